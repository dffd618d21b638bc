#include "gpu_worker/schedule.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu_worker/gpu.h"
#include "ipc/page_image.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"
#include "procs/mutant.h"

uint64_t gpu_request_sweep(struct gpu *g)
{
    g->sweeps++;
    atomic_store_explicit(&g->w->self->sweep_request, g->sweeps, memory_order_release);
    worker_bell(g->w, ROLE_IO, 0);
    return g->sweeps;
}

static int give_back(struct ring *ring, const struct ring_descriptor *d)
{
    return ring_lend(ring, d); /* RETURN and GRADIENT are as deep as what can be lent */
}

/* Elements that are copied and hashed at a time: what is hashed is still in the cache. */
enum { PIECE_ELEMENTS = 256 << 10 };

/* The payload of a borrowed frame as io_worker hashed it. */
static int check_hash(const struct gpu *g, const char *what, const struct ring_descriptor *d,
                      uint64_t found)
{
    if (!g->w->plan->frame_hashes || found == d->hash)
        return 0;
    return error_set(ERROR_DAMAGED,
                     "%s of page %llu in step %llu: hash: expected %016llx, found %016llx: memory "
                     "was changed after it was filled",
                     what, (unsigned long long)d->page, (unsigned long long)d->step,
                     (unsigned long long)d->hash, (unsigned long long)found);
}

/* Copies one page into its place in the buffer of its source. */
static int load_page(struct gpu *g, const struct visit *visit, const struct ring_descriptor *d)
{
    const struct model_page *page = &g->w->layout.pages[d->page];
    const struct model_layer *layer = &g->w->layout.layers[page->layer];
    uint64_t source = layer->group == visit->sources[0] ? 0 : 1,
             start = layer->start + page->offset;
    const char *frame = segment_frame(&g->w->segment, REGION_WEIGHTS_POOL, 0, d->frame);
    enum device_host_dtype from = g->w->plan->bf16 ? DEVICE_HOST_BF16 : DEVICE_HOST_F32;
    uint64_t width = g->w->plan->bf16 ? 2 : 4;
    struct page_digest_so_far digest;
    page_digest_begin(&digest);
    for (uint64_t at = 0, n; at < page->elements; at += n) {
        n = page->elements - at < PIECE_ELEMENTS ? page->elements - at : PIECE_ELEMENTS;
        if (g->w->plan->frame_hashes)
            page_digest_add(&digest, frame + at * width, n * width);
        g->device->ops->load(g->device,
                             device_at(g->device, g->buffers.weights[source], start + at),
                             frame + at * width, from, n);
    }
    g->device->ops->synchronize(g->device); /* before RETURN: the frame may be reused at once */
    if (check_hash(g, "weights", d, page_digest_end(&digest).low) < 0)
        return -(int)error_kind_now();
    fault_point(FAULT_gpu_weights_taken);
    int rc = give_back(&g->weights_return, d);
    fault_point(FAULT_gpu_weights_returned);
    return rc;
}

static int check_weights(const struct ring_descriptor *d, enum sweep_kind kind, uint64_t number,
                         uint64_t visit, uint64_t page)
{
    if (d->kind == (uint32_t)kind && d->step == number && d->visit == visit && d->page == page)
        return 0;
    return error_set(
        ERROR_DAMAGED,
        "ring WEIGHTS: expected page %llu for visit %llu of %s %llu, found page %llu for "
        "visit %llu of %s %llu",
        (unsigned long long)page, (unsigned long long)visit, kind == SWEEP_STEP ? "step" : "sweep",
        (unsigned long long)number, (unsigned long long)d->page, (unsigned long long)d->visit,
        d->kind == SWEEP_STEP ? "step" : "sweep", (unsigned long long)d->step);
}

int gpu_take_weights(struct gpu *g, enum sweep_kind kind, uint64_t number, uint64_t visit)
{
    const struct visits *vs = kind == SWEEP_STEP ? &g->visits : &g->forward_visits;
    const struct visit *v = &vs->visits[visit];
    uint64_t n = visit_n_pages(&g->w->layout, v);
    for (uint64_t k = 0; k < n; k++) {
        struct ring_descriptor d;
        int got, rc;
        while ((got = ring_consume(&g->weights, &d)) == 0)
            if ((rc = worker_pause(g->w, RING_WEIGHTS)) < 0)
                return rc;
        if (got < 0)
            return error_wrap("ring WEIGHTS");
        if ((rc = check_weights(&d, kind, number, visit, visit_page(&g->w->layout, v, k))) < 0 ||
            (rc = load_page(g, v, &d)) < 0)
            return rc;
    }
    if (n)
        worker_bell(g->w, ROLE_IO, 0);
    return worker_check(g->w);
}

int gpu_take_microbatch(struct gpu *g, enum microbatch_kind kind, uint64_t slot, uint64_t *labelled)
{
    struct ring_descriptor d;
    int got, rc;
    while ((got = ring_consume(&g->microbatch, &d)) == 0)
        if ((rc = worker_pause(g->w, RING_MICROBATCH)) < 0)
            return rc;
    if (got < 0)
        return error_wrap("ring MICROBATCH");
    if (d.kind != (uint32_t)kind ||
        (kind == MICROBATCH_TRAIN && (d.step != g->step || d.page != slot)))
        return error_set(ERROR_DAMAGED,
                         "ring MICROBATCH: found kind %u number %llu of step %llu in step %llu",
                         d.kind, (unsigned long long)d.page, (unsigned long long)d.step,
                         (unsigned long long)g->step);
    uint64_t n = g->buffers.batch_elements;
    const int32_t *frame = segment_frame(&g->w->segment, REGION_MICROBATCH_POOL, 0, d.frame);
    if (check_hash(g, "tokens", &d, page_image_digest(frame, 4 * n * sizeof(int32_t)).low) < 0)
        return -(int)error_kind_now();
    g->device->ops->copy_in(g->device, g->buffers.batch + slot * 4 * n, frame,
                            4 * n * sizeof(int32_t));
    for (uint64_t i = 0; i < n; i++)
        *labelled += frame[n + i] >= 0;
    if (!mutant(MUTANT_return_before_copy))
        g->device->ops->synchronize(g->device);
    fault_point(FAULT_gpu_microbatch_taken);
    rc = give_back(&g->microbatch_return, &d);
    worker_bell(g->w, ROLE_IO, 0);
    return rc;
}

void gpu_head(const struct gpu *g, struct layers_head *head)
{
    const struct model_layout *layout = &g->w->layout;
    uint32_t last = layout->n_layers - 1;
    const struct model_tensor *norm = model_layer_tensor(layout, last, MODEL_FINAL_NORM);
    const struct model_tensor *bias = model_layer_tensor(layout, last, MODEL_FINAL_NORM_BIAS);
    const struct model_tensor *matrix = model_layer_tensor(layout, last, MODEL_HEAD);
    const struct buffers *b = &g->buffers;
    memset(head, 0, sizeof *head);
    head->norm = device_at(g->device, b->weights[0], norm->offset);
    head->norm_bias = bias ? device_at(g->device, b->weights[0], bias->offset) : NULL;
    head->matrix = matrix ? device_at(g->device, b->weights[0], matrix->offset) : b->weights[1];
    if (b->gradients) {
        head->norm_gradient = b->gradients + norm->offset;
        head->norm_bias_gradient = bias ? b->gradients + bias->offset : NULL;
        head->matrix_gradient = matrix ? b->gradients + matrix->offset : b->head_share;
    }
}

/* -- gradients -- */

static int collect_returns(struct gpu *g)
{
    struct ring_descriptor d;
    for (uint32_t i = 0; i < g->w->plan->opt_workers; i++) {
        int rc;
        uint64_t frames = g->w->plan->pools[REGION_GRADIENT_POOL].frames;
        while ((rc = ring_consume(&g->gradient_return[i], &d)) == 1) {
            if (d.frame >= frames || g->n_free == frames)
                return error_set(ERROR_DAMAGED,
                                 "ring GRADIENT_RETURN of opt_worker %u: frame %u of "
                                 "%llu was not lent",
                                 i, d.frame, (unsigned long long)frames);
            g->free_frames[g->n_free++] = d.frame;
        }
        if (rc < 0)
            return error_wrap("ring GRADIENT_RETURN of opt_worker %u", i);
    }
    return 0;
}

static int take_frame(struct gpu *g, uint32_t *frame)
{
    for (;;) {
        int rc = collect_returns(g);
        if (rc < 0)
            return rc;
        if (g->n_free) {
            *frame = g->free_frames[--g->n_free];
            return 0;
        }
        if ((rc = worker_pause(g->w, RING_GRADIENT)) < 0)
            return rc;
    }
}

/* Tests only (opt_worker/recompute.c has MTLAUNCH_FLIP_OUT), by
 * MTLAUNCH_FLIP_GRADIENT=step[:bit[:path]]: shows that the equality tests notice one changed bit,
 * and plays the memory or processor that fails once. */
static void arm_flip(struct gpu *g)
{
    char *end = NULL;
    const char *text = getenv("MTLAUNCH_FLIP_GRADIENT");
    g->flip_bit = 21;
    if (!text)
        return;
    g->flip_step = strtoull(text, &end, 10);
    if (*end == ':')
        g->flip_bit = (uint32_t)strtoul(end + 1, &end, 10) % 32;
    if (*end == ':')
        g->flip_once = end + 1;
}

/* In the first piece that has something to flip. */
static void flip_bit(const struct gpu *g, uint64_t page, float *piece, uint64_t n, int *flipped)
{
    uint32_t bits;
    uint64_t i = 0;
    if (*flipped || g->step != g->flip_step || page != 0)
        return;
    while (i < n && piece[i] == 0.0f)
        i++; /* a bit of 0 would make a denormal, and those count as zero */
    if (i == n)
        return;
    *flipped = 1;
    if (g->flip_once) {
        int fd = open(g->flip_once, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd < 0)
            return;
        (void)close(fd);
    }
    memcpy(&bits, piece + i, sizeof bits);
    bits ^= 1u << g->flip_bit;
    memcpy(piece + i, &bits, sizeof bits);
}

/* Copies a page of gradients off the device, and hashes it. */
static uint64_t copy_gradients(const struct gpu *g, uint64_t p, float *frame)
{
    const struct model_page *page = &g->w->layout.pages[p];
    const float *gradients =
        g->buffers.gradients + g->w->layout.layers[page->layer].start + page->offset;
    struct page_digest_so_far digest;
    int flipped = 0;
    page_digest_begin(&digest);
    for (uint64_t at = 0, n; at < page->elements; at += n) {
        n = page->elements - at < PIECE_ELEMENTS ? page->elements - at : PIECE_ELEMENTS;
        g->device->ops->copy_out(g->device, frame + at, gradients + at, n * sizeof *frame);
        if (!mutant(MUTANT_publish_before_copy))
            g->device->ops->synchronize(g->device);
        flip_bit(g, p, frame + at, n, &flipped);
        if (g->w->plan->frame_hashes)
            page_digest_add(&digest, frame + at, n * sizeof *frame);
    }
    return page_digest_end(&digest).low;
}

/* Sends a group's accumulated gradient off the device, page by page, to the pages' owners. */
static int publish_gradients(struct gpu *g, uint32_t layer)
{
    uint64_t first = g->w->layout.layers[layer].first_page;
    uint64_t end = first + model_group_pages(&g->w->layout, layer);
    for (uint64_t p = first; p < end; p++) {
        uint32_t owner = topology_page_owner(p, g->w->plan->opt_workers);
        struct ring_descriptor d = {.page = p, .step = g->step};
        int rc = take_frame(g, &d.frame);
        if (rc < 0)
            return rc;
        d.hash =
            copy_gradients(g, p, segment_frame(&g->w->segment, REGION_GRADIENT_POOL, 0, d.frame));
        if ((rc = give_back(&g->gradient[owner], &d)) < 0) /* as deep as its pool */
            return rc;
        fault_point(FAULT_gpu_gradient_published);
        worker_bell(g->w, ROLE_OPT, owner);
    }
    return 0;
}

static void zero_gradients(struct gpu *g, uint32_t layer)
{
    g->device->ops->zero(g->device, g->buffers.gradients,
                         model_group_elements(&g->w->layout, layer) * sizeof(float));
}

/* -- one visit each; microbatch by microbatch -- */

/* Where a block's intermediates are kept: LAYERS_NO_SLOT when backward recomputes. */
static int64_t saved_slot(const struct gpu *g, const struct visit *v, uint64_t microbatch)
{
    uint32_t every = g->checkpoint_every;
    if (every == VISITS_CHECKPOINT_FULL)
        return LAYERS_NO_SLOT;
    if (v->kind == VISIT_FORWARD && v->keeps != VISIT_KEEPS_ALL)
        return LAYERS_NO_SLOT;
    uint64_t place = every == VISITS_CHECKPOINT_NONE ? v->block - 1 : (v->block - 1) % every;
    return (int64_t)(place * g->buffers.microbatches + microbatch);
}

static int visit_forward(struct gpu *g, const struct visit *v)
{
    struct layers_batch batch;
    if (v->layer == 0 && g->buffers.balance)
        g->device->ops->zero(g->device, g->buffers.balance,
                             g->buffers.microbatches * 2 * g->buffers.experts * sizeof(double));
    for (uint64_t m = 0; m < g->buffers.microbatches; m++) {
        buffers_batch(&g->buffers, m, &batch);
        batch.balance = buffers_balance(&g->buffers, m); /* a re-forward counts nothing again */
        if (v->layer == 0)
            layers_embedding_forward(g->layers, g->buffers.weights[0], &batch,
                                     buffers_input(&g->buffers, 1, m));
        else
            layers_block_forward(g->layers, v->layer, g->buffers.weights[0], &batch,
                                 buffers_input(&g->buffers, v->block, m),
                                 buffers_input(&g->buffers, (uint64_t)v->block + 1, m),
                                 saved_slot(g, v, m));
        int rc = worker_check(g->w);
        if (rc < 0)
            return rc;
    }
    fault_point(FAULT_gpu_mid_forward);
    return 0;
}

/* The last block of a group: its output is the next group's start, or dX by now; not written again.
 */
static int visit_reforward(struct gpu *g, const struct visit *v)
{
    uint64_t every = g->checkpoint_every;
    struct layers_batch batch;
    int last = v->block % every == 0 || v->block == g->buffers.blocks;
    for (uint64_t m = 0; m < g->buffers.microbatches; m++) {
        buffers_batch(&g->buffers, m, &batch);
        compute_t *out =
            last ? g->buffers.discard : buffers_input(&g->buffers, (uint64_t)v->block + 1, m);
        layers_block_forward(g->layers, v->layer, g->buffers.weights[0], &batch,
                             buffers_input(&g->buffers, v->block, m), out, saved_slot(g, v, m));
        int rc = worker_check(g->w);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Load balancing: the mean over microbatches of each one's loss, as if it were a loss of each
 * token.
 */
static void add_balance_loss(struct gpu *g, struct step_result *result)
{
    uint64_t n = g->buffers.microbatches;
    double coefficient = g->w->layout.config.router_aux_loss / (double)n, loss = 0.0;
    for (uint64_t m = 0; m < n && g->buffers.balance; m++)
        loss += layers_balance_loss(g->layers, buffers_balance(&g->buffers, m), coefficient,
                                    buffers_balance_slope(&g->buffers, m));
    result->loss_sum += loss * (double)result->labelled;
}

static int visit_head(struct gpu *g, const struct visit *v, struct step_result *result)
{
    struct layers_head head;
    struct layers_batch batch;
    zero_gradients(g, v->layer);
    if (g->buffers.head_share)
        g->device->ops->zero(g->device, g->buffers.head_share,
                             g->w->layout.config.vocab_size * g->w->layout.config.hidden_size *
                                 sizeof(float));
    gpu_head(g, &head);
    for (uint64_t m = 0; m < g->buffers.microbatches; m++) {
        double loss = 0.0;
        buffers_batch(&g->buffers, m, &batch);
        layers_head(g->layers, &head, &batch, buffers_dx(&g->buffers, m),
                    1.0 / (double)result->labelled, buffers_dx(&g->buffers, m), &loss);
        result->loss_sum += loss;
        int rc = worker_check(g->w);
        if (rc < 0)
            return rc;
    }
    add_balance_loss(g, result);
    return publish_gradients(g, v->layer);
}

static int visit_backward(struct gpu *g, const struct visit *v)
{
    struct layers_batch batch;
    zero_gradients(g, v->layer);
    for (uint64_t m = 0; m < g->buffers.microbatches; m++) {
        buffers_batch(&g->buffers, m, &batch);
        batch.balance_slope = buffers_balance_slope(&g->buffers, m);
        layers_block_backward(g->layers, v->layer, g->buffers.weights[0], g->buffers.gradients,
                              &batch, buffers_input(&g->buffers, v->block, m),
                              buffers_dx(&g->buffers, m), saved_slot(g, v, m));
        int rc = worker_check(g->w);
        if (rc < 0)
            return rc;
    }
    fault_point(FAULT_gpu_mid_backward);
    return publish_gradients(g, v->layer);
}

/* Head share + separately accumulated embedding share, in that order. */
static int visit_embedding_backward(struct gpu *g)
{
    struct layers_batch batch;
    const struct model_config *c = &g->w->layout.config;
    zero_gradients(g, 0);
    for (uint64_t m = 0; m < g->buffers.microbatches; m++) {
        buffers_batch(&g->buffers, m, &batch);
        layers_embedding_backward(g->layers, g->buffers.gradients, &batch,
                                  buffers_dx(&g->buffers, m));
    }
    if (g->buffers.head_share)
        g->device->ops->add(g->device, g->buffers.gradients, g->buffers.head_share,
                            c->vocab_size * c->hidden_size);
    return publish_gradients(g, 0);
}

static int do_visit(struct gpu *g, const struct visit *v, struct step_result *result)
{
    switch (v->kind) {
    case VISIT_FORWARD:
        return visit_forward(g, v);
    case VISIT_REFORWARD:
        return visit_reforward(g, v);
    case VISIT_HEAD:
        return visit_head(g, v, result);
    case VISIT_BACKWARD:
        return visit_backward(g, v);
    case VISIT_EMBEDDING_BACKWARD:
        return visit_embedding_backward(g);
    }
    CHECK(!"a kind of visit");
    return -1;
}

static int train_step(struct gpu *g)
{
    struct worker_control *self = g->w->self;
    struct step_result *result = &self->results[g->step % PLAN_SLACK_STEPS];
    int rc;
    memset(result, 0, sizeof *result);
    for (uint64_t m = 0; m < g->buffers.microbatches; m++)
        if ((rc = gpu_take_microbatch(g, MICROBATCH_TRAIN, m, &result->labelled)) < 0)
            return rc;
    result->tokens = g->buffers.microbatches * g->buffers.batch_elements;
    if (result->labelled == 0)
        return error_set(ERROR_USER,
                         "step %llu: no token of its %llu has a label; nothing to learn from",
                         (unsigned long long)g->step, (unsigned long long)result->tokens);
    for (uint64_t v = 0; v < g->visits.n_visits; v++) {
        if ((rc = gpu_take_weights(g, SWEEP_STEP, g->step, v)) < 0)
            return rc;
        if (v == 0)
            result->begin_ns = clock_now_ns();
        if ((rc = do_visit(g, &g->visits.visits[v], result)) < 0)
            return rc;
        if (v + 1 == g->visits.n_forward) {
            result->forward_ns = clock_now_ns();
            result->step = g->step;
            fault_point(FAULT_gpu_forward_done);
            atomic_store_explicit(&self->forward_step, g->step, memory_order_release);
        }
    }
    result->backward_ns = clock_now_ns();
    fault_point(FAULT_gpu_backward_done);
    atomic_store_explicit(&self->backward_step, g->step, memory_order_release);
    worker_fact(g->w);
    return 0;
}

/* -- set-up and main loop -- */

static uint64_t saved_slots(const struct plan *plan, uint64_t blocks, uint32_t every)
{
    if (plan->mode != PLAN_TRAIN || every == VISITS_CHECKPOINT_FULL)
        return 0;
    uint64_t held = every == VISITS_CHECKPOINT_NONE ? blocks : every;
    return plan->microbatches * (held < blocks ? held : blocks);
}

static struct layers_shape layers_shape_of(const struct gpu *g, uint32_t every)
{
    const struct plan *plan = g->w->plan;
    uint64_t context = generate_context(plan);
    return (struct layers_shape){
        .microbatch_size = plan->micro_batch_size,
        .seq_len = plan->seq_len,
        .saved_slots = saved_slots(plan, g->w->layout.config.n_layers, every),
        .context_max = context > plan->seq_len ? context : plan->seq_len,
        .forward_only = plan->mode != PLAN_TRAIN,
    };
}

/* Bytes of all device buffers under a mode of activation checkpointing. */
static uint64_t device_bytes(const struct gpu *g, uint32_t every)
{
    const struct plan *plan = g->w->plan;
    uint64_t compute = g->device->compute_bytes;
    struct layers_shape shape = layers_shape_of(g, every);
    return buffers_bytes(plan, &g->w->layout, every, compute) +
           layers_bytes(g->device, &g->w->layout, &shape) +
           generate_bytes(plan, &g->w->layout, compute);
}

/* What fits and costs least: no recomputation, else one, with whichever grouping takes the least
 * room. */
static uint32_t cheapest_mode(const struct gpu *g)
{
    uint64_t room = g->w->plan->device_bytes_max, blocks = g->w->layout.config.n_layers;
    uint32_t best = VISITS_CHECKPOINT_FULL;
    if (g->w->plan->mode != PLAN_TRAIN || device_bytes(g, VISITS_CHECKPOINT_NONE) <= room)
        return VISITS_CHECKPOINT_NONE;
    for (uint32_t every = 2; every < blocks && device_bytes(g, best) > room; every++)
        if (device_bytes(g, every) < device_bytes(g, best))
            best = every;
    return best;
}

static int choose_mode(struct gpu *g)
{
    const struct plan *plan = g->w->plan;
    g->checkpoint_every =
        plan->checkpoint_every == PLAN_CHECKPOINT_AUTO ? cheapest_mode(g) : plan->checkpoint_every;
    uint64_t need = device_bytes(g, g->checkpoint_every);
    g->w->self->device_bytes = need;
    g->w->self->checkpoint_every = g->checkpoint_every;
    if (need <= plan->device_bytes_max)
        return 0;
    (void)error_set(ERROR_FIT, "device buffers need %llu bytes, max_ram leaves %llu for them",
                    (unsigned long long)need, (unsigned long long)plan->device_bytes_max);
    return error_hint("a smaller micro_batch_size or seq_len, or activation_checkpointing = "
                      "\"full\", needs less");
}

static int open_layers(struct gpu *g)
{
    struct layers_shape shape = layers_shape_of(g, g->checkpoint_every);
    return layers_init(&g->layers, g->device, &g->w->layout, &shape);
}

/* A generation begins: rings at 0, every GRADIENT frame free, no step. */
static void open_rings(struct gpu *g)
{
    const struct segment *s = &g->w->segment;
    struct worker_control *self = g->w->self;
    uint64_t frames = g->w->plan->pools[REGION_GRADIENT_POOL].frames;
    for (g->n_free = 0; g->n_free < frames; g->n_free++)
        g->free_frames[g->n_free] = (uint32_t)(frames - 1 - g->n_free);
    g->step = g->sweeps = 0;
    /* relaxed: READY releases them */
    atomic_store_explicit(&self->forward_step, 0, memory_order_relaxed);
    atomic_store_explicit(&self->backward_step, 0, memory_order_relaxed);
    atomic_store_explicit(&self->sweep_request, 0, memory_order_relaxed);
    atomic_store_explicit(&self->evaluated, 0, memory_order_relaxed);
    atomic_store_explicit(&self->generated, 0, memory_order_relaxed);
    segment_ring(s, RING_WEIGHTS, 0, &g->weights);
    segment_ring(s, RING_WEIGHTS_RETURN, 0, &g->weights_return);
    segment_ring(s, RING_MICROBATCH, 0, &g->microbatch);
    segment_ring(s, RING_MICROBATCH_RETURN, 0, &g->microbatch_return);
    if (g->w->plan->mode != PLAN_TRAIN)
        return;
    for (uint32_t i = 0; i < g->w->plan->opt_workers; i++) {
        segment_ring(s, RING_GRADIENT, i, &g->gradient[i]);
        segment_ring(s, RING_GRADIENT_RETURN, i, &g->gradient_return[i]);
    }
}

static int gpu_open(struct gpu *g, struct worker *w)
{
    const struct plan *plan = w->plan;
    memset(g, 0, sizeof *g);
    g->w = w;
    arm_flip(g);
    uint64_t frames = plan->pools[REGION_GRADIENT_POOL].frames;
    g->free_frames = calloc(frames + 1, sizeof *g->free_frames);
    if (!g->free_frames)
        return error_set(ERROR_FAILED, "out of memory");
    if (device_cpu_open(&g->device, plan->bf16 ? DEVICE_BF16 : DEVICE_F32, plan->threads) < 0)
        return -(int)error_kind_now();
    device_cpu_set_heartbeat(g->device, &w->self->heartbeat);
    if (choose_mode(g) < 0 || visits_init(&g->visits, &w->layout, g->checkpoint_every) < 0 ||
        visits_forward_only(&g->forward_visits, &w->layout) < 0 ||
        buffers_open(&g->buffers, g->device, plan, &w->layout, g->checkpoint_every) < 0 ||
        open_layers(g) < 0 || generate_open(g) < 0)
        return -(int)error_kind_now();
    (void)snprintf(w->self->lineage, sizeof w->self->lineage, "%s",
                   g->device->ops->lineage(g->device));
    log_line(LOG_INFO, "device: %s; %llu bytes of buffers", g->device->ops->lineage(g->device),
             (unsigned long long)w->self->device_bytes);
    return 0;
}

static void gpu_close(struct gpu *g)
{
    generate_close(g);
    layers_destroy(g->layers);
    buffers_close(&g->buffers);
    device_close(g->device);
    visits_destroy(&g->visits);
    visits_destroy(&g->forward_visits);
    free(g->free_frames);
}

static uint64_t order(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire);
}

/* One request, whichever the launcher made: 1 done, 0 there was none, negative. */
static int serve(struct gpu *g)
{
    const struct launcher_control *o = g->w->orders;
    uint64_t begin = order(&o->begin_step);
    if (order(&o->evaluate_request) > order(&g->w->self->evaluated))
        return gpu_evaluate(g) < 0 ? -(int)error_kind_now() : 1;
    if (order(&o->generate_request) > order(&g->w->self->generated))
        return gpu_generate(g) < 0 ? -(int)error_kind_now() : 1;
    if (begin > g->step) {
        g->step = g->step ? g->step + 1 : begin; /* the first is the one after the newest commit */
        return train_step(g) < 0 ? -(int)error_kind_now() : 1;
    }
    return 0;
}

/* The requests of one generation, until something ends them. */
static int serve_generation(struct gpu *g)
{
    int rc = worker_wait_running(g->w);
    while (rc >= 0) {
        worker_operation(g->w, OPERATION_COMPUTE);
        rc = serve(g);
        worker_operation(g->w, OPERATION_IDLE);
        if (rc == 0)
            rc = worker_pause(g->w, WORKER_WAIT_OTHER);
    }
    return rc;
}

int schedule_run(struct worker *w)
{
    struct gpu g;
    int rc = gpu_open(&g, w);
    while (rc >= 0) {
        open_rings(&g);
        worker_ready(w);
        rc = serve_generation(&g);
        if (rc == -ERROR_ABANDONED) {
            worker_operation(w, OPERATION_STOP);
            g.device->ops->synchronize(g.device); /* copies still read and write frames */
            rc = worker_rejoin(w);
        }
    }
    gpu_close(&g);
    return rc;
}
