"""C helpers of the fault tests, linked with the libraries of the build under test."""
import atexit
import os
import shutil
import subprocess
import tempfile

from harness import MTLAUNCH, ROOT

LIBRARIES = ("io_worker", "ipc", "model", "procs")
SYSTEM = ["-luring", "-lzmq", "-lmsgpackc", "-ljansson", "-lxxhash", "-lm", "-ldl", "-lpthread"]
_programs = {}


def program(name):
    """The path of tests/fault/NAME.c as a program, compiled once per test program."""
    if name not in _programs:
        directory = tempfile.mkdtemp(prefix="mt-helper-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        path = os.path.join(directory, name)
        build = os.path.dirname(os.path.dirname(os.path.realpath(MTLAUNCH)))
        libraries = [os.path.join(build, "lib%s.a" % n) for n in LIBRARIES]
        subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-I.", "-o", path, "tests/fault/%s.c" % name] +
                       libraries + SYSTEM, cwd=ROOT, check=True)
        _programs[name] = path
    return _programs[name]
