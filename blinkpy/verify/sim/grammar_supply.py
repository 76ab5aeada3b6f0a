"""Grammars of a simulated world: small random automata over a few bytes. Half of them have a counted string, and some are
damaged.

Front ends look up the position after a token in a table, which NumPy fills from the automata without counts. The
scheduler and the model walk the packed automata byte by byte.
"""

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.byte_automaton import (
    BYTES,
    CELL_BITS,
    CELLS_WORD,
    CLASS_OF_WORD,
    CLASSES_WORD,
    COUNT_SHIFT,
    DEAD,
    DISTANCE_SHIFT,
    FARTHEST_WORD,
    HUBS_WORD,
    LOOP_HUB,
    NO_MOST,
    START_COUNT_WORD,
    START_WORD,
    STATE_ENDING,
    STATE_MASK,
    STATES_WORD,
    ByteAutomaton,
    packed_words,
    position_of,
)
from blinkpy.queues.token_rules import (
    BIASES_WORD,
    BITMASK_WORD,
    FIRST_WORD,
    HIGHEST_BIAS_BITS,
    MARK_WORD,
    SEQUENCE_TOKENS,
    SEQUENCES_WORD,
    TokenRules,
)
from blinkpy.queues.words import Int32, Int64

ALPHABET = b"ab{"
LONGEST_PIECE, MOST_STATES, MOST_CLASSES = 5, 7, 4
MOST_CHARACTERS, MOST_LOOP = 4, 3  # of a counted string: maximum characters, and states of its loop
MOST_POSITIONS = MOST_STATES + MOST_LOOP * MOST_CHARACTERS
GRAMMAR_WORDS = max(packed_words(MOST_STATES, MOST_CLASSES, MOST_LOOP), 144)  # the token rules below need 144
DEAD_SHARE = 0.3  # share of a state's bytes that lead nowhere
MORE_THAN_SHARE = 2  # automata in excess of a queue pair's share, to cause evictions
OPEN = 3  # index, of every four automata, whose outputs need not lead to an end
FAR = 1000  # greater than any distance
DAMAGES = 10  # number of damaged automata; they follow the valid automata


class GrammarSupply(NamedTuple):
    """A automata, the last DAMAGES of them damaged; V tokens."""

    words: Int32  # [A, GRAMMAR_WORDS] packed
    length: Int64  # [A] words of each
    digest: Int64  # [A] digests that front ends send; their assignment differs between pairs and epochs
    following: Int32  # [A - DAMAGES, MOST_POSITIONS, V] number of the next position by token, DEAD; the start has number 0
    accepting: Int32  # [A - DAMAGES, MOST_POSITIONS] 1 if the output may end here
    ending: Int32  # [A - DAMAGES, MOST_POSITIONS] 1 if the output must end here
    distance: Int32  # [A - DAMAGES, MOST_POSITIONS] bytes to an accepting state, or FAR; 0 if outputs need not end


def random_pieces(draw: random.Random, vocab_size: int) -> list[bytes]:
    """The bytes of each token. A few tokens have no bytes, like special tokens."""
    return [bytes(draw.choices(ALPHABET, k=draw.choice((0, 1, 1, 1, 2, 3, LONGEST_PIECE)))) for _ in range(vocab_size)]


def random_supply(seed: int, share: int, pieces: list[bytes], dead_ends: bool = False, dead: float = DEAD_SHARE) -> GrammarSupply:
    """Random automata: a few more than a queue pair's share, or one if the share is 0.

    dead_ends: no byte continues the last state of each.
    dead: share of dead bytes among bytes that need not continue a string.
    """
    draw = np.random.default_rng(seed)
    good = share + MORE_THAN_SHARE if share else 1
    automata = [replace(_random_automaton(draw, dead_ends, dead), closes=i % 4 != OPEN) for i in range(good)]
    supply = GrammarSupply(
        words=np.zeros((good + DAMAGES, GRAMMAR_WORDS), np.int32),
        length=np.zeros(good + DAMAGES, np.int64),
        digest=draw.integers(0, 2, good + DAMAGES) << 32 | np.arange(good + DAMAGES),
        following=np.full((good, MOST_POSITIONS, len(pieces)), DEAD, np.int32),
        accepting=np.zeros((good, MOST_POSITIONS), np.int32),
        ending=np.zeros((good, MOST_POSITIONS), np.int32),
        distance=np.full((good, MOST_POSITIONS), FAR, np.int32),
    )
    place = TokenBytes.of(pieces, len(pieces)).place
    spelled = np.zeros((LONGEST_PIECE, len(pieces)), np.uint8)
    for token, piece in enumerate(pieces):
        spelled[: len(piece), token] = list(piece)
    for i, automaton in enumerate(automata):
        table, accepting, _ = written_out(automaton)
        at = np.tile(np.arange(len(table))[:, None], len(pieces))
        for place_in, byte in enumerate(spelled):
            moved = np.where(at >= 0, table[at, automaton.class_of[byte]], DEAD)
            at = np.where(place_in < place[:, 1], moved, at)
        supply.following[i, : len(table)] = np.where(place[:, 1] > 0, at, DEAD)
        supply.accepting[i, : len(table)] = accepting
        supply.distance[i, : len(table)][accepting] = 0
        for _ in range(len(table)):  # no path to an end is longer
            for before, class_ in np.argwhere(table != DEAD).tolist():
                target = table[before, class_]
                supply.distance[i, before] = min(supply.distance[i, before], 1 + supply.distance[i, target])
        if not automaton.closes:
            supply.distance[i] = 0
        supply.ending[i, : len(table)] = accepting & (table == DEAD).all(axis=1)
    for i in range(good + DAMAGES):
        words = automata[i % good].words()
        supply.words[i, : len(words)], supply.length[i] = words, len(words)
    for kind in range(DAMAGES):
        _damage(supply, good + kind, kind)
    return supply


class WrittenOut(NamedTuple):
    """An automaton with counts expanded: a state for each of P reachable positions. The start is state 0. If a string has no
    maximum length, all counts above its minimum share one position.
    """

    table: Int32  # [P, classes] number of the next position, DEAD
    accepting: NDArray[np.bool_]  # [P]
    number: dict[int, int]  # of each position


def written_out(automaton: ByteAutomaton) -> WrittenOut:
    """An automaton without counts."""
    counted, hubs = automaton.counted, set(automaton.loops[:, LOOP_HUB].tolist())
    lengths = {counted + i: (least, most) for i, (_, least, most) in enumerate(automaton.loops.tolist())}
    next_state = automaton.next_state.tolist()

    def after(state: int, target: int, count: int) -> int:
        """The count after a step; -1 if the step violates a string's minimum or maximum length."""
        if state not in lengths:
            return 0
        least, most = lengths[state]
        if target not in lengths:
            return 0 if count >= least else -1
        count += target in hubs
        if most == NO_MOST:
            return min(count, least)
        return count if count + (target not in hubs) <= most else -1

    number = {automaton.start: 0}
    found, rows = [automaton.start], list[list[int]]()
    for position in found:  # grows meanwhile
        state, count = position & STATE_MASK, position >> COUNT_SHIFT
        row = []
        for target in next_state[state]:
            later = after(state, target, count) if target != DEAD else -1
            if later < 0:
                row.append(DEAD)
                continue
            following = position_of(target, later)
            if following not in number:
                number[following] = len(found)
                found.append(following)
            row.append(number[following])
        rows.append(row)
    return WrittenOut(np.array(rows, np.int32), automaton.accepting[[position & STATE_MASK for position in found]], number)


def _random_automaton(draw: np.random.Generator, dead_end: bool, dead: float) -> ByteAutomaton:
    loop = int(draw.integers(1, MOST_LOOP + 1)) if draw.random() < 0.5 else 0  # number of states in a counted string
    states, classes = int(draw.integers(1, MOST_STATES + 1 - loop)), int(draw.integers(2 if loop else 1, MOST_CLASSES + 1))
    table = np.where(draw.random((states, classes)) < dead, DEAD, draw.integers(0, states, (states, classes)))
    chain = np.arange(states - 1)
    table[chain, draw.integers(0, classes, states - 1)] = chain + 1
    accepting = draw.random(states) < 0.3
    accepting[-1] = True
    if dead_end and states > 1:
        table[-1] = DEAD
    class_of = np.zeros(BYTES, np.uint8)
    class_of[list(ALPHABET)] = draw.integers(0, classes, len(ALPHABET))
    if not loop:
        return ByteAutomaton(class_of, table.astype(np.int16), accepting)
    return with_a_string(draw, class_of, table, accepting, loop)


def with_a_string(
    draw: np.random.Generator, class_of: NDArray[np.uint8], table: Int64, accepting: NDArray[np.bool_], loop: int
) -> ByteAutomaton:
    """Add a counted string of `loop` states after a random state. Half of the time, the automaton starts within the string."""
    (states, classes), inside = table.shape, np.full((loop, table.shape[1]), DEAD)
    hub = states + loop - 1
    for body in range(loop - 1):
        inside[body, draw.random(classes) < 0.5] = hub
        inside[body, draw.integers(classes)] = states + draw.integers(loop - 1) if draw.random() < 0.3 else hub
        inside[body, draw.integers(classes)] = hub
    inside[-1] = np.where(draw.random(classes) < 0.5, DEAD, states + draw.integers(0, loop, classes))
    again, out = draw.choice(classes, 2, replace=False)
    inside[-1, again], inside[-1, out] = hub, draw.integers(0, states)
    begins = int(draw.integers(states - 1)) if states > 1 else 0  # the last state may be required as an end
    free = [class_ for class_ in range(classes) if table[begins, class_] != begins + 1] or [0]
    if states > 1 or not (table == DEAD).all():
        table[begins, free[int(draw.integers(len(free)))]] = hub
    most = int(draw.integers(1, MOST_CHARACTERS + 1))
    loops = np.tile(np.array([[hub, draw.integers(0, most + 1), most]], np.int32), (loop, 1))
    start = position_of(hub, int(draw.integers(most + 1))) if draw.random() < 0.5 else 0
    whole = np.concatenate([table, inside]).astype(np.int16)
    return ByteAutomaton(class_of, whole, np.append(accepting, np.zeros(loop, bool)), loops=loops, start=start)


def _damage(supply: GrammarSupply, i: int, kind: int) -> None:
    """Make the i-th automaton invalid, in one of DAMAGES ways."""
    words = supply.words[i]
    if kind == 0:
        words[CELLS_WORD] = int(words[STATES_WORD]) << CELL_BITS  # a target beyond the last state
    elif kind == 1:
        words[CLASS_OF_WORD + BYTES // 4 - 1] = int(words[CLASSES_WORD]) << 24
    elif kind == 2:
        words[STATES_WORD] += 1
    elif kind == 3:
        words[CLASSES_WORD] = 0
    elif kind == 4:
        words[CELLS_WORD] ^= STATE_ENDING
    elif kind == 6:
        words[START_WORD] = int(words[STATES_WORD])
    elif kind == 7:
        words[FARTHEST_WORD] += 1
    elif kind == 8:
        words[START_COUNT_WORD] += MOST_CHARACTERS + 1
    elif kind == 9:
        words[HUBS_WORD] += 1 if words[HUBS_WORD] < words[STATES_WORD] else -1
    else:
        words[CELLS_WORD] ^= 2 << DISTANCE_SHIFT  # of the first state


RULES = 4  # valid token rules
MOST = 6  # maximum biases, and maximum banned sequences, of a set
RULE_DAMAGES = 7  # number of damaged sets; they follow the valid sets


class RuleSupply(NamedTuple):
    """A sets of token rules, the last RULE_DAMAGES of them damaged; V tokens; N words in the longest."""

    words: Int32  # [A, N] packed
    length: Int64  # [A] words of each
    digest: Int64  # [A] digests that front ends send
    allowed: Int32  # [RULES, V]


def random_rules(seed: int, vocab_size: int) -> RuleSupply:
    """Token rules for a vocabulary. Each damaged set has biases, a banned sequence, and a bitmask."""
    draw = np.random.default_rng(seed)
    good = [_random_rules(draw, vocab_size, whole=False) for _ in range(RULES)]
    packed = [rules.words() for rules in good]
    packed += [_damaged(_random_rules(draw, vocab_size, whole=True), kind) for kind in range(RULE_DAMAGES)]
    supply = RuleSupply(
        words=np.zeros((len(packed), max(map(len, packed))), np.int32),
        length=np.array([len(words) for words in packed], np.int64),
        digest=draw.integers(0, 2, len(packed)) << 32 | np.arange(len(packed)),
        allowed=np.ones((RULES, vocab_size), np.int32),
    )
    for i, words in enumerate(packed):
        supply.words[i, : len(words)] = words
    for i, rules in enumerate(good):
        if rules.allowed is not None:
            supply.allowed[i] = np.isin(np.arange(vocab_size), rules.allowed)
    return supply


def _random_rules(draw: np.random.Generator, vocab_size: int, whole: bool) -> TokenRules:
    biased = draw.choice(vocab_size, draw.integers(2 if whole else 0, min(MOST, vocab_size) + 1), replace=False).tolist()
    lengths = draw.integers(1, SEQUENCE_TOKENS + 1, draw.integers(1 if whole else 0, MOST + 1)).tolist()
    sequences, allowed = [draw.integers(0, vocab_size, length).tolist() for length in lengths], None
    if whole or not (biased or sequences) or draw.random() < 0.7:
        allowed = draw.choice(vocab_size, draw.integers(1, vocab_size + 1), replace=False).tolist()
    return TokenRules(vocab_size, {token: float(draw.uniform(-100, 100)) for token in biased}, allowed, sequences)


def _damaged(rules: TokenRules, kind: int) -> Int32:
    """Damage valid token rules in one of RULE_DAMAGES ways, and return their words."""
    words = rules.words().copy()
    biases, sequence = int(words[BIASES_WORD]), FIRST_WORD + 2 * int(words[BIASES_WORD])
    if kind == 0:
        words[FIRST_WORD + 1] = words[FIRST_WORD]  # a duplicate token
    elif kind == 1:
        words[FIRST_WORD + biases] = HIGHEST_BIAS_BITS + 1
    elif kind == 2:
        words[sequence + SEQUENCE_TOKENS - 1] = rules.vocab_size
    elif kind == 3:
        words[sequence : sequence + SEQUENCE_TOKENS] = -1
    elif kind == 4:
        words[[SEQUENCES_WORD, BITMASK_WORD][len(words) & 1]] += 1
    elif kind == 5:
        words[sequence + SEQUENCE_TOKENS :] = 0  # nothing is allowed
    else:
        words[MARK_WORD] = 1
    return words
