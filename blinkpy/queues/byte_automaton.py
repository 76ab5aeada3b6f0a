"""Byte automata: a finite automaton over the bytes of a request's output, which defines the allowed outputs.

Its packed form, int32 words, crosses a queue pair and is stored in the engine's memory. Device code reads
it there (blinkpy/kv/, blinkpy/models/cpu/, blinkpy/kernels/sampling/), so the form is defined only here:

    word                        holds
    --------------------------  --------------------------------------------------------------------------------------
    0                           states
    1                           classes of bytes
    2                           first state of a counted string, or `states`
    3                           first hub, or `states`
    4, 5                        the start: its state and its count
    6                           an upper bound of all distances
    7 .. 70                     the class of each byte, four bytes a word
    71 ..                       cells of 16 bits, two a word, 1 + classes for each state: STATE_* flags and the distance to
                                an end << DISTANCE_SHIFT, then the next state for each class, or DEAD_CELL
    after the cells             LOOP_WORDS for each state of a counted string: its hub, and the string's minimum and maximum
                                characters

The distance of a state is the number of bytes of the shortest text that completes the output. If each byte is a token, the
distance also bounds the number of tokens. Otherwise all distances are 0, and outputs are not steered to an end.

A counted string has a minimum and a maximum number of characters. Its states are a loop: a hub between two characters,
and the states within a character. The states of loops come last in an automaton, and hubs come last among them. A counter counts
the characters: an edge from a plain state to the hub sets the counter to 0, and an edge of the loop to the hub increments it. The
loop may continue below the maximum, and end from the minimum on. Only one string is open at a time, so one counter is enough. A
position is state | count << COUNT_SHIFT.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.words import Int32, digest_of

BYTES = 256
MOST_STATES = (1 << 15) - 1
STATES_WORD, CLASSES_WORD, COUNTED_WORD, HUBS_WORD, START_WORD, START_COUNT_WORD, FARTHEST_WORD, CLASS_OF_WORD = range(8)
CELLS_WORD = CLASS_OF_WORD + BYTES // 4
CELL_BITS, CELL_MASK = 16, 0xFFFF
DEAD, DEAD_CELL = -1, 0xFFFF  # no string of the language continues with this byte
STATE_ACCEPTING = 1  # the output may end here
STATE_ENDING = 2  # the output must end here: no byte continues it
DISTANCE_SHIFT = 2
MOST_DISTANCE = (1 << CELL_BITS - DISTANCE_SHIFT) - 1  # larger distances are stored as this value
STATE_MASK, COUNT_SHIFT = MOST_STATES, 16  # of a position
LOOP_HUB, LOOP_LEAST, LOOP_MOST, LOOP_WORDS = range(4)
LONGEST_LEAST = 1 << 19  # maximum of a string's minimum length, characters
NO_MOST = 1 << 30  # characters: no limit


def packed_words(states: int, classes: int, counted: int = 0) -> int:
    """The number of int32 words of a packed automaton. counted: states of counted strings."""
    return CELLS_WORD + (states * (1 + classes) + 1) // 2 + LOOP_WORDS * counted


def position_of(state: int, count: int) -> int:
    """The position of a state and a count."""
    return state | count << COUNT_SHIFT


NO_LOOPS: Int32 = np.zeros((0, LOOP_WORDS), np.int32)


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton. Every state reaches an accepting state.

    class_of: uint8 [256], the class of each byte.
    next_state: int16 [states, classes], DEAD if no string continues.
    accepting: bool [states].
    closes: whether the packed form has distances.
    loops: int32 [n, 3], hub, minimum and maximum characters of each of the last n states, which belong to counted strings.
    start: the position before the first byte.
    Raises ValueError for wrong shapes, types or ranges; `trimmed` accepts any table.
    """

    class_of: NDArray[np.uint8]
    next_state: NDArray[np.int16]
    accepting: NDArray[np.bool_]
    closes: bool = True
    loops: Int32 = field(default_factory=lambda: NO_LOOPS)
    start: int = 0

    def __post_init__(self) -> None:
        _require(self.class_of.shape == (BYTES,) and self.class_of.dtype == np.uint8, "class_of must be uint8 [256]")
        _require(self.next_state.ndim == 2 and self.next_state.dtype == np.int16, "next_state must be int16 [states, classes]")
        _require(self.accepting.shape == (self.states,) and self.accepting.dtype == np.bool_, "accepting must be bool [states]")
        _require(1 <= self.states <= MOST_STATES, f"an automaton has 1 to {MOST_STATES} states, not {self.states}")
        _require(1 <= self.classes <= BYTES and int(self.class_of.max()) < self.classes, "a byte's class is out of range")
        _require(DEAD <= int(self.next_state.min()) and int(self.next_state.max()) < self.states, "a next state is out of range")
        _require(self.loops.shape == (len(self.loops), LOOP_WORDS) and self.loops.dtype == np.int32, "loops must be int32 [n, 3]")
        _require(0 < self.counted, "an automaton must have a state of no counted string")
        if len(self.loops):
            self._require_loops()
        _require(0 <= self.start and self.start & STATE_MASK < self.states, "the start is not a state")
        _require(self._may_be_at(self.start & STATE_MASK, self.start >> COUNT_SHIFT), "the start has a wrong count")

    def _require_loops(self) -> None:
        """Raise ValueError unless each loop is complete: see the top of this file."""
        states, hub = np.arange(self.counted, self.states), self.loops[:, LOOP_HUB]
        least, most = self.loops[:, LOOP_LEAST], self.loops[:, LOOP_MOST]
        fine = (self.hubs <= hub) & (hub < self.states) & ((states < self.hubs) | (hub == states))
        _require(bool(fine.all()) and self.hubs < self.states, "a state of a counted string has no hub")
        _require(
            np.array_equal(self.loops[hub - self.counted], self.loops), "the states of a counted string differ in its lengths"
        )
        fine = (least >= 0) & (least <= most) & (least <= LONGEST_LEAST) & (most >= 1) & (most <= NO_MOST)
        _require(bool(fine.all()), "the lengths of a counted string are out of range")
        _require(not self.accepting[self.counted :].any(), "an output may not end in a counted string")
        entered = self.next_state[: self.counted]
        _require(not ((entered >= self.counted) & (entered < self.hubs)).any(), "a counted string must begin at its hub")
        within = self.next_state[self.counted :]
        stays, exits = within >= self.counted, (within >= 0) & (within < self.counted)
        following = self.loops[np.where(stays, within - self.counted, 0), LOOP_HUB]
        _require(bool((~stays | (following == hub[:, None])).all()), "a counted string leads into another counted string")
        _require(not exits[: self.hubs - self.counted].any(), "a counted string ends within a character")
        again = (within == states[:, None]).any(axis=1)[self.hubs - self.counted :]
        _require(bool(again.all() and exits[self.hubs - self.counted :].any(axis=1).all()), "a hub must lead to itself, and out")

    def _may_be_at(self, state: int, count: int) -> bool:
        """Whether a state may have this count."""
        if state < self.counted:
            return count == 0
        return 0 <= count <= int(self.loops[state - self.counted, LOOP_MOST]) - (1 if state < self.hubs else 0)

    @property
    def states(self) -> int:
        return int(self.next_state.shape[0])

    @cached_property
    def counted(self) -> int:
        """The first state of a counted string, or the number of states."""
        return self.states - len(self.loops)

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """(minimum count, maximum count) of each state from `counted` on."""
        least_and_most: list[list[int]] = self.loops[:, 1:].tolist()
        return least_and_most

    @cached_property
    def hubs(self) -> int:
        """The first hub, or the number of states."""
        return int(self.loops[:, LOOP_HUB].min()) if len(self.loops) else self.states

    @property
    def classes(self) -> int:
        return int(self.next_state.shape[1])

    @classmethod
    def trimmed(
        cls,
        class_of: NDArray[np.uint8],
        next_state: NDArray[np.integer],
        accepting: NDArray[np.bool_],
        closes: bool = True,
    ) -> Self:
        """The automaton without unreachable states, and without states that reach no accepting state; the other states keep their
        order. next_state: integers [states, classes]. Raises ValueError if no string is accepted.
        """
        source, class_ = np.nonzero(next_state >= 0)
        target = next_state[source, class_]
        keep = _closure(source, target, np.arange(len(next_state)) == 0) & _closure(target, source, accepting)
        _require(bool(keep[0]), "the automaton accepts no string")
        number = np.append(np.where(keep, np.cumsum(keep) - 1, DEAD), DEAD)  # DEAD is -1, the last element
        _require(int(keep.sum()) <= MOST_STATES, f"an automaton has at most {MOST_STATES} states, not {int(keep.sum())}")
        return cls(class_of.astype(np.uint8), number[next_state[keep]].astype(np.int16), accepting[keep], closes)

    def with_steps(self, steps: NDArray[np.int64]) -> Self:
        """This automaton, with known numbers of bytes from each state to an accepting state. steps: int64 [states]."""
        self.__dict__["_known_steps"] = steps
        return self

    def words(self) -> Int32:
        """The packed form, int32 [packed_words]; read-only."""
        return self._words

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including the packed form."""
        return self.class_of.nbytes + self.next_state.nbytes + self.accepting.nbytes + self.loops.nbytes + self._words.nbytes

    @property
    def digest(self) -> int:
        """62 bits of the content, equal for equal automata."""
        return self._digest

    @cached_property
    def _words(self) -> Int32:
        packed = self._packed(self.distances() if self.closes else np.zeros(self.states, np.int64))
        self.__dict__.pop("_known_steps", None)  # the words now contain it
        return packed

    def _packed(self, distances: NDArray[np.integer]) -> Int32:
        ending = self.accepting & (self.next_state == DEAD).all(axis=1)
        flags = self.accepting * STATE_ACCEPTING + ending * STATE_ENDING + (distances.astype(np.int64) << DISTANCE_SHIFT)
        cells = np.concatenate([flags[:, None].astype(np.uint16), self.next_state.view(np.uint16)], axis=1)
        words = np.zeros(packed_words(self.states, self.classes, len(self.loops)), np.int32)
        words[STATES_WORD], words[CLASSES_WORD] = self.states, self.classes
        words[COUNTED_WORD], words[HUBS_WORD] = self.counted, self.hubs
        words[START_WORD], words[START_COUNT_WORD] = self.start & STATE_MASK, self.start >> COUNT_SHIFT
        words[FARTHEST_WORD] = int((distances + self._least_of_hubs()).max()) if distances.any() else 0
        words[CLASS_OF_WORD:CELLS_WORD] = self.class_of.view(np.int32)
        words[CELLS_WORD:].view(np.uint16)[: cells.size] = cells.reshape(-1)
        words[len(words) - self.loops.size :] = self.loops.reshape(-1)
        words.setflags(write=False)
        return words

    def _least_of_hubs(self) -> NDArray[np.int64]:
        """Minimum characters of the counted string that begins in each state; int64 [states]."""
        least = np.zeros(self.states, np.int64)
        least[self.hubs :] = self.loops[self.hubs - self.counted :, LOOP_LEAST]
        return least

    def distances(self) -> NDArray[np.int64]:
        """For each state: the minimum number of bytes to an accepting state, at most MOST_DISTANCE; int64 [states]. In a counted
        string, the distance assumes that the minimum length is reached.
        """
        least = self._least_of_hubs()
        if not least.any() and (steps := self.__dict__.get("_known_steps")) is not None:
            return np.minimum(steps, MOST_DISTANCE)
        begins, targets = self._runs()
        source = np.repeat(np.arange(self.states), np.diff(begins, append=len(targets)))
        source, target = source[targets >= 0], targets[targets >= 0]
        order = np.argsort(target, kind="stable")
        first = np.searchsorted(target[order], np.arange(self.states + 1)).tolist()
        sources = source[order].tolist()
        if not least.any():
            return self._steps_to_end(sources, first)
        found = [0 if ends else MOST_DISTANCE for ends in self.accepting.tolist()]
        more, counted = least.tolist(), self.counted  # more: minimum characters of the string that begins with a step to a hub
        reached = {0: np.flatnonzero(self.accepting).tolist()}  # by distance
        while reached:
            level = min(reached)
            for state in reached.pop(level):
                for before in sources[first[state] : first[state + 1]] if found[state] == level else ():
                    far = level + 1 + (more[state] if before < counted else 0)
                    if far < found[before]:
                        found[before] = far
                        reached.setdefault(far, []).append(before)
        return np.array(found, np.int64)

    def _steps_to_end(self, sources: list[int], first: list[int]) -> NDArray[np.int64]:
        """distances() if no string has a minimum length. sources[first[s] : first[s + 1]]: the states with an edge to state s."""
        found = [0 if ends else MOST_DISTANCE for ends in self.accepting.tolist()]
        level, far = np.flatnonzero(self.accepting).tolist(), 0
        while level and far < MOST_DISTANCE - 1:
            far += 1
            following = []
            for state in level:
                for before in sources[first[state] : first[state + 1]]:
                    if found[before] == MOST_DISTANCE:
                        found[before] = far
                        following.append(before)
            level = following
        return np.array(found, np.int64)

    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
        """Runs of equal next states: the first run of each state, and the next state of each run."""
        changes = np.ones(self.next_state.shape, bool)
        changes[:, 1:] = self.next_state[:, 1:] != self.next_state[:, :-1]
        places = np.flatnonzero(changes)
        return np.searchsorted(places, np.arange(self.states) * self.classes), self.next_state.reshape(-1)[places]

    @cached_property
    def _digest(self) -> int:
        return digest_of(self._words)

    @classmethod
    def of_words(cls, words: Int32) -> Self:
        """The automaton of a packed form. Raises ValueError if the form is invalid."""
        _require(len(words) >= CELLS_WORD, "a packed automaton is too short")
        states, classes = int(words[STATES_WORD]), int(words[CLASSES_WORD])
        _require(1 <= states <= MOST_STATES and 1 <= classes <= BYTES, "a packed automaton's sizes are out of range")
        counted = int(words[COUNTED_WORD])
        _require(0 < counted <= states, "a packed automaton's first state of a counted string is out of range")
        length = packed_words(states, classes, states - counted)
        _require(len(words) == length, "the length of a packed automaton does not match its sizes")
        loops = words[length - LOOP_WORDS * (states - counted) :].reshape(-1, LOOP_WORDS).copy()
        count = int(words[START_COUNT_WORD])
        _require(
            0 <= int(words[START_WORD]) < states and 0 <= count <= NO_MOST, "the start of a packed automaton is out of range"
        )
        start = position_of(int(words[START_WORD]), count)
        cells = words[CELLS_WORD:].view(np.uint16)[: states * (1 + classes)].reshape(states, 1 + classes)
        class_of = words[CLASS_OF_WORD:CELLS_WORD].copy().view(np.uint8)  # a view would keep all words alive
        distances, accepting = (cells[:, 0] >> DISTANCE_SHIFT).astype(np.int64), (cells[:, 0] & STATE_ACCEPTING) != 0
        closes = bool(distances.any() or accepting.all())
        automaton = cls(class_of, cells[:, 1:].astype(np.int16), accepting, closes, loops, start)
        # The equations of distances have a unique solution, so checking them suffices.
        fine = not closes or np.array_equal(distances, automaton._one_byte_before(distances))
        _require(fine, "a packed automaton has wrong distances")
        packed = automaton._packed(distances)
        _require(np.array_equal(packed, words), "the flags or padding of a packed automaton are invalid")
        automaton.__dict__["_words"] = packed  # of the cached property
        return automaton

    def _one_byte_before(self, distances: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distance of each state, computed from the distances of its next states."""
        begins, targets = self._runs()
        plain = int(begins[self.counted]) if self.counted < self.states else len(targets)  # runs of states outside of loops
        far = np.append(distances, MOST_DISTANCE)[targets]  # DEAD is -1, the last element
        far[:plain] = np.append(distances + self._least_of_hubs(), MOST_DISTANCE)[targets[:plain]]
        nearest = np.minimum.reduceat(far, begins) + 1
        return np.where(self.accepting, 0, np.minimum(nearest, MOST_DISTANCE))

    def advance(self, position: int, output: bytes) -> int:
        """The position after some bytes, or DEAD if no string of the language continues with them."""
        if position == DEAD:
            return DEAD
        state, count = position & STATE_MASK, position >> COUNT_SHIFT
        counted, next_state = self.counted, self.next_state.item
        for of_class in self.class_of[np.frombuffer(output, np.uint8)].tolist():
            following = next_state(state, of_class)
            if following == DEAD:
                return DEAD
            if state >= counted or following >= counted:
                count = self._count_after(state, following, count)
                if count == DEAD:
                    return DEAD
            state = following
        return position_of(state, count)

    def following(self, position: int) -> set[int]:
        """The positions after one byte of any class."""
        state, count = position & STATE_MASK, position >> COUNT_SHIFT
        found = set()
        for target in set(self.next_state[state].tolist()) - {DEAD}:
            after = self._count_after(state, target, count) if max(state, target) >= self.counted else 0
            if after != DEAD:
                found.add(position_of(target, after))
        return found

    def _count_after(self, state: int, following: int, count: int) -> int:
        """The count after a step into, within or out of a counted string; DEAD if the string's length forbids the step."""
        if state < self.counted:
            return 0
        least, most = self._lengths[state - self.counted]
        if following < self.counted:
            return 0 if count >= least else DEAD
        if count >= most:
            return DEAD
        return count + 1 if following >= self.hubs else count

    def may_end(self, position: int) -> bool:
        """Whether the output may end at this position."""
        return bool(self.accepting[position & STATE_MASK])

    def must_end(self, position: int) -> bool:
        """Whether the output may end at this position and no byte can follow."""
        return self.may_end(position) and bool((self.next_state[position & STATE_MASK] == DEAD).all())

    def accepts(self, output: bytes) -> bool:
        """Whether the bytes are a complete string of the language."""
        position = self.advance(self.start, output)
        return position != DEAD and self.may_end(position)


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)


def _closure(source: NDArray[np.integer], target: NDArray[np.integer], start: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The states reachable from `start` over the edges source -> target, including `start`: bool [states]."""
    order = np.argsort(source, kind="stable")
    target, first = target[order], np.searchsorted(source[order], np.arange(len(start) + 1))
    reached, waiting = start.copy(), deque(np.flatnonzero(start))
    while waiting:
        state = waiting.popleft()
        new = np.unique(target[first[state] : first[state + 1]])
        new = new[~reached[new]]
        reached[new] = True
        waiting.extend(new)
    return reached
