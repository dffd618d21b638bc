/* Alternatives, the command line over the file, and values this build has no mechanism for. */
#include "tests/unit/test_config_fixture.h"

static int load2(struct config *config, const char *text, const char *override)
{
    char *overrides[] = {(char *)(uintptr_t) override};
    fixture_write(text, strlen(text));
    error_clear();
    return config_load(config, fixture_path, overrides, 1);
}

static void one_alternative_removes_the_default_of_the_other(void **state)
{
    (void)state;
    struct config c;
    assert_loads(fixture_load(&c, REQUIRED "validation = [\"v\"]\n[training]\nepochs = 2\n"
                                           "global_batch_size = 12\nmicro_batch_size = 4\n"
                                           "[lr_scheduler]\nwarmup_ratio = 0.1\n"));
    assert_true(c.training_steps == 0 && c.training_epochs == 2.0);
    assert_true(c.training_gradient_accumulation_steps == 3 && c.training_global_batch_size == 12);
    assert_true(c.lr_scheduler_warmup_steps == 0 && c.lr_scheduler_warmup_ratio == 0.1);
    config_destroy(&c);
    assert_loads(fixture_load(&c, REQUIRED "[lr_scheduler]\nwarmup_ratio = 0.0\n"
                                           "[training]\nmicro_batch_size = 2\n"));
    assert_true(c.lr_scheduler_warmup_steps == 0 && c.lr_scheduler_warmup_ratio == 0.0);
    assert_true(c.training_steps == 1000 && c.training_epochs == 0.0);
    assert_true(c.training_gradient_accumulation_steps == 8 && c.training_global_batch_size == 16);
    config_destroy(&c);
}

static void both_alternatives_are_an_error(void **state)
{
    (void)state;
    struct config c;
    assert_error(fixture_load(&c, REQUIRED "[training]\nsteps = 5\nepochs = 2\n"),
                 "run.toml:6:1: [training] steps: expected one of steps and epochs, found both");
    assert_error(fixture_load(&c, REQUIRED "[training]\ngradient_accumulation_steps = 5\n"
                                           "global_batch_size = 5\n"),
                 "found both");
    assert_error(
        fixture_load(&c, REQUIRED "[lr_scheduler]\nwarmup_steps = 5\nwarmup_ratio = 0.5\n"),
        "found both");
    assert_error(fixture_load(&c, REQUIRED "validation = [\"v\"]\nval_fraction = 0.5\n"),
                 "found both");
    char *both[] = {(char *)(uintptr_t) "--training.steps=3",
                    (char *)(uintptr_t) "--training.epochs=3"};
    fixture_write(REQUIRED, strlen(REQUIRED));
    assert_error(config_load(&c, fixture_path, both, 2), "--training.steps=3: [training] steps");
}

static void an_alternative_that_is_off_does_not_count(void **state)
{
    (void)state;
    struct config c;
    assert_loads(fixture_load(&c, REQUIRED "validation = []\nval_fraction = 0.5\n"
                                           "[lr_scheduler]\nwarmup_steps = 5\nwarmup_ratio = 0\n"));
    assert_true(c.data_val_fraction == 0.5 && c.lr_scheduler_warmup_steps == 5);
    config_destroy(&c);
}

static void the_command_line_replaces_the_files_alternative(void **state)
{
    (void)state;
    struct config c;
    assert_loads(load2(&c, REQUIRED "[training]\nsteps = 5\n", "--training.epochs=0.5"));
    assert_true(c.training_steps == 0 && c.training_epochs == 0.5);
    config_destroy(&c);
    assert_loads(load2(&c, REQUIRED "validation = [\"v\", \"w\"]\n", "--data.val_fraction=0.25"));
    assert_true(c.data_validation.count == 0 && c.data_val_fraction == 0.25);
    config_destroy(&c);
}

static void a_global_batch_is_a_multiple_of_the_microbatch(void **state)
{
    (void)state;
    struct config c;
    assert_error(fixture_load(&c, REQUIRED "[training]\nglobal_batch_size = 1048577\n"),
                 "global_batch_size: expected at most 1048576 times micro_batch_size = 1");
    assert_error(fixture_load(&c, REQUIRED "[training]\nglobal_batch_size = 10\n"
                                           "micro_batch_size = 4\n"),
                 "run.toml:6:1: [training] global_batch_size: expected a multiple of "
                 "micro_batch_size = 4, found 10");
    assert_error(
        load2(&c, REQUIRED "[training]\nglobal_batch_size = 10\n", "--training.micro_batch_size=3"),
        "expected a multiple");
}

static void an_override_is_toml_or_a_bare_string(void **state)
{
    (void)state;
    struct config c;
    const struct {
        const char *override, *section, *name, *shown;
    } rows[] = {
        {"--training.seq_len=8", "training", "seq_len", "8"},
        {"--optimizer.learning_rate=3", "optimizer", "learning_rate", "3.0"},
        {"--optimizer.learning_rate=1e-3", "optimizer", "learning_rate", "0.001"},
        {"--model.path=/x y", "model", "path", "\"/x y\""},
        {"--model.path=\"/x\"", "model", "path", "\"/x\""},
        {"--model.path='/x=y'", "model", "path", "\"/x=y\""},
        {"--model.path=/2026", "model", "path", "\"/2026\""},
        {"--optimizer.name=123", "optimizer", "name", "\"123\""},
        {"--optimizer.name=true", "optimizer", "name", "\"true\""},
        {"--optimizer.compression=8bit", "optimizer", "compression", "\"8bit\""},
        {"--memory.max_ram=2GiB", "memory", "max_ram", "2147483648"},
        {"--memory.max_ram=5000", "memory", "max_ram", "5000"},
        {"--memory.device=cuda:1", "memory", "device", "\"cuda:1\""},
        {"--data.train=/a.txt", "data", "train", "[\"/a.txt\"]"},
        {"--data.train=[\"/a\", \"/b\"]", "data", "train", "[\"/a\", \"/b\"]"},
        {"--eval.sample_prompts=12", "eval", "sample_prompts", "[\"12\"]"},
        {"--eval.sample_prompts=[]", "eval", "sample_prompts", "[]"},
        {"--data.cache_dir=", "data", "cache_dir", "\"\""},
        {"--run.watchdog=false", "run", "watchdog", "false"},
        {"--optimizer.name=1\ny = 2", "optimizer", "name", "\"1\\u000Ay = 2\""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_loads(fixture_override(&c, rows[i].override));
        const struct config_key *key = config_key_find(rows[i].section, rows[i].name);
        char *text = config_value_text(key, config_key_value(key, &c));
        assert_string_equal(text, rows[i].shown);
        free(text);
        config_destroy(&c);
    }
}

static void the_last_override_wins_over_the_file(void **state)
{
    (void)state;
    struct config c;
    char *overrides[] = {(char *)(uintptr_t) "--data.train=/a",
                         (char *)(uintptr_t) "--data.train=/b"};
    fixture_write(REQUIRED, strlen(REQUIRED));
    assert_loads(config_load(&c, fixture_path, overrides, 2));
    assert_int_equal(c.data_train.count, 1);
    assert_string_equal(c.data_train.items[0], "/b");
    config_destroy(&c);
}

static void overrides_can_give_the_required_keys(void **state)
{
    (void)state;
    struct config c;
    char *overrides[] = {(char *)(uintptr_t) "--data.train=/a",
                         (char *)(uintptr_t) "--model.path=/b"};
    fixture_write("", 0);
    assert_loads(config_load(&c, fixture_path, overrides, 2));
    config_destroy(&c);
}

static void a_wrong_override_is_named_as_written(void **state)
{
    (void)state;
    struct config c;
    assert_error(fixture_override(&c, "--training.seq_len=abc"),
                 "--training.seq_len=abc: [training] seq_len: expected an integer");
    assert_error(fixture_override(&c, "--training.seqlen=1"), "did you mean [training] seq_len?");
    assert_error(fixture_override(&c, "--trainin.seq_len=1"), "did you mean [training]?");
    assert_error(fixture_override(&c, "--data.train=[\"a\""), "the value is not TOML");
    assert_error(fixture_override(&c, "--run.watchdog=False"), "expected true or false");
    assert_error(fixture_override(&c, "--run.seed=2026-01-01"), "found a date");
    assert_error(fixture_override(&c, "--model.path=\xff\xfe"), "expected UTF-8");
    const char *const malformed[] = {"run.seed=1", "--run.seed", "--seed=1", "--.seed=1",
                                     "--run.=1",   "--=",        "--",       ""};
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++)
        assert_error(fixture_override(&c, malformed[i]), "expected --section.key=value");
}

static void values_without_a_mechanism_are_refused_by_name(void **state)
{
    (void)state;
    struct config c;
    const char *const rows[][2] = {
        {"--memory.device=cuda:0", "[memory] device = \"cuda:0\": this build has no CUDA device"},
        {"--memory.max_vram=8GB", "[memory] max_vram = 8000000000: this build has no device"},
        {"--optimizer.compression=dynamic", "[optimizer] compression = \"dynamic\": this build has "
                                            "no compressed optimizer state; only "
                                            "\"none\""},
        {"--optimizer.name=lion", "[optimizer] name = \"lion\""},
        {"--log.http=127.0.0.1:80", "[log] http = \"127.0.0.1:80\""},
        {"--memory.drive_tbw=600", "[memory] drive_tbw = 600"},
        {"--log.trace=true", "[log] trace = true"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_loads(fixture_override(&c, rows[i][0]));
        assert_error(config_refuse_missing(&c), rows[i][1]);
        config_destroy(&c);
    }
}

static void values_with_a_mechanism_are_not_refused(void **state)
{
    (void)state;
    struct config c;
    const char *const rows[] = {"--memory.device=cpu",   "--memory.durability=7",
                                "--training.spike=redo", "--training.spike=skip",
                                "--data.format=text",    "--data.format=tokens",
                                "--data.format=chat",    "--data.format=prompt-completion",
                                "--data.overlong=drop",  "--run.seed=1"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_loads(fixture_override(&c, rows[i]));
        assert_int_equal(config_refuse_missing(&c), 0);
        config_destroy(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_alternative_removes_the_default_of_the_other),
        cmocka_unit_test(both_alternatives_are_an_error),
        cmocka_unit_test(an_alternative_that_is_off_does_not_count),
        cmocka_unit_test(the_command_line_replaces_the_files_alternative),
        cmocka_unit_test(a_global_batch_is_a_multiple_of_the_microbatch),
        cmocka_unit_test(an_override_is_toml_or_a_bare_string),
        cmocka_unit_test(the_last_override_wins_over_the_file),
        cmocka_unit_test(overrides_can_give_the_required_keys),
        cmocka_unit_test(a_wrong_override_is_named_as_written),
        cmocka_unit_test(values_without_a_mechanism_are_refused_by_name),
        cmocka_unit_test(values_with_a_mechanism_are_not_refused),
    };
    return cmocka_run_group_tests_name("config layers", tests, fixture_setup, fixture_teardown);
}
