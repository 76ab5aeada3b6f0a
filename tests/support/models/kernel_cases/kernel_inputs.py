"""Random inputs of kernels, and their expected outputs.

This folder has checks of the Triton kernels against tests/support/models/kernel_reference.py, for any device: small and
interpreted, or at real sizes on a GPU. Every case draws fresh inputs, poisons its outputs and caches with NaN, leaves the bucket
partly empty, and checks that padding was neither written nor read. A case returns nothing and raises AssertionError.
"""

import numpy as np
import torch
from support.models import kernel_reference
from torch import Tensor

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Maximum relative error by storage dtype."""
LONGEST = 4096
"""Number of positions with angles."""


def draw(rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Normal random values."""
    generator = torch.Generator(device=device).manual_seed(int(rng.integers(2**62)))
    return (torch.randn(*shape, generator=generator, device=device, dtype=torch.float32) * scale).to(dtype)


def poison(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def close(out: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    error = kernel_reference.relative_error(out, expected)
    assert error <= LIMITS[dtype], f"{what}: relative error {error:.2e} over {LIMITS[dtype]:.0e}"


def untouched(tensor: Tensor, what: str) -> None:
    assert bool(torch.isnan(tensor).all()), f"{what}: padding was written"


def repeats(device: str) -> int:
    """Number of runs of a kernel without state between launches: once in the interpreter, which is deterministic."""
    return 1 if device == "cpu" else 2


def header(rows: int, tokens: int, decode_rows: int, device: str) -> Tensor:
    counts = [rows, tokens, decode_rows, 0, 0, 0, 0, 0]
    return torch.tensor(counts, dtype=torch.int64, device=device)


def ints(values: object, device: str) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)
