"""Kernels of gated delta nets in the interpreter, against a recurrence in float64 by NumPy."""

import os

import numpy as np
import pytest
import torch
from support.models.kernel_cases.delta_cases import (
    convolution_case,
    copy_case,
    drafting_case,
    drawn_rows,
    gate_case,
    long_rows,
    recurrence_case,
)
from support.models.kernel_cases.space_cases import group_norm_case, scan_case

from blinkpy.kernels.delta import short_convolution, state_copies
from blinkpy.kernels.delta.delta_blocks import DELTA_BLOCK
from blinkpy.kernels.delta.recurrence import DeltaSizes
from blinkpy.kernels.delta.space_blocks import SPACE_BLOCK
from blinkpy.kernels.delta.state_space import SpaceSizes

CPU = "cpu"
STEPS = 20 if os.environ.get("BLINKPY_PROFILE") == "nightly" else 6  # with drafts


@pytest.mark.parametrize(("channels", "taps", "longest"), [(24, 4, 3), (short_convolution.CHANNELS, 2, 17), (130, 4, 33)])
def test_convolution(channels: int, taps: int, longest: int, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rows shorter and longer than the taps and a tile."""
    rows = drawn_rows(rng, longest)
    if longest == 3:
        rows = rows._replace(counts=[1, 1, 2, 3])
    convolution_case(rng, CPU, either_dtype, rows, channels=channels, taps=taps)


@pytest.mark.parametrize(("channels", "taps", "longest"), [(24, 3, 3), (130, 4, 33)])
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_gated_convolution(
    channels: int, taps: int, longest: int, last_tokens_only: bool, either_dtype: torch.dtype, rng: np.random.Generator
) -> None:
    rows, sizes = drawn_rows(rng, longest), {"channels": channels, "taps": taps}
    convolution_case(rng, CPU, either_dtype, rows, **sizes, gated=True, last_tokens_only=last_tokens_only)


@pytest.mark.parametrize("sizes", [DeltaSizes(2, 4, 16, 24), DeltaSizes(1, 3, 20, 16), DeltaSizes(2, 2, 33, 9)])
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_recurrence(sizes: DeltaSizes, last_tokens_only: bool, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    recurrence_case(rng, CPU, either_dtype, drawn_rows(rng, 9), sizes, last_tokens_only=last_tokens_only)


@pytest.mark.parametrize(
    ("sizes", "taps", "drafts"),
    [(DeltaSizes(2, 4, 16, 24), 4, 3), (DeltaSizes(1, 3, 20, 16), 2, 1), (DeltaSizes(1, 2, 9, 16), 4, 7)],
)
def test_states_follow_correct_drafts(
    sizes: DeltaSizes, taps: int, drafts: int, either_dtype: torch.dtype, rng: np.random.Generator
) -> None:
    assert drafting_case(rng, CPU, either_dtype, sizes, taps=taps, drafts=drafts, steps=STEPS) > 0


@pytest.mark.parametrize("sizes", [SpaceSizes(4, 2, 16, 24), SpaceSizes(3, 1, 20, 16)])
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_state_space(sizes: SpaceSizes, last_tokens_only: bool, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    scan_case(rng, CPU, either_dtype, drawn_rows(rng, 9), sizes, last_tokens_only=last_tokens_only)


@pytest.mark.parametrize(
    ("sizes", "decays"),
    [(DeltaSizes(1, 2, 16, 24), "strong"), (DeltaSizes(1, 2, 20, 16), "mixed"), (DeltaSizes(1, 1, 128, 128), "drawn")],
)
@pytest.mark.parametrize("alike", [False, True])
def test_recurrence_by_blocks(
    sizes: DeltaSizes, decays: str, alike: bool, either_dtype: torch.dtype, rng: np.random.Generator
) -> None:  # fmt: skip
    """By blocks is as precise as token by token, with the same inputs."""
    rows, seed = long_rows(rng, DELTA_BLOCK), int(rng.integers(2**31))
    how = {"last_tokens_only": bool(rng.integers(2)), "decays": decays if rng.integers(2) else "weak", "alike": alike}
    errors = [
        recurrence_case(np.random.default_rng(seed), CPU, either_dtype, rows, sizes, by_blocks=by_blocks, **how)
        for by_blocks in (False, True)
    ]
    assert_as_precise(*errors)


@pytest.mark.parametrize(
    ("sizes", "decays"),
    [
        (SpaceSizes(4, 2, 16, 24), "strong"),
        (SpaceSizes(2, 1, 20, 16), "mixed"),
        (SpaceSizes(1, 1, 128, 80), "weak"),
        (SpaceSizes(1, 1, 256, 64), "drawn"),
    ],
)
def test_state_space_by_blocks(sizes: SpaceSizes, decays: str, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    rows, seed = long_rows(rng, SPACE_BLOCK), int(rng.integers(2**31))
    how = {"last_tokens_only": bool(rng.integers(2)), "decays": decays}
    errors = [
        scan_case(np.random.default_rng(seed), CPU, either_dtype, rows, sizes, by_blocks=by_blocks, **how)
        for by_blocks in (False, True)
    ]
    assert_as_precise(*errors)


def assert_as_precise(by_tokens: tuple[float, float], by_blocks: tuple[float, float]) -> None:
    """Assert that errors of results and states, relative to the largest number, are not far above those token by token, or single
    bits."""
    print(by_tokens, by_blocks)
    for before, after in zip(by_tokens, by_blocks, strict=True):
        assert after < max(4 * before, 2e-6)


@pytest.mark.parametrize(("groups", "size"), [(1, 64), (3, 33), (2, 31)])
def test_norm_of_groups(groups: int, size: int, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    group_norm_case(rng, CPU, either_dtype, groups=groups, size=size)


@pytest.mark.parametrize("width", [24, 2048, 2060])
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_gate_of_the_output(width: int, last_tokens_only: bool, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    gate_case(rng, CPU, either_dtype, drawn_rows(rng, 5), width=width, last_tokens_only=last_tokens_only)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(("matrix", "taken"), [((2, 16, 24), (3, 40)), ((3, 33, 9), (1, 7)), ((0, 0, 0), (2, 130))])
def test_copies_of_states(
    save: bool, matrix: tuple[int, int, int], taken: tuple[int, int], either_dtype: torch.dtype, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """States smaller than a block, and of more blocks than programs."""
    monkeypatch.setattr(state_copies, "BLOCK", 64)
    copy_case(rng, CPU, either_dtype, layers=3, matrix=matrix, taken=taken, drafts=int(rng.integers(0, 3)), save=save)
