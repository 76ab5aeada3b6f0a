"""Norms, rotary embedding, attention, SwiGLU and embedding in the interpreter."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import pytest
import torch

from blinkpy.kernels.decode_plan import DecodePlan

CPU = "cpu"
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@both_dtypes
def test_norm(rng: np.random.Generator, dtype: torch.dtype) -> None:
    cases.norm_case(rng, CPU, dtype, tokens=5, bucket=8, hidden=200)
    cases.last_token_case(rng, CPU, dtype, hidden=96)


@both_dtypes
def test_swiglu_and_embedding(rng: np.random.Generator, dtype: torch.dtype) -> None:
    cases.swiglu_case(rng, CPU, dtype, tokens=3, bucket=5, width=150)
    cases.embedding_case(rng, CPU, dtype, tokens=3, bucket=4, hidden=72)


@both_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotary": 32, "page": 16, "norm": False},
        {"heads": 3, "kv_heads": 1, "head_dim": 96, "rotary": 72, "page": 16, "norm": False},  # partial, odd sizes
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "rotary": 128, "page": 32, "norm": True},
    ],
)
def test_rope(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, int]) -> None:
    cases.rope_case(rng, CPU, dtype, tokens=5, bucket=8, **shape)  # type: ignore[arg-type]


@both_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 1, "head_dim": 32, "page": 16},
        {"heads": 3, "kv_heads": 3, "head_dim": 96, "page": 32, "beside": True},
        {"heads": 10, "kv_heads": 2, "head_dim": 64, "page": 16, "window": 50},
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "page": 16, "window": 50, "beside": True},
        {"heads": 16, "kv_heads": 1, "head_dim": 128, "page": 64},
    ],
)
def test_attention(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, int]) -> None:
    lengths = [1, 1, 1, 19, 7, 2]
    contexts = [1, 200, 64, 19, 100, 150]
    cases.attention_case(
        rng,
        CPU,
        dtype,
        lengths,
        contexts,
        bucket_tokens=40,
        bucket_rows=8,
        block_m=32,
        **shape,  # type: ignore[arg-type]
    )


@both_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotary": 32, "page": 16},
        {"heads": 3, "kv_heads": 1, "head_dim": 96, "rotary": 72, "page": 16, "window": 50},
        {"heads": 16, "kv_heads": 2, "head_dim": 64, "rotary": 64, "page": 32, "norm": True},
    ],
)
def test_attention_with_new_tokens(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, int]) -> None:
    plan = DecodePlan(splits=4, min_tiles=1, block_n=64 if dtype == torch.bfloat16 else 32)
    cases.new_tokens_case(rng, CPU, dtype, [1, 300, 2, 65, 64, 129], plan=plan, bucket=8, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_only_and_prefill_only(rng: np.random.Generator, rows: int) -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page": 16}
    cases.attention_case(
        rng, CPU, torch.float32, [1] * rows, [130 + i for i in range(rows)], bucket_tokens=4, bucket_rows=4, **shape
    )
    cases.attention_case(
        rng, CPU, torch.float32, [9] * rows, [9 + 40 * i for i in range(rows)], bucket_tokens=32, bucket_rows=4, **shape
    )
