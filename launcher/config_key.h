/*
 * Inside the configuration: the table that config_keys.h becomes, and what can be done with one
 * value whatever its type. Used by launcher/config*.c and the tests; everyone else reads struct
 * config.
 */
#ifndef LAUNCHER_CONFIG_KEY_H
#define LAUNCHER_CONFIG_KEY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "launcher/config.h"
#include "launcher/toml_reader.h"

enum config_type {
    CONFIG_TYPE_BOOL,
    CONFIG_TYPE_INT,
    CONFIG_TYPE_SIZE,
    CONFIG_TYPE_FLOAT,
    CONFIG_TYPE_PAIR,
    CONFIG_TYPE_ENUM,
    CONFIG_TYPE_STRING,
    CONFIG_TYPE_PATH,
    CONFIG_TYPE_STRINGS,
    CONFIG_TYPE_PATHS,
};

/* The RESUME column. */
enum config_change {
    CONFIG_CHANGE_MAY_CHANGE,
    CONFIG_CHANGE_FIXED,
    CONFIG_CHANGE_FOLLOWS, /* compared through the key it is derived from */
};

struct config_word {
    const char *word;
    uint64_t value;
};

enum config_bound {
    CONFIG_BOUND_INCLUDED,
    CONFIG_BOUND_EXCLUDED,
};

struct config_limits {
    uint64_t int_min, int_max; /* INT, SIZE; int_max INT64_MAX means no limit but TOML's */
    double float_min, float_max;
    enum config_bound at_min, at_max;
    bool not_empty;                  /* strings, paths, lists */
    bool page_size;                  /* int_min x 2^k */
    const struct config_word *words; /* all there is for an ENUM; beside the values for others */
    size_t word_count;
    const char *prefix; /* "every-": numbers are written in words as well, "every-4" */
};

enum {
    CONFIG_ORDINAL_NONE = -1,
#define CONFIG_ORDINAL(section, key, ...) CONFIG_ORDINAL_##section##_##key,
    CONFIG_KEYS(CONFIG_ORDINAL)
#undef CONFIG_ORDINAL
        CONFIG_KEY_COUNT
};

struct config_key {
    const char *section, *name;
    enum config_type type;
    size_t offset;        /* in struct config */
    const char *fallback; /* the default as TOML; NULL: required, "": off until given */
    struct config_limits limits;
    enum config_change change;
    bool bits;
    const char *help;
};

/* In the order of config_keys.h, keys of one section together. */
extern const struct config_key config_key_table[CONFIG_KEY_COUNT];

/* The key, or NULL. */
const struct config_key *config_key_find(const char *section, const char *name);

/* Ordinal of the key that can be given instead of this one, or CONFIG_ORDINAL_NONE. */
int config_key_alternative(int ordinal);

/*
 * After an unknown name: adds a hint at the nearest one, by edit distance, if any is near. With
 * name NULL, the section is what is unknown. Returns what error_hint() returns.
 */
int config_key_suggest(const char *section, const char *name);

static inline bool config_key_is_required(const struct config_key *key)
{
    return key->fallback == NULL;
}

static inline void *config_key_field(const struct config_key *key, struct config *config)
{
    return (char *)config + key->offset;
}

static inline const void *config_key_value(const struct config_key *key,
                                           const struct config *config)
{
    return (const char *)config + key->offset;
}

/*
 * Stores a value in its field (releasing what was there); paths are joined to `directory`. Returns
 * 0, or ERROR_USER "expected ..., found ..." and the field is as it was.
 */
int config_value_set(const struct config_key *key, const struct toml_value *value,
                     const char *directory, void *field);

/* Frees what the field owns and zeroes it. */
void config_value_release(const struct config_key *key, void *field);

/* Is it 0 or an empty list: the state of an alternative that is not in force? */
bool config_value_is_off(const struct config_key *key, const void *field);

/* Writes the value as TOML that reads back to the same value; equal values have equal texts. */
void config_value_print(const struct config_key *key, const void *field, FILE *out);

/* The same as a string to free(). */
char *config_value_text(const struct config_key *key, const void *field);

/* "an integer from 1 to 256", for messages. */
void config_value_print_expected(const struct config_key *key, FILE *out);

#endif
