#!/usr/bin/env python3
"""A flipped bit, anywhere between a drive and a processor, is found before it can count.

Memory: one bit of a live run's shared segment is changed between the moment when something is written
there and the moment when it is used. Disk: a slot is damaged, read wrongly once, or never written. The
run ends with the bits of an undisturbed one, or stops and resumes to them; never with others. Where a
hash is what finds it, the same flip with hashes off must change the bits, or it proved nothing.
"""
import os
import re
import shutil
import signal
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE, os.path.join(os.path.dirname(HERE), "kill")]
from harness import *
import chaos
import segment

STEPS = 8
EMBEDDING_PAGES = 5  # of 4096 elements; a row of a token that does not occur matters to nobody
RINGS = ("MICROBATCH", "MICROBATCH_RETURN", "WEIGHTS", "WEIGHTS_RETURN", "GRADIENT", "GRADIENT_RETURN", "STATE",
         "STATE_RETURN", "WRITEBACK")


def integrity_run(directory, name="run", hf=None, **changes):
    sections = {"training": {"steps": STEPS}, "optimizer": {"workers": 2}, "memory": {"page_elements": 4096},
                "checkpoint": {"export_interval": 0}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return tiny_run(directory, name, hf, **sections)


undisturbed = Undisturbed(integrity_run)


def ends_right(run, live, timeout=60, truth=undisturbed):
    """To the end; a clean stop must resume. Returns how the run got there."""
    status = live.wait(timeout)
    check(status in (DONE, FAILED), "status %s: %s" % (status, live.output()))
    if status == FAILED:
        check("start it again to resume" in live.output() or "resume" in live.output(), live.output())
        run.ok()
    truth.check_state(run)
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
    check(run.hashes() != undisturbed.hashes(), "without hashes the flipped bit changes nothing")
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

def flip_image(t, name, ring, part, step):
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
    for part in (0, 3):
        run, _, how = flip_image(t, "part%d" % part, "STATE", part, 3)
        equal(how, "no restart", "how it went on")
        equal(run.events("worker_exit"), [], "deaths")
        check("reading it once more" in log_of(run, "io_worker.0"), "the log lacks the second read")


@test
def a_bit_of_an_out_frame_that_is_on_its_way_to_the_store(t):
    """By whoever reads it first: gpu_worker the weights, the next update the moments, after the last step the
    export. The commit that names it is given up."""
    for part, step in ((0, 3), (3, 3), (2, STEPS)):
        _, _, how = flip_image(t, "part%d-%d" % (part, step), "WRITEBACK", part, step)
        equal(how, "T2", "how it went on")


# -- rings --

CURSOR_BITS = (0, 1, 2, 3, 5, 40)  # small ones hide what was lent, or lend it twice; large ones are absurd


def flip_ring(t, name, ring, where):
    """Flips a random bit of a waiting descriptor, of the head or of the tail."""
    with Disturbed(t, name) as d:
        d.segment.hold(ring, 3)
        head, tail, depth = d.segment.ring(ring)
        at = {"head": head, "tail": tail, "descriptor": t.rng.choice(d.segment.waiting(ring))["at"]}[where]
        bit = t.rng.randrange(512) if where == "descriptor" else t.rng.choice(CURSOR_BITS)
        found = "%s, %s: bit %d; head %d, tail %d, depth %d" % ((ring, where, bit) + d.segment.cursors(ring) + (depth,))
        d.segment.flip(at, bit)
        d.segment.release()
        t.note("%s: %s" % (found, ends_right(d.run, d.live)))
        equal([e["tier"] for e in d.run.events("restart")], ["T2"], "restarts")
        words = d.run.events("worker_exit")[0]["words"]
        check("ring" in words, "last words: %s" % words)
    shutil.rmtree(d.run.dir)


@test
def a_bit_of_a_descriptor(t):
    for ring in t.rng.sample(RINGS, 3 * SCALE):
        flip_ring(t, ring, ring, "descriptor")


@test
def a_bit_of_a_cursor(t):
    places = [(ring, where) for ring in RINGS for where in ("head", "tail")]
    for ring, where in t.rng.sample(places, 6 * SCALE):
        flip_ring(t, "%s-%s" % (ring, where), ring, where)


# -- counters of the step protocol --


@test
def a_counter_that_falls_back_is_noticed_when_nothing_moves(t):
    """The launcher waits for a backward that it thinks undone, every worker for the launcher."""
    with Disturbed(t, "run", {"MTLAUNCH_SILENCE_S": "1"}) as d:
        step = d.segment.rest(3)
        d.segment.flip(d.segment.fact_at("gpu", "backward_step"), (step & -step).bit_length() - 1)
        d.segment.release()
        equal(ends_right(d.run, d.live), "T2", "how it went on")
        check("nothing moves" in d.live.output(), d.live.output())


@test
def a_counter_that_leaps_is_no_end_of_the_launcher(t):
    with Disturbed(t, "run") as d:
        d.segment.rest(3)
        d.segment.flip(d.segment.fact_at("io", "complete_step"), 40)
        d.segment.release()
        equal(ends_right(d.run, d.live), "T2", "how it went on")
        check("io_worker says" in d.live.output(), d.live.output())


@test
def numbers_of_a_generation_that_cannot_be_are_no_end_of_the_launcher(t):
    """Flipped when gpu_worker has written them and not announced them yet: prompts, tokens of each at most, tokens of one."""
    for field, offset in (("prompts", 0), ("tokens_max", 8), ("count", 16)):
        once = os.path.join(t.dir, field)
        with Disturbed(t, "run-" + field, {"MTLAUNCH_FAULT": "gpu_generated@gpu_worker.0:stop:1", "MTLAUNCH_FAULT_ONCE": once},
                       eval={"interval": 2, "sample_prompts": ["The"], "sample_tokens": 3}) as d:
            d.live.wait_for(lambda: os.path.exists(once) and process_state(d.segment.pid_of("gpu"))[0] == "T", "a generation")
            d.segment.flip(d.segment.layout["regions"]["GENERATED"]["offset"] + offset, 40)
            os.kill(d.segment.pid_of("gpu"), signal.SIGCONT)
            equal(ends_right(d.run, d.live), "T2", "how it went on, %s" % field)
            check("what gpu_worker generated" in d.live.output(), d.live.output())


# -- page tables --


class Tables:
    """The page tables of a live run: two copies of the state, four tables."""

    def __init__(self, segment):
        self.segment, self.at = segment, segment.layout["regions"]["PAGE_TABLE"]["offset"]
        self.sizes = segment.layout["page_table"]
        copies = [self.at + i * self.sizes["state_bytes"] for i in range(self.sizes["states"])]
        self.copies = sorted(copies, key=lambda at: segment.u64(at + self.sizes["sequence"]))  # newest last
        self.pages = segment.u64(copies[0] + self.sizes["sequence"] + 8)

    def place(self, role):
        """The table that anchor 0, committed 1, complete 2 or forming 3 is in."""
        return self.segment.u32(self.copies[-1] + self.sizes["place"] + 4 * role)

    def entry(self, place, page):
        first = self.at + self.sizes["states"] * self.sizes["state_bytes"]
        return first + (place * self.pages + page) * self.sizes["entry_bytes"]


def flip_tables(t, name, choose, kill_io=False, **changes):
    """choose(tables): (offset, bit). With kill_io: whoever comes next must make sense of it."""
    with Disturbed(t, name, **changes) as d:
        d.segment.rest(3)
        offset, bit = choose(Tables(d.segment))
        d.segment.flip(offset, bit)
        if kill_io:
            os.kill(d.segment.pid_of("io"), signal.SIGKILL)
        d.segment.release()
        t.note("%s: %s" % (name, ends_right(d.run, d.live)))
    shutil.rmtree(d.run.dir)


@test
def a_bit_of_a_page_table_entry(t):
    def entry(role):
        return lambda tables: (tables.entry(tables.place(role), t.rng.randrange(tables.pages)), t.rng.randrange(1024))

    def slot(role):
        return lambda tables: (tables.entry(tables.place(role), tables.pages - 1) + tables.sizes["slot"],
                               t.rng.randrange(2))

    trials = [("%s-%s" % (what, "anchor committed complete forming".split()[role]), choose(role))
              for what, choose in (("entry", entry), ("slot", slot)) for role in range(4)]
    for name, choose in t.rng.sample(trials, len(trials) if SCALE > 1 else 2):
        flip_tables(t, name, choose)
        flip_tables(t, name + "-killed", choose, kill_io=True)
    flip_tables(t, "slot-committed-3", slot(1), memory={"durability": 3})


@test
def a_bit_of_the_state_of_the_page_tables(t):
    for which, name in ((-1, "newest"), (0, "older")):
        def state(tables, i=which):
            return tables.copies[i], t.rng.randrange(8 * tables.sizes["state"])
        flip_tables(t, name, state)
        flip_tables(t, name + "-killed", state, kill_io=True)


# -- the store --


def slots_of(run):
    """{page: {version: offset in the slots file}}, read from the headers that lie there."""
    with open(os.path.join(run.dir, "store", "slots"), "rb") as f:
        data = f.read()
    found = {}
    for at in range(0, len(data), 4096):
        if data[at:at + 8] == data[:8]:
            page, version = struct.unpack_from("<QQ", data, at + 32)
            found.setdefault(page, {})[version] = at
    return found


def damage_slot(run, offset):
    path = os.path.join(run.dir, "store", "slots")
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 16]))
        f.flush()
        os.fsync(f.fileno())


def check_names_place(text, offsets):
    for offset in offsets:
        check(re.search(r"store/slots[,:] offset %d\b" % offset, text),
              "no file and offset %d in: %s" % (offset, text[-2000:]))


@test
def a_slot_that_changes_on_disk_costs_one_commit(t):
    with Disturbed(t, "run") as d:
        step = d.segment.rest(4)
        versions = slots_of(d.run)
        page = max(versions)  # read last
        equal(sorted(versions[page])[-1], step - 1, "newest version of page %d" % page)
        damage_slot(d.run, versions[page][step - 1] + 4096 + t.rng.randrange(1000))
        d.segment.release()
        equal(ends_right(d.run, d.live), "T2", "how it went on")
        check("reading it once more" in log_of(d.run, "io_worker.0"), "no second read in the log")
        check_names_place(d.live.output(), [versions[page][step - 1]])
        equal([e["step"] for e in d.run.events("resume")], [step - 2], "resumed after step")


@test
def the_same_page_damaged_in_both_commits_stops_the_run_and_changes_nothing(t):
    with Disturbed(t, "run") as d:
        step = d.segment.rest(4)
        versions = slots_of(d.run)
        page = max(versions)
        for version in (step - 1, step - 2):
            damage_slot(d.run, versions[page][version] + 5000)
        d.segment.release()
        equal(d.live.wait(), FAILED, "status: %s" % d.live.output())
        places = [versions[page][version] + 4096 for version in (step - 1, step - 2)]  # where the weights begin
        check_names_place(d.live.output(), places)
    before = tree(os.path.join(d.run.dir, "store"))
    result = d.run.ok(status=FAILED)
    check_names_place(result.err, places)
    equal(tree(os.path.join(d.run.dir, "store")), before, "the store after a refused start")
    equal(d.run.steps(), list(range(1, step)), "step lines")


def liar(t, name, what, page, version, times):
    """The environment of a run whose drive lies (disk_lies.c), and how often it did so far."""
    library = os.path.join(t.dir, "disk_lies.so")
    if not os.path.exists(library):
        subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-I.", "-shared", "-fPIC", "-o", library,
                        "tests/fault/disk_lies.c", "-ldl"], cwd=ROOT, check=True)
    path = os.path.join(t.dir, "lie-" + name)
    env = {"LD_PRELOAD": library, "TEST_DISK_LIE": "%s:%d:%d:%d:%s" % (what, page, version, times, path)}
    return env, lambda: len([n for n in os.listdir(t.dir) if n.startswith(os.path.basename(path) + ".")])


def lied_to(t, name, what, page, version, times=1, env=None, arguments=(), **changes):
    """A run with such a drive. Returns (run, tiers of its restarts, all it said and logged)."""
    changes.setdefault("memory", {})["io_engine"] = "sync"
    run = integrity_run(t.dir, name, **changes)
    lies, told = liar(t, name, what, page, version, times)
    if arguments:
        run.ok(*arguments, status=STOPPED)
    result = run.ok(env=dict(lies, **(env or {})))
    equal(told(), times, "lies told: %s" % result)
    return run, [e["tier"] for e in run.events("restart")], result.err + log_of(run, "io_worker.0")


@test
def a_read_that_is_wrong_once_is_read_again_and_costs_nothing(t):
    """While a step is applied, at a start, in an export: each time the second read is right."""
    for name, version, arguments in (("apply", 3, ()), ("start", 4, ("--run.stop_after_step=4",)),
                                     ("export", STEPS, ())):
        run, tiers, text = lied_to(t, name, "read", 20, version, arguments=arguments)
        undisturbed.check_state(run)
        equal(tiers, [], "restarts")
        equal(run.events("worker_exit"), [], "deaths")
        check("damaged" not in text, text)
        check(name == "start" or "reading it once more" in text, "the log of %s lacks the second read: %s" % (name, text))


@test
def a_read_that_is_wrong_twice_costs_a_restart_and_no_commit(t):
    run, tiers, text = lied_to(t, "run", "read", 20, 3, times=2)
    undisturbed.check_state(run)
    equal(tiers, ["T2"], "restarts")
    equal([e["step"] for e in run.events("resume")], [3], "resumed after step")


@test
def a_write_that_is_lost_costs_one_commit(t):
    """Found by the next update's read, or, after the last step, by the export's."""
    for version in (3, STEPS):
        run, tiers, text = lied_to(t, "version-%d" % version, "write", 20, version)
        undisturbed.check_state(run)
        equal(tiers, ["T2"], "restarts")
        equal([e["step"] for e in run.events("resume")], [version - 1], "resumed after step")
        check("is damaged; resuming from the one before it" in text, text)


@test
def a_write_lost_before_a_skipped_step_is_found_before_the_older_commit_gives_way(t):
    """Step 4 is skipped: no update reads what step 3 wrote, and the commit of 4 would overwrite the table of
    commit 2, the last whole one. The read-back before it must find the loss."""
    skip = {"MTLAUNCH_FLIP_GRADIENT": "4:30"}
    changes = {"training": {"max_grad_norm": 0.0}}
    plain = integrity_run(t.dir, "plain", **changes)
    plain.ok(env=skip)
    equal([l["step"] for l in plain.step_lines() if l["skipped"]], [4], "skipped steps")
    for durability in (1, 3):
        run, tiers, text = lied_to(t, "lost-%d" % durability, "write", 20, 3, env=skip,
                                   memory={"durability": durability}, **changes)
        run.check_steps(STEPS)
        equal(run.hashes(), plain.hashes(), "state hashes")
        equal(run.digest(), plain.digest(), "digest")
        equal(tiers, ["T2"], "restarts")
        words = run.events("worker_exit")[0]["words"]
        check(durability > 1 or "read-back of the newest commit" in words, "last words: %s" % words)
        order = [(e["event"], e.get("step")) for e in run.events() if e["event"] in ("commit", "worker_exit", "resume")]
        died = order.index(("worker_exit", None))
        check(("commit", 4) not in order[:died], "step 4 was committed before the loss was found: %s" % order)


# -- experts: pages of their own, most of them of experts that no token of a step went to --

EXPERTS = range(32, 32 + 24 * 3)  # pages of chaos.py's qwen3moe: embedding 5, a dense block 16, attention and router 11
EXPERT_ELEMENTS = 1536  # of each; the rest of a page is padding


def experts_run(directory, name="run", **changes):
    hf = chaos.write_config(os.path.join(directory, "experts"), "qwen3moe")
    return integrity_run(directory, name, hf, **changes)


experts_undisturbed = Undisturbed(experts_run)


def disturbed_experts(t, name, env=None):
    d = Disturbed(t, name, env)
    d.run = experts_run(t.dir, name)
    return d


def first_waiting(d, ring, wanted=lambda descriptor: True):
    """The first frame of a page of an expert that is lent on `ring`. Whoever takes from it is stopped: where it has too
    few frames for the pages before, it goes on for a moment at a time."""
    role = {"WEIGHTS": "gpu", "GRADIENT": "opt", "STATE": "opt", "WRITEBACK": "io"}[ring]

    def look():
        return next((w for w in d.segment.waiting(ring) if w["page"] in EXPERTS and wanted(w)), None)

    for _ in range(400):
        with contextlib.suppress(TestFailure):
            return wait_until(look, 0.05)
        d.segment.go_on(role)
        time.sleep(0.002)
        d.segment.stop(role)
    raise TestFailure("no page of an expert on %s" % ring)


def experts_end(d, t, tier, words=""):
    how = ends_right(d.run, d.live, truth=experts_undisturbed)
    equal(how, tier, "how it went on")
    check(words in d.live.output() + log_of(d.run, "io_worker.0"), "told nowhere: %r\n%s" % (words, d.live.output()))


@test
def a_bit_of_the_gradient_of_an_expert_without_tokens(t):
    """It is zero, and what it is flipped to would be the only thing that this expert learns in this step."""
    for env in (None, HASHES_OFF):
        with disturbed_experts(t, "on" if env is None else "off", env) as d:
            d.segment.hold("GRADIENT", 3)

            def is_zero(w):
                return not any(os.pread(d.segment.fd, 4096 * 4, d.segment.payload("GRADIENT", w)))
            waiting = first_waiting(d, "GRADIENT", is_zero)
            t.note("page %d, step %d" % (waiting["page"], waiting["step"]))
            d.segment.flip(d.segment.payload("GRADIENT", waiting) + 4 * t.rng.randrange(EXPERT_ELEMENTS) + 3, 6)
            d.segment.release()
            if env is None:
                experts_end(d, t, "T1", "gradient of page")
            else:
                equal(d.live.wait(), DONE, "status: %s" % d.live.output())
                check(d.run.hashes() != experts_undisturbed.hashes(), "without hashes the flipped bit changes nothing")


@test
def a_bit_of_what_belongs_to_an_expert(t):
    """Its weights on their way to the device, its state on its way to an update and back. The weights may be those of
    an expert that no token asks for: no result would show it, a hash does."""
    for ring, tier, words in (("WEIGHTS", "T2", "weights of page"), ("STATE", "no restart", "reading it once more"),
                              ("WRITEBACK", "T2", "")):
        with disturbed_experts(t, ring) as d:
            d.segment.hold(ring, 3)
            waiting = first_waiting(d, ring)
            at = d.segment.payload(ring, waiting) + 4 * t.rng.randrange(EXPERT_ELEMENTS)
            if ring != "WEIGHTS":
                at += d.segment.layout["image"]["offset"][t.rng.choice((0, 2, 3))]
            t.note("%s: page %d, step %d" % (ring, waiting["page"], waiting["step"]))
            d.segment.flip(at, t.rng.randrange(8))
            d.segment.release()
            experts_end(d, t, tier, words)


@test
def a_slot_of_an_expert_that_changes_on_disk_costs_one_commit(t):
    with disturbed_experts(t, "run") as d:
        step = d.segment.rest(4)
        equal(Tables(d.segment).pages, EXPERTS.stop + 6, "pages of the model")
        versions, page = slots_of(d.run), t.rng.choice(EXPERTS)
        equal(max(versions[page]), step - 1, "newest version of page %d" % page)
        damage_slot(d.run, versions[page][step - 1] + 4096 + t.rng.randrange(1000))
        d.segment.release()
        experts_end(d, t, "T2")
        check_names_place(d.live.output(), [versions[page][step - 1]])
        equal([e["step"] for e in d.run.events("resume")], [step - 2], "resumed after step")


def take_scale():
    """--all: every ring, cursor and table instead of a sample."""
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        return 3
    return 1


SCALE = take_scale()
main()
