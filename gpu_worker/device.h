/*
 * The device: one table of about forty operations over which the layer templates (layers.h) are
 * written once. device_cpu is the reference implementation, the default without a GPU and the
 * oracle in tests; device_cuda fills the same table.
 *
 * Memory. Two kinds of arrays live on a device:
 *   float *      f32 whatever the compute dtype: gradients, log-sum-exps, logits. Addresses may be
 *                offset by elements with ordinary arithmetic, but only operations dereference them.
 *   compute_t *  an array in the compute dtype: weights, activations, dX. The type is incomplete on
 *                purpose, so that nobody outside a device can index it; device_at() offsets it.
 * The CPU device stores both as f32; with DEVICE_BF16 every operation rounds what it stores into a
 * compute_t array to bfloat16, nearest even, at the points where transformers does (DESIGN 9: norm
 * before weight, silu before multiply, residual add, rope with its cos and sin, dX of each
 * operation). Scores, softmax, cross entropy, logits and weight gradients stay f32. In formulas
 * below, round() is that rounding; in DEVICE_F32 it does nothing.
 *
 * Every operation is deterministic: its result depends on its arguments and on the numeric lineage
 * (device_lineage) and on nothing else; not on the thread count, not on where a buffer lies.
 *
 * Operations are enqueued in order. The host may read results only through copy_out or after
 * synchronize, and may reuse the host side of a copy_in once synchronize returned. On the CPU
 * device every operation has completed when it returns.
 *
 * Shapes: all arrays are dense and row-major. R rows are the B x T tokens of a microbatch; C hidden
 * width; Hq, Hk query and key/value heads; D head width; F MLP width; V vocabulary; E experts, K of
 * them per token. rows may be 0 (an expert without tokens): then nothing is read or written, and
 * what is added to stays as it is.
 */
#ifndef GPU_WORKER_DEVICE_H
#define GPU_WORKER_DEVICE_H

#include <stddef.h>
#include <stdatomic.h>
#include <stdint.h>

enum device_dtype { DEVICE_F32, DEVICE_BF16 };

typedef struct device_compute compute_t; /* one element in the compute dtype; never complete */

struct device_ops;

struct device {
    const struct device_ops *ops;
    enum device_dtype dtype;
    uint64_t compute_bytes; /* bytes of one compute_t in device memory: 4 on the CPU device */
};

/* How a linear layer's weight lies in memory. Both are read as they are: nothing is transposed. */
enum device_layout {
    DEVICE_OUT_IN, /* (out, in): torch.nn.Linear */
    DEVICE_IN_OUT, /* (in, out): GPT-2's Conv1D */
};

/*
 * y = x W^T + b and its derivatives. x: (rows, in), y: (rows, out). W may be some rows of a wider
 * matrix that several layers share (offset w; Phi-3's qkv in DEVICE_OUT_IN), or some of its columns
 * (offset w and give the stride; GPT-2's c_attn in DEVICE_IN_OUT).
 */
struct device_linear {
    uint64_t rows, in, out;
    enum device_layout layout;
    uint64_t stride;       /* elements from one row of W to the next; 0: dense */
    const compute_t *bias; /* (out) or NULL; linear_forward alone reads it */
};

/*
 * Attention over packed rows. q: (B,T,Hq,D), k and v: (B,T,Hk,D); query head h reads key head
 * h / (Hq / Hk). Key position k is visible to query position q of the same row exactly if
 * document_start[b][q] <= k <= q and, with a window, q - k < window. Scores are scaled by 1/sqrt(D)
 * unless the model says otherwise; with a softcap they become softcap tanh(score scale / softcap).
 */
struct device_attention {
    uint64_t batch, seq_len, query_heads, key_heads, head_dim;
    float scale;
    const int32_t *document_start; /* (B,T) i32, index in the row of the document's first token */
    uint64_t window;               /* keys that a query sees, itself included; 0: all */
    float softcap;                 /* 0: none */
};

/*
 * Attention against a key/value cache: row r is the query at position[r] of sequence[r], and sees
 * keys 0..position[r] of its sequence, or the last `window` of them. cache_k, cache_v: (sequences,
 * context, Hk, D).
 */
struct device_decode {
    uint64_t rows, context, query_heads, key_heads, head_dim;
    float scale;
    const int32_t *sequence; /* (rows) i32 */
    const int32_t *position; /* (rows) i32 */
    uint64_t window;         /* as in device_attention */
    float softcap;
};

/* The first `rotated` elements of a head turn, the others stay; P = rotated. */
struct device_rope {
    uint64_t rows, heads, head_dim;
    const float *cosine, *sine; /* (positions, P/2) f32, already rounded to bf16 in DEVICE_BF16 */
    const int32_t *position;    /* (rows) i32 */
    uint64_t rotated;           /* even, at most head_dim; 0: all of it */
};

/* FORWARD rotates by the angle; BACKWARD by minus the angle (the transpose of the rotation). */
enum device_direction { DEVICE_FORWARD, DEVICE_BACKWARD };

/* SET overwrites the output; ADD adds to it (and then rounds, where the output is compute_t). */
enum device_write { DEVICE_SET, DEVICE_ADD };

enum device_loss { DEVICE_LOSS_ONLY, DEVICE_LOSS_AND_GRADIENT };

/* How host data is laid out: f32, or bfloat16 as the high half of an f32. */
enum device_host_dtype { DEVICE_HOST_F32, DEVICE_HOST_BF16 };

/*
 * x = table[token], or with a scale (Gemma: sqrt(C)) round(table[token] round(scale)), or with
 * learned positions (GPT-2) round(table[token] + position_table[position]).
 */
struct device_embedding {
    uint64_t rows, width;
    const int32_t *tokens;    /* (R) i32 */
    const int32_t *positions; /* (R) i32; NULL: no learned positions */
    float scale;              /* 0: none; not together with positions */
    int64_t skipped_token; /* backward: its rows get no gradient (torch's padding_idx); -1: none */
};

/*
 * The norms, of rows of C elements; per head: rows = R Hq, width = D. mean() is over the row.
 *
 *     RMSNORM        y = w round(x s),             s = 1/sqrt(mean(x^2) + eps)         Llama, Qwen3
 *     RMSNORM_PLUS   y = round(x s (1 + w)),       the same s                          Gemma
 *     LAYERNORM      y = round((x - m) s w + b),   s = 1/sqrt(mean((x - m)^2) + eps)   GPT-2
 *
 * with m = mean(x) (Zhang and Sennrich 2019; Ba, Kiros and Hinton 2016). m and s are f32 in
 * backward, too, as in torch's CUDA kernel; its CPU kernel keeps them in bf16.
 */
enum device_norm { DEVICE_RMSNORM, DEVICE_RMSNORM_PLUS, DEVICE_LAYERNORM };

/* With a residual, y = round(residual + norm): Gemma's norms behind attention and MLP. */
struct device_norm_forward {
    enum device_norm norm;
    float epsilon;
    uint64_t rows, width;
    compute_t *y;              /* (R,C); may be x or residual */
    float *rstd;               /* (R) f32: s */
    const compute_t *x;        /* (R,C) */
    const compute_t *w;        /* (C) */
    const compute_t *bias;     /* (C); NULL: none. LAYERNORM only */
    const compute_t *residual; /* (R,C) or NULL */
};

/* dx = [residual +] round(norm backward of dy); dw, dbias +=; y_again, if not NULL, gets the
 * forward's norm once more (without the forward's residual), the same bits. */
struct device_norm_backward {
    enum device_norm norm;
    compute_t *dx;             /* (R,C); may be residual or dy */
    float *dw;                 /* (C) f32, added to, by a fixed tree over rows */
    float *dbias;              /* (C) f32, the same; NULL: none. LAYERNORM only */
    compute_t *y_again;        /* (R,C) or NULL; may be dy or x */
    const compute_t *dy;       /* (R,C) */
    const compute_t *x;        /* (R,C) */
    const compute_t *w;        /* (C) */
    const compute_t *bias;     /* (C) of the forward, for y_again; or NULL */
    const float *rstd;         /* (R) f32 of the forward */
    const compute_t *residual; /* (R,C) or NULL */
    float *scratch;            /* device_norm_scratch(norm, rows, width) f32 */
    uint64_t rows, width;
};

/* Rows per partial sum of the gradients of norm weights and biases: a constant of the lineage. */
enum { DEVICE_NORM_ROWS = 64 };

static inline uint64_t device_norm_scratch(enum device_norm norm, uint64_t rows, uint64_t width)
{
    uint64_t sums = norm == DEVICE_LAYERNORM ? 2 : 1;
    return sums * ((rows + DEVICE_NORM_ROWS - 1) / DEVICE_NORM_ROWS) * width;
}

struct device_weight_gradient {
    float *dw;           /* (out,in) or (in,out) f32, added to */
    const compute_t *dy; /* (R,out) */
    uint64_t out;
    enum device_layout layout; /* of dw, as in device_linear */
    uint64_t stride;           /* the same */
};

struct device_attention_backward {
    compute_t *dq, *dk, *dv; /* as q, k, v; not the same arrays */
    const compute_t *dout;   /* (B,T,Hq,D) */
    const compute_t *out;    /* (B,T,Hq,D) of the forward */
    const float *lse;        /* (B,Hq,T) f32 of the forward */
    const compute_t *q, *k, *v;
    void *scratch; /* attention_scratch_bytes() */
};

struct device_decode_arrays {
    compute_t *out;               /* (rows,Hq,D) */
    compute_t *cache_k, *cache_v; /* (sequences,context,Hk,D) */
    const compute_t *q, *k, *v;
};

/*
 * f, plain: y = f(gate); gated: y = round(f(gate)) * up. f is rounded once, except GELU_NEW, which
 * transformers computes operation by operation: its bf16 bits are those of that.
 */
enum device_activation {
    DEVICE_SILU,      /* x / (1 + e^-x) */
    DEVICE_GELU_NEW,  /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), each operation rounded */
    DEVICE_GELU_TANH, /* the same function, rounded once: gelu_pytorch_tanh */
    DEVICE_GELU,      /* x Phi(x), Phi the normal distribution (Hendrycks and Gimpel 2016) */
};

/* All arrays: (elements). */
struct device_activation_forward {
    enum device_activation activation;
    uint64_t elements;
    compute_t *y; /* may be gate or up */
    const compute_t *gate;
    const compute_t *up; /* NULL: plain */
};

/* gate may be dgate, up dup, dy y or dgate. */
struct device_activation_backward {
    enum device_activation activation;
    uint64_t elements;
    compute_t *dgate;
    compute_t *dup; /* gated only */
    compute_t *y;   /* the forward's y once more, same bits; NULL: not wanted */
    const compute_t *dy, *gate;
    const compute_t *up; /* NULL: plain */
};

struct device_cross_entropy {
    uint64_t rows, vocabulary;
    float scale;   /* 1 / number of labelled tokens of the whole step */
    float softcap; /* of the logits, which softcap() has capped; 0: none */
};

/*
 * Mixture of experts (Shazeer et al. 2017; Mixtral, Qwen3-MoE). The router's logits (R,E) come from
 * a linear layer. p = softmax(logits); a token goes to the K experts with the largest p, ties to
 * the lower index, with weights p_k, or p_k / sum of the K.
 *
 * A slot is row * K + k: one token's place with one of its experts. Each expert works on the rows
 * of its own slots, gathered; an expert is an ordinary MLP over them:
 *
 *     router_forward(weights, experts, slots, first);      first to the host
 *     zero(out)
 *     for each expert e, upwards:                          n = first[e + 1] - first[e]
 *         expert_gather(xe, x, slots + first[e], n)
 *         ye = MLP_e(xe)
 *         expert_scatter(out, ye, weights, slots + first[e], n)
 *     accumulate(residual, out)
 *
 *     zero(dx)
 *     for each expert e, downwards:                        as autograd's order of additions
 *         expert_gather(xe, x, ...);  ye = MLP_e(xe) again
 *         expert_scatter_backward(dye, dweights, dout, ye, weights, ...)
 *         dxe = MLP_e backward (dye)
 *         expert_scatter(dx, dxe, NULL, ...)
 *     router_backward(dlogits, dweights, ...)
 *     linear_backward_input(dx, DEVICE_ADD, dlogits)
 *
 * As a token meets an expert at most once, the order of additions to a row is that of the experts.
 * The roundings are those of transformers' "eager" experts; its "grouped_mm" rounds the sum over a
 * token's experts once.
 */
enum device_router_scale {
    DEVICE_ROUTER_AS_IS,      /* weights p_k */
    DEVICE_ROUTER_NORMALIZED, /* weights p_k / sum of the K (norm_topk_prob) */
};

/* Mixtral multiplies by f32 weights, Qwen3-MoE by weights in the compute dtype. */
enum device_router_round { DEVICE_ROUTER_F32, DEVICE_ROUTER_ROUNDED };

struct device_router {
    uint64_t rows, experts, top_k, width;
    enum device_router_scale scale;
    enum device_router_round round;
};

struct device_router_forward {
    const compute_t *logits; /* (R,E) */
    float *probabilities;    /* (R,E) f32: p */
    float *weights;          /* (R,K) f32, largest first */
    int32_t *experts;        /* (R,K) i32 */
    int32_t *slots;          /* (R K) i32, sorted by expert, then by row */
    int32_t *first;  /* (E + 1) i32: expert e has slots[first[e]] to slots[first[e + 1] - 1] */
    double *balance; /* (2,E) f64, added to: slots of each expert, sum of its p; or NULL */
};

/*
 * balance_slope (E) f32, or NULL: derivative of the loss by each row's p_e, beside the weights. For
 * transformers' load balancing loss (Fedus et al. 2021, equations 4 to 6), over all layers and
 * rows,
 *
 *     loss = coefficient E sum_e (slots_e / N) (sum of p_e / N),   N = rows counted, of all layers
 *
 * it is coefficient E slots_e / N^2: slots are counted, not differentiated. p is f32 here as in the
 * router; transformers takes this softmax in the logits' dtype.
 */
struct device_router_backward {
    compute_t *dlogits;      /* (R,E); round(balance part) + round(weights part); may be logits */
    const float *dweights;   /* (R,K) f32 */
    const compute_t *logits; /* (R,E) */
    const int32_t *experts;  /* (R,K) i32 of the forward */
    const float *balance_slope;
};

/* Given dto of to += round(from w): dfrom = round(dto w), dweights[slot] = sum(dto from). */
struct device_expert_scatter_backward {
    compute_t *dfrom;      /* (n,C); may be from */
    float *dweights;       /* (R,K) f32: those of the n slots are set */
    const compute_t *dto;  /* (R,C) */
    const compute_t *from; /* (n,C) of the forward */
    const float *weights;  /* (R,K) f32 */
    const int32_t *slots;  /* (n) i32 */
    uint64_t n;
};

struct device_ops {
    /* ---- memory ---- */

    /* Returns device memory of at least `bytes`, aligned to 64, or NULL with an error set
     * (ERROR_FIT). Released by `free`, which accepts NULL. Uses device_alloc_bytes() bytes. */
    void *(*alloc)(struct device *, uint64_t bytes);
    void (*free)(struct device *, void *memory);
    void (*copy_in)(struct device *, void *to_device, const void *from_host, uint64_t bytes);
    void (*copy_out)(struct device *, void *to_host, const void *from_device, uint64_t bytes);
    void (*copy)(struct device *, void *to_device, const void *from_device, uint64_t bytes);
    void (*zero)(struct device *, void *memory, uint64_t bytes);
    void (*synchronize)(struct device *);

    /* Host weights -> device. bf16 is expanded exactly; f32 into DEVICE_BF16 is rounded. */
    void (*load)(struct device *, compute_t *to, const void *from_host, enum device_host_dtype from,
                 uint64_t elements);
    /* Device -> host in the given dtype. A DEVICE_BF16 array leaves as bf16 without loss. */
    void (*store)(struct device *, void *to_host, enum device_host_dtype to, const compute_t *from,
                  uint64_t elements);
    /* to += from, f32: the tied embedding's head share plus embedding share. */
    void (*add)(struct device *, float *to, const float *from, uint64_t elements);
    /* to = round(to + from): residual streams. */
    void (*accumulate)(struct device *, compute_t *to, const compute_t *from, uint64_t elements);

    /* ---- embedding: table (V,C), position_table (positions,C) or NULL, x (R,C) ---- */
    void (*embedding_forward)(struct device *, compute_t *x, const compute_t *table,
                              const compute_t *position_table, const struct device_embedding *);
    /* dtable += scatter(dx), rows added in token order; with a scale, of round(dx round(scale)).
     * dposition_table, with learned positions, += scatter(dx) by position, rows in token order. */
    void (*embedding_backward)(struct device *, float *dtable, float *dposition_table,
                               const compute_t *dx, const struct device_embedding *);

    /* ---- norms ---- */
    void (*norm_forward)(struct device *, const struct device_norm_forward *);
    void (*norm_backward)(struct device *, const struct device_norm_backward *);

    /* ---- linear ---- */
    /* y = round(x W^T [+ b]), or with `residual` (R,out) not NULL: y = round(residual + that); y is
     * not residual. */
    void (*linear_forward)(struct device *, compute_t *y, const compute_t *x, const compute_t *w,
                           const compute_t *residual, struct device_linear);
    /* dx = dy W, or dx += dy W */
    void (*linear_backward_input)(struct device *, compute_t *dx, enum device_write,
                                  const compute_t *dy, const compute_t *w, struct device_linear);
    /* dw[i] += dy[i]^T x for each of n linear layers that share rows and x (q, k, v; gate, up) */
    void (*linear_backward_weight)(struct device *, const struct device_weight_gradient *,
                                   uint64_t n, const compute_t *x, uint64_t rows, uint64_t in);
    /* dbias (out) f32 += column sums of dy (rows,out), DEVICE_NORM_ROWS rows at a time */
    void (*linear_backward_bias)(struct device *, float *dbias, const compute_t *dy, uint64_t rows,
                                 uint64_t out);

    /* ---- rotary embedding, in place; halves paired as in transformers (i, i + P/2) ---- */
    void (*rope)(struct device *, compute_t *x, struct device_rope, enum device_direction);

    /* ---- attention (tiled, online softmax; never T x T) ---- */
    /* out (B,T,Hq,D); lse (B,Hq,T) f32: log of the sum of exp of each query's scaled scores */
    void (*attention_forward)(struct device *, compute_t *out, float *lse, const compute_t *q,
                              const compute_t *k, const compute_t *v, struct device_attention);
    void (*attention_backward)(struct device *, const struct device_attention_backward *,
                               struct device_attention);
    /* Bytes of scratch that attention_backward needs for this shape. */
    uint64_t (*attention_scratch_bytes)(const struct device *, struct device_attention);
    /* Puts k, v (rows,Hk,D) into the caches, then out (rows,Hq,D) = attention of q over them. */
    void (*attention_decode)(struct device *, const struct device_decode_arrays *,
                             struct device_decode);

    /* ---- MLP: activations, plain and gated ---- */
    void (*activation_forward)(struct device *, const struct device_activation_forward *);
    /* Given dy: dgate, gated also dup, and y once more. */
    void (*activation_backward)(struct device *, const struct device_activation_backward *);

    /* ---- mixture of experts; what calls what: struct device_router ---- */
    void (*router_forward)(struct device *, const struct device_router_forward *,
                           struct device_router);
    void (*router_backward)(struct device *, const struct device_router_backward *,
                            struct device_router);
    /* to (n,C): row i = row slots[i] / K of from (R,C) */
    void (*expert_gather)(struct device *, compute_t *to, const compute_t *from,
                          const int32_t *slots, uint64_t n, struct device_router);
    /* Row r = slots[i] / K of to (R,C) = round(to[r] + round(from[i] weights[slots[i]])) with from
     * (n,C); weights NULL: 1. The n slots belong to one expert. */
    void (*expert_scatter)(struct device *, compute_t *to, const compute_t *from,
                           const float *weights, const int32_t *slots, uint64_t n,
                           struct device_router);
    void (*expert_scatter_backward)(struct device *, const struct device_expert_scatter_backward *,
                                    struct device_router);

    /* ---- head: logits stay f32 ---- */
    void (*head_forward)(struct device *, float *logits, const compute_t *x, const compute_t *w,
                         struct device_linear);
    /* logits = cap tanh(logits / cap), in place (Gemma 2) */
    void (*softcap)(struct device *, float *logits, float cap, uint64_t elements);
    /* row_loss (rows) f64: lse - logit of the label, 0 where the label is -1. With the gradient,
     * logits become (softmax - onehot(label)) * scale, and zero in rows without label. With a
     * softcap the logits are capped ones and the derivative is by those before the cap: each is
     * multiplied by 1 - (logit / softcap)^2. */
    void (*cross_entropy)(struct device *, double *row_loss, float *logits, const int32_t *labels,
                          struct device_cross_entropy, enum device_loss);
    void (*head_backward_input)(struct device *, compute_t *dx, const float *dlogits,
                                const compute_t *w, struct device_linear);
    void (*head_backward_weight)(struct device *, float *dw, const float *dlogits,
                                 const compute_t *x, struct device_linear);

    void (*close)(struct device *);
    /* One line that names all that bits depend on: device, core, libraries, versions, constants. */
    const char *(*lineage)(const struct device *);
};

/* The address `elements` further into a compute array. */
static inline compute_t *device_at(const struct device *device, const compute_t *base,
                                   uint64_t elements)
{
    return (compute_t *)((uintptr_t)base + elements * device->compute_bytes);
}

/*
 * Opens the CPU device with its own pool of `threads` threads (the caller is one of them; at least
 * 1). Loads OpenBLAS at run time. Needs x86-64-v3 (AVX2, FMA); anything less is ERROR_FAILED.
 * An operation may be called from one thread at a time, the one that opened the device.
 */
int device_cpu_open(struct device **device, enum device_dtype dtype, uint32_t threads);

/* The operations of a CPU device count up `heartbeat` (which outlives the device) while they go on.
 */
void device_cpu_set_heartbeat(struct device *device, _Atomic uint64_t *heartbeat);

static inline void device_close(struct device *device)
{
    if (device != NULL)
        device->ops->close(device);
}

#endif
