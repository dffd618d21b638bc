"""Builds and calls probe.c, which looks into a live run from outside; see there."""
import atexit
import json
import os
import shutil
import subprocess
import tempfile

from harness import ROOT, check

GONE = 3
_program = []


def program():
    """The path of the probe, compiled once per test program."""
    if not _program:
        directory = tempfile.mkdtemp(prefix="mt-probe-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        path = os.path.join(directory, "probe")
        sources = ["tests/kill/probe.c", "ipc/topology.c"]
        subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-I.", "-o", path] + sources,
                       cwd=ROOT, check=True)
        _program.append(path)
    return _program[0]


def call(pid, *arguments):
    """What the probe printed, or None when the run or the process was gone."""
    command = [program(), str(pid)] + [str(a) for a in arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    if done.returncode == GONE:
        return None
    check(done.returncode == 0, "probe: %s" % done.stderr)
    return json.loads(done.stdout)


def state(pid):
    return call(pid, "state")


def places(pid):
    return call(pid, "places")


def kill(pid, role, number, when, delay_s=0.0, generation=1):
    """Sends a signal to "launcher", "io_worker", "gpu_worker" or "opt_worker.I" at that moment."""
    return call(pid, "kill", role, int(number), generation, when, int(delay_s * 1e6))


def phase(seen):
    """What was going on, in words: the device side and the update side run side by side."""
    parts = []
    if seen["update"] in ("apply", "commit"):
        parts.append("%s %d" % (seen["update"], seen["committed"] + 1))
    elif seen["update"]:
        parts.append("%s %d" % (seen["update"], seen["begun"]))
    if seen["device"]:
        parts.append("%s %d" % (seen["device"], seen["begun"]))
    return " + ".join(parts) or "between"


__all__ = ["GONE", "call", "kill", "phase", "places", "program", "state"]
