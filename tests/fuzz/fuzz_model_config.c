/*
 * config.json of a model, and the layout that follows from it (model/config.h, model/layout.h).
 *
 *     | log2 of page size over 4096 | JSON ... |
 *
 * What is accepted computes: sizes divide as the code divides them, and pages cover every layer.
 */
#include <math.h>

#include "model/layout.h"
#include "tests/fuzz/fuzz.h"

enum { PAGES_MAX = 1 << 16 }; /* a layout of more is right, and slow */

static void rope_is_sound(const struct model_rope *r)
{
    REQUIRE(isfinite(r->theta) && r->theta > 0 && isfinite(r->factor) && r->factor >= 1);
    if (r->scaling == ROPE_SCALING_LLAMA3)
        REQUIRE(r->high_freq_factor > r->low_freq_factor && r->low_freq_factor > 0 &&
                r->original_max_position > 0);
}

static void config_is_sound(const struct model_config *c)
{
    REQUIRE(c->vocab_size > 0 && c->hidden_size > 0 && c->intermediate_size > 0);
    REQUIRE(c->n_layers > 0 && c->n_heads > 0 && c->n_kv_heads > 0 && c->max_position > 0);
    REQUIRE(c->n_heads % c->n_kv_heads == 0 && c->head_dim > 0 && c->head_dim % 2 == 0);
    REQUIRE(isfinite(c->norm_eps) && c->norm_eps > 0);
    REQUIRE(c->rope_dim % 2 == 0 && c->rope_dim <= c->head_dim);
    REQUIRE(isfinite(c->attention_scalar) && c->attention_scalar >= 0);
    REQUIRE(isfinite(c->attention_softcap) && isfinite(c->final_softcap));
    REQUIRE(c->dropout >= 0 && c->dropout <= 1);
    REQUIRE(c->experts_per_token <= c->n_experts && c->n_experts <= MODEL_EXPERTS_MAX);
    REQUIRE((c->n_experts > 0) == (model_config_n_sparse(c) > 0));
    REQUIRE(c->n_experts == 0 || (c->expert_size > 0 && c->experts_per_token > 0));
    REQUIRE(model_config_n_sparse(c) * c->n_experts <= MODEL_MODEL_EXPERTS_MAX);
    REQUIRE(isfinite(c->router_aux_loss) && c->router_aux_loss >= 0);
    for (uint64_t b = 0; b < c->n_layers; b++)
        REQUIRE(model_config_reach(c, b) == MODEL_REACH_FULL || model_config_window(c, b) > 0);
    REQUIRE(isfinite(c->initializer_range) && c->tie_word_embeddings <= 1 && c->reserved == 0 &&
            c->reserved_end == 0);
    REQUIRE(c->n_eos <= MODEL_EOS_TOKENS_MAX);
    for (uint32_t i = 0; i < c->n_eos; i++)
        REQUIRE(c->eos_token_id[i] >= 0 && (uint64_t)c->eos_token_id[i] < c->vocab_size);
    REQUIRE(c->bos_token_id >= -1 && c->bos_token_id < (int64_t)c->vocab_size);
    REQUIRE(c->pad_token_id >= -1 && c->pad_token_id < (int64_t)c->vocab_size);
    for (int reach = 0; c->rope_dim && reach < MODEL_REACHES; reach++)
        rope_is_sound(&c->rope[reach]);
}

static void layout_is_sound(const struct model_layout *layout)
{
    uint64_t pages = 0, elements = 0, parameters = 0;
    for (uint32_t l = 0; l < layout->n_layers; l++) {
        const struct model_layer *layer = &layout->layers[l];
        uint64_t covered = 0;
        REQUIRE(layer->first_page == pages && layer->elements % MODEL_BLOCK_ELEMENTS == 0);
        for (uint32_t p = 0; p < layer->n_pages; p++) {
            const struct model_page *page = &layout->pages[pages + p];
            REQUIRE(page->layer == l && page->index == p && page->offset == covered);
            REQUIRE(page->elements > 0 && page->elements <= layout->page_elements);
            covered += page->elements;
        }
        REQUIRE(covered == layer->elements);
        pages += layer->n_pages;
        elements += layer->elements;
    }
    for (uint32_t t = 0; t < layout->n_tensors; t++) {
        const struct model_tensor *tensor = &layout->tensors[t];
        REQUIRE(tensor->elements == tensor->rows * tensor->cols);
        REQUIRE(tensor->offset + tensor->elements <= layout->layers[tensor->layer].elements);
        REQUIRE(model_layout_find(layout, tensor->name) == tensor);
        parameters += tensor->elements;
    }
    REQUIRE(pages == layout->n_pages && elements == layout->elements);
    REQUIRE(parameters == layout->parameters);
}

/* Elements of the model, roughly, in floating point: only to leave out the large ones. */
static double size_of(const struct model_config *c)
{
    double width = (double)(c->n_heads * c->head_dim), hidden = (double)c->hidden_size;
    double experts = (double)(c->n_experts * c->expert_size);
    double block = hidden * (4 * width + 3 * ((double)c->intermediate_size + experts));
    return (double)c->n_layers * block + 2 * (double)c->vocab_size * hidden;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct model_config config, again;
    struct model_layout layout;
    uint64_t page_elements = (uint64_t)MODEL_BLOCK_ELEMENTS << fuzz_u8(&in) % 20;
    error_clear();
    int rc = model_config_parse(&config, (const char *)in.bytes, in.left, "config.json");
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
        REQUIRE(strstr(error_text(), "config.json") != NULL);
        return 0;
    }
    config_is_sound(&config);
    REQUIRE(model_config_parse(&again, (const char *)in.bytes, in.left, "config.json") == 0);
    REQUIRE(memcmp(&config, &again, sizeof config) == 0);
    if (size_of(&config) / (double)page_elements > PAGES_MAX || config.n_layers > 256)
        return 0;
    error_clear();
    rc = model_layout_init(&layout, &config, page_elements);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
        return 0;
    }
    layout_is_sound(&layout);
    model_layout_destroy(&layout);
    return 0;
}

static const char *const keys[] = {
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "initializer_range",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "_x",
    "mlp_bias",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "activation_function",
    "attention_dropout",
    "resid_pdrop",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "n_positions",
    "layer_norm_epsilon",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
    "output_router_logits",
};

static const char llama3[] = "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
                             "\"high_freq_factor\":4,\"original_max_position_embeddings\":128}";
static const char llama3_bad[] = "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
                                 "\"high_freq_factor\":4}";

static const char nested[] = "{\"full_attention\":{\"rope_theta\":5},\"sliding_attention\":{"
                             "\"factor\":2,\"type\":\"linear\"}}";

static const char *const texts[] = {
    "0",
    "1",
    "2",
    "64",
    "-1",
    "null",
    "true",
    "false",
    "1.5",
    "1e15",
    "1e-31",
    "4096",
    "[1,2]",
    "\"silu\"",
    "\"llama\"",
    "[\"LlamaForCausalLM\"]",
    "\"bfloat16\"",
    "\"float16\"",
    "16777216",
    "9223372036854775807",
    "9223372036854775808",
    "{}",
    "[]",
    "\"x\"",
    "[1,2,3,4,5,6,7,8,9]",
    "{\"type\":\"linear\",\"factor\":2}",
    "{\"rope_type\":\"default\",\"rope_theta\":5}",
    nested,
    "[\"full_attention\",\"sliding_attention\"]",
    "\"gelu_new\"",
    "\"gelu_pytorch_tanh\"",
    "0.75",
    llama3,
    llama3_bad,
};

static const char *const heads[] = {
    "{\"model_type\":\"llama\"",   "{\"model_type\":\"mistral\"",
    "{\"model_type\":\"qwen2\"",   "{\"model_type\":\"qwen3\"",
    "{\"model_type\":\"phi3\"",    "{\"model_type\":\"gemma2\"",
    "{\"model_type\":\"gpt2\"",    "{\"model_type\":\"gemma3_text\"",
    "{\"model_type\":\"mixtral\"", "{\"model_type\":\"qwen3_moe\"",
};

/* The head that the text has, or one at random. */
static const char *head_of(const uint8_t *data, size_t size, uint64_t *random)
{
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        size_t n = strlen(heads[i]);
        if (size > n && memcmp(data + 1, heads[i], n) == 0)
            return heads[i];
    }
    return heads[fuzz_below(random, sizeof heads / sizeof heads[0])];
}

/* `{"model_type":"llama"` or another family stays in front; a key and its value are put behind it.
 */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const char tail[] = "}";
    uint64_t random = seed;
    char pair[256];
    const char *head = head_of(data, size, &random);
    size_t front = 1 + strlen(head);
    if (fuzz_below(&random, 3) == 0)
        return LLVMFuzzerMutate(data, size, max_size);
    int n = snprintf(pair, sizeof pair, ",\"%s\":%s",
                     keys[fuzz_below(&random, sizeof keys / sizeof keys[0])],
                     texts[fuzz_below(&random, sizeof texts / sizeof texts[0])]);
    REQUIRE(n > 0 && (size_t)n < sizeof pair);
    if (size < front + 1 || memcmp(data + 1, head, front - 1) != 0) {
        if (front + sizeof tail > max_size)
            return size;
        data[0] = size ? data[0] : 0;
        memcpy(data + 1, head, front - 1);
        memcpy(data + front, tail, sizeof tail - 1);
        size = front + sizeof tail - 1;
    }
    if (size + (size_t)n > max_size)
        return size;
    memmove(data + front + n, data + front, size - front);
    memcpy(data + front, pair, (size_t)n);
    return size + (size_t)n;
}
