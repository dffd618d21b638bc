/*
 * The device: one table of about thirty operations over which the layer templates (layers.h) are
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
 * operation). Scores, softmax, cross entropy, logits and weight gradients stay f32.
 *
 * Every operation is deterministic: its result depends on its arguments and on the numeric lineage
 * (device_lineage) and on nothing else; not on the thread count, not on where a buffer lies.
 *
 * Operations are enqueued in order. The host may read results only through copy_out or after
 * synchronize, and may reuse the host side of a copy_in once synchronize returned. On the CPU
 * device every operation has completed when it returns.
 *
 * Shapes: all arrays are dense and row-major. R rows are the B x T tokens of a microbatch; C hidden
 * width; Hq, Hk query and key/value heads; D head width; F MLP width; V vocabulary.
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

/* y = x W^T and its derivatives. x: (rows, in), y: (rows, out), w: (out, in). */
struct device_linear {
    uint64_t rows, in, out;
};

/*
 * Attention over packed rows. q: (B,T,Hq,D), k and v: (B,T,Hk,D); query head h reads key head
 * h / (Hq / Hk). Key position k is visible to query position q of the same row exactly if
 * document_start[b][q] <= k <= q. Scores are scaled by 1/sqrt(D) unless the model says otherwise.
 */
struct device_attention {
    uint64_t batch, seq_len, query_heads, key_heads, head_dim;
    float scale;
    const int32_t *document_start; /* (B,T) i32, index in the row of the document's first token */
};

/*
 * Attention against a key/value cache: row r is the query at position[r] of sequence[r], and sees
 * keys 0..position[r] of its sequence. cache_k, cache_v: (sequences, context, Hk, D).
 */
struct device_decode {
    uint64_t rows, context, query_heads, key_heads, head_dim;
    float scale;
    const int32_t *sequence; /* (rows) i32 */
    const int32_t *position; /* (rows) i32 */
};

struct device_rope {
    uint64_t rows, heads, head_dim;
    const float *cosine, *sine; /* (positions, D/2) f32, already rounded to bf16 in DEVICE_BF16 */
    const int32_t *position;    /* (rows) i32 */
};

/* FORWARD rotates by the angle; BACKWARD by minus the angle (the transpose of the rotation). */
enum device_direction { DEVICE_FORWARD, DEVICE_BACKWARD };

/* SET overwrites the output; ADD adds to it (and then rounds, where the output is compute_t). */
enum device_write { DEVICE_SET, DEVICE_ADD };

enum device_loss { DEVICE_LOSS_ONLY, DEVICE_LOSS_AND_GRADIENT };

/* How host data is laid out: f32, or bfloat16 as the high half of an f32. */
enum device_host_dtype { DEVICE_HOST_F32, DEVICE_HOST_BF16 };

/* dx = [residual +] round(norm backward of dy); dw += ; y_again, if not NULL, gets the forward's y.
 */
struct device_rmsnorm_backward {
    compute_t *dx;             /* (R,C); may be residual or dy */
    float *dw;                 /* (C) f32, added to, by a fixed tree over rows */
    compute_t *y_again;        /* (R,C) or NULL */
    const compute_t *dy;       /* (R,C) */
    const compute_t *x;        /* (R,C) */
    const compute_t *w;        /* (C) */
    const float *rstd;         /* (R) f32 of the forward */
    const compute_t *residual; /* (R,C) or NULL */
    float *scratch;            /* device_rmsnorm_scratch(rows, width) f32 */
    uint64_t rows, width;
};

/* Rows per partial sum of the norm weight's gradient: a constant of the lineage. */
enum { DEVICE_NORM_ROWS = 64 };

static inline uint64_t device_rmsnorm_scratch(uint64_t rows, uint64_t width)
{
    return (rows + DEVICE_NORM_ROWS - 1) / DEVICE_NORM_ROWS * width;
}

struct device_weight_gradient {
    float *dw;           /* (out,in) f32, added to */
    const compute_t *dy; /* (R,out) */
    uint64_t out;
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

struct device_silu_backward {
    compute_t *dgate, *dup, *y;
    const compute_t *dy, *gate, *up;
};

struct device_cross_entropy {
    uint64_t rows, vocabulary;
    float scale; /* 1 / number of labelled tokens of the whole step */
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

    /* ---- embedding: table (V,C), tokens (R), x (R,C) ---- */
    void (*embedding_forward)(struct device *, compute_t *x, const compute_t *table,
                              const int32_t *tokens, uint64_t rows, uint64_t width);
    /* dtable += scatter(dx), rows added in token order; rows of `skipped_token` (-1: none) are
     * left out, as torch does for an embedding's padding_idx. */
    void (*embedding_backward)(struct device *, float *dtable, const compute_t *dx,
                               const int32_t *tokens, int64_t skipped_token, uint64_t rows,
                               uint64_t width);

    /* ---- RMSNorm (Zhang and Sennrich 2019): y = w * round(x * rstd), rstd = 1/sqrt(mean(x^2)+eps)
     * x, y (R,C); w (C); rstd (R) f32 ---- */
    void (*rmsnorm_forward)(struct device *, compute_t *y, float *rstd, const compute_t *x,
                            const compute_t *w, uint64_t rows, uint64_t width, float epsilon);
    void (*rmsnorm_backward)(struct device *, const struct device_rmsnorm_backward *);

    /* ---- linear ---- */
    /* y = x W^T, or with `residual` (R,out) not NULL: y = residual + round(x W^T); y is not
     * residual. */
    void (*linear_forward)(struct device *, compute_t *y, const compute_t *x, const compute_t *w,
                           const compute_t *residual, struct device_linear);
    /* dx = dy W, or dx += dy W */
    void (*linear_backward_input)(struct device *, compute_t *dx, enum device_write,
                                  const compute_t *dy, const compute_t *w, struct device_linear);
    /* dw[i] += dy[i]^T x for each of n linear layers that share rows and x (q, k, v; gate, up) */
    void (*linear_backward_weight)(struct device *, const struct device_weight_gradient *,
                                   uint64_t n, const compute_t *x, uint64_t rows, uint64_t in);

    /* ---- rotary embedding, in place; halves paired as in transformers (i, i + D/2) ---- */
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

    /* ---- MLP: y = round(silu(gate)) * up, all (elements) ---- */
    void (*silu_multiply_forward)(struct device *, compute_t *y, const compute_t *gate,
                                  const compute_t *up, uint64_t elements);
    /* Given dy: dgate, dup, and y once more (same bits as forward). gate may be dgate, up dup,
     * dy y. */
    void (*silu_multiply_backward)(struct device *, const struct device_silu_backward *,
                                   uint64_t elements);

    /* ---- head: logits stay f32 ---- */
    void (*head_forward)(struct device *, float *logits, const compute_t *x, const compute_t *w,
                         struct device_linear);
    /* row_loss (rows) f64: lse - logit of the label, 0 where the label is -1. With the gradient,
     * logits become (softmax - onehot(label)) * scale, and zero in rows without label. */
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
