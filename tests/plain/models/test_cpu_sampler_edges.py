"""Edges of the CPU sampler: rows without a distribution, the token 0, and compiling before anybody waits."""

from typing import Any

import numpy as np
import pytest

from blinkpy.models.cpu import cpu_sampler
from blinkpy.models.cpu.cpu_sampler import mask_stop_ids, read_parameters, sample_rows, warm_up
from blinkpy.queues.submission import neutral_entries

INF = np.float32(np.inf)


@pytest.mark.parametrize("value", [np.nan, -INF])
@pytest.mark.parametrize("vocabulary", [1, 2, 7])
def test_rows_without_a_distribution_give_a_token_of_the_vocabulary(value: float, vocabulary: int) -> None:
    entries = neutral_entries(2)
    entries["temperature"] = [1.0, 0.3]
    logits = np.full((2, vocabulary), value, np.float32)
    found = sample_rows(logits, read_parameters(entries), np.zeros(2, np.int32))
    assert found.tolist() == [0, 0]


def test_a_greedy_row_gets_the_same_token_alone_and_beside_one_that_draws(rng: np.random.Generator) -> None:
    """NaN among its logits, too: it counts as -inf."""
    logits = rng.normal(size=(40, 9)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = np.nan
    entries = neutral_entries(len(logits))
    entries["temperature"] = 0.0
    alone = sample_rows(logits, read_parameters(entries), np.zeros(len(logits), np.int32))
    entries["temperature"][-1] = 1.0
    beside = sample_rows(logits, read_parameters(entries), np.zeros(len(logits), np.int32))
    expected = np.where(np.isnan(logits), -INF, logits).argmax(axis=1)
    assert alone.tolist() == expected.tolist() and beside[:-1].tolist() == expected[:-1].tolist()


def test_candidates_are_in_the_order_of_floats() -> None:
    """The best of two neighbours, at every sign and size, also where bit patterns change theirs; of equal ones the first."""
    least = np.finfo(np.float32).smallest_subnormal
    values = np.float32([-(2.0**100), -3.0, -2.0, -1.0, -least, -0.0, 0.0, least, 1e-30, 1e-9, 1.0, 2.0, 3.0, 2.0**100])
    lower, higher = values, np.nextafter(values, INF)
    pairs = np.concatenate(
        [np.stack(each, 1) for each in ((lower, higher), (higher, lower), (values, values), (values, -values))]
    )
    entries = neutral_entries(len(pairs))
    entries["temperature"], entries["top_k"] = 1.0, 1
    found = sample_rows(pairs.copy(), read_parameters(entries), np.zeros(len(pairs), np.int32))
    assert found.tolist() == [int(b > a) for a, b in pairs.tolist()]


def test_weights_end_at_the_least_that_has_a_bucket() -> None:
    """2 ** -126 is a weight, and smaller values are 0."""
    powers = np.float32([0, -1.5, -125.5, -126.3, -127.5, -1000, -INF, np.nan])
    weights = np.empty(len(powers), np.float32)
    assert cpu_sampler._weigh(powers * np.float32(np.log(2)), np.float32(1), weights) == 0
    assert (weights[:3] > 0).all() and not weights[3:].any()


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.5, 2.0])
def test_each_repetition_penalty_counts(repetition: float) -> None:
    entries = neutral_entries(1)
    entries["repetition_penalty"] = repetition
    logits = np.float32([[6.0, -6.0, 0.0, 6.0]])
    cpu_sampler.penalize(logits, 0, read_parameters(entries), np.int32([0, 1, 2, 2]), 4)
    np.testing.assert_array_equal(logits, [[6.0 / repetition, -6.0 * repetition, 0.0, 6.0]])


@pytest.mark.parametrize(("top_p", "min_p", "expected"), [(0.5, 0.0, 2), (0.75, 0.0, 3), (1.0, 1.0, 4), (0.25, 1.0, 1)])
def test_a_bound_that_is_just_reached(top_p: float, min_p: float, expected: int) -> None:
    """Of four equal tokens: no further one once top_p is reached, and one of just min_p is kept."""
    draws = 400
    entries = neutral_entries(draws)
    entries["temperature"], entries["top_p"], entries["min_p"], entries["seed"] = 1.0, top_p, min_p, np.arange(draws)
    found = sample_rows(np.zeros((draws, 4), np.float32), read_parameters(entries), np.zeros(draws, np.int32))
    _, counts = np.unique(found, return_counts=True)
    assert len(counts) == expected and counts.min() > draws / 8


def test_each_stop_id_is_masked_the_token_0_too() -> None:
    entries = neutral_entries(3)
    entries["stop_ids"] = -1
    entries["stop_ids"][:, :3] = [0, 4, 9]
    entries["min_tokens"] = [2, 2, 0]
    logits = np.zeros((3, 5), np.float32)
    mask_stop_ids(logits, entries, np.array([1, 2, 0], np.int32))
    assert np.argwhere(logits == -INF).tolist() == [[0, 0], [0, 4]]


def test_warming_up_draws_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As requests do, with logits of their type: greedy ones would compile nothing."""
    drawn: list[Any] = []
    monkeypatch.setattr(cpu_sampler, "_draw_rows", lambda *arguments: drawn.append(arguments))
    warm_up()
    ((logits, parameters, positions, result),) = drawn
    assert (logits.dtype, positions.dtype, result.dtype) == (np.float32, np.int32, np.int32)
    assert (parameters.temperature > 0).all()


def test_members_of_a_bucket_weights_and_bounds_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """_weigh, _walk and _members as Python has them: no row waits for a compiler, and bits and heights are those of any float."""
    for name in ("_bucket", "_draw", "_draw_rows", "_members", "_walk", "_weigh"):
        function = getattr(cpu_sampler, name)
        monkeypatch.setattr(cpu_sampler, name, getattr(function, "py_func", function))
    monkeypatch.setattr(cpu_sampler, "bits_of", lambda value: int(np.float32(value).view(np.int32)))
    monkeypatch.setattr(cpu_sampler, "exp2", lambda x: np.float32(2.0 ** float(x)))
    monkeypatch.setattr(cpu_sampler, "uniform", lambda seed, position: np.float32((seed + 0.5) / 40))
    with np.errstate(invalid="ignore", over="ignore"):  # a highest logit of -inf, or far above the others
        test_rows_without_a_distribution_give_a_token_of_the_vocabulary(np.nan, 2)
        test_rows_without_a_distribution_give_a_token_of_the_vocabulary(-INF, 3)
        test_candidates_are_in_the_order_of_floats()
    for top_p, expected in ((0.5, [0, 1]), (0.75, [0, 1, 2])):
        assert drawn_tokens([1.0, 1.0, 1.0, 1.0], top_p=top_p) == expected, "no further one once it is reached"
    assert drawn_tokens([1.0, 0.515, 0.505], min_p=0.51) == [0, 1], "of one bucket, that with too little weight is not kept"
    assert drawn_tokens([1.0, 0.9, 0.8, 0.1], top_k=3) == [0, 1, 2]


def drawn_tokens(weights: list[float], **fields: float) -> list[int]:
    """All that are drawn of tokens with these weights, by numbers from end to end."""
    entries = neutral_entries(40)
    entries["temperature"], entries["seed"] = 1.0, np.arange(40)
    for name, value in fields.items():
        entries[name] = value
    logits = np.tile(np.log(np.float32(weights)), (40, 1))
    return np.unique(sample_rows(logits, read_parameters(entries), np.zeros(40, np.int32))).tolist()
