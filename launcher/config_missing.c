/* What the schema has and this build does not. Work that adds a mechanism deletes its row. */
#include <stdlib.h>
#include <string.h>

#include "launcher/config_key.h"
#include "procs/check.h"
#include "procs/error.h"

enum { WORKING_VALUES_MAX = 4 };

static const struct missing {
    int ordinal;
    const char
        *working[WORKING_VALUES_MAX]; /* the values that do work, as config_write() has them */
    const char *what;
} missing[] = {
    {CONFIG_ORDINAL_optimizer_name, {"\"adamw\""}, "no such optimizer"},
    {CONFIG_ORDINAL_optimizer_compression, {"\"none\""}, "no compressed optimizer state"},
    {CONFIG_ORDINAL_memory_device, {"\"auto\"", "\"cpu\""}, "no CUDA device"},
    {CONFIG_ORDINAL_memory_max_vram, {"\"auto\""}, "no device with VRAM"},
    {CONFIG_ORDINAL_memory_drive_tbw, {"0"}, "no plan that counts drive wear"},
    {CONFIG_ORDINAL_log_trace, {"false"}, "no trace"},
    {CONFIG_ORDINAL_log_http, {"\"\""}, "no status page"},
};

static bool is_working(const struct missing *row, const char *text)
{
    for (size_t i = 0; i < WORKING_VALUES_MAX && row->working[i]; i++) {
        if (strcmp(text, row->working[i]) == 0)
            return true;
    }
    return false;
}

static int refuse(const struct missing *row, const char *text)
{
    const struct config_key *key = &config_key_table[row->ordinal];
    const char *const *working = row->working;
    return error_set(ERROR_USER, "[%s] %s = %s: this build has %s; only %s%s%s%s%s", key->section,
                     key->name, text, row->what, working[0], working[1] ? ", " : "",
                     working[1] ? working[1] : "", working[2] ? ", " : "",
                     working[2] ? working[2] : "");
}

int config_refuse_missing(const struct config *config)
{
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        const struct config_key *key = &config_key_table[missing[i].ordinal];
        char *text = config_value_text(key, config_key_value(key, config));
        int rc = is_working(&missing[i], text) ? 0 : refuse(&missing[i], text);
        free(text);
        if (rc < 0)
            return rc;
    }
    return 0;
}
