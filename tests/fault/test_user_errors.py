#!/usr/bin/env python3
"""What a user can get wrong, and what is said then.

Every case here ends with exit 2 (3 where something does not fit, 5 where the run is in use) and exactly
one message on stderr: what, where, expected, found, and a hint where one helps. Nothing is printed
elsewhere, nothing is left on disk, and a run that was there is there unchanged. The messages are printed
(lines that begin with "# exit"), so that a person can judge them.
"""
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *

NOBODY = 65534


def names(directory):
    """Every path below, folders too."""
    found = set()
    for folder, folders, files in os.walk(directory):
        found |= {os.path.join(folder, name) for name in folders + files}
    return found


def one_message(t, result, status, *parts):
    """The result is this status and one message with all of these parts; returns it.

    A run that is there announces what its new run file changes before anything else; that is no message.
    """
    shown = result.err.replace(t.dir + "/", "")
    print("# exit %d: %s" % (result.status, shown.rstrip("\n").replace("\n", "\n#        ")), flush=True)
    equal(result.status, status, "status; it said %r" % result.err)
    equal(result.out, "", "stdout")
    lines = [line for line in result.err.splitlines() if not line.startswith("changed: ")]
    check(lines and lines[0].startswith("mtlaunch: "), "expected one message, found %r" % result.err)
    check(all(line.startswith("  hint: ") for line in lines[1:]) and len(lines) <= 2,
          "expected one message and at most one hint, found %r" % result.err)
    for part in parts:
        check(part in result.err, "expected %r in %r" % (part, result.err))
    return result.err


def fails(t, arguments, *parts, status=USER, preexec=None, cwd=None):
    """The command fails with one message and changes no name below t.dir."""
    before = names(t.dir)
    result = mtlaunch(*arguments, preexec=preexec, cwd=cwd)
    message = one_message(t, result, status, *parts)
    equal(sorted(names(t.dir) ^ before), [], "paths made or removed")
    return message


def run_fails(t, run, *parts, overrides=(), status=USER, **how):
    """Both `mtlaunch RUN.toml` and, for the same reason, `mtlaunch validate RUN.toml`."""
    message = fails(t, [run.file, *overrides], *parts, status=status, **how)
    if status == USER:
        quiet = mtlaunch("validate", run.file, *overrides, preexec=how.get("preexec"))
        if quiet.status != DONE:  # what only the run's own directories know is not in validate's reach
            equal((quiet.status, quiet.err), (USER, message), "status and message of validate")
    return message


def place(run, text):
    """file:line of a text in the run file."""
    with open(run.file) as f:
        for i, line in enumerate(f, 1):
            if text in line:
                return "%s:%d:" % (run.file, i)
    raise TestFailure("no %r in %s" % (text, run.file))


# -- the run file --

VALUES = [
    ("a_string_for_a_number", "training", "steps", "many", ["expected an integer", 'found "many"']),
    ("a_boolean_for_a_number", "log", "interval", True, ["expected an integer", "found true"]),
    ("a_fraction_for_an_integer", "training", "steps", 1.5, ["expected an integer", "found 1.5"]),
    ("a_number_for_a_boolean", "data", "shuffle", 1, ["expected true or false", "found 1"]),
    ("a_number_for_a_path", "model", "path", 7, ["expected a non-empty string", "found 7"]),
    ("a_string_for_a_list", "optimizer", "no_decay", "x", ["expected an array", 'found "x"']),
    ("too_small_a_number", "training", "steps", 0, ["at least 1", "found 0"]),
    ("a_negative_number", "training", "micro_batch_size", -3, ["from 1", "found -3"]),
    ("too_large_a_number", "training", "seq_len", 1 << 40, ["from 1 to 16777216", "found 1099511627776"]),
    ("a_fraction_out_of_range", "optimizer", "betas", [0.9, 1.0], ["below 1", "found 1"]),
    ("a_pair_of_one", "optimizer", "betas", [0.9], ["two numbers", "an array of 1"]),
    ("a_word_that_is_none", "model", "dtype", "bf16", ['"bfloat16" or "float32"', 'found "bf16"']),
    ("a_page_size_that_is_no_power", "memory", "page_elements", 5000, ["4096 x 2^k", "found 5000"]),
    ("a_size_with_a_wrong_unit", "memory", "max_ram", "12QB", ["24GiB", 'found "12QB"']),
    ("every_0_layers", "training", "activation_checkpointing", "every-0", ["every-N", 'found "every-0"']),
]


def add_value(name, section, name_of_key, value, parts):
    def function(t):
        run = tiny_run(t.dir)
        run.change(**{section: {name_of_key: value}})
        found = place(run, "%s = %s" % (name_of_key, toml_value(value)))
        run_fails(t, run, found + "1: [%s] %s: " % (section, name_of_key), *parts)
    add_test("config_" + name, function)


for case in VALUES:
    add_value(*case)


@test
def config_an_unknown_key_suggests_the_nearest(t):
    run = tiny_run(t.dir)
    run.change(training={"stepz": 3})
    run_fails(t, run, place(run, "stepz") + "1: [training] stepz: unknown key", "hint: did you mean [training] steps?")
    run = tiny_run(t.dir, "far")
    run.change(training={"zzzzzzzzzz": 3})
    check("did you mean" not in run_fails(t, run, "[training] zzzzzzzzzz: unknown key"), "a hint at nothing near")


@test
def config_an_unknown_section_suggests_the_nearest(t):
    run = tiny_run(t.dir)
    run.change(optimiser={"name": "adamw"})
    run_fails(t, run, place(run, "[optimiser]") + "2: [optimiser]: unknown section", "did you mean [optimizer]?")


@test
def config_a_missing_key_is_named(t):
    run = tiny_run(t.dir)
    run.change(model={"path": None})
    run_fails(t, run, run.file, "[model] path: required", "hint: ")


@test
def config_two_alternatives_are_one_too_many(t):
    run = tiny_run(t.dir)
    run.change(training={"epochs": 1.0})
    run_fails(t, run, run.file, "[training]", "steps and epochs, found both")


@test
def config_a_syntax_error_has_line_and_column(t):
    for name, text in (("brace", "[run]\noutput_dir = \"x\"\n[training\nsteps = 3\n"),
                       ("twice", "[training]\nsteps = 3\nsteps = 4\n"),
                       ("quote", "[run]\noutput_dir = \"x\n")):
        file = os.path.join(t.dir, name + ".toml")
        with open(file, "w") as f:
            f.write(text)
        line = 3 if name != "quote" else 2
        fails(t, [file], "%s.toml:%d:" % (name, line))


@test
def config_overrides_are_checked_like_the_file(t):
    run = tiny_run(t.dir)
    run_fails(t, run, "--training.stepz=3: [training] stepz: unknown key", "[training] steps?",
              overrides=["--training.stepz=3"])
    run_fails(t, run, "--training.steps=x: [training] steps: expected an integer", overrides=["--training.steps=x"])
    run_fails(t, run, "--training.steps: expected --section.key=value", overrides=["--training.steps"])
    run_fails(t, run, "training.steps=3: expected --section.key=value", overrides=["training.steps=3"])


@test
def run_file_that_is_none(t):
    fails(t, ["nowhere.toml"], "nowhere.toml: cannot be read: No such file")
    os.mkdir(os.path.join(t.dir, "folder.toml"))
    fails(t, [os.path.join(t.dir, "folder.toml")], "folder.toml: ", "Is a directory")
    binary = os.path.join(t.dir, "binary.toml")
    with open(binary, "wb") as f:
        f.write(bytes(range(256)) * 40)
    fails(t, [binary], "binary.toml:1:")
    huge = os.path.join(t.dir, "huge.toml")
    with open(huge, "wb") as f:
        f.truncate(1 << 40)
    fails(t, [huge], "huge.toml: larger than 1 MiB")
    empty = os.path.join(t.dir, "empty.toml")
    open(empty, "w").close()
    fails(t, [empty], "empty.toml", "required")


@test
def command_that_is_none(t):
    fails(t, ["frobnicate"], "frobnicate: neither a command nor a .toml file", "mtlaunch help")
    fails(t, ["run"], "expected a run file")
    fails(t, ["validate"], "expected a run file")


# -- the model's config.json --

CONFIGS = [
    ("of_another_architecture", {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
     ["LlamaForCausalLM", "BloomForCausalLM"]),
    ("of_a_relative", {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, ["Qwen2MoeForCausalLM"]),
    ("of_another_type", {"model_type": "qwen3"}, ['model_type: expected "llama"', '"qwen3"']),
    ("with_a_string_for_a_size", {"hidden_size": "64"}, ["hidden_size: expected an integer", 'found "64"']),
    ("with_heads_that_do_not_divide", {"num_key_value_heads": 3}, ["num_key_value_heads", "divisor", "found 3"]),
    ("with_another_activation", {"hidden_act": "relu"}, ['hidden_act: expected "silu"', '"relu"']),
    ("with_dropout", {"attention_dropout": 0.1}, ["attention_dropout: expected 0 for training", "0.1", "hint: "]),
    ("with_a_window", {"sliding_window": 8}, ["sliding_window: expected no such key"]),
    ("with_unknown_rope", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_scaling", '"yarn"']),
    ("with_an_unknown_key", {"frobnicate": 3}, ["frobnicate", "hint: "]),
    ("with_too_small_a_vocabulary", {"vocab_size": 256, "eos_token_id": None},
     ['tokenizer = "bytes"', "at least 257", "256"]),
    ("with_an_end_outside_of_the_vocabulary", {"eos_token_id": 272}, ["eos_token_id", "below vocab_size 272", "272"]),
    ("with_too_few_positions", {"max_position_embeddings": 31}, ["seq_len = 32", "31 positions", "hint: "]),
    ("with_absurd_sizes", {"hidden_size": 1 << 40}, ["hidden_size", "16777216"]),
]


def add_config(name, changes, parts):
    def function(t):
        run_fails(t, tiny_run(t.dir, hf=changes), *parts)
    add_test("model_" + name, function)


for case in CONFIGS:
    add_config(*case)


@test
def model_folder_that_is_none(t):
    run = tiny_run(t.dir)
    run.change(model={"path": "nowhere"})
    run_fails(t, run, "[model] path: %s/nowhere: No such file" % t.dir, "hint: expected a Hugging Face folder")
    run.change(model={"path": "train.txt"})
    run_fails(t, run, "train.txt/config.json: cannot open: Not a directory")
    os.mkdir(os.path.join(t.dir, "bare"))
    run.change(model={"path": "bare"})
    run_fails(t, run, "bare/config.json: cannot open: No such file")


@test
def model_config_that_is_no_json(t):
    for name, text, parts in (("comma", b'{"hidden_size": 1,}', [":1:"]), ("empty", b"", [":1:"]),
                              ("list", b"[1]", ["expected a JSON object"]), ("bytes", b"\xff\xfe\x00", [":1:"]),
                              ("twice", b'{"hidden_size": 1, "hidden_size": 2}', ["duplicate"])):
        folder = write_model(os.path.join(t.dir, name))
        with open(os.path.join(folder, "config.json"), "wb") as f:
            f.write(text)
        run_fails(t, tiny_run(t.dir, "run-" + name, hf=folder), name + "/config.json", *parts)


# -- weights --


def weights_run(t, tensors, name="model", shards=1):
    """A run that would start from these weights."""
    folder = write_pretrained(os.path.join(t.dir, name), tensors, shards=shards)
    run = tiny_run(t.dir, "run-" + name, hf=folder)
    run.change(model={"init": "pretrained"})
    return run, folder


UP = "model.layers.1.mlp.up_proj.weight"


def changed(change):
    tensors = make_weights(llama_config())
    change(tensors)
    return tensors


WEIGHTS = [
    ("a_missing_tensor", lambda w: w.pop(UP), [UP, "found nowhere", "hint: "]),
    ("a_tensor_too_many", lambda w: w.update({"model.extra.weight": w["model.norm.weight"]}),
     ["model.extra.weight: expected no such tensor"]),
    ("a_transposed_tensor", lambda w: w.update({UP: (w[UP][0], w[UP][1][::-1], w[UP][2])}),
     [UP, "expected shape [160, 64], found [64, 160]"]),
    ("a_shorter_tensor", lambda w: w.update({UP: ("F32", (160, 63), w[UP][2][:160 * 63 * 4])}),
     [UP, "expected shape [160, 64], found [160, 63]"]),
    ("an_integer_tensor", lambda w: w.update({UP: ("I32", w[UP][1], w[UP][2])}),
     [UP, "expected dtype F32, BF16 or F16, found I32"]),
    ("a_quantized_tensor", lambda w: w.update({UP: ("F8_E4M3", w[UP][1], w[UP][2][:160 * 64])}), [UP, "F8_E4M3"]),
]


def add_weights(name, change, parts):
    def function(t):
        run, folder = weights_run(t, changed(change))
        run_fails(t, run, os.path.join(folder, "model.safetensors"), *parts)
    add_test("weights_with_" + name, function)


for case in WEIGHTS:
    add_weights(*case)


@test
def weights_that_are_none_cut_short_or_something_else(t):
    tensors = make_weights(llama_config())
    run, folder = weights_run(t, tensors)
    path = os.path.join(folder, "model.safetensors")
    with open(path, "rb") as f:
        whole = f.read()
    for text, parts in ((whole[:-100], ["model.safetensors", "hint: "]), (whole[:20], ["model.safetensors"]),
                        (b"", ["at least 8 bytes, found 0"]),
                        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", ["hint: this is no safetensors"])):
        with open(path, "wb") as f:
            f.write(text)
        run_fails(t, run, *parts)
    os.remove(path)
    run_fails(t, run, "expected model.safetensors or model.safetensors.index.json", "hint: ")


@test
def weights_in_shards_with_one_missing_or_a_wrong_index(t):
    run, folder = weights_run(t, make_weights(llama_config()), shards=3)
    shards = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
    equal(len(shards), 3, "shards")
    run.ok("--training.steps=1")
    second = os.path.join(folder, shards[1])
    run = tiny_run(t.dir, "other", hf=folder)
    run.change(model={"init": "pretrained"})
    os.rename(second, second + ".away")
    run_fails(t, run, shards[1], "found no file", "hint: ")
    os.rename(second + ".away", second)
    index = os.path.join(folder, "model.safetensors.index.json")
    with open(index) as f:
        good = json.load(f)
    for value, parts in (("../../etc/passwd", [UP, "in the same folder", "../../etc/passwd"]), (3, [UP]),
                         (shards[0] if good["weight_map"][UP] != shards[0] else shards[2], [UP, "expected in"])):
        bad = dict(good, weight_map=dict(good["weight_map"], **{UP: value}))
        with open(index, "w") as f:
            json.dump(bad, f)
        run_fails(t, run, "model.safetensors.index.json", *parts)
    with open(index, "w") as f:
        f.write("{")
    run_fails(t, run, "model.safetensors.index.json:1:")


# -- tokenizer --


@test
def tokenizer_that_does_not_fit(t):
    folder = write_model(os.path.join(t.dir, "model"))
    run = tiny_run(t.dir, hf=folder)
    run.change(model={"tokenizer": ""})
    run_fails(t, run, "train.txt: text", '"bytes"', "hint: ", "shards")
    shard = write_nanogpt_shard(os.path.join(t.dir, "s.bin"), tokens_of(2000))
    run = tiny_run(t.dir, "shard", hf=folder, file=shard)
    run.change(model={"tokenizer": "nowhere.json"})
    run_fails(t, run, "[model] tokenizer", "nowhere.json", "No such file")
    run.change(model={"tokenizer": ""})
    file = os.path.join(folder, "tokenizer.json")
    for text, parts in (("{", [":1:"]), ("{}", ["model.vocab", "hint: "]),
                        (json.dumps({"model": {"vocab": {"a": 0, "big": 272}}}), ['"big"', "272", "hint: "]),
                        (json.dumps({"model": {"vocab": [["t", 0.0]] * 273}}), ["id 272"]),
                        (json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 999, "content": "<x>"}]}),
                         ['"<x>"', "999"])):
        with open(file, "w") as f:
            f.write(text)
        run_fails(t, run, "tokenizer.json", *parts)
    with open(file, "w") as f:
        json.dump({"model": {"vocab": {"a": 0, "b": 271}}}, f)
    run.ok("--training.steps=1")


@test
def sample_prompts_without_a_tokenizer(t):
    shard = write_nanogpt_shard(os.path.join(t.dir, "s.bin"), tokens_of(2000))
    run = tiny_run(t.dir, file=shard)
    run.change(model={"tokenizer": ""}, eval={"interval": 1, "sample_prompts": ["a"]})
    run_fails(t, run, "a prompt is text", "there is no tokenizer for it", "model.tokenizer")


# -- data --


def u16(ids):
    return struct.pack("<%dH" % len(ids), *ids)


def llmc(ids, magic=20240520, version=1, count=None):
    return struct.pack("<256i", magic, version, len(ids) if count is None else count, *[0] * 253) + u16(ids)


IDS = tokens_of(2000)
OUTSIDE = IDS[:777] + [300] + IDS[778:]

DATA = [
    ("that_is_empty", "e.txt", b"", ["the file is empty"]),
    ("that_is_not_utf8", "latin.txt", b"abc" * 100 + b"\xe9" + b"abc" * 100, ["byte offset 301", "hint: ", "iconv"]),
    ("that_ends_inside_a_character", "cut.txt", b"abc" * 100 + b"\xe2\x82", ["byte offset 300"]),
    ("without_a_known_name", "corpus", b"abc" * 1000, ["cannot tell the format", ".jsonl", "hint: "]),
    ("too_short_for_a_sample", "few.txt", b"abc", ["too little data for one sample", "4 tokens", "seq_len = 32"]),
    ("with_a_number_for_a_text", "n.jsonl", b'{"text": "hello"}\n{"text": 3}\n', ["n.jsonl:2:", "found a number"]),
    ("with_another_key", "k.jsonl", b'{"text": "hello"}\n\n{"txt": "a"}\n', ["k.jsonl:3:", 'key "text"', '"txt"']),
    ("with_a_broken_line", "b.jsonl", b'{"text": "hello"}\n{"text": "a"\n', ["b.jsonl:2:", "column"]),
    ("with_a_line_that_is_not_utf8", "u.jsonl", b'{"text": "hello"}\n{"text": "\xff"}\n', ["u.jsonl:2:", "offset"]),
    ("of_blank_lines", "blank.jsonl", b"\n\n\n", ["no document", "3 blank lines"]),
    ("with_a_token_outside_of_the_vocabulary", "o.bin", u16(OUTSIDE),
     ["token 777 (byte offset 1554) has id 300", "vocab_size = 272", "hint: "]),
    ("with_such_a_token_behind_a_header", "h.bin", llmc(OUTSIDE), ["token 777 (byte offset 2578) has id 300"]),
    ("of_an_odd_number_of_bytes", "odd.bin", u16(IDS) + b"x", ["odd number of bytes, 4001"]),
    ("of_another_version", "v.bin", llmc(IDS, version=3), ["expected version 1, found 3"]),
    ("shorter_than_its_header_says", "c.bin", llmc(IDS, count=3000), ["3000 tokens", "7024 bytes", "found 5024"]),
    ("of_multiple_choice", "m.bin", llmc(IDS, magic=20240522), ["multiple-choice", "20240520"]),
]


def add_data(name, file, content, parts):
    def function(t):
        path = os.path.join(t.dir, file)
        with open(path, "wb") as f:
            f.write(content)
        run_fails(t, tiny_run(t.dir, file=path), path, *parts)
        shard = write_nanogpt_shard(os.path.join(t.dir, "shard.bin"), IDS) if file.endswith(".bin") else None
        good = tiny_run(t.dir, "validation", file=shard)  # the same as validation data
        good.change(data={"validation": [path]}, eval={"interval": 1})
        fails(t, [good.file], path, *parts)
    add_test("data_" + name, function)


for case in DATA:
    add_data(*case)


@test
def data_that_is_no_file(t):
    run_fails(t, tiny_run(t.dir, "a", file=os.path.join(t.dir, "nowhere.txt")), "nowhere.txt: cannot open: No such file")
    os.mkdir(os.path.join(t.dir, "folder.txt"))
    run_fails(t, tiny_run(t.dir, "b", file=os.path.join(t.dir, "folder.txt")), "folder.txt", "found a directory")
    os.mkfifo(os.path.join(t.dir, "pipe.txt"))
    run_fails(t, tiny_run(t.dir, "c", file=os.path.join(t.dir, "pipe.txt")), "pipe.txt", "regular file")


@test
def data_of_two_natures(t):
    shard = write_nanogpt_shard(os.path.join(t.dir, "s.bin"), IDS)
    run = tiny_run(t.dir)
    run.change(data={"train": ["train.txt", shard]})
    run_fails(t, run, "text and token shards", "train.txt", "s.bin")
    run.change(data={"train": ["train.txt"], "format": "tokens"})
    run_fails(t, run, "train.txt", 'format = "tokens"')


@test
def data_all_held_out(t):
    few = write_text(os.path.join(t.dir, "few.txt"), 40)
    run = tiny_run(t.dir, file=few)
    run.change(data={"val_fraction": 0.5})
    run_fails(t, run, "val_fraction = 0.5 of 1 samples leaves none")


@test
def data_cache_dir_that_cannot_be_one(t):
    run = tiny_run(t.dir)
    for path in ("train.txt", "train.txt/below"):
        run.change(data={"cache_dir": path})
        fails(t, [run.file], "train.txt")


# -- places --


@test
def output_dir_that_cannot_be_one(t):
    run = tiny_run(t.dir)
    run.change(run={"output_dir": "train.txt"})
    fails(t, [run.file], "[run] output_dir: %s/train.txt: expected a directory" % t.dir)
    run.change(run={"output_dir": "train.txt/below"})
    fails(t, [run.file], "[run] output_dir: %s/train.txt" % t.dir)
    run.change(run={"output_dir": "x" * 300})
    fails(t, [run.file], "[run] output_dir: ", "File name too long")


@test
def offload_dir_that_cannot_be_one(t):
    run = tiny_run(t.dir)
    run.change(memory={"offload_dir": ["train.txt"]})
    fails(t, [run.file], "offload_dir: %s/train.txt: expected a directory, found a file" % t.dir)
    run.change(memory={"offload_dir": ["a", "a"]})
    fails(t, [run.file], "offload_dir: %s/a: expected once, found twice" % t.dir)
    run.change(memory={"offload_dir": ["d%d" % i for i in range(17)]})
    fails(t, [run.file], "offload_dir: expected at most 16 directories, found 17")


@test
def nothing_of_a_store_is_left_when_the_weights_are_wrong(t):
    run, _ = weights_run(t, changed(lambda w: w.pop(UP)))
    run.change(memory={"offload_dir": ["new/nvme"]}, data={"cache_dir": "new/cache"})
    before = names(t.dir)
    one_message(t, run.run(), USER, UP)
    left = names(t.dir) - before
    check(not any("nvme" in path or path.startswith(run.dir) for path in left), "left %s" % sorted(left))


def as_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def visible_to_all(t):
    """Another user reaches t.dir and may write in the folder returned, t.dir/theirs."""
    if os.geteuid() != 0:
        skip("needs root, to become another user")
    above = os.path.dirname(t.dir)
    os.chmod(above, 0o755)
    os.chmod(t.dir, 0o755)
    theirs = os.path.join(t.dir, "theirs")
    os.makedirs(theirs, exist_ok=True)
    os.chown(theirs, NOBODY, NOBODY)
    try:
        mtlaunch("--version", preexec=as_nobody, status=DONE)
    except PermissionError:
        skip("another user cannot run %s" % MTLAUNCH)
    return theirs


@test
def places_without_permission(t):
    theirs = visible_to_all(t)
    os.makedirs(os.path.join(t.dir, "closed"), mode=0o755)

    def refused(name, *parts, **changes):
        run = tiny_run(t.dir, name)
        run.change(**dict({"run": {"output_dir": os.path.join(theirs, "out")}}, **changes))
        os.chmod(run.file, 0o644)
        fails(t, [run.file], *parts, "Permission denied", preexec=as_nobody)

    refused("output", "[run] output_dir", "closed/out", run={"output_dir": "closed/out"})
    refused("store", "offload_dir", "closed", memory={"offload_dir": ["closed/nvme"]})
    refused("store2", "closed", memory={"offload_dir": ["closed"]})
    refused("cache", "closed", data={"cache_dir": "closed/cache"})
    refused("cache2", "closed", data={"cache_dir": "closed"})
    secret = write_text(os.path.join(t.dir, "secret.txt"))
    os.chmod(secret, 0o600)
    refused("data", "secret.txt", data={"train": ["secret.txt"]})
    folder = write_pretrained(os.path.join(t.dir, "model"), make_weights(llama_config()))
    os.chmod(os.path.join(folder, "model.safetensors"), 0o600)
    refused("weights", "model.safetensors", model={"path": "model", "init": "pretrained"})
    os.chmod(os.path.join(folder, "config.json"), 0o600)
    refused("config", "config.json", model={"path": "model"})
    closed = tiny_run(t.dir, "file")
    os.chmod(closed.file, 0o600)
    fails(t, [closed.file], "file.toml", "Permission denied", preexec=as_nobody)


@test
def a_batch_that_fits_nowhere_does_not_fit(t):
    run = tiny_run(t.dir, hf={"max_position_embeddings": (1 << 31) - 1})
    for seq_len, micro, steps in ((1 << 24, 1 << 20, 1 << 20), (1 << 24, 1 << 16, 1 << 20), (1 << 24, 1 << 20, 1),
                                  (32, 1 << 20, 1 << 20)):
        run.change(training={"seq_len": seq_len, "micro_batch_size": micro, "gradient_accumulation_steps": steps})
        fails(t, [run.file], "hint: ", status=FIT)


@test
def a_batch_whose_activations_do_not_fit_does_not_fit(t):
    run = tiny_run(t.dir)
    run.change(training={"micro_batch_size": 64, "gradient_accumulation_steps": 64}, memory={"max_ram": "120MB"})
    fails(t, [run.file], "device buffers need", "max_ram", "hint: ", status=FIT)


@test
def a_store_that_does_not_fit_on_its_file_system_writes_nothing(t):
    small = os.path.join(t.dir, "small")
    os.mkdir(small)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True,
                      check=False).returncode != 0:
        skip("a small file system cannot be mounted here")
    try:
        run = tiny_run(t.dir, memory={"offload_dir": [os.path.join(small, "nvme")]})
        fails(t, [run.file], "small/nvme: the store does not fit: need", "have 2", "hint: ", status=FIT)
    finally:
        subprocess.run(["umount", small], check=True)


# -- runs that are there --


def begun(t, name="run", **changes):
    """A run stopped after two steps."""
    run = tiny_run(t.dir, name, **changes)
    run.ok("--run.stop_after_step=2", status=STOPPED)
    return run


def kept_files(run):
    """What a failed start must leave alone: all but logs, and the cache, which any start may renew."""
    return {path: digest for path, digest in tree(run.dir).items() if not path.startswith(("logs/", "cache/"))}


def same_files(run, before):
    after = kept_files(run)
    differ = sorted(path for path in set(before) | set(after) if before.get(path) != after.get(path))
    equal(differ, [], "files changed by a start that failed")


def untouched(t, run, *parts, overrides=(), status=USER):
    """The start fails and the run's files keep every byte."""
    before = kept_files(run)
    hashes = run.digest()
    fails(t, [run.file, *overrides], *parts, status=status)
    same_files(run, before)
    equal(run.digest(), hashes, "digest")


@test
def a_run_survives_what_is_wrong_with_its_next_start(t):
    run = begun(t)
    untouched(t, run, "seed", "1234", "99", "hint: ", overrides=["--run.seed=99"])
    untouched(t, run, "page_elements", "8192", "4096", overrides=["--memory.page_elements=4096"])
    untouched(t, run, "seq_len", "32", "16", overrides=["--training.seq_len=16"])
    untouched(t, run, "stepz", overrides=["--training.stepz=9"])
    untouched(t, run, "max_ram", overrides=["--memory.max_ram=1MB"], status=FIT)
    untouched(t, run, "nowhere.txt", overrides=["--data.validation=nowhere.txt"])
    run.ok()
    run.check_steps(20)


@test
def a_run_whose_model_was_changed_is_refused(t):
    run = begun(t)
    folder = run.sections["model"]["path"]
    write_model(folder, num_hidden_layers=2)
    before = kept_files(run)
    fails(t, [run.file], "3x64", "2x64")
    same_files(run, before)
    write_model(folder)
    run.ok()


@test
def a_store_of_another_run_is_refused(t):
    first = tiny_run(t.dir, "one")
    first.change(memory={"offload_dir": ["nvme"]})
    first.ok("--run.stop_after_step=2", status=STOPPED)
    before = tree(os.path.join(t.dir, "nvme"))
    second = tiny_run(t.dir, "two")
    second.change(memory={"offload_dir": ["nvme"]})
    with open(os.path.join(first.dir, "run.id")) as f:
        theirs = f.read().strip()
    fails(t, [second.file], os.path.join(t.dir, "nvme"), "store of another run", "found " + theirs)
    equal(tree(os.path.join(t.dir, "nvme")), before, "the other run's store")
    equal(first.digest()[0], 2, "digest of the other run")


@test
def a_run_in_use_is_refused(t):
    run = tiny_run(t.dir)
    run.change(training={"steps": 100000})
    with run.start() as live:
        live.wait_committed(1)
        result = mtlaunch(run.file)
        one_message(t, result, BUSY, run.dir, "in use", "mtlaunch stop")
        one_message(t, mtlaunch("clean", run.dir), BUSY, "in use")
        live.signal(signal.SIGTERM)
        equal(live.wait(10), STOPPED, "status")


@test
def another_run_in_the_same_store_at_the_same_time_is_refused(t):
    first = tiny_run(t.dir, "one")
    first.change(training={"steps": 100000}, memory={"offload_dir": ["nvme"]})
    second = tiny_run(t.dir, "two")
    second.change(memory={"offload_dir": ["nvme"]})
    with first.start() as live:
        live.wait_committed(1)
        result = mtlaunch(second.file)
        check(result.status in (USER, BUSY), str(result))
        one_message(t, result, result.status, "nvme")
        check(not os.path.exists(second.dir), "left %s" % second.dir)
        live.signal(signal.SIGTERM)
        equal(live.wait(10), STOPPED, "status")


@test
def a_run_directory_with_a_broken_identity_is_refused(t):
    run = begun(t)
    path = os.path.join(run.dir, "run.id")
    with open(path) as f:
        good = f.read()
    with open(path, "w") as f:
        f.write("not an id")
    fails(t, [run.file], path, "32 hexadecimal digits")
    with open(path, "w") as f:
        f.write(good)
    equal(run.digest()[0], 2, "digest")


@test
def a_run_directory_that_lost_its_identity_keeps_its_store(t):
    run = begun(t)
    path = os.path.join(run.dir, "run.id")
    with open(path) as f:
        good = f.read()
    os.unlink(path)
    before = tree(os.path.join(run.dir, "store"))
    fails(t, [run.file], "store of another run", "found " + good.strip())
    equal(tree(os.path.join(run.dir, "store")), before, "the store")
    with open(path, "w") as f:
        f.write(good)
    equal(run.digest()[0], 2, "digest")
    run.ok()
    run.check_steps(20)


@test
def a_run_whose_store_is_gone_is_refused(t):
    run = begun(t)
    store, away = os.path.join(run.dir, "store"), os.path.join(t.dir, "unmounted")
    os.rename(store, away)
    before = kept_files(run)
    fails(t, [run.file], store, "metrics.jsonl has steps", "mounted?", "mtlaunch clean")
    same_files(run, before)
    check(not os.path.exists(store), "a second store was begun")
    os.rename(away, store)
    run.ok()
    run.check_steps(20)
    os.rename(store, away)
    equal(mtlaunch("clean", run.dir).status, DONE, "clean")
    run.ok("--run.stop_after_step=2", status=STOPPED)


# -- commands --


@test
def commands_on_what_is_no_run(t):
    nowhere, plain = os.path.join(t.dir, "nowhere"), os.path.join(t.dir, "plain")
    os.mkdir(plain)
    for command in ("digest", "stop", "clean"):
        fails(t, [command, nowhere], "nowhere", "No such file")
        fails(t, [command, plain], "plain", "not a run directory" if command != "digest" else "neither a run")
        fails(t, [command], command)
    fails(t, ["export", nowhere, os.path.join(t.dir, "out")], "nowhere")
    fails(t, ["eval", nowhere, "--data=x.txt"], "nowhere")
    fails(t, ["generate", nowhere, "--prompt=x"], "nowhere")


@test
def commands_with_wrong_options(t):
    run = begun(t)
    fails(t, ["digest", run.dir, "--fast"], '"--fast"')
    fails(t, ["export", run.dir], "OUT_DIR")
    fails(t, ["export", run.dir, os.path.join(t.dir, "o"), "--dtype=int8"], "float32", '"int8"')
    fails(t, ["export", run.dir, t.dir], t.dir)
    fails(t, ["eval", run.dir], "--data")
    fails(t, ["eval", run.dir, "--data=" + os.path.join(t.dir, "nowhere.txt")], "nowhere.txt")
    fails(t, ["eval", run.dir, "--data=" + os.path.join(t.dir, "train.txt"), "--seq-len=x"], "--seq-len", '"x"')
    fails(t, ["eval", run.dir, "--data=" + os.path.join(t.dir, "train.txt"), "--seq-len=100000"], "512")
    fails(t, ["generate", run.dir], "--prompt")
    fails(t, ["generate", run.dir, "--prompt=a", "--temperature=-1"], "--temperature", '"-1"')
    fails(t, ["generate", run.dir, "--prompt=a", "--top-p=0"], "--top-p", "0")
    fails(t, ["generate", run.dir, "--prompt=a", "--max-new-tokens=511"], "513 positions", "512")
    fails(t, ["generate", run.dir, "--prompt=a", "--max-new-tokens=many"], "--max-new-tokens", '"many"')
    fails(t, ["stop", run.dir], "no run is alive")


main()
