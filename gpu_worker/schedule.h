/*
 * One step on the device, layer-major: for each layer, all microbatches; then the next layer.
 *
 *     forward   for each visit: take its pages from WEIGHTS; for each microbatch: x = layer(x)
 *     head      loss, the head's gradients, dX
 *     backward  for each visit: take its pages; for each microbatch: accumulate; publish GRADIENT
 *
 * so a page crosses to the device once per pass however large the batch, and a layer's gradient
 * leaves once per step. Evaluation and generation are forward-only sweeps over the same visits.
 */
#ifndef GPU_WORKER_SCHEDULE_H
#define GPU_WORKER_SCHEDULE_H

#include "ipc/worker.h"

/* Until told to leave (-ERROR_STOPPED) or an error. */
int schedule_run(struct worker *w);

#endif
