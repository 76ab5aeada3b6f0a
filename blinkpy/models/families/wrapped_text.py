"""The text part of models that also take images or sound; weights for images and sound are ignored.

In such a model, text positions rotate heads as in the plain text model, whatever sections images use (mrope).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import Family, families, family

INHERITED = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
IMAGE_SECTIONS = ("mrope_section", "mrope_interleaved")  # of rotary embeddings
SPARE = "vision_tower. vision_model. visual. multi_modal_projector. mm_projector. mlp1. image_newline connector. audio_tower."
SPARE += " embed_vision. embed_audio. vision_embedder."
SPARE_PREFIXES = tuple(f"{prefix}{name}" for name in SPARE.split() for prefix in ("", "model."))
OUTER_KEYS = """
    vision_config audio_config image_token_id image_token_index video_token_id video_token_index audio_token_id
    audio_token_index vision_start_token_id vision_end_token_id vision_token_id image_start_token_id image_end_token_id
    video_start_token_id video_end_token_id image_seq_length downsample_ratio projector_hidden_act
    vision_feature_layer vision_feature_select_strategy multimodal_projector_bias"""
MORE_OUTER_KEYS = """
    image_grid_pinpoints use_image_newline_parameter vision_aspect_ratio spatial_merge_size scale_factor mm_tokens_per_image
    ps_version select_layer template force_image_size dynamic_image_size min_dynamic_patch max_dynamic_patch use_thumbnail
    use_backbone_lora use_llm_lora pad2square system_message hidden_size output_attentions vision_feature_layers"""
UNUSED = (*OUTER_KEYS.split(), *MORE_OUTER_KEYS.split())


class TextType(NamedTuple):
    """A text model that is saved only within others.

    like: the class with the same decoder. defaults: they replace its own. fixed: values of keys that this model does not read.
    """

    like: str
    defaults: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}


QWEN_VL: dict[str, Any] = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}
SOUND_MARKS = ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image")
QWEN3_VL: dict[str, Any] = {"rope_theta": 5e5, "max_position_embeddings": 128000}
QWEN3_VL_EXPERTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "num_key_value_heads": 16}
TEXT_TYPES = {
    "kimi_k2": TextType("DeepseekV3ForCausalLM"),
    "qwen2_vl_text": TextType("Qwen2ForCausalLM", QWEN_VL),
    "qwen2_5_vl_text": TextType("Qwen2ForCausalLM", QWEN_VL),
    "qwen3_vl_text": TextType("Qwen3ForCausalLM", QWEN3_VL | {"num_key_value_heads": 32}),
    "qwen3_vl_moe_text": TextType("Qwen3MoeForCausalLM", QWEN3_VL | QWEN3_VL_EXPERTS, {"norm_topk_prob": True}),
    "glm4v_text": TextType(
        "Glm4ForCausalLM",
        {"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
        {"attention_bias": True},
    ),
    "glm4v_moe_text": TextType(
        "Glm4MoeForCausalLM", {"attention_bias": True, "head_dim": None, "max_position_embeddings": 65536}
    ),
}


class Wrapper(NamedTuple):
    """A model class around a text model.

    text: model_type of the text, if its section does not name it.
    section: key in config.json; without it, config.json is flat.
    tied: the default of tie_word_embeddings.
    defaults: replace those of the text's class.
    ignores: more keys without an effect.
    """

    name: str
    model_type: str
    models: str
    text: str = "llama"
    section: str = "text_config"
    tied: bool = False
    defaults: Mapping[str, Any] = {}
    ignores: tuple[str, ...] = ()


VOXTRAL: dict[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128}
WRAPPERS = (
    Wrapper("Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2-VL", "qwen2_vl_text"),
    Wrapper("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2.5-VL", "qwen2_5_vl_text"),
    Wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3-VL, dense", "qwen3_vl_text"),
    Wrapper("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "Qwen3-VL, with experts", "qwen3_vl_moe_text"),
    Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3.5 and 3.6, dense", "qwen3_5_text"),
    Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "Qwen3.5 and 3.6, with experts", "qwen3_5_moe_text"),
    Wrapper("InternVLForConditionalGeneration", "internvl", "InternVL 3 and 3.5, as transformers has them", "qwen2", tied=True),
    Wrapper("InternVLChatModel", "internvl_chat", "InternVL 2.5, 3 and 3.5, as published", "qwen2", section="llm_config"),
    Wrapper(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        "Gemma 4 E2B, E4B, 26B-A4B and 31B",
        "gemma4_text",
        tied=True,
        ignores=SOUND_MARKS,
    ),
    Wrapper(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        "Gemma 4 12B",
        "gemma4_unified_text",
        tied=True,
        ignores=SOUND_MARKS,
    ),
    Wrapper("LlavaForConditionalGeneration", "llava", "LLaVA"),
    Wrapper("LlavaNextForConditionalGeneration", "llava_next", "LLaVA-NeXT"),
    Wrapper("LlavaOnevisionForConditionalGeneration", "llava_onevision", "LLaVA-OneVision", "qwen2"),
    Wrapper("Glm4vForConditionalGeneration", "glm4v", "GLM-4.1V", "glm4v_text"),
    Wrapper("Glm46VForConditionalGeneration", "glm46v", "GLM-4.6V", "glm4v_text"),
    Wrapper("Glm4vMoeForConditionalGeneration", "glm4v_moe", "GLM-4.5V", "glm4v_moe_text"),
    Wrapper("Exaone4_5_ForConditionalGeneration", "exaone4_5", "EXAONE 4.5", "exaone4"),
    Wrapper("Idefics3ForConditionalGeneration", "idefics3", "Idefics 3"),
    Wrapper("SmolVLMForConditionalGeneration", "smolvlm", "SmolVLM"),
    Wrapper("VoxtralForConditionalGeneration", "voxtral", "Voxtral", defaults=VOXTRAL | {"rope_theta": 1e8}),
    Wrapper("KimiK25ForConditionalGeneration", "kimi_k25", "Kimi K2.5 and K2.6", "deepseek_v3"),
    Wrapper("Qwen2AudioForConditionalGeneration", "qwen2_audio", "Qwen2-Audio", "qwen2"),
)


def _text_family(kind: str) -> tuple[Family, Mapping[str, Any]] | None:
    """The family of a text's model_type, and defaults that replace the family's."""
    known = families()
    if kind in TEXT_TYPES:
        return known[TEXT_TYPES[kind].like], TEXT_TYPES[kind].defaults
    inner = {wrapper.model_type for wrapper in WRAPPERS}
    return next(((one, {}) for one in known.values() if one.model_type == kind and kind not in inner), None)


def plain_rotation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The section without the parts of a rotary embedding that are for images."""
    plain = dict(values)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(plain.get(key), Mapping):
            rope = {name: value for name, value in plain[key].items() if name not in IMAGE_SECTIONS}
            plain[key] = {name: "default" if value == "mrope" else value for name, value in rope.items()}
    return plain


def nested_names(names: TensorNames) -> TensorNames:
    """The names of a text model within another."""

    def inside(name: str) -> str:
        return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name

    fields = "embedding final_norm lm_head layer layer_embedding layer_projection layer_projection_norm"
    outer: dict[str, Any] = {field: inside(getattr(names, field)) for field in fields.split()}
    spare = *names.spare, *SPARE_PREFIXES
    inner = "model.language_model."
    texts = [(f"{prefix}text_model.", inner) for prefix in ("model.language_model.", "model.")]  # Idefics 3, SmolVLM
    kept = [(prefix, prefix) for prefix in (inner, *(one for one in spare if one.startswith("model.")))]
    older = ("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")
    return names._replace(**outer, spare=spare, renamed=(*texts, *kept, *older, ("model.", "model.language_model.")))


def _describe(wrapper: Wrapper, c: HfConfig) -> DecoderDescription:
    values = c.get(wrapper.section)
    flat = values is None and c.get("hidden_size") is not None
    if flat:
        values, where = dict(c), c.where
    else:
        where = f"{c.where}: {wrapper.section}"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{c.where}: {wrapper.section} must be an object, not {str(values)[:80]}")
    kind = wrapper.text if flat else values.get("model_type") or wrapper.text
    found = _text_family(kind) if isinstance(kind, str) else None
    if found is None:
        raise ConfigError(f"{where}: model_type {kind!r:.80} is not supported as the text model of {c.name}")
    text_family, defaults = found
    tied = {"tie_word_embeddings": wrapper.tied}
    text = c.section(
        wrapper.section,
        INHERITED,
        {**text_family.defaults, **defaults, **wrapper.defaults, **tied},
        values={**plain_rotation(values), **(TEXT_TYPES[kind].fixed if kind in TEXT_TYPES else {})},
        ignores=(*text_family.ignores, *(UNUSED if flat else ())),
    )
    model = text_family.describe(text)
    names = nested_names(model.tensors)
    if kind == "qwen3_vl_moe_text":  # one tensor for all experts, or, as quantised checkpoints have it, each expert's own
        names = names._replace(one_for_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), either_order=True)
    return replace(model, tensors=names)


def _register(wrapper: Wrapper) -> None:
    @family(
        wrapper.name,
        models=f"{wrapper.models}: text only",
        model_type=wrapper.model_type,
        ignores=(*UNUSED, *wrapper.ignores),
    )
    def describe(c: HfConfig) -> DecoderDescription:
        return _describe(wrapper, c)


for one in WRAPPERS:
    _register(one)
