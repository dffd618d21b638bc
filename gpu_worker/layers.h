/*
 * Layer templates: embedding, decoder block, final norm + head, written once over the device's
 * operations (device.h). They know shapes and the order of operations, and never touch device
 * memory themselves. Every family is this one block with other options (model/config.h).
 *
 * A layer's weights arrive as one flat compute_t vector of layout->layers[l].elements elements (the
 * tensor t at its offset), those of a block with experts as the vector of its group (each layer at
 * its start); its gradients accumulate in one flat f32 vector of the same shape, to
 * which the caller has given its starting value (zero). Who holds x and dX between layers, and the
 * layer inputs kept as activation checkpoints, is the caller's business:
 *
 *     layers_embedding_forward(ls, weights[0], &batch, x0);
 *     for each block l:  layers_block_forward(ls, l, weights[l], &batch, x_in[l], x_out, slot);
 *     layers_head(ls, &head, &batch, x, 1.0 / labelled, dx, &loss);
 *     for each block, reversed:
 *                        layers_block_backward(ls, l, weights[l], gradients[l], &batch, x_in[l],
 * dx, slot); layers_embedding_backward(ls, gradients[0], &batch, dx);
 *
 * Intermediates. A saved slot holds what backward needs of one (layer, microbatch): rstd of both
 * norms, q, k, v as attention reads them, the attention's output and log-sum-exp, the residual
 * stream between the two halves, gate, up: compute_bytes x (C + 2 Hq D + 2 Hk D + 2 F) + 4 x (2 +
 * Hq) bytes per token; without a gate F less; with norms of q and k also what they read and their
 * rstd, Hq D + Hk D and Hq + Hk more; with norms behind attention and MLP the same, 2 C and 2. The
 * norms' outputs and act(gate) * up are not kept: backward writes them again in the same pass in
 * which it reads their inputs anyway. With LAYERS_NO_SLOT nothing is kept, and backward first
 * recomputes the slot's content; the bits are the same either way.
 *
 * A sparse block has in place of gate and up those of each token's K experts (2 K F), the router's
 * logits (E), and 8 K bytes for where the token goes.
 *
 * Results do not depend on the thread count, on slots, or on where buffers lie. They do depend, in
 * the last bits, on how the tokens of a step are cut into microbatches.
 */
#ifndef GPU_WORKER_LAYERS_H
#define GPU_WORKER_LAYERS_H

#include <stdint.h>

#include "gpu_worker/device.h"

struct model_layout;
struct layers;

enum { LAYERS_NO_SLOT = -1 };

/* Tokens of one head chunk: logits exist for at most this many tokens at a time. A constant of the
 * numeric lineage. */
enum { LAYERS_HEAD_ROWS = 512 };

struct layers_shape {
    uint64_t microbatch_size; /* B, rows of a microbatch */
    uint64_t seq_len;         /* T */
    uint64_t saved_slots;  /* sets of block intermediates held beside the one for recomputation */
    uint64_t context_max;  /* positions that rope is tabulated for; at least seq_len */
    uint64_t forward_only; /* 1: no backward, no scratch for it (evaluation, generation) */
};

/* One microbatch. All arrays (B,T) i32 in device memory (on the CPU device: ordinary memory). */
struct layers_batch {
    const int32_t *tokens;         /* each in [0, V) */
    const int32_t *labels;         /* already shifted; -1 where there is none */
    const int32_t *position;       /* position in the own document, < context_max */
    const int32_t *document_start; /* index in the row of the own document's first token */
    /* Sparse blocks only. (2 E) f64 in device memory: a forward adds what it sends to each expert,
     * and each expert's probabilities; or NULL. All tokens count, also those without labels. */
    double *balance;
    const float *balance_slope; /* (E) f32, for backward: layers_balance_loss() made it; or NULL */
};

/* The head's tensors: the final norm, and the output matrix, which with tied embeddings is the
 * embedding's. Gradients may be NULL for evaluation. */
struct layers_head {
    const compute_t *norm;      /* (C) */
    const compute_t *norm_bias; /* (C), or NULL where the model's norms have none */
    const compute_t *matrix;    /* (V,C) */
    float *norm_gradient;       /* (C), added to */
    float *norm_bias_gradient;  /* (C), added to; NULL without the bias */
    float *matrix_gradient;     /* (V,C), added to */
};

/* Device bytes that layers_init() will allocate for this shape, exactly. */
uint64_t layers_bytes(const struct device *device, const struct model_layout *layout,
                      const struct layers_shape *shape);

/* Allocates everything at once; nothing is allocated later. `layout` must outlive the layers.
 * Released by layers_destroy(). ERROR_FIT if the device has no room. */
int layers_init(struct layers **layers, struct device *device, const struct model_layout *layout,
                const struct layers_shape *shape);
void layers_destroy(struct layers *layers);

/*
 * The load balancing loss of transformers (Fedus et al. 2021, equations 4 to 6) of one microbatch,
 * over all its sparse blocks together: coefficient E sum_e (slots_e / N)(sum of p_e / N), N = rows
 * counted. `balance` is what the forward of every block added to zero; slope (E), in device memory,
 * is written for the backward.
 */
double layers_balance_loss(struct layers *layers, const double *balance, double coefficient,
                           float *slope);

/* Bytes of one microbatch's x or dX, (B,T,C) compute, in device memory. */
uint64_t layers_activation_bytes(const struct layers *layers);

/* x_out (B,T,C) = rows of the table. `weights` is the embedding layer's vector. */
void layers_embedding_forward(struct layers *layers, const compute_t *weights,
                              const struct layers_batch *batch, compute_t *x_out);
/* gradients += scatter of dx by token; the look-ups of pad_token_id give none. */
void layers_embedding_backward(struct layers *layers, float *gradients,
                               const struct layers_batch *batch, const compute_t *dx);

/* x_out = block(x_in), both (B,T,C); x_out may be x_in only with LAYERS_NO_SLOT in evaluation.
 * `layer` indexes layout->layers; `slot` is in [0, saved_slots) or LAYERS_NO_SLOT. */
void layers_block_forward(struct layers *layers, uint64_t layer, const compute_t *weights,
                          const struct layers_batch *batch, const compute_t *x_in, compute_t *x_out,
                          int64_t slot);

/* dx (B,T,C): on entry the derivative by the block's output, on return by its input.
 * `slot` is what the forward was given; its content is used up. LAYERS_NO_SLOT recomputes. */
void layers_block_backward(struct layers *layers, uint64_t layer, const compute_t *weights,
                           float *gradients, const struct layers_batch *batch,
                           const compute_t *x_in, compute_t *dx, int64_t slot);

/* Final norm, head, cross entropy, and their backward, in chunks of LAYERS_HEAD_ROWS tokens.
 * loss_scale is 1 / labelled tokens of the whole step; *loss_sum gets the sum (not scaled) of this
 * microbatch's token losses. dx (B,T,C) is overwritten; dx may be x. */
void layers_head(struct layers *layers, const struct layers_head *head,
                 const struct layers_batch *batch, const compute_t *x, double loss_scale,
                 compute_t *dx, double *loss_sum);

/* The sum of token losses alone, same bits as layers_head. */
void layers_head_loss(struct layers *layers, const struct layers_head *head,
                      const struct layers_batch *batch, const compute_t *x, double *loss_sum);

/* logits (rows,V) f32 in device memory, of the rows of x (rows,C). rows <= B T. Rows are taken in
 * chunks of LAYERS_HEAD_ROWS. */
void layers_head_logits(struct layers *layers, const struct layers_head *head, const compute_t *x,
                        uint64_t rows, float *logits);

/* Rows of a decoding sweep: row r is the token at position[r] of sequence[r]. Several rows of one
 * sequence (a prompt) are fine; all are put into the cache before any attends. */
struct layers_decode {
    uint64_t rows;           /* <= B T */
    const int32_t *tokens;   /* (rows) i32 in device memory */
    const int32_t *sequence; /* (rows) i32 */
    const int32_t *position; /* (rows) i32, < context */
    uint64_t context;        /* positions per sequence in the cache, <= context_max */
};

/* Bytes of one layer's keys (values take the same) for `sequences` x `context` positions:
 * (sequences, context, Hk, D) compute. */
uint64_t layers_cache_bytes(const struct layers *layers, uint64_t sequences, uint64_t context);

/* x (rows,C) = rows of the embedding table. */
void layers_embedding_decode(struct layers *layers, const compute_t *weights,
                             const struct layers_decode *decode, compute_t *x);

/* x (rows,C) = block(x) in place, against and into this layer's caches. */
void layers_block_decode(struct layers *layers, uint64_t layer, const compute_t *weights,
                         const struct layers_decode *rows, compute_t *x, compute_t *cache_k,
                         compute_t *cache_v);

#endif
