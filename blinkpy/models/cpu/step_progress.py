"""A step in pieces of a fraction of a second: a word advances after each, which distinguishes "computing" from
"dead".
"""

from collections.abc import Iterator

import numpy as np

PIECE = 1 << 30  # multiply-adds
FEWEST_TOKENS = 16  # of a piece: each reads the whole weight


class StepProgress:
    """piece: maximum multiply-adds between two updates of the word, except in products with FEWEST_TOKENS
    tokens.
    """

    def __init__(self, piece: int = PIECE):
        self.piece = piece
        self.word = np.zeros(1, np.int64)  # the word that front ends read, once the engine has attached

    def pieces(self, tokens: int, work: int) -> Iterator[slice]:
        """Slices of `tokens` tokens, each of which takes `work` multiply-adds. The word moves when one is done."""
        size = self._tokens_of_piece(work)
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))
            self.word += 1

    def _tokens_of_piece(self, work: int) -> int:
        return max(FEWEST_TOKENS, self.piece // max(work, 1))
