#!/usr/bin/env python3
"""Named fault points: whoever dies there, however, is told by name and cause, a crash loop ends, and the
run ends with the undisturbed bits.

These are points of the commit and of each role; tests/kill/chaos.py goes through all that procs/fault.h has.
"""
import os
import re
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *

STEPS = 6
DEADLY = ("kill", "segv", "abort", "exit0", "check")
CAUSES = {"kill": "killed by signal 9", "segv": "killed by signal 11", "abort": "killed by signal 6",
          "exit0": "exited with status 0", "check": "killed by signal 6"}


POINTS = ("io_before_flush", "io_after_flush", "io_before_record", "io_after_record", "gpu_mid_forward",
          "gpu_mid_backward", "opt_mid_apply", "opt_after_norm", "launcher_before_commit")


def role_of(point):
    return {"io": "io_worker.0", "gpu": "gpu_worker.0", "launcher": "launcher"}.get(point.split("_")[0])


def fault_run(directory, name="run", **changes):
    sections = {"training": {"steps": STEPS}, "optimizer": {"workers": 2},
                "memory": {"page_elements": 4096}, "checkpoint": {"export_interval": STEPS}}
    return tiny_run(directory, name, **merged(sections, changes))


check_undisturbed = Undisturbed(fault_run).check


def check_obituary(run, output, point, action):
    # a successor may not take over a flush whose end is not known; it leaves by itself
    deaths = [e for e in run.events("worker_exit") if "how that ended is not known" not in e["words"]]
    equal(len(deaths), 1, "worker_exit events")
    role = role_of(point)
    name = deaths[0]["worker"]
    check(name == role or (role is None and name.startswith("opt_worker.")), "%s died at %s" % (name, point))
    check(CAUSES[action] in deaths[0]["cause"], "cause: %s" % deaths[0]["cause"])
    check(name in output and CAUSES[action] in output, "no obituary of %s:\n%s" % (name, output))
    if action == "check":
        words = "CHECK(!\"a fault point asked for this\") failed"
        check(words in deaths[0]["words"], "words: %s" % deaths[0]["words"])
        check(words in output, "the obituary has no last words:\n%s" % output)


def dies_once(t, point, action, nth):
    run = fault_run(t.dir, "%s-%s-%d" % (point, action, nth))
    once = os.path.join(t.dir, "once-%s-%s-%d" % (point, action, nth))
    env = {"MTLAUNCH_FAULT": "%s:%s:%d" % (point, action, nth), "MTLAUNCH_FAULT_ONCE": once}
    first = run.run(env=env)
    check(os.path.exists(once), "the point was never reached: %s" % first)
    if role_of(point) == "launcher":
        expected = {"kill": -9, "segv": -11, "abort": -6, "exit0": 0, "check": -6}[action]
        equal(first.status, expected, "status of the launcher: %s" % first)
        run.ok(env=env)
    else:
        equal(first.status, DONE, "status: %s" % first)
        check_obituary(run, first.out + first.err, point, action)
    check_undisturbed(run)
    shutil.rmtree(run.dir)


# points that a worker passes once a step, or once a page and step: arrivals in the middle of a run
NTH = {"gpu_mid_forward": 10, "gpu_mid_backward": 8, "opt_mid_apply": 50}


def add_points():
    for point in POINTS:
        for action in DEADLY:
            add_test("%s_%s" % (point, action),
                     lambda t, p=point, a=action: dies_once(t, p, a, NTH.get(p, 3)))


# -- frozen, not dead: the watchdog waits 10 minutes, the user need not --


def interrupted_while(t, point, action):
    run = fault_run(t.dir, "%s-%s" % (point, action))
    once = os.path.join(t.dir, "once")
    env = {"MTLAUNCH_FAULT": "%s:%s:%d" % (point, action, NTH.get(point, 3)), "MTLAUNCH_FAULT_ONCE": once}
    with run.start(env=env) as live:
        live.wait_for(lambda: os.path.exists(once), "the fault point")
        workers = [pid for pid, _ in live.children()]
        time.sleep(0.3)
        check(live.running(), "the launcher ended by itself: %s" % live.output())
        began = time.monotonic()
        live.signal(signal.SIGINT)
        equal(live.wait(10), STOPPED, "status: %s" % live.output())
        took = time.monotonic() - began
        check(took < 2.0, "SIGINT took %.2f s" % took)
        left = [pid for pid in workers if is_alive(pid)]
        check(not left, "workers left: %s" % left)
    run.ok()
    check_undisturbed(run)
    shutil.rmtree(run.dir)


def add_frozen():
    for action in ("stop", "hang"):
        for point in POINTS:
            if role_of(point) != "launcher":
                add_test("interrupted_%s_%s" % (action, point),
                         lambda t, p=point, a=action: interrupted_while(t, p, a))


# -- limits --


def crash_loop(t, point, action, nth=1):
    """Ends with 1 after bounded deaths, says who, why and what next; a normal start goes on."""
    run = fault_run(t.dir, "%s-%s" % (point, action))
    result = run.run(env={"MTLAUNCH_FAULT": "%s:%s:%d" % (point, action, nth)}, timeout=60)
    equal(result.status, FAILED, "status: %s" % result)
    text = result.out + result.err
    last = text[text.rindex("no progress"):] if "no progress" in text else ""
    role = (role_of(point) or "opt_worker.").rstrip("0")
    for part in (role, CAUSES[action], run.dir, "resume", "start it again"):
        check(part in last, "the last message lacks %r:\n%s" % (part, text[-2000:]))
    if action == "check":
        check("CHECK(" in last, "the last message lacks the last words:\n%s" % last)
    deaths = len(re.findall(r"^warning: %s\S* \(pid" % role, text, re.M))
    check(1 <= deaths <= 10, "%d deaths" % deaths)
    t.note("%s:%s gave up after %d deaths" % (point, action, deaths))
    return run


@test
def a_worker_that_dies_every_time_ends_the_run_with_its_state_intact(t):
    for point, action in (("gpu_mid_forward", "kill"), ("opt_after_norm", "check"), ("io_before_record", "segv"),
                          ("io_before_flush", "exit0")):
        run = crash_loop(t, point, action)
        again = run.ok()
        check("resuming" in again.out + again.err or run.hashes(), "did not resume: %s" % again)
        check_undisturbed(run)
        shutil.rmtree(run.dir)


@test
def a_crash_loop_in_the_middle_keeps_what_was_committed(t):
    run = fault_run(t.dir)
    run.ok("--run.stop_after_step=3", status=STOPPED)
    before = run.digest()
    result = run.run(env={"MTLAUNCH_FAULT": "gpu_mid_backward:abort"}, timeout=60)
    equal(result.status, FAILED, "status: %s" % result)
    equal(run.digest(), before, "digest after the crash loop")
    run.check_steps(3)
    run.ok()
    check_undisturbed(run)


@test
def deaths_with_progress_between_them_end_no_run(t):
    """Every process dies at its second commit: each start gets one step further than the last."""
    run = fault_run(t.dir)
    result = run.ok(env={"MTLAUNCH_FAULT": "io_after_record:kill:3"})
    check(len(run.events("restart")) >= 2, "restarts: %s" % result)
    check_undisturbed(run)


@test
def a_worker_that_dies_before_ready_every_time_ends_the_run(t):
    """A gpu_worker that cannot start: its program is replaced by one that exits at once."""
    copy = os.path.join(t.dir, "bin")
    shutil.copytree(os.path.dirname(os.path.realpath(MTLAUNCH)), copy)
    with open(os.path.join(copy, "gpu_worker"), "w") as f:
        f.write("#!/bin/sh\nexit 9\n")
    run = fault_run(t.dir)
    process = subprocess.run([os.path.join(copy, "mtlaunch"), run.file], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, timeout=60, env=environment())
    equal(process.returncode, FAILED, "status: %s" % process.stdout)
    for part in ("gpu_worker", "exited with status 9", "no progress"):
        check(part in process.stdout, "the message lacks %r:\n%s" % (part, process.stdout))
    run.ok()
    check_undisturbed(run)


@test
def an_unknown_fault_is_refused_by_name(t):
    run = fault_run(t.dir)
    result = run.run(env={"MTLAUNCH_FAULT": "gpu_mid_forwards:kill"}, status=USER)
    for part in ("gpu_mid_forwards", "gpu_mid_forward", "opt_after_norm"):
        check(part in result.err, "the message lacks %r: %s" % (part, result.err))
    check(not os.path.exists(run.dir), "%s was made" % run.dir)


add_points()
add_frozen()
main()
