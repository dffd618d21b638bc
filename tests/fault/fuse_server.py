#!/usr/bin/env python3
"""A file system in memory that says what happened, and fails on demand: what tests put under a store.

    fuse_server.py MOUNT LOG [buffered]    (started by fuse_disk.py)

It speaks the kernel's FUSE protocol itself, so nothing but /dev/fuse is needed. Every file is opened
with direct I/O: each write(2), each O_DIRECT transfer and each fsync of the users arrives here, in
order, and is appended to LOG (pickled tuples) before it is answered. From LOG power_cut.py builds
the disk as it would be had the power failed at any moment. With "buffered" there is no direct I/O: the
kernel keeps pages, writes them when it is made to, and tells whoever flushes of those it could not write.

    ("create", parent, name, inode, is_directory)   ("link", parent, name, inode)
    ("unlink", parent, name)                        ("rename", parent, name, new_parent, new_name)
    ("size", inode, bytes)                          ("write", inode, offset, data, dsync)
    ("fsync", inode)                                ("fsyncdir", inode)
    ("read", inode, offset, bytes)                  ("mark", text)

Commands arrive as JSON lines on standard input, each is answered by one JSON line on standard
output; {"do": "rules", "rules": [...]} replaces the rules. A rule:

    {"op": "read" | "write" | "fsync" | "fallocate", "file": "slots",   whose path ends so
     "skip": 3, "count": 1,                                matches to let pass, then to treat (-1: all)
     "offset": 4096,                                       only transfers that touch this byte
     "act": "error", "errno": 5} | "short", "bytes": 4096 | "delay", "seconds": 1.5 |
            "hang" (until {"do": "release"}) | "lose" (a write: answered, never done)
"""
import ctypes
import errno
import heapq
import json
import os
import pickle
import select
import stat
import struct
import sys
import time

FORGET, BATCH_FORGET, INTERRUPT, INIT, DESTROY = 2, 42, 36, 26, 38
LOOKUP, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, LINK = 1, 3, 4, 9, 10, 11, 12, 13
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH = 14, 15, 16, 17, 18, 20, 25
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, ACCESS, CREATE = 27, 28, 29, 30, 34, 35
FALLOCATE, RENAME2, TMPFILE = 43, 45, 51
BIG_WRITES, ASYNC_DIO, WRITEBACK_CACHE, MAX_PAGES = 1 << 5, 1 << 15, 1 << 16, 1 << 22
FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FATTR_SIZE, FATTR_MODE = 1, 1 << 1, 1 << 3, 1 << 0
WRITE_BYTES_MAX = 1 << 20
ROOT = 1
VALID_S = 3600  # nobody else changes anything
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


class Inode:
    def __init__(self, number, mode):
        self.number, self.mode = number, mode
        self.data, self.names = bytearray(), {}  # of a file; of a directory
        self.path = ""

    def is_directory(self):
        return stat.S_ISDIR(self.mode)


class Failure(Exception):
    def __init__(self, number):
        super().__init__(number)
        self.errno = number


class Server:
    def __init__(self, mount, log, buffered):
        self.open_flags = FOPEN_KEEP_CACHE if buffered else FOPEN_DIRECT_IO
        self.init_flags = BIG_WRITES | ASYNC_DIO | MAX_PAGES | (WRITEBACK_CACHE if buffered else 0)
        self.log = open(log, "wb", buffering=1 << 20)
        self.inodes = {ROOT: Inode(ROOT, stat.S_IFDIR | 0o755)}
        self.next_inode = ROOT + 1
        self.rules, self.hits = [], []
        self.later, self.serial = [], 0  # heap of (when, serial, act)
        self.held = []  # (description, act): hanging until released
        self.fd = os.open("/dev/fuse", os.O_RDWR)
        libc = ctypes.CDLL(None, use_errno=True)
        options = "fd=%d,rootmode=40755,user_id=%d,group_id=%d,allow_other" % (self.fd, os.getuid(), os.getgid())
        if libc.mount(b"mtlaunch-test", mount.encode(), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount -t fuse %s" % mount)

    def write_log(self, *event):
        pickle.dump(event, self.log, protocol=4)

    # -- answers --

    def reply(self, unique, data=b"", error=0):
        try:
            os.write(self.fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
        except OSError as e:
            if e.errno != errno.ENOENT:  # the request was interrupted meanwhile
                raise

    def attributes(self, inode):
        size = 4096 if inode.is_directory() else len(inode.data)
        return struct.pack("<6Q10I", inode.number, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, inode.mode,
                           1, os.getuid(), os.getgid(), 0, 4096, 0)

    def entry(self, inode):
        return struct.pack("<4QII", inode.number, 0, VALID_S, VALID_S, 0, 0) + self.attributes(inode)

    # -- the tree --

    def find(self, parent, name):
        try:
            return self.inodes[self.inodes[parent].names[name]]
        except KeyError:
            raise Failure(errno.ENOENT) from None

    def make(self, parent, name, mode):
        inode = Inode(self.next_inode, mode)
        self.next_inode += 1
        self.inodes[inode.number] = inode
        if name is not None:
            inode.path = "%s/%s" % (self.inodes[parent].path, name)
            self.inodes[parent].names[name] = inode.number
            self.write_log("create", parent, name, inode.number, inode.is_directory())
        return inode

    def set_size(self, inode, size):
        if size == len(inode.data):
            return
        if size < len(inode.data):
            del inode.data[size:]
        else:
            inode.data.extend(bytes(size - len(inode.data)))
        self.write_log("size", inode.number, size)

    # -- operations: each returns the answer's bytes --

    def on_lookup(self, node, body):
        return self.entry(self.find(node, body.rstrip(b"\0").decode()))

    def on_getattr(self, node, body):
        return struct.pack("<QII", VALID_S, 0, 0) + self.attributes(self.inodes[node])

    def on_setattr(self, node, body):
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        inode = self.inodes[node]
        if valid & FATTR_SIZE:
            self.set_size(inode, size)
        if valid & FATTR_MODE:
            mode, = struct.unpack_from("<I", body, 68)
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        return self.on_getattr(node, body)

    def on_mkdir(self, node, body):
        mode, _ = struct.unpack_from("<II", body)
        return self.entry(self.make(node, body[8:].rstrip(b"\0").decode(), stat.S_IFDIR | mode & 0o7777))

    def on_create(self, node, body):
        _, mode, _, _ = struct.unpack_from("<4I", body)
        inode = self.make(node, body[16:].rstrip(b"\0").decode(), stat.S_IFREG | mode & 0o7777)
        return self.entry(inode) + struct.pack("<QII", 0, self.open_flags, 0)

    def on_tmpfile(self, node, body):
        inode = self.make(node, None, stat.S_IFREG | 0o600)
        return self.entry(inode) + struct.pack("<QII", 0, self.open_flags, 0)

    def on_unlink(self, node, body):
        name = body.rstrip(b"\0").decode()
        self.find(node, name)
        del self.inodes[node].names[name]
        self.write_log("unlink", node, name)
        return b""

    def on_rmdir(self, node, body):
        if self.find(node, body.rstrip(b"\0").decode()).names:
            raise Failure(errno.ENOTEMPTY)
        return self.on_unlink(node, body)

    def move(self, node, new, names, flags):
        old_name, new_name = [n.decode() for n in names.split(b"\0")[:2]]
        inode = self.find(node, old_name)
        there = self.inodes[new].names.get(new_name)
        if flags & RENAME_EXCHANGE or (flags & RENAME_NOREPLACE and there is not None):
            raise Failure(errno.EINVAL if flags & RENAME_EXCHANGE else errno.EEXIST)
        if there is not None and self.inodes[there].names:
            raise Failure(errno.ENOTEMPTY)
        del self.inodes[node].names[old_name]
        self.inodes[new].names[new_name] = inode.number
        inode.path = "%s/%s" % (self.inodes[new].path, new_name)
        self.write_log("rename", node, old_name, new, new_name)
        return b""

    def on_rename(self, node, body):
        return self.move(node, struct.unpack_from("<Q", body)[0], body[8:], 0)

    def on_rename2(self, node, body):
        new, flags, _ = struct.unpack_from("<QII", body)
        return self.move(node, new, body[16:], flags)

    def on_link(self, node, body):
        old, = struct.unpack_from("<Q", body)
        name = body[8:].rstrip(b"\0").decode()
        if name in self.inodes[node].names:
            raise Failure(errno.EEXIST)
        self.inodes[node].names[name] = old
        self.write_log("link", node, name, old)
        return self.entry(self.inodes[old])

    def on_open(self, node, body):
        return struct.pack("<QII", 0, self.open_flags, 0)

    def on_opendir(self, node, body):
        return struct.pack("<QII", 0, 0, 0)

    def on_readdir(self, node, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        names = [(".", node), ("..", node)] + sorted(self.inodes[node].names.items())
        for i, (name, number) in list(enumerate(names))[offset:]:
            text = name.encode()
            record = struct.pack("<QQII", number, i + 1, len(text), self.inodes[number].mode >> 12) + text
            record += bytes(-len(record) % 8)
            if len(out) + len(record) > size:
                break
            out += record
        return out

    def on_read(self, node, body):
        _, offset, size, _, _, flags = struct.unpack_from("<QQIIQI", body)
        if flags & os.O_DIRECT and not self.open_flags & FOPEN_DIRECT_IO:
            raise Failure(errno.EINVAL)
        self.write_log("read", node, offset, size)
        return bytes(self.inodes[node].data[offset:offset + size])

    def on_write(self, node, body, keep=None):
        _, offset, size, _, _, flags, _ = struct.unpack_from("<QQIIQII", body)
        data = body[40:40 + size][:keep]
        inode = self.inodes[node]
        if offset + len(data) > len(inode.data):
            inode.data.extend(bytes(offset + len(data) - len(inode.data)))
        inode.data[offset:offset + len(data)] = data
        self.write_log("write", node, offset, data, bool(flags & os.O_DSYNC))
        return struct.pack("<II", len(data), 0)

    def on_fsync(self, node, body):
        self.write_log("fsync", node)
        return b""

    def on_fsyncdir(self, node, body):
        self.write_log("fsyncdir", node)
        return b""

    def on_fallocate(self, node, body):
        _, offset, length, mode, _ = struct.unpack_from("<QQQII", body)
        if mode:
            raise Failure(errno.EOPNOTSUPP)
        inode = self.inodes[node]
        self.set_size(inode, max(len(inode.data), offset + length))
        return b""

    def on_statfs(self, node, body):
        return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0, *[0] * 6)

    def on_nothing(self, node, body):
        return b""

    OPERATIONS = {
        LOOKUP: on_lookup, GETATTR: on_getattr, SETATTR: on_setattr, MKDIR: on_mkdir, UNLINK: on_unlink,
        RMDIR: on_rmdir, RENAME: on_rename, RENAME2: on_rename2, LINK: on_link, OPEN: on_open, READ: on_read,
        WRITE: on_write, STATFS: on_statfs, RELEASE: on_nothing, FSYNC: on_fsync, FLUSH: on_nothing,
        OPENDIR: on_opendir, READDIR: on_readdir, RELEASEDIR: on_nothing, FSYNCDIR: on_fsyncdir,
        ACCESS: on_nothing, CREATE: on_create, FALLOCATE: on_fallocate, TMPFILE: on_tmpfile,
    }

    # -- faults --

    def rule_for(self, op, node, body):
        hit = self.describe(op, node, body)
        for rule in self.rules:
            if rule["op"] != op or not hit["file"].endswith(rule["file"]):
                continue
            if "offset" in rule and not hit["offset"] <= rule["offset"] < hit["offset"] + hit["bytes"]:
                continue
            if rule.get("skip", 0) > 0:
                rule["skip"] -= 1
            elif rule.get("count", 1) != 0:
                rule["count"] = rule.get("count", 1) - 1
                return rule
        return None

    def describe(self, op, node, body):
        hit = {"op": op, "file": self.inodes[node].path}
        if op in ("read", "write"):
            _, hit["offset"], hit["bytes"] = struct.unpack_from("<QQI", body)
        return hit

    def treat(self, rule, op, unique, node, body):
        """Answers as the rule says."""
        self.hits.append(self.describe(op, node, body))
        act = rule["act"]
        if act == "error":
            self.reply(unique, error=rule["errno"])
        elif act == "short" and op == "write":
            self.reply(unique, self.on_write(node, body, rule["bytes"]))
        elif act == "short":
            self.reply(unique, self.on_read(node, body)[:rule["bytes"]])
        elif act == "lose":
            self.reply(unique, struct.pack("<II", struct.unpack_from("<QQI", body)[2], 0))
        elif act == "delay":
            self.serial += 1
            heapq.heappush(self.later, (time.monotonic() + rule["seconds"], self.serial,
                                        lambda: self.land_late(op, unique, node, body)))
        elif act == "hang":
            self.held.append(lambda: self.land_late(op, unique, node, body))
        else:
            raise ValueError("act: %s" % act)

    def land_late(self, op, unique, node, body):
        self.perform(op, unique, node, body)
        self.write_log("mark", "landed late")

    def perform(self, op, unique, node, body):
        function = {"read": self.on_read, "write": self.on_write, "fsync": self.on_fsync,
                    "fallocate": self.on_fallocate}[op]
        self.reply(unique, function(node, body))

    # -- the loop --

    def init_answer(self, read_ahead):
        # major, minor, read ahead, flags, background, congestion, write max, time granularity, pages, map
        return struct.pack("<4IHHIIHH", 7, 31, read_ahead, self.init_flags, 256, 192,
                           WRITE_BYTES_MAX, 1, WRITE_BYTES_MAX // 4096, 0) + bytes(32)

    def request(self, packet):
        length, code, unique, node, _, _, _, _ = struct.unpack_from("<IIQQIIII", packet)
        body = packet[40:length]
        if code in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        if code == INIT:
            self.reply(unique, self.init_answer(struct.unpack_from("<I", body, 8)[0]))
            return
        op = {READ: "read", WRITE: "write", FSYNC: "fsync", FALLOCATE: "fallocate"}.get(code)
        rule = self.rule_for(op, node, body) if op and self.rules else None
        if rule:
            self.treat(rule, op, unique, node, body)
            return
        function = self.OPERATIONS.get(code)
        try:
            if not function:
                raise Failure(errno.ENOSYS)
            answer = function(self, node, body)
        except Failure as e:
            self.reply(unique, error=e.errno)
        else:
            self.reply(unique, answer)

    def command(self, line):
        order = json.loads(line)
        answer = {}
        if order["do"] == "rules":
            self.rules, self.hits = order["rules"], []
        elif order["do"] == "hits":
            answer = {"hits": self.hits, "held": len(self.held), "later": len(self.later)}
        elif order["do"] == "mark":
            self.write_log("mark", order["text"])
        elif order["do"] == "release":
            held, self.held = self.held, []
            for act in held:
                act()
        elif order["do"] == "flush":
            self.log.flush()
        print(json.dumps(answer), flush=True)

    def serve(self):
        print("serving", flush=True)
        commands = b""
        while True:
            timeout = max(0, self.later[0][0] - time.monotonic()) if self.later else None
            ready, _, _ = select.select([self.fd, 0], [], [], timeout)
            while self.later and self.later[0][0] <= time.monotonic():
                heapq.heappop(self.later)[2]()
            if self.fd in ready:
                try:
                    packet = os.read(self.fd, WRITE_BYTES_MAX + 8192)
                except OSError as e:
                    if e.errno == errno.ENODEV:
                        return  # unmounted
                    if e.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                        raise
                else:
                    self.request(packet)
            if 0 in ready:
                more = os.read(0, 65536)
                if not more:
                    return
                commands += more
                *lines, commands = commands.split(b"\n")
                for line in lines:
                    self.command(line)


def main():
    server = Server(sys.argv[1], sys.argv[2], sys.argv[3:] == ["buffered"])
    try:
        server.serve()
    finally:
        server.log.close()


main()
