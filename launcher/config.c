/*
 * Loading: defaults, then the file, then the command line, each over the one before; then what can
 * only be seen with everything in place (required keys, alternatives, values that exclude another).
 */
#include "launcher/config.h"

#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/config_key.h"
#include "procs/check.h"
#include "procs/error.h"

enum giver { GIVEN_BY_NOTHING, GIVEN_BY_FILE, GIVEN_BY_COMMAND_LINE };

/* Where the value of a key came from, for the messages of the checks at the end. */
struct place {
    enum giver giver;
    uint32_t line, column;
    const char *override;
};

struct load {
    struct config *config;
    const char *path;
    char *directory; /* absolute; of the run file */
    struct place places[CONFIG_KEY_COUNT];
};

static size_t ordinal_of(const struct config_key *key)
{
    return (size_t)(key - config_key_table);
}

/* Puts "place: [section] key" in front of the current error. */
static int wrap_with_place(const struct load *load, const struct config_key *key)
{
    const struct place *place = &load->places[ordinal_of(key)];
    (void)error_wrap("[%s] %s", key->section, key->name);
    if (place->giver == GIVEN_BY_FILE)
        return error_wrap("%s:%u:%u", load->path, place->line, place->column);
    if (place->giver == GIVEN_BY_COMMAND_LINE)
        return error_wrap("%s", place->override);
    return error_wrap("%s", load->path);
}

/* --- defaults ------------------------------------------------------------------------------- */

struct default_target {
    const struct load *load;
    const struct config_key *key;
};

static int on_default(void *context, const struct toml_entry *entry)
{
    const struct default_target *target = context;
    return config_value_set(target->key, &entry->value, target->load->directory,
                            config_key_field(target->key, target->load->config));
}

static int set_defaults(struct load *load)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        struct default_target target = {.load = load, .key = &config_key_table[i]};
        if (config_key_is_required(target.key) || !target.key->fallback[0])
            continue;
        /* only the directory's name can be at fault, the defaults themselves are ours */
        int rc = toml_read_value(target.key->fallback, on_default, &target);
        CHECK(rc <= 0);
        if (rc < 0)
            return wrap_with_place(load, target.key);
    }
    return 0;
}

/* --- the file ------------------------------------------------------------------------------- */

static bool is_section(const char *section)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        if (strcmp(config_key_table[i].section, section) == 0)
            return true;
    }
    return false;
}

/* Unknown section or key: an error with the nearest name. */
static int check_known(const char *section, const char *name)
{
    if (!is_section(section)) {
        (void)error_set(ERROR_USER, "[%.80s]: unknown section", section);
        return config_key_suggest(section, NULL);
    }
    if (name && !config_key_find(section, name)) {
        (void)error_set(ERROR_USER, "[%s] %.80s: unknown key", section, name);
        return config_key_suggest(section, name);
    }
    return 0;
}

static int on_file_entry(void *context, const struct toml_entry *entry)
{
    struct load *load = context;
    if (check_known(entry->section, entry->key) < 0)
        return error_wrap("%s:%u:%u", load->path, entry->line, entry->column);
    if (!entry->key)
        return 0;
    const struct config_key *key = config_key_find(entry->section, entry->key);
    load->places[ordinal_of(key)] =
        (struct place){.giver = GIVEN_BY_FILE, .line = entry->line, .column = entry->column};
    if (config_value_set(key, &entry->value, load->directory, config_key_field(key, load->config)) <
        0)
        return wrap_with_place(load, key);
    return 0;
}

/* --- the command line ----------------------------------------------------------------------- */

struct override_target {
    struct load *load;
    const struct config_key *key;
    const char *text; /* what follows the = */
};

static bool is_list(const struct config_key *key)
{
    return key->type == CONFIG_TYPE_STRINGS || key->type == CONFIG_TYPE_PATHS;
}

static bool takes_string(const struct config_key *key)
{
    return is_list(key) || key->type == CONFIG_TYPE_STRING || key->type == CONFIG_TYPE_PATH;
}

static int set_override(const struct override_target *target, const struct toml_value *value)
{
    struct toml_value list = {.kind = TOML_ARRAY, .items = value, .item_count = 1};
    if (is_list(target->key) && value->kind == TOML_STRING)
        value = &list;
    return config_value_set(target->key, value, target->load->directory,
                            config_key_field(target->key, target->load->config));
}

static int set_bare_override(const struct override_target *target)
{
    struct toml_value string = {
        .kind = TOML_STRING, .string = target->text, .string_bytes = strlen(target->text)};
    return set_override(target, &string);
}

static int on_override_value(void *context, const struct toml_entry *entry)
{
    const struct override_target *target = context;
    enum toml_kind kind = entry->value.kind;
    /* --run.output_dir=2026 names a directory */
    if (takes_string(target->key) && kind != TOML_STRING && kind != TOML_ARRAY)
        return set_bare_override(target);
    return set_override(target, &entry->value);
}

static int parse_override(struct override_target *target)
{
    int rc = toml_read_value(target->text, on_override_value, target);
    if (rc <= 0)
        return rc;
    if (target->text[0] && strchr("[{\"'", target->text[0]))
        return error_set(ERROR_USER, "the value is not TOML (is a quote or bracket missing?)");
    return set_bare_override(target);
}

static int refuse_override(const char *override)
{
    return error_set(ERROR_USER, "%s: expected --section.key=value", override);
}

/* Splits "--section.key=value", then sets the value. */
static int apply_override(struct load *load, const char *override)
{
    enum { NAME_BYTES_MAX = 64 };
    char name[NAME_BYTES_MAX * 2];
    const char *equals = strchr(override, '=');
    if (strncmp(override, "--", 2) != 0 || !equals ||
        (size_t)(equals - override - 2) >= sizeof name)
        return refuse_override(override);
    size_t name_bytes = (size_t)(equals - override - 2);
    memcpy(name, override + 2, name_bytes);
    name[name_bytes] = '\0';
    char *dot = strchr(name, '.');
    if (!dot || dot == name || !dot[1])
        return refuse_override(override);
    *dot = '\0';
    if (check_known(name, dot + 1) < 0)
        return error_wrap("%s", override);
    const struct config_key *key = config_key_find(name, dot + 1);
    struct override_target target = {.load = load, .key = key, .text = equals + 1};
    load->places[ordinal_of(key)] =
        (struct place){.giver = GIVEN_BY_COMMAND_LINE, .override = override};
    return parse_override(&target) < 0 ? wrap_with_place(load, key) : 0;
}

/* --- the whole ------------------------------------------------------------------------------ */

static int check_required(const struct load *load)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        if (!config_key_is_required(key) || load->places[i].giver != GIVEN_BY_NOTHING)
            continue;
        (void)error_set(ERROR_USER, "required, but not given");
        (void)wrap_with_place(load, key);
        return error_hint("add it to the file, or give --%s.%s=... on the command line",
                          key->section, key->name);
    }
    return 0;
}

/* Frees and zeroes a value: the alternative that was not given. */
static void turn_off(struct load *load, int ordinal)
{
    const struct config_key *key = &config_key_table[ordinal];
    void *field = config_key_field(key, load->config);
    config_value_release(key, field);
    if (key->type == CONFIG_TYPE_INT)
        *(uint64_t *)field = 0;
    if (key->type == CONFIG_TYPE_FLOAT)
        *(double *)field = 0.0;
}

static int refuse_both(const struct load *load, int a, int b)
{
    (void)error_set(ERROR_USER, "expected one of %s and %s, found both", config_key_table[a].name,
                    config_key_table[b].name);
    return wrap_with_place(load, &config_key_table[a]);
}

/* Of two alternatives the one given stands; see CONFIG_ALTERNATIVES. */
static int settle_alternative(struct load *load, int a, int b)
{
    const struct config_key *table = config_key_table;
    enum giver by_a = load->places[a].giver, by_b = load->places[b].giver;
    bool a_is_off = config_value_is_off(&table[a], config_key_value(&table[a], load->config));
    bool b_is_off = config_value_is_off(&table[b], config_key_value(&table[b], load->config));
    if (by_a > by_b)
        turn_off(load, b);
    else if (by_b > by_a)
        turn_off(load, a);
    else if (by_a != GIVEN_BY_NOTHING && !a_is_off && !b_is_off)
        return refuse_both(load, a, b);
    return 0;
}

static int settle_alternatives(struct load *load)
{
    for (int a = 0; a < CONFIG_KEY_COUNT; a++) {
        int b = config_key_alternative(a);
        if (b > a && settle_alternative(load, a, b) < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

static int refuse_batch(const struct load *load, const char *expected, uint64_t number)
{
    (void)error_set(ERROR_USER, "expected %s micro_batch_size = %llu, found %llu", expected,
                    (unsigned long long)number,
                    (unsigned long long)load->config->training_global_batch_size);
    return wrap_with_place(load, &config_key_table[CONFIG_ORDINAL_training_global_batch_size]);
}

/* Turns global_batch_size into gradient_accumulation_steps; afterwards it is always their product.
 */
static int settle_batch(struct load *load)
{
    struct config *config = load->config;
    uint64_t micro = config->training_micro_batch_size, global = config->training_global_batch_size;
    const struct config_key *steps =
        &config_key_table[CONFIG_ORDINAL_training_gradient_accumulation_steps];
    if (global != 0) {
        char most[64];
        (void)snprintf(most, sizeof most, "at most %llu times",
                       (unsigned long long)steps->limits.int_max);
        if (global % micro != 0)
            return refuse_batch(load, "a multiple of", micro);
        if (global / micro > steps->limits.int_max) /* else the effective file would be refused */
            return refuse_batch(load, most, micro);
        config->training_gradient_accumulation_steps = global / micro;
    }
    config->training_global_batch_size = micro * config->training_gradient_accumulation_steps;
    return 0;
}

/* An evaluation of nothing would be a key accepted and ignored. */
static int check_eval(const struct load *load)
{
    const struct config *config = load->config;
    if (config->eval_interval == 0 || config->data_validation.count > 0 ||
        config->data_val_fraction > 0.0 || config->eval_sample_prompts.count > 0)
        return 0;
    (void)error_set(ERROR_USER, "there is nothing to evaluate");
    (void)wrap_with_place(load, &config_key_table[CONFIG_ORDINAL_eval_interval]);
    return error_hint("give data.validation, data.val_fraction or eval.sample_prompts");
}

static int load_all(struct load *load, char *const overrides[], size_t override_count)
{
    if (set_defaults(load) < 0 || toml_read_file(load->path, on_file_entry, load) < 0)
        return -(int)error_kind_now();
    for (size_t i = 0; i < override_count; i++) {
        if (apply_override(load, overrides[i]) < 0)
            return -(int)error_kind_now();
    }
    if (check_required(load) < 0 || settle_alternatives(load) < 0 || settle_batch(load) < 0 ||
        check_eval(load) < 0)
        return -(int)error_kind_now();
    return 0;
}

/* The absolute directory of the run file; NULL if there is no such file. */
static char *directory_of(const char *path)
{
    char *absolute = realpath(path, NULL);
    if (!absolute)
        return NULL;
    char *directory = strdup(dirname(absolute));
    CHECK(directory != NULL);
    free(absolute);
    return directory;
}

int config_load(struct config *config, const char *path, char *const overrides[],
                size_t override_count)
{
    memset(config, 0, sizeof *config);
    struct load load = {.config = config, .path = path, .directory = directory_of(path)};
    if (!load.directory)
        return error_set(ERROR_USER, "%s: cannot be read: %s", path, strerror(errno));
    int rc = load_all(&load, overrides, override_count);
    free(load.directory);
    if (rc < 0)
        config_destroy(config);
    return rc;
}

void config_destroy(struct config *config)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++)
        config_value_release(&config_key_table[i], config_key_field(&config_key_table[i], config));
    memset(config, 0, sizeof *config);
}
