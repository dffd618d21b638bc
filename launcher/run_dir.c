#include "launcher/run_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher/orphans.h"
#include "launcher/run_lock.h"
#include "launcher/socket_dir.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/printable.h"

/* What a start makes in the run directory, in the order in which run_dir_undo() takes it away. */
static const char *const entries[] = {"logs",        "cache",  "store",
                                      "config.toml", "run.id", "run.lock"};
enum { ENTRIES = sizeof entries / sizeof entries[0] };

static int file_in(const struct run_dir *run, const char *name, char *out)
{
    int n = snprintf(out, LAUNCHER_PATH_BYTES, "%s/%s", run->path, name);
    if (n < 0 || n >= LAUNCHER_PATH_BYTES)
        return error_set(ERROR_USER, "%s: the path is too long", run->path);
    return 0;
}

/* A new name is durable when the directory it stands in was flushed: a store is written under it.
 */
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

/* Of a directory that was there already: whoever made it may have died before this, or be no
 * program that does it. What is not ours has been there for longer than that. A file system that
 * cannot do it is no reason to refuse the run. */
static void sync_name(const char *path, const char *parent)
{
    struct stat st;
    int fd = stat(path, &st) == 0 && st.st_uid == geteuid()
                 ? open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
                 : -1;
    if (fd >= 0) {
        (void)fsync(fd);
        (void)close(fd); /* opened for reading */
    }
}

static int make_one(const char *path, uint32_t *levels)
{
    char parent[LAUNCHER_PATH_BYTES + 4];
    (void)snprintf(parent, sizeof parent, "%s/..", path);
    if (mkdir(path, 0700) < 0) {
        if (errno != EEXIST)
            return error_set(ERROR_USER, "%s: cannot create the directory: %s", path,
                             strerror(errno));
        sync_name(path, parent);
        return 0;
    }
    ++*levels;
    return access(parent, R_OK) < 0 ? 0 : sync_directory(parent); /* one that may only be entered */
}

/* mkdir -p; new ones 0700 and durable. *levels: how many were not there. */
static int make_directories(const char *path, uint32_t *levels)
{
    char part[LAUNCHER_PATH_BYTES];
    struct stat there;
    size_t n = strlen(path);
    *levels = 0;
    if (n >= sizeof part)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    memcpy(part, path, n + 1);
    while (n > 1 && part[n - 1] == '/')
        part[--n] = '\0';
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p != '\0')
            continue;
        int last = *p == '\0';
        *p = '\0';
        if (make_one(part, levels) < 0)
            return -(int)error_kind_now();
        if (last && (stat(part, &there) < 0 || !S_ISDIR(there.st_mode)))
            return error_set(ERROR_USER, "%s: expected a directory, found a file", part);
        if (last)
            return 0;
        *p = '/';
    }
}

/* The inverse: as many as were made, as far as they are empty. */
static void remove_directories(const char *path, uint32_t levels)
{
    char part[LAUNCHER_PATH_BYTES];
    (void)snprintf(part, sizeof part, "%s", path);
    for (size_t n = strlen(part); n > 1 && part[n - 1] == '/'; n--)
        part[n - 1] = '\0';
    for (; levels > 0 && rmdir(part) == 0; levels--) {
        char *slash = strrchr(part, '/');
        if (!slash || slash == part)
            return;
        *slash = '\0';
    }
}

static int read_text(const char *path, char *out, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOATIME);
    if (fd < 0 && errno == EPERM) /* another user's: an access time cannot be helped */
        fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, out, bytes - 1);
    int error = errno;
    (void)close(fd); /* read only */
    if (n < 0)
        return -error;
    out[n] = '\0';
    return (int)n;
}

/* Written aside, fsynced, renamed: whole or absent. */
static int write_text(const char *path, const char *text)
{
    char aside[LAUNCHER_PATH_BYTES + 8];
    (void)snprintf(aside, sizeof aside, "%s.new", path);
    (void)unlink(aside); /* of a start that was killed */
    int fd = open(aside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return error_set(ERROR_FAILED, "%s: %s", aside, strerror(errno));
    ssize_t n = write(fd, text, strlen(text));
    int bad = n != (ssize_t)strlen(text) || fsync(fd) < 0;
    if (close(fd) < 0 || bad || rename(aside, path) < 0)
        return error_set(ERROR_FAILED, "%s: cannot write: %s", path, strerror(errno));
    return 0;
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
    if (n < 0 && !run->fresh)
        return error_set(ERROR_FAILED, "%s: cannot read: %s", path, strerror(-n));
    if (!run->fresh)
        return error_set(ERROR_USER, "%s: expected 32 hexadecimal digits", path);
    if (getrandom(run->id, sizeof run->id, 0) != (ssize_t)sizeof run->id)
        return error_set(ERROR_FAILED, "getrandom: %s", strerror(errno));
    for (int i = 0; i < RUN_ID_BYTES; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", run->id[i]);
    return write_text(path, text) < 0 ? -(int)error_kind_now() : sync_directory(run->path);
}

/* -- what killed launchers left -- */

/* Of a launcher that is dead: the text may have been copied from a run that lives, or be anybody's,
 * so the name must be one of ours, and nobody may listen there. */
static void remove_socket(const char *endpoint)
{
    char directory[] = "/tmp/mtlaunch-XXXXXX";
    const size_t name = sizeof directory - 1;
    if (strlen(endpoint) != name + 4 || strcmp(endpoint + name, "/ctl") != 0 ||
        strncmp(endpoint, directory, name - 6) != 0 || memchr(endpoint + name - 6, '/', 6))
        return;
    memcpy(directory, endpoint, name);
    socket_dir_remove_dead(directory, 0);
}

/* We hold the lock: whoever wrote its text here is dead. */
static void remove_leftovers(const struct run_dir *run, enum run_dir_mode mode)
{
    static const char *const files[] = {"run.id.new", "config.toml.new"};
    char path[LAUNCHER_PATH_BYTES];
    struct run_lock_text text;
    if (run_lock_read(run->path, &text) == 0)
        remove_socket(text.endpoint);
    for (size_t i = 0; mode == RUN_DIR_CREATE && i < sizeof files / sizeof *files; i++)
        if (file_in(run, files[i], path) == 0)
            (void)unlink(path); /* there may be none */
}

/* -- who may write there -- */

static int is_empty(const char *path)
{
    DIR *dir = opendir(path);
    int found = 0;
    while (dir && found == 0) {
        const struct dirent *e = readdir(dir);
        if (!e)
            break;
        found += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    if (dir)
        (void)closedir(dir); /* read only */
    return dir && found == 0;
}

static int tighten(struct run_dir *run, int fd, uint32_t mode)
{
    if (fchmod(fd, 0700) < 0)
        return error_set(ERROR_FAILED, "%s: chmod: %s", run->path, strerror(errno));
    run->mode_before = mode;
    (void)fprintf(stderr, "run directory: access for others (mode %04o) was taken away: now 0700\n",
                  mode);
    return 0;
}

static int refuse_shared(const struct run_dir *run, const struct stat *st)
{
    (void)error_set(
        ERROR_USER,
        "[run] output_dir: %s: others may write there (mode %04o, owner %u): they could "
        "replace the run's files",
        run->path, st->st_mode & 07777, st->st_uid);
    return error_hint("name a directory of your own, or a new one in it");
}

static int check_access(struct run_dir *run)
{
    char id[LAUNCHER_PATH_BYTES];
    struct stat st;
    int fd = open(run->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = 0;
    if (fd < 0 || fstat(fd, &st) < 0 || file_in(run, "run.id", id) < 0) {
        rc = error_set(ERROR_USER, "[run] output_dir: %s: %s", run->path, strerror(errno));
    } else if (st.st_uid == geteuid() && (st.st_mode & 077) &&
               (access(id, F_OK) == 0 || is_empty(run->path))) {
        rc = tighten(run, fd, st.st_mode & 07777);
    } else if ((st.st_mode & 022) || (geteuid() != 0 && st.st_uid != 0 && st.st_uid != geteuid())) {
        rc = refuse_shared(run, &st);
    }
    if (fd >= 0)
        (void)close(fd); /* a directory */
    return rc;
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

static int lock_run(struct run_dir *run, enum run_dir_mode mode)
{
    int created;
    run->read_only = mode == RUN_DIR_READ_ONLY;
    int rc = run_lock_take(run->path, "run", run->read_only ? RUN_LOCK_SHARED : RUN_LOCK_EXCLUSIVE,
                           &run->lock_fd, &created);
    if (rc < 0 || run->read_only)
        return rc;
    remove_leftovers(run, mode);
    return run_dir_write_contact(run, "", "");
}

/* Is there a run, and may it be worked on? */
static int check_path(struct run_dir *run, enum run_dir_mode mode)
{
    char probe[LAUNCHER_PATH_BYTES];
    if (mode == RUN_DIR_CREATE) {
        if (make_directories(run->path, &run->levels) < 0)
            return error_wrap("[run] output_dir");
        return run->levels ? 0 : check_access(run);
    }
    if (file_in(run, "run.id", probe) < 0)
        return -(int)error_kind_now();
    return access(probe, R_OK) == 0
               ? 0
               : error_set(ERROR_USER, "%s: not a run directory: no run.id in it", run->path);
}

int run_dir_open(struct run_dir *run, const char *path, enum run_dir_mode mode)
{
    memset(run, 0, sizeof *run);
    run->lock_fd = -1;
    if (snprintf(run->path, sizeof run->path, "%s", path) >= (int)sizeof run->path)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    if (check_path(run, mode) < 0)
        return -(int)error_kind_now();
    note_entries(run);
    if (lock_run(run, mode) < 0 || identify(run) < 0 || orphans_mark(run->id) < 0 ||
        (!run->read_only && orphans_end(run->id) < 0)) {
        run_dir_close(run);
        return -(int)error_kind_now();
    }
    return 0;
}

void run_dir_close(struct run_dir *run)
{
    char before[LAUNCHER_PATH_BYTES];
    for (uint32_t i = 0; i < run->n_stores; i++) {
        if (run->stores[i].fd < 0)
            continue;
        if (!run->read_only)
            run_lock_clear(run->stores[i].fd);
        (void)close(run->stores[i].fd); /* the lock goes with it */
    }
    run->n_stores = 0;
    if (run->lock_fd >= 0) {
        if (!run->read_only && file_in(run, "config.toml.before", before) == 0)
            (void)unlink(before); /* there may be none */
        if (!run->read_only)
            run_lock_clear(run->lock_fd);
        (void)close(run->lock_fd); /* the lock goes with it */
    }
    run->lock_fd = -1;
}

/* -- the locks in the offload_dirs -- */

static int is_same_directory(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

/* 1 when the lock of this directory is ours already, as that of the run directory. */
static int is_ours_already(const struct run_dir *run, const char *directory)
{
    for (uint32_t i = 0; i < run->n_stores; i++)
        if (is_same_directory(directory, run->stores[i].directory))
            return error_set(ERROR_USER, "offload_dir: %s: expected once, found twice", directory);
    return is_same_directory(directory, run->path);
}

static int has_store(const char *directory)
{
    char path[LAUNCHER_PATH_BYTES + 16];
    (void)snprintf(path, sizeof path, "%s/superblock", directory);
    return access(path, F_OK) == 0;
}

static int lock_store(struct run_dir *run, const char *directory, enum run_dir_mode mode)
{
    struct store_lock *lock = &run->stores[run->n_stores];
    struct run_lock_text text = {.pid = (int)getpid()};
    memset(lock, 0, sizeof *lock);
    lock->fd = -1;
    if (snprintf(lock->directory, sizeof lock->directory, "%s", directory) >=
        (int)sizeof lock->directory)
        return error_set(ERROR_USER, "offload_dir: %s: the path is too long", directory);
    if (mode != RUN_DIR_CREATE && !has_store(directory))
        return 0; /* nothing to protect; io_worker tells what that means */
    if (mode == RUN_DIR_CREATE && make_directories(directory, &lock->levels) < 0)
        return error_wrap("offload_dir");
    int rc = is_ours_already(run, directory);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    run->n_stores++;
    rc = run_lock_take(directory, "store",
                       mode == RUN_DIR_READ_ONLY ? RUN_LOCK_SHARED : RUN_LOCK_EXCLUSIVE, &lock->fd,
                       &lock->created);
    if (rc < 0 || mode == RUN_DIR_READ_ONLY)
        return rc < 0 ? error_wrap("offload_dir") : 0;
    (void)snprintf(text.path, sizeof text.path, "%s", run->path);
    return run_lock_write(lock->fd, &text);
}

int run_dir_lock_stores(struct run_dir *run, const struct config *config, enum run_dir_mode mode)
{
    char own[LAUNCHER_PATH_BYTES];
    uint64_t n = config->memory_offload_dir.count;
    if (file_in(run, "store", own) < 0)
        return -(int)error_kind_now();
    if (n > RUN_STORES_MAX)
        return error_set(ERROR_USER, "offload_dir: expected at most %d directories, found %llu",
                         RUN_STORES_MAX, (unsigned long long)n);
    for (uint64_t i = 0; i < (n ? n : 1); i++)
        if (lock_store(run, n ? config->memory_offload_dir.items[i] : own, mode) < 0)
            return -(int)error_kind_now();
    return 0;
}

static void undo_stores(struct run_dir *run)
{
    char path[LAUNCHER_PATH_BYTES + 16];
    for (uint32_t i = 0; i < run->n_stores; i++) {
        struct store_lock *lock = &run->stores[i];
        (void)snprintf(path, sizeof path, "%s/run.lock", lock->directory);
        if (lock->created && lock->fd >= 0)
            (void)unlink(path); /* held, so nobody else relies on it */
        remove_directories(lock->directory, lock->levels);
    }
}

/* -- configuration -- */

static void announce(void *context, const char *line)
{
    (void)context;
    (void)fputs("changed: ", stderr);
    printable_put(line, stderr);
    (void)fputc('\n', stderr);
}

int run_dir_read_config(const char *path, struct config *config)
{
    char file[LAUNCHER_PATH_BYTES];
    if (snprintf(file, sizeof file, "%s/config.toml", path) >= (int)sizeof file)
        return error_set(ERROR_USER, "%s: the path is too long", path);
    if (access(file, R_OK) < 0)
        return error_set(ERROR_USER, "%s: not a run directory: no config.toml in it", path);
    if (config_load(config, file, NULL, 0) < 0)
        return -(int)error_kind_now();
    char *here = strdup(path);
    if (!here)
        return error_set(ERROR_FAILED, "out of memory");
    free(config->run_output_dir); /* where it was when it was written: it may be moved, or a copy */
    config->run_output_dir = here;
    return 0;
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
    (void)unlink(aside);
    if (config_write(config, aside) < 0)
        return -(int)error_kind_now();
    fault_point(FAULT_launcher_config_before_rename);
    if (rename(aside, path) < 0)
        return error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    return sync_directory(run->path);
}

int run_dir_write_contact(struct run_dir *run, const char *endpoint, const char *token)
{
    struct run_lock_text text = {.pid = (int)getpid()};
    if (run->read_only)
        return 0;
    (void)snprintf(text.endpoint, sizeof text.endpoint, "%s", endpoint);
    (void)snprintf(text.token, sizeof text.token, "%s", token);
    (void)snprintf(text.path, sizeof text.path, "%s", run->path);
    return run_lock_write(run->lock_fd, &text) < 0 ? error_wrap("%s", run->path) : 0;
}

/* Another's run directory lets us see neither lock nor token. */
static int refuse_contact(const char *path, int code)
{
    struct stat st;
    if (code == ENOENT || code == ENOTDIR)
        return error_set(ERROR_USER, "%s: not a run directory: %s", path, strerror(code));
    if (stat(path, &st) == 0 && st.st_uid != geteuid())
        return error_set(
            ERROR_USER, "%s: the run of another user (uid %u): only that user and root may stop it",
            path, st.st_uid);
    return error_set(ERROR_USER, "%s: %s", path, strerror(code));
}

int run_dir_read_contact(const char *path, char *endpoint, char *token)
{
    struct run_lock_text text;
    int rc = run_lock_read(path, &text);
    if (rc < 0)
        return refuse_contact(path, -rc);
    if (!text.endpoint[0] || !run_lock_is_held(path))
        return error_set(ERROR_USER, "%s: no run is alive there", path);
    (void)snprintf(endpoint, PLAN_ENDPOINT_BYTES, "%s", text.endpoint);
    (void)snprintf(token, PLAN_TOKEN_BYTES, "%s", text.token);
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
    undo_stores(run);
    if (file_in(run, "config.toml", path) == 0 && file_in(run, "config.toml.before", before) == 0)
        (void)rename(before, path); /* absent where nothing was changed */
    /* of a run that was there before only config.toml may be new, written anew for one that was
     * lost */
    for (uint32_t i = 0; i < ENTRIES; i++)
        if ((run->fresh || strcmp(entries[i], "config.toml") == 0) &&
            (run->before & 1u << i) == 0 && file_in(run, entries[i], path) == 0)
            (void)run_dir_remove_tree(path); /* the error that brought us here is the one to tell */
    remove_directories(run->path, run->levels);
    if (run->mode_before)
        (void)chmod(run->path, run->mode_before); /* as it was found */
    run->levels = 0;
    run->fresh = 0;
}
