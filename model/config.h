/*
 * config.json of a Hugging Face folder, as numbers.
 *
 * The rule: a key either changes nothing that we compute, or it is understood, or the model is
 * refused with the key's name. A model that transformers would compute differently must never
 * train silently.
 */
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include <stdint.h>

#include "model/dtype.h"

enum model_architecture {
    MODEL_LLAMA, /* LlamaForCausalLM: Llama 2, Llama 3, SmolLM2 and whatever else says model_type
                    llama */
};

/* How rotary frequencies f are changed. Wavelength: 2 pi / f. */
enum model_rope_scaling {
    ROPE_SCALING_NONE,   /* f */
    ROPE_SCALING_LINEAR, /* f / factor */
    /* Llama 3.1: f where the wavelength < original_max_position / high_freq_factor; f / factor
     * where it is > original_max_position / low_freq_factor; between, with s =
     * (original_max_position / wavelength - low) / (high - low): (1 - s) f / factor + s f */
    ROPE_SCALING_LLAMA3,
};

enum { MODEL_EOS_TOKENS_MAX = 8 };

/* Plain data without pointers: it travels in shared memory and is written once, before it is read.
 */
struct model_config {
    enum model_architecture architecture;
    enum model_dtype
        source_dtype; /* torch_dtype / dtype of config.json: F32, BF16 or F16; F32 if absent */
    uint64_t vocab_size;
    uint64_t hidden_size;
    uint64_t intermediate_size;
    uint64_t n_layers;   /* decoder blocks */
    uint64_t n_heads;    /* query heads */
    uint64_t n_kv_heads; /* divides n_heads */
    uint64_t head_dim;   /* even; need not be hidden_size / n_heads */
    uint64_t max_position;
    double rms_norm_eps;
    double rope_theta;
    double initializer_range;
    enum model_rope_scaling rope_scaling;
    uint32_t tie_word_embeddings;        /* 0 or 1 */
    double rope_factor;                  /* 1 when rope_scaling is NONE */
    double rope_low_freq_factor;         /* LLAMA3 only, else 0 */
    double rope_high_freq_factor;        /* LLAMA3 only, else 0 */
    uint64_t rope_original_max_position; /* LLAMA3 only, else 0 */
    int64_t bos_token_id;                /* -1: none */
    /* -1: none. Its row of the embedding gets no gradient from look-ups (torch's padding_idx); a
     * tied head's share of the row's gradient stays. */
    int64_t pad_token_id;
    uint32_t n_eos;
    uint32_t reserved; /* 0, so that the bytes of two equal configurations are equal */
    int64_t eos_token_id[MODEL_EOS_TOKENS_MAX];
};

/*
 * Reads `folder`/config.json. Missing keys take the defaults of transformers' LlamaConfig.
 * Errors: ERROR_USER naming file (and line:column where the JSON itself is wrong), key, what was
 * expected and what was found; ERROR_FAILED when memory is exhausted.
 */
int model_config_load(struct model_config *config, const char *folder);

/* The same from text already in memory; `where` names it in messages. */
int model_config_parse(struct model_config *config, const char *json, uint64_t bytes,
                       const char *where);

#endif
