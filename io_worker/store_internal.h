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
    int made; /* the directory itself, by this process */
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

/* -- store_scan.c: the pieces of recovery and verification, for scrub.c -- */

/* What a damage report needs. */
struct store_damage_sink {
    store_damage *on_damage; /* NULL: the first damage ends the work */
    void *context;
    uint64_t count;
    uint64_t bytes; /* of pages looked at */
    char first[1024];
};

/* Reports the current error as damage. */
void store_damage_tell(struct store_damage_sink *sink, const char *file, uint64_t offset);

struct store_ring {
    struct commit_record records[COMMIT_RECORD_RING]; /* as on disk */
    int valid[COMMIT_RECORD_RING];
};

/* Reads the whole ring into 4 KiB-aligned memory that the caller frees. Damaged records go to
 * `sink`. */
int store_ring_load(struct store *store, struct store_ring **ring, struct store_damage_sink *sink);
/* NULL: none is valid. */
const struct commit_record *store_ring_newest(const struct store_ring *ring);
/* The record that `record` follows, if it is still in the ring. */
const struct commit_record *store_ring_parent(const struct store_ring *ring,
                                              const struct commit_record *record);

int store_superblocks_verify(struct store *store, struct store_damage_sink *sink);

/* Where the table lies that a record names; reads it and checks it against the record. */
uint64_t store_table_offset(const struct store *store, const struct commit_record *record);
int store_table_load(struct store *store, const struct commit_record *record,
                     struct page_entry *table);

/* All pages of the table; those that `known` (may be NULL) names alike are left out. A page that
 * fails is read once more before it counts as damaged. 0 (see sink->count) or ERROR_STOPPED. */
int store_pages_verify(struct store *store, const struct page_entry *table,
                       const struct page_entry *known, struct store_damage_sink *sink);

int store_is_zero(const void *data, uint64_t bytes);

#endif
