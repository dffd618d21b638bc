"""Makes a Hugging Face folder out of a Llama in a GGUF file.

    tools/venv/bin/python tools/real_weights/to_folder.py MODEL.gguf OUT_DIR

Weights are dequantized to float32 and written as such; nothing is rounded a second time. llama.cpp
turns pairs (2i, 2i + 1) in rope where transformers turns (i, i + head_dim / 2), so a GGUF holds the
rows of q and k in another order; they are put back here (--keep-permutation leaves them: the
folder then loads, and talks nonsense). The tokenizer is byte-level BPE from the vocabulary and the
merges in the file; how its text is cut before the merges ("smollm": single digits, then GPT-2's
pattern) is not in the file but in llama.cpp, and known here for that one name.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gguf_reader import Gguf

CONTROL = 3  # tokenizer.ggml.token_type of tokens that no text makes
BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name):
    """"blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in BLOCK and parts[3] == "weight":
        return "model.layers.%s.%s.weight" % (parts[1], BLOCK[parts[2]])
    if len(parts) == 2 and parts[0] in OUTSIDE and parts[1] == "weight":
        return OUTSIDE[parts[0]] + ".weight"
    raise SystemExit("tensor %s: expected one of a Llama" % name)


def unpermuted(weight, heads):
    """Rows of each head from (pair, half) to (half, pair): the inverse of llama.cpp's conversion."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def real(value):
    """1e-05 where the file has its float32, 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))


def config_of(gguf):
    m = gguf.metadata
    if m["general.architecture"] != "llama":
        raise SystemExit("general.architecture: expected llama, found %s" % m["general.architecture"])
    width, heads = m["llama.embedding_length"], m["llama.attention.head_count"]
    if m["llama.rope.dimension_count"] != width // heads:
        raise SystemExit("llama.rope.dimension_count: expected the whole head")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": m["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": m["llama.feed_forward_length"],
        "num_hidden_layers": m["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": m["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": m["llama.context_length"],
        "rms_norm_eps": real(m["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": real(m["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": m["tokenizer.ggml.bos_token_id"],
        "eos_token_id": m["tokenizer.ggml.eos_token_id"],
        "pad_token_id": m["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def weights_of(gguf, config, keep_permutation):
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    out = {}
    for name in gguf.tensors:
        weight, kind = gguf.tensor(name), name.split(".")[-2]
        if kind in heads and not keep_permutation:
            weight = unpermuted(weight, heads[kind])
        out[hf_name(name)] = numpy.ascontiguousarray(weight)
    return out


def tokenizer_of(gguf):
    m = gguf.metadata
    known = (m["tokenizer.ggml.model"], m["tokenizer.ggml.pre"])
    if known != ("gpt2", "smollm"):
        raise SystemExit("tokenizer.ggml.model and .pre: expected gpt2 and smollm, found %s and %s" % known)
    tokens = m["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in m["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=m["tokenizer.ggml.add_space_prefix"])])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, m["tokenizer.ggml.token_type"]) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    if tokenizer.get_vocab_size() != len(tokens):
        raise SystemExit("tokenizer: %d tokens became %d" % (len(tokens), tokenizer.get_vocab_size()))
    return tokenizer


def tokenizer_config_of(gguf):
    m = gguf.metadata
    name = lambda key: m["tokenizer.ggml.tokens"][m["tokenizer.ggml.%s_token_id" % key]]  # noqa: E731
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "unk_token": name("unknown"),
        "pad_token": name("padding"),
        "chat_template": m["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": m["llama.context_length"],
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--keep-permutation", action="store_true")
    arguments = parser.parse_args()
    try:
        gguf = Gguf(arguments.gguf)
    except (OSError, ValueError, struct.error) as error:
        sys.exit(str(error))
    config = config_of(gguf)
    weights = weights_of(gguf, config, arguments.keep_permutation)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file(weights, arguments.out / "model.safetensors", metadata={"format": "pt"})
    write_json(arguments.out / "config.json", config)
    tokenizer_of(gguf).save(str(arguments.out / "tokenizer.json"))
    write_json(arguments.out / "tokenizer_config.json", tokenizer_config_of(gguf))
    kinds = sorted({kind for _, kind in gguf.tensors.values()})
    print("%s: %s, licence %s, %d tensors of %s, %.1f M parameters" % (
        arguments.out, gguf.metadata["general.name"], gguf.metadata["general.license"], len(weights),
        ", ".join(kinds), sum(w.size for w in weights.values()) / 1e6))  # fmt: skip


if __name__ == "__main__":
    main()
