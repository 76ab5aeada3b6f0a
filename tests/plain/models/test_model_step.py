"""The CPU engine's step: its writes, the memory that it leaves alone, and that no request depends on its
neighbours."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.models.bare_forward import BareForward
from support.models.model_zoo import BASE, MOE, VOCAB
from support.models.paged_batch import PagedBatches, Sequence
from support.models.redrawn_cases import redrawn_at_ties

from blinkpy.config import ConfigError
from blinkpy.kv.state import GROUP, GROUPS, TOKENS
from blinkpy.models.cpu.cpu_step import CpuStep
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config
from blinkpy.models.paged_cache import PagedCache, kv_bytes_per_page
from blinkpy.models.weights.array_weights import dummy_array_weights
from blinkpy.models.weights.weight_loader import dummy_weights
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import SEQUENCE_TOKENS, TokenRules

PAGE, PAGES = 8, 200


@pytest.fixture(scope="module")
def architecture() -> DecoderDescription:
    return describe_config({**BASE, "architectures": ["LlamaForCausalLM"]})


def make_step(architecture: DecoderDescription, by: str = "torch") -> CpuStep:
    """by: the decoder, torch or NumPy."""
    numpy, torchs = dummy_array_weights(architecture, 7, 0.2), dummy_weights(architecture, 7, torch.float32, spread=0.2)
    return CpuStep(architecture, numpy if by == "numpy" else torchs, PAGES, PAGE, 256, 512)


def make_batches(rng: np.random.Generator) -> PagedBatches:
    return PagedBatches(rng, page_size=PAGE, num_pages=PAGES, slots=10, max_model_len=256, max_tokens=512, max_rows=10)


def generate(step: CpuStep, batches: PagedBatches, sequences: list[Sequence], count: int, chunk: int = 512) -> None:
    """Until each sequence has `count` new tokens."""
    while True:
        work = [(s, min(chunk, len(s.tokens) - s.computed)) for s in sequences if len(s.tokens) - s.prompt_length < count]
        if not work:
            return
        batch = batches.batch(work)
        before = batch.sampled.copy()
        step.run(batch, batches.requests)
        silent = batch.emits == 0
        assert (batch.sampled[silent] == before[silent]).all(), "a row that doesn't emit got a token"
        assert ((batch.sampled[~silent] >= 0) & (batch.sampled[~silent] < VOCAB)).all()
        batches.commit(batch)


PARAMETERS = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": -5},
    {"repetition_penalty": 1.5},
    {"temperature": 1.3, "seed": 4, "presence_penalty": 1.5, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("by", ["torch", "numpy"])
@redrawn_at_ties
def test_requests_do_not_feel_each_other(by: str, architecture: DecoderDescription, rng: np.random.Generator) -> None:
    """The same tokens alone, together, in chunks, and after a preemption; other tokens with another seed."""
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(5, 60, len(PARAMETERS))]
    alone = []
    for prompt, parameters in zip(prompts, PARAMETERS, strict=True):
        step, batches = make_step(architecture, by), make_batches(rng)
        sequence = batches.add(prompt, **parameters)
        generate(step, batches, [sequence], 25)
        alone.append(sequence.tokens)

    step, batches = make_step(architecture, by), make_batches(rng)
    sequences = [batches.add(p, **parameters) for p, parameters in zip(prompts, PARAMETERS, strict=True)]
    generate(step, batches, sequences, 12, chunk=int(rng.integers(3, 20)))
    batches.preempt(sequences[1])
    batches.preempt(sequences[4])
    generate(step, batches, sequences, 25, chunk=7)
    assert [s.tokens for s in sequences] == alone

    step, batches = make_step(architecture, by), make_batches(rng)
    other = batches.add(prompts[1], **{**PARAMETERS[1], "seed": 12})
    generate(step, batches, [other], 25)
    assert other.tokens != alone[1]


@pytest.mark.parametrize("by", ["torch", "numpy"])
@redrawn_at_ties
def test_output_of_another_engine_counts_as_output(by: str, architecture: DecoderDescription, rng: np.random.Generator) -> None:
    """By penalties: the same tokens as if one engine generates all of them."""
    prompt = rng.integers(0, VOCAB, 20).tolist()
    for parameters in PARAMETERS[3:]:
        step, batches = make_step(architecture, by), make_batches(rng)
        whole = batches.add(prompt, **parameters)
        generate(step, batches, [whole], 25)
        begun = int(rng.integers(1, 24))
        step, batches = make_step(architecture, by), make_batches(rng)
        follower = batches.add(whole.tokens[: 20 + begun], output_tokens=begun, **parameters)
        generate(step, batches, [follower], 25 - begun)
        assert follower.tokens == whole.tokens


def test_token_rules_distinguish_own_output_from_moved_output_and_prompt(
    architecture: DecoderDescription, rng: np.random.Generator
) -> None:
    """min_tokens are those of this engine's own output, and banned sequences are met in another engine's, too; never in a prompt.
    The logits are the test's: the stop id, then the banned token, then another."""
    step: Any = make_step(architecture, "numpy")
    stop, banned, other = VOCAB - 1, VOCAB - 2, VOCAB - 3
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [stop, banned, other]] = 3, 2, 1
    step.decoder.logits = lambda hidden: logits.copy()
    seen = set[int]()
    for _ in range(60):
        batches, length = make_batches(rng), int(rng.integers(2, 9))
        moved, own, least = int(rng.integers(length)), int(rng.integers(4)), int(rng.integers(6))
        tokens = rng.integers(0, VOCAB - 3, length + own).tolist()
        context = int(rng.integers(1, min(len(tokens), SEQUENCE_TOKENS - 1) + 1))
        words = TokenRules(VOCAB, {}, None, [[*tokens[-context:], banned]]).words()
        entry: dict[str, Any] = {"output_tokens": moved, "min_tokens": least, "stop_ids": [stop] + [-1] * (STOP_IDS - 1)}
        sequence = batches.add(tokens[:length], rules_words=len(words), **entry)
        sequence.tokens += tokens[length:]
        batch, step._grammars = batches.batch([(sequence, len(tokens))]), SimpleNamespace(words=words[None])
        step.run(batch, batches.requests._replace(rules=np.zeros(10, np.int32)))
        wanted = stop if own >= least else other if context <= moved + own else banned
        assert batch.sampled[0] == wanted, (moved, own, least, context)
        seen.add(wanted)
    assert seen == {stop, banned, other}


@pytest.mark.parametrize("by", ["torch", "numpy"])
@pytest.mark.parametrize("family", [{"architectures": ["LlamaForCausalLM"]}, {"architectures": ["Qwen3MoeForCausalLM"], **MOE}])
@redrawn_at_ties
def test_wanted_tokens_are_those_of_the_whole_batch(by: str, family: dict[str, Any], rng: np.random.Generator) -> None:
    """The last layer may leave tokens out, but not their keys and values."""
    architecture = describe_config({**BASE, **family})
    whole, narrow, batches = make_step(architecture, by), make_step(architecture, by), make_batches(rng)
    sequences = [batches.add(rng.integers(0, VOCAB, 40).tolist()) for _ in range(4)]
    for lengths in ([1, 7, 20, 30], [3, 1, 20, 10]):
        batch = batches.batch(list(zip(sequences, lengths, strict=True)))
        tokens = int(batch.counts[TOKENS])
        expected = whole.decoder.forward(batch, batches.requests.page_table)
        assert len(expected) == tokens
        for wanted in (np.zeros(0, np.int64), np.sort(rng.choice(tokens, 5, replace=False)), np.arange(tokens)):
            found = narrow.decoder.forward(batch, batches.requests.page_table, wanted)
            assert found.shape == (len(wanted), architecture.hidden_size)
            np.testing.assert_allclose(found, expected[wanted], rtol=1e-4, atol=1e-5)
            for left, right in zip(whole.cache.keys + whole.cache.values, narrow.cache.keys + narrow.cache.values, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
        batch.emits[:] = 0
        batches.commit(batch)


def test_agrees_with_the_bare_forward(architecture: DecoderDescription, rng: np.random.Generator) -> None:
    """The baseline of the benchmark computes the same logits, over a dense cache."""
    step, batches = make_step(architecture), make_batches(rng)
    bare = BareForward(architecture, step.decoder.weights, 6, 64)
    sequences = [batches.add(rng.integers(0, VOCAB, 40).tolist()) for _ in range(6)]
    for position in range(40):
        batch = batches.batch([(s, 1) for s in sequences])
        ours = step.decoder.logits(step.decoder.forward(batch, batches.requests.page_table))
        tokens = torch.tensor([s.tokens[position] for s in batches.rows])
        assert float((ours - bare(tokens, position)).abs().max()) < 1e-4
        batch.emits[:] = 0
        batches.commit(batch)


def test_cache_size(architecture: DecoderDescription) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = PagedCache(architecture, 10, PAGE, dtype)
        total = sum(t.numel() * t.element_size() for t in cache.keys + cache.values)
        assert total == 10 * kv_bytes_per_page(architecture, PAGE, dtype.itemsize)


@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_batches_beyond_the_memory_are_refused(by: str, architecture: DecoderDescription, rng: np.random.Generator) -> None:
    """Compiled code does not check its places: a value that doesn't fit must not reach it."""
    small = CpuStep(architecture, make_step(architecture, by).decoder.weights, PAGES, PAGE, 32, 16)
    batches = make_batches(rng)
    prompt = rng.integers(0, VOCAB, 60).tolist()
    with pytest.raises(ValueError, match="17 tokens"):
        small.run(batches.batch([(batches.add(prompt), 17)]), batches.requests)
    sequence = batches.add(prompt)
    sequence.computed = 30
    with pytest.raises(ValueError, match="up to 40"):
        small.run(batches.batch([(sequence, 10)]), batches.requests)
    with pytest.raises(ConfigError, match="page_size"):
        CpuStep(architecture, small.decoder.weights, PAGES, 2, 32, 16)


@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_a_step_in_groups_of_layers_gives_what_a_whole_one_gives(
    by: str, architecture: DecoderDescription, rng: np.random.Generator
) -> None:
    """Bit for bit, with another step between two groups; with more groups than layers, too.

    Claim decisions/groups: A step in groups of layers, with other steps in between, gives the same result
    as a whole step.
    """
    for groups in (2, len(architecture.layers) + 1):
        step, whole, batches = make_step(architecture, by), make_step(architecture, by), make_batches(rng)
        first, second = (batches.add(rng.integers(0, VOCAB, n).tolist()) for n in (40, 9))
        cut, other = (batches.batch([(sequence, n)]) for sequence, n in ((first, 40), (second, 9)))
        for batch in (cut, other):
            whole.run(batch, batches.requests)
        expected = [batch.sampled.copy() for batch in (cut, other)]
        cut.sampled[:], other.sampled[:], cut.counts[GROUPS] = -7, -7, groups
        for group in range(groups):
            assert (cut.sampled == -7).all()
            cut.counts[GROUP] = group
            step.run(cut, batches.requests)
            if group == 0:
                step.run(other, batches.requests)
        assert cut.sampled[0] == expected[0][0]
        assert other.sampled[0] == expected[1][0]
        for own, its in zip((*step.cache.keys, *step.cache.values), (*whole.cache.keys, *whole.cache.values), strict=True):
            assert np.array_equal(np.asarray(own), np.asarray(its))
