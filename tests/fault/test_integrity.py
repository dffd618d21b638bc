#!/usr/bin/env python3
"""A flipped bit, anywhere between a drive and a processor, is found before it can count.

Memory: one bit of a live run's shared segment is changed between the moment when something is written
there and the moment when it is used. Disk: a slot is damaged, read wrongly once, or never written. The
run ends with the bits of an undisturbed one, or stops and resumes to them; never with others. Where a
hash is what finds it, the same flip with hashes off must change the bits, or it proved nothing.
"""
import os
import re
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import *
import segment

STEPS = 8
EMBEDDING_PAGES = 5  # of 4096 elements; a row of a token that does not occur matters to nobody
RINGS = ("MICROBATCH", "MICROBATCH_RETURN", "WEIGHTS", "WEIGHTS_RETURN", "GRADIENT", "GRADIENT_RETURN", "STATE",
         "STATE_RETURN", "WRITEBACK")


def integrity_run(directory, name="run", **changes):
    sections = {"training": {"steps": STEPS}, "optimizer": {"workers": 2}, "memory": {"page_elements": 4096},
                "checkpoint": {"export_interval": 0}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(directory, name, **sections)


class Undisturbed:
    result = None

    @classmethod
    def get(cls):
        if cls.result is None:
            directory = tempfile.mkdtemp(prefix="mt-undisturbed-")
            run = integrity_run(directory)
            run.ok()
            cls.result = run.hashes(), run.digest()
            shutil.rmtree(directory)
        return cls.result


def check_undisturbed(run):
    hashes, digest = Undisturbed.get()
    run.check_steps(STEPS)
    equal(run.hashes(), hashes, "state hashes")
    equal(run.digest(), digest, "digest")


def ends_right(run, live, timeout=60):
    """To the end; a clean stop must resume. Returns how the run got there."""
    status = live.wait(timeout)
    check(status in (DONE, FAILED), "status %s: %s" % (status, live.output()))
    if status == FAILED:
        check("start it again to resume" in live.output() or "resume" in live.output(), live.output())
        run.ok()
    check_undisturbed(run)
    tiers = [e["tier"] for e in run.events("restart")]
    return ("stopped, " if status == FAILED else "") + (" ".join(tiers) or "no restart")


class Disturbed:
    """A live run whose segment is at hand; whoever is still stopped at the end goes on."""

    def __init__(self, t, name, env=None, **changes):
        self.run = integrity_run(t.dir, name, **changes)
        self.env = env

    def __enter__(self):
        segment.program()  # compiling takes longer than a run
        self.live = self.run.start(env=self.env)
        self.segment = segment.Segment(self.live.pid)
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            self.segment.release()
        self.segment.close()
        self.live.__exit__()


# -- frames --

HASHES_OFF = {"MTLAUNCH_FRAME_HASHES": "0"}


def flip_frame(t, ring, offset, bit, env=None, name="run", step=3, page=0):
    """Flips a bit of the payload of a frame that waits on `ring`. Returns (run, live output, how)."""
    with Disturbed(t, name, env) as d:
        at = d.segment.hold(ring, step)
        waiting = wait_until(lambda: next((w for w in d.segment.waiting(ring) if w["page"] >= page), None), 20,
                             "page %d on %s" % (page, ring))
        t.note("%s frame of page %d, step %d (in step %d), byte %d, bit %d" % (
            ring, waiting["page"], waiting["step"], at, offset, bit))
        d.segment.flip(d.segment.payload(ring, waiting) + offset, bit)
        d.segment.release()
        if env:
            equal(d.live.wait(), DONE, "status: %s" % d.live.output())
            return d.run, d.live.output(), None
        how = ends_right(d.run, d.live)
        t.note(how)
        return d.run, d.live.output(), how


def found_by_hash(t, ring, offset, bit, words, tier, page=0):
    run, output, how = flip_frame(t, ring, offset, bit, name="on", page=page)
    check(words in output, "the obituary lacks %r:\n%s" % (words, output))
    equal(how, tier, "how it went on")
    run, output, _ = flip_frame(t, ring, offset, bit, HASHES_OFF, name="off", page=page)
    check(run.hashes() != Undisturbed.get()[0], "without hashes the flipped bit changes nothing")
    equal(run.events("worker_exit"), [], "without hashes: deaths")


@test
def a_bit_of_a_microbatch_frame(t):
    found_by_hash(t, "MICROBATCH", 0, 1, "tokens of page", "T2")


@test
def a_bit_of_a_weights_frame(t):
    found_by_hash(t, "WEIGHTS", 4 * t.rng.randrange(4096) + 2, 6, "weights of page", "T2", page=EMBEDDING_PAGES)


@test
def a_bit_of_a_gradient_frame(t):
    found_by_hash(t, "GRADIENT", 4 * t.rng.randrange(64) + 2, 6, "gradient of page", "T1")


# An image carries its own digests, whatever MTLAUNCH_FRAME_HASHES says: parts 0 weights, 2 and 3 moments.

def flip_image(t, name, ring, part, step, frame="frame"):
    with Disturbed(t, name) as d:
        d.segment.hold(ring, step)
        waiting = d.segment.waiting(ring)[0]
        image = d.segment.layout["image"]
        offset = image["offset"][part] + t.rng.randrange(image["capacity"][part])
        t.note("%s: page %d, step %d, part %d, byte %d" % (ring, waiting["page"], waiting["step"], part, offset))
        d.segment.flip(d.segment.payload(ring, waiting) + offset, t.rng.randrange(8))
        d.segment.release()
        how = ends_right(d.run, d.live)
        t.note(how)
        return d.run, d.live.output(), how


def log_of(run, worker):
    with open(os.path.join(run.dir, "logs", worker + ".log")) as f:
        return f.read()


@test
def a_bit_of_a_state_frame(t):
    for part in (0, 2, 3):
        run, _, how = flip_image(t, "part%d" % part, "STATE", part, 3)
        equal(how, "no restart", "how it went on")
        equal(run.events("worker_exit"), [], "deaths")
        check("reading it once more" in log_of(run, "io_worker.0"), "the log lacks the second read")


@test
def a_bit_of_an_out_frame_that_is_on_its_way_to_the_store(t):
    for part in (0, 3):
        for step in (3, STEPS):
            run, output, how = flip_image(t, "part%d-%d" % (part, step), "WRITEBACK", part, step)
            check(how != "no restart" or part == 0, "nobody noticed")


# -- rings --


def flip_ring(t, name, ring, where, step):
    """Flips a random bit of a waiting descriptor, of the head or of the tail."""
    with Disturbed(t, name) as d:
        d.segment.hold(ring, step)
        head, tail, depth = d.segment.ring(ring)
        at = {"head": head, "tail": tail, "descriptor": t.rng.choice(d.segment.waiting(ring))["at"]}[where]
        bit = t.rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 20, 63)) if where != "descriptor" else t.rng.randrange(512)
        t.note("%s, %s: bit %d; head %d, tail %d, depth %d" % ((ring, where, bit) + d.segment.cursors(ring) + (depth,)))
        d.segment.flip(at, bit)
        d.segment.release()
        how = ends_right(d.run, d.live)
        t.note(how)
        return d.run, d.live.output(), how


def ring_test(t, ring, where):
    flip_ring(t, "run", ring, where, 3)


for _ring in RINGS:
    for _where in ("descriptor", "head", "tail"):
        add_test("a_bit_of_ring_%s_%s" % (_ring, _where), lambda t, r=_ring, w=_where: ring_test(t, r, w))

main()
