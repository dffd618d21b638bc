/*
 * Rotary embeddings in config.json. Old files: rope_theta, with rope_scaling beside it. New ones:
 * rope_parameters with all of it inside. Gemma 3 has two sets, for blocks with and without a
 * window: rope_theta + rope_scaling and rope_local_base_freq, or rope_parameters with an object for
 * each.
 */
#include <stdio.h>
#include <string.h>

#include "model/config_forms.h"
#include "procs/error.h"

#define THETA_MIN 1e-3
#define THETA_MAX 1e15

static const char full_key[] = "full_attention", sliding_key[] = "sliding_attention";

static int read_factors(const struct config_source *s, struct model_rope *rope)
{
    static const char *const keys[] = {"factor", "low_freq_factor", "high_freq_factor"};
    double *const out[] = {&rope->factor, &rope->low_freq_factor, &rope->high_freq_factor};
    size_t n = rope->scaling == ROPE_SCALING_LLAMA3 ? 3 : 1;
    for (size_t i = 0; i < n; i++) {
        if (!config_lookup(s->root, keys[i]))
            return config_refuse(s, keys[i], "a number", NULL);
        int rc = config_read_real(s, keys[i], i == 0 ? 1.0 : 1e-6, 1e9, out[i]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_llama3(const struct config_source *s, struct model_rope *rope)
{
    static const char key[] = "original_max_position_embeddings";
    int rc = read_factors(s, rope);
    if (rc < 0)
        return rc;
    if (rope->low_freq_factor >= rope->high_freq_factor)
        return error_set(ERROR_USER,
                         "%s: low_freq_factor: expected less than high_freq_factor %g, found %g",
                         s->where, rope->high_freq_factor, rope->low_freq_factor);
    if (!config_lookup(s->root, key))
        return config_refuse(s, key, "an integer", NULL);
    return config_read_size(s, key, (uint64_t)1 << 31, &rope->original_max_position);
}

static int refuse_unknown(const struct config_source *s, const char *const *known, size_t n)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)s->root, key, value)
    {
        size_t i = 0;
        while (i < n && strcmp(key, known[i]) != 0)
            i++;
        if (i == n && !json_is_null(value))
            return config_refuse(s, key, "no such key for this rope_type", value);
    }
    return 0;
}

/* The type and its numbers; theta was read. */
static int read_type(const struct config_source *s, const struct config_family *family,
                     struct model_rope *rope)
{
    static const char *const known[] = {/* default */ "rope_type",
                                        "type",
                                        "rope_theta",
                                        "partial_rotary_factor",
                                        /* linear */ "factor",
                                        /* llama3 */ "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings"};
    const json_t *type = config_lookup(s->root, "rope_type");
    int scales = family->rope != CONFIG_ROPE_PARTIAL;
    if (!type)
        type = config_lookup(s->root, "type");
    const char *name = type ? json_string_value(type) : "default";
    if (name && strcmp(name, "default") == 0)
        return refuse_unknown(s, known, 4);
    if (scales && name && strcmp(name, "linear") == 0) {
        rope->scaling = ROPE_SCALING_LINEAR;
        int rc = refuse_unknown(s, known, 5);
        return rc < 0 ? rc : read_factors(s, rope);
    }
    if (scales && name && strcmp(name, "llama3") == 0) {
        rope->scaling = ROPE_SCALING_LLAMA3;
        int rc = refuse_unknown(s, known, sizeof known / sizeof *known);
        return rc < 0 ? rc : read_llama3(s, rope);
    }
    return config_refuse(s, "rope_type",
                         scales ? "\"default\", \"linear\" or \"llama3\"" : "\"default\"", type);
}

/* How many dimensions turn: int(head_dim x factor), as the library cuts it. */
static int read_partial(const struct config_source *s, const struct config_family *family,
                        struct model_config *config)
{
    static const char key[] = "partial_rotary_factor";
    const json_t *value = config_lookup(s->root, key);
    double factor = 1.0;
    if (family->rope != CONFIG_ROPE_PARTIAL && value && json_number_value(value) != 1.0)
        return config_refuse(s, key, "1", value);
    if (!value)
        return 0;
    int rc = config_read_real(s, key, 0.0, 1.0, &factor);
    if (rc < 0)
        return rc;
    config->rope_dim = (uint64_t)((double)config->head_dim * factor);
    if (config->rope_dim < 2 || config->rope_dim % 2 != 0)
        return config_refuse(s, key, "an even number of a head's dimensions", value);
    return 0;
}

/* One set of parameters from an object. */
static int read_set(const struct config_source *s, const struct config_family *family,
                    struct model_config *config, enum model_reach reach)
{
    struct model_rope *rope = &config->rope[reach];
    int rc = config_read_real(s, "rope_theta", THETA_MIN, THETA_MAX, &rope->theta);
    if (rc == 0)
        rc = read_partial(s, family, config);
    return rc < 0 ? rc : read_type(s, family, rope);
}

/* The object of a key inside s, as a source of its own; its root is NULL when there is none. */
static int open_object(const struct config_source *s, const char *key, char where[512],
                       struct config_source *out)
{
    out->root = config_lookup(s->root, key);
    out->where = where;
    (void)snprintf(where, 512, "%s: %s", s->where, key); /* a long path is cut */
    if (out->root && !json_is_object(out->root))
        return config_refuse(s, key, "an object or null", out->root);
    return 0;
}

static int read_scaling(const struct config_source *s, const struct config_family *family,
                        struct model_config *config)
{
    char where[512];
    struct config_source old;
    int rc = open_object(s, "rope_scaling", where, &old);
    if (rc < 0 || !old.root)
        return rc;
    if (config_lookup(old.root, "rope_theta"))
        return config_refuse(&old, "rope_theta", "it beside rope_scaling, not inside",
                             config_lookup(old.root, "rope_theta"));
    return read_set(&old, family, config, MODEL_REACH_FULL);
}

static int read_flat(const struct config_source *s, const struct config_family *family,
                     struct model_config *config)
{
    char where[512];
    struct config_source new = {0};
    const json_t *old = config_lookup(s->root, "rope_scaling");
    int rc = open_object(s, "rope_parameters", where, &new);
    if (rc < 0)
        return rc;
    if (old && new.root && !json_equal(old, new.root))
        return config_refuse(s, "rope_scaling", "nothing beside rope_parameters", old);
    return new.root ? read_set(&new, family, config, MODEL_REACH_FULL)
                    : read_scaling(s, family, config);
}

/* rope_parameters of Gemma 3: an object for each reach, and nothing else. */
static int read_nested(const struct config_source *s, const struct config_family *family,
                       struct model_config *config)
{
    static const char *const keys[MODEL_REACHES] = {full_key, sliding_key};
    for (int reach = 0; reach < MODEL_REACHES; reach++) {
        char where[512];
        struct config_source set;
        int rc = open_object(s, keys[reach], where, &set);
        if (rc == 0 && set.root)
            rc = read_set(&set, family, config, (enum model_reach)reach);
        if (rc < 0)
            return rc;
    }
    return refuse_unknown(s, keys, MODEL_REACHES);
}

static int read_by_layer_type(const struct config_source *s, const struct config_family *family,
                              struct model_config *config)
{
    char where[512];
    struct config_source new = {0};
    const json_t *old = config_lookup(s->root, "rope_scaling");
    int rc = config_read_real(s, "rope_local_base_freq", THETA_MIN, THETA_MAX,
                              &config->rope[MODEL_REACH_SLIDING].theta);
    if (rc == 0)
        rc = open_object(s, "rope_parameters", where, &new);
    if (rc < 0)
        return rc;
    if (old && new.root)
        return config_refuse(s, "rope_scaling", "nothing beside rope_parameters", old);
    return new.root ? read_nested(&new, family, config) : read_scaling(s, family, config);
}

int config_read_rope(const struct config_source *s, const struct config_family *family,
                     struct model_config *config)
{
    for (int reach = 0; reach < MODEL_REACHES; reach++)
        config->rope[reach].factor = 1.0;
    if (family->rope == CONFIG_ROPE_NONE)
        return 0;
    config->rope_dim = config->head_dim;
    for (int reach = 0; reach < MODEL_REACHES; reach++)
        config->rope[reach].theta = family->rope_theta[reach];
    int rc = config_read_real(s, "rope_theta", THETA_MIN, THETA_MAX,
                              &config->rope[MODEL_REACH_FULL].theta);
    if (rc == 0 && family->rope != CONFIG_ROPE_BY_LAYER_TYPE)
        rc = read_partial(s, family, config);
    if (rc < 0)
        return rc;
    if (family->rope == CONFIG_ROPE_BY_LAYER_TYPE)
        return read_by_layer_type(s, family, config);
    rc = read_flat(s, family, config);
    config->rope[MODEL_REACH_SLIDING] = config->rope[MODEL_REACH_FULL];
    return rc;
}

int config_rope_reads(const struct config_family *family, const char *key)
{
    static const char *const keys[] = {"rope_theta", "rope_scaling", "rope_parameters",
                                       "partial_rotary_factor", "rope_local_base_freq"};
    static const size_t n[] = {[CONFIG_ROPE_FLAT] = 4,
                               [CONFIG_ROPE_PARTIAL] = 4,
                               [CONFIG_ROPE_BY_LAYER_TYPE] = 5,
                               [CONFIG_ROPE_NONE] = 0};
    for (size_t i = 0; i < n[family->rope]; i++)
        if (strcmp(key, keys[i]) == 0)
            return 1;
    return 0;
}
