"""Writes tests/goldens/: reference values from PyTorch and Hugging Face transformers.

    python tools/goldens/make_goldens.py [--only NAME_PREFIX]

A second run writes the same bytes: seeds are fixed, one thread, deterministic algorithms, the
instruction set of the math libraries is pinned below, and nothing in the files names a time.
See README.md for what the files hold. The log shows how far plain float32 is from the oracle.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile

# before torch is loaded: the same code path on every x86-64 machine, whatever its vector width
os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="1",
                  MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1", CUDA_VISIBLE_DEVICES="")
sys.dont_write_bytecode = True

import numpy  # noqa: E402
import torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import cases  # noqa: E402
import emulate  # noqa: E402
import oracle  # noqa: E402
import pipeline  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"
TOLERANCE = {"loss": 5e-6, "logits": 1e-5, "gradient": 1e-5, "after": 1e-4}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_model(folder, case, weights):
    """A Hugging Face folder: config.json and model.safetensors."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", case["config"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def meta_of(case, rates):
    return {
        "batch": case["batch"], "seq_len": case["seq_len"], "steps": len(rates),
        "packed": case["packed"], "learning_rate": max(rates), "lr_per_step": rates,
        "betas": [0.9, 0.95], "eps": case.get("eps", 1e-8), "weight_decay": 0.1,
        "max_grad_norm": case["max_grad_norm"],
    }


def float32(tensors, prefix):
    return {prefix + name: t.to(torch.float32).numpy() for name, t in tensors.items()}


def float64(*values):
    return numpy.array(values, numpy.float64)


def relative(a, b):
    if not b.any():
        return 0.0 if a is None or not a.any() else math.inf
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def worst_gradient(grads, exact):
    """max |d| over max(norm of the tensor, 1e-3 x norm of all)."""
    total = torch.stack([g.norm() for g in exact.values()]).norm()
    return max(((grads[n].double() - e).abs().max() / max(e.norm(), 1e-3 * total)).item()
               for n, e in exact.items())


def report_float32(case, plain, exact):
    """The tolerances that the C code must meet, met here by transformers itself in float32."""
    seen = {
        "loss": abs(plain["losses"][0] / exact["losses"][0] - 1),
        "logits": (plain["logits"].double() - exact["logits"]).abs().max().item(),
        "gradient": worst_gradient(plain["grads"], exact["grads"]),
        "after": max(relative(plain["after"][n], e) for n, e in exact["after"].items()),
    }
    print(f"{case['name']}: float32 - float64: "
          + ", ".join(f"{k} {v:.1e} (of {TOLERANCE[k]:.0e})" for k, v in seen.items()))
    print("  losses " + " ".join(f"{x:.3f}" for x in exact["losses"]))
    print("  norms  " + " ".join(f"{x:.2f}" for x in exact["grad_norms"])
          + f"  clipped above {case['max_grad_norm']}")
    if not all(seen[k] <= TOLERANCE[k] for k in seen):
        raise SystemExit(f"{case['name']}: float32 itself misses a tolerance")


def check_by_hand(case, weights, batch, model, loss, grads):
    """The model written out by hand, in float64, must be transformers' to the last digits."""
    wide = {n: torch.as_tensor(w).double() for n, w in weights.items()}
    hand_loss, hand, _ = emulate.run(case["config"], wide, batch, model, emulate.Rounding.NONE)
    every = [abs(hand_loss / loss - 1)] + [relative(hand[n], g) for n, g in grads.items()]
    worst = float(numpy.max(every))  # unlike max(), lets no NaN slip
    print(f"{case['name']}: two float64 implementations differ by {worst:.1e}")
    if not worst <= 1e-12:
        raise SystemExit(f"{case['name']}: the two float64 implementations disagree")


def frequencies(model):
    """Of the rotary embedding; Gemma 3 has two."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    names = {"inv_freq": "inv_freq", "full_attention_inv_freq": "inv_freq",
             "sliding_attention_inv_freq": "inv_freq_sliding"}
    return {to: getattr(rotary, name).to(torch.float32).numpy()
            for name, to in names.items() if hasattr(rotary, name)}


def make_float32_case(case):
    folder = OUT / case["name"]
    weights, batch = cases.weights(case), cases.batches(case, cases.STEPS)
    meta = meta_of(case, cases.LEARNING_RATES)
    write_model(folder, case, weights)
    write_json(folder / "meta.json", meta)
    model = oracle.load(folder, torch.float64)
    exact = oracle.train(model, batch, meta, case["packed"])
    plain = oracle.train(oracle.load(folder, torch.float32), batch, meta, case["packed"])
    check_by_hand(case, weights, batch, model, exact["losses"][0], exact["grads"])
    report_float32(case, plain, exact)
    save_file(
        dict(batch)
        | frequencies(model)
        | float32(exact["grads"], "grad.")
        | float32(exact["after"], "after.")
        | {
            "logits": exact["logits"].to(torch.float32).numpy(),
            "loss": float64(exact["losses"][0]),
            "losses": float64(*exact["losses"]),
            "grad_norm": float64(exact["grad_norms"][0]),
            "grad_norms": float64(*exact["grad_norms"]),
            "rates": float64(*cases.LEARNING_RATES),
            "max_grad_norm": float64(case["max_grad_norm"]),
        }
        | ({"eps": float64(case["eps"])} if "eps" in case else {}),
        folder / "reference.safetensors",
    )


def pipeline_meta(case):
    """What the run file says, and where the files are."""
    keys = ("seq_len", "micro_batch_size", "gradient_accumulation_steps", "max_grad_norm")
    return {
        "train": [f"train_{i}{data_suffix(case)}" for i in range(len(case["train"]))],
        "validation": ["validation" + data_suffix(case)],
        "variants": pipeline.variants_of(case),
        "run": {
            "data": {"packing": case["packing"], "shuffle": False},
            "training": {k: case[k] for k in keys} | {"steps": cases.STEPS},
            "optimizer": {k: case[k] for k in ("learning_rate", "betas", "eps", "weight_decay", "no_decay")},
            "lr_scheduler": case["scheduler"],
            "eval": {"interval": cases.STEPS, "sequences": case["eval_sequences"]},
        },
    }


def data_suffix(case):
    return ".jsonl" if case["data"] == "jsonl" else ".bin"


def report_pipeline(case, plain, exact, seen):
    """How far torch's own float32 is from float64 over the run, and which mistakes show how much."""
    def worst(run, key):
        return max(abs(a / b - 1) for a, b in zip(run[key], exact[key]))
    def after(run, names):
        return max(relative(run["after"][n], exact["after"][n]) for n in names)
    clipped = sum(n > case["max_grad_norm"] for n in exact["grad_norms"])
    print(f"{case['name']}: float32 - float64: loss {worst(plain, 'losses'):.1e}, norm "
          f"{worst(plain, 'grad_norms'):.1e}, after {after(plain, exact['after']):.1e}; {clipped} of "
          f"{cases.STEPS} steps clipped, norms {min(exact['grad_norms']):.2f} to {max(exact['grad_norms']):.2f}")
    for name, run in seen.items():
        print(f"  {name}: loss {worst(run, 'losses'):.1e}, norm {worst(run, 'grad_norms'):.1e}, "
              f"after {after(run, pipeline.kept_of_variant(run['after'])):.1e}")
    if after(plain, exact["after"]) > TOLERANCE["after"] / 3 or clipped == 0:
        raise SystemExit(f"{case['name']}: badly conditioned, or never clipped")


def make_pipeline_case(case):
    folder, weights, meta = OUT / case["name"], cases.weights(case), pipeline_meta(case)
    case = case | {"end": case["config"]["eos_token_id"]}
    write_model(folder, case, weights)
    write_json(folder / "meta.json", meta)
    rng = numpy.random.Generator(numpy.random.PCG64(case["seed"]))
    for name, count in zip(meta["train"] + meta["validation"], case["train"] + case["validation"]):
        pipeline.write_data(folder, name, rng, case, count)
    held_out = [folder / n for n in meta["validation"]]
    samples = pipeline.samples_of([folder / n for n in meta["train"]], case)
    needed = cases.STEPS * case["micro_batch_size"] * case["gradient_accumulation_steps"]
    if len(samples) >= needed:
        raise SystemExit(f"{case['name']}: {len(samples)} samples, the run uses only {needed}")
    validation = pipeline.samples_of(held_out, case)[: case["eval_sequences"]]

    def run(dtype, variant=""):
        model = pipeline.Transformers(folder, case, dtype, variant)
        out = pipeline.train(model, samples, case, variant)
        out["validation"] = pipeline.evaluate(model, validation)
        out["whole"] = pipeline.evaluate(model, pipeline.samples_of(held_out, case, keep_partial=True))
        return out

    exact, plain = run(torch.float64), run(torch.float32)
    seen = {variant: run(torch.float64, variant) for variant in meta["variants"]}
    rounded = pipeline.train(pipeline.Emulation(folder, case, weights, high_half), samples, case)
    report_pipeline(case, plain, exact, seen)
    errors = numpy.array(rounded["losses"]) / numpy.array(exact["losses"]) - 1
    print(f"  bfloat16 emulation: loss off by at most {numpy.abs(errors).max():.1e}, {len(samples)} samples, "
          f"validation {exact['validation']}, whole file {exact['whole']}")

    def numbers(out, prefix=""):
        return {prefix + k: float64(*out[k]) for k in ("losses", "grad_norms", "validation", "whole")}

    tensors = numbers(exact) | float32(exact["after"], "after.") | {
        "rates": float64(*exact["rates"]), "labelled": float64(*exact["labelled"]),
        "losses_bfloat16": float64(*rounded["losses"]),
    }
    for variant, out in seen.items():
        prefix = f"variant.{variant}."
        tensors |= numbers(out, prefix) | float32(pipeline.kept_of_variant(out["after"]), prefix + "after.")
    save_file(tensors, folder / "reference.safetensors")


def high_half(weight):
    """The bf16 value our split of a float32 master gives: round half up of the bits."""
    high = (weight.view(numpy.uint32) + numpy.uint32(0x8000)) & numpy.uint32(0xFFFF0000)
    return high.view(numpy.float32)


def loss_and_gradients(model, batch, packed):
    model.zero_grad()
    loss, _ = oracle.forward(model, batch, 0, packed)
    loss.backward()
    return loss.item(), oracle.gradients(model)


def load_high_halves(folder, weights, dtype):
    with tempfile.TemporaryDirectory() as rounded:
        shutil.copy(folder / "config.json", rounded)
        save_file({n: high_half(w) for n, w in weights.items()}, pathlib.Path(rounded, "model.safetensors"),
                  metadata={"format": "pt"})
        return oracle.load(rounded, dtype)


def rms(grads, exact):
    return {n: (grads[n].double() - e).pow(2).mean().sqrt().item() for n, e in exact.items()}


def same_routes(routes):
    """Does every rounding send every token to the same experts, in every block?"""
    return all(torch.equal(a, b) for other in routes[1:] for a, b in zip(routes[0], other))


def make_bfloat16_case(case):
    """Returns {kind: (loss error, rms error per tensor)} for the summary."""
    folder = OUT / case["name"]
    weights, batch = cases.weights(case), cases.batches(case, 1)
    write_model(folder, case, weights)
    write_json(folder / "meta.json", meta_of(case, [1e-3]))
    high = {n: torch.from_numpy(high_half(w)) for n, w in weights.items()}
    model = load_high_halves(folder, weights, torch.float64)
    loss, exact = loss_and_gradients(model, batch, case["packed"])
    check_by_hand(case, high, batch, model, loss, exact)
    seen = {kind: emulate.run(case["config"], high, batch, model, kind)
            for kind in (emulate.Rounding.NONE, emulate.Rounding.DESIGN, emulate.Rounding.EAGER)}
    if not same_routes([run[2] for run in seen.values()]):
        raise SystemExit(f"{case['name']}: rounding sends a token to another expert; take another seed")
    seen = {kind: run[:2] for kind, run in seen.items() if kind is not emulate.Rounding.NONE}
    library = load_high_halves(folder, weights, torch.bfloat16)
    seen["library"] = loss_and_gradients(library, batch, case["packed"])
    errors = {kind: (got - loss, rms(grads, exact)) for kind, (got, grads) in seen.items()}
    design, eager = seen[emulate.Rounding.DESIGN][0], seen[emulate.Rounding.EAGER][0]
    per_tensor = {}
    for prefix, kind in (("rms_emulated.", emulate.Rounding.DESIGN),
                         ("rms_eager.", emulate.Rounding.EAGER)):
        per_tensor |= {prefix + n: float64(v) for n, v in errors[kind][1].items()}
    save_file(
        dict(batch)
        | float32(exact, "grad.")
        | per_tensor
        | {"loss": float64(loss), "loss_emulated": float64(design), "loss_eager": float64(eager)},
        folder / "reference.safetensors",
    )
    return errors


def over_models(errors, kind):
    """rms over all models: of the loss, and of each gradient tensor."""
    def root(values):
        return float(numpy.sqrt(numpy.mean(numpy.square(values))))
    names = errors[0][kind][1]
    return root([e[kind][0] for e in errors]), {n: root([e[kind][1][n] for e in errors]) for n in names}


def report_bfloat16(name, errors):
    """How the two emulations and transformers' own bf16 compare over all models."""
    base_loss, base = over_models(errors, emulate.Rounding.DESIGN)
    print(f"{name}: loss rms error, scores in float32: {base_loss:.2e}")
    for kind in (emulate.Rounding.EAGER, "library"):
        loss, grads = over_models(errors, kind)
        ratios = sorted(grads[n] / base[n] for n in base)
        print(f"{name}: {kind} over that: loss {loss / base_loss:.2f}, gradients "
              f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}")


def make_bfloat16_cases(name, group, only):
    errors = [make_bfloat16_case(case) for case in group if case["name"].startswith(only)]
    if errors:
        report_bfloat16(name, errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name begins so")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.enabled = False
    if not only:
        shutil.rmtree(OUT, ignore_errors=True)
    for case in cases.FLOAT32_CASES + cases.FAMILY_CASES:
        if case["name"].startswith(only):
            make_float32_case(case)
    for case in cases.PIPELINE_CASES:
        if case["name"].startswith(only):
            make_pipeline_case(case)
    make_bfloat16_cases("bfloat16", map(cases.bfloat16_case, range(16)), only)
    for family in cases.FAMILY_BFLOAT16:
        group = [cases.family_bfloat16_case(family, i) for i in range(cases.FAMILY_BFLOAT16_MODELS)]
        make_bfloat16_cases("bfloat16, " + family, group, only)
    size = sum(p.stat().st_size for p in OUT.rglob("*") if p.is_file())
    print(f"{OUT}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
