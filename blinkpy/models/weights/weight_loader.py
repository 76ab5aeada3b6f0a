"""Makes a decoder's weights: from a checkpoint, or random."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.quantised_matrices import BLOCK, LARGEST, SCALE_BIAS, Fp8Matrix, PackedMatrix, int4_scales
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.split import WHOLE, Share
from blinkpy.models.weights.array_loader import read_scales
from blinkpy.models.weights.checkpoint import open_checkpoint
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights, own_dtype
from blinkpy.models.weights.packed_loader import SYMMETRIC, PackedReader
from blinkpy.models.weights.packed_matrix import (
    arrange_heads,
    arrange_runs,
    dense,
    empty_packed,
    factors_of_rows,
    read_packed,
)
from blinkpy.models.weights.parts.part import Part
from blinkpy.models.weights.parts.weight_parts import layer_parts, outer_parts
from blinkpy.models.weights.rank_checkpoint import rank_checkpoint, rank_description
from blinkpy.models.weights.stored_tensor import StoredTensor
from blinkpy.models.weights.tensor_loader import QuantisedRows, Target, load_tensors

LARGEST_FP4 = 6.0
INTEGER_RANGE = 8.0
DUMMY_RANGE = 1e-3
"""Largest absolute value of random weights: that of vLLM and SGLang, so that the GPU flips as many bits and draws as much power.
At its power limit, this also decides its clock."""
DUMMY_INPUT_SCALE = 2.0**-5
"""Input scale of static schemes: normed inputs are seldom above 14."""
DRAWN = 1 << 24
"""Random FP8 numbers made at a time."""


def _assemble(
    model: DecoderDescription,
    make: Callable[[Part], torch.Tensor],
    make_fp8: Callable[[Part], Fp8Matrix],
    make_packed: Callable[[Part], PackedMatrix],
    cache_scales: list[dict[str, float]] | None = None,
    share: Share = WHOLE,
    embedding: torch.Tensor | None = None,
) -> Weights:
    """Build all weights.

    make, make_fp8, make_packed: build the weight of a part.
    cache_scales: scales of each layer's cache.
    share: the rank's share, if its output head is a part of the embedding.
    embedding: that of the model, for a draft head without its own.
    """
    outer: dict[str, Any] = {part.field: make(part) for part in outer_parts(model)}
    layers = list[LayerWeights]()
    if model.inputs is not None and not model.inputs.embedding and embedding is not None:
        outer["embedding"] = embedding
    for layer in range(len(model.layers)):
        weights: dict[str, Any] = {} if cache_scales is None else dict(cache_scales[layer])
        for part in layer_parts(model, layer):
            form = make_packed if part.packing is not None else make if part.quantization is None else make_fp8
            weights[part.field] = form(part)
        layers.append(LayerWeights(**weights))
    head = share.head(model.vocab_size)
    tied = {"lm_head": outer["embedding"][head.start : head.stop]}
    return Weights(**(tied | outer), layers=layers)


def load_weights(
    model: DecoderDescription,
    folder: str | Path,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Callable[[float], None] = lambda share: None,
    share: Share = WHOLE,
    embedding: torch.Tensor | None = None,
) -> Weights:
    """Load a checkpoint, or a rank's part of it.

    progress: called with the completed fraction of the bytes.
    embedding: that of the model, for a draft head without its own.
    share: the rank's share; a bias of a matrix whose results are summed over ranks is 0 on all ranks but the first.

    All headers are checked before memory is allocated; then tensors are read piece by piece into their
    places. Raises ConfigError (see open_checkpoint), also for a truncated file.
    """
    stored = open_checkpoint(model, folder)
    if share.ranks > 1:
        model, stored = rank_checkpoint(model, share, stored)
    scales, packed = read_scales(model, stored), None if model.packing is None else PackedReader(model.packing, stored)
    if packed is not None:
        packed.check(model)
    places: list[tuple[str, StoredTensor, Target]] = []
    arranged, changed = list[tuple[torch.Tensor, Part]](), list[tuple[torch.Tensor, float, float]]()
    quantised: list[tuple[Part, Fp8Matrix]] = []
    by_rows = list[tuple[torch.Tensor, Part]]()

    def make(part: Part) -> torch.Tensor:
        if not part.sources:
            return torch.ones(part.shape, dtype=own_dtype(part, dtype), device=device)
        result = torch.empty(part.shape, dtype=own_dtype(part, dtype), device=device)
        for name, shape, expert, row in part.sources:
            target = result if expert < 0 else result[expert]
            places.append((name, stored[name], target[row : row + shape[0]]))
        if part.row_factors:
            by_rows.append((result, part))
        if part.transposed or part.interleaved or part.pairs_of or part.runs:
            arranged.append((result, part))
        if (part.offset, part.factor) != (0, 1):
            changed.append((result, part.offset, part.factor))
        return result

    def make_fp8(part: Part) -> Fp8Matrix:
        found = scales.of_parts.get(part.sources[0][0])
        result = _empty_fp8(part, device, None if found is None else found.inputs)
        if found is not None:
            result.scales.copy_(torch.from_numpy(found.weights))
        else:
            quantised.append((part, result))
        for name, shape, expert, row in part.sources:
            values, own = (result.values, result.scales) if expert < 0 else (result.values[expert], result.scales[expert])
            rows = slice(row, row + shape[0])  # of a matrix, or experts of a tensor that holds all of them
            target = QuantisedRows(values[rows].flatten(0, -2), own[rows].flatten())
            places.append((name, stored[name], target if found is None else values[rows]))
        if part.row_factors:
            by_rows.append((result.scales, part))
        if part.pairs_of:
            arranged.extend((rows, part) for rows in ((result.values,) if result.blocks else (result.values, result.scales)))
        if part.runs:
            arranged.extend((rows, part) for rows in (result.values, result.scales))
        if part.factor != 1:
            changed.append((result.scales, 0, part.factor))
        return result

    def make_packed(part: Part) -> PackedMatrix:
        if packed is None:
            raise ValueError("a 4-bit matrix of a model without a packing")
        return read_packed(part, packed, device)

    weights = _assemble(model, make, make_fp8, make_packed, scales.of_cache, share, embedding)
    load_tensors(places, torch.device(device), progress)
    for part, matrix in quantised:
        if not bool(matrix.scales.isfinite().all()):
            raise ConfigError(f"{folder}: {part.sources[0][0]}, or a matrix fused with it, has non-finite values")
    for tensor, part in by_rows:
        factors = factors_of_rows(part, unit=1 if len(tensor) == part.shape[0] else BLOCK)
        tensor.mul_(factors.to(device).view(-1, *[1] * (tensor.dim() - 1)))
    for tensor, part in arranged:
        if part.runs:
            arrange_runs(tensor, part.runs, unit=part.shape[0] // len(tensor))
        elif part.pairs_of:
            arrange_heads(tensor, *part.pairs_of)
        else:
            arrange_experts(tensor, part)
    for tensor, offset, factor in changed:
        tensor.add_(offset).mul_(factor)
    return _dequantised(model, _biased_once(weights, share))


def _biased_once(weights: Weights, share: Share) -> Weights:
    """Zero the biases of results that are summed over ranks, on all ranks but the first."""
    for layer in weights.layers if share.rank else ():
        for bias in (layer.o_bias, layer.down_bias):
            if bias is not None:
                bias.zero_()
    return weights


def _dequantised(model: DecoderDescription, weights: Weights) -> Weights:
    """Replace quantised matrices by plain tensors where the model needs these (Part.dequantised)."""
    for number, layer in enumerate(weights.layers):
        for part in layer_parts(model, number):
            if part.dequantised:
                setattr(layer, part.field, dense(getattr(layer, part.field), weights.dtype))
    return weights


def _empty_fp8(part: Part, device: str, input_scale: float | None) -> Fp8Matrix:
    values = torch.empty(part.shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Matrix(values, torch.empty(part.scale_shape, dtype=torch.float32, device=device), input_scale)


def arrange_experts(weight: torch.Tensor, part: Part) -> None:
    """Convert from the checkpoint's order to the decoder's, in place, one expert at a time.

    weight: [experts, rows] or [experts, rows, columns], whose memory holds the stored tensor.
    """
    for expert in weight:
        stored = expert.clone()
        if part.transposed:
            stored = stored.view(expert.shape[1], expert.shape[0]).t()
        if part.interleaved:
            stored = stored.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        expert.copy_(stored)


def dummy_weights(
    model: DecoderDescription,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    spread: float = DUMMY_RANGE,
    share: Share = WHOLE,
    embedding: torch.Tensor | None = None,
) -> Weights:
    """Random weights without a checkpoint (`--load-format dummy`): uniform in [-spread, spread), norms 1; equal for equal seeds.

    With a share, they have the sizes of a rank. Weights that are not split are equal on all ranks.

    MXFP4: random bits, with a scale that keeps values within the spread. FP8: uniform values and equal scales.
    """
    model = rank_description(model, share)
    generator, of_head = (torch.Generator(device).manual_seed(int(np.int64(seed))) for _ in range(2))

    def make(part: Part) -> torch.Tensor:
        result = torch.empty(part.shape, dtype=own_dtype(part, dtype), device=device)
        if part.packed and part.field.endswith("_scales"):
            return result.fill_(127 + math.floor(math.log2(spread / LARGEST_FP4)))
        if part.packed:
            return result.random_(0, 256, generator=generator)
        if part.field.endswith(("norm", "layer_scale", "expert_factors")):
            return result.fill_(1)
        own_numbers = part.field == "lm_head" and share.ranks > 1  # ranks differ in the number of these rows
        return result.uniform_(-spread, spread, generator=of_head if own_numbers else generator)

    def make_fp8(part: Part) -> Fp8Matrix:
        result = _empty_fp8(part, device, DUMMY_INPUT_SCALE if part.quantization and part.quantization.static else None)
        result.scales.fill_(spread / LARGEST)
        for some in result.values.view(-1).split(DRAWN):
            numbers = torch.empty(len(some), dtype=torch.float32, device=device)
            some.copy_(numbers.uniform_(-LARGEST, LARGEST, generator=generator))
        return result

    def make_packed(part: Part) -> PackedMatrix:
        result = empty_packed(part, device)
        result.words.random_(-(2**31), 2**31, generator=generator)
        if result.factors is not None:
            result.scales.view(torch.uint8).fill_(SCALE_BIAS << 3)  # 1
            result.factors.fill_(spread / LARGEST_FP4)
        else:
            scales = torch.full(result.scales.shape, spread / INTEGER_RANGE)
            result.scales.copy_(int4_scales(scales, torch.full(scales.shape, SYMMETRIC)))
        return result

    weights = _assemble(model, make, make_fp8, make_packed, share=share, embedding=embedding)
    return _dequantised(model, _biased_once(weights, share))
