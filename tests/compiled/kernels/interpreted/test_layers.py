"""Norms of last tokens, FP8 rows, rotary embedding and attention in the interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.models.kernel_cases.attention_cases import attention_case, new_tokens_case, rope_case
from support.models.kernel_cases.kernel_inputs import draw, header
from support.models.kernel_cases.layer_cases import (
    last_token_case,
    quantised_case,
    quantised_rows,
)

from blinkpy.kernels import MAX_FP8_WIDTH, fp8_rows
from blinkpy.kernels.activation import quantised_swiglu
from blinkpy.kernels.attention.attention import VARIANTS, attend
from blinkpy.kernels.attention.attention_variants import (
    CHUNKS,
    AttentionCall,
    DecodePlan,
    DecodeWorkspace,
    NewTokens,
    PagedKV,
    as_cached,
)
from blinkpy.kernels.attention.prefill_attention import plan_prefill
from blinkpy.kernels.fp8_rows import MOST_COLUMNS, PIECE, Fp8Rows, quantise_rows
from blinkpy.kernels.launch import BatchView

CPU = "cpu"
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@both_dtypes
def test_norm_of_last_tokens(rng: np.random.Generator, dtype: torch.dtype) -> None:
    """test_block_edges.py tests norms of all rows, and other layers."""
    last_token_case(rng, CPU, dtype, hidden=96)


@both_dtypes
@pytest.mark.parametrize(("width", "blocks", "given"), [(2500, True, None), (300, False, 0.02)])
def test_quantised_rows(rng: np.random.Generator, dtype: torch.dtype, width: int, blocks: bool, given: float | None) -> None:
    quantised_case(rng, CPU, dtype, tokens=4, bucket=6, width=width, blocks=blocks, given=given)


@both_dtypes
@pytest.mark.parametrize("kernel", ["rows", "silu", "gelu"])
def test_a_wide_row_in_pieces(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: str) -> None:
    """A row that no program can hold: its bytes and scale equal those of a row in one piece."""
    whole_pieces = [PIECE * n for n in range(1 + MOST_COLUMNS // PIECE, 1 + MAX_FP8_WIDTH // PIECE)]
    width = int(rng.choice([MOST_COLUMNS + 1, *whole_pieces, *(size - 1 for size in whole_pieces)]))
    x = draw(rng, 5, width if kernel == "rows" else 2 * width, dtype=dtype, device=CPU, scale=3.0)
    x[0, rng.integers(width)] = 1000.0  # the maximum is in any piece
    x[1] = 0.0
    x[2, rng.integers(width)] = float(rng.choice([np.nan, np.inf]))

    def quantised(most_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(fp8_rows, "MOST_COLUMNS", most_columns)
        out = Fp8Rows(torch.zeros(5, width, dtype=torch.float8_e4m3fn), torch.zeros(5))
        with np.errstate(all="ignore"):  # in the interpreter
            if kernel == "rows":
                quantise_rows(x, header(4, 4, 0, CPU), out)
            else:
                quantised_swiglu(x, header(4, 4, 0, CPU), out, None, gelu=kernel == "gelu")
        return out.values.view(torch.uint8), out.scales

    (values, scales), (expected, their_scales) = quantised(MOST_COLUMNS), quantised(MAX_FP8_WIDTH)
    assert torch.equal(values, expected), f"{width} columns"
    assert torch.equal(scales.view(torch.int32), their_scales.view(torch.int32))
    assert bool((scales[:4] != 0).all()) and not values[4].any(), "padding was written"
    if kernel == "rows":
        wanted, _ = quantised_rows(x[:2], False, None)
        assert torch.equal(values[:2].view(torch.float8_e4m3fn).float(), wanted)


@both_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotary": 32, "page": 16, "norm": False},
        {"heads": 3, "kv_heads": 1, "head_dim": 96, "rotary": 72, "page": 16, "norm": False},  # partial, odd sizes
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "rotary": 128, "page": 32, "norm": True},
        {"heads": 3, "kv_heads": 1, "head_dim": 96, "rotary": 72, "page": 16, "norm": False, "fp8": True},
        {"heads": 6, "kv_heads": 2, "head_dim": 32, "rotary": 32, "page": 32, "norm": True, "fp8": True},
        {"heads": 5, "kv_heads": 1, "head_dim": 32, "rotary": 32, "page": 16, "norm": False, "period": 2},
        {"heads": 4, "kv_heads": 2, "head_dim": 48, "rotary": 48, "page": 16, "norm": True, "value_norm": True},
        {"heads": 4, "kv_heads": 1, "head_dim": 512, "rotary": 512, "page": 16, "norm": True, "value_norm": True, "fp8": True},
    ],
)
def test_rope(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, int]) -> None:
    rope_case(rng, CPU, dtype, tokens=5, bucket=8, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 1, "head_dim": 32, "page": 16},
        {"heads": 3, "kv_heads": 3, "head_dim": 96, "page": 32, "overlap": True, "sinks": True},
        {"heads": 10, "kv_heads": 2, "head_dim": 64, "page": 16, "window": 50, "sinks": True},
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "page": 16, "window": 50, "cap": 0.7, "overlap": True},
        {"heads": 16, "kv_heads": 1, "head_dim": 128, "page": 64},
        {"heads": 2, "kv_heads": 1, "head_dim": 256, "page": 16, "cap": 1.3},
        {"heads": 8, "kv_heads": 1, "head_dim": 512, "page": 16},
        {"heads": 5, "kv_heads": 1, "head_dim": 32, "page": 16, "window": 50, "chunked": True},
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "page": 32, "window": 64, "chunked": True, "overlap": True},
    ],
)
def test_attention(rng: np.random.Generator, either_dtype: torch.dtype, shape: dict[str, int]) -> None:
    lengths = [1, 1, 1, 19, 7, 2]
    contexts = [1, 200, 64, 19, 100, 150]
    attention_case(
        rng,
        CPU,
        either_dtype,
        lengths,
        contexts,
        bucket_tokens=40,
        bucket_rows=8,
        tiles=VARIANTS["tiles"].plans(either_dtype)[1],
        **shape,  # type: ignore[arg-type]
    )


@triton.jit
def _round_all(x_ptr, scale_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, as_cached(tl.load(x_ptr + at), tl.load(scale_ptr), out_ptr, True))


def test_rounding_to_fp8(rng: np.random.Generator) -> None:
    """Equal to torch: numbers of all sizes, all halves between two numbers, and saturation; NaN is kept."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ordered, scale = numbers[~numbers.isnan()].sort().values, torch.tensor([2.0 ** float(rng.integers(-9, 9))])
    x = draw(rng, 4096, dtype=torch.float32, device=CPU) * torch.from_numpy(np.exp2(rng.uniform(-14, 10, 4096))).float()
    x[:253], x[300:305] = (ordered[1:] + ordered[:-1]) / 2, torch.tensor([464.0, 1e30, -1e30, -0.0, float("nan")])
    out = torch.zeros(4096, dtype=torch.float8_e4m3fn)
    _round_all[(1,)](x * scale, scale, out, 4096)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 6, "kv_heads": 2, "head_dim": 48, "page": 16, "window": 50, "sinks": True},
        {"heads": 4, "kv_heads": 1, "head_dim": 64, "page": 16, "window": 60, "cap": 0.7},
        {"heads": 3, "kv_heads": 3, "head_dim": 32, "page": 32, "cap": 0.7, "overlap": True},
        {"heads": 4, "kv_heads": 1, "head_dim": 64, "page": 16, "window": 33, "chunked": True},
        {"heads": 4, "kv_heads": 1, "head_dim": 320, "page": 16},
    ],
)
def test_attention_over_fp8(rng: np.random.Generator, either_dtype: torch.dtype, shape: dict[str, int]) -> None:
    lengths, contexts, tiles = [1, 1, 5, 2], [66, 1, 40, 70], VARIANTS["tiles"].plans(either_dtype)[1]
    few = {"bucket_tokens": 12, "bucket_rows": 5, "tiles": tiles, "fp8": True}
    attention_case(rng, CPU, either_dtype, lengths, contexts, **few, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotary": 32, "page": 16},
        {"heads": 3, "kv_heads": 1, "head_dim": 96, "rotary": 72, "page": 16, "window": 50, "cap": 0.7, "sinks": True},
        {"heads": 16, "kv_heads": 2, "head_dim": 64, "rotary": 64, "page": 32, "norm": True},
        {
            "heads": 3,
            "kv_heads": 1,
            "head_dim": 96,
            "rotary": 72,
            "page": 16,
            "window": 50,
            "cap": 0.7,
            "sinks": True,
            "fp8": True,
        },
        {"heads": 8, "kv_heads": 4, "head_dim": 32, "rotary": 32, "page": 32, "norm": True, "fp8": True},
        {"heads": 7, "kv_heads": 1, "head_dim": 128, "rotary": 128, "page": 16, "fp8": True},
        {"heads": 5, "kv_heads": 1, "head_dim": 32, "rotary": 32, "page": 16, "window": 64, "chunked": True, "period": 3},
        {"heads": 5, "kv_heads": 1, "head_dim": 48, "rotary": 48, "page": 16, "value_norm": True},
        {"heads": 4, "kv_heads": 1, "head_dim": 512, "rotary": 512, "page": 16, "norm": True, "value_norm": True, "fp8": True},
    ],
)
def test_attention_with_new_tokens(rng: np.random.Generator, either_dtype: torch.dtype, shape: dict[str, int]) -> None:
    plan = DecodePlan(splits=4, min_tiles=1, block_n=64 if either_dtype == torch.bfloat16 else 32)
    new_tokens_case(rng, CPU, either_dtype, [1, 300, 2, 65, 64, 129], plan=plan, bucket=8, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_only_and_prefill_only(rng: np.random.Generator, rows: int) -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page": 16}
    attention_case(rng, CPU, torch.float32, [1] * rows, [130 + i for i in range(rows)], bucket_tokens=4, bucket_rows=4, **shape)
    attention_case(
        rng, CPU, torch.float32, [9] * rows, [9 + 40 * i for i in range(rows)], bucket_tokens=32, bucket_rows=4, **shape
    )


def test_calls_of_decode_attention_that_do_not_fit_are_refused() -> None:
    """Rows must have queries, results and scratch memory. Last tokens must be rotated and cached, no kernel may run in parallel,
    and each row's tokens must have an end."""
    rows, plan = 3, DecodePlan(splits=1, min_tiles=1, block_n=32)
    qkv, cache, angles = torch.zeros(8, 4 * 32), torch.zeros(2, 1, 16, 32), torch.zeros(16, 16)
    q, numbers = qkv.view(8, 4, 32)[:, :2], torch.zeros(8, dtype=torch.int32)
    workspace = DecodeWorkspace.allocate([(rows, plan)], 2, 1, 32, CPU)
    batch = BatchView(torch.zeros(8, dtype=torch.int64), *[numbers] * 6)
    call = AttentionCall(q, PagedKV(cache, cache, numbers.view(1, 8)), batch, torch.zeros(3, 64), rows, 1.0, workspace=workspace)
    call, short = replace(call, last_tokens=True), batch._replace(query_starts=numbers[:3])
    for message, refused, chosen in (
        ("an earlier launch that rotates and caches", replace(call, new=NewTokens(qkv, angles, angles)), plan),
        ("needs an earlier launch", call, replace(plan, overlap_prefill=True)),
        ("query_starts: shape", replace(call, batch=short), plan),
        ("supports only chunks", call, plan_prefill(torch.float32)),
        ("exceeds q", replace(call, q=q[: rows - 1]), plan),
        ("or out", replace(call, out=torch.zeros(rows - 1, 64)), plan),
        ("needs a workspace", replace(call, workspace=None), plan),
        ("not settled", replace(call, last_tokens=False, settled=True), plan),
        *((f"{name} of the decode", replace(call, workspace=shorter(workspace, name)), plan) for name in vars(workspace)),
    ):
        with pytest.raises(ValueError, match=message):
            attend(refused, chosen)


def shorter(workspace: DecodeWorkspace, name: str) -> DecodeWorkspace:
    """The workspace without the last element of a tensor."""
    return replace(workspace, **{name: getattr(workspace, name)[:-1]})


@pytest.mark.parametrize("name", VARIANTS)
def test_plans_of_a_variant(rng: np.random.Generator, name: str) -> None:
    """Plans name a registered variant, and each variant computes the same results."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page": 16, "bucket_tokens": 24, "bucket_rows": 4}
    for plan in VARIANTS[name].plans(torch.float32):
        assert plan.variant == name
        role = {"tiles": plan} if CHUNKS in VARIANTS[name].rows else {"plan": plan}
        attention_case(rng, CPU, torch.float32, [1, 1, 9, 4], [70, 1, 40, 4], **shape, **role)
