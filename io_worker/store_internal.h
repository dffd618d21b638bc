/* What the store_*.c share. Nobody else includes this. */
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
    PROGRESS_INTERVAL_MS = 100,
    /* Readings, until what is not what was written counts as damage: a commit is at stake, and one
     * may be spoilt on the way and the next one refused. */
    RECOVERY_READS = 3,
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

/* -- store_files.c -- */

/* errno as an error: ERROR_USER where the user can help it. */
int store_file_error(const char *path, const char *what);
/* Opens file->path for reading and writing, or reading only where the options say so. 1: open, 0:
 * absent, negative. */
int store_file_open(const struct store *store, struct store_file *file, int flags);
void store_file_close(struct store_file *file);
/* The fence (store.h): 0 with the lock, ERROR_BUSY after the deadline, ERROR_STOPPED on request. */
int store_file_lock(const struct store *store, const struct store_file *file);
int store_file_check_size(const struct store_file *file, uint64_t expected);
/* Makes the same descriptor direct where the file system can, so that the lock stays. */
void store_file_make_direct(struct store *store, struct store_file *file);
/* After its fdatasync. A page that the kernel could not write it told of once, to whoever was
 * there, keeps it, calls it clean and shows it to whoever reads: what is buffered is read again
 * from the disk. */
void store_file_forget_cached(const struct store_file *file);
/* on_progress; ERROR_STOPPED when it wants to stop. */
int store_report(const struct store *store, enum store_activity activity, uint64_t done,
                 uint64_t total);
/* Adds a line to the notice; `format` takes path and why. */
void store_say(struct store *store, const char *format, const char *path, const char *why);

/* -- store_superblock.c -- */

/* The valid copies among the two of a superblock file. Bit i: copy i is valid. `newest` is filled
 * when any is. -ERROR_FAILED if none is and the file cannot be read. */
int store_superblock_load(const struct store_file *file, struct superblock *newest,
                          unsigned *valid_copies);
/* The newest copy into directory->content. ERROR_FAILED: none is valid, or not of this version. */
int store_superblock_read(struct store_directory *directory);
/* What the options and the store's map say, into the content of directory d. */
void store_superblock_fill(struct store *store, unsigned d, enum store_state state);
int store_superblock_write(struct store_directory *directory, int fd);
/* Ends what was begun by whoever died between the writes of the two copies, and left an older state
 * in one of them. A copy that is damaged stays as it is. */
int store_superblock_complete(struct store_directory *directory);
/* Writes `state` to all directories; durable on return (O_DSYNC). */
int store_set_state(struct store *store, enum store_state state);

/* -- store_pages.c -- */

/* Fills page_directories, page_offsets and each directory's slots_bytes from the weights. */
void store_map_pages(struct store *store);
/* Shapes, and what else of the configuration determines what is computed. */
struct page_digest store_digest_model(const struct model_layout *layout);

/* -- store.c -- */

int store_open_engine(struct store *store, const struct engine_region *regions, unsigned n_regions);

/* -- store_recover.c and store_scan.c: the pieces of recovery and verification, for scrub.c too --
 */

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
    int unreadable[COMMIT_RECORD_RING]; /* -errno; its record is zero */
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
 * fails is read RECOVERY_READS times in all before it counts as damaged. 0 (see sink->count) or
 * ERROR_STOPPED. */
int store_pages_verify(struct store *store, const struct page_entry *table,
                       const struct page_entry *known, struct store_damage_sink *sink);

int store_is_zero(const void *data, uint64_t bytes);

#endif
