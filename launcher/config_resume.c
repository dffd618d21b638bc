/* What a resumed run may change, and the hash of what it may not. Both walk the RESUME column. */
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "launcher/config_key.h"
#include "procs/check.h"
#include "procs/error.h"

static char *value_text(const struct config_key *key, const struct config *config)
{
    const void *field = config_key_value(key, config);
    bool has_alternative =
        config_key_alternative((int)(key - config_key_table)) != CONFIG_ORDINAL_NONE;
    if (!has_alternative || !config_value_is_off(key, field))
        return config_value_text(key, field);
    char *text = strdup("off");
    CHECK(text != NULL);
    return text;
}

static int refuse_change(const struct config_key *key, const char *old, const char *now)
{
    (void)error_set(
        ERROR_USER,
        "[%s] %s: may not change in a run that goes on: it was started with %s, found %s",
        key->section, key->name, old, now);
    return error_hint("set it back, or start a new run in another run.output_dir");
}

struct announcer {
    config_announce *announce;
    void *context;
};

static void announce_change(const struct announcer *to, const struct config_key *key,
                            const char *old, const char *now)
{
    char *line = NULL;
    if (!to->announce)
        return;
    CHECK(asprintf(&line, "[%s] %s: %s -> %s", key->section, key->name, old, now) >= 0);
    to->announce(to->context, line);
    free(line);
}

/* Handles the changed keys of one kind: fixed ones are refused, others announced. */
static int compare(const struct config *old, const struct config *now, enum config_change change,
                   const struct announcer *to)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        if (key->change != change)
            continue;
        char *old_text = value_text(key, old), *now_text = value_text(key, now);
        int rc = 0;
        if (strcmp(old_text, now_text) != 0) {
            if (change == CONFIG_CHANGE_FIXED)
                rc = refuse_change(key, old_text, now_text);
            else
                announce_change(to, key, old_text, now_text);
        }
        free(old_text);
        free(now_text);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int config_compare_resume(const struct config *old, const struct config *now,
                          config_announce *announce, void *context)
{
    struct announcer to = {.announce = announce, .context = context};
    int rc = compare(old, now, CONFIG_CHANGE_FIXED, &to);
    return rc < 0 ? rc : compare(old, now, CONFIG_CHANGE_MAY_CHANGE, &to);
}

struct config_hash config_bits_hash(const struct config *config)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    CHECK(out != NULL);
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        if (key->change != CONFIG_CHANGE_FIXED || !key->bits)
            continue;
        fprintf(out, "%s.%s = ", key->section, key->name);
        config_value_print(key, config_key_value(key, config), out);
        fputc('\n', out);
    }
    CHECK(fclose(out) == 0);
    XXH128_hash_t hash = XXH3_128bits(text, bytes);
    free(text);
    return (struct config_hash){.high = hash.high64, .low = hash.low64};
}
