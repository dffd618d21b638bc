/* Every key: what it takes, what it refuses, what an unknown name is told, and the shipped example.
 */
#include "tests/unit/test_config_fixture.h"
#include "tests/unit/test_config_values.h"

static void the_tests_know_every_key(void **state)
{
    (void)state;
    assert_int_equal(expectation_count, CONFIG_KEY_COUNT);
    for (size_t i = 0; i < expectation_count; i++) {
        const struct config_key *key =
            config_key_find(expectations[i].section, expectations[i].name);
        assert_non_null(key);
        assert_ptr_equal(key, &config_key_table[i]);
    }
}

static void a_valid_value_arrives_in_its_field(void **state)
{
    (void)state;
    for (size_t i = 0; i < expectation_count; i++) {
        const struct expectation *e = &expectations[i];
        const struct config_key *key = &config_key_table[i];
        struct config config;
        assert_loads(fixture_load_key(&config, key, e->good));
        char *text = config_value_text(key, config_key_value(key, &config));
        assert_string_equal(text, e->shown[0] ? e->shown : e->good);
        free(text);
        config_destroy(&config);
    }
}

static void a_wrong_value_is_refused_with_place_name_and_both_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < expectation_count; i++) {
        const struct expectation *e = &expectations[i];
        assert_non_null(e->refused[0]);
        for (size_t j = 0; j < REFUSED_MAX && e->refused[j]; j++) {
            struct config config;
            char where[256];
            (void)snprintf(where, sizeof where, "%s:2:1: [%s] %s: expected ", fixture_path,
                           e->section, e->name);
            assert_error(fixture_load_key(&config, &config_key_table[i], e->refused[j]), where);
            assert_non_null(strstr(error_text(), ", found "));
        }
    }
}

static void no_key_takes_a_date_or_a_table(void **state)
{
    (void)state;
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        struct config config;
        const struct config_key *key = &config_key_table[i];
        assert_error(fixture_load_key(&config, key, "2026-01-01"), "found a date");
        assert_error(fixture_load_key(&config, key, "12:00:00"), "found a time");
        assert_error(fixture_load_key(&config, key, "{a = 1}"), "a table inside a section");
    }
}

static void a_message_names_the_limits_and_the_value(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, REQUIRED "[training]\n  seq_len = \"abc\"\n"),
                 "run.toml:6:3: [training] seq_len: expected an integer from 1 to 16777216, found "
                 "\"abc\"");
    assert_error(fixture_load(&config, REQUIRED "[optimizer]\nworkers = 0\n"),
                 "expected \"auto\" or an integer from 1 to 64, found 0");
    assert_error(fixture_load(&config, REQUIRED "[memory]\ndevice = \"gpu\"\n"),
                 "expected \"auto\", \"cpu\" or \"cuda:N\" with N from 0 to 127, found \"gpu\"");
    assert_error(fixture_load(&config, REQUIRED "[lr_scheduler]\ntype = \"step\"\n"),
                 "expected \"constant\", \"linear\", \"cosine\" or \"wsd\", found \"step\"");
}

static void words_have_their_values(void **state)
{
    (void)state;
    struct config config;
    assert_loads(fixture_load(&config, REQUIRED));
    assert_true(config.memory_device == CONFIG_AUTO && config.memory_max_ram == CONFIG_AUTO);
    assert_true(config.memory_prefetch == CONFIG_AUTO && config.memory_threads == CONFIG_AUTO);
    assert_true(config.memory_durability == 1);
    assert_true(config.training_activation_checkpointing == CONFIG_AUTO);
    assert_string_equal(config.model_tokenizer, "");
    config_destroy(&config);
    assert_loads(fixture_load(&config,
                              REQUIRED "[memory]\ndevice = \"cuda:3\"\ndurability = 1\n"
                                       "[training]\nactivation_checkpointing = \"none\"\n"));
    assert_true(config.memory_device == 3 && config.memory_durability == 1);
    assert_true(config.training_activation_checkpointing == CONFIG_CHECKPOINTING_NONE);
    config_destroy(&config);
}

static void an_unknown_key_is_told_its_nearest_name(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, REQUIRED "[training]\nseqlen = 1\n"),
                 "run.toml:6:1: [training] seqlen: unknown key\n  hint: did you mean [training] "
                 "seq_len?");
    assert_error(fixture_load(&config, REQUIRED "[training]\nlearning_rate = 1\n"),
                 "did you mean [optimizer] learning_rate?");
    assert_error(fixture_load(&config, REQUIRED "[optimizer]\nbeta = 1\n"),
                 "did you mean [optimizer] betas?");
    assert_error(fixture_load(&config, REQUIRED "[optimizer]\nxyzzyplughfoo = 1\n"),
                 "[optimizer] xyzzyplughfoo: unknown key");
    assert_null(strstr(error_text(), "did you mean"));
}

static void every_key_with_a_letter_lost_is_told_its_name(void **state)
{
    (void)state;
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        char text[256], hint[256];
        (void)snprintf(text, sizeof text, "%s[%s]\n%s = 1\n",
                       strcmp(key->section, "model") == 0  ? "[data]\ntrain = [\"d\"]\n"
                       : strcmp(key->section, "data") == 0 ? "[model]\npath = \"m\"\n"
                                                           : REQUIRED,
                       key->section, key->name + 1);
        (void)snprintf(hint, sizeof hint, "did you mean [%s] %s?", key->section, key->name);
        struct config config;
        assert_error(fixture_load(&config, text), hint);
    }
}

static void an_unknown_section_is_an_error_even_when_empty(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, REQUIRED "[optimiser]\n"),
                 "run.toml:5:2: [optimiser]: unknown section\n  hint: did you mean [optimizer]?");
    assert_error(fixture_load(&config, REQUIRED "[zzz]\na = 1\n"), "sections are run, model");
}

static void a_missing_required_key_is_named(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, ""), "run.toml: [model] path: required, but not given");
    assert_error(fixture_load(&config, "[model]\npath = \"m\"\n"),
                 "run.toml: [data] train: required, but not given");
}

static void a_failed_load_holds_nothing(void **state)
{
    (void)state;
    struct config config, zero;
    memset(&zero, 0, sizeof zero);
    assert_error(fixture_load(&config, REQUIRED "[training]\nsteps = 0\n"), "steps");
    assert_memory_equal(&config, &zero, sizeof zero);
    config_destroy(&config);
}

static void paths_are_relative_to_the_run_file(void **state)
{
    (void)state;
    struct config config;
    char *directory = realpath(fixture_directory, NULL), expected[4200];
    assert_non_null(directory);
    assert_loads(fixture_load(&config, "[model]\npath = \"./a//b/./c/\"\n"
                                       "[data]\ntrain = [\"x/../y.txt\", \"/abs//z.txt\"]\n"
                                       "[run]\noutput_dir = \"/\"\n"));
    (void)snprintf(expected, sizeof expected, "%s/a/b/c", directory);
    assert_string_equal(config.model_path, expected);
    (void)snprintf(expected, sizeof expected, "%s/x/../y.txt", directory);
    assert_string_equal(config.data_train.items[0], expected);
    assert_string_equal(config.data_train.items[1], "/abs/z.txt");
    assert_string_equal(config.run_output_dir, "/");
    config_destroy(&config);
    free(directory);
}

static void an_evaluation_of_nothing_is_refused(void **state)
{
    (void)state;
    struct config config;
    assert_error(fixture_load(&config, REQUIRED "[eval]\ninterval = 5\n"),
                 "run.toml:6:1: [eval] interval: there is nothing to evaluate");
    assert_loads(
        fixture_load(&config, REQUIRED "[eval]\ninterval = 5\nsample_prompts = [\"a\"]\n"));
    config_destroy(&config);
    assert_loads(fixture_load(&config, REQUIRED "val_fraction = 0.1\n[eval]\ninterval = 5\n"));
    config_destroy(&config);
}

static char *read_file(const char *path)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    char *text = calloc(1, 1 << 16);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 16) - 1, file) > 0);
    assert_int_equal(fclose(file), 0);
    return text;
}

static void the_example_says_every_key_with_its_default(void **state)
{
    (void)state;
    const char *path = "examples/run.example.toml";
    struct config example, defaults;
    char *text = read_file(path);
    assert_loads(config_load(&example, path, NULL, 0));
    assert_loads(fixture_load(&defaults, REQUIRED));
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        char assigned[80], alternative[80];
        (void)snprintf(assigned, sizeof assigned, "\n%s = ", key->name);
        (void)snprintf(alternative, sizeof alternative, "# or %s", key->name);
        assert_true(strstr(text, assigned) || strstr(text, alternative));
        if (config_key_is_required(key) || key->type == CONFIG_TYPE_PATH)
            continue;
        char *a = config_value_text(key, config_key_value(key, &example));
        char *b = config_value_text(key, config_key_value(key, &defaults));
        assert_string_equal(a, b);
        free(a);
        free(b);
    }
    assert_non_null(strstr(example.run_output_dir, "/examples/runs/example"));
    assert_non_null(strstr(defaults.run_output_dir, "/runs/example"));
    assert_int_equal(config_refuse_missing(&example), 0);
    config_destroy(&example);
    config_destroy(&defaults);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_tests_know_every_key),
        cmocka_unit_test(a_valid_value_arrives_in_its_field),
        cmocka_unit_test(a_wrong_value_is_refused_with_place_name_and_both_values),
        cmocka_unit_test(no_key_takes_a_date_or_a_table),
        cmocka_unit_test(a_message_names_the_limits_and_the_value),
        cmocka_unit_test(words_have_their_values),
        cmocka_unit_test(an_unknown_key_is_told_its_nearest_name),
        cmocka_unit_test(every_key_with_a_letter_lost_is_told_its_name),
        cmocka_unit_test(an_unknown_section_is_an_error_even_when_empty),
        cmocka_unit_test(a_missing_required_key_is_named),
        cmocka_unit_test(a_failed_load_holds_nothing),
        cmocka_unit_test(paths_are_relative_to_the_run_file),
        cmocka_unit_test(an_evaluation_of_nothing_is_refused),
        cmocka_unit_test(the_example_says_every_key_with_its_default),
    };
    return cmocka_run_group_tests_name("config keys", tests, fixture_setup, fixture_teardown);
}
