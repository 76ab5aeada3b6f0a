"""Benchmarks side by side on one machine, each with cores and a GPU of its own: a load without neighbours never runs while
another benchmark's load has them, nor while another's server starts, which keeps many cores busy.

All of them name one folder. In it a load holds its mode's file, shared with others of that mode, and starts when nobody holds the
other mode's. To get there it passes a door, one at a time, and waits within it: so nobody overtakes who waits, and modes take
turns. These are flocks, which the kernel drops when their holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.common.harness import UsageError
from blinkpy.progress import ProgressCallback

WAIT_S = 900.0  # for others' loads and starts; longer than several of them take
POLL_S = 0.02
DOOR = "door"
TURNS = ("isolated", "interfered")
HERE = ".here"  # ends the name of the file that a benchmark holds while it lives


class OutOfTime(Exception):
    """A load's turn did not come before the time after which it must not start."""


class Beside:
    """One benchmark's part, within a with block. folder: what all of them name; None: nobody is beside.

    name: what the others' result files call this one. wait_s: how long a load may wait for its turn.
    """

    def __init__(self, folder: Path | None, name: str, report: ProgressCallback, wait_s: float = WAIT_S):
        self.folder, self.wait_s = folder, wait_s
        self._report = report
        self._here = f"{name}.{os.getpid()}{HERE}"
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Beside:
        if self.folder is None:
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(self._held.enter_context(self._open(self._here)), fcntl.LOCK_EX)
        except OSError as error:
            self._held.close()
            raise UsageError(f"--beside {self.folder}: {(error.strerror or str(error)).lower()}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self.folder is not None:
            (self.folder / self._here).unlink(missing_ok=True)
        self._held.close()

    @contextlib.contextmanager
    def load(self, interfered: bool, last_start: float = float("inf")) -> Iterator[dict[str, Any]]:
        """Wait for this mode's turn, and hold it. Gives what a result says of it: the seconds waited, and the names of the other
        benchmarks that were there at the load's start or end; nothing when there is no folder.

        Raises OutOfTime when last_start (time.monotonic()) comes first, UsageError after wait_s."""
        if self.folder is None:
            yield {}
            return
        mine, other = TURNS[interfered], TURNS[not interfered]
        began = time.monotonic()
        with self._open(mine) as turn:
            with self._open(DOOR) as door, self._open(other) as opposite:
                for file in (door, opposite):
                    self._lock(file, began, last_start, mine)
                fcntl.flock(turn, fcntl.LOCK_SH)  # never waits: whoever wants it alone holds the door
            found: dict[str, Any] = {"waited_s": round(time.monotonic() - began, 2)}
            before = self.others()
            yield found
            found["benchmarks"] = sorted(before | self.others())

    def start(self, last_start: float = float("inf")) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """The same for the start and the warm-up of a server: they take the turns of loads with neighbours, and run beside these
        or beside each other."""
        return self.load(True, last_start)

    def others(self) -> set[str]:
        """Names of the other benchmarks of the folder that live."""
        found = set()
        for path in self.folder.glob(f"*{HERE}") if self.folder else ():
            if path.name != self._here:
                with contextlib.suppress(FileNotFoundError), path.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # granted: its holder is dead
                    except BlockingIOError:
                        found.add(path.name.removesuffix(HERE).rpartition(".")[0])
        return found

    def _open(self, name: str) -> IO[str]:
        assert self.folder is not None
        return (self.folder / name).open("a")

    def _lock(self, file: IO[str], began: float, last_start: float, mine: str) -> None:
        """Lock a file for this process alone."""
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                now = time.monotonic()
            if now > last_start:
                raise OutOfTime(f"no turn for {mine} loads in time")
            if now - began > self.wait_s:
                who = " and ".join(sorted(self.others())) or "nobody who says so"
                raise UsageError(f"waited {self.wait_s:g} s for the end of others' loads (--beside {self.folder}: {who})")
            self._report(f"waiting for others' loads to end, {mine} is next", now - began, self.wait_s)
            time.sleep(POLL_S)
