/* Each family: its config.json as on the hub, what it asks for by name, the tensors it has. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "model/config.h"
#include "model/layout.h"
#include "model/weights.h"
#include "procs/error.h"

#define MISTRAL "\"architectures\": [\"MistralForCausalLM\"], \"model_type\": \"mistral\""
#define QWEN2   "\"architectures\": [\"Qwen2ForCausalLM\"], \"model_type\": \"qwen2\""
#define QWEN3   "\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\""
#define PHI3    "\"architectures\": [\"Phi3ForCausalLM\"], \"model_type\": \"phi3\""
#define GEMMA2  "\"architectures\": [\"Gemma2ForCausalLM\"], \"model_type\": \"gemma2\""
#define GEMMA3  "\"architectures\": [\"Gemma3ForCausalLM\"], \"model_type\": \"gemma3_text\""
#define GPT2    "\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\""
#define SMALL                                                                                      \
    ", \"vocab_size\": 300, \"hidden_size\": 48, \"intermediate_size\": 77, "                      \
    "\"num_hidden_layers\": 4, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "           \
    "\"head_dim\": 16, \"max_position_embeddings\": 64, \"bos_token_id\": null, "                  \
    "\"eos_token_id\": null, \"pad_token_id\": null"

static void expect_accepted(struct model_config *config, const char *json)
{
    error_clear();
    if (model_config_parse(config, json, strlen(json), "m/config.json") < 0)
        fail_msg("%s refused: %s", json, error_text());
}

static void expect_refused(const char *json, const char *words)
{
    struct model_config config;
    error_clear();
    int rc = model_config_parse(&config, json, strlen(json), "m/config.json");
    if (rc != -ERROR_USER || !strstr(error_text(), words) || !strstr(error_text(), "m/config.json"))
        fail_msg("expected a refusal with \"%s\" for %s, got %d: %s", words, json, rc,
                 error_text());
}

/* "ff.s": a letter per block, s slides */
static void expect_blocks(const struct model_config *c, const char *blocks)
{
    assert_int_equal(strlen(blocks), c->n_layers);
    for (uint64_t b = 0; b < c->n_layers; b++) {
        int slides = model_config_reach(c, b) == MODEL_REACH_SLIDING;
        assert_int_equal(slides, blocks[b] == 's');
        assert_int_equal(model_config_window(c, b), slides ? c->sliding_window : 0);
    }
}

/* ---- as on the hub ---- */

static void mistral_7b_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(
        &c, "{" MISTRAL ", \"attention_dropout\": 0.0, \"bos_token_id\": 1, "
            "\"eos_token_id\": 2, \"hidden_act\": \"silu\", \"hidden_size\": 4096, "
            "\"initializer_range\": 0.02, \"intermediate_size\": 14336, "
            "\"max_position_embeddings\": 32768, \"num_attention_heads\": 32, "
            "\"num_hidden_layers\": 2, \"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-05, "
            "\"rope_theta\": 10000.0, \"sliding_window\": 4096, "
            "\"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", "
            "\"use_cache\": true, \"vocab_size\": 32000}");
    assert_string_equal(model_config_family(&c), "mistral");
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.sliding_window, 4096);
    expect_blocks(&c, "ss");
    expect_accepted(&c, "{" MISTRAL SMALL ", \"sliding_window\": null}");
    assert_int_equal(c.sliding_window, 0);
    expect_blocks(&c, "ffff");
    expect_accepted(&c, "{" MISTRAL SMALL "}"); /* the class's default */
    assert_int_equal(c.sliding_window, 4096);
    expect_accepted(&c, "{\"model_type\": \"mistral\"}");
    assert_int_equal(c.n_kv_heads, 8);
    expect_accepted(&c, "{\"model_type\": \"mistral\", \"num_key_value_heads\": null}");
    assert_int_equal(c.n_kv_heads, 32);
}

static void qwen2_5_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{" QWEN2 ", \"attention_dropout\": 0.0, \"bos_token_id\": 151643, "
                        "\"eos_token_id\": 151645, \"hidden_act\": \"silu\", \"hidden_size\": 896, "
                        "\"initializer_range\": 0.02, \"intermediate_size\": 4864, "
                        "\"max_position_embeddings\": 32768, \"max_window_layers\": 21, "
                        "\"num_attention_heads\": 14, \"num_hidden_layers\": 24, "
                        "\"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-06, "
                        "\"rope_theta\": 1000000.0, \"sliding_window\": 32768, "
                        "\"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", "
                        "\"use_cache\": true, \"use_sliding_window\": false, "
                        "\"use_mrope\": false, \"vocab_size\": 151936}");
    assert_true(c.qkv_bias && !c.out_bias && !c.mlp_bias && !c.qk_norm);
    assert_int_equal(c.sliding_window, 0);
    assert_true(c.rope[0].theta == 1e6 && c.rope_dim == 64);
    assert_int_equal(c.tie_word_embeddings, 1);
}

static void qwen_windows_are_those_of_the_class(void **state)
{
    (void)state;
    struct model_config c, d;
    expect_accepted(&c, "{" QWEN2 SMALL ", \"use_sliding_window\": true, \"sliding_window\": 8, "
                        "\"max_window_layers\": 3}");
    expect_blocks(&c, "fffs");
    assert_int_equal(c.sliding_window, 8);
    expect_accepted(&d, "{" QWEN2 SMALL ", \"use_sliding_window\": true, \"sliding_window\": 8, "
                        "\"layer_types\": [\"full_attention\", \"full_attention\", "
                        "\"full_attention\", \"sliding_attention\"]}");
    assert_memory_equal(&c, &d, sizeof c);
    expect_accepted(&c, "{" QWEN3 SMALL ", \"use_sliding_window\": true, \"sliding_window\": 8}");
    expect_blocks(&c, "ffff"); /* max_window_layers is 28 */
    expect_refused("{" QWEN2 SMALL ", \"layer_types\": [\"full_attention\", \"full_attention\", "
                   "\"full_attention\", \"sliding_attention\"]}",
                   "use_sliding_window");
    expect_refused("{" QWEN2 SMALL ", \"layer_types\": [\"full_attention\"]}", "layer_types");
    expect_refused("{" QWEN2 SMALL ", \"layer_types\": [\"full_attention\", \"full_attention\", "
                   "\"full_attention\", \"chunked_attention\"]}",
                   "chunked_attention");
    expect_refused("{" QWEN2 SMALL ", \"use_sliding_window\": 1}", "use_sliding_window");
    expect_refused("{" QWEN2 SMALL ", \"max_window_layers\": -1}", "max_window_layers");
    expect_refused("{" QWEN2 SMALL ", \"use_mrope\": true}", "use_mrope");
    expect_refused("{" QWEN2 SMALL ", \"dual_chunk_attention_config\": {}}", "Qwen2Config");
}

static void qwen3_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{" QWEN3 ", \"attention_bias\": false, \"attention_dropout\": 0.0, "
                        "\"bos_token_id\": 151643, \"eos_token_id\": 151645, \"head_dim\": 128, "
                        "\"hidden_act\": \"silu\", \"hidden_size\": 1024, "
                        "\"initializer_range\": 0.02, \"intermediate_size\": 3072, "
                        "\"max_position_embeddings\": 40960, \"max_window_layers\": 28, "
                        "\"num_attention_heads\": 16, \"num_hidden_layers\": 28, "
                        "\"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-06, "
                        "\"rope_scaling\": null, \"rope_theta\": 1000000, "
                        "\"sliding_window\": null, \"tie_word_embeddings\": true, "
                        "\"torch_dtype\": \"bfloat16\", \"use_cache\": true, "
                        "\"use_sliding_window\": false, \"vocab_size\": 151936}");
    assert_true(c.qk_norm && !c.qkv_bias && c.head_dim == 128 && c.sliding_window == 0);
    expect_accepted(&c, "{" QWEN3 SMALL ", \"attention_bias\": true}");
    assert_true(c.qkv_bias && c.out_bias);
}

static void phi_3_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c,
                    "{" PHI3 ", \"attention_bias\": false, \"attention_dropout\": 0.0, "
                    "\"auto_map\": {\"AutoModelForCausalLM\": \"modeling_phi3.Phi3ForCausalLM\"}, "
                    "\"bos_token_id\": 1, \"embd_pdrop\": 0.0, \"eos_token_id\": 32000, "
                    "\"hidden_act\": \"silu\", \"hidden_size\": 3072, "
                    "\"initializer_range\": 0.02, \"intermediate_size\": 8192, "
                    "\"max_position_embeddings\": 4096, \"num_attention_heads\": 32, "
                    "\"num_hidden_layers\": 32, \"num_key_value_heads\": 32, "
                    "\"original_max_position_embeddings\": 4096, \"pad_token_id\": 32000, "
                    "\"resid_pdrop\": 0.0, \"rms_norm_eps\": 1e-05, \"rope_scaling\": null, "
                    "\"rope_theta\": 10000.0, \"sliding_window\": 2047, "
                    "\"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", "
                    "\"use_cache\": true, \"vocab_size\": 32064}");
    assert_true(c.fused_qkv && c.fused_gate_up && !c.transposed);
    assert_int_equal(c.pad_token_id, 32000);
    assert_int_equal(c.sliding_window, 2047);
    assert_int_equal(c.rope_dim, 96);
    expect_accepted(&c, "{" PHI3 SMALL ", \"partial_rotary_factor\": 0.75}");
    assert_int_equal(c.rope_dim, 12);
    assert_int_equal(c.sliding_window, 0);
    expect_accepted(&c, "{" PHI3 SMALL ", \"rope_parameters\": {\"rope_type\": \"default\", "
                        "\"partial_rotary_factor\": 0.5, \"rope_theta\": 500.0}}");
    assert_true(c.rope_dim == 8 && c.rope[0].theta == 500.0);
    expect_refused("{" PHI3 SMALL ", \"partial_rotary_factor\": 0.45}", "partial_rotary_factor");
    expect_refused("{" PHI3 SMALL ", \"rope_scaling\": {\"type\": \"longrope\", "
                   "\"short_factor\": [1], \"long_factor\": [1]}}",
                   "longrope");
    expect_refused("{" PHI3 SMALL ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}",
                   "linear"); /* the library has only longrope */
}

static void gemma_2_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{" GEMMA2 ", \"attention_bias\": false, \"attention_dropout\": 0.0, "
                        "\"attn_logit_softcapping\": 50.0, \"bos_token_id\": 2, "
                        "\"cache_implementation\": \"hybrid\", \"eos_token_id\": [1, 107], "
                        "\"final_logit_softcapping\": 30.0, \"head_dim\": 256, "
                        "\"hidden_act\": \"gelu_pytorch_tanh\", "
                        "\"hidden_activation\": \"gelu_pytorch_tanh\", \"hidden_size\": 2304, "
                        "\"initializer_range\": 0.02, \"intermediate_size\": 9216, "
                        "\"max_position_embeddings\": 8192, \"num_attention_heads\": 8, "
                        "\"num_hidden_layers\": 4, \"num_key_value_heads\": 4, "
                        "\"pad_token_id\": 0, \"query_pre_attn_scalar\": 256, "
                        "\"rms_norm_eps\": 1e-06, \"rope_theta\": 10000.0, "
                        "\"sliding_window\": 4096, \"torch_dtype\": \"bfloat16\", "
                        "\"use_cache\": true, \"vocab_size\": 256000}");
    assert_true(c.norm == MODEL_NORM_RMS_PLUS_ONE && c.post_norms && !c.qk_norm);
    assert_true(c.attention_scalar == 256 && c.attention_softcap == 50 && c.final_softcap == 30);
    assert_true(c.embedding_scale == 48.0 && c.activation == MODEL_ACTIVATION_GELU_TANH);
    assert_int_equal(c.tie_word_embeddings, 1);
    assert_int_equal(c.pad_token_id, 0);
    expect_blocks(&c, "sfsf");
    expect_accepted(&c, "{" GEMMA2 SMALL ", \"attn_logit_softcapping\": null, "
                        "\"final_logit_softcapping\": null}");
    assert_true(c.attention_softcap == 0 && c.final_softcap == 0);
    expect_accepted(&c, "{" GEMMA2 SMALL "}");
    assert_true(c.attention_softcap == 50 && c.final_softcap == 30);
    expect_refused("{" GEMMA2 SMALL ", \"sliding_window\": null}", "sliding_window");
    expect_refused("{" GEMMA2 SMALL ", \"use_bidirectional_attention\": true}",
                   "use_bidirectional_attention");
    expect_refused("{" GEMMA2 SMALL ", \"hidden_activation\": \"relu\"}", "hidden_activation");
    expect_refused("{" GEMMA2 SMALL ", \"sliding_window_pattern\": 3}", "sliding_window_pattern");
}

static void gemma_3_is_understood(void **state)
{
    (void)state;
    struct model_config old, new;
    expect_accepted(&old, "{" GEMMA3 SMALL ", \"attn_logit_softcapping\": null, "
                          "\"final_logit_softcapping\": null, \"rope_local_base_freq\": 1000, "
                          "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0}, "
                          "\"rope_theta\": 500000, \"sliding_window\": 512, "
                          "\"sliding_window_pattern\": 3, \"query_pre_attn_scalar\": 24}");
    assert_true(old.qk_norm && old.post_norms && old.norm == MODEL_NORM_RMS_PLUS_ONE);
    assert_true(old.rope[MODEL_REACH_FULL].theta == 5e5 && old.rope[MODEL_REACH_FULL].factor == 8);
    assert_true(old.rope[MODEL_REACH_SLIDING].theta == 1e3);
    assert_int_equal(old.rope[MODEL_REACH_SLIDING].scaling, ROPE_SCALING_NONE);
    expect_blocks(&old, "ssfs");
    expect_accepted(&new,
                    "{" GEMMA3 SMALL ", \"_sliding_window_pattern\": 3, \"rope_parameters\": {"
                    "\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 8.0, "
                    "\"rope_theta\": 500000}, \"sliding_attention\": {\"rope_type\": "
                    "\"default\", \"rope_theta\": 1000}}, \"sliding_window\": 512, "
                    "\"layer_types\": [\"sliding_attention\", \"sliding_attention\", "
                    "\"full_attention\", \"sliding_attention\"], "
                    "\"query_pre_attn_scalar\": 24, \"use_bidirectional_attention\": false}");
    assert_memory_equal(&old, &new, sizeof old);
    expect_accepted(&new, "{\"model_type\": \"gemma3_text\", \"num_hidden_layers\": 7}");
    expect_blocks(&new, "sssssfs");
    assert_true(new.rope[0].theta == 1e6 && new.rope[1].theta == 1e4 && new.final_softcap == 0);
    expect_refused("{" GEMMA3 SMALL ", \"rope_parameters\": {\"rope_theta\": 10000}}",
                   "rope_parameters: rope_theta");
    expect_refused("{" GEMMA3 SMALL ", \"attn_logit_softcapping\": 50.0}",
                   "attn_logit_softcapping");
    expect_refused("{\"architectures\": [\"Gemma3ForConditionalGeneration\"], "
                   "\"model_type\": \"gemma3\"}",
                   "Gemma3ForConditionalGeneration");
}

static void gpt_2_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c,
                    "{" GPT2 ", \"activation_function\": \"gelu_new\", \"attn_pdrop\": 0.1, "
                    "\"bos_token_id\": 50256, \"embd_pdrop\": 0.1, \"eos_token_id\": 50256, "
                    "\"initializer_range\": 0.02, \"layer_norm_epsilon\": 1e-05, "
                    "\"n_ctx\": 1024, \"n_embd\": 768, \"n_head\": 12, \"n_layer\": 12, "
                    "\"n_positions\": 1024, \"resid_pdrop\": 0.1, \"summary_activation\": null, "
                    "\"summary_first_dropout\": 0.1, \"summary_proj_to_labels\": true, "
                    "\"summary_type\": \"cls_index\", \"summary_use_proj\": true, "
                    "\"task_specific_params\": {}, \"vocab_size\": 50257}");
    assert_true(c.hidden_size == 768 && c.intermediate_size == 3072 && c.head_dim == 64);
    assert_true(c.n_kv_heads == 12 && c.max_position == 1024 && c.rope_dim == 0);
    assert_true(c.norm == MODEL_NORM_LAYER && c.positions == MODEL_POSITIONS_LEARNED);
    assert_true(c.plain_mlp && c.transposed && c.fused_qkv && c.mlp_bias && c.out_bias);
    assert_true(c.activation == MODEL_ACTIVATION_GELU_NEW && c.tie_word_embeddings);
    expect_accepted(&c, "{" GPT2 ", \"pad_token_id\": 5}");
    assert_int_equal(c.pad_token_id, -1); /* its embedding has no padding_idx */
    expect_refused("{" GPT2 ", \"scale_attn_by_inverse_layer_idx\": true}",
                   "scale_attn_by_inverse_layer_idx");
    expect_refused("{" GPT2 ", \"scale_attn_weights\": false}", "scale_attn_weights");
    expect_refused("{" GPT2 ", \"add_cross_attention\": true}", "add_cross_attention");
    expect_refused("{" GPT2 ", \"hidden_size\": 768}", "GPT2Config");
    expect_refused("{" GPT2 ", \"rope_theta\": 10000}", "rope_theta");
    expect_refused("{" GPT2 ", \"n_embd\": 770}", "multiple of n_head");
    expect_refused("{" GPT2 ", \"pad_token_id\": 60000}", "pad_token_id");
}

#define MIXTRAL   "\"model_type\": \"mixtral\""
#define QWEN3_MOE "\"model_type\": \"qwen3_moe\""

static void mixtral_as_on_the_hub(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(
        &c, "{\"architectures\": [\"MixtralForCausalLM\"], \"attention_dropout\": 0.0, "
            "\"bos_token_id\": 1, \"eos_token_id\": 2, \"hidden_act\": \"silu\", "
            "\"hidden_size\": 4096, \"initializer_range\": 0.02, \"intermediate_size\": 14336, "
            "\"max_position_embeddings\": 32768, \"model_type\": \"mixtral\", "
            "\"num_attention_heads\": 32, \"num_experts_per_tok\": 2, \"num_hidden_layers\": 32, "
            "\"num_key_value_heads\": 8, \"num_local_experts\": 8, "
            "\"output_router_logits\": false, \"rms_norm_eps\": 1e-05, \"rope_theta\": 1000000.0, "
            "\"router_aux_loss_coef\": 0.02, \"sliding_window\": null, "
            "\"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", "
            "\"transformers_version\": \"4.36.0.dev0\", \"use_cache\": true, "
            "\"vocab_size\": 32000}");
    assert_true(c.n_experts == 8 && c.experts_per_token == 2 && c.expert_size == 14336);
    assert_true(model_config_n_sparse(&c) == 32 && c.norm_topk && !c.router_rounded);
    assert_true(c.router_aux_loss == 0 &&
                c.sliding_window == 0); /* output_router_logits is false */
    expect_accepted(&c, "{" MIXTRAL ", \"output_router_logits\": true}");
    assert_true(c.router_aux_loss == 0.001 && c.rope[0].theta == 1e6);
    expect_accepted(&c, "{" MIXTRAL ", \"num_experts\": 5, \"router_jitter_noise\": 0.0}");
    assert_int_equal(c.n_experts, 5);
    expect_refused("{" MIXTRAL ", \"router_jitter_noise\": 0.1}", "router_jitter_noise");
    expect_refused("{" MIXTRAL ", \"num_experts\": 5, \"num_local_experts\": 6}",
                   "num_local_experts");
    expect_refused("{" MIXTRAL ", \"num_experts_per_tok\": 9}", "num_experts_per_tok");
    expect_refused("{" MIXTRAL ", \"norm_topk_prob\": true}", "MixtralConfig");
    expect_refused("{" MIXTRAL ", \"num_local_experts\": 2000}", "num_local_experts");
    expect_refused("{" MIXTRAL ", \"num_local_experts\": 1024, \"num_hidden_layers\": 300}",
                   "in all blocks");
    expect_refused("{" MIXTRAL ", \"router_aux_loss_coef\": -1}", "router_aux_loss_coef");
    expect_refused("{\"model_type\": \"llama\", \"num_local_experts\": 8}", "num_local_experts");
}

static void qwen3_moe_as_on_the_hub(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(
        &c, "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"attention_bias\": false, "
            "\"attention_dropout\": 0.0, \"bos_token_id\": 151643, \"decoder_sparse_step\": 1, "
            "\"eos_token_id\": 151645, \"head_dim\": 128, \"hidden_act\": \"silu\", "
            "\"hidden_size\": 2048, \"initializer_range\": 0.02, \"intermediate_size\": 6144, "
            "\"max_position_embeddings\": 40960, \"max_window_layers\": 48, "
            "\"mlp_only_layers\": [], \"model_type\": \"qwen3_moe\", "
            "\"moe_intermediate_size\": 768, \"norm_topk_prob\": true, "
            "\"num_attention_heads\": 32, \"num_experts\": 128, \"num_experts_per_tok\": 8, "
            "\"num_hidden_layers\": 48, \"num_key_value_heads\": 4, "
            "\"output_router_logits\": false, \"rms_norm_eps\": 1e-06, \"rope_scaling\": null, "
            "\"rope_theta\": 1000000.0, \"router_aux_loss_coef\": 0.001, "
            "\"sliding_window\": null, \"tie_word_embeddings\": false, "
            "\"torch_dtype\": \"bfloat16\", \"use_cache\": true, "
            "\"use_sliding_window\": false, \"vocab_size\": 151936}");
    assert_true(c.n_experts == 128 && c.experts_per_token == 8 && c.expert_size == 768);
    assert_true(model_config_n_sparse(&c) == 48 && c.norm_topk && c.router_rounded && c.qk_norm);
    expect_accepted(&c, "{" QWEN3_MOE ", \"num_hidden_layers\": 6, \"decoder_sparse_step\": 2, "
                        "\"mlp_only_layers\": [3, 4, 99]}");
    assert_int_equal(c.sparse[0], 1 << 1 | 1 << 5); /* every second, but 3 */
    assert_true(!c.norm_topk && c.sliding_window == 0);
    expect_accepted(&c, "{" QWEN3_MOE ", \"use_sliding_window\": true, \"sliding_window\": 9}");
    assert_true(model_config_window(&c, 0) == 9 && model_config_window(&c, 23) == 9);
    expect_refused("{" QWEN3_MOE ", \"decoder_sparse_step\": 25}", "at least one block");
    expect_refused("{" QWEN3_MOE ", \"mlp_only_layers\": [\"a\"]}", "mlp_only_layers");
    expect_refused("{" QWEN3_MOE ", \"mlp_only_layers\": 3}", "mlp_only_layers");
    expect_refused("{" QWEN3_MOE ", \"shared_expert_intermediate_size\": 10}", "Qwen3MoeConfig");
    expect_refused("{" QWEN3_MOE ", \"num_experts\": 0}", "num_experts");
}

/* ---- tensors ---- */

struct expected_tensor {
    const char *name;
    uint64_t rows, cols; /* cols 0: a vector */
};

/* The first block's tensors, in order. */
static void expect_block(const char *json, const struct expected_tensor *expected, uint32_t n)
{
    struct model_config c;
    struct model_layout layout;
    expect_accepted(&c, json);
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    assert_int_equal(layout.layers[1].n_tensors, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct model_tensor *t = &layout.tensors[layout.layers[1].first_tensor + i];
        assert_string_equal(t->name, expected[i].name);
        assert_int_equal(t->rows, expected[i].rows);
        assert_int_equal(t->cols, expected[i].cols ? expected[i].cols : 1);
        assert_int_equal(t->dims, expected[i].cols ? 2 : 1);
    }
    model_layout_destroy(&layout);
}

static void blocks_have_the_tensors_of_transformers(void **state)
{
    (void)state;
#define AT "model.layers.0."
    static const struct expected_tensor qwen2[] = {
        {AT "self_attn.q_proj.weight", 64, 48}, {AT "self_attn.q_proj.bias", 64, 0},
        {AT "self_attn.k_proj.weight", 32, 48}, {AT "self_attn.k_proj.bias", 32, 0},
        {AT "self_attn.v_proj.weight", 32, 48}, {AT "self_attn.v_proj.bias", 32, 0},
        {AT "self_attn.o_proj.weight", 48, 64}, {AT "mlp.gate_proj.weight", 77, 48},
        {AT "mlp.up_proj.weight", 77, 48},      {AT "mlp.down_proj.weight", 48, 77},
        {AT "input_layernorm.weight", 48, 0},   {AT "post_attention_layernorm.weight", 48, 0},
    };
    static const struct expected_tensor gemma3[] = {
        {AT "self_attn.q_proj.weight", 64, 48},
        {AT "self_attn.k_proj.weight", 32, 48},
        {AT "self_attn.v_proj.weight", 32, 48},
        {AT "self_attn.o_proj.weight", 48, 64},
        {AT "self_attn.q_norm.weight", 16, 0},
        {AT "self_attn.k_norm.weight", 16, 0},
        {AT "mlp.gate_proj.weight", 77, 48},
        {AT "mlp.up_proj.weight", 77, 48},
        {AT "mlp.down_proj.weight", 48, 77},
        {AT "input_layernorm.weight", 48, 0},
        {AT "pre_feedforward_layernorm.weight", 48, 0},
        {AT "post_attention_layernorm.weight", 48, 0},
        {AT "post_feedforward_layernorm.weight", 48, 0},
    };
    static const struct expected_tensor phi3[] = {
        {AT "self_attn.qkv_proj.weight", 128, 48}, {AT "self_attn.o_proj.weight", 48, 64},
        {AT "mlp.gate_up_proj.weight", 154, 48},   {AT "mlp.down_proj.weight", 48, 77},
        {AT "input_layernorm.weight", 48, 0},      {AT "post_attention_layernorm.weight", 48, 0},
    };
#undef AT
#define AT "transformer.h.0."
    static const struct expected_tensor gpt2[] = {
        {AT "attn.c_attn.weight", 48, 144}, {AT "attn.c_attn.bias", 144, 0},
        {AT "attn.c_proj.weight", 48, 48},  {AT "attn.c_proj.bias", 48, 0},
        {AT "mlp.c_fc.weight", 48, 192},    {AT "mlp.c_fc.bias", 192, 0},
        {AT "mlp.c_proj.weight", 192, 48},  {AT "mlp.c_proj.bias", 48, 0},
        {AT "ln_1.weight", 48, 0},          {AT "ln_1.bias", 48, 0},
        {AT "ln_2.weight", 48, 0},          {AT "ln_2.bias", 48, 0},
    };
#undef AT
    expect_block("{" QWEN2 SMALL "}", qwen2, 12);
    expect_block("{" GEMMA3 SMALL "}", gemma3, 13);
    expect_block("{" PHI3 SMALL "}", phi3, 6);
    expect_block("{" GPT2 ", \"n_embd\": 48, \"n_head\": 4}", gpt2, 12);
}

static void experts_have_layers_and_names_of_their_own(void **state)
{
    (void)state;
    struct model_config c;
    struct model_layout layout;
    expect_accepted(&c, "{" MIXTRAL SMALL ", \"num_local_experts\": 3}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    assert_int_equal(layout.n_layers, 2 + 4 * (1 + 3));
    const struct model_tensor *t =
        model_layout_find(&layout, "model.layers.1.block_sparse_moe.experts.2.w2.weight");
    assert_true(t != NULL && t->layer == layout.blocks[1] + 3 && t->rows == 48 && t->cols == 77);
    const struct model_layer *expert = &layout.layers[t->layer];
    assert_true(expert->kind == LAYER_EXPERT && expert->n_tensors == 3 && expert->block == 1);
    assert_int_equal(expert->group, layout.blocks[1]);
    assert_int_equal(expert->start + expert->elements,
                     model_group_elements(&layout, expert->group));
    assert_non_null(model_layout_find(&layout, "model.layers.0.block_sparse_moe.gate.weight"));
    assert_null(model_layout_find(&layout, "model.layers.0.mlp.gate_proj.weight"));
    model_layout_destroy(&layout);
    expect_accepted(&c, "{" QWEN3_MOE SMALL ", \"num_experts\": 3, \"num_experts_per_tok\": 1, "
                        "\"moe_intermediate_size\": 20, \"mlp_only_layers\": [0]}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    t = model_layout_find(&layout, "model.layers.1.mlp.experts.0.up_proj.weight");
    assert_true(t != NULL && t->rows == 20 && t->cols == 48);
    t = model_layout_find(&layout, "model.layers.0.mlp.up_proj.weight");
    assert_true(t != NULL && t->rows == 77 && t->layer == 1);
    assert_null(model_layout_find(&layout, "model.layers.0.mlp.gate.weight"));
    model_layout_destroy(&layout);
}

static void all_biases_fit_a_layer(void **state)
{
    (void)state;
    struct model_config c;
    struct model_layout layout;
    expect_accepted(&c, "{\"model_type\": \"llama\"" SMALL
                        ", \"attention_bias\": true, \"mlp_bias\": true}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    assert_int_equal(layout.layers[1].n_tensors, 16);
    assert_non_null(model_layout_find(&layout, "model.layers.3.mlp.down_proj.bias"));
    model_layout_destroy(&layout);
}

static void expect_slice(const struct model_layout *layout, enum model_role role,
                         enum model_role fused, uint64_t before, uint64_t stride)
{
    struct model_slice slice = model_layer_slice(layout, 1, role);
    assert_ptr_equal(slice.tensor, model_layer_tensor(layout, 1, fused));
    assert_int_equal(slice.offset, slice.tensor->offset + before);
    assert_int_equal(slice.stride, stride);
}

static void fused_tensors_are_found_by_their_parts(void **state)
{
    (void)state;
    struct model_config c;
    struct model_layout layout;
    expect_accepted(&c, "{" PHI3 SMALL "}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    expect_slice(&layout, MODEL_Q, MODEL_QKV, 0, 48);
    expect_slice(&layout, MODEL_K, MODEL_QKV, 64 * 48, 48);
    expect_slice(&layout, MODEL_V, MODEL_QKV, 96 * 48, 48);
    expect_slice(&layout, MODEL_GATE, MODEL_GATE_UP, 0, 48);
    expect_slice(&layout, MODEL_UP, MODEL_GATE_UP, 77 * 48, 48);
    expect_slice(&layout, MODEL_DOWN, MODEL_DOWN, 0, 77);
    assert_null(model_layer_slice(&layout, 1, MODEL_Q_BIAS).tensor);
    model_layout_destroy(&layout);
    expect_accepted(&c, "{" GPT2 ", \"n_embd\": 48, \"n_head\": 4}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    expect_slice(&layout, MODEL_K, MODEL_QKV, 48, 144); /* columns */
    expect_slice(&layout, MODEL_V, MODEL_QKV, 96, 144);
    expect_slice(&layout, MODEL_V_BIAS, MODEL_QKV_BIAS, 96, 1);
    expect_slice(&layout, MODEL_UP, MODEL_UP, 0, 192);
    model_layout_destroy(&layout);
}

static void ends_of_the_model_are_those_of_transformers(void **state)
{
    (void)state;
    struct model_config c;
    struct model_layout layout;
    expect_accepted(&c, "{" GPT2 ", \"n_embd\": 48, \"n_head\": 4, \"n_positions\": 20, "
                        "\"tie_word_embeddings\": false}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    const struct model_tensor *table = model_layout_find(&layout, "transformer.wpe.weight");
    assert_non_null(table);
    assert_true(table->layer == 0 && table->rows == 20 && table->cols == 48);
    assert_string_equal(model_tensor_base_name(table), "wpe.weight");
    assert_non_null(model_layout_find(&layout, "transformer.wte.weight"));
    assert_non_null(model_layout_find(&layout, "transformer.ln_f.bias"));
    const struct model_tensor *head = model_layout_find(&layout, "lm_head.weight");
    assert_non_null(head);
    assert_null(model_tensor_base_name(head));
    model_layout_destroy(&layout);
}

/* ---- random weights ---- */

static double deviation(const struct model_layout *layout, const char *name)
{
    static float values[4096];
    const struct model_tensor *t = model_layout_find(layout, name);
    double sum = 0;
    assert_non_null(t);
    uint64_t n = t->elements < 4096 ? t->elements : 4096;
    model_init_random(layout, t, 7, 0, n, values);
    for (uint64_t i = 0; i < n; i++)
        sum += (double)values[i] * (double)values[i];
    return sum / (double)n;
}

static void random_weights_begin_as_in_transformers(void **state)
{
    (void)state;
    struct model_config c;
    struct model_layout layout;
    expect_accepted(&c, "{" GEMMA3 SMALL "}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    assert_true(deviation(&layout, "model.layers.0.self_attn.q_norm.weight") == 0.0);
    assert_true(deviation(&layout, "model.norm.weight") == 0.0);
    model_layout_destroy(&layout);
    expect_accepted(&c, "{" GPT2 ", \"n_embd\": 96, \"n_head\": 4, \"n_layer\": 8}");
    assert_int_equal(model_layout_init(&layout, &c, 4096), 0);
    assert_true(deviation(&layout, "transformer.h.0.ln_1.weight") == 1.0);
    assert_true(deviation(&layout, "transformer.h.0.ln_1.bias") == 0.0);
    assert_true(deviation(&layout, "transformer.h.0.mlp.c_fc.bias") == 0.0);
    double wide = deviation(&layout, "transformer.h.0.mlp.c_fc.weight");
    double narrow = deviation(&layout, "transformer.h.0.mlp.c_proj.weight");
    assert_true(wide > 0.9 * 4e-4 && wide < 1.1 * 4e-4);
    assert_true(narrow > 0.9 * 4e-4 / 16 && narrow < 1.1 * 4e-4 / 16);
    model_layout_destroy(&layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mistral_7b_is_understood),
        cmocka_unit_test(qwen2_5_is_understood),
        cmocka_unit_test(qwen_windows_are_those_of_the_class),
        cmocka_unit_test(qwen3_is_understood),
        cmocka_unit_test(phi_3_is_understood),
        cmocka_unit_test(gemma_2_is_understood),
        cmocka_unit_test(gemma_3_is_understood),
        cmocka_unit_test(gpt_2_is_understood),
        cmocka_unit_test(blocks_have_the_tensors_of_transformers),
        cmocka_unit_test(mixtral_as_on_the_hub),
        cmocka_unit_test(qwen3_moe_as_on_the_hub),
        cmocka_unit_test(experts_have_layers_and_names_of_their_own),
        cmocka_unit_test(all_biases_fit_a_layer),
        cmocka_unit_test(fused_tensors_are_found_by_their_parts),
        cmocka_unit_test(ends_of_the_model_are_those_of_transformers),
        cmocka_unit_test(random_weights_begin_as_in_transformers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
