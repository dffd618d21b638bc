#!/usr/bin/env python3
"""Disks that answer late, and one that never does: the fence, and what ends a wait.

A killed process's I/O goes on. Its successor may touch neither the store nor memory that such I/O still
reads or fills, before the last of it has landed.
"""
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
from fuse_disk import fuse_disk
from helpers import program
from mounts import enter_namespace

STEPS = 6
LATE_S = 1.5


def settings(**changes):
    sections = {"training": {"steps": STEPS}, "memory": {"page_elements": 4096}, "optimizer": {"workers": 2}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return sections


undisturbed = Undisturbed(lambda directory: tiny_run(directory, **settings()))


def run_on(t, disk, name="run", **changes):
    sections = settings(**changes)
    sections["memory"]["offload_dir"] = [os.path.join(disk.mount, "store-" + name)]
    return tiny_run(t.dir, name, **sections)


# -- the fence --


def fence(t, lock):
    with fuse_disk(os.path.join(t.dir, "disk-" + lock)) as disk:
        path = os.path.join(disk.mount, "blocks")
        with open(path, "wb") as f:
            f.write(bytes(16 * 65536))
        late = {"file": "blocks", "act": "delay", "seconds": LATE_S, "count": 8}
        disk.rules(dict(late, op="write"), dict(late, op="read"))
        done = subprocess.run([program("fence"), path, lock], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        equal(len(disk.hits()), 16, "late requests")
        return json.loads(done.stdout)


@test
def the_lock_outlives_a_killed_process_until_its_last_read_and_write(t):
    """DESIGN 6: flock on the very descriptor that the I/O goes through; on another one it is no fence."""
    found = fence(t, "own")
    check(found["locked_after_s"] > LATE_S / 2, "locked before the I/O was done: %s" % found)
    equal((found["changed_blocks_after_lock"], found["changed_bytes_after_lock"]), (0, 0), "landed after the lock")
    weak = fence(t, "other")
    check(weak["changed_blocks_after_lock"] > 0 and weak["changed_bytes_after_lock"] > 0,
          "the control: nothing landed late, so this test proves nothing here: %s" % weak)
    t.note("own: %s; other: %s" % (found, weak))


def kill(disk, pid):
    """SIGKILL; from then on the disk is fast again, for whoever comes next. What the dead had asked for stays late."""
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.02)
    disk.rules()
    disk.mark("killed")


def check_fenced(t, events):
    """The dead's last late transfer landed before anybody else's first one of the slots."""
    names = {e[3]: e[2] for e in events if e[0] == "create"}
    killed = events.index(("mark", "killed"))
    late = [i for i, e in enumerate(events) if e == ("mark", "landed late")]
    check(late and late[-1] > killed, "nothing landed after the kill")
    first = next(i for i, e in enumerate(events) if i > killed and e[0] in ("read", "write") and
                 names.get(e[1]) == "slots" and events[i + 1:i + 2] != [("mark", "landed late")])
    check(late[-1] < first, "a late transfer landed after the successor's first one (%d of %d)" % (
        len([i for i in late if i > first]), len(late)))
    t.note("%d transfers landed after the kill, the last %d events before the successor's first one" % (
        len([i for i in late if i > killed]), first - late[-1]))


def killed_with_late_io(t, op, engine):
    """io_worker dies with requests in flight that the disk answers much later."""
    with fuse_disk(os.path.join(t.dir, "disk-" + engine)) as disk:
        run = run_on(t, disk, memory={"io_engine": engine})
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules({"op": op, "file": "/slots", "skip": t.rng.randint(130, 150) if op == "read" else t.rng.randint(0, 80),
                    "count": -1, "act": "delay", "seconds": LATE_S})
        with run.start() as live:
            disk.wait_hit()
            time.sleep(0.2)  # more of them
            kill(disk, live.children("io_worker")[0][0])
            equal(live.wait(60), DONE, "status: %s" % live.output())
            if engine == "io_uring":
                check("waiting for the last I/O of a killed process" in live.output(),
                      "the fence is not told: %s" % live.output())
        check_fenced(t, disk.log())
        undisturbed.check_state(run)


for _op in ("write", "read"):
    for _engine in ("io_uring", "sync"):
        add_test("late_%s_of_a_killed_io_worker_on_%s_are_waited_for" % (_op + "s", _engine),
                 lambda t, o=_op, e=_engine: killed_with_late_io(t, o, e))


@test
def the_next_launcher_waits_for_the_last_io_of_a_killed_run(t):
    """Everything is killed; the start that follows is another launcher."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules({"op": "write", "file": "/slots", "skip": 20, "count": -1, "act": "delay", "seconds": LATE_S})
        with run.start() as live:
            disk.wait_hit()
            kill(disk, live.pid)
            live.wait()
        result = run.ok()
        check("waiting for the last I/O of a killed process" in result.err, "the fence is not told: %s" % result)
        check_fenced(t, disk.log())
        undisturbed.check_state(run)


@test
def a_slow_disk_changes_no_bit(t):
    """Every transfer takes 5 to 20 ms, in an order of its own."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, training={"steps": STEPS})
        disk.rules(*[{"op": op, "file": "/slots", "skip": i, "count": 300, "act": "delay",
                      "seconds": t.rng.uniform(0.002, 0.02)} for op in ("read", "write") for i in range(4)],
                   {"op": "fsync", "file": "/slots", "count": -1, "act": "delay", "seconds": 0.05})
        run.ok()
        check(len(disk.hits()) > 500, "only %d slow requests" % len(disk.hits()))
        equal(run.events("worker_exit"), [], "deaths")
        undisturbed.check_state(run)


# -- requests that are never answered --


def never_answered(t, op, skip_requests):
    """C05: ends or restarts by the watchdog, which names the request; the next start is whole."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules({"op": op, "file": "/slots", "skip": skip_requests, "act": "hang"})
        with run.start(env={"MTLAUNCH_SILENCE_S": "1"}) as live:
            hit = disk.wait_hit()[0]
            what = "fdatasync of" if op == "fsync" else "%s of %d bytes at offset %d of" % (
                op, hit["bytes"], hit["offset"])
            live.wait_for(lambda: what in live.output(), "the request named: %s" % what, 60)
            disk.release()
            status = live.wait(90)
            check(status in (DONE, FAILED), "status %s: %s" % (status, live.output()))
        if status != DONE:
            run.ok()
        undisturbed.check_state(run)


for _op, _skip in (("write", 30), ("read", 120), ("fsync", 2)):
    add_test("a_%s_that_never_completes_is_named_and_ends_the_wait" % _op,
             lambda t, o=_op, s=_skip: never_answered(t, o, s))


@test
def a_worker_that_cannot_be_killed_ends_the_run_and_gets_no_successor(t):
    """It sleeps in the kernel, in a system call that the disk never answers: T4, never a second writer."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, memory={"io_engine": "sync"})
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules({"op": "write", "file": "/slots", "skip": 10, "act": "hang"})
        with run.start(env={"MTLAUNCH_SILENCE_S": "1"}) as live:
            disk.wait_hit()
            pid = live.children("io_worker")[0][0]
            os.kill(pid, signal.SIGKILL)
            status = live.wait(60)
            check(status == FAILED, "status %s: %s" % (status, live.output()))
            check("cannot be killed" in live.output() and str(pid) in live.output(), live.output())
        disk.release()
        run.ok()
        undisturbed.check_state(run)


@test
def a_run_whose_disk_never_answers_can_be_interrupted(t):
    """SIGTERM ends the launcher within seconds though a request is in flight for ever; the next start is whole."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, memory={"io_engine": "io_uring"})
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules({"op": "write", "file": "/slots", "skip": 30, "act": "hang"})
        with run.start() as live:
            disk.wait_hit()
            live.signal(signal.SIGTERM)
            equal(live.wait(20), STOPPED, "status: %s" % live.output())
        disk.release()
        run.ok()
        undisturbed.check_state(run)


enter_namespace()
main()
