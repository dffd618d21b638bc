/* What store.c and store_scan.c share. Nobody else includes this. */
#ifndef IO_WORKER_STORE_INTERNAL_H
#define IO_WORKER_STORE_INTERNAL_H

#include "io_worker/store.h"
#include "ipc/store_identity.h"

#include <limits.h>
#include <stddef.h>

enum {
    SECTOR_BYTES = STORE_SUPERBLOCK_BYTES,
    SUPERBLOCK_COPIES = STORE_SUPERBLOCK_COPIES,
    STORE_NOTICE_BYTES = 2048,
};

struct superblock {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t state;      /* enum store_state */
    uint64_t generation; /* of this file: the valid copy with the larger one counts */
    uint8_t run[RUN_UUID_BYTES];
    uint8_t store[RUN_UUID_BYTES];
    uint32_t directory; /* index of this one */
    uint32_t n_directories;
    uint64_t page_elements;
    uint64_t n_pages;
    uint32_t dtype; /* enum dtype_mode */
    uint32_t slots_per_page;
    struct page_digest model_digest; /* of all tensors' shapes and places */
    char model[STORE_MODEL_BYTES];
    uint32_t stripe_weights[STORE_DIRECTORIES_MAX]; /* with the page sizes, these give the map */
    uint64_t slots_bytes;                           /* of this directory's slots file */
    uint64_t commit_bytes;                          /* of the commit file; directory 0 only */
    uint8_t unused[3840];
    uint64_t hash; /* xxh3-64 of the 4096 bytes, this field taken as zero */
};
_Static_assert(sizeof(struct superblock) == SECTOR_BYTES, "one sector of 4 KiB");
_Static_assert(offsetof(struct superblock, run) == offsetof(struct store_identity, run),
               "begins as store_identity.h says");

struct store_file {
    int fd; /* -1: not open */
    int direct;
    char path[PATH_MAX];
};

struct store_directory {
    char path[PATH_MAX];
    struct store_file superblock;
    struct store_file slots;
    struct superblock content; /* valid once read or written */
    uint64_t slots_bytes;
};

struct store {
    struct store_options options;
    enum store_state state;
    uint8_t uuid[RUN_UUID_BYTES];
    struct page_digest model_digest;
    uint32_t weights[STORE_DIRECTORIES_MAX];
    struct store_directory directories[STORE_DIRECTORIES_MAX];
    struct store_file commit;
    uint64_t *page_offsets;    /* of slot 0 in the slots file */
    uint8_t *page_directories; /* index */
    struct engine *engine;
    char notice[STORE_NOTICE_BYTES];
};

/* The valid copies among the two of a superblock file. Bit i: copy i is valid. `newest` is filled
 * when any is. -ERROR_FAILED if the file cannot be read. */
int store_superblock_load(const struct store_file *file, struct superblock *newest,
                          unsigned *valid_copies);

#endif
