#!/usr/bin/env python3
"""A sample of chaos.py: every fault point once, with a process and an action that the seed chooses, and some random
moments, double faults and storms of kills. `make chaos N=10000` does what there is.

    tests/kill/test_chaos.py --seed 7        the same sample again
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
import chaos

JOBS = len(os.sched_getaffinity(0)) + 1  # a frozen worker needs no core while the watchdog waits


def all_end_undisturbed(t, cases):
    def tell(outcome):
        if outcome.why:
            t.note("FAILED %s: %s\nfiles: %s" % (chaos.title(outcome.case), outcome.why, outcome.directory))

    outcomes = chaos.carry_out_all(cases, JOBS, tell)
    line = chaos.summary(outcomes, t.seed, 0)
    t.note("%d cases; kills %s; restarts %s; death seen after ms %s, the next step ran after ms %s" % (
        len(cases), dict(line["kills"]), dict(line["tiers"]), line["death_seen_ms"], line["death_to_running_ms"]))
    failed = [chaos.title(o.case) for o in outcomes if o.why]
    check(not failed, "%d of %d cases: %s" % (len(failed), len(cases), "; ".join(failed)))


@test
def whoever_dies_or_freezes_at_any_fault_point_changes_nothing(t):
    all_end_undisturbed(t, chaos.sample(t.seed))


@test
def deaths_at_random_moments_change_nothing(t):
    all_end_undisturbed(t, [chaos.make_case(t.seed, n, ["moment"]) for n in range(8)])


@test
def a_second_death_while_the_first_is_dealt_with_changes_nothing(t):
    all_end_undisturbed(t, [chaos.make_case(t.seed, n, ["double"]) for n in range(8)])


@test
def twenty_kills_of_opt_workers_apply_each_update_once(t):
    all_end_undisturbed(t, [chaos.make_case(t.seed, n, ["storm"]) for n in range(2)])


@test
def gradients_that_change_while_they_are_applied_are_not_trained_on(t):
    """gpu_worker goes mad at the beginning of step 2, when the update of step 1 has just begun, and dies later."""
    cases = [chaos.case_of(t.rng, n, "point", "gpu_microbatch_taken", "gpu_worker.0", "scribble")._replace(nth=3, seed=n)
             for n in range(6)]
    all_end_undisturbed(t, cases)


@test
def a_changed_bit_and_a_file_left_behind_are_noticed(t):
    """chaos.py can fail."""
    case = chaos.case_of(t.rng, 0, "point", "opt_mid_apply", "opt_worker.1", "kill")
    attempt = chaos.Attempt(case, t.dir)
    attempt.trial.env["MTLAUNCH_FLIP_GRADIENT"] = "4"
    attempt.carry_out()
    for damage, words in ((lambda: None, "step 4"),
                          (lambda: attempt.expected.__dict__.update(lines=attempt.expected.facts(attempt.run)), "digest")):
        damage()
        try:
            attempt.check_end()
        except TestFailure as e:
            check(words in str(e), "noticed something else: %s" % e)
        else:
            raise TestFailure("a flipped bit was not noticed in %s" % words)
    with open(os.path.join(attempt.run.dir, "logs", "x.tmp"), "w"):
        pass
    try:
        attempt.trial.check_files(attempt.expected)
    except TestFailure as e:
        check("x.tmp" in str(e), "noticed something else: %s" % e)
    else:
        raise TestFailure("a temporary file was not noticed")


@test
def its_models_have_experts_of_several_pages_and_experts_without_tokens(t):
    """Without weight decay a weight that no token went to stays as it was, over all six steps."""
    weights = {}
    case = chaos.case_of(t.rng, 0, "moment")._replace(dtype="float32", data="bytes")
    for model in ("mixtral", "qwen3moe"):
        for rate in (0.0, 3e-3):
            directory = os.path.join(t.dir, "%s-%g" % (model, rate))
            os.makedirs(directory)
            run = chaos.run_of(directory, case._replace(model=model), training={"steps": chaos.STEPS},
                               optimizer={"learning_rate": rate, "weight_decay": 0.0})
            run.ok()
            weights[rate] = {n: x for n, x in read_weights(run.export_dir(chaos.STEPS)).items() if ".experts." in n}
        elements = sum(x[1][0] * x[1][1] for n, x in weights[0.0].items() if ".experts.0." in n) // (model == "mixtral" and 2 or 1)
        check(elements > 4096, "%s: an expert of %d elements" % (model, elements))
        still = {n.split(".experts.")[1].split(".")[0] for n in weights[0.0] if weights[0.0][n][2] == weights[3e-3][n][2]}
        t.note("%s: experts without a token: %s" % (model, sorted(still)))
        check(bool(still) == (model == "qwen3moe"), "%s: experts without a token: %s" % (model, still))


main()
