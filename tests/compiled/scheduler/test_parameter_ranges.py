"""The engine's check of request parameters, against a list of its own: which bits it accepts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit

from blinkpy.queues.request_parameters import PARAMETERS
from blinkpy.queues.submission import SQ_ENTRY, neutral_entries
from blinkpy.scheduler.phases.intake import parameters_in_range

# What the engine accepts, written down apart from the table. Signs and bits count: -0.0 is a temperature and no min_p.
ACCEPTED = {
    "max_tokens": lambda v: v >= 1,
    "min_tokens": lambda v: v >= 0,
    "temperature": lambda v: math.isfinite(v) and v >= 0,
    "top_p": lambda v: 0 < v <= 1,
    "top_k": lambda v: v >= 0,
    "min_p": lambda v: 0 <= v <= 1 and math.copysign(1, v) > 0,
    "repetition_penalty": lambda v: 0 < v < math.inf,
    "presence_penalty": math.isfinite,
    "frequency_penalty": math.isfinite,
    "seed": lambda v: True,
    "priority": lambda v: True,
    "logprobs": lambda v: -1 <= v <= 20,
    "cache_salt": lambda v: v >= 0,
    "flags": lambda v: v in (0, 1),
}
compiled = njit(parameters_in_range)
# Around 0, 1, 20, the largest finite number, infinity, and both signs of each.
EDGES = [base + step for base in (0, 1, 20, 0x3F800000, 0x7F800000, 0x7FFFFFFF) for step in (-1, 0, 1)]


def accepted(entry: np.ndarray) -> bool:
    return all(fine(entry[name].item()) for name, fine in ACCEPTED.items())


def both(entry: np.ndarray) -> set[bool]:
    words = np.frombuffer(entry.tobytes(), np.int32)
    return {bool(parameters_in_range(words.tolist())), bool(compiled(words))}


def test_the_list_has_all_parameters() -> None:
    assert list(ACCEPTED) == [p.name for p in PARAMETERS]


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_engine_accepts_exactly_these_bits(name: str, rng: np.random.Generator) -> None:
    """One parameter of any bits in an otherwise neutral entry; compiled, and as plain Python."""
    entry = neutral_entries(1)[0]
    entry["max_tokens"] = 1
    edges = np.array([edge & 0xFFFFFFFF for edge in EDGES], np.uint32)
    bits = np.concatenate([edges, edges ^ 0x80000000, rng.integers(0, 2**32, 300, dtype=np.uint32)])
    if SQ_ENTRY[name].itemsize == 8:
        bits = np.stack([rng.permutation(bits), bits], axis=1)
    seen = set()
    for value in np.ascontiguousarray(bits).view(SQ_ENTRY[name]).reshape(-1):
        entry[name] = value
        fine = accepted(entry)
        seen.add(fine)
        assert both(entry) == {fine}, (name, value)
    assert seen == ({True} if name in ("seed", "priority") else {True, False})


def test_the_engine_checks_all_parameters_at_once(rng: np.random.Generator) -> None:
    """Whole entries of which at most two parameters are drawn from all bits."""
    for _ in range(300):
        entry = neutral_entries(1)[0]
        entry["max_tokens"] = 1
        for name in rng.choice(list(ACCEPTED), rng.integers(0, 3)):
            entry[name] = np.frombuffer(rng.bytes(SQ_ENTRY[name].itemsize), SQ_ENTRY[name])[0]
        assert both(entry) == {accepted(entry)}
