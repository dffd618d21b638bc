#include "model/config.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "model/json.h"
#include "procs/error.h"

#define CONFIG_BYTES_MAX                                                                           \
    ((uint64_t)16 << 20) /* real ones have a few KiB; some carry label maps                        \
                          */

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

/* What a helper needs to read a key and to complain about it. */
struct source {
    const json_t *root;
    const char *where;
};

/* ---- sizes ---- */

/*
 * Defaults are those of transformers' LlamaConfig. The limits are far above any real model; they
 * keep every product of sizes within 64 bits (layout.c): a matrix has at most 2^48 elements, a
 * model of 2^12 blocks of seven matrices fewer than 2^63.
 */
static const struct size_key {
    const char *key;
    size_t field;
    uint64_t fallback; /* 0: worked out from others */
    uint64_t max;
} size_keys[] = {
    {"vocab_size", offsetof(struct model_config, vocab_size), 32000, 1 << 24},
    {"hidden_size", offsetof(struct model_config, hidden_size), 4096, 1 << 24},
    {"intermediate_size", offsetof(struct model_config, intermediate_size), 11008, 1 << 24},
    {"num_hidden_layers", offsetof(struct model_config, n_layers), 32, 1 << 12},
    {"num_attention_heads", offsetof(struct model_config, n_heads), 32, 1 << 16},
    {"num_key_value_heads", offsetof(struct model_config, n_kv_heads), 0, 1 << 16},
    {"head_dim", offsetof(struct model_config, head_dim), 0, 1 << 16},
    {"max_position_embeddings", offsetof(struct model_config, max_position), 2048,
     (uint64_t)1 << 31},
};

static const uint64_t attention_width_max = 1 << 24;

/* ---- real numbers ---- */

static const struct real_key {
    const char *key;
    size_t field;
    double fallback;
    double min, max;
} real_keys[] = {
    {"rms_norm_eps", offsetof(struct model_config, rms_norm_eps), 1e-6, 1e-30, 1.0},
    {"rope_theta", offsetof(struct model_config, rope_theta), 10000.0, 1e-3, 1e15},
    {"initializer_range", offsetof(struct model_config, initializer_range), 0.02, 0.0, 1e3},
};

/* ---- keys with a single value that we can compute ---- */

static const struct fixed_key {
    const char *key;
    const char *value; /* JSON; NULL: must be absent or null */
} fixed_keys[] = {
    {"hidden_act", "\"silu\""},
    {"attention_bias", "false"},
    {"mlp_bias", "false"},
    {"attention_dropout", "0"},
    {"hidden_dropout", "0"},
    {"hidden_dropout_prob", "0"},
    {"resid_pdrop", "0"},
    {"embd_pdrop", "0"},
    {"pretraining_tp", "1"},
    {"partial_rotary_factor", "1"},
    {"rope_interleaved", "false"},
    {"use_sliding_window", "false"},
    {"is_encoder_decoder", "false"},
    {"add_cross_attention", "false"},
    {"tie_encoder_decoder", "false"},
    {"chunk_size_feed_forward", "0"},
    {"pruned_heads", "{}"},
    {"sliding_window", NULL},
    {"quantization_config", NULL},
    {"cross_attention_hidden_size", NULL},
    {"auto_map", NULL},
};

/* ---- keys that say nothing about the computation of loss and gradients ---- */

static const char *const inert_keys[] = {
    /* about the file */
    "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version",
    "is_llama_config", "tokenizer_class", "finetuning_task", "task_specific_params", "problem_type",
    "id2label", "label2id", "num_labels", "prefix", "base_model_name_or_path", "name_or_path",
    "attn_implementation", "use_bfloat16", "torchscript", "tf_legacy_loss", "return_dict",
    "output_hidden_states", "output_attentions", "gradient_checkpointing", "is_decoder",
    "max_sequence_length", "tokenizer_model_max_length", "model_max_length",
    /* about generation */
    "use_cache", "cache_implementation", "sep_token_id", "decoder_start_token_id", "max_length",
    "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens"};

/* ---- keys read by a function of their own below ---- */

static const char *const read_keys[] = {
    "architectures", "model_type",      "tie_word_embeddings", "bos_token_id",
    "eos_token_id",  "pad_token_id",    "torch_dtype",         "dtype",
    "rope_scaling",  "rope_parameters",
};

/* The value of a key; NULL when it is absent or null, which transformers treats alike. */
static const json_t *lookup(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static int refuse(const struct source *s, const char *key, const char *expected,
                  const json_t *found)
{
    char text[MODEL_JSON_TEXT_BYTES];
    return error_set(ERROR_USER, "%s: %s: expected %s, found %s", s->where, key, expected,
                     model_json_text(found, text));
}

static int read_size(const struct source *s, const struct size_key *k, uint64_t *out)
{
    const json_t *value = lookup(s->root, k->key);
    *out = k->fallback;
    if (!value)
        return 0;
    json_int_t n = json_integer_value(value); /* 0 unless it is an integer */
    if (n < 1 || (uint64_t)n > k->max) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "an integer from 1 to %" PRIu64, k->max);
        return refuse(s, k->key, expected, value);
    }
    *out = (uint64_t)n;
    return 0;
}

static int read_real(const struct source *s, const char *key, double min, double max, double *out)
{
    const json_t *value = lookup(s->root, key);
    if (!value)
        return 0;
    double x = json_number_value(value);
    if (!json_is_number(value) || !(x >= min && x <= max)) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
        return refuse(s, key, expected, value);
    }
    *out = x;
    return 0;
}

static int read_architecture(const struct source *s, struct model_config *config)
{
    static const char supported[] = "LlamaForCausalLM (model_type \"llama\": Llama 2, Llama 3, "
                                    "SmolLM2)";
    const json_t *names = lookup(s->root, "architectures");
    const json_t *type = lookup(s->root, "model_type");
    const json_t *name = json_array_get(names, 0);
    config->architecture = MODEL_LLAMA;
    if (names && (json_array_size(names) != 1 || !json_is_string(name) ||
                  strcmp(json_string_value(name), "LlamaForCausalLM") != 0))
        return refuse(s, "architectures", supported, names);
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "llama") != 0))
        return refuse(s, "model_type", supported, type);
    if (!names && !type)
        return error_set(ERROR_USER, "%s: expected the key architectures or model_type saying %s",
                         s->where, supported);
    return 0;
}

static int read_sizes(const struct source *s, struct model_config *config)
{
    for (size_t i = 0; i < LENGTH(size_keys); i++) {
        int rc = read_size(s, &size_keys[i], (uint64_t *)((char *)config + size_keys[i].field));
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_sizes(const struct source *s, struct model_config *c)
{
    if (c->n_kv_heads == 0)
        c->n_kv_heads = c->n_heads;
    if (c->n_heads % c->n_kv_heads != 0)
        return error_set(
            ERROR_USER,
            "%s: num_key_value_heads: expected a divisor of num_attention_heads %" PRIu64
            ", found %" PRIu64,
            s->where, c->n_heads, c->n_kv_heads);
    if (c->head_dim == 0) {
        if (c->hidden_size % c->n_heads != 0)
            return error_set(ERROR_USER,
                             "%s: hidden_size: expected a multiple of num_attention_heads %" PRIu64
                             " because there is no head_dim, found %" PRIu64,
                             s->where, c->n_heads, c->hidden_size);
        c->head_dim = c->hidden_size / c->n_heads;
    }
    if (c->head_dim % 2 != 0)
        return error_set(ERROR_USER,
                         "%s: head_dim: expected an even number (rotary embeddings turn pairs), "
                         "found %" PRIu64,
                         s->where, c->head_dim);
    if (c->n_heads * c->head_dim > attention_width_max)
        return error_set(ERROR_USER,
                         "%s: num_attention_heads * head_dim: expected at most %" PRIu64
                         ", found %" PRIu64 " * %" PRIu64,
                         s->where, attention_width_max, c->n_heads, c->head_dim);
    return 0;
}

static int read_reals(const struct source *s, struct model_config *config)
{
    for (size_t i = 0; i < LENGTH(real_keys); i++) {
        const struct real_key *k = &real_keys[i];
        double *out = (double *)((char *)config + k->field);
        *out = k->fallback;
        int rc = read_real(s, k->key, k->min, k->max, out);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_tie(const struct source *s, struct model_config *config)
{
    const json_t *value = lookup(s->root, "tie_word_embeddings");
    if (value && !json_is_boolean(value))
        return refuse(s, "tie_word_embeddings", "true or false", value);
    config->tie_word_embeddings = json_is_true(value);
    return 0;
}

/* ---- token ids ---- */

static int read_token_id(const struct source *s, const char *key, const json_t *value,
                         uint64_t vocab_size, int64_t *out)
{
    json_int_t id = json_integer_value(value);
    if (!json_is_integer(value) || id < -1 || id >= (json_int_t)vocab_size) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "a token id below vocab_size %" PRIu64,
                       vocab_size);
        return refuse(s, key, expected, value);
    }
    *out = id;
    return 0;
}

/* LlamaConfig's own default, unless the vocabulary is too small to have it. */
static int64_t default_token_id(int64_t id, uint64_t vocab_size)
{
    return id < (int64_t)vocab_size ? id : -1;
}

static int read_bos(const struct source *s, struct model_config *config)
{
    const json_t *value = json_object_get(s->root, "bos_token_id");
    config->bos_token_id = value ? -1 : default_token_id(1, config->vocab_size);
    if (!value || json_is_null(value))
        return 0;
    return read_token_id(s, "bos_token_id", value, config->vocab_size, &config->bos_token_id);
}

/* torch counts a negative padding_idx from the end. */
static int read_pad(const struct source *s, struct model_config *config)
{
    const json_t *value = lookup(s->root, "pad_token_id");
    config->pad_token_id = -1;
    if (!value)
        return 0;
    int rc = read_token_id(s, "pad_token_id", value, config->vocab_size, &config->pad_token_id);
    if (rc == 0 && config->pad_token_id < 0)
        config->pad_token_id += (int64_t)config->vocab_size;
    return rc;
}

static int add_eos(const struct source *s, struct model_config *config, const json_t *value)
{
    int64_t id = -1;
    int rc = read_token_id(s, "eos_token_id", value, config->vocab_size, &id);
    if (rc < 0)
        return rc;
    if (id < 0)
        return 0; /* -1 says none */
    if (config->n_eos == MODEL_EOS_TOKENS_MAX)
        return error_set(ERROR_USER, "%s: eos_token_id: expected at most %d ids, found more",
                         s->where, MODEL_EOS_TOKENS_MAX);
    config->eos_token_id[config->n_eos++] = id;
    return 0;
}

static int read_eos(const struct source *s, struct model_config *config)
{
    for (uint32_t i = 0; i < MODEL_EOS_TOKENS_MAX; i++)
        config->eos_token_id[i] = -1;
    const json_t *value = json_object_get(s->root, "eos_token_id");
    if (!value) {
        int64_t id = default_token_id(2, config->vocab_size);
        config->eos_token_id[0] = id;
        config->n_eos = id >= 0;
        return 0;
    }
    if (json_is_null(value))
        return 0;
    if (!json_is_array(value))
        return add_eos(s, config, value);
    int rc = 0;
    for (size_t i = 0; i < json_array_size(value) && rc == 0; i++)
        rc = add_eos(s, config, json_array_get(value, i));
    return rc;
}

/* ---- dtype ---- */

static int read_dtype(const struct source *s, struct model_config *config)
{
    static const char *const keys[] = {"torch_dtype", "dtype"};
    int found = 0;
    config->source_dtype = DTYPE_F32;
    for (size_t i = 0; i < LENGTH(keys); i++) {
        const json_t *value = lookup(s->root, keys[i]);
        enum model_dtype dtype;
        if (!value)
            continue;
        if (!json_is_string(value) ||
            model_dtype_from_torch_name(json_string_value(value), &dtype) < 0)
            return refuse(s, keys[i], "\"float32\", \"bfloat16\" or \"float16\"", value);
        if (found && dtype != config->source_dtype)
            return refuse(s, "dtype", "the same as torch_dtype", value);
        config->source_dtype = dtype;
        found = 1;
    }
    return 0;
}

/* ---- rotary embeddings ---- */

static int rope_read_factors(const struct source *rope, struct model_config *config)
{
    static const char *const keys[] = {"factor", "low_freq_factor", "high_freq_factor"};
    double *const out[] = {&config->rope_factor, &config->rope_low_freq_factor,
                           &config->rope_high_freq_factor};
    size_t n = config->rope_scaling == ROPE_SCALING_LLAMA3 ? 3 : 1;
    for (size_t i = 0; i < n; i++) {
        if (!lookup(rope->root, keys[i]))
            return refuse(rope, keys[i], "a number", NULL);
        int rc = read_real(rope, keys[i], i == 0 ? 1.0 : 1e-6, 1e9, out[i]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int rope_read_llama3(const struct source *rope, struct model_config *config)
{
    static const struct size_key key = {"original_max_position_embeddings", 0, 0,
                                        (uint64_t)1 << 31};
    int rc = rope_read_factors(rope, config);
    if (rc < 0)
        return rc;
    if (config->rope_low_freq_factor >= config->rope_high_freq_factor)
        return error_set(ERROR_USER,
                         "%s: low_freq_factor: expected less than high_freq_factor %g, found %g",
                         rope->where, config->rope_high_freq_factor, config->rope_low_freq_factor);
    if (!lookup(rope->root, key.key))
        return refuse(rope, key.key, "an integer", NULL);
    return read_size(rope, &key, &config->rope_original_max_position);
}

static int rope_refuse_unknown(const struct source *rope, const char *const *known, size_t n)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)rope->root, key, value)
    {
        size_t i = 0;
        while (i < n && strcmp(key, known[i]) != 0)
            i++;
        if (i == n && !json_is_null(value))
            return refuse(rope, key, "no such key for this rope_type", value);
    }
    return 0;
}

static int rope_read_type(const struct source *rope, struct model_config *config)
{
    static const char *const known[] = {/* default */ "rope_type",
                                        "type",
                                        "rope_theta",
                                        "partial_rotary_factor",
                                        /* linear */ "factor",
                                        /* llama3 */ "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings"};
    const json_t *type = lookup(rope->root, "rope_type");
    if (!type)
        type = lookup(rope->root, "type");
    const char *name = type ? json_string_value(type) : "default";
    if (name && strcmp(name, "default") == 0)
        return rope_refuse_unknown(rope, known, 4);
    if (name && strcmp(name, "linear") == 0) {
        config->rope_scaling = ROPE_SCALING_LINEAR;
        int rc = rope_refuse_unknown(rope, known, 5);
        return rc < 0 ? rc : rope_read_factors(rope, config);
    }
    if (name && strcmp(name, "llama3") == 0) {
        config->rope_scaling = ROPE_SCALING_LLAMA3;
        int rc = rope_refuse_unknown(rope, known, LENGTH(known));
        return rc < 0 ? rc : rope_read_llama3(rope, config);
    }
    return refuse(rope, "rope_type", "\"default\", \"linear\" or \"llama3\"", type);
}

/* Old files: rope_scaling beside rope_theta. New ones: rope_parameters with rope_theta inside. */
static int read_rope(const struct source *s, struct model_config *config)
{
    const json_t *old = lookup(s->root, "rope_scaling");
    const json_t *new = lookup(s->root, "rope_parameters");
    const char *key = new ? "rope_parameters" : "rope_scaling";
    const json_t *object = new ? new : old;
    config->rope_factor = 1.0;
    if (!object)
        return 0;
    if (old && new && !json_equal(old, new))
        return refuse(s, "rope_scaling", "nothing beside rope_parameters", old);
    if (!json_is_object(object))
        return refuse(s, key, "an object or null", object);
    char where[512];
    (void)snprintf(where, sizeof where, "%s: %s", s->where, key); /* a long path is cut */
    struct source rope = {.root = object, .where = where};
    if (!new &&lookup(object, "rope_theta"))
        return refuse(&rope, "rope_theta", "it beside rope_scaling, not inside",
                      lookup(object, "rope_theta"));
    const json_t *partial = lookup(object, "partial_rotary_factor");
    if (partial && json_number_value(partial) != 1.0)
        return refuse(&rope, "partial_rotary_factor", "1", partial);
    int rc = read_real(&rope, "rope_theta", 1e-3, 1e15, &config->rope_theta);
    return rc < 0 ? rc : rope_read_type(&rope, config);
}

/* ---- everything else ---- */

static int is_one_of(const char *key, const char *const *keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(key, keys[i]) == 0)
            return 1;
    return 0;
}

static int is_read_elsewhere(const char *key)
{
    for (size_t i = 0; i < LENGTH(size_keys); i++)
        if (strcmp(key, size_keys[i].key) == 0)
            return 1;
    for (size_t i = 0; i < LENGTH(real_keys); i++)
        if (strcmp(key, real_keys[i].key) == 0)
            return 1;
    return is_one_of(key, read_keys, LENGTH(read_keys));
}

/* 1, 1.0: the same; else as JSON. */
static int same_value(const json_t *value, const char *text)
{
    json_t *expected = json_loads(text, JSON_DECODE_ANY, NULL);
    int same = json_is_number(expected) && json_is_number(value)
                   ? json_number_value(value) == json_number_value(expected)
                   : json_equal(value, expected);
    json_decref(expected);
    return same;
}

static int check_key(const struct source *s, const char *key, const json_t *value)
{
    for (size_t i = 0; i < LENGTH(fixed_keys); i++) {
        if (strcmp(key, fixed_keys[i].key) != 0)
            continue;
        if (!fixed_keys[i].value)
            return refuse(s, key, "no such key (this feature is not supported)", value);
        if (!same_value(value, fixed_keys[i].value))
            return refuse(s, key, fixed_keys[i].value, value);
        return 0;
    }
    if (is_read_elsewhere(key) || is_one_of(key, inert_keys, LENGTH(inert_keys)) || key[0] == '_')
        return 0; /* an underscore marks the library's own bookkeeping */
    (void)refuse(s, key, "a key of LlamaConfig", value);
    return error_hint("if it does not change how the model computes, remove it from the file");
}

static int check_other_keys(const struct source *s)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)s->root, key, value)
    {
        int rc = json_is_null(value) ? 0 : check_key(s, key, value);
        if (rc < 0)
            return rc;
    }
    return 0;
}

typedef int config_reader(const struct source *, struct model_config *);

static int config_from_json(struct model_config *config, const json_t *root, const char *where)
{
    static config_reader *const readers[] = {
        read_architecture, read_sizes, check_sizes, read_reals, read_tie,
        read_bos,          read_pad,   read_eos,    read_dtype, read_rope,
    };
    struct source s = {.root = root, .where = where};
    memset(config, 0, sizeof *config); /* padding too: equal models are equal bytes */
    for (size_t i = 0; i < LENGTH(readers); i++) {
        int rc = readers[i](&s, config);
        if (rc < 0)
            return rc;
    }
    return check_other_keys(&s);
}

int model_config_parse(struct model_config *config, const char *json, uint64_t bytes,
                       const char *where)
{
    json_t *root;
    int rc = model_json_parse(&root, json, bytes, where);
    if (rc < 0)
        return rc;
    rc = config_from_json(config, root, where);
    json_decref(root);
    return rc;
}

int model_config_load(struct model_config *config, const char *folder)
{
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/config.json", folder);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(ERROR_USER, "model folder: expected a path below 4000 bytes, found %d", n);
    json_t *root;
    int rc = model_json_load(&root, path, CONFIG_BYTES_MAX);
    if (rc < 0)
        return rc;
    rc = config_from_json(config, root, path);
    json_decref(root);
    return rc;
}
