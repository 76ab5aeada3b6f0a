"""Neighbours on the same machine: processes of the kinds that a shared server has, as many on each core as wanted.

    compress    what pbzip2 and its kin do: zlib, bz2 and lzma over blocks of text, without a pause
    build       what a parallel build does: short processes, each of which compiles some modules of Python's own library
    memory      what a copy or a scan of large data does: blocks that fit into no cache, copied to and fro

They may run on any of their cores, as a user's processes may. Each ends with its parent; what it started ends with it.
Run as a script, this file is one neighbour; it needs Python alone.
"""

import os
import select
import signal
import subprocess
import sys
from typing import Self

KINDS = ("compress", "build", "memory")
READY_S = 60.0  # longest time in which none starts
PR_SET_PDEATHSIG = 1
BLOCK = 900_000  # bytes, pbzip2's own
COPY = 32 << 20
MODULES = ("argparse", "ast", "datetime", "difflib", "inspect", "doctest", "tarfile", "typing")


class Neighbours:
    """Processes that keep cores busy, within a with block: per_core for each of the cores, on all of which they may run. kinds
    are dealt out in turn."""

    def __init__(self, kinds: tuple[str, ...], per_core: int, cores: tuple[int, ...]):
        self.kinds, self.cores = kinds, cores
        self.count = per_core * len(cores)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        ready, tell = os.pipe()
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self.cores or before)
            for i in range(self.count):
                command = [sys.executable, "-I", "-S", __file__, self.kinds[i % len(self.kinds)], str(tell)]
                self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(tell,), process_group=0))
            missing = self.count
            while missing:
                if not select.select([ready], [], [], READY_S)[0]:
                    raise TimeoutError(f"{missing} of {self.count} neighbours did not start within {READY_S:.0f} s")
                missing -= len(os.read(ready, missing))
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.sched_setaffinity(0, before)
            os.close(ready)
            os.close(tell)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes = []


def main() -> None:
    kind, tell = sys.argv[1], int(sys.argv[2])
    die_with_parent()
    with open(__file__, "rb") as file:
        text = file.read()
    block = (text * (BLOCK // len(text) + 1))[:BLOCK]
    os.write(tell, b"x")
    os.close(tell)
    {"compress": compress, "build": build, "memory": memory}[kind](block)


def compress(block: bytes) -> None:
    import bz2
    import lzma
    import zlib

    while True:
        zlib.compress(block, 6)
        bz2.compress(block)
        lzma.compress(block[: BLOCK // 4], preset=1)


def build(block: bytes) -> None:
    folder = os.path.dirname(os.__file__)
    paths = [os.path.join(folder, f"{name}.py") for name in MODULES]
    job = "import sys\nfor path in sys.argv[1:]:\n    compile(open(path, 'rb').read(), path, 'exec')\n"
    while True:
        subprocess.run([sys.executable, "-I", "-S", "-c", job, *paths], check=True)


def memory(block: bytes) -> None:
    here, there = memoryview(bytearray(COPY)), memoryview(bytearray(COPY))
    while True:
        here[:] = there
        there[:] = here


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
