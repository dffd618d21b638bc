#!/usr/bin/env python3
"""Which branches of the code that must never be wrong are taken by the C tests and by the simulator.

    make coverage        builds both with gcov, runs them, prints a line per file and appends docs/measured/coverage.jsonl

The two builds compile the same sources with different branches (the simulator has the mutants' switches), so they
are counted apart; the last column is the best of both, line by line. Branches that only a failing CHECK takes are
left out: no input takes them.
"""
import glob
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILES = ["ipc/ring.c", "io_worker/page_tables.c", "io_worker/takeover.c", "io_worker/commit.c", "io_worker/slots.c",
         "io_worker/read_back.c", "io_worker/store_recover.c", "io_worker/store_scan.c", "io_worker/pager.c", "launcher/supervisor.c",
         "launcher/restart.c", "launcher/watchdog.c", "launcher/coordinator.c", "launcher/session.c"]
KINDS = ("unit", "ring", "io")
SCHEDULES = 3000


def run(*command, ok=(0,), **kwargs):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **kwargs)
    if done.returncode not in ok:
        sys.exit("%s: status %d" % (" ".join(command), done.returncode))


def build_and_run():
    tests = [p[:-2].replace("tests/", "build/coverage/tests/", 1) for k in KINDS
             for p in glob.glob(os.path.join("tests", k, "test_*.c"), root_dir=ROOT)]
    for path in glob.glob(os.path.join(ROOT, "build/coverage*/**/*.gcda"), recursive=True):
        os.unlink(path)
    run("make", "-s", "-j%d" % os.cpu_count(), "COVERAGE=1", "build/coverage-sim/bin/sim", *tests)
    for test in tests:
        run(test, ok=(0, 1))
    run("build/coverage-sim/bin/sim", "--schedules", str(SCHEDULES))
    run("build/coverage-sim/bin/sim", "--sweep")


def branches(data_file, source):
    """{line: (taken, all)} of one source file in one build."""
    if not os.path.exists(os.path.join(ROOT, data_file)):
        return {}
    done = subprocess.run(["gcov", "--branch-probabilities", "--json-format", "--stdout", data_file], cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    with open(os.path.join(ROOT, source)) as f:
        text = f.read().split("\n")
    found = {}
    for entry in json.loads(done.stdout)["files"]:
        if not entry["file"].endswith(source):
            continue
        for line in entry["lines"]:
            if line["branches"] and "CHECK(" not in text[line["line_number"] - 1]:
                found[line["line_number"]] = (sum(b["count"] > 0 for b in line["branches"]), len(line["branches"]))
    return found


def percent(table):
    taken, total = sum(t for t, _ in table.values()), sum(n for _, n in table.values())
    return round(100.0 * taken / total, 1) if total else None


def main():
    build_and_run()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE,
                            text=True).stdout.strip()
    out = {"name": "branch_coverage", "commit": commit, "schedules": SCHEDULES, "files": {}}
    print("%-28s %9s %9s %9s" % ("branches taken, %", "C tests", "simulator", "best"))
    for source in FILES:
        tests = branches("build/coverage/%s.gcda" % (source + ".o")[:-2], source) or \
            branches("build/coverage/%s.gcda" % source, source)
        sim = branches("build/coverage-sim/product/%s.gcda" % source[:-2], source)
        best = {n: max((tests.get(n), sim.get(n)), key=lambda x: -1.0 if x is None else x[0] / x[1])
                for n in set(tests) | set(sim)}
        row = [percent(t) for t in (tests, sim, best)]
        out["files"][source] = dict(zip(("tests", "simulator", "best"), row))
        print("%-28s %9s %9s %9s" % (source, *["-" if r is None else "%.1f" % r for r in row]))
    with open(os.path.join(ROOT, "docs/measured/coverage.jsonl"), "a") as f:
        f.write(json.dumps(out) + "\n")


main()
