"""The blocks of a decoder: named types, with their sizes in elements. Families choose blocks, and decoders compute them.

A new type needs a member or a class here, and an implementation in the table of both decoders (`BLOCKS` in
torch_decoder.py and gpu_decoder.py). A decoder whose table lacks a type refuses models that need it.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from blinkpy.models.description.rope_tables import Rope

BLOCK = 128
"""Rows and columns of a block that shares a scale: blinkpy.kernels.fp8_rows.BLOCK."""


class Scales(Enum):
    """Which numbers of a stored weight share a scale."""

    MATRIX = "matrix"
    ROW = "row"
    BLOCK = "block of 128 x 128"


@dataclass(frozen=True)
class Quantization:
    """FP8 (E4M3) weights in the linear layers of all layers, including experts. blinkpy.kernels.fp8_rows
    defines the arithmetic.

    inputs: whether inputs are also rounded to 8 bits; otherwise weights are dequantised at the start.
    static: whether the checkpoint has an input scale for each matrix; otherwise each input gets a scale (with block scales of
    weights, one per 128 columns).
    stored: whether the checkpoint has FP8 weights; otherwise loading quantises them.
    scale, input_scale: possible suffixes of the names of stored scales.
    """

    scales: Scales = Scales.ROW
    static: bool = False
    stored: bool = True
    scale: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    input_scale: tuple[str, ...] = ("input_scale", "activation_scale")
    ignored: tuple[str, ...] = ()
    ignored_ends: tuple[str, ...] = ()
    inputs: bool = True

    @property
    def text(self) -> str:
        """A description for people."""
        if not self.inputs:
            return f"FP8 (E4M3), a scale for each {self.scales.value}, inputs not quantised: dequantised at the start"
        inputs = "one for each matrix" if self.static else "one for 128 columns" if self.scales == Scales.BLOCK else "one a token"
        made = "" if self.stored else ", quantised as it is loaded"
        return f"FP8 (E4M3), a scale for each {self.scales.value}, inputs have {inputs}{made}"

    def keeps(self, name: str) -> bool:
        """Whether a matrix is not quantised. name: without ".weight"."""
        return name.endswith(self.ignored_ends) or (bool(self.ignored) and _compiled(self.ignored).match(name) is not None)


QUANTISED_ON_LOADING = Quantization(stored=False)
"""The quantization of `--quantization fp8`."""


def joined(patterns: tuple[str, ...]) -> str:
    """One regular expression that matches every text that any of these expressions matches."""
    return "|".join(f"(?:{pattern})" for pattern in patterns)


@lru_cache(maxsize=16)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(joined(patterns))


class NormPlacement(Enum):
    """The positions of a layer's norms."""

    PRE = "norms before attention and MLP"
    POST = "norms after attention and MLP"
    SANDWICH = "norms before and after attention and MLP"
    PARALLEL = "one norm, whose result both attention and an MLP parallel to it read"


class QkNorm(Enum):
    """The dimensions over which queries and keys are normalised."""

    HEAD = "each head by itself"
    WIDTH = "all heads of a token together"
    ROTATED_HEAD = "each head by itself, in layers that rotate them, without stored weights"


class OutputGate(Enum):
    """The gate of attention's output."""

    SIGMOID = "a sigmoid that gates attention's output"


class LayerPart(Enum):
    """Parts of a layer that few models have."""

    VALUE_NORM = "norms of each head's values, without stored weights"
    HEAD_SIZES = "layers with different head sizes, or numbers of key and value heads"
    PARALLEL_EXPERTS = "an MLP parallel to the experts, each with separate norms"
    LAYER_SCALE = "a stored factor of each layer's output"
    SHARED_KEYS = "layers that read the keys and values of another layer"
    LAYER_INPUTS = "embeddings of tokens for each layer"
    PARALLEL_SPACE = "a state space parallel to attention"
    CENTRED_NORM = "LayerNorm without biases"
    DRAFT_LAYER = "a layer that drafts tokens"
    DRAFT_HEAD = "a head that drafts tokens"


class Activation(Enum):
    """The activation of a gated MLP's gate, whose result multiplies up; without a gate, of up."""

    SILU = "silu"
    GELU_TANH = "gelu, approximated with tanh"
    CLAMPED_SWISH = "gate * sigmoid(alpha * gate), with gate and up clamped; it is multiplied with up + 1"
    SQUARED_RELU = "squared ReLU of up, without a gate"

    @property
    def halves(self) -> int:
        """Matrices before the activation: 2 are gate and up, 1 is up alone."""
        return 1 if self == Activation.SQUARED_RELU else 2


class RouterKind(Enum):
    """How a router computes the shares of a token's experts from its scores."""

    SOFTMAX_TOP_K = "softmax over all experts, of which the top k are taken"
    TOP_K_SOFTMAX = "softmax over the top k scores"
    SIGMOID_TOP_K = "sigmoid of each score; the top k of its sum with the expert's bias are taken"
    TOP_K_SIGMOID = "sigmoid of the top k scores"
    BIASED_SOFTMAX_TOP_K = "softmax over all experts; the top k of its sum with the expert's bias are taken"


class Norm(NamedTuple):
    """The norm of a model: an RMSNorm, or a LayerNorm without biases.

    eps: added to the mean square, or to the variance.
    offset: added to the stored weights of all norms of the model.
    centred: LayerNorm: the mean is subtracted first (Ba et al., arXiv 1607.06450).
    """

    eps: float
    offset: float = 0.0
    centred: bool = False


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A head's keys and values are products with a
    token's latent vector, which all heads share. Only that vector is cached, followed by the rotated part of
    keys, which all heads share as well.

    The products are applied to queries and results instead (absorbed), so attention has one key head of
    rank + rotated elements, of which the first `rank` are its values.

    rank: elements of the latent vector, which is normalised.
    plain, rotated: elements of a head's query and key without and with rotation.
    value: elements of a head's value.
    q_rank: elements of the normalised vector from which queries are made; 0: they are made from the layer's
        input.
    neighbours: dimension 2 i of the rotated ones pairs with 2 i + 1, otherwise i with i + rotated // 2.
    eps: epsilon of both norms.
    """

    rank: int
    plain: int
    rotated: int
    value: int
    q_rank: int = 0
    neighbours: bool = True
    eps: float = 1e-6


class Attention(NamedTuple):
    """Attention with `heads` queries that share `kv_heads` keys and values.

    window: number of the last tokens that a token sees, including itself (0: all).
    qk_norm: norms of queries and keys.
    scale: factor of the scores; 0 means head_dim ** -0.5.
    softcap: c replaces a score by c * tanh(score / c); 0: unused.
    sinks: whether each head has an additional score in the softmax, without a value.
    chunked: a token instead sees the tokens of its chunk of `window` tokens, up to itself.
    latent: kv_heads is 1, and head_dim the size of a cached vector.
    gate: whether the output has a gate, computed by additional rows of the queries' projection.
    value_norm: an RMSNorm without weights of each head's values.
    keys_are_values: values are the keys' projection before norm and rotation.
    keys_of: number of an earlier layer, whose keys and values the queries read; None: the layer has its own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    chunked: bool = False
    latent: Latent | None = None
    gate: OutputGate | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    keys_of: int | None = None

    @property
    def q_size(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def projected_size(self) -> int:
        """Width of the fused projection before attention, without a gate."""
        if self.latent is None:
            return self.q_size + (2 * self.kv_size if self.keys_of is None else 0)
        return (self.latent.q_rank or self.heads * (self.latent.plain + self.latent.rotated)) + self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of the input of attention's last projection."""
        return self.heads * self.latent.value if self.latent else self.q_size

    @property
    def cached_size(self) -> int:
        """Elements that a layer caches of one token."""
        if self.keys_of is not None:
            return 0
        return self.head_dim if self.latent else 2 * self.kv_size

    @property
    def score_scale(self) -> float:
        """The factor of scores before the softmax."""
        return self.scale or float(self.head_dim**-0.5)


class Factors(NamedTuple):
    """Constants of a family.

    embedding: factor of token embeddings.
    residual: factor of the results of attention and MLP.
    logits: factor of the logits.
    rounded: the embedding's factor is rounded to the weights' dtype.
    softcap: soft cap of the logits, as in Attention.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    rounded: bool = False
    softcap: float = 0.0


NO_FACTORS = Factors()


class Mlp(NamedTuple):
    """An MLP: down(activation(gate(x)) * up(x)), or down(activation(up(x))). size: width of gate and up."""

    size: int
    activation: Activation = Activation.SILU
    bias: bool = False


class Clamp(NamedTuple):
    """Constants of CLAMPED_SWISH.

    alpha: factor in its sigmoid.
    limit: upper limit of gate; limit of the magnitude of up.
    """

    alpha: float
    limit: float


class Experts(NamedTuple):
    """`number` MLPs of width `size`; a token visits `top_k` of them.

    normalize: scale a token's shares to a sum of 1 (which they have with TOP_K_SOFTMAX).
    factor: multiplies the shares afterwards.
    groups, kept_groups: consecutive equal groups of experts; a token visits only experts of the best groups. A group's score is
    the sum of its best two scores with SIGMOID_TOP_K, and its best score with SOFTMAX_TOP_K.
    shared: width of an additional MLP that all tokens visit (0: none).
    shared_gated: its result is multiplied by a sigmoid of the token's product with a vector.
    bias: whether router and experts have biases.
    clamp: bound of CLAMPED_SWISH.
    mxfp4: the experts' matrices stay in memory as MXFP4 (OCP Microscaling Formats, version 1.0): 4 bits per
        weight, and an 8-bit scale per 32 weights.
    scales_inputs: the shares multiply the experts' inputs instead of their results.
    parallel: the additional MLP, the experts and the router each have a separate norm of the residual stream. Each
        result is normalised, then their sum. An expert's shares are multiplied by its stored factor.
    """

    number: int
    top_k: int
    size: int
    router: RouterKind = RouterKind.SOFTMAX_TOP_K
    activation: Activation = Activation.SILU
    normalize: bool = False
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    shared: int = 0
    shared_gated: bool = False
    bias: bool = False
    clamp: Clamp | None = None
    mxfp4: bool = False
    scales_inputs: bool = False
    parallel: bool = False


class GatedDelta(NamedTuple):
    """A gated delta net (Yang et al., "Gated Delta Networks", ICLR 2025): a recurrent layer instead of attention.

    Each request has a state: for each value head a matrix, float32 [key_dim, value_dim], and the last `taps` - 1 inputs of
    each channel of the causal convolution. A token has a decay a, a strength b, a normalised key k and query q, and a value v.
    The matrix S becomes a S + k (b (v - (a S)^T k))^T, and the token's result is S^T q.

    key_heads: number of query heads, and of key heads. Consecutive value heads share a key head.
    value_heads: a multiple of key_heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def key_size(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def in_size(self) -> int:
        """Width of the first projection: the channels, then the gate of the results."""
        return self.channels + self.value_size

    @property
    def out_size(self) -> int:
        """Width of the last projection's input."""
        return self.value_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices of a state: value heads, elements of a key, and of a value."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def drafted_size(self) -> int:
        """Numbers of a drafted token that its state keeps for each value head: its key, its value, strength and decay."""
        return self.key_dim + self.value_dim + 2


class ShortConvolution(NamedTuple):
    """A gated short convolution (LFM2 technical report, arXiv 2511.23404, section 2): a recurrent layer instead of attention.

    The layer's first projection gives B, C and x, each [channels]. The result is C * (causal convolution of B * x over `taps`
    tokens, separate for each channel), all by element. A request's state is the last `taps` - 1 products B * x; it has no matrix.

    bias: whether both projections and the convolution have biases.
    """

    channels: int
    taps: int = 3
    bias: bool = False

    @property
    def in_size(self) -> int:
        """Width of the first projection."""
        return 3 * self.channels

    @property
    def out_size(self) -> int:
        """Width of the last projection's input."""
        return self.channels

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices of a state: none."""
        return 0, 0, 0

    @property
    def drafted_size(self) -> int:
        """Numbers that a state keeps of a drafted token, in addition to its input of the convolution."""
        return 0


class StateSpace(NamedTuple):
    """A state-space layer (Mamba-2: Dao and Gu, arXiv 2405.21060): a recurrent layer instead of attention.

    Each request has a state: for each head a matrix, float32 [key_dim, value_dim], and the last `taps` - 1 inputs of each
    channel of the causal convolution. A token has for each head a time step d and a value v, and for each group of heads a key k
    and a query q (B and C). With the head's rate a, the matrix S becomes exp(-a d) S + d k v^T, and the token's result is S^T q,
    plus v times the head's skip. The results are gated by silu, then normalised over each group if `normed`.

    groups: of consecutive heads; a divisor of `heads`.
    bias, conv_bias, out_bias: whether the first projection, the convolution and the last projection have biases.
    """

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    normed: bool = True

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys, queries."""
        return self.value_size + 2 * self.groups * self.key_dim

    @property
    def in_size(self) -> int:
        """Width of the first projection: the channels, then the gate of the results, then time steps."""
        return self.channels + self.value_size + self.heads

    @property
    def out_size(self) -> int:
        """Width of the last projection's input."""
        return self.value_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices of a state: heads, elements of a key, and of a value."""
        return self.heads, self.key_dim, self.value_dim

    @property
    def drafted_size(self) -> int:
        """Numbers of a drafted token that its state keeps for each head: its key, its value, and its time step."""
        return self.key_dim + self.value_dim + 1


Recurrence = GatedDelta | ShortConvolution | StateSpace


def state_bytes(recurrence: Recurrence, itemsize: int, drafts: int = 0) -> int:
    """Bytes of the state of one request in one layer.

    itemsize: bytes of an input of the convolution.
    drafts: maximum drafts of a request in one step; see blinkpy.models.recurrent_states.
    """
    heads, key_dim, value_dim = recurrence.matrices
    drafted = drafts * (recurrence.channels + heads * recurrence.drafted_size)
    return 4 * heads * key_dim * value_dim + ((recurrence.taps - 1) * recurrence.channels + drafted) * itemsize


class Layer(NamedTuple):
    """One layer: attention, then an MLP or experts.

    mlp: None if the layer ends after its attention.
    recurrence: replaces attention, unless `parallel`.
    scaled: the layer's output is multiplied by a stored number.
    parallel: attention and a state space read the same norm, and their results are added.
    """

    attention: Attention
    mlp: Mlp | Experts | None
    recurrence: Recurrence | None = None
    scaled: bool = False
    parallel: bool = False

    @property
    def attends(self) -> bool:
        """Whether the layer has attention, and so keys and values."""
        return self.recurrence is None or self.parallel


BlockType = Enum | type[Mlp] | type[Experts] | type[Latent] | type[GatedDelta] | type[ShortConvolution] | type[StateSpace]
