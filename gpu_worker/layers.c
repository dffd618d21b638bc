#include "gpu_worker/layers.h"

#include <math.h>
#include <stdlib.h>

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
    struct layers_slot slot;
    slot.q = take_compute(arena, layers, n * layers->query_size);
    slot.k = take_compute(arena, layers, n * layers->key_size);
    slot.v = take_compute(arena, layers, n * layers->key_size);
    slot.attended = take_compute(arena, layers, n * layers->query_size);
    slot.middle = take_compute(arena, layers, n * config->hidden_size);
    slot.gate = take_compute(arena, layers, n * config->intermediate_size);
    slot.up = take_compute(arena, layers, n * config->intermediate_size);
    slot.rstd_input = take_floats(arena, n);
    slot.rstd_post = take_floats(arena, n);
    slot.lse = take_floats(arena, n * config->n_heads);
    if (layers->slots != NULL)
        layers->slots[index] = slot;
}

static void carve(struct layers *layers, struct arena *arena)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t n = layers->rows, half = config->head_dim / 2;
    layers->cosine = take_floats(arena, layers->shape.context_max * half);
    layers->sine = take_floats(arena, layers->shape.context_max * half);
    layers->normed = take_compute(arena, layers, n * config->hidden_size);
    uint64_t wide = most(config->intermediate_size, config->hidden_size);
    if (!layers->shape.forward_only)
        wide = most(wide, 2 * layers->query_size + 2 * layers->key_size);
    layers->wide = take_compute(arena, layers, n * wide);
    layers->logits = take_floats(arena, layers->head_rows * config->vocab_size);
    layers->row_loss = arena_take(arena, n * sizeof(double));
    if (!layers->shape.forward_only) {
        struct layers_batch none = {0};
        layers->norm_scratch =
            take_floats(arena, device_norm_scratch(DEVICE_RMSNORM, n, config->hidden_size));
        layers->attention_scratch =
            arena_take(arena, layers->device->ops->attention_scratch_bytes(
                                  layers->device, layers_attention(layers, &none)));
    }
    for (uint64_t i = 0; i <= layers->shape.saved_slots; i++)
        carve_slot(layers, arena, i);
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
    layers->scale = 1.0f / sqrtf((float)config->head_dim);
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

static int fill_rope(struct layers *layers)
{
    const struct model_config *config = &layers->layout->config;
    const struct device *device = layers->device;
    uint64_t half = config->head_dim / 2, bytes = layers->shape.context_max * half * sizeof(float);
    float *frequency = malloc(half * sizeof(float));
    float *cosine = malloc(bytes), *sine = malloc(bytes);
    int rc = 0;
    if (frequency == NULL || cosine == NULL || sine == NULL) {
        rc = error_set(ERROR_FAILED, "out of memory for the rope table of %llu positions",
                       (unsigned long long)layers->shape.context_max);
        goto cleanup;
    }
    rope_table_frequencies(config, frequency);
    rope_table_fill(frequency, half, layers->shape.context_max, device->dtype, cosine, sine);
    device->ops->copy_in(layers->device, layers->cosine, cosine, bytes);
    device->ops->copy_in(layers->device, layers->sine, sine, bytes);
    device->ops->synchronize(layers->device);
cleanup:
    free(sine);
    free(cosine);
    free(frequency);
    return rc;
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
    if (layers->slots == NULL || layers->host_loss == NULL) {
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
    if (fill_rope(layers) < 0) {
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

static uint64_t tensor_offset(const struct layers *layers, uint64_t layer, enum model_role role)
{
    const struct model_tensor *tensor = model_layer_tensor(layers->layout, (uint32_t)layer, role);
    CHECK(tensor != NULL);
    return tensor->offset;
}

const compute_t *layers_weight(const struct layers *layers, const compute_t *weights,
                               uint64_t layer, enum model_role role)
{
    return device_at(layers->device, weights, tensor_offset(layers, layer, role));
}

float *layers_gradient(const struct layers *layers, float *gradients, uint64_t layer,
                       enum model_role role)
{
    return gradients + tensor_offset(layers, layer, role);
}

struct device_attention layers_attention(const struct layers *layers,
                                         const struct layers_batch *batch)
{
    const struct model_config *config = &layers->layout->config;
    return (struct device_attention){.batch = layers->shape.microbatch_size,
                                     .seq_len = layers->shape.seq_len,
                                     .query_heads = config->n_heads,
                                     .key_heads = config->n_kv_heads,
                                     .head_dim = config->head_dim,
                                     .scale = layers->scale,
                                     .document_start = batch->document_start};
}
