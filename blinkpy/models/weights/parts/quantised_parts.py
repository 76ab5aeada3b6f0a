"""FP8 and 4-bit forms of a decoder's matrices, and refusals of models whose matrices can't have them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.packing import Packing
from blinkpy.models.description.quantization import BLOCK, Quantization, Scales
from blinkpy.models.weights.parts.part import Part


def as_packed(part: Part, model: DecoderDescription, packing: Packing) -> Part:
    """The 4-bit form of a matrix, unless the model keeps it unquantised. Raises ConfigError if it can't have 4 bits."""
    if not _is_quantised(part, model, packing.keeps):
        return part
    if len(part.sources[0][1]) == 3:
        name = part.sources[0][0].removesuffix(".weight")
        raise ConfigError(f"{name} has the matrices of all experts in one tensor, which is not supported with 4-bit weights")
    for name, (rows, width), _, _ in part.sources:
        misfit = packing.misfit(rows, width)
        if misfit:
            raise ConfigError(f"{name.removesuffix('.weight')}: {misfit}, as {packing.text} requires")
    return replace(part, packing=packing, dequantised=part.field == "kv_b")


def _is_quantised(part: Part, model: DecoderDescription, keeps: Callable[[str], bool]) -> bool:
    """Whether a matrix is quantised. keeps: by name. Raises ConfigError if only some of its sources are quantised."""
    names = [name.removesuffix(".weight") for name, _, _, _ in part.sources]
    kept = [name for name in names if any(keeps(spelling) for spelling in model.tensors.spellings(name))]
    if kept and len(kept) < len(names):
        other = next(name for name in names if name not in kept)
        raise ConfigError(f"{kept[0]} is not quantised, but {other} is; blinkpy fuses the two, so both must be, or neither")
    return not kept


def as_fp8(part: Part, model: DecoderDescription, kind: Quantization) -> Part:
    """The FP8 form of a matrix, unless the model keeps it unquantised. Raises ConfigError if it can't be FP8."""
    sensitive = part.field in ("kv_b", "delta_ba") and not kind.stored
    if sensitive or not _is_quantised(part, model, kind.keeps):
        return part
    names = [name.removesuffix(".weight") for name, _, _, _ in part.sources]
    if part.transposed or (kind.stored and kind.scales != Scales.MATRIX and len(part.sources[0][1]) == 3):
        raise ConfigError(f"{names[0]} has the matrices of all experts in one tensor, which is not supported with FP8")
    if part.field == "shared_down" and kind.static and model.experts.shared_gated:  # its inputs are gated, not its results
        raise ConfigError(f"{model.name} does not support static input scales: the inputs of {names[0]} are gated first")
    if kind.static and model.experts.scales_inputs and part.field == "gate_up" and len(part.shape) == 3:
        raise ConfigError(f"{model.name} does not support static input scales: the inputs of {names[0]} are scaled first")
    if kind.static and part.field in model.multipliers.scaled_inputs:
        raise ConfigError(f"{model.name} does not support static input scales: the inputs of {names[0]} are multiplied first")
    if kind.scales == Scales.BLOCK and any(size % BLOCK for run in part.runs for size in run):
        raise ConfigError(f"{names[0]} must be reordered, but FP8 block scales permit this only in units of {BLOCK} rows")
    factors = accumulate(rows for rows, _ in part.row_factors[:-1])
    if kind.scales == Scales.BLOCK and any(row % BLOCK for row in factors):
        raise ConfigError(
            f"{names[0]} has rows with different multipliers, but FP8 block scales permit this only in units of {BLOCK}"
        )
    ragged = [name for name, (_, _, _, row) in zip(names, part.sources, strict=True) if row % BLOCK]
    if kind.scales == Scales.BLOCK and part.pairs_of and BLOCK % part.pairs_of[1]:
        raise ConfigError(
            f"{names[0]} has heads of {part.pairs_of[1]} rows, which have to be reordered; FP8 with block scales then needs "
            f"a head size that divides {BLOCK}"
        )
    if kind.scales == Scales.BLOCK and ragged:
        raise ConfigError(
            f"{ragged[0]} does not start at a multiple of {BLOCK} rows of its fused matrix; FP8 with block scales "
            f"is not supported for {model.name} of this size"
        )
    return replace(part, quantization=kind, dequantised=part.field == "kv_b" or not kind.inputs)
