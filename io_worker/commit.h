/*
 * Making a step durable.
 *
 *     slot writes of the step all complete (the caller's part)
 *        |  fdatasync of every slots file       an error is never retried: the step is abandoned
 *        |  digest table -> the table place that the newest record does not name   (O_DSYNC)
 *        |  table read back and compared
 *        |  record -> ring[sequence % 8]        (O_DSYNC; the one toggle write that is the commit)
 *        |  record read back and compared
 *        v  on_done: announce COMMITTED
 *
 *     commit file:  | table place 0 | table place 1 | record 0 | record 1 | ... | record 7 |
 *
 * The table names, for every page, version, slot, codec, lengths and digests; the record names the
 * table by place and digest. So a record proves, by itself, each byte of the step: a torn, stale,
 * misdirected or lost write anywhere shows as a mismatch. Only two tables exist, so only the newest
 * two records can be recovered from; the ring of eight keeps a torn record write away from its
 * parent.
 *
 * After falling back from record n to n-1 the state of n-1 is committed once more before anything
 * else, with a sequence above n's and in n's table place. So n is given up for good: the redo of
 * its step writes the same bytes into the same slots, and a record n that fits again would
 * otherwise come back after the next power cut, when others have already gone on from n-1.
 */
#ifndef IO_WORKER_COMMIT_H
#define IO_WORKER_COMMIT_H

#include "ipc/page_image.h"
#include "ipc/spike_window.h"

#include <stdint.h>

struct store;

enum {
    COMMIT_RECORD_BYTES = 4096,
    COMMIT_RECORD_RING = 8,
    COMMIT_LINEAGE_BYTES = 512,
    COMMIT_LAYOUT_VERSION = 1,
};

/* One page of one step. Durable in the digest table and kept in shared memory by io_worker, which
 * alone writes it; entry_hash is set last, so that a reader after io's death can tell a whole
 * entry. */
struct page_entry {
    uint64_t page;
    uint64_t version;
    uint32_t layer;
    uint32_t slot;
    uint32_t codec; /* enum page_codec */
    uint32_t entry_hash;
    uint64_t length[PART_COUNT];
    struct page_digest digest[PART_COUNT];
};
_Static_assert(sizeof(struct page_entry) == 128, "two cache lines, no hidden padding");

/* Copies identity, codec, lengths and digests out of a sealed image's header and sets entry_hash.
 */
void page_entry_from_image(struct page_entry *entry, const void *image, uint32_t slot);
void page_entry_seal(struct page_entry *entry);
/* 1 if entry_hash matches. */
int page_entry_valid(const struct page_entry *entry);

/* What the launcher and the data reader know of a step; the rest of the record is commit.c's. */
struct commit_facts {
    uint64_t step;
    uint64_t optimizer_step; /* AdamW's t: skipped steps do not advance it */
    uint64_t seed;
    uint64_t data_position[4]; /* next sample; data_fingerprint() of what it counts in; 0 */
    uint64_t tokens;           /* labelled tokens of the step */
    double loss;
    double norm; /* before clipping */
    double learning_rate;
    uint32_t skipped;     /* 1: the norm forbade the update */
    uint32_t spike_count; /* valid entries of the window, oldest first */
    double spike_loss[SPIKE_WINDOW_STEPS];
    double spike_norm[SPIKE_WINDOW_STEPS];
    struct page_digest config;          /* of the configuration keys that determine bits */
    char lineage[COMMIT_LINEAGE_BYTES]; /* what bit-identity depends on; NUL-terminated */
};

struct commit_record {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t table_place; /* 0 or 1 */
    uint8_t run[RUN_UUID_BYTES];
    uint8_t store[RUN_UUID_BYTES];
    uint64_t sequence;         /* 0: the import; then one more with each commit */
    struct page_digest parent; /* of the parent record's 4096 bytes; zero for sequence 0 */
    uint64_t table_bytes;
    struct page_digest table_digest;
    struct page_digest state_hash;
    struct commit_facts facts;
    uint8_t unused[2840];
    uint64_t record_hash; /* xxh3-64 of the 4096 bytes, this field taken as zero */
};
_Static_assert(sizeof(struct commit_record) == COMMIT_RECORD_BYTES, "one sector of 4 KiB");

enum commit_phase {
    COMMIT_IDLE,         /* nothing in progress; commit_begin() leads to FLUSHING */
    COMMIT_FLUSHING,     /* fdatasync of every slots file is in flight; then TABLE_WRITE */
    COMMIT_TABLE_WRITE,  /* the table streams into the alternate place; then TABLE_READ */
    COMMIT_TABLE_READ,   /* it is read back and compared; then RECORD_WRITE */
    COMMIT_RECORD_WRITE, /* the record is being written; then RECORD_READ */
    COMMIT_RECORD_READ,  /* it is read back and compared; then IDLE: the step is durable */
    COMMIT_FAILED,       /* an error; stays: the process must end and the run recover */
};

struct commit;

/* result: 0 with the record that is now durable, or -ERROR_FAILED with error_text() set and NULL.
 */
typedef void commit_done(void *context, int result, const struct commit_record *record);

/* Allocates the streaming buffers. `store` stays the caller's and is READY or IMPORTING. */
int commit_open(struct commit **commit, struct store *store);
void commit_close(struct commit *commit);

/* The newest durable record, from store_recover(). Without it the next commit is sequence 0. */
void commit_resume(struct commit *commit, const struct commit_record *parent);
/* After commit_resume(): the record of that sequence was given up; the next commit goes beyond. */
void commit_give_up(struct commit *commit, uint64_t sequence);

/* Begins the commit of `facts` and `table` (n_pages entries in page order, unchanged until done).
 * All slot writes that the table names are complete, and no commit is in progress (CHECK). Goes on
 * from engine_poll(), and from commit_do_work() after the engine was full. 0, or ERROR_FAILED if an
 * entry is damaged or an earlier commit failed. */
int commit_begin(struct commit *commit, const struct commit_facts *facts,
                 const struct page_entry *table, commit_done *on_done, void *context);

/* Submits what a full engine refused. Part of the main loop; the number of requests submitted. */
unsigned commit_do_work(struct commit *commit);

enum commit_phase commit_phase_now(const struct commit *commit);
const char *commit_phase_name(enum commit_phase phase);

/* For start-up (import): begins, waits, returns 0 or ERROR_FAILED. `out` may be NULL. */
int commit_run(struct commit *commit, const struct commit_facts *facts,
               const struct page_entry *table, struct commit_record *out);

/* xxh3-128 over, in page order, {layer, page, version, codec, length and digest of each part}, then
 * the data position, t, and the spike window (count, losses, norms). No slot, path, run or padding.
 */
struct page_digest commit_state_hash(const struct commit_facts *facts,
                                     const struct page_entry *table, uint64_t n_pages);

/* "0123...": 32 hex digits and NUL. */
void page_digest_format(struct page_digest digest, char text[33]);

/* Bytes of one table place and of the commit file. Multiples of 4096. */
uint64_t commit_table_bytes(uint64_t n_pages);
uint64_t commit_file_bytes(uint64_t n_pages);
uint64_t commit_record_offset(uint64_t n_pages, uint64_t sequence);

/* Fills the bytes [offset, offset + bytes) of the table file of `sequence` from `table`. Multiples
 * of sizeof(struct page_entry) suffice; used by writer, read-back and tests. */
struct commit_table_source {
    uint8_t run[RUN_UUID_BYTES];
    uint64_t sequence;
    uint64_t n_pages;
    const struct page_entry *table;
};
void commit_table_fill(const struct commit_table_source *source, uint64_t offset, void *out,
                       uint64_t bytes);

/* The sequence that a table header of this run names, UINT64_MAX if it is none. */
uint64_t commit_table_sequence(const void *header, const uint8_t run[RUN_UUID_BYTES]);

/* Seals and checks a record's own hash, magic, layout version, uuids, and what readers take for
 * granted (spike count, lineage). verify: 0 or ERROR_FAILED. */
void commit_record_seal(struct commit_record *record);
int commit_record_verify(const struct commit_record *record, const uint8_t run[RUN_UUID_BYTES],
                         const uint8_t store[RUN_UUID_BYTES]);

#endif
