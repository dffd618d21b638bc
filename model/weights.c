#include "model/weights.h"

#include <fnmatch.h>
#include <inttypes.h>
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

static int check_present(const struct model_tensor *tensor, const struct safetensors *st)
{
    struct safetensors_tensor found;
    if (safetensors_find(st, tensor->name, &found) < 0) {
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

/* Tensors that transformers leaves aside when it loads a Llama. */
static int is_ignored(const struct model_layout *layout, const char *name)
{
    if (fnmatch("*.rotary_emb.inv_freq", name, 0) == 0)
        return 1;
    return layout->config.tie_word_embeddings && strcmp(name, "lm_head.weight") == 0;
}

int model_check_weights(const struct model_layout *layout, const struct safetensors *st)
{
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        int rc = check_present(&layout->tensors[i], st);
        if (rc < 0)
            return rc;
    }
    for (uint64_t i = 0; i < safetensors_n_tensors(st); i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(st, i);
        if (model_layout_find(layout, t->name) || is_ignored(layout, t->name))
            continue;
        error_set(ERROR_USER, "%s: tensor %s: expected no such tensor in this model",
                  safetensors_file_path(st, t->file), t->name);
        return error_hint("config.json and the weights belong to different models");
    }
    return 0;
}

void model_init_random(const struct model_layout *layout, const struct model_tensor *tensor,
                       uint64_t seed, uint64_t first, uint64_t count, float *out)
{
    CHECK(first <= tensor->elements && count <= tensor->elements - first);
    if (tensor->dims == 1) { /* in a Llama these are the norms */
        for (uint64_t i = 0; i < count; i++)
            out[i] = 1.0f;
        return;
    }
    struct random_key key = {.seed = seed, .purpose = RANDOM_INIT_WEIGHTS, .layer = tensor->layer};
    random_normal_fill(key, tensor->offset + first, count, out,
                       (float)layout->config.initializer_range);
}
