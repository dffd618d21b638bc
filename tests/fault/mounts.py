"""Small file systems for tests, mounted in a namespace of the test program's own: nothing outlives it."""
import contextlib
import os
import subprocess
import sys

from harness import skip

NAMESPACE = "TEST_MOUNT_NAMESPACE"


def enter_namespace():
    """Starts this program again where it may mount, if the system lets it."""
    if NAMESPACE in os.environ:
        return
    for options in (["-m"], ["-r", "-m"]):
        command = ["unshare"] + options + ["--propagation", "private"]
        tried = subprocess.run(command + ["sh", "-c", "mount -t tmpfs none /mnt"], stderr=subprocess.DEVNULL)
        if tried.returncode == 0:
            os.environ[NAMESPACE] = "1"
            os.execvp("unshare", command + [sys.executable, "-u"] + sys.argv)
    os.environ[NAMESPACE] = ""


def need_mounts():
    if not os.environ.get(NAMESPACE):
        skip("this user may not mount, not even in a namespace of its own (unshare -r -m)")


def run_or_skip(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        skip("%s: %s" % (" ".join(command), done.stderr.strip()))
    return done.stdout.strip()


@contextlib.contextmanager
def loop_device(image, size, sector=512):
    """A block device over a new file, with sectors of this size."""
    need_mounts()
    with open(image, "wb") as f:
        f.truncate(size)
    device = run_or_skip("losetup", "--find", "--show", "--sector-size", str(sector), image)
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


@contextlib.contextmanager
def mounted(directory, size, kind="tmpfs", sector=512, options=""):
    """tmpfs or ext4 (over a loop device with this sector size) at `directory`, made if need be."""
    need_mounts()
    os.makedirs(directory, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if kind == "tmpfs":
            run_or_skip("mount", "-t", "tmpfs", "-o", "size=%d" % size, "none", directory)
        else:
            device = stack.enter_context(loop_device(directory + ".image", size, sector))
            run_or_skip("mkfs." + kind, "-q", "-F", "-m", "0", device)
            run_or_skip("mount", *(["-o", options] if options else []), device, directory)
        stack.callback(subprocess.run, ["umount", "-l", directory], check=True)
        yield directory


def fill(directory, leave=0):
    """A file that takes all the space but `leave` bytes."""
    path = os.path.join(directory, "ballast")
    with open(path, "wb", buffering=0) as f:
        for size in (65536, 512):
            with contextlib.suppress(OSError):
                while True:
                    f.write(b"x" * size)
    if leave:
        os.truncate(path, max(0, os.path.getsize(path) - leave))
    return path
