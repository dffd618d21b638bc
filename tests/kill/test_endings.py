#!/usr/bin/env python3
"""What a run leaves when it ends in ways that nobody planned: nothing, and within two seconds.

Shared memory is counted on a /dev/shm of this program's own, where it may mount one.
"""
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
import probe
from trial import Trial

NAMESPACE = "TEST_ENDINGS_NAMESPACE"
LEAVING_S = 2


def enter_namespace():
    """Starts this program again with a /dev/shm of its own, if the system lets it."""
    if NAMESPACE in os.environ:
        return
    for options in (["-m"], ["-r", "-m"]):
        command = ["unshare"] + options + ["--propagation", "private", "sh", "-c",
                                           'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        if subprocess.run(command + ["true"], stderr=subprocess.DEVNULL).returncode == 0:
            os.environ[NAMESPACE] = "1"
            os.execvp("unshare", command + [sys.executable, "-u"] + sys.argv)
    os.environ[NAMESPACE] = ""


def shm_blocks():
    """Blocks in use; what is unlinked but mapped or open counts."""
    fs = os.statvfs("/dev/shm")
    return fs.f_blocks - fs.f_bfree


def life_run(directory, name="run", steps=6, **changes):
    sections = {"training": {"steps": steps}, "optimizer": {"workers": 2}, "memory": {"page_elements": 4096}}
    return tiny_run(directory, name, **merged(sections, changes))


UNDISTURBED = Undisturbed(life_run)
UNDISTURBED_LONG = Undisturbed(lambda d: life_run(d, steps=100))


def kill_all(live, rng):
    """kill -9 of launcher and workers, in any order."""
    pids = [live.pid] + [pid for pid, _ in live.children()]
    rng.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@test
def twenty_killed_runs_leave_no_shared_memory_and_no_mark_on_a_neighbour(t):
    if not os.environ[NAMESPACE]:
        skip("this user may not mount a /dev/shm, not even in a namespace of its own (unshare -r -m)")
    expected = UNDISTURBED.learn()
    equal(shm_blocks(), 0, "blocks in use before")
    neighbour = Trial(life_run(t.dir, "neighbour", steps=100000))
    with neighbour.start() as beside:
        beside.wait_committed(3)
        alone = shm_blocks()
        check(alone > 0, "the neighbour uses no shared memory")
        before = beside.children()
        trial = Trial(life_run(t.dir))
        for _ in range(20):
            with trial.start() as live:
                time.sleep(t.rng.random() * 0.4)
                trial.note_socket()
                kill_all(live, t.rng)
            trial.check_all_gone(LEAVING_S)
            wait_until(lambda: shm_blocks() == alone, 5, "blocks in use as before: %d, found %d" % (alone, shm_blocks()))
        equal(beside.children(), before, "workers of the neighbour")
        equal(mtlaunch("stop", neighbour.run.dir).status, DONE, "status of stop")
        equal(beside.wait(), STOPPED, "status of the neighbour: %s" % beside.output()[-2000:])
    equal([n for n in os.listdir("/dev/shm")], [], "names in /dev/shm")
    equal(shm_blocks(), 0, "blocks in use after")
    equal(neighbour.run.events("worker_exit"), [], "deaths in the neighbour")
    steps = len(neighbour.run.step_lines())
    again = life_run(t.dir, "again", steps=100000)
    again.ok("--run.stop_after_step=%d" % steps, status=STOPPED)
    equal(neighbour.run.hashes(), again.hashes(), "state hashes of the neighbour")
    t.note("neighbour: %d steps, %d blocks of shared memory" % (steps, alone))
    trial.run.ok()
    expected.check(trial.run)
    trial.check_nothing_left()


def leave(t, trial, number, twice, delay):
    """Sends a signal, or two; everybody is gone in time."""
    with trial.start() as live:
        time.sleep(delay)
        if not live.running():
            return False
        trial.note_socket()
        began = time.monotonic()
        live.signal(number)
        if twice:
            time.sleep(t.rng.random() * 0.1)
            if live.running():
                live.signal(number)
        status = live.wait(10)
        trial.check_all_gone(max(0.0, began + LEAVING_S - time.monotonic()))
        took = time.monotonic() - began
        text = live.output()
    check(took < LEAVING_S, "%s: all were gone after %.2f s" % (number.name, took))
    if number == signal.SIGKILL:
        equal(status, -signal.SIGKILL, "status")
    elif delay < 0.02:  # before it had blocked the signal; nothing was started then
        check(status in (STOPPED, -number), "status %s: %s" % (status, text))
    else:
        check(status in (STOPPED, DONE), "status %s: %s" % (status, text))
    return True


@test
def every_signal_ends_everybody_within_two_seconds(t):
    """At start-up, in the middle, and once more while it leaves."""
    expected = UNDISTURBED_LONG.learn()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        trial = Trial(life_run(t.dir, number.name, steps=100))
        for i in range(6):
            # from the first instruction to a moment deep in the steps
            leave(t, trial, number, i % 2 == 1, (0.005, 0.02, 0.08, 0.2, 0.3, 0.5)[i] * (0.5 + t.rng.random()))
        trial.run.ok()
        expected.check(trial.run)
        trial.check_nothing_left()
        trial.check_files(expected)


def frozen(pid):
    return process_state(pid)[0] == "T"


def tell_to_leave(live, workers):
    """In the place of a launcher that is frozen."""
    check(probe.call(live.pid, "stopping"), "the run is over")
    wait_until(lambda: not any(is_alive(pid) for pid in workers), LEAVING_S, "the workers leave by themselves")


@test
def workers_leave_though_the_launcher_reads_no_message(t):
    """A launcher that is frozen takes no message from its socket; no worker's way out waits for it."""
    expected = UNDISTURBED_LONG.learn()
    trial = Trial(life_run(t.dir, steps=100))
    with trial.start() as live:
        live.wait_committed(2)
        trial.note_socket()
        workers = [pid for pid, _ in live.children()]
        live.signal(signal.SIGSTOP)
        wait_until(lambda: frozen(live.pid), 5, "the launcher is frozen")
        time.sleep(0.2)
        tell_to_leave(live, workers)
        live.signal(signal.SIGCONT)
        equal(live.wait(60), DONE, "status: %s" % live.output()[-2000:])
    expected.check(trial.run)
    trial.check_nothing_left()


@test
def a_worker_leaves_though_no_message_of_it_was_ever_delivered(t):
    """The launcher is frozen before the worker connects: what it sends stays in its own queue."""
    once = os.path.join(t.dir, "once")
    trial = Trial(life_run(t.dir), {"MTLAUNCH_FAULT": "worker_attached@gpu_worker.0:stop", "MTLAUNCH_FAULT_ONCE": once})
    with trial.start() as live:
        live.wait_for(lambda: os.path.exists(once) and os.path.getsize(once), "the worker is frozen")
        trial.note_socket()
        worker, = [pid for pid, _ in live.children()]
        live.signal(signal.SIGSTOP)
        wait_until(lambda: frozen(live.pid) and frozen(worker), 5, "both are frozen")
        os.kill(worker, signal.SIGCONT)
        log = os.path.join(trial.run.dir, "logs", "gpu_worker.0.log")
        wait_until(lambda: os.path.exists(log) and "ready" in open(log).read(), 10, "READY was said")
        tell_to_leave(live, [worker])
        live.signal(signal.SIGCONT)
        equal(live.wait(60), DONE, "status: %s" % live.output()[-2000:])
    UNDISTURBED.check(trial.run)
    trial.check_nothing_left()


@test
def the_launcher_leaves_though_a_worker_reads_no_message(t):
    """A frozen worker takes no message; the launcher's way out does not wait for it."""
    expected = UNDISTURBED_LONG.learn()
    for role in ("io_worker", "gpu_worker", "opt_worker"):
        trial = Trial(life_run(t.dir, role, steps=100))
        with trial.start() as live:
            live.wait_committed(2)
            trial.note_socket()
            os.kill(live.children(role)[0][0], signal.SIGSTOP)
            time.sleep(0.3)  # messages pile up
            began = time.monotonic()
            live.signal(signal.SIGTERM)
            equal(live.wait(10), STOPPED, "status: %s" % live.output()[-2000:])
            trial.check_all_gone(max(0.0, began + LEAVING_S - time.monotonic()))
        trial.run.ok()
        expected.check(trial.run)
        trial.check_nothing_left()


enter_namespace()
main()
