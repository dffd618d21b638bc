#!/usr/bin/env python3
"""Whole runs on real file systems that fill up, are shut down under them, or cannot what others can.

Run directory, store and exports lie on file systems of their own, made for the test: what fills up is
then exactly one of them. Training state must stay intact whatever fills; logs, metrics and exports
degrade and say so.
"""
import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
from mounts import enter_namespace, fill, loop_device, mounted, need_mounts, run_or_skip

STEPS = 12


def settings(**changes):
    sections = {"training": {"steps": STEPS}, "memory": {"page_elements": 4096}, "optimizer": {"workers": 2}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return sections


class Undisturbed:
    """(hashes, digest, tree of the last export) of a run of that many steps."""
    known = {}

    @classmethod
    def get(cls, steps=STEPS):
        if steps not in cls.known:
            directory = tempfile.mkdtemp(prefix="mt-undisturbed-")
            run = tiny_run(directory, **settings(training={"steps": steps}))
            run.ok()
            cls.known[steps] = run.hashes(), run.digest(), tree(run.export_dir(steps))
            shutil.rmtree(directory)
        return cls.known[steps]


def check_undisturbed(run, steps=STEPS):
    hashes, digest, export = Undisturbed.get(steps)
    run.check_steps(steps)
    equal(run.hashes(), hashes, "state hashes")
    equal(run.digest(), digest, "digest")
    equal(tree(run.export_dir(steps)), export, "export")


def run_on(t, directory, **changes):
    """A run whose run directory lies in `directory`."""
    sections = settings(**changes)
    sections.setdefault("run", {})["output_dir"] = os.path.join(directory, "run")
    run = tiny_run(t.dir, **sections)
    run.dir = os.path.join(directory, "run")
    run.metrics_path = os.path.join(run.dir, "metrics.jsonl")
    return run


def said(text, *parts):
    for part in parts:
        check(re.search(part, text), "the message lacks %r:\n%s" % (part, text[-3000:]))


# -- C29: the disk of the run directory is full --


def begin_on_small_disk(t, small, steps=40):
    """A run that has two steps behind it; its store lies elsewhere."""
    run = run_on(t, small, training={"steps": steps}, memory={"offload_dir": [os.path.join(t.dir, "store")]})
    run.ok("--run.stop_after_step=2", status=STOPPED)
    return run


def fill_under(live, small):
    """The disk of a run that is under way is full from one moment to the next. Returns the ballast."""
    live.wait_committed(3)
    live.signal(signal.SIGSTOP)
    ballast = fill(small)
    live.signal(signal.SIGCONT)
    live.wait_for(lambda: "training pauses" in live.output(), "the pause", 60)
    return ballast


PAUSED = (r"metrics\.jsonl: the disk is full: training pauses before the commit of step \d+ until there is room",)


@test
def a_full_disk_pauses_training_until_there_is_room(t):
    """C29: the pause is told, nothing is committed in it, and it ends by itself."""
    with mounted(os.path.join(t.dir, "small"), 6 << 20) as small:
        run = begin_on_small_disk(t, small)
        with run.start() as live:
            ballast = fill_under(live, small)
            seen = len(run.step_lines())
            time.sleep(1.0)
            equal(len(run.step_lines()), seen, "step lines during the pause")
            equal(live.output().count("training pauses"), 1, "times that the pause was told")
            os.unlink(ballast)
            equal(live.wait(60), DONE, "status: %s" % live.output())
            said(live.output(), *PAUSED, "there is room again: training goes on")
        check_undisturbed(run, 40)


@test
def a_worker_that_dies_while_the_disk_is_full_is_restarted(t):
    """C29: a restart needs no byte of the run directory's disk."""
    with mounted(os.path.join(t.dir, "small"), 6 << 20) as small:
        run = begin_on_small_disk(t, small)
        with run.start() as live:
            ballast = fill_under(live, small)
            for role in ("io_worker", "opt_worker"):
                pids = [pid for pid, _ in live.children(role)]
                os.kill(pids[0], signal.SIGKILL)
                live.wait_for(lambda: pids[0] not in [pid for pid, _ in live.children(role)] and
                              live.children(role), "a new %s" % role)
            time.sleep(1.0)
            check(live.running(), "the run ended: %s" % live.output())
            os.unlink(ballast)
            equal(live.wait(60), DONE, "status: %s" % live.output())
        check_undisturbed(run, 40)


@test
def a_disk_that_stays_full_ends_the_run_resumable(t):
    """C29: patience is bounded; the state is intact and the message says what to do."""
    with mounted(os.path.join(t.dir, "small"), 6 << 20) as small:
        run = begin_on_small_disk(t, small)
        with run.start(env={"MTLAUNCH_FULL_DISK_S": "0.5"}) as live:
            ballast = fill_under(live, small)
            equal(live.wait(60), FAILED, "status: %s" % live.output())
            said(live.output(), *PAUSED, r"metrics\.jsonl: cannot append: No space left",
                 "state is intact; free some space and start it again")
        check(run.digest()[0] >= 3, "the digest went back: %s" % (run.digest(),))
        os.unlink(ballast)
        run.ok()
        check_undisturbed(run, 40)


@test
def a_paused_run_can_be_interrupted(t):
    with mounted(os.path.join(t.dir, "small"), 6 << 20) as small:
        run = begin_on_small_disk(t, small)
        with run.start() as live:
            ballast = fill_under(live, small)
            live.signal(signal.SIGTERM)
            equal(live.wait(10), STOPPED, "status: %s" % live.output())
        os.unlink(ballast)
        run.ok()
        check_undisturbed(run, 40)


@test
def a_full_disk_for_logs_costs_lines_and_is_told_once(t):
    """C29: logs alone on the full disk. Lines lost are counted in the first that gets through."""
    with mounted(os.path.join(t.dir, "run", "logs"), 1 << 20) as logs:
        run = run_on(t, t.dir)
        ballast = fill(logs)
        result = run.ok()
        check_undisturbed(run)
        for role in ("io_worker.0", "gpu_worker.0", "opt_worker.1"):
            told = re.findall(r"warning: .*/logs/%s\.log: .*lines are left out until" % role, result.err)
            equal(len(told), 1, "warnings of %s in: %s" % (role, result.err))
        os.unlink(ballast)
        run.change(training={"steps": STEPS + 1})
        run.ok()
        with open(os.path.join(logs, "io_worker.0.log")) as f:
            said(f.read(), "ready")


# -- C29: the disk of the exports is full --


def resize(directory, size):
    run_or_skip("mount", "-o", "remount,size=%d" % size, directory)


def export_names(run):
    return sorted(os.listdir(os.path.join(run.dir, "export")))


@test
def an_export_that_does_not_fit_is_given_up_and_training_goes_on(t):
    """C29: told with step and space, nothing of it is left, later exports are made again."""
    with mounted(os.path.join(t.dir, "run", "export"), 200 << 10) as exports:
        run = run_on(t, t.dir, checkpoint={"export_interval": 4, "keep": 100}, training={"steps": 40})
        with run.start() as live:
            live.wait_for(lambda: "is given up" in live.output(), "an export that is given up")
            live.signal(signal.SIGSTOP)
            equal([n for n in export_names(run) if not n.endswith(".tmp")], [], "exports on the full disk")
            resize(exports, 32 << 20)
            live.signal(signal.SIGCONT)
            equal(live.wait(60), DONE, "status: %s" % live.output())
            said(live.output(), r"warning: the export of step 4 is given up, training goes on: .*"
                 r"export/step-4: the export takes \d+ bytes, \d+ are free", "free some space")
        failed = [e["step"] for e in run.events("export_failed")]
        check(failed and failed[0] == 4, "export_failed events: %s" % failed)
        expected = ["step-%d" % s for s in range(4, 41, 4) if s not in failed]
        equal(export_names(run), sorted(expected), "exports")
        equal(run.events("worker_exit"), [], "deaths")
        check_undisturbed(run, 40)


@test
def the_last_export_on_a_full_disk_is_a_failure_that_costs_no_step(t):
    """C29: told at the start; exit 1 at the end; the model is trained, and the message says how to get it."""
    with mounted(os.path.join(t.dir, "run", "export"), 200 << 10) as exports:
        run = run_on(t, t.dir)
        result = run.ok(status=FAILED)
        said(result.err, r"warning: an export takes about \d+ bytes, \d+ are free in .*\n(.*\n)*step 1/",
             "the export of step %d, the last one, failed" % STEPS, r"takes \d+ bytes, \d+ are free",
             "mtlaunch export %s OUT_DIR" % re.escape(run.dir), "start it again")
        equal(run.events("worker_exit"), [], "deaths")
        equal(export_names(run), [], "left of the export")
        hashes, digest, export = Undisturbed.get()
        equal(run.digest(), digest, "digest")
        out = os.path.join(t.dir, "out")
        mtlaunch("export", run.dir, out, status=DONE)
        equal(tree(out), export, "export made by hand")
        resize(exports, 32 << 20)
        run.ok()
        check_undisturbed(run)


@test
def an_export_command_on_a_full_disk_fails_and_leaves_nothing(t):
    """C29"""
    run = run_on(t, t.dir)
    run.ok("--run.stop_after_step=2", status=STOPPED)
    with mounted(os.path.join(t.dir, "small"), 200 << 10) as small:
        result = mtlaunch("export", run.dir, os.path.join(small, "out"), status=FIT)
        said(result.err, r"takes \d+ bytes, \d+ are free")
        equal(os.listdir(small), [], "left")


# -- C29, C03, C04: the store --


@test
def a_store_on_a_disk_without_a_free_byte_trains_on(t):
    """C29: everything was allocated and written before the first step."""
    with mounted(os.path.join(t.dir, "disk"), 32 << 20, "ext4") as disk:
        run = run_on(t, t.dir, memory={"offload_dir": [os.path.join(disk, "store")]})
        run.ok("--run.stop_after_step=1", status=STOPPED)
        before = sorted((f, os.path.getsize(os.path.join(disk, "store", f)))
                        for f in os.listdir(os.path.join(disk, "store")))
        fill(disk)
        run.ok()
        equal(sorted((f, os.path.getsize(os.path.join(disk, "store", f)))
                     for f in os.listdir(os.path.join(disk, "store"))), before, "files of the store")
        check_undisturbed(run)


@test
def run_store_and_exports_on_three_file_systems(t):
    with mounted(os.path.join(t.dir, "a"), 32 << 20, "ext4") as a, \
            mounted(os.path.join(t.dir, "b"), 32 << 20, "ext4", 4096) as b, \
            mounted(os.path.join(t.dir, "a", "run", "export"), 32 << 20):
        run = run_on(t, a, memory={"offload_dir": [os.path.join(b, "store")]})
        run.ok()
        check_undisturbed(run)


def direct_on(t, sector):
    """C03: direct I/O with this sector size, whatever alignment statx tells."""
    with mounted(os.path.join(t.dir, "disk"), 32 << 20, "ext4", sector) as disk:
        if sector == 4096:
            size = subprocess.run(["stat", "-f", "-c", "%S", disk], stdout=subprocess.PIPE, text=True).stdout
            equal(size.strip(), "4096", "block size")
        run = run_on(t, t.dir, memory={"offload_dir": [os.path.join(disk, "store")]})
        with run.start("--run.stop_after_step=3") as live:
            live.wait_for(live.children and (lambda: store_flags(live)), "open store files")
            flags = store_flags(live)
            equal(live.wait(), STOPPED, "status: %s" % live.output())
            check("buffered" not in live.output(), "not direct: %s" % live.output())
        check(flags & os.O_DIRECT, "the slots file is not open for direct I/O: %o" % flags)
        run.ok()
        check_undisturbed(run)


def store_flags(live):
    """Open flags of io_worker's slots file, once it is direct; else 0."""
    for pid, _ in live.children("io_worker"):
        for fd in os.listdir("/proc/%d/fd" % pid) if is_alive(pid) else []:
            try:
                if os.readlink("/proc/%d/fd/%s" % (pid, fd)).endswith("/slots"):
                    with open("/proc/%d/fdinfo/%s" % (pid, fd)) as f:
                        flags = int(re.search(r"flags:\s+(\d+)", f.read()).group(1), 8)
                    return flags if flags & os.O_DIRECT else 0
            except OSError:
                pass
    return 0


for _sector in (512, 4096):
    add_test("direct_io_on_sectors_of_%d_bytes_gives_the_same_bits" % _sector,
             lambda t, s=_sector: direct_on(t, s))


def io_tests_on(t, mount):
    """C01, C03, C04: the C tests of engine and store with their /tmp on this file system."""
    build = os.path.dirname(os.path.dirname(os.path.realpath(MTLAUNCH)))
    programs = [os.path.join(build, "tests", "io", name) for name in ("test_engine", "test_store")]
    made = subprocess.run(["make", "--no-print-directory"] + [os.path.relpath(p, ROOT) for p in programs], cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check(made.returncode == 0, made.stdout[-3000:])
    for program in programs:
        done = subprocess.run(["unshare", "-m", "--propagation", "private", "sh", "-c", mount + ' && exec "$0"', program],
                              cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        check(done.returncode == 0, "%s: %s" % (os.path.basename(program), done.stdout[-3000:]))


for _sector in (512, 4096):
    def _io_tests(t, sector=_sector):
        need_mounts()
        with loop_device(os.path.join(t.dir, "image"), 256 << 20, sector) as device:
            run_or_skip("mkfs.ext4", "-q", "-F", device)
            io_tests_on(t, "mount %s /tmp" % device)
    add_test("engine_and_store_on_sectors_of_%d_bytes" % _sector, _io_tests)


@test
def engine_and_store_on_tmpfs(t):
    """C04"""
    need_mounts()
    io_tests_on(t, "mount -t tmpfs none /tmp")


@test
def a_store_on_overlayfs_gives_the_same_bits(t):
    """C04: over an upper layer with direct I/O and over one without."""
    need_mounts()
    for kind in ("ext4", "tmpfs"):
        with mounted(os.path.join(t.dir, kind), 32 << 20, kind) as layers:
            for name in ("lower", "upper", "work"):
                os.mkdir(os.path.join(layers, name))
            merged = os.path.join(t.dir, "merged-" + kind)
            os.mkdir(merged)
            run_or_skip("mount", "-t", "overlay", "overlay", "-o", "lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work" %
                        (layers, layers, layers), merged)
            try:
                run = run_on(t, os.path.join(t.dir, "run-" + kind),
                             memory={"offload_dir": [os.path.join(merged, "store")]})
                run.ok()  # where the upper layer has no direct I/O, test_store.c sees to the warning
                check_undisturbed(run)
            finally:
                subprocess.run(["umount", "-l", merged], check=True)


@test
def three_runs_into_one_directory_leave_a_store_of_the_same_size(t):
    """C07"""
    run = run_on(t, t.dir)
    store = os.path.join(run.dir, "store")

    def sizes():
        return {f: os.stat(os.path.join(store, f)).st_blocks for f in os.listdir(store)}
    seen = []
    for stop in (2, 4, None):
        run.ok(*["--run.stop_after_step=%d" % stop] if stop else [], status=STOPPED if stop else DONE)
        seen.append(sizes())
    equal(seen[1:], seen[:1] * 2, "files of the store and their blocks")
    check_undisturbed(run)
    mtlaunch("clean", run.dir, status=DONE)
    check(not os.path.exists(store), "left after clean: %s" % store)


# -- the file system is shut down under the run --

EXT4_IOC_SHUTDOWN, NOLOGFLUSH = 0x8004587d, 2  # _IOR('X', 125, __u32)


def shut_down(directory):
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, ctypes.c_uint32(NOLOGFLUSH))
    except OSError as e:
        skip("EXT4_IOC_SHUTDOWN: %s" % e)
    finally:
        os.close(fd)


@test
def an_ext4_that_is_shut_down_under_a_run_resumes_to_the_same_bits(t):
    """A smoke test of a power cut with ext4's own recovery: the journal is not flushed.

    The ioctl lets direct writes that were submitted reach the device; what a drive loses of them is
    test_power_cut.py's matter.
    """
    for i in range(3):
        with mounted(os.path.join(t.dir, "disk"), 64 << 20, "ext4") as disk:
            run = run_on(t, disk)
            step = t.rng.randint(1, STEPS - 2)
            with run.start("--training.steps=%d" % (STEPS * 20)) as live:
                live.wait_committed(step)
                time.sleep(t.rng.random() * 0.05)
                shut_down(disk)
                status = live.wait(60)
                check(status in (FAILED, DONE), "status %s: %s" % (status, live.output()))
                said(live.output(), "Input/output error|I/O error")
            device = next(line.split()[0] for line in open("/proc/mounts") if line.split()[1] == disk)
            wait_until(lambda: subprocess.run(["umount", disk], stderr=subprocess.DEVNULL).returncode == 0, 10,
                       "umount: the last descriptors of killed workers")
            run_or_skip("mount", device, disk)
            found = run.digest()[0]
            check(found >= step, "step %d was announced, found %d" % (step, found))
            run.ok()
            check_undisturbed(run)
            t.note("round %d: shut down after step %d, found step %d" % (i, step, found))
            shutil.rmtree(run.dir)
            os.unlink(os.path.join(t.dir, "disk.image"))


enter_namespace()
main()
