"""A run with a mark on it, so that whatever it leaves behind can be told from what others leave."""
import fcntl
import glob
import os
import time

from harness import check, equal, is_alive, shm_names, wait_until


def contact(run):
    """The socket directory of the live launcher, or None."""
    try:
        with open(os.path.join(run.dir, "run.lock")) as f:
            first = f.readline().strip()
        return os.path.dirname(first) or None
    except FileNotFoundError:
        return None


def marked(mark):
    """Processes that inherited this value in their environment."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as f:
                if mark.encode() in f.read():
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return [pid for pid in found if is_alive(pid)]


def is_unlocked(path):
    with open(path) as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False


class Trial:
    def __init__(self, run, env=None):
        self.run, self.env = run, env or {}
        self.mark = "mark-%d-%d" % (os.getpid(), time.monotonic_ns())
        self.launchers, self.sockets = [], set()
        self.shm_before = shm_names()  # may hold a name left by another program, with a process id that comes again

    def start(self, *overrides):
        live = self.run.start(*overrides, env=dict(self.env, TEST_MARK=self.mark))
        self.launchers.append(live.pid)
        return live

    def note_socket(self):
        directory = contact(self.run)
        if directory:
            self.sockets.add(directory)

    def marked(self):
        return marked(self.mark)

    def check_all_gone(self, seconds):
        wait_until(lambda: not self.marked(), seconds, "no process left, found %s" % self.marked())

    def check_nothing_left(self):
        self.check_all_gone(5)
        left = [d for d in self.sockets if os.path.exists(d)]
        check(not left, "left in /tmp: %s" % left)
        own = [n for n in shm_names() - self.shm_before if any("-%d-" % pid in n for pid in self.launchers)]
        check(not own, "left in /dev/shm: %s" % own)
        for path in [os.path.join(self.run.dir, "run.lock")] + glob.glob(self.run.dir + "/store/*"):
            # the kernel takes an io_uring down, and with it its hold on the files, after its process
            wait_until(lambda p=path: is_unlocked(p), 10, "%s is unlocked" % path)

    def check_files(self, undisturbed):
        """Names and sizes are those of a run that nobody disturbed."""
        equal(set(os.listdir(self.run.dir)), undisturbed.entries, "what lies in the run directory")
        equal(undisturbed.sizes(self.run), undisturbed.store, "files of the store")
        odd = [os.path.join(where, name) for where, folders, files in os.walk(self.run.dir)
               for name in folders + files if name.endswith((".tmp", ".new", ".before"))]
        check(not odd, "temporaries left: %s" % odd)
