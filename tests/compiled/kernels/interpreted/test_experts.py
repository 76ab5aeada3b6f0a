"""Mixture of experts in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support.models.kernel_cases as cases
import torch

from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertTile
from blinkpy.kernels.moe.routing import block_bound

SMALL = ExpertConfig(block_m=16, up=ExpertTile(32, 32), down=ExpertTile(16, 32))
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@BOTH_DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 1, "bucket": 5, "count": 8, "top_k": 2},
        {"tokens": 5, "bucket": 9, "count": 6, "top_k": 3, "normalize": False},
        {"tokens": 37, "bucket": 40, "count": 4, "top_k": 2, "one_expert": True},  # three blocks of one expert
    ],
)
def test_experts(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    cases.experts_case(rng, "cpu", dtype, SMALL, hidden=48, width=40, **shape)


@BOTH_DTYPES
@pytest.mark.parametrize(("tokens", "bucket", "count", "hidden"), [(1, 1, 6, 48), (3, 4, 21, 80)])
def test_router(rng: np.random.Generator, dtype: torch.dtype, tokens: int, bucket: int, count: int, hidden: int) -> None:
    cases.router_case(rng, "cpu", dtype, tokens=tokens, bucket=bucket, count=count, hidden=hidden)


@BOTH_DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 1, "bucket": 1, "count": 8, "top_k": 4, "hidden": 32, "width": 128},  # no tile is cut
        {"tokens": 1, "bucket": 1, "count": 6, "top_k": 3, "hidden": 50, "width": 42, "normalize": False},
        {"tokens": 3, "bucket": 4, "count": 11, "top_k": 3, "hidden": 48, "width": 40, "ties": True},
    ],
)
def test_expert_gemv(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    cases.expert_gemv_case(rng, "cpu", dtype, **shape)


def test_block_bound(rng: np.random.Generator) -> None:
    """No routing fills more blocks than the bound: random ones, and the two extremes."""
    for _ in range(200):
        tokens, experts, block_m = (int(rng.integers(1, n)) for n in (60, 20, 20))
        top_k = int(rng.integers(1, experts + 1))
        bound = block_bound(tokens, experts, top_k, block_m)
        ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)])
        for routed in (ids, np.tile(np.arange(top_k), (tokens, 1))):
            counts = np.bincount(routed.ravel(), minlength=experts)
            assert (-(-counts // block_m)).sum() <= bound
