/*
 * The device buffers of a run, all allocated at start: weights of a visit, gradients of a group,
 * activations of all microbatches.
 *
 * Activations. The input of block l (1..L) of every microbatch lies where the checkpointing mode
 * says; with groups of N blocks (full and none: N = 1):
 *
 *     starts[g]   input of the first block of group g: the activation checkpoint, kept until
 * backward inner[i]    input of block i + 1 of the group at hand (0 < i + 1 < N): used by forward
 * as it passes, filled again when backward re-forwards the group last        input of the head; dX
 * from there on (the head's dX may overwrite its input)
 *
 *     N = 3:   x -> [start0 in0 in1] [start1 in0 in1] [start2] -> last
 */
#ifndef GPU_WORKER_BUFFERS_H
#define GPU_WORKER_BUFFERS_H

#include "gpu_worker/device.h"
#include "gpu_worker/layers.h"
#include "ipc/plan.h"

struct buffers {
    struct device *device;
    uint64_t microbatches;
    uint64_t group;              /* N above */
    uint64_t blocks;             /* L */
    uint64_t activation_bytes;   /* (B, T, C) of one microbatch */
    compute_t *weights[2];       /* the visit's first and second source */
    float *gradients;            /* largest group, f32 */
    float *head_share;           /* tied: the head's part of the embedding's gradient (V, C) f32 */
    char *starts, *inner, *last; /* compute, activation_bytes each, [..][microbatches] */
    compute_t *discard;          /* groups only: the output that a re-forward has no use for */
    uint64_t experts;            /* E, where there is a load balancing loss; else 0 */
    double *balance;             /* [microbatches][2 E]: layers_batch.balance */
    float *balance_slope;        /* [microbatches][E] */
    int32_t *batch;          /* [microbatches][4][B T]: tokens, labels, position, document_start */
    uint64_t batch_elements; /* B T */
};

/* Bytes that buffers_open() allocates. `every`: activation checkpointing, 1 = full, N, 0 = none.
 * Modes other than training have no gradients and no checkpoints: a forward-only sweep works in
 * place, in `last`. */
uint64_t buffers_bytes(const struct plan *plan, const struct model_layout *layout, uint32_t every,
                       uint64_t compute_bytes);

int buffers_open(struct buffers *b, struct device *device, const struct plan *plan,
                 const struct model_layout *layout, uint32_t every);
void buffers_close(struct buffers *b);

/* Input of block `block` (1..L), or with L + 1 of the head. (B, T, C) compute. */
compute_t *buffers_input(const struct buffers *b, uint64_t block, uint64_t microbatch);

/* dX of a microbatch, and the x of forward-only sweeps: (B, T, C) compute. */
compute_t *buffers_dx(const struct buffers *b, uint64_t microbatch);

/* Without counts of experts. */
void buffers_batch(const struct buffers *b, uint64_t microbatch, struct layers_batch *batch);

/* Where a microbatch's are, and the loss' slope made of them; NULL without such a loss. */
double *buffers_balance(const struct buffers *b, uint64_t microbatch);
float *buffers_balance_slope(const struct buffers *b, uint64_t microbatch);

#endif
