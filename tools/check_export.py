"""Loads an exported Hugging Face folder with transformers and shows what it computes.

    tools/venv/bin/python tools/check_export.py HF_DIR [--tokens FILE] [--write-logits OUT.safetensors]
        [--ours build/release/tests/numeric/logits]

Every tensor of the model must be in the folder and none beside them. Prints the number of
parameters, a SHA-256 of the logits' float32 bytes, and the loss of predicting
each token from those before it. FILE holds token ids in text, separated by white space. With --ours (a
program that `make` builds under that name) our layers compute the logits of the same tokens from the same
folder, in float32 too; the largest difference is printed. Exit 1 when a tensor is missing, unexpected or of
another shape, a logit is not finite, or ours differ by more than 1e-5, or 1e-5 of the largest if that is over 1.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True)
    problems = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if problems:
        sys.exit(f"{folder}: not a whole model: {problems}")
    return model.eval()


def read_tokens(path, config):
    """The ids of a file, or without one the first ids of the vocabulary in a fixed order."""
    vocab_size = config.vocab_size
    if path is None:
        return torch.arange(min(64, config.max_position_embeddings))[None] * 31 % vocab_size
    ids = [int(word) for word in pathlib.Path(path).read_text().split()]
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if len(ids) < 2 or wrong:
        sys.exit(f"{path}: expected two or more ids below {vocab_size}, found {wrong[:3] or ids}")
    return torch.tensor([ids])


def difference_to_ours(program, folder, tokens, logits):
    """The largest, over what is allowed."""
    with tempfile.TemporaryDirectory() as scratch:
        ids, out = pathlib.Path(scratch, "tokens"), pathlib.Path(scratch, "logits")
        ids.write_bytes(tokens.to(torch.int32).numpy().tobytes())
        subprocess.run([program, folder, ids, out], check=True)
        ours = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32).view_as(logits)
    largest = (ours - logits).abs().max().item()
    return largest, largest / (1e-5 * max(1.0, logits.abs().max().item()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--tokens", metavar="FILE")
    parser.add_argument("--write-logits", metavar="OUT")
    parser.add_argument("--ours", metavar="PROGRAM")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(arguments.folder)
    tokens = read_tokens(arguments.tokens, model.config)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    if not torch.isfinite(logits).all():
        sys.exit(f"{arguments.folder}: a logit is not finite")
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), tokens[0, 1:])
    if arguments.write_logits:
        save_file({"logits": logits.contiguous(), "tokens": tokens.to(torch.int32)},
                  arguments.write_logits)
    found = {}
    if arguments.ours:
        largest, share = difference_to_ours(arguments.ours, arguments.folder, tokens, logits)
        found = {"largest_logit": logits.abs().max().item(), "difference_to_ours": largest}
        if not share <= 1:
            sys.exit(f"{arguments.folder}: our logits differ by {largest:.2g}: {found}")
    print(json.dumps(found | {
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens.numel(),
        "loss": loss.item(),
        "logits_sha256": hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest(),
    }))


if __name__ == "__main__":
    main()
