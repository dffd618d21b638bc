#include "io_worker/page_tables.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include <xxhash.h>

#include "procs/check.h"
#include "procs/error.h"
#include "procs/mutant.h"

#define STATE_MAGIC 0x3153454c42415450ull /* "PTABLES1" in memory */

_Static_assert(sizeof(struct page_entry) == PAGE_TABLE_ENTRY_BYTES, "page_table.h knows the size");

static struct page_entry *table_at(const struct page_tables *t, uint32_t place)
{
    unsigned char *first = t->memory + PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES;
    return (struct page_entry *)(void *)(first + place * t->n_pages * sizeof(struct page_entry));
}

static void point(struct page_tables *t)
{
    t->anchor = table_at(t, t->state.place[TABLE_ANCHOR]);
    t->committed = table_at(t, t->state.place[TABLE_COMMITTED]);
    t->complete = table_at(t, t->state.place[TABLE_COMPLETE]);
    t->forming = table_at(t, t->state.place[TABLE_FORMING]);
}

static uint64_t state_check(const struct page_tables_state *state)
{
    return XXH3_64bits(state, offsetof(struct page_tables_state, hash));
}

static void publish(struct page_tables *t)
{
    struct page_tables_state *s = &t->state;
    s->magic = STATE_MAGIC;
    s->n_pages = t->n_pages;
    s->sequence++;
    s->hash = state_check(s);
    /* a death between any two stores leaves either this state or the one before */
    atomic_thread_fence(memory_order_seq_cst);
    memcpy(t->memory + s->sequence % PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES, s, sizeof *s);
    atomic_thread_fence(memory_order_seq_cst);
    point(t);
}

/* A place that no role but forming holds. Three others at most, so there is one. */
static uint32_t free_place(const struct page_tables *t)
{
    for (uint32_t place = 0; place < PAGE_TABLE_PLACES; place++) {
        int taken = 0;
        for (int role = 0; role < TABLE_FORMING; role++)
            taken |= t->state.place[role] == place;
        if (!taken)
            return place;
    }
    CHECK(!"a free place");
    return 0;
}

/* The next version starts as a copy of the complete one. The state comes first: the place may be
 * that of the complete table before, which counts until the new state is written. */
static void start_forming(struct page_tables *t)
{
    t->state.place[TABLE_FORMING] = free_place(t);
    publish(t);
    memcpy(t->forming, t->complete, t->n_pages * sizeof(struct page_entry));
}

void page_tables_open(struct page_tables *t, void *memory, uint64_t n_pages)
{
    memset(t, 0, sizeof *t);
    t->memory = memory;
    t->n_pages = n_pages;
    t->state.place[TABLE_FORMING] = 1;
    point(t);
}

void page_tables_start(struct page_tables *t, const struct commit_facts *facts,
                       struct page_digest state_hash, int read_back)
{
    t->state.facts = *facts;
    t->state.state_hash = state_hash;
    t->state.read_back = read_back != 0;
    for (int role = 0; role < TABLE_ROLES; role++)
        t->state.step[role] = facts->step;
    start_forming(t);
}

void page_tables_complete(struct page_tables *t, const struct commit_facts *facts,
                          struct page_digest state_hash)
{
    t->state.facts = *facts;
    t->state.state_hash = state_hash;
    t->state.place[TABLE_COMPLETE] = t->state.place[TABLE_FORMING];
    t->state.step[TABLE_COMPLETE] = facts->step;
    start_forming(t);
}

void page_tables_committed(struct page_tables *t)
{
    t->state.place[TABLE_COMMITTED] = t->state.place[TABLE_COMPLETE];
    t->state.step[TABLE_COMMITTED] = t->state.step[TABLE_COMPLETE];
    t->state.read_back = 0;
    publish(t);
}

void page_tables_anchored(struct page_tables *t)
{
    t->state.place[TABLE_ANCHOR] = t->state.place[TABLE_COMMITTED];
    t->state.step[TABLE_ANCHOR] = t->state.step[TABLE_COMMITTED];
    t->state.read_back = 1;
    publish(t);
}

void page_tables_abandon(struct page_tables *t)
{
    if (mutant(MUTANT_half_applied_step_kept))
        return;
    start_forming(t);
}

/* -- taking over -- */

static int state_is_good(const struct page_tables_state *s, uint64_t n_pages)
{
    int good = s->magic == STATE_MAGIC && s->hash == state_check(s) && s->n_pages == n_pages &&
               s->facts.spike_count <= SPIKE_WINDOW_STEPS;
    for (int role = 0; role < TABLE_ROLES; role++)
        good = good && s->place[role] < PAGE_TABLE_PLACES;
    return good;
}

static int check_table(const struct page_tables *t, const struct page_entry *table,
                       const char *name, unsigned slots_per_page)
{
    for (uint64_t page = 0; page < t->n_pages && !mutant(MUTANT_page_table_believed); page++) {
        const struct page_entry *e = &table[page];
        if (!page_entry_valid(e) || e->page != page || e->slot >= slots_per_page)
            return error_set(ERROR_DAMAGED,
                             "page table in shared memory: %s entry %llu: found page %llu, slot "
                             "%u, hash %s",
                             name, (unsigned long long)page, (unsigned long long)e->page, e->slot,
                             page_entry_valid(e) ? "good" : "bad");
    }
    return 0;
}

int page_tables_adopt(struct page_tables *t, void *memory, uint64_t n_pages,
                      unsigned slots_per_page)
{
    int found = 0;
    page_tables_open(t, memory, n_pages);
    for (uint32_t copy = 0; copy < PAGE_TABLE_STATES; copy++) {
        struct page_tables_state s;
        memcpy(&s, t->memory + copy * PAGE_TABLE_STATE_BYTES, sizeof s);
        if (!state_is_good(&s, n_pages) || (found && s.sequence < t->state.sequence))
            continue;
        t->state = s;
        found = 1;
    }
    if (!found)
        return error_set(ERROR_DAMAGED, "page table in shared memory: no valid state");
    point(t);
    if (check_table(t, t->anchor, "anchor", slots_per_page) < 0 ||
        check_table(t, t->committed, "committed", slots_per_page) < 0 ||
        check_table(t, t->complete, "complete", slots_per_page) < 0)
        return -(int)error_kind_now();
    struct page_digest hash = commit_state_hash(&t->state.facts, t->complete, n_pages);
    if (!page_digest_equal(hash, t->state.state_hash) && !mutant(MUTANT_page_table_believed))
        return error_set(ERROR_DAMAGED,
                         "page table in shared memory: the complete step's hash does not fit");
    start_forming(t); /* what was forming counts for nothing */
    return 0;
}
