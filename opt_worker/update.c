#include "opt_worker/update.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/page_image.h"
#include "opt_worker/adamw.h"
#include "opt_worker/isa.h"
#include "opt_worker/norm.h"
#include "opt_worker/recompute.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"

enum { NO_FRAME = UINT32_MAX };

/* Elements that are worked on at a time, a multiple of 4096: what is hashed of them is still in the
 * cache (seven arrays of an update take 448 KiB). */
enum { PIECE_ELEMENTS = 16 << 10 };

struct update {
    struct worker *w;
    struct ring gradient, gradient_return, state, state_return, writeback;
    uint64_t own_pages;
    uint32_t *gradient_frames; /* (own_pages), by rank: the frame that waits for its update */
    uint64_t *gradient_hashes; /* (own_pages), by rank */
    uint8_t *decay_blocks;     /* (page_elements / 4096) of the page at hand */
    const char **no_decay;     /* patterns */
    struct recompute *recompute;
    struct norm_entry *norms; /* (own_pages), by rank */
    uint64_t step;            /* being worked on */
};

static uint64_t page_of_rank(const struct update *u, uint64_t rank)
{
    return rank * u->w->plan->opt_workers + u->w->segment.index;
}

static int update_open(struct update *u, struct worker *w)
{
    const struct plan *plan = w->plan;
    const struct segment *s = &w->segment;
    memset(u, 0, sizeof *u);
    u->w = w;
    u->norms = segment_region(s, REGION_NORM, s->index);
    while (page_of_rank(u, u->own_pages) < w->layout.n_pages)
        u->own_pages++;
    u->gradient_frames = calloc(u->own_pages + 1, sizeof *u->gradient_frames);
    u->gradient_hashes = calloc(u->own_pages + 1, sizeof *u->gradient_hashes);
    u->decay_blocks = calloc(plan->page_elements / MODEL_BLOCK_ELEMENTS, 1);
    u->no_decay = calloc(plan->no_decay.count + 1, sizeof *u->no_decay);
    if (!u->gradient_frames || !u->gradient_hashes || !u->decay_blocks || !u->no_decay)
        return error_set(ERROR_FAILED, "out of memory for %llu pages",
                         (unsigned long long)u->own_pages);
    for (uint64_t i = 0; i < plan->no_decay.count; i++)
        u->no_decay[i] = plan_texts_get(plan, plan->no_decay, i);
    struct recompute_options options = {.seed = plan->seed,
                                        .page_elements = plan->page_elements,
                                        .fraction = plan->recompute,
                                        .control = w->self};
    return recompute_open(&u->recompute, &options);
}

/* A generation begins: rings at 0, nothing borrowed, no step. */
static void open_rings(struct update *u)
{
    const struct segment *s = &u->w->segment;
    segment_ring(s, RING_GRADIENT, s->index, &u->gradient);
    segment_ring(s, RING_GRADIENT_RETURN, s->index, &u->gradient_return);
    segment_ring(s, RING_STATE, s->index, &u->state);
    segment_ring(s, RING_STATE_RETURN, s->index, &u->state_return);
    segment_ring(s, RING_WRITEBACK, s->index, &u->writeback);
    u->step = 0;
    atomic_store_explicit(&u->w->self->norm_step, 0, memory_order_relaxed); /* READY releases it */
}

static void update_close(struct update *u)
{
    recompute_close(u->recompute);
    free(u->gradient_frames);
    free(u->gradient_hashes);
    free(u->decay_blocks);
    free(u->no_decay);
}

/* Lends a frame back; a RETURN ring is as deep as what can be lent, so it is never full. */
static int give_back(struct ring *ring, uint32_t frame, uint64_t page, enum state_return_kind kind)
{
    struct ring_descriptor d = {.frame = frame, .page = page, .kind = (uint32_t)kind};
    return ring_lend(ring, &d);
}

static uint64_t piece_at(uint64_t at, uint64_t elements)
{
    return elements - at < PIECE_ELEMENTS ? elements - at : PIECE_ELEMENTS;
}

/* The gradient as gpu_worker hashed it when it left the device. */
static int check_gradient(const struct update *u, uint64_t page, uint64_t hash,
                          const struct page_digest_so_far *digest)
{
    if (!u->w->plan->frame_hashes)
        return 0;
    uint64_t found = page_digest_end(digest).low;
    if (found == hash)
        return 0;
    return error_set(ERROR_FAILED,
                     "gradient of page %llu in step %llu: hash: expected %016llx, found %016llx: "
                     "memory was changed after it was computed",
                     (unsigned long long)page, (unsigned long long)u->step,
                     (unsigned long long)hash, (unsigned long long)found);
}

static int wait_begin(struct update *u)
{
    while (atomic_load_explicit(&u->w->orders->begin_step, memory_order_acquire) < u->step) {
        int rc = worker_pause(u->w, WORKER_WAIT_OTHER);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int take_descriptor(struct update *u, struct ring *ring, enum ring_id id,
                           struct ring_descriptor *d)
{
    int n, rc;
    while ((n = ring_consume(ring, d)) == 0)
        if ((rc = worker_pause(u->w, (int)id)) < 0)
            return rc;
    if (n < 0)
        return error_wrap("ring %s", topology_rings[id].name);
    if (d->step != u->step || d->page >= u->w->layout.n_pages ||
        topology_page_owner(d->page, u->w->plan->opt_workers) != u->w->segment.index)
        return error_set(ERROR_DAMAGED,
                         "ring %s: page %llu of step %llu where step %llu was expected",
                         topology_rings[id].name, (unsigned long long)d->page,
                         (unsigned long long)d->step, (unsigned long long)u->step);
    return 0;
}

/* Hash and sum of squares of a gradient, in one pass. */
static int read_gradient(const struct update *u, const struct ring_descriptor *d, double *squares)
{
    const float *g = segment_frame(&u->w->segment, REGION_GRADIENT_POOL, 0, d->frame);
    uint64_t elements = u->w->layout.pages[d->page].elements;
    struct page_digest_so_far digest;
    struct norm_tree tree = {.leaves = 0};
    page_digest_begin(&digest);
    for (uint64_t at = 0, n; at < elements; at += n) {
        n = piece_at(at, elements);
        if (u->w->plan->frame_hashes)
            page_digest_add(&digest, g + at, n * sizeof *g);
        norm_push(&tree, g + at, n);
    }
    *squares = norm_tree_root(&tree);
    return check_gradient(u, d->page, d->hash, &digest);
}

static int collect(struct update *u)
{
    for (uint64_t r = 0; r < u->own_pages; r++)
        u->gradient_frames[r] = NO_FRAME;
    for (uint64_t n = 0; n < u->own_pages; n++) {
        struct ring_descriptor d;
        int rc = worker_check(u->w); /* a full ring lets take_descriptor() never pause */
        if (rc < 0 || (rc = take_descriptor(u, &u->gradient, RING_GRADIENT, &d)) < 0)
            return rc;
        uint64_t rank = topology_page_rank(d.page, u->w->plan->opt_workers);
        if (u->gradient_frames[rank] != NO_FRAME)
            return error_set(ERROR_DAMAGED, "gradient of page %llu came twice in step %llu",
                             (unsigned long long)d.page, (unsigned long long)u->step);
        u->gradient_frames[rank] = d.frame;
        u->gradient_hashes[rank] = d.hash;
        fault_point(FAULT_opt_gradient_taken);
        double squares;
        if ((rc = read_gradient(u, &d, &squares)) < 0)
            return rc;
        u->norms[rank].gradient_hash = d.hash;
        u->norms[rank].sum_of_squares = squares;
        atomic_store_explicit(&u->norms[rank].step, u->step, memory_order_release);
        fault_point(FAULT_opt_norm_written);
    }
    atomic_store_explicit(&u->w->self->norm_step, u->step, memory_order_release);
    worker_fact(u->w);
    fault_point(FAULT_opt_after_norm);
    return 0;
}

static int wait_decision(struct update *u, struct step_orders *orders)
{
    while (atomic_load_explicit(&u->w->orders->apply_step, memory_order_acquire) < u->step) {
        int rc = worker_pause(u->w, WORKER_WAIT_OTHER);
        if (rc < 0)
            return rc;
    }
    *orders = u->w->orders->orders[u->step % PLAN_SLACK_STEPS];
    CHECK(orders->step == u->step);
    return 0;
}

/* The arrays of one page's update: where they lie in the images. */
struct page_arrays {
    const struct page_image_layout *layout;
    char *in, *out;
    const float *gradient;
    int has_moments; /* 0: codec ZERO, they are all zero */
};

static void bind_f32(const struct update *u, const struct page_arrays *a,
                     struct adamw_page_f32 *page)
{
    const struct page_image_layout *l = a->layout;
    *page = (struct adamw_page_f32){
        .elements = l->elements,
        .decay_blocks = u->decay_blocks,
        .gradient = a->gradient,
        .w_in = page_image_part(a->in, l, PART_WEIGHTS),
        .m_in = a->has_moments ? page_image_part(a->in, l, PART_M) : NULL,
        .v_in = a->has_moments ? page_image_part(a->in, l, PART_V) : NULL,
        .w_out = page_image_part(a->out, l, PART_WEIGHTS),
        .m_out = page_image_part(a->out, l, PART_M),
        .v_out = page_image_part(a->out, l, PART_V),
    };
}

static void bind_split(const struct update *u, const struct page_arrays *a,
                       struct adamw_page_split *page)
{
    const struct page_image_layout *l = a->layout;
    *page = (struct adamw_page_split){
        .elements = l->elements,
        .decay_blocks = u->decay_blocks,
        .gradient = a->gradient,
        .w_hi_in = page_image_part(a->in, l, PART_WEIGHTS),
        .w_lo_in = page_image_part(a->in, l, PART_RESIDUAL),
        .m_in = a->has_moments ? page_image_part(a->in, l, PART_M) : NULL,
        .v_in = a->has_moments ? page_image_part(a->in, l, PART_V) : NULL,
        .w_hi_out = page_image_part(a->out, l, PART_WEIGHTS),
        .w_lo_out = page_image_part(a->out, l, PART_RESIDUAL),
        .m_out = page_image_part(a->out, l, PART_M),
        .v_out = page_image_part(a->out, l, PART_V),
    };
}

static const float *moved(const float *array, uint64_t at)
{
    return array ? array + at : NULL;
}

/* Updates a page, and hashes what it read of the gradient: gpu_worker maps that frame writable, and
 * may have gone mad since the norm was taken. */
static void update_pieces(const struct update *u, const struct recompute_page *done,
                          struct page_digest_so_far *digest)
{
    const float *gradient = done->f32 ? done->f32->gradient : done->split->gradient;
    uint64_t elements = done->f32 ? done->f32->elements : done->split->elements;
    page_digest_begin(digest);
    for (uint64_t at = 0, n; at < elements; at += n) {
        n = piece_at(at, elements);
        if (done->f32) {
            struct adamw_page_f32 p = *done->f32;
            p.elements = n;
            p.decay_blocks += at / MODEL_BLOCK_ELEMENTS;
            p.gradient += at, p.w_in += at, p.w_out += at, p.m_out += at, p.v_out += at;
            p.m_in = moved(p.m_in, at), p.v_in = moved(p.v_in, at);
            adamw_update_f32(done->scalars, &p);
        } else {
            struct adamw_page_split p = *done->split;
            p.elements = n;
            p.decay_blocks += at / MODEL_BLOCK_ELEMENTS;
            p.gradient += at, p.m_out += at, p.v_out += at;
            p.w_hi_in += at, p.w_lo_in += at, p.w_hi_out += at, p.w_lo_out += at;
            p.m_in = moved(p.m_in, at), p.v_in = moved(p.v_in, at);
            adamw_update_split(done->scalars, &p);
        }
        if (u->w->plan->frame_hashes)
            page_digest_add(digest, gradient + at, n * sizeof *gradient);
    }
}

/* Updates the page, and has a part of it computed once more. */
static int update_arrays(struct update *u, const struct page_arrays *a,
                         const struct adamw_scalars *scalars, uint64_t page,
                         struct page_digest_so_far *digest)
{
    struct recompute_page done = {.step = u->step, .page = page, .scalars = scalars};
    struct adamw_page_f32 f32;
    struct adamw_page_split split;
    recompute_bind(u->recompute);
    if (u->w->plan->bf16) {
        bind_split(u, a, &split);
        done.split = &split;
    } else {
        bind_f32(u, a, &f32);
        done.f32 = &f32;
    }
    update_pieces(u, &done, digest);
    return recompute_compare(u->recompute, &done);
}

static struct adamw_scalars scalars_of(const struct step_orders *o)
{
    return (struct adamw_scalars){
        .lr_decay = o->lr_decay,
        .step_size = o->step_size,
        .inv_sqrt_bias2 = o->inv_sqrt_bias2,
        .beta1 = o->beta1,
        .one_minus_beta1 = o->one_minus_beta1,
        .beta2 = o->beta2,
        .one_minus_beta2 = o->one_minus_beta2,
        .eps = o->eps,
        .scale = o->scale,
    };
}

static void identify(const struct update *u, uint64_t page, uint64_t version,
                     struct page_identity *id)
{
    memcpy(id->run, u->w->plan->run_uuid, sizeof id->run);
    id->page = page;
    id->version = version;
    id->layer = u->w->layout.pages[page].layer;
}

static int apply_page(struct update *u, const struct step_orders *orders,
                      const struct ring_descriptor *d)
{
    const struct segment *s = &u->w->segment;
    const struct model_page *page = &u->w->layout.pages[d->page];
    struct page_image_layout layout;
    struct page_identity identity;
    page_image_layout(&layout, u->w->plan->bf16 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, page->elements);
    struct page_arrays a = {.layout = &layout,
                            .in = segment_frame(s, REGION_STATE_POOL, s->index, d->frame),
                            .out = segment_frame(s, REGION_OUT_POOL, s->index, d->out_frame)};
    identify(u, d->page, d->version, &identity);
    if (page_image_verify(a.in, &layout, &identity) < 0)
        return 0; /* io_worker reads it again, and says what is wrong if that is no better */
    a.has_moments = ((const struct page_image_header *)(const void *)a.in)->codec != PAGE_ZERO;
    uint64_t rank = topology_page_rank(d->page, u->w->plan->opt_workers);
    a.gradient = segment_frame(s, REGION_GRADIENT_POOL, 0, u->gradient_frames[rank]);
    model_page_decay_bits(&u->w->layout, page, u->no_decay, (uint32_t)u->w->plan->no_decay.count,
                          u->decay_blocks);
    struct adamw_scalars scalars = scalars_of(orders);
    struct page_digest_so_far digest;
    if (update_arrays(u, &a, &scalars, d->page, &digest) < 0 ||
        check_gradient(u, d->page, u->gradient_hashes[rank], &digest) < 0)
        return -(int)error_kind_now();
    identity.version = u->step;
    page_image_seal(a.out, &layout, &identity, PAGE_RAW);
    return 1;
}

/* The page is updated: everything borrowed for it goes back. */
static int finish_page(struct update *u, const struct ring_descriptor *d)
{
    uint64_t rank = topology_page_rank(d->page, u->w->plan->opt_workers);
    struct ring_descriptor out = {
        .frame = d->out_frame, .page = d->page, .version = u->step, .step = u->step};
    int rc = give_back(&u->gradient_return, u->gradient_frames[rank], d->page, STATE_RETURN_USED);
    fault_point(FAULT_opt_gradient_returned);
    if (rc == 0 && mutant(MUTANT_frame_given_back_twice) && rank == 0)
        rc = give_back(&u->gradient_return, u->gradient_frames[rank], d->page, STATE_RETURN_USED);
    if (rc == 0)
        rc = give_back(&u->state_return, d->frame, d->page, STATE_RETURN_USED);
    if (rc == 0)
        rc = ring_lend(&u->writeback, &out);
    fault_point(FAULT_opt_written_back);
    if (rc < 0)
        return error_wrap("giving back page %llu", (unsigned long long)d->page);
    u->gradient_frames[rank] = NO_FRAME;
    atomic_fetch_add_explicit(&u->w->self->pages_updated, 1, memory_order_relaxed);
    worker_bell(u->w, ROLE_IO, 0);
    return rc;
}

/* Pages come in forward order, but for one that had to be read twice. */
static int apply(struct update *u, const struct step_orders *orders)
{
    for (uint64_t n = 0; n < u->own_pages;) {
        struct ring_descriptor d;
        int rc = worker_check(u->w);
        if (rc < 0 || (rc = take_descriptor(u, &u->state, RING_STATE, &d)) < 0)
            return rc;
        if (u->gradient_frames[topology_page_rank(d.page, u->w->plan->opt_workers)] == NO_FRAME)
            return error_set(ERROR_DAMAGED, "state of page %llu came twice in step %llu",
                             (unsigned long long)d.page, (unsigned long long)u->step);
        fault_point(FAULT_opt_state_taken);
        if ((rc = apply_page(u, orders, &d)) < 0)
            return rc;
        fault_point(FAULT_opt_image_sealed);
        n += (uint64_t)rc;
        rc = rc ? finish_page(u, &d)
                : give_back(&u->state_return, d.frame, d.page, STATE_RETURN_BAD);
        if (rc < 0)
            return rc;
        worker_bell(u->w, ROLE_IO, 0);
        fault_point(FAULT_opt_mid_apply);
    }
    worker_bell(u->w, ROLE_GPU, 0); /* gradient frames came back */
    return 0;
}

static int skip(struct update *u)
{
    int rc = 0;
    for (uint64_t rank = 0; rank < u->own_pages && rc == 0; rank++) {
        rc = give_back(&u->gradient_return, u->gradient_frames[rank], page_of_rank(u, rank),
                       STATE_RETURN_USED);
        fault_point(FAULT_opt_skip);
    }
    worker_bell(u->w, ROLE_GPU, 0);
    return rc;
}

static int update_step(struct update *u)
{
    struct step_orders orders;
    int rc;
    worker_operation(u->w, OPERATION_NORM);
    if ((rc = wait_begin(u)) < 0 || (rc = collect(u)) < 0 || (rc = wait_decision(u, &orders)) < 0)
        return rc;
    worker_operation(u->w, OPERATION_APPLY);
    return orders.skip ? skip(u) : apply(u, &orders);
}

/* The steps of one generation, until something ends them. */
static int update_steps(struct update *u)
{
    int rc = worker_wait_running(u->w);
    /* the first step to do is the one after the newest complete one, which the first order names */
    while (rc == 0 &&
           (u->step = atomic_load_explicit(&u->w->orders->begin_step, memory_order_acquire)) == 0)
        rc = worker_pause(u->w, WORKER_WAIT_OTHER);
    while (rc == 0) {
        rc = update_step(u);
        u->step++;
    }
    return rc;
}

int update_run(struct worker *w)
{
    struct update u;
    int rc = isa_check();
    if (rc < 0)
        return rc;
    rc = update_open(&u, w);
    while (rc == 0) {
        open_rings(&u);
        worker_ready(w);
        rc = update_steps(&u);
        if (rc == -ERROR_ABANDONED)
            rc = worker_rejoin(w); /* nothing of this worker is ever in flight */
    }
    update_close(&u);
    return rc;
}
