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
