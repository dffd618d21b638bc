#include "model/layout.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "procs/check.h"
#include "procs/error.h"

enum { BLOCK_TENSORS = 9 };

/* One row per tensor of a decoder block, in the order of the layout. */
static const struct {
    enum model_role role;
    const char *suffix;
} block_tensors[BLOCK_TENSORS] = {
    {MODEL_Q, "self_attn.q_proj.weight"},
    {MODEL_K, "self_attn.k_proj.weight"},
    {MODEL_V, "self_attn.v_proj.weight"},
    {MODEL_O, "self_attn.o_proj.weight"},
    {MODEL_GATE, "mlp.gate_proj.weight"},
    {MODEL_UP, "mlp.up_proj.weight"},
    {MODEL_DOWN, "mlp.down_proj.weight"},
    {MODEL_INPUT_NORM, "input_layernorm.weight"},
    {MODEL_POST_NORM, "post_attention_layernorm.weight"},
};

static void tensor_set_shape(struct model_tensor *t, const struct model_config *c)
{
    uint64_t query = c->n_heads * c->head_dim;
    uint64_t key = c->n_kv_heads * c->head_dim;
    const struct {
        uint64_t rows, cols;
        uint32_t dims;
    } shapes[] = {
        [MODEL_EMBED] = {c->vocab_size, c->hidden_size, 2},
        [MODEL_Q] = {query, c->hidden_size, 2},
        [MODEL_K] = {key, c->hidden_size, 2},
        [MODEL_V] = {key, c->hidden_size, 2},
        [MODEL_O] = {c->hidden_size, query, 2},
        [MODEL_GATE] = {c->intermediate_size, c->hidden_size, 2},
        [MODEL_UP] = {c->intermediate_size, c->hidden_size, 2},
        [MODEL_DOWN] = {c->hidden_size, c->intermediate_size, 2},
        [MODEL_INPUT_NORM] = {c->hidden_size, 1, 1},
        [MODEL_POST_NORM] = {c->hidden_size, 1, 1},
        [MODEL_FINAL_NORM] = {c->hidden_size, 1, 1},
        [MODEL_HEAD] = {c->vocab_size, c->hidden_size, 2},
    };
    t->rows = shapes[t->role].rows;
    t->cols = shapes[t->role].cols;
    t->dims = shapes[t->role].dims;
    t->elements = t->rows * t->cols;
}

/* Appends a tensor to the layer under construction, the last one. */
static struct model_tensor *layout_add_tensor(struct model_layout *layout, enum model_role role)
{
    struct model_layer *layer = &layout->layers[layout->n_layers - 1];
    struct model_tensor *tensor = &layout->tensors[layout->n_tensors++];
    tensor->role = role;
    tensor->layer = layout->n_layers - 1;
    tensor->offset = layer->elements;
    tensor_set_shape(tensor, &layout->config);
    layer->n_tensors++;
    uint64_t mask = MODEL_BLOCK_ELEMENTS - 1;
    layer->elements += (tensor->elements + mask) & ~mask;
    layout->parameters += tensor->elements;
    return tensor;
}

static void layout_begin_layer(struct model_layout *layout, enum model_layer_kind kind)
{
    layout->layers[layout->n_layers++] =
        (struct model_layer){.kind = kind, .first_tensor = layout->n_tensors};
}

static void layout_add_named(struct model_layout *layout, enum model_role role, const char *name)
{
    struct model_tensor *tensor = layout_add_tensor(layout, role);
    (void)snprintf(tensor->name, sizeof tensor->name, "%s", name); /* shorter than the field */
}

static void layout_add_layers(struct model_layout *layout)
{
    layout_begin_layer(layout, LAYER_EMBEDDING);
    layout_add_named(layout, MODEL_EMBED, "model.embed_tokens.weight");
    for (uint64_t b = 0; b < layout->config.n_layers; b++) {
        layout_begin_layer(layout, LAYER_BLOCK);
        for (int i = 0; i < BLOCK_TENSORS; i++) {
            struct model_tensor *tensor = layout_add_tensor(layout, block_tensors[i].role);
            (void)snprintf(tensor->name, sizeof tensor->name, "model.layers.%" PRIu64 ".%s", b,
                           block_tensors[i].suffix); /* 20 digits at most: fits */
        }
    }
    layout_begin_layer(layout, LAYER_HEAD);
    layout_add_named(layout, MODEL_FINAL_NORM, "model.norm.weight");
    if (!layout->config.tie_word_embeddings)
        layout_add_named(layout, MODEL_HEAD, "lm_head.weight");
}

/* Numbers the pages of each layer. */
static int layout_count_pages(struct model_layout *layout)
{
    for (uint32_t l = 0; l < layout->n_layers; l++) {
        struct model_layer *layer = &layout->layers[l];
        uint64_t n = (layer->elements + layout->page_elements - 1) / layout->page_elements;
        if (n > UINT32_MAX) {
            error_set(ERROR_USER,
                      "layer %" PRIu32 " of %" PRIu64 " elements: expected at most %" PRIu32
                      " pages of %" PRIu64 " elements, found %" PRIu64,
                      l, layer->elements, UINT32_MAX, layout->page_elements, n);
            return error_hint("choose a larger page_elements");
        }
        layer->first_page = layout->n_pages;
        layer->n_pages = (uint32_t)n;
        layout->n_pages += n;
        layout->elements += layer->elements;
    }
    return 0;
}

static int layout_fill_pages(struct model_layout *layout)
{
    layout->pages = calloc(layout->n_pages, sizeof *layout->pages);
    if (!layout->pages)
        return error_set(ERROR_FAILED, "no memory for a table of %" PRIu64 " pages",
                         layout->n_pages);
    for (uint32_t l = 0; l < layout->n_layers; l++) {
        const struct model_layer *layer = &layout->layers[l];
        for (uint32_t i = 0; i < layer->n_pages; i++) {
            uint64_t offset = i * layout->page_elements;
            uint64_t rest = layer->elements - offset;
            layout->pages[layer->first_page + i] = (struct model_page){
                .layer = l,
                .index = i,
                .offset = offset,
                .elements = rest < layout->page_elements ? rest : layout->page_elements,
            };
        }
    }
    return 0;
}

static int compare_names(const void *a, const void *b, void *tensors)
{
    const struct model_tensor *t = tensors;
    return strcmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static void layout_sort_names(struct model_layout *layout)
{
    for (uint32_t i = 0; i < layout->n_tensors; i++)
        layout->tensors_by_name[i] = i;
    qsort_r(layout->tensors_by_name, layout->n_tensors, sizeof *layout->tensors_by_name,
            compare_names, layout->tensors);
}

static int layout_build(struct model_layout *layout)
{
    uint64_t n_layers = layout->config.n_layers + 2;
    uint64_t n_tensors = layout->config.n_layers * BLOCK_TENSORS + 3;
    CHECK(n_tensors <= UINT32_MAX); /* model_config_load() bounds n_layers far below */
    layout->layers = calloc(n_layers, sizeof *layout->layers);
    layout->tensors = calloc(n_tensors, sizeof *layout->tensors);
    layout->tensors_by_name = calloc(n_tensors, sizeof *layout->tensors_by_name);
    if (!layout->layers || !layout->tensors || !layout->tensors_by_name)
        return error_set(ERROR_FAILED, "no memory for the tables of %" PRIu64 " layers", n_layers);
    layout_add_layers(layout);
    layout_sort_names(layout);
    int rc = layout_count_pages(layout);
    return rc < 0 ? rc : layout_fill_pages(layout);
}

int model_layout_init(struct model_layout *layout, const struct model_config *config,
                      uint64_t page_elements)
{
    *layout = (struct model_layout){.config = *config, .page_elements = page_elements};
    if (page_elements < MODEL_BLOCK_ELEMENTS || page_elements > MODEL_PAGE_ELEMENTS_MAX ||
        (page_elements & (page_elements - 1)) != 0)
        return error_set(ERROR_USER,
                         "page_elements: expected 4096 times a power of two, at most %" PRIu64
                         ", found %" PRIu64,
                         MODEL_PAGE_ELEMENTS_MAX, page_elements);
    int rc = layout_build(layout);
    if (rc < 0)
        model_layout_destroy(layout);
    return rc;
}

void model_layout_destroy(struct model_layout *layout)
{
    free(layout->layers);
    free(layout->tensors);
    free(layout->tensors_by_name);
    free(layout->pages);
    *layout = (struct model_layout){0};
}

const struct model_tensor *model_layout_find(const struct model_layout *layout, const char *name)
{
    uint32_t low = 0, high = layout->n_tensors;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct model_tensor *tensor = &layout->tensors[layout->tensors_by_name[middle]];
        int order = strcmp(name, tensor->name);
        if (order == 0)
            return tensor;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const struct model_tensor *model_layer_tensor(const struct model_layout *layout, uint32_t layer,
                                              enum model_role role)
{
    CHECK(layer < layout->n_layers);
    const struct model_tensor *tensors = &layout->tensors[layout->layers[layer].first_tensor];
    for (uint32_t i = 0; i < layout->layers[layer].n_tensors; i++)
        if (tensors[i].role == role)
            return &tensors[i];
    return NULL;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

uint32_t model_page_parts(const struct model_layout *layout, const struct model_page *page,
                          struct model_part parts[MODEL_LAYER_TENSORS_MAX])
{
    const struct model_layer *layer = &layout->layers[page->layer];
    uint32_t n = 0;
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        const struct model_tensor *tensor = &layout->tensors[layer->first_tensor + i];
        uint64_t from = max_u64(page->offset, tensor->offset);
        uint64_t to = min_u64(page->offset + page->elements, tensor->offset + tensor->elements);
        if (from >= to)
            continue;
        parts[n++] = (struct model_part){
            .tensor = layer->first_tensor + i,
            .tensor_start = from - tensor->offset,
            .page_start = from - page->offset,
            .count = to - from,
        };
    }
    return n;
}

_Static_assert((int)BLOCK_TENSORS <= (int)MODEL_LAYER_TENSORS_MAX,
               "model_page_parts() fills at most one part per tensor");

int model_tensor_is_exempt(const struct model_tensor *tensor, const char *const *patterns,
                           uint32_t n_patterns)
{
    if (tensor->dims == 1)
        return 1;
    for (uint32_t i = 0; i < n_patterns; i++)
        if (fnmatch(patterns[i], tensor->name, 0) == 0)
            return 1;
    return 0;
}

void model_page_decay_bits(const struct model_layout *layout, const struct model_page *page,
                           const char *const *patterns, uint32_t n_patterns, uint8_t *per_block)
{
    struct model_part parts[MODEL_LAYER_TENSORS_MAX];
    uint32_t n = model_page_parts(layout, page, parts);
    for (uint32_t i = 0; i < n; i++) {
        const struct model_tensor *tensor = &layout->tensors[parts[i].tensor];
        int decays = !model_tensor_is_exempt(tensor, patterns, n_patterns);
        uint64_t first = parts[i].page_start / MODEL_BLOCK_ELEMENTS;
        uint64_t blocks = (parts[i].count + MODEL_BLOCK_ELEMENTS - 1) / MODEL_BLOCK_ELEMENTS;
        memset(&per_block[first], decays, blocks);
    }
}
