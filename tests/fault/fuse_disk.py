"""The test's side of fuse_server.py: a mounted disk whose log can be read and whose requests can be made to fail."""
import contextlib
import errno
import json
import os
import pickle
import subprocess
import sys

from harness import check, skip, wait_until
from mounts import need_mounts

HERE = os.path.dirname(os.path.abspath(__file__))


class FuseDisk:
    def __init__(self, mount, log, buffered):
        self.mount, self.log_path = mount, log
        command = [sys.executable, "-u", os.path.join(HERE, "fuse_server.py"), mount, log]
        self.server = subprocess.Popen(command + (["buffered"] if buffered else []), stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        self.serving = self.server.stdout.readline() == "serving\n"

    def ask(self, **order):
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        line = self.server.stdout.readline()
        check(line, "the FUSE server died")
        return json.loads(line)

    def rules(self, *rules):
        self.ask(do="rules", rules=list(rules))

    def hits(self):
        """The requests that the rules caught: [{op, file, offset, bytes}]."""
        return self.ask(do="hits")["hits"]

    def held(self):
        return self.ask(do="hits")["held"]

    def wait_hit(self, n=1, timeout=60):
        wait_until(lambda: len(self.hits()) >= n, timeout, "a request that a rule catches")
        return self.hits()

    def release(self):
        self.ask(do="release")

    def mark(self, text):
        self.ask(do="mark", text=text)

    def log(self):
        """All events so far."""
        self.ask(do="flush")
        return read_log(self.log_path)

    def close(self):
        """Ends the server: whatever still hangs fails with ECONNABORTED."""
        with contextlib.suppress(BrokenPipeError):
            self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()


def read_log(path):
    events = []
    with open(path, "rb") as f:
        with contextlib.suppress(EOFError):
            while True:
                events.append(pickle.load(f))
    return events


@contextlib.contextmanager
def fuse_disk(directory, log=None, buffered=False):
    """A FuseDisk at `directory`, made if need be."""
    need_mounts()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        skip("/dev/fuse cannot be opened")
    os.makedirs(directory, exist_ok=True)
    disk = FuseDisk(directory, log or directory + ".log", buffered)
    try:
        if not disk.serving:
            skip("FUSE cannot be mounted here")
        yield disk
    finally:
        disk.close()
        subprocess.run(["umount", "-l", directory], stderr=subprocess.DEVNULL, check=False)


def error(op, file, number=errno.EIO, **more):
    return dict({"op": op, "file": file, "act": "error", "errno": number}, **more)
