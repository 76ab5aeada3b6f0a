"""Byte automata: a finite automaton over the bytes of a request's output, which defines the allowed outputs.

Its packed form, int32 words, crosses a queue pair and is stored in the engine's memory. Device code reads
it there (blinkpy/kv/, blinkpy/models/cpu/, blinkpy/kernels/sampling/), so the form is defined only here:

    word                        holds
    --------------------------  --------------------------------------------------------------------------------------
    0                           states
    1                           classes of bytes
    2 .. 65                     the class of each byte, four bytes a word
    66 ..                       cells of 16 bits, two a word, 1 + classes for each state: STATE_* flags, then the next
                                state for each class, or DEAD_CELL
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


def packed_words(states: int, classes: int) -> int:
    """The number of int32 words of a packed automaton."""
    return CELLS_WORD + (states * (1 + classes) + 1) // 2


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton that starts in state 0. Every state reaches an accepting state.

    class_of: uint8 [256], the class of each byte.
    next_state: int16 [states, classes], DEAD if no string continues.
    accepting: bool [states].
    Raises ValueError for wrong shapes, types or ranges; `trimmed` makes an automaton of any table.
    """

    class_of: NDArray[np.uint8]
    next_state: NDArray[np.int16]
    accepting: NDArray[np.bool_]

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
    def trimmed(cls, class_of: NDArray[np.uint8], next_state: NDArray[np.integer], accepting: NDArray[np.bool_]) -> Self:
        """The automaton without the states that the start does not reach, or that reach no accepting one; the
        others keep their order. next_state: integers [states, classes]. Raises ValueError if no string is accepted.
        """
        source, class_ = np.nonzero(next_state >= 0)
        target = next_state[source, class_]
        keep = _closure(source, target, np.arange(len(next_state)) == 0) & _closure(target, source, accepting)
        _require(bool(keep[0]), "the automaton accepts no string")
        number = np.append(np.where(keep, np.cumsum(keep) - 1, DEAD), DEAD)  # DEAD is -1, the last element
        _require(int(keep.sum()) <= MOST_STATES, f"an automaton has at most {MOST_STATES} states, not {int(keep.sum())}")
        return cls(class_of.astype(np.uint8), number[next_state[keep]].astype(np.int16), accepting[keep])

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
        ending = self.accepting & (self.next_state == DEAD).all(axis=1)
        flags = self.accepting * STATE_ACCEPTING + ending * STATE_ENDING
        cells = np.concatenate([flags[:, None].astype(np.uint16), self.next_state.view(np.uint16)], axis=1)
        words = np.zeros(packed_words(self.states, self.classes), np.int32)
        words[STATES_WORD], words[CLASSES_WORD] = self.states, self.classes
        words[CLASS_OF_WORD:CELLS_WORD] = self.class_of.view(np.int32)
        words[CELLS_WORD:].view(np.uint16)[: cells.size] = cells.reshape(-1)
        words.setflags(write=False)
        return words

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
        automaton = cls(class_of, cells[:, 1:].astype(np.int16), (cells[:, 0] & STATE_ACCEPTING) != 0)
        _require(np.array_equal(automaton.words(), words), "the flags or padding of a packed automaton are invalid")
        return automaton

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
