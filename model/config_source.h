/*
 * Reading one key of a config.json, and complaining about it. Internal to model/config*.c.
 */
#ifndef MODEL_CONFIG_SOURCE_H
#define MODEL_CONFIG_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "model/json.h"

/* An object, and what messages call it. */
struct config_source {
    const json_t *root;
    const char *where;
};

/* The value of a key; NULL when it is absent or null, which transformers mostly treats alike. */
const json_t *config_lookup(const json_t *object, const char *key);

/* 1 when the key is there and null. */
int config_is_null(const struct config_source *s, const char *key);

/* -ERROR_USER: WHERE: KEY: expected EXPECTED, found FOUND. */
int config_refuse(const struct config_source *s, const char *key, const char *expected,
                  const json_t *found);

/* An integer from 1 to max; *out stays where the key is absent or null. */
int config_read_size(const struct config_source *s, const char *key, uint64_t max, uint64_t *out);

/* A number from min to max; *out stays where the key is absent or null. */
int config_read_real(const struct config_source *s, const char *key, double min, double max,
                     double *out);

/* true or false; *out stays where the key is absent or null. */
int config_read_flag(const struct config_source *s, const char *key, uint32_t *out);

#endif
