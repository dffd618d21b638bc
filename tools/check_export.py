"""Loads an exported Hugging Face folder with transformers and shows what it computes.

    tools/venv/bin/python tools/check_export.py HF_DIR [--tokens FILE] [--write-logits OUT.safetensors]

Every tensor of the model must be in the folder and none beside them. Prints the number of
parameters, a SHA-256 of the logits' float32 bytes, and the loss of predicting
each token from those before it. FILE holds token ids in text, separated by white space. Exit 1
when a tensor is missing, unexpected or of another shape, or a logit is not finite.
"""

import argparse
import hashlib
import json
import os
import pathlib
import sys

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if problems:
        sys.exit(f"{folder}: not a whole model: {problems}")
    return model.eval()


def read_tokens(path, vocab_size):
    """The ids of a file, or without one the first ids of the vocabulary in a fixed order."""
    if path is None:
        return torch.arange(64)[None] * 31 % vocab_size
    ids = [int(word) for word in pathlib.Path(path).read_text().split()]
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if len(ids) < 2 or wrong:
        sys.exit(f"{path}: expected two or more ids below {vocab_size}, found {wrong[:3] or ids}")
    return torch.tensor([ids])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--tokens", metavar="FILE")
    parser.add_argument("--write-logits", metavar="OUT")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(arguments.folder)
    tokens = read_tokens(arguments.tokens, model.config.vocab_size)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    if not torch.isfinite(logits).all():
        sys.exit(f"{arguments.folder}: a logit is not finite")
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), tokens[0, 1:])
    if arguments.write_logits:
        save_file({"logits": logits.contiguous(), "tokens": tokens.to(torch.int32)},
                  arguments.write_logits)
    print(json.dumps({
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens.numel(),
        "loss": loss.item(),
        "logits_sha256": hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest(),
    }))


if __name__ == "__main__":
    main()
