/*
 * What must not change a bit, and what may change the last ones: threads, kept or recomputed
 * intermediates, and the cut of a step into microbatches.
 */
#include "tests/numeric/test_layers_fixture.h"

/* Several GEMM tiles, head chunks, attention tiles; nothing divides anything. Between them the
 * models have all that a block can have. */
#define SIZES                                                                                      \
    "\"hidden_size\":90,\"num_hidden_layers\":2,\"num_attention_heads\":6,"                        \
    "\"num_key_value_heads\":2,\"head_dim\":22,\"intermediate_size\":410,\"vocab_size\":517,"      \
    "\"max_position_embeddings\":1024,\"eos_token_id\":1,\"bos_token_id\":2,"
static const char llama[] =
    "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":90,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":6,\"num_key_value_heads\":2,\"head_dim\":22,"
    "\"intermediate_size\":410,\"vocab_size\":517,\"max_position_embeddings\":1024,"
    "\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"tie_word_embeddings\":false}";
static const char gemma3[] =
    "{\"model_type\":\"gemma3_text\"," SIZES
    "\"query_pre_attn_scalar\":30,\"sliding_window\":70,\"sliding_window_pattern\":2,"
    "\"final_logit_softcapping\":5,\"attention_bias\":true,\"rope_local_base_freq\":100}";
static const char gemma2[] =
    "{\"model_type\":\"gemma2\"," SIZES
    "\"query_pre_attn_scalar\":10,\"sliding_window\":33,\"attn_logit_softcapping\":2}";
static const char phi3[] =
    "{\"model_type\":\"phi3\"," SIZES
    "\"sliding_window\":40,\"partial_rotary_factor\":0.75,\"pad_token_id\":0}";
static const char gpt2[] = "{\"model_type\":\"gpt2\",\"n_embd\":90,\"n_layer\":2,\"n_head\":5,"
                           "\"n_inner\":410,\"vocab_size\":517,\"n_positions\":170}";
static const char qwen3_moe[] =
    "{\"model_type\":\"qwen3_moe\"," SIZES
    "\"num_experts\":5,\"num_experts_per_tok\":2,\"moe_intermediate_size\":130,"
    "\"mlp_only_layers\":[0],\"output_router_logits\":true,\"router_aux_loss_coef\":0.1}";
static const char mixtral[] =
    "{\"model_type\":\"mixtral\"," SIZES
    "\"num_local_experts\":7,\"num_experts_per_tok\":3,\"sliding_window\":40}";
static const char *const models[] = {llama, gemma2, phi3, gpt2, gemma3, qwen3_moe, mixtral};
enum { MODELS = sizeof models / sizeof models[0] };
enum { ROWS = 8, SEQ_LEN = 165 };

static const char *model = llama; /* of the test at work */

static void open_and_run(struct fixture *f, struct fixture_options options)
{
    fixture_open_random(f, model, ROWS, SEQ_LEN, options);
    fixture_run(f);
    assert_true(f->loss > 1 && f->loss < 100);
}

/* 1 when all gradients and the loss are equal bit for bit */
static int equal(const struct fixture *a, const struct fixture *b)
{
    if (memcmp(&a->loss, &b->loss, sizeof a->loss) != 0)
        return 0;
    for (uint32_t l = 0; l < a->layout.n_layers; l++)
        if (memcmp(a->gradients[l], b->gradients[l],
                   a->layout.layers[l].elements * sizeof(float)) != 0)
            return 0;
    return 1;
}

static void check_equal(struct fixture_options one, struct fixture_options other)
{
    struct fixture a, b;
    open_and_run(&a, one);
    open_and_run(&b, other);
    assert_true(equal(&a, &b));
    uint32_t bit;
    float *victim = b.gradients[1] + 1234; /* the comparison itself can fail */
    memcpy(&bit, victim, sizeof bit);
    bit ^= 1;
    memcpy(victim, &bit, sizeof bit);
    assert_false(equal(&a, &b));
    fixture_close(&a);
    fixture_close(&b);
}

static void bits_do_not_depend_on_the_number_of_threads(void **state)
{
    (void)state;
    for (int m = 0; m < MODELS; m++)
        for (int dtype = DEVICE_F32; dtype <= DEVICE_BF16; dtype++)
            for (uint32_t threads = 2; threads <= 3; threads++) {
                model = models[m];
                check_equal(
                    (struct fixture_options){(enum device_dtype)dtype, 1, FIXTURE_SAVED, 2},
                    (struct fixture_options){(enum device_dtype)dtype, threads, FIXTURE_SAVED, 2});
            }
    model = llama;
}

static void bits_do_not_depend_on_what_was_kept(void **state)
{
    (void)state;
    for (int m = 0; m < MODELS; m++)
        for (int dtype = DEVICE_F32; dtype <= DEVICE_BF16; dtype++) {
            model = models[m];
            check_equal(
                (struct fixture_options){(enum device_dtype)dtype, 2, FIXTURE_SAVED, 4},
                (struct fixture_options){(enum device_dtype)dtype, 2, FIXTURE_RECOMPUTED, 4});
        }
    model = llama;
}

static void check_close(const struct fixture *a, const struct fixture *b, double tolerance)
{
    assert_true(fabs(a->loss - b->loss) <= tolerance * a->loss);
    for (uint32_t t = 0; t < a->layout.n_tensors; t++) {
        const struct model_tensor *tensor = &a->layout.tensors[t];
        double norm = fixture_norm(fixture_gradient(a, tensor), NULL, tensor->elements);
        double difference = fixture_norm(fixture_gradient(a, tensor), fixture_gradient(b, tensor),
                                         tensor->elements);
        if (!(difference <= tolerance * norm))
            fail_msg("%s differs by %.2g of its norm", tensor->name, difference / norm);
    }
}

static void any_cut_into_microbatches_gives_the_same_gradients(void **state)
{
    (void)state;
    struct fixture whole, cut;
    open_and_run(&whole, (struct fixture_options){DEVICE_F32, 2, FIXTURE_SAVED, 1});
    for (uint64_t n = 2; n <= ROWS; n *= 2) {
        open_and_run(&cut, (struct fixture_options){DEVICE_F32, 2, FIXTURE_SAVED, n});
        check_close(&whole, &cut, 5e-6);
        fixture_close(&cut);
    }
    fixture_close(&whole);
}

/* The derivative of the loss along a direction, by central differences of the forward pass. */
static void gradients_are_the_slope_of_the_loss(void **state)
{
    (void)state;
    struct fixture f;
    open_and_run(&f, (struct fixture_options){DEVICE_F32, 2, FIXTURE_RECOMPUTED, 1});
    for (uint32_t t = 0; t < f.layout.n_tensors; t++) {
        const struct model_tensor *tensor = &f.layout.tensors[t];
        float *w = (float *)(void *)device_at(f.device, f.weights[tensor->layer], tensor->offset);
        float *before = fixture_memory(tensor->elements * sizeof *before);
        float *gradient = fixture_memory(tensor->elements * sizeof *gradient);
        memcpy(before, w, tensor->elements * sizeof *w);
        memcpy(gradient, fixture_gradient(&f, tensor), tensor->elements * sizeof *gradient);
        double norm = fixture_norm(gradient, NULL, tensor->elements), loss[2];
        /* so far that the loss changes by about 0.002: small for curvature, large for rounding */
        double step = 1e-3 / norm;
        for (int side = 0; side < 2; side++) {
            for (uint64_t i = 0; i < tensor->elements; i++)
                w[i] = before[i] + (float)((side ? step : -step) * (double)gradient[i] / norm);
            fixture_run(&f);
            loss[side] = f.loss;
        }
        memcpy(w, before, tensor->elements * sizeof *w);
        double slope = (loss[1] - loss[0]) / (2 * step);
        if (!(fabs(slope - norm) <= 0.01 * norm))
            fail_msg("%s: gradient norm %.6g, slope %.6g", tensor->name, norm, slope);
        free(before);
        free(gradient);
    }
    fixture_close(&f);
}

/* Floats per token in a slot, in the order of layers.h. */
static uint64_t slot_floats(const struct model_config *c)
{
    uint64_t query = c->n_heads * c->head_dim, key = c->n_kv_heads * c->head_dim;
    uint64_t floats =
        c->hidden_size + 2 * query + 2 * key + 2 * c->intermediate_size + 2 + c->n_heads;
    if (c->plain_mlp)
        floats -= c->intermediate_size;
    if (c->n_experts) { /* gate and up of a block with or without experts, whichever takes more */
        uint64_t inner = c->experts_per_token * c->expert_size;
        floats += c->n_experts + 3 * c->experts_per_token;
        if (inner > c->intermediate_size)
            floats += 2 * (inner - c->intermediate_size);
    }
    if (c->qk_norm)
        floats += query + key + c->n_heads + c->n_kv_heads;
    if (c->post_norms)
        floats += 2 * c->hidden_size + 2;
    return floats;
}

static void memory_is_predicted_before_it_is_allocated(void **state)
{
    (void)state;
    struct device *device;
    fixture_must(device_cpu_open(&device, DEVICE_F32, 1));
    for (int m = 0; m < MODELS; m++) {
        struct model_config config;
        struct model_layout layout;
        fixture_must(model_config_parse(&config, models[m], strlen(models[m]), "test"));
        fixture_must(model_layout_init(&layout, &config, MODEL_PAGE_ELEMENTS_DEFAULT));
        struct layers_shape none = {.microbatch_size = 2, .seq_len = 64};
        struct layers_shape two = {.microbatch_size = 2, .seq_len = 64, .saved_slots = 2};
        struct layers_shape forward = {.microbatch_size = 2, .seq_len = 64, .forward_only = 1};
        uint64_t tokens = 128, floats = slot_floats(&config);
        uint64_t slots = layers_bytes(device, &layout, &two) - layers_bytes(device, &layout, &none);
        assert_in_range(slots, 2 * 4 * tokens * floats, 2 * (4 * tokens * floats + 23 * 8192));
        assert_true(layers_bytes(device, &layout, &forward) < layers_bytes(device, &layout, &none));
        model_layout_destroy(&layout);
    }
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_do_not_depend_on_the_number_of_threads),
        cmocka_unit_test(bits_do_not_depend_on_what_was_kept),
        cmocka_unit_test(any_cut_into_microbatches_gives_the_same_gradients),
        cmocka_unit_test(gradients_are_the_slope_of_the_loss),
        cmocka_unit_test(memory_is_predicted_before_it_is_allocated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
