"""A token file, as model/token_file.h describes it: written beside its name, durable, then renamed.

A file that has the name is whole. What was written of one that has not is overwritten by the next writer; two
writers of one name wait for each other by the lock on what is written aside, which ends with its holder.
"""
import errno
import fcntl
import os
import struct
import time
import zlib

MAGIC = b"MTTOKENS"
VERSION = 2
HEADER_BYTES = 512
MASKED = 1 << 30  # the model is not to learn this token
END = 1 << 31  # the last token of its document
TEXT, INSTRUCTION = 1, 2
RACY_NS = 2_000_000_000  # as io_worker/data_cache.h: a change within one tick of the clock would not show

# magic version kind | tokens documents labels skipped unlabelled token_max scanned_ns | identity | key | hash | texts |
# CRC-32 of the words
LAYOUT = struct.Struct("<8sII7Q5Q16s32s32s24s288sI")
COUNTS = ("tokens", "documents", "labels", "skipped", "unlabelled", "token_max", "scanned_ns")
assert LAYOUT.size == HEADER_BYTES - 4


class Refusal(Exception):
    """Something to tell a person: the exit status, what, and a hint."""

    def __init__(self, status, text, hint=""):
        super().__init__(status, text, hint)
        self.status, self.text, self.hint = status, text, hint


FAILED, USER, FIT = 1, 2, 3


def os_refusal(error, what):
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(FIT, "%s: %s" % (what, error.strerror),
                       "free some space, or set data.cache_dir to a larger file system")
    users = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR)
    return Refusal(USER if error.errno in users else FAILED, "%s: %s" % (what, error.strerror))


def identity_of(status):
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def text_bytes(text, room):
    """Cut at the front, so that a path keeps its file name."""
    return text.encode("utf-8", "surrogateescape")[-(room - 1):]


class Header:
    """What the file says of itself. identity: of the source when it was read, as identity_of()."""

    def __init__(self, kind=TEXT, key=b"", taken_as="", source="", identity=(0,) * 5):
        self.kind, self.key, self.identity = kind, key, identity
        self.taken_as, self.source, self.made_by = taken_as, source, ""
        self.source_hash, self.words_checksum = b"", 0
        for name in COUNTS:
            setattr(self, name, 0)

    def pack(self):
        counts = [getattr(self, name) for name in COUNTS]
        body = LAYOUT.pack(MAGIC, VERSION, self.kind, *counts, *self.identity, self.key, self.source_hash,
                           text_bytes(self.made_by, 32), text_bytes(self.taken_as, 24), text_bytes(self.source, 288),
                           self.words_checksum)
        return body + struct.pack("<I", zlib.crc32(body))


def read_header(path):
    """The header of a whole file of this version, else None."""
    try:
        with open(path, "rb") as f:
            raw, size = f.read(HEADER_BYTES), os.fstat(f.fileno()).st_size
    except OSError:
        return None
    if len(raw) < HEADER_BYTES or struct.unpack("<I", raw[-4:])[0] != zlib.crc32(raw[:-4]):
        return None
    fields = LAYOUT.unpack(raw[:-4])
    if fields[0] != MAGIC or fields[1] != VERSION:
        return None
    header = Header(fields[2], fields[15], identity=fields[10:15])
    for name, value in zip(COUNTS, fields[3:10]):
        setattr(header, name, value)
    header.source_hash = fields[16]
    header.made_by, header.taken_as, header.source = (
        f.rstrip(b"\0").decode("utf-8", "surrogateescape") for f in fields[17:20])
    header.words_checksum = fields[20]
    return header if size == HEADER_BYTES + 4 * header.tokens else None


def is_certainly_of(header, identity):
    """Whether the source is the one that was read, without reading it again."""
    return header.identity == identity and header.scanned_ns >= max(identity[3], identity[4]) + RACY_NS


def renew(path, header, identity):
    """The same contents under new times: only the header changes, in one write."""
    header.identity, header.scanned_ns = identity, time.time_ns()
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, header.pack(), 0)
    finally:
        os.close(fd)


class Writer:
    """Holds the lock from open_locked() on; finish() or close() ends it."""

    def __init__(self, path):
        self.path, self.temporary, self.file, self.crc = path, path + ".tmp", None, 0

    def open_locked(self, on_wait):
        """Waits while another process writes the same file."""
        while self.file is None:
            fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the lock is on the file that the name still means: its last writer may have renamed it away
                if os.fstat(fd).st_ino == os.stat(self.temporary).st_ino:
                    self.file = os.fdopen(fd, "r+b", buffering=1 << 20)
                    return
            except (BlockingIOError, FileNotFoundError):
                on_wait()
                time.sleep(0.2)
            os.close(fd)

    def begin(self):
        self.crc = 0
        self.file.truncate(0)
        self.file.write(bytes(HEADER_BYTES))  # no magic: a file that was not finished is none

    def append(self, words):
        self.crc = zlib.crc32(words, self.crc)
        self.file.write(words)

    def finish(self, header):
        self.file.flush()
        header.scanned_ns = header.scanned_ns or time.time_ns()
        header.words_checksum = self.crc
        os.pwrite(self.file.fileno(), header.pack(), 0)
        os.fsync(self.file.fileno())
        os.rename(self.temporary, self.path)
        folder = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.file.close()
        self.file = None

    def close(self):
        if self.file is None:
            return
        try:
            os.unlink(self.temporary)
        except OSError:
            pass  # a leftover is overwritten by the next writer
        try:
            self.file.close()
        except OSError:
            pass  # a full disk: told already
        self.file = None
