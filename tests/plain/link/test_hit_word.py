"""The hit word names its request."""

import numpy as np

from blinkpy.queues.hit_word import HIT_LIMIT, hits_of, pack_hits
from blinkpy.queues.words import EPOCH_SHIFT


def test_a_word_is_its_requests_alone(rng: np.random.Generator) -> None:
    for _ in range(2000):
        epoch, counter, pages = (int(rng.integers(1, limit)) for limit in (2**31, 2**32 - 1, HIT_LIMIT))
        name = epoch << EPOCH_SHIFT | counter
        word = pack_hits(name, pages)
        assert 0 <= word < 2**63
        assert hits_of(word, name) == pages
        assert hits_of(0, name) == 0
        other = int(rng.choice([name + 1, name ^ 1 << int(rng.integers(32)), name + (1 << EPOCH_SHIFT)]))
        assert hits_of(word, other) == 0
    assert hits_of(pack_hits(2**63 - 1, HIT_LIMIT - 1), 2**63 - 1) == HIT_LIMIT - 1
