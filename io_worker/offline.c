/* Commands that io_worker does alone, on a store that no run uses: digest and export. */
#include <stdio.h>
#include <string.h>

#include "io_worker/io.h"
#include "procs/error.h"

static int open_ready_store(struct io *io)
{
    int exists = 0;
    if (start_store(io, &exists) < 0)
        return -(int)error_kind_now();
    return exists ? 0 : error_set(ERROR_USER, "%s: no commit yet", io->directories[0]);
}

/* Every damaged place goes into the message, as far as there is room. */
static void on_damage(void *context, const char *file, uint64_t offset, const char *text)
{
    struct io *io = context;
    size_t used = strlen(io->w->self->message);
    (void)snprintf(io->w->self->message + used, sizeof io->w->self->message - used,
                   "%s: offset %llu: %s\n", file, (unsigned long long)offset, text);
}

int offline_digest(struct io *io)
{
    struct worker_control *self = io->w->self;
    struct page_digest weights;
    if (open_ready_store(io) < 0)
        return -(int)error_kind_now();
    if (store_verify(io->store, &io->newest, io->tables.complete, on_damage, io) < 0 ||
        store_weights_hash(io->store, io->tables.complete, &weights) < 0)
        return -(int)error_kind_now();
    struct page_digest state =
        commit_state_hash(&io->newest.facts, io->tables.complete, io->layout->n_pages);
    self->resume_step = io->newest.facts.step;
    memcpy(self->state_hash[0], &state, sizeof state);
    memcpy(self->weights_hash, &weights, sizeof weights);
    return 0;
}

int offline_export(struct io *io)
{
    int rc = open_ready_store(io);
    if (rc == 0)
        rc = store_recover(io->store, &io->newest, io->tables.complete, NULL);
    if (rc == 0)
        rc = exporter_begin(io, plan_text_get(io->plan, io->plan->checkpoint.export_dir),
                            io->newest.facts.step);
    io->w->self->resume_step = io->newest.facts.step;
    while (rc == 0 && exporter_busy(io)) {
        worker_progress(io->w, ACTIVITY_EXPORTING, io->exporter.page, io->layout->n_pages);
        (void)engine_wait(io->engine, WORKER_POLL_MS);
        if (io->failed < 0)
            return io->failed;
        if ((rc = worker_check(io->w)) == 0 && (rc = exporter_turn(io)) > 0)
            rc = 0;
    }
    return rc;
}
