"""Common code of the tests of whole runs: tiny models, data, run files, starting and watching.

A test program looks like this:

    import os, sys
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from harness import *

    @test
    def a_stopped_run_resumes(t):
        run = tiny_run(t.dir, training={"steps": 4})
        run.ok("--run.stop_after_step=2", status=4)
        run.ok()
        check(run.steps() == [1, 2, 3, 4], "steps %s" % run.steps())

    main()

Each test gets `t.dir`, a directory of its own that is removed when it passes, and `t.rng`, a random
generator whose seed is printed when the test fails (set it with --seed N). `--only NAME` runs the
tests whose name contains NAME, `--keep` keeps the directories.

Only the standard library is used. Content is made by a fixed generator: the same every time.
"""
import array
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MTLAUNCH = os.environ.get("MTLAUNCH") or os.path.join(ROOT, "mtlaunch")
GOLDENS = os.path.join(ROOT, "tests", "goldens")
ROLES = ("gpu_worker", "io_worker", "opt_worker")
SECONDS_MAX = 120  # of one run; the machine may be busy

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it; a run would do so too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job does
    signal.signal(signal.SIGINT, signal.default_int_handler)

DONE, FAILED, USER, FIT, STOPPED, BUSY = range(6)  # exit statuses


class TestFailure(Exception):
    pass


class TestSkip(Exception):
    pass


def check(condition, message="check failed"):
    if not condition:
        raise TestFailure(message)


def equal(found, expected, what="value"):
    check(found == expected, "%s: expected %r, found %r" % (what, expected, found))


def skip(why):
    raise TestSkip(why)


# -- models and data --


def llama_config(**changes):
    """config.json of a Llama of 3 layers, hidden 64, untied, GQA 4:2, head_dim != hidden / heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 272,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    }
    config.update(changes)
    return config


def write_model(directory, **changes):
    """A folder with only config.json, for init = "random". Returns its path."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump(llama_config(**changes), f, indent=1)
    return directory


def tensor_shapes(config):
    """{name: shape} of a Llama of llama_config(), or of a Mixtral."""
    c = config
    hidden, inner, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        block = {"input_layernorm": (hidden,), "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
                 "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
                 "post_attention_layernorm": (hidden,), "mlp.gate_proj": (inner, hidden),
                 "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        if "num_local_experts" in c:
            block = {name: shape for name, shape in block.items() if not name.startswith("mlp.")}
            block["block_sparse_moe.gate"] = (c["num_local_experts"], hidden)
            for expert in range(c["num_local_experts"]):
                block.update({"block_sparse_moe.experts.%d.%s" % (expert, name): shape for name, shape in (
                    ("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))})
        shapes.update({"model.layers.%d.%s.weight" % (i, name): shape for name, shape in block.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    return shapes


def pack(dtype, values):
    """The bytes of floats as F32, BF16 (rounded toward zero) or F16."""
    if dtype == "F16":
        return struct.pack("<%de" % len(values), *values)
    data = array.array("f", values).tobytes()
    return data if dtype == "F32" else b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))


def make_weights(config, dtype="F32", seed=7):
    """{name: (dtype, shape, bytes)}: norms near 1, the rest small. dtype may be a function of the name."""
    rng, tensors = random.Random(seed), {}
    for name, shape in tensor_shapes(config).items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        kind = dtype(name) if callable(dtype) else dtype
        if "norm" in name:
            values = [1.0 + 0.1 * (rng.random() - 0.5) for _ in range(n)]
        else:
            values = [0.17 * (rng.random() - 0.5) for _ in range(n)]
        tensors[name] = (kind, shape, pack(kind, values))
    return tensors


def write_pretrained(directory, tensors, shards=1, **changes):
    """A Hugging Face folder: config.json and weights, in one file or in several with an index."""
    write_model(directory, **changes)
    if shards == 1:
        write_safetensors(os.path.join(directory, "model.safetensors"), tensors)
        return directory
    names, index = list(tensors), {}
    for i in range(shards):
        part = names[i * len(names) // shards:(i + 1) * len(names) // shards]
        file = "model-%05d-of-%05d.safetensors" % (i + 1, shards)
        write_safetensors(os.path.join(directory, file), {n: tensors[n] for n in part})
        index.update({n: file for n in part})
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": sum(len(t[2]) for t in tensors.values())}, "weight_map": index}, f)
    return directory


def text_of(n_bytes, seed=1):
    """Text with some structure, so that a loss can fall: words by a skewed choice, sentences."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefghiklmnoprstuvw") for _ in range(rng.randint(2, 7)))
             for _ in range(60)]
    parts, n = [], 0
    while n < n_bytes:
        sentence = " ".join(words[int(60 * rng.random() ** 2)] for _ in range(rng.randint(4, 12)))
        parts.append(sentence.capitalize() + ".\n")
        n += len(parts[-1])
    return "".join(parts)[:n_bytes]


def write_text(path, n_bytes=20000, seed=1):
    with open(path, "w") as f:
        f.write(text_of(n_bytes, seed))
    return path


def write_jsonl(path, documents=40, n_bytes=500, seed=1):
    with open(path, "w") as f:
        for i in range(documents):
            f.write(json.dumps({"text": text_of(n_bytes, seed * 1000 + i)}) + "\n")
    return path


def tokens_of(n, vocab=256, seed=1):
    """n token ids that a small model can learn something about."""
    data = text_of(n, seed).encode()
    return [b % vocab for b in data]


def write_nanogpt_shard(path, tokens):
    """Raw uint16, no header."""
    with open(path, "wb") as f:
        array.array("H", tokens).tofile(f)
    return path


def write_llmc_shard(path, tokens, magic=20240520):
    """llm.c: 256 int32 (magic, version, count); 20240520 version 1: uint16, 20240801 version 7: uint32."""
    version = 1 if magic == 20240520 else 7
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", magic, version, len(tokens), *([0] * 253)))
        array.array("H" if version == 1 else "I", tokens).tofile(f)
    return path


def write_token_file(path, conversations, vocab=250):
    """model/token_file.h. conversations: (tokens that are masked, tokens that are learned) of each."""
    words, labels = array.array("I"), 0
    for i, (masked, learned) in enumerate(conversations):
        ids = tokens_of(masked + learned, vocab, i)
        words.extend([n | 1 << 30 for n in ids[:masked]] + ids[masked:])
        words[-1] |= 1 << 31
        labels += learned
    header = struct.pack("<8sII4Q", b"MTTOKENS", 2, 2, len(words), len(conversations), labels, 0)
    header = header.ljust(508 - 32 - 24 - 292, b"\0")
    header += b"hand".ljust(32, b"\0") + b"messages".ljust(24, b"\0") + path.encode()[-287:].ljust(288, b"\0")
    header += struct.pack("<I", zlib.crc32(words.tobytes()))
    with open(path, "wb") as f:
        f.write(header + struct.pack("<I", zlib.crc32(header)) + words.tobytes())
    return path


# -- safetensors --

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}, and the metadata."""
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(n))
        data = f.read()
    meta = header.pop("__metadata__", {})
    return {name: (h["dtype"], tuple(h["shape"]), data[h["data_offsets"][0]:h["data_offsets"][1]])
            for name, h in header.items()}, meta


def write_safetensors(path, tensors):
    """The inverse of read_safetensors()."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    return path


def read_weights(folder):
    """All tensors of a Hugging Face folder, single file or sharded."""
    index = os.path.join(folder, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index) as f:
            files = sorted(set(json.load(f)["weight_map"].values()))
    tensors = {}
    for name in files:
        tensors.update(read_safetensors(os.path.join(folder, name))[0])
    return tensors


def floats(tensor):
    """The values of one tensor of read_safetensors() as a list."""
    dtype, _, data = tensor
    if dtype == "F32":
        return array.array("f", data).tolist()
    if dtype == "BF16":
        wide = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
        return array.array("f", wide).tolist()
    return list(struct.unpack("<%de" % (len(data) // 2), data))


# -- run files --


def toml_value(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return "[%s]" % ", ".join(toml_value(v) for v in value)
    return repr(value)


def write_run_file(path, sections):
    with open(path, "w") as f:
        for section, keys in sections.items():
            f.write("[%s]\n" % section)
            for key, value in keys.items():
                if value is not None:
                    f.write("%s = %s\n" % (key, toml_value(value)))
            f.write("\n")
    return path


def tiny_sections(output_dir, model, data):
    """A run that takes half a second: 20 steps of 2 x 2 sequences of 32 tokens."""
    return {
        "run": {"output_dir": output_dir, "seed": 1234},
        "model": {"path": model, "init": "random", "dtype": "float32", "tokenizer": "bytes"},
        "data": {"train": [data]},
        "training": {"seq_len": 32, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "steps": 20,
                     "activation_checkpointing": "full"},
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1, "workers": 1},
        "lr_scheduler": {"type": "constant", "warmup_steps": 2},
        "memory": {"device": "cpu", "threads": 1, "page_elements": 8192},
        "log": {"progress": "plain"},
    }


def merged(sections, changes):
    """`sections` with the keys of `changes` in them."""
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return sections


def tiny_run(directory, name="run", hf=None, file=None, **changes):
    """A Run on the tiny model. changes: section={key: value}; a value of None removes the key.

    hf is a model folder, or a dict of changes of llama_config() for a folder with a config.json only; file
    is the training file. By default both are made, and shared by the runs of one directory.
    """
    if not isinstance(hf, str):
        tag = hashlib.sha256(repr(sorted((hf or {}).items())).encode()).hexdigest()[:8]
        hf = write_model(os.path.join(directory, "model-" + tag), **(hf or {}))
    if file is None:
        file = os.path.join(directory, "train.txt")
        if not os.path.exists(file):
            write_text(file)
    output_dir = os.path.join(directory, name)
    sections = merged(tiny_sections(output_dir, hf, file), changes)
    return Run(write_run_file(os.path.join(directory, name + ".toml"), sections), output_dir, sections)


# -- processes --


class Result:
    def __init__(self, status, out, err, seconds):
        self.status, self.out, self.err, self.seconds = status, out, err, seconds

    def __str__(self):
        return "status %s after %.1f s\n%s%s" % (self.status, self.seconds, self.out[-3000:], self.err[-6000:])


def environment(env=None):
    out = {k: v for k, v in os.environ.items() if not k.startswith("MTLAUNCH_")}
    out.update(env or {})
    return out


def mtlaunch(*arguments, env=None, timeout=SECONDS_MAX, cwd=None, status=None, preexec=None):
    """Runs a command to its end. With status: anything else fails the test."""
    command = [MTLAUNCH] + [str(a) for a in arguments]
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment(env), cwd=cwd or ROOT, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=preexec)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        raise TestFailure("%s: not done after %d s\n%s" % (" ".join(command), timeout,
                                                         err.decode(errors="replace")[-3000:]))
    result = Result(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"),
                    time.monotonic() - began)
    if status is not None:
        check(result.status == status, "%s: expected status %d, found %s" % (" ".join(command), status, result))
    return result


def process_name(pid):
    try:
        with open("/proc/%d/comm" % pid) as f:
            return f.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_state(pid):
    """The letter of /proc/PID/stat ('Z' zombie), the parent and the process group; None when gone."""
    try:
        with open("/proc/%d/stat" % pid) as f:
            rest = f.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return rest[0], int(rest[1]), int(rest[2])


def is_alive(pid):
    state = process_state(pid)
    return state is not None and state[0] not in "ZX"


def children(pid, name=None):
    """[(pid, process name)] of the direct children that run, in order of their pids."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        state = process_state(int(entry))
        if state and state[1] == pid and state[0] not in "ZX":
            child_name = process_name(int(entry))
            if child_name and (name is None or child_name == name):
                found.append((int(entry), child_name))
    return sorted(found)


def wait_until(condition, timeout=30, what="condition", poll=0.005):
    """Waits for a true value and returns it."""
    until = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise TestFailure("waited %g s in vain for: %s" % (timeout, what))
        time.sleep(poll)


class Background:
    """A launcher that runs in the background, of a Run. Use as a context manager: it and its children end with it."""

    def __init__(self, run, arguments, env=None, preexec=None):
        self.run = run
        self.base = self.resumes() if os.path.exists(run.metrics_path) else None
        self.log = tempfile.TemporaryFile()
        self.began = time.monotonic()
        self.process = subprocess.Popen([MTLAUNCH] + [str(a) for a in arguments], env=environment(env), cwd=ROOT,
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                        preexec_fn=preexec)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        workers = [pid for pid, _ in children(self.pid)] if self.running() else []
        if self.running():
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(TestFailure):
            wait_until(lambda: not any(is_alive(p) for p in workers), 5)
        self.log.close()

    def running(self):
        return self.process.poll() is None

    def output(self):
        # the launcher writes through the same file offset: it must not be moved
        return os.pread(self.log.fileno(), 1 << 24, 0).decode(errors="replace")

    def signal(self, number):
        self.process.send_signal(number)

    def children(self, name=None):
        return children(self.pid, name)

    def wait_for(self, condition, what="condition", timeout=60):
        """Waits while the launcher lives; its end before that fails the test."""
        def look():
            value = condition()
            if value:
                return value
            if not self.running():
                value = condition()
                check(value, "the launcher ended (status %s) before: %s\n%s" % (
                    self.process.returncode, what, self.output()[-4000:]))
            return value
        return wait_until(look, timeout, what)

    def wait_committed(self, step, timeout=60):
        """Until a commit of this step or a later one was announced."""
        def look():
            return any(line.get("event") == "commit" and line["step"] >= step for line in self.run.lines(tolerant=True))
        return self.wait_for(look, "commit of step %d" % step, timeout)

    def wait_ready(self, timeout=60):
        """Until the workers are READY: the data are described then, metrics opened, a resume told in them."""
        def look():
            if self.base is None and os.path.exists(self.run.metrics_path):
                return True
            return self.resumes() > (self.base or 0) or re.search(r"^train: ", self.output(), re.M)
        return self.wait_for(look, "READY", timeout)

    def resumes(self):
        return sum(line.get("event") == "resume" for line in self.run.lines(tolerant=True))

    def wait(self, timeout=SECONDS_MAX):
        """The exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TestFailure("not ended after %g s\n%s" % (timeout, self.output()[-4000:])) from None


class Run:
    """A run file and its output directory."""

    def __init__(self, file, output_dir, sections):
        self.file, self.dir, self.sections = file, output_dir, sections
        self.metrics_path = os.path.join(output_dir, "metrics.jsonl")

    def start(self, *overrides, env=None, preexec=None):
        return Background(self, [self.file] + list(overrides), env, preexec)

    def run(self, *overrides, env=None, timeout=SECONDS_MAX, status=None):
        return mtlaunch(self.file, *overrides, env=env, timeout=timeout, status=status)

    def ok(self, *overrides, env=None, status=DONE, timeout=SECONDS_MAX):
        """Runs and expects this status."""
        return self.run(*overrides, env=env, timeout=timeout, status=status)

    def change(self, **changes):
        """Rewrites the run file."""
        write_run_file(self.file, merged(self.sections, changes))

    def lines(self, tolerant=False):
        """metrics.jsonl. Every line must be JSON, the last one whole; a live run may be writing it (tolerant)."""
        try:
            with open(self.metrics_path) as f:
                text = f.read()
        except FileNotFoundError:
            return []
        whole = text[:text.rfind("\n") + 1]
        check(tolerant or whole == text, "%s: the last line is torn: %r" % (self.metrics_path, text[len(whole):]))
        return [json.loads(line) for line in whole.splitlines()]

    def step_lines(self):
        return [line for line in self.lines() if "event" not in line]

    def steps(self):
        return [line["step"] for line in self.step_lines()]

    def hashes(self):
        """{step: state hash}."""
        return {line["step"]: line["state_hash"] for line in self.step_lines()}

    def events(self, name=None):
        return [line for line in self.lines() if "event" in line and name in (None, line["event"])]

    def check_steps(self, last):
        """Exactly one step line for each of 1..last, in order."""
        equal(self.steps(), list(range(1, last + 1)), "step lines of metrics.jsonl")

    def digest(self, status=DONE):
        return digest(self.dir, status)

    def export_dir(self, step):
        return os.path.join(self.dir, "export", "step-%d" % step)


def digest(run_dir, status=DONE):
    """(step, state hash, weights hash); with another status: the Result."""
    result = mtlaunch("digest", run_dir, status=status)
    if status != DONE:
        return result
    match = re.fullmatch(r"step (\d+) state_hash ([0-9a-f]{32}) weights_hash ([0-9a-f]{32})\n", result.out)
    check(match, "digest printed %r" % result.out)
    return int(match.group(1)), match.group(2), match.group(3)


# of a step line: what differs from run to run
TIMES = ("tokens_per_s", "step_s", "forward_s", "backward_s", "wait_s", "bytes_read", "bytes_written")


class Undisturbed:
    """What a run comes to that nobody disturbs: make(directory) is run to its end, when first asked for."""

    def __init__(self, make):
        self.make, self.lines = make, None

    def learn(self):
        if self.lines is not None:
            return self
        directory = tempfile.mkdtemp(prefix="mt-undisturbed-")
        try:
            run = self.make(directory)
            run.ok()
            lines = run.step_lines()
            run.check_steps(len(lines))
            self.step_s = min(line["step_s"] for line in lines)
            self.lines, self.digest = self.facts(run), run.digest()
            self.exports = tree(os.path.join(run.dir, "export"))
            self.events, self.entries, self.store = self.told(run), set(os.listdir(run.dir)), self.sizes(run)
        finally:
            shutil.rmtree(directory)
        return self

    @staticmethod
    def facts(run):
        return [{k: v for k, v in line.items() if k not in TIMES} for line in run.step_lines()]

    @staticmethod
    def told(run):
        """What evaluations, samples and skips said; an event may stand there twice."""
        lines = [{k: v for k, v in e.items() if k != "time"} for e in run.events()]
        return {json.dumps(e, sort_keys=True) for e in lines if e["event"] in ("eval", "sample", "skip")}

    @staticmethod
    def sizes(run):
        return {e.name: e.stat().st_size for e in os.scandir(os.path.join(run.dir, "store"))}

    def check(self, run, lost_exports=()):
        """The run has the same step lines, state and exports, but for exports that it said were lost."""
        self.learn()
        found = self.facts(run)
        equal([f["step"] for f in found], [e["step"] for e in self.lines], "step lines")
        for f, e in zip(found, self.lines):
            equal(f, e, "the line of step %d" % e["step"])
        equal(run.digest(), self.digest, "digest")
        expected = {path: h for path, h in self.exports.items() if path.split("/")[0] not in lost_exports}
        equal(tree(os.path.join(run.dir, "export")), expected, "exports")


    def hashes(self):
        return {line["step"]: line["state_hash"] for line in self.learn().lines}

    def check_state(self, run):
        """The run has the same state after every step, and at its end."""
        self.learn()
        run.check_steps(len(self.lines))
        equal(run.hashes(), self.hashes(), "state hashes")
        equal(run.digest(), self.digest, "digest")


def shm_names():
    return {name for name in os.listdir("/dev/shm") if "mtlaunch" in name}


def socket_dirs():
    return {name for name in os.listdir("/tmp") if name.startswith("mtlaunch-")}


def tree(directory):
    """{relative path: sha256 of the content} of everything below."""
    out = {}
    for folder, _, files in os.walk(directory):
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                out[os.path.relpath(path, directory)] = hashlib.sha256(f.read()).hexdigest()
    return out


# -- the framework --

_tests = []


def test(function):
    """Registers a test; they run in the order of the file."""
    _tests.append(function)
    return function


def add_test(name, function):
    """A test that is made in a loop: function(t)."""
    def wrapper(t):
        return function(t)
    wrapper.__name__ = name
    _tests.append(wrapper)


class Context:
    def __init__(self, directory, seed):
        self.dir, self.seed, self.rng = directory, seed, random.Random(seed)

    def note(self, text):
        """Told with the result, and in the log of a failure."""
        print("# %s" % text, flush=True)


def _run_one(function, root, options):
    directory = os.path.join(root, function.__name__[:40])
    os.makedirs(directory)
    t = Context(directory, options["seed"])
    began = time.monotonic()
    verdict, why = "ok", ""
    try:
        function(t)
    except TestSkip as e:
        verdict, why = "skip", str(e)
    except TestFailure as e:
        verdict, why = "not ok", str(e)
    except Exception:  # noqa: BLE001 - a broken test is a failed test
        verdict, why = "not ok", traceback.format_exc()
    seconds = time.monotonic() - began
    first, _, rest = why.partition("\n")
    if verdict == "not ok":
        rest = "%s\nseed %d, files in %s, %.1f s" % (rest, t.seed, directory, seconds)
    print("%s %s%s" % (verdict, function.__name__, ": " + first if first else ""), flush=True)
    for line in rest.splitlines():
        print("#   %s" % line, flush=True)
    if options["times"] or seconds > 10:
        print("#   %.2f s" % seconds, flush=True)
    if verdict != "not ok" and not options["keep"]:
        shutil.rmtree(directory, ignore_errors=True)
    return verdict


def _options(arguments):
    options = {"only": "", "seed": random.SystemRandom().randrange(1 << 32), "keep": False, "times": False}
    items = list(arguments)
    while items:
        name, _, value = items.pop(0).partition("=")
        key = name[2:]
        if not name.startswith("--") or key not in options:
            print("%s\nunknown: %s" % (__doc__, name))
            sys.exit(2)
        if key in ("keep", "times"):
            options[key] = True
        else:
            value = value or (items.pop(0) if items else "")
            options[key] = int(value) if key == "seed" else value
    return options


def main():
    """Runs the registered tests and exits: 0 if none failed and at least one ran."""
    options = _options(sys.argv[1:])
    chosen = [f for f in _tests if options["only"] in f.__name__]
    root = tempfile.mkdtemp(prefix="mt-test-")
    began = time.monotonic()
    print("# seed %d, %d tests" % (options["seed"], len(chosen)), flush=True)
    verdicts = [_run_one(f, root, options) for f in chosen]
    failed = verdicts.count("not ok")
    print("# %d passed, %d failed, %d skipped in %.1f s" % (
        verdicts.count("ok"), failed, verdicts.count("skip"), time.monotonic() - began), flush=True)
    if not failed and not options["keep"]:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(0 if chosen and not failed else 1)
