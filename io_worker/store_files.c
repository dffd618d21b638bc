/* A file of the store: opened, locked, made direct. */
#include "io_worker/folder.h"
#include "io_worker/store_internal.h"

#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/mutant.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#ifndef STATX_DIOALIGN
#error "needs the kernel headers of Linux 6.1 or newer (STATX_DIOALIGN)"
#endif

enum { LOCK_RETRY_MS = 20 };

int store_file_error(const char *path, const char *what)
{
    return error_set(folder_error_kind(errno), "%s: %s: %s", path, what, strerror(errno));
}

void store_file_close(struct store_file *file)
{
    if (file->fd >= 0)
        (void)close(file->fd); /* everything that matters was flushed by fdatasync or O_DSYNC */
    file->fd = -1;
}

/* Opens; 1 if open, 0 if it does not exist, negative on error. */
int store_file_open(const struct store *store, struct store_file *file, int flags)
{
    CHECK(file->fd < 0);
    if (store->options.read_only) {
        file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NOATIME);
        if (file->fd < 0 && errno == EPERM) /* another user's: an access time cannot be helped */
            file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    } else {
        file->fd = open(file->path, O_RDWR | O_CLOEXEC | flags, 0600);
    }
    if (file->fd >= 0)
        return 1;
    return errno == ENOENT || errno == ENOTDIR ? 0 : store_file_error(file->path, "cannot open");
}

int store_report(const struct store *store, enum store_activity activity, uint64_t done,
                 uint64_t total)
{
    if (store->options.on_progress &&
        store->options.on_progress(store->options.progress_context, activity, done, total))
        return error_set(ERROR_STOPPED, "stopped on request");
    return 0;
}

static void sleep_ms(unsigned ms)
{
    struct timespec t = {0, (long)ms * 1000000};
    (void)nanosleep(&t, NULL); /* shorter is fine */
}

/* The fence: see store.h. */
int store_file_lock(const struct store *store, const struct store_file *file)
{
    unsigned seconds = store->options.lock_timeout_s;
    const uint64_t limit_ms = 1000 * (uint64_t)(seconds ? seconds : STORE_LOCK_TIMEOUT_S);
    const uint64_t start = clock_now_ns();
    const int how = store->options.read_only ? LOCK_SH : LOCK_EX;
    uint64_t told_ms = 0;
    while (!mutant(MUTANT_no_fence) && flock(file->fd, how | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return store_file_error(file->path, "cannot lock");
        uint64_t waited_ms = (clock_now_ns() - start) / 1000000;
        if (waited_ms >= limit_ms) {
            error_set(ERROR_BUSY, "%s: still locked after %llu s", file->path,
                      (unsigned long long)(limit_ms / 1000));
            return error_hint("a live process uses the run, or I/O of a killed one is still in "
                              "flight on a stuck device; the store was not touched");
        }
        if (waited_ms >= told_ms + PROGRESS_INTERVAL_MS) {
            told_ms = waited_ms;
            if (store_report(store, STORE_WAITING_FOR_LOCK, waited_ms, limit_ms) < 0)
                return -ERROR_STOPPED;
        }
        sleep_ms(LOCK_RETRY_MS);
    }
    return 0;
}

int store_file_check_size(const struct store_file *file, uint64_t expected)
{
    struct stat st;
    if (fstat(file->fd, &st) < 0)
        return store_file_error(file->path, "cannot stat");
    if ((uint64_t)st.st_size == expected)
        return 0;
    error_set(ERROR_FAILED, "%s: size: expected %llu bytes, found %llu", file->path,
              (unsigned long long)expected, (unsigned long long)st.st_size);
    return error_hint("the file was truncated or replaced; restore it, or free the run with "
                      "`mtlaunch clean`");
}

void store_say(struct store *store, const char *format, const char *path, const char *why)
{
    size_t used = strlen(store->notice);
    (void)snprintf(store->notice + used, sizeof store->notice - used, format, used ? "\n" : "",
                   path, why);
}

/* One direct read tells where statx does not. */
static int probe_direct(int fd)
{
    void *buffer;
    if (posix_memalign(&buffer, SECTOR_BYTES, SECTOR_BYTES) != 0)
        return 0;
    ssize_t got = pread(fd, buffer, SECTOR_BYTES, 0);
    free(buffer);
    return got >= 0;
}

/* Makes the same descriptor direct where the file system can, so that the lock stays. */
void store_file_make_direct(struct store *store, struct store_file *file)
{
    struct statx st;
    struct statfs fs;
    memset(&st, 0, sizeof st);
    file->direct = 0;
    if (fstatfs(file->fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC) {
        store_say(store, "%s%s: %s", file->path,
                  "tmpfs: buffered I/O, and the data does not survive a power loss");
        return;
    }
    int told = statx(file->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 &&
               (st.stx_mask & STATX_DIOALIGN);
    int usable = !told || (st.stx_dio_offset_align > 0 && st.stx_dio_offset_align <= SECTOR_BYTES &&
                           st.stx_dio_mem_align <= SECTOR_BYTES);
    int flags = fcntl(file->fd, F_GETFL);
    if (usable && flags >= 0 && fcntl(file->fd, F_SETFL, flags | O_DIRECT) == 0) {
        file->direct = told || probe_direct(file->fd);
        if (!file->direct)
            (void)fcntl(file->fd, F_SETFL, flags); /* clearing a flag just set */
    }
    if (!file->direct)
        store_say(store, "%s%s: %s", file->path,
                  "the file system has no direct I/O (4 KiB): buffered, slower, uses page cache");
}

void store_file_forget_cached(const struct store_file *file)
{
    if (!file->direct)
        (void)posix_fadvise(file->fd, 0, 0, POSIX_FADV_DONTNEED); /* advice: it does not fail */
}
