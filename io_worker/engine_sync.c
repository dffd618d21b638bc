/*
 * pread, pwrite, fdatasync, done at submission. The result waits in a queue until it is collected,
 * so that callbacks come from the same place as with io_uring.
 */
#include "io_worker/engine_backend.h"

#include "procs/check.h"
#include "procs/error.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct finished {
    struct io_request *tag;
    int64_t result;
};

struct engine_sync {
    int event_fd;
    unsigned depth;
    unsigned head, tail; /* queue of finished transfers, tail - head <= depth */
    int fds[ENGINE_FILES_MAX];
    struct finished finished[];
};

int engine_sync_create(const struct engine_options *options, void **self)
{
    struct engine_sync *sync = calloc(1, sizeof *sync + options->depth * sizeof sync->finished[0]);
    if (sync == NULL)
        return error_set(ERROR_FAILED, "sync I/O engine: out of memory");
    sync->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (sync->event_fd < 0) {
        int failure = errno;
        free(sync);
        return error_set(ERROR_FAILED, "sync I/O engine: eventfd: %s", strerror(failure));
    }
    sync->depth = options->depth;
    for (unsigned i = 0; i < options->n_files; i++)
        sync->fds[i] = options->files[i].fd;
    *self = sync;
    return 0;
}

static int64_t perform(int fd, const struct engine_transfer *transfer)
{
    ssize_t result;
    if (transfer->op == IO_READ)
        result = pread(fd, transfer->buffer, transfer->bytes, (off_t)transfer->offset);
    else if (transfer->op == IO_WRITE)
        result = pwrite(fd, transfer->buffer, transfer->bytes, (off_t)transfer->offset);
    else
        result = fdatasync(fd);
    return result < 0 ? -errno : result;
}

static void sync_start(void *self, const struct engine_transfer *transfer)
{
    struct engine_sync *sync = self;
    CHECK(sync->tail - sync->head < sync->depth);
    int64_t result = perform(sync->fds[transfer->file], transfer);
    sync->finished[sync->tail++ % sync->depth] = (struct finished){transfer->tag, result};
    (void)eventfd_write(sync->event_fd, 1); /* only a hint; the queue is the truth */
}

static int sync_collect(void *self, struct io_request **tag, int64_t *result)
{
    struct engine_sync *sync = self;
    if (sync->head == sync->tail) {
        eventfd_t ignored;
        (void)eventfd_read(sync->event_fd, &ignored); /* nothing left: sleep may follow */
        return 0;
    }
    const struct finished *next = &sync->finished[sync->head++ % sync->depth];
    *tag = next->tag;
    *result = next->result;
    return 1;
}

static int sync_event_fd(const void *self)
{
    return ((const struct engine_sync *)self)->event_fd;
}

static void sync_close(void *self)
{
    struct engine_sync *sync = self;
    (void)close(sync->event_fd); /* nothing was written through it */
    free(sync);
}

const struct engine_backend engine_sync_backend = {.name = "sync",
                                                   .start = sync_start,
                                                   .collect = sync_collect,
                                                   .event_fd = sync_event_fd,
                                                   .close = sync_close};
