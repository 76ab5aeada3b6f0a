"""Token rules on the CPU, against transformers' processors."""

import numpy as np
import torch
from support.models.random_grammars import random_rules
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from blinkpy.models.cpu.cpu_sampler import apply_rules


def test_rules_do_what_the_processors_do(rng: np.random.Generator) -> None:
    """In a slot with words behind them; outputs of few different tokens, so that sequences are met."""
    met = 0
    for _ in range(150):
        vocabulary = int(rng.integers(5, 90))
        rules, output = random_rules(rng, vocabulary), rng.integers(0, 3, rng.integers(0, 30)).astype(np.int32)
        logits = rng.standard_normal(vocabulary).astype(np.float32)
        expected, ids = torch.from_numpy(logits.copy())[None], torch.from_numpy(output.astype(np.int64))[None]
        if rules.biases:
            expected = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in rules.biases.items()])(ids, expected)
        if rules.banned:
            before = expected
            expected = NoBadWordsLogitsProcessor([list(sequence) for sequence in rules.banned])(ids, expected)
            met += any(len(sequence) > 1 for sequence in rules.banned) and bool((before != expected).any())
        if rules.allowed is not None:
            mask = torch.full_like(expected, -torch.inf)
            mask[0, list(rules.allowed)] = 0
            expected = expected + mask
        apply_rules(logits, np.append(rules.words(), np.full(5, 77, np.int32)), output)
        np.testing.assert_array_equal(logits, expected[0].numpy())
    assert met > 30
