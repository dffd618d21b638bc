/*
 * What is kept when a worker dies.
 *
 * Page tables and WEIGHTS frames lie in shared memory, which outlives every worker. When another
 * worker dies, io_worker keeps all of it and gives up only the step being applied. When io_worker
 * itself dies, its successor, behind the fence (the store's locks: the last transfer of the dead
 * one is done), takes over both. It believes nothing: the newest durable commit is what the store
 * says, the tables must carry their hashes and fit that commit, and each frame must have the digest
 * of its table entry, or is read from the store again.
 */
#include <stdio.h>
#include <string.h>

#include "io_worker/io.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"
#include "procs/mutant.h"

/* One read of it: 0 with *good telling whether the digest fits, or an I/O error. */
static int load_once(struct io *io, uint64_t page, struct io_request *request, int *good)
{
    const struct page_entry *entry = &io->tables.complete[page];
    struct page_image_layout layout;
    *request = (struct io_request){.buffer = io->exporter.image};
    store_page_layout(io->store, page, &layout);
    request->bytes = page_image_weights_bytes(&layout);
    store_request_page(io->store, request, IO_READ, page, entry->slot);
    if (engine_run(io->engine, request) < 0)
        return -(int)error_kind_now();
    void *frame = segment_frame(&io->w->segment, REGION_WEIGHTS_POOL, 0, (uint32_t)page);
    uint64_t bytes = pager_weights_bytes(io, page);
    memcpy(frame, page_image_part(io->exporter.image, &layout, PART_WEIGHTS), bytes);
    *good = page_digest_equal(page_image_digest(frame, bytes), entry->digest[PART_WEIGHTS]);
    return 0;
}

int takeover_load(struct io *io, uint64_t page)
{
    const struct page_entry *entry = &io->tables.complete[page];
    struct io_request request;
    int good = 0, rc = load_once(io, page, &request, &good);
    if (rc == 0 && !good) {
        log_line(LOG_WARN, "%s, offset %llu: page %llu was read wrongly; reading it once more",
                 store_file_path(io->store, request.file), (unsigned long long)request.offset,
                 (unsigned long long)page);
        rc = load_once(io, page, &request, &good);
    }
    if (rc < 0)
        return rc;
    if (!good)
        return error_set(ERROR_DAMAGED,
                         "%s, offset %llu: weights of page %llu: the digest is not the one that "
                         "was written",
                         store_file_path(io->store, request.file),
                         (unsigned long long)request.offset, (unsigned long long)page);
    io->weights_version[page] = entry->version;
    io->weights_hash[page] = entry->digest[PART_WEIGHTS].low;
    fault_point(FAULT_io_load_page);
    return 0;
}

/* -- after another worker's death -- */

int takeover_stop(struct io *io)
{
    while (engine_in_flight(io->engine) > 0 &&
           !mutant(MUTANT_no_wait_for_transfers)) { /* they still write into frames and slots */
        (void)engine_wait(io->engine, WORKER_POLL_MS);
        if (io->commit)
            (void)commit_do_work(io->commit);
        if (io->failed < 0)
            return io->failed;
    }
    atomic_store_explicit(&io->w->self->oldest_io_ns, 0, memory_order_release); /* none is left */
    fault_point(FAULT_io_drained);
    return 0;
}

int takeover_keep(struct io *io)
{
    uint64_t reloaded = 0;
    int rc = 0;
    io->exporter.reading = io->exporter.landed = 0; /* its image is used here; it reads again */
    page_tables_abandon(&io->tables);
    for (uint64_t page = 0; page < io->layout->n_pages && rc == 0; page++)
        if (io->weights_version[page] != io->tables.complete[page].version) {
            rc = mutant(MUTANT_stale_weights) ? 0 : takeover_load(io, page);
            io->weights_version[page] = io->tables.complete[page].version;
            reloaded++;
        }
    log_line(LOG_INFO, "step %llu is kept; %llu pages of the abandoned step were read back",
             (unsigned long long)io->tables.state.facts.step, (unsigned long long)reloaded);
    return rc;
}

/* -- in a dead predecessor's place -- */

int takeover_due(const struct io *io)
{
    return io->plan->mode == PLAN_TRAIN && io->w->segment.generation > io->plan->generation;
}

/* The record says which of the tables is the newest commit: io may have died between a record and
 * its announcement. */
static int adopt_commit(struct io *io)
{
    struct page_tables *t = &io->tables;
    uint64_t announced = atomic_load_explicit(&io->w->self->committed_step, memory_order_relaxed);
    /* the forming place is free: the durable table of the newest record goes there to be compared
     */
    /* a flush that fails says so once: if it said so to the dead one, the next will say "done" */
    if (atomic_load_explicit(&io->w->self->flushing, memory_order_acquire) &&
        !mutant(MUTANT_failed_flush_taken_over))
        return error_set(ERROR_DAMAGED,
                         "the worker that died was flushing step %llu, and how that "
                         "ended is not known: the step is abandoned",
                         (unsigned long long)t->state.facts.step);
    atomic_store_explicit(&io->w->self->flushing, 1, memory_order_release);
    if (store_flush(io->store) < 0) /* the next flush would say that all is well */
        return error_as(ERROR_DAMAGED);
    atomic_store_explicit(&io->w->self->flushing, 0, memory_order_release);
    if (store_newest(io->store, &io->newest, t->forming) < 0)
        return -(int)error_kind_now();
    uint64_t told = atomic_load_explicit(&io->w->self->complete_step, memory_order_relaxed);
    if (t->state.facts.step < told)
        return error_set(ERROR_DAMAGED,
                         "page table in shared memory: step %llu was announced complete, the "
                         "newest valid state is of step %llu",
                         (unsigned long long)told, (unsigned long long)t->state.facts.step);
    uint64_t step = io->newest.facts.step, bytes = t->n_pages * sizeof *t->forming;
    int believed = mutant(MUTANT_page_table_believed);
    if (step == t->state.facts.step && (memcmp(t->forming, t->complete, bytes) == 0 || believed))
        page_tables_committed(t);
    else if (step != announced || (memcmp(t->forming, t->committed, bytes) != 0 && !believed))
        return error_set(ERROR_DAMAGED,
                         "page table in shared memory: step %llu is complete, step %llu was "
                         "announced, and neither is the newest commit, of step %llu",
                         (unsigned long long)t->state.facts.step, (unsigned long long)announced,
                         (unsigned long long)step);
    page_tables_abandon(t);
    return 0;
}

static int adopt_frames(struct io *io)
{
    uint64_t read = 0;
    for (uint64_t page = 0; page < io->layout->n_pages; page++) {
        const struct page_entry *entry = &io->tables.complete[page];
        const void *frame = segment_frame(&io->w->segment, REGION_WEIGHTS_POOL, 0, (uint32_t)page);
        uint64_t bytes = pager_weights_bytes(io, page);
        worker_progress(io->w, ACTIVITY_TAKEOVER, page, io->layout->n_pages);
        int rc = worker_check(io->w);
        io->weights_version[page] = entry->version;
        io->weights_hash[page] = entry->digest[PART_WEIGHTS].low;
        if (rc == 0 && !mutant(MUTANT_frames_not_hashed) &&
            !page_digest_equal(page_image_digest(frame, bytes), entry->digest[PART_WEIGHTS])) {
            rc = takeover_load(io, page);
            read++;
        }
        if (rc < 0)
            return rc;
        fault_point(FAULT_io_takeover_page);
    }
    log_line(LOG_INFO, "took over step %llu, newest commit %llu; %llu of %llu pages read again",
             (unsigned long long)io->tables.state.facts.step,
             (unsigned long long)io->newest.facts.step, (unsigned long long)read,
             (unsigned long long)io->layout->n_pages);
    return 0;
}

int takeover_adopt(struct io *io)
{
    struct page_tables *t = &io->tables;
    if (page_tables_adopt(t, t->memory, io->layout->n_pages, io->plan->slots_per_page) < 0)
        return -(int)error_kind_now();
    if (!mutant(MUTANT_page_table_believed) && (store_check_table(io->store, t->anchor) < 0 ||
                                                store_check_table(io->store, t->committed) < 0 ||
                                                store_check_table(io->store, t->complete) < 0)) {
        (void)error_wrap("page table in shared memory");
        return error_as(ERROR_DAMAGED);
    }
    if (adopt_commit(io) < 0)
        return -(int)error_kind_now();
    fault_point(FAULT_io_takeover);
    return adopt_frames(io);
}
