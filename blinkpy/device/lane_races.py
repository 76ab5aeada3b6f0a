"""Races between lanes: a word that two lanes touch between two barriers, where one of them writes.

Lanes that take turns show a race only in some orders and with some values. Here each access of an array is
recorded, so a race is found in every order and with any values (the rule of Netzer and Miller, "What are
race conditions?", 1992, with barriers as the only order). An index below 0, which Python counts from the
end, is an error, too: on a GPU it is out of range.
"""

import sys
from pathlib import Path
from typing import Any

from blinkpy.device.array_trees import map_named_arrays

WHICHEVER = {"scratch.found"}  # several lanes may write the same value: kv/grammars.unused_grammar


class LaneRaceError(RuntimeError):
    """Two lanes touch a word between two barriers, and one of them writes."""


class Accesses:
    """The words that the lanes accessed since the last barrier."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.since = self.now = 0  # marks of accesses: of the first lane behind the last barrier, and of the lane that runs
        self.several = lanes  # the mark of a word that several lanes read

    def pass_barrier(self) -> None:
        self.since += self._lanes + 1
        self.several = self.since + self._lanes

    def enter(self, lane: int) -> None:
        """Record that this lane runs now."""
        self.now = self.since + lane

    def watched(self, tree: Any) -> Any:
        """The same NamedTuples, with arrays whose accesses are recorded."""
        return map_named_arrays(lambda name, item: item if isinstance(item, int) else _Watched(self, name, item), tree)

    def race(self, name: str, index: Any, mark: int, what: str) -> LaneRaceError:
        frame = sys._getframe(2)
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        other = "another lane" if mark == self.several else f"lane {mark - self.since}"
        return LaneRaceError(
            f"{where}: lane {self.now - self.since} {what} {name}[{index}] of {other}, without a barrier in between"
        )


class _Watched:
    """An array that records which lanes read and write its words."""

    __slots__ = ("_accesses", "_array", "_name", "_read", "_written")

    def __init__(self, accesses: Accesses, name: str, array: Any) -> None:
        self._accesses, self._name, self._array = accesses, name, array
        self._read, self._written = dict[Any, int](), dict[Any, int]()  # marks by index; those before `since` count no more

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        accesses = self._accesses
        now = accesses.now
        self._check(index)
        written = self._written.get(index, -1)
        if written >= accesses.since and written != now:
            raise accesses.race(self._name, index, written, "reads what is written:")
        before = self._read.get(index, -1)
        if before != now:
            self._read[index] = accesses.several if before >= accesses.since else now
        return self._array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        accesses = self._accesses
        now = accesses.now
        self._check(index)
        before = self._read.get(index, -1)
        if before >= accesses.since and before != now:
            raise accesses.race(self._name, index, before, "writes what is read:")
        written = self._written.get(index, -1)
        if written >= accesses.since and written != now and (self._name not in WHICHEVER or self._array[index] != value):
            raise accesses.race(self._name, index, written, "writes what is written:")
        self._written[index] = now
        self._array[index] = value

    def _check(self, index: Any) -> None:
        if min(index) < 0 if isinstance(index, tuple) else index < 0:
            raise IndexError(f"{self._name}[{index}] is out of range")
