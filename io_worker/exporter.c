/*
 * Exports the committed version between other work: one page is in flight, and a turn converts one.
 * Its slots are pinned (a copy of the table), so that later steps write elsewhere; the launcher
 * lets no step two further be applied before the export is done.
 *
 * An export that cannot be written (a full or failing disk, a folder that is not ours) costs no
 * training: what is there of it is removed, the launcher tells why, and the run goes on. A page
 * that cannot be read or verified is the store's damage, not the export's, and an error as anywhere
 * else.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "io_worker/io.h"
#include "model/config_dtype.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"

int exporter_open(struct io *io)
{
    struct page_image_layout layout;
    page_image_layout(&layout, io->dtype, io->plan->page_elements);
    if (posix_memalign(&io->exporter.image, PAGE_IMAGE_HEADER_BYTES, layout.bytes) != 0)
        return error_set(ERROR_FAILED, "out of memory for a page of %llu bytes",
                         (unsigned long long)layout.bytes);
    io->exporter.pinned = calloc(io->layout->n_pages, sizeof *io->exporter.pinned);
    return io->exporter.pinned ? 0 : error_set(ERROR_FAILED, "out of memory");
}

/* statvfs of the folder, or of what there is of the way to it. */
static int free_bytes_at(const char *folder, uint64_t *bytes)
{
    struct statvfs fs;
    char path[PATH_MAX], *slash;
    (void)snprintf(path, sizeof path, "%s", folder);
    while (statvfs(path, &fs) < 0) {
        slash = strrchr(path, '/');
        if (errno != ENOENT || slash == NULL || slash == path)
            return -1;
        *slash = '\0';
    }
    *bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return 0;
}

void exporter_tell_space(struct io *io)
{
    const char *folder = plan_text_get(io->plan, io->plan->checkpoint.export_dir);
    int32_t dtype = io->plan->checkpoint.export_dtype;
    if (dtype == EXPORT_DTYPE_AUTO)
        dtype = (int32_t)io->layout->config.source_dtype;
    uint64_t need = io->layout->parameters * model_dtype_bytes((enum model_dtype)dtype), have = 0;
    size_t used = strlen(io->w->self->message);
    if (io->plan->mode != PLAN_TRAIN || free_bytes_at(folder, &have) < 0 || have >= need)
        return;
    (void)snprintf(io->w->self->message + used, sizeof io->w->self->message - used,
                   "warning: an export takes about %llu bytes, %llu are free in %s; without more "
                   "space the run trains to its end and ends without its export\n",
                   (unsigned long long)need, (unsigned long long)have, folder);
}

void exporter_close(struct io *io)
{
    export_close(io->exporter.export);
    free(io->exporter.image);
    free(io->exporter.pinned);
}

int exporter_begin(struct io *io, const char *out, uint64_t step)
{
    struct exporter *e = &io->exporter;
    const struct page_entry *table =
        step == io->newest.facts.step ? io->tables.committed : io->tables.anchor;
    const char *folder = plan_text_get(io->plan, io->plan->model_dir);
    e->step = step;
    struct export_config config = {
        .layout = io->layout,
        .model_folder = folder,
        .tokenizer = io->plan->data.tokenizer_is_bytes
                         ? NULL
                         : plan_text_get(io->plan, io->plan->data.tokenizer),
        .weights_folder = io->plan->weights == PLAN_WEIGHTS_RANDOM ? NULL : folder,
        .out = out,
        .dtype = io->plan->checkpoint.export_dtype,
        .step = step,
    };
    if (export_open(&e->export, &config) < 0)
        return -(int)error_kind_now();
    memcpy(e->pinned, table, io->layout->n_pages * sizeof *e->pinned);
    e->page = 0;
    e->reading = e->landed = e->reads = 0;
    return 0;
}

/* The launcher may go on; frames and slots of the step are free. */
static void end(struct io *io)
{
    if (io->plan->mode != PLAN_TRAIN)
        return;
    fault_point(FAULT_io_exported);
    atomic_store_explicit(&io->w->self->exported_step, io->exporter.step, memory_order_release);
    worker_fact(io->w);
}

int exporter_give_up(struct io *io)
{
    struct exporter *e = &io->exporter;
    struct worker_control *self = io->w->self;
    if (io->plan->mode != PLAN_TRAIN)
        return -(int)error_kind_now();
    (void)snprintf(self->export_error, sizeof self->export_error, "%s", error_text());
    log_line(LOG_ERROR, "export of step %llu given up: %s", (unsigned long long)e->step,
             self->export_error);
    export_close(e->export); /* removes what is there of it */
    e->export = NULL;
    error_clear();
    atomic_store_explicit(&self->export_given_up, e->step, memory_order_release);
    end(io);
    return 1;
}

static void on_read(struct io_request *request, int result)
{
    struct io *io = request->context;
    io->exporter.landed = 1;
    if (result < 0)
        io->failed = engine_request_error(io->engine, request);
}

static int read_page(struct io *io)
{
    struct exporter *e = &io->exporter;
    struct page_image_layout layout;
    store_page_layout(io->store, e->page, &layout);
    memset(&e->request, 0, sizeof e->request);
    e->request.buffer = e->image;
    e->request.bytes = page_image_bytes(&layout, (enum page_codec)e->pinned[e->page].codec);
    e->request.on_done = on_read;
    e->request.context = io;
    store_request_page(io->store, &e->request, IO_READ, e->page, e->pinned[e->page].slot);
    if (engine_submit(io->engine, &e->request) != ENGINE_ACCEPTED)
        return 0;
    e->reading = 1;
    e->reads++;
    return 1;
}

/* Not what was written: once more, then it is damage, which a restart of this process alone would
 * meet again. */
static int bad_page(struct io *io)
{
    struct exporter *e = &io->exporter;
    e->reading = e->landed = 0;
    if (e->reads >= 2)
        return error_as(ERROR_DAMAGED);
    log_line(LOG_WARN, "%s; reading it once more", error_text());
    return 1;
}

static int convert_page(struct io *io)
{
    struct exporter *e = &io->exporter;
    struct page_image_layout layout;
    store_page_layout(io->store, e->page, &layout);
    if (store_verify_image(io->store, &e->pinned[e->page], e->image) < 0)
        return bad_page(io);
    const uint16_t *residual =
        io->plan->bf16 ? page_image_part(e->image, &layout, PART_RESIDUAL) : NULL;
    if (export_page(e->export, &io->layout->pages[e->page],
                    page_image_part(e->image, &layout, PART_WEIGHTS), residual) < 0)
        return exporter_give_up(io);
    e->reading = e->landed = e->reads = 0;
    e->page++;
    fault_point(FAULT_io_export_page);
    return 1;
}

static int finish(struct io *io)
{
    struct exporter *e = &io->exporter;
    if (export_finish(e->export) < 0)
        return exporter_give_up(io);
    export_close(e->export);
    e->export = NULL;
    log_line(LOG_INFO, "exported step %llu", (unsigned long long)e->step);
    if (io->plan->mode == PLAN_TRAIN &&
        export_rotate(plan_text_get(io->plan, io->plan->checkpoint.export_dir),
                      io->plan->checkpoint.keep) < 0) {
        log_line(LOG_WARN, "older exports stay: %s", error_text()); /* the new one is whole */
        error_clear();
    }
    end(io);
    return 1;
}

int exporter_turn(struct io *io)
{
    struct exporter *e = &io->exporter;
    if (!e->export)
        return 0;
    if (e->page == io->layout->n_pages)
        return finish(io);
    if (!e->reading)
        return read_page(io);
    return e->landed ? convert_page(io) : 0;
}
