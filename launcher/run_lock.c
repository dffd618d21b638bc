#include "launcher/run_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "procs/error.h"
#include "procs/mutant.h"

/* Looking whether a lock is held takes it for an instant: that is no use of the run. */
enum { LOCK_TRIES = 5, LOCK_PAUSE_US = 20000, RENAMED_TRIES = 20 };

static int lock_path(const char *directory, char *out, size_t bytes)
{
    int n = snprintf(out, bytes, "%s/run.lock", directory);
    return n > 0 && n < (int)bytes ? 0
                                   : error_set(ERROR_USER, "%s: the path is too long", directory);
}

/* Reads without leaving an access time where the kernel lets us. */
static int open_to_read(const char *path)
{
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = open(path, flags | O_NOATIME);
    return fd < 0 && errno == EPERM ? open(path, flags) : fd;
}

/* A link or a device in its place is no lock file of ours: it would be written to. */
static int open_to_lock(const char *path, enum run_lock_how how, int *created)
{
    *created = 0;
    if (how == RUN_LOCK_SHARED)
        return open_to_read(path);
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = open(path, flags);
    if (fd < 0 && errno == ENOENT) {
        fd = open(path, flags | O_CREAT | O_EXCL, 0600);
        *created = fd >= 0;
        if (fd < 0 && errno == EEXIST)
            fd = open(path, flags);
    }
    return fd;
}

static int is_plain_file(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

static int is_still_there(int fd, const char *path)
{
    struct stat held, named;
    return fstat(fd, &held) == 0 && lstat(path, &named) == 0 && held.st_ino == named.st_ino &&
           held.st_dev == named.st_dev;
}

/* -- who holds it -- */

static void take_line(const char **at, char *out, size_t bytes)
{
    size_t n = strcspn(*at, "\n");
    (void)snprintf(out, bytes, "%.*s", (int)n, *at);
    *at += n + ((*at)[n] == '\n');
}

static void read_text(int fd, struct run_lock_text *text)
{
    char bytes[RUN_LOCK_TEXT_BYTES], pid[16];
    ssize_t n = pread(fd, bytes, sizeof bytes - 1, 0);
    bytes[n > 0 ? n : 0] = '\0';
    const char *at = bytes;
    take_line(&at, text->endpoint, sizeof text->endpoint);
    take_line(&at, text->token, sizeof text->token);
    take_line(&at, pid, sizeof pid);
    take_line(&at, text->path, sizeof text->path);
    text->pid = (int)strtol(pid, NULL, 10);
}

/* The kernel's own list, which also knows those that only read. 0 if it does not tell: some file
 * systems show another device there, and other namespaces have no pid here. */
static int pid_in_kernel_list(int fd)
{
    struct stat st;
    char line[256];
    int pid = 0, found = 0;
    unsigned dev_major, dev_minor;
    unsigned long long inode;
    FILE *locks = fopen("/proc/locks", "re");
    if (!locks || fstat(fd, &st) < 0) {
        if (locks)
            (void)fclose(locks); /* read only */
        return 0;
    }
    while (!found && fgets(line, sizeof line, locks))
        found = sscanf(line, "%*d: FLOCK ADVISORY %*s %d %x:%x:%llu", &pid, &dev_major, &dev_minor,
                       &inode) == 4 &&
                inode == st.st_ino && dev_major == major(st.st_dev) &&
                dev_minor == minor(st.st_dev);
    (void)fclose(locks); /* read only */
    return found && pid > 0 ? pid : 0;
}

static int busy(int fd, const char *directory, const char *what)
{
    struct run_lock_text text;
    char who[64] = "a live process";
    read_text(fd, &text);
    int pid = pid_in_kernel_list(fd);
    if (!pid)
        pid = text.pid;
    if (pid)
        (void)snprintf(who, sizeof who, "process %d", pid);
    int other = text.path[0] && strcmp(text.path, directory) != 0 && pid == text.pid;
    (void)error_set(ERROR_BUSY, "%s: the %s is in use by %s%s%s%s", directory, what, who,
                    other ? " (run " : "", other ? text.path : "", other ? ")" : "");
    return error_hint("`mtlaunch stop %s` ends a training after the step in flight",
                      other ? text.path : directory);
}

/* -- taking it -- */

static int flock_patiently(int fd, int operation)
{
    int rc = mutant(MUTANT_no_run_lock) ? 0 : flock(fd, operation | LOCK_NB);
    for (int i = 0; rc < 0 && (errno == EWOULDBLOCK || errno == EINTR) && i < LOCK_TRIES; i++) {
        (void)usleep(LOCK_PAUSE_US);
        rc = flock(fd, operation | LOCK_NB);
    }
    return rc;
}

/* 1 locked, 0 the file went while we waited, negative. */
static int try_to_take(const char *path, const char *directory, const char *what,
                       enum run_lock_how how, int *fd, int *created)
{
    *fd = open_to_lock(path, how, created);
    if (*fd < 0 && how == RUN_LOCK_SHARED && errno == ENOENT)
        return 1;
    if (*fd < 0)
        return error_set(ERROR_USER, "%s: %s", path,
                         errno == ELOOP ? "a symbolic link, expected a file" : strerror(errno));
    int rc = is_plain_file(*fd) ? 1 : error_set(ERROR_USER, "%s: expected a plain file", path);
    if (rc > 0 && flock_patiently(*fd, how == RUN_LOCK_SHARED ? LOCK_SH : LOCK_EX) < 0)
        rc = errno == EWOULDBLOCK ? busy(*fd, directory, what)
                                  : error_set(ERROR_FAILED, "%s: flock: %s", path, strerror(errno));
    if (rc > 0)
        rc = is_still_there(*fd, path);
    if (rc <= 0) {
        (void)close(*fd); /* nothing was written */
        *fd = -1;
    }
    return rc;
}

int run_lock_take(const char *directory, const char *what, enum run_lock_how how, int *fd,
                  int *created)
{
    char path[RUN_LOCK_TEXT_BYTES];
    *fd = -1;
    if (lock_path(directory, path, sizeof path) < 0)
        return -(int)error_kind_now();
    for (int i = 0; i < RENAMED_TRIES; i++) {
        int rc = try_to_take(path, directory, what, how, fd, created);
        if (rc != 0)
            return rc < 0 ? rc : 0;
    }
    return error_set(ERROR_BUSY, "%s: the lock file is removed and made again all the time", path);
}

/* -- its text -- */

int run_lock_write(int fd, const struct run_lock_text *text)
{
    char bytes[RUN_LOCK_TEXT_BYTES];
    int n = snprintf(bytes, sizeof bytes, "%s\n%s\n%d\n%s\n", text->endpoint, text->token,
                     text->pid, text->path);
    ssize_t wrote = pwrite(fd, bytes, (size_t)n, 0); /* over the old one, which has its space */
    int failure = wrote < 0 ? errno : wrote < n ? ENOSPC : ftruncate(fd, n) < 0 ? errno : 0;
    if (failure == 0)
        return 0;
    (void)!ftruncate(fd, 0); /* no text is better than a part of one */
    return failure == ENOSPC || failure == EDQUOT
               ? 0
               : error_set(ERROR_FAILED, "run.lock: %s", strerror(failure));
}

void run_lock_clear(int fd)
{
    (void)!ftruncate(fd, 0); /* a stale text is recognized anyway */
}

int run_lock_read(const char *directory, struct run_lock_text *text)
{
    char path[RUN_LOCK_TEXT_BYTES];
    memset(text, 0, sizeof *text);
    if (lock_path(directory, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    int fd = open_to_read(path);
    if (fd < 0)
        return -errno;
    read_text(fd, text);
    (void)close(fd); /* read only */
    return 0;
}

int run_lock_is_held(const char *directory)
{
    char path[RUN_LOCK_TEXT_BYTES];
    int fd = lock_path(directory, path, sizeof path) < 0 ? -1 : open_to_read(path);
    if (fd < 0)
        return 0;
    int held = flock(fd, LOCK_SH | LOCK_NB) < 0;
    (void)close(fd); /* read only */
    return held;
}
