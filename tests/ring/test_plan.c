/* The plan's texts and places, the topology table, the page table's size. */
#include "ipc/plan.h"

#include "tests/ring/ring_fixture.h"

#include <stdlib.h>

#include "ipc/control.h"
#include "ipc/page_table.h"
#include "ipc/ring.h"

static struct fixture f;

static void texts_come_back_as_they_were_added(void **state)
{
    (void)state;
    struct plan *plan = &f.at.plan;
    struct plan_text empty, path;
    struct plan_texts list, none;
    const char *const texts[] = {"/a", "", "a longer text with \xc3\xa4"};
    fixture_fill(&f, 2);
    assert_int_equal(plan_text_add(plan, FIXTURE_PLAN_BYTES, "/some/path", &path), 0);
    assert_int_equal(plan_texts_add(plan, FIXTURE_PLAN_BYTES, texts, 3, &list), 0);
    assert_int_equal(plan_texts_add(plan, FIXTURE_PLAN_BYTES, NULL, 0, &none), 0);
    assert_int_equal(plan_text_add(plan, FIXTURE_PLAN_BYTES, "", &empty), 0);
    assert_string_equal(plan_text_get(plan, path), "/some/path");
    assert_string_equal(plan_text_get(plan, empty), "");
    assert_int_equal(list.count, 3);
    assert_int_equal(none.count, 0);
    assert_int_equal(list.offset % 8, 0);
    for (uint64_t i = 0; i < 3; i++)
        assert_string_equal(plan_texts_get(plan, list, i), texts[i]);
    fixture_destroy(&f);
}

static void a_text_that_is_not_there_reads_as_empty(void **state)
{
    (void)state;
    fixture_fill(&f, 2);
    assert_string_equal(plan_text_get(&f.at.plan, (struct plan_text){0}), "");
    fixture_destroy(&f);
}

static void texts_beyond_the_capacity_are_refused_byte_exactly(void **state)
{
    (void)state;
    struct plan *plan = &f.at.plan;
    struct plan_text out;
    fixture_fill(&f, 2);
    f.at.bytes[sizeof *plan + 6] = 0xee;
    assert_int_equal(plan_text_add(plan, sizeof *plan + 5, "12345", &out), -ERROR_USER);
    fixture_expect_text("more than 5 bytes");
    assert_int_equal(plan->bytes, sizeof *plan);
    assert_int_equal(plan_text_add(plan, sizeof *plan + 6, "12345", &out), 0);
    assert_int_equal(plan->bytes, sizeof *plan + 6);
    assert_int_equal(f.at.bytes[sizeof *plan + 6], 0xee);
    fixture_destroy(&f);
}

static void ids_come_back_and_are_refused_beyond_the_capacity(void **state)
{
    (void)state;
    struct plan *plan = &f.at.plan;
    struct plan_text odd;
    struct plan_ids ids, none;
    const int32_t numbers[] = {128000, 0, -1};
    fixture_fill(&f, 2);
    uint64_t bytes = plan->bytes;
    assert_int_equal(plan_text_add(plan, FIXTURE_PLAN_BYTES, "", &odd), 0); /* no multiple of 4 */
    assert_int_equal(plan_ids_add(plan, bytes + 15, numbers, 3, &ids), -ERROR_USER);
    fixture_expect_text("3 tokens");
    assert_int_equal(plan_ids_add(plan, bytes + 15, numbers, UINT64_MAX / 4, &ids), -ERROR_USER);
    assert_int_equal(plan->bytes, bytes + 1);
    assert_int_equal(plan_ids_add(plan, bytes + 16, numbers, 3, &ids), 0);
    assert_int_equal(ids.offset % 4, 0);
    assert_memory_equal(plan_ids_get(plan, ids), numbers, sizeof numbers);
    assert_int_equal(plan->bytes, bytes + 16);
    assert_int_equal(plan_ids_add(plan, bytes + 16, numbers, 0, &none), 0);
    assert_int_equal(none.count, 0);
    fixture_destroy(&f);
}

static void lists_beyond_the_capacity_are_refused(void **state)
{
    (void)state;
    struct plan *plan = &f.at.plan;
    struct plan_texts out;
    const char *const texts[] = {"1234567", "1234567"};
    fixture_fill(&f, 2);
    assert_int_equal(plan_texts_add(plan, sizeof *plan + 15, texts, 2, &out), -ERROR_USER);
    assert_int_equal(plan_texts_add(plan, sizeof *plan + 31, texts, 2, &out), -ERROR_USER);
    plan->bytes = sizeof *plan;
    assert_int_equal(plan_texts_add(plan, sizeof *plan + 32, texts, 2, &out), 0);
    assert_int_equal(plan_texts_add(plan, FIXTURE_PLAN_BYTES, NULL, PLAN_LISTS_MAX + 1, &out),
                     -ERROR_USER);
    assert_int_equal(plan_texts_add(plan, FIXTURE_PLAN_BYTES, NULL, UINT64_MAX / 8 + 1, &out),
                     -ERROR_USER);
    fixture_destroy(&f);
}

static void a_frame_stride_is_the_smallest_odd_number_of_pages(void **state)
{
    (void)state;
    for (uint64_t bytes = 1; bytes < 20 * 4096; bytes += 511) {
        uint64_t stride = plan_frame_stride(bytes);
        assert_true(stride >= bytes && stride % 8192 == 4096);
        assert_true(stride < bytes + 2 * 4096);
    }
    assert_int_equal(plan_frame_stride(4096), 4096);
    assert_int_equal(plan_frame_stride(4097), 3 * 4096);
    assert_int_equal(plan_frame_stride(8192), 3 * 4096);
}

/* -- places -- */

struct span {
    uint64_t from, to;
};

static uint64_t add_spans(struct span *spans, uint64_t n, const struct plan_region *at,
                          uint64_t want)
{
    assert_int_equal(at->offset % 4096, 0);
    assert_int_equal(at->stride % 4096, 0);
    assert_true(at->stride >= want);
    for (uint64_t i = 0; i < at->instances; i++, n++)
        spans[n] = (struct span){at->offset + i * at->stride, at->offset + (i + 1) * at->stride};
    return n;
}

static int by_start(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    return x->to < y->to ? -1 : x->to > y->to;
}

static uint64_t wanted_bytes(int region)
{
    const struct plan *plan = &f.at.plan;
    switch (region) {
    case REGION_PLAN:
        return plan->bytes;
    case REGION_LAUNCHER_CONTROL:
        return sizeof(struct launcher_control);
    case REGION_IO_CONTROL:
    case REGION_GPU_CONTROL:
    case REGION_OPT_CONTROL:
        return sizeof(struct worker_control);
    case REGION_PAGE_TABLE:
        return 3 * 128 * f.layout.n_pages;
    case REGION_GENERATED:
        return 16 + 8 * plan->generate.prompts.count;
    case REGION_NORM:
        return 0; /* its own test */
    default:
        return plan->pools[region].stride * plan->pools[region].frames;
    }
}

static void expect_no_overlap(uint32_t opt_workers)
{
    static struct span spans[(REGION_COUNT + 2 * RING_COUNT) * OPT_WORKERS_MAX];
    const struct plan *plan = &f.at.plan;
    uint64_t n = 0;
    fixture_init(&f, opt_workers);
    for (int r = 0; r < REGION_COUNT; r++) {
        assert_int_equal(plan->regions[r].instances,
                         topology_regions[r].per_worker ? opt_workers : 1);
        n = add_spans(spans, n, &plan->regions[r], opt_workers ? wanted_bytes(r) : 0);
    }
    for (int r = 0; r < RING_COUNT; r++) {
        n = add_spans(spans, n, &plan->ring_producers[r], 4096 + 64 * plan->ring_depth[r]);
        n = add_spans(spans, n, &plan->ring_consumers[r], 4096);
    }
    qsort(spans, n, sizeof *spans, by_start);
    for (uint64_t i = 1; i < n; i++)
        assert_true(spans[i].from >= spans[i - 1].to);
    assert_int_equal(plan->regions[REGION_PLAN].offset, 0);
    assert_int_equal(spans[n - 1].to, plan->segment_bytes);
    fixture_destroy(&f);
}

static void regions_and_rings_are_page_aligned_and_do_not_overlap(void **state)
{
    (void)state;
    static const uint32_t workers[] = {1, 2, 3, 7, OPT_WORKERS_MAX};
    for (size_t i = 0; i < sizeof workers / sizeof *workers; i++)
        expect_no_overlap(workers[i]);
}

static void a_command_without_optimizer_workers_has_places_too(void **state)
{
    (void)state;
    expect_no_overlap(0);
}

static void the_norm_region_holds_every_page_of_its_worker(void **state)
{
    (void)state;
    for (uint32_t workers = 1; workers <= 9; workers++) {
        fixture_fill(&f, workers);
        f.layout.n_pages = 256 * workers + 1; /* one entry more than fills a page of memory */
        plan_place_regions(&f.at.plan, &f.layout);
        for (uint64_t p = 0; p < f.layout.n_pages; p++)
            assert_true((topology_page_rank(p, workers) + 1) * sizeof(struct norm_entry) <=
                        f.at.plan.regions[REGION_NORM].stride);
        fixture_destroy(&f);
    }
}

static void the_generated_region_holds_every_token_of_every_prompt(void **state)
{
    (void)state;
    uint64_t words[512];
    struct generated *g = (struct generated *)(void *)words;
    g->prompts = 3;
    g->tokens_max = 100;
    assert_ptr_equal(generated_counts(g), words + 2);
    assert_ptr_equal(generated_tokens(g, 0), words + 5);
    assert_ptr_equal((char *)generated_tokens(g, 3), (char *)words + generated_bytes(3, 100));
}

/* -- topology -- */

static void every_page_has_one_owner_and_ranks_have_no_gaps(void **state)
{
    (void)state;
    for (uint32_t workers = 1; workers < 6; workers++) {
        uint64_t next[6] = {0};
        for (uint64_t p = 0; p < 1000; p++) {
            uint32_t owner = topology_page_owner(p, workers);
            assert_true(owner < workers);
            assert_int_equal(topology_page_rank(p, workers), next[owner]++);
        }
    }
}

static void each_region_but_the_out_pool_has_one_writer(void **state)
{
    (void)state;
    for (int r = 0; r < REGION_COUNT; r++) {
        int writers = 0;
        for (int role = 0; role < ROLE_COUNT; role++) {
            const char *access = topology_regions[r].access[role];
            assert_true(strlen(access) == 1 && strchr("-rw", *access));
            writers += *access == 'w';
        }
        assert_int_equal(writers, r == REGION_OUT_POOL ? 2 : 1); /* io copies in, opt writes */
    }
}

static void the_launcher_maps_no_payload(void **state)
{
    (void)state;
    for (int r = 0; r < REGION_COUNT; r++)
        assert_int_equal(topology_regions[r].access[ROLE_LAUNCHER][0] == '-', fixture_is_pool(r));
}

/* The lender writes the frame (io writes what it reads from disk), the borrower can at least read
 * it. */
static void both_ends_of_a_ring_map_its_pool(void **state)
{
    (void)state;
    for (int r = 0; r < RING_COUNT; r++) {
        const struct ring_row *row = &topology_rings[r];
        assert_true(fixture_is_pool((int)row->pool));
        assert_true(row->from != row->to);
        assert_true(row->from != ROLE_LAUNCHER && row->to != ROLE_LAUNCHER);
        int returns = strstr(row->name, "_RETURN") != NULL;
        const char *const *access = topology_regions[row->pool].access;
        assert_int_equal(access[returns ? row->to : row->from][0], 'w');
        assert_int_not_equal(access[returns ? row->from : row->to][0], '-');
        assert_int_equal(row->per_worker, row->from == ROLE_OPT || row->to == ROLE_OPT);
    }
}

static void role_names_are_the_process_names(void **state)
{
    (void)state;
    assert_string_equal(topology_role_name(ROLE_LAUNCHER), "launcher");
    assert_string_equal(topology_role_name(ROLE_IO), "io_worker");
    assert_string_equal(topology_role_name(ROLE_GPU), "gpu_worker");
    assert_string_equal(topology_role_name(ROLE_OPT), "opt_worker");
}

static void the_page_table_has_four_entries_a_page_and_two_states(void **state)
{
    (void)state;
    assert_int_equal(page_table_bytes(1000), 2 * 4096 + 4 * 1000 * 128);
    assert_int_equal(page_table_bytes((uint64_t)1 << 36), 2 * 4096 + ((uint64_t)1 << 36) * 512);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_come_back_as_they_were_added),
        cmocka_unit_test(a_text_that_is_not_there_reads_as_empty),
        cmocka_unit_test(texts_beyond_the_capacity_are_refused_byte_exactly),
        cmocka_unit_test(ids_come_back_and_are_refused_beyond_the_capacity),
        cmocka_unit_test(lists_beyond_the_capacity_are_refused),
        cmocka_unit_test(a_frame_stride_is_the_smallest_odd_number_of_pages),
        cmocka_unit_test(regions_and_rings_are_page_aligned_and_do_not_overlap),
        cmocka_unit_test(a_command_without_optimizer_workers_has_places_too),
        cmocka_unit_test(the_norm_region_holds_every_page_of_its_worker),
        cmocka_unit_test(the_generated_region_holds_every_token_of_every_prompt),
        cmocka_unit_test(every_page_has_one_owner_and_ranks_have_no_gaps),
        cmocka_unit_test(each_region_but_the_out_pool_has_one_writer),
        cmocka_unit_test(the_launcher_maps_no_payload),
        cmocka_unit_test(both_ends_of_a_ring_map_its_pool),
        cmocka_unit_test(role_names_are_the_process_names),
        cmocka_unit_test(the_page_table_has_four_entries_a_page_and_two_states),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
