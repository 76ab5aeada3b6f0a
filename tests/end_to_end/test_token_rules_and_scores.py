"""Token rules, and log probabilities of prompts, of the demonstration model, compared with transformers.

Claim outputs/scores (simulator): Token rules and scores of a prompt equal those of transformers. A preemption
changes no score.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.automata import automaton_of_choices
from transformers import AutoModelForCausalLM, LogitsProcessorList, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from blinkpy import LLM, SamplingParams
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues import words as W
from blinkpy.queues.token_rules import banned_sequences

TEXT = "It was a dark and stormy night, and the captain of the ship had not slept. He went up to the deck and looked at the sea. "
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """Few pages, so that scored prompts are preempted."""
    sizes = {"max_model_len": 256, "num_pages": 20, "slots": 12, "max_num_seqs": 8, "grammar_slots": 8}
    with LLM("demo", device="cpu", dtype="float32", check_integrity="always", batch_invariant=True, **sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)


def log_likelihoods(reference: Any, ids: list[int]) -> np.ndarray:
    """Log probabilities of all tokens at each place except the first: [n - 1, vocab]."""
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).numpy()


def test_log_likelihoods_are_those_of_transformers(demo: LLM, reference: Any, rng: np.random.Generator) -> None:
    """Texts with common starts, more than run at a time, with preemptions; generated tokens equal those without scores."""
    texts = [(TEXT * 3)[: int(n)] + "x" * i for i, n in enumerate(rng.integers(len(TEXT), 3 * len(TEXT), 16))]
    each = [
        SamplingParams(
            max_tokens=int(rng.integers(3, 40)), temperature=float(rng.choice([0.0, 1.0])), seed=i, repetition_penalty=1.2,
            frequency_penalty=0.3, min_tokens=int(rng.choice([0, 3])), prompt_logprobs=int(rng.choice([0, 5])),
            logprobs=None if i % 2 else 1, ignore_eos=True,
        )
        for i in range(len(texts))
    ]  # fmt: skip
    engine = demo._pair.transport.read_engine
    before = engine()
    scored = demo.generate(texts, each)
    assert engine()[W.COUNTER["preemptions"]] > before[W.COUNTER["preemptions"]]
    generated = engine()[W.COUNTER["generated_tokens"]] - before[W.COUNTER["generated_tokens"]]
    assert generated == sum(len(output.outputs[0].token_ids) for output in scored)
    plain = demo.generate(texts, [SamplingParams(**{**vars(params), "prompt_logprobs": None}) for params in each])
    for output, other, params in zip(scored, plain, each, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids and other.prompt_logprobs is None
        assert (output.outputs[0].logprobs is None) == (params.logprobs is None)
        first, *tables = output.prompt_logprobs or ()
        assert first is None
        expected = log_likelihoods(reference, output.prompt_token_ids)
        for token, table, values in zip(output.prompt_token_ids[1:], tables, expected, strict=True):
            assert table is not None and token in table
            assert {key: entry.logprob for key, entry in table.items()} == pytest.approx(
                {key: float(values[key]) for key in table}, abs=1e-3
            )
            top = sorted((entry.logprob for key, entry in table.items() if key != token), reverse=True)
            assert len(table) >= (params.prompt_logprobs or 0)
            assert not top or top[0] >= float(values.max()) - 1e-3 or token == int(values.argmax())


def test_outputs_under_rules_are_those_of_transformers_processors(demo: LLM, reference: Any, rng: np.random.Generator) -> None:
    """Greedy, with the model's own choices banned or lowered, so that rules matter at each place."""
    prompts = [TEXT[:60], "The old man", "A letter came"]
    ids = [demo.tokenizer.encode(prompt).tolist() for prompt in prompts]
    free = [output.outputs[0].token_ids for output in demo.generate(ids, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))]
    words = sorted({demo.tokenizer.decode(tokens[i : i + 2]).strip() for tokens in free for i in range(0, 12, 3)} - {""})
    usual = sorted({token for tokens in free for token in tokens})
    biases = {token: float(rng.uniform(-6, 3)) for token in usual[::2]}
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, bad_words=words, logit_bias=biases, ignore_eos=True)
    banned = banned_sequences(words, lambda text: demo.tokenizer.encode(text, add_special_tokens=False))
    processors = LogitsProcessorList([NoBadWordsLogitsProcessor(banned)])
    processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]))
    for prompt, output, before in zip(ids, demo.generate(ids, params), free, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for place, token in enumerate(tokens):  # each is the likeliest after the previous tokens, within rounding
            (scores,) = processors(torch.tensor([tokens[:place]], dtype=torch.int64), logits[place : place + 1])
            assert torch.isfinite(scores[token]) and scores[token] >= scores.max() - 1e-3
        assert len(tokens) == NEW_TOKENS and tokens != before


def test_only_allowed_tokens_come_also_under_a_grammar(demo: LLM, rng: np.random.Generator) -> None:
    """With penalties and log probabilities, which are the model's own; next to requests without rules."""
    allowed = [int(token) for token in rng.choice(demo.tokenizer.vocab_size, 9, replace=False)]
    several = [
        SamplingParams(max_tokens=20, temperature=2.0, seed=i, allowed_token_ids=allowed if i % 2 else None, ignore_eos=True,
                       repetition_penalty=1.5, logprobs=2)
        for i in range(6)
    ]  # fmt: skip
    outputs = demo.generate(["The ship"] * 6, several)
    for i, output in enumerate(outputs):
        assert (set(output.outputs[0].token_ids) <= set(allowed)) == bool(i % 2)
    first = [(output.outputs[0].logprobs or [{}])[0] for output in outputs]
    tops = [dict(sorted(table.items(), key=lambda item: -item[1].logprob)[:2]) for table in first]
    assert len({tuple(table) for table in tops}) == 1, "rules change no log probability"
    grammar = automaton_of_choices([b"yes", b"no"])
    no = demo.tokenizer.encode("no", add_special_tokens=False).tolist()
    params = SamplingParams(max_tokens=9, grammar=grammar, logit_bias=dict.fromkeys(no, 100.0), temperature=0.0)
    assert demo.generate("Is it true? ", params)[0].outputs[0].text == "no"


def test_biases_may_come_from_json(demo: LLM) -> None:
    biases: Any = {"7": 100.0}
    assert demo.generate("The", SamplingParams(max_tokens=1, temperature=0, logit_bias=biases))[0].outputs[0].token_ids == [7]


def test_rules_that_leave_no_token_end_the_request_alone(demo: LLM) -> None:
    with pytest.raises(RuntimeError, match="together leave no token"):
        demo.generate("The", SamplingParams(max_tokens=2, allowed_token_ids=[7], grammar=automaton_of_choices([b"yes"])))
    assert len(demo.generate("The", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logit_bias": {1: 101.0}}, "logit_bias must have biases of -100 to 100, not {1: 101.0}"),
        ({"logit_bias": {10**6: 1.0}}, "token 1000000 is not in the vocabulary"),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids must be token ids, not \[-1\]"),
        ({"bad_words": ["an extraordinarily long sequence of words " * 4]}, "but a bad word must have 1 to 16"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be 0 to 20"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"bad_words": "word"}, "bad_words must be"),
    ],
)
def test_out_of_range_rules_are_refused_with_a_reason(demo: LLM, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        demo.generate("The", SamplingParams(**options))
