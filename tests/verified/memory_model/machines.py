"""An explicit-state checker for small programs that share memory: all interleavings, with the reorderings that a machine permits.

A program is a generator that yields what it does to memory, and gets the loaded values back; an AssertionError in it is a
violation, and so is a program that can't go on. Memory is one sequence of visible writes (all machines here are multi-copy
atomic between two parties); what differs is when a party's stores become visible, and how old a value its loads may return:

    machine   stores become visible               loads return
    X86       in order, later (TSO)               the newest value
    RDMA      in order, later (RC: writes of      the newest value (a read waits for the writes before it, and software
              one queue pair are ordered)         waits for the read before it goes on)
    WEAK      in any order, but for release       any value since the last acquire load or fence of the party; loads
              stores and fences                   of one word don't go back in time (Armv8, PTX)

The words of one Bulk write become visible in any order, on every machine. A store never becomes visible before a load whose value
decided about it (a data or control dependency: every machine here keeps that order). LoadLater is a load that nothing depends
on yet: on a weak machine it may happen as late as its Value is asked for, after later stores that are no release.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Predicate = Callable[[Any], bool]


class MemoryOrder(NamedTuple):
    """What a party's hardware may reorder."""

    name: str
    ordered_stores: bool
    newest_loads: bool


X86 = MemoryOrder("x86", ordered_stores=True, newest_loads=True)
RDMA = MemoryOrder("rdma", ordered_stores=True, newest_loads=True)
WEAK = MemoryOrder("weak", ordered_stores=False, newest_loads=False)


@dataclass(frozen=True)
class Load:
    """The value of a word. wanted: waits until a value is seen that it accepts, as a polling loop does."""

    word: str
    acquire: bool = False
    wanted: Predicate | None = None


@dataclass(frozen=True)
class LoadLater:
    """Begin to copy a word. Returns a ticket for Value."""

    word: str


@dataclass(frozen=True)
class Value:
    """The value that a LoadLater got."""

    ticket: int


@dataclass(frozen=True)
class Store:
    """Write a word."""

    word: str
    value: Any
    release: bool = False


@dataclass(frozen=True)
class Bulk:
    """Write several words, in no order among themselves."""

    words: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Fence:
    """All accesses before it happen before all accesses after it."""


@dataclass(frozen=True)
class Silence:
    """Wait until another party has ended and all its stores are visible."""

    party: int


Operation = Load | LoadLater | Value | Store | Bulk | Fence | Silence
Program = Callable[[], Generator[Operation, Any, None]]


class Violation(NamedTuple):
    """What went wrong, and the steps that lead there."""

    what: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((*self.steps, self.what))


class Pending(NamedTuple):
    """A store that is not visible yet. group: number of the write that it belongs to."""

    group: int
    word: str
    value: Any
    release: bool


class Party(NamedTuple):
    """A program's state: what its loads returned so far says where it is."""

    results: tuple[Any, ...] = ()
    buffer: tuple[Pending, ...] = ()
    group: int = 0
    floor: int = 0  # writes that all later loads see
    seen: tuple[tuple[str, int], ...] = ()  # per word: the visible writes at the last load
    tickets: tuple[tuple[int, str, Any], ...] = ()  # (number, word, value or UNBOUND)


class Memory(NamedTuple):
    """The state of everything: values before `recent`, visible writes since, and the parties."""

    base: tuple[tuple[str, Any], ...]
    recent: tuple[tuple[str, Any], ...]
    parties: tuple[Party, ...]


UNBOUND = "unbound"


class Checker:
    """Explores all states of some programs. initial: values of all words. machines: one for each program."""

    def __init__(self, programs: Sequence[Program], machines: Sequence[MemoryOrder], initial: dict[str, Any]) -> None:
        self._programs, self._machines = programs, machines
        self._start = Memory(tuple(sorted(initial.items())), (), tuple(Party() for _ in programs))
        self._operations: dict[tuple[int, tuple[Any, ...]], Operation | None] = {}
        self.states = 0

    def run(self, most_states: int = 1_000_000) -> Violation | None:
        """The first violation that is found, or None when there is none. Raises RuntimeError beyond most_states."""
        seen = {self._start}
        stack: list[tuple[Memory, tuple[str, ...]]] = [(self._start, ())]
        while stack:
            state, path = stack.pop()
            self.states += 1
            if self.states > most_states:
                raise RuntimeError(f"more than {most_states} states")
            moved = False
            try:
                for step, after in self._steps(state):
                    moved = True
                    if after not in seen:
                        seen.add(after)
                        stack.append((after, (*path, step)))
            except AssertionError as error:
                return Violation(f"violated: {error}", path)
            if not moved and any(self._next(i, party) is not None for i, party in enumerate(state.parties)):
                waiting = [
                    f"party {i} at {self._next(i, party)}" for i, party in enumerate(state.parties) if self._next(i, party)
                ]
                return Violation(f"nobody can go on: {'; '.join(waiting)}", path)
        return None

    def _next(self, index: int, party: Party) -> Operation | None:
        """The party's next operation, None at its end. Raises AssertionError where the program does."""
        key = index, party.results
        if key not in self._operations:
            program = self._programs[index]()
            try:
                operation = next(program)
                for result in party.results:
                    operation = program.send(result)
                self._operations[key] = operation
            except StopIteration:
                self._operations[key] = None
        return self._operations[key]

    def _steps(self, state: Memory) -> Iterator[tuple[str, Memory]]:
        """All that can happen next."""
        for i, party in enumerate(state.parties):
            machine = self._machines[i]
            for place, pending in enumerate(party.buffer):
                if _may_land(machine, party.buffer, place):
                    rest = party.buffer[:place] + party.buffer[place + 1 :]
                    after = _with(state, i, party._replace(buffer=rest))
                    after = after._replace(recent=(*state.recent, (pending.word, pending.value)))
                    yield f"{i}: {pending.word} = {pending.value} is visible", _trimmed(after, self._machines)
            for place, (ticket, word, value) in enumerate(party.tickets):
                if value is UNBOUND:
                    for found in _visible(state, party, machine, word):
                        tickets = (*party.tickets[:place], (ticket, word, found), *party.tickets[place + 1 :])
                        yield f"{i}: copies {word} = {found}", _with(state, i, party._replace(tickets=tickets))
            operation = self._next(i, party)
            if operation is not None:
                for step, after in _perform(state, i, party, machine, operation, self):
                    yield f"{i}: {step}", _trimmed(after, self._machines)

    def ended(self, state: Memory, index: int) -> bool:
        """Whether a party has ended and all its stores are visible."""
        party = state.parties[index]
        return self._next(index, party) is None and not party.buffer


def _with(state: Memory, index: int, party: Party) -> Memory:
    return state._replace(parties=(*state.parties[:index], party, *state.parties[index + 1 :]))


def _value(state: Memory, word: str, writes: int) -> Any:
    """Of a word, after so many of the recent writes."""
    for name, value in reversed(state.recent[:writes]):
        if name == word:
            return value
    return dict(state.base)[word]


def _may_land(machine: MemoryOrder, buffer: tuple[Pending, ...], place: int) -> bool:
    """Whether a store may become visible before those that wait with it."""
    pending = buffer[place]
    for earlier in buffer[:place]:
        if earlier.word == pending.word or pending.release:
            return False
        if machine.ordered_stores and earlier.group != pending.group:
            return False
    return True


def _trimmed(state: Memory, machines: Sequence[MemoryOrder]) -> Memory:
    """Forget old values that no load can return any more."""
    now = len(state.recent)
    needed = min([now, *(p.floor for p, machine in zip(state.parties, machines, strict=True) if not machine.newest_loads)])
    if needed == 0:
        return state
    base = dict(state.base) | dict(state.recent[:needed])
    parties = tuple(
        p._replace(floor=max(0, p.floor - needed), seen=tuple((w, n - needed) for w, n in p.seen if n > needed))
        for p in state.parties
    )
    return Memory(tuple(sorted(base.items())), state.recent[needed:], parties)


def _perform(
    state: Memory, index: int, party: Party, machine: MemoryOrder, operation: Operation, checker: Checker
) -> Iterator[tuple[str, Memory]]:
    """The ways in which an operation can go now."""
    done = party._replace(results=(*party.results, None))
    now = len(state.recent)
    match operation:
        case Store(word, value, release):
            if not (release and any(value is UNBOUND for _, _, value in party.tickets)):
                pending = Pending(party.group, word, value, release)
                yield (
                    f"stores {word} = {value}",
                    _with(state, index, done._replace(buffer=(*party.buffer, pending), group=party.group + 1)),
                )
        case Bulk(words):
            pendings = tuple(Pending(party.group, word, value, False) for word, value in words)
            yield f"writes {words}", _with(state, index, done._replace(buffer=(*party.buffer, *pendings), group=party.group + 1))
        case Fence():
            if not party.buffer and not any(value is UNBOUND for _, _, value in party.tickets):
                yield "fence", _with(state, index, done._replace(floor=now, seen=()))
        case Silence(other):
            if checker.ended(state, other):
                yield f"party {other} is silent", _with(state, index, done)
        case LoadLater(word):
            ticket = len(party.results)
            first = _value(state, word, now) if machine.newest_loads else UNBOUND
            tickets = (*party.tickets, (ticket, word, first))
            yield f"begins to copy {word}", _with(state, index, party._replace(results=(*party.results, ticket), tickets=tickets))
        case Value(ticket):
            value = next(value for number, _, value in party.tickets if number == ticket)
            if value is not UNBOUND:
                rest = tuple(entry for entry in party.tickets if entry[0] != ticket)
                yield f"uses {value}", _with(state, index, party._replace(results=(*party.results, value), tickets=rest))
        case Load():
            yield from _loads(state, index, party, machine, operation)


def _visible(state: Memory, party: Party, machine: MemoryOrder, word: str) -> dict[Any, int]:
    """The values that a load of a word may return, each with the oldest moment (number of recent writes) at which it does."""
    now = len(state.recent)
    own = [pending.value for pending in party.buffer if pending.word == word]
    if own:
        return {own[-1]: now}
    oldest = now if machine.newest_loads else max(party.floor, dict(party.seen).get(word, 0))
    return {_value(state, word, writes): writes for writes in range(now, oldest - 1, -1)}


def _loads(state: Memory, index: int, party: Party, machine: MemoryOrder, load: Load) -> Iterator[tuple[str, Memory]]:
    """The values that a load may return; one that waits may also see the newest value, and go on waiting."""
    for value, writes in _visible(state, party, machine, load.word).items():
        seen = tuple(sorted((dict(party.seen) | {load.word: writes}).items()))
        if load.wanted is None or load.wanted(value):
            floor = max(party.floor, writes) if load.acquire else party.floor
            after = party._replace(results=(*party.results, value), floor=floor, seen=seen)
            yield f"loads {load.word} = {value}", _with(state, index, after)
        elif writes > dict(party.seen).get(load.word, 0) and not machine.newest_loads:
            yield f"waits for {load.word}, sees {value}", _with(state, index, party._replace(seen=seen))
