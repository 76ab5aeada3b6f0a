"""Blocks from a config.json, as most families spell them."""

from collections.abc import Sequence
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.config_json.rope_reader import context_of, read_rope
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
    RouterKind,
)
from blinkpy.models.description.decoder_description import HF_NAMES, DecoderDescription, TensorNames
from blinkpy.models.description.rope_tables import Rope

MAX_VOCAB = 1 << 24  # a completion word has 24 bits for the token
DTYPES = ("float32", "bfloat16", "float16")


def grouped_attention(
    c: HfConfig, *, qk_norm: bool = False, qkv_bias: bool = False, o_bias: bool = False, **rope: Any
) -> Attention:
    """Attention with grouped keys and values. rope: options of read_rope."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    head_dim = c.integer("head_dim", default=hidden // heads if hidden % heads == 0 else None)
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
    """Of each layer: 0, for all tokens."""
    layers = c.integer("num_hidden_layers")
    if "sliding_attention" in (_layer_types(c, layers) or ()):
        raise ConfigError("config.json: layer_types has sliding_attention, but sliding_window is not set")
    return (0,) * layers


def sliding_windows(c: HfConfig, *, gated: bool = False, typed: bool = False, upper: bool = False) -> tuple[int, ...]:
    """The window of each layer: `sliding_window`, or 0.

    gated: only if `use_sliding_window` is set.
    typed: according to `layer_types`, if present.
    upper: otherwise only in layers from `max_window_layers` on.
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
    """Of each layer: `sliding_window`, or 0 as `layer_types` says, or without that in each `period`-th."""
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


def routed_experts(c: HfConfig, size: str, router: RouterKind, *, normalize: bool, **more: Any) -> Experts:
    """The experts of a layer; size: the key of their width. more: fields of Experts."""
    count, top_k = c.integer("num_experts", "num_local_experts", "n_routed_experts", low=0), c.integer("num_experts_per_tok")
    if 0 < count < top_k:
        raise ConfigError(f"config.json: num_experts_per_tok ({top_k}) is above num_experts ({count})")
    return Experts(count, top_k, c.integer(size), router, activation(c), normalize, **more)


def strided_experts(c: HfConfig, experts: Experts) -> list[Mlp | Experts]:
    """Experts in each layer whose number, from 1, is a multiple of decoder_sparse_step, except mlp_only_layers."""
    layers, stride, dense = c.integer("num_hidden_layers"), c.integer("decoder_sparse_step"), c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers below {layers}, not {dense!r:.200}")
    chosen = [experts.number > 0 and i not in dense and (i + 1) % stride == 0 for i in range(layers)]
    return [experts if has_experts else gated_mlp(c) for has_experts in chosen]


def pre_norm_decoder(
    c: HfConfig,
    attention: Attention,
    mlp: Mlp | Experts | list[Mlp | Experts],
    windows: tuple[int, ...] = (),
    tensors: TensorNames = HF_NAMES,
    *,
    ropes: Sequence[Rope] = (),
    factors: Factors = NO_FACTORS,
) -> DecoderDescription:
    """A decoder with norms before attention and MLP.

    mlp: of all layers, or a list with one per layer.
    windows, ropes: of each layer.
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
        norm=Norm(c.number("rms_norm_eps", below=1)),
        placement=NormPlacement.PRE,
        max_position=context_of(c, attention.rope),
        tied_embeddings=c.flag("tie_word_embeddings"),
        dtype=dtype,
        tensors=tensors,
        factors=factors,
    )
