"""Reads GGUF files (version 2 and 3): metadata and tensors, as numpy float32.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little-endian:

    "GGUF" | u32 version | u64 n_tensors | u64 n_pairs | pairs | tensor infos | padding | data

Block formats (ggml-common.h), 32 elements each, d and m float16:

    Q4_1: d, m, 16 bytes   x = d * q + m, q unsigned: the low nibbles are elements 0 to 15,
                           the high ones 16 to 31
    Q8_0: d, 32 bytes      x = d * q, q signed

Other formats are refused by name: nothing here has ever read one.
"""
import struct

import numpy

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, code):
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self):
        n = self.scalar("Q")
        if n > len(self.data) - self.at:
            raise ValueError("a string of %d bytes at byte %d reaches beyond the file" % (n, self.at))
        text = bytes(self.data[self.at:self.at + n]).decode("utf-8")
        self.at += n
        return text

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, n = self.scalar("I"), self.scalar("Q")
        return [self.value(kind) for _ in range(n)]


def from_f32(raw):
    return raw.view("<f4")


def nibbles(packed):
    return numpy.concatenate([packed & 15, packed >> 4], axis=1)


def from_q4_1(raw):
    blocks = raw.reshape(-1, 20)
    d = blocks[:, :2].copy().view("<f2").astype(numpy.float32)
    m = blocks[:, 2:4].copy().view("<f2").astype(numpy.float32)
    return (d * nibbles(blocks[:, 4:]).astype(numpy.float32) + m).reshape(-1)


def from_q8_0(raw):
    blocks = raw.reshape(-1, 34)
    d = blocks[:, :2].copy().view("<f2").astype(numpy.float32)
    return (d * blocks[:, 2:].copy().view(numpy.int8).astype(numpy.float32)).reshape(-1)


# ggml type: name, elements and bytes of a block, to float32
TYPES = {0: ("F32", 1, 4, from_f32), 3: ("Q4_1", 32, 20, from_q4_1), 8: ("Q8_0", 32, 34, from_q8_0)}


class Gguf:
    """metadata: {key: value}; tensors: {name: (shape, type's name)}, shape as numpy has it."""

    def __init__(self, path):
        self.data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
        cursor = Cursor(self.data)
        magic, version = bytes(self.data[:4]), struct.unpack_from("<I", self.data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("%s: expected GGUF version 2 or 3, found %r version %d" % (path, magic, version))
        cursor.at = 8
        n_tensors, n_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = {}
        for _ in range(n_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [self.info(cursor) for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        self.start = (cursor.at + alignment - 1) // alignment * alignment
        self.places = {name: (shape, kind, offset) for name, shape, kind, offset in infos}
        self.tensors = {name: (shape, TYPES[kind][0]) for name, shape, kind, _ in infos}

    @staticmethod
    def info(cursor):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        if kind not in TYPES:
            raise ValueError("tensor %s: ggml type %d is none of %s" % (name, kind, [t[0] for t in TYPES.values()]))
        return name, shape, kind, offset

    def tensor(self, name):
        """The tensor as float32, dequantized."""
        shape, kind, offset = self.places[name]
        _, block, size, convert = TYPES[kind]
        elements = int(numpy.prod(shape))
        raw = numpy.array(self.data[self.start + offset:self.start + offset + elements // block * size])
        return convert(raw).reshape(shape)
