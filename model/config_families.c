#include "model/config_families.h"

#define FIELD(name) offsetof(struct model_config, name)

/*
 * The limits are far above any real model; they keep every product of sizes within 64 bits
 * (layout.c): a matrix has at most 2^48 elements (a fused one 2^50), a model of 2^12 blocks of
 * seven matrices fewer than 2^63. Matrices of experts are bounded together: config_experts.c.
 */
#define POSITIONS_MAX ((uint64_t)1 << 31)

#define SIZES(vocab, hidden, inner, blocks, heads, kv_heads, head, positions)                      \
    (const struct config_size_key[])                                                               \
    {                                                                                              \
        {"vocab_size", FIELD(vocab_size), vocab, 1 << 24},                                         \
            {"hidden_size", FIELD(hidden_size), hidden, 1 << 24},                                  \
            {"intermediate_size", FIELD(intermediate_size), inner, 1 << 24},                       \
            {"num_hidden_layers", FIELD(n_layers), blocks, MODEL_BLOCKS_MAX},                      \
            {"num_attention_heads", FIELD(n_heads), heads, 1 << 16},                               \
            {"num_key_value_heads", FIELD(n_kv_heads), kv_heads, 1 << 16},                         \
            {"head_dim", FIELD(head_dim), head, 1 << 16},                                          \
            {"max_position_embeddings", FIELD(max_position), positions, POSITIONS_MAX},            \
        {                                                                                          \
            .key = NULL                                                                            \
        }                                                                                          \
    }

static const struct config_size_key gpt2_sizes[] = {
    {"vocab_size", FIELD(vocab_size), 50257, 1 << 24},
    {"n_embd", FIELD(hidden_size), 768, 1 << 24},
    {"n_inner", FIELD(intermediate_size), 0, 1 << 24},
    {"n_layer", FIELD(n_layers), 12, MODEL_BLOCKS_MAX},
    {"n_head", FIELD(n_heads), 12, 1 << 16},
    {"n_positions", FIELD(max_position), 1024, 1 << 24},
    {.key = NULL},
};

#define NORM_EPS(key, fallback)                                                                    \
    {                                                                                              \
        key, FIELD(norm_eps), fallback, 1e-30, 1.0, 0                                              \
    }
#define INITIALIZER_RANGE                                                                          \
    {                                                                                              \
        "initializer_range", FIELD(initializer_range), 0.02, 0.0, 1e3, 0                           \
    }
#define SOFTCAP(key, field, fallback)                                                              \
    {                                                                                              \
        key, FIELD(field), fallback, 1e-3, 1e9, 1                                                  \
    }
#define ATTENTION_SCALAR                                                                           \
    {                                                                                              \
        "query_pre_attn_scalar", FIELD(attention_scalar), 256, 1e-6, 1e9, 0                        \
    }

static const struct config_real_key rms_reals[] = {
    NORM_EPS("rms_norm_eps", 1e-6), INITIALIZER_RANGE, {.key = NULL}};
static const struct config_real_key mixtral_reals[] = {
    NORM_EPS("rms_norm_eps", 1e-5), INITIALIZER_RANGE, {.key = NULL}};
static const struct config_real_key phi3_reals[] = {
    NORM_EPS("rms_norm_eps", 1e-5), INITIALIZER_RANGE, {.key = NULL}};
static const struct config_real_key gpt2_reals[] = {
    NORM_EPS("layer_norm_epsilon", 1e-5), INITIALIZER_RANGE, {.key = NULL}};
static const struct config_real_key gemma2_reals[] = {
    NORM_EPS("rms_norm_eps", 1e-6),
    INITIALIZER_RANGE,
    ATTENTION_SCALAR,
    SOFTCAP("attn_logit_softcapping", attention_softcap, 50),
    SOFTCAP("final_logit_softcapping", final_softcap, 30),
    {.key = NULL}};
static const struct config_real_key gemma3_reals[] = {
    NORM_EPS("rms_norm_eps", 1e-6),
    INITIALIZER_RANGE,
    ATTENTION_SCALAR,
    SOFTCAP("final_logit_softcapping", final_softcap, 0),
    {.key = NULL}};

#define ATTENTION_BIAS                                                                             \
    {"attention_bias", FIELD(qkv_bias)},                                                           \
    {                                                                                              \
        "attention_bias", FIELD(out_bias)                                                          \
    }
#define TIE                                                                                        \
    {                                                                                              \
        "tie_word_embeddings", FIELD(tie_word_embeddings)                                          \
    }

static const struct config_flag_key llama_flags[] = {
    TIE, ATTENTION_BIAS, {"mlp_bias", FIELD(mlp_bias)}, {.key = NULL}};
static const struct config_flag_key attention_bias_flags[] = {TIE, ATTENTION_BIAS, {.key = NULL}};
static const struct config_flag_key tie_flag[] = {TIE, {.key = NULL}};

static const struct config_fixed_key llama_fixed[] = {{"use_sliding_window", "false"},
                                                      {"sliding_window", NULL},
                                                      {"pretraining_tp", "1"},
                                                      {.key = NULL}};
static const struct config_fixed_key no_bias[] = {{"attention_bias", "false"}, {.key = NULL}};
static const struct config_fixed_key qwen2_fixed[] = {{"use_mrope", "false"}, {.key = NULL}};
static const struct config_fixed_key no_fixed[] = {{.key = NULL}};
static const struct config_fixed_key gemma2_fixed[] = {{"use_bidirectional_attention", "false"},
                                                       {.key = NULL}};
/* The library's Gemma 3 does not cap the attention's scores, whatever the key says. */
static const struct config_fixed_key gemma3_fixed[] = {
    {"use_bidirectional_attention", "false"}, {"attn_logit_softcapping", NULL}, {.key = NULL}};
static const struct config_fixed_key gpt2_fixed[] = {
    {"scale_attn_weights", "true"}, {"scale_attn_by_inverse_layer_idx", "false"}, {.key = NULL}};

static const struct config_dropout_key usual_dropouts[] = {
    {"attention_dropout", 0}, {"hidden_dropout", 0}, {"hidden_dropout_prob", 0},
    {"resid_pdrop", 0},       {"embd_pdrop", 0},     {.key = NULL}};
static const struct config_dropout_key gpt2_dropouts[] = {
    {"resid_pdrop", 0.1}, {"embd_pdrop", 0.1}, {"attn_pdrop", 0.1}, {.key = NULL}};

/* Noise on the router's input, in training. */
static const struct config_fixed_key mixtral_fixed[] = {
    {"attention_bias", "false"}, {"router_jitter_noise", "0"}, {.key = NULL}};

static const char *const no_inert[] = {NULL};
static const char *const qwen3_moe_inert[] = {"max_window_layers", NULL}; /* not of this class */
static const char *const qwen2_inert[] = {"attention_bias", NULL}; /* always q, k, v and not o */
/* auto_map names code beside the weights, which the library's own class does without. */
static const char *const phi3_inert[] = {"original_max_position_embeddings", "auto_map", NULL};
/* hidden_act: the library reads hidden_activation. */
static const char *const gemma_inert[] = {"hidden_act", "sliding_window_size", NULL};
/* reorder_and_upcast_attn: scores in float32, as ours are anyway. The head of a summary is not part
 * of the language model. */
static const char *const gpt2_inert[] = {"n_ctx",
                                         "reorder_and_upcast_attn",
                                         "summary_type",
                                         "summary_use_proj",
                                         "summary_activation",
                                         "summary_proj_to_labels",
                                         "summary_first_dropout",
                                         NULL};

const struct config_family config_families[] = {
    {
        .architecture = "LlamaForCausalLM",
        .model_type = "llama",
        .class_name = "LlamaConfig",
        .options = {.architecture = MODEL_LLAMA},
        .sizes = SIZES(32000, 4096, 11008, 32, 32, 0, 0, 2048),
        .reals = rms_reals,
        .flags = llama_flags,
        .fixed = llama_fixed,
        .dropouts = usual_dropouts,
        .inert = no_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = 1,
        .eos = 2,
        .pad = -1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e4, 1e4},
    },
    {
        .architecture = "MistralForCausalLM",
        .model_type = "mistral",
        .class_name = "MistralConfig",
        .options = {.architecture = MODEL_MISTRAL},
        .sizes = SIZES(32000, 4096, 14336, 32, 32, 8, 0, 131072),
        .reals = rms_reals,
        .flags = tie_flag,
        .fixed = no_bias,
        .dropouts = usual_dropouts,
        .inert = no_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = 1,
        .eos = 2,
        .pad = -1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e4, 1e4},
        .window = CONFIG_WINDOW_ALL,
        .window_fallback = 4096,
    },
    {
        .architecture = "Qwen2ForCausalLM",
        .model_type = "qwen2",
        .class_name = "Qwen2Config",
        .options = {.architecture = MODEL_QWEN2, .qkv_bias = 1},
        .sizes = SIZES(151936, 4096, 22016, 32, 32, 32, 0, 32768),
        .reals = rms_reals,
        .flags = tie_flag,
        .fixed = qwen2_fixed,
        .dropouts = usual_dropouts,
        .inert = qwen2_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = -1,
        .eos = -1,
        .pad = -1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e4, 1e4},
        .window = CONFIG_WINDOW_QWEN,
        .window_fallback = 4096,
    },
    {
        .architecture = "Qwen3ForCausalLM",
        .model_type = "qwen3",
        .class_name = "Qwen3Config",
        .options = {.architecture = MODEL_QWEN3, .qk_norm = 1},
        .sizes = SIZES(151936, 4096, 22016, 32, 32, 32, 128, 32768),
        .reals = rms_reals,
        .flags = attention_bias_flags,
        .fixed = no_fixed,
        .dropouts = usual_dropouts,
        .inert = no_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = -1,
        .eos = -1,
        .pad = -1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e4, 1e4},
        .window = CONFIG_WINDOW_QWEN,
        .window_fallback = 4096,
    },
    {
        .architecture = "Phi3ForCausalLM",
        .model_type = "phi3",
        .class_name = "Phi3Config",
        .options = {.architecture = MODEL_PHI3, .fused_qkv = 1, .fused_gate_up = 1},
        .sizes = SIZES(32064, 3072, 8192, 32, 32, 0, 0, 4096),
        .reals = phi3_reals,
        .flags = tie_flag,
        .fixed = no_bias,
        .dropouts = usual_dropouts,
        .inert = phi3_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = 1,
        .eos = 32000,
        .pad = 32000,
        .rope = CONFIG_ROPE_PARTIAL,
        .rope_theta = {1e4, 1e4},
        .window = CONFIG_WINDOW_ALL,
    },
    {
        .architecture = "Gemma2ForCausalLM",
        .model_type = "gemma2",
        .class_name = "Gemma2Config",
        .options = {.architecture = MODEL_GEMMA2,
                    .norm = MODEL_NORM_RMS_PLUS_ONE,
                    .post_norms = 1,
                    .tie_word_embeddings = 1},
        .sizes = SIZES(256000, 2304, 9216, 26, 8, 4, 256, 8192),
        .reals = gemma2_reals,
        .flags = attention_bias_flags,
        .fixed = gemma2_fixed,
        .dropouts = usual_dropouts,
        .inert = gemma_inert,
        .activation_key = "hidden_activation",
        .activation = "gelu_pytorch_tanh",
        .bos = 2,
        .eos = 1,
        .pad = 0,
        .scales_embedding = 1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e4, 1e4},
        .window = CONFIG_WINDOW_PATTERN,
        .window_fallback = 4096,
        .window_pattern = 2,
    },
    {
        .architecture = "Gemma3ForCausalLM",
        .model_type = "gemma3_text",
        .class_name = "Gemma3TextConfig",
        .options = {.architecture = MODEL_GEMMA3,
                    .norm = MODEL_NORM_RMS_PLUS_ONE,
                    .qk_norm = 1,
                    .post_norms = 1,
                    .tie_word_embeddings = 1},
        .sizes = SIZES(262208, 2304, 9216, 26, 8, 4, 256, 131072),
        .reals = gemma3_reals,
        .flags = attention_bias_flags,
        .fixed = gemma3_fixed,
        .dropouts = usual_dropouts,
        .inert = gemma_inert,
        .activation_key = "hidden_activation",
        .activation = "gelu_pytorch_tanh",
        .bos = 2,
        .eos = 1,
        .pad = 0,
        .scales_embedding = 1,
        .rope = CONFIG_ROPE_BY_LAYER_TYPE,
        .rope_theta = {1e6, 1e4},
        .window = CONFIG_WINDOW_PATTERN,
        .window_fallback = 4096,
        .window_pattern = 6,
        .window_pattern_key = "sliding_window_pattern",
    },
    {
        .architecture = "GPT2LMHeadModel",
        .model_type = "gpt2",
        .class_name = "GPT2Config",
        .options = {.architecture = MODEL_GPT2,
                    .norm = MODEL_NORM_LAYER,
                    .positions = MODEL_POSITIONS_LEARNED,
                    .tie_word_embeddings = 1,
                    .qkv_bias = 1,
                    .out_bias = 1,
                    .mlp_bias = 1,
                    .plain_mlp = 1,
                    .transposed = 1,
                    .fused_qkv = 1,
                    .scaled_init = 1},
        .sizes = gpt2_sizes,
        .reals = gpt2_reals,
        .flags = tie_flag,
        .fixed = gpt2_fixed,
        .dropouts = gpt2_dropouts,
        .inert = gpt2_inert,
        .activation_key = "activation_function",
        .activation = "gelu_new",
        .bos = 50256,
        .eos = 50256,
        .pad = -1,
        .trains_pad_row = 1,
        .rope = CONFIG_ROPE_NONE,
    },
    {
        .architecture = "MixtralForCausalLM",
        .model_type = "mixtral",
        .class_name = "MixtralConfig",
        .options =
            {.architecture = MODEL_MIXTRAL, .norm_topk = 1, .n_experts = 8, .experts_per_token = 2},
        .sizes = SIZES(32000, 4096, 14336, 32, 32, 8, 0, 131072),
        .reals = mixtral_reals,
        .flags = tie_flag,
        .fixed = mixtral_fixed,
        .dropouts = usual_dropouts,
        .inert = no_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = 1,
        .eos = 2,
        .pad = -1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e6, 1e6},
        .window = CONFIG_WINDOW_ALL,
        .experts = CONFIG_EXPERTS_MIXTRAL,
    },
    {
        .architecture = "Qwen3MoeForCausalLM",
        .model_type = "qwen3_moe",
        .class_name = "Qwen3MoeConfig",
        .options = {.architecture = MODEL_QWEN3_MOE,
                    .qk_norm = 1,
                    .router_rounded = 1,
                    .n_experts = 128,
                    .experts_per_token = 8,
                    .expert_size = 768},
        .sizes = SIZES(151936, 2048, 6144, 24, 32, 4, 0, 32768),
        .reals = rms_reals,
        .flags = attention_bias_flags,
        .fixed = no_fixed,
        .dropouts = usual_dropouts,
        .inert = qwen3_moe_inert,
        .activation_key = "hidden_act",
        .activation = "silu",
        .bos = -1,
        .eos = -1,
        .pad = -1,
        .rope = CONFIG_ROPE_FLAT,
        .rope_theta = {1e4, 1e4},
        .window = CONFIG_WINDOW_SWITCH,
        .window_fallback = 4096,
        .experts = CONFIG_EXPERTS_QWEN,
    },
};

const size_t config_n_families = sizeof config_families / sizeof config_families[0];
