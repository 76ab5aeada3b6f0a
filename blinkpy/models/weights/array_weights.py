"""A decoder's weights as float32 NumPy arrays, which need no torch: the counterpart of decoder_weights.py and weight_loader.py.

unknown_parts() says why a model is not supported.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Attention, Experts, Factors, Mlp, Norm
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.weights.array_loader import load_arrays, read_scales
from blinkpy.models.weights.checkpoint import open_checkpoint
from blinkpy.models.weights.parts.part import Part
from blinkpy.models.weights.parts.weight_parts import layer_parts, outer_parts

Float32 = NDArray[np.float32]
LARGEST = 448.0  # FP8 number (E4M3)
MANTISSA_BITS, SMALLEST_EXPONENT = 3, -6
DUMMY_RANGE, DUMMY_INPUT_SCALE = 1e-3, 2.0**-5  # as in weight_loader.py
QUANTISED_ROWS = 1024  # rows that are quantised at a time
DRAWN = 1 << 20  # random numbers that are drawn at a time


def round_to_fp8(x: Float32) -> Float32:
    """The nearest FP8 numbers, ties to even, saturated. x: finite."""
    exponent = np.maximum(np.frexp(x)[1] - 1, SMALLEST_EXPONENT)
    step = np.ldexp(np.float32(1), exponent - MANTISSA_BITS)
    return np.clip(np.rint(x / step) * step, -LARGEST, LARGEST)


def quantised_rows(x: Float32, scale: float | None = None) -> tuple[Float32, Float32]:
    """(Values divided by their scale, rounded; the scales, float32 [...]).

    x: [..., K].
    scale: scale of all rows; None: the maximum of each row becomes 448 (scale 1 if it is 0).
    """
    if scale is None:
        scales = np.abs(x).max(axis=-1) / np.float32(LARGEST)
        scales[scales == 0] = 1
    else:
        scales = np.full(x.shape[:-1], scale, np.float32)
    with np.errstate(invalid="ignore"):  # non-finite numbers stay non-finite
        return round_to_fp8(x / scales[..., None]), scales


@dataclass(frozen=True)
class ArrayFp8:
    """The NumPy form of blinkpy.kernels.quantised_matrices.Fp8Matrix. The FP8 numbers are stored as float32 for NumPy's
    products.
    """

    values: Float32  # [N, K], or [experts, N, K]
    scales: Float32  # [N], or [ceil(N / 128), ceil(K / 128)]; of experts with them as first dimension
    input_scale: float | None = None

    @property
    def blocks(self) -> bool:
        """Whether each block has a scale, instead of each row."""
        return self.scales.ndim == self.values.ndim

    def __getitem__(self, expert: int) -> "ArrayFp8":
        return ArrayFp8(self.values[expert], self.scales[expert], self.input_scale)


ArrayMatrix = Float32 | ArrayFp8


@dataclass
class ArrayLayer:
    """Weights of one layer: see decoder_weights.LayerWeights."""

    input_norm: Float32  # [hidden]
    qkv: ArrayMatrix  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: ArrayMatrix  # [hidden, heads * head_dim]
    post_norm: Float32  # [hidden]
    gate_up: ArrayMatrix  # [2 * intermediate, hidden] or [experts, 2 * expert_size, hidden]
    down: ArrayMatrix  # [hidden, intermediate] or [experts, hidden, expert_size]
    qkv_bias: Float32 | None = None
    o_bias: Float32 | None = None
    gate_up_bias: Float32 | None = None
    down_bias: Float32 | None = None
    q_norm: Float32 | None = None  # [head_dim]
    k_norm: Float32 | None = None  # [head_dim]
    router: Float32 | None = None  # [experts, hidden]
    k_scale: float | None = None
    v_scale: float | None = None


@dataclass
class ArrayWeights:
    """All weights of a decoder. Tied embeddings: lm_head is the embedding."""

    embedding: Float32  # [vocab, hidden]
    layers: list[ArrayLayer]
    final_norm: Float32  # [hidden]
    lm_head: Float32  # [vocab, hidden]


KNOWN: dict[type, frozenset[str]] = {
    Norm: frozenset({"eps"}),
    Rope: frozenset(field.name for field in fields(Rope)) - {"neighbours", "query_growth", "query_period", "query_start"},
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "window", "qk_norm", "qkv_bias", "o_bias", "scale"}),
    Factors: frozenset({"embedding", "residual", "logits"}),
    Mlp: frozenset({"size", "activation", "bias"}),
    Experts: frozenset({"number", "top_k", "size", "router", "activation", "normalize"}),
    Part: frozenset({"field", "shape", "sources", "factor", "quantization"}),
    DecoderDescription: frozenset(
        {"name", "vocab_size", "hidden_size", "layers", "norm", "placement", "max_position", "tied_embeddings", "dtype"}
        | {"tensors", "factors", "quantization"}
    ),
}
"""Fields that the decoder over these arrays computes with. Others may exist for other decoders, and must have their defaults."""


def _set_fields(block: Any) -> Iterator[str]:
    """Fields of a block, part or description that are not KNOWN and not at their default."""
    if hasattr(block, "_fields"):
        values, defaults = block._asdict(), block._field_defaults
    else:
        values = {field.name: getattr(block, field.name) for field in fields(block)}
        defaults = {field.name: field.default for field in fields(block) if field.default is not MISSING}
    for name, value in values.items():
        if name not in KNOWN[type(block)] and (name not in defaults or value != defaults[name]):
            yield f"{type(block).__name__}.{name}"


def unknown_parts(model: DecoderDescription) -> list[str]:
    """The parts of a model that these weights or the NumPy decoder do not support, sorted."""
    parts = [part for layer in range(len(model.layers)) for part in layer_parts(model, layer)]
    own = {field.name for field in fields(ArrayLayer)}
    found = {f"weights {part.field}" for part in parts if part.field not in own}
    norms = {part.shape for part in parts if part.field in ("q_norm", "k_norm")}
    if norms - {(model.head_dim,)}:
        found.add("norms of queries and keys over more than a head")
    blocks = {model.norm, model.factors, *model.ropes} | {b for x in model.layers for b in (x.attention, x.mlp) if b is not None}
    for block in (model, *blocks, *parts, *outer_parts(model)):
        found.update(_set_fields(block))
    return sorted(found)


def _assemble(
    model: DecoderDescription,
    make: Callable[[Part], Float32],
    make_fp8: Callable[[Part], ArrayFp8],
    cache_scales: list[dict[str, float]] | None = None,
) -> ArrayWeights:
    """Build all weights.

    make, make_fp8: build the weight of a part.
    cache_scales: scales of each layer's cache.
    """
    outer, layers = {part.field: make(part) for part in outer_parts(model)}, []
    for layer in range(len(model.layers)):
        weights: dict[str, Any] = {} if cache_scales is None else dict(cache_scales[layer])
        for part in layer_parts(model, layer):
            weights[part.field] = make(part) if part.quantization is None else make_fp8(part)
        layers.append(ArrayLayer(**weights))
    return ArrayWeights(outer["embedding"], layers, outer["final_norm"], outer.get("lm_head", outer["embedding"]))


def load_array_weights(
    model: DecoderDescription, folder: str | Path, progress: Callable[[float], None] = lambda share: None
) -> ArrayWeights:
    """Load a checkpoint of any float type. progress: called with the completed fraction of the bytes.

    All headers are checked before memory is allocated; then tensors are read piece by piece into their
    places. Raises ConfigError (see open_checkpoint), also for a truncated file.
    """
    stored = open_checkpoint(model, folder)
    scales = read_scales(model, stored)
    places, scaled, quantised = [], list[tuple[Float32, float]](), list[tuple[Part, ArrayFp8]]()

    def place(part: Part, result: Float32) -> None:
        for name, shape, expert, row in part.sources:
            target = result if expert < 0 else result[expert]
            places.append((name, stored[name], target[row : row + shape[0]]))

    def make(part: Part) -> Float32:
        result = np.empty(part.shape, np.float32)
        place(part, result)
        if part.factor != 1:
            scaled.append((result, part.factor))
        return result

    def make_fp8(part: Part) -> ArrayFp8:
        found = scales.of_parts.get(part.sources[0][0])
        values = np.empty(part.shape, np.float32)
        place(part, values)
        if found is None:
            result = ArrayFp8(values, np.empty(part.scale_shape, np.float32))
            quantised.append((part, result))
        else:
            result = ArrayFp8(values, found.weights, found.inputs)
        if part.factor != 1:
            scaled.append((result.scales, part.factor))
        return result

    weights = _assemble(model, make, make_fp8, scales.of_cache)
    load_arrays(places, progress)
    for part, matrix in quantised:
        rows, own = matrix.values.reshape(-1, part.shape[-1]), matrix.scales.reshape(-1)
        for first in range(0, len(rows), QUANTISED_ROWS):
            some = slice(first, first + QUANTISED_ROWS)
            rows[some], own[some] = quantised_rows(rows[some])
        if not np.isfinite(own).all():
            raise ConfigError(f"{folder}: {part.sources[0][0]}, or a matrix fused with it, has non-finite values")
    for array, factor in scaled:
        array *= np.float32(factor)
    return weights


def dummy_array_weights(model: DecoderDescription, seed: int, spread: float = DUMMY_RANGE) -> ArrayWeights:
    """weight_loader.dummy_weights in float32. torch's CPU generator is also MT19937, and makes a number in
    [0, 1) from the low 24 bits of a word.
    """
    generator = np.random.MT19937()
    generator._legacy_seeding(seed & 0xFFFFFFFF)  # torch uses these bits of the seed

    def draw(result: Float32, spread: float) -> None:
        width = np.float64(np.float32(spread) - np.float32(-spread))
        for some in np.split(result.reshape(-1), range(DRAWN, result.size, DRAWN)):
            numbers = (generator.random_raw(len(some)) & 0xFFFFFF) * 2.0**-24
            some[:] = numbers * width - np.float32(spread)  # rounded once, like a fused multiply-add

    def make(part: Part) -> Float32:
        result = np.ones(part.shape, np.float32)
        if not part.field.endswith("norm"):
            draw(result, spread)
        return result

    def make_fp8(part: Part) -> ArrayFp8:
        values = np.empty(part.shape, np.float32)
        draw(values, LARGEST)
        for some in np.split(values.reshape(-1), range(DRAWN, values.size, DRAWN)):
            some[:] = round_to_fp8(some)
        inputs = DUMMY_INPUT_SCALE if part.quantization and part.quantization.static else None
        return ArrayFp8(values, np.full(part.scale_shape, np.float32(spread / LARGEST)), inputs)

    return _assemble(model, make, make_fp8)
