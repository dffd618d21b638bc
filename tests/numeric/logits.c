/*
 * What the layers make of a Hugging Face folder, for comparison with another program
 * (tools/check_export.py --ours): logits of one row of tokens in float32.
 *
 *     logits HF_DIR TOKENS OUT
 *
 * TOKENS: int32, one sequence. OUT: float32 (tokens, vocab_size). Status 1 with a message on error.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "gpu_worker/layers.h"
#include "model/config.h"
#include "model/layout.h"
#include "model/weights.h"
#include "procs/error.h"

struct program {
    struct model_layout layout;
    struct safetensors *weights;
    struct device *device;
    struct layers *layers;
    uint64_t n;                       /* tokens */
    int32_t *tokens;                  /* (n) */
    int32_t *zeros, *position;        /* (n) */
    compute_t *layer, *embedding, *x; /* one layer's weights at a time, the first for a tied head */
};

static void must(int rc)
{
    if (rc >= 0)
        return;
    (void)fprintf(stderr, "logits: %s\n", error_text());
    exit(1);
}

static void *memory(uint64_t bytes)
{
    void *p = calloc(1, bytes + 1);
    if (p == NULL)
        must(error_set(ERROR_FAILED, "out of memory"));
    return p;
}

static void read_tokens(struct program *p, const char *path)
{
    struct stat stat_buffer;
    FILE *f = fopen(path, "rb");
    if (f == NULL || fstat(fileno(f), &stat_buffer) < 0)
        must(error_set(ERROR_USER, "%s: cannot read", path));
    p->n = (uint64_t)stat_buffer.st_size / sizeof(int32_t);
    p->tokens = memory(p->n * sizeof(int32_t));
    p->zeros = memory(p->n * sizeof(int32_t));
    p->position = memory(p->n * sizeof(int32_t));
    if (p->n == 0 || fread(p->tokens, sizeof(int32_t), p->n, f) != p->n)
        must(error_set(ERROR_USER, "%s: expected int32 token ids", path));
    (void)fclose(f); /* read only */
    for (uint64_t i = 0; i < p->n; i++) {
        p->position[i] = (int32_t)i;
        if (p->tokens[i] < 0 || (uint64_t)p->tokens[i] >= p->layout.config.vocab_size)
            must(
                error_set(ERROR_USER, "%s: token %d is not in the vocabulary", path, p->tokens[i]));
    }
}

static void load_layer(struct program *p, uint32_t layer, compute_t *to)
{
    const struct model_layer *l = &p->layout.layers[layer];
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        const struct model_tensor *tensor = &p->layout.tensors[l->first_tensor + i];
        struct safetensors_tensor found;
        float *values = memory(tensor->elements * sizeof *values);
        must(model_find_weight(tensor, p->weights, &found));
        must(safetensors_read(p->weights, &found, 0, tensor->elements, values));
        p->device->ops->load(p->device, device_at(p->device, to, tensor->offset), values,
                             DEVICE_HOST_F32, tensor->elements);
        p->device->ops->synchronize(p->device);
        free(values);
    }
}

/* A block and its experts. */
static void load_group(struct program *p, uint32_t layer, compute_t *to)
{
    for (uint32_t l = layer; l <= layer + p->layout.layers[layer].n_experts; l++)
        load_layer(p, l, device_at(p->device, to, p->layout.layers[l].start));
}

static compute_t *allocate(struct program *p, uint64_t elements)
{
    compute_t *out = p->device->ops->alloc(p->device, elements * p->device->compute_bytes);
    if (out == NULL)
        must(-1);
    return out;
}

static void open_model(struct program *p, const char *folder)
{
    struct model_config config;
    must(model_config_load(&config, folder));
    must(model_layout_init(&p->layout, &config, MODEL_PAGE_ELEMENTS_DEFAULT));
    must(safetensors_open_folder(&p->weights, folder));
    must(model_check_weights(&p->layout, p->weights));
    must(device_cpu_open(&p->device, DEVICE_F32, 1));
}

static void prepare(struct program *p)
{
    must(layers_init(
        &p->layers, p->device, &p->layout,
        &(struct layers_shape){.microbatch_size = 1, .seq_len = p->n, .forward_only = 1}));
    p->embedding = allocate(p, p->layout.layers[0].elements);
    p->layer = allocate(p, p->layout.group_elements_max);
    p->x = allocate(p, p->n * p->layout.config.hidden_size);
}

static struct layers_head head_of(const struct program *p)
{
    uint32_t last = p->layout.n_layers - 1;
    const struct model_tensor *norm = model_layer_tensor(&p->layout, last, MODEL_FINAL_NORM);
    const struct model_tensor *bias = model_layer_tensor(&p->layout, last, MODEL_FINAL_NORM_BIAS);
    const struct model_tensor *matrix = model_layer_tensor(&p->layout, last, MODEL_HEAD);
    return (struct layers_head){
        .norm = device_at(p->device, p->layer, norm->offset),
        .norm_bias = bias ? device_at(p->device, p->layer, bias->offset) : NULL,
        .matrix = matrix ? device_at(p->device, p->layer, matrix->offset) : p->embedding};
}

static void compute(struct program *p, float *logits)
{
    struct layers_batch batch = {.tokens = p->tokens,
                                 .labels = p->zeros,
                                 .position = p->position,
                                 .document_start = p->zeros};
    uint32_t last = p->layout.n_layers - 1;
    load_layer(p, 0, p->embedding);
    layers_embedding_forward(p->layers, p->embedding, &batch, p->x);
    for (uint64_t b = 0; b < p->layout.config.n_layers; b++) {
        uint32_t l = p->layout.blocks[b];
        load_group(p, l, p->layer);
        layers_block_forward(p->layers, l, p->layer, &batch, p->x, p->x, LAYERS_NO_SLOT);
    }
    load_layer(p, last, p->layer);
    struct layers_head head = head_of(p);
    layers_head_logits(p->layers, &head, p->x, p->n, logits);
}

int main(int argc, char **argv)
{
    struct program p = {0};
    if (argc != 4)
        must(error_set(ERROR_USER, "expected HF_DIR TOKENS OUT"));
    open_model(&p, argv[1]);
    read_tokens(&p, argv[2]);
    prepare(&p);
    uint64_t count = p.n * p.layout.config.vocab_size;
    float *logits = p.device->ops->alloc(p.device, count * sizeof *logits);
    float *out = memory(count * sizeof *out);
    if (logits == NULL)
        must(-1);
    compute(&p, logits);
    p.device->ops->copy_out(p.device, out, logits, count * sizeof *out);
    FILE *f = fopen(argv[3], "wb");
    if (f == NULL || fwrite(out, sizeof *out, count, f) != count || fclose(f) != 0)
        must(error_set(ERROR_FAILED, "%s: cannot write", argv[3]));
    return 0;
}
