/*
 * A whole model on a device, for tests: weights from a folder of tests/goldens/, one step of
 * forward and backward over any cut into microbatches.
 */
#ifndef TESTS_NUMERIC_TEST_LAYERS_FIXTURE_H
#define TESTS_NUMERIC_TEST_LAYERS_FIXTURE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu_worker/layers.h"
#include "model/config.h"
#include "model/layout.h"
#include "model/safetensors.h"
#include "model/split.h"
#include "procs/error.h"

enum fixture_keep { FIXTURE_SAVED, FIXTURE_RECOMPUTED };

struct fixture_options {
    enum device_dtype dtype;
    uint32_t threads;
    enum fixture_keep keep;
    uint64_t microbatches; /* the step's rows are cut into this many */
};

/* The tokens of one step, (rows, T). */
struct fixture_step {
    uint64_t rows, seq_len;
    int32_t *tokens, *labels, *document, *position, *document_start;
};

struct fixture {
    struct model_layout layout;
    struct safetensors *reference;
    struct device *device;
    struct layers *layers;
    struct fixture_options options;
    struct fixture_step step;
    compute_t **weights; /* per layer */
    float **gradients;   /* per layer */
    double loss;         /* mean over labelled tokens */
};

static inline void fixture_must(int rc)
{
    if (rc < 0)
        fail_msg("%s", error_text());
}

static inline void *fixture_memory(uint64_t bytes)
{
    void *memory = calloc(1, bytes + 64);
    assert_non_null(memory);
    return memory;
}

/* The first step of a reference I32 tensor (steps, B, T). */
static inline int32_t *fixture_integers(struct fixture *f, const char *name)
{
    struct safetensors_tensor tensor;
    assert_int_equal(safetensors_find(f->reference, name, &tensor), 0);
    assert_int_equal(tensor.n_dims, 3);
    f->step.rows = tensor.shape[1];
    f->step.seq_len = tensor.shape[2];
    uint64_t count = tensor.shape[1] * tensor.shape[2];
    int32_t *values = fixture_memory(count * sizeof *values);
    fixture_must(safetensors_read_raw(f->reference, &tensor, 0, count, values));
    return values;
}

static inline double fixture_number(struct fixture *f, const char *name)
{
    struct safetensors_tensor tensor;
    double value;
    if (safetensors_find(f->reference, name, &tensor) < 0)
        fail_msg("the reference has no %s", name);
    fixture_must(safetensors_read_raw(f->reference, &tensor, 0, 1, &value));
    return value;
}

/* Reference tensor as f32; the caller frees it. */
static inline float *fixture_floats(struct fixture *f, const char *name, uint64_t elements)
{
    struct safetensors_tensor tensor;
    if (safetensors_find(f->reference, name, &tensor) < 0)
        fail_msg("the reference has no %s", name);
    assert_int_equal(tensor.elements, elements);
    float *values = fixture_memory(elements * sizeof *values);
    fixture_must(safetensors_read(f->reference, &tensor, 0, elements, values));
    return values;
}

static inline void fixture_read_step(struct fixture *f)
{
    struct fixture_step *step = &f->step;
    step->tokens = fixture_integers(f, "tokens");
    step->labels = fixture_integers(f, "labels");
    step->document = fixture_integers(f, "document");
    step->position = fixture_integers(f, "position");
    step->document_start = fixture_memory(step->rows * step->seq_len * sizeof(int32_t));
    for (uint64_t i = 0; i < step->rows * step->seq_len; i++)
        if (i % step->seq_len != 0)
            step->document_start[i] = step->document[i] == step->document[i - 1]
                                          ? step->document_start[i - 1]
                                          : (int32_t)(i % step->seq_len);
}

static inline void fixture_load_tensor(struct fixture *f, struct safetensors *model,
                                       const struct model_tensor *tensor)
{
    struct safetensors_tensor found;
    if (safetensors_find(model, tensor->name, &found) < 0)
        fail_msg("the model has no %s", tensor->name);
    assert_int_equal(found.elements, tensor->elements);
    float *master = fixture_memory(tensor->elements * sizeof *master);
    fixture_must(safetensors_read(model, &found, 0, tensor->elements, master));
    compute_t *to = device_at(f->device, f->weights[tensor->layer], tensor->offset);
    if (f->options.dtype == DEVICE_F32) {
        f->device->ops->load(f->device, to, master, DEVICE_HOST_F32, tensor->elements);
    } else {
        uint16_t *high = fixture_memory(tensor->elements * sizeof *high);
        uint16_t *low = fixture_memory(tensor->elements * sizeof *low);
        split_master(master, tensor->elements, high, low);
        f->device->ops->load(f->device, to, high, DEVICE_HOST_BF16, tensor->elements);
        free(low);
        free(high);
    }
    f->device->ops->synchronize(f->device);
    free(master);
}

/* Device, empty weights and gradients, layers; f->options, f->step and f->layout are set. */
static inline void fixture_build(struct fixture *f)
{
    fixture_must(device_cpu_open(&f->device, f->options.dtype, f->options.threads));
    f->weights = fixture_memory(f->layout.n_layers * sizeof *f->weights);
    f->gradients = fixture_memory(f->layout.n_layers * sizeof *f->gradients);
    for (uint32_t l = 0; l < f->layout.n_layers; l++) {
        const struct model_layer *layer = &f->layout.layers[l];
        if (layer->group != l) { /* an expert lies behind its block */
            f->weights[l] = device_at(f->device, f->weights[layer->group], layer->start);
            f->gradients[l] = f->gradients[layer->group] + layer->start;
            continue;
        }
        uint64_t elements = model_group_elements(&f->layout, l);
        f->weights[l] = f->device->ops->alloc(f->device, elements * f->device->compute_bytes);
        f->gradients[l] = f->device->ops->alloc(f->device, elements * sizeof(float));
        assert_non_null(f->weights[l]);
        assert_non_null(f->gradients[l]);
        f->device->ops->zero(f->device, f->weights[l], elements * f->device->compute_bytes);
    }
    uint64_t saved =
        f->options.keep == FIXTURE_SAVED ? f->options.microbatches * f->layout.config.n_layers : 0;
    fixture_must(layers_init(
        &f->layers, f->device, &f->layout,
        &(struct layers_shape){.microbatch_size = f->step.rows / f->options.microbatches,
                               .seq_len = f->step.seq_len,
                               .saved_slots = saved}));
}

typedef void fixture_change(struct model_config *);

/* A golden: its weights and its first step; `change` makes another model of it, or is NULL. */
static inline void fixture_open_changed(struct fixture *f, const char *name,
                                        struct fixture_options options, fixture_change *change)
{
    char folder[256], path[512];
    memset(f, 0, sizeof *f);
    f->options = options;
    snprintf(folder, sizeof folder, "tests/goldens/%s", name);
    snprintf(path, sizeof path, "%s/reference.safetensors", folder);
    struct model_config config;
    struct safetensors *model;
    fixture_must(model_config_load(&config, folder));
    if (change != NULL)
        change(&config);
    fixture_must(model_layout_init(&f->layout, &config, MODEL_PAGE_ELEMENTS_DEFAULT));
    fixture_must(safetensors_open_file(&f->reference, path));
    fixture_must(safetensors_open_folder(&model, folder));
    fixture_read_step(f);
    fixture_build(f);
    for (uint32_t t = 0; t < f->layout.n_tensors; t++)
        fixture_load_tensor(f, model, &f->layout.tensors[t]);
    safetensors_close(model);
}

static inline void fixture_open(struct fixture *f, const char *name, struct fixture_options options)
{
    fixture_open_changed(f, name, options, NULL);
}

/* A model of the given config.json with arbitrary weights, on documents of arbitrary length. */
static inline void fixture_open_random(struct fixture *f, const char *json, uint64_t rows,
                                       uint64_t seq_len, struct fixture_options options)
{
    memset(f, 0, sizeof *f);
    f->options = options;
    struct model_config config;
    fixture_must(model_config_parse(&config, json, strlen(json), "test"));
    fixture_must(model_layout_init(&f->layout, &config, MODEL_PAGE_ELEMENTS_DEFAULT));
    uint64_t n = rows * seq_len, state = 99;
    f->step = (struct fixture_step){rows,
                                    seq_len,
                                    fixture_memory(4 * n),
                                    fixture_memory(4 * n),
                                    fixture_memory(4 * n),
                                    fixture_memory(4 * n),
                                    fixture_memory(4 * n)};
    for (uint64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint64_t at = i % seq_len, new_document = at == 0 || (state >> 33) % 97 == 0;
        int32_t start = new_document ? (int32_t)at : f->step.document_start[i - 1];
        f->step.tokens[i] = (int32_t)((state >> 40) % config.vocab_size);
        f->step.labels[i] =
            (state >> 35) % 11 == 0 ? -1 : (int32_t)((state >> 20) % config.vocab_size);
        f->step.document_start[i] = start;
        f->step.position[i] = (int32_t)at - start;
    }
    fixture_build(f);
    for (uint32_t t = 0; t < f->layout.n_tensors; t++) {
        const struct model_tensor *tensor = &f->layout.tensors[t];
        float *values = fixture_memory(tensor->elements * sizeof *values);
        for (uint64_t i = 0; i < tensor->elements; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            float small = ((float)(state >> 40) / 16777216.0f - 0.5f) * 0.2f;
            values[i] = tensor->dims == 1 ? 1.0f + small : small;
        }
        f->device->ops->load(f->device,
                             device_at(f->device, f->weights[tensor->layer], tensor->offset),
                             values, DEVICE_HOST_F32, tensor->elements);
        free(values);
    }
}

static inline void fixture_close(struct fixture *f)
{
    for (uint32_t l = 0; l < f->layout.n_layers; l += f->layout.layers[l].n_experts + 1) {
        f->device->ops->free(f->device, f->weights[l]);
        f->device->ops->free(f->device, f->gradients[l]);
    }
    free(f->weights);
    free(f->gradients);
    free(f->step.tokens);
    free(f->step.labels);
    free(f->step.document);
    free(f->step.position);
    free(f->step.document_start);
    layers_destroy(f->layers);
    device_close(f->device);
    safetensors_close(f->reference);
    model_layout_destroy(&f->layout);
}

static inline struct layers_batch fixture_batch(const struct fixture *f, uint64_t microbatch)
{
    const struct fixture_step *step = &f->step;
    uint64_t at = microbatch * (step->rows / f->options.microbatches) * step->seq_len;
    return (struct layers_batch){.tokens = step->tokens + at,
                                 .labels = step->labels + at,
                                 .position = step->position + at,
                                 .document_start = step->document_start + at};
}

static inline struct layers_head fixture_head(const struct fixture *f)
{
    uint32_t last = f->layout.n_layers - 1;
    const struct model_tensor *norm = model_layer_tensor(&f->layout, last, MODEL_FINAL_NORM);
    const struct model_tensor *bias = model_layer_tensor(&f->layout, last, MODEL_FINAL_NORM_BIAS);
    const struct model_tensor *matrix = model_layer_tensor(&f->layout, last, MODEL_HEAD);
    if (matrix == NULL)
        matrix = model_layer_tensor(&f->layout, 0, MODEL_EMBED);
    return (struct layers_head){
        .norm = device_at(f->device, f->weights[last], norm->offset),
        .norm_bias = bias ? device_at(f->device, f->weights[last], bias->offset) : NULL,
        .matrix = device_at(f->device, f->weights[matrix->layer], matrix->offset),
        .norm_gradient = f->gradients[last] + norm->offset,
        .norm_bias_gradient = bias ? f->gradients[last] + bias->offset : NULL,
        .matrix_gradient = f->gradients[matrix->layer] + matrix->offset};
}

/* Forward and backward of the whole step, layer-major as the schedule does it. */
static inline void fixture_run(struct fixture *f)
{
    uint64_t n = f->options.microbatches, blocks = f->layout.config.n_layers, labelled = 0;
    uint64_t bytes = layers_activation_bytes(f->layers), experts = f->layout.config.n_experts;
    const uint32_t *at = f->layout.blocks;
    double coefficient = f->layout.config.router_aux_loss, *balance = NULL;
    float *slope = NULL;
    if (coefficient > 0) { /* on the CPU device, memory is memory */
        balance = fixture_memory(n * 2 * experts * sizeof *balance);
        slope = fixture_memory(n * experts * sizeof *slope);
    }
    compute_t **x =
        fixture_memory((blocks + 1) * n * sizeof *x); /* x[l * n + m]: input of block l */
    for (uint64_t i = 0; i < (blocks + 1) * n; i++)
        x[i] = f->device->ops->alloc(f->device, bytes);
    for (uint64_t i = 0; i < f->step.rows * f->step.seq_len; i++)
        labelled += f->step.labels[i] >= 0;
    for (uint32_t l = 0; l < f->layout.n_layers; l++)
        f->device->ops->zero(f->device, f->gradients[l],
                             f->layout.layers[l].elements * sizeof(float));
    f->loss = 0;
    struct layers_head head = fixture_head(f);
    for (uint64_t m = 0; m < n; m++) {
        struct layers_batch batch = fixture_batch(f, m);
        batch.balance = balance ? balance + m * 2 * experts : NULL;
        layers_embedding_forward(f->layers, f->weights[0], &batch, x[m]);
        for (uint64_t l = 0; l < blocks; l++)
            layers_block_forward(
                f->layers, at[l], f->weights[at[l]], &batch, x[l * n + m], x[(l + 1) * n + m],
                f->options.keep == FIXTURE_SAVED ? (int64_t)(l * n + m) : LAYERS_NO_SLOT);
        double loss;
        compute_t *dx = x[blocks * n + m];
        layers_head(f->layers, &head, &batch, dx, 1.0 / (double)labelled, dx, &loss);
        f->loss += loss / (double)labelled;
        if (balance)
            f->loss += layers_balance_loss(f->layers, batch.balance, coefficient / (double)n,
                                           slope + m * experts);
    }
    for (uint64_t l = blocks; l-- > 0;)
        for (uint64_t m = 0; m < n; m++) {
            struct layers_batch batch = fixture_batch(f, m);
            batch.balance_slope = slope ? slope + m * experts : NULL;
            layers_block_backward(f->layers, at[l], f->weights[at[l]], f->gradients[at[l]], &batch,
                                  x[l * n + m], x[blocks * n + m],
                                  f->options.keep == FIXTURE_SAVED ? (int64_t)(l * n + m)
                                                                   : LAYERS_NO_SLOT);
        }
    for (uint64_t m = 0; m < n; m++) {
        struct layers_batch batch = fixture_batch(f, m);
        layers_embedding_backward(f->layers, f->gradients[0], &batch, x[blocks * n + m]);
    }
    for (uint64_t i = 0; i < (blocks + 1) * n; i++)
        f->device->ops->free(f->device, x[i]);
    free(x);
    free(balance);
    free(slope);
}

/* The gradient of a tensor (on the CPU device, memory is memory). */
static inline const float *fixture_gradient(const struct fixture *f,
                                            const struct model_tensor *tensor)
{
    return f->gradients[tensor->layer] + tensor->offset;
}

static inline double fixture_norm(const float *x, const float *minus, uint64_t n)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        double d = (double)x[i] - (minus == NULL ? 0 : (double)minus[i]);
        sum += d * d;
    }
    return sqrt(sum);
}

#endif
