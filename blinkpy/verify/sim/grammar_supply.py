"""Grammars of a simulated world: small random automata over a vocabulary of a few bytes, some of them damaged.

Front ends look up what a token leads to in a table by token, which NumPy fills from the automata; the scheduler and the model
walk the packed automata byte by byte.
"""

import random
from typing import NamedTuple

import numpy as np

from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.array_types import Int32, Int64
from blinkpy.queues.byte_automaton import (
    BYTES,
    CELL_BITS,
    CELLS_WORD,
    CLASS_OF_WORD,
    CLASSES_WORD,
    DEAD,
    STATES_WORD,
    ByteAutomaton,
    packed_words,
)

ALPHABET = b"ab{"
LONGEST_PIECE, MOST_STATES, MOST_CLASSES = 5, 7, 4
GRAMMAR_WORDS = max(packed_words(MOST_STATES, MOST_CLASSES), 144)  # the token rules of rule_supply.py need as many
MORE_THAN_SHARE = 2  # automata of a world beyond a queue pair's share, so that some are evicted
DAMAGES = 5  # damaged automata, behind the good ones


class GrammarSupply(NamedTuple):
    """A automata, the last DAMAGES of them damaged; V tokens."""

    words: Int32  # [A, GRAMMAR_WORDS] packed
    length: Int64  # [A] words of each
    digest: Int64  # [A] what front ends call them; which is which differs from queue pair to queue pair, and from epoch to epoch
    following: Int32  # [A - DAMAGES, MOST_STATES, V] next state by token, DEAD
    accepting: Int32  # [A - DAMAGES, MOST_STATES] 1 where the output may end
    ending: Int32  # [A - DAMAGES, MOST_STATES] 1 where it must


def random_pieces(draw: random.Random, vocab_size: int) -> list[bytes]:
    """The bytes of each token; a few have none, as special tokens."""
    return [bytes(draw.choices(ALPHABET, k=draw.choice((0, 1, 1, 1, 2, 3, LONGEST_PIECE)))) for _ in range(vocab_size)]


def random_supply(seed: int, share: int, pieces: list[bytes]) -> GrammarSupply:
    """Automata for queue pairs with a share; hardly any where that is 0."""
    draw = np.random.default_rng(seed)
    good = share + MORE_THAN_SHARE if share else 1
    automata = [_random_automaton(draw) for _ in range(good)]
    supply = GrammarSupply(
        words=np.zeros((good + DAMAGES, GRAMMAR_WORDS), np.int32),
        length=np.zeros(good + DAMAGES, np.int64),
        digest=draw.integers(0, 2, good + DAMAGES) << 32 | np.arange(good + DAMAGES),
        following=np.full((good, MOST_STATES, len(pieces)), DEAD, np.int32),
        accepting=np.zeros((good, MOST_STATES), np.int32),
        ending=np.zeros((good, MOST_STATES), np.int32),
    )
    place = TokenBytes.of(pieces, len(pieces)).place
    spelled = np.zeros((LONGEST_PIECE, len(pieces)), np.uint8)
    for token, piece in enumerate(pieces):
        spelled[: len(piece), token] = list(piece)
    for i, automaton in enumerate(automata):
        states = np.tile(np.arange(automaton.states)[:, None], len(pieces))
        for position, byte in enumerate(spelled):
            moved = np.where(states >= 0, automaton.next_state[states, automaton.class_of[byte]], DEAD)
            states = np.where(position < place[:, 1], moved, states)
        supply.following[i, : automaton.states] = np.where(place[:, 1] > 0, states, DEAD)
        supply.accepting[i, : automaton.states] = automaton.accepting
        supply.ending[i, : automaton.states] = automaton.accepting & (automaton.next_state == DEAD).all(axis=1)
    for i in range(good + DAMAGES):
        words = automata[i % good].words()
        supply.words[i, : len(words)], supply.length[i] = words, len(words)
    for kind in range(DAMAGES):
        _damage(supply, good + kind, kind)
    return supply


def _random_automaton(draw: np.random.Generator) -> ByteAutomaton:
    states, classes = int(draw.integers(1, MOST_STATES + 1)), int(draw.integers(1, MOST_CLASSES + 1))
    table = np.where(draw.random((states, classes)) < 0.3, DEAD, draw.integers(0, states, (states, classes)))
    chain = np.arange(states - 1)
    table[chain, draw.integers(0, classes, states - 1)] = chain + 1
    accepting = draw.random(states) < 0.3
    accepting[-1] = True
    class_of = np.zeros(BYTES, np.uint8)
    class_of[list(ALPHABET)] = draw.integers(0, classes, len(ALPHABET))
    return ByteAutomaton(class_of, table.astype(np.int16), accepting)


def _damage(supply: GrammarSupply, i: int, kind: int) -> None:
    """Make the i-th automaton invalid, in one of DAMAGES ways."""
    words = supply.words[i]
    if kind == 0:
        words[CELLS_WORD] = int(words[STATES_WORD]) << CELL_BITS  # leads to a state behind the last one
    elif kind == 1:
        words[CLASS_OF_WORD + BYTES // 4 - 1] = int(words[CLASSES_WORD]) << 24
    elif kind == 2:
        words[STATES_WORD] += 1
    elif kind == 3:
        words[CLASSES_WORD] = 0
    else:
        words[CELLS_WORD] ^= 2  # STATE_ENDING where it is not true, or the other way round
