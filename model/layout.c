#include "model/layout.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "procs/check.h"
#include "procs/error.h"

enum { PREFIX_BYTES = 96 }; /* of a name; two numbers of 20 digits fit */

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Names of tensors, per block or of the model, in the two schemes there are. */
static const struct {
    const char *usual; /* model.layers.N.*, or the whole name */
    const char *gpt2;  /* transformer.h.N.*, or the whole name; NULL: GPT-2 has no such tensor */
} names[MODEL_ROLES] = {
    [MODEL_EMBED] = {"model.embed_tokens.weight", "transformer.wte.weight"},
    [MODEL_POSITIONS] = {NULL, "transformer.wpe.weight"},
    [MODEL_QKV] = {"self_attn.qkv_proj.weight", "attn.c_attn.weight"},
    [MODEL_QKV_BIAS] = {"self_attn.qkv_proj.bias", "attn.c_attn.bias"},
    [MODEL_Q] = {"self_attn.q_proj.weight", NULL},
    [MODEL_Q_BIAS] = {"self_attn.q_proj.bias", NULL},
    [MODEL_K] = {"self_attn.k_proj.weight", NULL},
    [MODEL_K_BIAS] = {"self_attn.k_proj.bias", NULL},
    [MODEL_V] = {"self_attn.v_proj.weight", NULL},
    [MODEL_V_BIAS] = {"self_attn.v_proj.bias", NULL},
    [MODEL_O] = {"self_attn.o_proj.weight", "attn.c_proj.weight"},
    [MODEL_O_BIAS] = {"self_attn.o_proj.bias", "attn.c_proj.bias"},
    [MODEL_Q_NORM] = {"self_attn.q_norm.weight", NULL},
    [MODEL_K_NORM] = {"self_attn.k_norm.weight", NULL},
    [MODEL_ROUTER] = {"mlp.gate.weight", NULL},
    [MODEL_GATE_UP] = {"mlp.gate_up_proj.weight", NULL},
    [MODEL_GATE] = {"mlp.gate_proj.weight", NULL},
    [MODEL_GATE_BIAS] = {"mlp.gate_proj.bias", NULL},
    [MODEL_UP] = {"mlp.up_proj.weight", "mlp.c_fc.weight"},
    [MODEL_UP_BIAS] = {"mlp.up_proj.bias", "mlp.c_fc.bias"},
    [MODEL_DOWN] = {"mlp.down_proj.weight", "mlp.c_proj.weight"},
    [MODEL_DOWN_BIAS] = {"mlp.down_proj.bias", "mlp.c_proj.bias"},
    [MODEL_INPUT_NORM] = {"input_layernorm.weight", "ln_1.weight"},
    [MODEL_INPUT_NORM_BIAS] = {NULL, "ln_1.bias"},
    /* with post_norms: pre_feedforward_layernorm, and this is the name of the one behind attention
     */
    [MODEL_POST_NORM] = {"post_attention_layernorm.weight", "ln_2.weight"},
    [MODEL_POST_NORM_BIAS] = {NULL, "ln_2.bias"},
    [MODEL_ATTENTION_OUT_NORM] = {"post_attention_layernorm.weight", NULL},
    [MODEL_MLP_OUT_NORM] = {"post_feedforward_layernorm.weight", NULL},
    [MODEL_FINAL_NORM] = {"model.norm.weight", "transformer.ln_f.weight"},
    [MODEL_FINAL_NORM_BIAS] = {NULL, "transformer.ln_f.bias"},
    [MODEL_HEAD] = {"lm_head.weight", "lm_head.weight"},
};

static const char *const base_prefixes[] = {"model.", "transformer."};

/* What layers hold which roles. */
enum part { PART_MODEL, PART_BLOCK, PART_SPARSE_BLOCK, PART_EXPERT };

/* Behind model.layers.N. or, of an expert, behind that and .experts.E. */
static const char *expert_name(const struct model_config *c, enum model_role role)
{
    int mixtral = c->architecture == MODEL_MIXTRAL;
    switch (role) {
    case MODEL_GATE:
        return mixtral ? "w1.weight" : "gate_proj.weight";
    case MODEL_UP:
        return mixtral ? "w3.weight" : "up_proj.weight";
    default:
        CHECK(role == MODEL_DOWN);
        return mixtral ? "w2.weight" : "down_proj.weight";
    }
}

static const char *role_name(const struct model_config *c, enum model_role role, enum part part)
{
    if (part == PART_EXPERT)
        return expert_name(c, role);
    if (role == MODEL_ROUTER && c->architecture == MODEL_MIXTRAL)
        return "block_sparse_moe.gate.weight";
    if (role == MODEL_POST_NORM && c->post_norms)
        return "pre_feedforward_layernorm.weight";
    return c->architecture == MODEL_GPT2 ? names[role].gpt2 : names[role].usual;
}

static int is_mlp(enum model_role role)
{
    return role >= MODEL_GATE_UP && role <= MODEL_DOWN_BIAS;
}

/* Does that part of the model have the tensor? What no option decides, every model has. */
static int has_role(const struct model_config *c, enum model_role role, enum part part)
{
    if (part == PART_EXPERT)
        return role == MODEL_GATE || role == MODEL_UP || role == MODEL_DOWN;
    if (part == PART_SPARSE_BLOCK && is_mlp(role))
        return 0;
    if (role == MODEL_ROUTER)
        return part == PART_SPARSE_BLOCK;
    const struct {
        enum model_role role;
        int has;
    } optional[] = {
        {MODEL_POSITIONS, c->positions == MODEL_POSITIONS_LEARNED},
        {MODEL_QKV, c->fused_qkv != 0},
        {MODEL_QKV_BIAS, c->fused_qkv && c->qkv_bias},
        {MODEL_Q, !c->fused_qkv},
        {MODEL_K, !c->fused_qkv},
        {MODEL_V, !c->fused_qkv},
        {MODEL_Q_BIAS, !c->fused_qkv && c->qkv_bias},
        {MODEL_K_BIAS, !c->fused_qkv && c->qkv_bias},
        {MODEL_V_BIAS, !c->fused_qkv && c->qkv_bias},
        {MODEL_O_BIAS, c->out_bias != 0},
        {MODEL_Q_NORM, c->qk_norm != 0},
        {MODEL_K_NORM, c->qk_norm != 0},
        {MODEL_GATE_UP, !c->plain_mlp && c->fused_gate_up},
        {MODEL_GATE, !c->plain_mlp && !c->fused_gate_up},
        {MODEL_GATE_BIAS, !c->plain_mlp && c->mlp_bias},
        {MODEL_UP, c->plain_mlp || !c->fused_gate_up},
        {MODEL_UP_BIAS, c->mlp_bias != 0},
        {MODEL_DOWN_BIAS, c->mlp_bias != 0},
        {MODEL_INPUT_NORM_BIAS, c->norm == MODEL_NORM_LAYER},
        {MODEL_POST_NORM_BIAS, c->norm == MODEL_NORM_LAYER},
        {MODEL_FINAL_NORM_BIAS, c->norm == MODEL_NORM_LAYER},
        {MODEL_ATTENTION_OUT_NORM, c->post_norms != 0},
        {MODEL_MLP_OUT_NORM, c->post_norms != 0},
        {MODEL_HEAD, !c->tie_word_embeddings},
    };
    for (size_t i = 0; i < sizeof optional / sizeof optional[0]; i++)
        if (optional[i].role == role)
            return optional[i].has;
    return 1;
}

static void tensor_set_shape(struct model_tensor *t, const struct model_config *c, enum part part)
{
    uint64_t query = c->n_heads * c->head_dim, key = c->n_kv_heads * c->head_dim;
    uint64_t hidden = c->hidden_size;
    uint64_t inner = part == PART_EXPERT ? c->expert_size : c->intermediate_size;
    const struct {
        uint64_t rows, cols; /* cols 0: a vector */
    } shapes[MODEL_ROLES] = {
        [MODEL_EMBED] = {c->vocab_size, hidden},
        [MODEL_POSITIONS] = {c->max_position, hidden},
        [MODEL_QKV] = {query + 2 * key, hidden},
        [MODEL_QKV_BIAS] = {query + 2 * key, 0},
        [MODEL_Q] = {query, hidden},
        [MODEL_Q_BIAS] = {query, 0},
        [MODEL_K] = {key, hidden},
        [MODEL_K_BIAS] = {key, 0},
        [MODEL_V] = {key, hidden},
        [MODEL_V_BIAS] = {key, 0},
        [MODEL_O] = {hidden, query},
        [MODEL_O_BIAS] = {hidden, 0},
        [MODEL_Q_NORM] = {c->head_dim, 0},
        [MODEL_K_NORM] = {c->head_dim, 0},
        [MODEL_ROUTER] = {c->n_experts, hidden},
        [MODEL_GATE_UP] = {2 * inner, hidden},
        [MODEL_GATE] = {inner, hidden},
        [MODEL_GATE_BIAS] = {inner, 0},
        [MODEL_UP] = {inner, hidden},
        [MODEL_UP_BIAS] = {inner, 0},
        [MODEL_DOWN] = {hidden, inner},
        [MODEL_DOWN_BIAS] = {hidden, 0},
        [MODEL_INPUT_NORM] = {hidden, 0},
        [MODEL_INPUT_NORM_BIAS] = {hidden, 0},
        [MODEL_POST_NORM] = {hidden, 0},
        [MODEL_POST_NORM_BIAS] = {hidden, 0},
        [MODEL_ATTENTION_OUT_NORM] = {hidden, 0},
        [MODEL_MLP_OUT_NORM] = {hidden, 0},
        [MODEL_FINAL_NORM] = {hidden, 0},
        [MODEL_FINAL_NORM_BIAS] = {hidden, 0},
        [MODEL_HEAD] = {c->vocab_size, hidden},
    };
    uint64_t rows = shapes[t->role].rows, cols = shapes[t->role].cols;
    int swap = c->transposed && cols && t->role >= MODEL_QKV && t->role <= MODEL_MLP_OUT_NORM;
    t->dims = cols ? 2 : 1;
    t->rows = swap ? cols : rows;
    t->cols = swap ? rows : (cols ? cols : 1);
    t->elements = t->rows * t->cols;
}

/* Appends a tensor to the layer under construction, the last one. */
static struct model_tensor *layout_add_tensor(struct model_layout *layout, enum model_role role,
                                              enum part part)
{
    struct model_layer *layer = &layout->layers[layout->n_layers - 1];
    struct model_tensor *tensor = &layout->tensors[layout->n_tensors++];
    tensor->role = role;
    tensor->layer = layout->n_layers - 1;
    tensor->offset = layer->elements;
    tensor_set_shape(tensor, &layout->config, part);
    layer->n_tensors++;
    uint64_t mask = MODEL_BLOCK_ELEMENTS - 1;
    layer->elements += (tensor->elements + mask) & ~mask;
    layout->parameters += tensor->elements;
    return tensor;
}

static void layout_begin_layer(struct model_layout *layout, enum model_layer_kind kind)
{
    layout->layers[layout->n_layers] = (struct model_layer){
        .kind = kind, .first_tensor = layout->n_tensors, .group = layout->n_layers};
    layout->n_layers++;
}

/* It joins the group of the layer before it. */
static void layout_begin_expert(struct model_layout *layout)
{
    const struct model_layer *before = &layout->layers[layout->n_layers - 1];
    uint32_t group = before->group, block = before->block;
    uint64_t start = before->start + before->elements;
    layout_begin_layer(layout, LAYER_EXPERT);
    struct model_layer *layer = &layout->layers[layout->n_layers - 1];
    layer->group = group;
    layer->block = block;
    layer->start = start;
    layout->layers[group].n_experts++;
}

/* Those of the roles [from, to] that the part has; their names begin with `prefix`. */
static void layout_add_roles(struct model_layout *layout, enum model_role from, enum model_role to,
                             enum part part, const char *prefix)
{
    const struct model_config *c = &layout->config;
    for (int role = (int)from; role <= (int)to; role++) {
        if (!has_role(c, (enum model_role)role, part))
            continue;
        struct model_tensor *tensor = layout_add_tensor(layout, (enum model_role)role, part);
        const char *name = role_name(c, tensor->role, part);
        CHECK(name != NULL);
        (void)snprintf(tensor->name, sizeof tensor->name, "%s%s", prefix, name);
    }
}

static void layout_add_experts(struct model_layout *layout, uint64_t block)
{
    const char *inside = layout->config.architecture == MODEL_MIXTRAL ? "block_sparse_moe" : "mlp";
    for (uint64_t e = 0; e < layout->config.n_experts; e++) {
        char prefix[PREFIX_BYTES];
        (void)snprintf(prefix, sizeof prefix, "model.layers.%" PRIu64 ".%s.experts.%" PRIu64 ".",
                       block, inside, e);
        layout_begin_expert(layout);
        layout_add_roles(layout, MODEL_QKV, MODEL_MLP_OUT_NORM, PART_EXPERT, prefix);
    }
}

static void layout_add_block(struct model_layout *layout, uint64_t block)
{
    const struct model_config *c = &layout->config;
    int sparse = model_config_is_sparse(c, block);
    char prefix[PREFIX_BYTES];
    (void)snprintf(prefix, sizeof prefix, "%s%" PRIu64 ".",
                   c->architecture == MODEL_GPT2 ? "transformer.h." : "model.layers.", block);
    layout->blocks[block] = layout->n_layers;
    layout_begin_layer(layout, LAYER_BLOCK);
    layout->layers[layout->n_layers - 1].block = (uint32_t)block;
    layout_add_roles(layout, MODEL_QKV, MODEL_MLP_OUT_NORM, sparse ? PART_SPARSE_BLOCK : PART_BLOCK,
                     prefix);
    if (sparse)
        layout_add_experts(layout, block);
}

static void layout_add_layers(struct model_layout *layout)
{
    layout_begin_layer(layout, LAYER_EMBEDDING);
    layout_add_roles(layout, MODEL_EMBED, MODEL_POSITIONS, PART_MODEL, "");
    for (uint64_t block = 0; block < layout->config.n_layers; block++)
        layout_add_block(layout, block);
    layout_begin_layer(layout, LAYER_HEAD);
    layout_add_roles(layout, MODEL_FINAL_NORM, MODEL_HEAD, PART_MODEL, "");
    for (uint32_t l = 0; l < layout->n_layers; l += layout->layers[l].n_experts + 1)
        layout->group_elements_max =
            max_u64(layout->group_elements_max, model_group_elements(layout, l));
}

static uint64_t count_roles(const struct model_config *c, enum model_role from, enum model_role to,
                            enum part part)
{
    uint64_t n = 0;
    for (int role = (int)from; role <= (int)to; role++)
        n += (uint64_t)has_role(c, (enum model_role)role, part);
    CHECK(n <= MODEL_LAYER_TENSORS_MAX);
    return n;
}

/* The tensors that layout_add_layers() will add. */
static uint64_t layout_count_tensors(const struct model_config *c)
{
    uint64_t n_sparse = model_config_n_sparse(c);
    uint64_t block = count_roles(c, MODEL_QKV, MODEL_MLP_OUT_NORM, PART_BLOCK);
    uint64_t sparse = count_roles(c, MODEL_QKV, MODEL_MLP_OUT_NORM, PART_SPARSE_BLOCK);
    uint64_t expert = count_roles(c, MODEL_QKV, MODEL_MLP_OUT_NORM, PART_EXPERT);
    return count_roles(c, MODEL_EMBED, MODEL_POSITIONS, PART_MODEL) +
           (c->n_layers - n_sparse) * block + n_sparse * (sparse + c->n_experts * expert) +
           count_roles(c, MODEL_FINAL_NORM, MODEL_HEAD, PART_MODEL);
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
    const struct model_config *c = &layout->config;
    uint64_t n_layers = c->n_layers + 2 + model_config_n_sparse(c) * c->n_experts;
    uint64_t n_tensors = layout_count_tensors(c);
    CHECK(n_tensors <= UINT32_MAX); /* model_config_load() bounds n_layers far below */
    layout->layers = calloc(n_layers, sizeof *layout->layers);
    layout->blocks = calloc(c->n_layers, sizeof *layout->blocks);
    layout->tensors = calloc(n_tensors, sizeof *layout->tensors);
    layout->tensors_by_name = calloc(n_tensors, sizeof *layout->tensors_by_name);
    if (!layout->layers || !layout->blocks || !layout->tensors || !layout->tensors_by_name)
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
    free(layout->blocks);
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

/* The fused tensor that may hold the role, and the parts of it before this one. */
static enum model_role fused_role(const struct model_config *c, enum model_role role,
                                  uint64_t *before)
{
    uint64_t query = c->n_heads * c->head_dim, key = c->n_kv_heads * c->head_dim;
    const struct {
        enum model_role role, fused;
        uint64_t before;
    } parts[] = {
        {MODEL_Q, MODEL_QKV, 0},
        {MODEL_K, MODEL_QKV, query},
        {MODEL_V, MODEL_QKV, query + key},
        {MODEL_Q_BIAS, MODEL_QKV_BIAS, 0},
        {MODEL_K_BIAS, MODEL_QKV_BIAS, query},
        {MODEL_V_BIAS, MODEL_QKV_BIAS, query + key},
        {MODEL_GATE, MODEL_GATE_UP, 0},
        {MODEL_UP, MODEL_GATE_UP, c->intermediate_size},
    };
    *before = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (parts[i].role == role) {
            *before = parts[i].before;
            return parts[i].fused;
        }
    return role;
}

struct model_slice model_layer_slice(const struct model_layout *layout, uint32_t layer,
                                     enum model_role role)
{
    uint64_t before = 0;
    const struct model_tensor *tensor = model_layer_tensor(layout, layer, role);
    if (tensor == NULL)
        tensor = model_layer_tensor(layout, layer, fused_role(&layout->config, role, &before));
    if (tensor == NULL)
        return (struct model_slice){0};
    int columns = layout->config.transposed && tensor->dims == 2;
    return (struct model_slice){.tensor = tensor,
                                .offset = tensor->offset + before * (columns ? 1 : tensor->cols),
                                .stride = tensor->cols};
}

const char *model_tensor_base_name(const struct model_tensor *tensor)
{
    for (size_t i = 0; i < sizeof base_prefixes / sizeof base_prefixes[0]; i++) {
        size_t n = strlen(base_prefixes[i]);
        if (strncmp(tensor->name, base_prefixes[i], n) == 0)
            return tensor->name + n;
    }
    return NULL;
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
