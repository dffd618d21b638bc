/*
 * The window of training.spike: losses and gradient norms of the last applied steps, oldest first.
 * launcher judges by it (launcher/spike.h); io_worker keeps it in the commit record and the state
 * hash, so that a resumed run judges as the undisturbed one does. Pure, header only.
 */
#ifndef IPC_SPIKE_WINDOW_H
#define IPC_SPIKE_WINDOW_H

#include <stdint.h>
#include <string.h>

enum { SPIKE_WINDOW_STEPS = 32 };

/* One more applied step; the oldest gives way. `loss`, `norm`: (SPIKE_WINDOW_STEPS), *count valid.
 */
static inline void spike_window_push(uint32_t *count, double *loss, double *norm, double new_loss,
                                     double new_norm)
{
    if (*count == SPIKE_WINDOW_STEPS) {
        memmove(loss, loss + 1, (SPIKE_WINDOW_STEPS - 1) * sizeof *loss);
        memmove(norm, norm + 1, (SPIKE_WINDOW_STEPS - 1) * sizeof *norm);
        --*count;
    }
    loss[*count] = new_loss;
    norm[(*count)++] = new_norm;
}

#endif
