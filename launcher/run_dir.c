#include "launcher/run_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "procs/error.h"

/* What a start makes in the run directory, in the order in which run_dir_undo() takes it away. */
static const char *const entries[] = {"logs",        "cache",  "store",
                                      "config.toml", "run.id", "run.lock"};
enum { ENTRIES = sizeof entries / sizeof entries[0] };

enum { LOCK_TRIES = 5, LOCK_PAUSE_US = 20000 };

static int file_in(const struct run_dir *run, const char *name, char *out)
{
    int n = snprintf(out, LAUNCHER_PATH_BYTES, "%s/%s", run->path, name);
    if (n < 0 || n >= LAUNCHER_PATH_BYTES)
        return error_set(ERROR_USER, "%s: the path is too long", run->path);
    return 0;
}

/* mkdir -p; the last component 0700. *created: it was not there. */
static int make_directories(const char *path, int *created)
{
    char part[LAUNCHER_PATH_BYTES];
    struct stat there;
    size_t n = strlen(path);
    *created = 0;
    if (n >= sizeof part)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    memcpy(part, path, n + 1);
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p != '\0')
            continue;
        int last = *p == '\0';
        *p = '\0';
        if (mkdir(part, 0700) == 0)
            *created = last;
        else if (errno != EEXIST)
            return error_set(ERROR_USER, "%s: cannot create: %s", part, strerror(errno));
        else if (last && (stat(part, &there) < 0 || !S_ISDIR(there.st_mode)))
            return error_set(ERROR_USER, "%s: expected a directory, found a file", part);
        if (last)
            return 0;
        *p = '/';
    }
}

static int read_text(const char *path, char *out, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, out, bytes - 1);
    (void)close(fd); /* read only */
    if (n < 0)
        return -EIO;
    out[n] = '\0';
    return (int)n;
}

/* Written aside, fsynced, renamed: whole or absent. */
static int write_text(const char *path, const char *text)
{
    char aside[LAUNCHER_PATH_BYTES + 8];
    (void)snprintf(aside, sizeof aside, "%s.new", path);
    int fd = open(aside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return error_set(ERROR_FAILED, "%s: %s", aside, strerror(errno));
    ssize_t n = write(fd, text, strlen(text));
    int bad = n != (ssize_t)strlen(text) || fsync(fd) < 0;
    if (close(fd) < 0 || bad || rename(aside, path) < 0)
        return error_set(ERROR_FAILED, "%s: cannot write: %s", path, strerror(errno));
    return 0;
}

/* A store is written under this identity: its name must not be lost where the store is not. */
static int sync_directory(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) < 0
                 ? error_set(ERROR_FAILED, "%s: fsync: %s", path, strerror(errno))
                 : 0;
    if (fd >= 0)
        (void)close(fd); /* opened for reading */
    return rc;
}

static int parse_id(const char *text, uint8_t id[RUN_ID_BYTES])
{
    for (int i = 0; i < RUN_ID_BYTES; i++) {
        unsigned value;
        if (sscanf(text + 2 * i, "%2x", &value) != 1)
            return -1;
        id[i] = (uint8_t)value;
    }
    return 0;
}

static int identify(struct run_dir *run)
{
    char path[LAUNCHER_PATH_BYTES], text[2 * RUN_ID_BYTES + 2];
    if (file_in(run, "run.id", path) < 0)
        return -(int)error_kind_now();
    int n = read_text(path, text, sizeof text);
    if (n >= 2 * RUN_ID_BYTES && parse_id(text, run->id) == 0)
        return 0;
    run->fresh = n == -ENOENT;
    if (!run->fresh)
        return error_set(ERROR_USER, "%s: expected 32 hexadecimal digits", path);
    if (getrandom(run->id, sizeof run->id, 0) != (ssize_t)sizeof run->id)
        return error_set(ERROR_FAILED, "getrandom: %s", strerror(errno));
    for (int i = 0; i < RUN_ID_BYTES; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", run->id[i]);
    return write_text(path, text) < 0 ? -(int)error_kind_now() : sync_directory(run->path);
}

static int lock(struct run_dir *run)
{
    char path[LAUNCHER_PATH_BYTES];
    if (file_in(run, "run.lock", path) < 0)
        return -(int)error_kind_now();
    run->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (run->lock_fd < 0)
        return error_set(ERROR_USER, "%s: %s", path, strerror(errno));
    /* `mtlaunch stop` looks by taking the lock for an instant: that is no use of the run */
    int rc = flock(run->lock_fd, LOCK_EX | LOCK_NB);
    for (int i = 0; rc < 0 && errno == EWOULDBLOCK && i < LOCK_TRIES; i++) {
        (void)usleep(LOCK_PAUSE_US);
        rc = flock(run->lock_fd, LOCK_EX | LOCK_NB);
    }
    if (rc < 0 && errno != EWOULDBLOCK)
        return error_set(ERROR_FAILED, "%s: flock: %s", path, strerror(errno));
    if (rc < 0) {
        (void)error_set(ERROR_BUSY, "%s: the run is in use by a live process", run->path);
        return error_hint("`mtlaunch stop %s` ends it after the step in flight", run->path);
    }
    return 0;
}

/* An old launcher that was killed leaves its socket directory behind; only we know its name. */
static void clean_socket(const struct run_dir *run)
{
    char text[512] = "", *end;
    ssize_t n = pread(run->lock_fd, text, sizeof text - 1, 0);
    if (n <= 0 || text[0] != '/' || !(end = strchr(text, '\n')))
        return;
    *end = '\0';
    (void)unlink(text); /* a leftover; its absence is fine */
    if ((end = strrchr(text, '/')) && strstr(text, "mtlaunch-")) {
        *end = '\0';
        (void)rmdir(text);
    }
}

/* A directory that lost its run.id looks fresh, and still holds a store that took weeks. */
static void note_entries(struct run_dir *run)
{
    char path[LAUNCHER_PATH_BYTES];
    struct stat there;
    for (uint32_t i = 0; i < ENTRIES; i++)
        if (file_in(run, entries[i], path) < 0 || lstat(path, &there) == 0 || errno != ENOENT)
            run->before |= 1u << i;
}

int run_dir_open(struct run_dir *run, const char *path, enum run_dir_mode mode)
{
    char probe[LAUNCHER_PATH_BYTES];
    memset(run, 0, sizeof *run);
    run->lock_fd = -1;
    if (snprintf(run->path, sizeof run->path, "%s", path) >= (int)sizeof run->path)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    if (mode == RUN_DIR_CREATE) {
        if (make_directories(run->path, &run->created) < 0)
            return error_wrap("[run] output_dir");
    } else if (file_in(run, "run.id", probe) < 0 || access(probe, R_OK) < 0) {
        return error_set(ERROR_USER, "%s: not a run directory: no run.id in it", path);
    }
    note_entries(run);
    if (lock(run) < 0) {
        run_dir_close(run);
        return -(int)error_kind_now();
    }
    clean_socket(run);
    return identify(run);
}

void run_dir_close(struct run_dir *run)
{
    char before[LAUNCHER_PATH_BYTES];
    if (run->lock_fd >= 0) {
        if (file_in(run, "config.toml.before", before) == 0)
            (void)unlink(before); /* there may be none */
        (void)!ftruncate(run->lock_fd,
                         0); /* no contact any more; a stale one is recognized anyway */
        (void)close(run->lock_fd);
    }
    run->lock_fd = -1;
}

static void announce(void *context, const char *line)
{
    (void)context;
    (void)fprintf(stderr, "changed: %s\n", line);
}

int run_dir_read_config(const char *path, struct config *config)
{
    char file[LAUNCHER_PATH_BYTES];
    if (snprintf(file, sizeof file, "%s/config.toml", path) >= (int)sizeof file)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    if (access(file, R_OK) < 0)
        return error_set(ERROR_USER, "%s: not a run directory: no config.toml in it", path);
    return config_load(config, file, NULL, 0);
}

int run_dir_adopt_config(struct run_dir *run, const struct config *config)
{
    char path[LAUNCHER_PATH_BYTES], aside[LAUNCHER_PATH_BYTES + 8];
    struct config old;
    if (file_in(run, "config.toml", path) < 0)
        return -(int)error_kind_now();
    (void)snprintf(aside, sizeof aside, "%s.before", path);
    (void)unlink(
        aside); /* of a launcher that was killed; run_dir_undo() must not take it for ours */
    if (access(path, F_OK) == 0) {
        if (config_load(&old, path, NULL, 0) < 0)
            return -(int)error_kind_now();
        int rc = config_compare_resume(&old, config, announce, NULL);
        config_destroy(&old);
        if (rc < 0)
            return error_wrap("%s holds a run with another configuration", run->path);
    }
    (void)link(path, aside); /* for run_dir_undo(); a file system without links only loses that */
    (void)snprintf(aside, sizeof aside, "%s.new", path);
    if (config_write(config, aside) < 0)
        return -(int)error_kind_now();
    if (rename(aside, path) < 0)
        return error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    return 0;
}

int run_dir_write_contact(struct run_dir *run, const char *endpoint, const char *token)
{
    char text[PLAN_ENDPOINT_BYTES + PLAN_TOKEN_BYTES + 4];
    int n = snprintf(text, sizeof text, "%s\n%s\n", endpoint, token);
    if (ftruncate(run->lock_fd, 0) < 0 || pwrite(run->lock_fd, text, (size_t)n, 0) != n)
        return error_set(ERROR_FAILED, "%s/run.lock: %s", run->path, strerror(errno));
    return 0;
}

int run_dir_read_contact(const char *path, char *endpoint, char *token)
{
    char file[LAUNCHER_PATH_BYTES], text[512];
    if (snprintf(file, sizeof file, "%s/run.lock", path) >= (int)sizeof file)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return error_set(ERROR_USER, "%s: not a run directory: %s", path, strerror(errno));
    int free_now = flock(fd, LOCK_SH | LOCK_NB) == 0;
    (void)close(fd);
    int n = read_text(file, text, sizeof text);
    char *line = n > 0 ? strchr(text, '\n') : NULL;
    if (free_now || !line)
        return error_set(ERROR_USER, "%s: no run is alive there", path);
    *line = '\0';
    (void)snprintf(endpoint, PLAN_ENDPOINT_BYTES, "%.*s", PLAN_ENDPOINT_BYTES - 1, text);
    (void)snprintf(token, PLAN_TOKEN_BYTES, "%.32s", line + 1);
    return 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

int run_dir_remove_tree(const char *path)
{
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT) < 0 && errno != ENOENT)
        return error_set(ERROR_FAILED, "%s: cannot remove: %s", path, strerror(errno));
    return 0;
}

void run_dir_undo(struct run_dir *run)
{
    char path[LAUNCHER_PATH_BYTES], before[LAUNCHER_PATH_BYTES];
    if (file_in(run, "config.toml", path) == 0 && file_in(run, "config.toml.before", before) == 0)
        (void)rename(before, path); /* absent where nothing was changed */
    /* of a run that was there before only config.toml may be new, written anew for one that was
     * lost */
    for (uint32_t i = 0; i < ENTRIES; i++)
        if ((run->fresh || strcmp(entries[i], "config.toml") == 0) &&
            (run->before & 1u << i) == 0 && file_in(run, entries[i], path) == 0)
            (void)run_dir_remove_tree(path); /* the error that brought us here is the one to tell */
    if (run->created)
        (void)rmdir(run->path);
    run->created = run->fresh = 0;
}
