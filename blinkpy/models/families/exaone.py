"""EXAONE 4, dense, and K-EXAONE, with experts. Layers without a window do not rotate their heads, unless no layer has a
window."""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import (
    gated_mlp,
    grouped_attention,
    no_windows,
    periodic_windows,
    pre_norm_decoder,
)
from blinkpy.models.description.blocks import NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import DENSE, SPARSE, biased_sigmoid_experts, typed_mlps
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import family

EXAONE4: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096}
EXAONE4 |= {"sliding_window_pattern": 4, "num_key_value_heads": 32}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1}
ROUTING = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
IGNORES = ("output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers", "scoring_func", "topk_method")


@family("Exaone4ForCausalLM", models="EXAONE 4.0, dense", model_type="exaone4", defaults=EXAONE4)
def exaone4(c: HfConfig) -> DecoderDescription:
    windows = _windows(c)
    attention = grouped_attention(c, qk_norm=True)
    model = pre_norm_decoder(c, attention, gated_mlp(c), windows, ropes=_ropes(c, attention.rope, windows))
    return replace(model, placement=NormPlacement.POST)


@family(
    "ExaoneMoeForCausalLM",
    models="K-EXAONE, with experts; without the layers for multi-token prediction",
    model_type="exaone_moe",
    defaults=EXAONE4 | EXPERTS | ROUTING,
    ignores=IGNORES,
)
def exaone_moe(c: HfConfig) -> DecoderDescription:
    windows = _windows(c)
    attention = grouped_attention(c, qk_norm=True)
    dense = c.integer("first_k_dense_replace", low=0)
    experts = biased_sigmoid_experts(
        c,
        shared=c.integer("num_shared_experts", low=0) * c.integer("moe_intermediate_size"),
        factor=c.number("routed_scaling_factor"),
        normalize=c.flag("norm_topk_prob"),
    )
    mlps = typed_mlps(c, experts, [DENSE if layer < dense else SPARSE for layer in range(len(windows))])
    names = TensorNames(selection_bias="mlp.e_score_correction_bias")
    return pre_norm_decoder(c, attention, mlps, windows, names, ropes=_ropes(c, attention.rope, windows))


def _windows(c: HfConfig) -> tuple[int, ...]:
    """The window of each layer. `sliding_window_pattern` is either a number n (every n-th layer sees all tokens), or the letters
    L and G for the layers of one period, whose last layer sees all tokens.
    """
    pattern = c.get("sliding_window_pattern")
    if c.get("sliding_window") is None:
        return no_windows(c)
    if isinstance(pattern, str):
        if not pattern or pattern != "L" * (len(pattern) - 1) + "G":
            known = "a number, or letters L before one G"
            raise ConfigError(f"{c.where}: sliding_window_pattern {pattern!r:.80} is not supported (supported: {known})")
        return periodic_windows(c, len(pattern))
    return periodic_windows(c, 1 if pattern is None else c.integer("sliding_window_pattern"))


def _ropes(c: HfConfig, rope: Rope, windows: tuple[int, ...]) -> list[Rope]:
    """The rotary embedding of each layer."""
    every = c.get("sliding_window") is None
    return [rope if every or window else rope.unrotated() for window in windows]
