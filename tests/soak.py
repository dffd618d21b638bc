#!/usr/bin/env python3
"""`make soak SECONDS=n`: kills processes of live runs at random moments for n seconds.

Each round is tests/kill/test_kill.py with a seed of its own; a round that ends with other bits, or leaves
something behind, stops the soak and prints how to repeat it. What was done is appended as one line to
docs/measured/soak.jsonl: {name, kills, rounds, failures, seconds, first_seed, commit}.
"""

import json
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
KILLS_PER_ROUND = 40


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3600.0
    first, start, rounds, failures = random.randrange(1 << 30), time.monotonic(), 0, 0
    while time.monotonic() - start < seconds and not failures:
        command = [sys.executable, "-u", "tests/kill/test_kill.py", "--only", "random_kills"]
        command += ["--count", str(KILLS_PER_ROUND), "--seed", str(first + rounds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        rounds += 1
        failures += done.returncode != 0
        print(f"round {rounds}: seed {first + rounds - 1}, {'FAILED' if failures else 'ok'}", flush=True)
        if failures:
            print(done.stdout, done.stderr, "again: " + " ".join(command), sep="\n")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    line = {"name": "random_kills", "kills": rounds * KILLS_PER_ROUND, "rounds": rounds, "failures": failures,
            "seconds": round(time.monotonic() - start), "first_seed": first, "commit": commit.stdout.strip()}  # fmt: skip
    ledger = ROOT / "docs" / "measured" / "soak.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.open("a") as f:
        f.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
