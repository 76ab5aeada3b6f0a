"""An explicit-state checker for small programs that share memory: it tries all interleavings and reorderings of a machine.

An AssertionError in a program (operations.py) is a violation, and so is a program that can't continue. Memory is one sequence of
visible writes (all machines here are multi-copy atomic between two parties). Machines differ in when a party's stores become
visible, and in how old a loaded value may be:

    machine   stores become visible               loads return
    X86       in order, later (TSO)               the newest value
    RDMA      in order, later (RC: writes of      the newest value (a read waits for the writes before it, and software
              one queue pair are ordered)         waits for the read before it continues)
    WEAK      in any order, except for release       any value since the last acquire load or fence of the party; loads
              stores and fences                   of one word don't go back in time (Armv8, PTX)

The words of one Bulk write become visible in any order, on every machine. A store never becomes visible before a load on which it
depends (by data or control: every machine here keeps that order). No operation depends on a LoadLater until its Value. On a weak
machine it may happen as late as that, after later stores without release.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from verified.memory_model.operations import Bulk, Fence, Load, LoadLater, Operation, Program, Silence, Store, Value


class MemoryOrder(NamedTuple):
    """The reorderings that a party's hardware may do."""

    name: str
    ordered_stores: bool
    newest_loads: bool


X86 = MemoryOrder("x86", ordered_stores=True, newest_loads=True)
RDMA = MemoryOrder("rdma", ordered_stores=True, newest_loads=True)
WEAK = MemoryOrder("weak", ordered_stores=False, newest_loads=False)


class Pending(NamedTuple):
    """A store that is not visible yet. group: number of its write; the stores of a Bulk share one."""

    group: int
    word: str
    value: Any
    release: bool


class Party(NamedTuple):
    """A program's state: the results of its loads determine its position."""

    results: tuple[Any, ...] = ()
    buffer: tuple[Pending, ...] = ()
    group: int = 0
    floor: int = 0  # writes that all later loads see
    seen: tuple[tuple[str, int], ...] = ()  # (word, number of visible writes at its last load)
    tickets: tuple[tuple[int, str, Any], ...] = ()  # (number, word, value or UNBOUND)

    def returns(self, result: Any, **changes: Any) -> Self:
        """The party after its next operation, which returned `result`."""
        return self._replace(results=(*self.results, result), **changes)

    def copies(self) -> bool:
        """Whether any LoadLater has no value yet."""
        return any(value is UNBOUND for _, _, value in self.tickets)


class Memory(NamedTuple):
    """The whole state: values before `recent`, visible writes since, and the parties."""

    base: tuple[tuple[str, Any], ...]
    recent: tuple[tuple[str, Any], ...]
    parties: tuple[Party, ...]

    def value(self, word: str, writes: int) -> Any:
        """The value of a word after the first `writes` recent writes."""
        for name, value in reversed(self.recent[:writes]):
            if name == word:
                return value
        return dict(self.base)[word]

    def changed(self, index: int, party: Party) -> Self:
        return self._replace(parties=(*self.parties[:index], party, *self.parties[index + 1 :]))


UNBOUND = "unbound"


class Checker:
    """Explores all states of some programs. initial: values of all words. machines: one for each program."""

    def __init__(self, programs: Sequence[Program], machines: Sequence[MemoryOrder], initial: dict[str, Any]) -> None:
        self._programs, self._machines = programs, machines
        self._start = Memory(tuple(sorted(initial.items())), (), tuple(Party() for _ in programs))
        self._operations: dict[tuple[int, tuple[Any, ...]], Operation | None] = {}
        self.states = 0

    def run(self, most_states: int = 1_000_000) -> str:
        """The steps to the first violation, and the violation; "" without a violation. Raises RuntimeError beyond most_states."""
        seen = {self._start}
        stack: list[tuple[Memory, tuple[str, ...]]] = [(self._start, ())]
        while stack:
            state, path = stack.pop()
            self.states += 1
            if self.states > most_states:
                raise RuntimeError(f"more than {most_states} states")
            try:
                steps = list(self._steps(state))
            except AssertionError as error:
                return "\n".join((*path, f"violated: {error}"))
            operations = [self._next(state, i) for i in range(len(state.parties))]
            if not steps and any(operation is not None for operation in operations):
                return "\n".join((*path, f"nobody can go on: the parties are at {operations}"))
            for step, after in steps:
                if after not in seen:
                    seen.add(after)
                    stack.append((after, (*path, step)))
        return ""

    def _next(self, state: Memory, index: int) -> Operation | None:
        """A party's next operation, None at its end. Raises AssertionError if the program does."""
        results = state.parties[index].results
        if (index, results) not in self._operations:
            program = self._programs[index]()
            operation: Operation | None = next(program)
            try:
                for result in results:
                    operation = program.send(result)
            except StopIteration:
                operation = None
            self._operations[index, results] = operation
        return self._operations[index, results]

    def _steps(self, state: Memory) -> Iterator[tuple[str, Memory]]:
        """All possible next steps, with the states after them."""
        for i, party in enumerate(state.parties):
            machine = self._machines[i]
            for place, pending in enumerate(party.buffer):
                if _may_land(machine, party.buffer, place):
                    after = state.changed(i, party._replace(buffer=party.buffer[:place] + party.buffer[place + 1 :]))
                    after = after._replace(recent=(*state.recent, (pending.word, pending.value)))
                    yield f"{i}: {pending.word} = {pending.value} is visible", self._trimmed(after)
            for place, (ticket, word, value) in enumerate(party.tickets):
                if value is UNBOUND:
                    for found in _visible(state, party, machine, word):
                        tickets = (*party.tickets[:place], (ticket, word, found), *party.tickets[place + 1 :])
                        yield f"{i}: copies {word} = {found}", state.changed(i, party._replace(tickets=tickets))
            operation = self._next(state, i)
            if operation is not None:
                for step, changed in self._perform(state, party, machine, operation):
                    yield f"{i}: {step}", self._trimmed(state.changed(i, changed))

    def _perform(self, state: Memory, party: Party, machine: MemoryOrder, operation: Operation) -> Iterator[tuple[str, Party]]:
        """All results that a party's operation can have now."""
        now = len(state.recent)
        match operation:
            case Store(word, value, release):
                if not (release and party.copies()):
                    buffer = (*party.buffer, Pending(party.group, word, value, release))
                    yield f"stores {word} = {value}", party.returns(None, buffer=buffer, group=party.group + 1)
            case Bulk(words):
                buffer = (*party.buffer, *(Pending(party.group, word, value, False) for word, value in words))
                yield f"writes {words}", party.returns(None, buffer=buffer, group=party.group + 1)
            case Fence():
                if not party.buffer and not party.copies():
                    yield "fence", party.returns(None, floor=now, seen=())
            case Silence(other):
                if self._next(state, other) is None and not state.parties[other].buffer:
                    yield f"party {other} is silent", party.returns(None)
            case LoadLater(word):
                ticket, first = len(party.results), state.value(word, now) if machine.newest_loads else UNBOUND
                yield f"begins to copy {word}", party.returns(ticket, tickets=(*party.tickets, (ticket, word, first)))
            case Value(ticket):
                value = next(value for number, _, value in party.tickets if number == ticket)
                if value is not UNBOUND:
                    rest = tuple(entry for entry in party.tickets if entry[0] != ticket)
                    yield f"uses {value}", party.returns(value, tickets=rest)
            case Load():
                yield from _loads(state, party, machine, operation)

    def _trimmed(self, state: Memory) -> Memory:
        """Forget old values that no load can return any more."""
        floors = [p.floor for p, machine in zip(state.parties, self._machines, strict=True) if not machine.newest_loads]
        needed = min([len(state.recent), *floors])
        if needed == 0:
            return state
        base = dict(state.base) | dict(state.recent[:needed])
        parties = tuple(
            p._replace(floor=max(0, p.floor - needed), seen=tuple((w, n - needed) for w, n in p.seen if n > needed))
            for p in state.parties
        )
        return Memory(tuple(sorted(base.items())), state.recent[needed:], parties)


def _may_land(machine: MemoryOrder, buffer: tuple[Pending, ...], place: int) -> bool:
    """Whether a store may become visible before other waiting stores."""
    pending = buffer[place]
    return not any(
        earlier.word == pending.word or pending.release or (machine.ordered_stores and earlier.group != pending.group)
        for earlier in buffer[:place]
    )


def _visible(state: Memory, party: Party, machine: MemoryOrder, word: str) -> dict[Any, int]:
    """The values that a load of a word may return, each with its oldest moment (number of recent writes)."""
    now = len(state.recent)
    own = [pending.value for pending in party.buffer if pending.word == word]
    if own:
        return {own[-1]: now}
    oldest = now if machine.newest_loads else max(party.floor, dict(party.seen).get(word, 0))
    return {state.value(word, writes): writes for writes in range(now, oldest - 1, -1)}


def _loads(state: Memory, party: Party, machine: MemoryOrder, load: Load) -> Iterator[tuple[str, Party]]:
    """The values that a load may return; a waiting load may also see the newest value, and continue to wait."""
    before = dict(party.seen)
    for value, writes in _visible(state, party, machine, load.word).items():
        seen = tuple(sorted((before | {load.word: writes}).items()))
        if load.wanted is None or load.wanted(value):
            floor = max(party.floor, writes) if load.acquire else party.floor
            yield f"loads {load.word} = {value}", party.returns(value, floor=floor, seen=seen)
        elif writes > before.get(load.word, 0) and not machine.newest_loads:
            yield f"waits for {load.word}, sees {value}", party._replace(seen=seen)
