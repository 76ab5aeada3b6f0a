"""Llama 4 (Scout, Maverick), text only: the weights for images are ignored.

In most layers, heads are rotated, and a token only sees its own attention chunk. In the others it sees all
tokens, and queries grow with their position. An expert gets its token multiplied by the router's share, and
each token also visits a shared MLP.
"""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import activation, grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import Attention, Experts, Mlp, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import family
from blinkpy.models.families.llama import rotated_layers
from blinkpy.models.families.mistral import NESTED

CHUNKED, FULL = "chunked_attention", "full_attention"
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
SIZES = {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48}
HEADS = {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": True}
LAYERS = {"no_rope_layer_interval": 4, "attention_chunk_size": 8192}
GROWTH = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
CONTEXT = {"max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "vocab_size": 202048}
TEXT: dict[str, Any] = {**EXPERTS, **SIZES, **HEADS, **LAYERS, **GROWTH, **CONTEXT}
IGNORES = ("for_llm_compressor", "cache_implementation", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
IMAGES = ("vision_config", "image_token_index", "boi_token_index", "eoi_token_index")
NAMES: dict[str, Any] = {
    "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "shared_gate_up": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "shared_down": "feed_forward.shared_expert.down_proj",
}
OF_ALL_EXPERTS: dict[str, Any] = {
    "expert_gate_up": ("feed_forward.experts.gate_up_proj",),
    "expert_down": "feed_forward.experts.down_proj",
    "gate_first": True,
}
OF_EACH_EXPERT: dict[str, Any] = {  # compressed-tensors' names of FP8 experts
    "expert_gate_up": ("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
    "expert_down": "feed_forward.experts.{expert}.down_proj",
}


@family(
    "Llama4ForCausalLM",
    models="Llama 4 Scout and Maverick: text only",
    model_type="llama4_text",
    defaults=TEXT,
    ignores=IGNORES,
)
def llama4(c: HfConfig) -> DecoderDescription:
    return replace(_decoder(c), tensors=_names(c, TensorNames()))


@family(
    "Llama4ForConditionalGeneration",
    models="Llama 4 Scout and Maverick: text only",
    model_type="llama4",
    ignores=(*IGNORES, *IMAGES),
)
def llama4_nested(c: HfConfig) -> DecoderDescription:
    text = c.section("text_config", ("dtype", "torch_dtype", "tie_word_embeddings"), TEXT)
    spare = (*NESTED.spare, "vision_model.", "model.vision_model.")
    return replace(_decoder(text), tensors=_names(c.having("quantization_config"), NESTED._replace(spare=spare)))


def _decoder(c: HfConfig) -> DecoderDescription:
    """Build the description, without the names of its weights."""
    layers = c.integer("num_hidden_layers")
    rotated, attention = rotated_layers(c, layers), _attention(c)
    ropes = [attention.rope if here else _unrotated(c, attention.rope) for here in rotated]
    return pre_norm_decoder(c, attention, _mlps(c, layers), _chunks(c, rotated), ropes=ropes)


def _names(c: HfConfig, names: TensorNames) -> TensorNames:
    """The names of a checkpoint's weights. c: the section with quantization_config."""
    stored = OF_ALL_EXPERTS if c.get("quantization_config") is None else OF_EACH_EXPERT
    return names._replace(**NAMES, **stored)


def _attention(c: HfConfig) -> Attention:
    bias = c.flag("attention_bias")
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias)
    if attention.rope.attention_factor != 1:
        raise ConfigError(f"{c.where}: rope type {attention.rope.kind} is not supported for {c.name}")
    return attention._replace(
        rope=replace(attention.rope, neighbours=True),
        qk_norm=QkNorm.ROTATED_HEAD if c.flag("use_qk_norm") else None,
        chunked=c.get("attention_chunk_size") is not None,
    )


def _unrotated(c: HfConfig, rope: Rope) -> Rope:
    """The rotary embedding of layers without rotation. In early configs, attn_temperature_tuning is a number
    that counts as a boolean.
    """
    grows = c.get("attn_temperature_tuning")
    if not isinstance(grows, (bool, int)):
        raise ConfigError(f"{c.where}: attn_temperature_tuning must be true or false, not {grows!r:.80}")
    growth, period = c.number("attn_scale"), c.integer("floor_scale")
    return replace(rope.unrotated(), query_growth=growth, query_period=period) if grows else rope.unrotated()


def _chunks(c: HfConfig, rotated: list[bool]) -> tuple[int, ...]:
    """The attention chunk of each layer in tokens, or 0. Without `layer_types`, rotated layers have
    chunks.
    """
    if c.get("attention_chunk_size") is None:
        return (0,) * len(rotated)
    types, size = c.get("layer_types"), c.integer("attention_chunk_size")
    if types is None:
        return tuple(size if here else 0 for here in rotated)
    if not isinstance(types, list) or len(types) != len(rotated) or not all(kind in (CHUNKED, FULL) for kind in types):
        raise ConfigError(
            f"{c.where}: layer_types must be a list of {len(rotated)} entries, each {CHUNKED} or {FULL}, not {types!r:.200}"
        )
    return tuple(size if kind == CHUNKED else 0 for kind in types)


def _mlps(c: HfConfig, layers: int) -> list[Mlp | Experts]:
    """Experts in `moe_layers`, or in each layer whose number, from 1, is a multiple of
    interleave_moe_layer_step.
    """
    step, listed = c.integer("interleave_moe_layer_step"), c.get("moe_layers")
    chosen = range(step - 1, layers, step) if listed is None else listed
    if not isinstance(chosen, (list, range)) or not all(type(i) is int and 0 <= i < layers for i in chosen):
        raise ConfigError(f"{c.where}: moe_layers must be a list of layers below {layers}, not {listed!r:.200}")
    size = c.integer("intermediate_size")
    experts = routed_experts(c, "intermediate_size", RouterKind.TOP_K_SIGMOID, normalize=False, shared=size, scales_inputs=True)
    if experts.number == 0:
        raise ConfigError(f"{c.where}: num_local_experts must be above 0")
    dense = Mlp(c.integer("intermediate_size_mlp"), activation(c))
    return [experts if layer in chosen else dense for layer in range(layers)]
