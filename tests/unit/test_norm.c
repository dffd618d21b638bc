/* The gradient norm: one order of additions whatever the page size or the instruction set. */
#include "opt_worker/isa.h"
#include "opt_worker/norm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = NORM_BLOCK_ELEMENTS,
    LAYER_BLOCKS = 1373, /* more than one largest page, and ragged at every page size */
    PAGE_BLOCKS_MAX = 1024,
};

static float *layer;
static double page_sums[LAYER_BLOCKS];

static uint64_t random_state = 7;

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

/* Magnitudes over twelve decades, so that another order of additions has other bits. */
static float random_gradient(void)
{
    double unit = (double)random_bits() * 0x1p-32 - 0.5;
    return (float)(unit * exp2((double)(random_bits() % 40) - 30.0));
}

static int set_up(void **state)
{
    (void)state;
    layer = malloc((size_t)LAYER_BLOCKS * BLOCK * sizeof *layer);
    if (!layer)
        return -1;
    for (size_t i = 0; i < (size_t)LAYER_BLOCKS * BLOCK; i++)
        layer[i] = random_gradient();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(layer);
    return 0;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double page_sum(const float *g, uint64_t elements)
{
    struct norm_tree tree = {.leaves = 0};
    norm_push(&tree, g, elements);
    return norm_tree_root(&tree);
}

static double layer_sum(uint64_t blocks, uint64_t page_blocks)
{
    uint64_t pages = 0;
    for (uint64_t at = 0; at < blocks; at += page_blocks) {
        uint64_t here = blocks - at < page_blocks ? blocks - at : page_blocks;
        page_sums[pages++] = page_sum(layer + at * BLOCK, here * BLOCK);
    }
    return norm_layer(page_sums, pages);
}

static void a_page_has_the_same_norm_bits_in_pieces(void **state)
{
    (void)state;
    isa_use(isa_now());
    for (uint64_t piece = 1; piece < 9; piece++) {
        struct norm_tree tree = {.leaves = 0};
        for (uint64_t at = 0, n; at < 27; at += n) {
            n = 27 - at < piece ? 27 - at : piece;
            norm_push(&tree, layer + at * BLOCK, n * BLOCK);
        }
        assert_int_equal(bits_of(norm_tree_root(&tree)),
                         bits_of(page_sum(layer, 27 * (uint64_t)BLOCK)));
    }
}

static void a_layer_has_the_same_norm_bits_for_every_page_size(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 5, 64, 100, 1023, 1024, 1025, LAYER_BLOCKS};
    isa_use(isa_now());
    for (unsigned i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t want = bits_of(layer_sum(sizes[i], 1));
        for (uint64_t page_blocks = 2; page_blocks <= PAGE_BLOCKS_MAX; page_blocks *= 2)
            assert_int_equal(bits_of(layer_sum(sizes[i], page_blocks)), want);
    }
}

static void all_implementations_give_the_same_bits(void **state)
{
    (void)state;
    static double want[LAYER_BLOCKS];
    enum isa best = isa_now();
    isa_use(ISA_SCALAR);
    (void)layer_sum(LAYER_BLOCKS, 1);
    memcpy(want, page_sums, sizeof want);
    for (enum isa isa = ISA_AVX2; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        isa_use(isa);
        (void)layer_sum(LAYER_BLOCKS, 1);
        assert_memory_equal(page_sums, want, sizeof want); /* every block, not only the total */
    }
    isa_use(best);
}

static void the_sum_is_the_sum_of_squares(void **state)
{
    (void)state;
    long double want = 0.0L;
    for (size_t i = 0; i < (size_t)LAYER_BLOCKS * BLOCK; i++)
        want += (long double)layer[i] * (long double)layer[i];
    double got = layer_sum(LAYER_BLOCKS, 512);
    assert_true(fabsl((long double)got - want) < 1e-14L * want);
}

/* The recursion that the header draws, written as such. */
static double tree_by_recursion(const double *leaves, uint64_t n, uint64_t width)
{
    if (n == 0)
        return 0.0;
    if (width == 1)
        return leaves[0];
    uint64_t half = width / 2, left = n < half ? n : half;
    return tree_by_recursion(leaves, left, half) + tree_by_recursion(leaves + left, n - left, half);
}

static void the_tree_is_the_balanced_one_padded_with_zeros(void **state)
{
    (void)state;
    double leaves[300];
    for (unsigned i = 0; i < 300; i++)
        leaves[i] = fabs((double)random_gradient());
    for (uint64_t n = 0; n <= 300; n++)
        assert_int_equal(bits_of(norm_tree_sum(leaves, n)),
                         bits_of(tree_by_recursion(leaves, n, 512)));
}

static void the_order_of_additions_shows_in_the_bits(void **state)
{
    (void)state;
    double in_order = 0.0;
    for (uint64_t i = 0; i < LAYER_BLOCKS; i++)
        in_order += page_sum(layer + i * BLOCK, BLOCK);
    assert_int_not_equal(bits_of(layer_sum(LAYER_BLOCKS, 1)), bits_of(in_order));
}

static void a_flipped_bit_of_a_gradient_changes_the_sum(void **state)
{
    (void)state;
    uint64_t before = bits_of(layer_sum(8, 4));
    float saved = layer[BLOCK + 5];
    layer[BLOCK + 5] = saved == 0.0f ? 1.0f : saved * 2.0f;
    assert_int_not_equal(bits_of(layer_sum(8, 4)), before);
    layer[BLOCK + 5] = saved;
}

static double sum_with(size_t at, float value)
{
    float saved = layer[at];
    layer[at] = value;
    double sum = layer_sum(9, 4);
    layer[at] = saved;
    return sum;
}

static void nan_and_inf_anywhere_reach_the_top(void **state)
{
    (void)state;
    enum isa best = isa_now();
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        isa_use(isa);
        for (size_t at = 0; at < 9 * BLOCK; at += 1021) {
            assert_int_equal(bits_of(sum_with(at, NAN)), bits_of((double)NAN));
            assert_int_equal(bits_of(sum_with(at, -NAN)), bits_of((double)NAN));
            assert_true(isinf(sum_with(at, INFINITY)));
            assert_true(isinf(sum_with(at, -INFINITY)));
        }
    }
    isa_use(best);
}

static void denormal_gradients_count_as_zero(void **state)
{
    (void)state;
    enum isa best = isa_now();
    static float g[BLOCK];
    for (unsigned i = 0; i < BLOCK; i++)
        g[i] = 0x1p-130f;
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        isa_use(isa);
        assert_int_equal(bits_of(page_sum(g, BLOCK)), 0);
    }
    isa_use(best);
}

static void the_largest_gradients_do_not_overflow(void **state)
{
    (void)state;
    static float g[BLOCK];
    for (unsigned i = 0; i < BLOCK; i++)
        g[i] = 0x1p127f;
    assert_int_equal(bits_of(page_sum(g, BLOCK)), bits_of(0x1p254 * BLOCK));
}

static void the_global_norm_is_the_root_of_the_layers_in_order(void **state)
{
    (void)state;
    const double layers[] = {9.0, 16.0}, broken[] = {1.0, NAN, 2.0};
    assert_true(norm_global(layers, 2) == 5.0);
    assert_true(norm_global(layers, 0) == 0.0);
    assert_true(isnan(norm_global(broken, 3)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_has_the_same_norm_bits_in_pieces),
        cmocka_unit_test(a_layer_has_the_same_norm_bits_for_every_page_size),
        cmocka_unit_test(all_implementations_give_the_same_bits),
        cmocka_unit_test(the_sum_is_the_sum_of_squares),
        cmocka_unit_test(the_tree_is_the_balanced_one_padded_with_zeros),
        cmocka_unit_test(the_order_of_additions_shows_in_the_bits),
        cmocka_unit_test(a_flipped_bit_of_a_gradient_changes_the_sum),
        cmocka_unit_test(nan_and_inf_anywhere_reach_the_top),
        cmocka_unit_test(denormal_gradients_count_as_zero),
        cmocka_unit_test(the_largest_gradients_do_not_overflow),
        cmocka_unit_test(the_global_norm_is_the_root_of_the_layers_in_order),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
