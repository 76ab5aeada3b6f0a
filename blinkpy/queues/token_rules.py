"""Token rules of one request: biases of single tokens, the allowed tokens, and banned sequences.

Their packed form, int32 words, crosses a queue pair and is stored in the engine's memory like an automaton
(byte_automaton). This module alone defines it:

    word                        holds
    --------------------------  --------------------------------------------------------------------------------------
    0                           MARK, which no automaton starts with
    1, 2, 3                     biases b, banned sequences s, words of the bitmask m
    4 ..                        b token ids, ascending
    4 + b ..                    b biases, float32
    4 + 2 b ..                  s sequences of SEQUENCE_TOKENS token ids, which end with the banned token; -1 before
                                shorter sequences
    4 + 2 b + 16 s ..           a bit for each token of the vocabulary, 1: allowed; m is 0 if all are allowed

The last token of a banned sequence is forbidden if the output ends with the other tokens of the sequence.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from blinkpy.queues.words import Int32, digest_of

MARK = -1
MARK_WORD, BIASES_WORD, SEQUENCES_WORD, BITMASK_WORD = range(4)
FIRST_WORD = 4
SEQUENCE_TOKENS = 16
ANY_TOKEN = -1  # fills a shorter sequence in front
MOST_BIASES, MOST_SEQUENCES = 1024, 256
HIGHEST_BIAS = 100.0
HIGHEST_BIAS_BITS = int(np.float32(HIGHEST_BIAS).view(np.int32))
BITS_SHIFT = 5  # token >> BITS_SHIFT: its word of the bitmask


def bitmask_words(vocab_size: int) -> int:
    """Words of a bitmask with one bit per token."""
    return (vocab_size + (1 << BITS_SHIFT) - 1) >> BITS_SHIFT


@dataclass(frozen=True, eq=False)
class TokenRules:
    """Rules for the tokens of a vocabulary.

    biases: added to the logits, by token id; -HIGHEST_BIAS to HIGHEST_BIAS. allowed: the only possible tokens; None: all tokens.
    banned: sequences of 1 to SEQUENCE_TOKENS token ids. Raises ValueError if a number or an id is out of range.
    """

    vocab_size: int
    biases: Mapping[int, float]
    allowed: Sequence[int] | None = None
    banned: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        sequences = [list(sequence) for sequence in self.banned]
        _require(len(self.biases) <= MOST_BIASES, f"at most {MOST_BIASES} tokens can have a bias, not {len(self.biases)}")
        _require(len(sequences) <= MOST_SEQUENCES, f"at most {MOST_SEQUENCES} sequences can be banned, not {len(sequences)}")
        _require(self.allowed is None or len(self.allowed) > 0, "no token is allowed")
        for sequence in sequences:
            _require(1 <= len(sequence) <= SEQUENCE_TOKENS, f"a banned sequence has 1 to {SEQUENCE_TOKENS} tokens")
        for bias in self.biases.values():
            _require(abs(bias) <= HIGHEST_BIAS, f"a bias is {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g}, not {bias}")  # NaN is neither
        for token in {*self.biases, *(self.allowed or ()), *(token for sequence in sequences for token in sequence)}:
            _require(0 <= token < self.vocab_size, f"token {token} is not in the vocabulary of {self.vocab_size}")

    def words(self) -> Int32:
        """The packed form, int32 [n]; read-only."""
        return self._words

    @property
    def digest(self) -> int:
        """62 bits of the content: equal for equal rules, otherwise different."""
        return self._digest

    @cached_property
    def _words(self) -> Int32:
        ids = np.array(sorted(self.biases), np.int32)
        values = np.array([self.biases[token] for token in ids.tolist()], np.float32)
        banned = np.full((len(self.banned), SEQUENCE_TOKENS), ANY_TOKEN, np.int32)
        for i, sequence in enumerate(self.banned):
            banned[i, SEQUENCE_TOKENS - len(sequence) :] = list(sequence)
        bits = np.zeros(0 if self.allowed is None else bitmask_words(self.vocab_size) * 32, np.uint8)
        bits[list(self.allowed or ())] = 1
        mask = np.packbits(bits, bitorder="little").view("<i4")
        head = np.array([MARK, len(ids), len(banned), len(mask)], np.int32)
        words = np.concatenate([head, ids, values.view(np.int32), banned.reshape(-1), mask])
        words.setflags(write=False)
        return words

    @cached_property
    def _digest(self) -> int:
        return digest_of(self._words)

    @classmethod
    def of_words(cls, words: Int32, vocab_size: int) -> Self:
        """The rules of a packed form. Raises ValueError if the form is invalid."""
        _require(len(words) > FIRST_WORD and words[MARK_WORD] == MARK, "the words are not token rules")
        biases, sequences, mask = (int(word) for word in words[BIASES_WORD:FIRST_WORD])
        _require(0 <= biases <= MOST_BIASES and 0 <= sequences <= MOST_SEQUENCES, "a count of token rules is out of range")
        _require(mask in (0, bitmask_words(vocab_size)), "the bitmask of token rules has the size of another vocabulary")
        lengths = (FIRST_WORD, biases, biases, SEQUENCE_TOKENS * sequences, mask)
        _require(sum(lengths) == len(words), "the length of token rules does not match their counts")
        _, ids, values, banned, bits = np.split(np.ascontiguousarray(words), np.cumsum(lengths)[:-1])
        table = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")
        rules = cls(
            vocab_size,
            dict(zip(ids.tolist(), np.ascontiguousarray(values).view(np.float32).tolist(), strict=True)),
            np.flatnonzero(table).tolist() if mask else None,
            [_without_padding(one) for one in banned.reshape(-1, SEQUENCE_TOKENS).tolist()],
        )
        _require(np.array_equal(rules.words(), words), "the padding or order of token rules is invalid")
        return rules


def _without_padding(sequence: list[int]) -> list[int]:
    first = next((i for i, token in enumerate(sequence) if token != ANY_TOKEN), SEQUENCE_TOKENS)
    return sequence[first:]


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)


MOST_BAD_WORDS, MAX_BAD_WORD = 128, 256  # words per request, each in up to two spellings; characters per word


def banned_sequences(words: Iterable[str], encode: Callable[[str], Int32]) -> list[list[int]]:
    """The token sequences of each word: at the start of a text, and after a space if that spelling has the same length and
    another first token.

    encode: encodes without special tokens.
    Raises ValueError for a word with no tokens or too many tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        alone, spaced = (encode(text).tolist() for text in (word.lstrip(), f" {word.lstrip()}"))
        if not 1 <= len(alone) <= SEQUENCE_TOKENS:
            raise ValueError(f"{word!r} has {len(alone)} tokens, but a bad word must have 1 to {SEQUENCE_TOKENS}")
        sequences.append(alone)
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            sequences.append(spaced)
    return sequences
