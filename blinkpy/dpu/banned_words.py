"""Bad words as token sequences, in vLLM's interpretation."""

from collections.abc import Callable, Iterable

from blinkpy.queues.token_rules import SEQUENCE_TOKENS
from blinkpy.queues.words import Int32

MOST_BAD_WORDS, MAX_BAD_WORD = 128, 256  # words per request, each in up to two spellings; characters per word


def banned_sequences(words: Iterable[str], encode: Callable[[str], Int32]) -> list[list[int]]:
    """The token sequences of each word: at the start of a text; and after a space, if that has the same
    length and another first token.

    encode: encodes without special tokens.
    Raises ValueError for a word with no token or too many.
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
