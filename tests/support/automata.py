"""Small automata for tests."""

from collections.abc import Sequence

import numpy as np

from blinkpy.queues.byte_automaton import BYTES, DEAD, ByteAutomaton
from blinkpy.queues.words import Int32
from blinkpy.verify.sim.grammar_supply import MOST_LOOP, with_a_string, written_out


class WordsOfSlot:
    """The parts of a slot's packed form that device code reads. Any other read is an error, and so is a negative index."""

    def __init__(self, words: Int32, slot: int) -> None:
        self._words, self._slot = words.tolist(), slot

    def __getitem__(self, place: tuple[int, int]) -> int:
        slot, word = place
        assert slot == self._slot and 0 <= word < len(self._words), f"word {word} of slot {slot} is no word of the packed form"
        return self._words[word]


def automaton_of_choices(choices: Sequence[bytes]) -> ByteAutomaton:
    """Accepts these byte strings: a trie, with a separate class for each byte that occurs."""
    used = sorted({byte for choice in choices for byte in choice})
    class_of = np.full(BYTES, len(used), np.uint8)
    class_of[used] = range(len(used))
    rows, accepting = [[DEAD] * (len(used) + 1)], [False]
    for choice in choices:
        state = 0
        for byte in choice:
            if rows[state][class_of[byte]] == DEAD:
                rows[state][class_of[byte]] = len(rows)
                rows.append([DEAD] * (len(used) + 1))
                accepting.append(False)
            state = rows[state][class_of[byte]]
        accepting[state] = True
    return ByteAutomaton(class_of, np.array(rows, np.int16), np.array(accepting))


def random_automaton(rng: np.random.Generator, *, states: int = 0, classes: int = 0, dead: float = 0.4) -> ByteAutomaton:
    """A random automaton; with exactly `states` states if given. dead: approximate share of transitions to no state."""
    n, classes = states or int(rng.integers(1, 9)), classes or int(rng.integers(1, 5))
    table = np.where(rng.random((n, classes)) < dead, DEAD, rng.integers(0, n, (n, classes)))
    table[np.arange(n - 1), rng.integers(0, classes, n - 1)] = np.arange(1, n)  # a chain through all states; the last accepts
    accepting = rng.random(n) < 0.3
    accepting[-1] = True
    return ByteAutomaton.trimmed(rng.integers(0, classes, BYTES).astype(np.uint8), table, accepting)


def random_counted_automaton(rng: np.random.Generator, classes: int = 4) -> ByteAutomaton:
    """A random automaton with a counted string of up to MOST_CHARACTERS; half of them start in it."""
    plain = random_automaton(rng, states=5, classes=classes, dead=0.3)
    loop = int(rng.integers(1, MOST_LOOP + 1))
    return with_a_string(rng, plain.class_of, plain.next_state.astype(np.int64), plain.accepting, loop)


def random_position(rng: np.random.Generator, automaton: ByteAutomaton) -> int:
    """A random state that is reachable from the start."""
    return int(rng.choice(list(written_out(automaton).number)))
