#!/usr/bin/env python3
"""Runs the whole suite, or parts of it, and says what passed.

    tests/run_tests.py                 everything, in the order below: what fails most often first
    tests/run_tests.py unit step       some parts
    tests/run_tests.py --verbose ...   every test's line, not only failures

A test program is a C program of tests/<kind>/test_*.c or a Python file tests/<kind>/test_*.py. It
runs alone in the repository root and prints one line per test: `ok NAME`, `not ok NAME: why` or
`skip NAME: why` (C programs: TAP, which cmocka writes). It ends with a status other than 0 if
anything failed. A program that dies, hangs, reports fewer tests than it announced or none at all is
a failure too. Each one gets MTLAUNCH, the launcher to test, and a TMPDIR of its own, which is
removed unless something failed.

The last line is `N passed, M failed`, with `, K skipped` behind it if any were.
"""
import concurrent.futures
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CORES = len(os.sched_getaffinity(0))
SECONDS_MAX = {"c": 300, "py": 1500, "make": 1500}
KINDS_C = ("unit", "ring", "io", "numeric")
SANITIZERS = {
    "release": {},
    "address-undefined": {
        "SANITIZE": "address,undefined",
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    "thread": {"SANITIZE": "thread", "TSAN_OPTIONS": "suppressions=tests/tsan.txt die_after_fork=0"},
}

LINE = re.compile(r"^(ok|not ok|skip)\b(?:\s+\d+)?(?:\s+-)?\s*(.*)$")
PLAN = re.compile(r"^1\.\.(\d+)\s*$")


class Outcome:
    """What one program, or several, reported."""

    def __init__(self):
        self.passed, self.failed, self.skipped = 0, [], []
        self.planned = None

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def read_line(self, line):
        """True if the line reports a failed test."""
        plan = PLAN.match(line)
        if plan:
            self.planned = (self.planned or 0) + int(plan.group(1))
        match = LINE.match(line)
        if not match:
            return False
        verdict, name = match.groups()
        if verdict == "skip" or "# SKIP" in name:
            self.skipped.append(name.replace("# SKIP", "").strip())
        elif verdict == "ok":
            self.passed += 1
        else:
            self.failed.append(name)
            return True
        return False

    def count(self):
        return self.passed + len(self.failed) + len(self.skipped)

    def text(self):
        return "%d passed, %d failed%s" % (
            self.passed, len(self.failed),
            ", %d skipped" % len(self.skipped) if self.skipped else "")


class Runner:
    def __init__(self, verbose):
        self.verbose = verbose
        self.running = set()

    def start(self, command, env):
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        self.running.add(process)
        return process

    def stop(self, process):
        """Ends the program and everything it started: the group is its own."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def stop_all(self):
        for process in list(self.running):
            self.stop(process)

    def output_of(self, command, env, seconds_max, on_line=lambda line: None):
        """Runs to the end or the limit. Returns the output and what was wrong with the ending."""
        process = self.start(command, env)
        timed_out = []

        def give_up(*_):
            timed_out.append(True)
            self.stop(process)

        timer = threading.Timer(seconds_max, give_up)
        timer.start()
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                on_line(line.rstrip("\n"))
            status = process.wait()
        finally:
            timer.cancel()
            self.stop(process)  # nothing it left behind outlives it
            self.running.discard(process)
        if timed_out:
            return lines, "not finished after %d s" % seconds_max
        if status < 0:
            return lines, "died of %s" % signal.Signals(-status).name
        return lines, "exit status %d" % status if status else None

    def program(self, name, command, env, seconds_max):
        """One test program. Prints its summary line, and all it said if something failed."""
        outcome = Outcome()
        started = time.monotonic()
        tmp = tempfile.mkdtemp(prefix="mt-")  # short: sockets may live below it
        os.chmod(tmp, 0o755)  # some tests become another user

        def on_line(line):
            if outcome.read_line(line) or (self.verbose and LINE.match(line)):
                print("    %s" % line, flush=True)

        lines, ending = self.output_of(command, dict(env, TMPDIR=tmp), seconds_max, on_line)
        if ending and (not outcome.failed or not ending.startswith("exit")):
            outcome.failed.append("%s: %s" % (name, ending))
        elif not outcome.count():
            outcome.failed.append("%s: reported no test" % name)
        elif outcome.planned is not None and outcome.count() < outcome.planned:
            outcome.failed.append("%s: %d of %d tests reported" % (
                name, outcome.count(), outcome.planned))
        report = "  %-44s %s, %.1f s" % (name, outcome.text(), time.monotonic() - started)
        if outcome.failed:
            report += "\n" + "".join("  | " + line for line in lines[-400:])
            report += "  TMPDIR is kept: %s" % tmp
        else:
            shutil.rmtree(tmp, ignore_errors=True)
        print(report, flush=True)
        return outcome

    def make(self, name, arguments, env=None):
        """A make target as one test."""
        outcome = Outcome()
        started = time.monotonic()
        command = ["make", "--no-print-directory"] + arguments
        lines, ending = self.output_of(command, dict(os.environ, **(env or {})),
                                       SECONDS_MAX["make"])
        if ending:
            outcome.failed.append("%s: make %s: %s" % (name, " ".join(arguments), ending))
            print("".join("  | " + line for line in lines[-400:]), end="")
        else:
            outcome.passed = 1
        print("  %-44s %s, %.1f s" % (name, "failed" if ending else "passed",
                                      time.monotonic() - started), flush=True)
        return outcome


def program_env(build):
    return dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP", PYTHONDONTWRITEBYTECODE="1",
                MTLAUNCH=os.path.join(ROOT, "build", build, "bin", "mtlaunch"), **SANITIZERS[build])


def c_programs(runner, build, kinds):
    """Builds and runs the C programs of some kinds, as many at a time as there are cores."""
    sources = [s for k in kinds for s in sorted(glob.glob("tests/%s/test_*.c" % k, root_dir=ROOT))]
    names = [source[len("tests/"):-len(".c")] for source in sources]
    binaries = ["build/%s/tests/%s" % (build, name) for name in names]
    outcome = Outcome()
    if not binaries:
        return outcome
    sanitize = SANITIZERS[build].get("SANITIZE", "")
    built = runner.make("build %s" % build, ["-k", "-j%d" % CORES, "SANITIZE=" + sanitize] + binaries)
    outcome.failed += built.failed
    env = program_env(build)
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        jobs = [pool.submit(runner.program, name, [binary], env, SECONDS_MAX["c"])
                for name, binary in zip(names, binaries)
                if os.access(os.path.join(ROOT, binary), os.X_OK)]
        for job in jobs:
            outcome.add(job.result())
    return outcome


def python_program(runner, build, path, *arguments):
    name = " ".join((path[len("tests/"):-len(".py")],) + arguments)
    return runner.program(name, [sys.executable, "-u", path] + list(arguments),
                          program_env(build), SECONDS_MAX["py"])


def python_programs(runner, kind):
    outcome = Outcome()
    for path in sorted(glob.glob("tests/%s/test_*.py" % kind, root_dir=ROOT)):
        outcome.add(python_program(runner, "release", path))
    return outcome


def one_run_and_one_kill(runner, build):
    outcome = python_program(runner, build, "tests/step/test_equality.py", "--only=a_second_run")
    outcome.add(python_program(runner, build, "tests/kill/test_kill.py", "--count", "1",
                               "--only=random_kills"))
    return outcome


def part_build(runner):
    return runner.make("build", ["-k", "-j%d" % CORES, "all", "benches"])


def part_unit(runner):
    return c_programs(runner, "release", KINDS_C)


def part_check(runner):
    return one_run_and_one_kill(runner, "release")


def part_format(runner):
    return runner.make("clang-format", ["format-check"])


def part_cppcheck(runner):
    return runner.make("cppcheck", ["cppcheck"])


def part_sanitize(runner):
    """The C programs and a whole run under ASan and UBSan."""
    outcome = c_programs(runner, "address-undefined", KINDS_C)
    built = runner.make("build the pipeline", ["-j%d" % CORES, "SANITIZE=address,undefined", "all"])
    outcome.add(built)
    if not built.failed:
        outcome.add(one_run_and_one_kill(runner, "address-undefined"))
    return outcome


def part_tsan(runner):
    return c_programs(runner, "thread", ("ring",))


def part_fuzz(runner):
    """The fuzz targets: the committed inputs and some seconds of new ones each."""
    return runner.program("fuzz", [sys.executable, "-u", "tests/fuzz/fuzz.py", "--corpus-only"], dict(os.environ),
                          SECONDS_MAX["py"])


def part_step(runner):
    return python_programs(runner, "step")


def part_fault(runner):
    return python_programs(runner, "fault")


def part_kill(runner):
    return python_programs(runner, "kill")


def part_sim(runner):
    """The control code over simulated edges: random schedules, every I/O x every fault, mutants."""
    outcome = runner.make("build the simulator", ["-j%d" % CORES, "build/sim/bin/sim"])
    if not outcome.failed:
        for arguments in (["--schedules", "50000"], ["--sweep"], ["--mutants"]):
            outcome.add(runner.program("sim " + arguments[0][2:], ["build/sim/bin/sim"] + arguments,
                                       dict(os.environ), SECONDS_MAX["py"]))
    return outcome


def part_tidy(runner):
    return runner.make("clang-tidy", ["-k", "-j%d" % CORES, "tidy"])


PARTS = {
    "build": part_build,
    "unit": part_unit,
    "format": part_format,
    "cppcheck": part_cppcheck,
    "sim": part_sim,
    "step": part_step,
    "sanitize": part_sanitize,
    "tsan": part_tsan,
    "fuzz": part_fuzz,
    "fault": part_fault,
    "kill": part_kill,
    "tidy": part_tidy,
}
PARTS_ON_REQUEST = {"check": part_check}  # a piece of step and kill; see `make check`


def run(runner, names):
    total, minutes = Outcome(), []
    for name in names:
        print("== %s" % name, flush=True)
        started = time.monotonic()
        outcome = (PARTS.get(name) or PARTS_ON_REQUEST[name])(runner)
        total.add(outcome)
        minutes.append((name, (time.monotonic() - started) / 60, outcome))
        if name == "build" and outcome.failed:
            print("the rest was not run: there is nothing to test without a build")
            break
    print("== summary")
    for name, spent, outcome in minutes:
        print("  %-12s %6.2f min  %s" % (name, spent, outcome.text()))
    for failure in total.failed:
        print("  not ok %s" % failure)
    for skip in total.skipped:
        print("  skip %s" % skip)
    print(total.text(), flush=True)
    return 0 if total.passed and not total.failed else 1


def main():
    names = [a for a in sys.argv[1:] if not a.startswith("-")]
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    known = list(PARTS) + list(PARTS_ON_REQUEST)
    unknown = [n for n in names if n not in known] + [o for o in options if o != "--verbose"]
    if unknown:
        print("%s\nparts: %s\nunknown: %s" % (__doc__, " ".join(known), " ".join(unknown)))
        return 2
    runner = Runner("--verbose" in options)
    try:
        return run(runner, names or list(PARTS))
    except KeyboardInterrupt:
        runner.stop_all()
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
