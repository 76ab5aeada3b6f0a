"""Token rules and scored prompts in the loop on the GPU, and in steps driven by the host, compared with the engine on the CPU."""

from typing import Any

import numpy as np
import pytest
from support.automata import automaton_of_choices

from blinkpy import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "slots": 24,
    "max_num_seqs": 12,
    "max_model_len": 256,
    "num_pages": 40,
    "grammar_slots": 6,
}
TEXT = "It was a dark and stormy night, and the captain of the ship had not slept. He went up to the deck. "


def requests(rng: np.random.Generator, vocab_size: int) -> list[SamplingParams]:
    """Greedy requests, so that both engines generate the same tokens; more different rules than slots for them."""
    made = []
    for i in range(40):
        rules: dict[str, Any] = {}
        if i % 4 != 3:
            rules["logit_bias"] = {int(token): float(rng.normal() * 5) for token in rng.choice(vocab_size, 300, replace=False)}
            rules["bad_words"] = ["the", "captain", "of the", "sea"]
        if i % 4 == 1:
            rules["allowed_token_ids"] = rng.choice(vocab_size, vocab_size // 2, replace=False).tolist()
        if i % 8 == 4:
            rules["grammar"] = automaton_of_choices([b"yes, he did", b"no, he did not"])
        scores = {"prompt_logprobs": 3} if i % 2 else {}
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 30)), temperature=0.0, repetition_penalty=1.1, logprobs=1, **rules, **scores
        )
        made.append(params)
    return made


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_the_gpu_matches_the_cpu(control: str, rng: np.random.Generator) -> None:
    texts = [TEXT[: int(n)] for n in rng.integers(2, len(TEXT), 40)]
    with LLM("demo", device="cuda", control=control, check_integrity="idle", **SIZES) as llm:
        params = requests(rng, llm._pair.facts.vocab_size)
        found = llm.generate(texts, params)
    with LLM("demo", device="cpu", **SIZES) as llm:
        expected = llm.generate(texts, params)
    differing = 0
    for ours, theirs, one in zip(found, expected, params, strict=True):
        assert len(ours.prompt_logprobs or ()) == len(theirs.prompt_logprobs or ())
        for table, other in zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True):
            assert (table is None) == (other is None)
            for token in set(table or ()) & set(other or ()):
                assert table is not None and other is not None
                assert table[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
        differing += ours.outputs[0].token_ids != theirs.outputs[0].token_ids
        if one.allowed_token_ids is not None:
            assert set(ours.outputs[0].token_ids) <= set(one.allowed_token_ids)
    assert differing <= 2, "only near ties may differ"
