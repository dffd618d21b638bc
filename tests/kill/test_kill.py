#!/usr/bin/env python3
"""kill -9 of any process, at any moment, changes nothing: the run ends with the bits, and the lines of
metrics.jsonl, of a run that nobody disturbed, and leaves nothing behind.

    tests/kill/test_kill.py --count 200 --seed 7      more kills; the same ones again
"""
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
import probe
from trial import Trial

STEPS = 10
MODEL = {"hidden_size": 96, "num_hidden_layers": 4, "intermediate_size": 256, "head_dim": 24}
COUNT = 20


def take_count():
    global COUNT
    for i, argument in enumerate(sys.argv):
        if argument == "--count":
            COUNT = int(sys.argv[i + 1])
            del sys.argv[i:i + 2]
            return


def kill_run(directory, name, dtype="float32", workers=1, engine="auto", steps=STEPS, **changes):
    sections = {
        "model": {"dtype": dtype},
        "training": {"steps": steps, "seq_len": 64, "gradient_accumulation_steps": 3},
        "optimizer": {"workers": workers},
        "memory": {"page_elements": 4096, "io_engine": engine},
    }
    run = tiny_run(directory, name, hf=MODEL, **merged(sections, changes))
    run.change(model={"dtype": dtype})
    return run


# workers and engine change no bit, so one per dtype serves all
UNDISTURBED = {dtype: Undisturbed(lambda d, t=dtype: kill_run(d, "undisturbed", t)) for dtype in ("float32", "bfloat16")}


def undisturbed(dtype):
    return UNDISTURBED[dtype].learn()


def kill(trial, live, role, when, number=signal.SIGKILL, **how):
    seen = probe.kill(live.pid, role, number, when, **how)
    trial.note_socket()
    return seen


def names_of(run):
    return [e["worker"] for e in run.events("worker_exit")]


def finish(trial, live, role, expected):
    """To the end: by itself after a worker's death, by a new start after the launcher's."""
    if role == "launcher":
        equal(live.wait(), -signal.SIGKILL, "status of the killed launcher")
        wait_until(lambda: not trial.marked(), 2, "the workers of a dead launcher end")
        with trial.start() as again:
            equal(again.wait(), DONE, "status of the next start: %s" % again.output())
    else:
        equal(live.wait(), DONE, "status: %s" % live.output()[-2000:])
        name = role if "." in role else role + ".0"
        check(name in names_of(trial.run), "no worker_exit of %s: %s" % (name, names_of(trial.run)))
        check("%s (pid " % name in live.output() and "signal 9" in live.output(),
              "no obituary of %s:\n%s" % (name, live.output()))
    expected.check(trial.run)
    trial.check_nothing_left()


# -- random kills --

VARIANTS = [(dtype, workers, engine) for engine in ("auto", "sync") for workers in (3, 1)
            for dtype in ("float32", "bfloat16")]


def draw_role(rng, turn, workers):
    role = ("io_worker", "gpu_worker", "opt_worker", "launcher")[turn % 4]
    return "opt_worker.%d" % rng.randrange(workers) if role == "opt_worker" else role


def one_kill(t, rng, number, variant):
    """True if the kill came between READY and the last step."""
    dtype, workers, engine = variant
    expected = undisturbed(dtype)
    role = draw_role(rng, number + number // len(VARIANTS), workers)
    step, delay = rng.randint(1, STEPS - 1), rng.random() * 1.5 * expected.step_s
    trial = Trial(kill_run(t.dir, "run-%d" % number, dtype, workers, engine))
    with trial.start() as live:
        seen = kill(trial, live, role, "step:%d" % step, delay_s=delay)
        if seen is None or seen["committed"] >= STEPS:
            return False
        t.note("kill %2d: %-12s step %2d, %s" % (number, role, seen["begun"], probe.phase(seen)))
        finish(trial, live, role, expected)
    shutil.rmtree(trial.run.dir)
    return True


def random_kills(t, variant, numbers):
    for number in numbers:
        rng = random.Random("%d, kill %d" % (t.seed, number))
        for _ in range(20):
            if one_kill(t, rng, number, variant):
                break
            shutil.rmtree(os.path.join(t.dir, "run-%d" % number))
        else:
            raise TestFailure("no kill came between READY and the last step in 20 attempts")


def add_random_kills():
    for i, variant in enumerate(VARIANTS):
        numbers = range(i, COUNT, len(VARIANTS))
        name = "random_kills_%s_%d_opt_%s" % (
            variant[0], variant[1], "io_uring" if variant[2] == "auto" else "sync")
        if numbers:
            add_test(name, lambda t, v=variant, n=numbers: random_kills(t, v, n))


# -- chosen moments --


@test
def two_workers_killed_within_milliseconds_are_one_death(t):
    expected = undisturbed("float32")
    for first, second in (("gpu_worker", "io_worker"), ("opt_worker.0", "opt_worker.2")):
        trial = Trial(kill_run(t.dir, "run-" + first, workers=3))
        with trial.start() as live:
            check(kill(trial, live, first, "step:4", delay_s=t.rng.random() * expected.step_s), "too late")
            probe.kill(live.pid, second, signal.SIGKILL, "step:4", delay_s=t.rng.random() * 0.02)
            equal(live.wait(), DONE, "status: %s" % live.output())
        check(len(trial.run.events("restart")) >= 1, "no restart")
        expected.check(trial.run)
        trial.check_nothing_left()


@test
def a_kill_during_recovery_is_recovered_from(t):
    expected = undisturbed("bfloat16")
    for role, when in (("io_worker", "activity:RECOVERING"), ("io_worker", "activity:TAKEOVER"),
                       ("gpu_worker", "activity:RECOVERING")):
        trial = Trial(kill_run(t.dir, "run-%s-%s" % (role, when[9:]), "bfloat16", 3))
        with trial.start() as live:
            check(kill(trial, live, "io_worker", "step:5"), "too late")
            seen = kill(trial, live, role, when, generation=2)
            t.note("second kill: %s in generation %s, %s" % (
                role, seen and seen["generation"], seen and seen["activity"]))
            equal(live.wait(), DONE, "status: %s" % live.output())
            # nobody takes over from who died in a flush: that successor leaves by itself
            left = live.output().count("how that ended is not known")
        equal(len(names_of(trial.run)), (2 if seen else 1) + left, "deaths")
        expected.check(trial.run)
        trial.check_nothing_left()


@test
def a_launcher_killed_during_recovery_leaves_a_resumable_run(t):
    expected = undisturbed("float32")
    trial = Trial(kill_run(t.dir, "run", workers=3))
    with trial.start() as live:
        check(kill(trial, live, "io_worker", "step:5"), "too late")
        seen = kill(trial, live, "launcher", "activity:RECOVERING", generation=2)
        check(seen, "the moment did not come")
        finish(trial, live, "launcher", expected)


def big_run(t, name):
    """A model that takes a while to zero-fill, import and export: 2.5 M parameters in small pages."""
    model = {"hidden_size": 192, "num_hidden_layers": 6, "intermediate_size": 512, "head_dim": 48}
    return tiny_run(t.dir, name, hf=model, training={"steps": 2}, memory={"page_elements": 4096},
                    optimizer={"workers": 2})


def import_trial(t, name, role, when, delay, digest_expected):
    trial = Trial(big_run(t, name))
    with trial.start() as live:
        seen = kill(trial, live, role, when, delay_s=delay)
        check(seen, "%s never came" % when)
        t.note("%s killed while %s, ready %d" % (role, seen["activity"], seen["ready"]))
        if role == "launcher":
            live.wait()
            with trial.start() as again:
                equal(again.wait(), DONE, "status: %s" % again.output())
        else:
            equal(live.wait(), DONE, "status: %s" % live.output())
    trial.run.check_steps(2)
    equal(trial.run.digest(), digest_expected, "digest")
    trial.check_nothing_left()
    shutil.rmtree(trial.run.dir)


@test
def a_kill_before_ready_makes_the_import_begin_again(t):
    plain = big_run(t, "plain")
    plain.ok()
    expected = plain.digest()
    for i, (role, when) in enumerate((
            ("io_worker", "activity:ZEROING"), ("io_worker", "activity:IMPORTING"),
            ("launcher", "activity:ZEROING"), ("launcher", "activity:IMPORTING"),
            ("gpu_worker", "activity:IMPORTING"))):
        import_trial(t, "run-%d" % i, role, when, t.rng.random() * 0.005, expected)


@test
def a_kill_during_an_export_leaves_one_whole_export(t):
    expected = undisturbed("float32")
    for role in ("io_worker", "launcher", "gpu_worker"):
        trial = Trial(kill_run(t.dir, "run-" + role, workers=2))
        with trial.start() as live:
            seen = kill(trial, live, role, "export", delay_s=t.rng.random() * 0.002)
            if seen is None:
                t.note("the export was over before %s could be killed" % role)
                equal(live.wait(), DONE, "status")
            else:
                t.note("%s killed during the export after step %d" % (role, seen["committed"]))
                finish(trial, live, role, expected)
        expected.check(trial.run)
        trial.check_nothing_left()


@test
def a_worker_stopped_for_three_seconds_goes_on(t):
    expected = undisturbed("float32")
    trial = Trial(kill_run(t.dir, "run", workers=3))
    with trial.start() as live:
        for i, role in enumerate(("gpu_worker", "opt_worker.1", "io_worker")):
            seen = kill(trial, live, role, "step:%d" % (2 + 2 * i), number=signal.SIGSTOP)
            check(seen, "too late for %s" % role)
            time.sleep(3)
            before = probe.state(live.pid)
            check(before["committed"] <= seen["committed"] + 2, "%s was not stopped" % role)
            check(probe.kill(live.pid, role, signal.SIGCONT, "step:1"), "%s is gone" % role)
        equal(live.wait(), DONE, "status: %s" % live.output())
    equal(names_of(trial.run), [], "deaths")
    expected.check(trial.run)
    trial.check_nothing_left()


def left_in_order(run, worker):
    """A worker says so at the very end, when its transfers are done and its memory is given back."""
    with open(os.path.join(run.dir, "logs", worker + ".log")) as f:
        return "leaving, status %d" % STOPPED in f.read().splitlines()[-1]


@test
def an_interrupt_at_any_moment_ends_all_in_order(t):
    """Four times in one run, each time somewhere else in a step, with transfers in flight."""
    expected = undisturbed("float32")
    trial = Trial(kill_run(t.dir, "run", workers=3))
    for i in range(4):
        with trial.start() as live:
            seen = kill(trial, live, "launcher", "step:%d" % (2 + 2 * i), number=signal.SIGINT,
                              delay_s=t.rng.random() * expected.step_s)
            check(seen, "too late")
            began = time.monotonic()
            equal(live.wait(), STOPPED, "status: %s" % live.output())
            took = time.monotonic() - began
        check(took < 2, "SIGINT took %.2f s" % took)
        t.note("interrupted in step %d, %s: %.2f s" % (seen["begun"], probe.phase(seen), took))
        for worker in ("io_worker.0", "gpu_worker.0", "opt_worker.0", "opt_worker.1", "opt_worker.2"):
            check(took > 0.9 or left_in_order(trial.run, worker), "%s did not leave in order" % worker)
    with trial.start() as live:
        equal(live.wait(), DONE, "status: %s" % live.output())
    expected.check(trial.run)
    trial.check_nothing_left()


take_count()
add_random_kills()
main()
