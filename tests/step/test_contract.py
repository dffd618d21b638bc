#!/usr/bin/env python3
"""What others' scripts rely on: exit statuses, signals, process names, files, metrics, and that nothing is
left behind."""
import os
import signal
import stat
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *  # noqa: E402,F403

LONG = 100000  # steps: never done


def long_run(t, name="run", **changes):
    changes.setdefault("training", {}).setdefault("steps", LONG)
    return tiny_run(t.dir, name, **changes)


def check_resumes(run, least=0):
    """The run goes on for two steps and its hashes are whole."""
    step = run.digest()[0]
    check(step >= least, "newest commit %d, at least %d was expected" % (step, least))
    run.ok("--run.stop_after_step=%d" % (step + 2), status=STOPPED)
    run.check_steps(step + 2)
    equal(run.digest()[1], run.hashes()[step + 2], "state hash")


def gone(pids, within, what):
    wait_until(lambda: not any(is_alive(p) for p in pids), within, what)


# -- commands and exit statuses --


@test
def help_and_version(t):
    for word in ("help", "--help", "-h"):
        result = mtlaunch(word, status=DONE)
        for command in ("run", "validate", "export", "generate", "eval", "digest", "stop", "clean", "--version"):
            check(command in result.out, "%s: `%s` is not in the help\n%s" % (word, command, result.out))
        equal(result.err, "", "stderr of " + word)
    result = mtlaunch("--version", status=DONE)
    check(re.fullmatch(r"mtlaunch \d+\.\d+\.\d+\n", result.out), "--version printed %r" % result.out)
    check("export" in (mtlaunch(status=USER).out), "no command: the help")


@test
def status_0_when_done(t):
    run = tiny_run(t.dir, training={"steps": 2})
    equal(mtlaunch("run", run.file).status, DONE, "status of `run FILE`")
    equal(run.run().status, DONE, "status of a finished run")
    check("valid: " in mtlaunch("validate", run.file, status=DONE).out, "validate says so")


@test
def status_1_when_the_state_is_damaged(t):
    run = tiny_run(t.dir, training={"steps": 2})
    run.ok()
    with open(os.path.join(run.dir, "store", "superblock"), "r+b") as f:
        f.write(b"\0" * 8192)
    result = run.digest(status=FAILED)
    check("superblock" in result.err, result.err)
    check("superblock" in run.ok("--training.steps=3", status=FAILED).err, "the run names the file too")


@test
def status_1_when_a_step_may_not_be_skipped(t):
    tensors = make_weights(llama_config())
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        name = "model.layers.0.%s.weight" % name
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, pack("F32", [1e30 * x for x in floats((dtype, shape, data))]))
    folder = write_pretrained(os.path.join(t.dir, "hf"), tensors)
    run = tiny_run(t.dir, hf=folder, model={"init": "pretrained"}, training={"steps": 2, "skip_nonfinite": False})
    result = run.ok(status=FAILED)
    check("skip_nonfinite" in result.err and "step 1" in result.err, result.err)
    equal(run.digest()[0], 0, "newest commit")


@test
def status_2_for_what_the_user_supplied(t):
    run = tiny_run(t.dir, training={"steps": 2})
    model, data = run.sections["model"]["path"], run.sections["data"]["train"][0]
    cases = {
        "unknown command": ["frobnicate"],
        "unknown option": [run.file, "--training.stepz=3"],
        "value out of range": [run.file, "--training.steps=0"],
        "not a number": [run.file, "--training.steps=many"],
        "no such run file": [os.path.join(t.dir, "none.toml")],
        "no such model": [run.file, "--model.path=" + os.path.join(t.dir, "nowhere")],
        "no such data": [run.file, "--data.train=" + os.path.join(t.dir, "none.txt")],
        "no weights": [run.file, "--model.init=pretrained"],
        "text without a tokenizer": [run.file, "--model.tokenizer="],
        "stray argument": [run.file, "stray"],
        "unknown option of a command": ["digest", run.dir, "--fast"],
        "no argument": ["digest"],
        "two directories": ["digest", run.dir, run.dir],
        "not a run": ["digest", t.dir],
        "missing": ["export", os.path.join(t.dir, "nowhere"), os.path.join(t.dir, "out")],
        "export to nowhere": ["export", run.dir],
        "generate without prompt": ["generate", model],
        "eval without data": ["eval", model],
        "stop of no live run": ["stop", t.dir],
    }
    for name, arguments in cases.items():
        result = mtlaunch(*arguments)
        check(result.status == USER, "%s: expected status %d, found %s" % (name, USER, result))
        check(result.err.strip(), name + ": no message")
        check(not os.path.exists(run.dir), name + ": the output directory was made")
    broken = os.path.join(t.dir, "broken.toml")
    with open(broken, "w") as f:
        f.write("[run]\noutput_dir = \n")
    result = mtlaunch(broken, status=USER)
    check("broken.toml:2" in result.err, "file and line\n" + result.err)
    check(os.path.exists(data), "the data is still there")


@test
def status_2_for_data_and_models_that_do_not_fit_together(t):
    bad_text = os.path.join(t.dir, "latin1.txt")
    with open(bad_text, "wb") as f:
        f.write(b"caf\xe9 " * 200)
    empty = os.path.join(t.dir, "empty.txt")
    open(empty, "w").close()
    bad_tokens = write_nanogpt_shard(os.path.join(t.dir, "big.bin"), [5] * 500 + [60000] + [5] * 500)
    bad_jsonl = os.path.join(t.dir, "bad.jsonl")
    with open(bad_jsonl, "w") as f:
        f.write('{"text": "fine"}\n{"text": \n')
    cases = {
        "not UTF-8": ({"file": bad_text}, "latin1.txt"),
        "empty": ({"file": empty}, "empty.txt"),
        "token out of vocabulary": ({"file": bad_tokens}, "60000"),
        "broken JSON": ({"file": bad_jsonl}, "bad.jsonl"),
        "too small a vocabulary": ({"hf": {"vocab_size": 200}}, "vocab_size"),
        "another architecture": ({"hf": {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}}, "BloomForCausalLM"),
        "too long": ({"training": {"seq_len": 4096}}, "max_position_embeddings"),
    }
    for i, (name, (changes, text)) in enumerate(cases.items()):
        run = tiny_run(t.dir, "run%d" % i, **changes)
        for result in (run.ok(status=USER), mtlaunch("validate", run.file, status=USER)):
            check(text in result.err, "%s: %r is not in the message\n%s" % (name, text, result.err))
        check(not os.path.exists(run.dir), name + ": the output directory was left behind")
    equal(sorted(os.listdir(t.dir)), sorted(
        os.path.basename(p) for p in [bad_text, empty, bad_tokens, bad_jsonl] +
        [os.path.join(t.dir, n) for n in os.listdir(t.dir) if n.startswith(("model-", "train.txt", "run"))]),
        "files beside the runs")


@test
def status_3_when_it_does_not_fit(t):
    run = tiny_run(t.dir, memory={"max_ram": "1MB"})
    result = run.ok(status=FIT)
    check("max_ram" in result.err, result.err)
    check(not os.path.exists(run.dir), "the output directory was left behind")
    equal(mtlaunch("validate", run.file).status, FIT, "status of validate")


@test
def status_4_at_the_step_asked_for(t):
    run = tiny_run(t.dir)
    result = run.ok("--run.stop_after_step=3", status=STOPPED)
    check("resume" in result.err, "how to go on\n" + result.err)
    equal(run.digest()[0], 3, "newest commit")
    check(not os.path.exists(os.path.join(run.dir, "export")), "no export of a run that is not done")


@test
def status_5_when_the_run_is_in_use(t):
    run = long_run(t)
    with run.start() as b:
        b.wait_committed(1)
        workers = b.children()
        for arguments in ([run.file], ["run", run.file, "--training.steps=7"], ["digest", run.dir],
                          ["export", run.dir, os.path.join(t.dir, "out")], ["eval", run.dir, "--data", run.file],
                          ["generate", run.dir, "--prompt", "a"], ["clean", run.dir]):
            result = mtlaunch(*arguments)
            check(result.status == BUSY, "%s: expected status %d, found %s" % (arguments, BUSY, result))
        equal(b.children(), workers, "the workers of the first launcher")
        check(not os.path.exists(os.path.join(t.dir, "out")), "an export was begun")
        step = max(line["step"] for line in run.lines(tolerant=True))
        b.wait_committed(step + 2)
        b.signal(signal.SIGTERM)
        equal(b.wait(), STOPPED, "status of the first launcher")
    check_resumes(run, step)


@test
def status_5_when_the_store_is_in_use_by_another_run(t):
    disk = os.path.join(t.dir, "disk")
    os.mkdir(disk)
    run, other = (long_run(t, name, memory={"offload_dir": [disk]}) for name in ("run", "other"))
    with run.start() as b:
        b.wait_committed(2)
        result = other.ok(status=BUSY)
        check(result.seconds < 10 and disk in result.err, "another's store is named at once\n%s" % result)
        check("process %d" % b.pid in result.err and run.dir in result.err, "who holds it is named\n%s" % result)
        check(not os.path.exists(other.dir), "its output directory was left behind")
        check(b.running(), "the first run has ended")
        b.signal(signal.SIGTERM)
        equal(b.wait(), STOPPED, "status")
    check_resumes(run, 2)
    result = other.ok(status=USER)
    check(disk in result.err, "a store of another run is named\n" + result.err)


# -- signals --


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ended_by(number):
    def run_it(t):
        run = long_run(t, optimizer={"workers": 3})
        with run.start() as b:
            b.wait_committed(2)
            workers = [pid for pid, _ in b.children()]
            equal(len(workers), 5, "workers")
            began = time.monotonic()
            b.signal(number)
            equal(b.wait(10), STOPPED, "status")
            seconds = time.monotonic() - began
            check(seconds < 2, "ended after %.2f s, expected 2" % seconds)
            check(not any(is_alive(p) for p in workers), "workers outlive the launcher")
        check_resumes(run, 2)
    return run_it


for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
    add_test(_name + "_ends_it_within_two_seconds", ended_by(getattr(signal, _name)))


@test
def a_second_interrupt_changes_nothing(t):
    run = long_run(t)
    with run.start() as b:
        b.wait_committed(2)
        b.signal(signal.SIGINT)
        for _ in range(20):
            if b.running():
                b.signal(signal.SIGINT)
        equal(b.wait(10), STOPPED, "status")
    check_resumes(run, 2)


@test
def a_hangup_that_was_ignored_at_start_stays_ignored(t):
    run = long_run(t)
    with run.start(preexec=ignore_hangup) as b:
        b.wait_committed(1)
        b.signal(signal.SIGHUP)
        step = max(line["step"] for line in run.lines(tolerant=True))
        b.wait_committed(step + 5)
        check(b.running(), "it has ended")
        b.signal(signal.SIGTERM)
        equal(b.wait(10), STOPPED, "status")


@test
def a_signal_before_the_workers_are_ready_ends_it_too(t):
    for delay in (0.0, 0.02, 0.05, 0.1):
        run = long_run(t, "run%g" % delay)
        with run.start() as b:
            b.wait_for(b.children, "a worker")
            time.sleep(delay)
            b.signal(signal.SIGTERM)
            began = time.monotonic()
            equal(b.wait(10), STOPPED, "status")
            check(time.monotonic() - began < 2, "took longer than 2 s")
        run.ok("--run.stop_after_step=2", status=STOPPED)
        check(run.steps()[-1] >= 2, "it does not go on")


@test
def stop_finishes_the_step_and_commits_it(t):
    run = long_run(t)
    with run.start() as b:
        b.wait_committed(2)
        result = mtlaunch("stop", run.dir, status=DONE)
        match = re.fullmatch(r"stopping after step (\d+)\n", result.out)
        check(match, "stop printed %r" % result.out)
        equal(b.wait(10), STOPPED, "status")
    step = int(match.group(1))
    run.check_steps(step)
    equal(run.digest()[0], step, "newest commit")
    result = mtlaunch("stop", run.dir, status=USER)
    check("no run is alive" in result.err, result.err)
    check_resumes(run, step)


# -- processes --


@test
def workers_are_direct_children_by_their_names(t):
    run = long_run(t, optimizer={"workers": 4})
    with run.start() as b:
        b.wait_committed(1)
        equal(sorted(name for _, name in b.children()), ["gpu_worker", "io_worker"] + 4 * ["opt_worker"], "children")
        for pid, _ in b.children():
            equal(children(pid), [], "children of a worker")
        b.signal(signal.SIGTERM)
        b.wait(10)


@test
def a_killed_launcher_takes_everything_with_it(t):
    run = long_run(t)
    shm = shm_names()
    with run.start() as b:
        b.wait_committed(3)
        workers = [pid for pid, _ in b.children()]
        sockets = sockets_of(b)
        check(sockets, "the launcher's socket directory")
        b.signal(signal.SIGKILL)
        b.wait(10)
        gone(workers, 2, "workers are gone")
    equal(shm_names() - shm, set(), "names in /dev/shm")
    check_resumes(run, 3)
    equal(sockets & socket_dirs(), set(), "socket directories of the killed launcher, after the next start")


@test
def any_start_sweeps_the_sockets_of_killed_launchers(t):
    """Only where nobody listens, and only what is older than any start takes."""
    killed = long_run(t)
    with killed.start() as b:
        b.wait_committed(1)
        sockets = sockets_of(b)
        b.signal(signal.SIGKILL)
        b.wait(10)
    with tiny_run(t.dir, "alive", training={"steps": 100000}).start() as alive:
        alive.wait_committed(1)
        listening = sockets_of(alive)
        check(sockets and listening, "both have a socket directory")
        tiny_run(t.dir, "early").ok()
        check(sockets <= socket_dirs(), "a young directory is left alone")
        for directory in sockets | listening:
            os.utime(os.path.join("/tmp", directory), (time.time() - 3600,) * 2)
        tiny_run(t.dir, "late").ok()
        equal(sockets & socket_dirs(), set(), "socket directories of the killed launcher")
        check(listening <= socket_dirs(), "the directory of a live launcher stays")
        alive.signal(signal.SIGINT)
        equal(alive.wait(10), STOPPED, "status of the live run")


@test
def a_frozen_worker_ends_with_the_launcher(t):
    """It can look at nothing and answer nothing; the kernel must end it, or the launcher."""
    run = long_run(t)
    for number, role in ((signal.SIGKILL, "gpu_worker"), (signal.SIGKILL, "io_worker"), (signal.SIGTERM, "opt_worker")):
        with run.start() as b:
            b.wait_ready()
            workers = [pid for pid, _ in b.children()]
            os.kill(b.children(role)[0][0], signal.SIGSTOP)
            began = time.monotonic()
            b.signal(number)
            status = b.wait(10)
            equal(status, STOPPED if number == signal.SIGTERM else -number, "status with a frozen " + role)
            gone(workers, 2, "workers are gone, with a frozen " + role)
            check(time.monotonic() - began < 2, "with a frozen %s: ended after %.2f s, expected 2" % (
                role, time.monotonic() - began))
    check_resumes(run)


def sockets_of(b):
    """The /tmp/mtlaunch-* directories in which this launcher listens."""
    with open("/proc/net/unix") as f:
        inodes = {line.split()[6]: line.split()[7] for line in f if "/tmp/mtlaunch-" in line}
    held = set()
    for fd in os.listdir("/proc/%d/fd" % b.pid):
        with contextlib.suppress(OSError):
            target = os.readlink("/proc/%d/fd/%s" % (b.pid, fd))
            if target.startswith("socket:["):
                held.add(target[8:-1])
    return {path.split("/")[2] for inode, path in inodes.items() if inode in held}


@test
def nothing_is_left_in_tmp_and_shared_memory(t):
    run = long_run(t)
    shm = shm_names()
    with run.start() as b:
        b.wait_committed(1)
        sockets = sockets_of(b)
        b.signal(signal.SIGTERM)
        b.wait(10)
    equal(sockets & socket_dirs(), set(), "socket directories")
    for arguments in (["digest", run.dir], ["generate", run.dir, "--prompt", "a", "--max-new-tokens", "2"],
                      ["eval", run.dir, "--data", run.sections["data"]["train"][0]], ["validate", run.file]):
        before = socket_dirs()
        with Background(run, arguments) as b:
            made = set()
            while b.running():
                made |= socket_dirs() - before
                time.sleep(0.002)
            equal(b.wait(), DONE, "status of %s\n%s" % (arguments[0], b.output()))
        # others' commands make such directories too, and remove them soon
        wait_until(lambda: not made & socket_dirs() & {d for d in made if "cache" in d or "validate" in d},
                   20, "nothing is left in /tmp by " + arguments[0])
    equal(shm_names() - shm, set(), "names in /dev/shm")


@test
def a_killed_worker_is_restarted_and_told(t):
    run = tiny_run(t.dir, training={"steps": 60})
    for role in ROLES:
        with run.start("--run.stop_after_step=%d" % (20 * (1 + ROLES.index(role)))) as b:
            b.wait_ready()
            b.wait_committed(20 * ROLES.index(role) + 2)
            os.kill(b.children(role)[0][0], signal.SIGKILL)
            status = b.wait()
            check(status in (STOPPED, DONE), "status %s\n%s" % (status, b.output()))
        death = [e for e in run.events("worker_exit") if "signal 9" in e["cause"]][-1]
        equal(death["worker"], role + ".0", "worker of the event")
    # a flush that a dead io_worker did not see end is not believed: its successor says so, and all begin anew
    others = [e for e in run.events("worker_exit") if "signal 9" not in e["cause"]]
    check(all("was flushing" in e["words"] for e in others), "deaths: %s" % others)
    equal(len(run.events("worker_exit")), 3 + len(others), "deaths")
    equal(sorted(e["tier"] for e in run.events("restart")), ["T1"] * (3 - len(others)) + ["T2"] * len(others),
          "one worker restarted at a time")
    equal(len(run.events("resume")), 2 + len(others), "resume events: of the second and the third start")
    run.check_steps(60)
    plain = tiny_run(t.dir, "plain", training={"steps": 60})
    plain.ok()
    equal(run.hashes(), plain.hashes(), "state hashes")


@test
def deaths_without_progress_end_it(t):
    run = tiny_run(t.dir)
    result = run.ok(env={"MTLAUNCH_FAULT": "gpu_mid_forward:segv"}, status=FAILED)
    check("no progress" in result.err and "gpu_worker" in result.err, result.err)
    equal(len(run.events("worker_exit")), 3, "deaths")
    run.ok()
    run.check_steps(20)


# -- files --


@test
def the_run_directory_is_private(t):
    run = tiny_run(t.dir, training={"steps": 1})
    old = os.umask(0)
    try:
        run.ok()
    finally:
        os.umask(old)
    equal(stat.S_IMODE(os.stat(run.dir).st_mode), 0o700, "mode of the run directory")


@test
def metrics_have_what_is_promised(t):
    run = tiny_run(t.dir, optimizer={"workers": 2}, training={"steps": 5})
    run.ok()
    for line in run.step_lines():
        for key in ("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "step_s"):
            check(isinstance(line.get(key), (int, float)) and line[key] > 0, "%s is %r in %s" % (key, line.get(key), line))
        check(re.fullmatch(r"[0-9a-f]{32}", line["state_hash"]), "state_hash %r" % line["state_hash"])
        equal(sorted(line["wait_s"]), ["gpu_worker.0", "io_worker.0", "opt_worker.0", "opt_worker.1"], "wait_s")
        rings = {ring for waits in line["wait_s"].values() for ring in waits}
        check(all(isinstance(s, float) and 0 <= s < 60 for w in line["wait_s"].values() for s in w.values()),
              "seconds of wait_s: %s" % line["wait_s"])
        equal(line["tokens"], 128, "tokens of a step")
        check(line["labelled_tokens"] <= 128, "labelled tokens")
        check(abs(line["tokens_per_s"] * line["step_s"] / 128 - 1) < 1e-3, "tokens_per_s and step_s disagree: %s" % line)
    check({"WEIGHTS", "GRADIENT", "STATE"} <= rings, "rings waited for: %s" % sorted(rings))
    equal([e["step"] for e in run.events("commit")], [1, 2, 3, 4, 5], "commit events")
    for event in run.events():
        check("time" in event, "an event without time: %s" % event)


@test
def the_loss_falls(t):
    run = tiny_run(t.dir, training={"steps": 150})
    run.ok()
    losses = [line["loss"] for line in run.step_lines()]
    mean = [sum(losses[i:i + 30]) / 30 for i in range(0, 150, 30)]
    t.note("mean losses of 30 steps: %s" % " ".join("%.3f" % m for m in mean))
    check(all(a > b for a, b in zip(mean, mean[1:])), "means of 30 steps: %s" % mean)
    check(abs(losses[0] - 5.6) < 0.3 and mean[-1] < 2.6, "from %.3f to %.3f" % (losses[0], mean[-1]))


main()
