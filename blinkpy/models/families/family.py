"""The model classes that are supported, and what each fixes or defaults beside its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blinkpy.config import ConfigError


@dataclass(frozen=True)
class Family:
    """What a model class fixes or defaults, where the config.json can't or need not say it.

    qkv_bias: True or False; None: the config's `attention_bias` decides, for the output projection too.
    window: "" never; "all": `sliding_window` holds for every layer; "upper": for the layers from `max_window_layers` on,
    or as `layer_types` says. A window of "gated" families counts only with `use_sliding_window`.
    fused: the checkpoint stores q, k, v as one tensor, and gate, up as another.
    """

    model_type: str
    rms_norm_eps: float = 1e-6
    head_dim: int = 0
    max_position: int = 32768
    qkv_bias: bool | None = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    fused: bool = False
    partial_rope: bool = False
    window: str = ""
    gated_window: bool = False
    window_default: int | None = None
    rope_original: int = 0
    rope_aliases: Mapping[str, str] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", max_position=2048, qkv_bias=None, mlp_bias=True),
    "MistralForCausalLM": Family("mistral", max_position=131072, window="all", window_default=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="upper", gated_window=True, window_default=4096),
    "Qwen3ForCausalLM": Family(
        "qwen3", head_dim=128, qkv_bias=None, qk_norm=True, window="upper", gated_window=True, window_default=4096
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", qkv_bias=None, qk_norm=True, experts=True, window="all", gated_window=True, window_default=4096
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        rms_norm_eps=1e-5,
        max_position=4096,
        fused=True,
        partial_rope=True,
        window="all",
        rope_original=4096,
        rope_aliases={"su": "longrope", "yarn": "longrope"},  # names in early Phi-3 configs
    ),
}

# Options of other models that change the computation. Any value but those listed is refused, never ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "qk_layernorm": (None, False),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "vision_config": (None,),
}


def family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The model class that a config.json names, and its family. Raises ConfigError for one that isn't supported."""
    supported = ", ".join(FAMILIES)
    names = config.get("architectures")
    if names is None:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        names = [by_type.get(str(config.get("model_type")), f"model_type {config.get('model_type')!r}")]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json: architectures must name one model class, not {names!r} (supported: {supported})")
    if names[0] not in FAMILIES:
        raise ConfigError(f"config.json: architecture {names[0]} is not supported (supported: {supported})")
    return names[0], FAMILIES[names[0]]
