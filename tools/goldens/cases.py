"""The cases: a tiny Llama each, its random weights and its batches. Pure functions of a seed.

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


def weights(case):
    """Float32 arrays by Hugging Face name. Deep enough in scale that attention is far from uniform."""
    c, rng = case["config"], numpy.random.Generator(numpy.random.PCG64(case["seed"]))
    hidden, inter = c["hidden_size"], c["intermediate_size"]
    q = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]

    def normal(rows, columns, std):
        return (rng.standard_normal((rows, columns)) * std).astype(numpy.float32)

    def norm():
        return (1.0 + 0.3 * rng.standard_normal(hidden)).astype(numpy.float32)

    out = {"model.embed_tokens.weight": normal(c["vocab_size"], hidden, case["embedding_std"])}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        out[at + "input_layernorm.weight"] = norm()
        out[at + "self_attn.q_proj.weight"] = normal(q, hidden, 1.2 * hidden**-0.5)
        out[at + "self_attn.k_proj.weight"] = normal(kv, hidden, 1.2 * hidden**-0.5)
        out[at + "self_attn.v_proj.weight"] = normal(kv, hidden, hidden**-0.5)
        out[at + "self_attn.o_proj.weight"] = normal(hidden, q, 0.5 * q**-0.5)
        out[at + "post_attention_layernorm.weight"] = norm()
        out[at + "mlp.gate_proj.weight"] = normal(inter, hidden, 1.2 * hidden**-0.5)
        out[at + "mlp.up_proj.weight"] = normal(inter, hidden, hidden**-0.5)
        out[at + "mlp.down_proj.weight"] = normal(hidden, inter, 0.7 * inter**-0.5)
    out["model.norm.weight"] = norm()
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
