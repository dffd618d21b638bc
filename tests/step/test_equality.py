#!/usr/bin/env python3
"""The same bits, however the run is carried out.

Each test runs a reference and several ways to do the same work, and compares the state hash of every
step (metrics.jsonl) and both hashes of `digest`, recomputed from the bytes on disk. One of the ways is
run once more with one gradient bit flipped in one step: from that step on every hash must differ, so
that each test is known to be able to fail.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *  # noqa: E402,F403

STEPS = 6
FLIPPED = 4  # the step in which a bit is flipped
FLIP = {"MTLAUNCH_FLIP_GRADIENT": str(FLIPPED)}


def make(t, name, **changes):
    run = tiny_run(t.dir, name, **changes)
    run.change(training={"steps": STEPS})
    return run


def outcome(run):
    """(hashes per step, digest) of a run that is done."""
    run.check_steps(STEPS)
    found = run.digest()
    equal(found[0], STEPS, "step of digest")
    equal(found[1], run.hashes()[STEPS], "state hash of digest against the last step line")
    return run.hashes(), found


def straight(run, *overrides, env=None):
    run.ok(*overrides, env=env)
    return outcome(run)


def stopped_at_every_step(run, *overrides, env=None):
    """Stops after each step and resumes; each start with another number of workers and engine."""
    for step in range(1, STEPS):
        run.ok("--run.stop_after_step=%d" % step, "--optimizer.workers=%d" % (1 + step % 3),
               "--memory.io_engine=" + ("sync" if step % 2 else "io_uring"), *overrides, env=env, status=STOPPED)
        run.check_steps(step)
        equal(run.digest()[0], step, "step of digest")
    run.ok(*overrides, env=env)
    return outcome(run)


def same(found, reference, way):
    for step in range(1, STEPS + 1):
        equal(found[0][step], reference[0][step], "%s: state hash of step %d" % (way, step))
    equal(found[1], reference[1], "%s: digest" % way)


def different(found, reference, way):
    for step in range(1, STEPS + 1):
        if step < FLIPPED:
            equal(found[0][step], reference[0][step], "%s: state hash of step %d, before the flip" % (way, step))
        else:
            check(found[0][step] != reference[0][step],
                  "%s: a gradient bit was flipped in step %d and the state hash of step %d is the same" % (
                      way, FLIPPED, step))
    check(found[1][2] != reference[1][2], "%s: a gradient bit was flipped, and the weights hash is the same" % way)


def compare(t, ways, reference=(), carry_out=straight, **changes):
    """ways: lists of overrides. The last one is run again with a bit flipped."""
    expected = straight(make(t, "reference", **changes), *reference)
    for i, way in enumerate(ways):
        same(carry_out(make(t, "way%d" % i, **changes), *way), expected, " ".join(way) or "plain")
    different(carry_out(make(t, "flipped", **changes), *ways[-1], env=FLIP), expected, " ".join(ways[-1]))
    return expected


@test
def a_second_run_has_the_same_bits(t):
    compare(t, [[]])


@test
def any_number_of_optimizer_workers(t):
    compare(t, [["--optimizer.workers=%d" % n] for n in (2, 4, 7)])


@test
def either_io_engine(t):
    compare(t, [["--memory.io_engine=sync"]], ["--memory.io_engine=io_uring"])


@test
def any_prefetch(t):
    compare(t, [["--memory.prefetch=%s" % n] for n in (2, 8, "predict")], ["--memory.prefetch=1"])


@test
def any_activation_checkpointing(t):
    ways = ["none", "every-2", "auto"]
    compare(t, [["--training.activation_checkpointing=" + w] for w in ways])


@test
def one_or_two_threads(t):
    # a model whose matrices are cut into many tiles
    compare(t, [["--memory.threads=2"], ["--memory.threads=3"]], ["--memory.threads=1"],
            hf={"intermediate_size": 480, "vocab_size": 1031})


@test
def two_or_three_slots_per_page(t):
    compare(t, [["--memory.verify_writes=false"]])


@test
def one_or_two_store_directories(t):
    dirs = [os.path.join(t.dir, "disk%d" % i) for i in range(4)]
    for d in dirs:
        os.mkdir(d)
    expected = straight(make(t, "reference"))
    same(straight(make(t, "two", memory={"offload_dir": dirs[:2]})), expected, "two directories")
    different(straight(make(t, "flipped", memory={"offload_dir": dirs[2:]}), env=FLIP), expected, "two directories")
    check(all(any(files for _, _, files in os.walk(d)) for d in dirs), "both directories hold a part")


@test
def stopped_and_resumed_at_every_step(t):
    compare(t, [[]], carry_out=stopped_at_every_step)


@test
def a_schedule_that_varies_and_shuffled_epochs_resume_alike(t):
    short = write_text(os.path.join(t.dir, "short.txt"), 500)  # an epoch is a few steps
    compare(t, [[]], carry_out=stopped_at_every_step, file=short,
            lr_scheduler={"type": "cosine", "warmup_steps": 3})


@test
def any_page_size_gives_the_same_weights(t):
    hashes = []
    for i, pages in enumerate((4096, 65536, None)):  # None: the default
        run = make(t, "run%d" % i, memory={"page_elements": pages})
        hashes.append(straight(run)[1])
    equal(hashes[1][2], hashes[0][2], "weights hash of 65536 against 4096 elements")
    equal(hashes[2][2], hashes[0][2], "weights hash of the default against 4096 elements")
    check(len({h[1] for h in hashes}) == 3, "the state hash covers the page size")
    flipped = straight(make(t, "flipped", memory={"page_elements": None}), env=FLIP)
    check(flipped[1][2] != hashes[0][2], "a gradient bit was flipped, and the weights hash is the same")


@test
def a_skipped_step_changes_nothing_anywhere(t):
    """Token 'z' drives attention beyond float32: steps that hold it are skipped, the others are not.

    The learning rate is tiny, lest the other tokens learn what makes z so special.
    """
    config = llama_config()
    tensors, hidden = make_weights(config), config["hidden_size"]

    def change(name, edit):
        dtype, shape, data = tensors[name]
        values = floats((dtype, shape, data))
        edit(values)
        tensors[name] = (dtype, shape, pack("F32", values))

    def only_z_has_the_first_dimension(values):
        values[::hidden] = [0.0] * (len(values) // hidden)
        values[ord("z") * hidden] = 1.0

    def first_element(value):
        def edit(values):
            values[0] = value
        return edit

    change("model.embed_tokens.weight", only_z_has_the_first_dimension)
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        change("model.layers.0.%s.weight" % name, first_element(1e20))  # q k of a z with itself: 1e40
    folder = write_pretrained(os.path.join(t.dir, "hf"), tensors)
    text, step_tokens = text_of(20000).replace("z", "y"), 128  # z comes in the third step only
    at = 2 * step_tokens + 40
    file = os.path.join(t.dir, "z.txt")
    with open(file, "w") as f:
        f.write(text[:at] + "z" + text[at + 1:])
    changes = {"hf": folder, "file": file, "model": {"init": "pretrained"}, "data": {"shuffle": False},
               "optimizer": {"learning_rate": 1e-25}}
    expected = compare(t, [["--optimizer.workers=4", "--training.activation_checkpointing=none"]], **changes)
    reference = make(t, "reference", **changes)
    skipped = [line["step"] for line in reference.step_lines() if line["skipped"]]
    equal(skipped, [3], "skipped steps")
    equal([e["step"] for e in reference.events("skip")], [3], "skip events")
    same(stopped_at_every_step(make(t, "resumed", **changes)), expected, "stopped at every step")


def everything_else(dtype, tied):
    """All at once on the other models; what differs there is the layout and the page image."""
    def run(t):
        changes = {"hf": {"tie_word_embeddings": tied, "hidden_size": 56, "num_hidden_layers": 4, "head_dim": 16},
                   "model": {"dtype": dtype}}
        ways = [["--optimizer.workers=7", "--memory.io_engine=sync", "--memory.prefetch=1", "--memory.threads=2",
                 "--training.activation_checkpointing=none", "--memory.verify_writes=false"],
                ["--optimizer.workers=2", "--memory.prefetch=8", "--training.activation_checkpointing=every-2"]]
        expected = compare(t, ways, **changes)
        same(stopped_at_every_step(make(t, "resumed", **changes)), expected, "stopped at every step")
    return run


for _dtype in ("float32", "bfloat16"):
    for _tied in (False, True):
        if (_dtype, _tied) != ("float32", False):
            add_test("the_same_in_%s_%s" % (_dtype, "tied" if _tied else "untied"), everything_else(_dtype, _tied))

main()
