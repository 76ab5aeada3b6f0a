"""A decoder as data: its blocks, and the names of its weights. It needs no torch."""

from collections.abc import Container
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple, Self

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import (
    NO_FACTORS,
    Attention,
    BlockType,
    Experts,
    Factors,
    Latent,
    Layer,
    LayerPart,
    Mlp,
    Norm,
    NormPlacement,
)
from blinkpy.models.description.multipliers import NO_MULTIPLIERS, Multipliers
from blinkpy.models.description.packing import Packing
from blinkpy.models.description.quantization import Quantization
from blinkpy.models.description.recurrent_blocks import Recurrence, state_bytes
from blinkpy.models.description.rope_tables import Rope


class TensorNames(NamedTuple):
    """A checkpoint's names, without ".weight" and ".bias". Names of layers follow `layer`, in which {layer} is
    its number.

    Tensors of several names are stacked along their first dimension.

    {expert}: number of the expert. Expert names without it refer to one tensor with all experts, as in gpt-oss; its rows of gate
    and up alternate.
    gate_first: all rows of gate come before all rows of up.
    either_order: the shape of a stored expert's matrix decides between [in, out] and [out, in].
    out_first: of these fields (gate_up, down), whether outputs come first, as checkpoint.as_stored finds them.
    one_for_experts: (gate_up, down) of a checkpoint that has one tensor for all experts instead, each matrix as [out, in], all
        rows of gate first; empty: there is no such form.
    counts_mlps: an MLP has a separate number in {layer}, after that of its attention. An MLP's names then follow the prefix of
        that number.
    recurrent_in, delta_ba: a single name stands for a tensor whose rows are grouped by key heads.
    renamed: (alternative prefix, our prefix) of names.
    spare: prefixes of parts that are ignored.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"  # before the MLP
    attention_out_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    o: str = "self_attn.o_proj"
    q_a: str = "self_attn.q_a_proj"  # this name and the next five are of latent attention
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    expert_down: str = "mlp.experts.{expert}.down_proj"
    gate_first: bool = False
    either_order: bool = False
    out_first: tuple[str, ...] = ()
    counts_mlps: bool = False
    selection_bias: str = "mlp.gate.e_score_correction_bias"  # complete name, without a suffix
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    shared_out_norm: str = "post_feedforward_layernorm_1"  # this name and the next four are of an MLP parallel to experts
    experts_in_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    router_norm: str = "router.scale"  # complete name, without a suffix
    expert_factors: str = "router.per_expert_scale"  # likewise
    layer_scale: str = "layer_scalar"  # likewise
    layer_embedding: str = "model.embed_tokens_per_layer"  # this name and the next five are of DecoderDescription.layer_inputs
    layer_projection: str = "model.per_layer_model_projection"
    layer_projection_norm: str = "model.per_layer_projection_norm"
    layer_input_gate: str = "per_layer_input_gate"
    layer_input_projection: str = "per_layer_projection"
    layer_input_norm: str = "post_per_layer_input_norm"
    one_for_experts: tuple[str, str] | tuple[()] = ()
    recurrent_in: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    delta_ba: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    recurrent_conv: str = "linear_attn.conv1d"  # the bias has the same name
    recurrent_decay: str = "linear_attn.A_log"  # complete name, without a suffix
    recurrent_bias: str = "linear_attn.dt_bias"  # likewise
    recurrent_norm: str = "linear_attn.norm"
    recurrent_skip: str = "mamba.D"  # complete name, without a suffix
    recurrent_out: str = "linear_attn.out_proj"
    draft_layer: str = ""  # prefix of a draft layer's tensors; empty: the prefix of other layers
    draft_outer: str = ""  # prefix of the five names below; empty: the layer's
    draft_embedding_norm: str = "enorm"
    draft_hidden_norm: str = "hnorm"
    draft_projection: str = "eh_proj"
    draft_norm: str = "shared_head.norm"
    draft_copies: tuple[str, ...] = ("embed_tokens.", "shared_head.head.")  # copies of the model's embedding and head
    renamed: tuple[tuple[str, str], ...] = ()
    spare: tuple[str, ...] = ()

    def spellings(self, name: str) -> list[str]:
        """A name, and its alternatives in a checkpoint."""
        return [name] + [old + name[len(new) :] for old, new in self.renamed if name.startswith(new)]


HF_NAMES = TensorNames()


@dataclass(frozen=True)
class HeadInputs:
    """The inputs of a draft head (EAGLE-3: Li et al., arXiv 2503.01840).

    layers: numbers of the model's layers before which its residual stream is read, ascending; the number of layers stands for
        the result of the last one.
    width: the model's hidden size.
    embedding: whether the head has its own embedding; otherwise it uses the model's.
    """

    layers: tuple[int, ...]
    width: int
    embedding: bool = False


@dataclass(frozen=True)
class DecoderDescription:
    """The description that the CPU's and the GPU's decoders interpret. Layers differ in windows, rotary embedding, presence
    of experts, width of the MLP, head size, and number of key and value heads. Some read the keys of other layers.

    name: the model class.
    max_position: maximum context of its training, tokens.
    layer_inputs: width of a token's vector for each layer, from a second embedding and from the first one; 0: unused.
        A gate is computed from the layer's output and multiplied by this vector; a projection of the product is normalised and
        added.
    dtype: the checkpoint's dtype, apart from FP8 weights (see `quantization`) and 4-bit weights (see `packing`).
    further_layers: the layers after `layers` in the checkpoint. The first one predicts the token after the next one, and so on
        (multi-token prediction: DeepSeek-V3 technical report, section 2.2).
    drafting: the last layer of `layers` is the first layer of `further_layers`. It only drafts tokens (docs/speculation.md).
    head_rows: rows of the output head, if there are fewer than tokens: in the description of one rank
        (blinkpy.models.description.split), and of a draft head; 0: all.
    draft_head: the separate head that drafts tokens; its vocabulary may be a part of the model's.
    inputs: inputs of a draft head; None: this is not a head.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    placement: NormPlacement
    max_position: int
    tied_embeddings: bool
    dtype: str
    tensors: TensorNames = HF_NAMES
    factors: Factors = NO_FACTORS
    multipliers: Multipliers = NO_MULTIPLIERS
    quantization: Quantization | None = None
    packing: Packing | None = None
    head_rows: int = 0
    layer_inputs: int = 0
    further_layers: tuple[Layer, ...] = ()
    drafting: bool = False
    draft_head: "DecoderDescription | None" = None
    inputs: HeadInputs | None = None

    def __post_init__(self) -> None:
        rope = self.layers[0].attention.rope
        if self.placement != NormPlacement.PRE and any(self.expert_layers) and not self.experts.parallel:
            kind = "experts parallel to attention" if self.placement == NormPlacement.PARALLEL else "norms after experts"
            raise ConfigError(f"{self.name}: {kind} are not supported")
        mixers = self.attention.latent, self.recurrence, self.attention.qk_norm
        if self.norm.centred and (any(self.expert_layers) or any(mixers) or self.layer_inputs or self.drafting):
            raise ConfigError(f"{self.name}: LayerNorm is supported only with an MLP and attention without norms of heads")
        if self.attention.softcap and self.attention.sinks:
            raise ConfigError(f"{self.name}: attention sinks together with a softcap are not supported")
        attention = {
            layer.attention._replace(window=0, rope=rope, kv_heads=1, head_dim=1, keys_are_values=False, keys_of=None)
            for layer in self.layers
        }
        mlps = {mlp._replace(size=1) if isinstance(mlp, Mlp) else mlp for mlp in self.mlps}
        recurrences = {layer.recurrence for layer in self.layers if layer.recurrence is not None}
        if len({mlp.activation.halves for mlp in self.mlps}) > 1:
            raise ConfigError(f"{self.name}: layers with and without gates are not supported")
        of_mlps = {m for m in mlps if isinstance(m, Mlp)}, {m for m in mlps if isinstance(m, Experts)}
        for kinds in (attention, *of_mlps, recurrences):
            if len(kinds) > 1:
                raise ConfigError(f"{self.name}: layers may differ only in window, rope and head sizes, not as in {kinds}")

    @property
    def attention(self) -> Attention:
        """The attention of all layers, except window, rotary embedding and head sizes."""
        return self.layers[0].attention

    @property
    def own_layers(self) -> int:
        """The number of layers, excluding the draft layer."""
        return len(self.layers) - self.drafting

    def prefix_of(self, layer: int) -> str:
        """The first part of the names of a layer's tensors; with TensorNames.counts_mlps, of those of its attention."""
        drafts = self.drafting and layer == self.own_layers
        number = layer
        if self.tensors.counts_mlps:
            number += sum(other.mlp is not None for other in self.layers[:layer])
        return (self.tensors.draft_layer if drafts else "") or self.tensors.layer.format(layer=number)

    def mlp_prefix_of(self, layer: int) -> str:
        """The first part of the names of the tensors of a layer's MLP, and of the norm before it."""
        if not self.tensors.counts_mlps:
            return self.prefix_of(layer)
        return self.tensors.layer.format(layer=1 + layer + sum(other.mlp is not None for other in self.layers[:layer]))

    @property
    def draft_prefix(self) -> str:
        """The first part of the names of the tensors around the draft layer."""
        return self.tensors.draft_outer or self.prefix_of(self.own_layers)

    @property
    def drafts_tokens(self) -> bool:
        """Whether a draft layer or a head drafts tokens after each step."""
        return self.drafting or self.draft_head is not None

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers before which the draft head reads the residual stream; empty without a head."""
        return () if self.draft_head is None or self.draft_head.inputs is None else self.draft_head.inputs.layers

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings of the layers, in their order."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers))

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of the recurrent layers; None without such layers."""
        return next((layer.recurrence for layer in self.layers if layer.recurrence is not None), None)

    @property
    def recurrent_layers(self) -> int:
        """The number of layers that have a recurrent state."""
        return sum(layer.recurrence is not None for layer in self.layers)

    def state_bytes(self, itemsize: int, drafts: int = 0) -> int:
        """Bytes of the recurrent state of one request.

        itemsize: bytes of an activation.
        drafts: maximum drafts of a request in one step.
        """
        return self.recurrent_layers * state_bytes(self.recurrence, itemsize, drafts) if self.recurrence is not None else 0

    @property
    def default_context(self) -> int:
        """Default maximum of a sequence, tokens. A longer maximum would change longrope's rotation of short sequences, too."""
        return min([self.max_position, *(rope.original_max_position for rope in self.ropes if rope.kind == "longrope")])

    @property
    def heads(self) -> int:
        return self.attention.heads

    @cached_property
    def kv_heads(self) -> int:
        """Number of key and value heads, in the layer with the most heads."""
        return max(layer.attention.kv_heads for layer in self.layers)

    @cached_property
    def head_dim(self) -> int:
        """Elements of a head, in the layer with the largest heads."""
        return max(layer.attention.head_dim for layer in self.layers)

    @cached_property
    def q_size(self) -> int:
        """Width of the queries, in the widest layer."""
        return max(layer.attention.q_size for layer in self.layers)

    @cached_property
    def kv_size(self) -> int:
        """Width of the keys, in the widest layer."""
        return max(layer.attention.kv_size for layer in self.layers)

    @cached_property
    def projected_size(self) -> int:
        """Width of attention's first projection, in the widest layer."""
        return max(layer.attention.projected_size for layer in self.layers)

    @cached_property
    def attended_size(self) -> int:
        """Width of attention's result, in the widest layer."""
        return max(layer.attention.attended_size for layer in self.layers)

    @cached_property
    def cached_size(self) -> int:
        """Numbers that a layer caches for a token, in the widest layer."""
        return max(layer.attention.cached_size for layer in self.layers)

    def keys_of(self, layer: int) -> int:
        """The layer whose cached keys and values a layer reads: itself, unless it shares those of another layer."""
        other = self.layers[layer].attention.keys_of
        return layer if other is None else other

    @cached_property
    def last_readers(self) -> frozenset[int]:
        """For each layer's cache, the last layer that reads it in a step."""
        return frozenset({self.keys_of(layer): layer for layer in range(len(self.layers))}.values())

    @property
    def kv_elements(self) -> int:
        """Elements of one token in the cache, of all layers together."""
        return self.cached_elements()

    def cached_elements(self, without: Container[int] = ()) -> int:
        """Elements of one token in the cache, of all layers except `without`."""
        kept = (layer for index, layer in enumerate(self.layers) if index not in without and layer.attends)
        return sum(layer.attention.cached_size for layer in kept)

    @property
    def layer_parts(self) -> list[LayerPart]:
        """The parts that few models have, in the order of LayerPart."""
        sizes = {(layer.attention.kv_heads, layer.attention.head_dim) for layer in self.layers}
        found = {
            LayerPart.VALUE_NORM: self.attention.value_norm,
            LayerPart.HEAD_SIZES: len(sizes) > 1,
            LayerPart.PARALLEL_EXPERTS: self.experts.parallel,
            LayerPart.LAYER_SCALE: any(layer.scaled for layer in self.layers),
            LayerPart.SHARED_KEYS: any(layer.attention.keys_of is not None for layer in self.layers),
            LayerPart.LAYER_INPUTS: self.layer_inputs > 0,
            LayerPart.PARALLEL_SPACE: any(layer.parallel for layer in self.layers),
            LayerPart.CENTRED_NORM: self.norm.centred,
            LayerPart.DRAFT_LAYER: self.drafting,
            LayerPart.DRAFT_HEAD: self.draft_head is not None,
        }
        return [part for part, has in found.items() if has]

    @property
    def mlp_size(self) -> int:
        """Width of the widest dense or shared MLP, or 1."""
        return max([1, *(mlp.size if isinstance(mlp, Mlp) else mlp.shared for mlp in self.mlps)])

    @property
    def mlps(self) -> tuple[Mlp | Experts, ...]:
        """The different MLPs and experts of the layers, in their order."""
        return tuple(dict.fromkeys(layer.mlp for layer in self.layers if layer.mlp is not None))

    @property
    def gated(self) -> bool:
        """Whether MLPs and experts have gates."""
        return all(mlp.activation.halves == 2 for mlp in self.mlps)

    @property
    def experts(self) -> Experts:
        """The experts of expert layers; size 0 without them."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), Experts(0, 0, 0))

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return tuple(isinstance(layer.mlp, Experts) for layer in self.layers)

    def with_draft_layer(self) -> Self:
        """The description with its first further layer as the draft layer. Raises ConfigError without exactly one."""
        count = len(self.further_layers)
        if count != 1:
            has = f"has {count} layers" if count else "has no layer"
            raise ConfigError(
                f"speculative mtp needs a checkpoint with exactly one layer for multi-token prediction, but {self.name} {has} "
                "that blinkpy can use (num_nextn_predict_layers of config.json): use speculative ngram or off"
            )
        return replace(self, layers=self.layers + self.further_layers, drafting=True)

    def require_blocks(self, implemented: Container[BlockType], decoder: str) -> None:
        """Raise ConfigError with the names of this model's blocks that a decoder lacks. implemented: the
        decoder's table.
        """
        lacking = self.lacking_blocks(implemented)
        if lacking:
            raise ConfigError(f"{self.name} needs {', '.join(lacking)}, which {decoder} does not support")

    def lacking_blocks(self, implemented: Container[BlockType]) -> list[str]:
        """Names of this model's blocks that a decoder's table lacks, sorted."""
        attention = self.attention.qk_norm, self.attention.gate, type(self.recurrence) if self.recurrence is not None else None
        needed: set[BlockType] = {block for block in (self.placement, *attention) if block is not None}
        needed |= {Latent} if self.attention.latent else set()
        needed |= set(self.layer_parts)
        for mlp in self.mlps:
            needed |= {type(mlp), mlp.activation} | ({mlp.router} if isinstance(mlp, Experts) else set())
        return sorted(str(block) if isinstance(block, Enum) else block.__name__ for block in needed if block not in implemented)
