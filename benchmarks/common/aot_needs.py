"""The estimated needs of a kernel: the formulas of blinkpy.kernels, applied to the constants of its
compilation.
"""

import re
from typing import Any

import torch

from blinkpy.kernels.attention.attention_variants import attention_needs
from blinkpy.kernels.config_files import Needs
from blinkpy.kernels.fp8_rows import BLOCK_SCALES
from blinkpy.kernels.linear.linear import VARIANTS
from blinkpy.kernels.linear.linear_variants import WORDS, LinearConfig, LinearShape
from blinkpy.kernels.moe.expert_variants import ExpertShape, ExpertTile, tile_needs
from blinkpy.kernels.quantised_matrices import FP8

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": FP8}
LINEAR = {"_linear": "triton", "_linear_tma": "tma", "_gemv": "gemv", "_fp8_gemv": "fp8_gemv", "_fp8_steps": "fp8_steps",
          "_packed_tiles": "packed"}  # fmt: skip
MOST_SHARED = 1.4  # times the formula, plus MORE_SHARED bytes: memory that kernels keep at their ends in addition to the buffers
MORE_SHARED = 10_240
LONG = 640  # inputs of the least published layer


def dtype_of(signature: str) -> torch.dtype | None:
    """The dtype behind a pointer or a tensor descriptor."""
    found = re.match(r"\*(\w+)|tensordesc<(\w+)", signature)
    return TYPES.get(found[1] or found[2]) if found else None


def formula(kernel: str, constants: dict[str, Any], types: list[str], warps: int, stages: int) -> Needs | None:
    """The estimate for a kernel; None without a formula. types: of its parameters."""
    first, second = (dtype_of(some) for some in types[:2])
    if kernel in LINEAR:
        return _of_linear(LINEAR[kernel], constants, first, second, warps, stages)
    if kernel in ("_expert_linear", "packed_linear", "_four_bit_experts"):
        return _of_experts(constants, first, second, warps, stages)
    if kernel in ("_decode_attention", "_prefill_attention") and first is not None:
        if first == torch.float32 and constants["D"] > 256:  # its sums go through shared memory, or are spilled
            return None
        c, buffers = constants, 1 if kernel == "_decode_attention" else max(1, (stages + 1) // 2)
        sizes = c["BLOCK_M"], c["BLOCK_N"], c["D"], first
        return attention_needs(*sizes, buffers=buffers, fp8=c["FP8"], rotated=bool(c.get("FUSED")))
    return None


def _of_linear(
    variant: str, c: dict[str, Any], first: torch.dtype | None, second: torch.dtype | None, warps: int, stages: int
) -> Needs:
    block_n = c.get("BLOCK_N") or sum(c[f"WIDTH_{i}"] for i in range(3))
    config = LinearConfig(
        variant,
        block_m=c.get("BLOCK_M", 16),
        block_n=block_n,
        block_k=16 if variant == "fp8_gemv" else c["BLOCK_K"],
        warps=warps,
        stages=stages,
        weights_first=c.get("WEIGHTS_FIRST", False),
        elementwise=c.get("VECTOR") == 1,
    )
    shape = LinearShape(1, c["N"], c["K"], swiglu=bool(c["SWIGLU"]), dtype=second or torch.bfloat16)
    if variant == "packed":
        shape = shape._replace(dtype=WORDS, inputs=first, fp4=c["FP4"], group=c["GROUP"], ordered=c["ORDERED"])
    if second == FP8:
        shape = shape._replace(blocks=c["SCALES"] == BLOCK_SCALES.value, inputs=None if first == FP8 else first)
    return VARIANTS[variant].needs(config, shape)


def _of_experts(c: dict[str, Any], first: torch.dtype | None, second: torch.dtype | None, warps: int, stages: int) -> Needs:
    words = "" if "GROUP" not in c else "fp4" if c["FP4"] else f"int4 {c['GROUP'] % c['K']}"
    packed, up = "SCALES" not in c and not words, bool(c["SWIGLU"] or c.get("SQUARED"))
    fp8 = "" if packed or words else ("", "rows", "blocks")[c["SCALES"]]
    sizes = (c["K"], c["N"]) if up else (c["N"], c["K"])
    shape = ExpertShape(8, 1, *sizes, packed, fp8, words, bool(words) and c["ORDERED"], gated=bool(c["SWIGLU"]))
    tile = ExpertTile(c["BLOCK_N"], c["BLOCK_K"], warps, stages)
    return tile_needs(c["BLOCK_M"], tile, shape, torch.bfloat16 if first == FP8 else first or torch.bfloat16, up=up)
