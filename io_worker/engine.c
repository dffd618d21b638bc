#include "io_worker/engine.h"
#include "io_worker/engine_backend.h"

#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/mutant.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Linux moves at most this many bytes in one call, whatever was asked for (read(2)). */
#define KERNEL_TRANSFER_BYTES_MAX 0x7ffff000ull

enum { ENGINE_NOTICE_BYTES = 256 };

struct engine {
    const struct engine_backend *backend;
    void *self;
    unsigned depth;
    unsigned in_flight;
    unsigned n_files;
    uint64_t transfer_bytes_max;
    struct io_request *oldest, *newest;
    void (*on_wait)(void *context);
    void *wait_context;
    char notice[ENGINE_NOTICE_BYTES];
    struct engine_file files[ENGINE_FILES_MAX];
};

static const char *const op_names[] = {"read", "write", "flush"};

/* -- opening -- */

static void check_options(const struct engine_options *options)
{
    CHECK(options->depth > 0 && options->depth <= ENGINE_DEPTH_MAX);
    CHECK(options->n_files > 0 && options->n_files <= ENGINE_FILES_MAX);
    CHECK(options->n_regions <= ENGINE_REGIONS_MAX);
    for (unsigned i = 0; i < options->n_files; i++)
        CHECK(options->files[i].alignment > 0 &&
              options->files[i].alignment <= KERNEL_TRANSFER_BYTES_MAX);
}

int engine_open_backend(struct engine **engine, const struct engine_options *options,
                        const struct engine_backend *backend, void *self)
{
    check_options(options);
    struct engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        backend->close(self);
        return error_set(ERROR_FAILED, "I/O engine: out of memory");
    }
    e->backend = backend;
    e->self = self;
    e->depth = options->depth;
    e->n_files = options->n_files;
    memcpy(e->files, options->files, options->n_files * sizeof e->files[0]);
    e->transfer_bytes_max = options->transfer_bytes_max;
    if (e->transfer_bytes_max == 0 || e->transfer_bytes_max > KERNEL_TRANSFER_BYTES_MAX)
        e->transfer_bytes_max = KERNEL_TRANSFER_BYTES_MAX;
    *engine = e;
    return 0;
}

static int open_sync(struct engine **engine, const struct engine_options *options)
{
    void *self;
    if (engine_sync_create(options, &self) < 0)
        return -(int)error_kind_now();
    return engine_open_backend(engine, options, &engine_sync_backend, self);
}

int engine_open(struct engine **engine, const struct engine_options *options)
{
    check_options(options);
    if (options->kind == ENGINE_SYNC)
        return open_sync(engine, options);
    char notice[ENGINE_NOTICE_BYTES];
    void *self;
    int rc = engine_uring_create(options, &self, notice, sizeof notice);
    if (rc == 0) {
        rc = engine_open_backend(engine, options, &engine_uring_backend, self);
    } else if (options->kind == ENGINE_AUTO) {
        (void)snprintf(notice, sizeof notice, "%.160s; using the sync I/O engine, same results",
                       error_text());
        error_clear();
        rc = open_sync(engine, options);
    }
    if (rc == 0)
        memcpy((*engine)->notice, notice, sizeof notice);
    return rc;
}

void engine_close(struct engine *engine)
{
    if (engine == NULL)
        return;
    while (engine->in_flight > 0)
        (void)engine_wait(engine, 100);
    engine->backend->close(engine->self);
    free(engine);
}

/* -- one request, many transfers -- */

static void start_transfer(struct engine *engine, struct io_request *request)
{
    uint64_t left = request->bytes - request->done_bytes;
    const uint64_t alignment = engine->files[request->file].alignment;
    uint64_t most = engine->transfer_bytes_max / alignment * alignment;
    if (most == 0)
        most = alignment;
    struct engine_transfer transfer = {.op = request->op, .file = request->file, .tag = request};
    if (request->op != IO_FLUSH) {
        transfer.buffer = (unsigned char *)request->buffer + request->done_bytes;
        transfer.offset = request->offset + request->done_bytes;
        transfer.bytes = (uint32_t)(left < most ? left : most);
    }
    engine->backend->start(engine->self, &transfer);
}

static void unlink_request(struct engine *engine, struct io_request *request)
{
    if (request->previous)
        request->previous->next = request->next;
    else
        engine->oldest = request->next;
    if (request->next)
        request->next->previous = request->previous;
    else
        engine->newest = request->previous;
    request->next = request->previous = NULL;
}

enum engine_answer engine_submit(struct engine *engine, struct io_request *request)
{
    CHECK(request->file < engine->n_files && request->on_done != NULL);
    if (engine->in_flight == engine->depth)
        return ENGINE_FULL;
    request->done_bytes = 0;
    request->idle_retries = 0;
    request->result = 0;
    request->submitted_ns = clock_now_ns();
    request->next = NULL;
    request->previous = engine->newest;
    if (engine->newest)
        engine->newest->next = request;
    else
        engine->oldest = request;
    engine->newest = request;
    engine->in_flight++;
    start_transfer(engine, request);
    return ENGINE_ACCEPTED;
}

static void finish(struct engine *engine, struct io_request *request, int result)
{
    unlink_request(engine, request);
    engine->in_flight--;
    request->result = result;
    request->on_done(request, result);
}

/* No progress: try again, but not for ever. 1 when the request is finished (with `failure`). */
static unsigned retry(struct engine *engine, struct io_request *request, int failure)
{
    if (++request->idle_retries > ENGINE_IDLE_RETRIES_MAX) {
        finish(engine, request, failure);
        return 1;
    }
    start_transfer(engine, request);
    return 0;
}

/* `moved` bytes arrived: finished, or continue. A direct transfer restarts only at an aligned byte;
 * so the tail of a short one is moved again. */
static unsigned advance(struct engine *engine, struct io_request *request, uint64_t moved)
{
    CHECK(moved <= request->bytes - request->done_bytes);
    if (request->done_bytes + moved == request->bytes || mutant(MUTANT_short_write_done)) {
        request->done_bytes = request->bytes;
        finish(engine, request, 0);
        return 1;
    }
    const uint64_t alignment = engine->files[request->file].alignment;
    const uint64_t whole = moved / alignment * alignment;
    if (whole == 0)
        return retry(engine, request, request->op == IO_READ ? -ENODATA : -EIO);
    request->done_bytes += whole;
    request->idle_retries = 0;
    start_transfer(engine, request);
    return 0;
}

/* Examines one result. 1 when the request is finished. */
static unsigned on_transfer(struct engine *engine, struct io_request *request, int64_t result)
{
    if (request->op == IO_FLUSH) {
        /* an interrupted fdatasync has reported nothing yet; any other error has, and only once */
        if (result == -EINTR)
            return retry(engine, request, -EINTR);
        finish(engine, request, result < 0 ? (int)result : 0);
        return 1;
    }
    if (result == -EINTR || result == -EAGAIN)
        return retry(engine, request, (int)result);
    if (result < 0) {
        finish(engine, request, (int)result);
        return 1;
    }
    if (result == 0 && request->bytes > request->done_bytes) {
        if (request->op == IO_WRITE)
            return retry(engine, request, -EIO);
        finish(engine, request, -ENODATA);
        return 1;
    }
    return advance(engine, request, (uint64_t)result);
}

unsigned engine_poll(struct engine *engine)
{
    unsigned finished = 0;
    struct io_request *request;
    int64_t result;
    /* bounded, so that callbacks which submit again cannot keep the main loop here */
    for (unsigned i = 0; i < 2 * engine->depth; i++) {
        if (!engine->backend->collect(engine->self, &request, &result))
            break;
        finished += on_transfer(engine, request, result);
    }
    return finished;
}

unsigned engine_wait(struct engine *engine, int timeout_ms)
{
    unsigned finished = engine_poll(engine);
    if (finished > 0 || engine->in_flight == 0)
        return finished;
    struct pollfd waited = {.fd = engine_event_fd(engine), .events = POLLIN};
    if (engine->on_wait)
        engine->on_wait(engine->wait_context);
    (void)poll(&waited, 1, timeout_ms); /* whatever it says, the truth is in the queue */
    finished = engine_poll(engine);
    if (engine->on_wait)
        engine->on_wait(engine->wait_context);
    return finished;
}

void engine_on_wait(struct engine *engine, void (*on_wait)(void *context), void *context)
{
    engine->on_wait = on_wait;
    engine->wait_context = context;
}

static void on_run_done(struct io_request *request, int result)
{
    (void)result; /* kept in request->result by the engine */
    *(int *)request->context = 1;
}

int engine_run(struct engine *engine, struct io_request *request)
{
    int done = 0;
    request->on_done = on_run_done;
    request->context = &done;
    while (engine_submit(engine, request) == ENGINE_FULL)
        (void)engine_wait(engine, 100);
    while (!done)
        (void)engine_wait(engine, 100);
    return request->result < 0 ? engine_request_error(engine, request) : 0;
}

/* -- facts -- */

unsigned engine_in_flight(const struct engine *engine)
{
    return engine->in_flight;
}

int engine_event_fd(const struct engine *engine)
{
    return engine->backend->event_fd(engine->self);
}

const struct io_request *engine_oldest(const struct engine *engine)
{
    return engine->oldest;
}

void engine_request_describe(const struct engine *engine, const struct io_request *request,
                             char *text, uint64_t text_bytes)
{
    const char *path = engine->files[request->file].path;
    if (request->op == IO_FLUSH)
        (void)snprintf(text, text_bytes, "fdatasync of %s", path);
    else
        (void)snprintf(text, text_bytes, "%s of %llu bytes at offset %llu of %s",
                       op_names[request->op], (unsigned long long)request->bytes,
                       (unsigned long long)request->offset, path);
}

int engine_request_error(const struct engine *engine, const struct io_request *request)
{
    CHECK(request->result < 0);
    char text[1024];
    engine_request_describe(engine, request, text, sizeof text);
    if (request->result == -ENODATA)
        return error_set(ERROR_FAILED, "%s: file ended after %llu bytes", text,
                         (unsigned long long)request->done_bytes);
    return error_set(ERROR_FAILED, "%s: %s after %llu bytes", text, strerror(-request->result),
                     (unsigned long long)request->done_bytes);
}

const char *engine_name(const struct engine *engine)
{
    return engine->backend->name;
}

const char *engine_notice(const struct engine *engine)
{
    return engine->notice;
}

static const char *const kind_names[] = {"auto", "io_uring", "sync"};

const char *engine_kind_name(enum engine_kind kind)
{
    return kind_names[kind];
}

int engine_kind_parse(const char *name, enum engine_kind *kind)
{
    for (unsigned i = 0; i < sizeof kind_names / sizeof kind_names[0]; i++)
        if (strcmp(name, kind_names[i]) == 0) {
            *kind = (enum engine_kind)i;
            return 0;
        }
    return error_set(ERROR_USER,
                     "io_engine: expected \"auto\", \"io_uring\" or \"sync\", found \"%s\"", name);
}
