/*
 * The layers from inside. layers.c plans and owns the memory; layers_block.c and layers_head.c are
 * the templates. One arena holds everything; layers_bytes() and layers_init() carve it with the
 * same code, so that the prediction is exact by construction.
 */
#ifndef GPU_WORKER_LAYERS_INTERNAL_H
#define GPU_WORKER_LAYERS_INTERNAL_H

#include "gpu_worker/layers.h"
#include "model/layout.h"

/* What backward needs of one (layer, microbatch). N = B T rows. NULL: not in this model. */
struct layers_slot {
    compute_t *q;             /* (N, Hq D) as attention reads it */
    compute_t *k, *v;         /* (N, Hk D), the same */
    compute_t *q_raw, *k_raw; /* q and k before their norms: qk_norm */
    compute_t *attended;      /* (N, Hq D) */
    compute_t *attention_out; /* (N, C) before its norm: post_norms */
    compute_t *middle;        /* (N, C) the residual stream after attention */
    compute_t *gate;    /* (N, F); backward turns it into its derivative; not in a plain MLP */
    compute_t *up;      /* (N, F); the same */
    compute_t *mlp_out; /* (N, C) before its norm: post_norms */
    /* Sparse blocks; gate and up are (N K, F) then, row i that of the slot slots[i]. */
    compute_t *router_logits; /* (N, E); backward turns them into their derivative */
    float *router_weights;    /* (N, K) */
    int32_t *experts, *slots; /* (N, K), (N K) */
    int32_t *first;           /* (E + 1) */
    float *rstd_input;        /* (N) */
    float *rstd_q, *rstd_k;   /* (N Hq), (N Hk) */
    float *rstd_attention_out, *rstd_post, *rstd_mlp_out; /* (N) */
    float *lse;                                           /* (B, Hq, T) */
};

struct layers {
    struct device *device;
    const struct model_layout *layout;
    struct layers_shape shape;
    uint64_t rows;         /* N = B T */
    uint64_t head_rows;    /* min(N, LAYERS_HEAD_ROWS) */
    uint64_t query_size;   /* Hq D */
    uint64_t key_size;     /* Hk D */
    uint64_t inner_max;    /* F of the widest MLP or expert */
    uint64_t gate_size;    /* elements of a slot's gate, and of its up, per row */
    float scale;           /* of attention scores: 1/sqrt(D), unless the model says otherwise */
    enum device_norm norm; /* of all norms of the model */
    enum device_activation activation;

    void *arena;
    struct layers_slot *slots; /* saved_slots, then the one for recomputation */
    /* (context_max, rope_dim / 2) for blocks that see all and that slide; the same array twice
     * where they do not differ */
    float *cosine[MODEL_REACHES], *sine[MODEL_REACHES];
    compute_t *normed; /* (N, C) output of a norm, or its derivative */
    compute_t *wide;   /* (N, max(F, C, 2 Hq D + 2 Hk D)) */
    compute_t *branch; /* (N, C) derivative of what attention or MLP add, before their norm */
    /* Sparse blocks only. */
    compute_t *mixed;       /* (N, C) sum of the experts' outputs; derivative of what they read */
    compute_t *expert_in;   /* (N, C) the rows of one expert */
    compute_t *expert_out;  /* (N, C) */
    float *probabilities;   /* (N, E) */
    float *router_dweights; /* (N, K) */
    int32_t *host_first;    /* (E + 1), in host memory */
    double *host_balance;   /* (2 E), the same */
    float *host_slope;      /* (E) */
    void *attention_scratch;
    float *norm_scratch;
    float *logits;     /* (head_rows, V) */
    double *row_loss;  /* (N) */
    double *host_loss; /* (N), in host memory */
};

/* A weight's place in its layer's vector; NULL when the model has none of the role. */
const compute_t *layers_weight(const struct layers *layers, const compute_t *weights,
                               uint64_t layer, enum model_role role);
float *layers_gradient(const struct layers *layers, float *gradients, uint64_t layer,
                       enum model_role role);

/* How the weight of a linear lies there. */
enum device_layout layers_linear_layout(const struct layers *layers);
uint64_t layers_linear_stride(const struct layers *layers, uint64_t layer, enum model_role role);

/* `layer` is a block's. */
struct device_attention layers_attention(const struct layers *layers,
                                         const struct layers_batch *batch, uint64_t layer);

#endif
