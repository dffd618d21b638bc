#!/usr/bin/env python3
"""mtlaunch scrub: finds a flipped bit wherever one matters, touches nothing, cries no wolf.

The layout of the store is read here in the test's own words, so that which slot a commit names is not
taken from the program under test.
"""
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *

STEPS = 12
SECTOR = 4096
PAGE_MAGIC_AT = 0
RING = 8
PARTS = ("weights", "residual", "first moment", "second moment")


# -- the store, read by the test --


class Superblock:
    def __init__(self, path):
        with open(path, "rb") as f:
            data = f.read(SECTOR)
        self.magic, _, self.state, _ = struct.unpack_from("<QIIQ", data)
        self.run = data[24:40]
        self.directory, self.n_directories, self.page_elements, self.n_pages = struct.unpack_from("<IIQQ", data, 56)


class Commit:
    """The commit file: records and the two tables."""

    def __init__(self, path, n_pages):
        with open(path, "rb") as f:
            self.data = f.read()
        self.path, self.n_pages = path, n_pages
        self.table_bytes = -(-(SECTOR + 128 * n_pages) // SECTOR) * SECTOR
        self.records_at = 2 * self.table_bytes
        equal(len(self.data), self.records_at + RING * SECTOR, "bytes of the commit file")

    def record(self, place):
        at = self.records_at + place * SECTOR
        magic, _, table_place = struct.unpack_from("<QII", self.data, at)
        sequence = struct.unpack_from("<Q", self.data, at + 48)[0]
        return (sequence, table_place) if magic else None

    def newest(self):
        """[(sequence, table place)] of the newest and the one before."""
        records = sorted(filter(None, (self.record(i) for i in range(RING))), reverse=True)
        return records[:2]

    def entries(self, table_place):
        """{page: (version, slot)}"""
        out = {}
        for i in range(self.n_pages):
            at = table_place * self.table_bytes + SECTOR + 128 * i
            page, version, _, slot = struct.unpack_from("<QQII", self.data, at)
            out[page] = (version, slot)
        return out


class Image:
    def __init__(self, path, offset, header):
        self.path, self.offset = path, offset
        self.page, self.version, _, self.codec, self.elements = struct.unpack_from("<QQIIQ", header, 32)
        self.lengths = struct.unpack_from("<4Q", header, 64)
        self.offsets = struct.unpack_from("<4Q", header, 96)

    def parts(self):
        """[(name, first byte, bytes)] of header, parts and gaps in the file."""
        out, at = [("header", self.offset, SECTOR)], SECTOR
        for name, offset, length in zip(PARTS, self.offsets, self.lengths):
            if length:
                if offset > at:
                    out.append(("gap before %s" % name, self.offset + at, offset - at))
                out.append((name, self.offset + offset, length))
                at = offset + length
        end = -(-at // SECTOR) * SECTOR
        if end > at:
            out.append(("gap at the end", self.offset + at, end - at))
        return out


def images_of(path, run_id):
    """Every page image in a slots file, in order."""
    with open(path, "rb") as f:
        data = f.read()
    magic, out = None, []
    for at in range(0, len(data), SECTOR):
        if data[at + 16:at + 32] != run_id:
            continue
        magic = magic or data[at:at + 8]
        if data[at:at + 8] == magic:
            out.append(Image(path, at, data[at:at + 256]))
    return out


class Store:
    def __init__(self, directories):
        self.directories = directories
        self.superblocks = [Superblock(os.path.join(d, "superblock")) for d in directories]
        first = self.superblocks[0]
        self.commit = Commit(os.path.join(directories[0], "commit"), first.n_pages)
        self.images = [i for d in directories for i in images_of(os.path.join(d, "slots"), first.run)]
        self.named = set()
        for _, place in self.commit.newest():
            self.named |= {(page, version) for page, (version, _) in self.commit.entries(place).items()}

    def is_named(self, image):
        return (image.page, image.version) in self.named


# -- flipping bits --


class Flipped:
    """One bit of a file inverted, and put back at the end."""

    def __init__(self, path, offset, bit):
        self.path, self.offset, self.bit = path, offset, bit

    def flip(self):
        with open(self.path, "r+b") as f:
            f.seek(self.offset)
            byte = f.read(1)[0]
            f.seek(self.offset)
            f.write(bytes([byte ^ 1 << self.bit]))

    def __enter__(self):
        self.flip()

    def __exit__(self, *_):
        self.flip()


def scrub(run, status=None):
    return mtlaunch("scrub", run.dir, status=status)


def found_at(result, path, first, length):
    """Is there a line on damage of this file between these bytes?"""
    for line in result.out.splitlines():
        match = re.match(re.escape(path) + r": offset (\d+): ", line)
        if match and first <= int(match.group(1)) < first + length:
            return True
    return False


def check_flip(t, run, path, first, length, what, needed, located=None):
    """A bit at random in [first, first + length): found, if a commit needs it."""
    at, bit = first + t.rng.randrange(length), t.rng.randrange(8)
    with Flipped(path, at, bit):
        result = scrub(run)
    said = "%s of %s, byte %d bit %d: %s" % (what, os.path.basename(path), at, bit, result)
    if needed:
        check(result.status == FAILED, "not found: " + said)
        # a part is named by its beginning, a header and a table's entries by what holds them
        begin = located if located is not None else first - first % SECTOR
        check(found_at(result, path, begin, first + length - begin), "not located: " + said)
    else:
        check(result.status == DONE, "what no commit names is no damage: " + said)


def trained(t, name="run", steps=STEPS, stores=1, **changes):
    sections = {"training": {"steps": steps}, "memory": {"page_elements": 4096}}
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    if stores > 1:
        sections["memory"]["offload_dir"] = [os.path.join(t.dir, "%s-disk%d" % (name, i)) for i in range(stores)]
    run = tiny_run(t.dir, name, **sections)
    run.ok()
    run.stores = sections["memory"].get("offload_dir") or [os.path.join(run.dir, "store")]
    return run


@test
def a_flipped_bit_in_the_commit_file_or_a_superblock_is_found(t):
    run = trained(t, stores=2)
    store = Store(run.stores)
    commit = store.commit
    before = [tree(d) for d in run.stores + [run.dir]]
    check("whole" in scrub(run, DONE).out, "a whole run")
    for directory in run.stores:
        for copy in range(2):
            path = os.path.join(directory, "superblock")
            check_flip(t, run, path, copy * SECTOR, 600, "fields of superblock copy %d" % copy, True)
            check_flip(t, run, path, copy * SECTOR + 600, SECTOR - 600, "rest of superblock copy %d" % copy, True)
    for place in range(RING):
        at = commit.records_at + place * SECTOR
        check_flip(t, run, commit.path, at, 256, "fields of record %d" % place, True)
        check_flip(t, run, commit.path, at + 256, SECTOR - 256, "rest of record %d" % place, True)
    for place in range(2):
        at = place * commit.table_bytes
        check_flip(t, run, commit.path, at, SECTOR, "header of table %d" % place, True)
        check_flip(t, run, commit.path, at + SECTOR, 128 * commit.n_pages, "entries of table %d" % place, True, at)
        end = SECTOR + 128 * commit.n_pages
        if end < commit.table_bytes:
            check_flip(t, run, commit.path, at + end, commit.table_bytes - end, "padding of table %d" % place, True, at)
    equal([tree(d) for d in run.stores + [run.dir]], before, "files after all flips")


def flip_in_slots(t, dtype):
    run = trained(t, "run-" + dtype, model={"dtype": dtype})
    store = Store(run.stores)
    pages = store.commit.n_pages
    check(len(store.images) > 2 * pages, "%d images of %d pages" % (len(store.images), pages))
    equal(sum(map(store.is_named, store.images)), 2 * pages, "images that the two newest commits name")
    # the first, the last and some pages, each with its three slots
    chosen = {0, pages - 1} | set(t.rng.sample(range(pages), 2))
    n = [0, 0]
    for image in store.images:
        if image.page not in chosen:
            continue
        needed = store.is_named(image)
        for what, first, length in image.parts():
            if needed or what in ("header", "weights"):
                check_flip(t, run, image.path, first, length, "%s of page %d" % (what, image.page), needed)
                n[needed] += 1
    t.note("%s: %d flips in slots that a commit names, all found; %d in others" % (dtype, n[1], n[0]))
    equal(scrub(run, DONE).out.count("damaged places: 0"), 1, "after all flips")


@test
def float32_any_part_of_a_named_slot_is_verified(t):
    flip_in_slots(t, "float32")


@test
def bfloat16_any_part_of_a_named_slot_is_verified(t):
    flip_in_slots(t, "bfloat16")


@test
def many_damages_are_told_one_by_one(t):
    run = trained(t)
    store = Store(run.stores)
    wanted = [i for i in store.images if store.is_named(i)]
    for image in wanted:
        Flipped(image.path, image.offset + SECTOR + 5, 3).flip()
    result = scrub(run, FAILED)
    lines = [line for line in result.out.splitlines() if ": offset " in line]
    for image in wanted:
        check(found_at(result, image.path, image.offset, SECTOR + 1), "page %d, version %d: %s" % (
            image.page, image.version, result))
    equal(len(lines), len(wanted), "lines")
    check(all("expected" in line and "found" in line for line in lines), "expected and found: %s" % lines[:3])
    check("damaged places: %d" % len(wanted) in result.out, result.out[-500:])
    check("no commit can be resumed" in result.err, result.err)


# -- what it means --


@test
def damage_in_the_newest_commit_leaves_the_one_before(t):
    """And a resume does go back to it, and comes to the same bits."""
    whole = trained(t, "whole")
    run = tiny_run(t.dir, "run", training={"steps": STEPS}, memory={"page_elements": 4096})
    run.ok("--run.stop_after_step=8", status=STOPPED)
    store = Store([os.path.join(run.dir, "store")])
    newest = store.commit.entries(store.commit.newest()[0][1])
    image = next(i for i in store.images if i.page == 3 and i.version == newest[3][0])
    Flipped(image.path, image.offset + SECTOR, 0).flip()
    result = scrub(run, FAILED)
    check("newest commit: step 8, damaged" in result.out, result.out)
    check("the commit before it: step 7, whole" in result.out, result.out)
    check("the commit of step 7 is whole: a resume goes on from there" in result.err, result.err)
    run.ok()
    equal(run.hashes(), whole.hashes(), "hashes after the resume")
    check("whole" in scrub(run, DONE).out, "after the resume")


@test
def damage_in_the_commit_before_leaves_the_newest(t):
    run = trained(t)
    store = Store(run.stores)
    parent = store.commit.entries(store.commit.newest()[1][1])
    image = next(i for i in store.images if i.page == 3 and i.version == parent[3][0])
    with Flipped(image.path, image.offset + SECTOR, 0):
        result = scrub(run, FAILED)
    check("step %d, whole" % STEPS in result.out and "step %d, damaged" % (STEPS - 1) in result.out, result.out)
    check("the commit of step %d is whole" % STEPS in result.err, result.err)


@test
def lost_writes_are_found(t):
    """Old bytes that are whole in themselves, where newer ones belong."""
    run = tiny_run(t.dir, training={"steps": STEPS}, memory={"page_elements": 4096})
    run.ok("--run.stop_after_step=3", status=STOPPED)
    commit_path = os.path.join(run.dir, "store", "commit")
    with open(commit_path, "rb") as f:
        old = f.read()
    run.ok()
    store = Store([os.path.join(run.dir, "store")])
    commit = store.commit
    with open(commit_path, "rb") as f:
        new = f.read()

    def with_bytes(path, at, data, said):
        with open(path, "r+b") as f:
            f.seek(at)
            kept = f.read(len(data))
            f.seek(at)
            f.write(data)
        result = scrub(run, FAILED)
        check(re.search(said, result.out), "expected %r: %s" % (said, result))
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(kept)

    at = commit.records_at + 2 * SECTOR  # sequence 10; once 2
    with_bytes(commit_path, at, old[at:at + SECTOR], r"expected sequence 10, found 2: a write was lost")
    with_bytes(commit_path, at, bytes(SECTOR), r"expected sequence 10, found zeros")
    place = commit.newest()[0][1]
    with_bytes(commit_path, place * commit.table_bytes, old[place * commit.table_bytes:][:commit.table_bytes],
               r"digest table")
    newest = commit.entries(place)
    slots = os.path.join(run.dir, "store", "slots")
    current = next(i for i in store.images if i.page == 1 and i.version == newest[1][0])
    older = next(i for i in store.images if i.page == 1 and not store.is_named(i))
    with open(slots, "rb") as f:
        f.seek(older.offset)
        stale = f.read(current.parts()[-1][1] + current.parts()[-1][2] - current.offset)
    with_bytes(slots, current.offset, stale, r"version: expected %d, found %d" % (current.version, older.version))
    other = next(i for i in store.images if i.page == 2 and i.elements == current.elements)
    with open(slots, "rb") as f:
        f.seek(other.offset)
        misdirected = f.read(len(stale))
    with_bytes(slots, current.offset, misdirected, r"page: expected 1, found 2")
    with open(commit_path, "rb") as f:
        equal(f.read(), new, "the commit file afterwards")
    scrub(run, DONE)


@test
def files_that_are_missing_or_of_another_size_are_named(t):
    run = trained(t)
    for name in ("superblock", "slots", "commit"):
        path = os.path.join(run.dir, "store", name)
        os.rename(path, path + ".away")
        result = scrub(run)
        check(result.status == FAILED, "%s is missing: %s" % (name, result))
        check((path if name != "superblock" else "no commit yet") in result.out, "%s is missing: %s" % (name, result))
        os.rename(path + ".away", path)
        size = os.path.getsize(path)
        shutil.copy(path, path + ".whole")
        for other in (size - SECTOR, 0):
            os.truncate(path, other)
            result = scrub(run, FAILED)
            check(path in result.out, "%s of %d bytes: %s" % (name, other, result))
        os.rename(path + ".whole", path)
    scrub(run, DONE)


# -- the run directory --


@test
def metrics_that_do_not_fit_the_newest_commit_are_found(t):
    run = trained(t)
    with open(run.metrics_path) as f:
        lines = f.read().splitlines(True)
    index = [i for i, line in enumerate(lines) if line.startswith('{"step"')]

    def with_lines(changed, said, status=FAILED):
        with open(run.metrics_path, "w") as f:
            f.write("".join(changed))
        result = scrub(run, status)
        check(re.search(said, result.out), "expected %r: %s" % (said, result))

    last, middle = index[-1], index[4]
    with_lines(lines[:middle] + lines[middle + 1:], r"expected the line of step 5, found step 6")
    with_lines(lines[:middle] + [lines[middle]] + lines[middle:], r"expected the line of step 6, found step 5")
    with_lines(lines[:last], r"expected lines up to step %d, found none after step %d" % (STEPS, STEPS - 1))
    digit = lines[last].index('"state_hash": "') + 20
    other = "0" if lines[last][digit] != "0" else "1"
    with_lines(lines[:last] + [lines[last][:digit] + other + lines[last][digit + 1:]] + lines[last + 1:],
               r"state_hash of step %d: expected" % STEPS)
    for broken in ('"', "{", ":", "\0", "\x1b"):
        text = lines[middle][:9] + broken + lines[middle][9:]
        with_lines(lines[:middle] + [text] + lines[middle + 1:], r"metrics.jsonl: offset %d: " % len("".join(lines[:middle])))
    # what a launcher that was killed leaves, and the next start cuts
    torn = lines[last].replace('"step": %d' % STEPS, '"step": %d' % (STEPS + 1))
    with_lines(lines + [torn], "damaged places: 0", DONE)
    with_lines(lines + [torn, torn[:50]], "damaged places: 0", DONE)
    with_lines(lines, "damaged places: 0", DONE)
    os.rename(run.metrics_path, run.metrics_path + ".away")
    check("No such file" in scrub(run, FAILED).out, "no metrics.jsonl")


@test
def a_damaged_identity_or_configuration_is_found(t):
    run = trained(t)
    for name, old, new, said in (("run.id", None, "zz" * 16, "32 hexadecimal digits"),
                                 ("run.id", None, "00" * 16, "store of another run"),
                                 ("config.toml", "seq_len = 32", "seq_len = 33", "determine bits"),
                                 ("config.toml", "[training]", "[trainin\x07]", "config.toml"),
                                 ("config.toml", "[training]", "[tr\x1b]", r"\x1b")):
        path = os.path.join(run.dir, name)
        with open(path) as f:
            text = f.read()
        changed = new if old is None else text.replace(old, new)
        check(changed != text, "nothing to change in " + name)
        with open(path, "w") as f:
            f.write(changed)
        result = scrub(run)
        # TOML's reader refuses the control byte and names it; whatever it says, none gets through
        check(result.status == FAILED, "%s: %s" % (name, result))
        check("\x1b" not in result.out + result.err and "\x07" not in result.out + result.err, "a control byte")
        check(said in result.out or said == r"\x1b", "%s: expected %r: %s" % (name, said, result))
        with open(path, "w") as f:
            f.write(text)
    scrub(run, DONE)


# -- it touches nothing, and nobody is in its way --


def stamps(*directories):
    out = {}
    for directory in directories:
        for folder, _, files in os.walk(directory):
            for name in files:
                st = os.stat(os.path.join(folder, name))
                out[os.path.join(folder, name)] = (st.st_mode, st.st_size, st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns)
    return out


@test
def nothing_is_touched(t):
    run = trained(t, stores=2)
    content = tree(t.dir)
    long_ago = time.time() - 30 * 86400  # with relatime any read would move an access time this old
    for folder, _, files in os.walk(t.dir):
        for name in files:
            os.utime(os.path.join(folder, name), (long_ago, long_ago - 86400))
    before = stamps(run.dir, *run.stores)
    scrub(run, DONE)
    equal(stamps(run.dir, *run.stores), before, "modes, sizes and times")
    os.unlink(os.path.join(run.dir, "run.lock"))
    os.unlink(os.path.join(run.stores[0], "run.lock"))
    before = stamps(run.dir, *run.stores)
    scrub(run, DONE)
    equal(stamps(run.dir, *run.stores), before, "without lock files: none is made")
    after = tree(t.dir)
    equal({k: v for k, v in content.items() if not k.endswith("run.lock")},
          {k: v for k, v in after.items() if not k.endswith("run.lock")}, "content")


@test
def a_read_only_file_system_is_enough(t):
    run = trained(t)
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && ! touch "$1/x" 2>/dev/null && exec "$2" scrub "$1"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", run.dir, MTLAUNCH]
    probe = subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL)
    if probe.returncode != 0:
        skip("this user may not mount")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    equal(done.returncode, DONE, "status: %s%s" % (done.stdout, done.stderr))
    check("damaged places: 0" in done.stdout, done.stdout)


@test
def a_live_run_is_refused_and_a_scrub_is_not_disturbed(t):
    run = tiny_run(t.dir, training={"steps": 100000}, memory={"page_elements": 4096})
    with run.start() as live:
        live.wait_committed(2)
        result = scrub(run, BUSY)
        check("process %d" % live.pid in result.err, "who holds it: %s" % result)
        check(live.running(), "the run has ended")
        live.signal(signal.SIGTERM)
        equal(live.wait(10), STOPPED, "status")
    with Background(run, ["scrub", run.dir]) as live:
        live.signal(signal.SIGSTOP)
        lock = os.path.join(run.dir, "run.lock")
        fd = os.open(lock, os.O_RDONLY)
        held = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        os.close(fd)
        if held:  # else it was stopped before it came that far, or was done
            result = run.ok(status=BUSY)
            check("process %d" % live.pid in result.err, "who holds it: %s" % result)
        t.note("the start met the scrub's lock: %s" % held)
        live.signal(signal.SIGCONT)
        equal(live.wait(10), DONE, "status: %s" % live.output())


@test
def a_killed_run_is_not_called_damaged(t):
    """Kills at random moments leave steps half written; what a commit needs is whole all the same."""
    run = tiny_run(t.dir, training={"steps": 100000}, memory={"page_elements": 4096})
    for _ in range(8):
        with run.start() as live:
            live.wait_committed(1)
            base = max(line["step"] for line in run.lines(tolerant=True) if "event" not in line)
            live.wait_committed(base + 1 + t.rng.randrange(3))
            time.sleep(t.rng.random() * 0.03)
            workers = [pid for pid, _ in live.children()]
            live.signal(signal.SIGKILL)
            live.wait(10)
            wait_until(lambda: not any(is_alive(p) for p in workers), 5, "the workers are gone")
        scrub(run, DONE)


@test
def a_commit_whose_place_was_being_taken_is_not_called_damaged(t):
    """The table's place by the next commit; its slots by the first step after a resume."""
    run = tiny_run(t.dir, training={"steps": 100000}, memory={"page_elements": 4096})
    for fault in ("io_before_record:stop:6", "opt_mid_apply:stop:20"):
        once = os.path.join(t.dir, fault.split(":")[0])
        with run.start(env={"MTLAUNCH_FAULT": fault, "MTLAUNCH_FAULT_ONCE": once}) as live:
            live.wait_for(lambda: os.path.exists(once), "the fault point")
            time.sleep(0.3)
            workers = [pid for pid, _ in live.children()]
            live.signal(signal.SIGKILL)
            live.wait(10)
            wait_until(lambda: not any(is_alive(p) for p in workers), 5, "the workers are gone")
        result = scrub(run, DONE)
        check(re.search(r"newest commit: step \d+, whole\nthe commit before it: step \d+, given up", result.out),
              "%s: %s" % (fault, result))
    run.ok("--run.stop_after_step=20", status=STOPPED)
    check("given up" not in scrub(run, DONE).out, "after the next start")


@test
def a_run_without_a_store_is_the_users_affair(t):
    check("not a run directory" in mtlaunch("scrub", t.dir, status=USER).err, "no run there")
    mtlaunch("scrub", os.path.join(t.dir, "nowhere"), status=USER)
    mtlaunch("scrub", status=USER)


main()
