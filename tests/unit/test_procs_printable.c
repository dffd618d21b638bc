/* Text for people: what a terminal would obey is shown. */
#include "procs/printable.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void expect(const char *text, const char *shown)
{
    char out[256], *stream = NULL;
    size_t bytes = 0;
    assert_int_equal(printable_copy(out, sizeof out, text), strlen(shown));
    assert_string_equal(out, shown);
    FILE *f = open_memstream(&stream, &bytes);
    assert_non_null(f);
    printable_put(text, f);
    assert_int_equal(fclose(f), 0);
    assert_string_equal(stream, shown);
    free(stream);
}

static void text_newlines_and_tabs_stay(void **state)
{
    (void)state;
    expect("", "");
    expect("a line\n\tand another, \xc3\xa9\xe2\x82\xac",
           "a line\n\tand another, \xc3\xa9\xe2\x82\xac");
    expect("bytes that are no UTF-8 \xff\xc2", "bytes that are no UTF-8 \xff\xc2");
}

static void control_bytes_are_shown(void **state)
{
    (void)state;
    expect("\x1b[31mred\x07\r\x7f", "\\x1b[31mred\\x07\\x0d\\x7f");
    expect("\xc2\x9b"
           "31m",
           "\\xc2\\x9b"
           "31m");
    expect("\xc2\xa0 is no control", "\xc2\xa0 is no control");
    for (int c = 1; c < 0x20; c++) {
        char text[2] = {(char)c, '\0'}, shown[8];
        (void)snprintf(shown, sizeof shown, c == '\n' || c == '\t' ? "%c" : "\\x%02x", c);
        expect(text, shown);
    }
}

static void what_does_not_fit_is_cut_between_characters(void **state)
{
    (void)state;
    char out[8];
    assert_int_equal(printable_copy(out, sizeof out, "abcdef\x1bz"), 6);
    assert_string_equal(out, "abcdef");
    assert_int_equal(printable_copy(out, sizeof out, "abc\x1bz"), 7);
    assert_string_equal(out, "abc\\x1b");
    out[0] = 'x';
    assert_int_equal(printable_copy(out, 1, "abc"), 0);
    assert_string_equal(out, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_newlines_and_tabs_stay),
        cmocka_unit_test(control_bytes_are_shown),
        cmocka_unit_test(what_does_not_fit_is_cut_between_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
