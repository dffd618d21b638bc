#include "gpu_worker/layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_worker/layers_internal.h"
#include "gpu_worker/rope_table.h"
#include "procs/check.h"
#include "procs/error.h"

/*
 * Arrays that are walked side by side must not start at the same place within 4 KiB (DESIGN 13):
 * each starts on a page boundary plus its own odd multiple of ARENA_STAGGER.
 */
enum { ARENA_PAGE = 4096, ARENA_STAGGER = 192 };

struct arena {
    char *base; /* NULL: only count */
    uint64_t used, arrays;
};

static void *arena_take(struct arena *arena, uint64_t bytes)
{
    uint64_t start = (arena->used + ARENA_PAGE - 1) / ARENA_PAGE * ARENA_PAGE;
    start += (2 * arena->arrays + 1) * ARENA_STAGGER % ARENA_PAGE;
    arena->arrays++;
    arena->used = start + bytes;
    return arena->base == NULL ? NULL : arena->base + start;
}

static compute_t *take_compute(struct arena *arena, const struct layers *layers, uint64_t elements)
{
    return arena_take(arena, elements * layers->device->compute_bytes);
}

static float *take_floats(struct arena *arena, uint64_t elements)
{
    return arena_take(arena, elements * sizeof(float));
}

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void carve_slot(struct layers *layers, struct arena *arena, uint64_t index)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t n = layers->rows;
    struct layers_slot slot = {0};
    slot.q = take_compute(arena, layers, n * layers->query_size);
    slot.k = take_compute(arena, layers, n * layers->key_size);
    slot.v = take_compute(arena, layers, n * layers->key_size);
    slot.attended = take_compute(arena, layers, n * layers->query_size);
    slot.middle = take_compute(arena, layers, n * config->hidden_size);
    if (!config->plain_mlp)
        slot.gate = take_compute(arena, layers, n * layers->gate_size);
    slot.up = take_compute(arena, layers, n * layers->gate_size);
    slot.rstd_input = take_floats(arena, n);
    slot.rstd_post = take_floats(arena, n);
    slot.lse = take_floats(arena, n * config->n_heads);
    if (config->qk_norm) {
        slot.q_raw = take_compute(arena, layers, n * layers->query_size);
        slot.k_raw = take_compute(arena, layers, n * layers->key_size);
        slot.rstd_q = take_floats(arena, n * config->n_heads);
        slot.rstd_k = take_floats(arena, n * config->n_kv_heads);
    }
    if (config->post_norms) {
        slot.attention_out = take_compute(arena, layers, n * config->hidden_size);
        slot.mlp_out = take_compute(arena, layers, n * config->hidden_size);
        slot.rstd_attention_out = take_floats(arena, n);
        slot.rstd_mlp_out = take_floats(arena, n);
    }
    if (config->n_experts) {
        uint64_t slots = n * config->experts_per_token;
        slot.router_logits = take_compute(arena, layers, n * config->n_experts);
        slot.router_weights = take_floats(arena, slots);
        slot.experts = arena_take(arena, slots * sizeof(int32_t));
        slot.slots = arena_take(arena, slots * sizeof(int32_t));
        slot.first = arena_take(arena, (config->n_experts + 1) * sizeof(int32_t));
    }
    if (layers->slots != NULL)
        layers->slots[index] = slot;
}

/* Do blocks with a window turn otherwise than those without? */
static int ropes_differ(const struct model_config *config)
{
    return memcmp(&config->rope[MODEL_REACH_FULL], &config->rope[MODEL_REACH_SLIDING],
                  sizeof config->rope[0]) != 0;
}

static void carve_rope(struct layers *layers, struct arena *arena)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t elements = layers->shape.context_max * (config->rope_dim / 2);
    for (int reach = 0; config->rope_dim && reach < MODEL_REACHES; reach++) {
        int shares = reach > 0 && !ropes_differ(config);
        layers->cosine[reach] = shares ? layers->cosine[0] : take_floats(arena, elements);
        layers->sine[reach] = shares ? layers->sine[0] : take_floats(arena, elements);
    }
}

/* Windows may change what attention's backward needs. */
static uint64_t attention_scratch_bytes(const struct layers *layers)
{
    const struct device *device = layers->device;
    struct layers_batch none = {0};
    uint64_t bytes = 0;
    for (uint64_t block = 0; block < layers->layout->config.n_layers; block++)
        bytes = most(bytes,
                     device->ops->attention_scratch_bytes(
                         device, layers_attention(layers, &none, layers->layout->blocks[block])));
    return bytes;
}

static uint64_t norm_scratch_elements(const struct layers *layers)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t n = layers->rows;
    uint64_t elements = device_norm_scratch(layers->norm, n, config->hidden_size);
    if (config->qk_norm) /* there are at least as many query heads as key heads */
        elements = most(elements,
                        device_norm_scratch(layers->norm, n * config->n_heads, config->head_dim));
    return elements;
}

static void carve_backward(struct layers *layers, struct arena *arena)
{
    const struct model_config *config = &layers->layout->config;
    layers->norm_scratch = take_floats(arena, norm_scratch_elements(layers));
    layers->attention_scratch = arena_take(arena, attention_scratch_bytes(layers));
    if (config->post_norms)
        layers->branch = take_compute(arena, layers, layers->rows * config->hidden_size);
    if (config->n_experts)
        layers->router_dweights = take_floats(arena, layers->rows * config->experts_per_token);
}

static void carve_experts(struct layers *layers, struct arena *arena)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t n = layers->rows;
    if (!config->n_experts)
        return;
    layers->mixed = take_compute(arena, layers, n * config->hidden_size);
    layers->expert_in = take_compute(arena, layers, n * config->hidden_size);
    layers->expert_out = take_compute(arena, layers, n * config->hidden_size);
    layers->probabilities = take_floats(arena, n * config->n_experts);
}

static void carve(struct layers *layers, struct arena *arena)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t n = layers->rows;
    carve_rope(layers, arena);
    layers->normed = take_compute(arena, layers, n * config->hidden_size);
    uint64_t wide = most(layers->inner_max, config->hidden_size);
    if (!layers->shape.forward_only)
        wide = most(wide, 2 * layers->query_size + 2 * layers->key_size);
    layers->wide = take_compute(arena, layers, n * wide);
    carve_experts(layers, arena);
    layers->logits = take_floats(arena, layers->head_rows * config->vocab_size);
    layers->row_loss = arena_take(arena, n * sizeof(double));
    if (!layers->shape.forward_only)
        carve_backward(layers, arena);
    for (uint64_t i = 0; i <= layers->shape.saved_slots; i++)
        carve_slot(layers, arena, i);
}

/* The model's words in the device's. */
static void describe_operations(struct layers *layers)
{
    static const enum device_norm norms[] = {[MODEL_NORM_RMS] = DEVICE_RMSNORM,
                                             [MODEL_NORM_RMS_PLUS_ONE] = DEVICE_RMSNORM_PLUS,
                                             [MODEL_NORM_LAYER] = DEVICE_LAYERNORM};
    static const enum device_activation activations[] = {
        [MODEL_ACTIVATION_SILU] = DEVICE_SILU,
        [MODEL_ACTIVATION_GELU_TANH] = DEVICE_GELU_TANH,
        [MODEL_ACTIVATION_GELU_NEW] = DEVICE_GELU_NEW,
        [MODEL_ACTIVATION_GELU] = DEVICE_GELU};
    const struct model_config *config = &layers->layout->config;
    double scalar =
        config->attention_scalar > 0 ? config->attention_scalar : (double)config->head_dim;
    layers->norm = norms[config->norm];
    layers->activation = activations[config->activation];
    layers->scale = 1.0f / sqrtf((float)scalar);
}

/* How wide an MLP can be, and what gate and up of a row can take. */
static void describe_mlps(struct layers *layers)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t sparse = model_config_n_sparse(config);
    if (sparse < config->n_layers)
        layers->gate_size = layers->inner_max = config->intermediate_size;
    if (sparse) {
        layers->gate_size =
            most(layers->gate_size, config->experts_per_token * config->expert_size);
        layers->inner_max = most(layers->inner_max, config->expert_size);
    }
}

static void describe(struct layers *layers, struct device *device,
                     const struct model_layout *layout, const struct layers_shape *shape)
{
    const struct model_config *config = &layout->config;
    layers->device = device;
    layers->layout = layout;
    layers->shape = *shape;
    layers->shape.context_max = most(shape->context_max, shape->seq_len);
    layers->rows = shape->microbatch_size * shape->seq_len;
    layers->head_rows = layers->rows < LAYERS_HEAD_ROWS ? layers->rows : LAYERS_HEAD_ROWS;
    layers->query_size = config->n_heads * config->head_dim;
    layers->key_size = config->n_kv_heads * config->head_dim;
    describe_mlps(layers);
    describe_operations(layers);
}

static struct arena count(struct layers *layers)
{
    struct arena arena = {0};
    carve(layers, &arena);
    return arena;
}

uint64_t layers_bytes(const struct device *device, const struct model_layout *layout,
                      const struct layers_shape *shape)
{
    struct layers layers = {0};
    /* carving only asks the device for sizes */
    describe(&layers, (struct device *)(uintptr_t)device, layout, shape);
    return count(&layers).used;
}

static int fill_rope(struct layers *layers, enum model_reach reach)
{
    const struct model_config *config = &layers->layout->config;
    const struct device *device = layers->device;
    uint64_t half = config->rope_dim / 2, bytes = layers->shape.context_max * half * sizeof(float);
    float *frequency = malloc(half * sizeof(float));
    float *cosine = malloc(bytes), *sine = malloc(bytes);
    int rc = 0;
    if (frequency == NULL || cosine == NULL || sine == NULL) {
        rc = error_set(ERROR_FAILED, "out of memory for the rope table of %llu positions",
                       (unsigned long long)layers->shape.context_max);
        goto cleanup;
    }
    rope_table_frequencies(&config->rope[reach], config->rope_dim, frequency);
    rope_table_fill(frequency, half, layers->shape.context_max, device->dtype, cosine, sine);
    device->ops->copy_in(layers->device, layers->cosine[reach], cosine, bytes);
    device->ops->copy_in(layers->device, layers->sine[reach], sine, bytes);
    device->ops->synchronize(layers->device);
cleanup:
    free(sine);
    free(cosine);
    free(frequency);
    return rc;
}

static int fill_ropes(struct layers *layers)
{
    const struct model_config *config = &layers->layout->config;
    if (!config->rope_dim)
        return 0;
    int rc = fill_rope(layers, MODEL_REACH_FULL);
    return rc == 0 && ropes_differ(config) ? fill_rope(layers, MODEL_REACH_SLIDING) : rc;
}

/* Host memory of sparse blocks. */
static int allocate_experts(struct layers *layers)
{
    uint64_t experts = layers->layout->config.n_experts;
    layers->host_first = calloc(experts + 1, sizeof *layers->host_first);
    layers->host_balance = calloc(2 * experts + 1, sizeof *layers->host_balance);
    layers->host_slope = calloc(experts + 1, sizeof *layers->host_slope);
    return layers->host_first && layers->host_balance && layers->host_slope ? 0 : -1;
}

int layers_init(struct layers **out, struct device *device, const struct model_layout *layout,
                const struct layers_shape *shape)
{
    struct layers *layers = calloc(1, sizeof *layers);
    if (layers == NULL)
        return error_set(ERROR_FAILED, "layers: out of memory");
    describe(layers, device, layout, shape);
    uint64_t bytes = count(layers).used;
    layers->slots = calloc(shape->saved_slots + 1, sizeof *layers->slots);
    layers->host_loss = calloc(layers->rows, sizeof *layers->host_loss);
    if (layers->slots == NULL || layers->host_loss == NULL || allocate_experts(layers) < 0) {
        layers_destroy(layers);
        return error_set(ERROR_FAILED, "layers: out of memory");
    }
    layers->arena = device->ops->alloc(device, bytes);
    if (layers->arena == NULL) {
        layers_destroy(layers);
        return error_wrap("layers");
    }
    struct arena arena = {.base = layers->arena};
    carve(layers, &arena);
    CHECK(arena.used == bytes);
    if (fill_ropes(layers) < 0) {
        layers_destroy(layers);
        return error_wrap("layers");
    }
    *out = layers;
    return 0;
}

void layers_destroy(struct layers *layers)
{
    if (layers == NULL)
        return;
    layers->device->ops->free(layers->device, layers->arena);
    free(layers->host_loss);
    free(layers->host_first);
    free(layers->host_balance);
    free(layers->host_slope);
    free(layers->slots);
    free(layers);
}

uint64_t layers_activation_bytes(const struct layers *layers)
{
    return layers->rows * layers->layout->config.hidden_size * layers->device->compute_bytes;
}

uint64_t layers_cache_bytes(const struct layers *layers, uint64_t sequences, uint64_t context)
{
    return sequences * context * layers->key_size * layers->device->compute_bytes;
}

const compute_t *layers_weight(const struct layers *layers, const compute_t *weights,
                               uint64_t layer, enum model_role role)
{
    struct model_slice slice = model_layer_slice(layers->layout, (uint32_t)layer, role);
    return slice.tensor ? device_at(layers->device, weights, slice.offset) : NULL;
}

float *layers_gradient(const struct layers *layers, float *gradients, uint64_t layer,
                       enum model_role role)
{
    struct model_slice slice = model_layer_slice(layers->layout, (uint32_t)layer, role);
    return slice.tensor ? gradients + slice.offset : NULL;
}

enum device_layout layers_linear_layout(const struct layers *layers)
{
    return layers->layout->config.transposed ? DEVICE_IN_OUT : DEVICE_OUT_IN;
}

uint64_t layers_linear_stride(const struct layers *layers, uint64_t layer, enum model_role role)
{
    return model_layer_slice(layers->layout, (uint32_t)layer, role).stride;
}

struct device_attention layers_attention(const struct layers *layers,
                                         const struct layers_batch *batch, uint64_t layer)
{
    const struct model_config *config = &layers->layout->config;
    return (struct device_attention){
        .batch = layers->shape.microbatch_size,
        .seq_len = layers->shape.seq_len,
        .query_heads = config->n_heads,
        .key_heads = config->n_kv_heads,
        .head_dim = config->head_dim,
        .scale = layers->scale,
        .document_start = batch->document_start,
        .window = model_config_window(config, layers->layout->layers[layer].block),
        .softcap = (float)config->attention_softcap};
}
