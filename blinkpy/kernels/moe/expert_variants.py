"""The interface of expert-layer variants."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import OTHER_SHARED, ConfigTable, Needs, check_needs, check_power_of_two, pipeline_bytes
from blinkpy.kernels.fp8_rows import Fp8Rows
from blinkpy.kernels.linear.packed_tiles import tf32_bytes
from blinkpy.kernels.moe.routing import Selection
from blinkpy.kernels.quantised_matrices import BLOCK, Fp8Matrix, PackedMatrix, kind_of

# Tiles of the grouped products of expert layers, by shape and bucket: a table per GPU model, or defaults.
#
# Measured by `python -m benchmarks.tuning.expert_tuner`. A configuration decides the order of sums. It is
# fixed per bucket, so results are reproducible.

LEAST_PACKED_K = 128
"""Columns of a tile of MXFP4. A part has a quarter of them: with 16, Triton 3.6 multiplied small tiles wrongly on an H200."""


@dataclass(frozen=True)
class ExpertTile:
    """The tiles of one of the two products."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class ExpertConfig:
    """Tiles of a bucket. Raises ConfigError unless kernels can be built from them."""

    block_m: int  # assignments of a block, as in the Routing
    up: ExpertTile  # gate and up, block_n rows of each
    down: ExpertTile

    def __post_init__(self) -> None:
        check_power_of_two("expert configuration: block_m", self.block_m, 16)
        for name, tile in (("up", self.up), ("down", self.down)):
            for field, least in (("block_n", 16), ("block_k", 16), ("warps", 1)):
                check_power_of_two(f"expert configuration: {name}.{field}", getattr(tile, field), least)
            if tile.stages < 1:
                raise ConfigError(f"expert configuration: {name}.stages {tile.stages} must be at least 1")


@dataclass(frozen=True)
class ExpertShape:
    """The shape of an expert layer.

    experts: number of experts.
    top_k: experts of a token.
    hidden: hidden size.
    width: an expert's width.
    mxfp4: the matrices are MXFP4.
    fp8: "rows" or "blocks": the matrices are FP8, with scales for rows or blocks; "": not FP8.
    packed: `PackedMatrix.kind` of matrices with 4-bit weights, or "".
    ordered: whether the columns of each PackedMatrix are in a different order than the inputs.
    gated: whether the experts have a gate; otherwise their activation is squared ReLU, and their first matrix has `width` rows.
    """

    experts: int
    top_k: int
    hidden: int
    width: int
    mxfp4: bool = False
    fp8: str = ""
    packed: str = ""
    ordered: bool = False
    gated: bool = True

    @property
    def halves(self) -> int:
        """Matrices of an expert before its activation: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def group(self) -> int:
        """Inputs that share a scale of int4 numbers; 0: all of a row."""
        return int(self.packed.removeprefix("int4 ")) if self.packed.startswith("int4 ") else 0

    def key(self, dtype: torch.dtype) -> str:
        """Name of its entry in a table. dtype: dtype of activations, and of weights that are not packed."""
        size = f"e{self.experts} top{self.top_k} h{self.hidden} w{self.width}{'' if self.gated else ' ungated'}"
        stored = f"{' mxfp4' if self.mxfp4 else ''}{f' fp8 {self.fp8}' if self.fp8 else ''}"
        stored += f" {self.packed}" if self.packed else ""
        return f"{size} {str(dtype).removeprefix('torch.')}{stored}"

    @classmethod
    def of_key(cls, name: str) -> tuple[Self, torch.dtype]:
        """The inverse of `key`: shape and dtype. Raises ConfigError for an invalid name."""
        found = KEY.fullmatch(name)
        if found is None:
            raise ConfigError(f"{name!r} is not the name of a shape, such as 'e128 top8 h2048 w768 bfloat16'")
        experts, top_k, hidden, width, ungated, dtype, mxfp4, fp8, packed = found.groups()
        sizes = int(experts), int(top_k), int(hidden), int(width)
        return cls(*sizes, bool(mxfp4), fp8 or "", packed or "", gated=not ungated), getattr(torch, dtype)


SIZE = r"([1-9]\d{0,8})"
STORED = r"( mxfp4)?(?: fp8 (rows|blocks))?(?: (fp4|int4 \d{1,6}))?"
KEY = re.compile(rf"e{SIZE} top{SIZE} h{SIZE} w{SIZE}( ungated)? (bfloat16|float32){STORED}")


MXFP4_DEFAULTS = (
    (8, ExpertConfig(16, ExpertTile(64, 256, stages=2), ExpertTile(64, 256, stages=3))),
    (32, ExpertConfig(32, ExpertTile(64, 128, stages=3), ExpertTile(64, 128, stages=3))),
    (64, ExpertConfig(64, ExpertTile(64, 128, stages=3), ExpertTile(128, 128, warps=8, stages=3))),
    (float("inf"), ExpertConfig(128, ExpertTile(128, 128, warps=8, stages=3), ExpertTile(128, 128, warps=8, stages=3))),
)
"""Configurations by the tokens of an expert: the fastest ones tried for gpt-oss's shape on an H200."""


def check_expert_config(config: ExpertConfig, shape: ExpertShape, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the kernels of both products fit a multiprocessor. dtype: dtype of activations."""
    for name, tile in (("up", config.up), ("down", config.down)):
        needs = tile_needs(config.block_m, tile, shape, dtype, up=name == "up")
        check_needs(needs, tile.warps, f"expert configuration: {name} {tile} with block_m {config.block_m} for {shape}")


def tile_needs(block_m: int, tile: ExpertTile, shape: ExpertShape, dtype: torch.dtype, *, up: bool) -> Needs:
    """The resources that a program of the grouped product needs. dtype: dtype of activations. up: whether it is the first
    product."""
    inputs, halves = (shape.hidden, shape.halves) if up else (shape.width, 1)
    if shape.packed:
        return _needs_of_words(block_m, tile, shape, dtype, inputs, halves)
    block_k, wide, tf32 = (
        step_over_k(tile, inputs, packed=shape.mxfp4, fp8=shape.fp8),
        halves * tile.block_n,
        dtype == torch.float32,
    )
    if inputs <= block_k:  # one step, without a pipeline
        return Needs(OTHER_SHARED, block_m * wide)
    if shape.mxfp4:  # inputs and words of eight weights are unpacked in registers, so that no operand stays in use
        operands = block_m * block_k * dtype.itemsize + wide * block_k // 2
        return Needs((tile.stages - 1) * operands + OTHER_SHARED, block_m * wide)
    operands = (block_m + wide) * block_k * (1 if shape.fp8 else dtype.itemsize)
    shared = pipeline_bytes(operands, tile.stages, block_m, tile.warps, tf32=tf32 and not shape.fp8)
    return Needs(shared, block_m * (wide + (tile.block_n if shape.fp8 == "blocks" else 0)))


def _needs_of_words(block_m: int, tile: ExpertTile, shape: ExpertShape, dtype: torch.dtype, inputs: int, halves: int) -> Needs:
    """tile_needs for 4-bit weights."""
    fp4 = shape.packed == "fp4"
    block_k = step_over_words(tile, shape.group, fp4=fp4)
    values = block_m * tile.block_n * (halves + (0 if fp4 else 1))
    if inputs <= block_k:  # one step, without a pipeline
        return Needs(OTHER_SHARED, values)
    stages, tf32 = 1 if shape.ordered else tile.stages, dtype == torch.float32
    x = pipeline_bytes(block_m * block_k * dtype.itemsize, stages, tile.block_n, tile.warps, tf32=tf32)
    x += tf32_bytes(block_m, tile.block_n, block_k, tile.warps) if tf32 else 0
    words = halves * tile.block_n * (block_k // 2 + 4 * (block_k // 64 if fp4 else 1))
    return Needs(x + max(1, tile.stages - 1) * words, values)


def step_over_words(tile: ExpertTile, group: int, *, fp4: bool) -> int:
    """Inputs of one step over 4-bit weights: they share one scale with int4, or one or two words of scales with E2M1.

    group: inputs that share a scale of int4, 0 for a row.
    """
    if fp4:
        return 64 if tile.block_k <= 64 else 128
    return max(32, min(tile.block_k, 128, group & -group if group else 128))


def step_over_k(tile: ExpertTile, inputs: int, *, packed: bool, fp8: str) -> int:
    """Inputs of one step of a grouped product: limited by the number of inputs and the range of a scale, and
    at least the matrix unit's minimum.

    packed: the matrix is MXFP4.
    fp8: `ExpertShape.fp8`.
    """
    least, most = LEAST_PACKED_K if packed else 32 if fp8 else 16, BLOCK if fp8 == "blocks" else tile.block_k
    return max(least, min(tile.block_k, most, 1 << (inputs - 1).bit_length()))


def default_expert_config(shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
    """Tiles for any shape, without measurement: narrow while experts see few tokens and reading weights
    dominates. They pass `check_expert_config`.
    """
    config = _default(shape, tokens, dtype)
    check_expert_config(config, shape, dtype)
    return config


def _default(shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
    if shape.packed:
        return _packed_default(shape, tokens, dtype)
    if dtype == torch.float32:
        return ExpertConfig(16, ExpertTile(32, 32, stages=3), ExpertTile(32, 32, stages=3))
    each = tokens * shape.top_k / shape.experts  # average tokens per expert
    if shape.mxfp4:
        return next(config for most, config in MXFP4_DEFAULTS if each <= most)
    if each <= 8:
        return ExpertConfig(16, ExpertTile(32, 128), ExpertTile(64, 128))
    if each <= 32:
        return ExpertConfig(32, ExpertTile(64, 128, stages=3), ExpertTile(64, 128, stages=3))
    if each <= 64 or shape.fp8 == "blocks":  # block scales need registers for second sums
        return ExpertConfig(64, ExpertTile(64, 64, stages=3), ExpertTile(128, 64, stages=3))
    return ExpertConfig(128, ExpertTile(128, 64, warps=8, stages=4), ExpertTile(128, 64, warps=8, stages=3))


def _packed_default(shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
    """The default for 4-bit weights, which are the first operand of the matrix unit: tiles of at least 64 rows."""
    if dtype == torch.float32:
        return ExpertConfig(16, ExpertTile(32, 64, stages=3), ExpertTile(32, 64, stages=3))
    each = tokens * shape.top_k / shape.experts
    if each <= 64:
        block_m = 16 if each <= 8 else 32 if each <= 32 else 64
        return ExpertConfig(block_m, ExpertTile(64, 128, 8 if block_m == 64 else 4), ExpertTile(64, 128))
    return ExpertConfig(128, ExpertTile(64, 128, 8, 3), ExpertTile(128, 128, 8, 3))


class ExpertTable(ConfigTable[dict[int, ExpertConfig]]):
    """Configurations by shape and dtype, then by tokens."""

    section, suffix = "experts", "_experts"

    @staticmethod
    def from_json(name: str, entry: dict[str, Any]) -> dict[int, ExpertConfig]:
        shape, dtype = ExpertShape.of_key(name)
        configs = {
            int(tokens): ExpertConfig(fields["block_m"], ExpertTile(**fields["up"]), ExpertTile(**fields["down"]))
            for tokens, fields in entry.items()
        }
        for config in configs.values():
            check_expert_config(config, shape, dtype)
        return configs

    @staticmethod
    def to_json(entry: dict[int, ExpertConfig]) -> dict[str, Any]:
        return {str(tokens): asdict(config) for tokens, config in sorted(entry.items())}

    def config(self, shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
        """The configuration for a bucket of `tokens` tokens: measured at the next larger number, or at the
        largest.
        """
        buckets = self.entries.get(shape.key(dtype))
        if not buckets:
            return default_expert_config(shape, tokens, dtype)
        config = buckets[min((n for n in buckets if n >= tokens), default=max(buckets))]
        check_expert_config(config, shape, dtype)
        return config


class InvariantExpertTable(ExpertTable):
    """One configuration for all numbers of tokens, like InvariantLinearTable."""

    def config(self, shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
        return default_expert_config(shape, 16 * shape.experts // shape.top_k, dtype)


@dataclass(frozen=True)
class ExpertWorkspace:
    """Scratch memory of the expert layers, shared by all buckets."""

    inner: torch.Tensor  # storage dtype [T * top_k * width] results of gate and up
    results: torch.Tensor  # storage dtype [T * top_k * hidden]
    quantised: Fp8Rows | None = None  # inputs of FP8 matrices: T * hidden, later T * top_k * width

    @classmethod
    def allocate(cls, shape: ExpertShape, tokens: int, dtype: torch.dtype, device: str) -> Self:
        """Allocate for up to `tokens` tokens."""
        sizes = (tokens * shape.top_k * shape.width, tokens * shape.top_k * shape.hidden)
        inner, results = (torch.zeros(size, dtype=dtype, device=device) for size in sizes)
        widest = max(shape.hidden, shape.width)
        quantised = Fp8Rows.allocate(tokens * shape.top_k, widest, device) if shape.fp8 else None
        return cls(inner, results, quantised)


class Clamp(NamedTuple):
    """An activation: gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up in [-limit,
    limit]. A limit of 0 means silu(gate) * up; a limit of -1 means gelu(gate) * up, with gelu approximated by tanh. Experts
    without a gate have squared ReLU, whatever this says.
    """

    alpha: float
    limit: float


SILU, GELU = Clamp(0.0, 0.0), Clamp(0.0, -1.0)


@dataclass(frozen=True)
class ExpertCall:
    """out += weighted sum over each token's experts of down(silu(gate(x)) * up(x)), for the first
    counts[TOKENS] tokens. Experts whose first matrix has only `width` rows have no gate: down(max(up(x), 0)^2).

    The experts of a token have the top_k largest logits, the lower id first among equals. Their weights are a
    softmax, unless the selection differs. If the selection scales inputs, an expert's weight multiplies its
    input x instead of its result.

    MXFP4 matrices are uint8 and half as long in their last dimension: a byte has two weights, the first in
    its lower half. A scale belongs to 32 weights, and is a power of two with an offset of 127.
    """

    x: torch.Tensor  # [T, hidden]
    logits: torch.Tensor  # float32 [T, E] of the router
    gate_up: torch.Tensor  # [E, 2 * width, hidden], gate rows then up rows; or [E, width, hidden], up alone
    down: torch.Tensor  # [E, hidden, width]
    counts: torch.Tensor  # int64 [8] batch header
    out: torch.Tensor  # [T, hidden], the residual stream
    workspace: ExpertWorkspace
    top_k: int
    selection: Selection
    pdl: bool = False
    clamp: Clamp = SILU  # activation between the products
    biases: tuple[torch.Tensor, torch.Tensor] | None = None  # [E, 2 * width] and [E, hidden]
    fp8: tuple[Fp8Matrix, Fp8Matrix] | None = None  # gate_up and down are their values
    scales: tuple[torch.Tensor, torch.Tensor] | None = None  # uint8 [E, 2 * width, hidden / 32] and [E, hidden, width / 32]
    add: bool = True  # else the sum replaces `out`
    packed: tuple[PackedMatrix, PackedMatrix] | None = None  # 4-bit matrices; gate_up and down are their words

    @property
    def shape(self) -> ExpertShape:
        """The shape of the layer."""
        experts, hidden, width = self.down.shape
        if self.packed is not None:
            width, ordered = self.packed[1].width, all(matrix.columns is not None for matrix in self.packed)
            gated, kind = self.gate_up.shape[1] != width, kind_of(*self.packed)
            return ExpertShape(experts, self.top_k, hidden, width, packed=kind, ordered=ordered, gated=gated)
        mxfp4 = self.scales is not None
        fp8 = "" if self.fp8 is None else "blocks" if self.fp8[1].blocks else "rows"
        width *= 2 if mxfp4 else 1
        return ExpertShape(experts, self.top_k, hidden, width, mxfp4, fp8, gated=self.gate_up.shape[1] != width)


class ExpertCase(NamedTuple):
    """A test of a variant. It is compiled ahead of time, and runs on a GPU and, unless it is large, in the interpreter."""

    tokens: int
    bucket: int
    shape: ExpertShape
    config: ExpertConfig | None = None  # None: the default
    normalize: bool = True
    one_expert: bool = False  # every token chooses expert 0 first, so that its blocks are full
    ties: bool = False  # logits of few values, zeros of both signs, and NaN
    groups: int = 0  # the choice is from half of them, rounded up; 0: all groups
    softmax: bool = False  # with groups: weights are a softmax, and not sigmoids that are chosen with a bias
    biased_softmax: bool = False  # weights are a softmax, and are chosen with a bias
    factor: float = 1.0
    clamp: Clamp = SILU
    biases: bool = False
    scales_inputs: bool = False  # by sigmoids of the chosen logits
    parallel: bool = False  # to an MLP: each expert has a factor, and the sum replaces `out`

    def selection(self, bias: torch.Tensor) -> Selection:
        """The selection. bias: float32 [experts], which the case may ignore or use as the experts' factors."""
        groups, biased = max(1, self.groups), self.groups and not self.softmax
        if self.scales_inputs:
            return Selection(self.normalize, self.factor, sigmoid=True, scales_inputs=True)
        if self.biased_softmax:
            return Selection(self.normalize, self.factor, bias=bias, softmax=True)
        factors = bias if self.parallel else None
        return Selection(self.normalize, self.factor, groups, (groups + 1) // 2, bias if biased else None, factors=factors)

    @property
    def large(self) -> bool:
        """Whether it has real sizes, which are too slow for the interpreter."""
        return self.shape.hidden > 200


@dataclass(frozen=True)
class ExpertVariant:
    """One way to compute an expert layer. A new variant is a file, and an entry in VARIANTS of experts.py.

    A token's result depends on the token and the prepared configuration, never on other tokens.
    """

    name: str
    supports: Callable[[ExpertShape, int], bool]
    """Whether it is for buckets of this many tokens. The first variant that supports a bucket computes it."""
    prepare: Callable[[ExpertShape, int, torch.dtype, str, ExpertTable], Any]
    """Prepares a bucket of `tokens` tokens on a device: configuration and scratch memory."""
    launch: Callable[[ExpertCall, Any], None]
    """Launches the kernels, given the checked call and the prepared data."""
    cases: tuple[ExpertCase, ...]  # tests of the variant
    kernels: tuple[Any, ...] = ()  # the Triton kernels that `launch` starts
