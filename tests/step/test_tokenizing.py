#!/usr/bin/env python3
"""Text and instruction data become token files: the ids, and what is learned, are transformers'; what is wrong is
told with file and line; whatever is killed, nothing half is believed.

Goldens are in tests/goldens/text (made by tools/goldens/make_text_goldens.py). Most tests need the environment of
`make tokenizer` and are skipped without it.
"""
import os
import re
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), os.path.join(os.path.dirname(HERE), "kill")]
from harness import *
import probe
import text_samples as samples

ENVIRONMENT = os.path.join(ROOT, "build", "tokenizer")
PYTHON = os.path.join(ENVIRONMENT, "bin", "python")
MASKED, END = 1 << 30, 1 << 31  # model/token_file.h


def needs_environment():
    pins = [os.path.join(d, "requirements.txt") for d in (os.path.join(ROOT, "tools", "tokenizer"), ENVIRONMENT)]
    if not os.path.exists(pins[1]) or open(pins[0]).read() != open(pins[1]).read():
        skip("no tokenizing environment: `make tokenizer` makes it")


def in_environment(code, *arguments):
    """What Python code prints there, as JSON."""
    done = subprocess.run([PYTHON, "-I", "-c", code] + list(arguments), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def model(t, family="chatml", name=None):
    folder = write_model(os.path.join(t.dir, name or "model-" + family), vocab_size=samples.VOCAB_SIZE, eos_token_id=2,
                         max_position_embeddings=4096)
    return samples.write_tokenizer(folder, family)


def text_run(t, files, family="chatml", name="run", **changes):
    sections = {"model": {"tokenizer": ""}, "data": {"train": files, "shuffle": False}, "training": {"steps": 2}}
    return tiny_run(t.dir, name, model(t, family), "-", **merged(sections, changes))


def tokenize(run, *overrides, status=DONE, **more):
    return mtlaunch("tokenize", run.file, *overrides, status=status, **more)


def token_files(run, cache=None):
    """{name of the source: path} of whole token files."""
    cache = cache or os.path.join(run.dir, "cache")
    return {re.sub(r"-[0-9a-f]{16}-[0-9a-f]{16}\.mttokens$", "", n): os.path.join(cache, n)
            for n in os.listdir(cache) if n.endswith(".mttokens")}


def read_documents(path):
    """[(ids, learned)] of a token file, the first token of each counted as learned."""
    with open(path, "rb") as f:
        header, words = f.read(512), array.array("I", f.read())
    tokens, = struct.unpack_from("<Q", header, 16)
    check(header[:8] == b"MTTOKENS" and len(words) == tokens, "%s is not whole" % path)
    out, ids, learned = [], [], []
    for word in words:
        ids.append(word & (MASKED - 1))
        learned.append(not word & MASKED)
        if word & END:
            out.append((ids, learned))
            ids, learned = [], []
    check(not ids, "%s ends inside a document" % path)
    return out


def same_documents(found, golden, what):
    for i, (ids, learned) in enumerate(golden["full"]):
        check(i < len(found), "%s: only %d documents" % (what, len(found)))
        equal(found[i][0], ids, "%s, document %d: ids" % (what, i))
        equal([int(x) for x in found[i][1][1:]], learned[1:], "%s, document %d: learned" % (what, i))
    names = [samples.document_name(*d) for d in found]
    equal(len(names), len(golden["names"]), "%s: documents" % what)
    wrong = [i for i, (a, b) in enumerate(zip(names, golden["names"])) if a != b]
    check(not wrong, "%s: documents %s are not the reference's; the first: %s" % (
        what, wrong[:10], found[wrong[0]] if wrong else ""))


# -- equal to the reference --


@test
def conversations_of_every_family_are_what_transformers_makes_of_them(t):
    needs_environment()
    goldens = samples.read_goldens()["families"]
    for family in samples.FAMILIES:
        file = samples.write_records(os.path.join(t.dir, family + ".jsonl"), samples.family_records(family))
        run = text_run(t, [file], family, family)
        result = tokenize(run)
        check("taken as messages, %d documents" % samples.PER_FAMILY in result.out, result.out)
        same_documents(read_documents(token_files(run)[family + ".jsonl"]), goldens[family], family)


def mixed_files(t):
    return {kind: samples.write_records(os.path.join(t.dir, kind + ".jsonl"), records)
            for kind, records in samples.mixed_records().items()}


TAKEN_AS = {"strings": "prompt-completion", "turns": "prompt-completion"}


@test
def five_hundred_samples_of_all_kinds_are_the_references_and_auto_says_what_they_are(t):
    needs_environment()
    files, goldens = mixed_files(t), samples.read_goldens()["mixed"]
    equal(sum(samples.MIXED.values()), 500, "samples")
    run = text_run(t, list(files.values()))
    result = tokenize(run)
    made = token_files(run)
    for kind, file in files.items():
        line = next(l for l in result.out.splitlines() if l.startswith(file + ":"))
        check("taken as %s, %d documents" % (TAKEN_AS.get(kind, kind), len(goldens[kind]["names"])) in line, line)
        left_out = re.search(r"(\d+) conversations in which nothing is learned", line)
        equal(int(left_out.group(1)) if left_out else 0, goldens[kind]["left_out"], "left out of " + kind)
        same_documents(read_documents(made[kind + ".jsonl"]), goldens[kind], kind)


def ring_samples(run, count):
    """Names of the samples that lie in the frames of MICROBATCH when a step is under way."""
    length = samples.SEQ_LEN
    with run.start(env={"MTLAUNCH_FAULT": "gpu_microbatch_taken:stop"}) as live:
        live.wait_ready()
        place = live.wait_for(lambda: probe.places(live.pid), "the segment")
        pool = next(p for p in place if p["name"] == "MICROBATCH_POOL")
        io, = [pid for pid, name in live.children("io_worker")]
        directory = "/proc/%d/fd" % io
        segment = next(p for p in (os.path.join(directory, f) for f in os.listdir(directory))
                       if os.readlink(p).startswith("/dev/shm/#"))
        stride = 4096 * ((-(-16 * length // 4096)) | 1)  # plan_frame_stride()
        fd = os.open(segment, os.O_RDONLY)

        def read_all():
            frames = [array.array("i", os.pread(fd, 16 * length, pool["offset"] + i * stride)) for i in range(count)]
            return all(any(f) for f in frames) and sorted(samples.digest(f) for f in frames)
        try:
            return live.wait_for(read_all, "every frame filled", 60)
        finally:
            os.close(fd)


@test
def what_the_microbatch_ring_carries_is_what_the_reference_trains_on(t):
    needs_environment()
    files, goldens = mixed_files(t), samples.read_goldens()["samples"]
    for word, expected in goldens.items():
        training = {"steps": 1, "seq_len": samples.SEQ_LEN, "micro_batch_size": 1,
                    "gradient_accumulation_steps": len(expected)}
        run = text_run(t, list(files.values()), name=word, data={"overlong": word, "cache_dir": "cache"},
                       training=training)
        equal(ring_samples(run, len(expected)), sorted(expected), "samples, overlong = " + word)


@test
def the_end_of_an_answer_is_learned_though_it_is_what_pads(t):
    needs_environment()
    file = samples.write_records(os.path.join(t.dir, "a.jsonl"), [{"messages": [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]}])
    run = text_run(t, [file])
    tokenize(run)
    (ids, learned), = read_documents(token_files(run)["a.jsonl"])
    end = samples.SPECIAL.index("<|im_end|>")
    at = len(ids) - 1 - ids[::-1].index(end)
    check(learned[at] and ids.count(end) == 3, "ids %s, learned %s" % (ids, learned))
    equal([learned[i] for i, number in enumerate(ids) if number == end], [False, False, True], "ends that are learned")


WHOLE = """
import json, sys
from tokenizers import Tokenizer
t = Tokenizer.from_file(sys.argv[1])
print(json.dumps(t.encode(open(sys.argv[2], encoding="utf-8").read()).ids + [2]))
"""


@test
def a_text_that_is_cut_into_pieces_has_the_ids_of_the_whole(t):
    needs_environment()
    dice, file = samples.Dice("long"), os.path.join(t.dir, "long.txt")
    part = "\n".join(samples.text(dice, 9) for _ in range(400))
    with open(file, "w", encoding="utf-8") as f:
        f.write(part * (2_300_000 // len(part.encode())))
    check(os.path.getsize(file) > 2 << 20, "the text is short")
    run = text_run(t, [file])
    tokenize(run)
    (ids, learned), = read_documents(token_files(run)["long.txt"])
    check(all(learned), "text is learned whole")
    expected = in_environment(WHOLE, os.path.join(samples.FOLDER, "tokenizer.json"), file)
    check(ids == expected, "%d ids, the whole has %d" % (len(ids), len(expected)))


PARQUET = """
import json, sys
import pyarrow, pyarrow.parquet
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sys.argv[2], row_group_size=37)
print("true")
"""


@test
def parquet_is_read_like_jsonl(t):
    needs_environment()
    files, goldens = mixed_files(t), samples.read_goldens()["mixed"]
    parquet = {kind: os.path.join(t.dir, kind + ".parquet") for kind in files}
    for kind in files:
        in_environment(PARQUET, files[kind], parquet[kind])
    run = text_run(t, list(parquet.values()))
    tokenize(run)
    for kind in files:
        same_documents(read_documents(token_files(run)[kind + ".parquet"]), goldens[kind], kind)


# -- what is wrong is said --

BAD = [  # what the second line is, and what is said of it
    ("auto", '{"messages": [{"role": "user", "content": "a"}]', "expected a JSON object, found an error at column 48"),
    ("auto", '["messages"]', "expected a JSON object, found a list"),
    ("auto", '{"text": "a"}', 'expected "messages" as in the first record, found only "text"'),
    ("auto", '{"messages": "a"}', 'expected "messages" to be a list of messages, found a string'),
    ("auto", '{"messages": [{"content": "a"}]}', '"messages", message 1: expected "role" to be a string, found null'),
    ("auto", '{"messages": [{"role": "user", "content": 5}]}', 'message 1: expected "content" to be a string'),
    ("auto", '{"messages": [{"role": "user", "role": "a"}]}', 'the key "role" stands twice'),
    ("auto", '{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair, \\ud800"),
    ("auto", '{"messages": [{"role": "assistant", "content": "a"}]}', "has no prefix to compare"),
    ("auto", '{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', "the chat template"),
    ("chat", '{"messages": [1]}', "message 1: expected an object, found a number"),
]
GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@test
def a_bad_line_is_named_with_what_was_expected_and_found(t):
    needs_environment()
    for i, (form, line, said) in enumerate(BAD):
        file = os.path.join(t.dir, "bad%d.jsonl" % i)
        with open(file, "w") as f:
            f.write("%s\n%s\n%s\n" % (GOOD, line, GOOD))
        run = text_run(t, [file], name="bad%d" % i, data={"format": form})
        result = tokenize(run, status=USER)
        check("%s:2: " % file in result.err and said in result.err, "line %s: %s" % (line, result.err))
        check(not os.path.exists(run.dir), "a refused start left %s" % run.dir)
    with open(file, "wb") as f:
        f.write(GOOD.encode() + b"\n" + GOOD.encode().replace(b"a", b"\xff", 1) + b"\n")
    result = tokenize(run, status=USER)
    check("%s:2: not valid UTF-8 at byte offset %d" % (file, len(GOOD) + 1 + GOOD.index("a")) in result.err, result.err)


@test
def files_that_do_not_fit_their_format_are_refused(t):
    needs_environment()
    text, chat = write_text(os.path.join(t.dir, "a.txt")), os.path.join(t.dir, "a.jsonl")
    with open(chat, "w") as f:
        f.write(GOOD + "\n")
    with open(os.path.join(t.dir, "a.parquet"), "w") as f:
        f.write("PAR1")
    rows = [
        (text, {"format": "chat"}, "expected .jsonl or .parquet"),
        (chat, {"format": "prompt-completion"}, '"prompt" and "completion" or "instruction" and "output", found only "me'),
        (chat, {"format": "text"}, 'expected keys "text", found only "messages"'),
        (os.path.join(t.dir, "a.parquet"), {}, "not a Parquet file"),
        (os.path.join(t.dir, "none.jsonl"), {}, "none.jsonl: cannot open: No such file"),
    ]
    for i, (file, data, said) in enumerate(rows):
        result = text_run(t, [file], name="r%d" % i, data=data).ok(status=USER)
        check(file in result.err and said in result.err, result.err)


@test
def a_template_for_which_prefixes_do_not_hold_is_refused_by_name(t):
    needs_environment()
    turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    file = samples.write_records(os.path.join(t.dir, "a.jsonl"), [{"messages": turns}])
    for template, said in (
            ("{{ messages | length }} {% for m in messages %}{{ m.content }}{% endfor %}", "message 2: the turns before it"),
            ("{% for m in messages %}{{ m.content }}{{ messages | length if loop.index0 % 2 and not loop.last }}!{% endfor %}",
             "message 2 is rendered otherwise when others follow")):
        run = text_run(t, [file], "phi3")
        with open(os.path.join(run.sections["model"]["path"], "chat_template.jinja"), "w") as f:
            f.write(template)
        result = tokenize(run, status=USER)
        check(said in result.err and "chat_template.jinja: " in result.err and "{%- generation %}" in result.err,
              result.err)
    bare = text_run(t, [file], "chatml", name="bare")
    os.unlink(os.path.join(t.dir, "model-chatml", "chat_template.jinja"))
    check("has no chat template" in tokenize(bare, status=USER).err, "a model without template")


@test
def instruction_data_needs_a_tokenizer(t):
    file = os.path.join(t.dir, "a.jsonl")
    with open(file, "w") as f:
        f.write(GOOD + "\n")
    run = text_run(t, [file], model={"tokenizer": "bytes"}, data={"format": "chat"})
    result = run.ok(status=USER)
    check('[data] format = "chat"' in result.err and "tokenizer.json" in result.err, result.err)
    check("bytes are their own tokens" in tokenize(run, "--data.format=auto", status=USER).err, "tokenize with bytes")
    os.unlink(os.path.join(run.sections["model"]["path"], "tokenizer.json"))
    result = run.ok("--model.tokenizer=", status=USER)
    check("there is no tokenizer for it" in result.err and "model.tokenizer" in result.err, result.err)


# -- what the model says --

LEARNED = "alpha βeta 🙂 gamma, ünd delta.\nSo it's 日本語 at the end"


@test
def a_model_that_learned_a_text_says_it_again(t):
    needs_environment()
    file = os.path.join(t.dir, "a.jsonl")
    with open(file, "w", encoding="utf-8") as f:
        f.write((json.dumps({"text": LEARNED}) + "\n") * 40)
    run = text_run(t, [file], training={"steps": 60, "seq_len": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 1},
                   optimizer={"learning_rate": 1e-2, "weight_decay": 0.0}, data={"packing": False})
    run.ok()
    for model_of in (run.dir, run.export_dir(60)):
        prompts = ["alpha", LEARNED[:20], "alpha βeta"]
        out = mtlaunch("generate", model_of, *sum((["--prompt", p] for p in prompts), []), "--max-new-tokens", "60",
                       status=DONE).out
        equal(out, (LEARNED + "\n") * 3, "three continuations of %s, up to the end of the document" % model_of)
    equal(mtlaunch("generate", run.dir, "--prompt", "alpha", "--max-new-tokens", "0", status=DONE).out, "alpha\n", "0 tokens")
    long = mtlaunch("generate", run.dir, "--prompt", "alpha " * 4000, status=USER)
    check("positions, the model has 4096" in long.err, long.err)


# -- the environment --


def elsewhere(t):
    """A launcher installed where there is no environment."""
    prefix = os.path.join(t.dir, "prefix")
    subprocess.run(["make", "-s", "install", "PREFIX=" + prefix], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return os.path.join(prefix, "bin", "mtlaunch")


def installed(program, *arguments, status):
    done = subprocess.run([program] + list(arguments), env=environment(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)
    equal(done.returncode, status, "status: %s" % done.stderr)
    return done


@test
def without_the_environment_the_error_is_the_command_that_makes_it(t):
    program, file = elsewhere(t), write_text(os.path.join(t.dir, "a.txt"))
    run = text_run(t, [file])
    done = installed(program, run.file, status=USER)
    command = os.path.join(t.dir, "prefix", "libexec", "mtlaunch", "tokenizer", "setup.sh")
    check("make it with `%s`" % command in done.stderr and os.access(command, os.X_OK), done.stderr)
    check(not os.path.exists(run.dir), "a refused start left %s" % run.dir)
    needs_environment()
    run.ok("--run.stop_after_step=1", status=STOPPED)  # what is tokenized needs no Python any more
    os.rename(os.path.join(run.dir, "cache"), os.path.join(t.dir, "aside"))
    check("make it with" in installed(program, run.file, status=USER).stderr, "a start without cache")
    os.rename(os.path.join(t.dir, "aside"), os.path.join(run.dir, "cache"))
    os.utime(file, ns=(1, 1))
    check("make it with" in installed(program, run.file, status=USER).stderr, "a source that may have changed")
    time.sleep(2.2)  # what was written just now may still change within the same tick of the clock
    tokenize(run)
    installed(program, run.file, status=DONE)


# -- cache, deaths, company --


def many_records(t, n=1500, name="many.jsonl"):
    records = [samples.conversation(samples.Dice("many", i), "system") for i in range(n // 10)] * 10
    return samples.write_records(os.path.join(t.dir, name), records)


@test
def what_is_in_the_cache_is_used_and_what_changed_is_made_again(t):
    needs_environment()
    file, other = many_records(t, 40), many_records(t, 30, "other.jsonl")
    os.utime(file, ns=(10 ** 18, 10 ** 18))
    run = text_run(t, [file, other], data={"cache_dir": "cache"})
    cache = os.path.join(t.dir, "cache")
    tokenize(run)
    inode = {n: os.stat(p).st_ino for n, p in token_files(run, cache).items()}
    os.utime(file)
    tokenize(run)  # the same bytes, hashed again
    equal({n: os.stat(p).st_ino for n, p in token_files(run, cache).items()}, inode, "token files")
    with open(file, "a") as f:
        f.write(GOOD + "\n")
    tokenize(run)
    now = {n: os.stat(p).st_ino for n, p in token_files(run, cache).items()}
    check(now["many.jsonl"] != inode["many.jsonl"] and now["other.jsonl"] == inode["other.jsonl"], "made again: %s" % now)
    equal(len(read_documents(token_files(run, cache)["many.jsonl"])), 41, "documents")
    with open(token_files(run, cache)["many.jsonl"], "r+b") as f:
        f.seek(100)
        f.write(b"\xff\xff\xff")  # a damaged header
    tokenize(run)
    equal(len(read_documents(token_files(run, cache)["many.jsonl"])), 41, "documents after damage")
    samples.write_tokenizer(run.sections["model"]["path"], "phi3")
    equal(len(os.listdir(cache)), 2, "files")
    tokenize(run)
    equal(len(os.listdir(cache)), 4, "files: another template is another key")


def python_of(pid):
    """Processes of the tokenizer below the launcher."""
    main = [p for p, _ in children(pid)]
    return main + [p for m in main for p, _ in children(m)]


def background(run):
    return Background(run, ["tokenize", run.file])


@test
def a_signal_stops_it_at_once_and_the_next_start_goes_on(t):
    needs_environment()
    file, second = many_records(t, 1000), many_records(t, 1500, "second.jsonl")
    run = text_run(t, [file, second])
    for number in (signal.SIGINT, signal.SIGTERM):
        with background(run) as live:
            below = live.wait_for(lambda: len(python_of(live.pid)) >= 3 and python_of(live.pid), "worker processes")
            live.signal(number)
            equal(live.wait(10), STOPPED, live.output())
            check("start again to go on" in live.output(), live.output())
            wait_until(lambda: not any(is_alive(p) for p in below), 5, "no process is left")
        check("second.jsonl" not in token_files(run), "a file that was not finished")
    tokenize(run)
    equal([len(read_documents(token_files(run)[n])) for n in ("many.jsonl", "second.jsonl")], [1000, 1500], "documents")


@test
def whatever_is_killed_nothing_half_is_believed(t):
    needs_environment()
    file = many_records(t, 1200)
    whole = text_run(t, [file], name="whole")
    tokenize(whole)
    expected = read_documents(token_files(whole)["many.jsonl"])
    run = text_run(t, [file])
    for i in range(6):
        with background(run) as live:
            delay = t.rng.random() * 0.8
            live.wait_for(lambda: python_of(live.pid), "the child")
            time.sleep(delay)
            below = python_of(live.pid)
            victim = live.pid if i % 3 == 0 or not below else below[0] if i % 3 == 1 else t.rng.choice(below)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            status = live.wait(30)
            check(status in (-signal.SIGKILL, FAILED, DONE), "status %d: %s" % (status, live.output()))
            if status == FAILED:
                check("tokeniz" in live.output(), live.output())
            wait_until(lambda: not any(is_alive(p) for p in below), 5, "no process is left")
        for path in token_files(run).values() if os.path.exists(os.path.join(run.dir, "cache")) else ():
            equal(len(read_documents(path)), 1200, "documents of a file that is there after a kill")
            os.unlink(path)  # the kill came too late; the next one needs something to interrupt
    tokenize(run)
    equal(read_documents(token_files(run)["many.jsonl"]), expected, "documents")
    left = [n for n in os.listdir(os.path.join(run.dir, "cache")) if n.endswith(".tmp")]
    equal(left, [], "files written aside")


@test
def two_runs_share_a_cache(t):
    needs_environment()
    file = many_records(t, 1000)
    runs = [text_run(t, [file], name="run%d" % i, data={"cache_dir": "cache"}) for i in range(3)]
    for run in runs[1:]:  # the same model, so the same key
        run.change(model={"path": runs[0].sections["model"]["path"]})
    lives = [background(run) for run in runs]
    try:
        for live in lives:
            equal(live.wait(), DONE, live.output())
    finally:
        for live in lives:
            live.__exit__(None, None, None)
    made = token_files(runs[0], os.path.join(t.dir, "cache"))
    equal(len(os.listdir(os.path.join(t.dir, "cache"))), 1, "files in the cache")
    equal(len(read_documents(made["many.jsonl"])), 1000, "documents")


@test
def who_waits_for_the_same_file_goes_on_when_its_writer_is_killed(t):
    needs_environment()
    file = many_records(t, 1000)
    runs = [text_run(t, [file], name="run%d" % i, data={"cache_dir": "cache"}) for i in range(2)]
    runs[1].change(model={"path": runs[0].sections["model"]["path"]})
    temporary, cache = None, os.path.join(t.dir, "cache")
    with background(runs[0]) as first, background(runs[1]) as second:
        first.wait_for(lambda: os.path.exists(cache) and os.listdir(cache), "the file that is written aside")
        temporary, = os.listdir(cache)
        time.sleep(t.rng.random() * 0.3)
        first.signal(signal.SIGKILL)
        equal(second.wait(), DONE, second.output())
    check(temporary.endswith(".mttokens.tmp") or temporary.endswith(".mttokens"), temporary)
    equal(os.listdir(cache), [temporary.replace(".tmp", "")], "files in the cache")
    equal(len(read_documents(token_files(runs[1], cache)["many.jsonl"])), 1000, "documents")


def shared_runs(t, file, count):
    """Runs of one model on one cache; what is in it holds without Python being asked."""
    os.utime(file, ns=(10 ** 18, 10 ** 18))
    time.sleep(2.2)  # the change of its times is older than a tick of the clock, too
    runs = [text_run(t, [file], name="run%d" % i, data={"cache_dir": "cache"}, training={"steps": 2, "seq_len": 256})
            for i in range(count)]
    for run in runs[1:]:
        run.change(model={"path": runs[0].sections["model"]["path"]})
    return runs, os.path.join(t.dir, "cache")


def flip(path, offset, bit):
    """As a drive would: the time of the file does not show it."""
    status = os.stat(path)
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@test
def what_was_damaged_in_the_cache_between_two_runs_is_refused_or_made_again(t):
    needs_environment()
    runs, cache = shared_runs(t, many_records(t, 60), 2)
    first, second = runs
    first.ok()
    path, = token_files(first, cache).values()
    with open(path, "rb") as f:
        whole = f.read()
    # a bit of the words, which the launcher does not read: io_worker finds it
    for offset, bit in ((512 + 4 * t.rng.randrange(2000), 0), (512 + 4 * 50 + 3, 6), (len(whole) - 1, 7)):
        flip(path, offset, bit)
        result = second.ok(status=USER)
        check("%s: damaged: checksum of the words" % path in result.err and "remove it" in result.err, result.err)
        flip(path, offset, bit)
    # what is cut, or whose header does not fit, is none: made again
    for damage in (lambda: os.truncate(path, len(whole) - 4), lambda: flip(path, 30, 2), lambda: flip(path, 505, 2)):
        damage()
        second.ok("--run.stop_after_step=1", status=STOPPED)
        with open(path, "rb") as f:
            equal(f.read()[512:], whole[512:], "words of what was made again")
    second.ok()
    equal(second.hashes(), first.hashes(), "state hashes")


@test
def a_run_tokenizes_what_it_needs_and_resumes_on_it(t):
    needs_environment()
    file = many_records(t, 60)
    run = text_run(t, [file], training={"steps": 4, "seq_len": 256})
    result = run.ok("--run.stop_after_step=2", status=STOPPED)
    check("many.jsonl as messages), tokenized by tokenizers" in result.err and "of them learned" in result.err, result.err)
    shutil.rmtree(os.path.join(run.dir, "cache"))
    run.ok()
    run.check_steps(4)
    whole = text_run(t, [file], name="whole", training={"steps": 4, "seq_len": 256})
    whole.ok()
    equal(run.hashes(), whole.hashes(), "state hashes")
    out = mtlaunch("eval", run.dir, "--data", file, status=DONE).out
    check(re.match(r"tokens \d+ loss ", out), out)


main()
