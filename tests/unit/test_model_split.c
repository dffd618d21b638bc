/* Split master weights are a bijection; the conversions between float types round as IEEE 754 says.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "model/dtype.h"
#include "model/split.h"

enum { CHUNK = 4096 };

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Checks `n` patterns start, start + stride, ... in chunks. */
static void check_round_trip(uint32_t start, uint32_t stride, uint64_t n)
{
    static float master[CHUNK], joined[CHUNK];
    static uint16_t hi[CHUNK], lo[CHUNK];
    uint32_t bits = start;
    for (uint64_t done = 0; done < n; done += CHUNK) {
        for (int i = 0; i < CHUNK; i++, bits += stride)
            memcpy(&master[i], &bits, sizeof bits);
        split_master(master, CHUNK, hi, lo);
        join_master(hi, lo, CHUNK, joined);
        assert_memory_equal(master, joined, sizeof master);
    }
}

static void every_upper_half_comes_back(void **state)
{
    (void)state;
    /* 0x10000 upper halves, each with lower halves 0, 1, 0x7fff, 0x8000, 0x8001, 0xffff */
    const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (int i = 0; i < 6; i++)
        check_round_trip(lower[i], 0x10000, 0x10000);
}

static void patterns_all_over_come_back(void **state)
{
    (void)state;
    check_round_trip(12345, 257, (uint64_t)1 << 24); /* odd stride: 2^24 distinct patterns */
    check_round_trip(0x3f7f0000, 1, 0x20000);        /* every lower half, two upper ones */
    check_round_trip(0xffff0000, 1, 0x20000);        /* across the wrap-around, NaN and zero */
}

static void the_upper_half_is_the_nearest_bf16(void **state)
{
    (void)state;
    const struct {
        uint32_t master;
        uint16_t hi, lo;
    } cases[] = {
        {0x3f800000, 0x3f80, 0x0000}, {0x3f807fff, 0x3f80, 0x7fff}, {0x3f808000, 0x3f81, 0x8000},
        {0x3f818000, 0x3f82, 0x8000}, {0xbf808000, 0xbf81, 0x8000}, {0x7f800000, 0x7f80, 0x0000},
        {0x7f7fffff, 0x7f80, 0xffff}, {0x00000001, 0x0000, 0x0001}, {0x007fffff, 0x0080, 0xffff},
        {0x7fc00000, 0x7fc0, 0x0000}, {0x80000000, 0x8000, 0x0000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float master = from_bits(cases[i].master);
        uint16_t hi, lo;
        split_master(&master, 1, &hi, &lo);
        assert_int_equal(hi, cases[i].hi);
        assert_int_equal(lo, cases[i].lo);
    }
}

static void every_f16_widens_as_the_compiler_does(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        uint16_t half = (uint16_t)h;
        __extension__ _Float16 reference;
        float found;
        memcpy(&reference, &half, sizeof half);
        dtype_f16_to_f32(&half, 1, &found);
        float expected = (float)reference;
        if (isnan(expected))
            assert_true(isnan(found));
        else
            assert_int_equal(to_bits(found), to_bits(expected));
    }
}

static void f32_narrows_to_f16_as_the_compiler_does(void **state)
{
    (void)state;
    uint32_t bits = 0;
    for (uint32_t i = 0; i < (1u << 21); i++, bits += 2049) {
        float value = from_bits(bits);
        uint16_t found, expected;
        dtype_f32_to_f16(&value, 1, &found);
        __extension__ _Float16 reference = (_Float16)value;
        memcpy(&expected, &reference, sizeof expected);
        if (isnan(value))
            assert_true((found & 0x7fff) > 0x7c00);
        else
            assert_int_equal(found, expected);
    }
}

/* Around every f16 value: the midpoint to its neighbour, and one f32 step to either side of it. */
static void ties_to_f16_go_to_even(void **state)
{
    (void)state;
    for (uint16_t h = 0; h < 0x7bff; h++) {
        float a, b;
        uint16_t next = (uint16_t)(h + 1), found;
        dtype_f16_to_f32(&h, 1, &a);
        dtype_f16_to_f32(&next, 1, &b);
        float middle = 0.5f * (a + b); /* exact */
        dtype_f32_to_f16(&middle, 1, &found);
        assert_int_equal(found, h & 1 ? next : h);
        float below = from_bits(to_bits(middle) - 1), above = from_bits(to_bits(middle) + 1);
        dtype_f32_to_f16(&below, 1, &found);
        assert_int_equal(found, h);
        dtype_f32_to_f16(&above, 1, &found);
        assert_int_equal(found, next);
    }
}

static void f32_narrows_to_bf16_nearest_even(void **state)
{
    (void)state;
    const struct {
        uint32_t in;
        uint16_t out;
    } cases[] = {
        {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82},
        {0x7f7fffff, 0x7f80}, {0xff7fffff, 0xff80}, {0x7f800001, 0x7fc0}, {0x7fffffff, 0x7fff},
        {0xffffffff, 0xffff}, {0x00008000, 0x0000}, {0x00018000, 0x0002}, {0x80000000, 0x8000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float value = from_bits(cases[i].in);
        uint16_t found;
        dtype_f32_to_bf16(&value, 1, &found);
        assert_int_equal(found, cases[i].out);
        float back;
        dtype_bf16_to_f32(&found, 1, &back);
        assert_int_equal(to_bits(back), (uint32_t)found << 16);
    }
}

static void dtype_names_are_those_of_the_formats(void **state)
{
    (void)state;
    enum model_dtype dtype;
    assert_string_equal(model_dtype_name(DTYPE_BF16), "BF16");
    assert_int_equal(model_dtype_bytes(DTYPE_F64), 8);
    assert_int_equal(model_dtype_from_name("F8_E4M3", &dtype), 0);
    assert_int_equal(dtype, DTYPE_F8_E4M3);
    assert_int_equal(model_dtype_from_name("F4", &dtype), -1);
    assert_int_equal(model_dtype_from_torch_name("bfloat16", &dtype), 0);
    assert_int_equal(dtype, DTYPE_BF16);
    assert_int_equal(model_dtype_from_torch_name("int8", &dtype), -1);
    assert_string_equal(model_dtype_torch_name(DTYPE_F16), "float16");
    assert_null(model_dtype_torch_name(DTYPE_I8));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_upper_half_comes_back),
        cmocka_unit_test(patterns_all_over_come_back),
        cmocka_unit_test(the_upper_half_is_the_nearest_bf16),
        cmocka_unit_test(every_f16_widens_as_the_compiler_does),
        cmocka_unit_test(f32_narrows_to_f16_as_the_compiler_does),
        cmocka_unit_test(ties_to_f16_go_to_even),
        cmocka_unit_test(f32_narrows_to_bf16_nearest_even),
        cmocka_unit_test(dtype_names_are_those_of_the_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
