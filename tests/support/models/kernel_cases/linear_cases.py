"""Cases of linear layers."""

from dataclasses import replace

import numpy as np
import torch
from support.models import kernel_reference
from support.models.kernel_cases.kernel_inputs import close, draw, header, poison
from torch import Tensor

from blinkpy.kernels.linear.linear import linear
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearConfig, LinearShape, LinearWorkspace, Scales
from blinkpy.kernels.quantised_matrices import E2M1, PackedMatrix, fp4_scales, int4_scales


def quantised_operands(
    rng: np.random.Generator, device: str, shape: LinearShape
) -> tuple[Tensor, Tensor, Scales, Tensor, Tensor]:
    """Values of x and weight, their scales, and float64 values times scales. Neighbouring scales are far apart, so that a wrong
    scale shows. Or x, and scales of the weight only."""
    m, wide, k, real = shape.rows, shape.weight_rows, shape.k, {"dtype": torch.float32, "device": device}
    x, weight = ((draw(rng, n, k, **real) * 60).clamp(-448, 448).to(torch.float8_e4m3fn) for n in (m, wide))
    groups = -(-k // 128)
    sizes = ((m, groups), (-(-wide // 128), groups)) if shape.blocks else ((m,), (wide,))
    x_scale, w_scale = (torch.exp2(draw(rng, *size, **real)) / 60 for size in sizes)
    w_scale *= k**-0.5  # products as large as their addends
    if shape.blocks:
        by_x = x_scale.repeat_interleave(128, 1)[:, :k]
        by_w = w_scale.repeat_interleave(128, 0)[:wide].repeat_interleave(128, 1)[:, :k]
    else:
        by_x, by_w = x_scale[:, None], w_scale[:, None]
    if shape.inputs is not None:
        x = draw(rng, m, k + 16, dtype=shape.inputs, device=device)[:, :k]
        if rng.integers(2):  # the row's largest number, which sets its scale, may be much larger than the rest, and hide it
            x[:, int(rng.integers(k))] = -2000.0
        return x, weight, Scales(None, w_scale), x.double(), weight.double() * by_w
    strided = torch.zeros(m, k + 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:, :k]
    strided.copy_(x)
    return strided, weight, Scales(x_scale, w_scale), x.double() * by_x, weight.double() * by_w


def draw_packed(
    rng: np.random.Generator, device: str, wide: int, k: int, *, group: int, fp4: bool, ordered: bool
) -> tuple[PackedMatrix, Tensor]:
    """4-bit weights, packed here pair by pair, and their float64 values [wide, k]. group: 0 for a row."""
    generator, group, chunks = (
        torch.Generator(device).manual_seed(int(rng.integers(2**62))),
        16 if fp4 else group or k,
        -(-k // 32),
    )

    def integers(least: int, end: int, *shape: int) -> Tensor:
        return torch.randint(least, end, shape, generator=generator, device=device)

    def uniform(least: float, most: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * (most - least) + least

    nibbles = integers(0, 16, wide, chunks, 4, 4, 2)  # numbers beyond k are never read
    numbers, words = nibbles.flatten(1)[:, :k], integers(0, 1, wide, chunks, 4)
    for pair in range(4):
        for half in range(2):
            words |= nibbles[:, :, pair, :, half] << 4 * pair + 16 * half
    factors = None
    if fp4:
        factors = uniform(0.5, 2.0, wide) * (k**-0.5 / 8)
        stored = uniform(0, 16, wide, k // group).to(torch.float8_e4m3fn).float()
        values = torch.tensor(E2M1, device=device, dtype=torch.float64)[numbers]
        exact = values * stored.double().repeat_interleave(group, 1) * factors.double()[:, None]
        of_groups = fp4_scales(stored)
    else:
        scales = uniform(0.5, 2.0, wide, k // group).half().float() * (k**-0.5 / 4)
        zeros = integers(0, 16, wide, k // group) if rng.integers(2) else integers(8, 9, wide, k // group)
        narrow = (scales.view(torch.int32) + 8 & -16).view(torch.float32)
        exact = (numbers - zeros.repeat_interleave(group, 1)) * narrow.double().repeat_interleave(group, 1)
        of_groups = int4_scales(scales, zeros).T.contiguous()
    order = torch.randperm(k, generator=generator, device=device)
    weight = torch.empty_like(exact).index_copy_(1, order, exact) if ordered else exact
    int32 = torch.where(words >= 2**31, words - 2**32, words).int().flatten(1)
    return PackedMatrix(int32, of_groups, k, factors, order.int() if ordered else None), weight


def packed_operands(rng: np.random.Generator, device: str, shape: LinearShape) -> tuple[Tensor, PackedMatrix, Tensor]:
    """x, 4-bit weights whose scales are a slice of a wider matrix's, and their float64 values."""
    x = draw(rng, shape.rows, shape.k + 8, dtype=shape.inputs or torch.bfloat16, device=device)[:, : shape.k]
    how = {"group": shape.group, "fp4": shape.fp4, "ordered": shape.ordered}
    packed, weight = draw_packed(rng, device, shape.weight_rows, shape.k, **how)
    wider = torch.nn.functional.pad(packed.scales, (0, 3), value=-1)
    return x, replace(packed, scales=wider[:, : shape.weight_rows]), weight


def linear_case(rng: np.random.Generator, device: str, config: LinearConfig, shape: LinearShape) -> None:
    m, n, k = shape.rows, shape.n, shape.k
    dtype = shape.inputs or (torch.bfloat16 if shape.fp8 or shape.packed else shape.dtype)
    wide, make = shape.weight_rows, {"dtype": dtype, "device": device}
    result = torch.float32 if shape.partials else shape.out_dtype
    packed = None
    if shape.packed:
        x, packed, exact_weight = packed_operands(rng, device, shape)
        weight, operand_scales, exact_x = packed.words, None, x.double()
    elif shape.fp8:
        x, weight, operand_scales, exact_x, exact_weight = quantised_operands(rng, device, shape)
    else:
        x, weight = draw(rng, m, k + 8, **make)[:, :k], draw(rng, wide, k, scale=k**-0.5, **make)
        operand_scales, exact_x, exact_weight = None, x.double(), weight.double()
    bias = draw(rng, wide, **make) if shape.bias else None
    scales = draw(rng, k, dtype=torch.float32 if rng.integers(2) else dtype, device=device) if shape.norm else None
    added = draw(rng, m, n, dtype=result, device=device) if shape.residual else None
    expected = exact_x if scales is None else kernel_reference.rms_norm(x, scales, 1e-5)
    expected = kernel_reference.linear(expected, exact_weight, bias)
    expected = kernel_reference.swiglu(expected, shape.gelu) if shape.swiglu else expected
    expected = expected if added is None else expected + added.double()
    partial = config.split_k * (m + config.block_m) * (wide + 2 * config.block_n)
    workspace = LinearWorkspace.allocate(device, dtype, partial=partial, tiles=4096, rows=m * (k + wide))
    sizes, outs = (config.split_k, m, n) if shape.partials else (m, n), []
    norm, counts = None if scales is None else (scales, 1e-5), header(m, m, 0, device)
    for _ in range(2):  # twice, because split sums must leave their counters at zero
        out = poison(*sizes, dtype=result, device=device) if added is None else added.clone()
        residual = None if added is None else out
        call = LinearCall(x, weight, out, workspace, counts, bias, norm, residual, shape.swiglu, gelu=shape.gelu)
        linear(replace(call, scales=operand_scales, packed=packed), config)
        assert not workspace.arrivals.any()
        close(out.double().sum(0) if shape.partials else out, expected, dtype, f"{shape} {config}")
        outs.append(out)
    assert torch.equal(*outs), "two runs differ"
