#include "io_worker/store.h"
#include "io_worker/folder.h"
#include "io_worker/store_internal.h"

#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <xxhash.h>

#ifndef STATX_DIOALIGN
#error "needs the kernel headers of Linux 6.1 or newer (STATX_DIOALIGN)"
#endif

enum {
    LOCK_RETRY_MS = 20,
    PROGRESS_INTERVAL_MS = 100,
    ZERO_CHUNK_BYTES = 4 << 20,
    ZERO_DEPTH_MAX = 8,
    PROBE_BYTES = 32 << 20, /* written and read per directory to weigh it */
    PROBE_CHUNK_BYTES = 4 << 20,
    STRIPE_WEIGHT_MAX = 256,
};

__extension__ typedef unsigned __int128 wide;

/* -- geometry -- */

static uint64_t slot_bytes(const struct model_layout *layout, enum dtype_mode dtype, uint64_t page)
{
    struct page_image_layout image;
    page_image_layout(&image, dtype, layout->pages[page].elements);
    return image.bytes;
}

uint64_t store_bytes_needed(const struct model_layout *layout, enum dtype_mode dtype,
                            unsigned slots_per_page)
{
    uint64_t bytes = SUPERBLOCK_COPIES * SECTOR_BYTES + commit_file_bytes(layout->n_pages);
    for (uint64_t page = 0; page < layout->n_pages; page++)
        bytes += slots_per_page * slot_bytes(layout, dtype, page);
    return bytes;
}

/* The stripe map: each page goes where its bytes, counted against the weight, come to least.
 * Integers only, so that the map is the same wherever it is computed from the same superblock. */
static void map_pages(struct store *store)
{
    const struct model_layout *layout = store->options.layout;
    const unsigned n = store->options.n_directories;
    for (unsigned d = 0; d < n; d++)
        store->directories[d].slots_bytes = 0;
    for (uint64_t page = 0; page < layout->n_pages; page++) {
        uint64_t bytes =
            slot_bytes(layout, store->options.dtype, page) * store->options.slots_per_page;
        unsigned best = 0;
        for (unsigned d = 1; d < n; d++) {
            wide here = (wide)(store->directories[d].slots_bytes + bytes) * store->weights[best];
            wide there = (wide)(store->directories[best].slots_bytes + bytes) * store->weights[d];
            if (here < there)
                best = d;
        }
        store->page_directories[page] = (uint8_t)best;
        store->page_offsets[page] = store->directories[best].slots_bytes;
        store->directories[best].slots_bytes += bytes;
    }
}

struct tensor_shape {
    uint64_t layer, offset, rows, cols;
};

/* Shapes, and what else of the configuration determines what is computed. */
static struct page_digest digest_model(const struct model_layout *layout)
{
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        const struct model_tensor *t = &layout->tensors[i];
        struct tensor_shape shape = {t->layer, t->offset, t->rows, t->cols};
        (void)XXH3_128bits_update(state, &shape, sizeof shape); /* fails only for NULL */
    }
    (void)XXH3_128bits_update(state, &layout->config, MODEL_CONFIG_COMPUTED_BYTES);
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    (void)XXH3_freeState(state);
    return (struct page_digest){hash.low64, hash.high64};
}

/* -- files -- */

static int file_error(const char *path, const char *what)
{
    return error_set(folder_error_kind(errno), "%s: %s: %s", path, what, strerror(errno));
}

static void file_close(struct store_file *file)
{
    if (file->fd >= 0)
        (void)close(file->fd); /* everything that matters was flushed by fdatasync or O_DSYNC */
    file->fd = -1;
}

/* Opens; 1 if open, 0 if it does not exist, negative on error. */
static int file_open(const struct store *store, struct store_file *file, int flags)
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
    return errno == ENOENT || errno == ENOTDIR ? 0 : file_error(file->path, "cannot open");
}

static int report(const struct store *store, enum store_activity activity, uint64_t done,
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
static int file_lock(const struct store *store, const struct store_file *file)
{
    unsigned seconds = store->options.lock_timeout_s;
    const uint64_t limit_ms = 1000 * (uint64_t)(seconds ? seconds : STORE_LOCK_TIMEOUT_S);
    const uint64_t start = clock_now_ns();
    const int how = store->options.read_only ? LOCK_SH : LOCK_EX;
    uint64_t told_ms = 0;
    while (!mutant(MUTANT_no_fence) && flock(file->fd, how | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return file_error(file->path, "cannot lock");
        uint64_t waited_ms = (clock_now_ns() - start) / 1000000;
        if (waited_ms >= limit_ms) {
            error_set(ERROR_BUSY, "%s: still locked after %llu s", file->path,
                      (unsigned long long)(limit_ms / 1000));
            return error_hint("a live process uses the run, or I/O of a killed one is still in "
                              "flight on a stuck device; the store was not touched");
        }
        if (waited_ms >= told_ms + PROGRESS_INTERVAL_MS) {
            told_ms = waited_ms;
            if (report(store, STORE_WAITING_FOR_LOCK, waited_ms, limit_ms) < 0)
                return -ERROR_STOPPED;
        }
        sleep_ms(LOCK_RETRY_MS);
    }
    return 0;
}

static int file_check_size(const struct store_file *file, uint64_t expected)
{
    struct stat st;
    if (fstat(file->fd, &st) < 0)
        return file_error(file->path, "cannot stat");
    if ((uint64_t)st.st_size == expected)
        return 0;
    error_set(ERROR_FAILED, "%s: size: expected %llu bytes, found %llu", file->path,
              (unsigned long long)expected, (unsigned long long)st.st_size);
    return error_hint("the file was truncated or replaced; restore it, or free the run with "
                      "`mtlaunch clean`");
}

static void say(struct store *store, const char *format, const char *path, const char *why)
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
static void file_make_direct(struct store *store, struct store_file *file)
{
    struct statx st;
    struct statfs fs;
    memset(&st, 0, sizeof st);
    file->direct = 0;
    if (fstatfs(file->fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC) {
        say(store, "%s%s: %s", file->path,
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
        say(store, "%s%s: %s", file->path,
            "the file system has no direct I/O (4 KiB): buffered, slower, uses page cache");
}

/* -- superblocks -- */

static uint64_t superblock_hash(const struct superblock *super)
{
    struct superblock copy = *super;
    copy.hash = 0;
    return XXH3_64bits(&copy, sizeof copy);
}

int store_superblock_load(const struct store_file *file, struct superblock *newest,
                          unsigned *valid_copies)
{
    *valid_copies = 0;
    for (unsigned i = 0; i < SUPERBLOCK_COPIES; i++) {
        struct superblock copy;
        ssize_t got = pread(file->fd, &copy, sizeof copy, (off_t)i * SECTOR_BYTES);
        if (got < 0)
            return file_error(file->path, "cannot read");
        if (got != (ssize_t)sizeof copy || copy.magic != STORE_SUPERBLOCK_MAGIC ||
            copy.hash != superblock_hash(&copy))
            continue;
        if (*valid_copies == 0 || copy.generation > newest->generation)
            *newest = copy;
        *valid_copies |= 1u << i;
    }
    return 0;
}

static int superblock_read(struct store_directory *directory)
{
    unsigned valid;
    if (store_superblock_load(&directory->superblock, &directory->content, &valid) < 0)
        return -(int)error_kind_now();
    if (valid == 0) {
        error_set(
            ERROR_FAILED,
            "%s: offset 0: expected a superblock with a matching hash, found none in %d copies",
            directory->superblock.path, SUPERBLOCK_COPIES);
        return error_hint("the file is damaged or not ours; nothing was changed");
    }
    if (directory->content.layout_version != STORE_LAYOUT_VERSION)
        return error_set(ERROR_FAILED, "%s: layout version: expected %d, found %u",
                         directory->superblock.path, STORE_LAYOUT_VERSION,
                         directory->content.layout_version);
    if (directory->content.state < STORE_ZEROING || directory->content.state > STORE_READY)
        return error_set(ERROR_FAILED, "%s: state: expected %d to %d, found %u",
                         directory->superblock.path, STORE_ZEROING, STORE_READY,
                         directory->content.state);
    directory->content.model[STORE_MODEL_BYTES - 1] = '\0'; /* it is printed */
    return 0;
}

/* Writes one copy, then the other: a torn write leaves one whole, and a state that was reached is
 * in both, so that a later flipped bit cannot bring an older state back. */
static int superblock_write(struct store_directory *directory, int fd)
{
    for (unsigned i = 0; i < SUPERBLOCK_COPIES; i++) {
        struct superblock *super = &directory->content;
        super->generation++;
        super->hash = superblock_hash(super);
        off_t offset = (off_t)(super->generation % SUPERBLOCK_COPIES) * SECTOR_BYTES;
        ssize_t put = pwrite(fd, super, sizeof *super, offset);
        if (put != (ssize_t)sizeof *super) {
            if (put >= 0)
                errno = ENOSPC;
            return file_error(directory->superblock.path, "cannot write");
        }
    }
    return 0;
}

static void superblock_fill(struct store *store, unsigned d, enum store_state state)
{
    struct superblock *super = &store->directories[d].content;
    const uint64_t generation = super->magic == STORE_SUPERBLOCK_MAGIC ? super->generation : 0;
    const struct store_options *options = &store->options;
    memset(super, 0, sizeof *super);
    super->magic = STORE_SUPERBLOCK_MAGIC;
    super->layout_version = STORE_LAYOUT_VERSION;
    super->state = state;
    super->generation = generation;
    memcpy(super->run, options->run, sizeof super->run);
    memcpy(super->store, store->uuid, sizeof super->store);
    super->directory = d;
    super->n_directories = options->n_directories;
    super->page_elements = options->layout->page_elements;
    super->n_pages = options->layout->n_pages;
    super->dtype = options->dtype;
    super->slots_per_page = options->slots_per_page;
    super->model_digest = store->model_digest;
    memcpy(super->model, options->model, sizeof super->model);
    super->model[sizeof super->model - 1] = '\0';
    memcpy(super->stripe_weights, store->weights, sizeof super->stripe_weights);
    super->slots_bytes = store->directories[d].slots_bytes;
    super->commit_bytes = d == 0 ? commit_file_bytes(options->layout->n_pages) : 0;
}

/* Directory 0 last: what it says holds for all. */
static int set_state(struct store *store, enum store_state state)
{
    for (unsigned i = store->options.n_directories; i-- > 0;) {
        struct store_directory *directory = &store->directories[i];
        superblock_fill(store, i, state);
        if (superblock_write(directory, directory->superblock.fd) < 0)
            return -(int)error_kind_now();
    }
    store->state = state;
    return 0;
}

/* -- opening -- */

static int refuse(const struct store_directory *directory, const char *what, const char *expected,
                  const char *found)
{
    error_set(ERROR_USER, "%s: store of another %s: expected %s, found %s",
              directory->superblock.path, what, expected, found);
    return error_hint("name another offload_dir, or free that store with `mtlaunch clean`");
}

static void format_run(const uint8_t run[RUN_UUID_BYTES], char text[2 * RUN_UUID_BYTES + 1])
{
    for (unsigned i = 0; i < RUN_UUID_BYTES; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", run[i]);
}

static int compare_number(const struct store_directory *directory, const char *what,
                          uint64_t expected, uint64_t found)
{
    if (expected == found)
        return 0;
    char want[32], have[32];
    (void)snprintf(want, sizeof want, "%llu", (unsigned long long)expected);
    (void)snprintf(have, sizeof have, "%llu", (unsigned long long)found);
    return refuse(directory, what, want, have);
}

static const char *dtype_text(uint32_t dtype)
{
    return dtype == DTYPE_FLOAT32 ? "float32" : dtype == DTYPE_BFLOAT16 ? "bfloat16" : "unknown";
}

static int compare_run(const struct store *store, const struct store_directory *directory)
{
    if (memcmp(store->options.run, directory->content.run, RUN_UUID_BYTES) == 0)
        return 0;
    char want[2 * RUN_UUID_BYTES + 1], have[2 * RUN_UUID_BYTES + 1];
    format_run(store->options.run, want);
    format_run(directory->content.run, have);
    return refuse(directory, "run", want, have);
}

/* A READY store must be exactly what the options describe. */
static int compare_geometry(const struct store *store, unsigned d)
{
    const struct store_directory *directory = &store->directories[d];
    const struct superblock *super = &directory->content;
    const struct store_options *options = &store->options;
    if (compare_number(directory, "number of directories", options->n_directories,
                       super->n_directories) < 0 ||
        compare_number(directory, "place in offload_dir", d, super->directory) < 0 ||
        compare_number(directory, "page size (page_elements)", options->layout->page_elements,
                       super->page_elements) < 0)
        return -ERROR_USER;
    if (options->dtype != super->dtype)
        return refuse(directory, "dtype", dtype_text(options->dtype), dtype_text(super->dtype));
    if (!page_digest_equal(store->model_digest, super->model_digest))
        return refuse(directory, "model", options->model, super->model);
    if (compare_number(directory, "number of slots per page (verify_writes)",
                       options->slots_per_page, super->slots_per_page) < 0 ||
        compare_number(directory, "number of pages", options->layout->n_pages, super->n_pages) < 0)
        return -ERROR_USER;
    if (memcmp(super->store, store->directories[0].content.store, RUN_UUID_BYTES) != 0)
        return error_set(ERROR_FAILED, "%s: belongs to another store than %s",
                         directory->superblock.path, store->directories[0].superblock.path);
    return 0;
}

static int open_engine(struct store *store, const struct engine_region *regions, unsigned n_regions)
{
    struct engine_file files[STORE_DIRECTORIES_MAX + 1];
    unsigned n = 0;
    for (; n < store->options.n_directories; n++) {
        const struct store_file *slots = &store->directories[n].slots;
        files[n] = (struct engine_file){slots->fd, slots->path, slots->direct ? SECTOR_BYTES : 1};
    }
    files[n++] = (struct engine_file){store->commit.fd, store->commit.path,
                                      store->commit.direct ? SECTOR_BYTES : 1};
    struct engine_options options = {.kind = store->options.engine,
                                     .depth = store->options.engine_depth,
                                     .files = files,
                                     .n_files = n,
                                     .regions = regions,
                                     .n_regions = n_regions};
    return engine_open(&store->engine, &options);
}

int store_register_regions(struct store *store, const struct engine_region *regions,
                           unsigned n_regions)
{
    CHECK(store->engine != NULL && engine_in_flight(store->engine) == 0);
    engine_close(store->engine);
    store->engine = NULL;
    if (open_engine(store, regions, n_regions) < 0)
        return -(int)error_kind_now();
    if (engine_notice(store->engine)[0] &&
        strstr(store->notice, engine_notice(store->engine)) == NULL)
        say(store, "%s%s: %s", "I/O engine", engine_notice(store->engine));
    return 0;
}

/* Opens and locks a data file of a store that exists. */
static int adopt_file(struct store *store, struct store_file *file, int flags)
{
    int found = file_open(store, file, flags);
    if (found < 0)
        return found;
    if (found == 0) {
        if (store->state != STORE_READY)
            return 0;
        error_set(ERROR_FAILED, "%s: missing, though the store is complete", file->path);
        return error_hint("is the file system mounted? nothing was changed");
    }
    return file_lock(store, file);
}

static int adopt_files(struct store *store)
{
    for (unsigned d = 0; d < store->options.n_directories; d++)
        if (adopt_file(store, &store->directories[d].slots, 0) < 0)
            return -(int)error_kind_now();
    return adopt_file(store, &store->commit, O_DSYNC);
}

static int open_ready(struct store *store)
{
    const unsigned n = store->options.n_directories;
    for (unsigned d = 0; d < n; d++)
        if (compare_geometry(store, d) < 0)
            return -(int)error_kind_now();
    memcpy(store->uuid, store->directories[0].content.store, sizeof store->uuid);
    memcpy(store->weights, store->directories[0].content.stripe_weights, sizeof store->weights);
    map_pages(store);
    if (adopt_files(store) < 0)
        return -(int)error_kind_now();
    for (unsigned d = 0; d < n; d++)
        if (file_check_size(&store->directories[d].slots, store->directories[d].slots_bytes) < 0)
            return -(int)error_kind_now();
    if (file_check_size(&store->commit, commit_file_bytes(store->options.layout->n_pages)) < 0)
        return -(int)error_kind_now();
    for (unsigned d = 0; d < n; d++)
        file_make_direct(store, &store->directories[d].slots);
    file_make_direct(store, &store->commit);
    return open_engine(store, NULL, 0);
}

/* Another's store is told at once: whoever holds its lock is no dead process of ours to wait for.
 */
static int refuse_other_run(const struct store *store, struct store_directory *directory)
{
    unsigned valid;
    if (store_superblock_load(&directory->superblock, &directory->content, &valid) < 0)
        return -(int)error_kind_now();
    return valid ? compare_run(store, directory) : 0;
}

/* Locks and reads the superblocks there are; `found` counts them. */
static int read_superblocks(struct store *store, unsigned *found)
{
    *found = 0;
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        struct store_directory *directory = &store->directories[d];
        int there = file_open(store, &directory->superblock, O_DSYNC);
        if (there < 0)
            return there;
        if (there == 0)
            continue;
        if (refuse_other_run(store, directory) < 0 ||
            file_lock(store, &directory->superblock) < 0 || superblock_read(directory) < 0 ||
            compare_run(store, directory) < 0)
            return -(int)error_kind_now();
        (*found)++;
    }
    return 0;
}

/* The state that the superblocks tell together. What directory 0's says holds for all, wherever it
 * is named now; all existed before any was READY, so if it is lost, a READY one says as much. */
static enum store_state common_state(const struct store *store)
{
    enum store_state of_first = STORE_ABSENT, of_any = STORE_ABSENT;
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        const struct store_directory *directory = &store->directories[d];
        if (directory->superblock.fd < 0)
            continue;
        enum store_state state = (enum store_state)directory->content.state;
        if (state > of_any)
            of_any = state;
        if (directory->content.directory == 0 && state > of_first)
            of_first = state;
    }
    return of_first != STORE_ABSENT ? of_first : of_any;
}

static int missing_superblock(const struct store *store)
{
    for (unsigned d = 0; d < store->options.n_directories; d++)
        if (store->directories[d].superblock.fd < 0) {
            error_set(ERROR_USER, "%s: missing, though the run has a complete store",
                      store->directories[d].superblock.path);
            return error_hint("offload_dir must name the same directories in the same order as "
                              "before; is the file system mounted?");
        }
    return 0;
}

static int open_existing(struct store *store)
{
    unsigned found;
    if (read_superblocks(store, &found) < 0)
        return -(int)error_kind_now();
    if (found == 0)
        return 0; /* ABSENT */
    store->state = common_state(store);
    if (store->state != STORE_READY)
        return adopt_files(store);
    if (missing_superblock(store) < 0)
        return -(int)error_kind_now();
    return open_ready(store);
}

static int set_paths(struct store *store)
{
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        struct store_directory *directory = &store->directories[d];
        const char *path = store->options.directories[d];
        directory->superblock.fd = directory->slots.fd = -1;
        if (strlen(path) + sizeof "/superblock.new" > sizeof directory->path)
            return error_set(ERROR_USER, "offload_dir: path too long: %s", path);
        (void)snprintf(directory->path, sizeof directory->path, "%s", path);
        (void)snprintf(directory->superblock.path, PATH_MAX, "%.4080s/superblock", path);
        (void)snprintf(directory->slots.path, PATH_MAX, "%.4080s/slots", path);
    }
    (void)snprintf(store->commit.path, PATH_MAX, "%.4080s/commit", store->directories[0].path);
    return 0;
}

static int check_directories(const struct store_options *options)
{
    CHECK(options->n_directories > 0);
    if (options->n_directories > STORE_DIRECTORIES_MAX)
        return error_set(ERROR_USER, "offload_dir: expected at most %d directories, found %u",
                         STORE_DIRECTORIES_MAX, options->n_directories);
    for (unsigned a = 0; a < options->n_directories; a++)
        for (unsigned b = a + 1; b < options->n_directories; b++)
            if (strcmp(options->directories[a], options->directories[b]) == 0)
                return error_set(ERROR_USER, "offload_dir: %s: expected once, found twice",
                                 options->directories[a]);
    return 0;
}

int store_open(struct store **store, const struct store_options *options)
{
    if (check_directories(options) < 0)
        return -(int)error_kind_now();
    CHECK(options->slots_per_page >= 2 && options->slots_per_page <= 3);
    struct store *s = calloc(1, sizeof *s);
    if (s == NULL)
        return error_set(ERROR_FAILED, "store: out of memory");
    s->options = *options;
    s->commit.fd = -1;
    for (unsigned d = 0; d < STORE_DIRECTORIES_MAX; d++)
        s->directories[d].superblock.fd = s->directories[d].slots.fd = -1;
    s->model_digest = digest_model(options->layout);
    s->page_offsets = calloc(options->layout->n_pages, sizeof s->page_offsets[0]);
    s->page_directories = calloc(options->layout->n_pages, sizeof s->page_directories[0]);
    int rc = s->page_offsets && s->page_directories
                 ? set_paths(s)
                 : error_set(ERROR_FAILED, "store: out of memory");
    if (rc == 0)
        rc = open_existing(s);
    if (rc == 0 && s->engine && engine_notice(s->engine)[0])
        say(s, "%s%s: %s", "I/O engine", engine_notice(s->engine));
    if (rc < 0)
        store_close(s);
    else
        *store = s;
    return rc;
}

void store_close(struct store *store)
{
    if (store == NULL)
        return;
    engine_close(store->engine);
    for (unsigned d = 0; d < STORE_DIRECTORIES_MAX; d++) {
        file_close(&store->directories[d].superblock);
        file_close(&store->directories[d].slots);
    }
    file_close(&store->commit);
    free(store->page_offsets);
    free(store->page_directories);
    free(store);
}

/* -- creating -- */

/* statvfs of the directory or of its nearest existing parent. */
static int free_space(const char *directory, uint64_t *bytes, dev_t *device)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s", directory);
    struct stat st;
    struct statvfs fs;
    while (stat(path, &st) < 0) {
        if (errno != ENOENT)
            return file_error(path, "cannot stat");
        char *slash = strrchr(path, '/');
        if (slash == NULL)
            (void)snprintf(path, sizeof path, ".");
        else
            slash[slash == path ? 1 : 0] = '\0';
    }
    if (!S_ISDIR(st.st_mode))
        return error_set(ERROR_USER, "offload_dir: %s is not a directory", path);
    if (statvfs(path, &fs) < 0)
        return file_error(path, "cannot statvfs");
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
        map_pages(store);
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

static int sync_directory(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return file_error(path, "cannot open");
    int rc = fsync(fd) < 0 ? file_error(path, "cannot fsync") : 0;
    (void)close(fd); /* read-only */
    return rc;
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
            if (sync_directory(parent) < 0)
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
    int rc = file_open(store, &fresh, O_CREAT | O_DSYNC);
    if (rc == 0)
        rc = file_error(fresh.path, "cannot create");
    if (rc > 0)
        rc = file_lock(store, &fresh);
    if (rc == 0 && access(directory->superblock.path, F_OK) == 0)
        rc = error_set(ERROR_BUSY, "%s: another process has just created a store here",
                       directory->superblock.path);
    if (rc == 0) {
        superblock_fill(store, d, STORE_ZEROING);
        rc = superblock_write(directory, fresh.fd);
    }
    if (rc == 0 && rename(fresh.path, directory->superblock.path) < 0)
        rc = file_error(fresh.path, "cannot rename");
    if (rc == 0)
        rc = sync_directory(directory->path);
    if (rc < 0) {
        file_close(&fresh);
        return rc;
    }
    directory->superblock.fd = fresh.fd;
    return 0;
}

/* Opens or creates a data file, empty, locked and allocated; direct from here on. */
static int allocate_file(struct store *store, struct store_file *file, int flags, uint64_t bytes)
{
    if (file->fd < 0) {
        int there = file_open(store, file, O_CREAT | flags);
        if (there <= 0)
            return there < 0 ? there : file_error(file->path, "cannot create");
        if (file_lock(store, file) < 0)
            return -(int)error_kind_now();
    }
    if (ftruncate(file->fd, 0) < 0)
        return file_error(file->path, "cannot truncate");
    int failure = bytes > 0 ? posix_fallocate(file->fd, 0, (off_t)bytes) : 0;
    if (failure == ENOSPC || failure == EDQUOT)
        return error_set(ERROR_FIT, "%s: cannot allocate %llu bytes: %s", file->path,
                         (unsigned long long)bytes, strerror(failure));
    errno = failure;
    if (failure != 0)
        return file_error(file->path, "cannot allocate");
    file_make_direct(store, file);
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
    return report(fill->store, STORE_ZERO_FILLING, fill->done_bytes, fill->total_bytes);
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
    return rc < 0 ? rc : report(store, STORE_ZERO_FILLING, fill.total_bytes, fill.total_bytes);
}

static int sync_files(struct store *store)
{
    for (unsigned d = 0; d < store->options.n_directories; d++) {
        const struct store_file *slots = &store->directories[d].slots;
        if (fsync(slots->fd) < 0)
            return file_error(slots->path, "cannot fsync");
    }
    if (fsync(store->commit.fd) < 0)
        return file_error(store->commit.path, "cannot fsync");
    for (unsigned d = 0; d < store->options.n_directories; d++)
        if (sync_directory(store->directories[d].path) < 0)
            return -(int)error_kind_now();
    return 0;
}

/* Writes PROBE_BYTES to a nameless file, flushes, reads them back: bytes per microsecond. */
static int measure_directory(struct store *store, const char *path, uint64_t *rate)
{
    struct store_file file = {.fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)};
    if (file.fd < 0)
        return file_error(path, "cannot create a temporary file to measure the directory");
    (void)snprintf(file.path, sizeof file.path, "%.4080s", path);
    file_make_direct(store, &file);
    void *buffer = NULL;
    int rc = posix_memalign(&buffer, SECTOR_BYTES, PROBE_CHUNK_BYTES)
                 ? error_set(ERROR_FAILED, "store: out of memory")
                 : 0;
    if (rc == 0)
        memset(buffer, 0x5a, PROBE_CHUNK_BYTES);
    const uint64_t start = clock_now_ns();
    for (off_t at = 0; rc == 0 && at < PROBE_BYTES; at += PROBE_CHUNK_BYTES)
        if (pwrite(file.fd, buffer, PROBE_CHUNK_BYTES, at) != PROBE_CHUNK_BYTES)
            rc = file_error(path, "measuring: short write");
    if (rc == 0 && fdatasync(file.fd) < 0)
        rc = file_error(path, "measuring: fdatasync");
    for (off_t at = 0; rc == 0 && at < PROBE_BYTES; at += PROBE_CHUNK_BYTES)
        if (pread(file.fd, buffer, PROBE_CHUNK_BYTES, at) != PROBE_CHUNK_BYTES)
            rc = file_error(path, "measuring: short read");
    *rate = 1 + 2 * (uint64_t)PROBE_BYTES * 1000 / (1 + clock_now_ns() - start);
    free(buffer);
    file_close(&file);
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
            return file_error(store->commit.path, "cannot stat");
        off_t offset = st.st_size - (off_t)(COMMIT_RECORD_RING - i) * COMMIT_RECORD_BYTES;
        if (offset < 0 ||
            pread(store->commit.fd, &record, sizeof record, offset) != (ssize_t)sizeof record)
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
        return file_error("getrandom", "store uuid");
    for (unsigned d = 0; d < n; d++) {
        if (store->directories[d].superblock.fd < 0 && create_superblock(store, d) < 0)
            return -(int)error_kind_now();
    }
    return set_state(store, STORE_ZEROING);
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
        open_engine(store, NULL, 0) < 0 || zero_files(store) < 0 || sync_files(store) < 0)
        return -(int)error_kind_now();
    if (engine_notice(store->engine)[0])
        say(store, "%s%s: %s", "I/O engine", engine_notice(store->engine));
    return set_state(store, STORE_IMPORTING);
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

int store_mark_ready(struct store *store)
{
    CHECK(store->state == STORE_IMPORTING && store->engine != NULL);
    return set_state(store, STORE_READY);
}

/* -- facts -- */

enum store_state store_state_now(const struct store *store)
{
    return store->state;
}

const char *store_state_name(enum store_state state)
{
    static const char *const names[] = {"ABSENT", "ZEROING", "IMPORTING", "READY"};
    return names[state];
}

const char *store_notice(const struct store *store)
{
    return store->notice;
}

struct engine *store_engine(struct store *store)
{
    return store->engine;
}

const struct store_options *store_options_of(const struct store *store)
{
    return &store->options;
}

const uint8_t *store_uuid(const struct store *store)
{
    return store->uuid;
}

uint64_t store_n_pages(const struct store *store)
{
    return store->options.layout->n_pages;
}

unsigned store_slots_per_page(const struct store *store)
{
    return store->options.slots_per_page;
}

unsigned store_directory_count(const struct store *store)
{
    return store->options.n_directories;
}

unsigned store_commit_file(const struct store *store)
{
    return store->options.n_directories;
}

const char *store_file_path(const struct store *store, unsigned file)
{
    CHECK(file <= store->options.n_directories);
    return file == store->options.n_directories ? store->commit.path
                                                : store->directories[file].slots.path;
}

unsigned store_page_file(const struct store *store, uint64_t page)
{
    CHECK(page < store_n_pages(store));
    return store->page_directories[page];
}

void store_page_layout(const struct store *store, uint64_t page, struct page_image_layout *layout)
{
    CHECK(page < store_n_pages(store));
    page_image_layout(layout, store->options.dtype, store->options.layout->pages[page].elements);
}

uint64_t store_slot_offset(const struct store *store, uint64_t page, uint32_t slot)
{
    CHECK(page < store_n_pages(store) && slot < store->options.slots_per_page);
    return store->page_offsets[page] +
           slot * slot_bytes(store->options.layout, store->options.dtype, page);
}

void store_page_identity(const struct store *store, uint64_t page, uint64_t version,
                         struct page_identity *identity)
{
    CHECK(page < store_n_pages(store));
    memset(identity, 0, sizeof *identity);
    memcpy(identity->run, store->options.run, sizeof identity->run);
    identity->page = page;
    identity->version = version;
    identity->layer = store->options.layout->pages[page].layer;
}

void store_request_page(const struct store *store, struct io_request *request, enum io_op op,
                        uint64_t page, uint32_t slot)
{
    request->op = op;
    request->file = store_page_file(store, page);
    request->offset = store_slot_offset(store, page, slot);
}

static int refuse_entry(uint64_t page, const char *field, uint64_t expected, uint64_t found)
{
    return error_set(ERROR_FAILED, "entry %llu: %s: expected %llu, found %llu",
                     (unsigned long long)page, field, (unsigned long long)expected,
                     (unsigned long long)found);
}

static int check_entry_parts(const struct store *store, const struct page_entry *entry)
{
    const struct page_digest none = {0, 0};
    struct page_image_layout layout;
    char field[64];
    store_page_layout(store, entry->page, &layout);
    for (unsigned part = 0; part < PART_COUNT; part++) {
        uint64_t length = page_image_part_length(&layout, (enum page_codec)entry->codec, part);
        (void)snprintf(field, sizeof field, "length of %s", page_part_name(part));
        if (entry->length[part] != length)
            return refuse_entry(entry->page, field, length, entry->length[part]);
        if (length == 0 && !page_digest_equal(entry->digest[part], none))
            return error_set(ERROR_FAILED, "entry %llu: digest of no %s: expected zero",
                             (unsigned long long)entry->page, page_part_name(part));
    }
    return 0;
}

int store_check_entry(const struct store *store, const struct page_entry *entry, uint64_t page)
{
    if (!page_entry_valid(entry))
        return error_set(ERROR_FAILED, "entry %llu: its hash does not match",
                         (unsigned long long)page);
    if (entry->page != page)
        return refuse_entry(page, "page", page, entry->page);
    if (entry->layer != store->options.layout->pages[page].layer)
        return refuse_entry(page, "layer", store->options.layout->pages[page].layer, entry->layer);
    if (entry->slot >= store->options.slots_per_page)
        return refuse_entry(page, "slot below", store->options.slots_per_page, entry->slot);
    if (entry->codec != PAGE_ZERO && entry->codec != PAGE_RAW)
        return refuse_entry(page, "codec up to", PAGE_RAW, entry->codec);
    return check_entry_parts(store, entry);
}

int store_check_table(const struct store *store, const struct page_entry *table)
{
    for (uint64_t page = 0; page < store_n_pages(store); page++)
        if (store_check_entry(store, &table[page], page) < 0)
            return -ERROR_FAILED;
    return 0;
}

int store_verify_image(const struct store *store, const struct page_entry *entry, const void *image)
{
    struct page_image_layout layout;
    struct page_identity identity;
    store_page_layout(store, entry->page, &layout);
    store_page_identity(store, entry->page, entry->version, &identity);
    int rc = page_image_verify(image, &layout, &identity);
    const struct page_image_header *header = image;
    for (unsigned part = 0; rc == 0 && part < PART_COUNT; part++)
        if (!page_digest_equal(header->digest[part], entry->digest[part]))
            rc =
                error_set(ERROR_FAILED, "page: digest of %s differs from the commit's (lost write)",
                          page_part_name(part));
    if (rc < 0)
        return error_wrap("%s: offset %llu: page %llu (layer %u), slot %u",
                          store_file_path(store, store_page_file(store, entry->page)),
                          (unsigned long long)store_slot_offset(store, entry->page, entry->slot),
                          (unsigned long long)entry->page, entry->layer, entry->slot);
    return 0;
}
