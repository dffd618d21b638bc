#!/usr/bin/env python3
"""What a run that goes on keeps, what may change, and what metrics.jsonl says afterwards."""
import os
import shutil
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *  # noqa: E402,F403


def stopped(t, step=3, name="run", **changes):
    """A run of 6 steps, stopped after some."""
    run = tiny_run(t.dir, name, **changes)
    run.change(training={"steps": 6})
    run.ok("--run.stop_after_step=%d" % step, status=STOPPED)
    run.check_steps(step)
    return run


def straight(t, name="straight", steps=6, **changes):
    run = tiny_run(t.dir, name, **changes)
    run.change(training={"steps": steps})
    run.ok()
    run.check_steps(steps)
    return run


def same_run(run, other):
    equal(run.hashes(), other.hashes(), "state hashes of every step")
    equal(run.digest(), other.digest(), "digest")
    for key in ("loss", "grad_norm", "learning_rate", "tokens", "labelled_tokens"):
        equal([line[key] for line in run.step_lines()], [line[key] for line in other.step_lines()], key)


# -- going on --


@test
def moments_position_and_learning_rate_go_on(t):
    """C27"""
    schedule = {"lr_scheduler": {"type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0}}
    run = stopped(t, 4, **schedule)
    run.ok()
    same_run(run, straight(t, **schedule))
    resume = run.events("resume")
    equal(len(resume), 1, "resume events")
    equal((resume[0]["step"], resume[0]["t"], resume[0]["data_position"]), (4, 4, 16), "step, t, data position")
    equal(resume[0]["state_hash"], run.hashes()[4], "state hash told on resuming")


@test
def the_learning_rate_is_the_one_of_the_definition(t):
    run = straight(t, steps=8, optimizer={"learning_rate": 0.01},
                   lr_scheduler={"type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1})
    for line in run.step_lines():
        k = line["step"] - 1
        expected = 0.01 * (k + 1) / 2 if k < 2 else 0.01 * (0.1 + 0.9 * (1 - (k - 2) / 6))
        check(abs(line["learning_rate"] - expected) < 1e-6 * 0.01, "step %d: learning rate %r, expected %r" % (
            line["step"], line["learning_rate"], expected))


@test
def a_finished_run_extended_equals_one_of_that_length(t):
    run = straight(t, "run", steps=4)
    run.change(training={"steps": 7})
    extended = run.ok()
    check("[training] steps: 4 -> 7" in extended.err, extended.err)
    same_run(run, straight(t, steps=7))
    check(os.path.isdir(run.export_dir(7)), "the export of the new end")


@test
def a_finished_run_started_again_does_nothing(t):
    run = straight(t, "run", steps=3)
    before, digest_before = tree(run.export_dir(3)), run.digest()
    stamp = os.stat(run.export_dir(3)).st_mtime_ns
    run.ok()
    equal(run.digest(), digest_before, "digest")
    equal(tree(run.export_dir(3)), before, "export")
    equal(os.stat(run.export_dir(3)).st_mtime_ns, stamp, "time of the export")
    run.check_steps(3)


@test
def a_start_behind_its_stop_step_does_nothing(t):
    run = stopped(t, 3)
    before = run.digest()
    for stop in (3, 2):
        run.ok("--run.stop_after_step=%d" % stop, status=STOPPED)
        equal(run.digest(), before, "digest")
        run.check_steps(3)


@test
def resume_never_refuses_a_commit(t):
    run = stopped(t)
    before = run.digest()
    result = run.ok("--run.resume=never", status=USER)
    check("never" in result.err and run.dir in result.err, result.err)
    equal(run.digest(), before, "digest")
    run.check_steps(3)
    fresh = tiny_run(t.dir, "fresh", run={"resume": "never"}, training={"steps": 2})
    fresh.ok()
    fresh.check_steps(2)


@test
def a_moved_run_file_and_another_working_directory_resume(t):
    run = stopped(t)
    other = os.path.join(t.dir, "elsewhere")
    os.mkdir(other)
    mtlaunch(os.path.relpath(run.file, other), cwd=other, status=DONE)
    same_run(run, straight(t))


# -- length --


@test
def epochs_are_as_many_steps_as_they_hold(t):
    file = write_text(os.path.join(t.dir, "short.txt"), 1200)
    by_epochs = tiny_run(t.dir, "epochs", file=file, training={"steps": None, "epochs": 1.5})
    by_epochs.ok()
    steps = by_epochs.steps()[-1]
    by_epochs.check_steps(steps)
    # 1201 tokens with the end of the document, 32 predicted per sample, 4 samples a step
    samples = 1200 // 32
    equal(steps, -(-3 * samples // (2 * 4)), "steps of 1.5 epochs of %d samples" % samples)
    same_run(by_epochs, straight(t, steps=steps, file=file))


@test
def a_run_may_change_from_steps_to_epochs(t):
    file = write_text(os.path.join(t.dir, "short.txt"), 1200)
    run = tiny_run(t.dir, "run", file=file, training={"steps": 3})
    run.ok()
    run.change(training={"steps": None, "epochs": 1.0})
    result = run.ok()
    check("[training] epochs: " in result.err, result.err)
    same_run(run, straight(t, steps=run.steps()[-1], file=file))


# -- what may change --


@test
def changes_are_told_with_both_values(t):
    run = stopped(t, run={"stop_after_step": 3})
    val = write_text(os.path.join(t.dir, "val.txt"), 3000, seed=2)
    changed = {
        ("run", "stop_after_step"): ("3", "0"),
        ("training", "steps"): ("6", "7"),
        ("training", "max_grad_norm"): ("1.0", "0.5"),
        ("training", "skip_nonfinite"): ("true", "false"),
        ("training", "activation_checkpointing"): ('"full"', '"none"'),
        ("optimizer", "learning_rate"): ("0.003", "0.001"),
        ("optimizer", "weight_decay"): ("0.1", "0.2"),
        ("optimizer", "eps"): (None, "1e-06"),
        ("optimizer", "workers"): ("1", "3"),
        ("lr_scheduler", "type"): ('"constant"', '"cosine"'),
        ("lr_scheduler", "warmup_steps"): ("2", "1"),
        ("lr_scheduler", "min_lr_ratio"): ("0.1", "0.2"),
        ("memory", "threads"): ("1", "2"),
        ("memory", "prefetch"): ('"predict"', "3"),
        ("memory", "io_engine"): ('"auto"', '"sync"'),
        ("memory", "max_ram"): ('"auto"', "2000000000"),
        ("data", "validation"): ("[]", val),
        ("eval", "interval"): ("0", "7"),
        ("eval", "sequences"): ("64", "2"),
        ("checkpoint", "export_interval"): ("0", "5"),
        ("checkpoint", "keep"): ("2", "3"),
        ("checkpoint", "export_dtype"): ('"auto"', '"bfloat16"'),
        ("log", "interval"): ("1", "2"),
        ("log", "max_size"): (None, "1000000"),
    }
    overrides = ["--%s.%s=%s" % (key + (now.strip('"'),)) for key, (_, now) in changed.items()]
    result = run.ok(*overrides)
    told = [line for line in result.err.splitlines() if " -> " in line]
    for (section, name), (old, now) in changed.items():
        lines = [line for line in told if "[%s] %s: " % (section, name) in line]
        check(len(lines) == 1, "[%s] %s: told %d times\n%s" % (section, name, len(lines), result.err))
        check(old is None or ": %s -> " % old in lines[0] or (section, name) == ("data", "validation"), lines[0])
        check(now in lines[0], lines[0])
    equal(len(told), len(changed), "changes told\n" + "\n".join(told))
    run.check_steps(7)
    check(os.path.isdir(run.export_dir(5)), "the export of the new interval")
    equal(len(run.events("eval")), 1, "evaluations")
    told = [line for line in run.ok(*overrides).err.splitlines() if " -> " in line]
    equal(told, [], "nothing changed since, nothing told")


@test
def a_changed_rate_acts_from_the_next_step(t):
    run = stopped(t)
    run.ok("--optimizer.learning_rate=0.001")
    plain = straight(t)
    for step in (1, 2, 3):
        equal(run.hashes()[step], plain.hashes()[step], "state hash of step %d" % step)
    for step in (4, 5, 6):
        check(run.hashes()[step] != plain.hashes()[step], "step %d is the same" % step)
    equal([round(line["learning_rate"], 9) for line in run.step_lines()],
          [0.0015, 0.003, 0.003, 0.001, 0.001, 0.001], "learning rates")


@test
def what_makes_the_bits_may_not_change(t):
    run = stopped(t)
    other_model = write_model(os.path.join(t.dir, "other-model"))
    other_data = write_text(os.path.join(t.dir, "other.txt"), 20000, seed=9)
    other_store = os.path.join(t.dir, "other-store")
    before, files = run.digest(), tree(run.dir)
    refused = {
        "run.seed": ("1234", "1235"),
        "model.path": ("model-", other_model),
        "model.init": ("random", "pretrained"),
        "model.dtype": ("float32", "bfloat16"),
        "data.train": ("train.txt", other_data),
        "data.shuffle": ("true", "false"),
        "data.packing": ("true", "false"),
        "data.val_fraction": ("off", "0.25"),
        "data.format": ("auto", "text"),
        "training.seq_len": ("32", "64"),
        "training.micro_batch_size": ("2", "4"),
        "training.gradient_accumulation_steps": ("2", "3"),
        "training.global_batch_size": ("2", "3"),  # told as accumulation steps
        "memory.page_elements": ("8192", "4096"),
        "memory.verify_writes": ("true", "false"),
        "memory.offload_dir": ("[]", other_store),
    }
    for key, (old, now) in refused.items():
        value = "6" if key == "training.global_batch_size" else now
        if key == "model.init":  # only a folder with weights gets that far
            continue
        result = run.ok("--%s=%s" % (key, value), status=USER)
        name = "gradient_accumulation_steps" if key == "training.global_batch_size" else key.split(".")[1]
        for text in (name, old, now):
            check(text in result.err, "%s: %r is not in the message\n%s" % (key, text, result.err))
        check(" -> " not in result.err, "%s: changes are told of a refused start\n%s" % (key, result.err))
        equal(tree(run.dir), files, "%s: files of the run" % key)
    check(not os.path.exists(other_store), "the other store directory was created")
    equal(run.digest(), before, "digest")
    run.ok()
    same_run(run, straight(t))


@test
def a_lost_config_toml_does_not_hide_a_change(t):
    run = tiny_run(t.dir, training={"steps": 4})
    run.ok("--run.stop_after_step=2", status=STOPPED)
    os.unlink(os.path.join(run.dir, "config.toml"))
    text = "bits are not those the run was started with"
    check(text not in run.ok("--run.stop_after_step=3", status=STOPPED).err, "a warning without a change")
    os.unlink(os.path.join(run.dir, "config.toml"))
    told = run.ok("--training.gradient_accumulation_steps=7", status=USER).err
    check("samples per step" in told, told)
    moved = os.path.join(t.dir, "moved")
    shutil.copytree(run.sections["model"]["path"], moved)
    told = run.ok("--model.path=" + moved).err
    check(text in told, told)


@test
def another_source_of_weights_is_refused(t):
    folder = write_pretrained(os.path.join(t.dir, "hf"), make_weights(llama_config()))
    run = stopped(t, hf=folder, model={"init": "pretrained"})
    before = run.digest()
    result = run.ok("--model.init=random", status=USER)
    check("pretrained" in result.err and "random" in result.err, result.err)
    equal(run.digest(), before, "digest")


@test
def a_changed_config_json_is_refused(t):
    """The folder's path is the same, the model is another one."""
    run = stopped(t)
    folder = run.sections["model"]["path"]
    before = run.digest()
    write_model(folder, num_hidden_layers=4)
    result = run.run()
    equal(result.status, USER, "status\n%s" % result)
    write_model(folder)
    equal(run.digest(), before, "digest")
    run.ok()
    same_run(run, straight(t))


@test
def changed_contents_of_the_data_are_refused(t):
    file = write_text(os.path.join(t.dir, "data.txt"), 20000)
    run = stopped(t, file=file)
    before = run.digest()
    write_text(file, 20000, seed=2)
    result = run.ok(status=USER)
    check("[data] train" in result.err and "contents" in result.err, result.err)
    equal(run.digest(), before, "digest")
    write_text(file, 20000)  # the same contents, another time
    run.ok("--data.validation=" + write_text(os.path.join(t.dir, "val.txt"), 3000, seed=2))
    same_run(run, straight(t, file=file))


@test
def a_moved_run_directory_resumes(t):
    run = stopped(t)
    moved = os.path.join(t.dir, "moved")
    os.rename(run.dir, moved)
    run.change(run={"output_dir": moved})
    run.ok()
    run.dir, run.metrics_path = moved, os.path.join(moved, "metrics.jsonl")
    same_run(run, straight(t))


# -- metrics.jsonl --


@test
def a_torn_tail_is_repaired(t):
    run = stopped(t)
    for tail in ('{"step": 4, "loss": 3.1', '{"event": "commi', "\0\0\0\0garbage", '{"step": 4}', '{"event":'):
        with open(run.metrics_path, "a") as f:
            f.write(tail)
        step = len([1 for line in run.lines(tolerant=True) if "event" not in line])
        run.ok("--run.stop_after_step=%d" % step, status=STOPPED)
        run.check_steps(step)
    run.ok()
    same_run(run, straight(t))


@test
def lines_past_the_commit_are_cut(t):
    run = stopped(t)
    line = json.dumps(dict(run.step_lines()[-1], step=4))
    with open(run.metrics_path, "a") as f:
        f.write(line + "\n" + '{"event": "worker_exit", "worker": "io_worker.0"}\n' + line.replace("4", "5", 1) + "\n")
    run.ok()
    same_run(run, straight(t))
    equal(len(run.events("worker_exit")), 1, "an event between cut lines stays")


@test
def one_line_per_step_when_the_launcher_dies_before_the_commit(t):
    run = tiny_run(t.dir, training={"steps": 6})
    deaths = 0
    while True:
        result = run.run(env={"MTLAUNCH_FAULT": "launcher_before_commit:kill:2"})
        if result.status == DONE:
            break
        equal(result.status, -signal.SIGKILL, "status\n%s" % result)
        lines = [line["step"] for line in run.lines(tolerant=True) if "event" not in line]
        equal(lines, list(range(1, len(lines) + 1)), "step lines")
        deaths += 1
        check(deaths < 10, "no progress")
    equal(deaths, 5, "deaths: each start commits one step and dies before the second commit")
    same_run(run, straight(t))


@test
def one_line_per_step_after_kills_at_random_moments(t):
    run = tiny_run(t.dir, training={"steps": 40})
    kills = []
    for _ in range(6):
        with run.start() as b:
            b.wait_ready()
            time.sleep(t.rng.uniform(0, 0.25))
            victim = t.rng.choice(("launcher",) + ROLES)
            workers = b.children(victim)
            if not b.running() or (victim != "launcher" and not workers):
                break
            os.kill(b.pid if victim == "launcher" else workers[0][0], signal.SIGKILL)
            kills.append(victim)
            if victim != "launcher":
                b.wait_for(lambda: len(run_events(run, "restart")) >= 1, "restart")
                b.signal(signal.SIGKILL)
                kills.append("launcher")
            b.wait()
    t.note("killed: " + " ".join(kills))
    run.ok()
    same_run(run, straight(t, steps=40))
    check(run.events("resume"), "no resume event")


def run_events(run, name):
    return [line for line in run.lines(tolerant=True) if line.get("event") == name]


# -- exports --


@test
def a_missing_final_export_is_made_again(t):
    run = straight(t, "run", steps=3)
    before, digest_before = tree(run.export_dir(3)), run.digest()
    shutil.rmtree(run.export_dir(3))
    run.ok()
    equal(tree(run.export_dir(3)), before, "export")
    equal(run.digest(), digest_before, "digest")
    run.check_steps(3)


def big_run(t, name, **changes):
    """Some hundred pages, so that an export takes a while."""
    return tiny_run(t.dir, name, hf={"intermediate_size": 1024, "num_hidden_layers": 6, "hidden_size": 128},
                    memory={"page_elements": 4096}, **changes)


def export_begun(run, step):
    return os.path.exists(run.export_dir(step) + ".tmp")


def kill_during_export(run, step, *overrides):
    """SIGKILL of the launcher while the export of this step is half done. False: it was too fast."""
    with run.start(*overrides) as b:
        def look():
            return export_begun(run, step) or os.path.exists(run.export_dir(step))
        b.wait_for(look, "export of step %d" % step)
        b.signal(signal.SIGKILL)
        b.wait()
    return not os.path.exists(run.export_dir(step))


@test
def an_export_cut_short_at_the_end_is_made_again(t):
    for attempt in range(5):
        run = big_run(t, "run%d" % attempt, training={"steps": 2})
        if kill_during_export(run, 2):
            break
    else:
        skip("the export was always done before the kill")
    run.ok()
    equal(sorted(os.listdir(os.path.join(run.dir, "export"))), ["step-2"], "exports")
    other = big_run(t, "other", training={"steps": 2})
    other.ok()
    same_run(run, other)
    equal(tree(run.export_dir(2)), tree(other.export_dir(2)), "export")


@test
def an_export_cut_short_in_between_is_made_again(t):
    for attempt in range(5):
        run = big_run(t, "run%d" % attempt, training={"steps": 4}, checkpoint={"export_interval": 2})
        cut = kill_during_export(run, 2, "--run.stop_after_step=2")
        equal(run.digest()[0], 2, "step of digest")
        if cut:
            break
    else:
        skip("the export was always done before the kill")
    run.ok()
    equal(sorted(os.listdir(os.path.join(run.dir, "export"))), ["step-2", "step-4"], "exports")


@test
def exports_in_between_are_kept_in_number_and_change_nothing(t):
    run = straight(t, "run", steps=8, checkpoint={"export_interval": 2, "keep": 3})
    equal(sorted(os.listdir(os.path.join(run.dir, "export"))), ["step-4", "step-6", "step-8"], "exports")
    same_run(run, straight(t, steps=8))
    short = straight(t, "short", steps=6)
    equal(read_weights(run.export_dir(6)), read_weights(short.export_dir(6)),
          "the export of step 6, made while step 7 was computed")


# -- the store --


def flip_in(path, offset, bit):
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ (1 << bit)]))


@test
def a_damaged_newest_commit_falls_back_to_the_one_before(t):
    reference = straight(t)
    run = stopped(t, 4)
    slots = os.path.join(run.dir, "store", "slots")
    for _ in range(200):
        offset, bit = t.rng.randrange(os.path.getsize(slots)), t.rng.randrange(8)
        flip_in(slots, offset, bit)
        if mtlaunch("digest", run.dir).status == FAILED:
            break
        flip_in(slots, offset, bit)
    else:
        raise TestFailure("200 flipped bits, and digest saw none")
    t.note("bit %d at offset %d" % (bit, offset))
    result = run.ok()
    check("damaged" in result.err, result.err)
    equal([e["step"] for e in run.events("resume")], [3], "resumed after step")
    same_run(run, reference)


@test
def a_store_that_grew_never_grows_again(t):
    def size():
        return {name: os.path.getsize(os.path.join(run.dir, "store", name))
                for name in os.listdir(os.path.join(run.dir, "store"))}
    run = stopped(t, 1)
    first = size()
    for step in (2, 3):
        run.ok("--run.stop_after_step=%d" % step, status=STOPPED)
        equal(size(), first, "files of the store after step %d" % step)


main()
