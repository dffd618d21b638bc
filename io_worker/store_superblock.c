/* The superblock of each directory: two copies, one of them whole whenever the power fails. */
#include "io_worker/store_internal.h"

#include "procs/error.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

static uint64_t superblock_hash(const struct superblock *super)
{
    struct superblock copy = *super;
    copy.hash = 0;
    return XXH3_64bits(&copy, sizeof copy);
}

int store_superblock_load(const struct store_file *file, struct superblock *newest,
                          unsigned *valid_copies)
{
    int failure = 0;
    *valid_copies = 0;
    for (unsigned i = 0; i < SUPERBLOCK_COPIES; i++) {
        struct superblock copy;
        ssize_t got = pread(file->fd, &copy, sizeof copy, (off_t)i * SECTOR_BYTES);
        if (got < 0)
            failure = errno; /* that is what the other one is for */
        if (got != (ssize_t)sizeof copy || copy.magic != STORE_SUPERBLOCK_MAGIC ||
            copy.hash != superblock_hash(&copy))
            continue;
        if (*valid_copies == 0 || copy.generation > newest->generation)
            *newest = copy;
        *valid_copies |= 1u << i;
    }
    errno = failure;
    return *valid_copies == 0 && failure ? store_file_error(file->path, "cannot read") : 0;
}

int store_superblock_read(struct store_directory *directory)
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
int store_superblock_write(struct store_directory *directory, int fd)
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
            return store_file_error(directory->superblock.path, "cannot write");
        }
    }
    return 0;
}

int store_superblock_complete(struct store_directory *directory)
{
    const struct superblock *newest = &directory->content;
    struct superblock other;
    int fd = directory->superblock.fd;
    off_t offset = (off_t)((newest->generation + 1) % SUPERBLOCK_COPIES) * SECTOR_BYTES;
    if (pread(fd, &other, sizeof other, offset) != (ssize_t)sizeof other ||
        other.magic != STORE_SUPERBLOCK_MAGIC || other.hash != superblock_hash(&other) ||
        other.state == newest->state)
        return 0;
    return store_superblock_write(directory, fd);
}

void store_superblock_fill(struct store *store, unsigned d, enum store_state state)
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
int store_set_state(struct store *store, enum store_state state)
{
    for (unsigned i = store->options.n_directories; i-- > 0;) {
        struct store_directory *directory = &store->directories[i];
        store_superblock_fill(store, i, state);
        if (store_superblock_write(directory, directory->superblock.fd) < 0)
            return -(int)error_kind_now();
    }
    store->state = state;
    return 0;
}
