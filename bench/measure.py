#!/usr/bin/env python3
"""`make numbers`: measures what the README claims and writes JSON lines under docs/measured/.

    bench/measure.py [--only NAME] [--pairs N]

Each line: {name, value, low, high, target, unit, repeats, command, commit, machine}. Ratios are medians
of interleaved pairs: ours and the rival take turns in one run, a pair shares the machine's mood, and
low..high is the 95 % interval of the median (order statistics). Timings are never tests.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MTLAUNCH = ROOT / "mtlaunch"
MODEL = ROOT / "bench" / "llama_25m"
SEQ_LEN, TOKENS_PER_STEP = 512, 4096
OURS_MICRO_BATCH = 4  # each side with the microbatch that suits it; torch's is an option below


def median_interval(values):
    """Median and a 95 % interval of it: order statistics of the binomial(n, 1/2)."""
    v = sorted(values)
    n = len(v)
    from math import comb

    k, mass = 0, 0.0
    while k < n // 2 and mass + comb(n, k) / 2**n <= 0.025:
        mass += comb(n, k) / 2**n
        k += 1
    k = max(k - 1, 0)
    return statistics.median(v), v[k], v[n - 1 - k]


def commit_id():
    out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return out.stdout.strip()


def machine():
    model = "unknown"
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


class Ours:
    """A run that goes on a few steps at a time: stopped and resumed, as a user would."""

    def __init__(self, folder, checkpointing, overrides=(), env=None):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.overrides, self.env = list(overrides), dict(os.environ, **(env or {}))
        self.step = 0
        text = self.folder / "text.txt"
        text.write_bytes((ROOT / "README.md").read_bytes() * 200)
        self.run_file = self.folder / "run.toml"
        self.run_file.write_text(
            f"""
[run]
output_dir = "out"
[model]
path = "{MODEL}"
init = "random"
dtype = "float32"
tokenizer = "bytes"
[data]
train = ["text.txt"]
[training]
seq_len = {SEQ_LEN}
micro_batch_size = {OURS_MICRO_BATCH}
gradient_accumulation_steps = {TOKENS_PER_STEP // SEQ_LEN // OURS_MICRO_BATCH}
steps = 100000
activation_checkpointing = "{checkpointing}"
[lr_scheduler]
type = "constant"
[memory]
threads = 2
[log]
progress = "none"
"""
        )

    def steps(self, count):
        """Seconds of `count` steps; the first step after a start warms up and is not counted."""
        self.step += count + 1
        done = subprocess.run(
            [MTLAUNCH, self.run_file, f"--run.stop_after_step={self.step}"] + self.overrides,
            capture_output=True, text=True, env=self.env,
        )
        if done.returncode != 4:
            sys.exit(f"mtlaunch ended with {done.returncode}: {done.stderr}")
        lines = [json.loads(l) for l in open(self.folder / "out" / "metrics.jsonl")]
        return [l["step_s"] for l in lines if "event" not in l][-count:]


class Peer:
    """transformers and torch AdamW, fastest of its settings for this model (see docs/measured)."""

    def __init__(self, checkpointing, micro_batch_size):
        command = [
            ROOT / "tools/venv/bin/python", ROOT / "bench/peer_torch.py", MODEL,
            "--seq-len", str(SEQ_LEN), "--tokens-per-step", str(TOKENS_PER_STEP),
            "--micro-batch-size", str(micro_batch_size), "--threads", "2",
        ]  # fmt: skip
        if checkpointing:
            command.append("--gradient-checkpointing")
        env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        while "ready" not in json.loads(self.process.stdout.readline()):
            pass

    def steps(self, count):
        self.process.stdin.write(f"run {count}\n")
        self.process.stdin.flush()
        return [json.loads(self.process.stdout.readline())["step_s"] for _ in range(count)]

    def close(self):
        self.process.communicate("quit\n")


def throughput(name, checkpointing, pairs, micro_batch_size):
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        ours, peer = Ours(folder, "full" if checkpointing else "none"), Peer(checkpointing, micro_batch_size)
        ours.steps(1)
        ratios, speeds, rival = [], [], []
        for pair in range(pairs):
            first, second = (ours, peer) if pair % 2 else (peer, ours)
            times = {first: statistics.median(first.steps(2)), second: statistics.median(second.steps(2))}
            ratios.append(times[peer] / times[ours])
            speeds.append(TOKENS_PER_STEP / times[ours])
            rival.append(TOKENS_PER_STEP / times[peer])
            print(f"  {name}: pair {pair + 1}/{pairs}: ours {speeds[-1]:.0f} tokens/s, "
                  f"torch {rival[-1]:.0f}, ratio {ratios[-1]:.3f}", file=sys.stderr)  # fmt: skip
        peer.close()
    value, low, high = median_interval(ratios)
    yield dict(name=name, value=round(value, 3), low=round(low, 3), high=round(high, 3), target=0.9,
               unit="x tokens/s of transformers + torch AdamW", repeats=pairs)  # fmt: skip
    yield dict(name=name + "_ours", value=round(statistics.median(speeds), 1), target=None, unit="tokens/s", repeats=pairs)
    yield dict(name=name + "_torch", value=round(statistics.median(rival), 1), target=None, unit="tokens/s", repeats=pairs)


def no_checkpointing(args):
    yield from throughput("step_rate_no_checkpointing", False, args.pairs, args.peer_micro_batch_size or 4)


def full_checkpointing(args):
    yield from throughput("step_rate_full_checkpointing", True, args.pairs, args.peer_micro_batch_size or 8)




def anonymous_and_shared(pid):
    """Private anonymous bytes of a process, and bytes of our shared segment that it has touched."""
    anonymous = shared = 0
    for line in open(f"/proc/{pid}/smaps"):
        if line[0] in "0123456789abcdef" and "-" in line.split(" ")[0]:
            ours = "/dev/shm/#" in line
        elif line.startswith("Anonymous:"):
            anonymous += int(line.split()[1]) * 1024
        elif line.startswith("Rss:") and ours:
            shared += int(line.split()[1]) * 1024
    return anonymous, shared


def memory(args):
    """Anonymous memory of all processes plus the segment once, over configured pools and device buffers,
    and how it moves over 200 steps."""
    import time

    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        ours = Ours(folder, "full")
        text = ours.run_file.read_text().replace('steps = 100000', 'steps = 210')
        text = text.replace("gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1")
        text = text.replace(f"seq_len = {SEQ_LEN}", "seq_len = 128")
        ours.run_file.write_text(text)
        run = subprocess.Popen([MTLAUNCH, ours.run_file], stderr=subprocess.DEVNULL)
        samples, metrics, configured = [], ours.folder / "out" / "metrics.jsonl", 0
        while run.poll() is None:
            time.sleep(0.5)
            steps = metrics.read_text().count('{"step"') if metrics.exists() else 0
            if not 5 <= steps <= 205:  # start-up and export have their own shape
                continue
            pids = [run.pid] + [int(p) for p in open(f"/proc/{run.pid}/task/{run.pid}/children").read().split()]
            try:
                anonymous = sum(anonymous_and_shared(p)[0] for p in pids)
                segment = max(os.stat(f"/proc/{p}/fd/{f}").st_size for p in pids[:1]
                              for f in os.listdir(f"/proc/{p}/fd")
                              if "/dev/shm/#" in os.readlink(f"/proc/{p}/fd/{f}"))
            except (OSError, ValueError):
                break
            samples.append((steps, anonymous + segment))
            configured = segment
        if run.wait() != 0 or len(samples) < 4:
            sys.exit("memory: the run did not end well")
        logs = (ours.folder / "out" / "logs" / "gpu_worker.0.log").read_text()
        device = int(logs.rsplit("bytes of buffers", 1)[0].rsplit(";", 1)[1].split()[0])
    used = [b for _, b in samples]
    yield dict(name="memory_over_configured", value=round(max(used) / (configured + device), 3), target=1.1,
               unit="x configured pools and device buffers", repeats=len(samples))  # fmt: skip
    yield dict(name="memory_drift", value=round(max(used) / min(used), 4), target=1.01,
               unit="x, highest over lowest in 200 steps", repeats=len(samples))  # fmt: skip


def safety(args):
    """Everything that guards a run against nothing of it: hashes of lent frames, deadlines, a third slot that is
    read back before reuse. 1024 tokens per step, a quarter of the other measurements': a step in which the
    optimizer, and with it what guards it, weighs four times as much."""
    small = ["--training.micro_batch_size=2", "--training.gradient_accumulation_steps=1"]
    pairs, ratios = max(args.pairs, 30), []
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        on = Ours(folder + "/on", "none", small)
        off = Ours(folder + "/off", "none", small + ["--run.watchdog=false", "--memory.verify_writes=false"],
                   {"MTLAUNCH_FRAME_HASHES": "0"})
        on.steps(1), off.steps(1)
        for pair in range(pairs):
            first, second = (on, off) if pair % 2 else (off, on)
            times = {first: statistics.median(first.steps(3)), second: statistics.median(second.steps(3))}
            ratios.append(times[on] / times[off])
            print(f"  safety: pair {pair + 1}/{pairs}: {times[on]:.3f} s against {times[off]:.3f} s", file=sys.stderr)
    middle, low, high = median_interval(ratios)
    yield dict(name="step_time_with_safety", value=round(middle, 4), low=round(low, 4), high=round(high, 4), target=1.02,
               unit="x step time without", repeats=pairs)  # fmt: skip


MEASUREMENTS = [no_checkpointing, full_checkpointing, memory, safety]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--only", help="one measurement: " + ", ".join(m.__name__ for m in MEASUREMENTS))
    p.add_argument("--pairs", type=int, default=10)
    p.add_argument("--peer-micro-batch-size", type=int, default=0,
                   help="0: its fastest of 1, 4 and 8 here, 4 without and 8 with checkpointing")  # fmt: skip
    args = p.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    target = ROOT / "docs" / "measured"
    target.mkdir(parents=True, exist_ok=True)
    for measure in MEASUREMENTS:
        if args.only and args.only != measure.__name__:
            continue
        lines = []
        for line in measure(args):
            line.update(command=f"bench/measure.py --only {measure.__name__}", commit=commit_id(), machine=machine())
            lines.append(json.dumps(line))
            print(lines[-1], flush=True)
        (target / f"{measure.__name__}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
