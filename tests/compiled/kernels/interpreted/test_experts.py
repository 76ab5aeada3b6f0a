"""Mixture of experts in the interpreter."""

import numpy as np
import pytest
import torch
from support.models.kernel_cases.expert_cases import experts_case, router_case, routing_case
from support.part_of_cases import part_of

from blinkpy.kernels.moe.expert_gemv import GEMV_TOKENS
from blinkpy.kernels.moe.expert_variants import ExpertCase, ExpertShape, ExpertTable
from blinkpy.kernels.moe.experts import VARIANTS, plan_experts
from blinkpy.kernels.moe.routing import block_bound

BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SMALL = [(name, case) for name, variant in VARIANTS.items() for case in variant.cases if not case.large]


@pytest.mark.parametrize(("name", "case"), part_of(SMALL, 6))
def test_experts(rng: np.random.Generator, either_dtype: torch.dtype, name: str, case: ExpertCase) -> None:
    experts_case(rng, "cpu", either_dtype, name, case)


@pytest.mark.parametrize(("name", "case"), SMALL)
def test_routing(rng: np.random.Generator, name: str, case: ExpertCase) -> None:
    routing_case(rng, "cpu", case, 16)


def test_the_first_variant_that_supports_a_bucket_computes_it() -> None:
    shape, table = ExpertShape(8, 2, 48, 40), ExpertTable()
    chosen = [plan_experts(shape, tokens, torch.float32, "cpu", table).variant for tokens in (1, GEMV_TOKENS, GEMV_TOKENS + 1)]
    assert chosen == ["gemv", "gemv", "grouped"]


@BOTH_DTYPES
@pytest.mark.parametrize(("tokens", "bucket", "count", "hidden"), [(1, 1, 6, 48), (3, 4, 21, 80)])
def test_router(rng: np.random.Generator, dtype: torch.dtype, tokens: int, bucket: int, count: int, hidden: int) -> None:
    router_case(rng, "cpu", dtype, tokens=tokens, bucket=bucket, count=count, hidden=hidden)


def test_block_bound(rng: np.random.Generator) -> None:
    """No routing fills more blocks than the bound: random routings, and both extremes."""
    for _ in range(200):
        tokens, experts, block_m = (int(rng.integers(1, n)) for n in (60, 20, 20))
        top_k = int(rng.integers(1, experts + 1))
        bound = block_bound(tokens, experts, top_k, block_m)
        ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)])
        for routed in (ids, np.tile(np.arange(top_k), (tokens, 1))):
            counts = np.bincount(routed.ravel(), minlength=experts)
            assert (-(-counts // block_m)).sum() <= bound
