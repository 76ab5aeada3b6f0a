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
