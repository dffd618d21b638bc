/* The effective file reads back to the same configuration; what a resumed run may change. */
#include "tests/unit/test_config_fixture.h"
#include "tests/unit/test_config_values.h"

/* By hand, beside the RESUME column: these refuse, all others are announced. */
static const char *const fixed[] = {
    "run.seed",
    "model.path",
    "model.init",
    "model.dtype",
    "model.tokenizer",
    "data.train",
    "data.val_fraction",
    "data.format",
    "data.packing",
    "data.overlong",
    "data.shuffle",
    "training.seq_len",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
    "optimizer.name",
    "optimizer.compression",
    "memory.offload_dir",
    "memory.verify_writes",
    "memory.page_elements",
};

/* Of those, the ones that change no bit of the numbers. */
static const char *const fixed_without_bits[] = {"memory.offload_dir", "memory.verify_writes"};

static bool is_in(const struct config_key *key, const char *const names[], size_t count)
{
    char name[80];
    (void)snprintf(name, sizeof name, "%s.%s", key->section, key->name);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(name, names[i]) == 0)
            return true;
    }
    return false;
}
#define IS_IN(key, names) is_in(key, names, sizeof names / sizeof *names)

static void assert_equal(const struct config *a, const struct config *b)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        char *x = config_value_text(key, config_key_value(key, a));
        char *y = config_value_text(key, config_key_value(key, b));
        assert_string_equal(x, y);
        free(x);
        free(y);
    }
}

static void assert_round_trip(const struct config *config)
{
    char path[128];
    struct config back;
    (void)snprintf(path, sizeof path, "%s/effective.toml", fixture_directory);
    assert_int_equal(config_write(config, path), 0);
    assert_loads(config_load(&back, path, NULL, 0));
    assert_equal(config, &back);
    config_destroy(&back);
    assert_int_equal(unlink(path), 0);
}

static void every_value_reads_back_from_the_effective_file(void **state)
{
    (void)state;
    struct config config;
    for (size_t i = 0; i < expectation_count; i++) {
        assert_loads(fixture_load_key(&config, &config_key_table[i], expectations[i].good));
        assert_round_trip(&config);
        config_destroy(&config);
    }
    assert_loads(fixture_load(&config, REQUIRED));
    assert_round_trip(&config);
    config_destroy(&config);
}

static void odd_strings_and_numbers_read_back(void **state)
{
    (void)state;
    struct config config;
    assert_loads(fixture_load(&config,
                              "[model]\npath = \"a \\\"b\\\" \\\\ \\n \\t \\u007f # \\u00fc\"\n"
                              "[data]\ntrain = [\"x,y\", \"]\", \"'\"]\nval_fraction = 0.1\n"
                              "[optimizer]\nlearning_rate = 3.3333333333333335e-4\neps = 1.2e-38\n"
                              "betas = [0, 0.99999999999999989]\nno_decay = []\n"
                              "[run]\nseed = 9223372036854775807\n"
                              "[training]\nepochs = 1e-3\nmax_grad_norm = -0.0\n"
                              "[lr_scheduler]\nwarmup_ratio = 0.0\n"));
    assert_true(config.optimizer_learning_rate == 3.3333333333333335e-4);
    assert_round_trip(&config);
    config_destroy(&config);
}

static void an_unwritable_effective_file_is_an_error(void **state)
{
    (void)state;
    struct config config;
    assert_loads(fixture_load(&config, REQUIRED));
    assert_int_equal(config_write(&config, "/nonexistent/x.toml"), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "/nonexistent/x.toml: cannot be written: No such file"));
    assert_int_equal(config_write(&config, "/dev/full"), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "No space left"));
    config_destroy(&config);
}

struct lines {
    size_t count;
    char text[8][256];
};

static void keep_line(void *context, const char *line)
{
    struct lines *lines = context;
    assert_true(lines->count < 8);
    (void)snprintf(lines->text[lines->count++], sizeof lines->text[0], "%s", line);
}

static bool same_hash(const struct config *a, const struct config *b)
{
    struct config_hash x = config_bits_hash(a), y = config_bits_hash(b);
    return x.high == y.high && x.low == y.low;
}

/* One changed key against a run of defaults. */
static void check_change(const struct config *old, const struct config *now,
                         const struct config_key *key)
{
    char *old_text = config_value_text(key, config_key_value(key, old));
    char *now_text = config_value_text(key, config_key_value(key, now));
    bool changed = strcmp(old_text, now_text) != 0;
    bool refused = changed && IS_IN(key, fixed);
    char start[80];
    struct lines lines = {0};
    (void)snprintf(start, sizeof start, "[%s] %s: ", key->section, key->name);
    int rc = config_compare_resume(old, now, keep_line, &lines);
    if (refused) {
        /* the derived key is refused under the name of the one it is derived from */
        assert_error(rc, key->change == CONFIG_CHANGE_FOLLOWS ? "[training] gradient_acc" : start);
        assert_non_null(strstr(error_text(), "may not change"));
        assert_int_equal(lines.count, 0);
    } else {
        assert_int_equal(rc, 0);
        assert_int_equal(lines.count > 0, changed);
    }
    assert_int_equal(same_hash(old, now), !refused || IS_IN(key, fixed_without_bits));
    free(old_text);
    free(now_text);
}

static void each_changed_key_is_announced_or_refused_by_the_table(void **state)
{
    (void)state;
    struct config old, now;
    assert_loads(fixture_load(&old, REQUIRED));
    for (size_t i = 0; i < expectation_count; i++) {
        assert_loads(fixture_load_key(&now, &config_key_table[i], expectations[i].good));
        check_change(&old, &now, &config_key_table[i]);
        config_destroy(&now);
    }
    config_destroy(&old);
}

static void changes_are_announced_old_to_new(void **state)
{
    (void)state;
    struct config old, now;
    struct lines lines = {0};
    assert_loads(fixture_load(&old, REQUIRED));
    assert_loads(fixture_load(&now, REQUIRED "[training]\nepochs = 2\n[optimizer]\nworkers = 4\n"
                                             "[log]\nmax_size = \"1MB\"\n"));
    assert_int_equal(config_compare_resume(&old, &now, keep_line, &lines), 0);
    assert_int_equal(lines.count, 4);
    assert_string_equal(lines.text[0], "[training] steps: 1000 -> off");
    assert_string_equal(lines.text[1], "[training] epochs: off -> 2.0");
    assert_string_equal(lines.text[2], "[optimizer] workers: \"auto\" -> 4");
    assert_string_equal(lines.text[3], "[log] max_size: 100000000 -> 1000000");
    config_destroy(&old);
    config_destroy(&now);
}

static void a_refusal_names_both_values_and_announces_nothing(void **state)
{
    (void)state;
    struct config old, now;
    struct lines lines = {0};
    assert_loads(fixture_load(&old, REQUIRED));
    assert_loads(fixture_load(&now, REQUIRED "[training]\nsteps = 5\nseq_len = 4096\n"));
    assert_error(config_compare_resume(&old, &now, keep_line, &lines),
                 "[training] seq_len: may not change in a run that goes on: it was started with "
                 "2048, found 4096");
    assert_int_equal(lines.count, 0);
    assert_int_equal(config_compare_resume(&old, &old, NULL, NULL), 0);
    config_destroy(&old);
    config_destroy(&now);
}

static void the_same_batch_said_otherwise_is_no_change(void **state)
{
    (void)state;
    struct config old, now;
    struct lines lines = {0};
    assert_loads(fixture_load(&old, REQUIRED));
    assert_loads(fixture_load(&now, REQUIRED "[training]\nglobal_batch_size = 8\n"
                                             "activation_checkpointing = \"auto\"\n"));
    assert_int_equal(config_compare_resume(&old, &now, keep_line, &lines), 0);
    assert_int_equal(lines.count, 0);
    assert_true(same_hash(&old, &now));
    config_destroy(&old);
    config_destroy(&now);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_reads_back_from_the_effective_file),
        cmocka_unit_test(odd_strings_and_numbers_read_back),
        cmocka_unit_test(an_unwritable_effective_file_is_an_error),
        cmocka_unit_test(each_changed_key_is_announced_or_refused_by_the_table),
        cmocka_unit_test(changes_are_announced_old_to_new),
        cmocka_unit_test(a_refusal_names_both_values_and_announces_nothing),
        cmocka_unit_test(the_same_batch_said_otherwise_is_no_change),
    };
    return cmocka_run_group_tests_name("config resume", tests, fixture_setup, fixture_teardown);
}
