/* What goes into metrics.jsonl is JSON in UTF-8, whatever a model says. */
#include "launcher/metrics.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void quoted_is(const char *text, const char *expected)
{
    char out[256];
    assert_string_equal(metrics_quote(out, sizeof out, text), expected);
}

static void text_is_quoted(void **state)
{
    (void)state;
    quoted_is("", "\"\"");
    quoted_is("a \"b\" \\ c", "\"a \\\"b\\\" \\\\ c\"");
    quoted_is("\n\x7f", "\"\\u000a\\u007f\"");
    quoted_is("\xc2\x9b\xc2\xa0", "\"\\u009b\xc2\xa0\""); /* C1 controls too, text as it is */
    quoted_is("\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\"");
}

static void bytes_that_are_no_utf8_are_replaced(void **state)
{
    (void)state;
    quoted_is("\x80", "\"\\ufffd\"");
    quoted_is("a\xff"
              "b",
              "\"a\\ufffdb\"");
    quoted_is("\xe2\x82", "\"\\ufffd\\ufffd\""); /* cut off in a character */
    quoted_is("\xe2\"", "\"\\ufffd\\\"\"");      /* and before a byte that needs escaping */
    quoted_is("\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\""); /* a surrogate */
}

static void a_long_text_is_cut_within_its_room(void **state)
{
    (void)state;
    char text[64], out[32];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    (void)metrics_quote(out, sizeof out, text);
    assert_true(strlen(out) < sizeof out && out[strlen(out) - 1] == '"');
}

/* A sample may be as long as the launcher lets it be; half a line would be no JSON. */
static void a_long_event_is_whole(void **state)
{
    (void)state;
    char directory[] = "/tmp/mt-metrics-XXXXXX", path[64], line[16384], fields[12288];
    struct metrics *m = NULL;
    assert_non_null(mkdtemp(directory));
    assert_int_equal(metrics_open(&m, directory, 0), 0);
    (void)snprintf(fields, sizeof fields, ", \"text\": \"%012000d\"", 0);
    metrics_event(m, "sample", fields);
    metrics_close(m);
    (void)snprintf(path, sizeof path, "%s/metrics.jsonl", directory);
    FILE *in = fopen(path, "re");
    assert_non_null(in);
    assert_non_null(fgets(line, sizeof line, in));
    assert_string_equal(line + strlen(line) - 3, "\"}\n");
    assert_null(fgets(line, sizeof line, in));
    (void)fclose(in);
    (void)unlink(path);
    (void)rmdir(directory);
}

/* A process may die between the loss of an evaluation and its last sample: it is done again. */
static void an_evaluation_is_told_with_its_last_sample(void **state)
{
    (void)state;
    static const char *const fields[] = {", \"step\": 3, \"val_loss\": 1",
                                         ", \"step\": 3, \"prompt\": 0, \"text\": \"a\"",
                                         ", \"step\": 3, \"prompt\": 1, \"text\": \"b\""};
    static const uint64_t without_prompts[] = {3, 3, 3}, of_two[] = {0, 2, 3};
    char directory[] = "/tmp/mt-metrics-XXXXXX", path[64];
    struct metrics *m = NULL;
    assert_non_null(mkdtemp(directory));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(metrics_open(&m, directory, 3), 0);
        metrics_event(m, i ? "sample" : "eval", fields[i]);
        metrics_close(m);
        assert_int_equal(metrics_open(&m, directory, 3), 0);
        assert_int_equal(metrics_last_evaluation(m, 0), without_prompts[i]);
        assert_int_equal(metrics_last_evaluation(m, 2), of_two[i]);
        metrics_close(m);
    }
    (void)snprintf(path, sizeof path, "%s/metrics.jsonl", directory);
    (void)unlink(path);
    (void)rmdir(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_quoted),
        cmocka_unit_test(bytes_that_are_no_utf8_are_replaced),
        cmocka_unit_test(a_long_text_is_cut_within_its_room),
        cmocka_unit_test(a_long_event_is_whole),
        cmocka_unit_test(an_evaluation_is_told_with_its_last_sample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
