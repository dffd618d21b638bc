/*
 * What gpu_worker holds, shared by its three kinds of work (schedule.c: steps, evaluate.c,
 * generate.c).
 */
#ifndef GPU_WORKER_GPU_H
#define GPU_WORKER_GPU_H

#include "gpu_worker/buffers.h"
#include "gpu_worker/device.h"
#include "gpu_worker/layers.h"
#include "ipc/worker.h"
#include "model/visits.h"

enum sweep_kind {
    SWEEP_STEP,    /* the visits of a training step; number = step */
    SWEEP_FORWARD, /* evaluation or generation; number counts gpu's requests */
};

struct gpu {
    struct worker *w;
    uint32_t checkpoint_every; /* activation checkpointing in force (ipc/plan.h) */
    struct device *device;
    struct layers *layers;
    struct visits visits, forward_visits;
    struct buffers buffers;

    struct ring weights, weights_return, microbatch, microbatch_return;
    struct ring gradient[OPT_WORKERS_MAX], gradient_return[OPT_WORKERS_MAX];
    uint32_t *free_frames; /* stack of GRADIENT frames */
    uint64_t n_free;

    struct generation *generation; /* NULL without prompts */

    uint64_t step;      /* being computed, or last computed */
    uint64_t sweeps;    /* forward-only sweeps requested so far */
    uint64_t flip_step; /* tests: one gradient bit is flipped in this step; 0 = never */
    uint32_t flip_bit;
    const char *flip_once; /* only if this file can be created; NULL: always */
};

/* Takes all pages of a visit into the device's weight buffers, in order, and gives the frames back.
 */
int gpu_take_weights(struct gpu *g, enum sweep_kind kind, uint64_t number, uint64_t visit);

/* Takes the next microbatch into device buffer `slot`; counts its labelled tokens. */
int gpu_take_microbatch(struct gpu *g, enum microbatch_kind kind, uint64_t slot,
                        uint64_t *labelled);

/* Asks io for one more forward-only sweep; its number. */
uint64_t gpu_request_sweep(struct gpu *g);

/* The head's tensors in the weight buffers after its pages were taken. */
void gpu_head(const struct gpu *g, struct layers_head *head);

/* evaluate.c, generate.c: one request each. */
int gpu_evaluate(struct gpu *g);
int gpu_generate(struct gpu *g);

/* generate.c: buffers for plan.generate; context = positions per sequence, 0 without prompts. */
int generate_open(struct gpu *g);
void generate_close(struct gpu *g);
uint64_t generate_context(const struct plan *plan);
uint64_t generate_bytes(const struct plan *plan, const struct model_layout *layout,
                        uint64_t compute_bytes);

#endif
