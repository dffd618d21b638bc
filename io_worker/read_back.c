/*
 * Read-back of the newest commit without an update.
 *
 * The next update reads every page anyway, and that is the read-back (slots.h). But it may not come
 * in time: a skipped step updates nothing, yet its commit takes the table place of the commit
 * before the newest one; and when the step after a commit was read before that commit was asked
 * for, its reads proved nothing. If the drive had lost a write of the newest commit, nothing whole
 * would be left to fall back to. So the next commit, or the apply after next, waits until every
 * page of the newest commit was read and compared, one at a time.
 */
#include <stdlib.h>
#include <string.h>

#include "io_worker/io.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"
#include "procs/mutant.h"

int read_back_open(struct io *io)
{
    struct page_image_layout layout;
    if (io->plan->mode != PLAN_TRAIN || io->plan->slots_per_page < 3)
        return 0;
    page_image_layout(&layout, io->dtype, io->plan->page_elements);
    if (posix_memalign(&io->read_back.image, PAGE_IMAGE_HEADER_BYTES, layout.bytes) != 0)
        return error_set(ERROR_FAILED, "out of memory for a page of %llu bytes",
                         (unsigned long long)layout.bytes);
    return 0;
}

void read_back_close(struct io *io)
{
    free(io->read_back.image);
}

int read_back_needed(const struct io *io)
{
    if (!io->read_back.image || !io->readback.active)
        return 0;
    uint64_t complete = atomic_load_explicit(&io->w->self->complete_step, memory_order_relaxed);
    const struct launcher_control *o = io->w->orders;
    int committing = atomic_load_explicit(&o->commit_step, memory_order_acquire) >= complete &&
                     io->newest.facts.step < complete;
    int applying = atomic_load_explicit(&o->apply_step, memory_order_acquire) > io->apply_step &&
                   io->tables.complete != io->tables.committed;
    if (mutant(MUTANT_skip_without_read_back))
        return 0;
    return committing || applying;
}

static void on_read(struct io_request *request, int result)
{
    struct io *io = request->context;
    io->read_back.landed = 1;
    if (result < 0)
        io->failed = engine_request_error(io->engine, request);
}

static int read_page(struct io *io)
{
    struct read_back *r = &io->read_back;
    struct page_image_layout layout;
    uint64_t page = readback_next(&io->readback, 0);
    r->reads = page == r->page ? r->reads : 0;
    r->page = page;
    store_page_layout(io->store, r->page, &layout);
    memset(&r->request, 0, sizeof r->request);
    r->request.buffer = r->image;
    r->request.bytes =
        page_image_bytes(&layout, (enum page_codec)io->tables.committed[r->page].codec);
    r->request.on_done = on_read;
    r->request.context = io;
    store_request_page(io->store, &r->request, IO_READ, r->page,
                       io->tables.committed[r->page].slot);
    if (engine_submit(io->engine, &r->request) != ENGINE_ACCEPTED)
        return 0;
    r->reading = 1;
    r->landed = 0;
    r->reads++;
    return 1;
}

/* Not what was written: once more, then it is damage, which a restart of this process alone would
 * meet again. */
static int bad_page(struct io *io)
{
    struct read_back *r = &io->read_back;
    (void)error_wrap("read-back of the newest commit");
    if (r->reads >= 2)
        return error_as(ERROR_DAMAGED);
    log_line(LOG_WARN, "%s; reading it once more", error_text());
    return 1;
}

int read_back_turn(struct io *io)
{
    struct read_back *r = &io->read_back;
    if (r->reading && !r->landed)
        return 0;
    if (r->reading) {
        r->reading = 0;
        if (store_verify_image(io->store, &io->tables.committed[r->page], r->image) < 0)
            return bad_page(io);
        r->reads = 0;
        pager_mark_read_back(io, r->page);
        fault_point(FAULT_io_skip_read_back);
        return 1;
    }
    return read_back_needed(io) ? read_page(io) : 0;
}
