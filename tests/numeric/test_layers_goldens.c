/*
 * Whole models against the committed references (tests/goldens/): PyTorch and transformers in
 * float64, tied and untied, packed and unpacked.
 */
#include "tests/numeric/golden_cases.h"
#include "tests/numeric/test_layers_fixture.h"

enum { BF16_CASES = 16, BF16_FAMILY_CASES = 4 };

static const double loss_tolerance = 5e-6;       /* relative */
static const double logit_tolerance = 1e-5;      /* absolute */
static const double gradient_tolerance = 1e-5;   /* of max(own norm, 1e-3 of the norm of all) */
static const double bf16_allowance = 1.1;        /* of the emulation's rms error */
static const double bf16_tensor_allowance = 1.3; /* the same of one tensor over few models */

static void check_gradients(struct fixture *f, const char *name)
{
    double all = 0;
    float **expected = fixture_memory(f->layout.n_tensors * sizeof *expected);
    for (uint32_t t = 0; t < f->layout.n_tensors; t++) {
        const struct model_tensor *tensor = &f->layout.tensors[t];
        char key[256];
        snprintf(key, sizeof key, "grad.%s", tensor->name);
        expected[t] = fixture_floats(f, key, tensor->elements);
        double norm = fixture_norm(expected[t], NULL, tensor->elements);
        all += norm * norm;
    }
    all = sqrt(all);
    double worst = 0;
    for (uint32_t t = 0; t < f->layout.n_tensors; t++) {
        const struct model_tensor *tensor = &f->layout.tensors[t];
        double norm = fixture_norm(expected[t], NULL, tensor->elements);
        double error = fixture_norm(fixture_gradient(f, tensor), expected[t], tensor->elements) /
                       fmax(norm, 1e-3 * all);
        worst = fmax(worst, error);
        if (!(error <= gradient_tolerance))
            fail_msg("%s: gradient of %s is off by %.3g", name, tensor->name, error);
        free(expected[t]);
    }
    free(expected);
    print_message("%s: worst gradient error %.2g\n", name, worst);
}

static void loss_and_gradients_match_the_float64_reference(void **state)
{
    (void)state;
    for (int i = 0; i < GOLDEN_CASES; i++) {
        struct fixture f;
        fixture_open(&f, golden_cases[i],
                     (struct fixture_options){DEVICE_F32, 2, FIXTURE_SAVED, 1});
        fixture_run(&f);
        double expected = fixture_number(&f, "loss");
        double error = fabs(f.loss - expected) / expected;
        print_message("%s: loss %.9f, off by %.2g\n", golden_cases[i], f.loss, error);
        assert_true(error <= loss_tolerance);
        check_gradients(&f, golden_cases[i]);
        fixture_close(&f);
    }
}

/* Plain forward to the last hidden state; x (N,C) is the caller's to free. */
static compute_t *run_forward(struct fixture *f)
{
    struct layers_batch batch = fixture_batch(f, 0);
    compute_t *x = f->device->ops->alloc(f->device, layers_activation_bytes(f->layers));
    layers_embedding_forward(f->layers, f->weights[0], &batch, x);
    for (uint64_t b = 0; b < f->layout.config.n_layers; b++) {
        uint32_t l = f->layout.blocks[b];
        layers_block_forward(f->layers, l, f->weights[l], &batch, x, x, LAYERS_NO_SLOT);
    }
    return x;
}

static double largest_difference(const float *a, const float *b, uint64_t n)
{
    double most = 0;
    for (uint64_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
    return most;
}

static void logits_match_the_float64_reference(void **state)
{
    (void)state;
    for (int i = 0; i < GOLDEN_CASES; i++) {
        struct fixture f;
        fixture_open(&f, golden_cases[i],
                     (struct fixture_options){DEVICE_F32, 2, FIXTURE_RECOMPUTED, 1});
        uint64_t rows = f.step.rows * f.step.seq_len;
        uint64_t count = rows * f.layout.config.vocab_size;
        compute_t *x = run_forward(&f);
        struct layers_head head = fixture_head(&f);
        float *logits = f.device->ops->alloc(f.device, count * sizeof *logits);
        layers_head_logits(f.layers, &head, x, rows, logits);
        float *expected = fixture_floats(&f, "logits", count);
        double error = largest_difference(logits, expected, count);
        print_message("%s: largest logit error %.2g\n", golden_cases[i], error);
        assert_true(error <= logit_tolerance);

        double loss, labelled = 0;
        struct layers_batch batch = fixture_batch(&f, 0);
        for (uint64_t r = 0; r < rows; r++)
            labelled += f.step.labels[r] >= 0;
        layers_head_loss(f.layers, &head, &batch, x, &loss);
        double expected_loss = fixture_number(&f, "loss");
        if (f.layout.config.router_aux_loss == 0) /* else the reference's has more in it */
            assert_true(fabs(loss / labelled - expected_loss) <= loss_tolerance * expected_loss);
        free(expected);
        f.device->ops->free(f.device, logits);
        f.device->ops->free(f.device, x);
        fixture_close(&f);
    }
}

/* Token by token through the cache, the first half of the row at once as a prompt: the logits of
 * the last token are those of the whole row. Only for rows that are one document. */
static void decode_case(const char *name)
{
    struct fixture f;
    fixture_open(&f, name, (struct fixture_options){DEVICE_F32, 2, FIXTURE_RECOMPUTED, 1});
    uint64_t seq = f.step.seq_len, batch = f.step.rows, vocab = f.layout.config.vocab_size;
    uint64_t blocks = f.layout.config.n_layers, prompt = seq / 2;
    uint64_t bytes = layers_cache_bytes(f.layers, batch, seq);
    compute_t *cache_k[8], *cache_v[8];
    for (uint64_t l = 0; l < blocks; l++) {
        cache_k[l] = f.device->ops->alloc(f.device, bytes);
        cache_v[l] = f.device->ops->alloc(f.device, bytes);
    }
    int32_t *tokens = fixture_memory(batch * seq * sizeof *tokens);
    int32_t *sequence = fixture_memory(batch * seq * sizeof *sequence);
    int32_t *position = fixture_memory(batch * seq * sizeof *position);
    compute_t *x = f.device->ops->alloc(f.device, layers_activation_bytes(f.layers));
    float *logits = f.device->ops->alloc(f.device, batch * seq * vocab * sizeof *logits);
    float *expected = fixture_floats(&f, "logits", batch * seq * vocab);
    struct layers_head head = fixture_head(&f);
    for (uint64_t start = 0; start < seq;) {
        uint64_t count = start == 0 ? prompt : 1, rows = 0;
        for (uint64_t b = 0; b < batch; b++)
            for (uint64_t t = start; t < start + count; t++, rows++) {
                tokens[rows] = f.step.tokens[b * seq + t];
                sequence[rows] = (int32_t)b;
                position[rows] = (int32_t)t;
            }
        struct layers_decode decode = {rows, tokens, sequence, position, seq};
        layers_embedding_decode(f.layers, f.weights[0], &decode, x);
        for (uint64_t l = 0; l < blocks; l++)
            layers_block_decode(f.layers, f.layout.blocks[l], f.weights[f.layout.blocks[l]],
                                &decode, x, cache_k[l], cache_v[l]);
        layers_head_logits(f.layers, &head, x, rows, logits);
        for (uint64_t r = 0; r < rows; r++) {
            uint64_t at = (uint64_t)sequence[r] * seq + (uint64_t)position[r];
            assert_true(largest_difference(logits + r * vocab, expected + at * vocab, vocab) <=
                        logit_tolerance);
        }
        start += count;
    }
    for (uint64_t l = 0; l < blocks; l++) {
        f.device->ops->free(f.device, cache_k[l]);
        f.device->ops->free(f.device, cache_v[l]);
    }
    f.device->ops->free(f.device, x);
    f.device->ops->free(f.device, logits);
    free(expected);
    free(tokens);
    free(sequence);
    free(position);
    fixture_close(&f);
}

static void decoding_with_a_cache_gives_the_logits_of_the_whole_row(void **state)
{
    (void)state;
    for (int i = 0; i < GOLDEN_CASES; i++)
        if (strstr(golden_cases[i], "unpacked") != NULL)
            decode_case(golden_cases[i]);
}

/* ---- wrong models ---- */

static void no_window(struct model_config *c)
{
    memset(c->sliding, 0, sizeof c->sliding);
}

static void window_one_longer(struct model_config *c)
{
    c->sliding_window++;
}

static void all_blocks_slide(struct model_config *c)
{
    memset(c->sliding, 0xff, sizeof c->sliding);
}

static void no_qkv_bias(struct model_config *c)
{
    c->qkv_bias = 0;
}

static void no_out_bias(struct model_config *c)
{
    c->out_bias = 0;
}

static void no_mlp_bias(struct model_config *c)
{
    c->mlp_bias = 0;
}

static void no_qk_norm(struct model_config *c)
{
    c->qk_norm = 0;
}

static void no_rope_scaling(struct model_config *c)
{
    c->rope[MODEL_REACH_FULL].scaling = ROPE_SCALING_NONE;
    c->rope[MODEL_REACH_SLIDING].scaling = ROPE_SCALING_NONE;
}

static void one_rope(struct model_config *c)
{
    c->rope[MODEL_REACH_SLIDING] = c->rope[MODEL_REACH_FULL];
}

static void ropes_swapped(struct model_config *c)
{
    struct model_rope full = c->rope[MODEL_REACH_FULL];
    c->rope[MODEL_REACH_FULL] = c->rope[MODEL_REACH_SLIDING];
    c->rope[MODEL_REACH_SLIDING] = full;
}

static void another_rope_base(struct model_config *c)
{
    c->rope[MODEL_REACH_FULL].theta *= 1.01;
    c->rope[MODEL_REACH_SLIDING].theta *= 1.01;
}

static void whole_heads_turn(struct model_config *c)
{
    c->rope_dim = c->head_dim;
}

static void norms_without_the_one(struct model_config *c)
{
    c->norm = MODEL_NORM_RMS;
}

static void rms_for_layer_norm(struct model_config *c)
{
    c->norm = MODEL_NORM_RMS;
}

static void no_attention_softcap(struct model_config *c)
{
    c->attention_softcap = 0;
}

static void no_final_softcap(struct model_config *c)
{
    c->final_softcap = 0;
}

static void usual_attention_scale(struct model_config *c)
{
    c->attention_scalar = 0;
}

static void no_embedding_scale(struct model_config *c)
{
    c->embedding_scale = 0;
}

static void no_post_norms(struct model_config *c)
{
    c->post_norms = 0;
}

static void silu(struct model_config *c)
{
    c->activation = MODEL_ACTIVATION_SILU;
}

static void tanh_gelu(struct model_config *c)
{
    c->activation = MODEL_ACTIVATION_GELU_TANH;
}

static void no_positions(struct model_config *c)
{
    c->positions = MODEL_POSITIONS_ROPE; /* and rope_dim is 0 */
}

static void not_transposed(struct model_config *c)
{
    c->transposed = 0;
}

static void another_epsilon(struct model_config *c)
{
    c->norm_eps *= 100;
}

static void weights_not_normalized(struct model_config *c)
{
    c->norm_topk = 0;
}

static void weights_normalized(struct model_config *c)
{
    c->norm_topk = 1;
}

static void one_expert_per_token(struct model_config *c)
{
    c->experts_per_token = 1;
}

static void not_balanced(struct model_config *c)
{
    c->router_aux_loss = 0;
}

static void balanced(struct model_config *c)
{
    c->router_aux_loss = 0.001;
}

#define WRONG(golden, change)                                                                      \
    {                                                                                              \
        golden, #change, change                                                                    \
    }
static const struct wrong {
    const char *golden, *what;
    fixture_change *change;
} wrong_models[] = {
    WRONG("mistral_untied_packed", no_window),
    WRONG("mistral_untied_packed", window_one_longer),
    WRONG("mistral_tied_unpacked", window_one_longer),
    WRONG("mistral_tied_unpacked", another_rope_base),
    WRONG("qwen2_tied_packed", no_window),
    WRONG("qwen2_tied_packed", all_blocks_slide),
    WRONG("qwen2_tied_packed", no_qkv_bias),
    WRONG("qwen2_untied_unpacked", no_qkv_bias),
    WRONG("qwen3_tied_unpacked", no_qk_norm),
    WRONG("qwen3_untied_packed", no_out_bias),
    WRONG("qwen3_untied_packed", no_rope_scaling),
    WRONG("qwen3_untied_packed", no_window),
    WRONG("llama_bias_untied_packed", no_mlp_bias),
    WRONG("llama_bias_untied_packed", no_rope_scaling),
    WRONG("llama_bias_untied_packed", tanh_gelu),
    WRONG("phi3_untied_packed", whole_heads_turn),
    WRONG("phi3_untied_packed", no_window),
    WRONG("gemma2_tied_packed", norms_without_the_one),
    WRONG("gemma2_tied_packed", no_attention_softcap),
    WRONG("gemma2_tied_packed", no_final_softcap),
    WRONG("gemma2_tied_packed", usual_attention_scale),
    WRONG("gemma2_tied_packed", no_embedding_scale),
    WRONG("gemma2_tied_packed", no_post_norms),
    WRONG("gemma2_tied_packed", silu),
    WRONG("gemma2_tied_packed", all_blocks_slide),
    WRONG("gemma2_untied_unpacked", no_window),
    WRONG("gemma3_tied_packed", one_rope),
    WRONG("gemma3_tied_packed", no_rope_scaling),
    WRONG("gemma3_tied_packed", no_qk_norm),
    WRONG("gemma3_untied_unpacked", ropes_swapped),
    WRONG("gemma3_untied_unpacked", window_one_longer),
    WRONG("gpt2_tied_packed", no_positions),
    WRONG("gpt2_tied_packed", not_transposed),
    WRONG("gpt2_tied_packed", rms_for_layer_norm),
    WRONG("gpt2_tied_packed", silu),
    WRONG("gpt2_tied_packed", another_epsilon),
    WRONG("gpt2_untied_unpacked", no_qkv_bias),
    WRONG("gpt2_untied_unpacked", no_mlp_bias),
    WRONG("mixtral_untied_packed", weights_not_normalized),
    WRONG("mixtral_untied_packed", one_expert_per_token),
    WRONG("mixtral_untied_packed", no_window),
    WRONG("mixtral_untied_packed", balanced),
    WRONG("mixtral_tied_unpacked", not_balanced),
    WRONG("mixtral_tied_unpacked", weights_not_normalized),
    WRONG("qwen3moe_untied_packed", not_balanced),
    WRONG("qwen3moe_untied_packed", no_qk_norm),
    WRONG("qwen3moe_untied_packed", one_expert_per_token),
    WRONG("qwen3moe_tied_unpacked", weights_normalized),
};

/* The comparison above refuses each, by the loss alone. */
static void wrong_models_do_not_pass_for_the_reference(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof wrong_models / sizeof wrong_models[0]; i++) {
        const struct wrong *w = &wrong_models[i];
        struct fixture f;
        fixture_open_changed(&f, w->golden,
                             (struct fixture_options){DEVICE_F32, 2, FIXTURE_SAVED, 1}, w->change);
        fixture_run(&f);
        double expected = fixture_number(&f, "loss");
        double error = fabs(f.loss - expected) / expected;
        print_message("%s, %s: loss off by %.2g\n", w->golden, w->what, error);
        assert_true(error > loss_tolerance);
        fixture_close(&f);
    }
}

/* In mixtral_untied_packed the router's last row is 0 and the others are two pairs of opposites:
 * two of them always come before it. */
static void an_expert_without_tokens_has_a_gradient_of_zero(void **state)
{
    (void)state;
    struct fixture f;
    fixture_open(&f, "mixtral_untied_packed",
                 (struct fixture_options){DEVICE_F32, 2, FIXTURE_SAVED, 1});
    fixture_run(&f);
    for (uint64_t b = 0; b < f.layout.config.n_layers; b++) {
        uint32_t block = f.layout.blocks[b], n = f.layout.layers[block].n_experts;
        assert_int_equal(n, 5);
        for (uint32_t e = 1; e <= n; e++) {
            uint64_t elements = f.layout.layers[block + e].elements;
            double norm = fixture_norm(f.gradients[block + e], NULL, elements);
            assert_true(e < n ? norm > 1e-3 : norm == 0);
        }
    }
    fixture_close(&f);
}

/* A router that learned nothing would not pass for the reference. */
static void routers_have_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < GOLDEN_CASES; i++) {
        struct fixture f;
        double all = 0;
        fixture_open(&f, golden_cases[i],
                     (struct fixture_options){DEVICE_F32, 2, FIXTURE_SAVED, 1});
        fixture_run(&f);
        for (uint32_t l = 0; l < f.layout.n_layers; l++)
            all += pow(fixture_norm(f.gradients[l], NULL, f.layout.layers[l].elements), 2);
        for (uint32_t t = 0; t < f.layout.n_tensors; t++) {
            const struct model_tensor *tensor = &f.layout.tensors[t];
            if (tensor->role != MODEL_ROUTER)
                continue;
            double norm = fixture_norm(fixture_gradient(&f, tensor), NULL, tensor->elements);
            print_message("%s: %.3g of the norm of all\n", tensor->name, norm / sqrt(all));
            assert_true(norm > 100 * gradient_tolerance * fmax(norm, 1e-3 * sqrt(all)));
        }
        fixture_close(&f);
    }
}

enum { TENSORS_MAX = 64 };

/* Sums over the models of squared rms errors, ours and the emulation's. */
struct bf16_errors {
    char name[TENSORS_MAX][MODEL_TENSOR_NAME_BYTES];
    double ours[TENSORS_MAX], emulated[TENSORS_MAX];
    double loss_ours, loss_emulated;
    uint32_t n;
};

static void add_bf16_case(struct bf16_errors *errors, const char *name)
{
    struct fixture f;
    char key[256];
    fixture_open(&f, name, (struct fixture_options){DEVICE_BF16, 2, FIXTURE_SAVED, 1});
    fixture_run(&f);
    double loss = fixture_number(&f, "loss");
    errors->loss_ours += pow(f.loss - loss, 2);
    errors->loss_emulated += pow(fixture_number(&f, "loss_emulated") - loss, 2);
    assert_true(f.layout.n_tensors <= TENSORS_MAX);
    errors->n = f.layout.n_tensors;
    for (uint32_t t = 0; t < f.layout.n_tensors; t++) {
        const struct model_tensor *tensor = &f.layout.tensors[t];
        snprintf(key, sizeof key, "grad.%s", tensor->name);
        float *expected = fixture_floats(&f, key, tensor->elements);
        double error = fixture_norm(fixture_gradient(&f, tensor), expected, tensor->elements);
        errors->ours[t] += error * error / (double)tensor->elements;
        snprintf(key, sizeof key, "rms_emulated.%s", tensor->name);
        errors->emulated[t] += pow(fixture_number(&f, key), 2);
        snprintf(errors->name[t], sizeof errors->name[t], "%s", tensor->name);
        free(expected);
    }
    fixture_close(&f);
}

/* Root mean square of our errors over the emulation's, of one tensor. */
static double bf16_ratio(const struct bf16_errors *errors, uint32_t tensor)
{
    return sqrt(errors->ours[tensor] / errors->emulated[tensor]);
}

static void bfloat16_errors_are_those_of_rounding_where_transformers_rounds(void **state)
{
    (void)state;
    static struct bf16_errors errors;
    for (int i = 0; i < BF16_CASES; i++) {
        char name[32];
        snprintf(name, sizeof name, "bf16_%02d", i);
        add_bf16_case(&errors, name);
    }
    int bad = 0;
    for (uint32_t t = 0; t < errors.n; t++) {
        double ratio = bf16_ratio(&errors, t);
        print_message("%-48s %.3f x the emulation's error\n", errors.name[t], ratio);
        bad += !(ratio <= bf16_allowance);
    }
    double ratio = sqrt(errors.loss_ours / errors.loss_emulated);
    print_message("%-48s %.3f\n", "loss", ratio);
    assert_int_equal(bad, 0);
    assert_true(ratio <= bf16_allowance);
}

/* Fewer models than of the Llama: a single tensor scatters more, all of them together do not. */
static void bfloat16_errors_of_other_families_are_those_too(void **state)
{
    (void)state;
    static const char *const families[] = {"mistral", "qwen2", "qwen3",   "phi3",    "gemma2",
                                           "gemma3",  "gpt2",  "mixtral", "qwen3moe"};
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        struct bf16_errors errors = {0};
        double log_sum = 0, worst = 0;
        for (int i = 0; i < BF16_FAMILY_CASES; i++) {
            char name[32];
            snprintf(name, sizeof name, "bf16_%s_%d", families[f], i);
            add_bf16_case(&errors, name);
        }
        for (uint32_t t = 0; t < errors.n; t++) {
            log_sum += log(bf16_ratio(&errors, t));
            worst = fmax(worst, bf16_ratio(&errors, t));
            print_message("%-48s %.3f x the emulation's error\n", errors.name[t],
                          bf16_ratio(&errors, t));
        }
        double mean = exp(log_sum / errors.n);
        print_message("%s: mean ratio to the emulation %.3f, largest %.3f\n", families[f], mean,
                      worst);
        assert_true(mean <= bf16_allowance && worst <= bf16_tensor_allowance);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loss_and_gradients_match_the_float64_reference),
        cmocka_unit_test(logits_match_the_float64_reference),
        cmocka_unit_test(decoding_with_a_cache_gives_the_logits_of_the_whole_row),
        cmocka_unit_test(wrong_models_do_not_pass_for_the_reference),
        cmocka_unit_test(an_expert_without_tokens_has_a_gradient_of_zero),
        cmocka_unit_test(routers_have_gradients),
        cmocka_unit_test(bfloat16_errors_are_those_of_rounding_where_transformers_rounds),
        cmocka_unit_test(bfloat16_errors_of_other_families_are_those_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
