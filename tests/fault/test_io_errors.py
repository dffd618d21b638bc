#!/usr/bin/env python3
"""Reads, writes and flushes that fail in the middle of a run: once, for ever, short, or only seemingly done.

Drives fail through a FUSE disk (fuse_server.py), the kernel through strace's fault injection. Whatever
happens, a run ends with the undisturbed bits, or it stops with status 1, its state intact, and the next
start ends with the undisturbed bits. Messages name the request, its offset and the file.
"""
import errno
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import power_cut
from harness import *
from fuse_disk import error, fuse_disk
from mounts import enter_namespace

STEPS = 6


def settings(**changes):
    sections = {"training": {"steps": STEPS}, "memory": {"page_elements": 4096}, "optimizer": {"workers": 2}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return sections


undisturbed = Undisturbed(lambda directory: tiny_run(directory, **settings()))


def said(text, *parts):
    for part in parts:
        check(re.search(part, text), "the message lacks %r:\n%s" % (part, text[-3000:]))


def run_on(t, disk, whole=False, **changes):
    """A run whose store, or all of whose run directory, lies on the disk."""
    sections = settings(**changes)
    if whole:
        sections.setdefault("run", {})["output_dir"] = os.path.join(disk.mount, "run")
    else:
        sections["memory"]["offload_dir"] = [os.path.join(disk.mount, "store")]
    run = tiny_run(t.dir, **sections)
    if whole:
        run.dir = os.path.join(disk.mount, "run")
        run.metrics_path = os.path.join(run.dir, "metrics.jsonl")
    return run


# -- a drive that fails under the store --


def drive_fails(t, rule, parts, statuses, engine="auto"):
    """From step 2 on. Then the drive is replaced, and the run ends as if nothing had been."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, memory={"io_engine": engine})
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules(rule)
        result = run.run(timeout=90)
        check(result.status in statuses, "status: %s" % result)
        hits = disk.hits()
        check(hits, "the rule %s caught nothing: %s" % (rule, result))
        text = result.out + result.err
        said(text, *parts)
        if result.status == FAILED:
            said(text, "no progress: \\d+ deaths", "state is intact")
        disk.rules()
        step = run.digest()[0]
        check(step >= 2, "the digest went back to step %d" % step)
        run.ok()
        undisturbed.check_state(run)
        t.note("%d requests caught, status %d after step %d" % (len(hits), result.status, step))


def slots(what, number):
    return r"%s of \d+ bytes at offset \d+ of \S+/store/slots: %s" % (what, os.strerror(number))


def add_drive_failures():
    ever = {"count": -1}
    cases = [  # name, rule, least skip, most skip, what must be said, statuses
        ("one_read_fails", error("read", "/slots"), 100, 160, [slots("read", errno.EIO)], (DONE,)),
        ("one_read_fails_in_recovery", error("read", "/slots"), 0, 50, [], (DONE,)),
        ("all_reads_fail", error("read", "/slots", **ever), 100, 160, [slots("read", errno.EIO)], (FAILED,)),
        ("one_write_fails", error("write", "/slots"), 0, 150, [slots("write", errno.EIO)], (DONE,)),
        ("all_writes_fail", error("write", "/slots", **ever), 0, 100, [slots("write", errno.EIO)], (FAILED,)),
        ("one_write_finds_no_space", error("write", "/slots", errno.ENOSPC), 0, 150,
         [slots("write", errno.ENOSPC)], (DONE,)),
        ("one_flush_fails", error("fsync", "/slots"), 1, 3,
         [r"fdatasync of \S+/slots: Input/output error", "it is abandoned, not flushed again"], (DONE,)),
        ("all_flushes_fail", error("fsync", "/slots", **ever), 1, 3, [r"fdatasync of \S+/slots: Input"], (FAILED,)),
        ("one_table_or_record_write_fails", error("write", "/commit"), 0, 5,
         [r"phase (TABLE|RECORD)_WRITE: write of \d+ bytes at offset \d+ of \S+/commit: Input"], (DONE,)),
        ("all_table_writes_fail", error("write", "/commit", **ever), 0, 3, [r"of \S+/commit: Input"], (FAILED,)),
    ]
    for name, rule, least, most, parts, statuses in cases:
        add_test("a_drive_where_%s" % name, lambda t, r=rule, a=least, b=most, p=parts, s=statuses:
                 drive_fails(t, dict(r, skip=t.rng.randint(a, b)), p, s))


add_drive_failures()


@test
def a_sector_of_the_newest_commit_that_cannot_be_read_any_more_goes_one_commit_back(t):
    """One place fails for ever: the commit before it is whole, and nobody needs the bad place for a while."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        run.ok("--run.stop_after_step=2", status=STOPPED)
        # which slot of page 0 holds step 2: the one that was written last
        last = [e for e in disk.log() if e[0] == "write" and e[2] < 3 * 61440 and len(e[3]) == 61440][-1]
        disk.rules(error("read", "/slots", offset=last[2] + 20000, count=3))  # as often as recovery reads
        result = run.ok()
        check(disk.hits(), "the place was never read")
        said(result.out + result.err, r"commit 2 is damaged", "resuming after step 1")
        undisturbed.check_state(run)


def unreadable(t, file, offset_of, must_say=()):
    """One sector fails for ever, and nothing that is needed stands in it."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        run.ok("--run.stop_after_step=2", status=STOPPED)
        size = os.path.getsize(os.path.join(disk.mount, "store", file))
        disk.rules(error("read", "/" + file, offset=offset_of(size), count=-1))
        result = run.ok("--run.stop_after_step=4", status=STOPPED)
        check(disk.hits(), "the sector was never read")
        said(result.err, "resuming after step 2", *must_say)
        result = mtlaunch("scrub", run.dir, status=FAILED)
        said(result.out + result.err, r"store/%s: offset %d:" % (file, offset_of(size)), "Input/output error")
        disk.rules()
        run.ok()
        undisturbed.check_state(run)


@test
def an_old_commit_record_that_cannot_be_read_any_more_costs_nothing(t):
    """That of the import: the ring has eight places, and only the newest two count."""
    unreadable(t, "commit", lambda size: size - 8 * 4096)


@test
def the_newest_commit_record_that_cannot_be_read_any_more_goes_one_commit_back(t):
    """And its place is passed over: the state of the commit before is committed once more, behind it."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        run.ok("--run.stop_after_step=2", status=STOPPED)
        size = os.path.getsize(os.path.join(disk.mount, "store", "commit"))
        disk.rules(error("read", "/commit", offset=size - (8 - 2) * 4096, count=-1))
        result = run.ok()
        check(disk.hits(), "the record was never read")
        said(result.out + result.err, r"commit 2 is damaged", "resuming after step 1")
        disk.rules()
        undisturbed.check_state(run)


@test
def one_superblock_copy_that_cannot_be_read_any_more_costs_nothing(t):
    """There are two."""
    unreadable(t, "superblock", lambda size: 4096)


@test
def a_state_that_only_one_superblock_copy_tells_is_told_by_both_at_the_next_start(t):
    """Whoever dies between the two writes leaves the older state in the other copy, to come back with the first bad sector."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        disk.rules(error("write", "/superblock", skip=5))  # two copies each of ZEROING, IMPORTING, READY
        run.ok("--run.stop_after_step=2", status=STOPPED)
        equal([hit["offset"] for hit in disk.hits()], [0], "failed writes of a superblock")
        disk.rules(error("read", "/superblock", offset=4096, count=-1))
        run.ok()
        check(disk.hits(), "the sector was never read")
        disk.rules()
        undisturbed.check_state(run)


@test
def an_identity_of_the_run_that_cannot_be_read_is_no_fault_of_the_user(t):
    """What the drive cannot read is not called malformed, and the run is not taken for a new one."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, whole=True)
        run.ok("--run.stop_after_step=2", status=STOPPED)
        disk.rules(error("read", "/run.id", count=-1))
        result = run.ok(status=FAILED)
        check(disk.hits(), "run.id was never read")
        said(result.err, r"run\.id: cannot read: Input/output error")
        disk.rules()
        run.ok()
        undisturbed.check_state(run)


@test
def a_lost_write_costs_steps_and_never_bits(t):
    """The drive says "written" and has done nothing: a slot, the digest table, the record."""
    for file, skip, parts in (("/slots", 70, ["lost write|digest|was lost|header"]),
                              ("/commit", 2, ["TABLE_READ: .*read back: expected byte"]),
                              ("/commit", 3, ["RECORD_READ: .*read back: expected byte"])):
        with fuse_disk(os.path.join(t.dir, "disk")) as disk:
            run = run_on(t, disk)
            run.ok("--run.stop_after_step=2", status=STOPPED)
            disk.rules({"op": "write", "file": file, "skip": skip, "act": "lose"})
            result = run.ok()
            equal(len(disk.hits()), 1, "lost writes")
            said(result.out + result.err, *parts)
            check(run.events("worker_exit"), "nothing was noticed: %s" % result)
            undisturbed.check_state(run)
            shutil.rmtree(run.dir)


def image_of(disk):
    """{path: content} of what the disk really has."""
    image = power_cut.Disk()
    for event in disk.log():
        image.play(event)
    return image.everything()


def steps_on_disk(disk):
    """Of the commit records."""
    commit = image_of(disk)["store/commit"]
    sectors = [commit[at:at + 4096] for at in range(0, len(commit), 4096)]
    return sorted(filter(None, (power_cut.record_step(("write", 0, 0, sector)) for sector in sectors)))


@test
def a_record_that_only_the_page_cache_has_is_no_commit(t):
    """Where there is no direct I/O. The kernel tells one process that the write failed, keeps the bytes, calls
    them clean, and shows them to the next."""
    with fuse_disk(os.path.join(t.dir, "disk"), buffered=True) as disk:
        run = run_on(t, disk)
        said(run.ok("--run.stop_after_step=2", status=STOPPED).err, "no direct I/O")
        size = os.path.getsize(os.path.join(disk.mount, "store", "commit"))
        disk.rules(error("write", "/commit", offset=size - (8 - 4) * 4096))
        run.ok("--run.stop_after_step=4", status=STOPPED)
        equal(len(disk.hits()), 1, "failed writes of the record of step 4")
        equal(steps_on_disk(disk), [1, 2, 3, 4], "commits on the disk after step 4 was announced")
        disk.rules()
        run.ok()
        undisturbed.check_state(run)


@test
def a_superblock_that_only_the_page_cache_has_is_not_believed(t):
    """The same while a store is made. Superblocks are buffered everywhere."""
    with fuse_disk(os.path.join(t.dir, "disk"), buffered=True) as disk:
        run = run_on(t, disk)
        disk.rules(error("write", "/superblock", skip=4)) # two copies each of ZEROING, IMPORTING, READY
        run.ok("--run.stop_after_step=2", status=STOPPED)
        equal(len(disk.hits()), 1, "failed writes of a superblock")
        image = image_of(disk)
    power_cut.restore(image, disk.mount)
    run.ok()
    undisturbed.check_state(run)


@test
def short_transfers_are_continued(t):
    """C10: whatever part of a transfer is done, the rest follows; nobody dies of it."""
    for engine in ("io_uring", "sync"):
        with fuse_disk(os.path.join(t.dir, "disk")) as disk:
            run = run_on(t, disk, memory={"io_engine": engine})
            rules = [{"op": "read", "file": "/slots", "skip": 10, "count": 100, "act": "short", "bytes": 4096},
                     {"op": "read", "file": "/slots", "skip": 100, "count": 30, "act": "short", "bytes": 7001}]
            if engine == "sync":  # of asynchronous ones FUSE makes EIO; tests/io has an engine that lies
                rules += [{"op": "write", "file": "/slots", "skip": 300, "count": 40, "act": "short", "bytes": 8192},
                          {"op": "write", "file": "/slots", "skip": 100, "count": 40, "act": "short", "bytes": 5000},
                          {"op": "write", "file": "/commit", "skip": 5, "count": 3, "act": "short", "bytes": 4096}]
            disk.rules(*rules)
            result = run.ok()
            check(len(disk.hits()) > 100, "only %d short transfers" % len(disk.hits()))
            equal(run.events("worker_exit"), [], "deaths: %s" % result)
            undisturbed.check_state(run)
            shutil.rmtree(run.dir)


@test
def a_store_that_cannot_be_allocated_leaves_nothing(t):
    """C29: someone else took the space after it was counted."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk)
        for file in ("/slots", "/commit"):
            disk.rules(error("fallocate", file, errno.ENOSPC))
            result = run.ok(status=FIT)
            said(result.err, r"%s: cannot allocate \d+ bytes: No space left" % file)
            equal(os.listdir(disk.mount), [], "left on the disk")
            check(not os.path.exists(run.dir), "left: %s" % run.dir)
        disk.rules()
        run.ok()
        undisturbed.check_state(run)


# -- the rest of the run directory --


@test
def an_export_that_the_drive_refuses_is_given_up(t):
    """C29: full or failing in the middle of a file, at a flush, at the first byte."""
    for op, number, skip in (("write", errno.ENOSPC, 2), ("write", errno.EIO, 0), ("fsync", errno.EIO, 0)):
        with fuse_disk(os.path.join(t.dir, "disk")) as disk:
            run = run_on(t, disk, whole=True, checkpoint={"export_interval": 2})
            disk.rules(error(op, ".safetensors", number, skip=skip))
            result = run.ok()
            said(result.err, "the export of step 2 is given up, training goes on: .*%s" % os.strerror(number))
            equal([e["step"] for e in run.events("export_failed")], [2], "export_failed events")
            equal(sorted(os.listdir(os.path.join(run.dir, "export"))), ["step-4", "step-6"], "exports")
            equal(run.events("worker_exit"), [], "deaths")
            undisturbed.check_state(run)


@test
def the_last_export_that_the_drive_refuses_is_a_failure(t):
    """C29"""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, whole=True)
        disk.rules(error("fsync", ".safetensors", count=-1))
        result = run.ok(status=FAILED)
        said(result.err, "the export of step %d, the last one, failed: .*Input/output error" % STEPS, "mtlaunch export")
        equal(os.listdir(os.path.join(run.dir, "export")), [], "left of the export")
        disk.rules()
        run.ok()
        check(os.path.exists(run.export_dir(STEPS)), "no export")
        undisturbed.check_state(run)


@test
def step_lines_that_find_no_space_at_the_flush_wait_for_it(t):
    """C29: file systems that allocate late say so only at fdatasync."""
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, whole=True)
        disk.rules(error("fsync", "metrics.jsonl", errno.ENOSPC, skip=2, count=3))
        result = run.ok()
        said(result.err, "training pauses before the commit of step 3", "there is room again")
        undisturbed.check_state(run)


@test
def step_lines_that_cannot_be_written_end_the_run_resumable(t):
    for op in ("write", "fsync"):
        with fuse_disk(os.path.join(t.dir, "disk")) as disk:
            run = run_on(t, disk, whole=True)
            run.ok("--run.stop_after_step=2", status=STOPPED)
            disk.rules(error(op, "metrics.jsonl", count=-1))
            result = run.ok(status=FAILED)
            said(result.err, r"metrics\.jsonl: .*: Input/output error", "state is intact; see to the disk")
            disk.rules()
            check(run.digest()[0] >= 2, "the digest went back")
            run.ok()
            undisturbed.check_state(run)


@test
def logs_that_cannot_be_written_cost_nothing_but_lines(t):
    with fuse_disk(os.path.join(t.dir, "disk")) as disk:
        run = run_on(t, disk, whole=True)
        disk.rules(error("write", ".log", count=-1))
        result = run.ok()
        said(result.err, r"io_worker\.0\.log: Input/output error; log lines are left out")
        equal(run.events("worker_exit"), [], "deaths")
        undisturbed.check_state(run)


# -- a kernel that refuses: strace --


def injected(t, name, inject, *overrides, file=None, statuses=(DONE,), timeout=90):
    """A run with this fault injected, then one without. Returns what the first one said."""
    if not shutil.which("strace"):
        skip("strace is not installed")
    run = tiny_run(t.dir, name, **settings())
    trace = os.path.join(t.dir, name + ".trace")
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", trace, "-e", "trace=" + inject.split(":")[0],
               "-e", "inject=" + inject]
    if file:
        command += ["-P", os.path.join(run.dir, file)]
    try:
        done = subprocess.run(command + [MTLAUNCH, run.file] + list(overrides), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
                              env=environment(), cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise TestFailure("%s: hangs" % inject) from None
    if "ptrace" in done.stdout and "not permitted" in done.stdout:
        skip("strace may not trace here")
    with open(trace) as f:
        n = f.read().count("INJECTED")
    check(n, "%s was never injected: %s" % (inject, done.stdout[-2000:]))
    check(done.returncode in statuses, "%s: status %d: %s" % (inject, done.returncode, done.stdout[-3000:]))
    if done.returncode != DONE:
        run.ok()
    undisturbed.check_state(run)
    t.note("%s: %d injected, status %d" % (inject, n, done.returncode))
    return done.stdout


@test
def a_kernel_that_interrupts_or_is_busy_costs_time_only(t):
    """C10"""
    for i, inject in enumerate(("EINTR:when=2+2", "EAGAIN:when=5+3", "EBUSY:when=4+3", "EAGAIN:when=100..130")):
        text = injected(t, "uring%d" % i, "io_uring_enter:error=" + inject)
        check("sync I/O engine" not in text, "fell back to the sync engine: %s" % text)
        check("restarting" not in text, "restarted: %s" % text)


@test
def an_io_uring_that_is_not_to_be_had_is_said_and_changes_no_bit(t):
    """C09: in all the ways in which a sandbox or a limit forbids it."""
    for call, name in (("io_uring_setup", "EPERM"), ("io_uring_setup", "ENOSYS"), ("io_uring_setup", "ENOMEM"),
                       ("io_uring_register", "EPERM"), ("io_uring_enter", "EPERM"), ("io_uring_enter", "ENOSYS")):
        text = injected(t, "%s-%s" % (call, name), "%s:error=%s" % (call, name))
        said(text, r"io_uring (is not available here|cannot be set up)", os.strerror(getattr(errno, name)),
             "using the sync I/O engine, same results")


@test
def an_io_uring_that_is_forbidden_in_mid_run_is_no_hang(t):
    """C05, C09: the requests that were never taken fail by name, the run resumes."""
    text = injected(t, "uring", "io_uring_enter:error=EPERM:when=150+", statuses=(DONE, FAILED))
    said(text, r"(read|write) of \d+ bytes at offset \d+ of \S+/store/slots: Operation not permitted")


@test
def system_calls_of_the_sync_engine_that_fail_are_no_wrong_bits(t):
    """C10: pread, pwrite and fdatasync as the kernel may answer them."""
    for i, (inject, file, part) in enumerate((
            ("pread64:error=EINTR:when=3+3", "store/slots", None),
            ("pwrite64:error=EINTR:when=3+3", "store/slots", None),
            ("pread64:error=EIO:when=200", "store/slots", "read of .*/slots: Input/output error"),
            ("pwrite64:error=EIO:when=150", "store/slots", "write of .*/slots: Input/output error"),
            ("pwrite64:error=ENOSPC:when=150", "store/slots", "write of .*/slots: No space left"),
            ("fdatasync:error=EIO:when=4", "store/slots", "fdatasync of .*/slots: Input/output error"),
            ("pwrite64:retval=61440:when=150", "store/slots", "lost|digest|header"),
            ("pread64:retval=4096:when=5", "store/commit", None))):
        text = injected(t, "sync%d" % i, inject, "--memory.io_engine=sync", file=file, statuses=(DONE, FAILED))
        if part:
            said(text, part)
        else:
            check("sync%d" % i == "sync7" or "restarting" not in text, "restarted: %s" % text)


enter_namespace()
main()
