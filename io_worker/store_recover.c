/* Which commit counts: the ring of records, the newest whose table and slots verify, or its parent.
 */
#include "io_worker/store_internal.h"

#include "procs/check.h"
#include "procs/error.h"
#include "procs/mutant.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int store_is_zero(const void *data, uint64_t bytes)
{
    const unsigned char *byte = data;
    return byte[0] == 0 && memcmp(byte, byte + 1, bytes - 1) == 0;
}

static int read_records(struct store *store, unsigned first, unsigned n, struct commit_record *read)
{
    struct io_request request = {.op = IO_READ,
                                 .file = store_commit_file(store),
                                 .buffer = read + first,
                                 .offset = commit_record_offset(store_n_pages(store), 0) +
                                           (uint64_t)first * COMMIT_RECORD_BYTES,
                                 .bytes = (uint64_t)n * COMMIT_RECORD_BYTES};
    return engine_run(store_engine(store), &request) < 0 ? request.result : 0;
}

/* Where not all of the ring can be read, record by record: a sector of an old one must not hide the
 * newest. -ERROR_FAILED if none can. */
static int read_what_can_be_read(struct store *store, struct store_ring *into,
                                 struct commit_record *read)
{
    unsigned n_unreadable = 0;
    int failure = read_records(store, 0, COMMIT_RECORD_RING, read);
    for (unsigned i = 0; i < COMMIT_RECORD_RING; i++) {
        into->unreadable[i] = failure < 0 ? read_records(store, i, 1, read) : 0;
        n_unreadable += into->unreadable[i] < 0;
        if (into->unreadable[i] < 0)
            memset(&read[i], 0, sizeof read[i]);
    }
    return n_unreadable == COMMIT_RECORD_RING ? -ERROR_FAILED : 0;
}

/* One read of the ring into `into`; records that were valid before stay. How many are damaged:
 * neither valid nor empty; or negative. */
static int read_ring(struct store *store, struct store_ring *into, struct commit_record *read)
{
    int damaged = 0;
    if (read_what_can_be_read(store, into, read) < 0)
        return -ERROR_FAILED;
    for (unsigned i = 0; i < COMMIT_RECORD_RING; i++) {
        if (into->valid[i])
            continue;
        int rc = commit_record_verify(&read[i], store_options_of(store)->run, store_uuid(store));
        if (rc == 0 && read[i].sequence % COMMIT_RECORD_RING != i && !mutant(MUTANT_one_record))
            rc = error_set(ERROR_FAILED, "commit record: sequence %llu in place %u of the ring",
                           (unsigned long long)read[i].sequence, i);
        into->valid[i] = rc == 0;
        into->records[i] = read[i];
        damaged += rc < 0 && (into->unreadable[i] || !store_is_zero(&read[i], sizeof read[i]));
    }
    return damaged;
}

static void tell_damaged_records(const struct store *store, const struct store_ring *ring,
                                 struct store_damage_sink *sink)
{
    for (unsigned i = 0; i < COMMIT_RECORD_RING; i++) {
        const struct commit_record *record = &ring->records[i];
        if (ring->valid[i] || (!ring->unreadable[i] && store_is_zero(record, sizeof *record)))
            continue;
        if (ring->unreadable[i])
            error_set(ERROR_FAILED, "commit record: cannot read: %s",
                      strerror(-ring->unreadable[i]));
        else if (commit_record_verify(record, store_options_of(store)->run, store_uuid(store)) == 0)
            error_set(ERROR_FAILED, "commit record: sequence %llu in place %u of the ring",
                      (unsigned long long)record->sequence, i);
        store_damage_tell(sink, store_file_path(store, store_commit_file(store)),
                          commit_record_offset(store_n_pages(store), i));
    }
}

/* Reads the whole ring into memory that the caller frees. A read that fails, or shows a damaged
 * record, is done again before it counts: a bit flipped on the way must not cost a commit.
 * Damaged records go to `sink`. */
int store_ring_load(struct store *store, struct store_ring **ring, struct store_damage_sink *sink)
{
    struct commit_record *read = NULL;
    *ring = calloc(1, sizeof **ring);
    if (*ring == NULL ||
        posix_memalign((void **)&read, SECTOR_BYTES, sizeof(*ring)->records) != 0) {
        free(*ring);
        return error_set(ERROR_FAILED, "store: out of memory");
    }
    int damaged = read_ring(store, *ring, read);
    for (int reads = 1; reads < RECOVERY_READS && damaged != 0; reads++)
        damaged = read_ring(store, *ring, read);
    free(read);
    if (damaged < 0) {
        free(*ring);
        return -ERROR_FAILED;
    }
    tell_damaged_records(store, *ring, sink);
    return 0;
}

const struct commit_record *store_ring_newest(const struct store_ring *ring)
{
    const struct commit_record *newest = NULL;
    for (unsigned i = 0; i < COMMIT_RECORD_RING; i++)
        if (ring->valid[i] && (newest == NULL || ring->records[i].sequence > newest->sequence))
            newest = &ring->records[i];
    return newest;
}

/* The record that `record` follows, if it is still in the ring: the one before it, or, where that
 * was given up, the one before that. */
const struct commit_record *store_ring_parent(const struct store_ring *ring,
                                              const struct commit_record *record)
{
    for (unsigned i = 0; record->sequence > 0 && i < COMMIT_RECORD_RING; i++) {
        const struct commit_record *parent = &ring->records[i];
        if (ring->valid[i] && parent->sequence < record->sequence &&
            page_digest_equal(page_image_digest(parent, sizeof *parent), record->parent))
            return parent;
    }
    return NULL;
}

static int no_record(const struct store *store)
{
    error_set(
        ERROR_FAILED, "%s: offset %llu: expected a valid commit record, found none in %d places",
        store_file_path(store, store_commit_file(store)),
        (unsigned long long)commit_record_offset(store_n_pages(store), 0), COMMIT_RECORD_RING);
    return error_hint("nothing was changed. Restore the file from a copy, or free the run with "
                      "`mtlaunch clean` and start anew");
}

enum page_checks { CHECK_TABLE_ONLY, CHECK_TABLE_AND_SLOTS };

/* Does `record` stand? Fills `table`. 0 yes; else error_text() says where not. */
static int record_stands(struct store *store, const struct commit_record *record,
                         struct page_entry *table, enum page_checks checks)
{
    int rc = store_table_load(store, record, table);
    for (int reads = 1; reads < RECOVERY_READS && rc == -ERROR_FAILED; reads++)
        if (!mutant(MUTANT_no_second_read))
            rc = store_table_load(store, record, table);
    if (rc == -ERROR_STOPPED)
        return rc;
    if (rc < 0)
        return error_wrap("%s: offset %llu", store_file_path(store, store_commit_file(store)),
                          (unsigned long long)store_table_offset(store, record));
    if (checks == CHECK_TABLE_ONLY || mutant(MUTANT_no_slot_check))
        return 0;
    struct store_damage_sink sink = {0};
    rc = store_pages_verify(store, table, NULL, &sink);
    if (rc == 0 && sink.count > 0)
        rc = error_set(ERROR_FAILED, "%s", sink.first);
    return rc;
}

static int newest_that_stands(struct store *store, const struct store_ring *ring,
                              struct commit_record *out, struct page_entry *table,
                              enum page_checks checks)
{
    const struct commit_record *newest = store_ring_newest(ring);
    if (newest == NULL)
        return no_record(store);
    *out = *newest;
    int rc = record_stands(store, newest, table, checks);
    if (rc == 0 || rc == -ERROR_STOPPED)
        return rc;
    char why[1024];
    (void)snprintf(why, sizeof why, "%.1000s", error_text());
    const struct commit_record *parent = store_ring_parent(ring, newest);
    if (parent == NULL) {
        error_set(ERROR_FAILED, "commit of step %llu is damaged: %s; its predecessor is not there",
                  (unsigned long long)newest->facts.step, why);
    } else {
        *out = *parent;
        rc = record_stands(store, parent, table, checks);
        if (rc == 0 || rc == -ERROR_STOPPED)
            return rc;
        error_wrap("commit of step %llu is damaged: %s; and the one before, of step %llu",
                   (unsigned long long)newest->facts.step, why,
                   (unsigned long long)parent->facts.step);
    }
    return error_hint(
        "nothing was changed or repaired. Check the drive (SMART, dmesg), restore the "
        "store from a copy, or free the run with `mtlaunch clean` and start from the "
        "newest export");
}

int store_flush(struct store *store)
{
    for (unsigned file = 0; file <= store_directory_count(store); file++) {
        struct io_request flush = {.op = IO_FLUSH, .file = file};
        if (engine_run(store_engine(store), &flush) < 0)
            return -ERROR_FAILED;
        store_file_forget_cached(
            file < store_directory_count(store) ? &store->directories[file].slots : &store->commit);
    }
    for (unsigned d = 0; d < store_directory_count(store); d++) {
        const struct store_file *file = &store->directories[d].superblock;
        if (fdatasync(file->fd) < 0)
            return error_set(ERROR_FAILED, "%s: fdatasync: %s", file->path, strerror(errno));
    }
    return 0;
}

static int find_commit(struct store *store, struct commit_record *out, struct page_entry *table,
                       enum page_checks checks, uint64_t *fell_back)
{
    struct store_damage_sink ignored = {0};
    struct store_ring *ring;
    if (store_ring_load(store, &ring, &ignored) < 0)
        return -ERROR_FAILED;
    int rc = newest_that_stands(store, ring, out, table, checks);
    if (rc == 0 && fell_back) {
        uint64_t newest = store_ring_newest(ring)->sequence;
        /* what cannot be read where the next one would stand may be the next one */
        newest += ring->unreadable[(newest + 1) % COMMIT_RECORD_RING] != 0;
        *fell_back = newest != out->sequence ? newest : 0;
    }
    free(ring);
    return rc;
}

int store_recover(struct store *store, struct commit_record *out, struct page_entry *table,
                  uint64_t *fell_back)
{
    if (!mutant(MUTANT_no_flush_at_recovery) && store_flush(store) < 0)
        return -ERROR_FAILED;
    return find_commit(store, out, table, CHECK_TABLE_AND_SLOTS, fell_back);
}

int store_newest(struct store *store, struct commit_record *out, struct page_entry *table)
{
    return find_commit(store, out, table, CHECK_TABLE_ONLY, NULL);
}

int store_superblocks_verify(struct store *store, struct store_damage_sink *sink)
{
    for (unsigned d = 0; d < store_directory_count(store); d++) {
        const struct store_file *file = &store->directories[d].superblock;
        struct superblock newest;
        unsigned valid;
        if (store_superblock_load(file, &newest, &valid) < 0)
            return -ERROR_FAILED;
        for (unsigned i = 0; i < SUPERBLOCK_COPIES; i++)
            if ((valid >> i & 1) == 0) {
                char byte;
                if (pread(file->fd, &byte, 1, (off_t)i * SECTOR_BYTES) < 0)
                    error_set(ERROR_FAILED, "superblock, copy %u: cannot read: %s", i,
                              strerror(errno));
                else
                    error_set(ERROR_FAILED, "superblock, copy %u: hash does not match", i);
                store_damage_tell(sink, file->path, (uint64_t)i * SECTOR_BYTES);
            }
    }
    return 0;
}

static int verify_newest(struct store *store, const struct store_ring *ring,
                         struct commit_record *out, struct page_entry *table,
                         struct store_damage_sink *sink)
{
    const struct commit_record *newest = store_ring_newest(ring);
    if (newest == NULL)
        return no_record(store);
    *out = *newest;
    int rc = store_table_load(store, newest, table);
    if (rc == -ERROR_STOPPED)
        return rc;
    if (rc < 0) {
        store_damage_tell(sink, store_file_path(store, store_commit_file(store)),
                          store_table_offset(store, newest));
        return 0;
    }
    return store_pages_verify(store, table, NULL, sink);
}

static void drop_damage(void *context, const char *file, uint64_t offset, const char *text)
{
    (void)context; /* the caller wants only the first, which the sink keeps */
    (void)file;
    (void)offset;
    (void)text;
}

int store_verify(struct store *store, struct commit_record *out, struct page_entry *table,
                 store_damage *on_damage, void *context)
{
    struct store_damage_sink sink = {.on_damage = on_damage ? on_damage : drop_damage,
                                     .context = context};
    struct store_ring *ring;
    if (store_flush(store) < 0 || store_superblocks_verify(store, &sink) < 0 ||
        store_ring_load(store, &ring, &sink) < 0)
        return -ERROR_FAILED;
    int rc = verify_newest(store, ring, out, table, &sink);
    free(ring);
    if (rc < 0 && sink.count == 0)
        return rc;
    if (sink.count == 0)
        return 0;
    return error_set(ERROR_FAILED, "%s%s", sink.first, sink.count > 1 ? " (and more)" : "");
}
