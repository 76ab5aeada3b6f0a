"""Grammars in the loop on the GPU, and in its steps driven by the host."""

import numpy as np
import pytest
from support.automata import automaton_of_choices
from support.grammar_outputs import JSON, generate_legal_outputs

from blinkpy import LLM, SamplingParams


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_every_output_is_a_string_of_its_automaton_or_a_prefix(control: str, rng: np.random.Generator) -> None:
    """More rows than slots for grammars; and a grammar with a single output."""
    sizes = {"slots": 48, "max_num_seqs": 24, "grammar_slots": 6, "max_model_len": 256, "num_pages": 400}
    with LLM("demo", device="cuda", control=control, load_format="dummy", check_integrity="idle", **sizes) as llm:
        for _ in range(3):
            generate_legal_outputs(llm, rng, 120)
        one = SamplingParams(max_tokens=200, grammar=automaton_of_choices([JSON]), ignore_eos=True, temperature=2.0)
        assert [done.outputs[0].text.encode() for done in llm.generate(["a", "b", "c"], one)] == [JSON] * 3
