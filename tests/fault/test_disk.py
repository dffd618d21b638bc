#!/usr/bin/env python3
"""Space that is too small, disks and kernels that cannot what others can, and store files that are not
what they were. Space that runs out in mid-run: test_file_systems.py.
"""
import ctypes
import os
import random
import re
import resource
import shutil
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
from mounts import enter_namespace, mounted
import text_samples as samples

STEPS = 4


def disk_run(directory, name="run", **changes):
    sections = {"training": {"steps": STEPS}, "memory": {"page_elements": 4096}}
    return tiny_run(directory, name, **merged(sections, changes))


check_undisturbed = Undisturbed(disk_run).check


def check_said(result, *parts):
    text = result.out + result.err
    for part in parts:
        check(re.search(part, text), "the message lacks %r:\n%s" % (part, text[-3000:]))


# -- does not fit: exit 3 before anything is written --


def check_does_not_fit(run, *parts):
    result = run.ok(status=FIT)
    check_said(result, *parts)
    check(not os.path.exists(run.dir), "left behind: %s" % list(tree(run.dir)))
    return result


@test
def a_store_larger_than_its_disk_is_refused(t):
    with mounted(os.path.join(t.dir, "small"), 4 << 20) as small:
        run = disk_run(t.dir, memory={"offload_dir": [os.path.join(small, "store")]})
        check_does_not_fit(run, r"need \d+ bytes", r"have \d+", re.escape(small))
        equal(os.listdir(small), [], "written to the small disk")


@test
def a_store_larger_than_its_ext4_disk_is_refused(t):
    with mounted(os.path.join(t.dir, "small"), 6 << 20, "ext4") as small:
        run = disk_run(t.dir, memory={"offload_dir": [os.path.join(small, "store")]})
        check_does_not_fit(run, r"need \d+ bytes", r"have \d+", re.escape(small))
        equal(os.listdir(small), ["lost+found"], "written to the small disk")


@test
def two_directories_on_one_small_disk_count_once(t):
    """Each half of the store fits by itself, both together do not."""
    with mounted(os.path.join(t.dir, "small"), 8 << 20) as small:
        run = disk_run(t.dir, memory={"offload_dir": [os.path.join(small, "a"), os.path.join(small, "b")]})
        check_does_not_fit(run, r"need \d+ bytes", r"have \d+")
        equal(os.listdir(small), [], "written to the small disk")


@test
def shared_memory_too_small_is_refused(t):
    """C14"""
    run = disk_run(t.dir)
    with mounted("/dev/shm", 1 << 20):
        check_does_not_fit(run, r"/dev/shm: need \d+ bytes", r"have \d+", "enlarge it")
        equal(os.listdir("/dev/shm"), [], "left in /dev/shm")


@test
def a_ram_budget_smaller_than_the_run_is_refused(t):
    run = disk_run(t.dir, memory={"max_ram": "10MB"})
    check_does_not_fit(run, r"max_ram", r"needs \S+ \S+ of shared memory", r"the budget is 10")


@test
def a_ram_budget_without_room_for_the_device_is_refused(t):
    """Pools and processes fit, activations of 16 x 512 positions do not."""
    sections = {"training": {"seq_len": 512, "micro_batch_size": 16}}
    run = disk_run(t.dir, memory={"max_ram": "10MB"}, **sections)
    text = run.ok(status=FIT).err
    found = re.search(r"needs ([\d.]+) (\w+) of shared memory and ([\d.]+) (\w+) for", text)
    check(found, "no figures in: %s" % text)
    unit = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    need = float(found[1]) * unit[found[2]] + float(found[3]) * unit[found[4]]
    run.change(memory={"max_ram": int(need * 1.01) + 1000000})
    check_does_not_fit(run, r"max_ram|budget", r"need", r"device|buffers")


# -- what a disk or a kernel cannot do --


@test
def tmpfs_without_direct_io_gives_the_same_bits(t):
    """C04"""
    with mounted(os.path.join(t.dir, "memory"), 64 << 20) as memory:
        run = disk_run(t.dir, memory={"offload_dir": [os.path.join(memory, "store")]})
        check_said(run.ok(), "tmpfs: buffered")
        check_undisturbed(run)


@test
def an_ext4_loop_disk_gives_the_same_bits(t):
    with mounted(os.path.join(t.dir, "disk"), 64 << 20, "ext4") as disk:
        run = disk_run(t.dir, memory={"offload_dir": [os.path.join(disk, "store"), os.path.join(t.dir, "other")]})
        run.ok()
        check_undisturbed(run)


PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_CAPBSET_DROP = 38, 22, 2, 24
IO_URING_SETUP = 425  # on every architecture with the common numbers
CAP_IPC_LOCK = 14


def forbid_io_uring():
    """As containers do it: io_uring_setup answers EPERM."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = b"".join(struct.pack("<HBBI", *i) for i in (
        (0x20, 0, 0, 0),                  # load the system call's number
        (0x15, 0, 1, IO_URING_SETUP),     # another one: skip the next
        (0x06, 0, 0, 0x00050000 | 1),     # return ERRNO | EPERM
        (0x06, 0, 0, 0x7fff0000)))        # return ALLOW
    buffer = ctypes.create_string_buffer(program)
    filters = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or \
            libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(filters), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


@test
def a_forbidden_io_uring_is_said_and_changes_no_bit(t):
    """C09"""
    run = disk_run(t.dir)
    result = mtlaunch(run.file, preexec=forbid_io_uring, status=DONE)
    check_said(result, "io_uring is not available here: Operation not permitted", "sync I/O engine")
    check_undisturbed(run)
    asked = disk_run(t.dir, "asked", memory={"io_engine": "io_uring"})
    result = mtlaunch(asked.file, preexec=forbid_io_uring)
    check(result.status in (FAILED, USER), "io_engine = \"io_uring\" where there is none: %s" % result)
    check_said(result, "io_uring is not available here")


def no_locked_memory():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)  # not root: it has none to drop


@test
def a_memlock_limit_of_nothing_changes_no_bit(t):
    """C09"""
    run = disk_run(t.dir)
    result = mtlaunch(run.file, preexec=no_locked_memory, status=DONE)
    check_said(result, "memlock limit|sync I/O engine")
    check_undisturbed(run)


# -- damaged store files --


def store_of(run):
    return os.path.join(run.dir, "store")


def damaged(t, name, damage, status, parts, **changes):
    """A stopped run, damaged; the next start says what is wrong and touches nothing."""
    run = disk_run(t.dir, name, **changes)
    run.ok("--run.stop_after_step=2", status=STOPPED)
    damage(run)
    directories = [store_of(run)] + list(run.sections["memory"].get("offload_dir", []))
    before = [tree(d) for d in directories]
    result = run.run()
    equal(result.status, status, "status: %s" % result)
    check_said(result, *parts)
    equal([tree(d) for d in directories], before, "the store's files")
    equal(run.steps(), [1, 2], "step lines")
    return run


def truncate_slots(run):
    path = os.path.join(store_of(run), "slots")
    os.truncate(path, os.path.getsize(path) // 2)


def overwrite(path, offset, data):
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)


@test
def a_truncated_slots_file_is_named(t):
    """C02"""
    damaged(t, "run", truncate_slots, FAILED, [r"store/slots: size: expected \d+ bytes, found \d+"])


@test
def a_slots_file_truncated_to_nothing_is_named(t):
    """C02"""
    damaged(t, "run", lambda run: os.truncate(os.path.join(store_of(run), "slots"), 0), FAILED,
            [r"store/slots: size: expected \d+ bytes, found 0"])


@test
def a_zeroed_superblock_is_named(t):
    damaged(t, "run", lambda run: overwrite(os.path.join(store_of(run), "superblock"), 0, bytes(8192)),
            FAILED, [r"store/superblock: offset 0: expected a superblock", "found none"])


@test
def a_commit_file_of_garbage_is_named(t):
    def garbage(run):
        path = os.path.join(store_of(run), "commit")
        overwrite(path, 0, random.Random(5).randbytes(os.path.getsize(path)))
    damaged(t, "run", garbage, FAILED, [r"store/commit: offset \d+: expected a valid commit record, found none"])


@test
def a_truncated_commit_file_is_named(t):
    """C02"""
    damaged(t, "run", lambda run: os.truncate(os.path.join(store_of(run), "commit"), 4096), FAILED,
            [r"store/commit: size: expected \d+ bytes, found 4096"])


@test
def a_missing_slots_file_is_named(t):
    damaged(t, "run", lambda run: os.unlink(os.path.join(store_of(run), "slots")), FAILED,
            [r"store/slots: missing, though the store is complete"])


@test
def a_missing_directory_of_two_is_named(t):
    directories = [os.path.join(t.dir, "store-a"), os.path.join(t.dir, "store-b")]
    for gone in directories:
        name = os.path.basename(gone)
        away = gone + ".away"
        run = damaged(t, "run-" + name, lambda run, g=gone, a=away: os.rename(g, a), USER,
                      [re.escape(gone) + ".*missing", "mounted"], memory={"offload_dir": directories})
        check(not os.path.exists(gone), "%s was made" % gone)
        os.rename(away, gone)
        run.ok()
        check_undisturbed(run)
        mtlaunch("clean", run.dir, status=DONE)


@test
def directories_in_each_others_place_are_told_and_not_to_be_freed(t):
    a, b, c = (os.path.join(t.dir, "store-" + name) for name in "abc")

    def swap():
        for old, new in ((a, c), (b, a), (c, b)):
            os.rename(old, new)

    run = disk_run(t.dir, memory={"offload_dir": [a, b]})
    run.ok("--run.stop_after_step=2", status=STOPPED)
    swap()
    before = tree(a), tree(b)
    result = run.ok(status=USER)
    check_said(result, "expected directory 1 of offload_dir, found directory 2", "each other's place")
    check("clean" not in result.err, "a hint that would cost the run: %s" % result)
    equal((tree(a), tree(b)), before, "the directories")
    swap()
    run.ok()
    check_undisturbed(run)


def flip_committed_bit(run):
    """Flips one bit of the newest commit in a slot; returns what digest said."""
    path = os.path.join(store_of(run), "slots")
    for offset in range(10000, os.path.getsize(path), 20000):
        with open(path, "r+b") as f:
            f.seek(offset)
            old = f.read(1)
            f.seek(offset)
            f.write(bytes([old[0] ^ 4]))
        result = mtlaunch("digest", run.dir)
        if result.status != DONE:
            return offset, result
        overwrite(path, offset, old)
    raise TestFailure("no flipped bit was noticed")


@test
def a_flipped_bit_in_the_newest_commit_goes_one_commit_back(t):
    run = disk_run(t.dir)
    run.ok("--run.stop_after_step=2", status=STOPPED)
    offset, result = flip_committed_bit(run)
    equal(result.status, FAILED, "status of digest")
    check_said(result, r"store/slots", r"offset \d+")
    t.note("flipped a bit at %d: %s" % (offset, result.err.strip().splitlines()[0]))
    result = run.ok()
    check_said(result, r"commit \d+ is damaged", "resuming after step 1")
    check_undisturbed(run)


@test
def a_line_of_the_metrics_that_is_gone_is_told_by_the_next_start(t):
    run = disk_run(t.dir)
    run.ok("--run.stop_after_step=3", status=STOPPED)
    with open(run.metrics_path) as f:
        lines = f.readlines()
    with open(run.metrics_path, "w") as f:
        f.writelines(line.replace('{"step": 2,', 'x"step": 2,') for line in lines if '{"step": 1,' not in line)
    result = run.ok()
    check_said(result, r"metrics.jsonl: expected a line of each of 3 committed steps, found 1 whole")
    equal(run.steps(), [3, 4], "step lines")
    equal(run.digest(), check_undisturbed.__self__.learn().digest, "digest")
    run = disk_run(t.dir, "whole")
    run.ok("--run.stop_after_step=3", status=STOPPED)
    check("whole ones" not in run.ok().err, "a false alarm")


@test
def a_file_size_limit_is_told_and_costs_nothing(t):
    """The kernel's answer to a write past it is a deadly signal, unless one asks for an error."""
    run = disk_run(t.dir)
    for limit in (100, 65536, 1000000):
        result = mtlaunch(run.file, status=FAILED,
                          preexec=lambda n=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)))
        check_said(result, "File too large")
    run.ok()
    check_undisturbed(run)


def limited(resource_name, soft, hard):
    return lambda: resource.setrlimit(getattr(resource, resource_name), (soft, hard))


@test
def limits_under_which_a_library_would_abort_or_spin_are_refused_with_numbers(t):
    """libzmq aborts without descriptors; OpenBLAS tries for ever to map a buffer."""
    run = disk_run(t.dir)
    for name, limit, what in (("RLIMIT_NOFILE", 10, "open files: expected to be allowed 64, found a limit of 10"),
                              ("RLIMIT_NOFILE", 70, "expected to be allowed 72, found a limit of 70"),
                              ("RLIMIT_AS", 100 << 20, "address space: each worker needs"),
                              ("RLIMIT_DATA", 30 << 20, "private memory: each worker needs")):
        result = mtlaunch(run.file, "--optimizer.workers=2", status=FIT, timeout=20, preexec=limited(name, limit, limit))
        check_said(result, what)
        check_said(result, "ulimit")
        check(not os.path.exists(run.dir), "a refused start left %s" % run.dir)
    equal(mtlaunch("stop", "nowhere", status=FIT, preexec=limited("RLIMIT_NOFILE", 10, 10)).out, "", "said")
    mtlaunch(run.file, status=DONE, preexec=limited("RLIMIT_NOFILE", 12, 4096))  # a soft limit is raised
    check_undisturbed(run)


# -- the cache of text --


@test
def a_disk_that_is_full_while_text_is_tokenized_leaves_nothing_that_is_believed(t):
    if not os.path.exists(os.path.join(ROOT, "build", "tokenizer", "requirements.txt")):
        skip("no tokenizing environment: `make tokenizer` makes it")
    folder = samples.write_tokenizer(write_model(os.path.join(t.dir, "model"), vocab_size=samples.VOCAB_SIZE,
                                                 eos_token_id=2), "chatml")
    file = samples.write_records(os.path.join(t.dir, "a.jsonl"), [samples.conversation(samples.Dice("full", i), "system")
                                                                  for i in range(400)])

    def text_run(name, cache):
        return tiny_run(t.dir, name, folder, file, model={"tokenizer": ""}, data={"cache_dir": cache},
                        training={"steps": 2, "seq_len": 128})

    whole = text_run("whole", os.path.join(t.dir, "cache"))
    whole.ok()
    size = max(os.path.getsize(os.path.join(t.dir, "cache", n)) for n in os.listdir(os.path.join(t.dir, "cache")))
    for i, room in enumerate((4096, size // 2, size - 4096, size + 4096)):
        with mounted(os.path.join(t.dir, "small%d" % i), room & -4096) as small:
            run = text_run("run%d" % i, small)
            result = run.ok(status=FIT)  # the last one: by io_worker, which has no room for what it scanned
            check_said(result, "No space left", re.escape(small), "free some space, or set data.cache_dir")
            whole_ones = [n for n in os.listdir(small) if not n.endswith(".tmp")]
            check(len(whole_ones) == (i == 3), "left in the cache with %d bytes: %s" % (room, os.listdir(small)))
            subprocess.run(["mount", "-o", "remount,size=%d" % (4 << 20), small], check=True)
            run.ok()
            equal(run.hashes(), whole.hashes(), "state hashes")


enter_namespace()
main()
