#include "io_worker/io.h"

#include <stdio.h>
#include <string.h>

#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"

enum { OLD_REQUEST_NS = 1000000000 }; /* younger ones are of no interest */

/* Begins the export that the launcher has asked for; the version is committed by then. */
static int take_export_order(struct io *io)
{
    char out[4096];
    uint64_t step = atomic_load_explicit(&io->w->orders->export_step, memory_order_acquire);
    if (exporter_busy(io) ||
        step <= atomic_load_explicit(&io->w->self->exported_step, memory_order_relaxed))
        return 0;
    if (step > io->newest.facts.step)
        return 0; /* not committed yet */
    /* Ordered from a predecessor that died after the next commit: that step is the anchor still,
     * or, when the next commit was not announced any more, nowhere. */
    if (step < io->newest.facts.step && step != io->tables.state.step[TABLE_ANCHOR]) {
        (void)error_set(ERROR_FAILED,
                        "there is no export of step %llu, which was due: the run has gone on to "
                        "step %llu",
                        (unsigned long long)step, (unsigned long long)io->newest.facts.step);
        io->exporter.step = step;
        return exporter_give_up(io);
    }
    (void)snprintf(out, sizeof out, "%s/step-%llu",
                   plan_text_get(io->plan, io->plan->checkpoint.export_dir),
                   (unsigned long long)step);
    return exporter_begin(io, out, step) < 0 ? exporter_give_up(io) : 1;
}

static int export_turn(struct io *io)
{
    int rc = take_export_order(io);
    return rc != 0 ? rc : exporter_turn(io);
}

/* What io waits for when it has nothing to do: the optimizer while a step is applied. */
static int reason(const struct io *io)
{
    uint64_t complete = atomic_load_explicit(&io->w->self->complete_step, memory_order_relaxed);
    return io->apply_step > complete ? RING_WRITEBACK : WORKER_WAIT_OTHER;
}

/* The watchdog judges a request by its age: which is the oldest, and since when. */
void io_tell_oldest_request(void *context)
{
    struct io *io = context;
    struct worker_control *self = io->w->self;
    const struct io_request *oldest = engine_oldest(io->engine);
    io->oldest_told_ns = clock_now_ns();
    int old = oldest && io->oldest_told_ns - oldest->submitted_ns > OLD_REQUEST_NS;
    if (old)
        engine_request_describe(io->engine, oldest, self->oldest_io, sizeof self->oldest_io);
    atomic_store_explicit(&self->oldest_io_ns, old ? oldest->submitted_ns : 0,
                          memory_order_release);
}

static int one_turn(struct io *io)
{
    worker_operation(io->w, OPERATION_PAGE);
    int rc = pager_turn(io), exported = 0;
    if (rc >= 0 && io->plan->mode == PLAN_TRAIN) {
        if (exporter_busy(io))
            worker_operation(io->w, OPERATION_EXPORT);
        exported = export_turn(io);
    }
    if (exported < 0)
        rc = exported;
    if (io->engine && clock_now_ns() - io->oldest_told_ns > OLD_REQUEST_NS)
        io_tell_oldest_request(io);
    if (rc == 0 && exported == 0)
        return worker_pause(io->w, reason(io));
    return rc < 0 ? rc : worker_check(io->w);
}

/* The work of one generation, until something ends it. */
static int serve_generation(struct io *io)
{
    int rc = worker_wait_running(io->w);
    while (rc >= 0)
        rc = one_turn(io);
    return rc;
}

static int serve(struct io *io)
{
    int rc = pager_open(io);
    if (io->engine)
        io->w->event_fd = engine_event_fd(io->engine);
    while (rc >= 0) {
        if ((rc = pager_begin(io)) < 0)
            break;
        worker_ready(io->w);
        rc = serve_generation(io);
        if (rc != -ERROR_ABANDONED)
            break;
        worker_operation(io->w, OPERATION_STOP);
        rc = takeover_stop(io);
        /* frames are filled again only when nobody reads them any more: all have acknowledged */
        if (rc >= 0)
            rc = worker_rejoin(io->w);
        if (rc >= 0)
            rc = takeover_keep(io);
    }
    return rc;
}

static int run_mode(struct io *io)
{
    enum plan_mode mode = (enum plan_mode)io->plan->mode;
    int rc;
    if (mode == PLAN_DIGEST)
        return offline_digest(io);
    if (mode == PLAN_SCRUB)
        return scrub_run(io);
    if (mode == PLAN_EXPORT)
        return offline_export(io);
    if (mode != PLAN_GENERATE && (rc = start_data(io)) < 0)
        return rc;
    if (mode == PLAN_VALIDATE)
        return start_validate(io);
    if ((rc = start_weights(io)) < 0)
        return rc;
    exporter_tell_space(io);
    return serve(io);
}

/* Completions write into what is freed next; a commit that was asked for runs to its end. */
static void finish_transfers(struct io *io)
{
    while (io->engine && engine_in_flight(io->engine) > 0) {
        (void)engine_wait(io->engine, 100); /* what came of them matters to nobody any more */
        if (io->commit)
            (void)commit_do_work(io->commit); /* what a full engine refused */
    }
}

int io_run(struct worker *w)
{
    struct io io;
    memset(&io, 0, sizeof io);
    io.w = w;
    io.plan = w->plan;
    io.layout = &w->layout;
    io.dtype = w->plan->bf16 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32;
    int rc = start_open(&io);
    if (rc == 0)
        rc = run_mode(&io);
    finish_transfers(&io);
    pager_close(&io);
    start_close(&io);
    return rc;
}
