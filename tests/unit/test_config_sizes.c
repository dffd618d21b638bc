/* Sizes and durations as people write and read them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "launcher/size.h"

static void a_size_is_read_exactly(void **state)
{
    (void)state;
    const struct {
        const char *text;
        uint64_t bytes;
    } rows[] = {
        {"0B", 0},
        {"24GB", 24000000000},
        {"24GiB", 25769803776},
        {"1.5 GB", 1500000000},
        {"1.5GiB", 1610612736},
        {"0.1GB", 100000000},
        {"0.000000001GB", 1},
        {"7kB", 7000},
        {"7KB", 7000},
        {"7KiB", 7168},
        {"1TiB", 1099511627776},
        {"8191PiB", 9222246136947933184},
        {"100MB", 100000000},
        {"1.250TB", 1250000000000},
        {"9223PB", 9223000000000000000},
        {"007B", 7},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint64_t bytes = 1234567;
        assert_int_equal(size_parse(rows[i].text, &bytes), 0);
        assert_true(bytes == rows[i].bytes);
    }
}

static void what_is_no_size_is_refused(void **state)
{
    (void)state;
    const char *const rows[] = {"",       "GB",      "24",    "24gb",
                                "24 G",   "-1GB",    "1,5GB", "1.GB",
                                ".5GB",   "1.5.5GB", "1.5B",  "1e3GB",
                                " 1GB",   "1GB ",    "1  GB", "8192PiB",
                                "9224PB", "0.3KiB",  "80%",   "1234567890123456789B",
                                "nanGB",  "0x10KB",  "1GBGB", "1.00000000000000000000GB"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint64_t bytes = 1234567;
        assert_int_equal(size_parse(rows[i], &bytes), -1);
        assert_true(bytes == 1234567);
    }
}

static void a_size_is_shown_with_three_digits(void **state)
{
    (void)state;
    char text[SIZE_TEXT_BYTES_MAX];
    assert_string_equal(size_format(text, sizeof text, 0), "0 B");
    assert_string_equal(size_format(text, sizeof text, 999), "999 B");
    assert_string_equal(size_format(text, sizeof text, 1000), "1 KB");
    assert_string_equal(size_format(text, sizeof text, 1500000000), "1.5 GB");
    assert_string_equal(size_format(text, sizeof text, 27340000000), "27.3 GB");
    assert_string_equal(size_format(text, sizeof text, 999499), "999 KB");
    assert_string_equal(size_format(text, sizeof text, 999500), "1 MB");
    assert_string_equal(size_format(text, sizeof text, 999999999), "1 GB");
    assert_string_equal(size_format(text, sizeof text, UINT64_MAX), "18.4 EB");
}

static void a_duration_is_shown_in_two_units(void **state)
{
    (void)state;
    char text[SIZE_TEXT_BYTES_MAX];
    assert_string_equal(size_format_duration(text, sizeof text, 0.2), "0 s");
    assert_string_equal(size_format_duration(text, sizeof text, 45), "45 s");
    assert_string_equal(size_format_duration(text, sizeof text, 59.6), "1 min 0 s");
    assert_string_equal(size_format_duration(text, sizeof text, 725), "12 min 5 s");
    assert_string_equal(size_format_duration(text, sizeof text, 3 * 3600 + 12 * 60 + 30),
                        "3 h 12 min");
    assert_string_equal(size_format_duration(text, sizeof text, 5 * 86400 + 3 * 3600), "5 d 3 h");
    assert_string_equal(size_format_duration(text, sizeof text, -1), "unknown");
    assert_string_equal(size_format_duration(text, sizeof text, __builtin_nan("")), "unknown");
    assert_string_equal(size_format_duration(text, sizeof text, __builtin_inf()), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_size_is_read_exactly),
        cmocka_unit_test(what_is_no_size_is_refused),
        cmocka_unit_test(a_size_is_shown_with_three_digits),
        cmocka_unit_test(a_duration_is_shown_in_two_units),
    };
    return cmocka_run_group_tests_name("sizes", tests, NULL, NULL);
}
