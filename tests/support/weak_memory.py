"""Memory that several machines share, each with its own memory order, for the real code of both ends of a link.

The machines are those of the memory model (verified/memory_model/machines.py), but the programs are the code itself. A
`SharedArray` replaces an array or a memoryview of the segment, and the party's machine makes every access through it. Stores
become visible late and, on a weak machine, out of order; loads return old values. The model's LoadLater is an array that is
`late`: its loads may happen after later stores without release. So no party may write there until a later release store or fence
is visible.
"""

import random
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from verified.memory_model.machines import MemoryOrder

LAND, STALE, MEANWHILE = 0.05, 0.4, 0.03  # probabilities: a store becomes visible, a load is old, another party acts meanwhile
LAND_LATE = 0.0005  # probability that a store of a dead party becomes visible
PLAIN, RELAXED, ACQUIRE, RELEASE = "plain", "relaxed", "acquire", "release"


class PendingStore(NamedTuple):
    """A store that is not visible yet. group: number of its write; after: number of late loads before it, for a release."""

    group: int
    address: int
    value: int
    release: bool
    after: int


class WeakMemory:
    """The words of a segment, and the moment at which each value became visible."""

    def __init__(self, segment: memoryview, draw: random.Random) -> None:
        self.segment, self.draw = segment, draw
        self.base = int(np.frombuffer(segment, np.uint8).ctypes.data)
        self.moment = 0  # visible writes
        self.history: dict[int, tuple[list[int], list[int]]] = {}  # address -> (moments, value from each moment on)
        self.width: dict[int, int] = {}
        self.parties: list[Party] = []

    def values(self, address: int, width: int) -> tuple[list[int], list[int]]:
        if self.width.setdefault(address, width) != width:
            raise AssertionError(f"a word is accessed in pieces: {self.width[address]} bytes, then {width}")
        if address not in self.history:
            first = int.from_bytes(self.segment[address : address + width], "little", signed=True)
            self.history[address] = [0], [first]
        return self.history[address]

    def land(self, writer: "Party", store: PendingStore) -> None:
        """Make a store visible."""
        for party in self.parties:
            assert party is writer or store.address not in party.late, "a store overwrites a word before its late load"
        self.moment += 1
        moments, values = self.history[store.address]
        moments.append(self.moment)
        values.append(store.value)
        width = self.width[store.address]
        self.segment[store.address : store.address + width] = store.value.to_bytes(width, "little", signed=True)


class Party:
    """One processor. order: memory order of its machine. meanwhile: actions of other parties between two of its accesses."""

    def __init__(self, memory: WeakMemory, order: MemoryOrder, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._memory, self._order, self._meanwhile = memory, order, meanwhile
        self._pending: list[PendingStore] = []
        self._groups = self._loads = 0
        self._floor = memory.moment  # at its start it sees all visible writes
        self._seen: dict[int, int] = {}
        self.late: dict[int, int] = {}  # address -> number of a load that may still happen
        self.dead = False
        memory.parties.append(self)

    def pass_time(self) -> None:
        draw = self._memory.draw
        for party in self._memory.parties[:]:
            if party.dead and not party._pending:
                self._memory.parties.remove(party)
            elif party._pending and draw.random() < (LAND_LATE if party.dead else LAND):
                party.drain(draw.choice((1, draw.randint(1, 2 * len(party._pending)))))
        if draw.random() < MEANWHILE:
            self._meanwhile()

    def load(self, address: int, width: int, acquire: bool, late: bool) -> int:
        memory = self._memory
        moments, values = memory.values(address, width)
        own = [store.value for store in self._pending if store.address == address]
        if own:
            return own[-1]
        least, chosen = max(self._floor, self._seen.get(address, 0)), len(values) - 1
        if not self._order.newest_loads:
            if memory.draw.random() < STALE:
                oldest = bisect_right(moments, least) - 1
                chosen = memory.draw.choice((oldest, memory.draw.randint(oldest, chosen)))
            if late:
                self._loads += 1
                self.late[address] = self._loads
        self._seen[address] = max(least, moments[chosen])
        if acquire:
            self._floor = max(self._floor, moments[chosen])
        return values[chosen]

    def begin_write(self) -> int:
        """The number of a new write: its words become visible in any order, on every machine."""
        self._groups += 1
        return self._groups

    def store(self, address: int, width: int, value: int, release: bool, group: int) -> None:
        self._memory.values(address, width)
        self._pending.append(PendingStore(group, address, value, release, self._loads))

    def fence(self) -> None:
        self.drain(len(self._pending))
        self.late.clear()
        self._floor = self._memory.moment

    def drain(self, stores: int) -> None:
        """Make some stores visible, in an order that the machine permits."""
        for _ in range(min(stores, len(self._pending))):
            self._land(self._next())

    def crash(self, is_word: Callable[[int], bool]) -> None:
        """End the party. Its pending stores to words may land much later; all other stores land now: Transport's promise 7."""
        for store in [store for store in self._pending if not is_word(store.address)]:
            self._land(self._pending.index(store))
        self.dead = True

    def _next(self) -> int:
        """The index of a pending store that may become visible next."""
        draw, pending = self._memory.draw, self._pending
        if self._order.ordered_stores:
            group = [i for i, store in enumerate(pending) if store.group == pending[0].group]
            return draw.choice(group)
        address = pending[draw.randrange(len(pending))].address
        first = next(i for i, store in enumerate(pending) if store.address == address)
        return 0 if pending[first].release else first

    def _land(self, i: int) -> None:
        store = self._pending.pop(i)
        if store.release:
            self.late = {address: load for address, load in self.late.items() if load > store.after}
        self._memory.land(self, store)


class SharedArray:
    """An array of the segment as a party accesses it. late: whether loads may happen after later stores. kinds: recorded kinds of
    access to each index of the last axis."""

    def __init__(self, party: Party, memory: WeakMemory, array: NDArray[Any], late: bool = False) -> None:
        self._party, self._late, self.dtype = party, late, array.dtype
        self.kinds: dict[int, set[str]] = {}
        self._width = array.dtype.itemsize
        self.where = np.full(array.shape, array.ctypes.data - memory.base)
        for axis, (extent, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            self.where += (np.arange(extent) * stride).reshape(-1, *[1] * (array.ndim - axis - 1))

    def load(self, index: Any, kind: str) -> Any:
        where = self.where[index]
        if where.ndim:
            raw = [self._load(int(address), kind) for address in where.flat]
            return np.array(raw, f"i{self._width}").reshape(where.shape).view(self.dtype)
        self._note(index, kind)
        return self._load(int(where), kind)

    def store(self, index: Any, value: Any, kind: str) -> None:
        where, group = self.where[index], self._party.begin_write()
        if where.ndim:
            for address, each in zip(where.flat, value, strict=True):
                self._party.store(int(address), self._width, int(each), False, group)
            return
        self._note(index, kind)
        self._party.pass_time()
        self._party.store(int(where), self._width, int(value), kind == RELEASE, group)

    def __getitem__(self, index: Any) -> Any:
        return self.load(index, PLAIN)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.store(index, value, PLAIN)

    def _load(self, address: int, kind: str) -> int:
        self._party.pass_time()
        return self._party.load(address, self._width, kind == ACQUIRE, self._late)

    def _note(self, index: Any, kind: str) -> None:
        self.kinds.setdefault(index[-1] if isinstance(index, tuple) else index, set()).add(kind)


def _load(kind: str) -> Callable[..., Any]:
    return lambda array, index: array.load(index, kind) if isinstance(array, SharedArray) else array[index]


def _store(kind: str) -> Callable[..., None]:
    return lambda array, index, value: array.store(index, value, kind)


PRIMITIVES = {
    "load_acquire": _load(ACQUIRE),
    "load_relaxed": _load(RELAXED),
    "store_release": _store(RELEASE),
    "store_relaxed": _store(RELAXED),
}
"""Replacements of blinkpy.device.portable's functions, for device functions in plain Python."""
