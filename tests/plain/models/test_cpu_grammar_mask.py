"""The mask of the CPU's sampler against a walk over every token."""

import numpy as np
from support.models.random_grammars import RandomGrammars

from blinkpy.kv.grammars import NO_LIMIT
from blinkpy.models.cpu.cpu_sampler import _mask_row, mask_illegal, warm_up_rules
from blinkpy.queues.submission import STOP_IDS


def test_only_illegal_tokens_are_masked(rng: np.random.Generator) -> None:
    vocabulary, slots = 300, 40
    grammars = RandomGrammars(rng, slots, vocabulary)
    arrays, seen = grammars.arrays(), 0
    for slot in np.flatnonzero(grammars.slot >= 0).tolist():
        logits = rng.standard_normal(vocabulary).astype(np.float32)
        stop_ids = np.full(STOP_IDS, -1, np.int32)
        stop_ids[: rng.integers(STOP_IDS)] = vocabulary + 7  # beyond the model's vocabulary
        stop_ids[-3:] = rng.integers(0, vocabulary, 3)
        masked = logits.copy()
        most = int(rng.choice([0, 1, 2, 3, NO_LIMIT]))
        mask_illegal(masked, arrays, int(grammars.slot[slot]), int(grammars.state[slot]), stop_ids, most)
        legal = grammars.legal(slot, stop_ids[stop_ids < vocabulary], most)
        np.testing.assert_array_equal(masked, np.where(legal, logits, -np.inf))
        seen += int(legal.sum())
    assert 0 < seen < slots * vocabulary


def test_a_mask_is_compiled_once(rng: np.random.Generator) -> None:
    """At the start: compiling takes seconds, in which an engine makes no progress."""
    arrays = RandomGrammars(rng, 4, 30).arrays()
    warm_up_rules(arrays)
    compiled = list(_mask_row.signatures)
    for most in (NO_LIMIT, 3, np.int32(3), np.int64(3)):
        mask_illegal(np.zeros(30, np.float32), arrays, 0, 0, np.full(STOP_IDS, -1, np.int32), most)
    assert _mask_row.signatures == compiled
