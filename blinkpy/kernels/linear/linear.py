"""Linear layers, y = x W^T, with adjacent operations: RMSNorm of x before; bias, SwiGLU and the residual
addition after.

The configuration selects one of VARIANTS. A row's result depends on the row and the configuration, never on
other rows.
"""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.activation import swiglu
from blinkpy.kernels.config_files import check_needs
from blinkpy.kernels.fp8_rows import BLOCK_SCALES
from blinkpy.kernels.launch import HEADER, STORAGE_DTYPES, by_name, check_tensors, noted
from blinkpy.kernels.linear import cublas, fp8_gemv, fp8_steps, gemv, packed_tiles, split_k, wide_tiles
from blinkpy.kernels.linear.linear_variants import WORDS, LinearCall, LinearConfig, LinearShape, LinearVariant
from blinkpy.kernels.norm import rms_norm
from blinkpy.kernels.quantised_matrices import BLOCK, CHUNK, FP8

VARIANTS: dict[str, LinearVariant] = by_name(
    *cublas.VARIANTS, gemv.VARIANT, fp8_gemv.VARIANT, fp8_steps.VARIANT, split_k.VARIANT, wide_tiles.VARIANT, packed_tiles.VARIANT
)


def linear(call: LinearCall, config: LinearConfig) -> None:
    """Compute a linear layer with a configuration of `LinearTable.config`. Results of padding rows are
    undefined.

    A norm or SwiGLU that the variant does not fuse runs as a separate kernel, in the workspace. Raises
    ValueError or TypeError if call, configuration and workspace do not match.
    """
    if config.variant not in VARIANTS:
        raise ConfigError(f"linear configuration: unknown variant {config.variant!r}; known variants: {', '.join(VARIANTS)}")
    variant = VARIANTS[config.variant]
    check_call(call, config, variant)
    scratch = call.workspace.rows
    if call.norm is not None and "norm" not in variant.fuses:
        normed, scratch = take(scratch, call.x, call.x.shape[1])
        rms_norm(call.x, *call.norm, call.counts, normed, pdl=call.pdl)
        call = replace(call, x=normed, norm=None)
    with noted(lambda: f"{config} for {call.shape}"):
        launch_variant(call, config, variant, scratch)


def launch_variant(call: LinearCall, config: LinearConfig, variant: LinearVariant, scratch: torch.Tensor) -> None:
    """Launch the product, then SwiGLU if the variant does not fuse it. scratch: memory that no norm uses."""
    if call.swiglu and "swiglu" not in variant.fuses:
        gate_up, _ = take(scratch, call.out, call.weight.shape[0])
        variant.launch(replace(call, out=gate_up, swiglu=False), config)
        swiglu(gate_up, call.counts, call.out, gelu=call.gelu, pdl=call.pdl)
    else:
        variant.launch(call, config)


def check_call(call: LinearCall, config: LinearConfig, variant: LinearVariant) -> None:
    """Raise ValueError or TypeError unless the tensors match and the variant supports the call."""
    x, out, bias, norm, residual = call.x, call.out, call.bias, call.norm, call.residual
    (rows, k), n, shape = x.shape, out.shape[-1], call.shape
    fp8, quantised = call.scales is not None, call.scales is not None and call.scales.x is not None
    stored, dtypes = ((FP8,), STORAGE_DTYPES) if quantised else (STORAGE_DTYPES, (x.dtype,))
    results = STORAGE_DTYPES if fp8 else (x.dtype, torch.float32)
    check_tensors(
        (x, "x", (None, None), stored, True),
        *declared_scales(call),
        *declared_words(call),
        (None if shape.packed else call.weight, "weight", (shape.weight_rows, k), FP8 if fp8 else x.dtype),
        (out, "out", (config.split_k, rows, n) if call.partials else (rows, n), torch.float32 if call.partials else results),
        (bias, "bias", (len(call.weight),), dtypes),
        (None if norm is None else norm[0], "norm weight", (k,)),
        (residual, "residual", (rows, n), out.dtype),
        (call.counts, "counts", *HEADER),
        (call.workspace.partial, "partial", (None,), torch.float32),
    )
    check_config(config, shape)
    if quantised != (fp8 and variant.quantised_inputs):
        raise ValueError(f"{config} does not support {shape}: it takes inputs {'as FP8' if fp8 else 'in a storage dtype'}")
    if call.partials:
        if "partials" not in variant.fuses or call.swiglu or residual is not None:
            raise ValueError(f"{config}: this variant can't return partial sums, or can't combine them with swiglu or a residual")
    elif writes_partials(config):
        raise ValueError(f"{config}: the variant returns partial sums, but the call does not expect them")
    if (bias is not None and "bias" not in variant.fuses) or (residual is not None and "residual" not in variant.fuses):
        raise ValueError(f"{config}: the variant does not support this bias or residual")
    if residual is not None and call.swiglu and "swiglu" not in variant.fuses:
        raise ValueError(f"{config}: the variant does not support a residual together with swiglu")


def declared_scales(call: LinearCall) -> list[tuple[Any, ...]]:
    """For `check_tensors`."""
    if call.scales is None:
        return []
    rows, outputs, groups = len(call.x), len(call.weight), -(-call.x.shape[1] // BLOCK)
    by_block = call.scales_kind == BLOCK_SCALES.value
    return [
        (call.scales.x, "scales of x", (rows, groups) if by_block else (rows,), torch.float32),
        (call.scales.weight, "scales of weight", (-(-outputs // BLOCK), groups) if by_block else (outputs,), torch.float32),
    ]


def declared_words(call: LinearCall) -> list[tuple[Any, ...]]:
    """For `check_tensors`. Raises ValueError for words without their scales."""
    packed, k = call.packed, call.x.shape[1]
    if packed is None:
        if call.shape.packed:
            raise ValueError("weight: words of 4-bit numbers need the scales of their matrix")
        return []
    outputs, groups = call.shape.weight_rows, -(-k // 64) if packed.fp4 else k // (packed.group or k)
    return [
        (call.weight, "words", (outputs, -(-k // CHUNK) * 4), WORDS),
        (packed.scales, "scales of weight", (groups, outputs), WORDS, True),
        (packed.factors, "factors of rows", (outputs,), torch.float32),
        (packed.columns, "order of columns", (k,), torch.int32),
    ]


def check_config(config: LinearConfig, shape: LinearShape) -> None:
    """Raise ConfigError for a configuration that its variant does not support with this shape, or whose
    kernel does not fit a multiprocessor.
    """
    if config.variant not in VARIANTS:
        raise ConfigError(f"linear configuration: unknown variant {config.variant!r}; known variants: {', '.join(VARIANTS)}")
    variant = VARIANTS[config.variant]
    if not variant.supports(shape):
        raise ConfigError(f"linear configuration: variant {variant.name!r} does not support {shape}")
    variant.check(config, shape)
    check_needs(variant.needs(config, shape), config.warps, f"linear configuration: {config} for {shape}")


def fits(config: LinearConfig, shape: LinearShape) -> bool:
    """Whether `check_config` accepts the configuration."""
    try:
        check_config(config, shape)
    except ConfigError:
        return False
    return True


def can_fuse(config: LinearConfig, *features: str) -> bool:
    """Whether the configuration's variant fuses all these operations."""
    return VARIANTS[config.variant].fuses.issuperset(features)


def can_write_partials(config: LinearConfig) -> bool:
    """Whether the sums are split over K and the result may be partial sums."""
    return config.split_k > 1 and can_fuse(config, "partials")


def writes_partials(config: LinearConfig) -> bool:
    """Whether the result must be partial sums, because the variant does not add them."""
    return config.split_k > 1 and not can_fuse(config, "split sums")


def without_partials(config: LinearConfig, *, fp8: bool) -> LinearConfig:
    """The configuration, or a configuration without partial sums if its result must be partial sums. fp8: the weight is FP8."""
    if not writes_partials(config):
        return config
    return replace(config, split_k=1) if fp8 else LinearConfig("cublas")


def take(scratch: torch.Tensor, like: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide scratch memory: a contiguous [rows of `like`, columns], and the remaining memory."""
    rows = like.shape[0]
    if scratch.numel() < rows * columns or scratch.dtype != like.dtype:
        raise ValueError(f"linear workspace: {rows * columns} scratch elements of {like.dtype} needed, {scratch.numel()} left")
    return scratch[: rows * columns].view(rows, columns), scratch[rows * columns :]
