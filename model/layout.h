/*
 * config -> layers -> tensors -> pages (DESIGN section 2).
 *
 * Every layer is one flat vector of parameters. Its tensors lie in it one after the other, each
 * starting at a multiple of 4096 elements; the gaps are padding, zero for ever. The vector is cut
 * into pages of `page_elements`; the last one of a layer is short (but a multiple of 4096).
 *
 *     layer   |  q_proj      |k_proj|p|v_proj|p| ...            |norm|p|     p = padding
 *     blocks  |4096|4096|4096|4096|4096|4096|4096| ...                       norms, decay, hashing
 *     pages   |   page 0          |   page 1          | ...     | last |     paging, I/O, versions
 *
 * A tensor may cross pages; a page never crosses layers. Page size changes which page an element is
 * in and nothing else: offsets in the layer, 4096-blocks and tensors are the same for all of them.
 *
 * Layer 0 is the embedding; then come the blocks, a sparse one followed by a layer for each of its
 * experts; the last is the head (final norm, and lm_head unless it is tied to the embedding: then
 * its visits name the embedding's pages). So no two experts share a page.
 * Within a layer the tensors are, as far as the model has them, in the order of enum model_role.
 *
 * A block and its experts are a group: computed and differentiated together, their vectors one
 * after the other in one buffer. Any other layer is a group of its own.
 */
#ifndef MODEL_LAYOUT_H
#define MODEL_LAYOUT_H

#include <stdint.h>

#include "model/config.h"

enum {
    MODEL_BLOCK_ELEMENTS = 4096, /* alignment of tensors; unit of the gradient norm and of decay */
    MODEL_TENSOR_NAME_BYTES = 128, /* with the terminating zero */
    MODEL_LAYER_TENSORS_MAX = 24,  /* a Llama block has 9, with all biases 16; Gemma 3's 17 */
};

#define MODEL_PAGE_ELEMENTS_DEFAULT ((uint64_t)4 << 20)
#define MODEL_PAGE_ELEMENTS_MAX     ((uint64_t)1 << 30)

/*
 * What a tensor is for. Shapes are those of torch.nn.Linear, (out, in); with config.transposed the
 * matrices of blocks are (in, out). Q = n_heads * head_dim, K = n_kv_heads * head_dim, C =
 * hidden_size, F = intermediate_size or, in an expert, expert_size.
 */
enum model_role {
    MODEL_EMBED,              /* (vocab_size, C) */
    MODEL_POSITIONS,          /* (max_position, C) */
    MODEL_QKV,                /* (Q + 2 K, C): the rows of q, then of k, then of v */
    MODEL_QKV_BIAS,           /* (Q + 2 K) */
    MODEL_Q,                  /* (Q, C) */
    MODEL_Q_BIAS,             /* (Q) */
    MODEL_K,                  /* (K, C) */
    MODEL_K_BIAS,             /* (K) */
    MODEL_V,                  /* (K, C) */
    MODEL_V_BIAS,             /* (K) */
    MODEL_O,                  /* (C, Q) */
    MODEL_O_BIAS,             /* (C) */
    MODEL_Q_NORM,             /* (head_dim) */
    MODEL_K_NORM,             /* (head_dim) */
    MODEL_ROUTER,             /* (n_experts, C) */
    MODEL_GATE_UP,            /* (2 F, C): the rows of gate, then of up */
    MODEL_GATE,               /* (F, C) */
    MODEL_GATE_BIAS,          /* (F) */
    MODEL_UP,                 /* (F, C) */
    MODEL_UP_BIAS,            /* (F) */
    MODEL_DOWN,               /* (C, F) */
    MODEL_DOWN_BIAS,          /* (C) */
    MODEL_INPUT_NORM,         /* (C), before attention */
    MODEL_INPUT_NORM_BIAS,    /* (C) */
    MODEL_POST_NORM,          /* (C), after attention: before the MLP */
    MODEL_POST_NORM_BIAS,     /* (C) */
    MODEL_ATTENTION_OUT_NORM, /* (C), of what attention adds (config.post_norms) */
    MODEL_MLP_OUT_NORM,       /* (C), of what the MLP adds */
    MODEL_FINAL_NORM,         /* (C) */
    MODEL_FINAL_NORM_BIAS,    /* (C) */
    MODEL_HEAD,               /* (vocab_size, C) */
    MODEL_ROLES,
};

/* Row-major. */
struct model_tensor {
    char name[MODEL_TENSOR_NAME_BYTES]; /* as in the Hugging Face state_dict */
    uint32_t layer;
    uint32_t dims;   /* 1 or 2 */
    uint64_t offset; /* elements from the start of the layer, a multiple of 4096 */
    uint64_t rows;   /* dims == 1: the length */
    uint64_t cols;   /* dims == 1: 1 */
    uint64_t elements;
    enum model_role role;
};

enum model_layer_kind { LAYER_EMBEDDING, LAYER_BLOCK, LAYER_EXPERT, LAYER_HEAD };

struct model_layer {
    enum model_layer_kind kind;
    uint32_t first_tensor; /* index in layout.tensors */
    uint32_t n_tensors;
    uint64_t elements;   /* with padding, a multiple of 4096 */
    uint64_t first_page; /* index in layout.pages */
    uint32_t n_pages;
    uint32_t group;     /* the first layer of its group: the block of an expert, else itself */
    uint32_t n_experts; /* layers of experts that follow in the group; of a block only */
    uint32_t block;     /* BLOCK, EXPERT: number of the block, from 0 */
    uint64_t start;     /* elements from the start of the group */
};

struct model_page {
    uint32_t layer;
    uint32_t index;    /* in the layer */
    uint64_t offset;   /* elements from the start of the layer: index * page_elements */
    uint64_t elements; /* page_elements, or less for the last of a layer; a multiple of 4096 */
};

struct model_layout {
    struct model_config config;
    uint64_t page_elements;
    uint32_t n_layers; /* config.n_layers + 2 + experts */
    uint32_t n_tensors;
    uint64_t n_pages;
    struct model_layer *layers;
    struct model_tensor *tensors; /* in (layer, offset) order: the order of the weights hash */
    struct model_page *pages;     /* in (layer, index) order: the order of the state hash */
    uint32_t *blocks;             /* [config.n_layers]: the layer of each block */
    uint32_t *tensors_by_name;    /* for model_layout_find() only */
    uint64_t parameters;          /* real ones */
    uint64_t elements;            /* with padding */
    uint64_t group_elements_max;  /* of the largest group */
};

/*
 * `config` is one that model_config_load() accepted; page_elements must be 4096 x 2^k, at most
 * MODEL_PAGE_ELEMENTS_MAX. Errors: ERROR_USER for page_elements or for more pages than a layer can
 * number, ERROR_FAILED for memory. On error nothing is left to destroy.
 */
int model_layout_init(struct model_layout *layout, const struct model_config *config,
                      uint64_t page_elements);
void model_layout_destroy(struct model_layout *layout);

/* Elements and pages of the group that begins with `layer`. Its pages are consecutive. */
static inline uint64_t model_group_elements(const struct model_layout *layout, uint32_t layer)
{
    const struct model_layer *last = &layout->layers[layer + layout->layers[layer].n_experts];
    return last->start + last->elements;
}
static inline uint64_t model_group_pages(const struct model_layout *layout, uint32_t layer)
{
    const struct model_layer *last = &layout->layers[layer + layout->layers[layer].n_experts];
    return last->first_page + last->n_pages - layout->layers[layer].first_page;
}

/* By Hugging Face name; NULL when the model has no such tensor. */
const struct model_tensor *model_layout_find(const struct model_layout *layout, const char *name);

/* The tensor of that role in that layer, or NULL. A tied model has no MODEL_HEAD anywhere. */
const struct model_tensor *model_layer_tensor(const struct model_layout *layout, uint32_t layer,
                                              enum model_role role);

/* Where a weight lies that may be a part of a fused tensor. */
struct model_slice {
    const struct model_tensor *tensor; /* NULL: the model has no such weight */
    uint64_t offset;                   /* elements from the start of the layer */
    uint64_t stride;                   /* elements from one row to the next */
};

/* Like model_layer_tensor(), but MODEL_Q, K, V and their biases, MODEL_GATE and UP are found inside
 * MODEL_QKV and MODEL_GATE_UP too: some rows of the matrix, or with config.transposed columns. */
struct model_slice model_layer_slice(const struct model_layout *layout, uint32_t layer,
                                     enum model_role role);

/*
 * The name without what transformers' base class puts before it ("model.", "transformer."), as
 * checkpoints saved from the base class have it; NULL when the name has no such prefix.
 */
const char *model_tensor_base_name(const struct model_tensor *tensor);

/* A run of `count` elements that page and tensor have in common. */
struct model_part {
    uint32_t tensor;       /* index in layout.tensors */
    uint64_t tensor_start; /* elements from the start of the tensor */
    uint64_t page_start;   /* elements from the start of the page */
    uint64_t count;
};

/*
 * The real parameters in a page, in order, padding left out. Returns their number, at most
 * MODEL_LAYER_TENSORS_MAX:
 *
 *     struct model_part parts[MODEL_LAYER_TENSORS_MAX];
 *     uint32_t n = model_page_parts(layout, &layout->pages[p], parts);
 *     for (uint32_t i = 0; i < n; i++)
 *         use(&frame[parts[i].page_start], parts[i].count, &layout->tensors[parts[i].tensor]);
 */
uint32_t model_page_parts(const struct model_layout *layout, const struct model_page *page,
                          struct model_part parts[MODEL_LAYER_TENSORS_MAX]);

/*
 * 1 when weight decay must leave the tensor alone: it has one dimension, or its name matches one of
 * the `n_patterns` fnmatch(3) patterns ("*.embed_tokens.weight"); `*` matches dots.
 */
int model_tensor_is_exempt(const struct model_tensor *tensor, const char *const *patterns,
                           uint32_t n_patterns);

/*
 * per_block: (page->elements / 4096), 1 where the 4096-block decays, 0 where it is exempt. No block
 * holds two tensors, so that one byte per block says it all.
 */
void model_page_decay_bits(const struct model_layout *layout, const struct model_page *page,
                           const char *const *patterns, uint32_t n_patterns, uint8_t *per_block);

#endif
