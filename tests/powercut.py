#!/usr/bin/env python3
"""`make powercut`: the power fails at every moment of many runs, each moment in many ways.

Each round is tests/fault/test_power_cut.py with a seed of its own and REPEATS random images per event
instead of one or two, and RESUMES of them run to their end. A violation stops the rounds and prints how to
repeat it. What was done is appended as one line to docs/measured/powercut.jsonl: {name, events, writes,
flushes, images, resumed, violations, rounds, seconds, first_seed, commit}.
"""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROUNDS, REPEATS, RESUMES = 3, 5, 20
COUNTS = ("events", "writes", "flushes", "images", "resumed", "violations")


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    first, start, counts, failed = random.randrange(1 << 30), time.monotonic(), dict.fromkeys(COUNTS, 0), False
    env = dict(os.environ, POWER_CUT_REPEATS=str(REPEATS), POWER_CUT_RESUMES=str(RESUMES))
    done_rounds = 0
    while done_rounds < rounds and not failed:
        command = [sys.executable, "-u", "tests/fault/test_power_cut.py", "--seed", str(first + done_rounds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
        for number, what in re.findall(r"(\d+) (\w+)", "\n".join(re.findall(r"^# counted: .*$", done.stdout, re.M))):
            counts[what] += int(number)
        done_rounds += 1
        failed = done.returncode != 0 or "\nskip" in done.stdout
        print(f"round {done_rounds}: seed {first + done_rounds - 1}, {'FAILED' if failed else 'ok'}, {counts}", flush=True)
        if failed:
            print(done.stdout, done.stderr, "again: " + " ".join(command), sep="\n")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    line = {"name": "power_cut", **counts, "rounds": done_rounds, "seconds": round(time.monotonic() - start),
            "first_seed": first, "commit": commit.stdout.strip()}  # fmt: skip
    ledger = ROOT / "docs" / "measured" / "powercut.jsonl"
    with ledger.open("a") as f:
        f.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
