#!/usr/bin/env python3
"""The commands on a run's directory and on a Hugging Face folder."""
import glob
import math
import os
import shutil
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *  # noqa: E402,F403

FROZEN = {"optimizer": {"learning_rate": 0.0, "weight_decay": 0.0}, "training": {"steps": 1}}


def trained(t, steps=3, name="run", **changes):
    run = tiny_run(t.dir, name, **changes)
    run.change(training={"steps": steps})
    run.ok()
    return run


def same_tensors(found, expected):
    equal(sorted(found), sorted(expected), "tensors")
    for name in expected:
        equal(found[name][:2], expected[name][:2], "dtype and shape of " + name)
        check(found[name][2] == expected[name][2], "%s: the bytes differ" % name)


# -- export --


@test
def golden_folders_come_back_bit_for_bit(t):
    """Import, one step that changes nothing, export."""
    folders = sorted(glob.glob(os.path.join(GOLDENS, "llama_*"))) + sorted(glob.glob(os.path.join(GOLDENS, "bf16_*")))[:2]
    check(len(folders) >= 4, "no goldens in " + GOLDENS)
    data = write_nanogpt_shard(os.path.join(t.dir, "train.bin"), tokens_of(4000, vocab=60))
    for folder in folders:
        source = read_weights(folder)
        with open(os.path.join(folder, "config.json")) as f:
            tokenizer = "bytes" if json.load(f)["vocab_size"] > 256 else ""
        for dtype in ("float32", "bfloat16"):
            run = tiny_run(t.dir, "%s-%s" % (os.path.basename(folder), dtype), hf=folder, file=data,
                           model={"init": "pretrained", "dtype": dtype, "tokenizer": tokenizer},
                           memory={"page_elements": 4096}, **FROZEN)
            run.ok()
            # bf16 compute splits a master weight without loss: the same f32 bits come back
            same_tensors(read_weights(run.export_dir(1)), source)
            with open(os.path.join(run.export_dir(1), "config.json")) as f, \
                    open(os.path.join(folder, "config.json")) as g:
                ours, theirs = json.load(f), json.load(g)
            equal(ours, theirs, "config.json")


def mixed_dtype(name):
    return "F32" if "norm" in name else "F16" if "mlp" in name else "BF16"


@test
def each_tensor_keeps_the_dtype_of_its_source(t):
    tensors = make_weights(llama_config(), mixed_dtype)
    folder = write_pretrained(os.path.join(t.dir, "hf"), tensors, shards=3)
    beside = {"tokenizer.json": b'{"model": {}}', "tokenizer_config.json": b'{"a": 1}', "generation_config.json": b"{}",
              "special_tokens_map.json": b"{}", "README.md": b"not ours"}
    for name, content in beside.items():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(content)
    run = tiny_run(t.dir, hf=folder, model={"init": "pretrained"}, **FROZEN)
    run.ok()
    out = run.export_dir(1)
    same_tensors(read_weights(out), tensors)
    for name in beside:
        if name != "README.md":
            with open(os.path.join(out, name), "rb") as f:
                check(f.read() == beside[name], name + " is not the source's")
    with open(os.path.join(out, "config.json")) as f:
        equal(json.load(f), llama_config(), "config.json")
    check_index(out)


def check_index(folder):
    """Every tensor is where the index says, if there is one; else in model.safetensors."""
    files = [n for n in os.listdir(folder) if n.endswith(".safetensors")]
    index_path = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index_path):
        equal(files, ["model.safetensors"], "weights files without an index")
        return
    with open(index_path) as f:
        index = json.load(f)
    equal(sorted(set(index["weight_map"].values())), sorted(files), "files of the index")
    total = 0
    for file in files:
        tensors = read_safetensors(os.path.join(folder, file))[0]
        equal({n for n, where in index["weight_map"].items() if where == file}, set(tensors), "tensors of " + file)
        total += sum(len(x[2]) for x in tensors.values())
    equal(index["metadata"]["total_size"], total, "total_size")


@test
def dtype_asked_for_is_the_dtype_written(t):
    run = trained(t)
    exact = read_weights(run.export_dir(3))
    for dtype, code, relative in (("float32", "F32", 0), ("bfloat16", "BF16", 2 ** -8), ("float16", "F16", 2 ** -10)):
        out = os.path.join(t.dir, "out-" + dtype)
        result = mtlaunch("export", run.dir, out, "--dtype", dtype, status=DONE)
        check("step 3" in result.out and out in result.out, result.out)
        for name, tensor in read_weights(out).items():
            equal(tensor[0], code, "dtype of " + name)
            for a, b in zip(floats(tensor), floats(exact[name])):
                check(abs(a - b) <= relative * abs(b) + (6e-8 if code == "F16" else 0), "%s: %r for %r" % (name, a, b))
        with open(os.path.join(out, "config.json")) as f:
            config = json.load(f)
        equal(config.get("torch_dtype", config.get("dtype")), dtype, "dtype in config.json")
    check("--dtype" in mtlaunch("export", run.dir, os.path.join(t.dir, "x"), "--dtype=int8", status=USER).err)
    check(not os.path.exists(os.path.join(t.dir, "x")), "a refused export leaves nothing")


@test
def an_export_is_of_the_newest_commit_whatever_came_before(t):
    run = tiny_run(t.dir, training={"steps": 5})
    run.ok("--run.stop_after_step=1", status=STOPPED)
    outs = []
    for step in (1, 2, 5):
        if step > 1:
            run.ok("--run.stop_after_step=%d" % (step % 5), status=STOPPED if step < 5 else DONE)
        outs.append(os.path.join(t.dir, "out%d" % step))
        check("step %d" % step in mtlaunch("export", run.dir, outs[-1], status=DONE).out, "the step is told")
    straight = trained(t, 2, "straight")
    same_tensors(read_weights(outs[1]), read_weights(straight.export_dir(2)))
    equal(tree(outs[2]), tree(run.export_dir(5)), "the command's export against the run's own")
    check(read_weights(outs[0]) != read_weights(outs[1]), "steps 1 and 2 are alike")
    # before the first step: what was imported
    fresh = tiny_run(t.dir, "fresh")
    with fresh.start(env={"MTLAUNCH_FAULT": "gpu_mid_forward:stop"}) as b:
        b.wait_ready()
        b.signal(signal.SIGTERM)
        equal(b.wait(10), STOPPED, "status")
    check("step 0" in mtlaunch("export", fresh.dir, os.path.join(t.dir, "out0"), status=DONE).out)
    shapes = {name: x[1] for name, x in read_weights(os.path.join(t.dir, "out0")).items()}
    equal(shapes, tensor_shapes(llama_config()), "shapes")


@test
def an_export_can_be_trained_on(t):
    """What one run writes, another reads; its first loss goes on from there."""
    run = trained(t, 30)
    again = tiny_run(t.dir, "again", hf=run.export_dir(30), model={"init": "pretrained"}, training={"steps": 1})
    again.ok()
    first, last = run.step_lines()[0]["loss"], run.step_lines()[-1]["loss"]
    loss = again.step_lines()[0]["loss"]
    check(abs(loss - last) < abs(first - last) / 3, "loss %.3f after %.3f, the run began at %.3f" % (loss, last, first))


@test
def a_foreign_folder_is_never_overwritten(t):
    run = trained(t)
    out = os.path.join(t.dir, "out")
    os.mkdir(out)
    with open(os.path.join(out, "thesis.txt"), "w") as f:
        f.write("years of work")
    result = mtlaunch("export", run.dir, out, status=USER)
    check(out in result.err, result.err)
    equal(os.listdir(out), ["thesis.txt"], "files of the folder")
    # its own it may replace
    own = os.path.join(t.dir, "own")
    mtlaunch("export", run.dir, own, status=DONE)
    before = tree(own)
    mtlaunch("export", run.dir, own, status=DONE)
    equal(tree(own), before, "a second export to the same place")


# -- generate --


def generate(where, *arguments, prompt="The ", status=DONE):
    result = mtlaunch("generate", where, "--prompt", prompt, *arguments, status=status)
    if status == DONE:
        check(result.out.startswith(prompt), "the prompt comes first: %r" % result.out)
    return result.out


@test
def greedy_text_is_the_same_each_time_and_from_the_export(t):
    run = trained(t, 40)
    text = generate(run.dir, "--max-new-tokens", "40")
    equal(generate(run.dir, "--max-new-tokens=40"), text, "again")
    equal(generate(run.dir, "--max-new-tokens=40", "--temperature=0", "--seed=5"), text, "seed at temperature 0")
    equal(generate(run.export_dir(40), "--max-new-tokens=40"), text, "from the export")
    check(generate(run.dir, "--max-new-tokens=10")[:-1] == text[:14], "a shorter text is its beginning")


@test
def sampling_follows_the_seed(t):
    run = trained(t, 20)

    def sample(*arguments):
        result = mtlaunch("generate", run.dir, "--prompt=The ", "--max-new-tokens=30", *arguments, status=DONE)
        return result.out
    texts = [sample("--temperature=1.0", "--seed=%d" % seed) for seed in (1, 2, 3)]
    equal(sample("--temperature=1.0", "--seed=1"), texts[0], "seed 1 again")
    equal(len(set(texts)), 3, "different texts of 3 seeds")
    equal(sample("--temperature=1.0", "--top-p=0.000001", "--seed=1"), sample("--temperature=0"),
          "top-p near 0 against greedy")
    check(sample("--temperature=1.0", "--top-p=0.5", "--seed=1") != texts[0], "top-p 0.5 changes nothing")
    for bad in ("--temperature=-1", "--temperature=warm", "--top-p=0", "--top-p=1.5", "--max-new-tokens=-3", "--seed=x"):
        generate(run.dir, bad, status=USER)


@test
def as_many_tokens_as_asked_for_and_several_prompts(t):
    run = trained(t, 2)  # hardly trained: the end of a text is improbable
    for n in (0, 1, 7):
        result = mtlaunch("generate", run.dir, "--prompt", "ab", "--max-new-tokens", str(n), status=DONE)
        check(len(result.out) <= 3 + n * 4, "%d new tokens: %r" % (n, result.out))
        if n == 0:
            equal(result.out, "ab\n", "text without new tokens")
    prompts = ["The ", "A longer prompt than the others, so that they are not alike. ", "x"]
    arguments = [a for p in prompts for a in ("--prompt", p)]
    together = mtlaunch("generate", run.dir, *arguments, "--max-new-tokens=12", status=DONE).out
    alone = "".join(generate(run.dir, "--max-new-tokens=12", prompt=p) for p in prompts)
    equal(together, alone, "several prompts against each alone")
    result = mtlaunch("generate", run.dir, "--prompt", "a" * 600, "--max-new-tokens=1", status=USER)
    check("positions" in result.err, result.err)
    generate(run.dir, "--max-new-tokens=20", prompt="Grüße, 世界 ")


# -- eval --


def evaluate(where, data, *arguments):
    out = mtlaunch("eval", where, "--data", data, *arguments, status=DONE).out
    match = re.fullmatch(r"tokens (\d+) loss (\S+) perplexity (\S+)\n", out)
    check(match, "eval printed %r" % out)
    tokens, loss, perplexity = int(match.group(1)), float(match.group(2)), float(match.group(3))
    check(abs(math.exp(loss) / perplexity - 1) < 1e-6, "loss and perplexity disagree: " + out)
    return tokens, loss


@test
def a_run_and_its_export_evaluate_alike(t):
    val = write_text(os.path.join(t.dir, "val.txt"), 3000, seed=2)
    for dtype in ("float32", "bfloat16"):
        run = trained(t, 30, "run-" + dtype, model={"dtype": dtype})
        out = os.path.join(t.dir, "out-" + dtype)
        mtlaunch("export", run.dir, out, "--dtype", dtype, status=DONE)
        length = "--seq-len=64"
        of_run, of_export = (evaluate(where, val, length) for where in (run.dir, out))
        # the export of a bf16 run is read again as the same high halves
        equal(of_export, of_run, "eval of the export against the run, " + dtype)
        check(2900 < of_run[0] <= 3000, "tokens: %d" % of_run[0])
        check(of_run[1] < run.step_lines()[0]["loss"], "loss %.3f" % of_run[1])


@test
def eval_is_the_validation_loss_of_training(t):
    val = write_text(os.path.join(t.dir, "val.txt"), 32 * 40, seed=2)
    run = tiny_run(t.dir, training={"steps": 4}, data={"validation": [val]}, eval={"interval": 2, "sequences": 1000})
    run.ok()
    events = run.events("eval")
    equal([e["step"] for e in events], [2, 4], "evaluations")
    tokens, loss = evaluate(run.dir, val, "--seq-len=32")
    check(abs(loss - events[-1]["val_loss"]) < 2e-2, "eval %.6f, validation loss %.6f" % (loss, events[-1]["val_loss"]))
    check(0.9 < events[-1]["tokens"] / tokens <= 1, "tokens %s of %s" % (events[-1]["tokens"], tokens))


@test
def eval_refuses_what_it_cannot_read(t):
    run = trained(t, 1)
    model = run.sections["model"]["path"]
    data = run.sections["data"]["train"][0]
    check("none.txt" in mtlaunch("eval", run.dir, "--data", os.path.join(t.dir, "none.txt"), status=USER).err)
    mtlaunch("eval", model, "--data", data, status=USER)  # only a config.json
    mtlaunch("eval", t.dir, "--data", data, status=USER)
    mtlaunch("eval", run.dir, "--data", data, "--seq-len=100000", status=USER)


# -- digest --


def flip(path, offset, bit):
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ (1 << bit)]))


def digest_with(run, path, offset, bit):
    flip(path, offset, bit)
    result = mtlaunch("digest", run.dir)
    flip(path, offset, bit)
    return result


def of_newest_commit(run, before):
    """Byte ranges of the slots file that the last step wrote: what changed since `before`."""
    with open(os.path.join(run.dir, "store", "slots"), "rb") as f:
        after = f.read()
    return [i for i in range(0, len(after), 512) if after[i:i + 512] != before[i:i + 512]]


@test
def digest_names_file_and_offset_of_any_flipped_bit(t):
    run = tiny_run(t.dir, training={"steps": 4})
    run.ok("--run.stop_after_step=3", status=STOPPED)
    slots, commit = (os.path.join(run.dir, "store", name) for name in ("slots", "commit"))
    with open(slots, "rb") as f:
        before = f.read()
    run.ok()
    good = run.digest()
    sectors = of_newest_commit(run, before)
    check(len(sectors) > 100, "the last step wrote %d sectors" % len(sectors))
    t.note("seed %d" % t.seed)
    for _ in range(25):
        offset, bit = t.rng.choice(sectors) + t.rng.randrange(512), t.rng.randrange(8)
        result = digest_with(run, slots, offset, bit)
        check(result.status in (DONE, FAILED), "flipped bit %d of %d: %s" % (bit, offset, result))
        if result.status == DONE:
            # only what no one ever reads may go unseen: padding between parts of a slot
            equal(result.out.split()[1:6:2], [str(good[0])] + list(good[1:]), "digest")
            check(before_and_after_alike(slots, before, offset), "bit %d at offset %d of a changed byte: unseen" % (bit, offset))
            continue
        found = [int(n) for n in re.findall(r"offset (\d+)", result.err)]
        check(slots in result.err and found, "file and offset are not named\n%s" % result)
        check(any(abs(n - offset) <= 8192 * 16 for n in found), "flipped at %d, named %s" % (offset, found))
    equal(run.digest(), good, "digest when all is restored")


def before_and_after_alike(path, before, offset):
    with open(path, "rb") as f:
        f.seek(offset)
        return f.read(1)[0] == before[offset]


@test
def digest_sees_a_flipped_bit_in_table_record_and_superblock(t):
    run = tiny_run(t.dir, training={"steps": 4})
    run.ok("--run.stop_after_step=3", status=STOPPED)
    commit, superblock = (os.path.join(run.dir, "store", name) for name in ("commit", "superblock"))
    with open(commit, "rb") as f:
        before = f.read()
    run.ok()
    good = run.digest()
    with open(commit, "rb") as f:
        after = f.read()
    changed = [i for i in range(len(after)) if after[i] != before[i]]
    check(changed, "the last commit wrote nothing")
    for _ in range(20):
        offset, bit = t.rng.choice(changed), t.rng.randrange(8)
        result = digest_with(run, commit, offset, bit)
        check(result.status == FAILED, "bit %d of byte %d of the commit file: %s" % (bit, offset, result))
        check(commit in result.err and re.search(r"offset \d+", result.err), "file and offset are not named\n%s" % result)
    with open(superblock, "rb") as f:
        size = len(f.read().rstrip(b"\0"))
    for _ in range(6):
        offset, bit = t.rng.randrange(min(size, 200)), t.rng.randrange(8)
        result = digest_with(run, superblock, offset, bit)
        check(result.status == FAILED, "bit %d of byte %d of the superblock: %s" % (bit, offset, result))
        check(superblock in result.err and "offset" in result.err, "file and offset are not named\n%s" % result)
    equal(run.digest(), good, "digest when all is restored")


@test
def digest_changes_nothing(t):
    run = trained(t)
    before = tree(run.dir)
    run.digest()
    after = tree(run.dir)
    equal(after, before, "files of the run")


# -- clean --


@test
def clean_frees_the_store_and_keeps_what_was_made(t):
    run = trained(t)
    kept = tree(run.export_dir(3))
    steps = run.steps()
    mtlaunch("clean", run.dir, status=DONE)
    check(not os.path.exists(os.path.join(run.dir, "store")), "the store is still there")
    equal(tree(run.export_dir(3)), kept, "export")
    metrics = glob.glob(os.path.join(run.dir, "metrics*.jsonl"))
    equal(len(metrics), 1, "metrics files")
    with open(metrics[0]) as f:
        equal([json.loads(line)["step"] for line in f if '"event"' not in line], steps, "step lines kept")
    for command in (["digest", run.dir], ["export", run.dir, os.path.join(t.dir, "x")]):
        equal(mtlaunch(*command).status, USER, "status of %s on a cleaned run" % command[0])
    # a new run may begin there, of whatever shape
    run.ok("--memory.page_elements=4096", "--run.seed=7")
    run.check_steps(3)


@test
def clean_frees_every_offload_dir_and_nothing_else(t):
    disks = [os.path.join(t.dir, "disk%d" % i) for i in range(2)]
    for d in disks:
        os.mkdir(d)
        with open(os.path.join(d, "mine.txt"), "w") as f:
            f.write("keep")
    run = trained(t, memory={"offload_dir": disks})
    check(all(len(os.listdir(d)) > 1 for d in disks), "both directories are used")
    mtlaunch("clean", run.dir, status=DONE)
    for d in disks:
        equal(os.listdir(d), ["mine.txt"], "files in " + d)


@test
def clean_never_touches_the_store_of_another_run(t):
    disk = os.path.join(t.dir, "disk")
    os.mkdir(disk)
    first = trained(t, 2, "first", memory={"offload_dir": [disk]})
    copied = os.path.join(t.dir, "copied")
    shutil.copytree(first.dir, copied)
    with open(os.path.join(copied, "run.id"), "w") as f:
        f.write("0123456789abcdef0123456789abcdef")
    before = tree(disk)
    result = mtlaunch("clean", copied, status=USER)
    check(disk in result.err, "the place is named\n" + result.err)
    equal(tree(disk), before, "the store of the first run")
    equal(first.digest()[0], 2, "step of digest")


@test
def commands_on_what_is_no_run_exit_2(t):
    nothing, file = os.path.join(t.dir, "nothing"), write_text(os.path.join(t.dir, "file.txt"), 100)
    for place in (t.dir, nothing, file, write_model(os.path.join(t.dir, "hf"))):
        for command in (["digest", place], ["export", place, os.path.join(t.dir, "x")], ["stop", place], ["clean", place]):
            result = mtlaunch(*command)
            equal(result.status, USER, "status of %s\n%s" % (" ".join(command), result))
            check(place in result.err, "%s: the place is not named\n%s" % (command[0], result.err))
    check(not os.path.exists(nothing) and not os.path.exists(os.path.join(t.dir, "x")), "something was made")


main()
