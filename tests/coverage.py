#!/usr/bin/env python3
"""Which branches of the code that must never be wrong are taken: by the C tests, the simulator, whole runs.

    make coverage                                        builds with gcov, runs all three, prints a line per file and
                                                         appends docs/measured/coverage.jsonl
    tests/coverage.py --run sim tests                    only these, builds and runs them again; nothing is appended
    tests/coverage.py --missing launcher/session.c ...   the branches that none of them has taken, from the last run

`sim` is the simulator (random schedules and the sweep) without the mutants' switches, `tests` the C tests, `runs` some
of the Python tests with real processes. A process that is killed writes no counts, so whole runs count what was done by
those that ended by themselves. The last column is their union, branch by branch where the compiler made as many in each
build, otherwise the best of them, line by line. Branches that only a failing CHECK takes are left out: no input takes
them.
"""
import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILES = ["ipc/ring.c", "io_worker/page_tables.c", "io_worker/takeover.c", "io_worker/commit.c", "io_worker/slots.c",
         "io_worker/read_back.c", "io_worker/store_recover.c", "io_worker/store_scan.c", "io_worker/pager.c", "launcher/supervisor.c",
         "launcher/restart.c", "launcher/watchdog.c", "launcher/coordinator.c", "launcher/session.c"]
KINDS = ("unit", "ring", "io")
SCHEDULES = 20000  # 256 share a configuration
# ends of runs, restarts, full disks, lost workers: by processes that are not all killed
PROGRAMS = ["fault/test_points.py", "fault/test_lifecycle.py", "fault/test_integrity.py", "fault/test_disk.py", "fault/test_shared_memory.py",
            "kill/test_endings.py", "step/test_resume.py", "step/test_scrub.py"]
COUNTS = os.path.join(ROOT, "build/coverage-counts")


def run(*command, ok=(0,), **kwargs):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **kwargs)
    if done.returncode not in ok:
        sys.exit("%s: status %d" % (" ".join(command), done.returncode))


def build(*targets):
    run("make", "-s", "-j%d" % os.cpu_count(), "COVERAGE=1", *targets)


def keep(name, folder, sources):
    """Moves what was counted below build/`folder` to COUNTS/`name`, where the next way's runs do not add to it."""
    out = os.path.join(COUNTS, name)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    table = {}
    for source in FILES:
        for data in (sources % source, sources % source[:-2]):
            data = os.path.join(folder, data)
            if os.path.exists(os.path.join(ROOT, data)):
                table[source] = branches(data, source)
    with open(os.path.join(out, "branches.json"), "w") as f:
        json.dump(table, f)


def forget(folder):
    for path in glob.glob(os.path.join(ROOT, folder, "**/*.gcda"), recursive=True):
        os.unlink(path)


def count_sim():
    build("build/coverage-sim/bin/sim")
    forget("build/coverage-sim")
    run("build/coverage-sim/bin/sim", "--schedules", str(SCHEDULES))
    run("build/coverage-sim/bin/sim", "--sweep")
    keep("sim", "build/coverage-sim", "product/%s.gcda")


def count_tests():
    tests = [p[:-2].replace("tests/", "build/coverage/tests/", 1) for k in KINDS
             for p in glob.glob(os.path.join("tests", k, "test_*.c"), root_dir=ROOT)]
    build(*tests)
    forget("build/coverage")
    for test in tests:
        run(test, ok=(0, 1))
    keep("tests", "build/coverage", "%s.gcda")


def count_runs():
    build("build/coverage/bin/mtlaunch", "workers")
    forget("build/coverage")
    env = dict(os.environ, MTLAUNCH=os.path.join(ROOT, "build/coverage/bin/mtlaunch"))
    for program in PROGRAMS:
        started = time.monotonic()
        done = subprocess.run([sys.executable, os.path.join("tests", program)], cwd=ROOT, env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        print("  %s: %.0f s" % (program, time.monotonic() - started), file=sys.stderr)
        if done.returncode:
            print("%s: status %d\n%s" % (program, done.returncode, done.stdout[-2000:]), file=sys.stderr)
    keep("runs", "build/coverage", "%s.gcda")


WAYS = {"tests": count_tests, "sim": count_sim, "runs": count_runs}


def branches(data_file, source):
    """{line: [is it taken] of each branch} of one source file in one build."""
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
                found[str(line["line_number"])] = [b["count"] > 0 for b in line["branches"]]
    return found


def counts(source):
    """Of each way that was run: its table, or {}."""
    out = {}
    for way in WAYS:
        path = os.path.join(COUNTS, way, "branches.json")
        if os.path.exists(path):
            with open(path) as f:
                out[way] = json.load(f).get(source, {})
    return out


def union(tables):
    out = {}
    for line in sorted({n for t in tables for n in t}, key=int):
        of = [t[line] for t in tables if line in t]
        if len({len(x) for x in of}) == 1:
            out[line] = [any(x) for x in zip(*of)]
        else:
            out[line] = max(of, key=lambda x: sum(x) / len(x))
    return out


def percent(table):
    taken, total = sum(sum(t) for t in table.values()), sum(len(t) for t in table.values())
    return round(100.0 * taken / total, 1) if total else None


def show_missing(source):
    by_way = counts(source)
    table = union(list(by_way.values()))
    with open(os.path.join(ROOT, source)) as f:
        text = f.read().split("\n")
    print("%s: %s %% of the branches taken; + taken, - not, in the order of the code" % (source, percent(table)))
    for line, taken in table.items():
        if not all(taken):
            print("%5s %-10s %s" % (line, "".join("+" if t else "-" for t in taken), text[int(line) - 1].strip()))


def show_all(append):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE,
                            text=True).stdout.strip()
    out = {"name": "branch_coverage", "commit": commit, "schedules": SCHEDULES, "files": {}}
    print("%-28s %9s %9s %9s %9s" % ("branches taken, %", "C tests", "simulator", "runs", "all"))
    for source in FILES:
        by_way = counts(source)
        row = [percent(by_way.get(way, {})) for way in ("tests", "sim", "runs")] + [percent(union(list(by_way.values())))]
        out["files"][source] = dict(zip(("tests", "simulator", "runs", "all"), row))
        print("%-28s %9s %9s %9s %9s" % (source, *["-" if r is None else "%.1f" % r for r in row]))
    if append:
        with open(os.path.join(ROOT, "docs/measured/coverage.jsonl"), "a") as f:
            f.write(json.dumps(out) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--missing", nargs="+", metavar="FILE", help="list the branches that were not taken in the last run")
    parser.add_argument("--run", nargs="+", choices=sorted(WAYS), help="run only these and append nothing")
    arguments = parser.parse_args()
    for source in arguments.missing or ():
        if source not in FILES:
            sys.exit("%s is not among the files looked at: %s" % (source, ", ".join(FILES)))
        show_missing(source)
    if arguments.missing:
        return
    for way in arguments.run or WAYS:
        WAYS[way]()
    show_all(append=not arguments.run)


main()
