#!/usr/bin/env python3
"""Who may run, who must go: locks, orphans, a launcher's death in every phase, what the dead leave."""
import glob
import os
import pty
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import harness
from harness import *

ENDLESS = {"training": {"steps": 100000}}
GONE_S = 2


def endless(t, name="run", **changes):
    sections = {"training": {"steps": 100000}, "memory": {"page_elements": 4096}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(t.dir, name, **sections)


def gone(pids, seconds=GONE_S):
    began = time.monotonic()
    wait_until(lambda: not any(is_alive(p) for p in pids), 10, "processes %s are gone" % pids)
    took = time.monotonic() - began
    check(took < seconds, "gone after %.2f s, expected %g" % (took, seconds))
    return took


def stop(live):
    live.signal(signal.SIGTERM)
    equal(live.wait(10), STOPPED, "status")


def snapshot(directory):
    """Content, modes and modification times."""
    out = {}
    for folder, directories, files in os.walk(directory):
        for name in directories + files:
            path = os.path.join(folder, name)
            st = os.lstat(path)
            out[os.path.relpath(path, directory)] = (st.st_mode, st.st_size, st.st_mtime_ns)
    return out, tree(directory)


class Frozen:
    """A live run that does nothing while it is looked at."""

    def __init__(self, run):
        self.run = run

    def __enter__(self):
        self.live = self.run.start()
        self.live.__enter__()
        done = max((line["step"] for line in self.run.lines(tolerant=True) if "event" not in line), default=0)
        self.live.wait_committed(done + 2)
        self.pids = [self.live.pid] + [pid for pid, _ in self.live.children()]
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        return self.live

    def __exit__(self, kind, *_):
        for pid in self.pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)
        if kind is None:
            stop(self.live)
        self.live.__exit__(None, None, None)


def refused(live, arguments, *parts):
    result = mtlaunch(*arguments, status=BUSY)
    for part in ("process %d" % live.pid, "in use") + parts:
        check(part in result.err, "the message lacks %r: %s" % (part, result))


# -- locks --


@test
def a_second_launcher_on_a_run_touches_nothing(t):
    run = endless(t)
    with Frozen(run) as live:
        before = snapshot(run.dir)
        for arguments in ([run.file], ["digest", run.dir], ["export", run.dir, os.path.join(t.dir, "out")],
                          ["eval", run.dir, "--data", run.sections["data"]["train"][0]],
                          ["generate", run.dir, "--prompt", "a"], ["clean", run.dir], ["scrub", run.dir]):
            refused(live, arguments, run.dir)
        equal(snapshot(run.dir), before, "the run directory")
    run.digest()


@test
def a_copy_that_shares_the_store_is_refused_while_the_original_lives(t):
    disk = os.path.join(t.dir, "disk")
    run = endless(t, memory={"offload_dir": [disk]})
    run.ok("--run.stop_after_step=2", status=STOPPED)
    copy = os.path.join(t.dir, "copy")
    shutil.copytree(run.dir, copy, symlinks=True)
    with Frozen(run) as live:
        before = snapshot(disk), snapshot(copy)
        for arguments in ([run.file, "--run.output_dir=" + copy], ["digest", copy], ["clean", copy], ["scrub", copy],
                          ["export", copy, os.path.join(t.dir, "out")]):
            refused(live, arguments, disk, "run " + run.dir)
        # nothing lost: but for the lock's own file and the time of a directory in which aside files came and went
        def plain(s):
            return s[1]
        equal(tuple(map(plain, (snapshot(disk), snapshot(copy)))), tuple(map(plain, before)), "store and copy")
        check(not os.path.exists(os.path.join(t.dir, "out")), "an export was begun")
        mtlaunch("stop", copy, status=USER)
    run.digest()


@test
def a_copy_with_its_own_store_is_a_run_of_its_own(t):
    """Both go on from the same step, at the same time, to the same bits."""
    run = tiny_run(t.dir, training={"steps": 60})
    run.ok("--run.stop_after_step=3", status=STOPPED)
    copy = Run(run.file, os.path.join(t.dir, "copy"), run.sections)
    shutil.copytree(run.dir, copy.dir, symlinks=True)
    with run.start() as a, run.start("--run.output_dir=" + copy.dir) as b:
        b.run = copy
        equal((a.wait(), b.wait()), (DONE, DONE), "statuses: %s%s" % (a.output(), b.output()))
    equal(run.hashes(), copy.hashes(), "state hashes")
    equal(run.digest(), copy.digest(), "digests")
    equal([len(r.events("worker_exit")) for r in (run, copy)], [0, 0], "deaths of workers")


@test
def a_copy_of_a_live_run_leaves_the_socket_of_the_original(t):
    """It stands in the copied run.lock, too: without it no worker of the original could be woken, and none stopped."""
    run, copy = endless(t), os.path.join(t.dir, "copy")
    with Frozen(run):
        shutil.copytree(run.dir, copy)
        with open(os.path.join(copy, "run.lock")) as f:
            path = f.readline().strip()
        mtlaunch("digest", copy, status=DONE)
        mtlaunch(run.file, "--run.output_dir=" + copy, "--run.stop_after_step=8", status=STOPPED)
        check(os.path.exists(path), "the original's %s was removed" % path)


@test
def commands_on_a_copied_or_moved_run_look_at_its_own_store(t):
    run = tiny_run(t.dir, training={"steps": 3})
    run.ok()
    digests = run.digest()
    copy, moved = os.path.join(t.dir, "copy"), os.path.join(t.dir, "moved")
    shutil.copytree(run.dir, copy)
    with open(os.path.join(copy, "store", "slots"), "r+b") as f:
        f.write(b"x" * os.path.getsize(f.name))
    mtlaunch("scrub", copy, status=FAILED)
    mtlaunch("digest", copy, status=FAILED)
    mtlaunch("export", copy, os.path.join(t.dir, "bad"), status=FAILED)
    mtlaunch("scrub", run.dir, status=DONE)
    os.rename(run.dir, moved)
    mtlaunch("scrub", moved, status=DONE)
    equal(digest(moved), digests, "digest where it is now")
    mtlaunch("export", moved, os.path.join(t.dir, "out"), status=DONE)
    equal(tree(os.path.join(t.dir, "out")), tree(os.path.join(moved, "export", "step-3")), "export")
    mtlaunch("generate", moved, "--prompt", "a", "--max-new-tokens", "2", status=DONE)
    check(not os.path.exists(run.dir), "made again: %s" % run.dir)


@test
def two_runs_that_begin_on_one_store_at_once(t):
    """One gets it, whoever was first; the other leaves nothing of its own behind."""
    for i in range(6):
        disk = os.path.join(t.dir, "disk%d" % i)
        runs = [tiny_run(t.dir, "run%d-%d" % (i, k), training={"steps": 3}, memory={"offload_dir": [disk]})
                for k in range(2)]
        with runs[0].start() as a:
            if i % 2:
                time.sleep(t.rng.random() * 0.1)
            with runs[1].start() as b:
                statuses = [a.wait(), b.wait()]
                output = a.output() + b.output()
        equal(sorted(statuses)[0], DONE, "one of them is done: %s\n%s" % (statuses, output))
        # the loser met the lock, or came after the winner's end and found its store
        check(sorted(statuses)[1] in (BUSY, USER), "the other is refused: %s\n%s" % (statuses, output))
        loser = runs[statuses.index(max(statuses))]
        check(not os.path.exists(loser.dir), "left behind: %s" % loser.dir)
        runs[statuses.index(DONE)].check_steps(3)


@test
def one_store_directory_named_twice_is_refused(t):
    os.mkdir(os.path.join(t.dir, "disk"))
    os.symlink("disk", os.path.join(t.dir, "alias"))
    run = tiny_run(t.dir, memory={"offload_dir": [os.path.join(t.dir, n) for n in ("disk", "alias")]})
    result = run.ok(status=USER)
    check("twice" in result.err and "alias" in result.err, str(result))
    equal(os.listdir(os.path.join(t.dir, "disk")), [], "left in the store directory")


@test
def a_failed_start_takes_its_lock_files_and_directories_along(t):
    deep = os.path.join(t.dir, "a", "b", "c")
    run = tiny_run(t.dir, memory={"offload_dir": [deep]}, training={"steps": 2})
    run.change(data={"train": [os.path.join(t.dir, "empty.txt")]})
    open(os.path.join(t.dir, "empty.txt"), "w").close()
    run.ok(status=USER)
    check(not os.path.exists(os.path.join(t.dir, "a")), "directories were left behind")
    check(not os.path.exists(run.dir), "the run directory was left behind")


@test
def clean_of_a_live_run_removes_nothing(t):
    disk = os.path.join(t.dir, "disk")
    run = endless(t, memory={"offload_dir": [disk]})
    with Frozen(run) as live:
        before = tree(run.dir), tree(disk)
        refused(live, ["clean", run.dir])
        equal((tree(run.dir), tree(disk)), before, "files")
    mtlaunch("clean", run.dir, status=DONE)
    check(not os.path.exists(disk), "the store is still there: %s" % list(tree(t.dir)))


# -- the launcher dies --


def killed_launcher(t, run, delay, **start):
    """Kills the launcher some time after its start; its children must follow at once."""
    with run.start(**start) as live:
        time.sleep(delay)
        workers = [pid for pid, _ in live.children()]
        live.signal(signal.SIGKILL)
        live.process.wait()
        gone(workers)
        # a child that was just being forked when we looked
        wait_until(lambda: not of_run(run), GONE_S, "no process of the run is left: %s" % of_run(run))


def of_run(run):
    """Processes that have a file of this run open."""
    found = []
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(run.dir + "/"):
                found.append(int(path.split("/")[2]))
    return sorted(set(found))


@test
def a_launcher_killed_in_any_phase_takes_its_workers_along(t):
    model = {"hidden_size": 192, "num_hidden_layers": 6, "intermediate_size": 512, "head_dim": 48}
    run = tiny_run(t.dir, hf=model, training={"steps": 6}, memory={"page_elements": 4096},
                   checkpoint={"export_interval": 2})
    names = shm_names()
    began = time.monotonic()
    run.ok()
    whole = time.monotonic() - began
    expected = run.hashes()
    mtlaunch("clean", run.dir, status=DONE)
    os.unlink(glob.glob(run.dir + "/metrics-*.jsonl")[0])
    shutil.rmtree(os.path.join(run.dir, "export"))
    # start-up, zero-fill, import, training, exports: each time a little further
    for i in range(10):
        killed_launcher(t, run, whole * i / 10 + t.rng.random() * 0.02)
    run.ok()
    equal(run.hashes(), expected, "state hashes")
    equal(shm_names() - names, set(), "names in /dev/shm")


@test
def a_run_outlives_the_shell_that_started_it(t):
    """Only the launcher's own end is the workers' end."""
    run = endless(t)
    shell = subprocess.Popen(["sh", "-c", '"$@" & echo $!; wait', "sh", MTLAUNCH, run.file], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
    launcher = int(shell.stdout.readline())
    try:
        wait_until(lambda: any(line.get("event") == "commit" for line in run.lines(tolerant=True)), 30, "a commit")
        workers = [pid for pid, _ in children(launcher)]
        shell.kill()
        shell.wait()
        time.sleep(0.3)
        check(is_alive(launcher) and all(is_alive(p) for p in workers), "they ended with the shell")
        os.kill(launcher, signal.SIGKILL)
        gone(workers + [launcher])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGKILL)
    run.ok("--run.stop_after_step=%d" % (max(run.steps()) + 2), status=STOPPED)


@test
def a_closed_terminal_ends_the_run_in_order(t):
    run = endless(t)
    pid, master = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execve(MTLAUNCH, [MTLAUNCH, run.file], environment())
    try:
        wait_until(lambda: any(line.get("event") == "commit" for line in run.lines(tolerant=True)), 30, "a commit")
        workers = [p for p, _ in children(pid)]
        equal(len(workers), 3, "workers")
        began = time.monotonic()
        os.close(master)  # the terminal is gone: the kernel sends SIGHUP to the session
        _, status = os.waitpid(pid, 0)
        check(time.monotonic() - began < GONE_S, "ended after %.1f s" % (time.monotonic() - began))
        equal(os.waitstatus_to_exitcode(status), STOPPED, "status")
        gone(workers)
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    run.ok("--run.stop_after_step=%d" % (max(run.steps()) + 2), status=STOPPED)


SHIM = r"""
#define _GNU_SOURCE
#include <poll.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
/* the death signal is never set; with BLIND, the parent never seems to change; with DEAF, the
 * lifeline never seems to be cut either */
int prctl(int option, ...)
{
    va_list args;
    unsigned long a[4];
    va_start(args, option);
    for (int i = 0; i < 4; i++)
        a[i] = va_arg(args, unsigned long);
    va_end(args);
    return option == PR_SET_PDEATHSIG ? 0 : (int)syscall(SYS_prctl, option, a[0], a[1], a[2], a[3]);
}
#ifdef DEAF
int poll(struct pollfd *fds, nfds_t n, int timeout)
{
    struct timespec t = {timeout / 1000, timeout % 1000 * 1000000L};
    if (n == 1 && fds[0].fd == 0 && fds[0].events == 0)
        return 0;
    return (int)syscall(SYS_ppoll, fds, n, timeout < 0 ? 0 : &t, 0, 8);
}
#endif
#ifdef BLIND
pid_t getppid(void)
{
    static pid_t first;
    if (!first)
        first = (pid_t)syscall(SYS_getppid);
    return first;
}
#endif
"""


def shim(t, name, *flags):
    """A library that takes one line of defence away."""
    source, library = os.path.join(t.dir, name + ".c"), os.path.join(t.dir, name + ".so")
    with open(source, "w") as f:
        f.write(SHIM)
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source] + list(flags), check=True)
    except FileNotFoundError:
        skip("no gcc")
    return {"LD_PRELOAD": library}


@test
def the_lifeline_alone_ends_the_workers(t):
    """Without the kernel's death signal, and blind for another parent."""
    run = endless(t)
    killed_launcher(t, run, 0.5, env=shim(t, "blind", "-DBLIND"))
    with run.start(env=shim(t, "blind", "-DBLIND")) as live:
        live.wait_committed(3)
        workers = [pid for pid, _ in live.children()]
        live.signal(signal.SIGKILL)
        live.process.wait()
        t.note("gone after %.2f s" % gone(workers))


# -- orphans --


def orphaned(t, run, stopped):
    """Workers that no line of defence reached when their launcher died."""
    with run.start(env=shim(t, "deaf", "-DBLIND", "-DDEAF")) as live:
        done = max((line["step"] for line in run.lines(tolerant=True) if "event" not in line), default=0)
        live.wait_committed(done + 1)
        left = [pid for pid, _ in live.children()]
        equal(len(left), 3, "workers")
        live.signal(signal.SIGKILL)
        live.process.wait()
    time.sleep(0.5)
    check(all(is_alive(p) for p in left), "the test made no orphans")
    for pid in left if stopped else []:
        os.kill(pid, signal.SIGSTOP)
    return left


@test
def orphans_are_ended_by_the_next_start(t):
    run = endless(t)
    for stopped in (False, True):
        left = orphaned(t, run, stopped)
        try:
            committed = max(line["step"] for line in run.lines(tolerant=True) if "event" not in line)
            held = mtlaunch("digest", run.dir) if stopped else None
            if held:
                equal(held.status, DONE, "a command ends them too: %s" % held)
            result = held or run.ok("--run.stop_after_step=%d" % (3 + committed), status=STOPPED)
            check(not any(is_alive(p) for p in left), "an orphan lives")
            for pid in left:
                check("ended process %d" % pid in result.err, "not told of %d: %s" % (pid, result))
            check(result.seconds < 20, "the fence was waited for: %.1f s" % result.seconds)
        finally:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    mtlaunch("scrub", run.dir, status=DONE)
    expected = tiny_run(t.dir, "undisturbed", training={"steps": 100000}, memory={"page_elements": 4096})
    expected.ok("--run.stop_after_step=%d" % max(run.steps()), status=STOPPED)
    equal(run.hashes(), expected.hashes(), "state hashes")


def start_time(pid):
    with open("/proc/%d/stat" % pid) as f:
        return int(f.read().rsplit(")", 1)[1].split()[19])


@test
def only_orphans_of_this_run_are_ended(t):
    """Look-alikes: another run's, one whose launcher lives, one without the name."""
    run = tiny_run(t.dir, training={"steps": 3})
    run.ok("--run.stop_after_step=1", status=STOPPED)
    with open(os.path.join(run.dir, "run.id")) as f:
        run_id = f.read().strip()
    program = os.path.join(t.dir, "io_worker")
    shutil.copy(shutil.which("sleep"), program)

    def start(path, mark):
        return subprocess.Popen([path, "100"], env={"MTLAUNCH_WORKER": mark}, stdin=subprocess.DEVNULL)

    dead = start_time(os.getpid()) - 1  # no process that began then is our parent
    cases = {
        "an orphan": (program, "%s:%d" % (run_id, dead), True),
        "another run's": (program, "%s:%d" % ("0" * 32, dead), False),
        "its launcher lives": (program, "%s:%d" % (run_id, start_time(os.getpid())), False),
        "no worker by its name": (shutil.which("sleep"), "%s:%d" % (run_id, dead), False),
        "a mark that is none": (program, run_id, False),
    }
    started = {name: start(path, mark) for name, (path, mark, _) in cases.items()}
    try:
        time.sleep(0.1)
        mtlaunch("scrub", run.dir, status=DONE)
        equal([p.poll() for p in started.values()], [None] * len(started), "scrub ends nobody")
        run.ok()
        for name, (_, _, ends) in cases.items():
            if ends:
                equal(started[name].wait(5), -signal.SIGKILL, name)
            else:
                equal(started[name].poll(), None, name)
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@test
def a_live_copy_with_the_same_id_keeps_its_workers(t):
    run = endless(t)
    run.ok("--run.stop_after_step=2", status=STOPPED)
    copy = os.path.join(t.dir, "copy")
    shutil.copytree(run.dir, copy)
    with run.start() as live:
        live.wait_committed(4)
        workers = live.children()
        mtlaunch(run.file, "--run.output_dir=" + copy, "--run.stop_after_step=4", status=STOPPED)
        mtlaunch("digest", copy, status=DONE)
        equal(live.children(), workers, "the workers of the original")
        stop(live)
    equal(run.events("worker_exit"), [], "deaths")


# -- leftovers --


@test
def what_dead_runs_left_is_removed_by_the_next_start(t):
    run = endless(t)
    run.ok("--run.stop_after_step=1", status=STOPPED)
    old = time.time() - 3600
    for name in ("run.id.new", "config.toml.new", "config.toml.before"):
        with open(os.path.join(run.dir, name), "w") as f:
            f.write("torn")
    with run.start() as live:
        live.wait_committed(2)
        live.signal(signal.SIGKILL)
        live.process.wait()
    with open(os.path.join(run.dir, "run.lock")) as f:
        contact = os.path.dirname(f.readline().strip())
    check(os.path.isdir(contact), "the killed launcher left no socket directory")
    with Background(run, ["eval", run.dir, "--data", run.sections["data"]["train"][0]]) as command:
        mine = wait_until(lambda: scratch_of(command.pid), 10, "the command's scratch directory")
        command.signal(signal.SIGKILL)
        command.process.wait()
    os.utime(mine, (old, old))
    run.ok("--run.stop_after_step=%d" % (max(run.steps()) + 2), status=STOPPED)
    left = [n for n in os.listdir(run.dir) if n.endswith((".new", ".before"))]
    equal(left, [], "temporary files in the run directory")
    check(not os.path.exists(contact), "left: " + contact)
    mtlaunch("validate", run.file, status=DONE)
    check(not os.path.exists(mine), "left: " + mine)


def scratch_of(pid):
    """The scratch directory that this process has locked."""
    for path in glob.glob("/proc/%d/fd/*" % pid):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/tmp/mtlaunch-cache-"):
                return os.readlink(path)
    return None


def socket_of(run):
    with open(os.path.join(run.dir, "run.lock")) as f:
        return f.readline().strip()


@test
def a_socket_that_a_cleaner_removed_is_made_anew_when_somebody_must_find_it(t):
    run = endless(t)
    with run.start() as live:
        live.wait_committed(3)
        before = socket_of(run)
        shutil.rmtree(os.path.dirname(before))
        os.kill(live.children("opt_worker")[0][0], signal.SIGKILL)
        live.wait_for(lambda: socket_of(run) not in ("", before) and os.path.exists(socket_of(run)), "another socket")
        live.wait_committed(max(line.get("step", 0) for line in run.lines(tolerant=True)) + 3)
        mtlaunch("stop", run.dir, status=DONE)
        equal(live.wait(), STOPPED, "status")
        check("is gone" in live.output(), "not told: %s" % live.output()[-2000:])
    equal([e["tier"] for e in run.events("restart")], ["T2"], "restarts")
    run.check_steps(len(run.steps()))


@test
def a_scratch_directory_in_use_stays(t):
    run = endless(t)
    run.ok("--run.stop_after_step=1", status=STOPPED)
    with Background(run, ["eval", run.dir, "--data", run.sections["data"]["train"][0]]) as command:
        mine = wait_until(lambda: scratch_of(command.pid), 10, "the command's scratch directory")
        command.signal(signal.SIGSTOP)
        os.utime(mine, (time.time() - 3600,) * 2)
        mtlaunch("validate", run.file, status=DONE)
        check(os.path.exists(mine), "it was removed")
        command.signal(signal.SIGCONT)
        equal(command.wait(), DONE, command.output())


# -- surroundings --


@test
def closed_standard_streams_harm_nothing(t):
    """A file must not be opened in their place, and take the messages."""
    expected = tiny_run(t.dir, "expected", training={"steps": 5})
    expected.ok()
    run = tiny_run(t.dir, training={"steps": 5})

    def close_all():
        for fd in range(3):
            os.close(fd)

    process = subprocess.Popen([MTLAUNCH, run.file], env=environment(), preexec_fn=close_all)
    equal(process.wait(60), DONE, "status")
    equal(run.hashes(), expected.hashes(), "state hashes")
    mtlaunch("scrub", run.dir, status=DONE)


@test
def whoever_ignores_children_starts_a_run_that_knows_how_its_own_end(t):
    """SIGCHLD ignored is inherited, and would have the kernel reap the workers in the launcher's place."""
    run = endless(t)

    def ignore():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with run.start("--run.stop_after_step=12", preexec=ignore) as live:
        live.wait_committed(2)
        os.kill(live.children("opt_worker")[0][0], signal.SIGKILL)
        equal(live.wait(60), STOPPED, "status")
    equal([e["cause"] for e in run.events("worker_exit")], ["killed by signal 9 (Killed)"], "causes of death")
    run.check_steps(12)


@test
def a_run_goes_on_with_the_programs_that_it_began_with(t):
    """`make`, or an upgrade, while it runs: a successor from another build would share memory of another layout."""
    expected = tiny_run(t.dir, "expected", training={"steps": 40})
    expected.ok()
    programs, mine = os.path.dirname(os.path.realpath(harness.MTLAUNCH)), os.path.join(t.dir, "bin")
    shutil.copytree(programs, mine)
    run = tiny_run(t.dir, training={"steps": 40})
    kept, harness.MTLAUNCH = harness.MTLAUNCH, os.path.join(mine, "mtlaunch")
    try:
        with run.start() as live:
            for step, name in enumerate(ROLES, 1):
                live.wait_committed(4 * step)
                os.unlink(os.path.join(mine, name))
                shutil.copy("/bin/false", os.path.join(mine, name))
                os.kill(live.children(name)[0][0], signal.SIGKILL)
            equal(live.wait(60), DONE, "status")
    finally:
        harness.MTLAUNCH = kept
    equal(len(run.events("worker_exit")), 3, "deaths")
    equal(run.hashes(), expected.hashes(), "state hashes")


@test
def a_listener_that_accepts_nobody_holds_up_no_start(t):
    """A frozen launcher's socket directory looks like a leftover until somebody connects; its queue may be full."""
    trap = "/tmp/mtlaunch-%06x" % t.rng.randrange(1 << 24)
    os.mkdir(trap, 0o700)
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
            listener.bind(trap + "/ctl")
            listener.listen(0)
            waiting.connect(trap + "/ctl")
            old = time.time() - 3600
            os.utime(trap, (old, old))
            run = tiny_run(t.dir, training={"steps": 2})
            run.ok(timeout=30)
            check(os.path.exists(trap + "/ctl"), "a live launcher's socket was removed")
    finally:
        shutil.rmtree(trap, ignore_errors=True)


@test
def an_answer_that_cannot_be_written_is_no_success(t):
    run = tiny_run(t.dir, training={"steps": 1})
    with open("/dev/full", "w") as full:
        equal(subprocess.run([MTLAUNCH, run.file], env=environment(), stdout=full, stderr=full).returncode, DONE,
              "training, which answers in files")
        for arguments in (["digest", run.dir], ["scrub", run.dir], ["--version"]):
            done = subprocess.run([MTLAUNCH] + arguments, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
            equal(done.returncode, FAILED, "status of %s" % arguments[0])
            check("standard output" in done.stderr and "No space" in done.stderr, "told: %s" % done.stderr)


def cgroup_of(pid):
    with open("/proc/%d/cgroup" % pid) as f:
        return [line.strip().split(":", 2)[2] for line in f]


def log_of_launcher(run):
    with open(os.path.join(run.dir, "logs", "launcher.log")) as f:
        return f.read()


@test
def workers_have_a_cgroup_of_their_own_where_that_is_possible(t):
    run = endless(t)
    with run.start() as live:
        live.wait_committed(1)
        told = re.search(r"the workers' cgroup is (\S+)", log_of_launcher(run))
        if not told:
            check("no cgroup for the workers" in log_of_launcher(run), log_of_launcher(run))
            stop(live)
            skip("no writable cgroup here; the log says so")
        name = os.path.basename(told.group(1))
        check(name.endswith("-%d" % live.pid), name)
        for pid, role in live.children():
            check(any(os.path.basename(path) == name for path in cgroup_of(pid)), "%s: %s" % (role, cgroup_of(pid)))
        check(not any(os.path.basename(path) == name for path in cgroup_of(live.pid)), "the launcher is in it too")
        stop(live)
    check(not os.path.exists(told.group(1)), "left: " + told.group(1))
    with run.start() as live:
        live.wait_committed(2)
        left = re.findall(r"the workers' cgroup is (\S+)", log_of_launcher(run))[-1]
        workers = [pid for pid, _ in live.children()]
        live.signal(signal.SIGKILL)
        live.process.wait()
        gone(workers)
    check(os.path.exists(left), "the killed launcher left no cgroup to remove")
    run.ok("--run.stop_after_step=%d" % (2 + max(run.steps())), status=STOPPED)
    check(not os.path.exists(left), "the next start left " + left)


@contextlib.contextmanager
def memory_groups():
    """Two cgroups, one in the other: (set limit of the outer, procs file of the inner)."""
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        outer = os.path.join(root, "mt-test-%d" % os.getpid())
        inner = os.path.join(outer, "inner")
        try:
            if not os.path.exists(os.path.join(root, "cgroup.procs")):
                continue
            os.makedirs(inner)
            if not os.path.exists(os.path.join(outer, limit)):
                os.rmdir(inner)
                os.rmdir(outer)
                continue
        except OSError:
            continue
        try:
            yield os.path.join(outer, limit), os.path.join(inner, "cgroup.procs")
        finally:
            for directory in (inner, outer):
                wait_until(lambda d=directory: not removed_or_busy(d), 10, "the test's cgroup is empty")
        return
    skip("no memory cgroup that this user may make")


def removed_or_busy(directory):
    try:
        os.rmdir(directory)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


@test
def the_memory_limit_of_an_outer_cgroup_counts(t):
    run = tiny_run(t.dir, training={"steps": 3}, memory={"max_ram": "auto"})
    with memory_groups() as (limit, procs):
        def enter():
            with open(procs, "w") as f:
                f.write("0")

        def limited(megabytes):
            with open(limit, "w") as f:
                f.write(str(megabytes << 20))

        limited(60)
        result = mtlaunch(run.file, preexec=enter, status=FIT)
        check("max_ram" in result.err and "budget" in result.err, str(result))
        limited(1000)
        mtlaunch(run.file, preexec=enter, status=DONE)
        # page cache of others is counted as used, but it is room: the kernel gives it up
        big = os.path.join(t.dir, "big")
        subprocess.run(["dd", "if=/dev/zero", "of=" + big, "bs=1M", "count=700"], preexec_fn=enter, check=True,
                       stderr=subprocess.DEVNULL)
        os.sync()
        subprocess.run(["cat", big], preexec_fn=enter, check=True, stdout=subprocess.DEVNULL)
        limited(800)
        again = tiny_run(t.dir, "again", training={"steps": 3}, memory={"max_ram": "auto"})
        mtlaunch(again.file, preexec=enter, status=DONE)
        os.unlink(big)


main()
