#!/usr/bin/env python3
"""The pipeline is real: each process maps what the topology says and no more, only io_worker touches
the store, every opt_worker works, the next step's forward runs behind the optimizer, and memory is
what was configured and stays so.

    tests/step/test_pipeline.py --only memory
"""
import fcntl
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), os.path.join(os.path.dirname(HERE), "kill")]
from harness import *
import probe

MODEL = {"hidden_size": 128, "num_hidden_layers": 6, "intermediate_size": 384, "head_dim": 32}
WORKERS = 3


def pipeline_run(directory, **changes):
    sections = {
        "training": {"steps": 40, "seq_len": 64, "gradient_accumulation_steps": 4},
        "optimizer": {"workers": WORKERS},
        "memory": {"page_elements": 8192},
    }
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(directory, hf=MODEL, **sections)


class Paused:
    """A run stopped (SIGSTOP of the launcher) after some commits, for a look at its processes."""

    def __init__(self, t, **changes):
        self.run = pipeline_run(t.dir, **changes)

    def __enter__(self):
        self.live = self.run.start()
        self.live.wait_committed(3)
        self.live.signal(signal.SIGSTOP)
        self.state = probe.state(self.live.pid)
        check(self.state, "the run ended")
        self.workers = {"io_worker": self.state["io"], "gpu_worker": self.state["gpu"]}
        self.workers.update({"opt_worker.%d" % i: pid for i, pid in enumerate(self.state["pids"])})
        return self

    def __exit__(self, kind, *_):
        self.live.signal(signal.SIGCONT)
        if kind is None:
            equal(self.live.wait(), DONE, "status: %s" % self.live.output())
        self.live.__exit__(None, None, None)


def mappings(pid):
    """[(first byte, byte behind the last, 'r' or 'w')] of the shared segment, by offset in it."""
    found = []
    with open("/proc/%d/maps" % pid) as f:
        for line in f:
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or not fields[5].startswith("/dev/shm/#"):
                continue
            low, high = (int(x, 16) for x in fields[0].split("-"))
            offset = int(fields[2], 16)
            check("x" not in fields[1] and "s" in fields[1], "pid %d maps %s" % (pid, line))
            found.append((offset, offset + high - low, "w" if "w" in fields[1] else "r"))
    return found


def access_of(maps, first, end):
    """What the mappings allow on bytes [first, end) of the segment: '-', 'r', 'w', or 'mixed'."""
    seen, covered = set(), 0
    for low, high, access in maps:
        overlap = min(end, high) - max(first, low)
        if overlap > 0:
            seen.add(access)
            covered += overlap
    if not seen:
        return "-"
    if "w" in seen:
        return "w"
    return "r" if covered >= end - first else "mixed"


def expected_access(place, role, instance):
    kind, _, index = role.partition(".")
    access = place[kind]
    if kind == "opt_worker" and place["instances"] > 1 and instance != int(index):
        return "-"
    return access


@test
def each_process_maps_what_the_topology_says(t):
    with Paused(t) as p:
        places = probe.places(p.live.pid)
        processes = dict(p.workers, launcher=p.live.pid)
        looked = 0
        for role, pid in processes.items():
            maps = mappings(pid)
            check(maps, "%s maps nothing of the segment" % role)
            for place in places:
                for i in range(place["instances"] if place["stride"] else 0):
                    first = place["offset"] + i * place["stride"]
                    found = access_of(maps, first, first + place["stride"])
                    expected = expected_access(place, role, i)
                    # the plan is mapped in its true length, and read before the regions are known
                    if place["name"] == "PLAN" and found == "mixed":
                        found = "r"
                    check(found == expected, "%s, %s[%d], bytes %d to %d: expected %r, found %r" % (
                        role, place["name"], i, first, first + place["stride"], expected, found))
                    looked += 1
        t.note("%d places of %d processes, segment of %d bytes" % (
            looked, len(processes), p.state["segment_bytes"]))


@test
def a_page_has_one_writer_but_for_what_two_move(t):
    """Only OUT frames are writable in two processes: the opt_worker fills them, io_worker registers them
    for its transfers, and io_uring takes no buffer that it could not write."""
    with Paused(t) as p:
        writable = {role: [m for m in mappings(pid) if m[2] == "w"] for role, pid in
                    dict(p.workers, launcher=p.live.pid).items()}
        places = probe.places(p.live.pid)

        def name_of(byte):
            for place in places:
                if place["offset"] <= byte < place["offset"] + place["stride"] * place["instances"]:
                    return place["name"]
            return "byte %d" % byte

        shared = set()
        roles = list(writable)
        for i, a in enumerate(roles):
            for b in roles[i + 1:]:
                for low, high, _ in writable[a]:
                    for low2, high2, _ in writable[b]:
                        if max(low, low2) < min(high, high2):
                            shared.add(name_of(max(low, low2)))
        equal(shared, {"OUT_POOL"}, "writable in two processes")


def store_files(pid, store):
    """{path: flags} of open descriptors below the store."""
    found = {}
    for fd in os.listdir("/proc/%d/fd" % pid):
        try:
            path = os.readlink("/proc/%d/fd/%s" % (pid, fd))
            with open("/proc/%d/fdinfo/%s" % (pid, fd)) as f:
                flags = int(next(line for line in f if line.startswith("flags:")).split()[1], 8)
        except FileNotFoundError:
            continue
        if path.startswith(store + "/"):
            found[os.path.basename(path)] = flags
    return found


def has_direct_io(directory):
    path = os.path.join(directory, "direct")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        return True
    except OSError:
        return False
    finally:
        os.unlink(path)


def is_tmpfs(directory):
    return subprocess.run(["stat", "-f", "-c", "%T", directory], stdout=subprocess.PIPE,
                          text=True).stdout.strip() == "tmpfs"


@test
def only_io_worker_holds_store_files_and_directly(t):
    with Paused(t) as p:
        store = os.path.join(p.run.dir, "store")
        for role, pid in dict(p.workers, launcher=p.live.pid).items():
            found = store_files(pid, store)
            if role != "io_worker":
                equal(sorted(found), ["run.lock"] if role == "launcher" else [], "store files of %s" % role)
                continue
            equal(sorted(found), ["commit", "slots", "superblock"], "store files of io_worker")
            if not has_direct_io(t.dir) or is_tmpfs(t.dir):
                t.note("no direct I/O in %s: O_DIRECT not looked for" % t.dir)
                continue
            for name in ("commit", "slots"):
                check(found[name] & os.O_DIRECT, "%s: flags %o without O_DIRECT" % (name, found[name]))
            check(found["commit"] & os.O_DSYNC, "commit: flags %o without O_DSYNC" % found["commit"])


@test
def each_opt_worker_updates_its_share_of_the_pages(t):
    with Paused(t) as p:
        state = p.state
        updated, pages = state["pages_updated"], state["pages"]
        own = [len(range(i, pages, WORKERS)) for i in range(WORKERS)]
        for i in range(WORKERS):
            low, high = state["committed"] * own[i], (state["committed"] + 2) * own[i]
            check(low <= updated[i] <= high, "opt_worker.%d of %s pages: expected %d to %d updates, found %d" % (
                i, own[i], low, high, updated[i]))
        t.note("pages %d, updates per worker %s after %d commits" % (pages, updated, state["committed"]))
    waits = p.run.step_lines()[-1]["wait_s"]
    equal(sorted(waits), ["gpu_worker.0", "io_worker.0"] + ["opt_worker.%d" % i for i in range(WORKERS)],
          "workers whose waits are told")
    for i in range(WORKERS):
        check("GRADIENT" in waits["opt_worker.%d" % i], "opt_worker.%d: waits of %s" % (i, waits))


@test
def the_next_forward_starts_before_the_commit(t):
    run = pipeline_run(t.dir, training={"steps": 20, "seq_len": 64})
    run.ok()
    commits = run.events("commit")
    equal([c["step"] for c in commits], list(range(1, 21)), "commit events")
    overlapped = [c for c in commits if c["next_forward_ran_s"] > 0]
    t.note("%d of 19 commits came while the next forward ran, %.1f ms on average" % (
        len(overlapped), 1e3 * sum(c["next_forward_ran_s"] for c in overlapped) / max(1, len(overlapped))))
    check(len(overlapped) >= 15, "only %d of 19 commits came behind the next forward" % len(overlapped))
    equal(commits[-1]["next_forward_ran_s"], 0, "after the last step there is no forward")


# -- memory --


def rollup(pid):
    """Anonymous and shared memory of a process, in bytes."""
    out = {}
    with open("/proc/%d/smaps_rollup" % pid) as f:
        for line in f:
            name, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                out[name] = int(rest.split()[0]) * 1024
    return out


def anonymous(pids):
    return sum(rollup(pid)["Anonymous"] for pid in pids)


@test
def memory_is_what_was_configured_and_flat_over_200_steps(t):
    """10 M parameters, so that what processes are made of (libraries, stacks) is small beside it."""
    model = {"hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 768, "head_dim": 32,
             "num_attention_heads": 8, "num_key_value_heads": 4}
    run = tiny_run(t.dir, hf=model, optimizer={"workers": 2}, memory={"page_elements": 131072, "threads": 2},
                   training={"steps": 202, "seq_len": 16, "micro_batch_size": 1, "gradient_accumulation_steps": 1})
    samples = {}
    with run.start() as live:
        for step in range(5, 201, 15):
            live.wait_committed(step, 240)
            seen = probe.state(live.pid)
            if seen is None:
                break
            pids = [live.pid, seen["io"], seen["gpu"]] + seen["pids"]
            samples[seen["committed"]] = anonymous(pids)
        equal(live.wait(240), DONE, "status: %s" % live.output())
    check(len(samples) >= 10, "samples at %s" % sorted(samples))
    configured = seen["segment_bytes"] + seen["device_bytes"]
    total = {step: seen["segment_bytes"] + bytes for step, bytes in samples.items()}
    first, last = total[min(total)], total[max(total)]
    mb = 1e-6
    t.note("configured %.1f MB: segment %.1f, device buffers %.1f" % (
        mb * configured, mb * seen["segment_bytes"], mb * seen["device_bytes"]))
    t.note("measured %.1f MB at step %d, %.1f MB at step %d, highest %.1f (%+.1f %%)" % (
        mb * first, min(total), mb * last, max(total), mb * max(total.values()),
        100.0 * (max(total.values()) / configured - 1)))
    check(max(total.values()) <= 1.10 * configured, "%.1f MB are more than 10 %% above the %.1f MB configured" % (
        mb * max(total.values()), mb * configured))
    check(min(total.values()) >= 0.90 * configured, "%.1f MB are more than 10 %% below the %.1f MB configured" % (
        mb * min(total.values()), mb * configured))
    check(abs(last - first) <= 0.01 * first, "not flat: %.1f MB at first, %.1f MB at last" % (mb * first, mb * last))


main()
