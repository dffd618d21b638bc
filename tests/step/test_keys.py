#!/usr/bin/env python3
"""Every key of a run file: what it changes, seen from outside.

One test per key of launcher/config_keys.h. It shows in real runs what each documented value does, or
that the value is refused with exit 2 and the name of what is missing. The last two tests read that
header: a key without a test here, or a word of a key that no test names, fails.
"""
import math
import os
import pty
import re
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *

STEPS = 3
covered = {}  # "section.key": the words that its test uses
base = {}     # {step: state hash} of the run that others are compared with


def key(name, *words):
    """Registers the test of one key. words: its values that are words, all of them."""
    def register(function):
        check(name not in covered, "%s has two tests" % name)
        covered[name] = set(words)
        return test(function)
    return register


def short(t, name, folder=None, file=None, **changes):
    """A run of STEPS steps, not started. folder: its model's, file: its data's. changes: section={key: value}."""
    run = tiny_run(t.dir, name, folder, file, training={"steps": STEPS})
    run.change(**changes)
    return run


def done(t, name, folder=None, file=None, **changes):
    """The same, run to its end."""
    run = short(t, name, folder, file, **changes)
    run.result = run.ok()
    return run


def base_hashes(t):
    if not base:
        base.update(done(t, "base").hashes())
    return base


def last(run):
    return run.step_lines()[-1]


def same_as_base(t, name, **changes):
    run = done(t, name, **changes)
    equal(run.hashes(), base_hashes(t), "state hashes with %s" % changes)
    return run


def other_than_base(t, name, **changes):
    run = done(t, name, **changes)
    check(run.hashes() != base_hashes(t), "no bit of the state depends on %s" % changes)
    return run


def refused(t, missing, **changes):
    """The values in changes are refused, the message says what this build has not, nothing is left."""
    run = short(t, "refused", **changes)
    result = run.ok(status=USER)
    (section, (name,)), = changes.items()
    check("[%s] %s = " % (section, name) in result.err and missing in result.err,
          "expected [%s] %s and %r, found %s" % (section, name, missing, result.err))
    check(not os.path.exists(run.dir), "a refused start left %s" % run.dir)


def log_text(run, worker):
    with open(os.path.join(run.dir, "logs", worker + ".0.log")) as f:
        return f.read()


def buffer_bytes(run):
    return int(re.findall(r"(\d+) bytes of buffers", log_text(run, "gpu_worker"))[-1])


def pretrained(t, name="source", **changes):
    """A folder with weights, and the weights."""
    tensors = make_weights(llama_config(**changes))
    return write_pretrained(os.path.join(t.dir, name), tensors, **changes), tensors


def tune(t, name, folder, **changes):
    """A finished run that starts from the weights of a folder."""
    return done(t, name, folder, model={"init": "pretrained"}, **changes)


def exported(run, step=STEPS):
    return read_weights(run.export_dir(step))


def described(run, pattern):
    """What the start said about the data."""
    found = re.search(pattern, run.result.err)
    check(found, "expected %r in %s" % (pattern, run.result.err))
    return found


# -- run --


@key("run.output_dir")
def output_dir_is_where_everything_goes_and_is_relative_to_the_run_file(t):
    run = short(t, "run", run={"output_dir": "deep/er/out"})
    before = set(os.listdir(ROOT))
    run.ok()
    out = os.path.join(t.dir, "deep", "er", "out")
    for name in ("metrics.jsonl", "logs", "store", "cache", "export", "config.toml"):
        check(os.path.exists(os.path.join(out, name)), "no %s in %s" % (name, out))
    run.ok("--run.output_dir=other")
    check(os.path.exists(os.path.join(t.dir, "other", "metrics.jsonl")), "not relative to the run file")
    equal(set(os.listdir(ROOT)) - before, set(), "new files in the working directory")


@key("run.seed")
def seed_decides_every_bit(t):
    same_as_base(t, "same", run={"seed": 1234})
    other_than_base(t, "other", run={"seed": 1235})
    other_than_base(t, "large", run={"seed": (1 << 63) - 1})


@key("run.resume", "auto", "never")
def resume_auto_goes_on_and_never_refuses_a_commit(t):
    run = short(t, "run", run={"resume": "never"})
    run.ok("--run.stop_after_step=2", status=STOPPED)
    before = run.digest()
    result = run.ok(status=USER)
    check("resume" in result.err and "never" in result.err, result.err)
    equal(run.digest(), before, "digest after a refused start")
    run.ok("--run.resume=auto")
    equal(run.hashes(), base_hashes(t), "state hashes")


@key("run.stop_after_step")
def stop_after_step_stops_and_leaves_the_schedule_alone(t):
    changes = {"lr_scheduler": {"type": "cosine"}, "training": {"steps": 6}}
    whole = done(t, "whole", **changes)
    run = short(t, "run", **changes)
    run.change(run={"stop_after_step": 2})
    run.ok(status=STOPPED)
    equal(run.digest()[0], 2, "committed step")
    run.ok("--run.stop_after_step=0")
    run.check_steps(6)
    equal(run.hashes(), whole.hashes(), "state hashes")


@key("run.watchdog")
def watchdog_ends_a_silent_worker_and_false_leaves_it_alone(t):
    env = {"MTLAUNCH_FAULT": "gpu_mid_forward:hang:11", "MTLAUNCH_SILENCE_S": "1"}
    run = short(t, "on")
    run.ok(env=env)
    deaths = run.events("worker_exit")
    check(deaths and deaths[0]["worker"] == "gpu_worker.0" and "signal 6" in deaths[0]["cause"],
          "expected an aborted gpu_worker, found %s" % deaths)
    equal(run.hashes(), base_hashes(t), "state hashes")
    quiet = short(t, "off", run={"watchdog": False})
    with quiet.start(env=env) as live:
        live.wait_committed(1)
        time.sleep(4)
        check(live.running(), "ended: %s" % live.output())
        equal([e for e in quiet.lines(tolerant=True) if e.get("event") == "worker_exit"], [], "deaths")
        live.signal(signal.SIGTERM)
        equal(live.wait(10), STOPPED, "status after SIGTERM")


# -- model --


@key("model.path")
def path_is_the_folder_of_the_model(t):
    write_model(os.path.join(t.dir, "small"), num_hidden_layers=1)
    run = short(t, "run", "small")
    small = mtlaunch("validate", run.file, status=DONE).out
    large = mtlaunch("validate", short(t, "large").file, status=DONE).out
    parameters = [int(re.search(r"(\d+) parameters", text).group(1)) for text in (small, large)]
    shapes = tensor_shapes(llama_config(num_hidden_layers=1))
    equal(parameters[0], sum(math.prod(s) for s in shapes.values()), "parameters")
    check(parameters[0] < parameters[1], "parameters %s" % parameters)
    run.ok()
    equal(set(exported(run)), set(shapes), "exported tensors")


@key("model.init", "pretrained", "random")
def init_takes_the_weights_of_the_folder_or_random_numbers(t):
    folder, tensors = pretrained(t)
    still = {"optimizer": {"learning_rate": 0.0}}
    kept = exported(tune(t, "kept", folder, **still))
    equal({n: v[2] for n, v in kept.items()}, {n: v[2] for n, v in tensors.items()}, "weights")
    drawn = exported(done(t, "drawn", folder, **still))
    check(drawn["model.embed_tokens.weight"][2] != tensors["model.embed_tokens.weight"][2], "not random")
    values = floats(drawn["model.embed_tokens.weight"])
    deviation = math.sqrt(sum(v * v for v in values) / len(values))
    check(abs(deviation - 0.05) < 0.002, "deviation %g, initializer_range 0.05" % deviation)
    equal(set(floats(drawn["model.norm.weight"])), {1.0}, "norms")


@key("model.dtype", "bfloat16", "float32")
def dtype_is_of_the_computation_and_master_weights_stay_float32(t):
    same_as_base(t, "f32", model={"dtype": "float32"})
    run = other_than_base(t, "bf16", model={"dtype": "bfloat16"},
                          optimizer={"learning_rate": 1e-6}, checkpoint={"export_dtype": "float32"})
    bits = exported(run)["model.layers.1.mlp.up_proj.weight"][2]
    low = sum(bits[i:i + 2] != b"\0\0" for i in range(0, len(bits), 4))
    check(low > len(bits) // 8, "only %d of %d weights have bits below bfloat16" % (low, len(bits) // 4))


@key("model.tokenizer", "bytes")
def tokenizer_is_bytes_or_a_file_that_the_export_keeps(t):
    shard = write_nanogpt_shard(os.path.join(t.dir, "tokens.bin"), tokens_of(3000))
    model = write_model(os.path.join(t.dir, "model"))
    result = short(t, "text", model={"tokenizer": ""}).ok(status=USER)
    check('"bytes"' in result.err and "train.txt" in result.err, result.err)
    run = done(t, "shards", model, shard, model={"tokenizer": ""})
    check(not os.path.exists(os.path.join(run.export_dir(STEPS), "tokenizer.json")), "a tokenizer from nowhere")
    file = os.path.join(t.dir, "mine.json")
    vocabulary = {"t%d" % i: i for i in range(272)}
    with open(file, "w") as f:
        json.dump({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}, f)
    named = done(t, "named", model, shard, model={"tokenizer": "mine.json"})
    with open(file, "rb") as f, open(os.path.join(named.export_dir(STEPS), "tokenizer.json"), "rb") as g:
        equal(g.read(), f.read(), "tokenizer.json of the export")
    vocabulary["one too many"] = 272
    with open(file, "w") as f:
        json.dump({"model": {"vocab": vocabulary}}, f)
    result = short(t, "many", model, shard, model={"tokenizer": "mine.json"}).ok(status=USER)
    check("one too many" in result.err and "272" in result.err, result.err)


# -- data --


@key("data.train")
def train_takes_text_and_token_shards_one_or_several(t):
    tokens = tokens_of(4000)
    shards = [write_nanogpt_shard(os.path.join(t.dir, "n.bin"), tokens),
              write_llmc_shard(os.path.join(t.dir, "u16.bin"), tokens),
              write_llmc_shard(os.path.join(t.dir, "u32.bin"), tokens, magic=20240801)]
    halves = [write_llmc_shard(os.path.join(t.dir, "a.bin"), tokens[:1700]),
              write_llmc_shard(os.path.join(t.dir, "b.bin"), tokens[1700:], magic=20240801)]
    weights = set()
    kinds = ("nanoGPT", r"llm.c \(uint16\)", r"llm.c \(uint32\)")
    for i, (shard, kind) in enumerate(zip(shards, kinds)):
        run = done(t, "shard%d" % i, file=shard)
        described(run, kind)
        weights.add(run.digest()[2])
    equal(len(weights), 1, "different weights from the same tokens in different files")
    several = done(t, "halves", file="-", data={"train": halves})
    equal(described(several, r"(\d+) tokens").group(1), "4000", "tokens of two files")
    jsonl = write_jsonl(os.path.join(t.dir, "d.jsonl"), documents=12)
    lines = done(t, "jsonl", file=jsonl)
    described(lines, r"12 documents")
    both = done(t, "both", file="-", data={"train": [jsonl, write_text(os.path.join(t.dir, "d.txt"), 5000)]})
    described(both, r"2 files .*13 documents, %d tokens" % (12 * 501 + 5001))
    check(last(both)["state_hash"] != last(lines)["state_hash"], "the second file changes nothing")


@key("data.validation")
def validation_files_are_evaluated_and_never_trained(t):
    files = [write_text(os.path.join(t.dir, "v%d.txt" % i), 1000 * (i + 1), seed=i + 5) for i in range(2)]
    found = []
    for name, chosen in (("a", files[:1]), ("b", files[1:]), ("ab", files)):
        run = same_as_base(t, name, data={"validation": chosen}, eval={"interval": STEPS, "sequences": 1000})
        event, = run.events("eval")
        found.append((event["tokens"], event["val_loss"]))
    check(found[0][0] < found[1][0] < found[2][0], "labelled tokens %s" % found)
    equal(len({loss for _, loss in found}), 3, "different losses")


@key("data.val_fraction")
def val_fraction_sets_the_last_samples_aside(t):
    run = other_than_base(t, "run", data={"val_fraction": 0.25}, eval={"interval": STEPS, "sequences": 1000})
    total = int(described(run, r"(\d+) samples of 32").group(1))
    held, trained = map(int, described(run, r"the last (\d+) samples of train, (\d+) are trained").groups())
    equal((held, trained), (total // 4, total - total // 4), "samples held out, trained")
    event, = run.events("eval")
    check(held * 30 <= event["tokens"] <= held * 32, "%d tokens of %d samples" % (event["tokens"], held))


@key("data.format", "auto", "text", "tokens", "chat", "prompt-completion")
def format_says_what_names_do_not(t):
    text = write_text(os.path.join(t.dir, "corpus"))
    tokens = write_nanogpt_shard(os.path.join(t.dir, "shard"), tokens_of(3000))
    unknown = short(t, "unknown", file=text).ok(status=USER)
    check("format" in unknown.err, unknown.err)
    described(done(t, "as-text", file=text, data={"format": "text"}), "text, one document per file")
    described(done(t, "as-tokens", file=tokens, data={"format": "tokens"}), "nanoGPT")
    same_as_base(t, "auto", data={"format": "auto"})
    for word in ("chat", "prompt-completion"):  # tests/step/test_tokenizing.py shows them at work
        refused(t, "instruction data needs a tokenizer.json", data={"format": word})


@key("data.packing")
def packing_puts_documents_together_or_pads_each(t):
    data = write_jsonl(os.path.join(t.dir, "short.jsonl"), documents=200, n_bytes=20)
    packed = done(t, "packed", file=data)
    alone = done(t, "alone", file=data, data={"packing": False})
    described(packed, ", packed")
    described(alone, "200 samples of 32, one document each")
    # 20 bytes and their end: 20 labels of 32 positions, 4 sequences a step
    equal([line["labelled_tokens"] for line in alone.step_lines()], [4 * 20] * STEPS, "labels, one document each")
    check(all(line["labelled_tokens"] > 4 * 28 for line in packed.step_lines()), "labels, packed")


@key("data.overlong", "truncate", "drop")
def overlong_conversations_are_truncated_or_dropped_and_counted(t):
    data = write_token_file(os.path.join(t.dir, "chat.mttokens"), [(8, 2 + i) for i in range(60)])
    cut = done(t, "cut", file=data, data={"shuffle": False})
    dropped = done(t, "dropped", file=data, data={"overlong": "drop", "shuffle": False})
    # 8 tokens of a question and 2 to 61 of an answer: up to 24 of these fit into 32
    described(cut, r"37 conversations longer than 32 tokens truncated \(data.overlong\)")
    described(dropped, r"37 conversations longer than 32 tokens left out \(data.overlong\)")
    samples = [int(described(run, r"(\d+) samples of 32, packed, no conversation cut").group(1)) for run in (cut, dropped)]
    equal(samples[0] - samples[1], 37, "samples more: each truncated conversation fills one")
    check(dropped.hashes() == done(t, "same", file=data, data={"overlong": "drop", "shuffle": False}).hashes() !=
          cut.hashes(), "state hashes")
    resumed = short(t, "cut", file=data, data={"overlong": "drop", "shuffle": False}).ok(status=USER)
    check("[data] overlong: may not change" in resumed.err, resumed.err)


@key("data.shuffle")
def shuffle_is_a_function_of_the_seed_and_false_is_the_files_order(t):
    folder, _ = pretrained(t)
    weights = {}
    for shuffle in (True, False):
        for seed in (1, 2):
            run = tune(t, "%s%d" % (shuffle, seed), folder, run={"seed": seed}, data={"shuffle": shuffle})
            weights[shuffle, seed] = run.digest()[2]
    check(weights[True, 1] != weights[True, 2], "the order does not depend on the seed")
    equal(weights[False, 1], weights[False, 2], "weights without shuffling")
    check(weights[False, 1] not in (weights[True, 1], weights[True, 2]), "shuffle changes nothing")


@key("data.cache_dir")
def cache_dir_holds_what_text_became_and_is_used_again(t):
    cache = os.path.join(t.dir, "cache")

    def files():
        return {name: os.stat(os.path.join(cache, name)).st_ino for name in os.listdir(cache)}

    run = done(t, "one", data={"cache_dir": "cache"})
    made = files()
    check(made, "nothing in %s" % cache)
    check(not os.path.exists(os.path.join(run.dir, "cache")), "another cache in the run directory")
    again = done(t, "two", data={"cache_dir": cache})
    equal(files(), made, "cache files (a new one has another inode)")
    equal(again.hashes(), run.hashes(), "state hashes")
    check(os.listdir(os.path.join(done(t, "own").dir, "cache")), "the default is output_dir/cache")


# -- training --


@key("training.seq_len")
def seq_len_is_the_length_of_a_sample(t):
    run = done(t, "run", training={"seq_len": 48})
    described(run, "samples of 48")
    equal(last(run)["tokens"], 4 * 48, "tokens of a step")


@key("training.micro_batch_size")
def micro_batch_size_is_sequences_per_microbatch(t):
    run = done(t, "run", training={"micro_batch_size": 3})
    equal(last(run)["tokens"], 3 * 2 * 32, "tokens of a step")
    check(buffer_bytes(run) > buffer_bytes(done(t, "two")), "a larger microbatch takes no more memory")


@key("training.gradient_accumulation_steps")
def gradient_accumulation_steps_are_microbatches_per_step(t):
    run = done(t, "run", training={"gradient_accumulation_steps": 3})
    equal(last(run)["tokens"], 2 * 3 * 32, "tokens of a step")
    check(last(run)["state_hash"] != base_hashes(t)[STEPS], "changes nothing")


@key("training.global_batch_size")
def global_batch_size_is_sequences_per_step(t):
    run = done(t, "run", training={"global_batch_size": 6, "gradient_accumulation_steps": None})
    equal(last(run)["tokens"], 6 * 32, "tokens of a step")
    equal(run.hashes(), done(t, "same", training={"gradient_accumulation_steps": 3}).hashes(), "state hashes")
    both = short(t, "both", training={"global_batch_size": 6}).ok(status=USER)
    check("global_batch_size" in both.err and "gradient_accumulation_steps" in both.err, both.err)
    odd = short(t, "odd", training={"global_batch_size": 5, "gradient_accumulation_steps": None}).ok(status=USER)
    check("global_batch_size" in odd.err and "micro_batch_size" in odd.err, odd.err)


@key("training.steps")
def steps_is_the_length_of_the_run(t):
    for steps in (1, 5):
        run = done(t, "run%d" % steps, training={"steps": steps})
        run.check_steps(steps)
        check(os.path.exists(run.export_dir(steps)), "no export of step %d" % steps)


@key("training.epochs")
def epochs_are_passes_over_the_training_data(t):
    run = done(t, "run", training={"steps": None, "epochs": 0.05})
    samples = int(described(run, r"(\d+) samples of 32").group(1))
    run.check_steps(math.ceil(0.05 * samples / 4))
    both = short(t, "both", training={"epochs": 1.0}).ok(status=USER)
    check("epochs" in both.err and "steps" in both.err, both.err)


@key("training.max_grad_norm")
def max_grad_norm_scales_down_what_is_above_it_and_0_is_off(t):
    off = done(t, "off", training={"max_grad_norm": 0.0})
    equal(done(t, "loose", training={"max_grad_norm": 1e9}).hashes(), off.hashes(), "hashes, 1e9 against 0")
    norm = off.step_lines()[0]["grad_norm"]
    tight = done(t, "tight", training={"max_grad_norm": norm / 1000, "steps": 1}, optimizer={"eps": 1.0})
    free = done(t, "free", training={"max_grad_norm": 0.0, "steps": 1}, optimizer={"eps": 1.0})
    equal(tight.step_lines()[0]["grad_norm"], norm, "the norm is told before clipping")
    start = exported(done(t, "start", training={"steps": 1}, optimizer={"learning_rate": 0.0}), 1)

    def moved(run):
        """The update; with eps = 1 its size is the gradient's, so clipping shows (AdamW at t = 1)."""
        name = "model.layers.1.mlp.down_proj.weight"
        pairs = zip(floats(exported(run, 1)[name]), floats(start[name]))
        return math.sqrt(sum((a - b) ** 2 for a, b in pairs))

    no_decay = {"weight_decay": 0.0, "eps": 1.0, "learning_rate": 1.0}
    schedule = {"warmup_steps": 0}
    a = moved(done(t, "a", training={"max_grad_norm": 0.0, "steps": 1}, optimizer=no_decay, lr_scheduler=schedule))
    b = moved(done(t, "b", training={"max_grad_norm": norm / 10, "steps": 1}, optimizer=no_decay,
                   lr_scheduler=schedule))
    check(8.5 < a / b < 10.5, "clipped to a tenth, the update is %g of %g" % (b, a))
    check(last(tight)["state_hash"] != last(free)["state_hash"], "clipping changes no bit")


@key("training.activation_checkpointing", "auto", "full", "none")
def activation_checkpointing_trades_memory_and_changes_no_bit(t):
    bytes_of = {}
    for mode in ("full", "every-2", "every-3", "none"):
        run = same_as_base(t, mode, training={"activation_checkpointing": mode})
        bytes_of[mode] = buffer_bytes(run)
        check("activation checkpointing" not in run.result.err, "announced, though it was given")
    check(bytes_of["full"] < bytes_of["every-2"] < bytes_of["none"], "device bytes %s" % bytes_of)
    run = same_as_base(t, "auto", training={"activation_checkpointing": "auto"})
    choice = re.search(r"activation checkpointing: (\S+)", run.result.err).group(1)
    equal(buffer_bytes(run), bytes_of[choice], "bytes of the choice announced")


@key("training.skip_nonfinite")
def skip_nonfinite_skips_a_step_or_stops_before_it(t):
    exploding = {"optimizer": {"learning_rate": 1e6}, "training": {"max_grad_norm": 0.0, "steps": 5},
                 "lr_scheduler": {"warmup_steps": 0}}
    run = short(t, "skip", **exploding)
    run.ok("--run.stop_after_step=1", status=STOPPED)
    _, state, weights = run.digest()
    result = run.ok("--run.stop_after_step=3", status=STOPPED)
    step, state_after, weights_after = run.digest()
    equal(step, 3, "committed step")
    equal(weights_after, weights, "weights hash before and after skipped steps")
    check(state_after != state, "the data position is part of the state hash")
    lines = run.step_lines()
    equal([line["skipped"] for line in lines], [False, True, True], "skipped")
    equal([line["grad_norm"] for line in lines[1:]], [None, None], "norms that are no numbers")
    equal([event["step"] for event in run.events("skip")], [2, 3], "steps of skip events")
    check(result.err.count("skipped: gradient norm") == 2, result.err)
    run.ok()
    resume = run.events("resume")[-1]
    equal((resume["t"], resume["data_position"]), (1, 12), "AdamW's t, samples seen")
    stop = short(t, "stop", **exploding)
    stop.change(training={"skip_nonfinite": False})
    result = stop.ok(status=FAILED)
    check("gradient norm" in result.err and "skip_nonfinite" in result.err, result.err)
    equal(stop.digest(), (1, state, weights), "the state before the step that was refused")
    stop.check_steps(1)


def spiky(t, name, steps=12, **training):
    """One sample a step, in order. The text repeats itself, but for a stretch of noise in step 11."""
    text = ("the quick brown fox jumps over the lazy dog " * 40)[:10 * 33 + 4].encode()
    noise = bytes(random.Random(5).randrange(33, 127) for _ in range(33))
    with open(os.path.join(t.dir, "spiky.txt"), "wb") as f:
        f.write(text + noise + text)
    keys = {"seq_len": 32, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "steps": steps,
            "spike_factor": 1.5}
    keys.update(training)
    return short(t, name, data={"train": [os.path.join(t.dir, "spiky.txt")], "shuffle": False, "format": "text"},
                 optimizer={"learning_rate": 2e-2}, training=keys)


def answers(run):
    return [(e["step"], e["answer"].split(";")[0].split(":")[0]) for e in run.events("spike")]


@key("training.spike", "off", "redo", "skip")
def a_spike_is_redone_or_skipped(t):
    off = spiky(t, "off", spike="off")
    off.ok()
    equal(answers(off), [], "spikes with the policy off")
    redo = spiky(t, "redo", spike="redo")
    redo.ok()
    found = answers(redo)
    step = found[0][0]
    check(found and found[:2] == [(step, "computing it again"),
                                  (step, "the same bits again, so it is in the data")], "answers: %s" % found)
    equal(redo.hashes()[step - 1], off.hashes()[step - 1], "the state before the spike")
    equal([(l["step"], l["loss"]) for l in redo.step_lines()], [(l["step"], l["loss"]) for l in off.step_lines()],
          "losses: a spike that is in the data is applied")
    equal(redo.digest()[2], off.digest()[2], "weights")
    skip = spiky(t, "skip", spike="skip")
    skip.ok()
    skipped = [l["step"] for l in skip.step_lines() if l["skipped"]]
    check(step in skipped, "step %d was not skipped: %s" % (step, skipped))
    # the window is part of the state: stopped right before the spike, a resumed run skips it too
    parts = spiky(t, "parts", spike="skip")
    parts.ok("--run.stop_after_step=%d" % (step - 1), status=STOPPED)
    parts.ok()
    equal(parts.hashes(), skip.hashes(), "state hashes of a run resumed before the spike")


@key("training.spike_factor")
def a_spike_that_is_the_machines_is_computed_until_it_is_right(t):
    """A flipped exponent bit makes the norm leap, once: the redo finds other bits, and the run ends with the
    bits of one in which nothing was flipped."""
    plain = spiky(t, "plain", steps=10, spike="redo")
    plain.ok()
    equal(answers(plain), [], "spikes of the undisturbed run")
    flipped = spiky(t, "flipped", steps=10, spike="redo")
    flip = "10:30:" + os.path.join(t.dir, "flipped-once")
    flipped.ok(env={"MTLAUNCH_FLIP_GRADIENT": flip})
    found = answers(flipped)
    equal([f[0] for f in found], [10], "steps with a spike: %s" % found)
    equal(flipped.hashes(), plain.hashes(), "state hashes")
    unnoticed = spiky(t, "unnoticed", steps=10, spike="off")
    os.unlink(os.path.join(t.dir, "flipped-once"))
    unnoticed.ok(env={"MTLAUNCH_FLIP_GRADIENT": flip})
    check(unnoticed.hashes()[10] != plain.hashes()[10], "the flipped bit changes nothing")


# -- optimizer --


@key("optimizer.name")
def other_optimizers_than_adamw_are_refused(t):
    same_as_base(t, "adamw", optimizer={"name": "adamw"})
    refused(t, "no such optimizer", optimizer={"name": "adafactor"})


@key("optimizer.learning_rate")
def learning_rate_is_the_size_of_the_step(t):
    folder, tensors = pretrained(t)
    name = "model.layers.0.self_attn.q_proj.weight"
    moves = {}
    for rate in (1e-4, 1e-2):
        run = tune(t, "rate%g" % rate, folder, training={"steps": 1}, lr_scheduler={"warmup_steps": 0},
                   optimizer={"learning_rate": rate, "weight_decay": 0.0})
        check(abs(last(run)["learning_rate"] / rate - 1) < 1e-6, "learning_rate %r" % last(run)["learning_rate"])
        pairs = zip(floats(exported(run, 1)[name]), floats(tensors[name]))
        moves[rate] = max(abs(a - b) for a, b in pairs)
        check(0.9 * rate < moves[rate] < 1.01 * rate, "the first step of AdamW is %g for lr %g" % (moves[rate], rate))


@key("optimizer.betas")
def betas_are_the_memory_of_the_moments(t):
    other_than_base(t, "first", optimizer={"betas": [0.5, 0.95]})
    other_than_base(t, "second", optimizer={"betas": [0.9, 0.5]})
    same_as_base(t, "default", optimizer={"betas": [0.9, 0.95]})


@key("optimizer.eps")
def eps_damps_small_gradients(t):
    other_than_base(t, "other", optimizer={"eps": 1e-7})
    folder, tensors = pretrained(t)
    name = "model.layers.0.self_attn.q_proj.weight"

    def largest_move(eps):
        run = tune(t, "eps%g" % eps, folder, optimizer={"eps": eps, "weight_decay": 0.0}, training={"steps": 1})
        return max(abs(a - b) for a, b in zip(floats(exported(run, 1)[name]), floats(tensors[name])))

    check(largest_move(1e3) < 1e-3 * largest_move(1e-8), "a large eps does not damp")


def decay_moves(t, name, folder, tensors, **optimizer):
    """{tensor: what decay took off, relative to the weights} against a run without decay."""
    settings = {"training": {"steps": 1}, "lr_scheduler": {"warmup_steps": 0}}
    rate = {"learning_rate": 0.01}
    without = exported(tune(t, name + "-0", folder, optimizer=dict(rate, weight_decay=0.0), **settings), 1)
    with_it = exported(tune(t, name, folder, optimizer=dict(rate, **optimizer), **settings), 1)
    out = {}
    for tensor, start in tensors.items():
        a, b, w = floats(without[tensor]), floats(with_it[tensor]), floats(start)
        out[tensor] = sum((x - y) * z for x, y, z in zip(a, b, w)) / sum(z * z for z in w)
    return out


@key("optimizer.weight_decay")
def weight_decay_takes_lr_times_itself_off_each_matrix(t):
    folder, tensors = pretrained(t)
    for tensor, part in decay_moves(t, "run", folder, tensors, weight_decay=0.5).items():
        expected = 0.0 if "norm" in tensor else 0.01 * 0.5
        check(abs(part - expected) < 1e-5, "%s: decayed by %g, expected %g" % (tensor, part, expected))


@key("optimizer.no_decay")
def no_decay_names_tensors_that_keep_their_size(t):
    folder, tensors = pretrained(t)
    moves = decay_moves(t, "run", folder, tensors, weight_decay=0.5, no_decay=["*embed*", "*layers.1.*q_proj*"])
    for tensor, part in moves.items():
        exempt = "norm" in tensor or "embed" in tensor or tensor == "model.layers.1.self_attn.q_proj.weight"
        check(abs(part - (0.0 if exempt else 0.005)) < 1e-5, "%s: decayed by %g" % (tensor, part))


@key("optimizer.compression", "none", "lossless", "8bit", "dynamic", "minimum")
def compressed_optimizer_state_is_refused(t):
    same_as_base(t, "none", optimizer={"compression": "none"})
    for word in ("lossless", "8bit", "dynamic", "minimum"):
        refused(t, "no compressed optimizer state", optimizer={"compression": word})


@key("optimizer.workers", "auto")
def workers_is_the_number_of_optimizer_processes(t):
    for workers in (1, 3):
        run = short(t, "w%d" % workers, optimizer={"workers": workers}, training={"steps": 2000})
        with run.start() as live:
            live.wait_committed(STEPS)
            equal(len(live.children("opt_worker")), workers, "processes named opt_worker")
            live.signal(signal.SIGTERM)
            equal(live.wait(10), STOPPED, "status")
        equal({s: h for s, h in run.hashes().items() if s <= STEPS}, base_hashes(t), "state hashes")
    run = same_as_base(t, "auto", optimizer={"workers": "auto"})
    nodes = [n for n in os.listdir("/sys/devices/system/node") if re.fullmatch(r"node\d+", n)] \
        if os.path.isdir("/sys/devices/system/node") else ["node0"]
    logs = [n for n in os.listdir(os.path.join(run.dir, "logs")) if n.startswith("opt_worker")]
    check(1 <= len(logs) <= len(nodes), "%d workers for %d NUMA nodes" % (len(logs), len(nodes)))


def recomputed(run):
    """Blocks that the opt_workers' logs say were computed twice."""
    folder, total = os.path.join(run.dir, "logs"), 0
    for name in os.listdir(folder):
        with open(os.path.join(folder, name)) as f:
            total += sum(int(n) for n in re.findall(r"recomputed (\d+) blocks", f.read()))
    return total


@key("optimizer.recompute")
def recompute_is_the_part_of_the_blocks_that_another_core_computes_again(t):
    elements = 8192
    blocks = {}
    for part in (0.0, 0.5, 1.0):
        run = same_as_base(t, "part%g" % part, optimizer={"recompute": part}, memory={"page_elements": elements})
        blocks[part] = recomputed(run)
    equal(blocks[0.0], 0, "blocks with recompute = 0")
    check(0.3 * blocks[1.0] < blocks[0.5] < 0.7 * blocks[1.0], "blocks: %s" % blocks)
    run = short(t, "changed")
    run.ok("--run.stop_after_step=1", status=STOPPED)
    run.ok("--optimizer.recompute=1.0")
    equal(run.hashes(), base_hashes(t), "state hashes of a run resumed with another value")


def flipped_out(t, name, fault, status=DONE, **changes):
    """A run in which a bit of an updated page comes out wrong (MTLAUNCH_FLIP_OUT), once."""
    run = short(t, name, **changes)
    once = os.path.join(t.dir, name + "-once")
    run.result = run.ok(env={"MTLAUNCH_FLIP_OUT": "%s:%s" % (fault, once)}, status=status)
    check(os.path.exists(once), "nothing was flipped: %s" % run.result)
    return run


@test
def a_core_that_computes_wrongly_is_found_and_named_and_changes_nothing(t):
    cores = len(os.sched_getaffinity(0))
    for dtype, parts in (("float32", (0, 2, 3)), ("bfloat16", (0, 1, 2, 3))):
        plain = done(t, "plain-" + dtype, model={"dtype": dtype})
        for part in parts:
            fault, name = "2:%d:1" % part, "%s-%d" % (dtype, part)
            run = flipped_out(t, name, fault, model={"dtype": dtype}, optimizer={"recompute": 1.0, "workers": 2})
            equal(run.hashes(), plain.hashes(), "state hashes with part %d repaired" % part)
            equal(run.digest(), plain.digest(), "digest with part %d repaired" % part)
            found = run.events("recompute")
            equal([(e["worker"], e["step"], e["page"], e["block"], e["part"]) for e in found],
                  [("opt_worker.0", 2, 0, 0, ("weights", "residual", "first moment", "second moment")[part])],
                  "recompute events")
            check(cores == 1 or found[0]["cores"][0] != found[0]["cores"][1], "cores: %s" % found[0])
            equal(found[0]["wrong_core"], found[0]["cores"][0], "wrong core")
            for words in ("page 0", "block 0", "step 2", "came out differently", "element %d" % found[0]["element"]):
                check(words in run.result.err, "the warning lacks %r: %s" % (words, run.result))
            equal(run.events("worker_exit"), [], "deaths")
            unnoticed = flipped_out(t, name + "-off", fault, model={"dtype": dtype}, optimizer={"workers": 2})
            check(unnoticed.hashes()[2] != plain.hashes()[2], "the flipped bit changes nothing")
            equal(unnoticed.events("recompute"), [], "recompute events with recompute = 0")


@test
def a_block_with_three_results_ends_the_worker_and_the_step_is_done_again(t):
    run = flipped_out(t, "once", "2:0:3", optimizer={"recompute": 1.0})
    equal(run.hashes(), base_hashes(t), "state hashes")
    words = [e["words"] for e in run.events("worker_exit")]
    check(len(words) == 1 and "does not compute reliably" in words[0] and "page 0, block 0" in words[0],
          "last words: %s" % words)
    always = short(t, "always", optimizer={"recompute": 1.0})
    result = always.ok(env={"MTLAUNCH_FLIP_OUT": "2:0:3"}, status=FAILED)
    check("does not compute reliably" in result.err and "test memory and processor" in result.err, "%s" % result)
    equal(always.digest()[0], 1, "committed step")
    always.ok()
    equal(always.hashes(), base_hashes(t), "state hashes after the hardware was changed")


# -- lr_scheduler --

RATE, LENGTH = 4e-3, 12


def rates(t, name, steps=LENGTH, status=DONE, **scheduler):
    run = short(t, name, training={"steps": steps}, optimizer={"learning_rate": RATE})
    run.sections["lr_scheduler"] = scheduler
    run.change()
    run.result = run.ok(status=status)
    return [line["learning_rate"] for line in run.step_lines()], run


def check_rates(found, formula):
    for k, rate in enumerate(found):
        expected = RATE * formula(k)
        check(abs(rate - expected) <= 2e-7 * RATE, "update %d: expected %.9g, found %.9g" % (k, expected, rate))


def decayed(shape, warmup, ratio, steps=LENGTH):
    return lambda k: (k + 1) / warmup if k < warmup else ratio + (1 - ratio) * shape((k - warmup) / (steps - warmup))


@key("lr_scheduler.type", "constant", "linear", "cosine", "wsd")
def type_is_the_shape_after_warm_up(t):
    check_rates(rates(t, "constant", type="constant", warmup_steps=3)[0], lambda k: min(1, (k + 1) / 3))
    check_rates(rates(t, "linear", type="linear", warmup_steps=3, min_lr_ratio=0.1)[0],
                decayed(lambda p: 1 - p, 3, 0.1))
    check_rates(rates(t, "cosine", type="cosine", warmup_steps=3, min_lr_ratio=0.1)[0],
                decayed(lambda p: 0.5 * (1 + math.cos(math.pi * p)), 3, 0.1))
    wsd = rates(t, "wsd", type="wsd", warmup_steps=3, min_lr_ratio=0.2, decay_ratio=0.5)[0]
    check_rates(wsd, lambda k: min(1, (k + 1) / 3) if k < 6 else 1 - 0.8 * (k - 6) / 6)


@key("lr_scheduler.warmup_steps")
def warmup_steps_rise_linearly_and_too_many_warn(t):
    check_rates(rates(t, "none", type="constant", warmup_steps=0)[0], lambda k: 1)
    check_rates(rates(t, "five", type="constant", warmup_steps=5)[0], lambda k: min(1, (k + 1) / 5))
    found, run = rates(t, "many", steps=4, type="cosine", warmup_steps=8)
    check_rates(found, lambda k: (k + 1) / 8)
    check("warning: warm-up of 8 steps in a run of 4" in run.result.err, run.result.err)


@key("lr_scheduler.warmup_ratio")
def warmup_ratio_is_a_part_of_the_run(t):
    check_rates(rates(t, "ratio", type="constant", warmup_ratio=0.4)[0], lambda k: min(1, (k + 1) / 5))
    _, run = rates(t, "both", status=USER, type="constant", warmup_ratio=0.5, warmup_steps=2)
    check("warmup_ratio" in run.result.err and "warmup_steps" in run.result.err, run.result.err)


@key("lr_scheduler.min_lr_ratio")
def min_lr_ratio_is_where_the_decay_ends(t):
    for ratio in (0.0, 0.5, 1.0):
        check_rates(rates(t, "r%g" % ratio, type="linear", warmup_steps=0, min_lr_ratio=ratio)[0],
                    decayed(lambda p: 1 - p, 0, ratio))


@key("lr_scheduler.decay_ratio")
def decay_ratio_is_the_last_part_of_wsd(t):
    for ratio in (0.25, 1.0):
        begin = LENGTH * (1 - ratio)
        found = rates(t, "d%g" % ratio, type="wsd", warmup_steps=0, min_lr_ratio=0.0, decay_ratio=ratio)[0]
        check_rates(found, lambda k: 1 if k < begin else 1 - (k - begin) / (LENGTH - begin))


# -- memory --


@key("memory.device", "auto", "cpu")
def device_is_the_cpu_and_cuda_is_refused(t):
    for word in ("auto", "cpu"):
        run = same_as_base(t, word, memory={"device": word})
        check("device: cpu" in log_text(run, "gpu_worker"), "the log does not name the device")
    refused(t, "no CUDA device", memory={"device": "cuda:0"})


@key("memory.max_vram", "auto")
def max_vram_is_refused_without_a_device_that_has_any(t):
    same_as_base(t, "auto", memory={"max_vram": "auto"})
    refused(t, "no device with VRAM", memory={"max_vram": "8GB"})


@key("memory.max_ram", "auto")
def max_ram_is_a_limit_that_is_kept(t):
    run = short(t, "tiny", memory={"max_ram": "1MB"})
    result = run.ok(status=FIT)
    check("max_ram" in result.err and "1 MB" in result.err, result.err)
    check(not os.path.exists(run.dir), "left behind")
    same_as_base(t, "auto", memory={"max_ram": "auto"})
    # activations of 16 x 8 x 64 positions decide: keeping them all fits in 2 GB, not in what is left of 160 MB
    large = {"training": {"seq_len": 64, "micro_batch_size": 16, "gradient_accumulation_steps": 8, "steps": 1,
                          "activation_checkpointing": "auto"}}
    choices = {}
    for budget in ("160MB", "2GB"):
        run = done(t, "b" + budget, memory={"max_ram": budget}, **large)
        choices[budget] = re.search(r"activation checkpointing: (\S+)", run.result.err).group(1)
        check(buffer_bytes(run) < 2e9, "buffers")
    equal(choices["2GB"], "none", "what fits in 2 GB")
    check(choices["160MB"] != "none", "the budget decides nothing")
    run = short(t, "tight", memory={"max_ram": "160MB"}, **large)
    result = run.ok("--training.activation_checkpointing=none", status=FIT)
    check("max_ram" in result.err and "activation_checkpointing" in result.err, result.err)
    check(not os.path.exists(run.dir), "left behind")


@key("memory.offload_dir")
def offload_dir_is_where_the_store_lies_one_or_several(t):
    one = short(t, "one", memory={"offload_dir": ["nvme"]})
    one.ok()
    equal(one.hashes(), base_hashes(t), "state hashes")
    equal(set(os.listdir(os.path.join(t.dir, "nvme"))), {"superblock", "slots", "commit", "run.lock"},
          "files of the store")
    check(not os.path.exists(os.path.join(one.dir, "store")), "another store in the run directory")
    dirs = [os.path.join(t.dir, "a"), os.path.join(t.dir, "b")]
    two = same_as_base(t, "two", memory={"offload_dir": dirs})
    sizes = [os.path.getsize(os.path.join(d, "slots")) for d in dirs]
    check(min(sizes) > 0, "bytes in each directory: %s" % sizes)
    equal(sum(sizes), os.path.getsize(os.path.join(t.dir, "nvme", "slots")), "bytes of slots in all")
    equal(two.digest()[1], base_hashes(t)[STEPS], "digest")


def commit_bytes(run):
    """One digest table and one record: the commit file is two tables and eight records."""
    return (os.path.getsize(os.path.join(run.dir, "store", "commit")) - 8 * 4096) // 2 + 4096


@key("memory.durability", "step")
def durability_commits_every_k_steps_and_changes_no_bit(t):
    for value, commits in (("step", [1, 2, 3]), (1, [1, 2, 3]), (2, [2, 3]), (100, [3])):
        run = same_as_base(t, "d%s" % value, memory={"durability": value})
        equal([e["step"] for e in run.events("commit")], commits, "commits with durability %s" % value)
        written = [l["bytes_written"] for l in run.step_lines()]  # a step's slots; a commit is in the next line
        slots = written[0]
        equal(written[1:], [slots + (commit_bytes(run) if s in commits else 0) for s in (1, 2)],
              "bytes written per step with durability %s" % value)
    stopped = short(t, "stopped", memory={"durability": 100})
    stopped.ok("--run.stop_after_step=2", status=STOPPED)
    equal(stopped.digest()[0], 2, "the step before a stop is committed")
    stopped.ok()
    equal(stopped.hashes(), base_hashes(t), "state hashes after stop and resume")
    few = short(t, "few", memory={"durability": 2, "verify_writes": False})
    result = few.ok(status=FIT)
    check("durability" in result.err and "verify_writes" in result.err, result.err)
    check(not os.path.exists(few.dir), "a refused start left %s" % few.dir)


@key("memory.verify_writes")
def verify_writes_takes_three_slots_per_page_instead_of_two(t):
    sizes = [os.path.getsize(os.path.join(same_as_base(t, "v%d" % v, memory={"verify_writes": v}).dir, "store", "slots"))
             for v in (True, False)]
    equal(sizes[0] * 2, sizes[1] * 3, "bytes of slots, 3 : 2")


@key("memory.page_elements")
def page_elements_cut_the_model_and_change_no_weight(t):
    pages, weights = {}, set()
    for elements in (4096, 8192, 4194304):
        run = done(t, "p%d" % elements, memory={"page_elements": elements})
        weights.add(run.digest()[2])
        valid = mtlaunch("validate", run.file, status=DONE).out
        pages[elements] = int(re.search(r"in (\d+) pages", valid).group(1))
    equal(len(weights), 1, "different weights")
    check(pages[4096] > pages[8192] > pages[4194304] == 5, "pages %s, a layer has at least one" % pages)
    bad = short(t, "bad", memory={"page_elements": 5000}).ok(status=USER)
    check("4096 x 2^k" in bad.err, bad.err)


@key("memory.io_engine", "auto", "io_uring", "sync")
def io_engine_is_named_in_the_log_and_changes_no_bit(t):
    named = {}
    for word in ("auto", "io_uring", "sync"):
        run = same_as_base(t, word, memory={"io_engine": word})
        named[word] = re.search(r"I/O engine: (\S+)", log_text(run, "io_worker")).group(1)
    equal((named["io_uring"], named["sync"]), ("io_uring", "sync"), "engines")
    check(named["auto"] in ("io_uring", "sync"), "engine %s" % named["auto"])


@key("memory.prefetch", "predict")
def prefetch_is_pages_read_ahead(t):
    ram = {}
    for value in (1, 4, "predict"):
        run = same_as_base(t, "p%s" % value, memory={"prefetch": value})
        ram[value] = float(re.search(r"RAM ([\d.]+) MB", run.result.err).group(1))
    check(ram[1] < ram[4] < ram["predict"], "RAM of the frames: %s MB" % ram)


@key("memory.threads", "auto")
def threads_are_the_compute_threads_of_the_cpu_device(t):
    counts = {}
    for threads in (1, 2, 3):
        run = short(t, "t%d" % threads, memory={"threads": threads}, training={"steps": 2000})
        with run.start() as live:
            live.wait_committed(STEPS)
            (pid, _), = live.children("gpu_worker")
            counts[threads] = len(os.listdir("/proc/%d/task" % pid))
            live.signal(signal.SIGTERM)
            equal(live.wait(10), STOPPED, "status")
        equal({s: h for s, h in run.hashes().items() if s <= STEPS}, base_hashes(t), "state hashes")
    equal((counts[2] - counts[1], counts[3] - counts[2]), (1, 1), "tasks of gpu_worker %s" % counts)
    same_as_base(t, "auto", memory={"threads": "auto"})
    many = short(t, "many", memory={"threads": 1025}).ok(status=USER)
    check("from 1 to 1024" in many.err, many.err)


@key("memory.drive_tbw")
def drive_tbw_is_refused_without_a_plan_that_counts_wear(t):
    refused(t, "no plan that counts drive wear", memory={"drive_tbw": 600})


# -- checkpoint --


def export_names(run):
    return sorted(os.listdir(os.path.join(run.dir, "export")))


@key("checkpoint.export_interval")
def export_interval_is_steps_between_exports(t):
    run = same_as_base(t, "each", checkpoint={"export_interval": 1, "keep": 9})
    equal(export_names(run), ["step-1", "step-2", "step-3"], "exports")
    first, third = exported(run, 1), exported(run, 3)
    check(first["lm_head.weight"][2] != third["lm_head.weight"][2], "the same weights at steps 1 and 3")
    equal(export_names(done(t, "end")), ["step-3"], "exports without an interval")


@key("checkpoint.keep")
def keep_is_how_many_exports_stay(t):
    for keep in (1, 2):
        run = done(t, "k%d" % keep, checkpoint={"export_interval": 1, "keep": keep}, training={"steps": 4})
        equal(export_names(run), ["step-%d" % s for s in range(5 - keep, 5)], "exports")


@key("checkpoint.export_dtype", "auto", "float32", "bfloat16", "float16")
def export_dtype_is_the_dtype_of_the_tensors(t):
    for word, dtype in (("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")):
        run = same_as_base(t, word, checkpoint={"export_dtype": word})
        equal({v[0] for v in exported(run).values()}, {dtype}, "dtypes")
        with open(os.path.join(run.export_dir(STEPS), "config.json")) as f:
            config = json.load(f)
        equal(config.get("dtype", config.get("torch_dtype")), word, "dtype of config.json")
    mixed = make_weights(llama_config(), lambda name: "F16" if "mlp" in name else "BF16")
    folder = write_pretrained(os.path.join(t.dir, "mixed"), mixed)
    found = exported(tune(t, "auto", folder, checkpoint={"export_dtype": "auto"}))
    equal({n: v[0] for n, v in found.items()}, {n: v[0] for n, v in mixed.items()}, "dtype of each tensor")


# -- eval --

HELD = {"val_fraction": 0.1}


@key("eval.interval")
def interval_is_steps_between_evaluations(t):
    run = done(t, "run", data=HELD, training={"steps": 5}, eval={"interval": 2})
    equal([e["step"] for e in run.events("eval")], [2, 4, 5], "steps of eval events")
    for event in run.events("eval"):
        check(abs(math.exp(event["val_loss"]) / event["perplexity"] - 1) < 1e-6, "perplexity of %s" % event)
    off = done(t, "off", data=HELD, training={"steps": 5})
    equal(off.events("eval"), [], "evaluations without an interval")
    equal(off.hashes(), run.hashes(), "evaluation changes the state")
    nothing = short(t, "nothing", eval={"interval": 2}).ok(status=USER)
    check("nothing to evaluate" in nothing.err, nothing.err)


@key("eval.sequences")
def sequences_is_how_many_are_evaluated(t):
    tokens = {}
    for n in (1, 5, 100000):
        run = done(t, "s%d" % n, data=HELD, eval={"interval": STEPS, "sequences": n})
        tokens[n] = run.events("eval")[0]["tokens"]
    held = int(described(run, r"the last (\d+) samples").group(1))
    check(30 <= tokens[1] <= 32 and 150 <= tokens[5] <= 160, "tokens %s" % tokens)
    check(held * 30 <= tokens[100000] <= held * 32, "tokens %s of %d samples" % (tokens, held))


@key("eval.sample_prompts")
def sample_prompts_are_continued_at_each_evaluation(t):
    prompts = ["Once upon", "two"]
    run = same_as_base(t, "run", eval={"interval": STEPS, "sample_prompts": prompts, "sample_tokens": 5})
    samples = run.events("sample")
    equal([(s["step"], s["prompt"]) for s in samples], [(STEPS, 0), (STEPS, 1)], "samples")
    equal(run.events("eval"), [], "evaluations without validation data")
    for prompt in prompts:
        check("sample: %s|" % prompt in run.result.err, run.result.err)


@key("eval.sample_tokens")
def sample_tokens_is_the_length_of_a_sample(t):
    lengths = {}
    for n in (3, 40):
        run = short(t, "n%d" % n, eval={"interval": STEPS, "sample_prompts": ["ab"], "sample_tokens": n})
        run.ok()
        lengths[n] = len(run.events("sample")[0]["text"].encode())
    check(lengths[3] <= 3 < lengths[40] <= 40, "bytes %s" % lengths)


# -- log --


def shown_steps(text):
    return [int(s) for s in re.findall(r"step (\d+)/\d+ ", text)]


@key("log.interval")
def log_interval_is_steps_between_progress_lines(t):
    run = done(t, "run", training={"steps": 8}, log={"interval": 3})
    equal(shown_steps(run.result.err), [3, 6, 8], "steps shown")
    run.check_steps(8)


def on_a_terminal(run):
    """Runs with stderr a terminal: (status, what it showed)."""
    master, slave = pty.openpty()
    process = subprocess.Popen([MTLAUNCH, run.file], env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    return process.wait(), shown.decode(errors="replace")


@key("log.progress", "auto", "bar", "plain", "none")
def progress_is_a_bar_or_lines_or_nothing(t):
    bar = done(t, "bar", log={"progress": "bar"}).result.err
    check("\r[" in bar and "#" in bar, repr(bar))
    plain = done(t, "plain", log={"progress": "plain"}).result.err
    check("\r" not in plain and shown_steps(plain) == [1, 2, 3], repr(plain))
    equal(done(t, "none", log={"progress": "none"}).result.err, "", "stderr with progress = none")
    auto = done(t, "auto", log={"progress": "auto"}).result.err
    check("\r" not in auto and shown_steps(auto) == [1, 2, 3], repr(auto))
    status, shown = on_a_terminal(short(t, "tty", log={"progress": "auto"}))
    equal(status, DONE, "status")
    check("\r[" in shown, repr(shown))


@key("log.trace")
def trace_is_refused(t):
    same_as_base(t, "off", log={"trace": False})
    refused(t, "no trace", log={"trace": True})


@key("log.http")
def http_is_refused(t):
    refused(t, "no status page", log={"http": "127.0.0.1:8080"})


@key("log.max_size")
def max_size_rotates_a_log(t):
    for size, rotated in (("64KiB", True), ("100MB", False)):
        run = short(t, "s" + size, log={"max_size": size})
        run.ok("--run.stop_after_step=1", status=STOPPED)
        log = os.path.join(run.dir, "logs", "io_worker.0.log")
        with open(log, "a") as f:
            f.write(("x" * 99 + "\n") * 655)
        run.ok()
        equal(os.path.exists(log + ".1"), rotated, "a second log with max_size = %s" % size)
        check(os.path.getsize(log) <= (65536 if rotated else 100e6), "bytes of the log")
    bad = short(t, "bad", log={"max_size": 1000}).ok(status=USER)
    check("65536" in bad.err, bad.err)


# -- nothing is left out --


def header():
    with open(os.path.join(ROOT, "launcher", "config_keys.h")) as f:
        return f.read()


def macro(text, name):
    """The rows of an X-macro list, each split at commas outside of strings."""
    body = re.search(r"#define %s\(X\)((?:.*\\\n)*.*\n)" % name, text).group(1).replace("\\\n", " ")
    return [re.findall(r'"(?:[^"\\]|\\.)*"|[^,\s"]+', row) for row in re.split(r"\bX\(", body)[1:]]


@test
def every_key_has_a_test(t):
    keys = {"%s.%s" % (row[0], row[1]) for row in macro(header(), "CONFIG_KEYS")}
    check(len(keys) > 50, "read only %d keys" % len(keys))
    equal(keys - set(covered), set(), "keys without a test")
    equal(set(covered) - keys, set(), "tests of keys that do not exist")


@test
def every_word_of_a_key_has_a_test(t):
    text = header()
    for row in macro(text, "CONFIG_KEYS"):
        name, rest = "%s.%s" % (row[0], row[1]), " ".join(row[2:])
        chosen = re.search(r"ONE_OF\((\w+)\)|WORDS(?:_OR)?\((\w+)", rest)
        if not chosen:
            continue
        lists = "CONFIG_ENUM_" + chosen.group(1) if chosen.group(1) else "CONFIG_WORDS_" + chosen.group(2)
        words = {r[-2 if r[-1] == ")" else -1].rstrip(")").strip('"') for r in macro(text, lists)}
        equal(covered[name], words, "words of %s in its test" % name)


main()
