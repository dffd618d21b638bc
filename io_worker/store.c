/* A store that exists is opened: found, locked, compared with what is wanted. */
#include "io_worker/store_internal.h"

#include "procs/check.h"
#include "procs/error.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* A directory of this run's own, but another one: nothing to be freed. */
static int compare_place(const struct store_directory *directory, unsigned d)
{
    if (directory->content.directory == d)
        return 0;
    (void)error_set(ERROR_USER, "%s: expected directory %u of offload_dir, found directory %u",
                    directory->superblock.path, d + 1, directory->content.directory + 1);
    return error_hint("are its disks mounted in each other's place? Nothing was changed");
}

/* A READY store must be exactly what the options describe. */
static int compare_geometry(const struct store *store, unsigned d)
{
    const struct store_directory *directory = &store->directories[d];
    const struct superblock *super = &directory->content;
    const struct store_options *options = &store->options;
    if (compare_number(directory, "number of directories", options->n_directories,
                       super->n_directories) < 0 ||
        compare_place(directory, d) < 0 ||
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

int store_open_engine(struct store *store, const struct engine_region *regions, unsigned n_regions)
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
    if (store_open_engine(store, regions, n_regions) < 0)
        return -(int)error_kind_now();
    if (engine_notice(store->engine)[0] &&
        strstr(store->notice, engine_notice(store->engine)) == NULL)
        store_say(store, "%s%s: %s", "I/O engine", engine_notice(store->engine));
    return 0;
}

/* Opens and locks a data file of a store that exists. */
static int adopt_file(struct store *store, struct store_file *file, int flags)
{
    int found = store_file_open(store, file, flags);
    if (found < 0)
        return found;
    if (found == 0) {
        if (store->state != STORE_READY)
            return 0;
        error_set(ERROR_FAILED, "%s: missing, though the store is complete", file->path);
        return error_hint("is the file system mounted? nothing was changed");
    }
    return store_file_lock(store, file);
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
        if (compare_geometry(store, d) < 0 ||
            (!store->options.read_only && store_superblock_complete(&store->directories[d]) < 0))
            return -(int)error_kind_now();
    memcpy(store->uuid, store->directories[0].content.store, sizeof store->uuid);
    memcpy(store->weights, store->directories[0].content.stripe_weights, sizeof store->weights);
    store_map_pages(store);
    if (adopt_files(store) < 0)
        return -(int)error_kind_now();
    for (unsigned d = 0; d < n; d++)
        if (store_file_check_size(&store->directories[d].slots, store->directories[d].slots_bytes) <
            0)
            return -(int)error_kind_now();
    if (store_file_check_size(&store->commit, commit_file_bytes(store->options.layout->n_pages)) <
        0)
        return -(int)error_kind_now();
    for (unsigned d = 0; d < n; d++)
        store_file_make_direct(store, &store->directories[d].slots);
    store_file_make_direct(store, &store->commit);
    return store_open_engine(store, NULL, 0);
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
        int there = store_file_open(store, &directory->superblock, O_DSYNC);
        if (there < 0)
            return there;
        if (there == 0)
            continue;
        if (refuse_other_run(store, directory) < 0 ||
            store_file_lock(store, &directory->superblock) < 0)
            return -(int)error_kind_now();
        if (fdatasync(directory->superblock.fd) < 0)
            return store_file_error(directory->superblock.path, "cannot fdatasync");
        store_file_forget_cached(&directory->superblock);
        if (store_superblock_read(directory) < 0 || compare_run(store, directory) < 0)
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
    s->model_digest = store_digest_model(options->layout);
    s->page_offsets = calloc(options->layout->n_pages, sizeof s->page_offsets[0]);
    s->page_directories = calloc(options->layout->n_pages, sizeof s->page_directories[0]);
    int rc = s->page_offsets && s->page_directories
                 ? set_paths(s)
                 : error_set(ERROR_FAILED, "store: out of memory");
    if (rc == 0)
        rc = open_existing(s);
    if (rc == 0 && s->engine && engine_notice(s->engine)[0])
        store_say(s, "%s%s: %s", "I/O engine", engine_notice(s->engine));
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
        store_file_close(&store->directories[d].superblock);
        store_file_close(&store->directories[d].slots);
    }
    store_file_close(&store->commit);
    free(store->page_offsets);
    free(store->page_directories);
    free(store);
}

int store_mark_ready(struct store *store)
{
    CHECK(store->state == STORE_IMPORTING && store->engine != NULL);
    return store_set_state(store, STORE_READY);
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
