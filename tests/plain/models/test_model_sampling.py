"""The CPU sampler against literal, independent implementations."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from support.models import kernel_reference

from blinkpy.models.cpu import cpu_sampler
from blinkpy.models.cpu.cpu_sampler import (
    SamplingParameters,
    logprob_records,
    mask_stop_ids,
    penalize,
    read_parameters,
    sample_rows,
    uniform,
    warm_up,
)
from blinkpy.queues.submission import SQ_ENTRY, neutral_entries
from blinkpy.queues.words import LOGPROB_ENTRY


def parameters_of(rows: list[dict[str, float]]) -> SamplingParameters:
    entries = neutral_entries(len(rows))
    for entry, fields in zip(entries, rows, strict=True):
        for name, value in fields.items():
            entry[name] = value
    return read_parameters(entries)


def test_numbers_are_those_of_the_paper(rng: np.random.Generator) -> None:
    """tests/compiled/kernels/interpreted/test_sampling.py compares them with Triton's."""
    for seed in [0, 1, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63, 50).tolist()]:
        position = int(rng.integers(0, 2**31))
        assert uniform(np.int64(seed), np.int32(position)) == kernel_reference.uniform(seed, position)
    assert uniform(np.int64(1), np.int32(91_093_890)) == 0  # the first word of Philox is 0 there, which one in 2**32 is


def check_token(logits: np.ndarray, fields: dict[str, float], number: float, token: int) -> None:
    """The token must be what a full sort in float64 gives; a number or a cut within 1e-5 of a boundary allows both sides."""
    slack = 1e-5
    weights = np.exp((logits.astype(np.float64) - logits.max()) / fields["temperature"])
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = weights[order]
    top_k, top_p, min_p = int(fields.get("top_k", 0)), fields.get("top_p", 1.0), fields.get("min_p", 0.0)
    if 0 < top_k < len(order):
        weights[top_k:] = 0
    before = (weights.cumsum() - weights) / weights.sum()
    intervals = []
    for p_shift, min_shift in itertools.product((-slack, slack), repeat=2):
        kept = (weights > 0) & (weights >= min_p + min_shift)
        if top_p < 1:
            kept &= before < top_p + p_shift
        kept[0] = True
        share = np.where(kept, weights, 0).cumsum() / weights[kept].sum()
        place = int(np.flatnonzero(order == token)[0])
        if kept[place]:
            intervals.append((share[place] - weights[place] / weights[kept].sum(), share[place]))
    assert intervals, f"token {token} is not among those that the filters keep ({fields})"
    low, high = min(i[0] for i in intervals), max(i[1] for i in intervals)
    assert low - slack <= number <= high + slack, f"{number} is not in [{low}, {high}) of token {token} ({fields})"


def random_rows(rng: np.random.Generator, count: int) -> list[dict[str, float]]:
    rows = []
    for _ in range(count):
        fields = {"temperature": float(rng.choice([0.2, 0.7, 1.0, 1.0, 2.5])), "seed": int(rng.integers(2**62))}
        if rng.random() < 0.5:
            fields["top_k"] = int(rng.choice([1, 2, 5, 40, 1000]))
        if rng.random() < 0.5:
            fields["top_p"] = float(np.float32(rng.choice([0.01, 0.5, 0.9, 0.999])))
        if rng.random() < 0.5:
            fields["min_p"] = float(np.float32(rng.choice([0.001, 0.05, 0.5, 1.0])))
        rows.append(fields)
    return rows


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 300.0])
@pytest.mark.parametrize("vocab", [1, 2, 37, 3000])
def test_filters(vocab: int, spread: float, rng: np.random.Generator) -> None:
    check_filters(vocab, spread, rng, 60)


def check_filters(vocab: int, spread: float, rng: np.random.Generator, count: int) -> None:
    rows = random_rows(rng, count)
    logits = (rng.standard_normal((len(rows), vocab)) * spread).astype(np.float32)
    if spread == 1.0:
        logits = np.round(logits, 1)  # many equal ones
    positions = rng.integers(0, 2**20, len(rows)).astype(np.int32)
    tokens = sample_rows(logits.copy(), parameters_of(rows), positions)
    for row, fields in enumerate(rows):
        number = float(uniform(np.int64(fields["seed"]), positions[row]))
        check_token(logits[row], fields, number, int(tokens[row]))


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_filters_without_numba(spread: float, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code does not notice an index that is out of range; that of a weight of 0 would be."""
    for name in ("_bucket", "_draw", "_draw_rows", "_members", "_walk", "_weigh"):
        function = getattr(cpu_sampler, name)
        monkeypatch.setattr(cpu_sampler, name, getattr(function, "py_func", function))
    monkeypatch.setattr(cpu_sampler, "bits_of", lambda value: int(np.float32(value).view(np.int32)))
    monkeypatch.setattr(cpu_sampler, "exp2", lambda x: np.float32(2.0 ** float(x)))
    check_filters(37, spread, rng, 12)


def test_warming_up_calls_what_requests_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With arguments of the same types, or Numba would compile once more."""
    called = list[Any]()

    def kinds(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return [kinds(each) for each in argument]
        return argument.dtype, argument.ndim, argument.flags.c_contiguous, argument.flags.writeable

    monkeypatch.setattr(cpu_sampler, "_draw_rows", lambda *arguments: called.append(kinds(arguments)))
    warm_up()
    sample_rows(np.zeros((3, 50), np.float32), parameters_of([{"temperature": 1}] * 3), np.arange(3, dtype=np.int32))
    assert len(called) == 2 and called[0] == called[1]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.array([[1, 3, 3, 2], [5, 0, 5, 5], [0, 0, 0, 0]], np.float32)
    assert sample_rows(logits, parameters_of([{"temperature": 0}] * 3), np.zeros(3, np.int32)).tolist() == [1, 0, 0]
    mixed = parameters_of([{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 0}])
    assert sample_rows(logits, mixed, np.zeros(3, np.int32))[[0, 2]].tolist() == [1, 0]


def test_broken_logits_give_a_token(rng: np.random.Generator) -> None:
    """NaN and infinities of one row neither crash nor reach another row."""
    logits = rng.standard_normal((6, 100)).astype(np.float32)
    logits[0] = np.nan
    logits[1, 5] = np.nan
    logits[2] = -np.inf
    logits[3, 7] = np.inf
    logits[4, :99] = -np.inf
    rows = [{"temperature": 1, "seed": 1}] * 6
    tokens = sample_rows(logits.copy(), parameters_of(rows), np.zeros(6, np.int32))
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert tokens[3] == 7
    assert tokens[4] == 99
    assert tokens[5] == sample_rows(logits[5:], parameters_of(rows[5:]), np.zeros(1, np.int32))[0]
    assert sample_rows(logits.copy(), parameters_of([{"temperature": 0}] * 6), np.zeros(6, np.int32)).max() < 100
    only = np.array([[np.nan], [-np.inf], [np.inf]], np.float32)  # of the only token
    assert sample_rows(only, parameters_of(rows[:3]), np.zeros(3, np.int32)).tolist() == [0, 0, 0]


def test_penalties(rng: np.random.Generator) -> None:
    vocab = 60
    tokens = rng.integers(0, vocab, 40).astype(np.int32)
    fields = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4}
    logits = rng.standard_normal((3, vocab)).astype(np.float32)
    ours = logits.copy()
    penalize(ours, 1, parameters_of([{}, fields, {}]), tokens, 25)
    expected = kernel_reference.penalize(logits[1], tokens, 25, repetition=1.3, presence=0.7, frequency=-0.4)
    np.testing.assert_allclose(ours[1], expected, rtol=1e-5, atol=1e-5)
    assert (ours[[0, 2]] == logits[[0, 2]]).all()


def test_logprob_records(rng: np.random.Generator) -> None:
    logits = np.round(rng.standard_normal((5, 200)) * 3, 1).astype(np.float32)
    tokens = rng.integers(0, 200, 5).astype(np.int32)
    records = logprob_records(logits, tokens).view(LOGPROB_ENTRY)
    for row in range(5):
        every, top = kernel_reference.top_logprobs(logits[row], 20)
        order = [int(tokens[row]), *top.tolist()]
        assert records["token"][row].tolist() == order
        np.testing.assert_allclose(records["logprob"][row], every[order], atol=1e-5)


def test_records_of_few_or_broken_logits() -> None:
    """A missing value is marked, and nothing raises or warns."""
    logits = np.full((4, 7), -np.inf, np.float32)
    logits[0, [5, 2, 6]] = 1, 3, 1
    logits[1] = np.nan
    logits[2, 4] = np.inf
    logits[3, :2] = np.nan, 2
    records = logprob_records(logits, np.array([2, 0, 4, 1], np.int32)).view(LOGPROB_ENTRY)
    assert records["token"].tolist() == [[2, 2, 5, 6] + [-1] * 17, [0] + [-1] * 20, [4] + [-1] * 20, [1, 1] + [-1] * 19]
    total = math.log(math.exp(3) + 2 * math.e)
    np.testing.assert_allclose(records["logprob"][0, :4], [3 - total, 3 - total, 1 - total, 1 - total], atol=1e-6)
    assert records["logprob"][3, :2].tolist() == [0, 0]
    assert (records["logprob"][:, 4:] == -np.inf).all()


def test_stop_ids_are_impossible_before_min_tokens(rng: np.random.Generator) -> None:
    entries = np.zeros(4, SQ_ENTRY)
    entries["stop_ids"] = [3, 0, 9, 10, 999, -1, -1, -1]  # 10 and 999: outside this vocabulary
    entries["min_tokens"] = [0, 2, 2, 2]
    logits = rng.standard_normal((4, 10)).astype(np.float32)
    masked = logits.copy()
    mask_stop_ids(masked, entries, np.array([0, 0, 1, 2], np.int32))
    expected = logits.copy()
    expected[1:3, [0, 3, 9]] = -np.inf
    assert (masked == expected).all()
