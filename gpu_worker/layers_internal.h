/*
 * The layers from inside. layers.c plans and owns the memory; layers_block.c and layers_head.c are
 * the templates. One arena holds everything; layers_bytes() and layers_init() carve it with the
 * same code, so that the prediction is exact by construction.
 */
#ifndef GPU_WORKER_LAYERS_INTERNAL_H
#define GPU_WORKER_LAYERS_INTERNAL_H

#include "gpu_worker/layers.h"
#include "model/layout.h"

/* What backward needs of one (layer, microbatch). N = B T rows. */
struct layers_slot {
    compute_t *q;        /* (N, Hq D) after rope */
    compute_t *k, *v;    /* (N, Hk D), k after rope */
    compute_t *attended; /* (N, Hq D) */
    compute_t *middle;   /* (N, C) the residual stream after attention */
    compute_t *gate;     /* (N, F); backward turns it into its derivative */
    compute_t *up;       /* (N, F); the same */
    float *rstd_input;   /* (N) */
    float *rstd_post;    /* (N) */
    float *lse;          /* (B, Hq, T) */
};

struct layers {
    struct device *device;
    const struct model_layout *layout;
    struct layers_shape shape;
    uint64_t rows;       /* N = B T */
    uint64_t head_rows;  /* min(N, LAYERS_HEAD_ROWS) */
    uint64_t query_size; /* Hq D */
    uint64_t key_size;   /* Hk D */
    float scale;         /* of attention scores: 1/sqrt(D) */

    void *arena;
    struct layers_slot *slots; /* saved_slots, then the one for recomputation */
    float *cosine, *sine;      /* (context_max, D/2) */
    compute_t *normed;         /* (N, C) output of a norm, or its derivative */
    compute_t *wide;           /* (N, max(F, C, 2 Hq D + 2 Hk D)) */
    void *attention_scratch;
    float *norm_scratch;
    float *logits;     /* (head_rows, V) */
    double *row_loss;  /* (N) */
    double *host_loss; /* (N), in host memory */
};

/* The tensor's place in its layer's vector. */
const compute_t *layers_weight(const struct layers *layers, const compute_t *weights,
                               uint64_t layer, enum model_role role);
float *layers_gradient(const struct layers *layers, float *gradients, uint64_t layer,
                       enum model_role role);

struct device_attention layers_attention(const struct layers *layers,
                                         const struct layers_batch *batch);

#endif
