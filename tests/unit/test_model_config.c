/* config.json: what is understood, what is refused by name, and what the message says. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/config.h"
#include "procs/error.h"

#define LLAMA "\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\""
#define TINY                                                                                       \
    LLAMA ", \"vocab_size\": 300, \"hidden_size\": 64, \"intermediate_size\": 96, "                \
          "\"num_hidden_layers\": 2, \"num_attention_heads\": 4"

static int parse(struct model_config *config, const char *json)
{
    error_clear();
    return model_config_parse(config, json, strlen(json), "m/config.json");
}

static void expect_refused(const char *json, const char *words)
{
    struct model_config config;
    int rc = parse(&config, json);
    if (rc != -ERROR_USER || !strstr(error_text(), words) || !strstr(error_text(), "m/config.json"))
        fail_msg("expected a refusal with \"%s\" for %s, got %d: %s", words, json, rc,
                 error_text());
}

static void expect_accepted(struct model_config *config, const char *json)
{
    if (parse(config, json) < 0)
        fail_msg("%s refused: %s", json, error_text());
}

static void missing_keys_take_the_defaults_of_llama_config(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{\"model_type\": \"llama\"}");
    assert_int_equal(c.architecture, MODEL_LLAMA);
    assert_int_equal(c.source_dtype, DTYPE_F32);
    assert_int_equal(c.vocab_size, 32000);
    assert_int_equal(c.hidden_size, 4096);
    assert_int_equal(c.intermediate_size, 11008);
    assert_int_equal(c.n_layers, 32);
    assert_int_equal(c.n_heads, 32);
    assert_int_equal(c.n_kv_heads, 32);
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.max_position, 2048);
    assert_true(c.norm_eps == 1e-6 && c.rope[0].theta == 10000.0 && c.initializer_range == 0.02);
    assert_int_equal(c.rope[0].scaling, ROPE_SCALING_NONE);
    assert_int_equal(c.tie_word_embeddings, 0);
    assert_int_equal(c.bos_token_id, 1);
    assert_int_equal(c.pad_token_id, -1);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos_token_id[0], 2);
}

static void llama_3_2_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(
        &c,
        "{" LLAMA ", \"attention_bias\": false, \"attention_dropout\": 0.0,"
        "\"bos_token_id\": 128000, \"eos_token_id\": [128001, 128008, 128009],"
        "\"head_dim\": 64, \"hidden_act\": \"silu\", \"hidden_size\": 2048,"
        "\"initializer_range\": 0.02, \"intermediate_size\": 8192,"
        "\"max_position_embeddings\": 131072, \"mlp_bias\": false,"
        "\"num_attention_heads\": 32, \"num_hidden_layers\": 16, \"num_key_value_heads\": 8,"
        "\"pretraining_tp\": 1, \"rms_norm_eps\": 1e-05, \"rope_scaling\": {\"factor\": 32.0,"
        "\"high_freq_factor\": 4.0, \"low_freq_factor\": 1.0,"
        "\"original_max_position_embeddings\": 8192, \"rope_type\": \"llama3\"},"
        "\"rope_theta\": 500000.0, \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\","
        "\"transformers_version\": \"4.45.0\", \"use_cache\": true, \"vocab_size\": 128256}");
    assert_int_equal(c.rope[0].scaling, ROPE_SCALING_LLAMA3);
    assert_true(c.rope[0].factor == 32.0 && c.rope[0].low_freq_factor == 1.0);
    assert_true(c.rope[0].high_freq_factor == 4.0 && c.rope[0].original_max_position == 8192);
    assert_true(c.rope[0].theta == 500000.0 && c.norm_eps == 1e-5);
    assert_int_equal(c.source_dtype, DTYPE_BF16);
    assert_int_equal(c.n_kv_heads, 8);
    assert_int_equal(c.tie_word_embeddings, 1);
    assert_int_equal(c.n_eos, 3);
    assert_int_equal(c.eos_token_id[2], 128009);
}

static void the_newer_spelling_gives_the_same_bytes(void **state)
{
    (void)state;
    struct model_config old, new;
    memset(&old, 1, sizeof old);
    memset(&new, 2, sizeof new);
    expect_accepted(&old, "{" TINY ", \"torch_dtype\": \"float16\", \"rope_theta\": 5e5,"
                          "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}");
    expect_accepted(&new, "{" TINY ", \"dtype\": \"float16\", \"rope_parameters\": "
                          "{\"rope_type\": \"linear\", \"factor\": 2.0, \"rope_theta\": 500000}}");
    assert_memory_equal(&old, &new, sizeof old);
    assert_int_equal(new.rope[0].scaling, ROPE_SCALING_LINEAR);
    assert_true(new.rope[0].theta == 5e5 && new.rope[0].factor == 2.0);
}

static void smollm2_with_its_extra_keys_is_understood(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{" TINY ", \"is_llama_config\": true, \"rope_interleaved\": false,"
                        "\"rope_scaling\": null, \"pad_token_id\": 2, \"head_dim\": 10,"
                        "\"num_key_value_heads\": 2, \"_name_or_path\": \"x\","
                        "\"transformers.js_config\": {\"dtype\": \"q4\"}}");
    assert_int_equal(c.head_dim, 10);
    assert_int_equal(c.pad_token_id, 2);
}

static void a_small_vocabulary_has_no_default_tokens(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{\"model_type\": \"llama\", \"vocab_size\": 2, \"eos_token_id\": null}");
    assert_int_equal(c.bos_token_id, 1);
    assert_int_equal(c.n_eos, 0);
    expect_accepted(&c, "{\"model_type\": \"llama\", \"vocab_size\": 1, \"bos_token_id\": null}");
    assert_int_equal(c.bos_token_id, -1);
    assert_int_equal(c.n_eos, 0);
    expect_accepted(&c, "{\"model_type\": \"llama\", \"pad_token_id\": -1}"); /* torch: the last */
    assert_int_equal(c.pad_token_id, 31999);
}

static void other_architectures_are_refused_by_name(void **state)
{
    (void)state;
    expect_refused("{\"architectures\": [\"BloomForCausalLM\"], \"model_type\": \"bloom\"}",
                   "BloomForCausalLM");
    expect_refused("{\"architectures\": [\"BloomForCausalLM\"]}", "LlamaForCausalLM");
    expect_refused("{\"model_type\": \"bloom\"}", "bloom");
    expect_refused("{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"mistral\"}",
                   "mistral");
    expect_refused("{\"architectures\": [\"LlamaForSequenceClassification\"]}",
                   "LlamaForSequenceClassification");
    expect_refused("{\"architectures\": [\"LlamaForCausalLM\", \"GPT2LMHeadModel\"]}",
                   "architectures");
    expect_refused("{}", "architectures");
}

static void what_would_compute_differently_is_refused_by_name(void **state)
{
    (void)state;
    expect_refused("{" TINY ", \"hidden_act\": \"relu\"}", "hidden_act");
    expect_refused("{" TINY ", \"attention_dropout\": 2}", "attention_dropout");
    expect_refused("{" TINY ", \"pretraining_tp\": 2}", "pretraining_tp");
    expect_refused("{" TINY ", \"sliding_window\": 4096}", "sliding_window");
    expect_refused("{" TINY ", \"partial_rotary_factor\": 0.5}", "partial_rotary_factor");
    expect_refused("{" TINY ", \"rope_interleaved\": true}", "rope_interleaved");
    expect_refused("{" TINY ", \"quantization_config\": {\"bits\": 4}}", "quantization_config");
    expect_refused("{" TINY ", \"torch_dtype\": \"float64\"}", "float64");
    expect_refused("{" TINY ", \"torch_dtype\": \"float16\", \"dtype\": \"float32\"}", "dtype");
    expect_refused("{" TINY ", \"logit_softcap\": 30}", "logit_softcap");
}

/* Evaluation has none; training refuses it. */
static void dropout_is_refused_for_training_alone(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{" TINY "}");
    assert_int_equal(model_config_check_training(&c, "m"), 0);
    expect_accepted(&c, "{" TINY ", \"attention_dropout\": 0.1}");
    assert_int_equal(model_config_check_training(&c, "m"), -ERROR_USER);
    assert_non_null(strstr(error_text(), "m/config.json: attention_dropout"));
    expect_accepted(&c, "{\"model_type\": \"gpt2\", \"resid_pdrop\": 0.0}");
    assert_int_equal(model_config_check_training(&c, "m"), -ERROR_USER); /* embd_pdrop: 0.1 */
    assert_non_null(strstr(error_text(), "embd_pdrop"));
    expect_accepted(&c, "{\"model_type\": \"gpt2\", \"resid_pdrop\": 0.0, \"embd_pdrop\": 0, "
                        "\"attn_pdrop\": 0.0}");
    assert_int_equal(model_config_check_training(&c, "m"), 0);
}

static void rope_scaling_is_understood_or_refused(void **state)
{
    (void)state;
    struct model_config c;
    expect_accepted(&c, "{" TINY ", \"rope_parameters\": {\"rope_type\": \"default\"}}");
    assert_true(c.rope[0].theta == 10000.0 && c.rope[0].scaling == ROPE_SCALING_NONE);
    expect_accepted(&c, "{" TINY ", \"rope_parameters\": {\"partial_rotary_factor\": 1.0}}");
    expect_refused("{" TINY ", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2}}", "yarn");
    expect_refused("{" TINY ", \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}}",
                   "dynamic");
    expect_refused("{" TINY ", \"rope_scaling\": {\"type\": \"linear\"}}", "factor");
    expect_refused("{" TINY ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 0.5}}",
                   "factor");
    expect_refused("{" TINY ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2, "
                   "\"attention_factor\": 2}}",
                   "attention_factor");
    expect_refused("{" TINY ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, "
                   "\"low_freq_factor\": 1, \"high_freq_factor\": 4}}",
                   "original_max_position_embeddings");
    expect_refused("{" TINY ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, "
                   "\"low_freq_factor\": 4, \"high_freq_factor\": 4, "
                   "\"original_max_position_embeddings\": 8192}}",
                   "low_freq_factor");
    expect_refused("{" TINY ", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}}",
                   "partial_rotary_factor");
    expect_refused("{" TINY ", \"rope_scaling\": 2}", "rope_scaling");
    expect_refused("{" TINY ", \"rope_parameters\": {}, \"rope_scaling\": {\"type\": \"linear\"}}",
                   "rope_scaling");
}

static void sizes_out_of_range_are_refused_with_both_values(void **state)
{
    (void)state;
    expect_refused("{\"model_type\": \"llama\", \"vocab_size\": 0}", "vocab_size");
    expect_refused("{\"model_type\": \"llama\", \"hidden_size\": -4}", "found -4");
    expect_refused("{\"model_type\": \"llama\", \"hidden_size\": 64.0}", "found 64.0");
    expect_refused("{\"model_type\": \"llama\", \"hidden_size\": \"64\"}", "found \"64\"");
    expect_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 1000000}", "from 1 to 4096");
    expect_refused("{" TINY ", \"num_key_value_heads\": 3}", "num_key_value_heads");
    expect_refused("{" TINY ", \"head_dim\": 5}", "head_dim");
    expect_refused("{\"model_type\": \"llama\", \"hidden_size\": 100}", "multiple");
    expect_refused("{\"model_type\": \"llama\", \"hidden_size\": 96}",
                   "head_dim"); /* 96 / 32 = 3 */
    expect_refused("{\"model_type\": \"llama\", \"num_attention_heads\": 65536, "
                   "\"head_dim\": 65536}",
                   "at most 16777216");
    expect_refused("{" TINY ", \"rms_norm_eps\": 0}", "rms_norm_eps");
    expect_refused("{" TINY ", \"rope_theta\": -1}", "rope_theta");
    expect_refused("{" TINY ", \"tie_word_embeddings\": 1}", "tie_word_embeddings");
    expect_refused("{" TINY ", \"bos_token_id\": 300}", "below vocab_size 300");
    expect_refused("{" TINY ", \"eos_token_id\": [1,2,3,4,5,6,7,8,9]}", "at most 8");
}

static void broken_json_is_named_by_line_and_column(void **state)
{
    (void)state;
    expect_refused("{\n \"model_type\": \"llama\",\n \"vocab_size\": }", "m/config.json:3:16");
    expect_refused("{\"model_type\": \"llama\", \"model_type\": \"llama\"}", "duplicate");
    expect_refused("[1]", "expected a JSON object");
    expect_refused("", "m/config.json:");
    expect_refused("{} x", "m/config.json:1:4");
}

static void a_folder_is_read_and_a_missing_file_is_the_users(void **state)
{
    (void)state;
    char folder[] = "/tmp/model_config_XXXXXX";
    char path[64];
    struct model_config c;
    assert_non_null(mkdtemp(folder));
    assert_int_equal(model_config_load(&c, folder), -ERROR_USER);
    assert_non_null(strstr(error_text(), "config.json: cannot open"));
    (void)snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{" TINY "}", f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(model_config_load(&c, folder), 0);
    assert_int_equal(c.hidden_size, 64);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_keys_take_the_defaults_of_llama_config),
        cmocka_unit_test(llama_3_2_is_understood),
        cmocka_unit_test(the_newer_spelling_gives_the_same_bytes),
        cmocka_unit_test(smollm2_with_its_extra_keys_is_understood),
        cmocka_unit_test(a_small_vocabulary_has_no_default_tokens),
        cmocka_unit_test(other_architectures_are_refused_by_name),
        cmocka_unit_test(what_would_compute_differently_is_refused_by_name),
        cmocka_unit_test(dropout_is_refused_for_training_alone),
        cmocka_unit_test(rope_scaling_is_understood_or_refused),
        cmocka_unit_test(sizes_out_of_range_are_refused_with_both_values),
        cmocka_unit_test(broken_json_is_named_by_line_and_column),
        cmocka_unit_test(a_folder_is_read_and_a_missing_file_is_the_users),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
