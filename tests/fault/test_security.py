#!/usr/bin/env python3
"""Who is kept out, and of what: modes, another user on the machine, names planted in our way, bytes
that a terminal would obey.

The hostile user is the uid of nobody; those tests need root, to become it.
"""
import contextlib
import fcntl
import glob
import json
import os
import pty
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *

NOBODY = 65534
BAD = "\x1b]0;owned\x07\x9b31m\r\x7f"  # \x9b: as UTF-8 the control sequence introducer


def endless(t, name="run", **changes):
    sections = {"training": {"steps": 100000}, "memory": {"page_elements": 4096}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(t.dir, name, **sections)


def stop(live):
    live.signal(signal.SIGTERM)
    equal(live.wait(10), STOPPED, "status: %s" % live.output())


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


def contact(run):
    """Socket and token of the live launcher."""
    with open(os.path.join(run.dir, "run.lock")) as f:
        return f.read().splitlines()[:2]


# -- modes --


@test
def everything_is_the_owners_alone_whatever_the_umask(t):
    disk = os.path.join(t.dir, "disk")
    run = endless(t, memory={"offload_dir": [disk]}, log={"max_size": "64KiB"})
    with run.start(preexec=lambda: os.umask(0)) as live:
        live.wait_committed(3)
        endpoint, token = contact(run)
        equal(mode(os.path.dirname(endpoint)), 0o700, "mode of the socket's directory")
        check(stat.S_ISSOCK(os.lstat(endpoint).st_mode), "a socket")
        equal(mode(endpoint), 0o600, "mode of the socket")
        check(re.fullmatch("[0-9a-f]{32}", token), "token %r" % token)
        stop(live)
    for top in (run.dir, disk):
        equal(mode(top), 0o700, "mode of " + top)
    for path in ["run.lock", "run.id", "config.toml", "metrics.jsonl"]:
        equal(mode(os.path.join(run.dir, path)), 0o600, "mode of " + path)
    equal(mode(os.path.join(run.dir, "logs")), 0o700, "mode of logs")
    logs = os.listdir(os.path.join(run.dir, "logs"))
    equal(len(logs), 4, "logs: %s" % logs)
    for folder, names in ((os.path.join(run.dir, "logs"), logs), (disk, os.listdir(disk))):
        for name in names:
            equal(mode(os.path.join(folder, name)), 0o600, "mode of " + name)
    equal(sorted(os.listdir(disk)), ["commit", "run.lock", "slots", "superblock"], "files of the store")


@test
def an_open_run_directory_is_closed_and_that_is_said(t):
    run = tiny_run(t.dir, training={"steps": 2})
    os.mkdir(run.dir)
    os.chmod(run.dir, 0o777)
    result = run.ok("--run.stop_after_step=1", status=STOPPED)
    check("0777" in result.err and "now 0700" in result.err, "not told: %s" % result)
    equal(mode(run.dir), 0o700, "mode of an empty directory")
    os.chmod(run.dir, 0o755)
    check("0755" in run.ok().err, "not told")
    equal(mode(run.dir), 0o700, "mode of a run's directory")
    # a start that is refused leaves it as it was
    other = tiny_run(t.dir, "other")
    os.mkdir(other.dir, 0o750)
    open(os.path.join(t.dir, "empty.txt"), "w").close()
    other.ok("--data.train=" + os.path.join(t.dir, "empty.txt"), status=USER)
    equal(mode(other.dir), 0o750, "mode after a refused start")


@test
def a_directory_with_other_things_in_it_is_not_changed(t):
    run = tiny_run(t.dir, training={"steps": 1})
    os.mkdir(run.dir)
    open(os.path.join(run.dir, "mine"), "w").close()
    for bits in (0o770, 0o707, 0o1777):
        os.chmod(run.dir, bits)
        result = run.ok(status=USER)
        check("others may write" in result.err and run.dir in result.err and "%04o" % bits in result.err, str(result))
        equal((os.listdir(run.dir), mode(run.dir)), (["mine"], bits), "the directory")
    os.chmod(run.dir, 0o755)
    run.ok()
    equal(mode(run.dir), 0o755, "its mode")
    equal(mode(os.path.join(run.dir, "metrics.jsonl")), 0o600, "mode of metrics.jsonl")


# -- names in our way --


@test
def a_link_in_place_of_a_file_is_not_followed(t):
    run = tiny_run(t.dir, training={"steps": 2})
    run.ok("--run.stop_after_step=1", status=STOPPED)
    victim = os.path.join(t.dir, "victim")
    with open(victim, "w") as f:
        f.write("precious")
    lock = os.path.join(run.dir, "run.lock")
    os.unlink(lock)
    for make in (os.symlink, lambda a, b: os.mkfifo(b)):
        make(victim, lock)
        for arguments in ([run.file], ["digest", run.dir], ["clean", run.dir], ["scrub", run.dir]):
            result = mtlaunch(*arguments)
            check(result.status == USER and lock in result.err, "%s: %s" % (arguments, result))
        mtlaunch("stop", run.dir, status=USER)
        os.unlink(lock)
    for name in ("config.toml.new", "run.id.new"):
        os.symlink(victim, os.path.join(run.dir, name))
    run.ok()
    with open(victim) as f:
        equal(f.read(), "precious", "the file that links pointed to")


@test
def a_forged_lock_text_removes_nothing(t):
    """The socket of a dead launcher is removed by the name in its lock file, if it is one."""
    run = tiny_run(t.dir, training={"steps": 100})
    run.ok("--run.stop_after_step=1", status=STOPPED)
    victim = os.path.join(t.dir, "ctl")
    folder = os.path.join("/tmp", "mtlaunch-%s" % os.urandom(3).hex())
    os.mkdir(folder)
    try:
        for n, endpoint in enumerate((victim, folder + "/../" + os.path.relpath(victim, "/tmp"), folder + "/ctl/../ctl",
                                      "/tmp/mtlaunch-../ctl", "A" * 5000)):
            for path in (victim, os.path.join(folder, "ctl")):
                open(path, "w").close()
            with open(os.path.join(run.dir, "run.lock"), "w") as f:
                f.write("%s\n%s\n1\n/\n" % (endpoint, "0" * 32))
            run.ok("--run.stop_after_step=%d" % (n + 2), status=STOPPED)
            check(os.path.exists(victim) and os.path.exists(os.path.join(folder, "ctl")), "removed by %r" % endpoint)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            with open(os.path.join(run.dir, "run.lock"), "w") as f:
                f.write("%s/ctl\n\n1\n/\n" % folder)
            run.ok("--run.stop_after_step=20", status=STOPPED)
            check(os.path.exists(os.path.join(folder, "ctl")), "another user's was removed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- another user --


def become_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def visible(t):
    """Makes the tests' directories passable, so that only our own modes keep the other out."""
    if os.geteuid() != 0:
        skip("needs root, to become another user")
    os.chmod(os.path.dirname(t.dir), 0o755)
    os.chmod(t.dir, 0o755)
    try:
        mtlaunch("--version", preexec=become_nobody, status=DONE)
    except PermissionError:
        skip("another user cannot run %s" % MTLAUNCH)


def as_nobody(function):
    """Runs it in a child of that user; what it returns, as JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_nobody()
            text = json.dumps(function())
        except Exception as e:  # noqa: BLE001 - told to the parent
            text = json.dumps("%s: %s" % (type(e).__name__, e))
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        text = f.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def attempt(function, *arguments):
    """The name of the error, or "done"."""
    try:
        function(*arguments)
        return "done"
    except OSError as e:
        return type(e).__name__


@test
def another_user_sees_and_reaches_nothing(t):
    visible(t)
    disk = os.path.join(t.dir, "disk")
    run = endless(t, memory={"offload_dir": [disk]})
    with run.start() as live:
        live.wait_committed(2)
        endpoint, _ = contact(run)
        pids = [live.pid] + [pid for pid, _ in live.children()]
        segments = [path for pid in pids for path in glob.glob("/proc/%d/fd/*" % pid)
                    if os.readlink(path).startswith("/dev/shm/#")]
        equal(len(segments), len(pids), "descriptors of the segment")

        def connect(path):
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(path)

        def tries():
            found = {}
            for path in (run.dir, disk, os.path.dirname(endpoint)):
                found["list " + path] = attempt(os.listdir, path)
                found["make in " + path] = attempt(os.mkdir, path + "/x")
            for path in [os.path.join(run.dir, n) for n in ("run.lock", "metrics.jsonl", "config.toml")] + [
                    os.path.join(disk, n) for n in ("slots", "run.lock")] + segments:
                found["read " + path] = attempt(os.open, path, os.O_RDONLY)
                found["write " + path] = attempt(os.open, path, os.O_RDWR)
            for pid in pids:
                found["memory of %d" % pid] = attempt(os.open, "/proc/%d/mem" % pid, os.O_RDWR)
                found["kill %d" % pid] = attempt(os.kill, pid, signal.SIGTERM)
            found["connect"] = attempt(connect, endpoint)
            return found

        tried = as_nobody(tries)
        check(isinstance(tried, dict) and len(tried) > 20, "the tries: %s" % tried)
        equal({k: v for k, v in tried.items() if v != "PermissionError"}, {}, "what another user could do")
        for arguments in (["stop", run.dir], ["digest", run.dir], ["scrub", run.dir], ["clean", run.dir],
                          ["generate", run.dir, "--prompt", "a"]):
            result = mtlaunch(*arguments, preexec=become_nobody, status=USER)
            check(run.dir in result.err and len(result.err.splitlines()) <= 2, str(result))
        check("another user" in mtlaunch("stop", run.dir, preexec=become_nobody).err, "who may stop it")
        check(live.running(), "the run has ended: %s" % live.output())
        stop(live)
    equal(run.events("worker_exit"), [], "deaths")


@test
def the_kernel_says_who_is_at_the_other_end_of_the_socket(t):
    """Even with every mode opened and the token known, another user is not heard."""
    visible(t)
    run = endless(t)
    with run.start() as live:
        live.wait_committed(2)
        endpoint, _ = contact(run)
        os.chmod(os.path.dirname(endpoint), 0o711)
        os.chmod(endpoint, 0o666)

        def connect():
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(endpoint)
                s.settimeout(10)
                return len(s.recv(64))  # a ZeroMQ peer greets first; one that is turned away hears nothing

        equal(as_nobody(connect), 0, "bytes that another user hears")
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(endpoint)
            s.settimeout(10)
            check(len(s.recv(64)) > 0, "root is not greeted")
        fake = os.path.join(t.dir, "fake")
        os.mkdir(fake)
        shutil.copy(os.path.join(run.dir, "run.lock"), os.path.join(fake, "run.lock"))
        for path in (fake, os.path.join(fake, "run.lock")):
            os.chown(path, NOBODY, NOBODY)
        with open(os.path.join(fake, "run.lock"), "r+") as f:
            fcntl.flock(f, fcntl.LOCK_EX)  # it looks alive
            result = mtlaunch("stop", fake, preexec=become_nobody, status=FAILED)
            check("no answer" in result.err, str(result))
            check(live.running(), "another user has stopped the run")
            # the same by root is heard: it was the user that made the difference
            os.chown(fake, 0, 0)
            process = subprocess.Popen([MTLAUNCH, "stop", fake], env=environment(), stdout=subprocess.PIPE, text=True)
            equal(live.wait(10), STOPPED, "status after root's stop")
        equal(process.wait(10), DONE, "root's stop")


@test
def a_user_runs_beside_what_another_has_planted(t):
    """Runs of nobody and root start and end with a third user's names in /tmp, and they stay."""
    visible(t)
    home = os.path.join(t.dir, "home")
    os.mkdir(home)
    run = tiny_run(t.dir, training={"steps": 3})
    run.change(run={"output_dir": os.path.join(home, "run")})
    for path in glob.glob(t.dir + "/**", recursive=True):
        os.chmod(path, 0o755)
    os.chown(home, NOBODY, NOBODY)
    planted, target = [], os.path.join(t.dir, "target")
    os.mkdir(target)
    long_ago = time.time() - 86400
    for i in range(40):
        name = os.path.join("/tmp", "mtlaunch-%s" % os.urandom(3).hex())
        if i % 2:
            os.symlink(target, name)
        else:
            os.mkdir(name)
            os.symlink(os.path.join(target, "x"), os.path.join(name, "ctl"))
            os.utime(name, (long_ago, long_ago))
        os.chown(name, NOBODY - 1, NOBODY - 1, follow_symlinks=False)
        planted.append(name)
    scratch = os.path.join("/tmp", "mtlaunch-cache-%s" % os.urandom(3).hex())
    os.symlink(target, scratch)
    os.chown(scratch, NOBODY - 1, NOBODY - 1, follow_symlinks=False)
    open(os.path.join(target, "kept"), "w").close()
    os.utime(target, (long_ago, long_ago))
    try:
        mtlaunch(run.file, preexec=become_nobody, status=DONE)
        mtlaunch("digest", os.path.join(home, "run"), preexec=become_nobody, status=DONE)
        for name in planted + [scratch]:
            check(os.path.lexists(name), "removed: " + name)
        equal(os.listdir(target), ["kept"], "where the links point")
        # root may work on anybody's run, and does not take it away
        mtlaunch("scrub", os.path.join(home, "run"), status=DONE)
        mtlaunch("digest", os.path.join(home, "run"), status=DONE)
        mtlaunch("digest", os.path.join(home, "run"), preexec=become_nobody, status=DONE)
        for name in planted + [scratch]:
            check(os.path.lexists(name), "removed: " + name)
        equal(os.listdir(target), ["kept"], "where the links point")
    finally:
        for name in planted + [scratch]:
            with contextlib.suppress(OSError):
                os.unlink(name) if os.path.islink(name) else shutil.rmtree(name)


@test
def root_stops_the_run_of_a_user_and_the_user_its_own(t):
    visible(t)
    home = os.path.join(t.dir, "home")
    os.mkdir(home)
    os.chown(home, NOBODY, NOBODY)
    run = endless(t)
    run.dir = os.path.join(home, "run")
    run.metrics_path = os.path.join(run.dir, "metrics.jsonl")
    run.change(run={"output_dir": run.dir})
    for path in glob.glob(t.dir + "/*"):
        os.chmod(path, 0o755)
    for path in glob.glob(t.dir + "/model-*/*"):
        os.chmod(path, 0o644)
    for stopper in (None, become_nobody):
        with run.start(preexec=become_nobody) as live:
            live.wait_committed(1 + max([0] + [line["step"] for line in run.lines(tolerant=True) if "event" not in line]))
            result = mtlaunch("stop", run.dir, preexec=stopper, status=DONE)
            check("stopping after step" in result.out, str(result))
            equal(live.wait(10), STOPPED, "status")
    # a directory of another user, in which one may write, is nobody's to work in
    shared = os.path.join(t.dir, "shared")
    os.mkdir(shared)
    open(os.path.join(shared, "x"), "w").close()
    os.chmod(shared, 0o777)
    result = mtlaunch(run.file, "--run.output_dir=" + shared, preexec=become_nobody, status=USER)
    check("others may write" in result.err, str(result))


# -- bytes that a terminal would obey --


def controls_in(text):
    return [c for c in text if (ord(c) < 0x20 and c not in "\n\t") or 0x7f <= ord(c) < 0xa0]


@test
def control_bytes_in_names_and_texts_are_shown_not_obeyed(t):
    name = "run" + BAD
    text = os.path.join(t.dir, "data%s.txt" % BAD)
    write_text(text)
    run = tiny_run(t.dir, file=text, training={"steps": 4})
    run.dir = os.path.join(t.dir, name)
    run.metrics_path = os.path.join(run.dir, "metrics.jsonl")
    run.change(run={"output_dir": run.dir},
               eval={"interval": 2, "sequences": 2, "sample_prompts": ["a" + BAD], "sample_tokens": 40},
               data={"val_fraction": 0.2})
    results = [run.ok("--run.stop_after_step=1", status=STOPPED), run.ok()]
    # a worker's last words and every message that names a file
    results += [run.ok("--training.steps=9", env={"MTLAUNCH_FAULT": "opt_mid_apply:check:9",
                                                 "MTLAUNCH_FAULT_ONCE": os.path.join(t.dir, "once")})]
    out = os.path.join(t.dir, "out" + BAD)
    results += [mtlaunch("export", run.dir, out), mtlaunch("digest", run.dir), mtlaunch("scrub", run.dir),
                mtlaunch("validate", run.file), mtlaunch("stop", run.dir, status=USER),
                mtlaunch("digest", os.path.join(t.dir, "no" + BAD), status=USER),
                mtlaunch("nonsense" + BAD, status=USER), mtlaunch(run.file, "--run.nonsense%s=1" % BAD, status=USER),
                mtlaunch(os.path.join(t.dir, "no%s.toml" % BAD), status=USER)]
    os.truncate(os.path.join(run.dir, "store", "commit"), 100)
    results += [mtlaunch("scrub", run.dir, status=FAILED), mtlaunch("digest", run.dir, status=FAILED)]
    for i, result in enumerate(results):
        equal(controls_in(result.out + result.err), [], "control characters in output %d: %r" % (i, result.err))
    check(any("\\x1b" in r.err for r in results), "no name was shown at all")
    for path in glob.glob(glob.escape(run.dir) + "/logs/*") + [run.metrics_path]:
        with open(path, encoding="utf-8", errors="replace") as f:
            equal(controls_in(f.read()), [], "control characters in " + os.path.basename(path))
    check(run.events("sample"), "no sample was taken")


@test
def generate_spares_a_terminal_and_gives_a_file_every_byte(t):
    run = tiny_run(t.dir, training={"steps": 1}, optimizer={"learning_rate": 0.0})
    run.ok()
    command = [MTLAUNCH, "generate", run.dir, "--prompt", "p\x1b[2J", "--max-new-tokens", "200", "--temperature", "2",
               "--seed", "3"]
    plain = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True).stdout
    check(b"\x1b[2J" in plain, "a pipe gets the bytes as they are")
    check(any(b < 0x20 and b not in b"\n\t" for b in plain.replace(b"\x1b[2J", b"")), "the model says no control byte")
    pid, master = pty.fork()
    if pid == 0:
        os.execve(MTLAUNCH, command, environment())
    shown = b""
    with contextlib.suppress(OSError):
        while True:
            shown += os.read(master, 65536)
    os.waitpid(pid, 0)
    os.close(master)
    found = [b for b in shown if b < 0x20 and b not in b"\n\t\r"] + [b for b in shown if b == 0x7f]
    equal(found, [], "control bytes on a terminal")
    check(b"\\x1b[2J" in shown, "what is shown for an escape: %r" % shown[:80])


# -- what comes from the environment --


@test
def nothing_in_a_run_file_is_expanded(t):
    names = ["$HOME", "${HOME}", "~", "%s%n%d", "$(touch x)", "`touch x`"]
    for name in names:
        run = tiny_run(t.dir, training={"steps": 1})
        run.change(run={"output_dir": "plain/" + name})
        run.ok(env={"HOME": os.path.join(t.dir, "home")})
        check(os.path.exists(os.path.join(t.dir, "plain", name, "metrics.jsonl")), "not literal: " + name)
    equal(sorted(os.listdir(os.path.join(t.dir, "plain"))), sorted(names), "directories")
    for folder in (ROOT, t.dir):
        check(not os.path.exists(os.path.join(folder, "x")), "something was run")


def variables_of_sources():
    found = set()
    for folder in ("launcher", "procs", "ipc", "io_worker", "gpu_worker", "opt_worker", "model"):
        for path in glob.glob(os.path.join(ROOT, folder, "**", "*.[ch]*"), recursive=True):
            with open(path) as f:
                text = f.read()
            if "getenv" in text or "setenv" in text:
                found |= set(re.findall(r'"(MTLAUNCH_[A-Z_]+)', text))
    return found


@test
def every_variable_is_documented_and_none_changes_the_bits(t):
    with open(os.path.join(ROOT, "README.md")) as f:
        readme = f.read()
    names = variables_of_sources()
    check("MTLAUNCH_FAULT" in names and "MTLAUNCH_WORKER" in names, "names found: %s" % sorted(names))
    for name in names:
        check("`%s" % name in readme, "README.md does not tell of " + name)
    plain = tiny_run(t.dir, "plain", training={"steps": 3})
    plain.ok()
    run = tiny_run(t.dir, training={"steps": 3})
    run.ok(env={"MTLAUNCH_WORKER": "00:1", "MTLAUNCH_SILENCE_S": "nonsense", "MTLAUNCH_NOTHING": "1",
                "MTLAUNCH_FAULT_ONCE": "/nonexistent"})
    equal(run.hashes(), plain.hashes(), "state hashes")
    check("MTLAUNCH_FAULT" in run.ok(env={"MTLAUNCH_FAULT": "nonsense"}, status=USER).err, "a wrong fault point")


main()
