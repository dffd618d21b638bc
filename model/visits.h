/*
 * The visiting order: which layers' pages are lent to the device, when, and what for.
 *
 * io_worker (which lends the pages) and gpu_worker (which expects them) both walk this list; that
 * they agree without a message is what makes prefetching exact. It is a pure function of the layout
 * and of the activation checkpointing mode.
 *
 *     training, n = 3 blocks, every-2:            F forward  R re-forward  B backward
 *     F0 F1 F2 F3 HEAD4  R3 B3  R1 R2 B2 B1  E0
 *
 * The visits of one step are the same every step. Activation checkpointing:
 *     1 (full)   every block's input is kept; a backward visit recomputes inside itself
 *     N (every)  the input of each group's first block is kept; groups are [1..N], [N+1..2N], ...
 *     0 (none)   every intermediate is kept; nothing is recomputed
 */
#ifndef MODEL_VISITS_H
#define MODEL_VISITS_H

#include <stdint.h>

#include "model/layout.h"

enum visit_kind {
    VISIT_FORWARD,   /* layer 0: look the embeddings up; blocks: x = block(x) */
    VISIT_REFORWARD, /* a block again, from the checkpoint of its group's first block */
    VISIT_HEAD,      /* final norm and head: loss; in training also their gradients and dX */
    VISIT_BACKWARD,  /* a block's gradients and dX */
    VISIT_EMBEDDING_BACKWARD, /* the embedding's gradient (plus the head's share when tied) */
};

/* What a visit leaves behind for its layer's backward visit. */
enum visit_keeps {
    VISIT_KEEPS_NOTHING,
    VISIT_KEEPS_INPUT, /* the layer's input: an activation checkpoint */
    VISIT_KEEPS_ALL,   /* all intermediates that the backward visit needs */
};

struct visit {
    enum visit_kind kind;
    uint32_t layer;
    uint32_t block;     /* blocks: 1..n; else 0 */
    uint32_t n_sources; /* 0..2 */
    uint32_t
        sources[2]; /* layers whose pages, and those of their experts, are lent, in this order */
    uint32_t publishes; /* 1: the gradient pages of layer and experts leave after this visit */
    enum visit_keeps keeps;
};

enum { VISITS_CHECKPOINT_NONE = 0, VISITS_CHECKPOINT_FULL = 1 };

struct visits {
    uint64_t n_visits;
    struct visit *visits;
    uint64_t n_forward; /* the first n_forward visits form the forward window, the head included */
    uint64_t n_pages;   /* pages lent in one walk over all visits */
};

/* The visits of a training step. Errors: ERROR_FAILED for memory. */
int visits_init(struct visits *visits, const struct model_layout *layout,
                uint32_t checkpoint_every);

/* The visits of an evaluation: forward, ending with HEAD; nothing kept, nothing published. */
int visits_forward_only(struct visits *visits, const struct model_layout *layout);

void visits_destroy(struct visits *visits);

/* How many pages the visit is lent: those of its sources. */
uint64_t visit_n_pages(const struct model_layout *layout, const struct visit *visit);

/* The k-th page lent to the visit, k < visit_n_pages(); an index in layout.pages. */
uint64_t visit_page(const struct model_layout *layout, const struct visit *visit, uint64_t k);

/* "forward", "reforward", "head", "backward", "embedding_backward". */
const char *visit_kind_name(enum visit_kind kind);

#endif
