#include "model/weights.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "procs/check.h"
#include "procs/error.h"

enum { SHAPE_TEXT_BYTES = 200 };

static const char *shape_text(const struct safetensors_tensor *t, char text[SHAPE_TEXT_BYTES])
{
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < t->n_dims; i++) /* 8 sizes of at most 20 digits fit */
        used += (size_t)snprintf(text + used, SHAPE_TEXT_BYTES - used, "%s%" PRIu64, i ? ", " : "",
                                 t->shape[i]);
    return text;
}

static int has_shape(const struct model_tensor *tensor, const struct safetensors_tensor *found)
{
    return found->n_dims == tensor->dims && found->shape[0] == tensor->rows &&
           (tensor->dims == 1 || found->shape[1] == tensor->cols);
}

static int refuse_shape(const struct safetensors *st, const struct model_tensor *tensor,
                        const struct safetensors_tensor *found)
{
    char text[SHAPE_TEXT_BYTES];
    const char *path = safetensors_file_path(st, found->file);
    (void)shape_text(found, text);
    if (tensor->dims == 1)
        error_set(ERROR_USER, "%s: tensor %s: expected shape [%" PRIu64 "], found [%s]", path,
                  tensor->name, tensor->rows, text);
    else
        error_set(ERROR_USER,
                  "%s: tensor %s: expected shape [%" PRIu64 ", %" PRIu64 "], found [%s]", path,
                  tensor->name, tensor->rows, tensor->cols, text);
    return error_hint("config.json and the weights belong to different models");
}

int model_find_weight(const struct model_tensor *tensor, const struct safetensors *st,
                      struct safetensors_tensor *found)
{
    const char *base = model_tensor_base_name(tensor);
    int rc = safetensors_find(st, tensor->name, found);
    return rc < 0 && base ? safetensors_find(st, base, found) : rc;
}

static int check_present(const struct model_tensor *tensor, const struct safetensors *st)
{
    struct safetensors_tensor found;
    if (model_find_weight(tensor, st, &found) < 0) {
        error_set(ERROR_USER, "%s: tensor %s: expected in the weights, found nowhere",
                  safetensors_file_path(st, 0), tensor->name);
        if (tensor->role == MODEL_HEAD)
            return error_hint("if the head is the embedding, config.json needs "
                              "\"tie_word_embeddings\": true");
        return error_hint("config.json and the weights belong to different models");
    }
    if (!has_shape(tensor, &found))
        return refuse_shape(st, tensor, &found);
    if (found.dtype != DTYPE_F32 && found.dtype != DTYPE_BF16 && found.dtype != DTYPE_F16)
        return error_set(ERROR_USER, "%s: tensor %s: expected dtype F32, BF16 or F16, found %s",
                         safetensors_file_path(st, found.file), tensor->name,
                         model_dtype_name(found.dtype));
    return 0;
}

/* Tensors that transformers leaves aside when it loads a model. */
static int is_ignored(const struct model_layout *layout, const char *name)
{
    static const char *const buffers[] = {"*.rotary_emb.inv_freq", "*.attn.bias",
                                          "*.attn.masked_bias"};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        if (fnmatch(buffers[i], name, 0) == 0)
            return 1;
    return layout->config.tie_word_embeddings && strcmp(name, "lm_head.weight") == 0;
}

/* Is it what model_find_weight() finds for a tensor? The name of the base class counts only where
 * the full one is absent. */
static int is_wanted(const struct model_layout *layout, const struct safetensors *st,
                     const char *name)
{
    struct safetensors_tensor found;
    char full[MODEL_TENSOR_NAME_BYTES];
    const char *first = layout->tensors[0].name,
               *base = model_tensor_base_name(&layout->tensors[0]);
    if (model_layout_find(layout, name))
        return 1;
    if (!base)
        return 0;
    int n = snprintf(full, sizeof full, "%.*s%s", (int)(base - first), first, name);
    return n > 0 && (size_t)n < sizeof full && model_layout_find(layout, full) &&
           safetensors_find(st, full, &found) < 0;
}

/* transformers holds all experts of a block in one tensor of three dimensions; the hub does not. */
static int refuse_fused_experts(const struct model_layout *layout, const struct safetensors *st)
{
    for (uint64_t i = 0; layout->config.n_experts && i < safetensors_n_tensors(st); i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(st, i);
        if (fnmatch("*.experts.gate_up_proj", t->name, 0) != 0 &&
            fnmatch("*.experts.down_proj", t->name, 0) != 0)
            continue;
        error_set(ERROR_USER,
                  "%s: tensor %s: expected a tensor for each expert, found all experts in one",
                  safetensors_file_path(st, t->file), t->name);
        return error_hint("transformers' save_pretrained() writes a tensor for each expert");
    }
    return 0;
}

int model_check_weights(const struct model_layout *layout, const struct safetensors *st)
{
    if (refuse_fused_experts(layout, st) < 0)
        return -ERROR_USER;
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        int rc = check_present(&layout->tensors[i], st);
        if (rc < 0)
            return rc;
    }
    for (uint64_t i = 0; i < safetensors_n_tensors(st); i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(st, i);
        if (is_wanted(layout, st, t->name) || is_ignored(layout, t->name))
            continue;
        error_set(ERROR_USER, "%s: tensor %s: expected no such tensor in this model",
                  safetensors_file_path(st, t->file), t->name);
        return error_hint("config.json and the weights belong to different models");
    }
    return 0;
}

/* What the vectors of a model begin with. */
static float vector_start(const struct model_layout *layout, enum model_role role)
{
    switch (role) {
    case MODEL_Q_NORM:
    case MODEL_K_NORM:
    case MODEL_INPUT_NORM:
    case MODEL_POST_NORM:
    case MODEL_ATTENTION_OUT_NORM:
    case MODEL_MLP_OUT_NORM:
    case MODEL_FINAL_NORM:
        return layout->config.norm == MODEL_NORM_RMS_PLUS_ONE ? 0.0f : 1.0f;
    default:
        return 0.0f; /* biases */
    }
}

void model_init_random(const struct model_layout *layout, const struct model_tensor *tensor,
                       uint64_t seed, uint64_t first, uint64_t count, float *out)
{
    const struct model_config *c = &layout->config;
    CHECK(first <= tensor->elements && count <= tensor->elements - first);
    if (tensor->dims == 1) {
        for (uint64_t i = 0; i < count; i++)
            out[i] = vector_start(layout, tensor->role);
        return;
    }
    struct random_key key = {.seed = seed, .purpose = RANDOM_INIT_WEIGHTS, .layer = tensor->layer};
    double deviation = c->initializer_range;
    if (c->scaled_init && (tensor->role == MODEL_O || tensor->role == MODEL_DOWN))
        deviation /= sqrt(2.0 * (double)c->n_layers);
    random_normal_fill(key, tensor->offset + first, count, out, (float)deviation);
}
