/* What the configuration tests share: a run file in a private directory, loaded from text. */
#ifndef TESTS_UNIT_TEST_CONFIG_FIXTURE_H
#define TESTS_UNIT_TEST_CONFIG_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "launcher/config.h"
#include "launcher/config_key.h"
#include "procs/error.h"

/* The two required keys, for files that test others. */
#define REQUIRED "[model]\npath = \"m\"\n[data]\ntrain = [\"d.txt\"]\n"

static char fixture_directory[64];
static char fixture_path[96];

static inline int fixture_setup(void **state)
{
    (void)state;
    (void)snprintf(fixture_directory, sizeof fixture_directory, "/tmp/test_config.XXXXXX");
    if (!mkdtemp(fixture_directory))
        return -1;
    (void)snprintf(fixture_path, sizeof fixture_path, "%s/run.toml", fixture_directory);
    return 0;
}

static inline int fixture_teardown(void **state)
{
    (void)state;
    (void)unlink(fixture_path); /* a test that wrote no file leaves none */
    return rmdir(fixture_directory);
}

static inline void fixture_write(const void *bytes, size_t count)
{
    FILE *file = fopen(fixture_path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

static inline int fixture_load_bytes(struct config *config, const void *bytes, size_t count)
{
    fixture_write(bytes, count);
    error_clear();
    return config_load(config, fixture_path, NULL, 0);
}

static inline int fixture_load(struct config *config, const char *text)
{
    return fixture_load_bytes(config, text, strlen(text));
}

/* REQUIRED with one override on the command line. */
static inline int fixture_override(struct config *config, const char *override)
{
    char *overrides[] = {(char *)(uintptr_t) override};
    fixture_write(REQUIRED, strlen(REQUIRED));
    error_clear();
    return config_load(config, fixture_path, overrides, 1);
}

/*
 * A run file with one key set, in line 2 (line 2 column 1 is the key); the required keys come along
 * where they are not the one.
 */
static inline int fixture_load_key(struct config *config, const struct config_key *key,
                                   const char *value)
{
    const char *required[][3] = {{"model", "path", "\"m\""}, {"data", "train", "[\"d.txt\"]"}};
    char text[4096];
    size_t used = 0;
    for (int own = 1; own >= 0;
         own--) { /* the key's own section first, so that it is not reopened */
        if (own)
            used = (size_t)snprintf(text, sizeof text, "[%s]\n%s = %s\n", key->section, key->name,
                                    value);
        for (size_t i = 0; i < 2; i++) {
            bool in_section = strcmp(key->section, required[i][0]) == 0;
            if (in_section != (own == 1) || (in_section && strcmp(key->name, required[i][1]) == 0))
                continue;
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s%s%s = %s\n",
                                     own ? "" : "[", own ? "" : required[i][0], own ? "" : "]\n",
                                     required[i][1], required[i][2]);
        }
    }
    return fixture_load(config, text);
}

static inline void assert_error(int rc, const char *part)
{
    if (rc != -ERROR_USER || !strstr(error_text(), part))
        fail_msg("expected an error of the user's with '%s', got %d '%s'", part, rc, error_text());
}

static inline void assert_loads(int rc)
{
    if (rc != 0)
        fail_msg("expected 0, got %d '%s'", rc, error_text());
}

#endif
