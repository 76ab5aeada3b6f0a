"""Kernels of latent attention in the interpreter; sizes on both sides of their blocks: test_block_edges.py."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.models.kernel_cases.latent_cases import LatentSizes, latent_case, products_case, rotate_case

from blinkpy.config import ConfigError
from blinkpy.kernels.attention import latent_tokens
from blinkpy.kernels.attention.attention_variants import DecodePlan
from blinkpy.kernels.attention.latent_attention import check_plan, heads_of_program, plan_latent

CPU = "cpu"


@pytest.mark.parametrize(
    "sizes",
    [
        LatentSizes(),
        LatentSizes(heads=5, rank=24, turned=12),
        LatentSizes(heads=3, rank=72, turned=8, page=32),
        LatentSizes(heads=16, rank=128, turned=64),
    ],
)
def test_attention(rng: np.random.Generator, either_dtype: torch.dtype, sizes: LatentSizes) -> None:
    lengths, contexts = [1, 1, 1, 19, 7, 2], [1, 200, 64, 19, 100, 150]
    latent_case(rng, CPU, either_dtype, lengths, contexts, sizes, bucket_tokens=40, bucket_rows=8)


def test_attention_of_two_programs_of_34_heads(rng: np.random.Generator) -> None:
    sizes = LatentSizes(heads=68, rank=16, turned=16)
    latent_case(rng, CPU, torch.bfloat16, [1, 1, 5], [1, 66, 20], sizes, bucket_tokens=9, bucket_rows=4)


def test_attention_of_published_sizes(rng: np.random.Generator, either_dtype: torch.dtype) -> None:
    """DeepSeek's vectors and GLM-4.7-Flash's heads, with the plans of an engine."""
    plans = plan_latent(4, 20, 4096, 132, either_dtype)
    sizes = LatentSizes(heads=20, rank=512, turned=64)
    latent_case(
        rng, CPU, either_dtype, [1, 3], [45, 20], sizes, decode=plans.decode, chunks=plans.chunks, bucket_tokens=6, bucket_rows=4
    )


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("neighbours", [False, True])
def test_rotation(rng: np.random.Generator, either_dtype: torch.dtype, neighbours: bool, grows: bool) -> None:
    for sizes in (LatentSizes(), LatentSizes(heads=5, rank=24, turned=12, plain=3)):
        rotate_case(rng, CPU, either_dtype, sizes, tokens=5, bucket=8, neighbours=neighbours, grows=grows)


@pytest.mark.parametrize("transposed", [False, True])
def test_products(rng: np.random.Generator, either_dtype: torch.dtype, transposed: bool) -> None:
    for tokens, bucket in ((3, 5), (66, 80)):
        shape = {"heads": 3, "k": 40, "n": 70}
        products_case(rng, CPU, either_dtype, tokens=tokens, bucket=bucket, transposed=transposed, grows=not transposed, **shape)


def test_heads_of_a_program_divide_all() -> None:
    heads = (1, 5, 16, 20, 64, 67, 68, 96, 128)
    assert [heads_of_program(count, torch.bfloat16) for count in heads] == [1, 5, 16, 20, 64, 1, 34, 48, 64]
    assert [heads_of_program(count, torch.float32) for count in heads] == [1, 5, 16, 10, 16, 1, 4, 16, 16]


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        check_plan(DecodePlan(1, 1, 256, 8, 2), 64, 576, 512, torch.float32)
    with pytest.raises(ConfigError, match="registers per thread"):
        check_plan(DecodePlan(1, 1, 16, 2, 2), 64, 576, 512, torch.bfloat16)


def test_invariant_head_products_have_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sums inside a tile may depend on its size."""
    launched = list[int]()

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, BLOCK_M, **constants: launched.append(BLOCK_M)

    monkeypatch.setattr(latent_tokens, "_head_products", Kernel())
    for invariant in (False, True):
        for tokens in (1, 16, 17, 300):
            x, out = torch.zeros(tokens, 2, 16), torch.zeros(tokens, 2, 32)
            counts = torch.zeros(8, dtype=torch.int64)
            latent_tokens.head_products(x, torch.zeros(2, 16, 32), out, counts, invariant=invariant)
    assert launched == [16, 16, 64, 64, 64, 64, 64, 64]
