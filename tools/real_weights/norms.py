"""The gradient norm of single samples under different roundings, at the weights of one folder.

    tools/venv/bin/python tools/real_weights/norms.py WORK_DIR FOLDER SAMPLE... [--seeds N]

WORK_DIR is that of finetune.py (its train.bin is read); FOLDER a model folder, such as
one exported between two steps. Per sample: float32; float32 arithmetic on weights rounded to
bfloat16; torch's bfloat16 with eager and with sdpa attention; this project's rounding points
(tools/goldens/emulate.py), then only those of the forward pass and only those of the backward pass.
With --seeds, torch's bfloat16 again, each weight multiplied by 1 + u, u uniform within 2^-9 (half a
unit in the last place of bfloat16, at most). docs/REAL_WEIGHTS.md says what came out.
"""

import argparse
import pathlib

import finetune  # first: it sets the paths and the environment

import torch  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import emulate  # noqa: E402
import pipeline  # noqa: E402


class RoundForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return emulate.to_bfloat16(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Unrounded:
    apply = staticmethod(emulate.same)


def upper_half(master):
    return finetune.upper_half(torch.from_numpy(master)).numpy()


def report(name, model, samples, chosen):
    for index in chosen:
        batch = samples[index : index + 1].unbind(-1)
        for _, p in model.named():
            p.grad = None
        loss = model.loss_sum(*batch) / pipeline.labelled(batch)
        loss.backward()
        norm = sum(p.grad.double().pow(2).sum() for _, p in model.named() if p.grad is not None).sqrt()
        print("sample %d  %-36s loss %.5f  norm %.4f" % (index, name, loss.item(), norm.item()), flush=True)


def set_weights(model, weights):
    with torch.no_grad():
        for name, p in model.named():
            p.copy_(weights(name, p))


def exact(folder, case, samples, chosen):
    model = pipeline.Transformers(folder, case, torch.float32, "")
    report("float32", model, samples, chosen)
    set_weights(model, lambda _, p: finetune.upper_half(p))
    report("float32 on rounded weights", model, samples, chosen)


def library(folder, samples, chosen, seeds):
    model = finetune.Bfloat16(folder)
    masters = {n: p.detach().clone() for n, p in model.named()}
    for seed in range(seeds + 1):
        torch.manual_seed(seed)
        if seed > 0:
            set_weights(model, lambda n, p: masters[n] * (1 + (torch.rand_like(p) - 0.5) / 256))
        for attention in ("eager", "sdpa"):
            model.model.set_attn_implementation(attention)
            name = "torch bfloat16, " + attention + (", seed %d" % seed if seed else "")
            report(name, model, samples, chosen)


def emulated(folder, case, samples, chosen):
    config = case["config"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    case = {**case, "config": {"head_dim": head_dim, **config}}
    model = pipeline.Emulation(folder, case, load_file(folder / "model.safetensors"), upper_half)
    both, gradient = emulate.RoundBoth, emulate.RoundGradient
    report("emulated", model, samples, chosen)
    emulate.RoundBoth, emulate.RoundGradient = RoundForward, Unrounded
    report("emulated, only forward rounded", model, samples, chosen)
    emulate.RoundBoth, emulate.RoundGradient = gradient, gradient
    report("emulated, only backward rounded", model, samples, chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("samples", type=int, nargs="+", help="of 256 tokens, from 0")
    parser.add_argument("--seeds", type=int, default=0)
    arguments = parser.parse_args()
    case = finetune.case_of(1, 1, arguments.folder)
    samples = pipeline.samples_of([arguments.work / "train.bin"], case)
    exact(arguments.folder, case, samples, arguments.samples)
    library(arguments.folder, samples, arguments.samples, arguments.seeds)
    emulated(arguments.folder, case, samples, arguments.samples)


if __name__ == "__main__":
    main()
