#!/usr/bin/env python3
"""Chaos with real processes: whatever dies, freezes or goes mad, wherever, the run ends as if nothing had.

    tests/kill/chaos.py --cases 1000 [--seed 7] [--jobs 2]   `make chaos N=1000`
    tests/kill/chaos.py --seed 7 --case 412                  one of them again
    tests/kill/chaos.py --kinds storm --cases 50             500 kills of opt_workers
    tests/kill/chaos.py --only ':(stop|hang):'               what the watchdog ends, at every point

Case K of a seed is the same whatever else is run. First come the named ones: each fault point of procs/fault.h
with each action in each process that passes it. Then random ones:

    moment   a live process, the launcher too, gets SIGKILL, or SIGSTOP and then SIGKILL, at any moment
    double   a fault point or a moment, and a second kill up to 0.3 s later, while the first is dealt with
    storm    one run, ten kills of opt_workers, each at any moment after a commit

A case has a model of MODELS (dense, tied, experts of several pages, experts that get no token, GPT-2) and data of DATA
(text in bytes, a token shard, a token file of conversations, instruction data that a tokenizer.json tokenizes).

Each case ends with the step lines, state hashes, exports, evaluations and samples of an undisturbed run; with no
process, lock, shared memory, socket directory or temporary file left, the store's files as large as ever; and a
second start finds nothing to do. What was done is appended as one line to docs/measured/chaos.jsonl.
"""
import argparse
import atexit
import collections
import concurrent.futures
import datetime
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
import probe
import text_samples
from trial import Trial

STEPS, STORM_STEPS, STORM_KILLS = 6, 60, 10
WORKERS = ("io_worker.0", "gpu_worker.0", "opt_worker.0", "opt_worker.1")
SILENCE_S = 2  # of a frozen worker, before the watchdog acts
LEDGER = os.path.join(ROOT, "docs", "measured", "chaos.jsonl")


def names_in_header(macro):
    with open(os.path.join(ROOT, "procs/fault.h")) as f:
        text = f.read()
    body = re.search(r"#define %s\(X\)(.*?[^\\])\n" % macro, text, re.S).group(1)
    return re.findall(r"X\((\w+),", body)


POINTS, ACTIONS = names_in_header("FAULT_POINTS"), names_in_header("FAULT_ACTIONS")

# how often a process passes a point in one run, at least; once where not named here
PASSES = {
    "launcher_child_started": 4, "io_import_page": 40, "io_load_page": 40, "io_takeover_page": 40, "gpu_mid_evaluation": 8,
    "gpu_mid_generation": 8, "io_export_page": 80, "io_weights_lent": 400, "io_state_landed": 200,
    "io_state_lent": 200, "io_slot_submitted": 200, "gpu_weights_taken": 400, "gpu_weights_returned": 400,
    "gpu_gradient_published": 200, "opt_gradient_taken": 100, "opt_norm_written": 100, "opt_state_taken": 100,
    "opt_image_sealed": 100, "opt_gradient_returned": 100, "opt_written_back": 100, "opt_mid_apply": 100,
    "io_microbatch_published": 11, "gpu_microbatch_taken": 11, "gpu_mid_forward": 12, "gpu_mid_backward": 10,
    "io_skip_read_back": 30, "opt_skip": 15, "gpu_evaluated": 2, "gpu_generated": 2,
    "launcher_evaluation_ordered": 2, "launcher_export_ordered": 2, "io_export_before_rename": 2, "io_exported": 2,
}
PASSES.update((point, STEPS - 1) for point in POINTS if point in (
    "io_slots_written", "io_complete", "io_before_flush", "io_after_flush", "io_before_table", "io_table_written",
    "io_before_record", "io_record_written", "io_after_record", "io_committed", "gpu_forward_done",
    "gpu_backward_done", "opt_after_norm", "launcher_step_begun", "launcher_before_apply", "launcher_line_written",
    "launcher_before_commit", "launcher_commit_ordered", "launcher_after_commit"))
ONLY_RESUMED = ("io_recovered", "io_load_page")
ONLY_SKIPPED = ("io_skip_read_back", "opt_skip")
ONLY_SAMPLED = ("gpu_mid_generation", "gpu_generated")
# passed only after a death: of whom, and when (probe.c)
ANY = ("io_worker", "gpu_worker", "opt_worker.0", "opt_worker.1")
ONLY_RESTARTED = {
    "worker_abandoned": (ANY, "step"), "worker_acknowledged": (ANY, "step"), "worker_ready_again": (ANY, "step"),
    "io_drained": (ANY[1:], "step"),
    "io_takeover": (ANY[:1], "step"), "io_takeover_page": (ANY[:1], "step"),
    "launcher_before_restart": (ANY, "step"), "launcher_before_release": (ANY, "step"),
    "launcher_restarting_all": (ANY[:1], "activity:IMPORTING"),
}


def processes_of(point):
    role = point.split("_")[0]
    if role == "launcher":
        return ("launcher",)
    return tuple(w for w in WORKERS if role in ("worker", w.split("_")[0]))


# -- models and data --

COMMON = {"vocab_size": 272, "initializer_range": 0.05, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
          "torch_dtype": "float32"}
USUAL = {**COMMON, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128}
MODELS = {
    "llama": llama_config(),
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, **USUAL,
              "num_hidden_layers": 3},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4,
             "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **COMMON},
    # an expert has six pages
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": 10,
                "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False, **USUAL},
    # so many experts that in each step some get no token (test_chaos.py)
    "qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": [0],
                 "num_experts": 24, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "norm_topk_prob": False,
                 **USUAL},
}
SKIPPABLE = ("llama", "mixtral")  # skip_run() knows where in their attention to put a huge number
DATA = ("bytes", "bytes", "shard", "tokens", "text")
SAMPLED = ("bytes", "text")  # a prompt needs a tokenizer
ENVIRONMENT = os.path.join(ROOT, "build", "tokenizer", "bin", "python")  # of `make tokenizer`
_shared = []


def shared_directory():
    """Of all cases of this program: what is tokenized there is tokenized once."""
    with _lock:
        if not _shared:
            _shared.append(tempfile.mkdtemp(prefix="mt-chaos-data-"))
            atexit.register(shutil.rmtree, _shared[0], ignore_errors=True)
    return _shared[0]


def write_config(folder, model, data="bytes"):
    """config.json; text in bytes has the vocabulary of test models, other text that of its tokenizer.json."""
    os.makedirs(folder, exist_ok=True)
    if data == "text":
        text_samples.write_tokenizer(folder, "chatml")
    vocabulary = {"vocab_size": text_samples.VOCAB_SIZE, "eos_token_id": 2} if data == "text" else {}
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**MODELS[model], **vocabulary}, f, indent=1)
    return folder


def conversations(count=800):
    """Short ones: a sample of 32 tokens holds one or two, whole."""
    dice = text_samples.Dice("chaos")
    for _ in range(count):
        yield {"prompt": text_samples.sentence(dice, 2), "completion": text_samples.sentence(dice, 4)}


def data_file(directory, data):
    """The training file and what else a run file says about it."""
    if data == "text":
        directory = shared_directory()
    path = os.path.join(directory, {"bytes": "train.txt", "shard": "train.bin", "tokens": "train.mttokens",
                                    "text": "train.jsonl"}[data])
    with _lock:
        if not os.path.exists(path):
            {"bytes": lambda: write_text(path),
             "shard": lambda: write_nanogpt_shard(path, tokens_of(20000)),
             "tokens": lambda: write_token_file(path, [(5 + i % 7, 4 + i % 9) for i in range(400)]),
             "text": lambda: text_samples.write_records(path, conversations())}[data]()
    return path, {"cache_dir": os.path.join(directory, "cache")} if data == "text" else {}


# -- runs --


def run_of(directory, case, hf=None, file=None, **sections):
    """A run of what a case has drawn, with these sections besides."""
    usual, described = data_file(directory, case.data)
    common = {"model": {"dtype": case.dtype, "tokenizer": "bytes" if case.data == "bytes" else ""},
              "optimizer": {"workers": case.workers}, "data": described,
              "memory": {"page_elements": 4096, "io_engine": case.engine, "durability": case.durability}}
    hf = hf or write_config(os.path.join(directory, "model"), case.model, case.data)
    return tiny_run(directory, "run", hf, file or usual, **merged(common, sections))


def chaos_run(directory, case):
    """Every point of the protocol in a fifth of a second: evaluations, samples and exports after steps 3 and 6."""
    samples = {"sample_prompts": ["The"], "sample_tokens": 3} if case.data in SAMPLED else {}
    return run_of(directory, case, training={"steps": STEPS}, data={"val_fraction": 0.1},
                  checkpoint={"export_interval": 3, "keep": 9}, eval={"interval": 3, "sequences": 4, **samples})


def storm_run(directory, case):
    return run_of(directory, case, training={"steps": STORM_STEPS})


def skip_run(directory, case):
    """The third step has a token whose attention overflows: it is skipped."""
    hf, file = os.path.join(directory, "hf-skip"), os.path.join(directory, "skip.txt")
    if not os.path.exists(file):
        config = MODELS[case.model]
        tensors, shapes = make_weights(config), tensor_shapes(config)
        for tensor, value in (("embed_tokens", None), ("layers.0.self_attn.q_proj", 1e20),
                              ("layers.0.self_attn.k_proj", 1e20)):
            key = "model.%s.weight" % tensor
            values = floats(tensors[key])
            if value:
                values[0] = value
            else:  # only "z" has the first dimension
                values[::64] = [1.0 if i == ord("z") else 0.0 for i in range(shapes[key][0])]
            tensors[key] = ("F32", shapes[key], pack("F32", values))
        write_safetensors(os.path.join(write_config(hf, case.model), "model.safetensors"), tensors)
        at, text = 2 * 128 + 40, text_of(20000).replace("z", "y")
        with open(file, "w") as f:
            f.write(text[:at] + "z" + text[at + 1:])
    return run_of(directory, case, hf, file, training={"steps": STEPS}, model={"init": "pretrained"},
                  optimizer={"learning_rate": 1e-25}, data={"shuffle": False})


MAKERS = {"chaos": chaos_run, "storm": storm_run, "skip": skip_run}
_undisturbed, _lock = {}, threading.RLock()


def undisturbed(maker, case):
    """Workers and engine change no bit, so one of a kind, model, dtype and data serves all."""
    plain = case._replace(workers=2, engine="auto", durability="step")
    with _lock:
        lock, truth = _undisturbed.setdefault((maker, case.model, case.dtype, case.data), (
            threading.Lock(), Undisturbed(lambda d: MAKERS[maker](d, plain))))
    with lock:
        if truth.lines is None:
            if case.data == "text":  # what is in the cache is not tokenized by what is disturbed
                with tempfile.TemporaryDirectory() as aside:
                    mtlaunch("tokenize", MAKERS[maker](aside, plain).file, status=DONE)
            began = time.monotonic()
            truth.learn()
            truth.seconds = 0.7 * (time.monotonic() - began)
    return truth


# -- cases --

Case = collections.namedtuple("Case", "number kind point process action nth double resumed dtype workers engine "
                              "durability seed model data")


def named_combinations():
    return [(point, process, action) for point in POINTS for process in processes_of(point) for action in ACTIONS
            if (process, action) != ("launcher", "scribble")]


def make_case(seed, number, kinds=None):
    """Case `number` of a seed."""
    rng = random.Random("%d, case %d" % (seed, number))
    named = named_combinations() if not kinds else []
    kind = "point" if number < len(named) else rng.choice(kinds or ("moment", "moment", "double", "double", "storm"))
    point = process = action = None
    double = kind == "double"
    if kind == "point":
        point, process, action = named[number]
    elif double and rng.random() < 0.7:
        kind = "point"
        point, process, action = rng.choice(
            [c for c in named_combinations() if c[2] not in ("stop", "hang") and c[0] not in ONLY_RESTARTED])
    elif double:
        kind = "moment"
    return case_of(rng, number, kind, point, process, action, double)


def case_of(rng, number, kind, point=None, process=None, action=None, double=False):
    resumed = point in ONLY_RESUMED or (kind == "moment" and rng.random() < 0.25)
    drawn = (rng.randint(1, PASSES.get(point, 1)), double, resumed,
             rng.choice(("float32", "bfloat16")), 2 if kind == "point" else rng.randint(1, 3),
             rng.choice(("auto", "sync")), "step" if kind == "point" else rng.choice(("step", "step", 2)),
             rng.getrandbits(32))
    return with_model(Case(number, kind, point, process, action, *drawn, rng.choice(tuple(MODELS)), ""), rng.choice(DATA))


def with_model(case, data):
    """The case with this data, or what its point needs in its place."""
    model = case.model
    if case.point in ONLY_SKIPPED:
        model, data = SKIPPABLE[model in ("mixtral", "qwen3moe")], "bytes"
    if data == "text" and not os.path.exists(ENVIRONMENT):
        data = "shard"
    if case.point in ONLY_SAMPLED and data not in SAMPLED:
        data = "bytes"
    if case.point == "io_cache_before_rename" and data == "text":
        data = "tokens"  # the cache of text is shared, and full
    return case._replace(model=model, data=data)


def title(case):
    what = "%s@%s:%s:%d" % case[2:6] if case.kind == "point" else case.kind
    return "%d %s%s%s (%s of %s, %s, %d opt, %s, durability %s)" % (
        case.number, what, " + kill" if case.double else "", ", resumed" if case.resumed else "", case.model, case.data,
        case.dtype, case.workers, case.engine, case.durability)


class Attempt:
    """One case being carried out."""

    def __init__(self, case, directory):
        self.case, self.rng = case, random.Random(case.seed)
        self.maker = "storm" if case.kind == "storm" else "skip" if case.point in ONLY_SKIPPED else "chaos"
        self.expected = undisturbed(self.maker, case)
        self.once = os.path.join(directory, "once")
        env = {"MTLAUNCH_FAULT": "%s@%s:%s:%d" % case[2:6], "MTLAUNCH_FAULT_ONCE": self.once,
               "MTLAUNCH_FAULT_SEED": str(case.seed)} if case.kind == "point" else {}
        if case.action in ("stop", "hang"):
            env["MTLAUNCH_SILENCE_S"] = str(SILENCE_S)
        run = MAKERS[self.maker](directory, case)
        self.trial, self.run = Trial(run, env), run
        self.kills = []  # (pid, seconds since 1970, action)
        self.output, self.late, self.killed_before, self.noted = "", 0, None, False

    # -- from outside --

    def kill(self, live, pid, number=signal.SIGKILL):
        self.kills.append((pid, time.time(), "kill"))
        self.trial.note_socket()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.kills.pop()

    def victims(self, live, name=None):
        """Workers: who tokenizes samples beside them is restarted by nobody."""
        return [pid for pid, role in live.children(name) if role in ROLES]

    def kill_any(self, live):
        """The launcher one time in four."""
        pids = [live.pid] if self.rng.random() < 0.25 else self.victims(live) or [live.pid]
        pid = self.rng.choice(pids)
        if not live.running():
            self.late += 1
            return
        if self.rng.random() < 0.3:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rng.random() * 0.3)
        self.kill(live, pid)

    def wait_fault(self, live):
        """True when the fault has acted; False when the launcher ended without it."""
        while not os.path.exists(self.once):
            if not live.running():
                return os.path.exists(self.once)
            time.sleep(0.001)
        return True

    def disturb_point(self, live):
        case = self.case
        if case.point in ONLY_RESTARTED:
            roles, when = ONLY_RESTARTED[case.point]
            survivor = case.point in ("worker_abandoned", "worker_acknowledged")
            role = self.rng.choice([r for r in roles if not (survivor and case.process.startswith(r))])
            when = "step:%d" % self.rng.randint(1, STEPS - 1) if when == "step" else when
            seen = probe.kill(live.pid, role, signal.SIGKILL, when)
            check(seen, "too late for a death that is restarted from")
            self.killed_before = role if "." in role else role + ".0"
            pid = seen["pids"][int(role[-1])] if "." in role else seen[role[:role.index("_")]]
            self.kills.append((pid, seen["at"], "kill"))
        if not self.wait_fault(live):
            return
        self.trial.note_socket()
        if case.process == "launcher" and case.action in ("stop", "hang"):
            time.sleep(0.1)
            if case.action == "hang" or self.rng.random() < 0.5:
                self.kill(live, live.pid)
            else:
                live.signal(signal.SIGCONT)  # frozen for a moment, and goes on
        if case.double:
            time.sleep(self.rng.random() * 0.3)
            self.kill_any(live)

    def disturb_moment(self, live):
        time.sleep(self.rng.random() * self.expected.seconds)
        self.kill_any(live)
        if self.case.double:
            time.sleep(self.rng.random() * 0.3)
            self.kill_any(live)

    def disturb_storm(self, live):
        """Between two kills the run gets on: a limit of the supervisor counts deaths without progress."""
        step = 1
        while len(self.kills) < STORM_KILLS and live.running():
            worker = self.rng.randrange(self.case.workers)
            seen = probe.kill(live.pid, "opt_worker.%d" % worker, signal.SIGKILL, "step:%d" % step,
                              delay_s=self.rng.random() * 2 * self.expected.step_s)
            if seen and seen["committed"] < STORM_STEPS:
                self.kills.append((seen["pids"][worker], seen["at"], "kill"))
                step = seen["begun"] + (2 if self.case.durability == "step" else 2 * self.case.durability)
        check(len(self.kills) == STORM_KILLS, "only %d kills came in time" % len(self.kills))

    # -- to the end --

    def carry_out(self):
        if self.case.resumed:
            self.run.ok("--run.stop_after_step=%d" % self.rng.randint(1, 4), status=STOPPED)
        disturb = getattr(self, "disturb_" + self.case.kind)
        for _ in range(4):
            with self.trial.start() as live:
                if disturb:
                    disturb(live)
                status = live.wait(60)
                self.output += live.output()
            disturb = None
            self.take_note_of_fault()
            if not any(pid == live.pid for pid, _, _ in self.kills):
                equal(status, DONE, "status")
                return
            self.trial.check_all_gone(2)
        raise TestFailure("the launcher was killed again and again")

    def take_note_of_fault(self):
        if self.case.kind != "point" or self.noted:
            return
        self.noted = True
        if not os.path.exists(self.once) and self.killed_before and "how that ended is not known" in self.output:
            raise MetFlush  # nobody takes over from who died in a flush: not the place that was wanted
        check(os.path.exists(self.once), "the point was never reached")
        with open(self.once) as f:
            _, pid, when = f.read().split()
        if (self.case.process, self.case.action) != ("launcher", "stop"):
            self.kills.append((int(pid), float(when), self.case.action))

    def deaths(self):
        """Names that the launcher told of; a successor that may not take over a flush leaves by itself."""
        told = re.findall(r"^warning: (\w+\.\d+) \(pid \d+\) (?:killed|exited)(.*)", self.output, re.M)
        return [name for name, how in told if "how that ended is not known" not in how]

    def check_end(self):
        lost = re.findall(r"there is no export of step (\d+), which was due", self.output)
        self.expected.check(self.run, lost_exports=["step-%s" % s for s in lost])
        equal(Undisturbed.told(self.run), self.expected.events, "evaluations, samples and skips told")
        if self.case.kind == "point" and self.case.process != "launcher" and not self.case.double and \
                self.case.action != "scribble":  # who reads what was scribbled may find it and leave, too
            before = [self.killed_before] if self.killed_before else []
            equal(self.deaths(), before + [self.case.process], "who died")
        self.run.ok()  # no lock is held, and there is nothing to do
        self.run.check_steps(len(self.expected.lines))
        self.trial.check_nothing_left()
        self.trial.check_files(self.expected)

    def measured(self):
        """{actions, tiers, seen_ms: from a death whose moment is known to the launcher's notice, running_ms by tier: to the
        next step}"""
        events = self.run.events()
        found = {"kills": [action for _, _, action in self.kills], "late": self.late, "seen_ms": [],
                 "tiers": [e["tier"] for e in events if e["event"] == "restart"], "running_ms": []}
        for pid, when, action in self.kills:
            at = [i for i, e in enumerate(events) if e["event"] == "worker_exit" and e["pid"] == pid]
            if not at or action in ("stop", "hang", "scribble"):  # they die later than they said
                continue
            found["seen_ms"].append(1e3 * (seconds_of(events[at[0]]) - when))
            after = events[at[0]:]
            # T1 is told when all go on, T2 when all are killed
            restart = next((e for e in after if e["event"] == "restart"), None)
            runs = restart if restart and restart["tier"] == "T1" else \
                next((e for e in after if e["event"] == "resume"), None)
            if restart and runs:
                found["running_ms"].append((restart["tier"], 1e3 * (seconds_of(runs) - when)))
        return found


def seconds_of(event):
    when = datetime.datetime.strptime(event["time"], "%Y-%m-%dT%H:%M:%S.%fZ")
    return when.replace(tzinfo=datetime.timezone.utc).timestamp()


class MetFlush(Exception):
    """The kill that makes somebody take over met a flush."""


Outcome = collections.namedtuple("Outcome", "case seconds why directory measured")


def carry_out(case, root, tries=4):
    """Outcome of a case; its directory stays if it failed."""
    directory = os.path.join(root, "case-%d" % case.number)
    os.makedirs(directory)
    began, why, measured, attempt = time.monotonic(), "", {}, None
    try:
        attempt = Attempt(case, directory)
        attempt.carry_out()
        attempt.check_end()
        measured = attempt.measured()
    except MetFlush:
        if tries > 1:
            shutil.rmtree(directory)
            return carry_out(case, root, tries - 1)
        why = "four times the kill before met a flush"
    except TestFailure as e:
        why = "%s\n%s" % (e, attempt.output[-2000:] if attempt else "")
    except Exception:  # noqa: BLE001 - a broken test is a failed test
        why = traceback.format_exc()
    if not why:
        shutil.rmtree(directory)
    return Outcome(case, time.monotonic() - began, why, directory, measured)


def carry_out_all(cases, jobs, tell):
    """[Outcome]; tell(outcome) as each ends."""
    probe.program()
    outcomes, root = [], tempfile.mkdtemp(prefix="mt-chaos-")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(carry_out, case, root) for case in cases]):
            outcomes.append(done.result())
            tell(outcomes[-1])
    if not any(o.why for o in outcomes):
        shutil.rmtree(root)
    return outcomes


# -- the sample of `make test` --


def sample(seed):
    """Each fault point once; processes and actions by the seed; frozen ones, which take long, first. A model has one
    kind of data: each pair costs an undisturbed run."""
    rng, cases = random.Random(seed), []
    data = dict(zip(MODELS, rng.sample(sorted(set(DATA)) + ["bytes"], len(MODELS))))
    for i, point in enumerate(POINTS):
        process = rng.choice(processes_of(point))
        action = ACTIONS[(i + seed) % len(ACTIONS)]
        if (process, action) == ("launcher", "scribble"):
            action = "kill"
        case = case_of(rng, i, "point", point, process, action)
        cases.append(with_model(case, data[case.model]))
    return sorted(cases, key=lambda c: (c.action not in ("stop", "hang"), c.number))


# -- the ledger --


def spread(values):
    values = sorted(values)
    if not values:
        return None
    return {"n": len(values), "median": round(values[len(values) // 2], 1),
            "p90": round(values[int(0.9 * len(values))], 1), "max": round(values[-1], 1)}


def commit_now():
    return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def summary(outcomes, seed, seconds, commit=""):
    """A line of the ledger. kills: by action, from outside too; late: moments after the end; tiers: restarts told in
    metrics.jsonl; death_seen_ms: from a kill to the launcher's worker_exit; death_to_running_ms: to the next step;
    slowest, seen_last: the cases of the maxima."""
    count = collections.Counter
    good = [o.measured for o in outcomes if o.measured]
    running = [pair for m in good for pair in m["running_ms"]]
    slowest = max(((ms, title(o.case)) for o in outcomes if o.measured for _, ms in o.measured["running_ms"]), default=(0, ""))
    seen = max(((ms, title(o.case)) for o in outcomes if o.measured for ms in o.measured["seen_ms"]), default=(0, ""))
    return {"name": "chaos", "commit": commit, "cases": len(outcomes),
            "kinds": count(o.case.kind + ("+kill" if o.case.double else "") for o in outcomes),
            "models": count(o.case.model for o in outcomes), "data": count(o.case.data for o in outcomes),
            "kills": count(a for m in good for a in m["kills"]), "late": sum(m["late"] for m in good),
            "tiers": count(t for m in good for t in m["tiers"]), "failures": sum(1 for o in outcomes if o.why),
            "death_seen_ms": spread([v for m in good for v in m["seen_ms"]]),
            "death_to_running_ms": {tier: spread([ms for t, ms in running if t == tier])
                                    for tier in sorted({t for t, _ in running})}, "slowest": slowest[1], "seen_last": seen[1],
            "seed": seed, "seconds": round(seconds)}


def replay(seed, case, kinds):
    return "tests/kill/chaos.py --seed %d --case %d%s" % (seed, case.number, " --kinds %s" % kinds if kinds else "")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=len(named_combinations()))
    options.add_argument("--case", type=int, action="append", help="only this one, of --seed")
    options.add_argument("--first", type=int, default=0, help="number of the first case")
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--only", default="", help="of these, only cases whose title matches this expression")
    options.add_argument("--kinds", help="only random cases of these kinds: moment,double,storm")
    given = options.parse_args()
    numbers = given.case or range(given.first, given.first + given.cases)
    cases = [make_case(given.seed, n, given.kinds and given.kinds.split(",")) for n in numbers]
    cases = [case for case in cases if re.search(given.only, title(case))]
    began, done, commit = time.monotonic(), [], commit_now()
    print("seed %d: %d cases, %d named combinations" % (given.seed, len(cases), len(named_combinations())), flush=True)

    def tell(outcome):
        done.append(outcome)
        if outcome.why:
            print("FAILED %s\n  %s\n  files: %s\n  again: %s" % (
                title(outcome.case), outcome.why.replace("\n", "\n  "), outcome.directory,
                replay(given.seed, outcome.case, given.kinds)), flush=True)
        elif given.case or len(done) % 100 == 0:
            print("%d of %d, %.0f s; last: %s" % (len(done), len(cases), time.monotonic() - began,
                                                  title(outcome.case)), flush=True)

    outcomes = carry_out_all(cases, given.jobs, tell)
    line = json.dumps(summary(outcomes, given.seed, time.monotonic() - began, commit))
    print(line)
    if not given.case:
        with open(LEDGER, "a") as f:
            f.write(line + "\n")
    return 1 if any(o.why for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
