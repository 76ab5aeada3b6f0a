"""Page hashes of the front end: those of the definition, for all page sizes, salts and lengths."""

import numpy as np
import pytest
from support.front_end.hash_reference import PRIMES, page_hashes

from blinkpy.queues import page_hash
from blinkpy.queues.page_hash import HASH_MULTIPLIER_RANGE, LARGEST_VOCAB, PageHasher


def draw_multipliers(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(*HASH_MULTIPLIER_RANGE)), int(rng.integers(*HASH_MULTIPLIER_RANGE))


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 256])
@pytest.mark.parametrize("salt", [0, 1, 2**31 - 1, 2**40 + 12345, 2**63 - 1])
def test_hashes_are_those_of_the_definition(page_size: int, salt: int, rng: np.random.Generator) -> None:
    multipliers = draw_multipliers(rng)
    hasher = PageHasher(page_size, multipliers)
    for length in (0, page_size - 1, page_size, int(rng.integers(0, 40 * page_size))):
        tokens = rng.integers(0, LARGEST_VOCAB, length, dtype=np.int32)
        hashes = hasher.hashes(tokens, salt)
        assert hashes.dtype == np.int64
        assert hashes.tolist() == page_hashes(tokens.tolist(), page_size, multipliers, salt)


def test_long_prompts_enlarge_the_tables(rng: np.random.Generator) -> None:
    multipliers = draw_multipliers(rng)
    hasher = PageHasher(4, multipliers)
    for pages in (5 * page_hash.FIRST_PAGES + 3, 7):
        tokens = rng.integers(0, 1000, 4 * pages, dtype=np.int32)
        assert hasher.hashes(tokens, 9).tolist() == page_hashes(tokens.tolist(), 4, multipliers, 9)


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_the_largest_numbers_do_not_overflow(page_size: int, rng: np.random.Generator) -> None:
    """The largest tokens of three vocabularies: the largest, the largest whose hashes are summed in float64, and the next.
    Multipliers make large products: near half of the primes, -1 modulo the primes, and the largest that engines draw."""
    in_floats = 2**53 // 2**30 // page_size
    halves = [PRIMES[0] // 2 + int(rng.integers(-9, 9)), PRIMES[1] // 2 + int(rng.integers(-9, 9))]
    for multipliers in (
        halves,
        (PRIMES[0] - 1, PRIMES[1] - 1),
        (HASH_MULTIPLIER_RANGE[1] - 1,) * 2,
        (1, 1),
        draw_multipliers(rng),
    ):
        for vocab_size in (LARGEST_VOCAB, in_floats, in_floats + 1):
            tokens = vocab_size - 1 - rng.integers(0, 3, 9 * page_size, dtype=np.int32)
            hasher = PageHasher(page_size, tuple(multipliers), vocab_size)
            assert hasher.sums_in == (np.float64 if vocab_size <= in_floats else np.int64)
            assert np.abs(hasher._weights).max() <= 2**30, "what the choice between them relies on"
            hashes = hasher.hashes(tokens)
            assert hashes.tolist() == page_hashes(tokens.tolist(), page_size, multipliers)


def test_usual_vocabularies_are_summed_in_floats(rng: np.random.Generator) -> None:
    """Which is several times as fast; and the numbers are the same."""
    multipliers, tokens = draw_multipliers(rng), rng.integers(0, 152_064, 16 * 700, dtype=np.int32)
    fast, slow = PageHasher(16, multipliers, 152_064), PageHasher(16, multipliers)
    assert [hasher.sums_in.kind for hasher in (fast, slow)] == ["f", "i"]
    assert fast.hashes(tokens, 5).tolist() == slow.hashes(tokens, 5).tolist() == page_hashes(tokens.tolist(), 16, multipliers, 5)


@pytest.mark.parametrize("multipliers", [(0, 0), (0, 70_001), (70_001, PRIMES[1])])
def test_multipliers_that_forget(multipliers: tuple[int, int], rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 1000, 333, dtype=np.int32)
    assert PageHasher(16, multipliers).hashes(tokens, 7).tolist() == page_hashes(tokens.tolist(), 16, multipliers, 7)
