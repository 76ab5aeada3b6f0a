"""Page hashes: the name of a full page of a prompt is a hash of all tokens up to its end.

A front end hashes prompts (PageHasher), and the engine hashes generated tokens
(blinkpy.kv.prefix_cache.extend_hash); both must compute the same numbers. A hash only finds candidates: the
engine compares tokens, so a collision costs time but never shares another request's page. The hash is a
polynomial modulo a prime below 2**31 with a secret multiplier m (Karp and Rabin's fingerprint):

    hash of t[0..n) = (salt * m**n + sum of (t[i] + 1) * m**(n - 1 - i)) mod prime

A client that does not know m can't construct prompts whose hashes collide. A page has two such hashes, with multipliers that each
engine draws at its start. No product exceeds 2**62, so NumPy, njit and CUDA compute the same number.
"""

import numpy as np
from numpy.typing import NDArray

HASH_MODULUS_1 = 2**31 - 1
HASH_MODULUS_2 = 2**31 - 19
HASH_SHIFT = 31
HASH_MULTIPLIER_RANGE = (1 << 16, HASH_MODULUS_2 - 1)  # range of an engine's random multipliers

LARGEST_VOCAB = 1 << 24  # maximum vocabulary of engines that hash pages
FIRST_PAGES = 256  # initial size of tables; a power of two
_MODULI = (HASH_MODULUS_1, HASH_MODULUS_2)


class PageHasher:
    """Hashes the pages of prompts for one engine.

    page_size: tokens, at most 256.
    multipliers: the engine's secrets. For tests of collisions: a multiple of the modulus makes a hash depend only on each page's
    last token.
    vocab_size: exclusive maximum of tokens; at most 2**24.

    The recurrence hash = before * m**page_size + own would need a loop in Python. Divided by m**(tokens up to the page's end), it
    becomes a plain sum, so NumPy computes all pages together. Division is multiplication by the inverse, which is exact modulo a
    prime.
    """

    def __init__(self, page_size: int, multipliers: tuple[int, int], vocab_size: int = LARGEST_VOCAB):
        self.page_size = page_size
        columns = list(zip(multipliers, _MODULI, strict=True))
        weights = np.array([[pow(m, exponent, p) for m, p in columns] for exponent in reversed(range(page_size))])
        self._for_the_ones = weights.sum(axis=0) % _MODULI  # because 1 is added to each token
        weights -= np.where(weights > np.array(_MODULI) // 2, _MODULI, 0)  # magnitude below 2**30
        # BLAS has no integer products. Sums of integers in float64 are exact in any order below 2**53.
        self.sums_in = np.dtype(np.float64 if vocab_size * page_size * 2**30 <= 2**53 else np.int64)
        self._weights = weights.astype(self.sums_in)
        self._step = [pow(m, page_size, p) for m, p in columns]
        self._step_back = [pow(step, -1, p) if step else 0 for step, p in zip(self._step, _MODULI, strict=True)]
        self._forgets = [column for column, step in enumerate(self._step) if step == 0]
        self._grow(FIRST_PAGES)

    def _grow(self, pages: int) -> None:
        """Compute tables for prompts of up to `pages` pages, int64 [pages, 2].

        The first two tables are the divisors of each page's hash and their inverses. The other two repeat one row, because
        broadcasting rows of two takes NumPy several times as long.
        """
        self._down, self._up = _powers(self._step_back, pages), _powers(self._step, pages)
        self._moduli, self._ones = np.repeat([_MODULI], pages, axis=0), np.repeat([self._for_the_ones], pages, axis=0)

    def hashes(self, tokens: NDArray[np.int32], cache_salt: int = 0) -> NDArray[np.int64]:
        """The hash of each full page of a prompt, int64 [n // page_size], in [0, 2**62).

        tokens: int32 [n], each in [0, vocab_size).
        cache_salt: in [0, 2**63).
        """
        size = self.page_size
        count = len(tokens) // size
        while count > len(self._moduli):
            self._grow(2 * len(self._moduli))
        moduli = self._moduli[:count]
        sums = tokens[: count * size].astype(self.sums_in).reshape(count, size).dot(self._weights)  # within 2**24 * 2**30 * 2**8
        sums = sums.astype(np.int64, copy=False)
        sums += self._ones[:count]
        sums %= moduli
        alone = sums[:, self._forgets] if self._forgets else None
        sums *= self._down[:count]
        sums %= moduli
        if cache_salt and count:
            sums[0] += cache_salt % HASH_MODULUS_1, cache_salt // HASH_MODULUS_1 % HASH_MODULUS_2
        np.add.accumulate(sums, axis=0, out=sums)
        sums %= moduli
        sums *= self._up[:count]
        sums %= moduli
        if alone is not None:
            sums[:, self._forgets] = alone
        return sums[:, 0] << HASH_SHIFT | sums[:, 1]


def _powers(bases: list[int], count: int) -> NDArray[np.int64]:
    """bases[column] ** (1 + row), modulo the column's prime: int64 [count, 2], count a power of two."""
    powers = np.array([bases], np.int64)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * powers[-1] % _MODULI])
    return powers
