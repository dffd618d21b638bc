#include "io_worker/import.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

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

int import_open(struct import **out, const struct import_config *config)
{
    struct import *im = calloc(1, sizeof *im);
    CHECK(im != NULL);
    im->layout = config->layout;
    im->seed = config->seed;
    im->chunk = malloc(CHUNK_ELEMENTS * sizeof *im->chunk);
    CHECK(im->chunk != NULL);
    if (config->folder != NULL && (safetensors_open_folder(&im->source, config->folder) < 0 ||
                                   model_check_weights(im->layout, im->source) < 0)) {
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
