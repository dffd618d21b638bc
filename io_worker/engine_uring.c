/*
 * io_uring: registered files always, registered buffers where the memlock limit allows, completions
 * through an eventfd. No SQPOLL: its kernel thread would take a core from compute.
 *
 * Registration takes at most 1 GiB per buffer, so regions are registered in pieces; a transfer that
 * crosses two pieces goes unregistered, which is slower by a page walk and otherwise the same.
 *
 * A submission that the kernel cannot take now is repeated. One that it will never take (a ring
 * that is forbidden after it was set up, say) breaks the engine: what it holds is given back with
 * that error, and so is all that follows. What was submitted before still completes.
 */
#include "io_worker/engine_backend.h"

#include "procs/check.h"
#include "procs/error.h"

#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    PIECES_MAX = 1024, /* the kernel takes 16384; 1 TiB is enough, the rest goes unregistered */
    PROBE_TRIES = 100,
};

#define PIECE_BYTES_MAX ((uint64_t)1 << 30)

struct engine_uring {
    struct io_uring ring;
    int event_fd;
    int broken; /* -errno of a submission that no repeating helps; 0 */
    unsigned depth;
    uint64_t n_started, n_refused; /* transfers; refused: given back since it broke, or submitted */
    struct io_request **tags;      /* (depth) of started transfers, the newest at n_started - 1 */
    unsigned n_pieces;
    struct iovec pieces[PIECES_MAX];
};

static unsigned cut_regions(const struct engine_options *options, struct iovec *pieces)
{
    unsigned n = 0;
    for (unsigned r = 0; r < options->n_regions; r++) {
        unsigned char *base = options->regions[r].base;
        uint64_t left = options->regions[r].bytes;
        while (left > 0 && n < PIECES_MAX) {
            uint64_t bytes = left < PIECE_BYTES_MAX ? left : PIECE_BYTES_MAX;
            pieces[n++] = (struct iovec){base, bytes};
            base += bytes;
            left -= bytes;
        }
    }
    return n;
}

static void register_regions(struct engine_uring *uring, const struct engine_options *options,
                             char *notice, uint64_t notice_bytes)
{
    unsigned n = cut_regions(options, uring->pieces);
    if (n == 0)
        return;
    int rc = io_uring_register_buffers(&uring->ring, uring->pieces, n);
    if (rc == 0) {
        uring->n_pieces = n;
        return;
    }
    struct rlimit limit = {0, 0};
    (void)getrlimit(RLIMIT_MEMLOCK, &limit); /* only for the text */
    (void)snprintf(notice, notice_bytes,
                   "I/O buffers are not registered (%s; memlock limit %llu KiB): same results, "
                   "some more CPU time; raise `ulimit -l`",
                   strerror(-rc), (unsigned long long)limit.rlim_cur / 1024);
}

/* What may be otherwise the next time. */
static int is_passing(int rc)
{
    return rc == -EAGAIN || rc == -EBUSY || rc == -EINTR || rc == -ENOMEM;
}

/* One operation that does nothing: some sandboxes allow the set-up and forbid the use. */
static int probe(struct io_uring *ring)
{
    struct io_uring_cqe *cqe;
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    CHECK(sqe != NULL);
    io_uring_prep_nop(sqe);
    int rc = -EAGAIN;
    for (int i = 0; i < PROBE_TRIES && (rc == 0 || is_passing(rc)); i++) {
        rc = io_uring_submit_and_wait(ring, 1);
        if (io_uring_peek_cqe(ring, &cqe) == 0) {
            rc = cqe->res;
            io_uring_cqe_seen(ring, cqe);
            return rc;
        }
    }
    return rc < 0 ? rc : -EAGAIN;
}

static int set_up(struct engine_uring *uring, const struct engine_options *options)
{
    int rc = io_uring_queue_init(options->depth, &uring->ring, 0);
    if (rc < 0)
        return error_set(ERROR_FAILED, "io_uring is not available here: %s%s", strerror(-rc),
                         rc == -ENOMEM                   ? " (memlock limit too low?)"
                         : rc == -EPERM || rc == -ENOSYS ? " (forbidden by the container?)"
                                                         : "");
    rc = probe(&uring->ring);
    if (rc < 0) {
        io_uring_queue_exit(&uring->ring);
        return error_set(ERROR_FAILED, "io_uring is not available here: %s at the first use",
                         strerror(-rc));
    }
    int fds[ENGINE_FILES_MAX];
    for (unsigned i = 0; i < options->n_files; i++)
        fds[i] = options->files[i].fd;
    rc = io_uring_register_files(&uring->ring, fds, options->n_files);
    if (rc == 0)
        rc = io_uring_register_eventfd(&uring->ring, uring->event_fd);
    if (rc < 0) {
        io_uring_queue_exit(&uring->ring);
        return error_set(ERROR_FAILED, "io_uring cannot be set up: registering files: %s",
                         strerror(-rc));
    }
    return 0;
}

int engine_uring_create(const struct engine_options *options, void **self, char *notice,
                        uint64_t notice_bytes)
{
    notice[0] = '\0';
    struct engine_uring *uring = calloc(1, sizeof *uring);
    if (uring == NULL)
        return error_set(ERROR_FAILED, "io_uring engine: out of memory");
    uring->depth = options->depth;
    uring->tags = calloc(options->depth, sizeof(struct io_request *));
    uring->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = uring->tags == NULL ? error_set(ERROR_FAILED, "io_uring engine: out of memory")
             : uring->event_fd < 0
                 ? error_set(ERROR_FAILED, "io_uring engine: eventfd: %s", strerror(errno))
                 : set_up(uring, options);
    if (rc < 0) {
        if (uring->event_fd >= 0)
            (void)close(uring->event_fd);
        free(uring->tags);
        free(uring);
        return rc;
    }
    register_regions(uring, options, notice, notice_bytes);
    *self = uring;
    return 0;
}

/* Index of the registered piece that holds all of the transfer, or -1. */
static int find_piece(const struct engine_uring *uring, const struct engine_transfer *transfer)
{
    const unsigned char *begin = transfer->buffer;
    for (unsigned i = 0; i < uring->n_pieces; i++) {
        const unsigned char *base = uring->pieces[i].iov_base;
        if (begin >= base && begin + transfer->bytes <= base + uring->pieces[i].iov_len)
            return (int)i;
    }
    return -1;
}

static void prepare(struct io_uring_sqe *sqe, const struct engine_transfer *transfer, int piece)
{
    const int file = (int)transfer->file;
    if (transfer->op == IO_FLUSH)
        io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
    else if (transfer->op == IO_READ && piece >= 0)
        io_uring_prep_read_fixed(sqe, file, transfer->buffer, transfer->bytes, transfer->offset,
                                 piece);
    else if (transfer->op == IO_READ)
        io_uring_prep_read(sqe, file, transfer->buffer, transfer->bytes, transfer->offset);
    else if (piece >= 0)
        io_uring_prep_write_fixed(sqe, file, transfer->buffer, transfer->bytes, transfer->offset,
                                  piece);
    else
        io_uring_prep_write(sqe, file, transfer->buffer, transfer->bytes, transfer->offset);
    sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, transfer->tag);
}

static void submit(struct engine_uring *uring)
{
    int rc = uring->broken ? 0 : io_uring_submit(&uring->ring);
    if (rc >= 0 || is_passing(rc))
        return; /* what it could not take, collect submits again */
    uring->broken = rc;
    uring->n_refused = uring->n_started - io_uring_sq_ready(&uring->ring);
    (void)eventfd_write(uring->event_fd, 1);
}

static void uring_start(void *self, const struct engine_transfer *transfer)
{
    struct engine_uring *uring = self;
    uring->tags[uring->n_started++ % uring->depth] = transfer->tag;
    if (uring->broken) {
        (void)eventfd_write(uring->event_fd, 1);
        return;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    CHECK(sqe != NULL); /* the queue is as deep as the engine */
    prepare(sqe, transfer, transfer->op == IO_FLUSH ? -1 : find_piece(uring, transfer));
    submit(uring);
}

/* Gives back what will never be submitted. */
static int collect_refused(struct engine_uring *uring, struct io_request **tag, int64_t *result)
{
    if (!uring->broken || uring->n_refused == uring->n_started)
        return 0;
    *tag = uring->tags[uring->n_refused++ % uring->depth];
    *result = uring->broken;
    return 1;
}

static int uring_collect(void *self, struct io_request **tag, int64_t *result)
{
    struct engine_uring *uring = self;
    if (io_uring_sq_ready(&uring->ring) > 0)
        submit(uring); /* EAGAIN, EBUSY: again at the next call */
    struct io_uring_cqe *cqe;
    if (io_uring_peek_cqe(&uring->ring, &cqe) != 0) {
        eventfd_t ignored;
        (void)eventfd_read(uring->event_fd, &ignored);
        /* a completion between peek and read would have lost its wake-up */
        if (io_uring_peek_cqe(&uring->ring, &cqe) != 0)
            return collect_refused(uring, tag, result);
    }
    *tag = io_uring_cqe_get_data(cqe);
    *result = cqe->res;
    io_uring_cqe_seen(&uring->ring, cqe);
    return 1;
}

static int uring_event_fd(const void *self)
{
    return ((const struct engine_uring *)self)->event_fd;
}

static void uring_close(void *self)
{
    struct engine_uring *uring = self;
    io_uring_queue_exit(&uring->ring);
    (void)close(uring->event_fd); /* nothing was written through it */
    free(uring->tags);
    free(uring);
}

const struct engine_backend engine_uring_backend = {.name = "io_uring",
                                                    .start = uring_start,
                                                    .collect = uring_collect,
                                                    .event_fd = uring_event_fd,
                                                    .close = uring_close};
