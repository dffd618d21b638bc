"""The rival of `make numbers`: a Llama trained by transformers and torch's AdamW on the CPU.

    tools/venv/bin/python bench/peer_torch.py bench/llama_25m --seq-len 512 --tokens-per-step 4096

Random weights and tokens; whole steps are timed: zero_grad, forward and backward of every
microbatch, clip_grad_norm_, optimizer step. One JSON line per measured step:
{"step_s": .., "tokens_per_s": ..}. The first line, {"ready": true, ..}, says what runs.

With --steps N it measures N steps after --warmup and ends. Without, it warms up and then takes
commands from stdin, so that a driver can interleave rivals: "run K" measures K steps and prints
their lines, "quit" (or the end of input) ends.
"""

import argparse
import json
import os
import sys
import time

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", help="folder with config.json, or that file")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seq-len", type=int, default=512)
    p.add_argument("--tokens-per-step", type=int, default=4096)
    p.add_argument("--micro-batch-size", type=int, default=1, help="sequences per microbatch")
    p.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    p.add_argument("--gradient-checkpointing", action="store_true")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--adamw", choices=("default", "foreach", "fused"), default="default")
    p.add_argument("--steps", type=int, default=0, help="0: commands on stdin")
    p.add_argument("--warmup", type=int, default=1, help="steps that are not measured")
    p.add_argument("--seed", type=int, default=1)
    arguments = p.parse_args()
    sequences, rest = divmod(arguments.tokens_per_step, arguments.seq_len)
    if rest or sequences % arguments.micro_batch_size:
        p.error("--tokens-per-step must be a multiple of --seq-len x --micro-batch-size")
    return arguments


ARGUMENTS = parse_arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGUMENTS.threads)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


class Peer:
    """One model, its optimizer and a fixed batch."""

    def __init__(self, a):
        torch.manual_seed(a.seed)
        config = LlamaConfig.from_pretrained(a.model)
        config._attn_implementation = a.attention
        config.use_cache = False
        self.model = LlamaForCausalLM(config).to(getattr(torch, a.dtype)).train()
        if a.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        how = {} if a.adamw == "default" else {a.adamw: True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95),
                                           eps=1e-8, weight_decay=0.1, **how)
        sequences = a.tokens_per_step // a.seq_len
        # one token more than the model reads, so that every position has a label
        samples = torch.randint(config.vocab_size, (sequences, a.seq_len + 1))
        self.microbatches = samples.split(a.micro_batch_size)
        self.tokens = a.tokens_per_step

    def step(self):
        """Seconds of one whole step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        for samples in self.microbatches:
            tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
            # the library's own loss: sum over the labels / num_items_in_batch
            loss = self.model(input_ids=tokens, labels=tokens, shift_labels=labels,
                              num_items_in_batch=self.tokens).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - start


def say(**fields):
    print(json.dumps(fields), flush=True)


def measure(peer, steps):
    for _ in range(steps):
        seconds = peer.step()
        say(step_s=round(seconds, 6), tokens_per_s=round(peer.tokens / seconds, 3))


def obey(peer, lines):
    for line in lines:
        words = line.split()
        if words == ["quit"]:
            return
        if len(words) != 2 or words[0] != "run" or not words[1].isdigit():
            raise SystemExit(f"stdin: expected 'run K' or 'quit', found {line.strip()!r}")
        measure(peer, int(words[1]))


def main():
    torch.set_num_threads(ARGUMENTS.threads)
    torch.set_num_interop_threads(1)
    peer = Peer(ARGUMENTS)
    for _ in range(ARGUMENTS.warmup):
        peer.step()
    parameters = sum(p.numel() for p in peer.model.parameters())
    say(ready=True, parameters=parameters, torch=torch.__version__, **vars(ARGUMENTS))
    if ARGUMENTS.steps:
        measure(peer, ARGUMENTS.steps)
    else:
        obey(peer, sys.stdin)


if __name__ == "__main__":
    main()
