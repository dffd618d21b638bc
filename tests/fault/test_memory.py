#!/usr/bin/env python3
"""RAM: loading takes no more than training, limits of cgroups count, tensors may be larger than any buffer."""
import contextlib
import os
import random
import re
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *

MB = 1 << 20


def large_model(directory):
    """5 M parameters, a checkpoint of 20 MB in one file: many times what the processes need besides."""
    shape = {"hidden_size": 128, "intermediate_size": 320, "vocab_size": 16384, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = llama_config(**shape)
    rng = random.Random(3)
    block = struct.pack("<4096f", *[rng.gauss(0.0, 0.02) for _ in range(4096)])
    tensors = {}
    for name, dims in tensor_shapes(config).items():
        n = 4
        for d in dims:
            n *= d
        tensors[name] = ("F32", dims, (block * (n // len(block) + 1))[:n])
    return write_pretrained(os.path.join(directory, "large"), tensors, **shape)


def large_run(t, name="run", **changes):
    sections = {"model": {"init": "pretrained"}, "training": {"steps": 4}, "memory": {"page_elements": 65536}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(t.dir, name, hf=large_model(t.dir), **sections)


def status_bytes(pid, field):
    with open("/proc/%d/status" % pid) as f:
        return int(re.search(r"^%s:\s+(\d+) kB" % field, f.read(), re.M).group(1)) << 10


@test
def loading_a_checkpoint_takes_no_more_memory_than_training(t):
    """C15: it streams; neither the checkpoint nor a tensor is ever whole in memory beside its pages."""
    run = large_run(t, training={"steps": 100000})
    with run.start() as live:
        live.wait_ready()
        peak = {name: status_bytes(pid, "VmHWM") for pid, name in live.children()}
        live.wait_committed(3)
        steady = {name: status_bytes(pid, "VmRSS") for pid, name in live.children()}
        live.signal(signal.SIGTERM)
        equal(live.wait(30), STOPPED, "status: %s" % live.output())
    t.note("peak while loading %s, steady %s MB" % (
        {n: b // MB for n, b in peak.items()}, {n: b // MB for n, b in steady.items()}))
    for name in peak:
        check(peak[name] <= steady[name] + 2 * MB, "%s: %d bytes while loading, %d while training" % (
            name, peak[name], steady[name]))


@contextlib.contextmanager
def memory_cgroup(limit):
    """A group with this limit below our own, of version 1 or 2. Yields (preexec, peak in bytes)."""
    group = None
    with open("/proc/self/cgroup") as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                group = ("/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
            elif not controllers and group is None:
                group = ("/sys/fs/cgroup" + path, "memory.max", "memory.peak")
    check(group, "no cgroup in /proc/self/cgroup")
    directory = os.path.join(group[0], "mt-test-%d" % os.getpid())
    try:
        os.mkdir(directory)
        with open(os.path.join(directory, group[1]), "w") as f:
            f.write(str(limit))
    except OSError as e:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
        skip("no cgroup of our own: %s" % e)

    def enter():
        with open(os.path.join(directory, "cgroup.procs"), "w") as f:
            f.write(str(os.getpid()))

    def peak():
        with open(os.path.join(directory, group[2])) as f:
            return int(f.read())
    try:
        yield enter, peak
    finally:
        wait_until(lambda: not open(os.path.join(directory, "cgroup.procs")).read(), 10, "an empty cgroup")
        os.rmdir(directory)


@test
def the_limit_of_a_cgroup_counts_like_ram(t):
    """C15: too small is refused with the arithmetic; large enough runs within it."""
    run = large_run(t)
    with memory_cgroup(40 * MB) as (enter, _):
        result = mtlaunch(run.file, preexec=enter, status=FIT)
        budget = re.search(r"the budget is ([\d.]+) MB", result.err)
        check(budget and float(budget.group(1)) <= 40, "no budget below the limit: %s" % result)
        check("needs" in result.err and "shared memory" in result.err, "no arithmetic: %s" % result)
        check(not os.path.exists(run.dir), "left: %s" % run.dir)
    with memory_cgroup(256 * MB) as (enter, peak):
        mtlaunch(run.file, preexec=enter, status=DONE)
        t.note("peak %d MB of 256" % (peak() // MB))
    run.check_steps(4)


@test
def a_tensor_larger_than_every_buffer_just_works(t):
    """C06: pages cut it. The weights are the same for any page size, the smallest is a 512th of the embedding."""
    weights = set()
    for elements in (4096, 65536, 4 * MB):
        run = large_run(t, "pages-%d" % elements, training={"steps": 2}, memory={"page_elements": elements})
        run.ok()
        weights.add(run.digest()[2])
    equal(len(weights), 1, "weights hashes of three page sizes")


@test
def an_embedding_of_256k_by_8k_is_refused_at_once_where_it_does_not_fit(t):
    """C06: before anything is read or written, with the arithmetic."""
    folder = write_model(os.path.join(t.dir, "huge"), hidden_size=8192, vocab_size=262144, intermediate_size=28672,
                         num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8, head_dim=128)
    run = tiny_run(t.dir, hf=folder, memory={"page_elements": 4 * MB, "max_ram": "16GB"})
    for command in ([run.file], ["validate", run.file]):
        result = mtlaunch(*command, status=FIT, timeout=30)
        check(re.search(r"needs [\d.]+ GB of shared memory.*the budget is 16", result.err, re.S), result.err)
        check(not os.path.exists(run.dir), "left: %s" % run.dir)


main()
