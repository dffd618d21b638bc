#include "launcher/config_key.h"

#include <string.h>

#include "procs/error.h"

/* CONFIG_AUTO and the like are used as words' values, so nothing a key accepts may reach them. */
_Static_assert(CONFIG_DEVICE_CPU > INT64_MAX, "special values lie above every TOML integer");

#define CONFIG_WORD(value_, word_) {.word = word_, .value = value_},
static const struct config_word words_run_resume[] = {CONFIG_ENUM_run_resume(CONFIG_WORD)};
static const struct config_word words_model_init[] = {CONFIG_ENUM_model_init(CONFIG_WORD)};
static const struct config_word words_model_dtype[] = {CONFIG_ENUM_model_dtype(CONFIG_WORD)};
static const struct config_word words_data_format[] = {CONFIG_ENUM_data_format(CONFIG_WORD)};
static const struct config_word words_data_overlong[] = {CONFIG_ENUM_data_overlong(CONFIG_WORD)};
static const struct config_word words_training_spike[] = {CONFIG_ENUM_training_spike(CONFIG_WORD)};
static const struct config_word words_optimizer_compression[] = {
    CONFIG_ENUM_optimizer_compression(CONFIG_WORD)};
static const struct config_word words_lr_scheduler_type[] = {
    CONFIG_ENUM_lr_scheduler_type(CONFIG_WORD)};
static const struct config_word words_memory_io_engine[] = {
    CONFIG_ENUM_memory_io_engine(CONFIG_WORD)};
static const struct config_word words_checkpoint_export_dtype[] = {
    CONFIG_ENUM_checkpoint_export_dtype(CONFIG_WORD)};
static const struct config_word words_log_progress[] = {CONFIG_ENUM_log_progress(CONFIG_WORD)};
static const struct config_word words_auto[] = {CONFIG_WORDS_auto(CONFIG_WORD)};
static const struct config_word words_prefetch[] = {CONFIG_WORDS_prefetch(CONFIG_WORD)};
static const struct config_word words_durability[] = {CONFIG_WORDS_durability(CONFIG_WORD)};
static const struct config_word words_device[] = {CONFIG_WORDS_device(CONFIG_WORD)};
static const struct config_word words_activation_checkpointing[] = {
    CONFIG_WORDS_activation_checkpointing(CONFIG_WORD)};
static const struct config_word words_model_tokenizer[] = {
    CONFIG_WORDS_model_tokenizer(CONFIG_WORD)};

/* The LIMITS column. */
#define ANY                                                                                        \
    {                                                                                              \
        0                                                                                          \
    }
#define NOT_EMPTY                                                                                  \
    {                                                                                              \
        .not_empty = true                                                                          \
    }
#define FROM(min)                                                                                  \
    {                                                                                              \
        .int_min = min, .int_max = INT64_MAX                                                       \
    }
#define RANGE(min, max)                                                                            \
    {                                                                                              \
        .int_min = min, .int_max = max                                                             \
    }
#define PAGE_SIZE(min, max)                                                                        \
    {                                                                                              \
        .int_min = min, .int_max = max, .page_size = true                                          \
    }
#define BETWEEN(min, max)                                                                          \
    {                                                                                              \
        .float_min = min, .float_max = max                                                         \
    }
#define BETWEEN_BELOW(min, max)                                                                    \
    {                                                                                              \
        .float_min = min, .float_max = max, .at_max = CONFIG_BOUND_EXCLUDED                        \
    }
#define ABOVE(min, max)                                                                            \
    {                                                                                              \
        .float_min = min, .float_max = max, .at_min = CONFIG_BOUND_EXCLUDED                        \
    }
#define WORDS(set)                                                                                 \
    {                                                                                              \
        .words = words_##set, .word_count = sizeof words_##set / sizeof *words_##set               \
    }
#define ONE_OF(set) WORDS(set)
#define WORDS_OR(set, prefix_, min, max)                                                           \
    {                                                                                              \
        .words = words_##set, .word_count = sizeof words_##set / sizeof *words_##set,              \
        .prefix = prefix_, .int_min = min, .int_max = max                                          \
    }

/* The columns default, RESUME and BITS. */
#define CONFIG_REQUIRED NULL
#define CONFIG_UNSET    ""
#define NO_BITS         false
#define BITS            true

#define CONFIG_ROW(section_, key_, type_, fallback_, limits_, change_, bits_, help_)               \
    {.section = #section_,                                                                         \
     .name = #key_,                                                                                \
     .type = CONFIG_TYPE_##type_,                                                                  \
     .offset = offsetof(struct config, section_##_##key_),                                         \
     .fallback = fallback_,                                                                        \
     .limits = limits_,                                                                            \
     .change = CONFIG_CHANGE_##change_,                                                            \
     .bits = bits_,                                                                                \
     .help = help_},
const struct config_key config_key_table[CONFIG_KEY_COUNT] = {CONFIG_KEYS(CONFIG_ROW)};

static const struct config_pair {
    int a, b;
} alternatives[] = {
#define CONFIG_PAIR(section, a_, b_)                                                               \
    {.a = CONFIG_ORDINAL_##section##_##a_, .b = CONFIG_ORDINAL_##section##_##b_},
    CONFIG_ALTERNATIVES(CONFIG_PAIR)};

enum {
    NAME_BYTES_MAX = 64, /* longer names are near nothing */
    /* what another section costs in edits: a right name in the wrong section beats a wrong one */
    OTHER_SECTION_COST = 1,
};

int config_key_alternative(int ordinal)
{
    for (size_t i = 0; i < sizeof alternatives / sizeof *alternatives; i++) {
        if (alternatives[i].a == ordinal)
            return alternatives[i].b;
        if (alternatives[i].b == ordinal)
            return alternatives[i].a;
    }
    return CONFIG_ORDINAL_NONE;
}

const struct config_key *config_key_find(const char *section, const char *name)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        if (strcmp(key->section, section) == 0 && strcmp(key->name, name) == 0)
            return key;
    }
    return NULL;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Levenshtein distance by rows. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[NAME_BYTES_MAX + 1];
    size_t a_bytes = strlen(a), b_bytes = strlen(b);
    if (a_bytes > NAME_BYTES_MAX || b_bytes > NAME_BYTES_MAX)
        return SIZE_MAX / 2;
    for (size_t j = 0; j <= b_bytes; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_bytes; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = least(replaced, least(row[j], row[j - 1]) + 1);
        }
    }
    return row[b_bytes];
}

/* Near: a third of the letters wrong, and two in a short name. */
static size_t near_enough(const char *name)
{
    size_t third = strlen(name) / 3;
    return third < 2 ? 2 : third;
}

static int suggest_section(const char *section)
{
    const struct config_key *nearest = NULL;
    size_t nearest_distance = near_enough(section) + 1;
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        size_t distance = edit_distance(section, config_key_table[i].section);
        if (distance < nearest_distance) {
            nearest = &config_key_table[i];
            nearest_distance = distance;
        }
    }
    if (nearest)
        return error_hint("did you mean [%s]?", nearest->section);
    return error_hint("sections are run, model, data, training, optimizer, lr_scheduler, memory, "
                      "checkpoint, eval, log");
}

int config_key_suggest(const char *section, const char *name)
{
    if (!name)
        return suggest_section(section);
    const struct config_key *nearest = NULL;
    size_t nearest_distance = near_enough(name) + 1;
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        size_t distance = edit_distance(name, key->name);
        if (strcmp(section, key->section) != 0)
            distance += OTHER_SECTION_COST;
        if (distance < nearest_distance) {
            nearest = key;
            nearest_distance = distance;
        }
    }
    if (nearest)
        return error_hint("did you mean [%s] %s?", nearest->section, nearest->name);
    return -(int)error_kind_now();
}
