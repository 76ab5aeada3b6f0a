"""Qwen3, dense and with experts."""

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Experts, Mlp, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, routed_experts, sliding_windows
from blinkpy.models.families.family import family
from blinkpy.models.families.hf_config import HfConfig

EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}


@family("Qwen3ForCausalLM", model_type="qwen3", defaults={"head_dim": 128, "sliding_window": 4096})
def qwen3(c: HfConfig) -> DecoderDescription:
    bias, windows = c.flag("attention_bias"), sliding_windows(c, gated=True, typed=True, upper=True)
    return pre_norm_decoder(c, grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias), gated_mlp(c), windows)


@family(
    "Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={**EXPERTS, "sliding_window": 4096},
    ignores=("intermediate_size", "output_router_logits", "router_aux_loss_coef"),
)
def qwen3_moe(c: HfConfig) -> DecoderDescription:
    bias, windows = c.flag("attention_bias"), sliding_windows(c, gated=True)
    attention = grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias)
    return pre_norm_decoder(c, attention, _mlps(c, len(windows)), windows)


def _mlps(c: HfConfig, layers: int) -> list[Mlp | Experts]:
    """Experts in each layer whose number, from 1, is a multiple of decoder_sparse_step, but for mlp_only_layers."""
    normalize = c.flag("norm_topk_prob")
    experts = routed_experts(c, "moe_intermediate_size", RouterKind.SOFTMAX_TOP_K, normalize=normalize)
    stride, dense = c.integer("decoder_sparse_step"), c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers below {layers}, not {dense!r}")
    chosen = [experts.number > 0 and i not in dense and (i + 1) % stride == 0 for i in range(layers)]
    return [experts if has_experts else gated_mlp(c) for has_experts in chosen]
