/*
 * The families: for each architecture the keys of its configuration class in transformers, their
 * defaults, and the options of the block template that it sets. Internal to model/config*.c.
 */
#ifndef MODEL_CONFIG_FAMILIES_H
#define MODEL_CONFIG_FAMILIES_H

#include "model/config.h"
#include "model/config_source.h"

/* Lists end with a row whose key is NULL. `field` is an offset in struct model_config. */

struct config_size_key {
    const char *key;
    size_t field;
    uint64_t fallback; /* 0: worked out from others */
    uint64_t max;
};

struct config_real_key {
    const char *key;
    size_t field;
    double fallback;
    double min, max;
    int null_is_none; /* null sets 0, else the fallback */
};

struct config_flag_key {
    const char *key;
    size_t field;
};

/* A key with a single value that we can compute. */
struct config_fixed_key {
    const char *key;
    const char *value; /* JSON; NULL: must be absent or null */
};

/* A probability of dropout; training refuses what is not 0. */
struct config_dropout_key {
    const char *key;
    double fallback;
};

enum config_rope_form {
    CONFIG_ROPE_FLAT,          /* rope_theta + rope_scaling, or rope_parameters */
    CONFIG_ROPE_PARTIAL,       /* the same with partial_rotary_factor, and no scaling */
    CONFIG_ROPE_BY_LAYER_TYPE, /* rope_parameters, or rope_theta and rope_local_base_freq */
    CONFIG_ROPE_NONE,
};

enum config_window_form {
    CONFIG_WINDOW_NONE,
    CONFIG_WINDOW_ALL,  /* sliding_window, in all blocks */
    CONFIG_WINDOW_QWEN, /* use_sliding_window: blocks from max_window_layers on, or layer_types */
    CONFIG_WINDOW_PATTERN, /* all but every Nth block, or layer_types */
    CONFIG_WINDOW_SWITCH,  /* sliding_window in all blocks, if use_sliding_window */
};

enum config_experts_form {
    CONFIG_EXPERTS_NONE,
    CONFIG_EXPERTS_MIXTRAL, /* in every block, of intermediate_size */
    CONFIG_EXPERTS_QWEN,    /* in some blocks, of moe_intermediate_size */
};

struct config_family {
    const char *architecture; /* in "architectures" */
    const char *model_type;
    const char *class_name; /* of the configuration */
    struct model_config options;
    const struct config_size_key *sizes;
    const struct config_real_key *reals;
    const struct config_flag_key *flags;
    const struct config_fixed_key *fixed; /* beside those of all families */
    const struct config_dropout_key *dropouts;
    const char *const *inert; /* beside those of all families */
    const char *activation_key, *activation;
    int64_t bos, eos, pad; /* -1: none */
    int trains_pad_row;    /* the embedding has no padding_idx */
    int scales_embedding;  /* by sqrt(hidden_size) */
    enum config_rope_form rope;
    double rope_theta[MODEL_REACHES];
    enum config_window_form window;
    uint64_t window_fallback;       /* 0: none */
    uint64_t window_pattern;        /* N of CONFIG_WINDOW_PATTERN ... */
    const char *window_pattern_key; /* ... unless this key says another; NULL: none does */
    enum config_experts_form experts;
};

extern const struct config_family config_families[];
extern const size_t config_n_families;

#endif
