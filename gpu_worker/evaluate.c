/* Evaluation: forward only, layer-major over as many microbatches at a time as training holds. */
#include "gpu_worker/gpu.h"
#include "procs/fault.h"

/* One sweep over the weights for `n` microbatches that are in the device's buffers. */
static int sweep(struct gpu *g, uint64_t n, double *loss_sum)
{
    uint64_t number = gpu_request_sweep(g);
    for (uint64_t v = 0; v < g->forward_visits.n_visits; v++) {
        const struct visit *visit = &g->forward_visits.visits[v];
        int rc = gpu_take_weights(g, SWEEP_FORWARD, number, v);
        if (rc < 0)
            return rc;
        for (uint64_t m = 0; m < n; m++) {
            struct layers_batch batch;
            struct layers_head head;
            double loss = 0.0;
            compute_t *x = buffers_dx(&g->buffers, m);
            buffers_batch(&g->buffers, m, &batch);
            if (visit->kind == VISIT_HEAD) {
                gpu_head(g, &head);
                layers_head_loss(g->layers, &head, &batch, x, &loss);
                *loss_sum += loss;
            } else if (visit->layer == 0) {
                layers_embedding_forward(g->layers, g->buffers.weights[0], &batch, x);
            } else {
                layers_block_forward(g->layers, visit->layer, g->buffers.weights[0], &batch, x, x,
                                     LAYERS_NO_SLOT);
            }
            if ((rc = worker_check(g->w)) < 0)
                return rc;
        }
        fault_point(FAULT_gpu_mid_evaluation);
    }
    return 0;
}

int gpu_evaluate(struct gpu *g)
{
    const struct worker_control *io = segment_region(&g->w->segment, REGION_IO_CONTROL, 0);
    struct worker_control *self = g->w->self;
    uint64_t request = atomic_load_explicit(&self->evaluated, memory_order_relaxed) + 1;
    uint64_t left = atomic_load_explicit(&io->evaluate_microbatches, memory_order_acquire);
    uint64_t labelled = 0;
    double loss_sum = 0.0;
    while (left) {
        uint64_t n = left < g->buffers.microbatches ? left : g->buffers.microbatches;
        int rc = 0;
        for (uint64_t m = 0; m < n && rc == 0; m++)
            rc = gpu_take_microbatch(g, MICROBATCH_EVALUATE, m, &labelled);
        if (rc == 0)
            rc = sweep(g, n, &loss_sum);
        if (rc < 0)
            return rc;
        left -= n;
    }
    atomic_store_explicit(&self->evaluate_tokens, labelled, memory_order_relaxed);
    atomic_store_explicit(&self->evaluate_loss_sum, loss_sum, memory_order_relaxed);
    fault_point(FAULT_gpu_evaluated);
    atomic_store_explicit(&self->evaluated, request, memory_order_release);
    worker_fact(g->w);
    return 0;
}
