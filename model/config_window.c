/* Sliding windows in config.json: how many tokens back, and in which blocks. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/config_forms.h"
#include "procs/error.h"

#define WINDOW_MAX ((uint64_t)1 << 31)

static const char window_key[] = "sliding_window", types_key[] = "layer_types";

static void set_sliding(struct model_config *config, uint64_t block)
{
    config->sliding[block / 8] |= (uint8_t)(1U << (block % 8));
}

/* sliding_window: null is none, which is not the same as absent. */
static int read_size(const struct config_source *s, const struct config_family *family,
                     uint64_t *window)
{
    *window = config_is_null(s, window_key) ? 0 : family->window_fallback;
    return config_read_size(s, window_key, WINDOW_MAX, window);
}

/* layer_types: one name per block. */
static int read_types(const struct config_source *s, const json_t *types,
                      struct model_config *config)
{
    char expected[96];
    (void)snprintf(expected, sizeof expected, "a list of %" PRIu64 " names (num_hidden_layers)",
                   config->n_layers);
    if (!json_is_array(types) || json_array_size(types) != config->n_layers)
        return config_refuse(s, types_key, expected, types);
    for (uint64_t b = 0; b < config->n_layers; b++) {
        const json_t *type = json_array_get(types, b);
        const char *name = json_is_string(type) ? json_string_value(type) : "";
        if (strcmp(name, "sliding_attention") == 0)
            set_sliding(config, b);
        else if (strcmp(name, "full_attention") != 0)
            return config_refuse(s, types_key, "\"full_attention\" or \"sliding_attention\"", type);
    }
    return 0;
}

static int any_slides(const struct model_config *config)
{
    for (uint64_t b = 0; b < config->n_layers; b++)
        if (model_config_reach(config, b) == MODEL_REACH_SLIDING)
            return 1;
    return 0;
}

/* Blocks that slide need a window; a window that no block uses is none. */
static int settle(const struct config_source *s, const char *key, struct model_config *config,
                  uint64_t window)
{
    if (!any_slides(config))
        return 0;
    if (window == 0)
        return config_refuse(s, key, "a window, because blocks of the model slide",
                             json_object_get(s->root, key));
    config->sliding_window = window;
    return 0;
}

static int read_all(const struct config_source *s, const struct config_family *family,
                    struct model_config *config)
{
    int rc = read_size(s, family, &config->sliding_window);
    for (uint64_t b = 0; rc == 0 && config->sliding_window && b < config->n_layers; b++)
        set_sliding(config, b);
    return rc;
}

static int read_qwen(const struct config_source *s, const struct config_family *family,
                     struct model_config *config)
{
    static const char use_key[] = "use_sliding_window", from_key[] = "max_window_layers";
    const json_t *types = config_lookup(s->root, types_key);
    const json_t *from = config_lookup(s->root, from_key);
    uint64_t window, first = 28; /* the default of both classes */
    uint32_t uses = 0;
    int rc = read_size(s, family, &window);
    if (rc == 0)
        rc = config_read_flag(s, use_key, &uses);
    if (rc < 0)
        return rc;
    if (from && (!json_is_integer(from) || json_integer_value(from) < 0))
        return config_refuse(s, from_key, "a number of blocks", from);
    if (from)
        first = (uint64_t)json_integer_value(from);
    if (types)
        rc = read_types(s, types, config);
    for (uint64_t b = first; !types && uses && window && b < config->n_layers; b++)
        set_sliding(config, b);
    if (rc < 0)
        return rc;
    return settle(s, uses ? window_key : use_key, config, uses ? window : 0);
}

static int read_switch(const struct config_source *s, const struct config_family *family,
                       struct model_config *config)
{
    uint32_t uses = 0;
    int rc = config_read_flag(s, "use_sliding_window", &uses);
    if (rc == 0)
        rc = read_all(s, family, config);
    if (rc == 0 && !uses) {
        config->sliding_window = 0;
        memset(config->sliding, 0, sizeof config->sliding);
    }
    return rc;
}

static int read_pattern(const struct config_source *s, const struct config_family *family,
                        struct model_config *config)
{
    const json_t *types = config_lookup(s->root, types_key);
    uint64_t window, every = family->window_pattern;
    int rc = read_size(s, family, &window);
    if (rc == 0 && family->window_pattern_key)
        rc = config_read_size(s, family->window_pattern_key, MODEL_BLOCKS_MAX, &every);
    if (rc == 0 && types)
        rc = read_types(s, types, config);
    for (uint64_t b = 0; rc == 0 && !types && b < config->n_layers; b++)
        if ((b + 1) % every != 0)
            set_sliding(config, b);
    return rc < 0 ? rc : settle(s, window_key, config, window);
}

int config_read_window(const struct config_source *s, const struct config_family *family,
                       struct model_config *config)
{
    switch (family->window) {
    case CONFIG_WINDOW_NONE:
        break;
    case CONFIG_WINDOW_ALL:
        return read_all(s, family, config);
    case CONFIG_WINDOW_QWEN:
        return read_qwen(s, family, config);
    case CONFIG_WINDOW_PATTERN:
        return read_pattern(s, family, config);
    case CONFIG_WINDOW_SWITCH:
        return read_switch(s, family, config);
    }
    return 0;
}

int config_window_reads(const struct config_family *family, const char *key)
{
    switch (family->window) {
    case CONFIG_WINDOW_NONE:
        break;
    case CONFIG_WINDOW_ALL:
        return strcmp(key, window_key) == 0;
    case CONFIG_WINDOW_QWEN:
        return strcmp(key, window_key) == 0 || strcmp(key, types_key) == 0 ||
               strcmp(key, "use_sliding_window") == 0 || strcmp(key, "max_window_layers") == 0;
    case CONFIG_WINDOW_PATTERN:
        return strcmp(key, window_key) == 0 || strcmp(key, types_key) == 0 ||
               (family->window_pattern_key && strcmp(key, family->window_pattern_key) == 0);
    case CONFIG_WINDOW_SWITCH:
        return strcmp(key, window_key) == 0 || strcmp(key, "use_sliding_window") == 0;
    }
    return 0;
}
