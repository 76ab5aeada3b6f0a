"""Token rules of a simulated world: small random ones, some of them damaged. The model keeps to their bitmask alone."""

from typing import NamedTuple

import numpy as np

from blinkpy.queues.array_types import Int32, Int64
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

RULES = 4  # good ones
MOST = 6  # biases, and banned sequences, of one
RULE_DAMAGES = 7  # damaged ones, behind the good ones


class RuleSupply(NamedTuple):
    """A rules, the last RULE_DAMAGES of them damaged; V tokens, N words of the longest."""

    words: Int32  # [A, N] packed
    length: Int64  # [A] words of each
    digest: Int64  # [A] what front ends call them
    allowed: Int32  # [RULES, V]


def random_rules(seed: int, vocab_size: int) -> RuleSupply:
    """Rules for a vocabulary. The damaged ones have biases, a sequence, and a bitmask."""
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
    """The words of whole rules, made invalid in one of RULE_DAMAGES ways."""
    words = rules.words().copy()
    biases, sequence = int(words[BIASES_WORD]), FIRST_WORD + 2 * int(words[BIASES_WORD])
    if kind == 0:
        words[FIRST_WORD + 1] = words[FIRST_WORD]  # a token twice
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
