/*
 * An engine backend that lies, and one that loses power.
 *
 * It moves bytes with pread and pwrite through descriptors of its own (buffered, so that any size
 * and memory will do) and completes in random order. What it may do wrong is switched on by the
 * test; everything random comes from `seed`, which tests print.
 *
 * With `cache` on, a write is kept in memory, as a drive's volatile cache would, until its file is
 * flushed; reads see it. After `power_budget` transfers the power goes: a random subset of the
 * 512-byte sectors that were not flushed reaches the file, in random order, and every later
 * transfer fails. Files opened O_DSYNC (bit in `durable_files`) are written through; only the
 * transfer that is cut is torn.
 */
#ifndef TESTS_IO_LYING_ENGINE_H
#define TESTS_IO_LYING_ENGINE_H

#include "io_worker/engine_backend.h"
#include "procs/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { LIAR_SECTOR = 512, LIAR_QUEUE = 1024, LIAR_CACHE = 4096 };

struct liar_write {
    unsigned file;
    uint64_t offset, bytes;
    unsigned char *data;
};

struct liar {
    uint64_t seed;
    uint32_t short_percent;   /* transfers that move only a part */
    uint32_t retry_percent;   /* transfers that say EINTR or EAGAIN and move nothing */
    int always_retry;         /* ... for ever */
    int64_t fail_at, fail_as; /* the fail_at-th transfer (from 1) of fail_op gives -fail_as */
    enum io_op fail_op;
    int64_t lose_write_at;      /* this write says "done" and never happens */
    int64_t misdirect_write_at; /* this write lands misdirect_by bytes further on */
    int64_t misdirect_by;
    int cache;
    int drop_flushes; /* FLUSH says "done" and flushes nothing */
    uint32_t durable_files;
    int64_t power_budget; /* transfers until the power goes; negative: never */
    int power_is_off;
    /* facts */
    int64_t count[3], transfers;
    uint32_t largest;

    int event_fd;
    int fds[ENGINE_FILES_MAX];
    unsigned n_files;
    unsigned n_queued;
    struct {
        struct io_request *tag;
        int64_t result;
    } queue[LIAR_QUEUE];
    unsigned n_writes;
    struct liar_write writes[LIAR_CACHE];
};

static inline uint64_t liar_random(struct liar *liar)
{
    liar->seed ^= liar->seed << 13;
    liar->seed ^= liar->seed >> 7;
    liar->seed ^= liar->seed << 17;
    return liar->seed >> 11;
}

static inline int64_t liar_move(struct liar *liar, enum io_op op, unsigned file, void *buffer,
                                uint64_t bytes, uint64_t offset)
{
    ssize_t n = op == IO_READ ? pread(liar->fds[file], buffer, bytes, (off_t)offset)
                              : pwrite(liar->fds[file], buffer, bytes, (off_t)offset);
    return n < 0 ? -errno : n;
}

static inline void liar_forget(struct liar *liar, unsigned i)
{
    free(liar->writes[i].data);
    memmove(&liar->writes[i], &liar->writes[i + 1],
            (liar->n_writes - i - 1) * sizeof liar->writes[0]);
    liar->n_writes--;
}

static inline void liar_flush(struct liar *liar, unsigned file)
{
    for (unsigned i = 0; i < liar->n_writes;) {
        const struct liar_write *w = &liar->writes[i];
        if (w->file != file) {
            i++;
            continue;
        }
        CHECK(liar_move(liar, IO_WRITE, file, w->data, w->bytes, w->offset) == (int64_t)w->bytes);
        liar_forget(liar, i);
    }
}

static inline void liar_cut_power(struct liar *liar)
{
    liar->power_is_off = 1;
    while (liar->n_writes > 0) {
        unsigned i = (unsigned)(liar_random(liar) % liar->n_writes);
        const struct liar_write *w = &liar->writes[i];
        uint64_t keep_percent = liar_random(liar) % 101;
        for (uint64_t at = 0; at < w->bytes; at += LIAR_SECTOR)
            if (liar_random(liar) % 100 < keep_percent)
                (void)liar_move(liar, IO_WRITE, w->file, w->data + at, LIAR_SECTOR, w->offset + at);
        liar_forget(liar, i);
    }
}

static inline void liar_remember(struct liar *liar, const struct engine_transfer *t)
{
    CHECK(liar->n_writes < LIAR_CACHE);
    struct liar_write *w = &liar->writes[liar->n_writes++];
    *w = (struct liar_write){t->file, t->offset, t->bytes, malloc(t->bytes)};
    CHECK(w->data != NULL);
    memcpy(w->data, t->buffer, t->bytes);
}

static inline int64_t liar_read(struct liar *liar, const struct engine_transfer *t, uint64_t bytes)
{
    int64_t n = liar_move(liar, IO_READ, t->file, t->buffer, bytes, t->offset);
    for (unsigned i = 0; n > 0 && i < liar->n_writes; i++) {
        const struct liar_write *w = &liar->writes[i];
        uint64_t from = t->offset > w->offset ? t->offset : w->offset;
        uint64_t end = t->offset + (uint64_t)n;
        uint64_t to = end < w->offset + w->bytes ? end : w->offset + w->bytes;
        if (w->file == t->file && from < to)
            memcpy((unsigned char *)t->buffer + (from - t->offset), w->data + (from - w->offset),
                   to - from);
    }
    return n;
}

static inline int64_t liar_write(struct liar *liar, const struct engine_transfer *t, uint64_t bytes)
{
    if (liar->count[IO_WRITE] == liar->lose_write_at)
        return (int64_t)bytes;
    struct engine_transfer moved = *t;
    moved.bytes = (uint32_t)bytes;
    if (liar->count[IO_WRITE] == liar->misdirect_write_at)
        moved.offset += (uint64_t)liar->misdirect_by;
    if (liar->cache && (liar->durable_files >> t->file & 1) == 0) {
        liar_remember(liar, &moved);
        return (int64_t)bytes;
    }
    return liar_move(liar, IO_WRITE, moved.file, moved.buffer, bytes, moved.offset);
}

static inline int64_t liar_perform(struct liar *liar, const struct engine_transfer *t)
{
    liar->transfers++;
    liar->count[t->op]++;
    if (t->bytes > liar->largest)
        liar->largest = t->bytes;
    if (liar->power_is_off)
        return -EIO;
    if (liar->power_budget >= 0 && liar->power_budget-- == 0) {
        if (t->op == IO_WRITE)
            liar_remember(liar, t);
        liar_cut_power(liar);
        return -EIO;
    }
    if (liar->count[t->op] == liar->fail_at && t->op == liar->fail_op)
        return -liar->fail_as;
    if (liar->always_retry || liar_random(liar) % 100 < liar->retry_percent)
        return liar_random(liar) % 2 && t->op != IO_FLUSH ? -EAGAIN : -EINTR;
    if (t->op == IO_FLUSH) {
        if (!liar->drop_flushes)
            liar_flush(liar, t->file);
        return 0;
    }
    uint64_t bytes = t->bytes;
    if (liar_random(liar) % 100 < liar->short_percent)
        bytes = 1 + liar_random(liar) % bytes;
    return t->op == IO_READ ? liar_read(liar, t, bytes) : liar_write(liar, t, bytes);
}

static inline void liar_start(void *self, const struct engine_transfer *transfer)
{
    struct liar *liar = self;
    CHECK(liar->n_queued < LIAR_QUEUE);
    int64_t result = liar_perform(liar, transfer);
    liar->queue[liar->n_queued].tag = transfer->tag;
    liar->queue[liar->n_queued++].result = result;
    (void)eventfd_write(liar->event_fd, 1);
}

static inline int liar_collect(void *self, struct io_request **tag, int64_t *result)
{
    struct liar *liar = self;
    if (liar->n_queued == 0)
        return 0;
    unsigned i = (unsigned)(liar_random(liar) % liar->n_queued);
    *tag = liar->queue[i].tag;
    *result = liar->queue[i].result;
    liar->queue[i] = liar->queue[--liar->n_queued];
    return 1;
}

static inline int liar_event_fd(const void *self)
{
    return ((const struct liar *)self)->event_fd;
}

static inline void liar_close(void *self)
{
    struct liar *liar = self;
    for (unsigned i = 0; i < liar->n_files; i++)
        liar_flush(liar, i); /* an orderly end keeps everything */
    for (unsigned i = 0; i < liar->n_files; i++)
        (void)close(liar->fds[i]);
    (void)close(liar->event_fd);
}

static const struct engine_backend liar_backend = {.name = "lying",
                                                   .start = liar_start,
                                                   .collect = liar_collect,
                                                   .event_fd = liar_event_fd,
                                                   .close = liar_close};

/* `liar` stays the caller's. Opens the files of `options` anew by their paths. */
static inline int liar_open(struct engine **engine, const struct engine_options *options,
                            struct liar *liar)
{
    liar->seed = liar->seed * 0x9E3779B97F4A7C15ull + 1;
    liar->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    liar->n_files = options->n_files;
    for (unsigned i = 0; i < options->n_files; i++) {
        liar->fds[i] = open(options->files[i].path, O_RDWR | O_CLOEXEC);
        CHECK(liar->fds[i] >= 0);
    }
    return engine_open_backend(engine, options, &liar_backend, liar);
}

#define LIAR_HONEST(the_seed)                                                                      \
    {                                                                                              \
        .seed = (the_seed), .power_budget = -1                                                     \
    }

#endif
