"""Reads and changes the shared segment of a live run from outside, as a failing memory chip would.

    segment = Segment(launcher_pid)
    segment.hold("WEIGHTS")           # a frame is lent there, its borrower is stopped before it used it
    segment.flip(segment.payload("WEIGHTS", segment.waiting("WEIGHTS")[0]), bit)
    segment.release()                 # everybody goes on

layout.c prints where things lie. Moments are brought about with SIGSTOP, not by timing: a launcher that
is stopped decides nothing, so all workers come to rest behind the step at hand; whoever is to use a frame
is stopped then, and the launcher goes on until the frame is lent.
"""
import atexit
import json
import os
import shutil
import signal
import struct
import subprocess
import tempfile

from harness import ROOT, wait_until

_program = []


def program():
    """The path of layout.c's program, compiled once per test program."""
    if not _program:
        directory = tempfile.mkdtemp(prefix="mt-layout-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        path = os.path.join(directory, "layout")
        sources = ["tests/fault/layout.c", "ipc/topology.c", "ipc/page_image.c", "procs/error.c", "procs/check.c"]
        subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-I.", "-o", path] + sources + ["-lxxhash"],
                       cwd=ROOT, check=True)
        _program.append(path)
    return _program[0]


def _open(pid):
    """(descriptor, layout), or None before the plan stands there."""
    path = _segment_path(pid)
    if path:
        done = subprocess.run([program(), path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return os.open(path, os.O_RDWR), json.loads(done.stdout)
    return None


def _segment_path(pid):
    """The newest one: a restart of all workers makes another."""
    directory = "/proc/%d/fd" % pid
    for name in sorted(os.listdir(directory), key=int, reverse=True):
        try:
            target = os.readlink(os.path.join(directory, name))
        except OSError:
            continue
        if target.startswith("/dev/shm/#"):
            return os.path.join(directory, name)
    return None


class Segment:
    def __init__(self, pid):
        self.pid, self.stopped = pid, []
        self.fd, self.layout = wait_until(lambda: _open(pid), 30, "a segment with a plan")

    def close(self):
        os.close(self.fd)

    # -- bytes --

    def u64(self, offset):
        return struct.unpack("<Q", os.pread(self.fd, 8, offset))[0]

    def u32(self, offset):
        return struct.unpack("<I", os.pread(self.fd, 4, offset))[0]

    def flip(self, offset, bit):
        """Bit 0 .. is in the byte at `offset`, bit 8 in the next one, and so on."""
        at = offset + bit // 8
        os.pwrite(self.fd, bytes([os.pread(self.fd, 1, at)[0] ^ 1 << bit % 8]), at)

    # -- counters --

    def order(self, name):
        return self.u64(self.layout["orders"][name])

    def fact_at(self, role, name, index=0):
        region = self.layout["regions"][{"io": "IO_CONTROL", "gpu": "GPU_CONTROL", "opt": "OPT_CONTROL"}[role]]
        return region["offset"] + region["stride"] * index + self.layout["facts"][name]

    def fact(self, role, name, index=0):
        return self.u64(self.fact_at(role, name, index))

    def pid_of(self, role, index=0):
        return self.fact(role, "pid", index) & 0xffffffff

    # -- rings --

    def ring(self, name, index=0):
        r = self.layout["rings"][name]
        head = r["producer"] + r["producer_stride"] * index
        return head, r["consumer"] + r["consumer_stride"] * index, r["depth"]

    def cursors(self, name, index=0):
        head, tail, _ = self.ring(name, index)
        return self.u64(head), self.u64(tail)

    def waiting(self, name, index=0):
        """Descriptors lent and not taken yet, oldest first: {"at": offset, "frame", "page", ...}."""
        producer, _, depth = self.ring(name, index)
        head, tail = self.cursors(name, index)
        fields, out = self.layout["descriptor"], []
        for count in range(tail, head):
            at = producer + fields["first"] + fields["bytes"] * (count % depth)
            out.append({"at": at, "index": index, "frame": self.u32(at + fields["frame"]),
                        "out_frame": self.u32(at + fields["out_frame"]), "page": self.u64(at + fields["page"]),
                        "step": self.u64(at + fields["step"])})
        return out

    def payload(self, name, descriptor):
        """Offset of the frame that it lends."""
        pool = self.layout["regions"][self.layout["rings"][name]["pool"]]
        return pool["offset"] + pool["stride"] * descriptor["index"] + pool["frame_stride"] * descriptor["frame"]

    # -- moments --

    def stop(self, role, index=0):
        pid = self.pid if role == "launcher" else self.pid_of(role, index)
        os.kill(pid, signal.SIGSTOP)
        self.stopped.append(pid)

    def go_on(self, role, index=0):
        pid = self.pid if role == "launcher" else self.pid_of(role, index)
        os.kill(pid, signal.SIGCONT)
        self.stopped.remove(pid)

    def release(self):
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self.stopped = []

    def at_rest(self):
        step, workers = self.order("begin_step"), range(self.layout["opt_workers"])
        return step > 0 and self.fact("gpu", "backward_step") == step and \
            all(self.fact("opt", "norm_step", i) == step for i in workers) and \
            self.fact("io", "complete_step") == self.order("apply_step") and \
            self.fact("io", "committed_step") >= self.order("commit_step")

    def rest(self, step):
        """Step `step` or a later one has its gradient norms, the launcher is stopped before it decides. Returns
        the step."""
        wait_until(lambda: self.order("begin_step") >= step, 30, "step %d" % step)
        self.stop("launcher")
        wait_until(self.at_rest, 30, "all workers at rest")
        return self.order("begin_step")

    def _until_waiting(self, name):
        wait_until(lambda: self.waiting(name), 30, "something lent on %s" % name)

    def hold(self, name, step):
        """Something is lent on this ring and not taken, and who would take it is stopped."""
        step = self.rest(step)
        if name in ("STATE", "STATE_RETURN", "WRITEBACK"):
            self.stop("opt")
            self.go_on("launcher")
            self._until_waiting("STATE")
            if name == "STATE":
                return step
            self.stop("io")
            self.go_on("opt")
        else:
            self.stop("gpu")
            self.go_on("launcher")
            if name == "GRADIENT":
                wait_until(lambda: self.fact("io", "complete_step") == step, 30, "step %d complete" % step)
                self.stop("opt")
                self.go_on("gpu")
            elif name in ("MICROBATCH_RETURN", "WEIGHTS_RETURN"):
                self._until_waiting("MICROBATCH")
                self._until_waiting("WEIGHTS")
                self.stop("io")
                self.go_on("gpu")
        self._until_waiting(name)
        return step

    def taker(self, name):
        """The role that takes from this ring."""
        return self.layout["rings"][name]["to"]


__all__ = ["Segment", "program"]
