"""The interface of linear-layer variants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.activation import GEGLU
from blinkpy.kernels.config_files import Needs, check_power_of_two
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, ROW_SCALES
from blinkpy.kernels.quantised_matrices import BLOCK, FP8, PackedMatrix

# The parameters of a linear layer's kernel. They determine the order of the sums, which is therefore fixed per
# bucket, and so is every result.

WORDS = torch.int32
"""Dtype of 4-bit weights in a PackedMatrix."""
MOST = {"block_m": 256, "block_n": 512, "block_k": 8192, "split_k": 64, "warps": 32, "stages": 16, "tiles": 1 << 20}
"""The largest value of each number of a configuration."""


@dataclass(frozen=True)
class LinearConfig:
    """The configuration of one linear layer. Fields that a variant does not use keep their defaults.

    Raises ConfigError for values that no variant supports. `blinkpy.kernels.linear.linear.check_config`
    checks them for a variant and a shape.
    """

    variant: str = "triton"  # name of a `LinearVariant`
    block_m: int = 16
    block_n: int = 32
    block_k: int = 256
    split_k: int = 1
    warps: int = 4
    stages: int = 4
    weights_first: bool = False  # weights as the first operand of the matrix unit
    elementwise: bool = False  # gemv: multiply-adds of single elements, and one reduction at the end
    tiles: int = 1  # fp8_gemv: tiles that a program computes, one after another
    early_trigger: bool = False
    """Release the dependent launch at the start, not after the products. This helps if one program fills an SM;
    otherwise the programs of the next layer crowd the few SMs that become free first.
    """

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"linear configuration: {name} {value!r} must be an integer from 1 to {most}")
        for name, least in (("block_m", 16), ("block_k", 16), ("warps", 1)):
            check_power_of_two(f"linear configuration: {name}", getattr(self, name), least)


class LinearShape(NamedTuple):
    """Sizes of a linear layer, and its fused operations."""

    rows: int
    n: int  # outputs
    k: int  # inputs
    norm: bool = False
    bias: bool = False
    swiglu: bool = False
    residual: bool = False
    partials: bool = False  # the result is partial sums
    dtype: torch.dtype = torch.bfloat16  # of the weights
    result: torch.dtype | None = None  # None: the dtype of x, or bfloat16 for FP8
    gelu: bool = False
    blocks: bool = False  # with FP8: a scale per block instead of per row
    inputs: torch.dtype | None = None  # of x; None: dtype
    group: int = 0  # of 4-bit weights: inputs that share a scale; 0: all of a row
    fp4: bool = False  # of 4-bit weights: E2M1 numbers, not integers
    ordered: bool = False  # of 4-bit weights: the columns have another order than the inputs

    @property
    def weight_rows(self) -> int:
        """Rows of the weight, which has both gate and up with SwiGLU."""
        return 2 * self.n if self.swiglu else self.n

    @property
    def fp8(self) -> bool:
        """Whether weights are FP8 numbers with scales."""
        return self.dtype == FP8

    @property
    def packed(self) -> bool:
        """Whether weights are words of 4-bit numbers."""
        return self.dtype == WORDS

    @property
    def plain(self) -> bool:
        """Whether weights are numbers without scales."""
        return not (self.fp8 or self.packed)

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of a complete result, unlike partial sums."""
        return self.result or self.inputs or (self.dtype if self.plain else torch.bfloat16)


class LinearCase(NamedTuple):
    """A test of a variant. It is compiled ahead of time, and runs on a GPU and, unless it is large, in the
    interpreter.
    """

    config: LinearConfig
    shape: LinearShape

    @property
    def large(self) -> bool:
        """Whether it has real sizes, which are too slow for the interpreter."""
        return self.shape.n * self.shape.k > 1_000_000


PARTIAL_FLOATS = 4_194_304
"""Of a workspace, for the sums of splits."""


@dataclass(frozen=True)
class LinearWorkspace:
    """Scratch memory of the linear layers, shared by all layers of a step."""

    partial: torch.Tensor  # float32 [elements] partials of split sums
    arrivals: torch.Tensor  # int32 [tiles], zero between launches
    rows: torch.Tensor  # storage dtype [elements] normalised inputs, and results before SwiGLU, if these are not fused

    @classmethod
    def allocate(
        cls, device: str, dtype: torch.dtype, *, partial: int = PARTIAL_FLOATS, tiles: int = 65_536, rows: int = 1
    ) -> Self:
        """partial: number of floats.
        tiles: number of counters.
        rows: elements; at least T * 2 * width if SwiGLU is not fused, plus T * K for a norm that is not fused.
        """
        return cls(
            torch.zeros(partial, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=dtype, device=device),
        )


class Scales(NamedTuple):
    """Scales of FP8 operands, in the form of `Fp8Matrix` and `Fp8Rows`."""

    x: torch.Tensor | None  # float32 [M], or [M, ceil(K / 128)]; None: x is not quantised
    weight: torch.Tensor  # float32 [rows of weight], or [ceil(rows of weight / 128), ceil(K / 128)]

    @property
    def kind(self) -> int:
        """The kernels' SCALES."""
        return ROW_SCALES.value if self.weight.dim() == 1 else BLOCK_SCALES.value


@dataclass(frozen=True)
class LinearCall:
    """One linear layer: out = f(norm(x) weight^T + bias) + residual, for all M rows of the bucket."""

    x: torch.Tensor  # [M, K], rows of any stride, of a storage dtype or FP8
    weight: (
        torch.Tensor
    )  # [N, K], in x's dtype or FP8, or words; with swiglu [2 * N, K], gate then up, and f(gate, up) = silu(gate) * up
    out: torch.Tensor
    """[M, N] in x's dtype or float32, of FP8 weights in a storage dtype; or float32 [split_k, M, N], whose sum over the splits is
    the result."""
    workspace: LinearWorkspace
    counts: torch.Tensor  # int64 [8] batch header
    bias: torch.Tensor | None = None  # [rows of weight]
    norm: tuple[torch.Tensor, float] | None = None  # weight [K] and eps of an RMSNorm of x
    residual: torch.Tensor | None = None  # [M, N] in out's dtype; may be out itself
    swiglu: bool = False
    pdl: bool = False
    gelu: bool = False  # with swiglu: gelu (tanh approximation) instead of silu
    scales: Scales | None = None  # scales of FP8 weights, and of x if x is FP8, which excludes a norm
    packed: PackedMatrix | None = None  # 4-bit weights, whose words are `weight`

    @property
    def gate(self) -> int:
        """The kernels' SWIGLU."""
        return GEGLU.value if self.swiglu and self.gelu else self.swiglu

    @property
    def partials(self) -> bool:
        """Whether the result is partial sums, which `blinkpy.kernels.norm.rms_norm` adds up."""
        return self.out.dim() == 3

    @property
    def shape(self) -> LinearShape:
        """The sizes of this call."""
        around = (self.norm is not None, self.bias is not None, self.swiglu, self.residual is not None, self.partials)
        sizes, blocks = (len(self.x), self.out.shape[-1], self.x.shape[1]), self.scales_kind == BLOCK_SCALES.value
        inputs = None if self.x.dtype == self.weight.dtype else self.x.dtype
        shape = LinearShape(*sizes, *around, self.weight.dtype, self.out.dtype, self.gelu, blocks, inputs)
        if self.packed is None:
            return shape
        return shape._replace(group=self.packed.group, fp4=self.packed.fp4, ordered=self.packed.columns is not None)

    @property
    def scales_kind(self) -> int:
        """The kernels' SCALES."""
        return 0 if self.scales is None else self.scales.kind

    @property
    def scale_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernels' scales of x and weight; unused placeholders if there are no scales."""
        x, weight = self.scales or (None, None)
        return self.x if x is None else x, self.x if weight is None else weight


def check_block_n(config: LinearConfig, shape: LinearShape, least: int = 16) -> None:
    """Raise ConfigError unless block_n is a power of two of at least `least`."""
    check_power_of_two("linear configuration: block_n", config.block_n, least)


def check_block_k(config: LinearConfig, shape: LinearShape) -> None:
    """Raise ConfigError if a step over K would cross a boundary of block scales."""
    if shape.fp8 and shape.blocks and config.block_k > BLOCK:
        raise ConfigError(
            f"linear configuration: block_k {config.block_k} exceeds {BLOCK}, the number of inputs that share a scale"
        )


def check_tile(config: LinearConfig, shape: LinearShape) -> None:
    """Raise ConfigError unless block_n is a power of two of at least 16, and a step over K stays within one scale."""
    check_block_n(config, shape)
    check_block_k(config, shape)


@dataclass(frozen=True)
class LinearVariant:
    """One way to compute a linear layer. A new variant is a file, and an entry in VARIANTS of linear.py."""

    name: str  # `LinearConfig.variant`; "kind" in configs/*.json
    launch: Callable[[LinearCall, LinearConfig], None]
    """Launches the kernels. The call is checked, and uses only operations in `fuses`."""
    fuses: frozenset[str]
    """Fused operations: "norm" of x before the product; "bias", "swiglu", "residual" after it; "partials":
    return partial sums over K; "split sums": add them up. `linear` runs missing norm and SwiGLU separately.
    """
    cases: tuple[LinearCase, ...]  # tests of the variant
    kernels: tuple[Any, ...] = ()  # the Triton kernels that `launch` starts
    supports: Callable[[LinearShape], bool] = lambda shape: shape.plain
    """Whether it computes layers of these rows, sizes and dtype."""
    check: Callable[[LinearConfig, LinearShape], None] = check_tile
    """Raises ConfigError unless a kernel for a shape that it supports can be built from the configuration."""
    needs: Callable[[LinearConfig, LinearShape], Needs] = lambda config, shape: Needs()
    """The resources that a program of that kernel needs on a multiprocessor, by formula."""
    candidates: Callable[[LinearShape, int], Iterator[LinearConfig]] = lambda shape, sm_count: iter(())
    """For the tuner: configurations that may be good for a shape that it supports, on a GPU with this many SMs."""
    quantised_inputs: bool = True
    """Whether it takes x as FP8 numbers where weights are; else x is in a storage dtype."""

    def given(self, shape: LinearShape, inputs: torch.dtype = torch.bfloat16) -> LinearShape:
        """The shape with x in the form that this variant takes. inputs: storage dtype of x."""
        return shape._replace(inputs=None if self.quantised_inputs or shape.plain else inputs)
