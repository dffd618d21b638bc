#include "io_worker/import.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "io_worker/export.h"
#include "model/safetensors.h"
#include "model/split.h"
#include "model/weights.h"
#include "procs/check.h"
#include "procs/error.h"

#define CHUNK_ELEMENTS 65536u /* f32 on their way from the file to the frame; fits in L2 */

struct import {
    const struct model_layout *layout;
    struct safetensors *source; /* NULL: random numbers */
    uint64_t seed;
    float *chunk; /* (CHUNK_ELEMENTS) f32 */
};

/* Elements [first, first + n) of head and embedding: equal, or the first that is not is named. */
static int compare_tied(const struct import *im, const struct safetensors_tensor *head,
                        const struct safetensors_tensor *embedding, uint64_t first, uint64_t n)
{
    float *a = im->chunk, *b = im->chunk + CHUNK_ELEMENTS / 2;
    if (safetensors_read(im->source, head, first, n, a) < 0 ||
        safetensors_read(im->source, embedding, first, n, b) < 0)
        return -(int)error_kind_now();
    for (uint64_t i = 0; i < n; i++) {
        if (a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))
            continue;
        (void)error_set(ERROR_USER,
                        "%s: tensor %s: element %" PRIu64 " is %g, expected %g as in %s, because "
                        "config.json ties them",
                        safetensors_file_path(im->source, head->file), head->name, first + i,
                        (double)a[i], (double)b[i], embedding->name);
        return error_hint("if the model has a head of its own, config.json needs "
                          "\"tie_word_embeddings\": false; else remove the tensor");
    }
    return 0;
}

/* A head beside tied embeddings is left out, so it must say what they say: transformers would not
 * tie two that differ. */
static int check_tied_head(const struct import *im)
{
    struct safetensors_tensor head, embedding;
    const struct model_tensor *tied = model_layer_tensor(im->layout, 0, MODEL_EMBED);
    if (!im->layout->config.tie_word_embeddings || tied == NULL ||
        safetensors_find(im->source, "lm_head.weight", &head) < 0 ||
        safetensors_find(im->source, tied->name, &embedding) < 0)
        return 0;
    if (head.n_dims != 2 || head.shape[0] != tied->rows || head.shape[1] != tied->cols)
        return error_set(ERROR_USER,
                         "%s: tensor lm_head.weight: expected the shape of %s [%" PRIu64
                         ", %" PRIu64 "], because config.json ties them",
                         safetensors_file_path(im->source, head.file), tied->name, tied->rows,
                         tied->cols);
    for (uint64_t done = 0, n; done < head.elements; done += n) {
        n = head.elements - done;
        if (n > CHUNK_ELEMENTS / 2)
            n = CHUNK_ELEMENTS / 2;
        if (compare_tied(im, &head, &embedding, done, n) < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

static int open_source(struct import *im, const char *folder)
{
    if (safetensors_open_folder(&im->source, folder) < 0 ||
        model_check_weights(im->layout, im->source) < 0 || check_tied_head(im) < 0 ||
        export_check_folder(folder) < 0)
        return -(int)error_kind_now();
    return 0;
}

int import_open(struct import **out, const struct import_config *config)
{
    struct import *im = calloc(1, sizeof *im);
    CHECK(im != NULL);
    im->layout = config->layout;
    im->seed = config->seed;
    im->chunk = malloc(CHUNK_ELEMENTS * sizeof *im->chunk);
    CHECK(im->chunk != NULL);
    if (config->folder != NULL && open_source(im, config->folder) < 0) {
        import_close(im);
        return -(int)error_kind_now();
    }
    *out = im;
    return 0;
}

void import_close(struct import *im)
{
    if (im == NULL)
        return;
    safetensors_close(im->source);
    free(im->chunk);
    free(im);
}

/* Where a page's master weights go: f32 whole, or two halves. */
struct destination {
    void *weights;
    uint16_t *residual;
};

static void put(const struct destination *to, uint64_t at, const float *master, uint64_t n)
{
    if (to->residual == NULL)
        memcpy((float *)to->weights + at, master, n * sizeof *master);
    else
        split_master(master, n, (uint16_t *)to->weights + at, to->residual + at);
}

static void put_zeros(const struct destination *to, uint64_t from, uint64_t end)
{
    size_t n = end - from;
    if (to->residual == NULL) {
        memset((float *)to->weights + from, 0, n * sizeof(float));
    } else {
        memset((uint16_t *)to->weights + from, 0, n * sizeof(uint16_t));
        memset(to->residual + from, 0, n * sizeof(uint16_t));
    }
}

static int check_finite(const struct import *im, const struct safetensors_tensor *t, uint64_t first,
                        uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        if (!isfinite(im->chunk[i]))
            return error_set(ERROR_USER,
                             "%s: tensor %s: element %" PRIu64 " is %s, expected a finite number",
                             safetensors_file_path(im->source, t->file), t->name, first + i,
                             isnan(im->chunk[i]) ? "not a number" : "infinite");
    return 0;
}

static int read_part(struct import *im, const struct model_part *part, const struct destination *to)
{
    const struct model_tensor *tensor = &im->layout->tensors[part->tensor];
    struct safetensors_tensor from;
    if (im->source != NULL)
        CHECK(model_find_weight(tensor, im->source, &from) == 0); /* import_open checked */
    for (uint64_t done = 0; done < part->count;) {
        uint64_t left = part->count - done, first = part->tensor_start + done;
        uint64_t n = left < CHUNK_ELEMENTS ? left : CHUNK_ELEMENTS;
        if (im->source == NULL)
            model_init_random(im->layout, tensor, im->seed, first, n, im->chunk);
        else if (safetensors_read(im->source, &from, first, n, im->chunk) < 0 ||
                 check_finite(im, &from, first, n) < 0)
            return -(int)error_kind_now();
        put(to, part->page_start + done, im->chunk, n);
        done += n;
    }
    return 0;
}

int import_page(struct import *im, const struct model_page *page, void *weights, uint16_t *residual)
{
    struct model_part parts[MODEL_LAYER_TENSORS_MAX];
    uint32_t n = model_page_parts(im->layout, page, parts);
    const struct destination to = {weights, residual};
    uint64_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        put_zeros(&to, at, parts[i].page_start);
        if (read_part(im, &parts[i], &to) < 0)
            return -(int)error_kind_now();
        at = parts[i].page_start + parts[i].count;
    }
    put_zeros(&to, at, page->elements);
    return 0;
}
