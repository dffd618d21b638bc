/* The models of tests/goldens/ that hold ten steps in float64: every family, tied and untied. */
#ifndef TESTS_NUMERIC_GOLDEN_CASES_H
#define TESTS_NUMERIC_GOLDEN_CASES_H

static const char *const golden_cases[] = {
    "llama_tied_packed",      "llama_tied_unpacked",      "llama_untied_packed",
    "llama_untied_unpacked",  "llama_bias_untied_packed", "mistral_untied_packed",
    "mistral_tied_unpacked",  "qwen2_tied_packed",        "qwen2_untied_unpacked",
    "qwen3_untied_packed",    "qwen3_tied_unpacked",      "phi3_untied_packed",
    "phi3_tied_unpacked",     "gemma2_tied_packed",       "gemma2_untied_unpacked",
    "gemma3_tied_packed",     "gemma3_untied_unpacked",   "gpt2_tied_packed",
    "gpt2_untied_unpacked",   "mixtral_untied_packed",    "mixtral_tied_unpacked",
    "qwen3moe_untied_packed", "qwen3moe_tied_unpacked",
};
enum { GOLDEN_CASES = sizeof golden_cases / sizeof golden_cases[0] };

#endif
