"""Mistral and Ministral."""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, rope_section, sliding_windows
from blinkpy.models.description.blocks import Layer, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.deepseek import MISTRAL_4, mistral4
from blinkpy.models.families.deepseek import UNREAD as LATENT_UNREAD
from blinkpy.models.families.family import family

DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}


@family(
    "MinistralForCausalLM",
    models="Ministral; windows in the layers that `layer_types` names",
    model_type="ministral",
    defaults=DEFAULTS,
)
@family("MistralForCausalLM", models="Mistral 7B", model_type="mistral", defaults=DEFAULTS)
def mistral(c: HfConfig) -> DecoderDescription:
    return pre_norm_decoder(c, grouped_attention(c), gated_mlp(c), sliding_windows(c, typed=True))


# Mistral 3 (Small 3.1, Magistral, Ministral 3), text only: the weights for images are ignored.
#
# Ministral 3's queries grow with the logarithm of the position after its original context.

GROWTH = "llama_4_scaling_beta"
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, GROWTH: 0.1}
HEADS = {"num_key_value_heads": 8, "head_dim": 128}
MINISTRAL_3 = {**HEADS, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_parameters": ROPE}
TIED = {"tie_word_embeddings": True}
TEXTS: dict[str, dict[str, Any]] = {"mistral": DEFAULTS | TIED, "ministral3": MINISTRAL_3 | TIED, "mistral4": MISTRAL_4 | TIED}
NESTED = TensorNames(
    embedding="language_model.model.embed_tokens",
    final_norm="language_model.model.norm",
    lm_head="language_model.lm_head",
    layer="language_model.model.layers.{layer}.",
    renamed=(("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    spare=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
IMAGES = """
    vision_config image_token_index image_token_id multimodal_projector_bias projector_hidden_act spatial_merge_size
    vision_feature_layer"""


@family("Ministral3ForCausalLM", models="Ministral 3: text only", model_type="ministral3", defaults=MINISTRAL_3)
def ministral3(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, inert={GROWTH, "max_position_embeddings"})
    model = pre_norm_decoder(c, attention, gated_mlp(c), sliding_windows(c, typed=True))
    section = rope_section(c, None, {GROWTH, "max_position_embeddings"})
    if not section.get(GROWTH):
        return model
    if not attention.rope.original_max_position:
        raise ConfigError(f"{c.where}: {GROWTH} is supported only with rope type yarn")
    return replace(model, layers=tuple(_growing(layer, section.number(GROWTH)) for layer in model.layers))


def _growing(layer: Layer, growth: float) -> Layer:
    """The layer with queries that grow by a step at each multiple of the original context."""
    rope = layer.attention.rope
    rope = replace(rope, query_growth=growth, query_period=rope.original_max_position, query_start=0)
    return layer._replace(attention=layer.attention._replace(rope=rope))


@family(
    "Mistral3ForConditionalGeneration",
    models="Mistral Small 3.1 and 4, Ministral 3, and, with a [converted tokenizer](#checkpoints), 3.2 and Magistral: text only",
    model_type="mistral3",
    ignores=tuple(IMAGES.split()),
)
def mistral3(c: HfConfig) -> DecoderDescription:
    values = c.get("text_config")
    kind = values.get("model_type", "mistral") if isinstance(values, dict) else "mistral"
    if not isinstance(kind, str) or kind not in TEXTS:
        raise ConfigError(f"config.json: text_config: model_type {kind!r:.80} is not supported (supported: {', '.join(TEXTS)})")
    is_latent = kind == "mistral4"
    ignores = LATENT_UNREAD if is_latent else ()
    text = c.section("text_config", ("dtype", "torch_dtype", "tie_word_embeddings"), TEXTS[kind], ignores=ignores)
    model = mistral4(text) if is_latent else ministral3(text)
    outer = {name: getattr(NESTED, name) for name in ("embedding", "final_norm", "lm_head", "layer", "renamed", "spare")}
    return replace(model, tensors=model.tensors._replace(**outer))


# Mixtral: Mistral's attention, and experts in every layer.

EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8, "intermediate_size": 14336}
NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_down="block_sparse_moe.experts.{expert}.w2",
)


@family(
    "MixtralForCausalLM",
    models="Mixtral",
    model_type="mixtral",
    defaults={**EXPERTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072},
    ignores=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
def mixtral(c: HfConfig) -> DecoderDescription:
    experts = routed_experts(c, "intermediate_size", RouterKind.TOP_K_SOFTMAX, normalize=True)
    return pre_norm_decoder(c, grouped_attention(c), experts, sliding_windows(c), NAMES)
