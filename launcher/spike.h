/*
 * Losses and gradient norms far above their running median. Pure.
 *
 * The window holds the last applied steps (ipc/spike_window.h).
 */
#ifndef LAUNCHER_SPIKE_H
#define LAUNCHER_SPIKE_H

#include <stdint.h>

#include "ipc/spike_window.h"

enum { SPIKE_STEPS_MIN = 8 }; /* fewer steps have no median worth the name */

struct spike_window {
    uint32_t count; /* valid entries, oldest first */
    double loss[SPIKE_WINDOW_STEPS], norm[SPIKE_WINDOW_STEPS];
};

/* The median: middle value, or the mean of the two in the middle. `n` at most
 * SPIKE_WINDOW_STEPS, at least 1. */
double spike_median(const double *values, uint32_t n);

/* 1: `loss` or `norm` is above `factor` times its median. */
int spike_found(const struct spike_window *window, double loss, double norm, double factor);

/*
 * training.spike = "redo": the step is computed again, until two computations have the same
 * gradient bits. Equal at once: the spike is in the data, and the step is applied. Otherwise memory
 * or a processor changed something in one of them: what was computed twice is right.
 */
enum spike_answer {
    SPIKE_AGAIN,    /* compute the step once more */
    SPIKE_DATA,     /* the same bits: apply */
    SPIKE_HARDWARE, /* the same bits at last, after others: apply, and name the hardware */
    SPIKE_LOST,     /* no two alike: this machine cannot compute */
};

enum { SPIKE_COMPUTATIONS_MAX = 5 };

struct spike_redo {
    uint64_t step; /* that is being judged; 0: none */
    uint32_t computed;
    struct {
        uint64_t low, high;
    } hash[SPIKE_COMPUTATIONS_MAX];
};

/* One more computation of `step`, whose gradient has this hash. */
enum spike_answer spike_judge(struct spike_redo *redo, uint64_t step, uint64_t low, uint64_t high);

#endif
