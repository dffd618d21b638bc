"""Several hundred small safetensors files, right and wrong, with the reference library's verdicts.

    tools/venv/bin/python tools/goldens/safetensors_corpus.py
    tools/venv/bin/python tools/goldens/safetensors_corpus.py --seed 7 --changed 50000 --out /tmp/corpus.txt
    build/release/tests/unit/test_safetensors_reference /tmp/corpus.txt

Writes tests/goldens/safetensors/corpus.txt (`make goldens` does, too), one file per line:

    NAME VERDICT MEANING BYTES

BYTES are the file's in hex. VERDICT is accept or refuse, as safetensors.deserialize() says; or
stricter: the library accepts it and our reader must not; looser: the other way round. MEANING is for accept a 64-bit FNV-1a hash
of what the file holds (see `meaning`), for stricter what our message must contain (_ for spaces),
else -. The corpus is a pure function of SEED and of the library's version.
"""

import argparse
import json
import pathlib
import random
import struct

import safetensors

OUT = pathlib.Path(__file__).resolve().parent.parent.parent / "tests" / "goldens" / "safetensors" / "corpus.txt"
SEED = 4
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "I64": 8,
         "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip

# where our reader refuses what the library takes: name of the case -> words of the message
STRICTER = {}
# -0 is an integer to our JSON reader, and it is 0
LOOSER = {"offsets-minus-zero"}


def strictly(name, words):
    STRICTER[name] = words
    return name


def file_of(header, data, length=None):
    """The bytes of a file; `header` as text, bytes or an object."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header, separators=(",", ":"))
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def product(shape):
    n = 1
    for size in shape:
        n *= size
    return n


def info(dtype, shape, start):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + product(shape) * SIZES[dtype]]}


def whole(rng, dtypes=None, n=None):
    """A valid header and its data; places and keys in random order, aligned as the library writes."""
    n = rng.randrange(1, 4) if n is None else n
    specs = []
    for i in range(n):
        dims = rng.choice([0, 1, 1, 2, 2, 3])
        specs.append((rng.choice(dtypes or list(SIZES)), [rng.choice([0, 1, 1, 2, 3]) for _ in range(dims)]))
    header, start = {}, 0
    for i, (dtype, shape) in enumerate(specs):
        header["abcdefgh"[i]] = info(dtype, shape, start)
        start = header["abcdefgh"[i]]["data_offsets"][1]
    items = list(header.items())
    rng.shuffle(items)
    for _, item in items:
        pairs = list(item.items())
        rng.shuffle(pairs)
        item.clear()
        item.update(pairs)
    return dict(items), bytes(rng.randrange(256) for _ in range(start))


def accepted(rng):
    for i in range(40):
        header, data = whole(rng)
        yield "whole-%d" % i, file_of(header, data)
    for dtype in SIZES:
        yield "dtype-" + dtype, file_of(*whole(rng, [dtype], 2))
    one = {"a": info("F32", [1], 0)}
    yield "no-tensors", file_of("{}", b"")
    yield "only-metadata", file_of({"__metadata__": {"format": "pt"}}, b"")
    yield "scalar", file_of({"a": info("F64", [], 0)}, b"12345678")
    yield "empty", file_of({"a": info("F32", [0], 0), "b": info("F32", [3, 0, 2], 0)}, b"")
    yield "empty-between", file_of({"a": info("U8", [3], 0), "e": info("F32", [0], 3), "c": info("U8", [1], 3)}, b"abcd")
    yield "unaligned", file_of({"a": info("U8", [1], 0), "b": info("F32", [1], 1)}, b"abcde")
    for pad in (1, 7, 100):
        yield "padded-%d" % pad, file_of(json.dumps(one) + " " * pad, b"abcd")
    yield "padded-newline", file_of(json.dumps(one) + "\n\t\r", b"abcd")
    yield "pretty", file_of(json.dumps(one, indent=2), b"abcd")
    yield "metadata-empty", file_of({"__metadata__": {}, **one}, b"abcd")
    yield "metadata-last", file_of({**one, "__metadata__": {"a": "b", "c": "d"}}, b"abcd")
    yield "metadata-null", file_of({"__metadata__": None, **one}, b"abcd")
    yield "extra-key", file_of({"a": {**one["a"], "comment": [1, {"x": None}]}}, b"abcd")
    yield "name-escaped", file_of('{"\\u00e9\\n\\"\\ud83d\\ude42":%s}' % json.dumps(one["a"]), b"abcd")
    yield "name-utf8", file_of(json.dumps({"é🙂": one["a"]}, ensure_ascii=False), b"abcd")
    yield "name-empty", file_of({"": one["a"]}, b"abcd")
    yield "name-255", file_of({"n" * 255: one["a"]}, b"abcd")
    yield strictly("name-256", "a name below 256 bytes"), file_of({"n" * 256: one["a"]}, b"abcd")
    yield strictly("name-zero", "not valid JSON"), file_of('{"a\\u0000b":%s}' % json.dumps(one["a"]), b"abcd")
    yield "dims-8", file_of({"a": info("F32", [1] * 8, 0)}, b"abcd")
    yield strictly("dims-9", "at most 8 dimensions"), file_of({"a": info("F32", [1] * 9, 0)}, b"abcd")
    yield strictly("name-duplicate-metadata", "duplicate"), file_of('{"__metadata__":{"a":"b","a":"b"}}', b"")
    yield strictly("name-duplicate", "duplicate"), file_of('{"a":%s,"a":%s}' % ((json.dumps(one["a"]),) * 2), b"abcd")
    yield strictly("name-duplicate-other", "duplicate"), file_of('{"a":%s,"a":%s}' % (json.dumps(info("U8", [4], 0)), json.dumps(one["a"])), b"abcd")
    yield strictly("name-duplicate-escaped", "duplicate"), file_of('{"a":%s,"\\u0061":%s}' % ((json.dumps(one["a"]),) * 2), b"abcd")
    yield "key-duplicate", file_of('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"abcd")
    yield "huge-beside-zero", file_of({"a": info("F32", [0], 0) | {"shape": [0, 1 << 40, 1 << 40]}}, b"")
    yield "zero-after-huge", file_of({"a": info("F32", [0], 0) | {"shape": [1 << 40, 1 << 40, 0]}}, b"")
    yield strictly("size-over-int64", "too big integer"), file_of({"a": info("F32", [0], 0) | {"shape": [0, 1 << 63]}}, b"")


def lengths(rng):
    header, data = whole(rng)
    text = json.dumps(header).encode()
    n = len(text)
    for length in (0, 1, 2, n - 1, n + 1, n + len(data), n + len(data) + 1, 100000000, 100000001, (1 << 31) - 1,
                   1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1):  # fmt: skip
        yield "length-%d" % length, file_of(text, data, length)
    for size in (0, 1, 7, 8, 9, 10):
        yield "cut-%d" % size, file_of(text, data)[:size]
    for missing in range(1, 5):
        yield "cut-by-%d" % missing, file_of({"a": info("F32", [1], 0)}, b"abcd")[:-missing]
    for more in (1, 4, 8):
        yield "trailing-%d" % more, file_of({"a": info("F32", [1], 0)}, b"abcd" + bytes(more))
    yield "trailing-no-tensors", file_of("{}", b"x")


def places(rng):
    def two(first, second, size, **of):
        dtype = of.get("dtype", "U8")
        make = lambda p: {"dtype": dtype, "shape": [(p[1] - p[0]) // SIZES[dtype]], "data_offsets": list(p)}  # noqa: E731
        return file_of({"a": make(first), "b": make(second)}, bytes(size))

    yield "hole-between", two((0, 4), (8, 12), 12)
    yield "hole-first", two((1, 4), (4, 8), 8)
    yield "overlap", two((0, 5), (4, 8), 8)
    yield "overlap-same", two((0, 4), (0, 4), 4)
    yield "overlap-inside", two((0, 8), (2, 4), 8)
    yield "overlap-empty-inside", two((0, 8), (4, 4), 8)
    yield "empty-at-end", two((0, 8), (8, 8), 8)
    yield "empty-beyond-end", two((0, 8), (9, 9), 8)
    yield "beyond-end", two((0, 4), (4, 9), 8)
    yield "swapped-order", two((4, 8), (0, 4), 8)
    base = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for name, offsets in {
        "reversed": [4, 0], "negative": [-4, 0], "one": [4], "three": [0, 4, 8], "none": [], "null": None, "text": "0,4",
        "texts": ["0", "4"], "real": [0.0, 4.0], "big": [0, 1 << 63], "bigger": [0, 1 << 64], "wrap": [(1 << 64) - 4, 0],
        "bool": [False, 4], "object": {"0": 0, "1": 4}, "nested": [[0], [4]], "short": [0, 3], "long": [0, 5],
    }.items():  # fmt: skip
        yield "offsets-" + name, file_of({"a": {**base, "data_offsets": offsets}}, b"abcd")
    yield "offsets-exponent", file_of('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4e0]}}', b"abcd")
    yield "offsets-leading-zero", file_of('{"a":{"dtype":"F32","shape":[1],"data_offsets":[00,4]}}', b"abcd")
    yield "offsets-minus-zero", file_of('{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}', b"abcd")
    for name, shape in {
        "negative": [-1], "twice-negative": [-1, -1], "real": [1.0], "text": ["1"], "number": 1, "null": None, "nulls": [None],
        "object": {}, "bool": [True], "larger": [2], "smaller": [0], "overflow": [1 << 32, 1 << 32],
        "overflow-to-one": [(1 << 32) + 1, 0xFFFFFFFF], "overflow-bytes": [1 << 62], "big": [1 << 64], "wraps-to-4": [1 << 63, 2, 1],
        "nested": [[1]],
    }.items():  # fmt: skip
        yield "shape-" + name, file_of({"a": {**base, "shape": shape}}, b"abcd")
    for name, dtype in {"unknown": "F4X", "lower": "f32", "empty": "", "null": None, "number": 32, "torch": "float32", "list": ["F32"],
                        "padded": "F32 "}.items():  # fmt: skip
        yield "dtype-" + name, file_of({"a": {**base, "dtype": dtype}}, b"abcd")
    for key in base:
        yield "without-" + key, file_of({"a": {k: v for k, v in base.items() if k != key}}, b"abcd")
    for name, value in {"null": None, "number": 3, "list": [], "text": "x", "empty": {}}.items():
        yield "info-" + name, file_of({"a": value}, b"abcd")


def headers(rng):
    one = json.dumps({"a": info("F32", [1], 0)})
    for name, text in {
        "empty": "", "list": "[]", "null": "null", "number": "12", "text": '"ab"', "space-first": " " + one, "newline-first": "\n" + one,
        "bom": "\ufeff" + one, "twice": one + one, "comma": one[:-1] + ",}", "comment": one + "/**/", "zero-padding": one + "\0\0",
        "unquoted": one.replace('"a"', "a"), "single-quotes": one.replace('"', "'"), "unclosed": one[:-1],
        "surrogate": '{"\\ud83d":%s}' % one[5:-1], "control": one.replace('"a"', '"a\tb"'), "nan": one.replace("[1]", "[NaN]"),
        "letter-after": one + " x",
    }.items():  # fmt: skip
        case = "header-" + name
        # the format's description: the header MUST begin with a { character
        yield strictly(case, "expected {") if name.endswith("-first") else case, file_of(text, b"abcd")
    for name, raw in {"latin1": b'{"\xe9":', "overlong": b'{"\xc0\xaf":', "half": b'{"\xf0\x9f":', "raw-surrogate": b'{"\xed\xa0\x80":'}.items():
        yield "utf8-" + name, file_of(raw + one[5:-1].encode() + b"}", b"abcd")
    for name, value in {"list": [], "text": "x", "number": 1, "numbers": {"a": 1}, "nested": {"a": {}}, "nulls": {"a": None},
                        "false": False}.items():  # fmt: skip
        yield "metadata-" + name, file_of({"__metadata__": value, "a": info("F32", [1], 0)}, b"abcd")
    yield "metadata-is-tensor", file_of({"__metadata__": info("F32", [1], 0)}, b"abcd")
    # half-byte and exotic types of newer versions: no model of ours can have them
    for dtype, size in {"F4": 1, "F6_E2M3": 3, "F6_E3M2": 3, "F8_E4M3FNUZ": 4, "F8_E5M2FNUZ": 4}.items():
        yield strictly("dtype-" + dtype, "a known dtype"), file_of(
            {"a": {"dtype": dtype, "shape": [4 if size != 1 else 2], "data_offsets": [0, size]}}, bytes(size))
    for depth in (100, 1000):
        yield "depth-%d" % depth, file_of('{"a":' + "[" * depth + "]" * depth + "}", b"")


def changed(rng, count):
    """Whole files with one to three bytes changed, put in or taken out."""
    letters = b'{}[]",:0123456789-.eE \\aFBx\x00\xff'
    for i in range(count):
        header, data = whole(rng, ["F32", "BF16", "U8", "I64"])
        bytes_ = bytearray(file_of(header, data))
        n = struct.unpack_from("<Q", bytes_)[0]
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(8, 8 + n)
            what = rng.randrange(3)
            if what == 0:
                bytes_[at] = rng.choice(letters)
            elif what == 1:
                bytes_.insert(at, rng.choice(letters))
                n += 1
            else:
                del bytes_[at]
                n -= 1
        struct.pack_into("<Q", bytes_, 0, n)
        yield "changed-%d" % i, bytes(bytes_)


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % (1 << 64)
    return h


def meaning(tensors):
    """Hash of: name, 0, dtype, 0, sizes as u64, the data; tensor after tensor in order of names' bytes."""
    out = b""
    for name, tensor in sorted((n.encode(), t) for n, t in tensors):
        out += name + b"\0" + tensor["dtype"].encode() + b"\0" + struct.pack("<%dQ" % len(tensor["shape"]), *tensor["shape"])
        out += bytes(tensor["data"])
    return "%016x" % fnv(out)


def verdict_of(data):
    try:
        return "accept", meaning(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        return "refuse", str(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--changed", type=int, default=220, help="files with random changes")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    lines, names = [], set()
    for make in (accepted, lengths, places, headers, lambda r: changed(r, arguments.changed)):
        for name, data in make(rng):
            verdict, what = verdict_of(data)
            if name in names:
                raise SystemExit("two cases are named %s" % name)
            names.add(name)
            if name in STRICTER:
                if verdict != "accept":
                    raise SystemExit("%s: the library refuses it too: %s" % (name, what))
                verdict, what = "stricter", STRICTER[name].replace(" ", "_")
            if name in LOOSER:
                if verdict != "refuse":
                    raise SystemExit("%s: the library accepts it too" % name)
                verdict, what = "looser", "-"
            lines.append("%s %s %s %s\n" % (name, verdict, "-" if verdict == "refuse" else what, data.hex()))
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text("".join(lines))
    counts = {v: sum(line.split()[1] == v for line in lines) for v in ("accept", "refuse", "stricter", "looser")}
    print("safetensors %s: %d files, %s, %d bytes" % (safetensors.__version__, len(lines), counts, arguments.out.stat().st_size))


if __name__ == "__main__":
    main()
