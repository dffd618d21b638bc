#!/usr/bin/env python3
"""The power fails at every moment of a run: what is on the disk then recovers to the undisturbed bits (C28).

A short run lives, run directory and store, on a FUSE file system that logs every write, flush and name
in order. From the log the disk is built as it may be found after each event (power_cut.py), and
recovered. `make powercut` does more of the same.
"""
import itertools
import os
import re
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *
from fuse_disk import fuse_disk
from mounts import enter_namespace, mounted
import power_cut
import text_samples as samples

STEPS = 5
REPEATS = int(os.environ.get("POWER_CUT_REPEATS", "0"))  # random images per event; 0: what the test says
RESUMES = int(os.environ.get("POWER_CUT_RESUMES", "0"))
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16}


EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1,
           **{k: v for k, v in llama_config(**SMALL).items() if k not in (
               "architectures", "model_type", "attention_bias", "mlp_bias")}}  # an expert has three pages


def skipping_model(directory, config):
    """A model whose gradient is no number in steps that hold the letter z."""
    tensors = make_weights(config)

    def change(name, edit):
        dtype, shape, data = tensors[name]
        values = floats((dtype, shape, data))
        edit(values)
        tensors[name] = (dtype, shape, pack("F32", values))

    def only_z_has_the_first_dimension(values):
        values[::SMALL["hidden_size"]] = [0.0] * (len(values) // SMALL["hidden_size"])
        values[ord("z") * SMALL["hidden_size"]] = 1.0

    def huge_first(values):
        values[0] = 1e20

    change("model.embed_tokens.weight", only_z_has_the_first_dimension)
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        change("model.layers.0.%s.weight" % name, huge_first)
    folder = write_pretrained(os.path.join(directory, "hf"), tensors)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
    return folder


def text_with_z(path, at):
    text = text_of(8000).replace("z", "y")
    with open(path, "w") as f:
        f.write(text[:at] + "z" + text[at + 1:])
    return path


class Recorded:
    """A run on a logging disk: its file, its log, what an undisturbed run says."""

    def __init__(self, t, name, stores=("run/store",), stops=(), fault=None, made=(), config=None, **changes):
        self.directory = os.path.join(t.dir, name)
        self.mount = os.path.join(self.directory, "disk")
        os.makedirs(self.mount)
        self.stores = stores
        hf = skipping_model(self.directory, config or llama_config(**SMALL))
        file = text_with_z(os.path.join(self.directory, "z.txt"), 2 * 128 + 40)  # in the third step
        sections = {"run": {"output_dir": os.path.join(self.mount, "run")}, "model": {"init": "pretrained"},
                    "training": {"steps": STEPS}, "data": {"shuffle": False},
                    "optimizer": {"workers": 2, "learning_rate": 1e-25},
                    "memory": {"page_elements": 4096}}
        if stores != ("run/store",):
            sections["memory"]["offload_dir"] = [os.path.join(self.mount, s) for s in stores]
        for section, keys in changes.items():
            sections.setdefault(section, {}).update(keys)
        self.run = tiny_run(self.directory, "undisturbed", hf=hf, file=file, **sections)
        self.run.dir = os.path.join(self.mount, "run")
        self.run.metrics_path = os.path.join(self.run.dir, "metrics.jsonl")
        with fuse_disk(self.mount, os.path.join(self.directory, "log")) as disk:
            for folder in made:
                os.makedirs(os.path.join(self.mount, folder), 0o700)
            for stop in stops:
                self.run.ok("--run.stop_after_step=%d" % stop, status=STOPPED)
            env, once = {}, os.path.join(self.directory, "once")
            if fault:
                env = {"MTLAUNCH_FAULT": fault, "MTLAUNCH_FAULT_ONCE": once}
            self.run.ok(env=env)
            check(not fault or os.path.exists(once), "%s was never reached" % fault)
            self.run.check_steps(STEPS)
            self.hashes, self.digest = self.run.hashes(), self.run.digest()
            equal([s["step"] for s in self.run.step_lines() if s["skipped"]], [3], "skipped steps")
            with open(os.path.join(self.run.dir, "run.id")) as f:
                self.run_id = f.read().strip()
            self.events = disk.log()
        last = power_cut.Disk()
        for event in self.events:
            last.play(event)
        self.last_image = last.everything()

    def recovery(self, where):
        memory = self.run.sections["memory"]
        return power_cut.Recovery(where, {
            "stores": self.stores, "model": self.run.sections["model"]["path"], "run_id": self.run_id,
            "page_elements": memory["page_elements"], "dtype": self.run.sections["model"]["dtype"],
            "slots": 3 if memory.get("verify_writes", True) else 2})

    def sweep(self, t, where, **options):
        recovery = self.recovery(where)
        try:
            if 0 not in self.hashes:
                self.hashes = self.hashes_with_import(recovery)
            expected = power_cut.Expected(self.hashes, self.run_id)
            expected.exports = {p: c for p, c in self.last_image.items() if "/export/step-" in p and c is not None}
            check(len(expected.exports) > 2, "no export in %s" % sorted(self.last_image))
            return power_cut.sweep(self.events, recovery, expected, t.rng, **options)
        finally:
            recovery.close()

    def hashes_with_import(self, recovery):
        """Step 0 writes no line: its hash is that of the first image that holds nothing newer."""
        disk = power_cut.Disk()
        for event in self.events:
            disk.play(event)
            if power_cut.record_step(event) == 0:
                break
        rest = self.events[self.events.index(event) + 1:]
        for event in itertools.takewhile(lambda e: power_cut.record_step(e) is None, rest):
            disk.play(event)
        found = recovery.ask(disk.only_flushed())
        equal(found[:2], ("commit", 0), "recovered after the import")
        return {0: found[2], **self.hashes}

    def resume(self, image):
        """The image as a real directory, and the run started again on it."""
        shutil.rmtree(self.mount, ignore_errors=True)
        power_cut.restore(image, self.mount)
        self.run.ok()
        self.run.check_steps(STEPS)
        equal(self.run.hashes(), {k: v for k, v in self.hashes.items() if k}, "state hashes after resuming")
        equal(self.run.digest(), self.digest, "digest after resuming")


    def resume_recorded(self, t, where, image, step):
        """The same on a disk that logs again: where the power may fail once more. Returns counts, violations."""
        shutil.rmtree(self.mount, ignore_errors=True)
        with fuse_disk(self.mount, os.path.join(self.directory, "log-again")) as disk:
            power_cut.restore(image, self.mount)
            first = len(power_cut.changes(disk.log()))
            self.run.ok()
            self.run.check_steps(STEPS)
            equal(self.run.digest(), self.digest, "digest after resuming")
            events = disk.log()
        recovery = self.recovery(where)
        expected = power_cut.Expected(self.hashes, self.run_id)
        expected.durable = expected.newest = step
        try:
            return power_cut.sweep(events, recovery, expected, t.rng, first=first)
        finally:
            recovery.close()


def check_sweep(t, counts, violations):
    t.note("counted: %(events)d events, %(writes)d writes, %(flushes)d flushes, %(images)d images, " % counts +
           "%d violations" % len(violations))
    check(not violations, "%d violations, seed %d:\n%s" % (len(violations), t.seed, "\n".join(violations[:8])))


def every_prefix(t, resumes, repeats, *arguments, **changes):
    recorded = Recorded(t, "recorded", *arguments, **changes)
    resumes, repeats, kept = RESUMES or resumes, REPEATS or repeats, []

    def keep(number, image, found):
        """A sample, each image with the same chance; all of them would not fit in memory."""
        seen[0] += 1
        if len(kept) < resumes:
            kept.append((number, image))
        elif t.rng.randrange(seen[0]) < resumes:
            kept[t.rng.randrange(resumes)] = (number, image)

    seen = [0]
    with mounted(os.path.join(t.dir, "memory"), 256 << 20) as where:
        counts, violations = recorded.sweep(t, where, repeats=repeats, keep_image=keep)
    check_sweep(t, counts, violations)
    for number, image in sorted(kept, key=lambda k: k[0]):
        try:
            recorded.resume(image)
        except TestFailure as e:
            raise TestFailure("resumed after event %d of %d: %s" % (number, counts["events"], e)) from None
    t.note("counted: %d resumed" % len(kept))


@test
def the_power_fails_at_every_write_and_flush(t):
    every_prefix(t, 12, 2)


@test
def the_power_fails_in_a_run_that_was_stopped_and_resumed_on_two_directories_in_bfloat16(t):
    every_prefix(t, 6, 1, ("store-a", "store-b"), (2,), model={"dtype": "bfloat16"})


@test
def the_power_fails_with_two_slots_per_page(t):
    every_prefix(t, 4, 1, memory={"verify_writes": False})


@test
def the_power_fails_where_only_every_other_step_is_committed(t):
    """memory.durability: found is the newest commit, never a step between two."""
    every_prefix(t, 4, 1, memory={"durability": 2})


@test
def the_power_fails_in_directories_that_somebody_else_had_made(t):
    """By hand, or by a launcher that was killed before it could flush their names."""
    recorded = Recorded(t, "recorded", ("stores/a", "stores/b"), made=("run", "stores/a", "stores/b"))
    with mounted(os.path.join(t.dir, "memory"), 256 << 20) as where:
        counts, violations = recorded.sweep(t, where)
    check_sweep(t, counts, violations)


@test
def an_export_that_was_told_of_survives_the_power(t):
    """The folders on the way to it were made by the run, too."""
    recorded, disk = Recorded(t, "recorded"), power_cut.Disk()
    for event in recorded.events:
        disk.play(event)
    exports = {p: c for p, c in recorded.last_image.items() if "/export/step-" in p}
    image = disk.only_flushed()
    equal([p for p, c in exports.items() if image.get(p, 0) != c], [], "lost of the export")


@test
def the_power_fails_in_a_run_of_experts(t):
    """Each has pages of its own; a step's commit has all of them, whichever its tokens went to."""
    every_prefix(t, 4, 1, config=EXPERTS)


def cache_events(t, kind, folder, file, tokenizer):
    """What is written to a cache on a logging disk: by a run that makes it and one that uses it."""
    mount = os.path.join(t.dir, "disk-" + kind)
    os.makedirs(mount)
    with fuse_disk(mount, os.path.join(t.dir, "log-" + kind)) as disk:
        for i in range(2):
            tiny_run(t.dir, "%s-%d" % (kind, i), folder, file, model={"tokenizer": tokenizer}, training={"steps": 1},
                     data={"cache_dir": os.path.join(mount, "cache"), "packing": tokenizer == ""}).ok()
        return power_cut.changes(disk.log())


@test
def the_power_fails_while_a_cache_of_tokens_is_made(t):
    """A file that has its name is whole, whatever came through of what was not flushed; what it says of its source may
    be an older word."""
    kinds = [("bytes", None, "bytes", {"tokens", "documents-32"})]
    if os.path.exists(os.path.join(ROOT, "build", "tokenizer", "requirements.txt")):
        folder = samples.write_tokenizer(write_model(os.path.join(t.dir, "text-model"), vocab_size=samples.VOCAB_SIZE,
                                                     eos_token_id=2), "chatml")
        kinds.append(("text", folder, "", {"mttokens", "scan", "packed-32"}))
    for kind, folder, tokenizer, expected in kinds:
        if kind == "bytes":
            file = write_jsonl(os.path.join(t.dir, "a.jsonl"))
        else:
            file = samples.write_records(os.path.join(t.dir, "b.jsonl"), [{"prompt": "a", "completion": "it is %d" % i}
                                                                        for i in range(400)])
        disk, images, seen = power_cut.Disk(), 0, set()
        events = cache_events(t, kind, folder, file, tokenizer)
        last = power_cut.Disk()
        for event in events:
            last.play(event)
        whole = last.everything()
        for number, event in enumerate(events, 1):
            disk.play(event)
            for name, image in power_cut.images(disk, t.rng, REPEATS or 2):
                images += 1
                for path, content in image.items():
                    if content is None or path.endswith(".tmp"):
                        continue
                    seen.add(path.rsplit(".", 1)[1])
                    check(content[512:] == whole[path][512:] and content[:8] == whole[path][:8],
                          "after event %d %s, %s: %s is there and is not whole" % (
                              number, power_cut.describe(event), name, path))
        equal(seen, expected, "files of the cache")
        t.note("%s: %d events, %d images" % (kind, len(events), images))


DEATHS = ("io_before_flush:kill:3", "io_after_flush:kill:3", "io_before_table:kill:4", "io_before_record:kill:3",
          "io_after_record:kill:4", "opt_mid_apply:kill:20", "opt_after_norm:kill:5")


@test
def the_power_fails_in_a_run_whose_workers_die(t):
    """What a dead io_worker had written and not flushed, its successor must flush before it commits it."""
    reference = Recorded(t, "undisturbed")
    for death in DEATHS if REPEATS else t.rng.sample(DEATHS[:5], 1) + t.rng.sample(DEATHS[5:], 1):
        recorded = Recorded(t, death.split(":")[0], fault=death)
        equal(recorded.hashes, {k: v for k, v in reference.hashes.items() if k}, "state hashes with %s" % death)
        with mounted(os.path.join(t.dir, "memory"), 256 << 20) as where:
            counts, violations = recorded.sweep(t, where, repeats=REPEATS or 1)
        t.note(death)
        check_sweep(t, counts, violations)


@test
def the_power_fails_again_while_the_run_resumes(t):
    """Three disks as a power cut left them in mid-run: the same again for every moment of what follows."""
    recorded, found = Recorded(t, "recorded"), []
    with mounted(os.path.join(t.dir, "memory"), 256 << 20) as where:
        recorded.sweep(t, where, keep_image=lambda number, image, what: found.append((image, what[1]))
                       if what[0] == "commit" and 0 < what[1] < STEPS and t.rng.random() < 0.05 else None)
        for image, step in t.rng.sample(found, min(3, len(found))):
            counts, violations = recorded.resume_recorded(t, where, image, step)
            check_sweep(t, counts, violations)


@test
def a_drive_that_lies_about_flushes_is_noticed_by_this_test(t):
    """The control: without honest flushes the same judge finds commits lost or mixed."""
    recorded = Recorded(t, "recorded")
    with mounted(os.path.join(t.dir, "memory"), 256 << 20) as where:
        _, violations = recorded.sweep(t, where, drive=power_cut.LYING)
    check(len(violations) > 100, "only %d violations" % len(violations))
    recorded.events = [e for e in recorded.events if e[0] != "fsync"]
    with mounted(os.path.join(t.dir, "memory"), 256 << 20) as where:
        _, violations = recorded.sweep(t, where)
    check(any("recovery failed" in v for v in violations), "no fdatasync at all, and nothing was noticed")
    t.note("%d violations without fdatasync, the first: %s" % (len(violations), violations[0][:300]))


enter_namespace()
main()
