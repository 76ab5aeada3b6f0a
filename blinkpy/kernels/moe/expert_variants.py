"""The interface of expert-layer variants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from blinkpy.kernels.fp8_rows import Fp8Matrix, Fp8Rows
from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertShape, ExpertTable
from blinkpy.kernels.moe.routing import Selection


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
    limit]. A limit of 0 means silu(gate) * up.
    """

    alpha: float
    limit: float


SILU = Clamp(0.0, 0.0)


@dataclass(frozen=True)
class ExpertCall:
    """out += weighted sum over each token's experts of down(silu(gate(x)) * up(x)), for the first
    counts[TOKENS] tokens.

    The experts of a token have the top_k largest logits, the lower id first among equals. Their weights are a
    softmax, unless the selection differs. If the selection scales inputs, an expert's weight multiplies its
    input x instead of its result.

    MXFP4 matrices are uint8 and half as long in their last dimension: a byte has two weights, the first in
    its lower half. A scale belongs to 32 weights, and is a power of two with an offset of 127.
    """

    x: torch.Tensor  # [T, hidden]
    logits: torch.Tensor  # float32 [T, E] of the router
    gate_up: torch.Tensor  # [E, 2 * width, hidden], gate rows then up rows
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

    @property
    def shape(self) -> ExpertShape:
        """The shape of the layer."""
        experts, hidden, width = self.down.shape
        mxfp4 = self.scales is not None
        fp8 = "" if self.fp8 is None else "blocks" if self.fp8[1].blocks else "rows"
        return ExpertShape(experts, self.top_k, hidden, width * 2 if mxfp4 else width, mxfp4, fp8)


class ExpertCase(NamedTuple):
    """A test of a variant. It is compiled ahead of time, and runs on a GPU and, unless it is large, in the interpreter."""

    tokens: int
    bucket: int
    shape: ExpertShape
    config: ExpertConfig | None = None  # None: the default
    normalize: bool = True
    one_expert: bool = False  # every token chooses expert 0 first, so that its blocks are full
    ties: bool = False  # logits of few values, zeros of both signs, and NaN
    groups: int = 0  # weights are sigmoids, chosen with a bias from half of the groups, rounded up; 0: softmax
    factor: float = 1.0
    clamp: Clamp = SILU
    biases: bool = False
    scales_inputs: bool = False  # by sigmoids of the chosen logits

    def selection(self, bias: torch.Tensor) -> Selection:
        """The selection. bias: float32 [experts], which the case may ignore."""
        groups = max(1, self.groups)
        if self.scales_inputs:
            return Selection(self.normalize, self.factor, sigmoid=True, scales_inputs=True)
        return Selection(self.normalize, self.factor, groups, (groups + 1) // 2, bias if self.groups else None)

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
