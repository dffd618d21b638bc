#!/usr/bin/env python3
"""Samples of an evaluation with the model's own tokenizer: they are told while training is watched as ever."""
import json
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
import text_samples as samples

ENVIRONMENT = os.path.join(ROOT, "build/tokenizer")
LEARNED = "alpha βeta 🙂 gamma, ünd delta.\nSo it's 日本語 at the end"
PROMPTS = ["alpha", "alpha βeta", "alpha"]


def sampling_run(t, name="run"):
    """Six steps, evaluated by two samples after three and six; a text that 60 steps learn by heart."""
    if not os.path.exists(os.path.join(ENVIRONMENT, "requirements.txt")):
        skip("no tokenizing environment; `make tokenizer` makes it")
    file = os.path.join(t.dir, "a.jsonl")
    with open(file, "w", encoding="utf-8") as f:
        f.write((json.dumps({"text": LEARNED}) + "\n") * 40)
    folder = write_model(os.path.join(t.dir, "model"), vocab_size=samples.VOCAB_SIZE, eos_token_id=2,
                         max_position_embeddings=4096)
    samples.write_tokenizer(folder, "chatml")
    return tiny_run(t.dir, name, folder, "-", model={"tokenizer": ""},
                    data={"train": [file], "shuffle": False, "packing": False},
                    training={"steps": 6, "seq_len": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 1},
                    optimizer={"learning_rate": 1e-2, "weight_decay": 0.0},
                    eval={"interval": 3, "sample_prompts": PROMPTS[:2], "sample_tokens": 60})


def told(run):
    return [(e["step"], e["prompt"], e["text"]) for e in run.events("sample")]


@test
def samples_are_what_generate_says(t):
    run = sampling_run(t)
    result = run.ok("--training.steps=60", "--eval.interval=30", "--eval.sample_prompts=%s" % json.dumps(PROMPTS))
    found = told(run)
    equal([f[:2] for f in found], [(s, p) for s in (30, 60) for p in range(3)], "samples told")
    equal([prompt + text for (_, _, text), prompt in zip(found[3:], PROMPTS)], [LEARNED] * 3, "the text that was learned")
    check("sample: alpha| βeta 🙂 gamma" in result.err, result.err)
    out = mtlaunch("generate", run.dir, "--prompt", "alpha", "--max-new-tokens", "60", status=DONE).out
    equal(out, PROMPTS[0] + found[3][2] + "\n", "mtlaunch generate")


def decoder_of(live):
    """The child that decodes, stopped as soon as it is seen; another one encoded the prompts before there were workers."""
    live.wait_committed(3)
    workers = ("io_worker", "gpu_worker", "opt_worker", "mtlaunch")
    found = live.wait_for(lambda: [p for p, name in live.children() if name not in workers], "the decoder")
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


@test
def a_decoder_that_dies_stops_no_training(t):
    run = sampling_run(t)
    run.ok("--run.stop_after_step=1", status=STOPPED)  # tokenizes, so that the next child is a decoder
    with run.start() as live:
        os.kill(decoder_of(live), signal.SIGKILL)
        equal(live.wait(), DONE, live.output())
        check("samples of step 3 are not decoded: the tokenizer (pid" in live.output(), live.output())
    found = told(run)
    equal(found[:2], [(3, 0, None), (3, 1, None)], "samples of step 3")
    check(len(found) == 4 and all(text for _, _, text in found[2:]), "samples of step 6: %s" % found)
    run.check_steps(6)


@test
def a_worker_that_dies_meanwhile_is_restarted_and_the_samples_come_once(t):
    whole = sampling_run(t, "whole")
    whole.ok()
    for victim in ("gpu_worker", "opt_worker", "io_worker", "launcher"):
        run = sampling_run(t, victim)
        run.ok("--run.stop_after_step=1", status=STOPPED)
        with run.start() as live:
            decoder = decoder_of(live)
            os.kill(live.pid if victim == "launcher" else live.children(victim)[0][0], signal.SIGKILL)
            wait_until(lambda: not is_alive(decoder), 5, "the decoder ends")
            equal(live.wait(), -signal.SIGKILL if victim == "launcher" else DONE, live.output())
        run.ok()
        equal(told(run), told(whole), "samples, %s killed" % victim)
        equal(run.hashes(), whole.hashes(), "state hashes, %s killed" % victim)


@test
def a_signal_is_heard_while_samples_are_decoded(t):
    run = sampling_run(t)
    run.ok("--run.stop_after_step=1", status=STOPPED)
    with run.start() as live:
        decoder = decoder_of(live)
        live.signal(signal.SIGTERM)
        equal(live.wait(10), STOPPED, live.output())
        wait_until(lambda: not is_alive(decoder), 5, "the decoder ends")
    run.ok()
    equal([f[:2] for f in told(run)], [(s, p) for s in (3, 6) for p in range(2)], "samples told")


@test
def without_the_environment_prompts_are_refused_before_the_start(t):
    run = sampling_run(t)
    prefix = os.path.join(t.dir, "prefix")
    subprocess.run(["make", "-s", "install", "PREFIX=" + prefix], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([os.path.join(prefix, "bin", "mtlaunch"), run.file], env=environment(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)
    equal(done.returncode, USER, done.stderr)
    check("make it with" in done.stderr and not os.path.exists(run.dir), done.stderr)


if __name__ == "__main__":
    main()
