/* Files that are no run files: each is an error with a place, never a crash and never accepted. */
#include "tests/unit/test_config_fixture.h"

#include <sys/stat.h>

static void a_syntax_error_has_line_and_column(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, REQUIRED "[training]\nsteps = = 3\n"), "run.toml:6:9: ");
    assert_error(fixture_load(&config, REQUIRED "[training\n"), "run.toml:5:");
    assert_error(fixture_load(&config, REQUIRED "[training]\nsteps = 3\nsteps = 4\n"),
                 "run.toml:7:");
    assert_error(fixture_load(&config, REQUIRED "[model]\ndtype = \"float32\"\n"), "run.toml:5:");
    assert_error(fixture_load(&config, REQUIRED "[run]\noutput_dir = \"a\n"), "run.toml:6:");
    assert_error(fixture_load(&config, REQUIRED "[run]\nseed = 99999999999999999999\n"),
                 "run.toml:6:");
}

/* toml++ 3.3 would abort on these. */
static void an_assertion_of_the_parser_is_an_error_with_a_line(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, "[&"), "run.toml:1:1: not TOML");
    assert_error(fixture_load(&config, REQUIRED "[[[a]]]\n[run]\nseed = 1\n"),
                 "run.toml:5:1: not TOML");
    assert_error(fixture_load(&config, "[data]\ntrain = [\n'a',\n]\n[=\n"),
                 "run.toml:5:1: not TOML");
}

/* toml++ 3.3 has undefined behaviour for some of these. */
static void a_character_beyond_ascii_stands_in_quotes_and_comments_only(void **state)
{
    (void)state;
    struct config config;
    char *override[] = {"--run.output_dir=\xc3\xa9t\xc3\xa9"};
    assert_error(fixture_load(&config, REQUIRED "[run]\n\xc3\xa9 = 1\n"), "run.toml:6:1: not TOML");
    assert_error(fixture_load(&config, REQUIRED "[run]\n\"\xc3\xa9\" = 1\nseed = 1 \xe3\x81\x82\n"),
                 "run.toml:7:10: not TOML");
    assert_error(fixture_load(&config, REQUIRED "[run]\noutput_dir = \"\"\"a\"\"\"\" \xc3\xa9\n"),
                 "run.toml:6:23: not TOML");
    assert_loads(fixture_load(&config,
                              "\xef\xbb\xbf" REQUIRED
                              "[run] # \xc3\xa9\noutput_dir = '''\n/\xc3\xa9\"\xe3\x81\x82'''\n"));
    assert_string_equal(config.run_output_dir, "/\xc3\xa9\"\xe3\x81\x82");
    config_destroy(&config);
    assert_loads(fixture_load(&config, REQUIRED));
    config_destroy(&config);
    char path[512];
    (void)snprintf(path, sizeof path, "%s/run.toml", fixture_directory);
    assert_loads(config_load(&config, path, override, 1));
    assert_non_null(strstr(config.run_output_dir, "/\xc3\xa9t\xc3\xa9"));
    config_destroy(&config);
}

static void a_key_outside_a_section_is_an_error(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, "seed = 1\n" REQUIRED),
                 "run.toml:1:1: \"seed\" stands outside of any section");
}

static void a_table_in_a_section_is_an_error(void **state)
{
    (void)state;
    struct config config;
    const char *inside = "a table inside a section";
    assert_error(fixture_load(&config, REQUIRED "[training.seq_len]\na = 1\n"), inside);
    assert_error(fixture_load(&config, REQUIRED "[training]\nseq_len.max = 1\n"), inside);
    assert_error(fixture_load(&config, REQUIRED "[training]\nseq_len = {max = 1}\n"), inside);
    assert_error(fixture_load(&config, REQUIRED "[[training.seq_len]]\na = 1\n"), inside);
    assert_error(fixture_load(&config, REQUIRED "[[training]]\nsteps = 1\n"),
                 "stands outside of any section");
}

static void toml_has_other_ways_to_write_a_section(void **state)
{
    (void)state;
    struct config config;
    assert_loads(fixture_load(&config, "training.steps = 3\nrun = {seed = 5}\n"
                                       "\"model\".'path' = \"m\"\n[data]\ntrain = [\n\"d\",\n]\n"));
    assert_true(config.training_steps == 3 && config.run_seed == 5);
    config_destroy(&config);
    assert_error(fixture_load(&config, "training = {seqlen = 3}\n"), "did you mean");
}

static void not_a_number_is_refused(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, REQUIRED "[optimizer]\neps = nan\n"), "found nan");
    assert_error(fixture_load(&config, REQUIRED "[optimizer]\neps = -inf\n"), "found -inf");
}

static void bytes_that_are_no_text_are_an_error(void **state)
{
    (void)state;
    struct config config;
    unsigned char bytes[4096];
    uint32_t random = 12345;
    for (size_t round = 0; round < 200; round++) {
        for (size_t i = 0; i < sizeof bytes; i++) {
            random = random * 1664525u + 1013904223u;
            bytes[i] = (unsigned char)(random >> 24);
        }
        assert_int_equal(fixture_load_bytes(&config, bytes, sizeof bytes), -ERROR_USER);
    }
    assert_error(fixture_load_bytes(&config, "[run]\nseed = 1\0\n", 16), "run.toml:");
    assert_error(fixture_load_bytes(&config, "[run]\nresume = \"\xff\"\n", 18), "run.toml:");
}

/* Every way to cut or to damage a good file gives an error or a checked configuration. */
static void a_damaged_file_never_crashes(void **state)
{
    (void)state;
    struct config config;
    char text[] = REQUIRED "[optimizer]\nbetas = [0.9, 0.95]\nno_decay = [\"*a*\"]\nworkers = 2\n";
    for (size_t i = 0; i < sizeof text - 1; i++) {
        static const char damage[] = "\"[]{}=.#\n\\0'\x80";
        char kept = text[i];
        if (fixture_load_bytes(&config, text, i) == 0)
            config_destroy(&config);
        for (size_t j = 0; j < sizeof damage; j++) {
            text[i] = damage[j];
            if (fixture_load_bytes(&config, text, sizeof text - 1) == 0)
                config_destroy(&config);
            else
                assert_int_equal(error_kind_now(), ERROR_USER);
        }
        text[i] = kept;
    }
}

static char *repeated(const char *head, const char *part, size_t count, const char *tail)
{
    size_t head_bytes = strlen(head), part_bytes = strlen(part);
    char *text = malloc(head_bytes + part_bytes * count + strlen(tail) + 1);
    assert_non_null(text);
    memcpy(text, head, head_bytes);
    for (size_t i = 0; i < count; i++)
        memcpy(text + head_bytes + i * part_bytes, part, part_bytes);
    strcpy(text + head_bytes + part_bytes * count, tail);
    return text;
}

static void check_deep(const char *head, const char *part, size_t count, const char *tail)
{
    struct config config;
    char *text = repeated(head, part, count, tail);
    assert_error(fixture_load(&config, text), "run.toml:");
    free(text);
}

static void deep_nesting_is_an_error(void **state)
{
    (void)state;
    check_deep("[data]\ntrain = ", "[", 100000, "\n");
    check_deep("[data]\ntrain = ", "{a=", 100000, "\n");
    check_deep("", "a.", 400000, "a = 1\n");
    check_deep("[", "a.", 400000, "a]\n");
    check_deep("[data]\nx = {", "'a'.", 200000, "a = 1}\n");
    check_deep("", "a .", 300000, "a = 1\n???\n");
    check_deep("", "[[a]]\n", 100000, "");
}

static void long_dotted_values_are_no_deep_names(void **state)
{
    (void)state;
    struct config config;
    char *text = repeated("[model]\npath = \"", "../", 500, "\"\n[data]\ntrain = [\"d\"] # ...\n");
    assert_loads(fixture_load(&config, text));
    config_destroy(&config);
    free(text);
}

static void a_huge_file_is_an_error(void **state)
{
    (void)state;
    struct config config;
    char *text = repeated(REQUIRED, "# x\n", 300000, "");
    assert_error(fixture_load(&config, text), "larger than 1 MiB");
    free(text);
    text = repeated("[eval]\nsample_prompts = [", "\"x\",", 200000, "]\n" REQUIRED);
    assert_loads(fixture_load(&config, text));
    assert_int_equal(config.eval_sample_prompts.count, 200000);
    config_destroy(&config);
    free(text);
}

static void a_long_value_is_not_shown_whole(void **state)
{
    (void)state;
    struct config config;
    char *text = repeated(REQUIRED "[run]\nresume = \"", "x", 9000, "\"\n");
    assert_error(fixture_load(&config, text), "found a string of 9000 bytes");
    free(text);
    text = repeated(REQUIRED "[run]\n", "x", 9000, " = 1\n");
    assert_error(fixture_load(&config, text), "unknown key");
    free(text);
}

static void what_cannot_be_read_is_an_error(void **state)
{
    (void)state;
    struct config config;
    assert_error(config_load(&config, "/nonexistent.toml", NULL, 0),
                 "/nonexistent.toml: cannot be read: No such file or directory");
    assert_error(config_load(&config, fixture_directory, NULL, 0),
                 "cannot be read: Is a directory");
    assert_error(config_load(&config, "", NULL, 0), "cannot be read");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_syntax_error_has_line_and_column),
        cmocka_unit_test(an_assertion_of_the_parser_is_an_error_with_a_line),
        cmocka_unit_test(a_character_beyond_ascii_stands_in_quotes_and_comments_only),
        cmocka_unit_test(a_key_outside_a_section_is_an_error),
        cmocka_unit_test(a_table_in_a_section_is_an_error),
        cmocka_unit_test(toml_has_other_ways_to_write_a_section),
        cmocka_unit_test(not_a_number_is_refused),
        cmocka_unit_test(bytes_that_are_no_text_are_an_error),
        cmocka_unit_test(a_damaged_file_never_crashes),
        cmocka_unit_test(deep_nesting_is_an_error),
        cmocka_unit_test(long_dotted_values_are_no_deep_names),
        cmocka_unit_test(a_huge_file_is_an_error),
        cmocka_unit_test(a_long_value_is_not_shown_whole),
        cmocka_unit_test(what_cannot_be_read_is_an_error),
    };
    return cmocka_run_group_tests_name("config garbage", tests, fixture_setup, fixture_teardown);
}
