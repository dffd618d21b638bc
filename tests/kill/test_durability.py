#!/usr/bin/env python3
"""Durability K: whoever is killed at whatever moment, every step has the bits of an undisturbed run.

A worker's death costs no step that was complete, committed or not; the launcher's costs those since the
newest commit, and they are done again. Committing less often writes no byte more or less for a step.

    tests/kill/test_durability.py --rounds 20 --seed 7      more kills; the same ones again
"""
import os
import shutil
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
import probe

STEPS = 14
KS = (1, 3, 7)
ROLES_KILLED = ("io_worker", "gpu_worker", "opt_worker.1", "launcher")


def take_rounds():
    if "--rounds" not in sys.argv:
        return 1
    i = sys.argv.index("--rounds")
    rounds = int(sys.argv[i + 1])
    del sys.argv[i:i + 2]
    return rounds


ROUNDS = take_rounds()


def durable_run(t, name, k):
    return tiny_run(t.dir, name, training={"steps": STEPS}, optimizer={"workers": 2},
                    memory={"page_elements": 4096, "durability": k})


class Undisturbed:
    result = None

    @classmethod
    def of(cls, t):
        """(state hashes, digest, seconds of a step)."""
        if cls.result is None:
            run = durable_run(t, "undisturbed", 1)
            run.ok()
            cls.result = run.hashes(), run.digest(), min(l["step_s"] for l in run.step_lines())
        return cls.result


def commits(run):
    return [e["step"] for e in run.events("commit")]


def due(k):
    return [s for s in range(1, STEPS + 1) if s % k == 0 or s == STEPS]


@test
def what_a_step_writes_does_not_depend_on_how_often_is_committed(t):
    written = {}
    for k in KS:
        run = durable_run(t, "k%d" % k, k)
        run.ok()
        run.check_steps(STEPS)
        equal(run.hashes(), Undisturbed.of(t)[0], "state hashes with durability %d" % k)
        equal(commits(run), due(k), "commits with durability %d" % k)
        commit = (os.path.getsize(os.path.join(run.dir, "store", "commit")) - 8 * 4096) // 2 + 4096
        # a commit is written after the line of its step
        written[k] = [l["bytes_written"] - commit * (l["step"] - 1 in due(k)) for l in run.step_lines()]
    equal(written[3], written[1], "bytes written per step with durability 3 and 1, commits aside")
    equal(written[7], written[1], "bytes written per step with durability 7 and 1, commits aside")


def check_resumed(run, k):
    """After the launcher's death: from a commit, and none later was announced."""
    resumed = [e["step"] for e in run.events("resume")]
    check(len(resumed) <= 1 and all(s % k == 0 for s in resumed), "resumed after steps %s" % resumed)
    return resumed[0] if resumed else 0


def finish(run, live, role, k, seen):
    if role == "launcher":
        equal(live.wait(), -signal.SIGKILL, "status of the killed launcher")
        run.ok()
        step = check_resumed(run, k)
        check(step >= seen["committed"], "step %d was committed, resumed after %d" % (seen["committed"], step))
        return "resumed after %d" % step
    equal(live.wait(), DONE, "status: %s" % live.output())
    tiers = [e["tier"] for e in run.events("restart")]
    if tiers == ["T2"] and role == "io_worker":  # it may have died in a flush: nobody takes over from there
        check("how that ended is not known" in live.output(), "T2 without a flush: %s" % live.output())
        return "T2, died in a flush; resumed after %d" % check_resumed(run, k)
    equal(tiers, ["T1"], "restarts")
    equal([e["step"] for e in run.events("resume")], [], "a worker's death replays no complete step")
    return "T1"


def one_kill(t, name, k, role):
    """True if the kill came in time."""
    hashes, digest_expected, step_s = Undisturbed.of(t)
    run = durable_run(t, name, k)
    step, delay = t.rng.randint(1, STEPS - 1), t.rng.random() * 2 * step_s
    with run.start() as live:
        seen = probe.kill(live.pid, role, signal.SIGKILL, "step:%d" % step, delay_s=delay)
        if seen is None or seen["committed"] >= STEPS:
            shutil.rmtree(run.dir)
            return False
        how = finish(run, live, role, k, seen)
        t.note("K %d, %-12s step %2d, commit %2d, %s: %s" % (
            k, role, seen["begun"], seen["committed"], probe.phase(seen), how))
    run.check_steps(STEPS)
    equal(run.hashes(), hashes, "state hashes")
    equal(run.digest(), digest_expected, "digest")
    check(set(due(k)) <= set(commits(run)) | {check_resumed(run, k)}, "commits: %s" % commits(run))
    shutil.rmtree(run.dir)
    return True


def kills(t, k):
    Undisturbed.of(t)
    for n in range(ROUNDS):
        for role in ROLES_KILLED:
            check(any(one_kill(t, "%s-%d-%d" % (role, n, i), k, role) for i in range(10)), "no kill came in time")


for _k in KS:
    add_test("kills_with_durability_%d" % _k, lambda t, k=_k: kills(t, k))

main()
