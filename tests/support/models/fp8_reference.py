"""FP8 matrices of random models, and float64 values of quantised inputs, defined by kernels/quantised_matrices.py."""

from dataclasses import replace

import torch
from torch import Tensor

from blinkpy.kernels.quantised_matrices import Fp8Matrix
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights

MATRICES: tuple[str, ...] = ("qkv", "q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down", "space_in", "space_out")
MATRICES += ("layer_input_gate", "layer_input_projection")


def quantised(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [..., k] as FP8 numbers and their scales [..., groups]. group: columns of a group."""
    groups = x.float().split(group, -1)
    scales = [part.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / 448 for part in groups]
    parts = [part / scale for part, scale in zip(groups, scales, strict=True)]
    return torch.cat(parts, -1).clamp(-448, 448).to(torch.float8_e4m3fn), torch.cat(scales, -1)


def fp8_matrix(weight: Tensor, blocks: bool, input_scale: float | None = None) -> Fp8Matrix:
    """A matrix [..., n, k] quantised row by row or block by block."""
    if not blocks:
        values, scales = quantised(weight, weight.shape[-1])
        return Fp8Matrix(values, scales.squeeze(-1).contiguous(), input_scale)
    values, parts = torch.zeros_like(weight, dtype=torch.uint8).view(torch.float8_e4m3fn), list[Tensor]()
    n, k = weight.shape[-2:]
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            block = weight[..., row : row + 128, column : column + 128].float()
            parts.append(block.abs().amax((-2, -1)) / 448)
            values[..., row : row + 128, column : column + 128] = (block / parts[-1][..., None, None]).to(values.dtype)
    return Fp8Matrix(values, torch.stack(parts, -1).view(*weight.shape[:-2], -(-n // 128), -(-k // 128)).contiguous())


def exact(matrix: Fp8Matrix) -> Tensor:
    """The float64 values of a matrix: numbers times scales."""
    n, k = matrix.values.shape[-2:]
    by = matrix.scales.double()
    by = by.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k] if matrix.blocks else by[..., None]
    return matrix.values.double() * by


def rounded(x: Tensor, blocks: bool, dtype: torch.dtype) -> Tensor:
    """float64 x after rounding to a storage dtype and quantisation."""
    group = 128 if blocks else x.shape[-1]
    values, scales = quantised(x.to(dtype), group)
    return values.double() * scales.double().repeat_interleave(group, -1)[..., : x.shape[-1]]


def fp8_weights(weights: Weights, *, blocks: bool = False, static: bool = False, kept: tuple[str, ...] = ()) -> Weights:
    """The same model with FP8 matrices, except those kept. static: inputs have one scale."""

    def layer(of: LayerWeights) -> LayerWeights:
        given = {name: getattr(of, name) for name in MATRICES if name not in kept}
        scale = 0.02 if static else None
        return replace(of, **{name: fp8_matrix(it, blocks, scale) for name, it in given.items() if it is not None})

    return replace(weights, layers=[layer(of) for of in weights.layers])
