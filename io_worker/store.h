/*
 * The files in `offload_dir`: where every version of every page is durable.
 *
 *     superblock   in each directory: two copies of 4 KiB: who this store belongs to, its geometry
 *
 *     slots        in each directory: the slots of the pages that the stripe map gives to it
 *
 *     commit       in directory 0: digest tables and commit records (commit.h)
 *
 * Life:   (absent) -> ZEROING -> IMPORTING -> READY
 *
 *     ZEROING     files are being allocated and really written with zeros
 *
 *     IMPORTING   all bytes exist and are durable; version 0 of the pages is being written
 *
 *     READY       commit record 0 is durable. From here on no create, rename or truncate, so no
 *                 metadata changes and no ENOSPC in the middle of a run
 *
 * A store that is not READY holds nothing of value; the next start of the same run wipes and redoes
 * it. A store of another run, model, page size or dtype is refused with both values.
 *
 * The fence. A killed process's I/O goes on landing for seconds after it was reaped. The lock that
 * tells when it is over is flock(LOCK_EX) on the very descriptors the I/O goes through: the kernel
 * holds the open file, and so the lock, until the last request is done. store_open() therefore
 * locks every file it will do I/O through before it reads a byte, retrying up to a deadline.
 *
 * O_DIRECT where statx() reports an alignment (or, on kernels that do not report it, where a 4 KiB
 * direct read works); buffered elsewhere (tmpfs, overlay), said by store_notice().
 */
#ifndef IO_WORKER_STORE_H
#define IO_WORKER_STORE_H

#include "io_worker/commit.h"
#include "io_worker/engine.h"
#include "ipc/page_image.h"
#include "model/layout.h"

#include <stdint.h>

enum {
    STORE_DIRECTORIES_MAX = 16,
    STORE_LOCK_TIMEOUT_S = 120,
    STORE_LAYOUT_VERSION = 1,
    STORE_MODEL_BYTES = 64,
};

enum store_state {
    STORE_ABSENT,    /* no superblock in any directory; nothing was created */
    STORE_ZEROING,   /* ours, incomplete: store_create() wipes and restarts it */
    STORE_IMPORTING, /* set by store_create(); on opening: incomplete like ZEROING */
    STORE_READY,     /* store_recover() may be called */
};

enum store_activity {
    STORE_WAITING_FOR_LOCK, /* done and total in milliseconds */
    STORE_ZERO_FILLING,
    STORE_VERIFYING,
    STORE_HASHING,
};

/* Called about every 100 ms during long work, and at its end. Return nonzero to stop it: the
 * function then fails with ERROR_STOPPED. */
typedef int store_progress(void *context, enum store_activity activity, uint64_t done_bytes,
                           uint64_t total_bytes);

struct store_options {
    const char *const *directories;
    unsigned n_directories;
    uint8_t run[RUN_UUID_BYTES];
    char model[STORE_MODEL_BYTES];     /* NUL-terminated; named in refusals */
    const struct model_layout *layout; /* outlives the store */
    enum dtype_mode dtype;
    unsigned slots_per_page; /* 3, or 2 with verify_writes = false */
    enum engine_kind engine;
    unsigned engine_depth;
    unsigned lock_timeout_s; /* 0: STORE_LOCK_TIMEOUT_S */
    int read_only;           /* nothing is written, not even an access time; the locks are shared */
    uint32_t stripe_weights[STORE_DIRECTORIES_MAX]; /* all 0: measured at creation */
    store_progress *on_progress;                    /* may be NULL */
    void *progress_context;
};

struct store;

/* Bytes that a store needs in all. */
uint64_t store_bytes_needed(const struct model_layout *layout, enum dtype_mode dtype,
                            unsigned slots_per_page);

/* Opens what is there: locks, reads superblocks, compares. 0 with store_state_now() telling ABSENT,
 * ZEROING/IMPORTING (own, incomplete) or READY; creates nothing. ERROR_USER: a store of another
 * run, model, page size or dtype, with both values. ERROR_BUSY: locks not got within the deadline.
 * ERROR_FAILED: damaged superblock, missing file, wrong file size (file, expected, found). */
int store_open(struct store **store, const struct store_options *options);
void store_close(struct store *store);

/* Compares need and space (ERROR_FIT, before anything is written). For ABSENT and incomplete
 * stores. */
int store_preflight(struct store *store);

/* Creates or wipes: preflight, allocate, zero-fill, fsync; ends in IMPORTING. */
int store_create(struct store *store);

/* Removes what there is of a store that never became READY. For a start that fails on the user's
 * account: its run does not exist any more, and no other run would dare to touch its store. */
void store_discard(struct store *store);

/* Frame pools exist only after the fence, so after store_open(): opens the engine anew with
 * `regions` registered where possible. Nothing may be in flight. 0, or ERROR_FAILED. */
int store_register_regions(struct store *store, const struct engine_region *regions,
                           unsigned n_regions);

/* After commit record 0 is durable. */
int store_mark_ready(struct store *store);

enum store_state store_state_now(const struct store *store);
const char *store_state_name(enum store_state state);

/* A plain text for the user: buffered directories, engine fallback. "" if there is nothing to say.
 */
const char *store_notice(const struct store *store);

/* NULL for ABSENT and incomplete stores. */
struct engine *store_engine(struct store *store);
const struct store_options *store_options_of(const struct store *store);
const uint8_t *store_uuid(const struct store *store);
uint64_t store_n_pages(const struct store *store);
unsigned store_slots_per_page(const struct store *store);

/* Where page images live: engine file index and byte offset. */
unsigned store_page_file(const struct store *store, uint64_t page);
uint64_t store_slot_offset(const struct store *store, uint64_t page, uint32_t slot);
void store_page_layout(const struct store *store, uint64_t page, struct page_image_layout *layout);
void store_page_identity(const struct store *store, uint64_t page, uint64_t version,
                         struct page_identity *identity);
unsigned store_commit_file(const struct store *store);
const char *store_file_path(const struct store *store, unsigned file);
unsigned store_directory_count(const struct store *store);

/* Fills op, file and offset of a request that moves an image from or to a slot. buffer, bytes
 * (page_image_bytes() or page_image_weights_bytes()), on_done and context are the caller's. */
void store_request_page(const struct store *store, struct io_request *request, enum io_op op,
                        uint64_t page, uint32_t slot);

/* Whether an entry can be one of this store's page `page`: its hash, and every field that code
 * behind it goes by; and a whole table (n_pages entries). Commit and recovery ask the same, so that
 * nothing is made durable that the next start would not believe. 0 or ERROR_FAILED. */
int store_check_entry(const struct store *store, const struct page_entry *entry, uint64_t page);
int store_check_table(const struct store *store, const struct page_entry *table);

/* Verifies an image that was read from (page, slot) against its table entry: header, identity,
 * version, gaps, digests of every part, and that they are the entry's. ERROR_FAILED names file,
 * offset and field. */
int store_verify_image(const struct store *store, const struct page_entry *entry,
                       const void *image);

/* -- store_recover.c and store_scan.c: the whole store read, for start-up and commands -- */

/* Recovers: fdatasync of every file, all records, newest valid whose table and slots verify, else
 * its parent if that verifies entirely, else ERROR_FAILED with file, offset and instructions. Fills
 * `out` and `table` (n_pages entries, the caller's memory). fell_back (may be NULL): the sequence
 * that was given up, or 0. */
int store_recover(struct store *store, struct commit_record *out, struct page_entry *table,
                  uint64_t *fell_back);

/* fdatasync of every file: what was read before it may not be durable. */
int store_flush(struct store *store);

/* The newest commit without verifying slots: records and table only. */
int store_newest(struct store *store, struct commit_record *out, struct page_entry *table);

/* Reads every byte of the newest commit (superblocks, records, table, slots). For each damaged
 * place calls on_damage with file, byte offset and a sentence. 0: whole; ERROR_FAILED: text names
 * the first. */
typedef void store_damage(void *context, const char *file, uint64_t offset, const char *text);
int store_verify(struct store *store, struct commit_record *out, struct page_entry *table,
                 store_damage *on_damage, void *context);

/* Streams the f32 master weights (joined from both halves with bfloat16) of the pages of `table` in
 * page order: `elements` values starting at element `first` of `page`, in order, without a gap
 * inside a page; padding included. Nonzero from the visitor stops with that value (it has set the
 * error). */
typedef int store_weights_visitor(void *context, uint64_t page, uint64_t first,
                                  const float *weights, uint64_t elements);
int store_weights_stream(struct store *store, const struct page_entry *table,
                         store_weights_visitor *visitor, void *context);

/* xxh3-128 over the f32 master weights in tensor order (layer, then offset), without padding:
 * independent of page size, codec, dtype of storage and slot. */
int store_weights_hash(struct store *store, const struct page_entry *table,
                       struct page_digest *hash);

#endif
