/*
 * The steady state of io_worker: one turn does whatever can be done now, and never waits.
 *
 * Two walks run side by side. The gpu's: MICROBATCH and WEIGHTS descriptors in visiting order, each
 * page as soon as its frame holds the version that the step computes with. The optimizer's: for the
 * step whose gradients come next, images are read ahead from the newest commit, lent in forward
 * order once the launcher has decided, and come back one version on.
 *
 * Reading ahead for the next apply starts when a step is complete, or, where that step is to be
 * committed, when it is durable: these reads are also the commit's read-back (slots.h), and count
 * as such only when they were submitted after its flush.
 *
 * How far ahead: `prefetch` pages per worker; "predict" reads as many as keep the worker busy while
 * one is read (read time over update time, moving averages) plus one, within the pool.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io_worker/io.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"
#include "procs/mutant.h"

uint64_t pager_weights_bytes(const struct io *io, uint64_t page)
{
    return io->layout->pages[page].elements * (io->plan->bf16 ? 2 : 4);
}

static uint64_t order(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire);
}

static uint64_t page_of(const struct io *io, uint32_t lane, uint64_t rank)
{
    return rank * io->plan->opt_workers + lane;
}

/* A borrower gives back only what it has: anything else would be lent twice from then on. */
static int not_lent(const char *ring, uint64_t what)
{
    return error_set(ERROR_DAMAGED, "ring %s: %llu came back and was not lent", ring,
                     (unsigned long long)what);
}

/* -- MICROBATCH -- */

static int fill_microbatch(struct io *io, enum data_set set, uint64_t first, uint64_t count,
                           int32_t *frame)
{
    uint64_t t = io->plan->seq_len, b = io->plan->micro_batch_size, n = t * b;
    for (uint64_t i = 0; i < b; i++) {
        struct data_sample sample = {.tokens = frame + i * t,
                                     .labels = frame + n + i * t,
                                     .position = frame + 2 * n + i * t,
                                     .document_start = frame + 3 * n + i * t};
        /* rows beyond the last sequence of an evaluation repeat the first one, without labels */
        if (data_read_sample(io->data, set, i < count ? first + i : first, &sample) < 0)
            return -(int)error_kind_now();
        for (uint64_t k = 0; i >= count && k < t; k++)
            sample.labels[k] = DATA_NO_LABEL;
    }
    return 0;
}

static int publish_microbatch(struct io *io, struct ring_descriptor *d, enum data_set set,
                              uint64_t first, uint64_t count)
{
    d->frame = io->free_microbatches[--io->n_free_microbatches];
    int32_t *frame = segment_frame(&io->w->segment, REGION_MICROBATCH_POOL, 0, d->frame);
    if (fill_microbatch(io, set, first, count, frame) < 0)
        return -(int)error_kind_now();
    if (io->plan->frame_hashes)
        d->hash = page_image_digest(frame,
                                    microbatch_bytes(io->plan->micro_batch_size, io->plan->seq_len))
                      .low;
    if (ring_lend(&io->microbatch, d) < 0)
        return error_wrap("ring MICROBATCH");
    fault_point(FAULT_io_microbatch_published);
    return 1;
}

static int feed_training(struct io *io)
{
    struct cursor *c = &io->train_feed;
    uint64_t b = io->plan->micro_batch_size, a = io->plan->microbatches;
    int done = 0;
    while (io->n_free_microbatches && c->number <= order(&io->w->orders->begin_step)) {
        struct ring_descriptor d = {.kind = MICROBATCH_TRAIN, .page = c->k, .step = c->number};
        if (publish_microbatch(io, &d, DATA_TRAIN, ((c->number - 1) * a + c->k) * b, b) < 0)
            return -(int)error_kind_now();
        done = 1;
        if (++c->k == a) {
            c->k = 0;
            c->number++;
        }
    }
    return done;
}

static int feed_evaluation(struct io *io)
{
    struct cursor *c = &io->evaluate_feed;
    const struct worker_control *self = io->w->self;
    uint64_t b = io->plan->micro_batch_size, n = order(&self->evaluate_microbatches);
    uint64_t sequences = order(&self->evaluate_sequences);
    enum data_set set = io->plan->mode == PLAN_EVALUATE ? DATA_TRAIN : DATA_VALIDATION;
    int done = 0;
    while (io->n_free_microbatches && c->number < order(&io->w->orders->evaluate_request)) {
        if (c->k < n) {
            struct ring_descriptor d = {.kind = MICROBATCH_EVALUATE, .page = c->k};
            uint64_t first = c->k * b, left = sequences - first;
            if (publish_microbatch(io, &d, set, first, left < b ? left : b) < 0)
                return -(int)error_kind_now();
            done = 1;
            c->k++;
        }
        if (c->k >= n) {
            c->k = 0;
            c->number++;
        }
    }
    return done;
}

static int feed(struct io *io)
{
    struct ring_descriptor d;
    int rc, done = 0;
    uint64_t frames = io->plan->pools[REGION_MICROBATCH_POOL].frames;
    while ((rc = ring_consume(&io->microbatch_return, &d)) == 1) {
        if (d.frame >= frames || io->n_free_microbatches == frames)
            return not_lent("MICROBATCH_RETURN", d.frame);
        io->free_microbatches[io->n_free_microbatches++] = d.frame;
    }
    if (rc < 0 || !io->data)
        return rc;
    if (io->plan->mode == PLAN_TRAIN && (rc = feed_training(io)) != 0)
        done = rc;
    if (rc >= 0 && (rc = feed_evaluation(io)) != 0)
        done = rc;
    if (done > 0)
        worker_bell(io->w, ROLE_GPU, 0);
    return done;
}

/* -- WEIGHTS -- */

/* Lends the cursor's page: 1, 0 when the ring is full (this one, or that of the returns would be),
 * negative. */
static int lend_weights(struct io *io, const struct visits *vs, struct cursor *c, uint32_t kind)
{
    const struct visit *visit = &vs->visits[c->visit];
    if (io->n_lent == io->weights_return.depth)
        return 0;
    struct ring_descriptor d = {.kind = kind, .step = c->number, .visit = c->visit};
    d.page = visit_page(io->layout, visit, c->k);
    d.frame = (uint32_t)d.page;
    d.version = io->weights_version[d.page];
    d.hash = io->weights_hash[d.page];
    int rc = ring_publish(&io->weights, &d);
    if (rc < 0)
        return rc == -EAGAIN ? 0 : error_wrap("ring WEIGHTS");
    io->weights_lent[d.page]++;
    io->n_lent++;
    fault_point(FAULT_io_weights_lent);
    if (++c->k == visit_n_pages(io->layout, visit)) {
        c->k = 0;
        c->visit++;
    }
    return 1;
}

/* Visits without pages take no place in the ring. */
static void pass_empty_visits(const struct io *io, const struct visits *vs, struct cursor *c)
{
    while (c->visit < vs->n_visits && visit_n_pages(io->layout, &vs->visits[c->visit]) == 0)
        c->visit++;
    if (c->visit == vs->n_visits) {
        c->number++;
        c->visit = c->k = 0;
    }
}

static int lend_step(struct io *io)
{
    struct cursor *c = &io->step_cursor;
    int done = 0, rc;
    /* step s computes with what step s - 1 left: not before that decision has been taken in here */
    while (c->number <= order(&io->w->orders->begin_step) && c->number == io->apply_step + 1) {
        uint64_t page = visit_page(io->layout, &io->visits.visits[c->visit], c->k);
        if ((io->weights_version[page] != io->base_version &&
             !mutant(MUTANT_weights_before_update)) ||
            (rc = lend_weights(io, &io->visits, c, 0)) == 0)
            break;
        if (rc < 0)
            return rc;
        pass_empty_visits(io, &io->visits, c);
        done++;
    }
    return done;
}

static int lend_sweeps(struct io *io)
{
    const struct worker_control *gpu = segment_region(&io->w->segment, REGION_GPU_CONTROL, 0);
    struct cursor *c = &io->sweep_cursor;
    int done = 0, rc;
    while (c->number <= order(&gpu->sweep_request)) {
        if ((rc = lend_weights(io, &io->forward_visits, c, 1)) == 0)
            break;
        if (rc < 0)
            return rc;
        pass_empty_visits(io, &io->forward_visits, c);
        done++;
    }
    return done;
}

static int take_weights_back(struct io *io)
{
    struct ring_descriptor d;
    int rc;
    while ((rc = ring_consume(&io->weights_return, &d)) == 1) {
        if (d.page >= io->layout->n_pages || io->weights_lent[d.page] == 0)
            return not_lent("WEIGHTS_RETURN", d.page);
        io->weights_lent[d.page]--;
        io->n_lent--;
    }
    return rc;
}

static int lend(struct io *io)
{
    int steps = io->plan->mode == PLAN_TRAIN ? lend_step(io) : 0;
    int sweeps = steps < 0 ? steps : lend_sweeps(io);
    if (sweeps < 0)
        return sweeps;
    if (steps + sweeps)
        worker_bell(io->w, ROLE_GPU, 0);
    return steps + sweeps;
}

/* -- STATE -- */

static void submit_state_read(struct io *io, struct frame_io *f);

/* What was read is not what the table says: once more, then it is damage. */
static void bad_state(struct io *io, struct frame_io *f)
{
    const struct page_entry *entry = &io->tables.complete[f->page];
    struct page_image_layout layout;
    if (f->reads < 2) {
        log_line(LOG_WARN, "%s, offset %llu: page %llu was read wrongly; reading it once more",
                 store_file_path(io->store, f->request.file), (unsigned long long)f->request.offset,
                 (unsigned long long)f->page);
        submit_state_read(io, f);
        return;
    }
    store_page_layout(io->store, f->page, &layout);
    io->failed =
        store_verify_image(io->store, entry, f->request.buffer) < 0
            ? error_as(ERROR_DAMAGED)
            : error_set(ERROR_DAMAGED, "page %llu: opt_worker %u finds damage that is not there",
                        (unsigned long long)f->page, f->lane);
}

static void on_state_read(struct io_request *request, int result)
{
    struct frame_io *f = request->context;
    struct io *io = f->io;
    struct lane *lane = &io->lanes[f->lane];
    const struct page_entry *entry = &io->tables.complete[f->page];
    struct page_image_layout layout;
    struct page_identity identity;
    if (result < 0) {
        io->failed = engine_request_error(io->engine, request);
        return;
    }
    store_page_layout(io->store, f->page, &layout);
    store_page_identity(io->store, f->page, entry->version, &identity);
    const struct page_image_header *header = request->buffer;
    /* the parts' bytes are compared with these digests by the opt_worker, where they are used */
    if (page_image_verify_header(header, &layout, &identity) < 0 ||
        memcmp(header->digest, entry->digest, sizeof entry->digest) != 0) {
        bad_state(io, f);
        return;
    }
    double seconds = clock_seconds_since(request->submitted_ns);
    lane->read_s = lane->read_s > 0.0 ? 0.75 * lane->read_s + 0.25 * seconds : seconds;
    atomic_fetch_add_explicit(&io->w->self->bytes_read, request->bytes, memory_order_relaxed);
    fault_point(FAULT_io_state_landed);
    f->ready = 1;
}

/* The depth of the engine covers all frames. */
static void submit_state_read(struct io *io, struct frame_io *f)
{
    const struct page_entry *entry = &io->tables.complete[f->page];
    struct page_image_layout layout;
    store_page_layout(io->store, f->page, &layout);
    f->request.buffer = segment_frame(&io->w->segment, REGION_STATE_POOL, f->lane, f->frame);
    f->request.bytes = page_image_bytes(&layout, (enum page_codec)entry->codec);
    store_request_page(io->store, &f->request, IO_READ, f->page, entry->slot);
    f->ready = 0;
    f->reads++;
    f->after_commit = order(&io->w->self->committed_step) == order(&io->w->self->complete_step);
    CHECK(engine_submit(io->engine, &f->request) == ENGINE_ACCEPTED);
}

/* Pages to have read or in flight beyond those lent. */
static uint64_t depth_of(const struct io *io, const struct lane *lane)
{
    uint64_t depth = io->plan->prefetch;
    if (depth == 0) {
        double ahead = lane->apply_s > 0.0 ? lane->read_s / lane->apply_s + 1.0 : 1.0;
        depth = ahead < (double)lane->frames_max ? (uint64_t)ahead + 1 : lane->frames_max;
    }
    return depth < lane->frames_max ? depth : lane->frames_max;
}

static int read_ahead(struct io *io, uint32_t l)
{
    struct lane *lane = &io->lanes[l];
    int done = 0;
    while (lane->read_rank < lane->own_pages && lane->n_free_in &&
           lane->read_rank - lane->lend_rank < depth_of(io, lane) &&
           engine_in_flight(io->engine) < io->engine_depth) {
        struct frame_io *f = &lane->in[lane->free_in[--lane->n_free_in]];
        f->page = page_of(io, l, lane->read_rank);
        f->reads = 0;
        submit_state_read(io, f);
        lane->in_of_rank[lane->read_rank++ % lane->frames_max] = f->frame;
        done++;
    }
    return done;
}

static int lend_image(struct io *io, struct lane *lane, struct frame_io *f)
{
    struct ring_descriptor d = {.frame = f->frame,
                                .out_frame = f->lent_out,
                                .page = f->page,
                                .version = io->tables.complete[f->page].version,
                                .step = io->apply_step};
    if (ring_lend(&lane->state, &d) < 0)
        return error_wrap("ring STATE");
    fault_point(FAULT_io_state_lent);
    return 0;
}

/* Images that the opt_worker found damaged, read a second time. */
static int lend_again(struct io *io, struct lane *lane)
{
    int done = 0;
    for (uint64_t i = 0; i < lane->n_again;) {
        struct frame_io *f = &lane->in[lane->again[i]];
        if (!f->ready) {
            i++;
            continue;
        }
        if (lend_image(io, lane, f) < 0)
            return -(int)error_kind_now();
        lane->again[i] = lane->again[--lane->n_again];
        done++;
    }
    return done;
}

static int lend_state(struct io *io, uint32_t l)
{
    struct lane *lane = &io->lanes[l];
    int done = lend_again(io, lane);
    if (done < 0)
        return done;
    while (lane->lend_rank < lane->read_rank && lane->n_free_out) {
        struct frame_io *f = &lane->in[lane->in_of_rank[lane->lend_rank % lane->frames_max]];
        if (!f->ready)
            break;
        f->lent_out = lane->free_out[--lane->n_free_out];
        if (lend_image(io, lane, f) < 0)
            return -(int)error_kind_now();
        lane->lend_rank++;
        done++;
    }
    if (done)
        worker_bell(io->w, ROLE_OPT, l);
    return done;
}

/* -- WRITEBACK -- */

static void on_slot_written(struct io_request *request, int result)
{
    struct frame_io *f = request->context;
    struct io *io = f->io;
    struct lane *lane = &io->lanes[f->lane];
    if (result < 0) {
        io->failed = engine_request_error(io->engine, request);
        return;
    }
    atomic_fetch_add_explicit(&io->w->self->bytes_written, request->bytes, memory_order_relaxed);
    lane->free_out[lane->n_free_out++] = f->frame;
    io->pages_written++;
}

static uint32_t choose_slot(const struct io *io, uint64_t page)
{
    uint32_t pinned = io->exporter.export ? io->exporter.pinned[page].slot : SLOT_NONE;
    int verify = io->plan->slots_per_page > 2 && !mutant(MUTANT_slots_not_anchored);
    struct slot_holders holders = {
        .anchor = verify ? io->tables.anchor[page].slot : io->tables.committed[page].slot,
        .committed = io->tables.committed[page].slot,
        .committing = SLOT_NONE, /* a commit names the complete version */
        .complete = io->tables.complete[page].slot,
        .forming = SLOT_NONE,
        .pinned = &pinned,
        .n_pinned = io->exporter.export ? 1 : 0,
    };
    if (mutant(MUTANT_slot_from_step))
        return (uint32_t)(io->apply_step % 2);
    return slots_choose(&holders, io->plan->slots_per_page);
}

/* A slot that a changed entry does not name any more would count as free. */
static int check_entries(const struct io *io, uint64_t page)
{
    const struct page_tables *t = &io->tables;
    if (page_entry_valid(&t->anchor[page]) && page_entry_valid(&t->committed[page]) &&
        page_entry_valid(&t->complete[page]))
        return 0;
    return error_set(ERROR_DAMAGED,
                     "page table in shared memory: an entry of page %llu was changed",
                     (unsigned long long)page);
}

void pager_mark_read_back(struct io *io, uint64_t page)
{
    if (readback_mark(&io->readback, io->newest.sequence, page))
        page_tables_anchored(&io->tables);
}

/* The image that the opt_worker has just used was the newest commit's, read since its flush. */
static int was_read_back(const struct io *io, const struct frame_io *f)
{
    const struct page_entry *read = &io->tables.complete[f->page];
    const struct page_entry *named = &io->tables.committed[f->page];
    return f->after_commit && read->slot == named->slot && read->version == named->version;
}

/* A descriptor of this worker's own page and frames: nothing else may index our arrays. */
static int check_owner(const struct io *io, uint32_t l, const struct ring_descriptor *d)
{
    if (d->page < io->layout->n_pages && d->frame < io->lanes[l].frames_max &&
        topology_page_owner(d->page, io->plan->opt_workers) == l)
        return 0;
    return error_set(ERROR_DAMAGED, "opt_worker %u gave back frame %u for page %llu", l, d->frame,
                     (unsigned long long)d->page);
}

/* The page's new version: to WEIGHTS by copying, to the store by writing. */
static int write_back(struct io *io, uint32_t l, const struct ring_descriptor *d)
{
    struct lane *lane = &io->lanes[l];
    struct frame_io *f = &lane->out[d->frame];
    void *image = segment_frame(&io->w->segment, REGION_OUT_POOL, l, d->frame);
    struct page_image_layout layout;
    struct page_identity identity;
    store_page_layout(io->store, d->page, &layout);
    store_page_identity(io->store, d->page, d->step, &identity);
    if (d->step != io->apply_step)
        return error_set(ERROR_DAMAGED, "ring WRITEBACK: page %llu of step %llu in step %llu",
                         (unsigned long long)d->page, (unsigned long long)d->step,
                         (unsigned long long)io->apply_step);
    if (io->tables.forming[d->page].version == d->step)
        return not_lent("WRITEBACK", d->page); /* its new version is here already */
    if (page_image_verify_header(image, &layout, &identity) < 0)
        return error_wrap("ring WRITEBACK, page %llu of step %llu", (unsigned long long)d->page,
                          (unsigned long long)d->step);
    if (check_entries(io, d->page) < 0)
        return -(int)error_kind_now();
    uint32_t slot = choose_slot(io, d->page);
    if (slot == SLOT_NONE)
        return error_set(ERROR_FAILED, "page %llu: no slot is free for version %llu",
                         (unsigned long long)d->page, (unsigned long long)d->step);
    if (io->weights_lent[d->page] != 0) /* backward of this step has returned every frame */
        return error_set(ERROR_DAMAGED, "ring WEIGHTS_RETURN: page %llu has not come back",
                         (unsigned long long)d->page);
    memcpy(segment_frame(&io->w->segment, REGION_WEIGHTS_POOL, 0, (uint32_t)d->page),
           page_image_part(image, &layout, PART_WEIGHTS), pager_weights_bytes(io, d->page));
    page_entry_from_image(&io->tables.forming[d->page], image, slot);
    io->weights_version[d->page] = d->step;
    io->weights_hash[d->page] = io->tables.forming[d->page].digest[PART_WEIGHTS].low;
    f->page = d->page;
    f->request.buffer = image;
    f->request.bytes = page_image_bytes(&layout, PAGE_RAW);
    store_request_page(io->store, &f->request, IO_WRITE, d->page, slot);
    CHECK(engine_submit(io->engine, &f->request) == ENGINE_ACCEPTED); /* depth covers all frames */
    io->pages_back++;
    fault_point(FAULT_io_slot_submitted);
    return 0;
}

static void take_state_back(struct io *io, struct lane *lane, const struct ring_descriptor *d)
{
    struct frame_io *f = &lane->in[d->frame];
    if (d->kind == STATE_RETURN_BAD) {
        lane->again[lane->n_again++] = d->frame;
        bad_state(io, f);
        return;
    }
    /* the worker compared every byte of the version that it used */
    if (was_read_back(io, f))
        pager_mark_read_back(io, f->page);
    lane->free_in[lane->n_free_in++] = d->frame;
}

static int take_writebacks(struct io *io, uint32_t l)
{
    struct lane *lane = &io->lanes[l];
    struct ring_descriptor d;
    int rc = 0, done = 0;
    while (engine_in_flight(io->engine) < io->engine_depth && /* a bad image is read again */
           (rc = ring_consume(&lane->state_return, &d)) == 1) {
        if (check_owner(io, l, &d) < 0)
            return -(int)error_kind_now();
        if (lane->n_free_in == lane->frames_max || lane->n_again == lane->frames_max)
            return not_lent("STATE_RETURN", d.frame);
        take_state_back(io, lane, &d);
        done++;
    }
    while (rc == 0 && engine_in_flight(io->engine) < io->engine_depth &&
           (rc = ring_consume(&lane->writeback, &d)) == 1) {
        if (check_owner(io, l, &d) < 0)
            return -(int)error_kind_now();
        uint64_t now = clock_now_ns();
        double seconds = (double)(now - lane->last_writeback_ns) * 1e-9;
        if (io->pages_back && seconds < 10.0)
            lane->apply_s = lane->apply_s > 0.0 ? 0.75 * lane->apply_s + 0.25 * seconds : seconds;
        lane->last_writeback_ns = now;
        rc = write_back(io, l, &d);
        done++;
    }
    return rc < 0 ? rc : done;
}

/* -- the step: decision, completeness, commit -- */

static void begin_apply(struct io *io)
{
    io->orders = io->w->orders->orders[(io->apply_step + 1) % PLAN_SLACK_STEPS];
    CHECK(io->orders.step == io->apply_step + 1);
    io->apply_step++;
    io->reads_may_begin = 1;
    io->pages_back = io->pages_written = io->orders.skip ? io->layout->n_pages : 0;
    if (!io->orders.skip) {
        io->base_version = io->apply_step;
        io->w->self->apply_begin_ns[io->apply_step % PLAN_SLACK_STEPS] = clock_now_ns();
    }
}

/* Every page of the step exists in its new version and is hashed. */
static void announce_complete(struct io *io)
{
    struct worker_control *self = io->w->self;
    struct commit_facts facts = io->tables.state.facts, *f = &facts;
    uint64_t at = io->apply_step % PLAN_SLACK_STEPS;
    fault_point(FAULT_io_slots_written);
    f->step = io->apply_step;
    f->optimizer_step = io->orders.t;
    f->seed = io->plan->seed;
    f->data_position[0] = io->apply_step * io->plan->microbatches * io->plan->micro_batch_size;
    f->tokens = io->orders.labelled;
    f->loss = io->orders.loss;
    f->norm = io->orders.norm;
    f->learning_rate = io->orders.learning_rate;
    f->skipped = io->orders.skip;
    if (!io->orders.skip)
        spike_window_push(&f->spike_count, f->spike_loss, f->spike_norm, f->loss, f->norm);
    const struct worker_control *gpu = segment_region(&io->w->segment, REGION_GPU_CONTROL, 0);
    memset(f->lineage, 0, sizeof f->lineage);
    memcpy(f->lineage, gpu->lineage, strnlen(gpu->lineage, sizeof f->lineage - 1));
    struct page_digest hash = commit_state_hash(f, io->tables.forming, io->layout->n_pages);
    page_tables_complete(&io->tables, f, hash);
    memcpy(self->state_hash[at], &hash, sizeof hash);
    self->complete_ns[at] = clock_now_ns();
    for (uint32_t l = 0; l < io->plan->opt_workers && !io->orders.skip; l++)
        io->lanes[l].read_rank = io->lanes[l].lend_rank = 0;
    io->reads_may_begin = !io->orders.commits;
    atomic_store_explicit(&self->complete_step, io->apply_step, memory_order_release);
    fault_point(FAULT_io_complete);
    worker_fact(io->w);
}

static void on_committed(void *context, int result, const struct commit_record *record)
{
    struct io *io = context;
    if (result < 0) {
        io->failed = result;
        return;
    }
    io->newest = *record;
    uint64_t bytes = record->table_bytes + COMMIT_RECORD_BYTES; /* written, and read back */
    atomic_fetch_add_explicit(&io->w->self->bytes_written, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&io->w->self->bytes_read, bytes, memory_order_relaxed);
    page_tables_committed(&io->tables);
    readback_begin(&io->readback, record->sequence);
    io->reads_may_begin = 1;
    io->w->self->committed_ns[record->facts.step % PLAN_SLACK_STEPS] = clock_now_ns();
    fault_point(FAULT_io_after_record);
    atomic_store_explicit(&io->w->self->committed_step, record->facts.step, memory_order_release);
    fault_point(FAULT_io_committed);
    worker_fact(io->w);
}

static int advance_step(struct io *io)
{
    const struct launcher_control *orders = io->w->orders;
    uint64_t complete = order(&io->w->self->complete_step);
    uint64_t committed = order(&io->w->self->committed_step);
    int idle = commit_phase_now(io->commit) == COMMIT_IDLE;
    uint64_t pages = mutant(MUTANT_commit_before_writes) ? io->pages_back : io->pages_written;
    if (io->apply_step > complete && pages == io->layout->n_pages) {
        announce_complete(io);
        return 1;
    }
    if (io->apply_step != complete || (!idle && !mutant(MUTANT_apply_before_commit)) ||
        read_back_needed(io))
        return 0;
    if (committed < complete && order(&orders->commit_step) >= complete) {
        atomic_store_explicit(&io->w->self->flushing, 1, memory_order_release);
        return commit_begin(io->commit, &io->tables.state.facts, io->tables.complete, on_committed,
                            io) < 0
                   ? -1
                   : 1;
    }
    if (order(&orders->apply_step) > io->apply_step &&
        (order(&orders->commit_step) <= committed || mutant(MUTANT_apply_before_commit))) {
        begin_apply(io);
        return 1;
    }
    return 0;
}

static int serve_lanes(struct io *io)
{
    uint64_t complete = order(&io->w->self->complete_step);
    int applying = io->apply_step > complete && !io->orders.skip, done = 0;
    for (uint32_t l = 0; l < io->plan->opt_workers; l++) {
        int rc = take_writebacks(io, l);
        if (rc < 0)
            return rc;
        done += rc;
        if (io->reads_may_begin)
            done += read_ahead(io, l);
        if (applying && (rc = lend_state(io, l)) < 0)
            return rc;
        done += applying ? rc : 0;
    }
    return done;
}

int pager_turn(struct io *io)
{
    int done = 0, rc;
    if (io->engine)
        done += (int)engine_poll(io->engine);
    if (io->failed < 0)
        return io->failed;
    if ((rc = take_weights_back(io)) < 0 || (rc = feed(io)) < 0)
        return rc;
    done += rc;
    if (io->plan->mode == PLAN_TRAIN) {
        done += (int)commit_do_work(io->commit);
        if (commit_phase_now(io->commit) != COMMIT_FLUSHING)
            atomic_store_explicit(&io->w->self->flushing, 0, memory_order_release);
        if ((rc = advance_step(io)) < 0)
            return -(int)error_kind_now();
        done += rc;
        if ((rc = serve_lanes(io)) < 0)
            return rc;
        done += rc;
        if ((rc = read_back_turn(io)) < 0)
            return rc;
        done += rc;
    }
    rc = lend(io);
    return rc < 0 ? rc : done + rc;
}

/* -- set-up -- */

static void open_frame(struct frame_io *f, struct io *io, uint32_t lane, uint32_t frame)
{
    f->io = io;
    f->lane = lane;
    f->frame = frame;
    f->request.context = f;
}

static int open_lane(struct io *io, uint32_t l)
{
    struct lane *lane = &io->lanes[l];
    uint64_t n = lane->frames_max = io->plan->pools[REGION_STATE_POOL].frames;
    CHECK(n == io->plan->pools[REGION_OUT_POOL].frames);
    lane->in = calloc(n, sizeof *lane->in);
    lane->out = calloc(n, sizeof *lane->out);
    lane->free_in = calloc(n, sizeof *lane->free_in);
    lane->free_out = calloc(n, sizeof *lane->free_out);
    lane->in_of_rank = calloc(n, sizeof *lane->in_of_rank);
    lane->again = calloc(n, sizeof *lane->again);
    if (!lane->in || !lane->out || !lane->free_in || !lane->free_out || !lane->in_of_rank ||
        !lane->again)
        return error_set(ERROR_FAILED, "out of memory for %llu frames", (unsigned long long)n);
    for (uint32_t f = 0; f < n; f++) {
        open_frame(&lane->in[f], io, l, f);
        open_frame(&lane->out[f], io, l, f);
        lane->in[f].request.on_done = on_state_read;
        lane->out[f].request.on_done = on_slot_written;
    }
    while (page_of(io, l, lane->own_pages) < io->layout->n_pages)
        lane->own_pages++;
    return 0;
}

static int open_training(struct io *io)
{
    io->lanes = calloc(io->plan->opt_workers, sizeof *io->lanes);
    if (!io->lanes)
        return error_set(ERROR_FAILED, "out of memory");
    for (uint32_t l = 0; l < io->plan->opt_workers; l++)
        if (open_lane(io, l) < 0)
            return -(int)error_kind_now();
    io->engine_depth = store_options_of(io->store)->engine_depth;
    return 0;
}

int pager_open(struct io *io)
{
    /* gpu_worker is READY before io_worker is started: its choice stands */
    const struct worker_control *gpu = segment_region(&io->w->segment, REGION_GPU_CONTROL, 0);
    uint64_t frames = io->plan->pools[REGION_MICROBATCH_POOL].frames;
    io->free_microbatches = calloc(frames + 1, sizeof *io->free_microbatches);
    if (!io->free_microbatches || visits_init(&io->visits, io->layout, gpu->checkpoint_every) < 0 ||
        visits_forward_only(&io->forward_visits, io->layout) < 0)
        return error_set(ERROR_FAILED, "out of memory");
    return io->plan->mode == PLAN_TRAIN ? open_training(io) : 0;
}

static void begin_lane(struct io *io, uint32_t l)
{
    struct lane *lane = &io->lanes[l];
    const struct segment *s = &io->w->segment;
    segment_ring(s, RING_STATE, l, &lane->state);
    segment_ring(s, RING_STATE_RETURN, l, &lane->state_return);
    segment_ring(s, RING_WRITEBACK, l, &lane->writeback);
    lane->n_free_in = lane->n_free_out = lane->n_again = 0;
    for (uint32_t f = 0; f < lane->frames_max; f++) {
        lane->free_in[lane->n_free_in++] = f;
        lane->free_out[lane->n_free_out++] = f;
    }
    lane->read_rank = lane->lend_rank = 0;
    lane->last_writeback_ns = clock_now_ns();
}

void pager_announce_resume(struct io *io)
{
    struct worker_control *self = io->w->self;
    const struct commit_facts *f = &io->tables.state.facts;
    const struct commit_facts *durable = &io->newest.facts;
    self->resume_step = f->step;
    self->resume_t = f->optimizer_step;
    self->resume_data_position = f->data_position[0];
    self->spike_count = f->spike_count;
    memcpy(self->spike_loss, f->spike_loss, sizeof self->spike_loss);
    memcpy(self->spike_norm, f->spike_norm, sizeof self->spike_norm);
    memcpy(self->state_hash[durable->step % PLAN_SLACK_STEPS], &io->newest.state_hash, 16);
    memcpy(self->state_hash[f->step % PLAN_SLACK_STEPS], &io->tables.state.state_hash, 16);
    (void)snprintf(self->lineage, sizeof self->lineage, "%s", durable->lineage);
    atomic_store_explicit(&self->complete_step, f->step, memory_order_release);
    atomic_store_explicit(&self->committed_step, durable->step, memory_order_release);
}

static void begin_training(struct io *io)
{
    uint64_t step = io->tables.state.facts.step;
    for (uint32_t l = 0; l < io->plan->opt_workers; l++)
        begin_lane(io, l);
    memset(&io->orders, 0, sizeof io->orders);
    io->apply_step = step;
    io->pages_back = io->pages_written = 0;
    memset(&io->train_feed, 0, sizeof io->train_feed);
    memset(&io->step_cursor, 0, sizeof io->step_cursor);
    io->train_feed.number = io->step_cursor.number = step + 1;
    io->base_version = 0;
    for (uint64_t p = 0; p < io->layout->n_pages; p++) /* all pages change in the same steps */
        io->base_version = io->tables.complete[p].version;
    if (io->tables.state.read_back)
        io->readback.active = 0;
    else if (io->readback.sequence != io->newest.sequence || !io->readback.active)
        readback_begin(&io->readback, io->newest.sequence);
    io->reads_may_begin = io->newest.facts.step == step;
    pager_announce_resume(io);
}

int pager_begin(struct io *io)
{
    const struct segment *s = &io->w->segment;
    uint64_t frames = io->plan->pools[REGION_MICROBATCH_POOL].frames;
    segment_ring(s, RING_MICROBATCH, 0, &io->microbatch);
    segment_ring(s, RING_MICROBATCH_RETURN, 0, &io->microbatch_return);
    segment_ring(s, RING_WEIGHTS, 0, &io->weights);
    segment_ring(s, RING_WEIGHTS_RETURN, 0, &io->weights_return);
    for (io->n_free_microbatches = 0; io->n_free_microbatches < frames; io->n_free_microbatches++)
        io->free_microbatches[io->n_free_microbatches] = (uint32_t)io->n_free_microbatches;
    memset(io->weights_lent, 0, io->layout->n_pages * sizeof *io->weights_lent);
    io->n_lent = 0;
    memset(&io->sweep_cursor, 0, sizeof io->sweep_cursor);
    memset(&io->evaluate_feed, 0, sizeof io->evaluate_feed);
    io->sweep_cursor.number = 1;
    if (io->plan->mode == PLAN_TRAIN)
        begin_training(io);
    return 0;
}

void pager_close(struct io *io)
{
    for (uint32_t l = 0; io->lanes && l < io->plan->opt_workers; l++) {
        struct lane *lane = &io->lanes[l];
        free(lane->in);
        free(lane->out);
        free(lane->free_in);
        free(lane->free_out);
        free(lane->in_of_rank);
        free(lane->again);
    }
    free(io->lanes);
    free(io->free_microbatches);
    visits_destroy(&io->visits);
    visits_destroy(&io->forward_visits);
}
