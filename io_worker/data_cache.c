#include "io_worker/data_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "io_worker/folder.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/fault.h"

#define CACHE_VERSION      3
#define CACHE_BUFFER_BYTES ((size_t)1 << 20)
#define CACHE_NAME_MAX     64 /* of the source's own name, at the front of the cache file's */

static const char cache_magic[8] = {'M', 'T', 'D', 'A', 'T', 'A', '0', '1'};

static uint64_t nanoseconds(const struct timespec *t)
{
    return (uint64_t)t->tv_sec * 1000000000u + (uint64_t)t->tv_nsec;
}

struct data_identity data_identity_of(const struct stat *status)
{
    return (struct data_identity){.device = status->st_dev,
                                  .inode = status->st_ino,
                                  .size = (uint64_t)status->st_size,
                                  .mtime_ns = nanoseconds(&status->st_mtim),
                                  .ctime_ns = nanoseconds(&status->st_ctim)};
}

char *data_cache_path(const char *directory, const char *source_path, const char *suffix)
{
    char absolute[PATH_MAX], copy[PATH_MAX], *path = NULL;
    const char *whole = realpath(source_path, absolute) ? absolute : source_path;
    (void)snprintf(copy, sizeof copy, "%s", whole);
    uint64_t hash = XXH3_64bits(whole, strlen(whole));
    int n = asprintf(&path, "%s/%.*s-%016llx.%s", directory, CACHE_NAME_MAX, basename(copy),
                     (unsigned long long)hash, suffix);
    CHECK(n > 0);
    return path;
}

static uint64_t header_checksum(const struct data_cache_header *header)
{
    return XXH3_64bits(header, offsetof(struct data_cache_header, checksum));
}

static uint64_t body_bytes(const struct data_cache_header *h)
{
    switch ((enum data_cache_kind)h->kind) {
    case DATA_CACHE_TEXT:
        return h->tokens * h->token_bytes;
    case DATA_CACHE_INDEX:
        return h->entries * 3 * sizeof(uint64_t);
    case DATA_CACHE_SCAN:
        break;
    }
    return 0;
}

uint64_t data_cache_checks_offset(const struct data_cache_header *header)
{
    return sizeof *header + body_bytes(header);
}

static uint64_t checks_bytes(const struct data_cache_header *h)
{
    uint64_t covered = h->kind == DATA_CACHE_SCAN ? h->tokens * h->token_bytes : body_bytes(h);
    return data_checks_count(covered) * sizeof(uint64_t);
}

int data_cache_open(const char *path, enum data_cache_kind kind, struct data_cache_header *header)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && pread(fd, header, sizeof *header, 0) == (ssize_t)sizeof *header &&
        fstat(fd, &status) == 0 && memcmp(header->magic, cache_magic, sizeof cache_magic) == 0 &&
        header->version == CACHE_VERSION && header->kind == kind &&
        header->checksum == header_checksum(header) &&
        (uint64_t)status.st_size == data_cache_checks_offset(header) + checks_bytes(header))
        return fd;
    if (fd >= 0)
        (void)close(fd); /* nothing was written */
    return -1;
}

int data_cache_load(const char *path, enum data_cache_kind kind, struct data_cache_header *header)
{
    int fd = data_cache_open(path, kind, header);
    if (fd >= 0)
        (void)close(fd); /* nothing was written */
    return fd >= 0;
}

int data_cache_matches(const struct data_cache_header *header, const struct data_identity *now)
{
    const struct data_identity *then = &header->source;
    uint64_t youngest = then->mtime_ns > then->ctime_ns ? then->mtime_ns : then->ctime_ns;
    return memcmp(then, now, sizeof *now) == 0 &&
           header->scanned_ns >= youngest + DATA_CACHE_RACY_NS;
}

static void header_seal(struct data_cache_header *header)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now); /* cannot fail for this clock */
    memcpy(header->magic, cache_magic, sizeof cache_magic);
    header->version = CACHE_VERSION;
    if (header->scanned_ns == 0)
        header->scanned_ns = nanoseconds(&now);
    header->checksum = header_checksum(header);
}

void data_cache_renew(const char *path, struct data_cache_header *header)
{
    header->scanned_ns = 0;
    header_seal(header);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return; /* a cache that cannot be written only costs the hashing again */
    if (pwrite(fd, header, sizeof *header, 0) != (ssize_t)sizeof *header)
        (void)unlink(path); /* a torn header is of no use; the next start makes it again */
    (void)close(fd);
}

static int write_error(const struct data_cache_writer *w, const char *what)
{
    int full = errno == ENOSPC || errno == EDQUOT;
    int rc = error_set(full ? ERROR_FIT : folder_error_kind(errno), "%s: %s: %s", w->temporary,
                       what, strerror(errno));
    if (full)
        rc = error_hint("free some space, or set data.cache_dir to a larger file system");
    return rc;
}

/* The lock is on the file that the name still means: its last writer may have renamed it away. */
static int lock_temporary(struct data_cache_writer *w)
{
    struct stat opened, named;
    for (int attempt = 0; attempt < 10; attempt++) {
        w->fd = open(w->temporary, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (w->fd < 0)
            return write_error(w, "cannot create");
        if (flock(w->fd, LOCK_EX | LOCK_NB) < 0)
            break;
        if (fstat(w->fd, &opened) == 0 && stat(w->temporary, &named) == 0 &&
            opened.st_ino == named.st_ino)
            return 0;
        (void)close(w->fd); /* not ours, nothing written */
    }
    (void)error_set(ERROR_BUSY, "%s: another process is writing it", w->temporary);
    int rc = error_hint("a run that shares data.cache_dir makes it; start again when it has");
    if (w->fd >= 0)
        (void)close(w->fd);
    w->fd = -1;
    return rc;
}

int data_cache_begin(struct data_cache_writer *w, const char *path)
{
    *w = (struct data_cache_writer){.fd = -1, .offset = DATA_CACHE_HEADER_BYTES};
    w->path = strdup(path);
    CHECK(w->path != NULL && asprintf(&w->temporary, "%s.tmp", path) > 0);
    w->buffer = malloc(CACHE_BUFFER_BYTES);
    CHECK(w->buffer != NULL);
    int rc = lock_temporary(w);
    if (rc == 0 && ftruncate(w->fd, 0) < 0)
        rc = write_error(w, "cannot truncate");
    if (rc < 0)
        data_cache_abandon(w);
    return rc;
}

static int write_all(struct data_cache_writer *w, const void *bytes, size_t n, uint64_t offset)
{
    const uint8_t *b = bytes;
    for (size_t done = 0; done < n;) {
        ssize_t k = pwrite(w->fd, b + done, n - done, (off_t)(offset + done));
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return write_error(w, "write");
        done += (size_t)k;
    }
    return 0;
}

static int flush_buffer(struct data_cache_writer *w)
{
    int rc = write_all(w, w->buffer, w->used, w->offset);
    w->offset += w->used;
    w->used = 0;
    return rc;
}

int data_cache_append(struct data_cache_writer *w, const void *bytes, size_t n)
{
    const uint8_t *b = bytes;
    data_checks_feed(&w->checks, bytes, n);
    while (n > 0) {
        size_t room = CACHE_BUFFER_BYTES - w->used;
        size_t k = n < room ? n : room;
        memcpy(w->buffer + w->used, b, k);
        w->used += k;
        b += k;
        n -= k;
        if (w->used == CACHE_BUFFER_BYTES && flush_buffer(w) < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

/* A rename is durable once its folder is; the run must not find half a cache after power loss. */
static int sync_parent(const char *path)
{
    char *parent = folder_parent(path);
    int rc = folder_sync(parent);
    free(parent);
    return rc;
}

int data_cache_finish(struct data_cache_writer *w, struct data_cache_header *header)
{
    header_seal(header);
    int rc = flush_buffer(w);
    data_checks_end(&w->checks);
    if (rc == 0)
        rc = write_all(w, w->checks.hashes, w->checks.n * sizeof *w->checks.hashes, w->offset);
    if (rc == 0)
        rc = write_all(w, header, sizeof *header, 0);
    if (rc == 0 && fsync(w->fd) < 0)
        rc = write_error(w, "fsync");
    if (rc == 0)
        fault_point(FAULT_io_cache_before_rename);
    if (rc == 0 && rename(w->temporary, w->path) < 0)
        rc = write_error(w, "rename");
    if (rc == 0) {
        rc = sync_parent(w->path);
        (void)close(w->fd); /* fsynced above */
        w->fd = -1;
    }
    data_cache_abandon(w);
    return rc;
}

void data_cache_abandon(struct data_cache_writer *w)
{
    if (w->temporary != NULL && w->fd >= 0) {
        (void)unlink(w->temporary); /* a leftover would be overwritten by the next start */
        (void)close(w->fd);
    }
    free(w->path);
    free(w->temporary);
    free(w->buffer);
    data_checks_free(&w->checks);
    *w = (struct data_cache_writer){.fd = -1};
}
