#include "io_worker/commit.h"

#include "io_worker/engine.h"
#include "io_worker/store.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#define RECORD_MAGIC 0x3144524f43454d4dull /* "MMECORD1" in memory */
#define TABLE_MAGIC  0x31454c4241544d4dull /* "MMTABLE1" in memory */

enum {
    TABLE_HEADER_BYTES = 4096,
    TABLE_CHUNK_BYTES = 1 << 20,
    BUFFER_ALIGNMENT = 4096,
};

struct table_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t entry_bytes;
    uint64_t sequence;
    uint64_t n_pages;
    uint8_t run[RUN_UUID_BYTES];
};

struct commit {
    struct store *store;
    enum commit_phase phase;
    int has_parent;
    uint64_t given_up;           /* sequence of a newer record that does not stand; 0: none */
    struct commit_record newest; /* the newest durable record, if has_parent */
    struct commit_record *record_out, *record_in; /* aligned for direct I/O */
    unsigned char *chunk_out, *chunk_in;          /* TABLE_CHUNK_BYTES each */
    XXH3_state_t *table_hash;
    struct commit_table_source source;
    uint64_t table_done; /* bytes of the table written or compared */

    struct io_request request;                        /* table and record */
    struct io_request flushes[STORE_DIRECTORIES_MAX]; /* one per slots file */
    unsigned n_flushes, flushes_submitted, flushes_done;
    int flush_failed;
    int blocked; /* the engine was full when `request` was ready */

    commit_done *on_done;
    void *context;
};

/* -- entries, tables, records: pure -- */

static uint32_t entry_hash(const struct page_entry *entry)
{
    struct page_entry copy = *entry;
    copy.entry_hash = 0;
    return (uint32_t)XXH3_64bits(&copy, sizeof copy);
}

void page_entry_seal(struct page_entry *entry)
{
    entry->entry_hash = entry_hash(entry);
}

int page_entry_valid(const struct page_entry *entry)
{
    return entry->entry_hash == entry_hash(entry);
}

void page_entry_from_image(struct page_entry *entry, const void *image, uint32_t slot)
{
    struct page_image_header header;
    memcpy(&header, image, sizeof header);
    memset(entry, 0, sizeof *entry);
    entry->page = header.page;
    entry->version = header.version;
    entry->layer = header.layer;
    entry->slot = slot;
    entry->codec = header.codec;
    memcpy(entry->length, header.length, sizeof entry->length);
    memcpy(entry->digest, header.digest, sizeof entry->digest);
    page_entry_seal(entry);
}

uint64_t commit_table_bytes(uint64_t n_pages)
{
    uint64_t bytes = TABLE_HEADER_BYTES + n_pages * sizeof(struct page_entry);
    return (bytes + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
}

uint64_t commit_file_bytes(uint64_t n_pages)
{
    return 2 * commit_table_bytes(n_pages) + (uint64_t)COMMIT_RECORD_RING * COMMIT_RECORD_BYTES;
}

uint64_t commit_record_offset(uint64_t n_pages, uint64_t sequence)
{
    if (mutant(MUTANT_one_record))
        sequence = 0;
    return 2 * commit_table_bytes(n_pages) + sequence % COMMIT_RECORD_RING * COMMIT_RECORD_BYTES;
}

/* Copies the overlap of [offset, offset + bytes) with `data` at [at, at + data_bytes). */
static void fill_overlap(unsigned char *out, uint64_t offset, uint64_t bytes, const void *data,
                         uint64_t at, uint64_t data_bytes)
{
    uint64_t from = offset > at ? offset : at;
    uint64_t to = offset + bytes < at + data_bytes ? offset + bytes : at + data_bytes;
    if (from < to)
        memcpy(out + (from - offset), (const unsigned char *)data + (from - at), to - from);
}

void commit_table_fill(const struct commit_table_source *source, uint64_t offset, void *out,
                       uint64_t bytes)
{
    struct table_header header = {.magic = TABLE_MAGIC,
                                  .layout_version = COMMIT_LAYOUT_VERSION,
                                  .entry_bytes = sizeof(struct page_entry),
                                  .sequence = source->sequence,
                                  .n_pages = source->n_pages};
    memcpy(header.run, source->run, sizeof header.run);
    memset(out, 0, bytes);
    fill_overlap(out, offset, bytes, &header, 0, sizeof header);
    fill_overlap(out, offset, bytes, source->table, TABLE_HEADER_BYTES,
                 source->n_pages * sizeof(struct page_entry));
}

uint64_t commit_table_sequence(const void *header, const uint8_t run[RUN_UUID_BYTES])
{
    struct table_header found;
    memcpy(&found, header, sizeof found);
    return found.magic == TABLE_MAGIC && memcmp(found.run, run, sizeof found.run) == 0
               ? found.sequence
               : UINT64_MAX;
}

static uint64_t record_hash(const struct commit_record *record)
{
    struct commit_record copy = *record;
    copy.record_hash = 0;
    return XXH3_64bits(&copy, sizeof copy);
}

void commit_record_seal(struct commit_record *record)
{
    record->magic = RECORD_MAGIC;
    record->layout_version = COMMIT_LAYOUT_VERSION;
    record->record_hash = record_hash(record);
}

int commit_record_verify(const struct commit_record *record, const uint8_t run[RUN_UUID_BYTES],
                         const uint8_t store[RUN_UUID_BYTES])
{
    if (record->magic != RECORD_MAGIC)
        return error_set(ERROR_FAILED, "commit record: magic: expected %016llx, found %016llx",
                         RECORD_MAGIC, (unsigned long long)record->magic);
    uint64_t hash = record_hash(record);
    if (hash != record->record_hash)
        return error_set(ERROR_FAILED, "commit record: hash: expected %016llx, found %016llx",
                         (unsigned long long)record->record_hash, (unsigned long long)hash);
    if (record->layout_version != COMMIT_LAYOUT_VERSION)
        return error_set(ERROR_FAILED, "commit record: layout version: expected %d, found %u",
                         COMMIT_LAYOUT_VERSION, record->layout_version);
    if (memcmp(record->run, run, RUN_UUID_BYTES) != 0)
        return error_set(ERROR_FAILED, "commit record: of another run");
    if (memcmp(record->store, store, RUN_UUID_BYTES) != 0)
        return error_set(ERROR_FAILED, "commit record: of another store");
    if (record->table_place > 1)
        return error_set(ERROR_FAILED, "commit record: table place: expected 0 or 1, found %u",
                         record->table_place);
    /* readers go by these without looking again */
    if (record->facts.spike_count > SPIKE_WINDOW_STEPS)
        return error_set(ERROR_FAILED, "commit record: spike window: expected at most %d, found %u",
                         SPIKE_WINDOW_STEPS, record->facts.spike_count);
    if (memchr(record->facts.lineage, '\0', sizeof record->facts.lineage) == NULL)
        return error_set(ERROR_FAILED, "commit record: lineage: expected a text, found no end");
    return 0;
}

void page_digest_format(struct page_digest digest, char text[33])
{
    (void)snprintf(text, 33, "%016llx%016llx", (unsigned long long)digest.high,
                   (unsigned long long)digest.low);
}

/* What the state hash takes of an entry: no slot, no entry_hash. */
struct state_of_page {
    uint64_t layer;
    uint64_t page;
    uint64_t version;
    uint64_t codec;
    uint64_t length[PART_COUNT];
    struct page_digest digest[PART_COUNT];
};

static void hash_bytes(XXH3_state_t *state, const void *data, uint64_t bytes)
{
    CHECK(XXH3_128bits_update(state, data, bytes) == XXH_OK);
}

struct page_digest commit_state_hash(const struct commit_facts *facts,
                                     const struct page_entry *table, uint64_t n_pages)
{
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    for (uint64_t i = 0; i < n_pages; i++) {
        const struct page_entry *entry = &table[i];
        struct state_of_page page = {entry->layer, entry->page, entry->version,
                                     entry->codec, {0},         {{0, 0}}};
        memcpy(page.length, entry->length, sizeof page.length);
        memcpy(page.digest, entry->digest, sizeof page.digest);
        hash_bytes(state, &page, sizeof page);
    }
    CHECK(facts->spike_count <= SPIKE_WINDOW_STEPS);
    const uint64_t spikes = facts->spike_count;
    hash_bytes(state, facts->data_position, sizeof facts->data_position);
    hash_bytes(state, &facts->optimizer_step, sizeof facts->optimizer_step);
    hash_bytes(state, &spikes, sizeof spikes);
    hash_bytes(state, facts->spike_loss, spikes * sizeof facts->spike_loss[0]);
    hash_bytes(state, facts->spike_norm, spikes * sizeof facts->spike_norm[0]);
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    (void)XXH3_freeState(state);
    return (struct page_digest){hash.low64, hash.high64};
}

/* -- the state machine -- */

const char *commit_phase_name(enum commit_phase phase)
{
    static const char *const names[] = {"IDLE",         "FLUSHING",    "TABLE_WRITE", "TABLE_READ",
                                        "RECORD_WRITE", "RECORD_READ", "FAILED"};
    return names[phase];
}

enum commit_phase commit_phase_now(const struct commit *commit)
{
    return commit->phase;
}

static void fail(struct commit *commit)
{
    error_wrap("commit of step %llu, phase %s", (unsigned long long)commit->record_out->facts.step,
               commit_phase_name(commit->phase));
    commit->phase = COMMIT_FAILED;
    commit->on_done(commit->context, -(int)error_kind_now(), NULL);
}

static void submit_request(struct commit *commit)
{
    commit->blocked = engine_submit(store_engine(commit->store), &commit->request) == ENGINE_FULL;
}

static uint64_t table_offset(const struct commit *commit)
{
    return commit->record_out->table_place * commit->record_out->table_bytes;
}

static uint64_t chunk_bytes(const struct commit *commit)
{
    uint64_t left = commit->record_out->table_bytes - commit->table_done;
    return left < TABLE_CHUNK_BYTES ? left : TABLE_CHUNK_BYTES;
}

static void on_request_done(struct io_request *request, int result);

static void start_io(struct commit *commit, enum io_op op, void *buffer, uint64_t offset,
                     uint64_t bytes)
{
    commit->request = (struct io_request){.op = op,
                                          .file = store_commit_file(commit->store),
                                          .buffer = buffer,
                                          .offset = offset,
                                          .bytes = bytes,
                                          .on_done = on_request_done,
                                          .context = commit};
    submit_request(commit);
}

static void start_table_chunk(struct commit *commit)
{
    const uint64_t bytes = chunk_bytes(commit);
    const int writing = commit->phase == COMMIT_TABLE_WRITE;
    commit_table_fill(&commit->source, commit->table_done, commit->chunk_out, bytes);
    if (writing)
        hash_bytes(commit->table_hash, commit->chunk_out, bytes);
    start_io(commit, writing ? IO_WRITE : IO_READ, writing ? commit->chunk_out : commit->chunk_in,
             table_offset(commit) + commit->table_done, bytes);
}

static void enter_table_phase(struct commit *commit, enum commit_phase phase)
{
    if (phase == COMMIT_TABLE_READ)
        fault_point(FAULT_io_table_written);
    commit->phase = phase;
    commit->table_done = 0;
    start_table_chunk(commit);
}

static void start_record(struct commit *commit, enum commit_phase phase)
{
    commit->phase = phase;
    const int writing = phase == COMMIT_RECORD_WRITE;
    start_io(commit, writing ? IO_WRITE : IO_READ, writing ? commit->record_out : commit->record_in,
             commit_record_offset(commit->source.n_pages, commit->record_out->sequence),
             COMMIT_RECORD_BYTES);
}

static void enter_record_write(struct commit *commit)
{
    XXH128_hash_t hash = XXH3_128bits_digest(commit->table_hash);
    commit->record_out->table_digest = (struct page_digest){hash.low64, hash.high64};
    commit_record_seal(commit->record_out);
    fault_point(FAULT_io_before_record);
    start_record(commit, COMMIT_RECORD_WRITE);
}

static void finish(struct commit *commit)
{
    commit->newest = *commit->record_out;
    commit->given_up = 0;
    commit->has_parent = 1;
    commit->phase = COMMIT_IDLE;
    commit->on_done(commit->context, 0, &commit->newest);
}

/* What came back must be what went out: a controller that says "written" is not believed. */
static int compare(struct commit *commit, const void *expected, const void *found)
{
    const struct io_request *request = &commit->request;
    if (memcmp(expected, found, request->bytes) == 0 || mutant(MUTANT_no_read_back_of_commit))
        return 0;
    const unsigned char *e = expected, *f = found;
    uint64_t at = 0;
    while (e[at] == f[at])
        at++;
    return error_set(ERROR_FAILED, "%s: offset %llu: read back: expected byte %u, found %u",
                     store_file_path(commit->store, request->file),
                     (unsigned long long)(request->offset + at), e[at], f[at]);
}

static void on_table_chunk_done(struct commit *commit)
{
    const int writing = commit->phase == COMMIT_TABLE_WRITE;
    if (!writing && compare(commit, commit->chunk_out, commit->chunk_in) < 0) {
        fail(commit);
        return;
    }
    commit->table_done += commit->request.bytes;
    if (commit->table_done < commit->record_out->table_bytes)
        start_table_chunk(commit);
    else if (writing)
        enter_table_phase(commit, COMMIT_TABLE_READ);
    else
        enter_record_write(commit);
}

static void on_request_done(struct io_request *request, int result)
{
    struct commit *commit = request->context;
    if (result < 0) {
        (void)engine_request_error(store_engine(commit->store), request);
        fail(commit);
        return;
    }
    switch (commit->phase) {
    case COMMIT_TABLE_WRITE:
    case COMMIT_TABLE_READ:
        on_table_chunk_done(commit);
        break;
    case COMMIT_RECORD_WRITE:
        fault_point(FAULT_io_record_written);
        start_record(commit, COMMIT_RECORD_READ);
        break;
    case COMMIT_RECORD_READ:
        if (compare(commit, commit->record_out, commit->record_in) < 0)
            fail(commit);
        else
            finish(commit);
        break;
    case COMMIT_IDLE:
    case COMMIT_FLUSHING:
    case COMMIT_FAILED:
        CHECK(!"a table or record request in this phase");
    }
}

static void on_flush_done(struct io_request *request, int result)
{
    struct commit *commit = request->context;
    commit->flushes_done++;
    if (result < 0 && !mutant(MUTANT_flush_error_ignored))
        commit->flush_failed = 1;
    if (commit->flushes_done < commit->n_flushes)
        return;
    if (commit->flush_failed) {
        unsigned i = 0;
        while (commit->flushes[i].result == 0)
            i++;
        (void)engine_request_error(store_engine(commit->store), &commit->flushes[i]);
        (void)error_hint("the data of this step may be lost; it is abandoned, not flushed again");
        if (!mutant(MUTANT_failed_flush_taken_over))
            (void)error_as(
                ERROR_DAMAGED); /* a successor must not take the step over and flush it */
        fail(commit);
        return;
    }
    fault_point(FAULT_io_after_flush);
    fault_point(FAULT_io_before_table);
    enter_table_phase(commit, COMMIT_TABLE_WRITE);
}

static unsigned submit_flushes(struct commit *commit)
{
    unsigned submitted = 0;
    while (commit->flushes_submitted < commit->n_flushes) {
        struct io_request *flush = &commit->flushes[commit->flushes_submitted];
        *flush = (struct io_request){.op = IO_FLUSH,
                                     .file = commit->flushes_submitted,
                                     .on_done = on_flush_done,
                                     .context = commit};
        if (engine_submit(store_engine(commit->store), flush) == ENGINE_FULL)
            break;
        commit->flushes_submitted++;
        submitted++;
    }
    return submitted;
}

unsigned commit_do_work(struct commit *commit)
{
    if (commit->phase == COMMIT_FLUSHING)
        return submit_flushes(commit);
    if (!commit->blocked)
        return 0;
    submit_request(commit);
    return !commit->blocked;
}

/* -- opening, beginning -- */

int commit_open(struct commit **commit, struct store *store)
{
    struct commit *c = calloc(1, sizeof *c);
    if (c == NULL)
        return error_set(ERROR_FAILED, "commit: out of memory");
    c->store = store;
    c->table_hash = XXH3_createState();
    if (c->table_hash == NULL ||
        posix_memalign((void **)&c->record_out, BUFFER_ALIGNMENT, COMMIT_RECORD_BYTES) != 0 ||
        posix_memalign((void **)&c->record_in, BUFFER_ALIGNMENT, COMMIT_RECORD_BYTES) != 0 ||
        posix_memalign((void **)&c->chunk_out, BUFFER_ALIGNMENT, TABLE_CHUNK_BYTES) != 0 ||
        posix_memalign((void **)&c->chunk_in, BUFFER_ALIGNMENT, TABLE_CHUNK_BYTES) != 0) {
        commit_close(c);
        return error_set(ERROR_FAILED, "commit: out of memory");
    }
    *commit = c;
    return 0;
}

void commit_close(struct commit *commit)
{
    if (commit == NULL)
        return;
    CHECK(commit->phase == COMMIT_IDLE || commit->phase == COMMIT_FAILED);
    (void)XXH3_freeState(commit->table_hash);
    free(commit->record_out);
    free(commit->record_in);
    free(commit->chunk_out);
    free(commit->chunk_in);
    free(commit);
}

void commit_resume(struct commit *commit, const struct commit_record *parent)
{
    CHECK(commit->phase == COMMIT_IDLE);
    commit->newest = *parent;
    commit->has_parent = 1;
    commit->given_up = 0;
}

void commit_give_up(struct commit *commit, uint64_t sequence)
{
    CHECK(commit->has_parent && sequence > commit->newest.sequence);
    commit->given_up = sequence;
}

static void fill_record(struct commit *commit, const struct commit_facts *facts)
{
    struct commit_record *record = commit->record_out;
    memset(record, 0, sizeof *record);
    memcpy(record->run, store_options_of(commit->store)->run, sizeof record->run);
    memcpy(record->store, store_uuid(commit->store), sizeof record->store);
    if (commit->has_parent) {
        record->sequence = (commit->given_up ? commit->given_up : commit->newest.sequence) + 1;
        record->parent = page_image_digest(&commit->newest, sizeof commit->newest);
        record->table_place = mutant(MUTANT_table_in_place) ? 0 : 1 - commit->newest.table_place;
    }
    record->table_bytes = commit_table_bytes(store_n_pages(commit->store));
    record->facts = *facts;
    record->state_hash =
        commit_state_hash(facts, commit->source.table, store_n_pages(commit->store));
}

int commit_begin(struct commit *commit, const struct commit_facts *facts,
                 const struct page_entry *table, commit_done *on_done, void *context)
{
    if (commit->phase == COMMIT_FAILED)
        return error_set(ERROR_FAILED, "commit: an earlier commit failed; recover first");
    CHECK(commit->phase == COMMIT_IDLE);
    if (store_check_table(commit->store, table) < 0)
        return error_wrap("page table");
    commit->source.n_pages = store_n_pages(commit->store);
    commit->source.table = table;
    memcpy(commit->source.run, store_options_of(commit->store)->run, RUN_UUID_BYTES);
    fill_record(commit, facts);
    commit->source.sequence = commit->record_out->sequence;
    CHECK(XXH3_128bits_reset(commit->table_hash) == XXH_OK);
    commit->on_done = on_done;
    commit->context = context;
    commit->n_flushes =
        mutant(MUTANT_flush_one_directory) ? 1 : store_directory_count(commit->store);
    commit->flushes_submitted = commit->flushes_done = 0;
    commit->flush_failed = 0;
    commit->blocked = 0;
    commit->phase = COMMIT_FLUSHING;
    fault_point(FAULT_io_before_flush);
    if (mutant(MUTANT_no_flush))
        enter_table_phase(commit, COMMIT_TABLE_WRITE);
    else
        (void)submit_flushes(commit);
    return 0;
}

struct run_result {
    int done, result;
    struct commit_record *out;
};

static void on_run_done(void *context, int result, const struct commit_record *record)
{
    struct run_result *run = context;
    run->done = 1;
    run->result = result;
    if (record && run->out)
        *run->out = *record;
}

int commit_run(struct commit *commit, const struct commit_facts *facts,
               const struct page_entry *table, struct commit_record *out)
{
    struct run_result run = {.out = out};
    if (commit_begin(commit, facts, table, on_run_done, &run) < 0)
        return -(int)error_kind_now();
    while (!run.done) {
        (void)commit_do_work(commit);
        (void)engine_wait(store_engine(commit->store), 100);
    }
    return run.result;
}
