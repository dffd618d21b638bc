/*
 * Sampled recomputation: which blocks, and what becomes of a block that comes out differently.
 */
#include "opt_worker/recompute.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/page_image.h"
#include "model/random.h"
#include "procs/error.h"

enum { BLOCKS = 6, N = BLOCKS * ADAMW_BLOCK_ELEMENTS, PAGE_BLOCKS = 1024 };

struct arrays {
    float w[N], m[N], v[N];
    uint16_t hi[N], lo[N];
} __attribute__((aligned(64)));

static struct arrays in, out, right;
static float gradient[N] __attribute__((aligned(64)));
static uint8_t decay_blocks[BLOCKS] = {1, 0, 1, 1, 0, 1};
static struct worker_control control;

static const struct adamw_scalars scalars = {.lr_decay = 1e-4f,
                                             .step_size = 1e-3f,
                                             .inv_sqrt_bias2 = 2.0f,
                                             .beta1 = 0.9f,
                                             .one_minus_beta1 = 0.1f,
                                             .beta2 = 0.95f,
                                             .one_minus_beta2 = 0.05f,
                                             .eps = 1e-8f,
                                             .scale = 0.5f};
static struct adamw_page_f32 f32 = {.elements = N,
                                    .decay_blocks = decay_blocks,
                                    .gradient = gradient,
                                    .w_in = in.w,
                                    .m_in = in.m,
                                    .v_in = in.v,
                                    .w_out = out.w,
                                    .m_out = out.m,
                                    .v_out = out.v};
static struct adamw_page_split split = {.elements = N,
                                        .decay_blocks = decay_blocks,
                                        .gradient = gradient,
                                        .w_hi_in = in.hi,
                                        .w_lo_in = in.lo,
                                        .m_in = in.m,
                                        .v_in = in.v,
                                        .w_hi_out = out.hi,
                                        .w_lo_out = out.lo,
                                        .m_out = out.m,
                                        .v_out = out.v};
static const struct recompute_page page_f32 = {.step = 7, .scalars = &scalars, .f32 = &f32};
static const struct recompute_page page_split = {.step = 7, .scalars = &scalars, .split = &split};
static const struct recompute_page *const pages[] = {&page_f32, &page_split};

/* -- the choice -- */

static const struct recompute_options quarter = {
    .seed = 42, .page_elements = PAGE_BLOCKS * ADAMW_BLOCK_ELEMENTS, .fraction = 0.25};

static uint64_t choose(struct recompute_options o, uint64_t step, uint64_t page, uint32_t *chosen)
{
    return recompute_choose(&o, step, page, PAGE_BLOCKS, chosen);
}

static void the_fraction_is_respected(void **state)
{
    (void)state;
    static const double fractions[] = {0.0, 0.001, 0.1, 0.25, 0.9, 1.0};
    uint32_t chosen[PAGE_BLOCKS];
    for (unsigned f = 0; f < sizeof fractions / sizeof *fractions; f++) {
        struct recompute_options o = quarter;
        double p = o.fraction = fractions[f], n = 0.0, total = 64.0 * PAGE_BLOCKS;
        for (uint64_t page = 0; page < 64; page++)
            n += (double)choose(o, 3, page, chosen);
        assert_true(fabs(n - p * total) <= 4.0 * sqrt(p * (1.0 - p) * total));
    }
}

static void the_choice_is_a_function_of_seed_step_page_and_block(void **state)
{
    (void)state;
    uint32_t a[PAGE_BLOCKS], b[PAGE_BLOCKS];
    uint64_t n = choose(quarter, 3, 5, a), same = n * sizeof *a;
    assert_int_equal(choose(quarter, 3, 5, b), n);
    assert_memory_equal(a, b, same);
    assert_true(choose(quarter, 4, 5, b) != n || memcmp(a, b, same) != 0);
    assert_true(choose(quarter, 3, 6, b) != n || memcmp(a, b, same) != 0);
    struct recompute_options other = quarter;
    other.seed++;
    assert_true(choose(other, 3, 5, b) != n || memcmp(a, b, same) != 0);
    /* a short page is the beginning of a whole one */
    uint64_t few = recompute_choose(&quarter, 3, 5, 100, b);
    assert_true(few < n && a[few] >= 100);
    assert_memory_equal(a, b, few * sizeof *a);
}

static void blocks_come_in_order_and_a_larger_fraction_keeps_those_of_a_smaller(void **state)
{
    (void)state;
    uint32_t few[PAGE_BLOCKS], many[PAGE_BLOCKS];
    struct recompute_options half = quarter;
    half.fraction = 0.5;
    uint64_t n_few = choose(quarter, 9, 2, few), n_many = choose(half, 9, 2, many), k = 0;
    for (uint64_t i = 0; i < n_many; i++) {
        assert_true(many[i] < PAGE_BLOCKS && (i == 0 || many[i] > many[i - 1]));
        k += k < n_few && many[i] == few[k];
    }
    assert_int_equal(k, n_few);
}

static void over_the_steps_every_block_is_chosen(void **state)
{
    (void)state;
    uint32_t chosen[PAGE_BLOCKS];
    unsigned times[PAGE_BLOCKS] = {0};
    for (uint64_t step = 1; step <= 100; step++)
        for (uint64_t i = choose(quarter, step, 11, chosen); i > 0; i--)
            times[chosen[i - 1]]++;
    for (unsigned block = 0; block < PAGE_BLOCKS; block++)
        assert_true(times[block] > 0);
}

/* -- comparing -- */

static int fill(void **state)
{
    (void)state;
    struct random_key key = {.seed = 1, .purpose = RANDOM_TEST};
    random_normal_fill(key, 0, N, in.w, 0.02f);
    random_normal_fill(key, N, N, in.m, 1e-3f);
    random_normal_fill(key, 2 * N, N, in.v, 1e-6f);
    random_normal_fill(key, 3 * N, N, gradient, 1e-2f);
    for (unsigned i = 0; i < N; i++) {
        uint32_t bits;
        in.v[i] = fabsf(in.v[i]);
        memcpy(&bits, &in.w[i], sizeof bits);
        in.hi[i] = (uint16_t)((bits + 0x8000u) >> 16);
        in.lo[i] = (uint16_t)(bits & 0xffffu);
    }
    return 0;
}

static void update(const struct recompute_page *page)
{
    if (page->f32)
        adamw_update_f32(&scalars, &f32);
    else
        adamw_update_split(&scalars, &split);
}

/* Updates a page with `fault` (MTLAUNCH_FLIP_OUT, or NULL), compares, leaves the undisturbed result
 * in `right`. */
static int compare(const struct recompute_page *page, double fraction, const char *fault,
                   uint64_t *differences)
{
    struct recompute *r;
    struct recompute_options o = {
        .seed = 5, .page_elements = N, .fraction = fraction, .control = &control};
    memset(&out, 0, sizeof out);
    memset(&control, 0, sizeof control);
    (void)unsetenv("MTLAUNCH_FLIP_OUT");
    if (fault)
        assert_int_equal(setenv("MTLAUNCH_FLIP_OUT", fault, 1), 0);
    assert_int_equal(recompute_open(&r, &o), 0);
    recompute_bind(r);
    update(page);
    right = out;
    int rc = recompute_compare(r, page);
    *differences = recompute_differences(r);
    if (fraction >= 1.0 && rc == 0)
        assert_int_equal(recompute_blocks(r), BLOCKS);
    recompute_close(r);
    return rc;
}

static void what_is_computed_right_is_left_alone(void **state)
{
    (void)state;
    uint64_t differences;
    for (unsigned k = 0; k < 2; k++)
        for (unsigned zero = 0; zero < 2; zero++) { /* the first step has no moments */
            f32.m_in = split.m_in = zero ? NULL : in.m;
            f32.v_in = split.v_in = zero ? NULL : in.v;
            assert_int_equal(compare(pages[k], 1.0, NULL, &differences), 0);
            assert_int_equal(differences, 0);
            assert_memory_equal(&out, &right, sizeof out);
            assert_int_equal(control.n_findings, 0);
        }
}

static void a_bit_that_an_update_got_wrong_is_found_and_put_right(void **state)
{
    (void)state;
    uint64_t differences;
    char fault[32];
    for (unsigned k = 0; k < 2; k++)
        for (unsigned part = 0; part < PART_COUNT; part++) {
            if (part == PART_RESIDUAL && pages[k]->f32)
                continue;
            (void)snprintf(fault, sizeof fault, "7:%u:1", part);
            assert_int_equal(compare(pages[k], 1.0, fault, &differences), 0);
            assert_int_equal(differences, 1);
            assert_memory_equal(&out, &right, sizeof out);
            assert_int_equal(control.n_findings, 1);
            const struct recompute_finding *f = &control.findings[0];
            assert_int_equal(f->step, 7);
            assert_int_equal(f->page, 0);
            assert_int_equal(f->block, 0);
            assert_int_equal(f->part, part);
            assert_int_equal(f->wrong, 0);
            assert_int_equal(f->element,
                             pages[k]->split && part <= PART_RESIDUAL ? 10 : 5); /* byte 20 */
        }
}

static void a_second_computation_that_is_wrong_changes_nothing(void **state)
{
    (void)state;
    uint64_t differences;
    for (unsigned k = 0; k < 2; k++) {
        assert_int_equal(compare(pages[k], 1.0, "7:2:2", &differences), 0);
        assert_int_equal(differences, 1);
        assert_memory_equal(&out, &right, sizeof out);
        assert_int_equal(control.findings[0].wrong, 1);
    }
}

static void three_results_are_an_error_that_names_the_hardware(void **state)
{
    (void)state;
    uint64_t differences;
    assert_int_equal(compare(&page_split, 1.0, "7:0:3", &differences), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "step 7, page 0, block 0, weights of element 10"));
    assert_non_null(strstr(error_text(), "does not compute reliably"));
    assert_non_null(strstr(error_text(), "test memory and processor"));
    assert_int_equal(control.n_findings, 0);
}

static void without_recomputation_the_bit_stays_wrong(void **state)
{
    (void)state;
    uint64_t differences;
    assert_int_equal(compare(&page_f32, 0.0, "7:0:1", &differences), 0);
    assert_int_equal(differences, 0);
    assert_memory_not_equal(&out, &right, sizeof out);
}

/* Any bit of any element of a chosen block; and none of the others. */
static void exactly_the_chosen_blocks_are_compared(void **state)
{
    (void)state;
    struct recompute_options o = {.seed = 8, .page_elements = N, .fraction = 0.5};
    struct recompute *r;
    uint32_t chosen[BLOCKS];
    uint64_t n = recompute_choose(&o, 7, 0, BLOCKS, chosen);
    assert_true(n > 0 && n < BLOCKS);
    (void)unsetenv("MTLAUNCH_FLIP_OUT");
    assert_int_equal(recompute_open(&r, &o), 0);
    for (uint64_t trial = 0; trial < 200; trial++) {
        struct random_key key = {.seed = 3, .purpose = RANDOM_TEST, .step = trial};
        uint32_t draw[3], block, k = 0;
        random_bits_fill(key, 0, 3, draw);
        unsigned element = draw[0] % N;
        float *array = draw[1] % 3 == 0 ? out.w : draw[1] % 3 == 1 ? out.m : out.v;
        update(&page_f32);
        right = out;
        ((unsigned char *)(array + element))[draw[2] % 4] ^= (unsigned char)(1u << draw[2] / 4 % 8);
        assert_int_equal(recompute_compare(r, &page_f32), 0);
        block = element / ADAMW_BLOCK_ELEMENTS;
        while (k < n && chosen[k] != block)
            k++;
        assert_int_equal(memcmp(&out, &right, sizeof out) == 0, k < n);
    }
    recompute_close(r);
}

static void an_unreadable_fault_is_refused(void **state)
{
    (void)state;
    static const char *const faults[] = {"", "7", "7:0", "7:4:1", "7:0:0", "0:0:1"};
    struct recompute_options o = {.page_elements = N};
    struct recompute *r;
    for (unsigned i = 0; i < sizeof faults / sizeof *faults; i++) {
        assert_int_equal(setenv("MTLAUNCH_FLIP_OUT", faults[i], 1), 0);
        assert_int_equal(recompute_open(&r, &o), -ERROR_USER);
        recompute_close(r);
    }
    (void)unsetenv("MTLAUNCH_FLIP_OUT");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_fraction_is_respected),
        cmocka_unit_test(the_choice_is_a_function_of_seed_step_page_and_block),
        cmocka_unit_test(blocks_come_in_order_and_a_larger_fraction_keeps_those_of_a_smaller),
        cmocka_unit_test(over_the_steps_every_block_is_chosen),
        cmocka_unit_test(what_is_computed_right_is_left_alone),
        cmocka_unit_test(a_bit_that_an_update_got_wrong_is_found_and_put_right),
        cmocka_unit_test(a_second_computation_that_is_wrong_changes_nothing),
        cmocka_unit_test(three_results_are_an_error_that_names_the_hardware),
        cmocka_unit_test(without_recomputation_the_bit_stays_wrong),
        cmocka_unit_test(exactly_the_chosen_blocks_are_compared),
        cmocka_unit_test(an_unreadable_fault_is_refused),
    };
    return cmocka_run_group_tests_name("recompute", tests, fill, NULL);
}
