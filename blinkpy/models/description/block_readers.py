"""Readers of a config.json's blocks, in the spelling of most families."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import (
    NO_FACTORS,
    Activation,
    Attention,
    Experts,
    Factors,
    Layer,
    Mlp,
    Norm,
    NormPlacement,
    QkNorm,
)
from blinkpy.models.description.decoder_description import HF_NAMES, DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.rope_tables import Rope

# Every supported parameter of a rope section. Ignoring another key could change the model.
KNOWN_PARAMETERS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attn_factor"),
}
MOST_FURTHER_LAYERS = 16
MAX_CONTEXT = 1 << 31  # limit of values in a config.json
INERT_PARAMETERS = {"finetuned"}  # these only describe the weights' origin
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
KINDS = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


def rope_section(c: HfConfig, layer_type: str | None, inert: Set[str]) -> HfConfig:
    """The part of a config.json that describes the rotary embedding, for layers of one type, or an empty
    section.
    inert: keys without effect.
    """
    parameters, scaling = c.given("rope_parameters"), c.get("rope_scaling")
    where, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object, not {values!r}")
    if layer_type and any(isinstance(value, Mapping) for value in values.values()):
        # Parameters next to the sections have no effect: transformers 5 saves old parameters there.
        if set(values) - set(LAYER_TYPES) - KNOWN_PARAMETERS - INERT_PARAMETERS:
            raise ConfigError(f"{where}: must have one section for each of {', '.join(LAYER_TYPES)}, not for {', '.join(values)}")
        where, values = f"{where}.{layer_type}", values.get(layer_type) or {}
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be an object, not {values!r}")
    elif layer_type == SLIDING:
        values = {}
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError(f"{where}: different rotary embeddings per layer type are not supported")
    unknown = sorted(set(values) - KNOWN_PARAMETERS - INERT_PARAMETERS - inert)
    if unknown:
        raise ConfigError(f"{where}: {', '.join(unknown)} not supported (known: {', '.join(sorted(KNOWN_PARAMETERS))})")
    return HfConfig(c.name, values, {}, where)


def read_rope(
    c: HfConfig,
    head_dim: int,
    *,
    partial: bool = False,
    original_default: int = 0,
    aliases: Mapping[str, str] = MappingProxyType({}),
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
    rotary_key: str = "",
    inert: Set[str] = frozenset(),
) -> Rope:
    """The rotary embedding that a config.json describes.

    partial: the family can rotate a part of each head.
    original_default: original context, if configs of the family may omit it (0: the model's maximum).
    aliases: older names of rope types in this family.
    inert: parameters without effect in this family.
    layer_type: the layer type, for a family with an embedding per layer type; a single section is for full attention.
    theta_key: key in config.json, for a section without a theta.
    rotary_key: key in config.json with the number of rotated elements of a head, for a section without a share.

    Raises ConfigError for unknown, missing or out-of-range parameters.
    """
    section, max_position = rope_section(c, layer_type, inert), c.integer("max_position_embeddings")
    kind = section.get("rope_type") or section.get("type") or "default"
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise ConfigError(f"{section.where}: rope type {kind!r:.80} is not supported (supported: {', '.join(KINDS)})")
    theta = section.number("rope_theta", c.number(theta_key))
    share = section.number("partial_rotary_factor", c.number("partial_rotary_factor"))
    if rotary_key and c.get(rotary_key) is not None and section.get("partial_rotary_factor") is None:
        share = c.integer(rotary_key) / head_dim
    if share > 1 or (share != 1 and not partial):
        raise ConfigError(f"{section.where}: partial_rotary_factor {share:g} is not supported for {c.name} with rope type {kind}")
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{section.where}: a rotary embedding needs an even number of dimensions, not {rotary_dim} (head_dim {head_dim})"
        )
    rope = Rope(kind, theta, rotary_dim)
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the model's context, so no sequence uses it
        return replace(rope, kind="default")
    if kind == "linear":
        return replace(rope, factor=section.number("factor"))

    stated = (c.given("original_max_position_embeddings"), section.get("original_max_position_embeddings"))
    original = next((value for value in stated if value is not None), original_default or max_position)
    if isinstance(original, bool) or not isinstance(original, int) or not 1 < original <= MAX_CONTEXT:
        raise ConfigError(f"{section.where}: original_max_position_embeddings must be an integer above 1, not {original!r:.80}")
    rope = replace(rope, original_max_position=original)
    if kind == "llama3":
        return _read_llama3(section, rope)
    rope = replace(rope, factor=section.number("factor", max_position / original))
    return _read_longrope(section, rope) if kind == "longrope" else _read_yarn(section, rope)


def context_of(c: HfConfig, rope: Rope) -> int:
    """The longest context of a config.json, tokens. With scaling by a factor, the config may state the context
    before scaling.
    """
    stated = c.integer("max_position_embeddings")
    before = {"linear": stated, "yarn": rope.original_max_position}.get(rope.kind, 0)
    return max(stated, min(int(rope.factor * before), MAX_CONTEXT))


def _read_llama3(section: HfConfig, rope: Rope) -> Rope:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high < low:
        raise ConfigError(f"{section.where}: high_freq_factor ({high:g}) must not be below low_freq_factor ({low:g})")
    return replace(rope, factor=section.number("factor"), low_freq_factor=low, high_freq_factor=high)


def _read_longrope(section: HfConfig, rope: Rope) -> Rope:
    def stretches(name: str) -> tuple[float, ...]:
        """A positive number for each rotated pair of dimensions."""
        value, count = section.get(name), rope.rotary_dim // 2
        if not isinstance(value, list) or not all(isinstance(x, (int, float)) and x > 0 for x in value):
            raise ConfigError(f"{section.where}: {name} must be a list of positive numbers, not {value!r:.200}")
        if len(value) != count:
            raise ConfigError(f"{section.where}: {name} must have {count} numbers, one per rotated pair, not {len(value)}")
        return tuple(float(x) for x in value)

    usual = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    scaled = replace(rope, attention_factor=section.number("attention_factor", usual))
    return replace(scaled, short_factor=stretches("short_factor"), long_factor=stretches("long_factor"))


def _read_yarn(section: HfConfig, rope: Rope) -> Rope:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.theta <= 1:
        raise ConfigError(f"{section.where}: rope_theta must be above 1 with yarn, not {rope.theta:g}")
    usual = magnitude(1)
    if section.get("mscale") and section.get("mscale_all_dim"):
        usual = magnitude(section.number("mscale")) / magnitude(section.number("mscale_all_dim"))
    usual *= section.number("attn_factor", 1.0)  # vLLM's name for a further factor; transformers knows none
    return replace(
        rope,
        attention_factor=section.number("attention_factor", usual),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.get("truncate") is not False,
    )


MAX_VOCAB = 1 << 24  # a completion word has 24 bits for the token
DTYPES = ("float32", "bfloat16", "float16")


def grouped_attention(
    c: HfConfig, *, qk_norm: bool = False, qkv_bias: bool = False, o_bias: bool = False, **rope: Any
) -> Attention:
    """Grouped-query attention. rope: options of read_rope."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    kv_heads = heads if c.is_null("num_key_value_heads") else c.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    even = hidden // heads if hidden % heads == 0 else None
    if even is None and c.get("head_dim") is None:
        raise ConfigError(
            f"config.json: without head_dim, hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})"
        )
    head_dim = even if c.is_null("head_dim") and even else c.integer("head_dim", default=even)
    norm = QkNorm.HEAD if qk_norm else None
    return Attention(heads, kv_heads, head_dim, read_rope(c, head_dim, **rope), 0, norm, qkv_bias, o_bias)


def _layer_types(c: HfConfig, layers: int) -> list[str] | None:
    types = c.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise ConfigError(f"config.json: layer_types must be a list of {layers} names, not {types!r:.200}")
    for name in set(types or ()) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"config.json: layer type {name!r} is not supported (supported: full_attention, sliding_attention)")
    return types


def no_windows(c: HfConfig) -> tuple[int, ...]:
    """0 for each layer: it sees all tokens. Raises ConfigError if `layer_types` has windows."""
    layers = c.integer("num_hidden_layers")
    if "sliding_attention" in (_layer_types(c, layers) or ()):
        raise ConfigError("config.json: layer_types has sliding_attention, but sliding_window is not set")
    return (0,) * layers


def sliding_windows(c: HfConfig, *, gated: bool = False, typed: bool = False, upper: bool = False) -> tuple[int, ...]:
    """The window of each layer: `sliding_window`, or 0.

    gated: only if `use_sliding_window` is set.
    typed: according to `layer_types`, if present.
    upper: without `layer_types`, only in layers from `max_window_layers` on.
    """
    window, gate = c.get("sliding_window"), not gated or c.flag("use_sliding_window")
    if window is None or not gate:
        return no_windows(c)
    layers = c.integer("num_hidden_layers")
    window, types = c.integer("sliding_window"), _layer_types(c, layers)
    if typed and types is not None:
        return tuple(window if name == "sliding_attention" else 0 for name in types)
    if upper:
        first = c.integer("max_window_layers", default=28, low=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if "full_attention" in (types or ()):
        raise ConfigError(
            "config.json: layer_types with full_attention and a sliding_window is not supported for this model class"
        )
    return (window,) * layers


def periodic_windows(c: HfConfig, period: int) -> tuple[int, ...]:
    """The window of each layer: `sliding_window`, or 0 according to `layer_types`; without `layer_types`, 0
    in each `period`-th layer.
    """
    layers, window = c.integer("num_hidden_layers"), c.get("sliding_window")
    types = _layer_types(c, layers) or ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    if window is None and "sliding_attention" in types:
        raise ConfigError("config.json: sliding_window is not set, but there are layers with sliding_attention")
    return tuple(c.integer("sliding_window") if name == "sliding_attention" else 0 for name in types)


def activation(c: HfConfig) -> Activation:
    if c["hidden_act"] not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {c['hidden_act']!r} is not supported (supported: silu)")
    return Activation.SILU


def gated_mlp(c: HfConfig, *, bias: bool = False) -> Mlp:
    return Mlp(c.integer("intermediate_size"), activation(c), bias)


def further_layers(c: HfConfig, attention: Attention, mlp: Mlp | Experts) -> tuple[Layer, ...]:
    """The layers that predict further tokens (DecoderDescription.further_layers). They are like the last layer."""
    count = c.integer("num_nextn_predict_layers", "num_mtp_layers", low=0, high=MOST_FURTHER_LAYERS)
    return (Layer(attention, mlp),) * count


def pre_norm_decoder(
    c: HfConfig,
    attention: Attention,
    mlp: Mlp | Experts | list[Mlp | Experts],
    windows: tuple[int, ...] = (),
    tensors: TensorNames = HF_NAMES,
    *,
    ropes: Sequence[Rope] = (),
    factors: Factors = NO_FACTORS,
    norm: Norm | None = None,
) -> DecoderDescription:
    """A decoder with norms before attention and MLP.

    mlp: the MLP of all layers, or a list with one per layer.
    windows, ropes: window and rotary embedding of each layer.
    norm: default: an RMSNorm with `rms_norm_eps`.
    """
    windows = windows or no_windows(c)
    ropes = ropes or [attention.rope] * len(windows)
    dtype = str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"config.json: dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    mlps = mlp if isinstance(mlp, list) else [mlp] * len(windows)
    return DecoderDescription(
        name=c.name,
        vocab_size=c.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=c.integer("hidden_size"),
        layers=tuple(Layer(attention._replace(window=w, rope=r), m) for w, r, m in zip(windows, ropes, mlps, strict=True)),
        norm=Norm(c.number("rms_norm_eps", below=1)) if norm is None else norm,
        placement=NormPlacement.PRE,
        max_position=context_of(c, attention.rope),
        tied_embeddings=c.flag("tie_word_embeddings"),
        dtype=dtype,
        tensors=tensors,
        factors=factors,
    )
