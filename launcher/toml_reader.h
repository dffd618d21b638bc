/*
 * Reading TOML: the C face of toml++, which lives in toml_reader.cpp and nowhere else.
 *
 * A run file is two levels deep, [section] and key, and this reader knows no more than that: it
 * parses, then hands over every key with its value and place. What a key means is config.c's.
 * Anything else (a key outside a section, a table inside a section) is an error here, so that
 * nothing in a file can go unseen. `training.seq_len = 8` at the top of a file and
 * `training = {seq_len = 8}` are the same document as a [training] section to TOML, so they are
 * here.
 */
#ifndef LAUNCHER_TOML_READER_H
#define LAUNCHER_TOML_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum toml_kind {
    TOML_STRING,
    TOML_INTEGER,
    TOML_FLOAT, /* nan and inf are TOML; refusing them is the caller's */
    TOML_BOOLEAN,
    TOML_ARRAY,
    TOML_OTHER, /* dates, times, and tables inside arrays: no key takes one */
};

struct toml_value {
    enum toml_kind kind;
    const char *string;  /* STRING: UTF-8, ends with NUL. OTHER: what it is, "a date" */
    size_t string_bytes; /* more than strlen(string) if a NUL was escaped into it */
    int64_t integer;
    double number; /* FLOAT, and the INTEGER as a double */
    bool boolean;
    const struct toml_value *items; /* ARRAY; an array inside an array is an OTHER */
    size_t item_count;
};

/* One key, or with key == NULL the section itself, named once before its keys (it may have none).
 */
struct toml_entry {
    const char *section;
    const char *key;
    struct toml_value value;
    uint32_t line, column; /* of the key, from 1 */
};

/* Everything in the entry belongs to the reader and dies with the call. Negative stops the reading.
 */
typedef int toml_visit(void *context, const struct toml_entry *entry);

/*
 * Parses a file, then visits sections and keys in the order of their names. Returns 0, what `visit`
 * returned if negative, or ERROR_USER "path:line:column: what" (a file that cannot be read, is
 * larger than 1 MiB, is not TOML, or is not shaped as a run file). No exception escapes.
 */
int toml_read_file(const char *path, toml_visit *visit, void *context);

/* The same for a text in memory; `name` takes the place of the path in errors. */
int toml_read_text(const char *text, const char *name, toml_visit *visit, void *context);

/*
 * Parses one value, the right-hand side of an assignment ("8", "[1, 2]", "\"x\""), and visits it
 * once with an empty section and key. Returns 1 if the text is not exactly one TOML value.
 */
int toml_read_value(const char *text, toml_visit *visit, void *context);

#ifdef __cplusplus
}
#endif

#endif
