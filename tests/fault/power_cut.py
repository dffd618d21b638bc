"""What would be on the disk had the power failed: built from the log of fuse_server.py, and judged.

The disk of this model promises what POSIX and a drive do, and no more:

- written data is on it for certain only after fsync or fdatasync of that file, or when it was written
  through O_DSYNC; before that any 512-byte sector of it may be old or new, whatever came before or after
- a name is on it for certain only after fsync of its directory; before that, directories come back as
  they were after some earlier operation on them

An image is one possible disk after the first n events. Recovery of each must find a commit that is
the undisturbed run's of that step, bit for bit, and no older than the newest that was durable by then.
"""
import os
import re
import struct
import subprocess

from harness import check
from helpers import program

SECTOR = 512
RECORD_MAGIC = struct.pack("<Q", 0x3144524f43454d4d)
RECORD_STEP_AT = 112  # struct commit_record: facts.step
HONEST, LYING = "honest", "lying"  # a lying drive answers a flush and does nothing


class File:
    def __init__(self):
        self.durable = bytearray()
        self.pending = []  # ("size", bytes) and ("write", offset, data), since the last flush

    def flush(self):
        for change in self.pending:
            apply(self.durable, change)
        self.pending = []


class Directory:
    def __init__(self):
        self.durable = {}  # name -> inode
        self.pending = []  # ("set", name, inode), ("drop", name) and ("move", name, new_name, inode)

    def names(self, n_pending):
        names = dict(self.durable)
        for change in self.pending[:n_pending]:
            if change[0] == "set":
                names[change[1]] = change[2]
            else:
                names.pop(change[1], None)
            if change[0] == "move":
                names[change[2]] = change[3]
        return names

    def flush(self):
        self.durable = self.names(len(self.pending))
        self.pending = []


def apply(content, change):
    if change[0] == "size":
        size = change[1]
        del content[size:]
        content.extend(bytes(size - len(content)))
    else:
        _, offset, data = change
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset:offset + len(data)] = data


def sectors_of(change, chosen):
    """The changes that are left of a write of which only some sectors came through."""
    if change[0] == "size":
        return [change] if chosen() else []
    _, offset, data = change
    parts, at = [], 0
    while at < len(data):
        n = min(len(data) - at, SECTOR - (offset + at) % SECTOR)
        if chosen():
            parts.append(("write", offset + at, data[at:at + n]))
        at += n
    return parts


class Disk:
    """The disk after some events of the log."""

    def __init__(self, drive=HONEST):
        self.drive = drive
        self.files, self.directories = {}, {1: Directory()}
        self.current = {1: {}}  # directory -> names as users see them
        self.last = None  # the last event

    def play(self, event):
        kind, rest = event[0], event[1:]
        self.last = event
        getattr(self, "play_" + kind)(*rest)

    def set_name(self, parent, name, inode):
        self.current[parent][name] = inode
        self.directories[parent].pending.append(("set", name, inode))

    def drop_name(self, parent, name):
        del self.current[parent][name]
        self.directories[parent].pending.append(("drop", name))

    def play_create(self, parent, name, inode, is_directory):
        if is_directory:
            self.directories[inode], self.current[inode] = Directory(), {}
        else:
            self.files[inode] = File()
        self.set_name(parent, name, inode)

    def play_link(self, parent, name, inode):
        self.set_name(parent, name, inode)

    def play_unlink(self, parent, name):
        self.drop_name(parent, name)

    def play_rename(self, parent, name, new_parent, new_name):
        inode = self.current[parent][name]
        del self.current[parent][name]
        self.current[new_parent][new_name] = inode
        check(parent == new_parent, "this model has no order for a rename across directories")
        self.directories[parent].pending.append(("move", name, new_name, inode))

    def play_size(self, inode, size):
        if inode in self.files:
            self.files[inode].pending.append(("size", size))

    def play_write(self, inode, offset, data, dsync):
        file = self.files.get(inode)
        if file is None:
            return  # a nameless file
        change = ("write", offset, data)
        if not dsync or self.drive == LYING:
            file.pending.append(change)
            return
        for other in file.pending:
            check(other[0] == "size" or other[1] >= offset + len(data) or other[1] + len(other[2]) <= offset,
                  "a write through O_DSYNC over one that is not flushed: this model has no order for them")
        for other in [c for c in file.pending if c[0] == "size"]:
            apply(file.durable, other)
        file.pending = [c for c in file.pending if c[0] != "size"]
        apply(file.durable, change)

    def play_fsync(self, inode):
        if inode in self.files and self.drive == HONEST:
            self.files[inode].flush()

    def play_fsyncdir(self, inode):
        if self.drive == HONEST:
            self.directories[inode].flush()

    def play_mark(self, text):
        pass

    def play_read(self, inode, offset, size):
        pass

    def unflushed(self):
        return sum(len(f.pending) for f in self.files.values()) + sum(
            len(d.pending) for d in self.directories.values())

    # -- images: {path: content}, directories as None --

    def image(self, content_of, names_of):
        out = {}

        def walk(path, inode):
            for name, child in sorted(names_of(self.directories[inode]).items()):
                below = path + "/" + name
                if child in self.directories:
                    out[below[1:]] = None
                    walk(below, child)
                else:
                    out[below[1:]] = content_of(self.files[child])

        walk("", 1)
        return out

    def everything(self):
        """All that was written arrived."""
        return self.image(lambda f: self.content(f, f.pending), lambda d: d.names(len(d.pending)))

    def only_flushed(self):
        """Nothing that was not flushed arrived, names included."""
        return self.image(lambda f: bytes(f.durable), lambda d: d.durable)

    def names_only(self):
        """A journal kept the names, the data were lost."""
        return self.image(lambda f: bytes(f.durable), lambda d: d.names(len(d.pending)))

    def some_writes(self, rng):
        """Whole writes came through or not, in any order."""
        return self.image(lambda f: self.content(f, [c for c in f.pending if rng.random() < 0.5]),
                          lambda d: d.names(rng.randint(0, len(d.pending))))

    def some_sectors(self, rng):
        """Each sector for itself."""
        share = rng.choice((0.1, 0.5, 0.9, 0.99))

        def content(f):
            parts = [p for c in f.pending for p in sectors_of(c, lambda: rng.random() < share)]
            return self.content(f, parts)
        return self.image(content, lambda d: d.names(rng.randint(0, len(d.pending))))

    def last_torn(self, rng):
        """All arrived but the last write's end: torn at a sector."""
        if self.last[0] != "write":
            return None
        inode, offset, data = self.last[1:4]
        keep = rng.randrange(max(1, len(data) // SECTOR)) * SECTOR
        file = self.files.get(inode)
        if file is None or file.pending[-1:] != [("write", offset, data)]:
            return None
        torn = file.pending[:-1] + [("write", offset, data[:keep])]
        return self.image(lambda f: self.content(f, torn if f is file else f.pending),
                          lambda d: d.names(len(d.pending)))

    @staticmethod
    def content(file, changes):
        content = bytearray(file.durable)
        for change in changes:
            apply(content, change)
        return bytes(content)


def torn_in_flight(before, event, rng):
    """A write through O_DSYNC that was cut off: the disk before it, and some of its sectors."""
    if event[0] != "write" or not event[4] or before.files.get(event[1]) is None:
        return None
    change = ("write", event[2], event[3])
    keep = rng.randrange(max(1, len(event[3]) // SECTOR)) * SECTOR
    file = before.files[event[1]]
    parts = [("write", event[2], event[3][:keep])] if rng.random() < 0.5 else sectors_of(
        change, lambda: rng.random() < 0.5)
    return before.image(lambda f: Disk.content(f, f.pending + (parts if f is file else [])),
                        lambda d: d.names(len(d.pending)))


def images(disk, rng, repeats):
    """[(name, image)] of the disk as it may be found now."""
    out = [("everything", disk.everything())]
    if not disk.unflushed():
        return out
    out += [("only_flushed", disk.only_flushed()), ("names_only", disk.names_only())]
    for _ in range(repeats):
        out += [("some_writes", disk.some_writes(rng)), ("some_sectors", disk.some_sectors(rng))]
    torn = disk.last_torn(rng)
    return out + ([("last_torn", torn)] if torn else [])


# -- what must be found --


def record_step(event):
    """The step that this write commits, or None: a record is one 4 KiB write with a magic number."""
    if event[0] != "write" or len(event[3]) != 4096 or event[3][:8] != RECORD_MAGIC:
        return None
    return struct.unpack_from("<Q", event[3], RECORD_STEP_AT)[0]


class Recovery:
    """recover.c as a server."""

    def __init__(self, where, options):
        self.where, self.stores = where, options["stores"]
        os.makedirs(where, exist_ok=True)
        command = [program("recover"), options["model"], str(options["page_elements"]), options["dtype"],
                   str(options["slots"]), options["run_id"]]
        command += [os.path.join(where, s.replace("/", "+")) for s in self.stores]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.written = {}

    def put(self, image):
        """The stores of the image into the directories; what lies there already is not written again."""
        wanted = {}
        for store in self.stores:
            for path, content in image.items():
                if path.startswith(store + "/") and content is not None:
                    wanted[os.path.join(self.where, store.replace("/", "+"), path[len(store) + 1:])] = content
        for path in [p for p in self.written if p not in wanted]:
            os.unlink(path)
            del self.written[path]
        for path, content in wanted.items():
            if self.written.get(path) != content:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as f:
                    f.write(content)
                self.written[path] = content

    def ask(self, image):
        """("commit", step, hash, fell_back), ("none", state) or ("error", text)."""
        self.put(image)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        kind, _, rest = self.process.stdout.readline().rstrip("\n").partition(" ")
        if kind == "commit":
            step, state, fell_back = rest.split()
            return kind, int(step), state, int(fell_back)
        check(kind in ("none", "error"), "recover died at this image: %r" % kind)
        return kind, rest

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


class Expected:
    """What the undisturbed run says, and what the disk must keep."""

    def __init__(self, hashes, run_id, run="run"):
        self.hashes, self.run_id, self.run = hashes, run_id, run
        self.exports = {}  # {path: content}, as they are at the end
        self.durable = self.newest = None  # steps: record surely on disk; record written at all

    def violation(self, found, image):
        """None, or what is wrong with what recovery found in this image."""
        if found[0] == "error":
            return "recovery failed: %s" % found[1]
        if found[0] == "none":  # step 0 is the import: the start that had not ended is simply done again
            return "begins anew, though step %d was committed" % self.durable if self.durable else None
        _, step, state, fell_back = found
        if state != self.hashes[step]:
            return "step %d has state %s, undisturbed %s" % (step, state, self.hashes[step])
        if self.durable is not None and step < self.durable:
            return "found step %d, though step %d was committed" % (step, self.durable)
        if self.newest is None or step > self.newest:
            return "found step %d, which was never written" % step
        if fell_back:
            return "commit %d did not verify after an honest flush" % fell_back
        return self.run_directory_violation(step, image)

    def run_directory_violation(self, step, image):
        """Identity, configuration and step lines of what was committed."""
        run = self.run
        if image.get(run + "/run.id", b"").decode().strip() != self.run_id:
            return "run.id is %r" % image.get(run + "/run.id")
        if b"[memory]" not in image.get(run + "/config.toml", b""):
            return "config.toml is %r..." % image.get(run + "/config.toml", b"")[:40]
        lines = re.findall(rb'^\{"step": (\d+), .*\}$', image.get(run + "/metrics.jsonl", b""), re.M)
        missing = set(range(1, step + 1)) - {int(n) for n in lines}
        if missing:
            return "metrics.jsonl lacks step %s" % sorted(missing)
        return self.export_violation(image)

    def export_violation(self, image):
        """An export is whole or absent."""
        for folder in {os.path.dirname(p) for p in self.exports}:
            if folder not in image:
                continue
            for path, content in self.exports.items():
                if os.path.dirname(path) == folder and image.get(path) != content:
                    return "%s is there, but not as it was written" % path
        return None


def changes(events):
    return [e for e in events if e[0] not in ("read", "mark")]


def sweep(events, recovery, expected, rng, repeats=1, drive=HONEST, keep_image=None, first=0):
    """Every prefix of the events from the `first` on, in every variant. Returns counts and the violations.

    keep_image(number, image, found) sees each image that stands."""
    events = changes(events)
    disk = Disk(drive)
    for event in events[:first]:
        disk.play(event)
    counts = {"events": len(events) - first, "writes": 0, "flushes": 0, "images": 0}
    violations = []

    def judge(number, name, image):
        counts["images"] += 1
        found = recovery.ask(image)
        wrong = expected.violation(found, image)
        if wrong:
            violations.append("after event %d %s, %s: %s" % (number, describe(events[number - 1]), name, wrong))
        elif keep_image:
            keep_image(number, image, found)

    for number, event in list(enumerate(events, 1))[first:]:
        torn = torn_in_flight(disk, event, rng)
        step = record_step(event)
        if torn:
            expected.newest = step if step is not None else expected.newest
            judge(number, "torn in flight", torn)
        disk.play(event)
        counts["writes"] += event[0] == "write"
        counts["flushes"] += event[0] in ("fsync", "fsyncdir") or event[0] == "write" and event[4]
        if step is not None:
            expected.durable = expected.newest = step
        for name, image in images(disk, rng, repeats):
            judge(number, name, image)
    return counts, violations


def describe(event):
    return "(%s)" % " ".join("%d bytes" % len(v) if isinstance(v, bytes) else str(v) for v in event)


def restore(image, directory):
    """The whole image as files below the directory, durable."""
    for path, content in sorted(image.items()):
        whole = os.path.join(directory, path)
        os.makedirs(whole if content is None else os.path.dirname(whole), exist_ok=True)
        if content is not None:
            with open(whole, "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
    for folder, _, _ in os.walk(directory):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
