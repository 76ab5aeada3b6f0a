"""Limits that clash are refused before anything is allocated."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_cases import case_sizes

from blinkpy.config import ConfigError
from blinkpy.kv.limits import Limits, make_limits
from blinkpy.kv.state_memory import make_state

MIXED = r"mixed_step_tokens \({}\) must be at least twice max_num_seqs \(4\)"
BURST = r"burst_step_tokens \({}\) needs mixed_step_tokens \({}\)"


def limits_of(**sizes: Any) -> Limits:
    queue, facts, options = case_sizes(**sizes)
    return make_limits(queue, facts, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 5000, "tokens": 8192}, "max_num_seqs must be 1 to 4096"),
        ({"page_size": 3}, "page_size must be a power of two"),
        ({"pages": 0}, "num_pages must be at least 1"),
        ({"rows": 8, "tokens": 7}, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
        *(({"mixed_step_tokens": mixed}, MIXED.format(mixed)) for mixed in (7, 17)),
        *(
            ({"mixed_step_tokens": mixed, "burst_step_tokens": burst}, BURST.format(burst, mixed))
            for mixed, burst in ((0, 12), (12, 11), (12, 17))
        ),
    ],
)
def test_limits_that_clash_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_of(**sizes)


@pytest.mark.parametrize("buckets", [[(4, 4)], [(8, 4), (4, 4), (16, 4)], [(0, 0), (16, 4)]])
def test_buckets_must_hold_the_largest_batch(buckets: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        make_state(limits_of(), buckets)
