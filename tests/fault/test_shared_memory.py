#!/usr/bin/env python3
"""/dev/shm that is too small, full, or filled by somebody else at the wrong moment, and what killed runs leave in it.

Each test has a /dev/shm of its own, a small tmpfs in a private mount namespace.
"""
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
from mounts import enter_namespace, fill, mounted

STEPS = 6
SHM = "/dev/shm"


def shm_run(directory, name="run", **changes):
    sections = {"training": {"steps": STEPS}, "memory": {"page_elements": 4096}, "optimizer": {"workers": 2}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(directory, name, **sections)


class Undisturbed:
    known = {}

    @classmethod
    def get(cls, steps):
        if steps not in cls.known:
            directory = tempfile.mkdtemp(prefix="mt-undisturbed-")
            run = shm_run(directory, training={"steps": steps})
            run.ok()
            cls.known[steps] = run.hashes(), run.digest()
            shutil.rmtree(directory)
        return cls.known[steps]


def check_undisturbed(run, steps=STEPS):
    hashes, digest = Undisturbed.get(steps)
    run.check_steps(steps)
    equal(run.hashes(), hashes, "state hashes")
    equal(run.digest(), digest, "digest")


def used():
    space = os.statvfs(SHM)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def said(text, *parts):
    for part in parts:
        check(re.search(part, text), "the message lacks %r:\n%s" % (part, text[-3000:]))


NEED = r"/dev/shm: need (\d+) bytes.* have \d+"


def needed(t):
    """Bytes that a run asks for, as a refusal tells them."""
    run = shm_run(t.dir, "asking")
    with mounted(SHM, 64 << 10):
        result = run.ok(status=FIT)
    said(result.err, NEED)
    return int(re.search(NEED, result.err).group(1))


def check_refused(run, result):
    equal(result.status, FIT, "status: %s" % result)
    said(result.out + result.err, NEED + r"|/dev/shm: allocating \d+ bytes of shared memory: No space")
    check(not os.path.exists(run.dir), "left: %s" % run.dir)


@test
def the_need_that_is_told_is_the_need(t):
    """C14: with one page less a run is refused, with exactly that it runs; C11: no more is taken than said."""
    need = needed(t)
    for size in (4096, need // 2, need - 4096):
        run = shm_run(t.dir, "run-%d" % size)
        with mounted(SHM, size):
            check_refused(run, run.run())
            equal(used(), 0, "bytes left in /dev/shm")
    with mounted(SHM, (need + 4095) // 4096 * 4096):
        run = shm_run(t.dir)
        run.ok()
        equal(used(), 0, "bytes left in /dev/shm")
    check_undisturbed(run)


@test
def a_dev_shm_that_others_have_filled_is_refused(t):
    """C14: what counts is what is free, not how large it is."""
    with mounted(SHM, 64 << 20):
        ballast = fill(SHM, leave=1 << 20)
        before = used()
        run = shm_run(t.dir)
        check_refused(run, run.run())
        equal(used(), before, "bytes in use")
        os.unlink(ballast)
        run.ok()
        check_undisturbed(run)


@test
def commands_in_a_dev_shm_that_is_too_small_are_refused(t):
    """C14"""
    run = shm_run(t.dir)
    run.ok()
    with mounted(SHM, 64 << 10):
        for command in (["digest", run.dir], ["export", run.dir, os.path.join(t.dir, "out")],
                        ["generate", run.dir, "--prompt", "a"]):
            said(mtlaunch(*command, status=FIT).err, NEED)
        equal(used(), 0, "bytes left in /dev/shm")
    check(not os.path.exists(os.path.join(t.dir, "out")), "an export was begun")


@test
def a_dev_shm_that_fills_between_the_look_and_the_allocation_is_refused(t):
    """C14: the kernel says ENOSPC where there seemed to be room."""
    if not shutil.which("strace"):
        skip("strace is not installed")
    run = shm_run(t.dir)
    with mounted(SHM, 64 << 20):
        trace = os.path.join(t.dir, "trace")
        done = subprocess.run(["strace", "-qq", "-o", trace, "-e", "trace=fallocate", "-e",
                               "inject=fallocate:error=ENOSPC:when=1", MTLAUNCH, run.file], cwd=ROOT,
                              env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with open(trace) as f:
            if "INJECTED" not in f.read():
                skip("strace could not inject: %s" % done.stdout[-300:])
        check_refused(run, Result(done.returncode, "", done.stdout, 0))
        equal(used(), 0, "bytes left in /dev/shm")
        run.ok()
    check_undisturbed(run)


class Rival:
    """Fills /dev/shm and frees it again, all the time, in small steps."""

    def __init__(self):
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        path = os.path.join(SHM, "rival")
        while not self.ended.is_set():
            with open(path, "wb", buffering=0) as f:
                with contextlib.suppress(OSError):
                    while not self.ended.is_set():
                        f.write(b"x" * 262144)
            time.sleep(0.01)
            os.unlink(path)
            time.sleep(0.02)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


@test
def a_rival_for_the_last_bytes_never_costs_a_sigbus(t):
    """C14: every start is refused with 3, or runs to its end with the right bits."""
    outcomes, (hashes, _) = [], Undisturbed.get(STEPS)
    with mounted(SHM, needed(t) + (8 << 20)), Rival():
        for i in range(12):
            run = shm_run(t.dir, "run-%d" % i)
            result = run.run()
            outcomes.append(result.status)
            if result.status == DONE:
                run.check_steps(STEPS)
                equal(run.hashes(), hashes, "state hashes")
            else:
                check_refused(run, result)
    t.note("%d of %d starts were refused" % (outcomes.count(FIT), len(outcomes)))


@test
def a_dev_shm_that_is_full_disturbs_no_run_that_has_begun(t):
    """C14: all is allocated at the start; a restart finds the space that the dead generation had."""
    with mounted(SHM, needed(t) + (4 << 20)):
        run = shm_run(t.dir, training={"steps": 40})
        with run.start() as live:
            live.wait_committed(2)
            fill(SHM)
            live.wait_committed(6)
            for role in ("opt_worker", "io_worker", "gpu_worker"):
                committed = max(run.steps()[-1:] + [0])
                os.kill(live.children(role)[0][0], signal.SIGKILL)
                live.wait_committed(min(committed + 3, 40))
            equal(live.wait(60), DONE, "status: %s" % live.output())
        os.unlink(os.path.join(SHM, "ballast"))
        equal(used(), 0, "bytes left in /dev/shm")
    check_undisturbed(run, 40)


@test
def killed_runs_leave_nothing_and_touch_no_neighbour(t):
    """C13: twenty times everything is killed with SIGKILL; /dev/shm stays as it was but for the neighbour's part."""
    with mounted(SHM, 64 << 20):
        neighbour = shm_run(t.dir, "neighbour", training={"steps": 100000})
        with neighbour.start() as other:
            other.wait_committed(1)
            level, names = used(), set(os.listdir(SHM))
            run = shm_run(t.dir, training={"steps": 100000})
            for i in range(20):
                with run.start() as live:
                    if i % 2:  # in training; else at any moment of the start
                        live.wait_committed(max(run.steps()[-1:] + [0]) + 1)
                    time.sleep(t.rng.random() * (0.1 if i % 2 else 0.4))
                    pids = [live.pid] + [pid for pid, _ in live.children()]
                    t.rng.shuffle(pids)
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                wait_until(lambda: used() <= level, 10, "/dev/shm back at %d bytes" % level)
                equal(set(os.listdir(SHM)) - names, set(), "names left in /dev/shm")
            check(other.running(), "the neighbour ended: %s" % other.output())
            other.signal(signal.SIGTERM)
            equal(other.wait(20), STOPPED, "status of the neighbour: %s" % other.output())
        equal(neighbour.events("worker_exit"), [], "deaths in the neighbour")
        equal(used(), 0, "bytes left in /dev/shm")
        last = run.steps()[-1]
        run.ok("--training.steps=%d" % (last + 2))
    run.check_steps(last + 2)
    common = {step: h for step, h in neighbour.hashes().items() if step <= last + 2}
    check(len(common) > 10, "the neighbour came to step %d only" % len(common))
    equal({step: run.hashes()[step] for step in common}, common, "state hashes, against the neighbour's")


enter_namespace()
main()
