/* A store is made: room, files, zeros, stripe weights; or discarded. */
#include "io_worker/folder.h"
#include "io_worker/store_internal.h"

#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum {
    ZERO_CHUNK_BYTES = 4 << 20,
    ZERO_DEPTH_MAX = 8,
    PROBE_BYTES = 32 << 20, /* written and read per directory to weigh it */
    PROBE_CHUNK_BYTES = 4 << 20,
    STRIPE_WEIGHT_MAX = 256,
};

/* statvfs of the directory or of its nearest existing parent. */
static int free_space(const char *directory, uint64_t *bytes, dev_t *device)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s", directory);
    struct stat st;
    struct statvfs fs;
    while (stat(path, &st) < 0) {
        if (errno != ENOENT)
            return store_file_error(path, "cannot stat");
        char *slash = strrchr(path, '/');
        if (slash == NULL)
            (void)snprintf(path, sizeof path, ".");
        else
            slash[slash == path ? 1 : 0] = '\0';
    }
    if (!S_ISDIR(st.st_mode))
        return error_set(ERROR_USER, "offload_dir: %s is not a directory", path);
    if (statvfs(path, &fs) < 0)
        return store_file_error(path, "cannot statvfs");
    *bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    *device = st.st_dev;
    return 0;
}

/* What wiping an incomplete store gives back. */
static uint64_t reclaimable(const struct store_file *file)
{
    struct stat st;
    if (file->fd < 0 || fstat(file->fd, &st) < 0)
        return 0;
    return (uint64_t)st.st_blocks * 512;
}

struct space {
    dev_t device;
    uint64_t free_bytes, needed_bytes;
    const char *directory;
};

static unsigned find_space(struct space *spaces, unsigned *n, dev_t device)
{
    for (unsigned i = 0; i < *n; i++)
        if (spaces[i].device == device)
            return i;
    spaces[*n].device = device;
    return (*n)++;
}

/* Sums need and space per file system: several directories may share one. Before the stripe weights
 * are known, the total is all that can be said. */
static int gather_spaces(const struct store *store, struct space *spaces, unsigned *n)
{
    *n = 0;
    memset(spaces, 0, STORE_DIRECTORIES_MAX * sizeof spaces[0]);
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        const struct store_directory *directory = &store->directories[d];
        uint64_t bytes = 0;
        dev_t device = 0;
        if (free_space(directory->path, &bytes, &device) < 0)
            return -(int)error_kind_now();
        struct space *space = &spaces[find_space(spaces, n, device)];
        if (space->directory == NULL) {
            space->directory = directory->path;
            space->free_bytes = bytes;
        }
        space->free_bytes += reclaimable(&directory->slots);
        space->needed_bytes += SUPERBLOCK_COPIES * SECTOR_BYTES + directory->slots_bytes;
        if (d == 0) {
            space->free_bytes += reclaimable(&store->commit);
            space->needed_bytes += commit_file_bytes(store->options.layout->n_pages);
        }
    }
    return 0;
}

static int does_not_fit(const char *where, uint64_t need, uint64_t have)
{
    error_set(ERROR_FIT,
              "%s: the store does not fit: need %llu bytes (%.2f GB), have %llu (%.2f GB)", where,
              (unsigned long long)need, (double)need * 1e-9, (unsigned long long)have,
              (double)have * 1e-9);
    return error_hint("free some space, name another offload_dir, or set verify_writes = false "
                      "(two slots per page instead of three)");
}

static int weights_known(const struct store *store)
{
    for (unsigned d = 0; d < store->options.n_directories; d++)
        if (store->weights[d] == 0)
            return 0;
    return 1;
}

int store_preflight(struct store *store)
{
    CHECK(store->state != STORE_READY);
    const struct store_options *options = &store->options;
    memcpy(store->weights, options->stripe_weights, sizeof store->weights);
    if (options->n_directories == 1)
        store->weights[0] = 1;
    const int known = weights_known(store);
    if (known)
        store_map_pages(store);
    struct space spaces[STORE_DIRECTORIES_MAX];
    unsigned n;
    if (gather_spaces(store, spaces, &n) < 0)
        return -(int)error_kind_now();
    uint64_t have = 0;
    for (unsigned i = 0; i < n; i++) {
        have += spaces[i].free_bytes;
        if (known && spaces[i].needed_bytes > spaces[i].free_bytes)
            return does_not_fit(spaces[i].directory, spaces[i].needed_bytes, spaces[i].free_bytes);
    }
    uint64_t need = store_bytes_needed(options->layout, options->dtype, options->slots_per_page);
    return need > have ? does_not_fit(options->directories[0], need, have) : 0;
}

/* mkdir -p, each new entry made durable in its parent. */
static int make_directory(const char *directory, int *made)
{
    char path[PATH_MAX];
    *made = 0;
    (void)snprintf(path, sizeof path, "%s", directory);
    for (char *p = path + 1;; p++) {
        if (*p != '/' && *p != '\0')
            continue;
        const char kept = *p;
        *p = '\0';
        if (mkdir(path, 0700) == 0) {
            *made = kept == '\0';
            char parent[PATH_MAX + 4];
            (void)snprintf(parent, sizeof parent, "%s/..", path);
            if (folder_sync(parent) < 0)
                return -(int)error_kind_now();
        } else if (errno != EEXIST) {
            return error_set(ERROR_USER, "offload_dir: %s: cannot create the directory: %s", path,
                             strerror(errno));
        }
        *p = kept;
        if (kept == '\0')
            return 0;
    }
}

/* A superblock appears whole or not at all: a file without a valid superblock would be nobody's. */
static int create_superblock(struct store *store, unsigned d)
{
    struct store_directory *directory = &store->directories[d];
    struct store_file fresh = {.fd = -1};
    (void)snprintf(fresh.path, sizeof fresh.path, "%.4080s/superblock.new", directory->path);
    int rc = store_file_open(store, &fresh, O_CREAT | O_DSYNC);
    if (rc == 0)
        rc = store_file_error(fresh.path, "cannot create");
    if (rc > 0)
        rc = store_file_lock(store, &fresh);
    if (rc == 0 && access(directory->superblock.path, F_OK) == 0)
        rc = error_set(ERROR_BUSY, "%s: another process has just created a store here",
                       directory->superblock.path);
    if (rc == 0) {
        store_superblock_fill(store, d, STORE_ZEROING);
        rc = store_superblock_write(directory, fresh.fd);
    }
    if (rc == 0 && rename(fresh.path, directory->superblock.path) < 0)
        rc = store_file_error(fresh.path, "cannot rename");
    if (rc == 0)
        rc = folder_sync(directory->path);
    if (rc < 0) {
        store_file_close(&fresh);
        return rc;
    }
    directory->superblock.fd = fresh.fd;
    return 0;
}

/* Opens or creates a data file, empty, locked and allocated; direct from here on. */
static int allocate_file(struct store *store, struct store_file *file, int flags, uint64_t bytes)
{
    if (file->fd < 0) {
        int there = store_file_open(store, file, O_CREAT | flags);
        if (there <= 0)
            return there < 0 ? there : store_file_error(file->path, "cannot create");
        if (store_file_lock(store, file) < 0)
            return -(int)error_kind_now();
    }
    if (ftruncate(file->fd, 0) < 0)
        return store_file_error(file->path, "cannot truncate");
    int failure = bytes > 0 ? posix_fallocate(file->fd, 0, (off_t)bytes) : 0;
    if (failure == ENOSPC || failure == EDQUOT)
        return error_set(ERROR_FIT, "%s: cannot allocate %llu bytes: %s", file->path,
                         (unsigned long long)bytes, strerror(failure));
    errno = failure;
    if (failure != 0)
        return store_file_error(file->path, "cannot allocate");
    store_file_make_direct(store, file);
    return 0;
}

struct zero_fill {
    struct store *store;
    unsigned char *zeros; /* ZERO_CHUNK_BYTES, written again and again */
    struct io_request requests[ZERO_DEPTH_MAX];
    int busy[ZERO_DEPTH_MAX];
    uint64_t done_bytes, total_bytes, told_ns;
    int failed; /* error_text() is set */
};

static void on_zeros_written(struct io_request *request, int result)
{
    struct zero_fill *fill = request->context;
    fill->busy[request - fill->requests] = 0;
    fill->done_bytes += request->bytes;
    if (result < 0 && !fill->failed)
        fill->failed = engine_request_error(fill->store->engine, request);
}

static int tell_zero_fill(struct zero_fill *fill)
{
    if (clock_now_ns() - fill->told_ns < PROGRESS_INTERVAL_MS * 1000000ull)
        return 0;
    fill->told_ns = clock_now_ns();
    return store_report(fill->store, STORE_ZERO_FILLING, fill->done_bytes, fill->total_bytes);
}

static int zero_file(struct zero_fill *fill, unsigned file, uint64_t bytes)
{
    struct engine *engine = fill->store->engine;
    unsigned depth = fill->store->options.engine_depth;
    if (depth > ZERO_DEPTH_MAX)
        depth = ZERO_DEPTH_MAX;
    uint64_t offset = 0;
    while (offset < bytes && !fill->failed) {
        for (unsigned i = 0; i < depth && offset < bytes; i++) {
            if (fill->busy[i])
                continue;
            uint64_t chunk = bytes - offset < ZERO_CHUNK_BYTES ? bytes - offset : ZERO_CHUNK_BYTES;
            fill->requests[i] = (struct io_request){.op = IO_WRITE,
                                                    .file = file,
                                                    .buffer = fill->zeros,
                                                    .offset = offset,
                                                    .bytes = chunk,
                                                    .on_done = on_zeros_written,
                                                    .context = fill};
            fill->busy[i] = 1;
            CHECK(engine_submit(engine, &fill->requests[i]) == ENGINE_ACCEPTED);
            offset += chunk;
        }
        (void)engine_wait(engine, 100);
        if (!fill->failed && tell_zero_fill(fill) < 0)
            fill->failed = -ERROR_STOPPED;
    }
    while (engine_in_flight(engine) > 0)
        (void)engine_wait(engine, 100);
    return fill->failed;
}

static int zero_files(struct store *store)
{
    struct zero_fill fill = {.store = store};
    const unsigned n = store->options.n_directories;
    const uint64_t commit_bytes = commit_file_bytes(store->options.layout->n_pages);
    if (posix_memalign((void **)&fill.zeros, SECTOR_BYTES, ZERO_CHUNK_BYTES) != 0)
        return error_set(ERROR_FAILED, "store: out of memory");
    memset(fill.zeros, 0, ZERO_CHUNK_BYTES);
    fill.total_bytes = commit_bytes;
    for (unsigned d = 0; d < n; d++)
        fill.total_bytes += store->directories[d].slots_bytes;
    int rc = zero_file(&fill, n, commit_bytes);
    fault_point(FAULT_io_zero_fill);
    for (unsigned d = 0; d < n && rc == 0; d++)
        rc = zero_file(&fill, d, store->directories[d].slots_bytes);
    free(fill.zeros);
    return rc < 0 ? rc
                  : store_report(store, STORE_ZERO_FILLING, fill.total_bytes, fill.total_bytes);
}

static int sync_files(struct store *store)
{
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        const struct store_file *slots = &store->directories[d].slots;
        if (fsync(slots->fd) < 0)
            return store_file_error(slots->path, "cannot fsync");
    }
    if (fsync(store->commit.fd) < 0)
        return store_file_error(store->commit.path, "cannot fsync");
    for (unsigned d = 0; d < store->options.n_directories; d++)
        if (folder_sync(store->directories[d].path) < 0)
            return -(int)error_kind_now();
    return 0;
}

/* Writes PROBE_BYTES to a nameless file, flushes, reads them back: bytes per microsecond. */
static int measure_directory(struct store *store, const char *path, uint64_t *rate)
{
    struct store_file file = {.fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)};
    if (file.fd < 0)
        return store_file_error(path, "cannot create a temporary file to measure the directory");
    (void)snprintf(file.path, sizeof file.path, "%.4080s", path);
    store_file_make_direct(store, &file);
    void *buffer = NULL;
    int rc = posix_memalign(&buffer, SECTOR_BYTES, PROBE_CHUNK_BYTES)
                 ? error_set(ERROR_FAILED, "store: out of memory")
                 : 0;
    if (rc == 0)
        memset(buffer, 0x5a, PROBE_CHUNK_BYTES);
    const uint64_t start = clock_now_ns();
    for (off_t at = 0; rc == 0 && at < PROBE_BYTES; at += PROBE_CHUNK_BYTES)
        if (pwrite(file.fd, buffer, PROBE_CHUNK_BYTES, at) != PROBE_CHUNK_BYTES)
            rc = store_file_error(path, "measuring: short write");
    if (rc == 0 && fdatasync(file.fd) < 0)
        rc = store_file_error(path, "measuring: fdatasync");
    for (off_t at = 0; rc == 0 && at < PROBE_BYTES; at += PROBE_CHUNK_BYTES)
        if (pread(file.fd, buffer, PROBE_CHUNK_BYTES, at) != PROBE_CHUNK_BYTES)
            rc = store_file_error(path, "measuring: short read");
    *rate = 1 + 2 * (uint64_t)PROBE_BYTES * 1000 / (1 + clock_now_ns() - start);
    free(buffer);
    store_file_close(&file);
    return rc;
}

/* Weights 1 .. STRIPE_WEIGHT_MAX in proportion to what each directory was measured to move. */
static int measure_weights(struct store *store)
{
    uint64_t rates[STORE_DIRECTORIES_MAX] = {0}, fastest = 1;
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        if (measure_directory(store, store->directories[d].path, &rates[d]) < 0)
            return -(int)error_kind_now();
        if (rates[d] > fastest)
            fastest = rates[d];
    }
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        uint64_t weight = rates[d] * STRIPE_WEIGHT_MAX / fastest;
        store->weights[d] = weight > 0 ? (uint32_t)weight : 1;
    }
    store->notice[0] = '\0'; /* the real files will say it again */
    return 0;
}

/* A superblock that says "incomplete" is not enough to wipe by: a commit after the import says that
 * the store has been in use. */
static int refuse_to_wipe_commits(const struct store *store)
{
    if (store->commit.fd < 0)
        return 0;
    for (unsigned i = 0; i < COMMIT_RECORD_RING; i++) {
        struct commit_record record;
        struct stat st;
        if (fstat(store->commit.fd, &st) < 0)
            return store_file_error(store->commit.path, "cannot stat");
        off_t offset = st.st_size - (off_t)(COMMIT_RECORD_RING - i) * COMMIT_RECORD_BYTES;
        ssize_t got = offset < 0 ? 0 : pread(store->commit.fd, &record, sizeof record, offset);
        if (got < 0) /* it may be a commit */
            return store_file_error(store->commit.path, "cannot read");
        if (got != (ssize_t)sizeof record)
            continue;
        if (commit_record_verify(&record, store->options.run,
                                 store->directories[0].content.store) == 0 &&
            record.sequence > 0) {
            error_set(ERROR_FAILED, "%s: superblock says %s, but %s has a commit of step %llu",
                      store->directories[0].superblock.path, store_state_name(store->state),
                      store->commit.path, (unsigned long long)record.facts.step);
            return error_hint("the superblock is damaged; nothing was changed");
        }
    }
    error_clear();
    return 0;
}

static int begin_zeroing(struct store *store)
{
    const unsigned n = store->options.n_directories;
    if (getrandom(store->uuid, sizeof store->uuid, 0) != (ssize_t)sizeof store->uuid)
        return store_file_error("getrandom", "store uuid");
    for (unsigned d = 0; d < n; d++) {
        if (store->directories[d].superblock.fd < 0 && create_superblock(store, d) < 0)
            return -(int)error_kind_now();
    }
    return store_set_state(store, STORE_ZEROING);
}

int store_create(struct store *store)
{
    CHECK(store->state != STORE_READY && store->engine == NULL);
    const unsigned n = store->options.n_directories;
    if (refuse_to_wipe_commits(store) < 0 || store_preflight(store) < 0)
        return -(int)error_kind_now();
    for (unsigned d = 0; d < n; d++)
        if (make_directory(store->directories[d].path, &store->directories[d].made) < 0)
            return -(int)error_kind_now();
    if (!weights_known(store)) {
        if (measure_weights(store) < 0)
            return -(int)error_kind_now();
        memcpy(store->options.stripe_weights, store->weights, sizeof store->weights);
        if (store_preflight(store) < 0)
            return -(int)error_kind_now();
    }
    if (begin_zeroing(store) < 0)
        return -(int)error_kind_now();
    for (unsigned d = 0; d < n; d++)
        if (allocate_file(store, &store->directories[d].slots, 0,
                          store->directories[d].slots_bytes) < 0)
            return -(int)error_kind_now();
    if (allocate_file(store, &store->commit, O_DSYNC,
                      commit_file_bytes(store->options.layout->n_pages)) < 0 ||
        store_open_engine(store, NULL, 0) < 0 || zero_files(store) < 0 || sync_files(store) < 0)
        return -(int)error_kind_now();
    if (engine_notice(store->engine)[0])
        store_say(store, "%s%s: %s", "I/O engine", engine_notice(store->engine));
    return store_set_state(store, STORE_IMPORTING);
}

/* What is not open here is not ours to remove. */
static void remove_file(const struct store_file *file)
{
    if (file->fd >= 0)
        (void)unlink(file->path); /* what stays is wiped or refused by name later */
}

void store_discard(struct store *store)
{
    CHECK(store->state != STORE_READY);
    remove_file(&store->commit);
    for (unsigned d = 0; d < store->options.n_directories; d++)
        remove_file(&store->directories[d].slots);
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        remove_file(&store->directories[d].superblock);
        if (store->directories[d].made)
            (void)rmdir(store->directories[d].path); /* something else may lie in it */
    }
}
