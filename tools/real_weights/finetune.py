"""Fine-tunes real weights with mtlaunch and with transformers, on the same tokens.

    tools/venv/bin/python tools/real_weights/finetune.py WORK_DIR [--steps N] [--only float32]

WORK_DIR/model is the folder of to_folder.py. The text is the prose of Debian's package perl-doc
(examples/quickstart/extract_text.py), tokenized into a shard as README.md describes. Both sides
start from the same folder and read the same shard in file order: packed samples, attention and
labels within documents, AdamW, clipping, the same learning rates. The other side is transformers'
LlamaForCausalLM with eager attention and torch's AdamW (tools/goldens/pipeline.py reads the shard
and makes the steps). In bfloat16 it computes in torch.bfloat16 and keeps float32 masters, whose
upper halves, rounded half up, are the weights of the next step.

docs/measured/real_weights.jsonl is written anew for the dtypes that ran. Lines:
{"name": "real_weights", dtype, step, loss, loss_transformers, ...}, then what the model writes
before and after {"name": "real_weights_sample"}, and its loss on text that it was not trained on
{"name": "real_weights_held_out"}.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools" / "goldens"))
sys.path.insert(0, str(ROOT / "bench"))
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")

import numpy  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import cases  # noqa: E402
import measure  # noqa: E402
import oracle  # noqa: E402
import pipeline  # noqa: E402

MEASURED = ROOT / "docs" / "measured" / "real_weights.jsonl"
HELD_OUT_TOKENS = 8192
PROMPT = "The value of a scalar variable is"
QUESTION = "What is a Perl hash?"
NEW_TOKENS = 40

RUN_FILE = """
[run]
output_dir = "{dtype}"
[model]
path = "model"
dtype = "{dtype}"
[data]
train = ["train.bin"]
shuffle = false
[training]
seq_len = {seq_len}
micro_batch_size = {micro_batch_size}
gradient_accumulation_steps = {gradient_accumulation_steps}
steps = {steps}
max_grad_norm = {max_grad_norm}
[optimizer]
learning_rate = {learning_rate}
weight_decay = {weight_decay}
[lr_scheduler]
warmup_steps = {warmup_steps}
min_lr_ratio = {min_lr_ratio}
"""


def case_of(steps, sequences, model):
    config = json.loads((model / "config.json").read_text())
    return {
        "name": "real_weights", "config": config, "data": "nanogpt", "packing": True,
        "end": config["eos_token_id"], "seq_len": 256, "micro_batch_size": min(sequences, 2),
        "gradient_accumulation_steps": max(sequences // 2, 1), "steps": steps, "max_grad_norm": 1.0,
        "learning_rate": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8,
        "no_decay": ["*norm*", "*bias"],
        "scheduler": {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},
    }  # fmt: skip


def make_shards(work, model):
    """train.bin, and held_out.bin from its end."""
    text = work / "perl-doc.jsonl"
    if not text.exists():
        subprocess.run([sys.executable, ROOT / "examples/quickstart/extract_text.py", text], check=True)
    if (work / "train.bin").exists():
        return
    t = AutoTokenizer.from_pretrained(model)
    ids = [i for line in open(text) for i in t(json.loads(line)["text"])["input_ids"] + [t.eos_token_id]]
    ids = numpy.array(ids, dtype=numpy.uint16)
    ids[-HELD_OUT_TOKENS:].tofile(work / "held_out.bin")
    ids[:-HELD_OUT_TOKENS].tofile(work / "train.bin")


def start_ours(work, dtype, case):
    run_file = work / (dtype + ".toml")
    run_file.write_text(RUN_FILE.format(dtype=dtype, **{**case, **case["scheduler"]}))
    return subprocess.Popen([ROOT / "mtlaunch", run_file])


def finish_ours(process, work, dtype, case):
    """The lines of the steps, and the exported folder."""
    if process.wait():
        raise SystemExit("mtlaunch ended with status %d" % process.returncode)
    lines = [json.loads(line) for line in open(work / dtype / "metrics.jsonl")]
    export = work / dtype / "export" / ("step-%d" % case["steps"])
    return [line for line in lines if "loss" in line and "event" not in line], export


def upper_half(master):
    bits = master.detach().view(torch.int32) + 0x8000
    return (bits & -0x10000).view(torch.float32)


class Bfloat16:
    """transformers computing in bfloat16; the optimizer's parameters are float32 masters."""

    def __init__(self, folder):
        self.model = oracle.load(folder, torch.bfloat16)
        exact = oracle.load(folder, torch.float32)
        self.masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in exact.named_parameters()}

    def named(self):
        return list(self.masters.items())

    def loss_sum(self, tokens, labels, document, position):
        weights = {n: (p + (upper_half(p) - p).detach()).to(torch.bfloat16) for n, p in self.masters.items()}
        given = {"input_ids": tokens, "position_ids": position, "use_cache": False,
                 "attention_mask": oracle.block_mask(document, torch.bfloat16)}  # fmt: skip
        logits = torch.func.functional_call(self.model, weights, (), given).logits
        return oracle.summed_loss(logits, labels) * (labels >= 0).sum()


def train_theirs(work, dtype, case):
    samples = pipeline.samples_of([work / "train.bin"], case)
    folder = work / "model"
    model = Bfloat16(folder) if dtype == "bfloat16" else pipeline.Transformers(folder, case, torch.float32, "")
    return pipeline.train(model, samples, case)


def held_out_loss(work, folder, case):
    """What `mtlaunch eval` says of the folder."""
    command = [ROOT / "mtlaunch", "eval", folder, "--data", work / "held_out.bin", "--seq-len", str(case["seq_len"])]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def sample(folder):
    """Greedy continuations: of a prompt as it is, and of a question in the chat template."""
    t = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = t.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False)
    out = {}
    for key, text in (("prompt", PROMPT), ("question", chat)):
        ids = t(text, return_tensors="pt")
        with torch.no_grad():
            new = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids["input_ids"].shape[1]:]
        out[key] = t.decode(new)
    return out


def compare(work, dtype, case):
    """The lines of one dtype."""
    about = {"commit": measure.commit_id(), "machine": measure.machine()}
    process = start_ours(work, dtype, case)  # both at once: nothing here is timed
    try:
        theirs = train_theirs(work, dtype, case)
        ours, export = finish_ours(process, work, dtype, case)
    finally:
        process.terminate()
    lines = []
    for line, loss, norm in zip(ours, theirs["losses"], theirs["grad_norms"], strict=True):
        lines.append({"name": "real_weights", "dtype": dtype, "step": line["step"], "loss": line["loss"],
                      "loss_transformers": loss, "relative_difference": abs(line["loss"] / loss - 1),
                      "grad_norm": line["grad_norm"], "grad_norm_transformers": norm, "tokens": line["tokens"],
                      **about})  # fmt: skip
        print("%s step %2d: loss %.6f, transformers %.6f" % (dtype, line["step"], line["loss"], loss), flush=True)
    for when, folder in (("before", work / "model"), ("after", export)):
        lines.append({"name": "real_weights_held_out", "dtype": dtype, "when": when,
                      "eval": held_out_loss(work, folder, case), **about})  # fmt: skip
        lines.append({"name": "real_weights_sample", "dtype": dtype, "when": when, "given": [PROMPT, QUESTION],
                      **sample(folder), **about})  # fmt: skip
        print(lines[-2]["eval"], json.dumps(lines[-1]), flush=True)
    subprocess.run([ROOT / "mtlaunch", "clean", work / dtype], check=True)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=4, help="of 256 tokens in a step")
    parser.add_argument("--only", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases.STEPS = arguments.steps
    work = arguments.work.resolve()
    case = case_of(arguments.steps, arguments.sequences, work / "model")
    make_shards(work, work / "model")
    dtypes = [arguments.only] if arguments.only else ["float32", "bfloat16"]
    kept = [line for line in MEASURED.read_text().splitlines() if json.loads(line)["dtype"] not in dtypes] \
        if MEASURED.exists() else []  # fmt: skip
    for dtype in dtypes:
        kept += [json.dumps(line) for line in compare(work, dtype, case)]
        MEASURED.write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    main()
