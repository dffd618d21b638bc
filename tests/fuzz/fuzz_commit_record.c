/*
 * A commit record and a page table's entries as they lie in memory or on disk: the checks, and what
 * is computed from what they accept (io_worker/commit.h).
 *
 *     | flags | n entries | changes ... |
 */
#include <stdbool.h>
#include <xxhash.h>

#include "io_worker/commit.h"
#include "tests/fuzz/fuzz.h"

enum { HEAD_BYTES = 2, ENTRIES_MAX = 40, TABLE_BYTES_MAX = 4096 * 3 };

enum flag { FLAG_RECORD_HASH = 1, FLAG_ENTRY_HASHES = 2 };

enum change { CHANGE_RECORD, CHANGE_ENTRY, CHANGE_XOR_RECORD, CHANGE_COUNT };

static const uint8_t run[RUN_UUID_BYTES] = {1, 2, 3}, store[RUN_UUID_BYTES] = {4, 5, 6};

static struct commit_record good_record(void)
{
    struct commit_record record;
    memset(&record, 0, sizeof record);
    memcpy(record.run, run, sizeof run);
    memcpy(record.store, store, sizeof store);
    record.sequence = 9;
    record.table_place = 1;
    record.table_bytes = commit_table_bytes(3);
    record.facts = (struct commit_facts){.step = 9, .optimizer_step = 8, .spike_count = 2};
    memcpy(record.facts.lineage, "cpu", 4);
    commit_record_seal(&record);
    return record;
}

static void good_entries(struct page_entry *entries, size_t n)
{
    memset(entries, 0, n * sizeof *entries);
    for (size_t i = 0; i < n; i++) {
        entries[i].page = i;
        entries[i].version = 9;
        entries[i].slot = i % 3;
        entries[i].codec = PAGE_RAW;
        entries[i].length[PART_WEIGHTS] = 16384;
        page_entry_seal(&entries[i]);
    }
}

static void change(struct fuzz_input *in, struct commit_record *record, struct page_entry *entries,
                   size_t n)
{
    struct fuzz_op op;
    for (int i = 0; i < FUZZ_OPS_MAX && fuzz_next_op(in, &op); i++)
        switch (op.what % CHANGE_COUNT) {
        case CHANGE_RECORD:
            fuzz_op_write(&op, record, sizeof *record, op.at % sizeof *record);
            break;
        case CHANGE_ENTRY:
            fuzz_op_write(&op, entries, n * sizeof *entries, op.at % (n * sizeof *entries));
            break;
        default:
            ((uint8_t *)record)[op.at % sizeof *record] ^= op.value[0];
        }
}

static uint64_t hash_without(const void *bytes, size_t n, size_t at, size_t field_bytes)
{
    uint8_t copy[COMMIT_RECORD_BYTES];
    memcpy(copy, bytes, n);
    memset(copy + at, 0, field_bytes);
    return XXH3_64bits(copy, n);
}

/* An entry holds if and only if its hash, computed here once more, is right. */
static void check_entries(const struct page_entry *entries, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const size_t at = offsetof(struct page_entry, entry_hash);
        uint32_t hash = (uint32_t)hash_without(&entries[i], sizeof entries[i], at, 4);
        REQUIRE(page_entry_valid(&entries[i]) == (hash == entries[i].entry_hash));
        struct page_entry again = entries[i];
        page_entry_seal(&again);
        REQUIRE(page_entry_valid(&again));
        if (page_entry_valid(&entries[i]))
            REQUIRE(memcmp(&again, &entries[i], sizeof again) == 0);
    }
}

/* A table written in pieces is the table written at once, and nothing is written beside it. */
static void check_fill(const struct page_entry *entries, size_t n, size_t piece)
{
    static uint8_t whole[TABLE_BYTES_MAX], pieces[TABLE_BYTES_MAX + 128];
    struct commit_table_source source = {.sequence = 9, .n_pages = n, .table = entries};
    uint64_t bytes = commit_table_bytes(n);
    REQUIRE(bytes <= sizeof whole && bytes % 4096 == 0);
    REQUIRE(commit_file_bytes(n) == 2 * bytes + (uint64_t)COMMIT_RECORD_RING * COMMIT_RECORD_BYTES);
    memset(pieces, 0x5a, sizeof pieces);
    commit_table_fill(&source, 0, whole, bytes);
    for (uint64_t at = 0; at < bytes; at += piece)
        commit_table_fill(&source, at, pieces + at, bytes - at < piece ? bytes - at : piece);
    REQUIRE(memcmp(whole, pieces, bytes) == 0);
    for (uint64_t at = bytes; at < bytes + 128; at++)
        REQUIRE(pieces[at] == 0x5a);
    REQUIRE(memcmp(whole + 4096, entries, n * sizeof *entries) == 0);
}

static void accepted(const struct commit_record *record, const struct page_entry *entries, size_t n)
{
    struct commit_record again = *record;
    commit_record_seal(&again);
    REQUIRE(memcmp(&again, record, sizeof again) == 0);
    REQUIRE(record->table_place <= 1);
    REQUIRE(memcmp(record->run, run, sizeof run) == 0);
    REQUIRE(memcmp(record->store, store, sizeof store) == 0);
    const struct commit_facts *facts = &record->facts;
    REQUIRE(facts->spike_count <= SPIKE_WINDOW_STEPS);
    REQUIRE(strnlen(facts->lineage, sizeof facts->lineage) < sizeof facts->lineage);
    struct page_digest hash = commit_state_hash(facts, entries, n);
    struct page_digest once_more = commit_state_hash(facts, entries, n);
    REQUIRE(page_digest_equal(hash, once_more));
    char text[33];
    page_digest_format(hash, text);
    REQUIRE(strlen(text) == 32);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct commit_record record = good_record();
    struct page_entry *entries;
    uint8_t flags = fuzz_u8(&in);
    size_t n = 1 + fuzz_u8(&in) % ENTRIES_MAX;
    entries = malloc(n * sizeof *entries); /* exactly as many: a step outside is seen */
    REQUIRE(entries != NULL);
    good_entries(entries, n);
    REQUIRE(commit_record_verify(&record, run, store) == 0);
    change(&in, &record, entries, n);
    if (flags & FLAG_ENTRY_HASHES)
        for (size_t i = 0; i < n; i++)
            page_entry_seal(&entries[i]);
    check_entries(entries, n);
    check_fill(entries, n, 128 * (1 + (size_t)flags / 4));
    const size_t at = offsetof(struct commit_record, record_hash);
    if (flags & FLAG_RECORD_HASH)
        record.record_hash = hash_without(&record, sizeof record, at, 8);
    bool hash_holds = record.record_hash == hash_without(&record, sizeof record, at, 8);
    error_clear();
    int rc = commit_record_verify(&record, run, store);
    REQUIRE(rc < 0 || hash_holds);
    if (rc < 0)
        fuzz_refused(rc, FUZZ_FAILED);
    else
        accepted(&record, entries, n);
    free(entries);
    return 0;
}

#define RECORD(field, bytes)                                                                       \
    {                                                                                              \
        CHANGE_RECORD, offsetof(struct commit_record, field), bytes                                \
    }
#define ENTRY(field, bytes)                                                                        \
    {                                                                                              \
        CHANGE_ENTRY, offsetof(struct page_entry, field), bytes                                    \
    }

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const struct fuzz_place places[] = {
        RECORD(magic, 8),
        RECORD(layout_version, 4),
        RECORD(table_place, 4),
        RECORD(run, 8),
        RECORD(store, 8),
        RECORD(sequence, 8),
        RECORD(parent, 8),
        RECORD(table_bytes, 8),
        RECORD(table_digest, 8),
        RECORD(state_hash, 8),
        RECORD(facts.step, 8),
        RECORD(facts.data_position, 8),
        RECORD(facts.loss, 8),
        RECORD(facts.skipped, 4),
        RECORD(facts.spike_count, 4),
        RECORD(facts.spike_loss, 8),
        RECORD(facts.lineage, 8),
        RECORD(facts.lineage[COMMIT_LINEAGE_BYTES - 8], 8),
        RECORD(unused, 8),
        ENTRY(page, 8),
        ENTRY(version, 8),
        ENTRY(layer, 4),
        ENTRY(slot, 4),
        ENTRY(codec, 4),
        ENTRY(entry_hash, 4),
        ENTRY(length, 8),
        ENTRY(digest, 8),
        {CHANGE_XOR_RECORD, 100, 1},
    };
    uint64_t random = seed;
    size = fuzz_mutate_ops(data, size, max_size, HEAD_BYTES, &random, places,
                           sizeof places / sizeof places[0]);
    if (size >= 1 && fuzz_below(&random, 4) != 0)
        data[0] |= FLAG_RECORD_HASH;
    return size;
}
