"""Sampling kernels in the interpreter, against the CPU sampler; small capacities make every search path run."""

from typing import Any

import numpy as np
import pytest
import support.models.kernel_cases as cases
import torch
import triton
import triton.language as tl

from blinkpy.kernels.sampling.sample_tokens import VARIANTS
from blinkpy.kernels.sampling.sampling_call import SamplingWorkspace
from blinkpy.models.cpu.cpu_sampler import uniform
from blinkpy.queues import submission as E


# Flat: searches in the whole row; peaked: the head is enough.
@pytest.mark.parametrize(("spread", "ties"), [(0.8, True), (0.5, False), (4.0, False)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling(rng: np.random.Generator, spread: float, ties: bool, variant: str) -> None:
    make = {"rows": 5, "bucket": 6, "vocabulary": 300, "spread": spread, "ties": ties, "variant": variant}
    workspace = SamplingWorkspace.allocate(6, 300, "cpu", chunk=128, capacity=32, block=256)
    cases.sampling_case(rng, "cpu", workspace=workspace, **make)


def test_small_vocabulary(rng: np.random.Generator) -> None:
    """Fewer tokens than log probabilities are asked for, and one chunk."""
    workspace = SamplingWorkspace.allocate(8, 11, "cpu", chunk=16, capacity=32, block=16)
    cases.sampling_case(rng, "cpu", rows=8, bucket=8, vocabulary=11, spread=1.0, workspace=workspace)


def test_programs_with_several_rows(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than programs for log probabilities, some of which ask for none."""
    monkeypatch.setattr("blinkpy.kernels.sampling.record_logprobs.PROGRAMS", 3)
    workspace = SamplingWorkspace.allocate(11, 40, "cpu", chunk=64, capacity=32, block=64)
    cases.sampling_case(rng, "cpu", rows=10, bucket=11, vocabulary=40, spread=1.0, workspace=workspace)


# Flat distributions of which a filter keeps more than can be sorted at once, and peaked ones of which it keeps a few candidates.
FLAT, PEAKED = {"rows": 4, "vocabulary": 300, "spread": 0.5}, {"rows": 12, "vocabulary": 60, "spread": 2.0}


@pytest.mark.parametrize(
    ("made", "filters"),
    [
        *((FLAT, filters) for filters in ({E.WORD_TOP_K: 120}, {E.WORD_TOP_P: 0.9}, {E.WORD_MIN_P: 0.2}, {})),
        *((PEAKED, filters) for filters in ({E.WORD_TOP_K: 3}, {E.WORD_TOP_P: 0.6}, {E.WORD_MIN_P: 0.3})),
    ],
)
def test_filters(rng: np.random.Generator, made: dict[str, Any], filters: dict[int, float]) -> None:
    """Half of the draws are for the last token that a filter keeps."""
    chunk = 512 if made is FLAT else 64
    workspace = SamplingWorkspace.allocate(made["rows"], made["vocabulary"], "cpu", chunk=chunk, capacity=32, block=chunk)
    off = {E.WORD_TOP_K: 0, E.WORD_TOP_P: 1.0, E.WORD_MIN_P: 0.0, E.WORD_TEMPERATURE: 1.7}
    cases.sampling_case(rng, "cpu", bucket=made["rows"], workspace=workspace, fixed=off | filters, **made)


@pytest.mark.parametrize("word", [E.WORD_REPETITION_PENALTY, E.WORD_PRESENCE_PENALTY, E.WORD_FREQUENCY_PENALTY])
def test_penalties(rng: np.random.Generator, word: int) -> None:
    """Greedy with few tokens, so that the wrong penalty of one shows."""
    workspace = SamplingWorkspace.allocate(30, 10, "cpu", chunk=4, capacity=32, block=16)
    fixed = {name: 1.0 if name == E.WORD_REPETITION_PENALTY else 0.0 for name in cases.PARAMETERS} | {word: 1.4}
    cases.sampling_case(rng, "cpu", rows=30, bucket=30, vocabulary=10, spread=1.0, workspace=workspace, history=30, fixed=fixed)


@pytest.mark.parametrize("word", [None, E.WORD_FREQUENCY_PENALTY])
def test_stop_ids_before_min_tokens(rng: np.random.Generator, word: int | None) -> None:
    """Few tokens, many of them stop ids: draws from the wrong logits show, with penalties and without."""
    workspace = SamplingWorkspace.allocate(30, 12, "cpu", chunk=4, capacity=32, block=16)
    fixed = {name: 1.0 if name == E.WORD_REPETITION_PENALTY else 0.0 for name in cases.PENALTIES}
    fixed |= {E.WORD_MIN_TOKENS: 1000, E.WORD_TEMPERATURE: 1.7} | ({} if word is None else {word: 1.4})
    cases.sampling_case(rng, "cpu", rows=30, bucket=30, vocabulary=12, spread=1.0, workspace=workspace, fixed=fixed)


@triton.jit
def numbers_kernel(seed, positions, out, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[i] = the number of positions[i]. positions, out: [count]."""
    places = tl.arange(0, count)
    tl.store(out + places, tl.rand(seed, tl.load(positions + places)))


def test_the_cpu_samplers_numbers_are_tritons(rng: np.random.Generator) -> None:
    positions = rng.integers(0, 2**20, 64, dtype=np.int32)
    for seed in (0, 7, *rng.integers(0, 2**63, 4).tolist()):
        found = torch.empty(64)
        numbers_kernel[(1,)](seed, torch.from_numpy(positions), found, 64)
        assert found.tolist() == [float(uniform(np.int64(seed), position)) for position in positions]
