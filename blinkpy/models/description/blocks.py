"""The blocks of a decoder: named types, with their sizes in elements. Families choose blocks, and decoders compute them.

recurrent_blocks.py has the blocks with a state instead of keys and values. A new type needs a member or a class in one of the
two files, and an implementation in the table of both decoders (`BLOCKS` in torch_decoder.py and gpu_decoder.py). A decoder whose
table lacks a type refuses models that need it.
"""

from enum import Enum
from typing import NamedTuple

from blinkpy.models.description.recurrent_blocks import GatedDelta, Recurrence, ShortConvolution, StateSpace
from blinkpy.models.description.rope_tables import Rope


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
