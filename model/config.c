#include "model/config.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/config_families.h"
#include "model/config_forms.h"
#include "procs/check.h"
#include "procs/error.h"

#define CONFIG_BYTES_MAX                                                                           \
    ((uint64_t)16 << 20) /* real ones have a few KiB; some carry label maps                        \
                          */

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

static const uint64_t attention_width_max = 1 << 24;

/* A value of a configuration, at its offset. */
static void *field_at(struct model_config *config, size_t field)
{
    return (char *)config + field;
}

/* ---- keys with a single value that we can compute, in all families ---- */

static const struct config_fixed_key fixed_keys[] = {
    {"rope_interleaved", "false"},
    {"is_encoder_decoder", "false"},
    {"add_cross_attention", "false"},
    {"tie_encoder_decoder", "false"},
    {"chunk_size_feed_forward", "0"},
    {"pruned_heads", "{}"},
    {"quantization_config", NULL},
    {"cross_attention_hidden_size", NULL},
    {"auto_map", NULL},
    {.key = NULL},
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
    "architectures", "model_type",  "bos_token_id", "eos_token_id",
    "pad_token_id",  "torch_dtype", "dtype",
};

/* ---- the family ---- */

/* "LlamaForCausalLM (llama), MistralForCausalLM (mistral), ..." */
static const char *supported(char *text, size_t bytes)
{
    size_t used = 0;
    for (size_t i = 0; i < config_n_families && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s (%s)", i ? ", " : "one of ",
                                 config_families[i].architecture, config_families[i].model_type);
    return text;
}

static const struct config_family *family_named(const json_t *architectures, const json_t *type)
{
    const json_t *name = json_array_get(architectures, 0);
    for (size_t i = 0; i < config_n_families; i++) {
        const struct config_family *f = &config_families[i];
        if (architectures
                ? json_array_size(architectures) == 1 && json_is_string(name) &&
                      strcmp(json_string_value(name), f->architecture) == 0
                : json_is_string(type) && strcmp(json_string_value(type), f->model_type) == 0)
            return f;
    }
    return NULL;
}

static int read_architecture(const struct config_source *s, const struct config_family **family)
{
    char text[512];
    const json_t *names = config_lookup(s->root, "architectures");
    const json_t *type = config_lookup(s->root, "model_type");
    if (!names && !type)
        return error_set(ERROR_USER, "%s: expected the key architectures or model_type saying %s",
                         s->where, supported(text, sizeof text));
    *family = family_named(names, type);
    if (!*family)
        return config_refuse(s, names ? "architectures" : "model_type",
                             supported(text, sizeof text), names ? names : type);
    if (type &&
        (!json_is_string(type) || strcmp(json_string_value(type), (*family)->model_type) != 0)) {
        (void)snprintf(text, sizeof text, "\"%s\" (architectures says %s)", (*family)->model_type,
                       (*family)->architecture);
        return config_refuse(s, "model_type", text, type);
    }
    return 0;
}

/* ---- sizes ---- */

static int read_sizes(const struct config_source *s, const struct config_family *family,
                      struct model_config *config)
{
    for (const struct config_size_key *k = family->sizes; k->key; k++) {
        uint64_t *out = field_at(config, k->field);
        *out = k->fallback;
        int rc = config_read_size(s, k->key, k->max, out);
        if (rc < 0)
            return rc;
    }
    if (config_is_null(s, "num_key_value_heads"))
        config->n_kv_heads = 0; /* null says as many as query heads, whatever the default */
    return 0;
}

/* What a family calls the size that another calls by its usual name. */
static const char *size_name(const struct config_family *family, size_t field)
{
    for (const struct config_size_key *k = family->sizes; k->key; k++)
        if (k->field == field)
            return k->key;
    return "head_dim"; /* GPT-2 has no key for it */
}

static int fill_head_dim(const struct config_source *s, const struct config_family *family,
                         struct model_config *c)
{
    if (c->head_dim != 0)
        return 0;
    if (c->hidden_size % c->n_heads != 0)
        return error_set(ERROR_USER,
                         "%s: %s: expected a multiple of %s %" PRIu64
                         " because there is no head_dim, found %" PRIu64,
                         s->where, size_name(family, offsetof(struct model_config, hidden_size)),
                         size_name(family, offsetof(struct model_config, n_heads)), c->n_heads,
                         c->hidden_size);
    c->head_dim = c->hidden_size / c->n_heads;
    return 0;
}

static int check_sizes(const struct config_source *s, const struct config_family *family,
                       struct model_config *c)
{
    if (c->intermediate_size == 0)
        c->intermediate_size = 4 * c->hidden_size;
    if (c->n_kv_heads == 0)
        c->n_kv_heads = c->n_heads;
    if (c->n_heads % c->n_kv_heads != 0)
        return error_set(
            ERROR_USER,
            "%s: num_key_value_heads: expected a divisor of num_attention_heads %" PRIu64
            ", found %" PRIu64,
            s->where, c->n_heads, c->n_kv_heads);
    int rc = fill_head_dim(s, family, c);
    if (rc < 0)
        return rc;
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

/* ---- real numbers, flags, activation, dropout ---- */

static int read_reals(const struct config_source *s, const struct config_family *family,
                      struct model_config *config)
{
    for (const struct config_real_key *k = family->reals; k->key; k++) {
        double *out = field_at(config, k->field);
        *out = k->null_is_none && config_is_null(s, k->key) ? 0.0 : k->fallback;
        int rc = config_read_real(s, k->key, k->min, k->max, out);
        if (rc < 0)
            return rc;
    }
    if (family->scales_embedding)
        config->embedding_scale = sqrt((double)config->hidden_size);
    return 0;
}

static int read_flags(const struct config_source *s, const struct config_family *family,
                      struct model_config *config)
{
    for (const struct config_flag_key *k = family->flags; k->key; k++) {
        int rc = config_read_flag(s, k->key, field_at(config, k->field));
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_activation(const struct config_source *s, const struct config_family *family,
                           struct model_config *config)
{
    static const struct {
        const char *name;
        enum model_activation activation;
    } activations[] = {
        {"silu", MODEL_ACTIVATION_SILU},
        {"swish", MODEL_ACTIVATION_SILU},
        {"gelu_pytorch_tanh", MODEL_ACTIVATION_GELU_TANH},
        {"gelu_new", MODEL_ACTIVATION_GELU_NEW},
        {"gelu", MODEL_ACTIVATION_GELU},
    };
    const json_t *value = config_lookup(s->root, family->activation_key);
    const char *name = value ? json_string_value(value) : family->activation;
    for (size_t i = 0; name && i < LENGTH(activations); i++)
        if (strcmp(name, activations[i].name) == 0) {
            config->activation = activations[i].activation;
            return 0;
        }
    return config_refuse(s, family->activation_key,
                         "\"silu\", \"gelu_pytorch_tanh\", \"gelu_new\" or \"gelu\"", value);
}

static int read_dropouts(const struct config_source *s, const struct config_family *family,
                         struct model_config *config)
{
    for (const struct config_dropout_key *k = family->dropouts; k->key; k++) {
        double p = config_is_null(s, k->key) ? 0.0 : k->fallback;
        int rc = config_read_real(s, k->key, 0.0, 1.0, &p);
        if (rc < 0)
            return rc;
        if (p > config->dropout) {
            config->dropout = p;
            config->dropout_key = (uint32_t)(k - family->dropouts);
        }
    }
    return 0;
}

/* ---- token ids ---- */

static int read_token_id(const struct config_source *s, const char *key, const json_t *value,
                         uint64_t vocab_size, int64_t *out)
{
    json_int_t id = json_integer_value(value);
    if (!json_is_integer(value) || id < -1 || id >= (json_int_t)vocab_size) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "a token id below vocab_size %" PRIu64,
                       vocab_size);
        return config_refuse(s, key, expected, value);
    }
    *out = id;
    return 0;
}

/* The class's own default, unless the vocabulary is too small to have it. */
static int64_t default_token_id(int64_t id, uint64_t vocab_size)
{
    return id < (int64_t)vocab_size ? id : -1;
}

static int read_bos(const struct config_source *s, const struct config_family *family,
                    struct model_config *config)
{
    const json_t *value = json_object_get(s->root, "bos_token_id");
    config->bos_token_id = value ? -1 : default_token_id(family->bos, config->vocab_size);
    if (!value || json_is_null(value))
        return 0;
    return read_token_id(s, "bos_token_id", value, config->vocab_size, &config->bos_token_id);
}

/* torch counts a negative padding_idx from the end. */
static int read_pad(const struct config_source *s, const struct config_family *family,
                    struct model_config *config)
{
    const json_t *value = json_object_get(s->root, "pad_token_id");
    config->pad_token_id = value ? -1 : default_token_id(family->pad, config->vocab_size);
    if (value && !json_is_null(value)) {
        int rc = read_token_id(s, "pad_token_id", value, config->vocab_size, &config->pad_token_id);
        if (rc < 0)
            return rc;
        if (config->pad_token_id < 0)
            config->pad_token_id += (int64_t)config->vocab_size;
    }
    if (family->trains_pad_row)
        config->pad_token_id = -1;
    return 0;
}

static int add_eos(const struct config_source *s, struct model_config *config, const json_t *value)
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

static int read_eos(const struct config_source *s, const struct config_family *family,
                    struct model_config *config)
{
    for (uint32_t i = 0; i < MODEL_EOS_TOKENS_MAX; i++)
        config->eos_token_id[i] = -1;
    const json_t *value = json_object_get(s->root, "eos_token_id");
    if (!value) {
        int64_t id = default_token_id(family->eos, config->vocab_size);
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

static int read_dtype(const struct config_source *s, const struct config_family *family,
                      struct model_config *config)
{
    static const char *const keys[] = {"torch_dtype", "dtype"};
    int found = 0;
    (void)family; /* the same in all */
    config->source_dtype = DTYPE_F32;
    for (size_t i = 0; i < LENGTH(keys); i++) {
        const json_t *value = config_lookup(s->root, keys[i]);
        enum model_dtype dtype;
        if (!value)
            continue;
        if (!json_is_string(value) ||
            model_dtype_from_torch_name(json_string_value(value), &dtype) < 0)
            return config_refuse(s, keys[i], "\"float32\", \"bfloat16\" or \"float16\"", value);
        if (found && dtype != config->source_dtype)
            return config_refuse(s, "dtype", "the same as torch_dtype", value);
        config->source_dtype = dtype;
        found = 1;
    }
    return 0;
}

/* ---- everything else ---- */

static int is_one_of(const char *key, const char *const *keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(key, keys[i]) == 0)
            return 1;
    return 0;
}

static int is_inert(const struct config_family *family, const char *key)
{
    if (key[0] == '_') /* marks the library's own bookkeeping */
        return 1;
    for (const char *const *k = family->inert; *k; k++)
        if (strcmp(key, *k) == 0)
            return 1;
    return is_one_of(key, inert_keys, LENGTH(inert_keys));
}

/* In a table of rows that begin with their key, ended by a row without one. */
static int has_key(const void *table, size_t row_bytes, const char *key)
{
    const char *row_key;
    for (const char *row = table;; row += row_bytes) {
        memcpy(&row_key, row, sizeof row_key);
        if (!row_key || strcmp(key, row_key) == 0)
            return row_key != NULL;
    }
}

static int is_read_elsewhere(const struct config_family *family, const char *key)
{
    return has_key(family->sizes, sizeof *family->sizes, key) ||
           has_key(family->reals, sizeof *family->reals, key) ||
           has_key(family->flags, sizeof *family->flags, key) ||
           has_key(family->dropouts, sizeof *family->dropouts, key) ||
           strcmp(key, family->activation_key) == 0 || config_rope_reads(family, key) ||
           config_window_reads(family, key) || config_experts_reads(family, key) ||
           is_one_of(key, read_keys, LENGTH(read_keys));
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

/* 1: the table has the key, with the value found; 0: it has no such key. */
static int check_fixed(const struct config_source *s, const struct config_fixed_key *table,
                       const char *key, const json_t *value)
{
    for (const struct config_fixed_key *k = table; k->key; k++) {
        if (strcmp(key, k->key) != 0)
            continue;
        if (!k->value)
            return config_refuse(s, key, "no such key (this feature is not supported)", value);
        return same_value(value, k->value) ? 1 : config_refuse(s, key, k->value, value);
    }
    return 0;
}

static int check_key(const struct config_source *s, const struct config_family *family,
                     const char *key, const json_t *value)
{
    if (is_read_elsewhere(family, key) || is_inert(family, key))
        return 0;
    int rc = check_fixed(s, family->fixed, key, value);
    if (rc == 0)
        rc = check_fixed(s, fixed_keys, key, value);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    char expected[64];
    (void)snprintf(expected, sizeof expected, "a key of %s", family->class_name);
    (void)config_refuse(s, key, expected, value);
    return error_hint("if it does not change how the model computes, remove it from the file");
}

static int check_other_keys(const struct config_source *s, const struct config_family *family,
                            struct model_config *config)
{
    const char *key;
    json_t *value;
    (void)config; /* all was read */
    json_object_foreach((json_t *)s->root, key, value)
    {
        int rc = json_is_null(value) ? 0 : check_key(s, family, key, value);
        if (rc < 0)
            return rc;
    }
    return 0;
}

typedef int config_reader(const struct config_source *, const struct config_family *,
                          struct model_config *);

static int config_from_json(struct model_config *config, const json_t *root, const char *where)
{
    static config_reader *const readers[] = {
        read_sizes,       check_sizes,      read_reals,         read_flags,
        read_activation,  read_dropouts,    read_bos,           read_pad,
        read_eos,         read_dtype,       config_read_window, config_read_experts,
        config_read_rope, check_other_keys,
    };
    struct config_source s = {.root = root, .where = where};
    const struct config_family *family;
    memset(config, 0, sizeof *config);
    int rc = read_architecture(&s, &family);
    if (rc < 0)
        return rc;
    memcpy(config, &family->options, sizeof *config);
    for (size_t i = 0; i < LENGTH(readers); i++)
        if ((rc = readers[i](&s, family, config)) < 0)
            return rc;
    return 0;
}

static const struct config_family *family_of(const struct model_config *config)
{
    for (size_t i = 0; i < config_n_families; i++)
        if (config_families[i].options.architecture == config->architecture)
            return &config_families[i];
    CHECK(!"an architecture of the table");
    return NULL;
}

int model_config_check_training(const struct model_config *config, const char *folder)
{
    if (config->dropout <= 0.0)
        return 0;
    (void)error_set(ERROR_USER,
                    "%s/config.json: %s: expected 0 for training, which has no dropout here, found "
                    "%g (where the key is missing, the default of %s)",
                    folder, family_of(config)->dropouts[config->dropout_key].key, config->dropout,
                    family_of(config)->class_name);
    return error_hint("write 0 for it and the other dropout keys, to train without dropout");
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
    int rc = model_json_load_in(&root, folder, "config.json", CONFIG_BYTES_MAX);
    if (rc == 0)
        return error_set(ERROR_USER, "%s: cannot open: %s", path, strerror(ENOENT));
    if (rc < 0)
        return rc;
    rc = config_from_json(config, root, path);
    json_decref(root);
    return rc;
}
