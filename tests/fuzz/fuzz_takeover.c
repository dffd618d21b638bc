/*
 * Taking over the page tables that a dead io_worker left in shared memory
 * (io_worker/page_tables.h).
 *
 *     | change of roles | where it was torn | flags | changes ... |
 *
 * The memory is that of a change of roles torn at any byte: without further damage the successor
 * finds the roles of before or of after it. Damaged memory is refused, or what counts of it is
 * genuine. Where hashes were made right again (the flags), what is accepted still fits together.
 */
#include "io_worker/page_tables.h"
#include "tests/fuzz/fuzz.h"

#include <xxhash.h>

enum { PAGES = 5, SLOTS = 3, CHANGES = 14, HEAD_BYTES = 6 };

enum flag { FLAG_STATES = 1, FLAG_ENTRIES = 2, FLAG_STATE_HASH = 4 };

enum change { CHANGE_STATE, CHANGE_ENTRY, CHANGE_ANY, CHANGE_COUNT };

enum {
    TABLES_AT = PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES,
    TABLE_BYTES = PAGES * PAGE_TABLE_ENTRY_BYTES,
    MEMORY_BYTES = TABLES_AT + PAGE_TABLE_PLACES * TABLE_BYTES,
};

static struct snapshot {
    uint8_t memory[MEMORY_BYTES];
    struct page_tables_state state;
} before[CHANGES], after[CHANGES];

static uint8_t *memory; /* exactly as large as it must be */

static void fill(struct page_entry *table, uint64_t step)
{
    memset(table, 0, PAGES * sizeof *table);
    for (uint64_t page = 0; page < PAGES; page++) {
        table[page].page = page;
        table[page].version = step;
        table[page].slot = (uint32_t)(step % SLOTS);
        table[page].codec = PAGE_RAW;
        table[page].digest[PART_WEIGHTS].low = step * 1000 + page;
        page_entry_seal(&table[page]);
    }
}

static struct commit_facts facts_of(uint64_t step)
{
    struct commit_facts facts;
    memset(&facts, 0, sizeof facts);
    facts.step = facts.optimizer_step = step;
    return facts;
}

static void keep(struct snapshot *s, const struct page_tables *t)
{
    memcpy(s->memory, memory, MEMORY_BYTES);
    s->state = t->state;
}

/* Fourteen changes of roles as a run makes them, each kept as before and after. */
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    struct page_tables t;
    struct commit_facts facts = facts_of(0);
    uint64_t step = 0;
    memory = calloc(1, MEMORY_BYTES);
    REQUIRE(memory != NULL);
    page_tables_open(&t, memory, PAGES);
    fill(t.complete, 0);
    page_tables_start(&t, &facts, commit_state_hash(&facts, t.complete, PAGES), 1);
    for (int i = 0; i < CHANGES; i++) {
        int kind = i % 7 % 4; /* complete, committed, anchored, abandoned, complete, ... */
        if (kind == 0) {
            fill(t.forming, ++step);
            facts = facts_of(step);
        } else if (kind == 3) {
            fill(t.forming, step + 1);
        }
        keep(&before[i], &t);
        if (kind == 0)
            page_tables_complete(&t, &facts, commit_state_hash(&facts, t.forming, PAGES));
        else if (kind == 1)
            page_tables_committed(&t);
        else if (kind == 2)
            page_tables_anchored(&t);
        else
            page_tables_abandon(&t);
        keep(&after[i], &t);
    }
    return 0;
}

/* The first `bytes` bytes of what the change wrote: the state, then the new forming table. */
static void tear(int i, uint64_t bytes)
{
    const uint64_t state_bytes = sizeof(struct page_tables_state);
    uint64_t state_at = after[i].state.sequence % PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES;
    uint64_t forming_at = TABLES_AT + after[i].state.place[TABLE_FORMING] * (uint64_t)TABLE_BYTES;
    uint64_t first = bytes < state_bytes ? bytes : state_bytes, second = bytes - first;
    memcpy(memory, before[i].memory, MEMORY_BYTES);
    memcpy(memory + state_at, after[i].memory + state_at, first);
    memcpy(memory + forming_at, after[i].memory + forming_at,
           second < TABLE_BYTES ? second : TABLE_BYTES);
}

static int change(struct fuzz_input *in)
{
    struct fuzz_op op;
    int n = 0;
    for (; n < FUZZ_OPS_MAX && fuzz_next_op(in, &op); n++)
        switch (op.what % CHANGE_COUNT) {
        case CHANGE_STATE:
            fuzz_op_write(&op, memory, TABLES_AT, op.at % TABLES_AT);
            break;
        case CHANGE_ENTRY:
            fuzz_op_write(&op, memory + TABLES_AT, MEMORY_BYTES - TABLES_AT,
                          op.at % (MEMORY_BYTES - TABLES_AT));
            break;
        default:
            memory[op.at % MEMORY_BYTES] ^= op.value[0];
        }
    return n;
}

static struct page_entry *table_in(uint32_t place)
{
    return (struct page_entry *)(void *)(memory + TABLES_AT + (size_t)place * TABLE_BYTES);
}

static void seal(uint8_t flags)
{
    for (uint32_t place = 0; place < PAGE_TABLE_PLACES && flags & FLAG_ENTRIES; place++)
        for (int page = 0; page < PAGES; page++)
            page_entry_seal(&table_in(place)[page]);
    for (int copy = 0; copy < PAGE_TABLE_STATES && flags & FLAG_STATES; copy++) {
        struct page_tables_state s;
        uint8_t *at = memory + copy * PAGE_TABLE_STATE_BYTES;
        memcpy(&s, at, sizeof s);
        if (flags & FLAG_STATE_HASH && s.place[TABLE_COMPLETE] < PAGE_TABLE_PLACES &&
            s.facts.spike_count <= SPIKE_WINDOW_STEPS)
            s.state_hash = commit_state_hash(&s.facts, table_in(s.place[TABLE_COMPLETE]), PAGES);
        s.hash = XXH3_64bits(&s, offsetof(struct page_tables_state, hash));
        memcpy(at, &s, sizeof s);
    }
}

static void is_whole(const struct page_entry *table)
{
    for (uint64_t page = 0; page < PAGES; page++) {
        REQUIRE(page_entry_valid(&table[page]));
        REQUIRE(table[page].page == page && table[page].slot < SLOTS);
    }
}

static void is_of_step(const struct page_entry *table, uint64_t step)
{
    struct page_entry genuine[PAGES];
    fill(genuine, step);
    REQUIRE(memcmp(table, genuine, sizeof genuine) == 0);
}

static void adopted(const struct page_tables *t)
{
    const struct page_tables_state *s = &t->state;
    struct page_digest hash = commit_state_hash(&s->facts, t->complete, PAGES);
    is_whole(t->anchor);
    is_whole(t->committed);
    is_whole(t->complete);
    REQUIRE(page_digest_equal(hash, s->state_hash));
    REQUIRE(strnlen(s->facts.lineage, sizeof s->facts.lineage) < sizeof s->facts.lineage);
    REQUIRE(memcmp(t->forming, t->complete, TABLE_BYTES) == 0);
    for (int role = 0; role < TABLE_FORMING; role++)
        REQUIRE(s->place[TABLE_FORMING] != s->place[role]);
}

/* Of an input that forged nothing: the roles are those of one moment, and so are the tables. */
static void is_genuine(const struct page_tables *t, int i, int damaged)
{
    const struct page_tables_state *s = &t->state;
    uint64_t sequence = s->sequence - 1; /* adopting is a change, too */
    if (!damaged)
        REQUIRE(sequence == before[i].state.sequence || sequence == after[i].state.sequence);
    REQUIRE(sequence <= after[i].state.sequence);
    is_of_step(t->anchor, s->step[TABLE_ANCHOR]);
    is_of_step(t->committed, s->step[TABLE_COMMITTED]);
    is_of_step(t->complete, s->step[TABLE_COMPLETE]);
    REQUIRE(s->step[TABLE_COMPLETE] == s->facts.step);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct page_tables t, again;
    int i = fuzz_u8(&in) % CHANGES;
    uint64_t torn = fuzz_u32(&in) % (sizeof(struct page_tables_state) + TABLE_BYTES + 1);
    uint8_t flags = fuzz_u8(&in);
    tear(i, torn);
    int damaged = change(&in);
    if (damaged) /* a torn state is not made whole */
        seal(flags);
    error_clear();
    int rc = page_tables_adopt(&t, memory, PAGES, SLOTS);
    REQUIRE(rc == 0 || damaged);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_DAMAGED);
        return 0;
    }
    adopted(&t);
    if (damaged && flags & (FLAG_STATES | FLAG_ENTRIES))
        return 0;
    is_genuine(&t, i, damaged);
    /* and once more, after a death right behind the take-over */
    REQUIRE(page_tables_adopt(&again, memory, PAGES, SLOTS) == 0);
    REQUIRE(memcmp(&again.state.facts, &t.state.facts, sizeof t.state.facts) == 0);
    return 0;
}

#define STATE(copy, field, bytes)                                                                  \
    {                                                                                              \
        CHANGE_STATE, (copy)*PAGE_TABLE_STATE_BYTES + offsetof(struct page_tables_state, field),   \
            bytes                                                                                  \
    }
#define STATES(field, bytes) STATE(0, field, bytes), STATE(1, field, bytes)
#define ENTRY(place, field, bytes)                                                                 \
    {                                                                                              \
        CHANGE_ENTRY, (place)*TABLE_BYTES + offsetof(struct page_entry, field), bytes              \
    }
#define ENTRIES(field, bytes)                                                                      \
    ENTRY(0, field, bytes), ENTRY(1, field, bytes), ENTRY(2, field, bytes), ENTRY(3, field, bytes)

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const struct fuzz_place places[] = {
        STATES(magic, 8),
        STATES(sequence, 8),
        STATES(n_pages, 8),
        STATES(place[TABLE_ANCHOR], 4),
        STATES(place[TABLE_COMMITTED], 4),
        STATES(place[TABLE_COMPLETE], 4),
        STATES(place[TABLE_FORMING], 4),
        STATES(step[TABLE_ANCHOR], 8),
        STATES(facts.step, 8),
        STATES(facts.spike_count, 4),
        STATES(facts.lineage[COMMIT_LINEAGE_BYTES - 1], 1),
        STATES(hash, 8),
        ENTRIES(page, 8),
        ENTRIES(slot, 4),
        ENTRIES(version, 8),
        ENTRIES(entry_hash, 4),
        {CHANGE_ANY, 20, 1},
    };
    uint64_t random = seed;
    size = fuzz_mutate_ops(data, size, max_size, HEAD_BYTES, &random, places,
                           sizeof places / sizeof places[0]);
    if (size >= HEAD_BYTES && fuzz_below(&random, 2) != 0)
        data[5] |= (uint8_t)fuzz_below(&random, 8);
    if (size >= HEAD_BYTES && fuzz_below(&random, 4) == 0) {
        uint32_t torn = (uint32_t)fuzz_random(&random);
        memcpy(data + 1, &torn, sizeof torn);
    }
    return size;
}
