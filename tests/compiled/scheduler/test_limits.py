"""Limits that clash are refused before anything is allocated."""

from __future__ import annotations

import pytest
from support.scheduler_world import Sizes

from blinkpy.config import ConfigError
from blinkpy.kv.limits import make_limits
from blinkpy.kv.state_memory import make_state


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        ({"rows": 5000}, 8192, "max_num_seqs must be 1 to 4096"),
        ({"page_size": 3}, 16, "page_size must be a power of two"),
        ({"pages": 0}, 16, "num_pages must be at least 1"),
        ({"rows": 8}, 7, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
    ],
)
def test_limits_that_clash_are_named(changes: dict[str, int], tokens: int, message: str) -> None:
    sizes = Sizes(**changes)
    with pytest.raises(ConfigError, match=message):
        make_limits(Sizes().queue_sizes(), sizes.facts(), max_num_batched_tokens=tokens)


@pytest.mark.parametrize("mixed", [7, 17])
def test_a_mixed_step_has_room_for_prompts_and_is_no_larger_than_others(mixed: int) -> None:
    sizes = Sizes(rows=4)
    with pytest.raises(ConfigError, match=rf"mixed_step_tokens \({mixed}\) must be at least twice max_num_seqs \(4\)"):
        make_limits(sizes.queue_sizes(), sizes.facts(), max_num_batched_tokens=16, mixed_step_tokens=mixed)


@pytest.mark.parametrize(("mixed", "burst_step"), [(0, 12), (12, 11), (12, 17)])
def test_steps_of_a_burst_are_between_the_smaller_and_the_largest(mixed: int, burst_step: int) -> None:
    sizes = Sizes(rows=4)
    with pytest.raises(ConfigError, match=rf"burst_step_tokens \({burst_step}\) needs mixed_step_tokens \({mixed}\)"):
        make_limits(
            sizes.queue_sizes(),
            sizes.facts(),
            max_num_batched_tokens=16,
            mixed_step_tokens=mixed,
            burst_step_tokens=burst_step,
        )


@pytest.mark.parametrize("buckets", [[(4, 4)], [(8, 4), (4, 4), (16, 4)], [(0, 0), (16, 4)]])
def test_buckets_must_hold_the_largest_batch(buckets: list[tuple[int, int]]) -> None:
    limits = make_limits(Sizes().queue_sizes(), Sizes().facts(), max_num_batched_tokens=16)
    with pytest.raises(ConfigError, match="bucket"):
        make_state(limits, buckets)
