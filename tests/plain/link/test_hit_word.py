"""The hit word names its request."""

import numpy as np

from blinkpy.queues.words import EPOCH_SHIFT, HIT_LIMIT, WAIT_LIMIT, WAIT_SHIFT, hits_of, pack_hits, wait_of


def test_a_word_is_its_requests_alone(rng: np.random.Generator) -> None:
    for _ in range(2000):
        epoch, counter, pages = (int(rng.integers(1, limit)) for limit in (2**31 - 1, 2**32 - 1, HIT_LIMIT))
        name, waited = epoch << EPOCH_SHIFT | counter, int(rng.integers(WAIT_LIMIT << WAIT_SHIFT))
        word = pack_hits(name, pages, waited)
        assert 0 <= word < 2**63
        assert (hits_of(word, name), wait_of(word, name)) == (pages, waited >> WAIT_SHIFT << WAIT_SHIFT)
        assert (hits_of(0, name), wait_of(0, name)) in ((0, -1), (0, 0))
        near = min(2**32 - 1, counter + int(rng.integers(1, 4_000_000)))
        changed = [name + 1, name ^ 1 << int(rng.integers(63)), name + (1 << EPOCH_SHIFT), epoch << EPOCH_SHIFT | near]
        for other in changed:
            assert other == name or (hits_of(word, other), wait_of(word, other)) == (0, -1), (name, other)
    most = pack_hits(2**63 - 1, HIT_LIMIT - 1, 2**62)
    assert (hits_of(most, 2**63 - 1), wait_of(most, 2**63 - 1)) == (HIT_LIMIT - 1, WAIT_LIMIT - 1 << WAIT_SHIFT)
