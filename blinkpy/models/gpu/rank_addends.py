"""Products of matrices whose columns are split over several GPUs: the addend of each rank, and the sum over the ranks.

A rank's products never leave partial sums to a norm, and never add to the residual stream. all_reduce adds to
it, so every rank has the same stream, bit for bit.
"""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.kernels.fp8_rows import Fp8Rows
from blinkpy.kernels.linear.linear import linear, without_partials
from blinkpy.kernels.linear.linear_variants import LinearCall
from blinkpy.kernels.norm import rms_norm
from blinkpy.kernels.quantised_matrices import PackedMatrix
from blinkpy.models.weights.decoder_weights import Matrix


def add_over_ranks(
    decoder: Any,
    x: torch.Tensor | Fp8Rows,
    weight: Matrix,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    factor: torch.Tensor | None,
) -> None:
    """Add norm(the sum of all ranks' x weight^T + bias), or the sum without a norm, to the residual stream, and
    complete it.

    decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
    bias: whole on rank 0, and 0 on the others.
    factor: [1] of the residual stream afterwards; only with a norm.
    """
    stream, hidden = decoder.stream, decoder.stream.hidden
    write_addend(decoder, x, weight, bias)
    if norm is None:
        decoder.sum_over_ranks(hidden, add=True)
        return
    total = decoder.buffers.normed[: stream.rows]
    decoder.sum_over_ranks(total)
    eps, centred = decoder.model.norm.eps, decoder.centred
    rms_norm(total, norm, eps, stream.counts, hidden, add=True, factor=factor, centred=centred, pdl=decoder.pdl)


def write_addend(
    decoder: Any, x: torch.Tensor | Fp8Rows, weight: Matrix, bias: torch.Tensor | None, *, add: bool = False
) -> None:
    """This rank's addend = x weight^T + bias. add: add it to the present addend. Parameters as in add_over_ranks."""
    stream, out = decoder.stream, decoder.addend_of(decoder.stream.hidden)
    config = decoder._config(weight, len(out))
    rows, matrix, scales = decoder._operands(x, weight, config)
    config = without_partials(config, fp8=scales is not None)
    residual = out if add else None
    call = LinearCall(
        rows, matrix, out, decoder.linear_workspace, stream.counts, bias, residual=residual, pdl=decoder.pdl, scales=scales
    )
    linear(replace(call, packed=words_of(weight)), config)


def words_of(weight: Matrix) -> PackedMatrix | None:
    """The matrix, if it has 4-bit weights."""
    return weight if isinstance(weight, PackedMatrix) else None
