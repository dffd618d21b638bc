/*
 * config.json of a Hugging Face folder, as numbers: the options of one block template.
 *
 * The rule: a key either changes nothing that we compute, or it is understood, or the model is
 * refused with the key's name. A model that transformers would compute differently must never
 * train silently.
 *
 * Nothing after the reading asks which architecture it was: model/layout.h and gpu_worker/layers.h
 * look at the options alone. A family is a row of model/config_families.c. An option's zero is what
 * a Llama has.
 */
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "model/dtype.h"

/* Only for messages and for the names of tensors. */
enum model_architecture {
    MODEL_LLAMA,   /* LlamaForCausalLM: Llama 2, Llama 3, SmolLM2, whatever says model_type llama */
    MODEL_MISTRAL, /* MistralForCausalLM */
    MODEL_QWEN2,   /* Qwen2ForCausalLM: Qwen2, Qwen2.5 */
    MODEL_QWEN3,   /* Qwen3ForCausalLM */
    MODEL_PHI3,    /* Phi3ForCausalLM: Phi-3, Phi-4 */
    MODEL_GEMMA2,  /* Gemma2ForCausalLM */
    MODEL_GEMMA3,  /* Gemma3ForCausalLM, text only */
    MODEL_GPT2,    /* GPT2LMHeadModel */
    MODEL_MIXTRAL, /* MixtralForCausalLM */
    MODEL_QWEN3_MOE, /* Qwen3MoeForCausalLM */
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

enum model_norm {
    MODEL_NORM_RMS,          /* w * x / rms(x) */
    MODEL_NORM_RMS_PLUS_ONE, /* (1 + w) * x / rms(x): Gemma */
    MODEL_NORM_LAYER,        /* w * (x - mean) / deviation + b: GPT-2 */
};

enum model_activation {
    MODEL_ACTIVATION_SILU,
    MODEL_ACTIVATION_GELU_TANH, /* gelu_pytorch_tanh */
    MODEL_ACTIVATION_GELU_NEW,  /* the same function, other rounding points in bfloat16 */
    MODEL_ACTIVATION_GELU,
};

/* Where the position of a token enters. */
enum model_positions {
    MODEL_POSITIONS_ROPE,    /* q and k are turned */
    MODEL_POSITIONS_LEARNED, /* a second table is added to the embedding: GPT-2 */
};

enum {
    MODEL_EOS_TOKENS_MAX = 8,
    MODEL_BLOCKS_MAX = 1 << 12,
    MODEL_EXPERTS_MAX = 1 << 10,       /* of a block */
    MODEL_MODEL_EXPERTS_MAX = 1 << 18, /* of all blocks */
};

struct model_rope {
    double theta;
    double factor;                  /* 1 when scaling is NONE */
    double low_freq_factor;         /* LLAMA3 only, else 0 */
    double high_freq_factor;        /* LLAMA3 only, else 0 */
    uint64_t original_max_position; /* LLAMA3 only, else 0 */
    uint32_t scaling;               /* enum model_rope_scaling */
    uint32_t reserved;              /* 0 */
};

/* Index of rope[] : blocks that see the whole document, blocks with a sliding window. */
enum model_reach { MODEL_REACH_FULL, MODEL_REACH_SLIDING, MODEL_REACHES };

/*
 * Plain data without pointers and without padding: it travels in shared memory, is written once,
 * before it is read, and two equal models are equal bytes. What comes before `max_position`
 * determines what is computed, and is in the store's fingerprint of the model.
 */
struct model_config {
    uint64_t vocab_size;
    uint64_t hidden_size;
    uint64_t intermediate_size;
    uint64_t n_layers;   /* decoder blocks, at most MODEL_BLOCKS_MAX */
    uint64_t n_heads;    /* query heads */
    uint64_t n_kv_heads; /* divides n_heads */
    uint64_t head_dim;   /* need not be hidden_size / n_heads */
    uint64_t rope_dim;   /* even, at most head_dim: the first dimensions of a head that turn; 0
                            without   rope */
    /* The token sees itself and the sliding_window - 1 tokens before it, in the blocks whose bit in
     * `sliding` is set; 0: no block has a window. */
    uint64_t sliding_window;
    double norm_eps;
    double attention_scalar;  /* scores are divided by its square root; 0: head_dim */
    double attention_softcap; /* c: scores become c tanh(score / c); 0: none */
    double final_softcap;     /* the same of the logits */
    double embedding_scale;   /* looked-up rows are multiplied by it; 0: not */
    /* Mixture of experts: what a block whose bit in `sparse` is set has in place of its MLP. */
    uint64_t n_experts;         /* E; 0: no block is sparse */
    uint64_t experts_per_token; /* K */
    uint64_t expert_size;       /* F of an expert; intermediate_size is that of the other blocks */
    double router_aux_loss;     /* coefficient of the load balancing loss; 0: there is none */
    /* -1: none. Its row of the embedding gets no gradient from look-ups (torch's padding_idx); a
     * tied head's share of the row's gradient stays. */
    int64_t pad_token_id;
    struct model_rope rope[MODEL_REACHES];
    uint8_t sliding[MODEL_BLOCKS_MAX / 8]; /* bit b % 8 of byte b / 8: block b, from 0 */
    uint8_t sparse[MODEL_BLOCKS_MAX / 8];  /* the same for mixtures of experts */
    uint32_t norm;                         /* enum model_norm */
    uint32_t activation;                   /* enum model_activation */
    uint32_t positions;                    /* enum model_positions */
    /* Each 0 or 1. */
    uint32_t tie_word_embeddings;
    uint32_t qkv_bias;
    uint32_t out_bias;   /* of the attention's output projection */
    uint32_t mlp_bias;   /* of all linears of the MLP */
    uint32_t qk_norm;    /* q and k are normed per head, before rope */
    uint32_t post_norms; /* what attention and MLP give is normed before it is added */
    uint32_t plain_mlp;  /* down(act(up(x))), without a gate */
    uint32_t transposed; /* linears of the blocks are stored (in, out), as GPT-2's Conv1D */
    uint32_t fused_qkv;  /* q, k, v are one tensor */
    uint32_t fused_gate_up;
    uint32_t norm_topk;      /* the weights of a token's experts are divided by their sum */
    uint32_t router_rounded; /* those weights are numbers of the compute dtype, else float32 */
    uint32_t reserved;       /* 0 */

    uint64_t max_position;
    double initializer_range;
    double dropout;       /* the largest dropout probability that training would use */
    int64_t bos_token_id; /* -1: none */
    int64_t eos_token_id[MODEL_EOS_TOKENS_MAX];
    uint32_t n_eos;
    uint32_t architecture; /* enum model_architecture */
    uint32_t source_dtype; /* torch_dtype / dtype of config.json: F32, BF16 or F16; F32 if absent */
    uint32_t dropout_key;  /* which key says so: row of the family's table */
    uint32_t scaled_init;  /* random weights of projections onto the residual stream are smaller by
                              sqrt(2 n_layers): GPT-2 */
    uint32_t reserved_end; /* 0 */
};

/*
 * Reads `folder`/config.json. Missing keys take the defaults of the family's configuration class in
 * transformers. Errors: ERROR_USER naming file (and line:column where the JSON itself is wrong),
 * key, what was expected and what was found; ERROR_FAILED when memory is exhausted.
 */
int model_config_load(struct model_config *config, const char *folder);

/* The same from text already in memory; `where` names it in messages. */
int model_config_parse(struct model_config *config, const char *json, uint64_t bytes,
                       const char *where);

/* -ERROR_USER when training would compute what evaluation does not, and we have not: dropout. */
int model_config_check_training(const struct model_config *config, const char *folder);

/* The family's model_type: "llama", "qwen2", ... */
static inline const char *model_config_family(const struct model_config *config)
{
    static const char *const families[] = {"llama",   "mistral",  "qwen2",       "qwen3",
                                           "phi3",    "gemma2",   "gemma3_text", "gpt2",
                                           "mixtral", "qwen3_moe"};
    return families[config->architecture];
}

/* Bytes at the start of a configuration that determine what is computed. */
#define MODEL_CONFIG_COMPUTED_BYTES offsetof(struct model_config, max_position)

/* Of block b, from 0. */
static inline enum model_reach model_config_reach(const struct model_config *config, uint64_t block)
{
    return (config->sliding[block / 8] >> (block % 8)) & 1 ? MODEL_REACH_SLIDING : MODEL_REACH_FULL;
}

/* Has block b, from 0, experts? */
static inline int model_config_is_sparse(const struct model_config *config, uint64_t block)
{
    return (config->sparse[block / 8] >> (block % 8)) & 1;
}

/* Blocks with experts. */
static inline uint64_t model_config_n_sparse(const struct model_config *config)
{
    uint64_t n = 0;
    for (uint64_t block = 0; block < config->n_layers; block++)
        n += (uint64_t)model_config_is_sparse(config, block);
    return n;
}

/* Keys that a query of block b sees at most, itself among them; 0: all of its document. */
static inline uint64_t model_config_window(const struct model_config *config, uint64_t block)
{
    return model_config_reach(config, block) == MODEL_REACH_SLIDING ? config->sliding_window : 0;
}

#endif
