"""gpt-oss: attention sinks, a window in every second layer, and experts with biases, as MXFP4 or unquantised."""

from collections.abc import Mapping

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.description.blocks import Activation, Clamp, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
EXPERTS = {"num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880, "torch_dtype": "bfloat16"}
ATTENTION = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "attention_bias": True}
SWISH = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
NAMES = TensorNames(router="mlp.router", expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj")
QUANTIZATION = {
    "quant_method",
    "modules_to_not_convert",
    "dequantize",
}  # keys of the section


@family(
    "GptOssForCausalLM", models="gpt-oss 20b and 120b, their experts as MXFP4 or unquantised",
    model_type="gpt_oss",
    defaults={
        **EXPERTS, **ATTENTION, **SWISH, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072,
        "rope_parameters": YARN,
    },
    ignores=("experts_per_token", "initial_context_length", "output_router_logits", "router_aux_loss_coef"),
)  # fmt: skip
def gpt_oss(c: HfConfig) -> DecoderDescription:
    bias = c.flag("attention_bias")
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias)._replace(sinks=True)
    experts = routed_experts(c, "intermediate_size", RouterKind.TOP_K_SOFTMAX, normalize=True)._replace(
        activation=Activation.CLAMPED_SWISH,
        bias=True,
        clamp=Clamp(c.number("swiglu_alpha"), c.number("swiglu_limit")),
        mxfp4=_is_mxfp4(c),
    )
    if experts.mxfp4 and (c.integer("hidden_size") % 32 or experts.size % 32):
        raise ConfigError("config.json: with mxfp4, hidden_size and intermediate_size must be multiples of 32")
    return pre_norm_decoder(c, attention, experts, _windows(c), NAMES)


def _windows(c: HfConfig) -> tuple[int, ...]:
    """The window of each layer by `layer_types`; without it, the first and every second layer after it have a
    window.
    """
    windows = sliding_windows(c, typed=True)
    if c.get("layer_types") is None:
        return tuple(0 if layer % 2 else window for layer, window in enumerate(windows))
    return windows


def _is_mxfp4(c: HfConfig) -> bool:
    """Whether the experts' matrices are stored as MXFP4."""
    section = c.get("quantization_config")
    if section is None:
        return False
    if not isinstance(section, Mapping) or section.get("quant_method") != "mxfp4":
        method = section.get("quant_method") if isinstance(section, Mapping) else section
        raise ConfigError(f"config.json: quantization_config {method!r} is not supported for {c.name} (supported: mxfp4)")
    unknown = sorted(set(section) - QUANTIZATION)
    if unknown:
        raise ConfigError(f"config.json: quantization_config: {', '.join(unknown)} not supported")
    return True
