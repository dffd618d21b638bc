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
 * Layer 0 is the embedding, 1..n are the blocks, n+1 is the head (final norm, and lm_head unless
 * it is tied to the embedding: then its visits name the embedding's pages).
 * Within a block the tensors are in the order of transformers' state_dict: q, k, v, o, gate, up,
 * down, input norm, post-attention norm.
 */
#ifndef MODEL_LAYOUT_H
#define MODEL_LAYOUT_H

#include <stdint.h>

#include "model/config.h"

enum {
    MODEL_BLOCK_ELEMENTS = 4096, /* alignment of tensors; unit of the gradient norm and of decay */
    MODEL_TENSOR_NAME_BYTES = 128, /* with the terminating zero */
    MODEL_LAYER_TENSORS_MAX = 16,  /* a Llama block has 9 */
};

#define MODEL_PAGE_ELEMENTS_DEFAULT ((uint64_t)4 << 20)
#define MODEL_PAGE_ELEMENTS_MAX     ((uint64_t)1 << 30)

enum model_role {
    MODEL_EMBED,      /* (vocab_size, hidden_size) */
    MODEL_Q,          /* (n_heads * head_dim, hidden_size) */
    MODEL_K,          /* (n_kv_heads * head_dim, hidden_size) */
    MODEL_V,          /* (n_kv_heads * head_dim, hidden_size) */
    MODEL_O,          /* (hidden_size, n_heads * head_dim) */
    MODEL_GATE,       /* (intermediate_size, hidden_size) */
    MODEL_UP,         /* (intermediate_size, hidden_size) */
    MODEL_DOWN,       /* (hidden_size, intermediate_size) */
    MODEL_INPUT_NORM, /* (hidden_size) */
    MODEL_POST_NORM,  /* (hidden_size) */
    MODEL_FINAL_NORM, /* (hidden_size) */
    MODEL_HEAD,       /* (vocab_size, hidden_size) */
};

/* Row-major, y = x W^T as torch.nn.Linear: rows are outputs, cols are inputs. */
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

enum model_layer_kind { LAYER_EMBEDDING, LAYER_BLOCK, LAYER_HEAD };

struct model_layer {
    enum model_layer_kind kind;
    uint32_t first_tensor; /* index in layout.tensors */
    uint32_t n_tensors;
    uint64_t elements;   /* with padding, a multiple of 4096 */
    uint64_t first_page; /* index in layout.pages */
    uint32_t n_pages;
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
    uint32_t n_layers; /* config.n_layers + 2 */
    uint32_t n_tensors;
    uint64_t n_pages;
    struct model_layer *layers;
    struct model_tensor *tensors; /* in (layer, offset) order: the order of the weights hash */
    struct model_page *pages;     /* in (layer, index) order: the order of the state hash */
    uint32_t *tensors_by_name;    /* for model_layout_find() only */
    uint64_t parameters;          /* real ones */
    uint64_t elements;            /* with padding */
};

/*
 * `config` is one that model_config_load() accepted; page_elements must be 4096 x 2^k, at most
 * MODEL_PAGE_ELEMENTS_MAX. Errors: ERROR_USER for page_elements or for more pages than a layer can
 * number, ERROR_FAILED for memory. On error nothing is left to destroy.
 */
int model_layout_init(struct model_layout *layout, const struct model_config *config,
                      uint64_t page_elements);
void model_layout_destroy(struct model_layout *layout);

/* By Hugging Face name; NULL when the model has no such tensor. */
const struct model_tensor *model_layout_find(const struct model_layout *layout, const char *name);

/* The tensor of that role in that layer, or NULL. A tied model has no MODEL_HEAD anywhere. */
const struct model_tensor *model_layer_tensor(const struct model_layout *layout, uint32_t layer,
                                              enum model_role role);

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
