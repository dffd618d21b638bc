#include "model/config_source.h"

#include <inttypes.h>
#include <stdio.h>

#include "procs/error.h"

const json_t *config_lookup(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

int config_is_null(const struct config_source *s, const char *key)
{
    return json_is_null(json_object_get(s->root, key));
}

int config_refuse(const struct config_source *s, const char *key, const char *expected,
                  const json_t *found)
{
    char text[MODEL_JSON_TEXT_BYTES];
    return error_set(ERROR_USER, "%s: %s: expected %s, found %s", s->where, key, expected,
                     model_json_text(found, text));
}

int config_read_size(const struct config_source *s, const char *key, uint64_t max, uint64_t *out)
{
    const json_t *value = config_lookup(s->root, key);
    if (!value)
        return 0;
    json_int_t n = json_integer_value(value); /* 0 unless it is an integer */
    if (n < 1 || (uint64_t)n > max) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "an integer from 1 to %" PRIu64, max);
        return config_refuse(s, key, expected, value);
    }
    *out = (uint64_t)n;
    return 0;
}

int config_read_real(const struct config_source *s, const char *key, double min, double max,
                     double *out)
{
    const json_t *value = config_lookup(s->root, key);
    if (!value)
        return 0;
    double x = json_number_value(value);
    if (!json_is_number(value) || !(x >= min && x <= max)) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
        return config_refuse(s, key, expected, value);
    }
    *out = x;
    return 0;
}

int config_read_flag(const struct config_source *s, const char *key, uint32_t *out)
{
    const json_t *value = config_lookup(s->root, key);
    if (!value)
        return 0;
    if (!json_is_boolean(value))
        return config_refuse(s, key, "true or false", value);
    *out = json_is_true(value);
    return 0;
}
