/* The slot rule over every state of a small world. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io_worker/slots.h"

#include <string.h>

static void no_protected_slot_is_ever_chosen_and_a_free_one_always(void **state)
{
    (void)state;
    static const uint32_t values[] = {0, 1, 2, SLOT_NONE};
    for (unsigned code = 0; code < 4 * 4 * 4 * 4 * 4 * 4 * 4; code++) {
        uint32_t pick[7];
        for (unsigned i = 0, c = code; i < 7; i++, c /= 4)
            pick[i] = values[c % 4];
        struct slot_holders holders = {.anchor = pick[0],
                                       .committed = pick[1],
                                       .committing = pick[2],
                                       .complete = pick[3],
                                       .forming = pick[4],
                                       .between = &pick[5],
                                       .n_between = 1,
                                       .pinned = &pick[6],
                                       .n_pinned = 1};
        int used[3] = {0};
        for (unsigned i = 0; i < 7; i++)
            if (pick[i] != SLOT_NONE)
                used[pick[i]] = 1;
        uint32_t expected = SLOT_NONE;
        for (uint32_t s = 3; s-- > 0;)
            if (!used[s])
                expected = s;
        assert_int_equal(slots_choose(&holders, 3), expected);
        assert_int_equal(slots_protected(&holders), used[0] | used[1] << 1 | used[2] << 2);
        if (!used[2])
            assert_int_equal(slots_choose(&holders, 2), expected == 2 ? SLOT_NONE : expected);
    }
}

/*
 * One page through every order of: a step writes it or skips, its commit begins and ends, a
 * read-back ends. Versions on the fallback path (anchor .. newest) must stay in their slots.
 */
struct world {
    int is_commit[8];                            /* a commit names this version */
    uint32_t slot_of[8];                         /* by version */
    int version_in[3];                           /* what each slot holds; -1 nothing */
    int anchor, committed, complete, committing; /* versions; committing -1: none */
};

static uint64_t worlds_seen, waits_seen;

static void check_world(const struct world *w)
{
    for (int v = w->anchor; v <= w->complete; v++)
        if (w->is_commit[v] || v == w->complete || v == w->committing)
            assert_int_equal(w->version_in[w->slot_of[v]], v);
}

static void explore(struct world w, unsigned depth)
{
    worlds_seen++;
    check_world(&w);
    if (depth == 0)
        return;
    if (w.complete < 6 &&
        w.committing < 0) { /* a step: at most one complete step beyond a commit */
        uint32_t between[8], n = 0;
        for (int v = w.anchor + 1; v < w.committed; v++)
            if (w.is_commit[v])
                between[n++] = w.slot_of[v];
        struct slot_holders h = {.anchor = w.slot_of[w.anchor],
                                 .committed = w.slot_of[w.committed],
                                 .committing = SLOT_NONE,
                                 .complete = w.slot_of[w.complete],
                                 .forming = SLOT_NONE,
                                 .between = between,
                                 .n_between = n};
        uint32_t slot = slots_choose(&h, 3);
        waits_seen += slot == SLOT_NONE;
        if (slot != SLOT_NONE) {
            struct world next = w;
            next.complete++;
            next.slot_of[next.complete] = slot;
            next.version_in[slot] = next.complete;
            explore(next, depth - 1);
        }
    }
    if (w.committing < 0 && w.committed < w.complete) {
        struct world next = w;
        next.committing = w.complete;
        explore(next, depth - 1);
    }
    if (w.committing >= 0) {
        struct world next = w;
        next.committed = w.committing;
        next.is_commit[w.committing] = 1;
        next.committing = -1;
        explore(next, depth - 1);
    }
    if (w.anchor < w.committed) {
        struct world next = w;
        next.anchor = w.committed;
        explore(next, depth - 1);
    }
}

static void every_version_that_recovery_may_need_stays_in_its_slot(void **state)
{
    (void)state;
    struct world start = {.is_commit = {1}, .version_in = {0, -1, -1}, .committing = -1};
    explore(start, 14);
    assert_true(worlds_seen > 100);
    assert_true(waits_seen > 0);
}

static void with_a_readback_each_step_three_slots_never_wait(void **state)
{
    (void)state;
    uint32_t anchor = 0, committed = 0;
    for (unsigned step = 1; step < 100; step++) {
        struct slot_holders h = {anchor, committed, SLOT_NONE, committed, SLOT_NONE,
                                 NULL,   0,         NULL,      0};
        uint32_t slot = slots_choose(&h, 3);
        assert_int_not_equal(slot, SLOT_NONE);
        anchor = committed; /* the reads of this step's apply were its read-back */
        committed = slot;
    }
}

static void two_slots_alternate_without_readback(void **state)
{
    (void)state;
    uint32_t committed = 0;
    for (unsigned step = 1; step < 10; step++) {
        struct slot_holders h = {committed, committed, SLOT_NONE, committed, SLOT_NONE,
                                 NULL,      0,         NULL,      0};
        uint32_t slot = slots_choose(&h, 2);
        assert_int_equal(slot, 1 - committed);
        committed = slot;
    }
}

static void a_readback_is_done_when_every_page_was_seen_once(void **state)
{
    (void)state;
    uint64_t bits[4];
    struct readback r = {.bits = bits, .n_pages = 130};
    assert_int_equal(readback_words(130), 3);
    assert_int_equal(readback_mark(&r, 5, 0), 0); /* none active */
    readback_begin(&r, 5);
    for (uint64_t page = 0; page < 129; page++) {
        assert_int_equal(readback_next(&r, 0), page);
        assert_int_equal(readback_mark(&r, 5, page), 0);
        assert_int_equal(readback_mark(&r, 5, page), 0); /* twice counts once */
        assert_int_equal(readback_mark(&r, 4, 129), 0);  /* of another commit */
    }
    assert_int_equal(readback_mark(&r, 5, 129), 1);
    assert_int_equal(readback_next(&r, 0), 130);
    assert_int_equal(readback_mark(&r, 5, 129), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_protected_slot_is_ever_chosen_and_a_free_one_always),
        cmocka_unit_test(every_version_that_recovery_may_need_stays_in_its_slot),
        cmocka_unit_test(with_a_readback_each_step_three_slots_never_wait),
        cmocka_unit_test(two_slots_alternate_without_readback),
        cmocka_unit_test(a_readback_is_done_when_every_page_was_seen_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
