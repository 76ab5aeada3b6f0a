"""The bytes of every token of a vocabulary, packed for the device."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from blinkpy.queues.words import Int32

LONGEST = 1 << 10  # maximum bytes of a token; longer tokens are never legal


class TokenBytes(NamedTuple):
    """The bytes of V tokens. Each token's bytes start at a word boundary."""

    place: Int32  # [V, 2] first word, number of bytes; 0 bytes: the token is never legal
    words: Int32  # [n] four bytes a word, the first in the lowest bits

    @classmethod
    def of(cls, pieces: Sequence[bytes], vocab_size: int) -> Self:
        """Pack the bytes of tokens. pieces: the bytes of the first tokens; the other tokens get no bytes."""
        kept = [piece if len(piece) <= LONGEST else b"" for piece in pieces[:vocab_size]]
        lengths = np.zeros(vocab_size, np.int64)
        lengths[: len(kept)] = [len(piece) for piece in kept]
        words = (lengths + 3) // 4
        padded = b"".join(piece + bytes(-len(piece) % 4) for piece in kept)
        place = np.stack([np.cumsum(words) - words, lengths], axis=1)
        return cls(place.astype(np.int32), np.frombuffer(padded or bytes(4), "<i4").astype(np.int32))

    def pieces(self) -> list[bytes]:
        """The bytes of each token."""
        memory = self.words.tobytes()
        return [memory[4 * first : 4 * first + length] for first, length in self.place.tolist()]
