/*
 * The page tables in shared memory: who comes after a dead io_worker finds either the roles of
 * before or of after a change, and nothing that was damaged is believed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "io_worker/page_tables.h"
#include "model/random.h"
#include "procs/error.h"

enum { PAGES = 5, SLOTS = 3 };

static unsigned char memory[PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES +
                            PAGE_TABLE_PLACES * PAGES * PAGE_TABLE_ENTRY_BYTES];

static void fill(struct page_entry *table, uint64_t step)
{
    for (uint64_t page = 0; page < PAGES; page++) {
        memset(&table[page], 0, sizeof table[page]);
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

static void start(struct page_tables *t)
{
    struct commit_facts facts = facts_of(0);
    memset(memory, 0x5a, sizeof memory);
    page_tables_open(t, memory, PAGES);
    fill(t->complete, 0);
    page_tables_start(t, &facts, commit_state_hash(&facts, t->complete, PAGES), 1);
}

static void complete(struct page_tables *t, uint64_t step)
{
    struct commit_facts facts = facts_of(step);
    fill(t->forming, step);
    page_tables_complete(t, &facts, commit_state_hash(&facts, t->forming, PAGES));
}

static void assert_versions(const struct page_tables *t, uint64_t anchor, uint64_t committed,
                            uint64_t done)
{
    for (uint64_t page = 0; page < PAGES; page++) {
        assert_int_equal(t->anchor[page].version, anchor);
        assert_int_equal(t->committed[page].version, committed);
        assert_int_equal(t->complete[page].version, done);
        assert_int_equal(t->forming[page].version, done);
    }
    assert_int_equal(t->state.step[TABLE_ANCHOR], anchor);
    assert_int_equal(t->state.step[TABLE_COMMITTED], committed);
    assert_int_equal(t->state.facts.step, done);
}

static void roles_move_and_a_successor_finds_them(void **state)
{
    struct page_tables t, next;
    (void)state;
    start(&t);
    assert_versions(&t, 0, 0, 0);
    for (uint64_t step = 1; step < 200; step++) {
        complete(&t, step);
        assert_versions(&t, step - 1, step - 1, step);
        page_tables_committed(&t);
        assert_versions(&t, step - 1, step, step);
        assert_int_equal(t.state.read_back, 0);
        assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), 0);
        assert_versions(&next, step - 1, step, step);
        t = next;
        assert_int_equal(t.state.read_back, 0); /* a successor reads it back, too */
        page_tables_anchored(&t);
        assert_int_equal(t.state.read_back, 1);
        assert_versions(&t, step, step, step);
    }
}

/* Several steps between two commits: four different versions, and what is forming is dropped. */
static void what_was_forming_counts_for_nothing(void **state)
{
    struct page_tables t, next;
    (void)state;
    start(&t);
    complete(&t, 1);
    page_tables_committed(&t);
    complete(&t, 2);
    complete(&t, 3);
    assert_versions(&t, 0, 1, 3);
    fill(t.forming, 4);
    assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), 0);
    assert_versions(&next, 0, 1, 3);
    fill(next.forming, 4);
    page_tables_abandon(&next);
    assert_versions(&next, 0, 1, 3);
}

/* The process may die between any two stores: every prefix of a change of roles is tried. */
static void a_death_in_the_middle_of_a_change_leaves_one_side_of_it(void **state)
{
    unsigned char before[sizeof memory], after[sizeof memory];
    struct page_tables t, next;
    uint64_t old_side = 0, new_side = 0;
    (void)state;
    start(&t);
    complete(&t, 1);
    page_tables_committed(&t);
    fill(t.forming, 2);
    memcpy(before, memory, sizeof memory);
    struct commit_facts facts = facts_of(2);
    page_tables_complete(&t, &facts, commit_state_hash(&facts, t.forming, PAGES));
    memcpy(after, memory, sizeof memory);
    /* the state first (either copy), then the table that starts as a copy */
    size_t states = PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES;
    for (size_t n = 0; n <= sizeof memory; n += n < states ? 8 : 64) {
        memcpy(memory, after, n);
        memcpy(memory + n, before + n, sizeof memory - n);
        assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), 0);
        if (next.state.facts.step == 1) {
            assert_versions(&next, 0, 1, 1);
            old_side++;
        } else {
            assert_versions(&next, 0, 1, 2);
            new_side++;
        }
        memcpy(memory, before, sizeof memory);
    }
    assert_true(old_side > 10 && new_side > 10);
}

/* Any flipped bit is refused, or lies where nothing is believed: the older state, the free tables.
 * In the newest state it looks like a death in the middle of writing it: the older one counts, and
 * takeover.c finds that more had been announced. */
static void no_flipped_bit_changes_what_is_taken_over(void **state)
{
    unsigned char whole[sizeof memory];
    struct page_tables t, next;
    uint64_t refused = 0, harmless = 0, older = 0;
    (void)state;
    start(&t);
    complete(&t, 1);
    page_tables_committed(&t);
    complete(&t, 2);
    memcpy(whole, memory, sizeof memory);
    for (uint64_t i = 0; i < 40000; i++) {
        uint64_t bit = random_permute(7, 0, sizeof memory * 8, i);
        memcpy(memory, whole, sizeof memory);
        memory[bit / 8] ^= (unsigned char)(1u << bit % 8);
        int rc = page_tables_adopt(&next, memory, PAGES, SLOTS);
        if (rc < 0) {
            assert_int_equal(rc, -ERROR_DAMAGED);
            refused++;
        } else if (next.state.facts.step == 1) {
            assert_in_range(bit / 8 % PAGE_TABLE_STATE_BYTES, 0, sizeof next.state - 1);
            assert_versions(&next, 0, 1, 1);
            older++;
        } else {
            assert_versions(&next, 0, 1, 2);
            harmless++;
        }
    }
    assert_true(refused > 1000 && harmless > 1000 && older > 100);
    memset(memory, 0, sizeof memory);
    assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), -ERROR_DAMAGED);
}

static void a_slot_or_a_page_out_of_range_is_refused(void **state)
{
    struct page_tables t, next;
    (void)state;
    start(&t);
    t.complete[2].slot = SLOTS;
    page_entry_seal(&t.complete[2]);
    assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), -ERROR_DAMAGED);
    start(&t);
    t.anchor[2].page = 3;
    page_entry_seal(&t.anchor[2]);
    assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), -ERROR_DAMAGED);
    start(&t);
    assert_int_equal(page_tables_adopt(&next, memory, PAGES - 1, SLOTS), -ERROR_DAMAGED);
    /* a complete table that is whole, but of another step than its hash */
    start(&t);
    complete(&t, 1);
    fill(t.complete, 2);
    assert_int_equal(page_tables_adopt(&next, memory, PAGES, SLOTS), -ERROR_DAMAGED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(roles_move_and_a_successor_finds_them),
        cmocka_unit_test(what_was_forming_counts_for_nothing),
        cmocka_unit_test(a_death_in_the_middle_of_a_change_leaves_one_side_of_it),
        cmocka_unit_test(no_flipped_bit_changes_what_is_taken_over),
        cmocka_unit_test(a_slot_or_a_page_out_of_range_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
