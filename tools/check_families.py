"""Small models of every family, made and saved by transformers itself, against our layers.

    tools/venv/bin/python tools/check_families.py build/release/tests/numeric/logits

What a folder looks like is thus not our idea of it: config.json has every key that the library's classes
write, the weights have its names. PROGRAM (`make` builds it under that name) computes the logits of 64 tokens
from the folder in float32; they must be the library's to 1e-5. Prints a line for each model; exit 1 when one is
refused or differs. That config.json of the hub are understood is tests/unit/test_model_families.c's.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")

import torch  # noqa: E402
import transformers as hf  # noqa: E402

VOCAB, TOKENS = 101, 64
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 100, "bos_token_id": 1, "eos_token_id": 2}
ALTERNATING = ["full_attention", "sliding_attention"] * 2
MODELS = [
    (hf.LlamaConfig, {**SIZES, "head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    (hf.MistralConfig, {**SIZES, "sliding_window": 9}),
    (hf.Qwen2Config, SIZES),
    (hf.Qwen2Config, {**SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    (hf.Qwen3Config, {**SIZES, "head_dim": 20, "tie_word_embeddings": True}),
    (hf.Phi3Config, {**SIZES, "pad_token_id": 0}),
    (hf.Phi3Config, {**SIZES, "pad_token_id": 0, "sliding_window": 7, "partial_rotary_factor": 0.5}),
    (hf.Gemma2Config, {**SIZES, "head_dim": 20, "sliding_window": 9}),
    (hf.Gemma3TextConfig, {**SIZES, "head_dim": 20, "sliding_window": 9}),
    (hf.Gemma3TextConfig, {**SIZES, "sliding_window": 9, "layer_types": ALTERNATING, "final_logit_softcapping": 3.0}),
    (hf.MixtralConfig, {**SIZES, "num_local_experts": 4}),
    (hf.MixtralConfig, {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9}),
    (hf.Qwen3MoeConfig, {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 30}),
    (hf.Qwen3MoeConfig, {**SIZES, "head_dim": 20, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 30,
                         "norm_topk_prob": True, "mlp_only_layers": [2], "decoder_sparse_step": 1,
                         "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": True}),
    (hf.GPT2Config, GPT2),
    (hf.GPT2Config, {**GPT2, "activation_function": "gelu", "tie_word_embeddings": False}),
]


def save(config, folder):
    """Random weights, far enough from the library's first ones that norms and biases matter."""
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(5)
    model.save_pretrained(folder)


def difference(program, folder):
    """(largest logit, largest difference to ours)."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager",
                                                    experts_implementation="eager", dtype=torch.float32).eval()
    tokens = torch.arange(TOKENS) * 31 % VOCAB
    ids, out = pathlib.Path(folder, "tokens"), pathlib.Path(folder, "logits")
    ids.write_bytes(tokens.to(torch.int32).numpy().tobytes())
    subprocess.run([program, folder, ids, out], check=True)
    ours = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32).view(TOKENS, VOCAB)
    with torch.no_grad():
        expected = model(input_ids=tokens[None], use_cache=False).logits[0]
    return expected.abs().max().item(), (ours - expected).abs().max().item()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    hf.logging.disable_progress_bar()
    wrong = 0
    for kind, keys in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            save(kind(**keys), folder)
            largest, differs = difference(sys.argv[1], folder)
        wrong += not differs <= 1e-5
        print(f"{kind.__name__}: largest logit {largest:.2f}, ours differ by {differs:.2g}")
    sys.exit(f"{wrong} models differ by more than 1e-5" if wrong else 0)


if __name__ == "__main__":
    main()
