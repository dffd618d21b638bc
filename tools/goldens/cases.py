"""The cases: a tiny model each, its random weights and its batches. Pure functions of a seed.

Every case is chosen so that a plausible mistake shows: head_dim that is not hidden / heads, odd
intermediate sizes, sequence lengths that no tile divides, norm weights that are not 1, embeddings
so small that rms_norm_eps matters, prompts without labels, documents of a single token.
"""

import numpy

VOCAB = 259
STEPS = 10
# warm-up, then values that are no power of two and not monotone
LEARNING_RATES = [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 9.3e-4, 8.1e-4, 1.1e-3, 6.7e-4, 3.1e-4]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # frequencies kept, blended and divided all occur
}


def llama_config(**overrides):
    """config.json of a Llama as a dict; every key that both sides read is written out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "vocab_size": VOCAB,
    }
    config.update(overrides)
    return config


# config.json comes in two spellings of rope: rope_theta + rope_scaling (all of the hub until
# transformers 5) and rope_parameters (what transformers 5 saves). Both are covered.
FLOAT32_CASES = [
    {
        "name": "llama_tied_unpacked",
        "seed": 1,
        "batch": 3,
        "seq_len": 37,
        "packed": False,
        "max_grad_norm": 1.0,
        "embedding_std": 0.05,
        "config": llama_config(
            hidden_size=48, intermediate_size=77, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0,
            rope_scaling=None, tie_word_embeddings=True,
        ),
    },
    {
        "name": "llama_untied_unpacked",
        "seed": 2,
        "batch": 2,
        "seq_len": 70,
        "packed": False,
        "max_grad_norm": 1000.0,
        "embedding_std": 0.1,
        "config": llama_config(
            hidden_size=40, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=500000.0,
            rope_scaling=LLAMA3, tie_word_embeddings=False,
        ),
    },
    {
        "name": "llama_tied_packed",
        "seed": 3,
        "batch": 2,
        "seq_len": 51,
        "packed": True,
        "max_grad_norm": 3.0,
        "embedding_std": 0.05,
        "config": llama_config(
            hidden_size=42, intermediate_size=77, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, head_dim=10, rms_norm_eps=1e-6,
            rope_parameters=dict(LLAMA3, rope_theta=10000.0), tie_word_embeddings=True,
        ),
    },
    {
        "name": "llama_untied_packed",
        "seed": 4,
        "batch": 3,
        "seq_len": 61,
        "packed": True,
        "max_grad_norm": 1.0,
        "embedding_std": 0.1,
        "config": llama_config(
            hidden_size=32, intermediate_size=101, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
        ),
    },
]


def family_config(architecture, model_type, **keys):
    """config.json of another family; what a class has a default for is written only where it differs."""
    config = {"architectures": [architecture], "model_type": model_type, "bos_token_id": None, "dtype": "float32",
              "eos_token_id": 60, "pad_token_id": None, "initializer_range": 0.02, "vocab_size": 61}
    if model_type == "gpt2":
        shape = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 128,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        act = "hidden_activation" if model_type.startswith("gemma") else "hidden_act"
        shape = {act: "gelu_pytorch_tanh" if model_type.startswith("gemma") else "silu", "attention_dropout": 0.0,
                 "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "num_hidden_layers": 2}
    return config | shape | keys


def mistral_config(**keys):
    return family_config("MistralForCausalLM", "mistral", **keys)


def qwen2_config(**keys):
    return family_config("Qwen2ForCausalLM", "qwen2", **keys)


def qwen3_config(**keys):
    return family_config("Qwen3ForCausalLM", "qwen3", **keys)


def phi3_config(**keys):
    return family_config("Phi3ForCausalLM", "phi3", **keys)


def gemma2_config(**keys):
    return family_config("Gemma2ForCausalLM", "gemma2", **keys)


def gemma3_config(**keys):
    return family_config("Gemma3ForCausalLM", "gemma3_text", **keys)


def mixtral_config(**keys):
    return family_config("MixtralForCausalLM", "mixtral", **{"router_jitter_noise": 0.0} | keys)


def qwen3_moe_config(**keys):
    return family_config("Qwen3MoeForCausalLM", "qwen3_moe", **keys)


def gpt2_config(**keys):
    return family_config("GPT2LMHeadModel", "gpt2", **keys)


# Odd sizes, heads whose width is not hidden / heads (where the family has the key), windows much shorter than
# the sequence; old and new spelling of rope and of the windows. A bias of the keys changes no probability without
# rope, and little with a large base: its gradient is 0 but for rounding, from which Adam would make steps of full
# size. There a large eps keeps the comparison of the weights meaningful.
NARROW = {"hidden_size": 24, "intermediate_size": 37, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}


def family_case(name, seed, config, **other):
    return {"name": name, "seed": seed, "batch": 2, "seq_len": 41, "packed": name.endswith("_packed"),
            "max_grad_norm": 1.0, "embedding_std": 0.1, "config": config} | other


FAMILY_CASES = [
    family_case("mistral_untied_packed", 301, mistral_config(
        **NARROW, rope_theta=10000.0, sliding_window=7, tie_word_embeddings=False)),
    family_case("mistral_tied_unpacked", 302, mistral_config(
        **NARROW | {"num_key_value_heads": 1}, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        sliding_window=9, tie_word_embeddings=True)),
    family_case("qwen2_tied_packed", 303, qwen2_config(
        **NARROW | {"head_dim": 6}, rope_theta=1000000.0, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        tie_word_embeddings=True), eps=1e-5),
    family_case("qwen2_untied_unpacked", 304, qwen2_config(
        **NARROW, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, use_sliding_window=False,
        sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=False)),
    family_case("qwen3_tied_unpacked", 305, qwen3_config(
        **NARROW, rope_theta=10000.0, rope_scaling=None, use_sliding_window=False, sliding_window=None,
        attention_bias=False, tie_word_embeddings=True)),
    family_case("qwen3_untied_packed", 306, qwen3_config(
        **NARROW, rope_parameters=dict(LLAMA3, rope_theta=10000.0), use_sliding_window=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"], attention_bias=True, tie_word_embeddings=False)),
    family_case("llama_bias_untied_packed", 307, llama_config(
        **NARROW, num_hidden_layers=2, vocab_size=61, eos_token_id=60, rms_norm_eps=1e-6, rope_theta=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0}, tie_word_embeddings=False) | {
            "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    family_case("phi3_untied_packed", 308, phi3_config(
        **{k: v for k, v in NARROW.items() if k != "head_dim"} | {"hidden_size": 32}, rope_theta=10000.0,
        rope_scaling=None, partial_rotary_factor=0.75, sliding_window=7, tie_word_embeddings=False)),
    family_case("phi3_tied_unpacked", 309, phi3_config(
        **NARROW, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        sliding_window=None, tie_word_embeddings=True)),
    family_case("gemma2_tied_packed", 310, gemma2_config(
        **NARROW, rope_theta=10000.0, sliding_window=6, query_pre_attn_scalar=14, attn_logit_softcapping=2.5,
        final_logit_softcapping=3.0, tie_word_embeddings=True)),
    family_case("gemma2_untied_unpacked", 311, gemma2_config(
        **NARROW, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, sliding_window=8,
        query_pre_attn_scalar=6, attn_logit_softcapping=5.0, final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention"], attention_bias=True, tie_word_embeddings=False)),
    family_case("gemma3_tied_packed", 312, gemma3_config(
        **NARROW | {"num_hidden_layers": 3}, rope_theta=500000.0, rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window=6, sliding_window_pattern=2,
        query_pre_attn_scalar=14, tie_word_embeddings=True)),
    family_case("gemma3_untied_unpacked", 313, gemma3_config(
        **NARROW, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 20000.0},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
        layer_types=["full_attention", "sliding_attention"], sliding_window=9, query_pre_attn_scalar=10,
        final_logit_softcapping=4.0, tie_word_embeddings=False, pad_token_id=3)),
    family_case("gpt2_tied_packed", 314, gpt2_config(
        n_embd=24, n_layer=2, n_head=4, n_inner=37, tie_word_embeddings=True), eps=1e-5),
    family_case("gpt2_untied_unpacked", 315, gpt2_config(
        n_embd=30, n_layer=2, n_head=3, n_inner=None, tie_word_embeddings=False), eps=1e-5),
    # an expert that never gets a token; with load balancing; blocks without experts among those with; more experts
    # than tokens, so that most have none in one step and some in another
    family_case("mixtral_untied_packed", 316, mixtral_config(
        **NARROW, num_local_experts=5, num_experts_per_tok=2, rope_theta=10000.0, sliding_window=7,
        tie_word_embeddings=False), starved=True, eps=1e-5),
    family_case("mixtral_tied_unpacked", 317, mixtral_config(
        **NARROW, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, sliding_window=None, tie_word_embeddings=True)),
    family_case("qwen3moe_untied_packed", 318, qwen3_moe_config(
        **NARROW | {"num_hidden_layers": 3}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=19,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1], output_router_logits=True,
        router_aux_loss_coef=0.03, rope_theta=10000.0, use_sliding_window=True, sliding_window=6, attention_bias=True,
        tie_word_embeddings=False)),
    family_case("qwen3moe_tied_unpacked", 319, qwen3_moe_config(
        **NARROW, num_local_experts=12, num_experts_per_tok=2, moe_intermediate_size=13, norm_topk_prob=False,
        decoder_sparse_step=2, mlp_only_layers=[], output_router_logits=False, router_aux_loss_coef=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, use_sliding_window=False, sliding_window=None,
        tie_word_embeddings=True), batch=1, seq_len=13),
]


def small_config(**overrides):
    """A Llama of two narrow blocks for whole runs."""
    shape = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
             "rope_scaling": None, "vocab_size": 61, "eos_token_id": 60}
    return llama_config(**(shape | overrides))


# Whole runs from data files (pipeline.py). `train` and `validation` are tokens, or texts of a
# .jsonl, per file; few enough samples that a run goes through them more than once.
PIPELINE_DEFAULTS = {
    "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "no_decay": ["*norm*", "*bias"],
    "learning_rate": 1e-3, "embedding_std": 0.1, "document_lengths": [1, 2, 4, 9, 16, 40],
}
PIPELINE_CASES = [PIPELINE_DEFAULTS | case for case in (
    {
        "name": "pipeline_nanogpt_tied_packed", "seed": 201, "data": "nanogpt", "packing": True,
        "train": [397, 251], "validation": [223], "eval_sequences": 5,
        "seq_len": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 2.9,
        "scheduler": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1},
        "config": small_config(tie_word_embeddings=True),
    },
    {
        "name": "pipeline_llmc_untied_packed", "seed": 202, "data": "llmc16", "packing": True,
        "train": [901], "validation": [300], "eval_sequences": 64,
        "seq_len": 37, "micro_batch_size": 1, "gradient_accumulation_steps": 3, "max_grad_norm": 2.6,
        "no_decay": ["*norm*", "*bias", "*embed_tokens*"],
        "scheduler": {"type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2},
        "config": small_config(tie_word_embeddings=False, vocab_size=70, eos_token_id=7, rope_scaling=LLAMA3),
    },
    {
        "name": "pipeline_jsonl_tied_unpacked", "seed": 203, "data": "jsonl", "packing": False,
        "train": [30], "validation": [6], "eval_sequences": 7,
        "seq_len": 29, "micro_batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": 2.9,
        "document_lengths": [1, 3, 8, 28, 29, 60],
        "scheduler": {"type": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.0},
        "config": small_config(tie_word_embeddings=True, vocab_size=259, eos_token_id=256),
    },
    {
        "name": "pipeline_jsonl_untied_packed", "seed": 206, "data": "jsonl", "packing": True,
        "train": [19, 17], "validation": [9], "eval_sequences": 7,
        "seq_len": 31, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 3.0,
        "document_lengths": [1, 3, 8, 28, 29, 60],
        "scheduler": {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.3},
        "config": small_config(tie_word_embeddings=False, vocab_size=257, eos_token_id=256),
    },
    {
        "name": "pipeline_pad_tied_unpacked", "seed": 204, "data": "nanogpt", "packing": False,
        "train": [560], "validation": [200], "eval_sequences": 6,
        "seq_len": 21, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 3.4,
        "document_lengths": [1, 2, 7, 20, 21, 22, 50],
        "scheduler": {"type": "wsd", "warmup_steps": 3, "min_lr_ratio": 0.1, "decay_ratio": 0.35},
        "config": small_config(tie_word_embeddings=True, pad_token_id=2),
    },
    {
        # embeddings so small that theirs is nearly all of the gradient: the last layer to finish
        # decides the clipping of all others
        "name": "pipeline_clip_untied_packed", "seed": 205, "data": "llmc32", "packing": True,
        "train": [811], "validation": [150], "eval_sequences": 64,
        "seq_len": 26, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
        "embedding_std": 1e-4, "learning_rate": 3e-5, "eps": 1e-7,
        "scheduler": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1},
        "config": small_config(tie_word_embeddings=False, rms_norm_eps=1e-12, pad_token_id=2),
    },
    {
        "name": "pipeline_mistral_untied_packed", "seed": 211, "data": "nanogpt", "packing": True,
        "train": [397, 251], "validation": [223], "eval_sequences": 5,
        "seq_len": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 3.2,
        "scheduler": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1},
        "config": mistral_config(**NARROW, rope_theta=10000.0, sliding_window=6, tie_word_embeddings=False),
    },
    {
        "name": "pipeline_qwen2_tied_unpacked", "seed": 212, "data": "nanogpt", "packing": False,
        "train": [560], "validation": [200], "eval_sequences": 6,
        "seq_len": 21, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 2.5,
        "document_lengths": [1, 2, 7, 20, 21, 22, 50],
        "scheduler": {"type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2},
        "config": qwen2_config(**NARROW, rope_theta=10000.0, use_sliding_window=True, sliding_window=5,
                               max_window_layers=1, tie_word_embeddings=True),
    },
    {
        "name": "pipeline_phi3_untied_packed", "seed": 213, "data": "llmc16", "packing": True,
        "train": [901], "validation": [300], "eval_sequences": 64,
        "seq_len": 37, "micro_batch_size": 1, "gradient_accumulation_steps": 3, "max_grad_norm": 2.5,
        "scheduler": {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.2},
        "config": phi3_config(**{k: v for k, v in NARROW.items() if k != "head_dim"} | {"hidden_size": 32},
                              rope_theta=10000.0, partial_rotary_factor=0.75, sliding_window=7,
                              tie_word_embeddings=False, pad_token_id=2),
    },
    {
        "name": "pipeline_gemma3_tied_packed", "seed": 214, "data": "llmc32", "packing": True,
        "train": [811], "validation": [150], "eval_sequences": 64,
        "seq_len": 26, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.55,
        "scheduler": {"type": "wsd", "warmup_steps": 3, "min_lr_ratio": 0.1, "decay_ratio": 0.35},
        "config": gemma3_config(**NARROW, rope_theta=20000.0, rope_local_base_freq=100.0, sliding_window=5,
                                sliding_window_pattern=2, query_pre_attn_scalar=14, final_logit_softcapping=5.0,
                                tie_word_embeddings=True, pad_token_id=0),
    },
    {
        "name": "pipeline_gpt2_tied_packed", "seed": 215, "data": "nanogpt", "packing": True,
        "train": [397, 251], "validation": [223], "eval_sequences": 5,
        "seq_len": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.4,
        "scheduler": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1}, "eps": 1e-5,
        "config": gpt2_config(n_embd=24, n_layer=2, n_head=4, n_inner=37, tie_word_embeddings=True),
    },
    {
        # experts of microbatches without a token, and load balancing over each microbatch
        "name": "pipeline_mixtral_untied_packed", "seed": 216, "data": "nanogpt", "packing": True,
        "train": [397, 251], "validation": [223], "eval_sequences": 5,
        "seq_len": 24, "micro_batch_size": 1, "gradient_accumulation_steps": 3, "max_grad_norm": 3.0,
        "scheduler": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1},
        "config": mixtral_config(**NARROW, num_local_experts=6, num_experts_per_tok=2, output_router_logits=True,
                                 router_aux_loss_coef=0.1, rope_theta=10000.0, sliding_window=6,
                                 tie_word_embeddings=False),
    },
    {
        "name": "pipeline_qwen3moe_tied_packed", "seed": 217, "data": "llmc32", "packing": True,
        "train": [811], "validation": [150], "eval_sequences": 64,
        "seq_len": 26, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.8,
        "scheduler": {"type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2},
        "config": qwen3_moe_config(**NARROW, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=21,
                                   norm_topk_prob=True, mlp_only_layers=[0], rope_theta=10000.0,
                                   tie_word_embeddings=True, pad_token_id=2),
    },
)]


def bfloat16_case(index):
    """One of the 16 seeded models: the same shapes each time, other weights and tokens."""
    return {
        "name": f"bf16_{index:02d}",
        "seed": 100 + index,
        "batch": 2,
        "seq_len": 29,
        "packed": index % 2 == 1,
        "max_grad_norm": 1.0,
        "embedding_std": 0.2,
        "config": llama_config(
            hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-5, rope_theta=10000.0,
            rope_scaling=None, tie_word_embeddings=False, vocab_size=61, eos_token_id=None,
        ),
    }


FAMILY_BFLOAT16_MODELS = 4
SMALLER = {"vocab_size": 31, "eos_token_id": None}
FAMILY_BFLOAT16 = {
    "mistral": mistral_config(**NARROW | SMALLER, num_hidden_layers=1, rope_theta=10000.0, sliding_window=7,
                              tie_word_embeddings=False),
    "qwen2": qwen2_config(**NARROW | SMALLER, num_hidden_layers=1, rope_theta=10000.0, tie_word_embeddings=False),
    "qwen3": qwen3_config(**NARROW | SMALLER, num_hidden_layers=1, rope_theta=10000.0, tie_word_embeddings=True),
    "phi3": phi3_config(**NARROW | SMALLER, num_hidden_layers=1, rope_theta=10000.0,
                        tie_word_embeddings=False),
    "gemma2": gemma2_config(**NARROW | SMALLER, rope_theta=10000.0, sliding_window=6, query_pre_attn_scalar=14,
                            attn_logit_softcapping=2.5, final_logit_softcapping=3.0, tie_word_embeddings=False),
    "gemma3": gemma3_config(**NARROW | SMALLER, rope_theta=20000.0, rope_local_base_freq=100.0, sliding_window=6,
                            sliding_window_pattern=2, query_pre_attn_scalar=14, tie_word_embeddings=True),
    "gpt2": gpt2_config(**SMALLER, n_positions=32, n_embd=24, n_layer=1, n_head=4, n_inner=37,
                        tie_word_embeddings=True),
    "mixtral": mixtral_config(**NARROW | SMALLER, num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2,
                              rope_theta=10000.0, tie_word_embeddings=False),
    "qwen3moe": qwen3_moe_config(**NARROW | SMALLER, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2,
                                 moe_intermediate_size=21, norm_topk_prob=True, rope_theta=10000.0,
                                 tie_word_embeddings=False),
}


# Rounding sends every token where float64 sends it; make_goldens.py looks after that.
ROUTED_SEEDS = {"mixtral": [604, 601, 607, 603], "qwen3moe": [601, 600, 602, 603]}


def family_bfloat16_case(family, index):
    """As bfloat16_case(), of another family; fewer models, since what is not in a Llama is little."""
    return {
        "name": f"bf16_{family}_{index}",
        "seed": (ROUTED_SEEDS[family][index] if family in ROUTED_SEEDS
                 else 400 + 16 * list(FAMILY_BFLOAT16).index(family) + index),
        "batch": 2 if family in ROUTED_SEEDS else 3,
        "seq_len": 29,
        "packed": index % 2 == 1,
        "max_grad_norm": 1.0,
        "embedding_std": 0.2,
        "config": FAMILY_BFLOAT16[family],
    }


def weights(case):
    """Float32 arrays by Hugging Face name. Deep enough in scale that attention is far from uniform."""
    c, rng = case["config"], numpy.random.Generator(numpy.random.PCG64(case["seed"]))

    def normal(rows, columns, std):
        return (rng.standard_normal((rows, columns)) * std).astype(numpy.float32)

    def vector(size, centre, std):
        return (centre + std * rng.standard_normal(size)).astype(numpy.float32)

    family = gpt2_weights if c["model_type"] == "gpt2" else usual_weights
    out = family(c, case["embedding_std"], normal, vector)
    for name, router in out.items():
        if case.get("starved") and name.endswith("block_sparse_moe.gate.weight"):
            # v, -v, u, -u, 0: two of the first four are always above the last
            router[1], router[3], router[4] = -router[0], -router[2], 0
    return out


def has_experts(c, layer):
    """Blocks of Mixtral and Qwen3-MoE that have a router."""
    if c["model_type"] == "mixtral":
        return True
    return (c["model_type"] == "qwen3_moe" and layer not in c.get("mlp_only_layers", [])
            and (layer + 1) % c.get("decoder_sparse_step", 1) == 0)


def gpt2_weights(c, embedding_std, normal, vector):
    """Matrices are (in, out)."""
    hidden, inner = c["n_embd"], c["n_inner"] or 4 * c["n_embd"]
    out = {"transformer.wte.weight": normal(c["vocab_size"], hidden, embedding_std),
           "transformer.wpe.weight": normal(c["n_positions"], hidden, 0.6 * embedding_std)}

    def norm(name):
        out[name + ".weight"], out[name + ".bias"] = vector(hidden, 1.0, 0.3), vector(hidden, 0.0, 0.2)

    def linear(name, rows, columns, std):
        out[name + ".weight"], out[name + ".bias"] = normal(rows, columns, std), vector(columns, 0.0, 0.2)

    for layer in range(c["n_layer"]):
        at = f"transformer.h.{layer}."
        norm(at + "ln_1")
        linear(at + "attn.c_attn", hidden, 3 * hidden, 1.2 * hidden**-0.5)
        linear(at + "attn.c_proj", hidden, hidden, 0.5 * hidden**-0.5)
        norm(at + "ln_2")
        linear(at + "mlp.c_fc", hidden, inner, 1.2 * hidden**-0.5)
        linear(at + "mlp.c_proj", inner, hidden, 0.7 * inner**-0.5)
    norm("transformer.ln_f")
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(c["vocab_size"], hidden, 0.6 * hidden**-0.5)
    return out


def usual_weights(c, embedding_std, normal, vector):
    """Llama and all that is built like it."""
    kind, hidden, inter = c["model_type"], c["hidden_size"], c["intermediate_size"]
    head = c.get("head_dim") or hidden // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    gemma = kind.startswith("gemma")
    attention_bias, mlp_bias = c.get("attention_bias", False), c.get("mlp_bias", False)
    out = {}

    def norm(name, size=hidden):
        out[name + ".weight"] = vector(size, 0.0 if gemma else 1.0, 0.3)

    def linear(name, rows, columns, std, bias):
        out[name + ".weight"] = normal(rows, columns, std)
        if bias:
            out[name + ".bias"] = vector(rows, 0.0, 0.2)

    def attention(at):
        qkv_bias = attention_bias or kind == "qwen2"
        if kind == "phi3":
            linear(at + "qkv_proj", q + 2 * kv, hidden, 1.2 * hidden**-0.5, False)
        else:
            linear(at + "q_proj", q, hidden, 1.2 * hidden**-0.5, qkv_bias)
            linear(at + "k_proj", kv, hidden, 1.2 * hidden**-0.5, qkv_bias)
            linear(at + "v_proj", kv, hidden, hidden**-0.5, qkv_bias)
        linear(at + "o_proj", hidden, q, 0.5 * q**-0.5, attention_bias)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            norm(at + "q_norm", head)
            norm(at + "k_norm", head)

    def experts(at):
        gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        size = c.get("moe_intermediate_size", inter)
        count = c.get("num_local_experts") or c.get("num_experts")
        linear(at + "gate", count, hidden, 1.5 * hidden**-0.5, False)
        for e in range(count):
            linear(f"{at}experts.{e}.{gate}", size, hidden, 1.2 * hidden**-0.5, False)
            linear(f"{at}experts.{e}.{up}", size, hidden, hidden**-0.5, False)
            linear(f"{at}experts.{e}.{down}", hidden, size, 1.4 * size**-0.5, False)

    def mlp(at):
        if kind == "phi3":
            linear(at + "gate_up_proj", 2 * inter, hidden, 1.2 * hidden**-0.5, False)
        else:
            linear(at + "gate_proj", inter, hidden, 1.2 * hidden**-0.5, mlp_bias)
            linear(at + "up_proj", inter, hidden, hidden**-0.5, mlp_bias)
        linear(at + "down_proj", hidden, inter, 0.7 * inter**-0.5, mlp_bias)

    # the library multiplies a Gemma's rows by sqrt(hidden)
    out["model.embed_tokens.weight"] = normal(c["vocab_size"], hidden, embedding_std)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        norm(at + "input_layernorm")
        attention(at + "self_attn.")
        norm(at + "post_attention_layernorm")
        if gemma:
            norm(at + "pre_feedforward_layernorm")
        if has_experts(c, layer):
            experts(at + ("block_sparse_moe." if kind == "mixtral" else "mlp."))
        else:
            mlp(at + "mlp.")
        if gemma:
            norm(at + "post_feedforward_layernorm")
    norm("model.norm")
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(c["vocab_size"], hidden, 0.6 * hidden**-0.5)
    return out


def document_starts(rng, length):
    """Lengths that fill a row: short, long and now and then a single token."""
    starts, at = [], 0
    while at < length:
        starts.append(at)
        at += int(rng.choice([1, 2, 5, 9, 16, 23]))
    return starts


def packed_row(rng, sample, length):
    """Labels stop at each document's end; about a third of the documents begin with a prompt."""
    labels = sample[1:].copy()
    document = numpy.zeros(length, numpy.int32)
    position = numpy.zeros(length, numpy.int32)
    starts = document_starts(rng, length)
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else length
        document[start:end] = number
        position[start:end] = numpy.arange(end - start)
        labels[end - 1] = -1
        if rng.random() < 0.33:
            labels[start : start + int(rng.integers(1, end - start + 1))] = -1
    return labels, document, position


def unpacked_row(rng, sample, length, kind):
    """kind 0: all labelled (token shards); 1: a prompt; 2: internal shift, the last has no target."""
    labels = sample[1:].copy()
    if kind == 1:
        labels[: int(rng.integers(3, length - 3))] = -1
    if kind == 2:
        labels[-1] = -1
    return labels, numpy.zeros(length, numpy.int32), numpy.arange(length, dtype=numpy.int32)


def batches(case, steps):
    """tokens, labels (already shifted, -1 = none), document and position: (steps, B, T) int32."""
    rng = numpy.random.Generator(numpy.random.PCG64(1000 + case["seed"]))
    vocab, rows, length = case["config"]["vocab_size"], case["batch"], case["seq_len"]
    out = {k: numpy.zeros((steps, rows, length), numpy.int32)
           for k in ("tokens", "labels", "document", "position")}
    for step in range(steps):
        for row in range(rows):
            # squared: frequent low ids, so that embedding rows collect several gradients
            sample = (vocab * rng.random(length + 1) ** 2).astype(numpy.int32)
            sample[2], sample[4] = 0, vocab - 1
            parts = (packed_row(rng, sample, length) if case["packed"]
                     else unpacked_row(rng, sample, length, (step + row) % 3))
            out["tokens"][step, row] = sample[:-1]
            out["labels"][step, row], out["document"][step, row], out["position"][step, row] = parts
    return out
