"""What one decoder needs to know, derived from a Hugging Face config.json. No torch: it works in the base install.

All families share one decoder: pre-norm RMSNorm, rotary attention with grouped keys and values, a gated SiLU MLP or a
mixture of such experts. What differs is in blinkpy.models.families.family and in the fields of DecoderDescription.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.rope_config import read_rope
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import UNSUPPORTED, Family, family_of

MAX_VOCAB = 1 << 24  # a completion word has 24 bits for the token
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DecoderDescription:
    """One decoder. Sizes are in elements.

    q_size = heads * head_dim and kv_size = kv_heads * head_dim are the widths of the projections. windows: per layer, how
    many of the last tokens a token sees, itself included (0: all). expert_layers: per layer, whether its MLP is a mixture of
    `experts` experts of width expert_size, experts_per_token of which a token visits. dtype: of the checkpoint.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    dtype: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    windows: tuple[int, ...]
    expert_layers: tuple[bool, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = False

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


class _Reader:
    """Typed look-ups in a config.json, with errors that name the field."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
        """The first of the names that is there and not null, else the default; without a default it must be there."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if value is None:
            raise ConfigError(f"config.json: {names[0]} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"config.json: {names[0]} must be an integer from {low} to {high}, not {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, not {value!r}")
        return value


def _windows(config: Mapping[str, Any], read: _Reader, family: Family, layers: int) -> tuple[int, ...]:
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise ConfigError(f"config.json: layer_types must be a list of {layers} names, not {types!r}")
    for name in set(types or ()) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"config.json: layer type {name!r} is not supported (supported: full_attention, sliding_attention)")

    value = config.get("sliding_window", family.window_default)
    if family.gated_window and not read.flag("use_sliding_window"):
        value = None
    if value is None:
        if types is not None and "sliding_attention" in types:
            raise ConfigError("config.json: layer_types has sliding_attention, but sliding_window is not set")
        return (0,) * layers
    if not family.window:
        raise ConfigError("config.json: sliding_window is not an option of this architecture")
    window = read.integer("sliding_window", default=family.window_default)
    if family.window == "upper":
        if types is not None:
            return tuple(window if name == "sliding_attention" else 0 for name in types)
        first = read.integer("max_window_layers", default=28, low=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if types is not None and "full_attention" in types:
        raise ConfigError("config.json: layer_types with full_attention beside a sliding_window is not supported here")
    return (window,) * layers


@dataclass(frozen=True)
class _Experts:
    """The mixtures of experts of a model: in which layers they are, and their sizes, 0 where there are none."""

    expert_layers: tuple[bool, ...]
    count: int = 0
    per_token: int = 0
    size: int = 0


def _read_experts(config: Mapping[str, Any], read: _Reader, layers: int) -> _Experts:
    count = read.integer("num_experts", "num_local_experts", default=128, low=0)
    per_token = read.integer("num_experts_per_tok", default=8)
    size = read.integer("moe_intermediate_size", default=768)
    stride = read.integer("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers below {layers}, not {dense!r}")
    expert_layers = tuple(count > 0 and i not in dense and (i + 1) % stride == 0 for i in range(layers))
    if not any(expert_layers):
        return _Experts(expert_layers)
    if per_token > count:
        raise ConfigError(f"config.json: num_experts_per_tok ({per_token}) is above num_experts ({count})")
    return _Experts(expert_layers, count, per_token, size)


def describe_config(config: Mapping[str, Any]) -> DecoderDescription:
    """DecoderDescription of a config.json that was read. Raises ConfigError for all that is unknown, missing or impossible."""
    name, family = family_of(config)
    for key, neutral in UNSUPPORTED.items():
        if key in config and config[key] not in neutral:
            raise ConfigError(f"config.json: {key} is not supported by {name} here (found {str(config[key])[:80]})")
    read = _Reader(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported (supported: silu)")

    hidden, layers, heads = (read.integer(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = read.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    divided = hidden // heads if hidden % heads == 0 else None
    head_dim = read.integer("head_dim", default=family.head_dim or divided)
    max_position = read.integer("max_position_embeddings", default=family.max_position)
    eps = config.get("rms_norm_eps", family.rms_norm_eps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
        raise ConfigError(f"config.json: rms_norm_eps must be a number between 0 and 1, not {eps!r}")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"config.json: dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    attention_bias = read.flag("attention_bias")
    if attention_bias and family.qkv_bias is not None and not family.qkv_bias:
        raise ConfigError(f"config.json: attention_bias is not an option of {name}")
    mlp_bias = read.flag("mlp_bias")
    if mlp_bias and not family.mlp_bias:
        raise ConfigError(f"config.json: mlp_bias is not an option of {name}")

    experts = _read_experts(config, read, layers) if family.experts else _Experts((False,) * layers)
    intermediate = read.integer("intermediate_size", default=1 if all(experts.expert_layers) else None)

    return DecoderDescription(
        name=name,
        vocab_size=read.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position=max_position,
        rms_norm_eps=float(eps),
        rope=read_rope(
            config,
            head_dim=head_dim,
            max_position=max_position,
            partial=family.partial_rope,
            original_default=family.rope_original,
            aliases=family.rope_aliases,
        ),
        tied_embeddings=read.flag("tie_word_embeddings"),
        dtype=dtype,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        fused=family.fused,
        windows=_windows(config, read, family, layers),
        expert_layers=experts.expert_layers,
        experts=experts.count,
        experts_per_token=experts.per_token,
        expert_size=experts.size,
        normalize_experts=family.experts and read.flag("norm_topk_prob"),
    )


def describe_model(folder: str | Path) -> DecoderDescription:
    """DecoderDescription of the model in a folder, from its config.json. Raises ConfigError."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, not {type(config).__name__}")
    try:
        return describe_config(config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
