"""Neighbours on the same machine: processes of the kinds that a shared server has, as many on each core as wanted.

    compress    what pbzip2 and its kin do: zlib, bz2 and lzma over blocks of text, without a pause
    build       what a parallel build does: short processes, each of which compiles some modules of Python's own library
    memory      what a copy or a scan of large data does: blocks that fit into no cache, copied to and fro

Each counts what it got done, in units of its kind: megabytes, files, gigabytes. So a result says what a server leaves its
neighbours.

They may run on any of their cores, as a user's processes may. Each ends with its parent; what it started ends with it.
Run as a script, this file is one neighbour; it needs Python alone.
"""

import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Self

KINDS = ("compress", "build", "memory")
UNITS = {"compress": "MB", "build": "files", "memory": "GB"}
READY_S = 60.0  # longest time in which none starts
PR_SET_PDEATHSIG = 1
BLOCK = 900_000  # bytes, pbzip2's own
COPY = 32 << 20
MODULES = ("argparse", "ast", "datetime", "difflib", "inspect", "doctest", "tarfile", "typing")


class Neighbours:
    """Processes that keep cores busy within a with block: per_core for each core, free to run on all of them. The
    kinds alternate."""

    def __init__(self, kinds: tuple[str, ...], per_core: int, cores: tuple[int, ...]):
        self.kinds, self.cores = kinds, cores
        self.count = per_core * len(cores)
        self.work: dict[str, dict[str, float | str]] = {}
        """What the neighbours of each kind got done a second, together: known after the block."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._began = 0.0  # 0: not all of them have started

    def __enter__(self) -> Self:
        ready, tell = os.pipe()
        counts = os.memfd_create("neighbours")
        os.ftruncate(counts, max(1, 8 * self.count))
        self._counts = mmap.mmap(counts, max(1, 8 * self.count))
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self.cores or before)
            for i in range(self.count):
                command = [sys.executable, "-I", "-S", __file__, self.kinds[i % len(self.kinds)], *map(str, (tell, counts, i))]
                one = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(tell, counts), process_group=0)
                self._processes.append(one)
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
            os.close(counts)
        self._began, self._before = time.monotonic(), self._done()
        return self

    def _done(self) -> dict[str, float]:
        """The work of the neighbours of each kind since their start, in UNITS."""
        done = dict.fromkeys(self.kinds, 0.0)
        for i, units in enumerate(memoryview(self._counts)[: 8 * self.count].cast("d").tolist()):
            done[self.kinds[i % len(self.kinds)]] += units
        return done

    def __exit__(self, *exception: object) -> None:
        if self._began and self._processes:
            seconds, done = time.monotonic() - self._began, self._done()
            rates = {kind: round((units - self._before[kind]) / seconds, 3) for kind, units in done.items()}
            self.work = {kind: {"per_s": rate, "unit": UNITS[kind]} for kind, rate in rates.items()}
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes, self._began = [], 0.0


def main() -> None:
    kind, tell, counts, index = sys.argv[1], *map(int, sys.argv[2:])
    die_with_parent()
    with open(__file__, "rb") as file:
        text = file.read()
    block = (text * (BLOCK // len(text) + 1))[:BLOCK]
    own = memoryview(mmap.mmap(counts, 0))[8 * index : 8 * index + 8].cast("d")

    def did(units: float) -> None:
        own[0] += units

    os.write(tell, b"x")
    os.close(tell)
    {"compress": compress, "build": build, "memory": memory}[kind](block, did)


Did = Callable[[float], None]  # counts units of work


def compress(block: bytes, did: Did) -> None:
    import bz2
    import lzma
    import zlib

    while True:
        zlib.compress(block, 6)
        did(len(block) / 1e6)
        bz2.compress(block)
        did(len(block) / 1e6)
        lzma.compress(block[: BLOCK // 4], preset=1)
        did(BLOCK // 4 / 1e6)


def build(block: bytes, did: Did) -> None:
    folder = os.path.dirname(os.__file__)
    paths = [os.path.join(folder, f"{name}.py") for name in MODULES]
    job = "import sys\nfor path in sys.argv[1:]:\n    compile(open(path, 'rb').read(), path, 'exec')\n"
    while True:
        subprocess.run([sys.executable, "-I", "-S", "-c", job, *paths], check=True)
        did(len(paths))


def memory(block: bytes, did: Did) -> None:
    here, there = memoryview(bytearray(COPY)), memoryview(bytearray(COPY))
    while True:
        here[:] = there
        there[:] = here
        did(2 * COPY / 1e9)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
