"""Sizes of an engine from options and a model."""

from __future__ import annotations

import numpy as np
import pytest

from blinkpy.config import Config, ConfigError
from blinkpy.engine.sizing import engine_sizes, pages_for


def test_what_is_left_open_comes_from_the_model_and_the_memory(rng: np.random.Generator) -> None:
    context, page_bytes = int(rng.integers(100, 5000)), int(rng.integers(1000, 100_000))
    pages = int(rng.integers(2, 2000))
    sizes = engine_sizes(Config(), context, page_bytes, pages * page_bytes + page_bytes // 2)
    assert sizes.num_pages == pages
    assert sizes.max_model_len == min(context, pages * 16)
    assert pages_for(sizes.max_model_len, 16) <= sizes.num_pages
    assert sizes.queue.prompt_tokens >= sizes.max_model_len
    assert sizes.queue.sq_entries >= sizes.queue.slots
    assert sizes.max_num_seqs <= sizes.slots


def test_pages_that_no_slot_could_use_are_not_allocated() -> None:
    config = Config().with_options({"slots": 2, "max_model_len": 32})
    assert engine_sizes(config, 1000, 1, 1 << 20).num_pages == 2 * 2 * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 2000}, "beyond the model's context of 1000"),
        ({"num_pages": 3, "max_model_len": 100}, "7 pages needed, 3 there"),
        ({"prompt_arena_tokens": 50, "max_model_len": 100}, "prompt_arena_tokens"),
        ({"workers": 64, "slots": 65535, "max_model_len": 1000, "max_num_seqs": 1}, "GiB of token history"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_figures(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_sizes(Config().with_options(options), 1000, 1024, 1 << 20)


def test_no_memory_for_a_single_page() -> None:
    with pytest.raises(ConfigError, match="too small for one sequence"):
        engine_sizes(Config(), 1000, 4096, 4000)
