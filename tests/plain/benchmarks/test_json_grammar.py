"""Grammars of benchmarks of decode steps."""

import json

import numpy as np
import pytest

from benchmarks.common.json_grammar import ENDLESS, byte_level_tokenizer, endless_objects
from blinkpy.dpu.text.detokenizer import byte_alphabet
from blinkpy.queues.byte_automaton import DEAD, STATE_MASK

TOKENS = 800


@pytest.mark.parametrize("kind", ENDLESS)
def test_outputs_go_on(kind: str, rng: np.random.Generator) -> None:
    """Random legal tokens never end the output; with counted strings, most positions are within one."""
    automaton, alphabet = endless_objects(kind), byte_alphabet()
    spelled = [bytes(alphabet[one] for one in word) for word in json.loads(byte_level_tokenizer(2000))["model"]["vocab"]]
    position, counted = automaton.start, 0
    for _ in range(TOKENS):
        for token in rng.permutation(len(spelled)).tolist():
            following = automaton.advance(position, spelled[token])
            if following != DEAD:
                break
        assert following != DEAD and not automaton.must_end(following)
        position, counted = following, counted + ((following & STATE_MASK) >= automaton.counted)
    assert counted == 0 if kind == "strings" else counted > TOKENS // 2
