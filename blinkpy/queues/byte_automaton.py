"""Byte automata: a finite automaton over the bytes of a request's output, which defines the allowed outputs.

Its packed form, int32 words, crosses a queue pair and is stored in the engine's memory. Device code reads
it there (blinkpy/kv/, blinkpy/models/cpu/, blinkpy/kernels/sampling/), so the form is defined only here:

    word                        holds
    --------------------------  --------------------------------------------------------------------------------------
    0                           states
    1                           classes of bytes
    2 .. 65                     the class of each byte, four bytes a word
    66 ..                       cells of 16 bits, two a word, 1 + classes for each state: STATE_* flags and the distance to
                                an end << DISTANCE_SHIFT, then the next state for each class, or DEAD_CELL

The distance of a state is the number of bytes of the shortest text that completes the output. That also bounds the
number of tokens, if each byte is a token. Otherwise all distances are 0, and outputs are not led to an end.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.words import Int32, digest_of

BYTES = 256
MOST_STATES = (1 << 15) - 1
STATES_WORD, CLASSES_WORD, CLASS_OF_WORD = range(3)
CELLS_WORD = CLASS_OF_WORD + BYTES // 4
CELL_BITS, CELL_MASK = 16, 0xFFFF
DEAD, DEAD_CELL = -1, 0xFFFF  # no string of the language continues with this byte
STATE_ACCEPTING = 1  # the output may end here
STATE_ENDING = 2  # the output must end here: no byte continues it
DISTANCE_SHIFT = 2
MOST_DISTANCE = (1 << CELL_BITS - DISTANCE_SHIFT) - 1  # a larger distance counts as this one


def packed_words(states: int, classes: int) -> int:
    """The number of int32 words of a packed automaton."""
    return CELLS_WORD + (states * (1 + classes) + 1) // 2


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton that starts in state 0. Every state reaches an accepting state.

    class_of: uint8 [256], the class of each byte.
    next_state: int16 [states, classes], DEAD if no string continues.
    accepting: bool [states].
    closes: whether the packed form has distances.
    Raises ValueError for wrong shapes, types or ranges; `trimmed` makes an automaton of any table.
    """

    class_of: NDArray[np.uint8]
    next_state: NDArray[np.int16]
    accepting: NDArray[np.bool_]
    closes: bool = True

    def __post_init__(self) -> None:
        _require(self.class_of.shape == (BYTES,) and self.class_of.dtype == np.uint8, "class_of must be uint8 [256]")
        _require(self.next_state.ndim == 2 and self.next_state.dtype == np.int16, "next_state must be int16 [states, classes]")
        _require(self.accepting.shape == (self.states,) and self.accepting.dtype == np.bool_, "accepting must be bool [states]")
        _require(1 <= self.states <= MOST_STATES, f"an automaton has 1 to {MOST_STATES} states, not {self.states}")
        _require(1 <= self.classes <= BYTES and int(self.class_of.max()) < self.classes, "a byte's class is out of range")
        _require(DEAD <= int(self.next_state.min()) and int(self.next_state.max()) < self.states, "a next state is out of range")

    @property
    def states(self) -> int:
        return int(self.next_state.shape[0])

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
        """The automaton without the states that the start does not reach, or that reach no accepting one; the
        others keep their order. next_state: integers [states, classes]. Raises ValueError if no string is accepted.
        """
        source, class_ = np.nonzero(next_state >= 0)
        target = next_state[source, class_]
        keep = _closure(source, target, np.arange(len(next_state)) == 0) & _closure(target, source, accepting)
        _require(bool(keep[0]), "the automaton accepts no string")
        number = np.append(np.where(keep, np.cumsum(keep) - 1, DEAD), DEAD)  # DEAD is -1, the last element
        _require(int(keep.sum()) <= MOST_STATES, f"an automaton has at most {MOST_STATES} states, not {int(keep.sum())}")
        return cls(class_of.astype(np.uint8), number[next_state[keep]].astype(np.int16), accepting[keep], closes)

    def words(self) -> Int32:
        """The packed form, int32 [packed_words]; read-only."""
        return self._words

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including the packed form."""
        return self.class_of.nbytes + self.next_state.nbytes + self.accepting.nbytes + self._words.nbytes

    @property
    def digest(self) -> int:
        """62 bits of the content, equal for equal automata."""
        return self._digest

    @cached_property
    def _words(self) -> Int32:
        return self._packed(self.distances() if self.closes else np.zeros(self.states, np.int64))

    def _packed(self, distances: NDArray[np.integer]) -> Int32:
        ending = self.accepting & (self.next_state == DEAD).all(axis=1)
        flags = self.accepting * STATE_ACCEPTING + ending * STATE_ENDING + (distances.astype(np.int64) << DISTANCE_SHIFT)
        cells = np.concatenate([flags[:, None].astype(np.uint16), self.next_state.view(np.uint16)], axis=1)
        words = np.zeros(packed_words(self.states, self.classes), np.int32)
        words[STATES_WORD], words[CLASSES_WORD] = self.states, self.classes
        words[CLASS_OF_WORD:CELLS_WORD] = self.class_of.view(np.int32)
        words[CELLS_WORD:].view(np.uint16)[: cells.size] = cells.reshape(-1)
        words.setflags(write=False)
        return words

    def distances(self) -> NDArray[np.int64]:
        """Of each state: the fewest bytes to an accepting state, at most MOST_DISTANCE; int64 [states]."""
        following = np.sort(self.next_state, axis=1)
        new = following >= 0
        new[:, 1:] &= following[:, 1:] != following[:, :-1]
        source, place = np.nonzero(new)
        target = following[source, place]
        order = np.argsort(target, kind="stable")
        first = np.searchsorted(target[order], np.arange(self.states + 1)).tolist()
        sources = source[order].tolist()
        found = [0 if ends else MOST_DISTANCE for ends in self.accepting.tolist()]
        level, reached = 0, np.flatnonzero(self.accepting).tolist()
        while reached and level + 1 < MOST_DISTANCE:
            level, states, reached = level + 1, reached, []
            for state in states:
                for before in sources[first[state] : first[state + 1]]:
                    if found[before] > level:
                        found[before] = level
                        reached.append(before)
        return np.array(found, np.int64)

    @cached_property
    def _digest(self) -> int:
        return digest_of(self._words)

    @classmethod
    def of_words(cls, words: Int32) -> Self:
        """The automaton of a packed form. Raises ValueError if the form is invalid."""
        _require(len(words) >= CELLS_WORD, "a packed automaton is too short")
        states, classes = int(words[STATES_WORD]), int(words[CLASSES_WORD])
        _require(1 <= states <= MOST_STATES and 1 <= classes <= BYTES, "a packed automaton's sizes are out of range")
        _require(len(words) == packed_words(states, classes), "the length of a packed automaton does not match its sizes")
        cells = words[CELLS_WORD:].view(np.uint16)[: states * (1 + classes)].reshape(states, 1 + classes)
        class_of = words[CLASS_OF_WORD:CELLS_WORD].copy().view(np.uint8)  # a view would keep all words alive
        distances, accepting = (cells[:, 0] >> DISTANCE_SHIFT).astype(np.int64), (cells[:, 0] & STATE_ACCEPTING) != 0
        closes = bool(distances.any() or accepting.all())
        automaton = cls(class_of, cells[:, 1:].astype(np.int16), accepting, closes)
        # The equations of distances have one solution, so they need not be computed.
        fine = not closes or np.array_equal(distances, automaton._one_byte_before(distances))
        _require(fine, "a packed automaton has wrong distances")
        packed = automaton._packed(distances)
        _require(np.array_equal(packed, words), "the flags or padding of a packed automaton are invalid")
        automaton.__dict__["_words"] = packed  # of the cached property
        return automaton

    def _one_byte_before(self, distances: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distance of each state by the distances of the next ones."""
        padded = np.append(distances, MOST_DISTANCE)  # DEAD is -1, the last element
        nearest = np.minimum(padded[self.next_state].min(axis=1) + 1, MOST_DISTANCE)
        return np.where(self.accepting, 0, nearest)

    def advance(self, state: int, output: bytes) -> int:
        """The state after some bytes, or DEAD if no string of the language continues with them."""
        for byte in output:
            if state != DEAD:
                state = int(self.next_state[state, self.class_of[byte]])
        return state

    def must_end(self, state: int) -> bool:
        """Whether the state is accepting and no byte continues it."""
        return bool(self.accepting[state]) and bool((self.next_state[state] == DEAD).all())

    def accepts(self, output: bytes) -> bool:
        """Whether the bytes are a complete string of the language."""
        state = self.advance(0, output)
        return state != DEAD and bool(self.accepting[state])


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
