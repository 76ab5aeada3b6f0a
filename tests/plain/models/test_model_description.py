"""config.json to DecoderDescription: published models in their own spelling, and everything that has to be refused."""

import json
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blinkpy.config import ConfigError
from blinkpy.engine.devices.cpu_device import lacking_without_torch
from blinkpy.models.description.blocks import (
    Activation,
    Attention,
    Experts,
    Factors,
    Layer,
    LayerPart,
    Mlp,
    Norm,
    NormPlacement,
    QkNorm,
    RouterKind,
)
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import describe_config, describe_model, families
from blinkpy.models.weights.parts.weight_sizes import weight_elements

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def config(name: str, *sizes: int, rms_norm_eps: float = 1e-5, **more: Any) -> dict[str, Any]:
    """A config.json of a published model. sizes: as in SIZES. more: the other keys that it has, with their values."""
    common = {"architectures": [f"{name}ForCausalLM"], "hidden_act": "silu", "torch_dtype": "bfloat16"}
    return common | {"tie_word_embeddings": False, "rms_norm_eps": rms_norm_eps} | dict(zip(SIZES, sizes, strict=True)) | more


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
QWEN3 = {"head_dim": 128, "attention_bias": False, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}
QWEN3_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PHI3 = {"original_max_position_embeddings": 4096, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02}

LLAMA_31_8B = config(
    "Llama", 4096, 14336, 32, 32, 8, 128256, 131072, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, model_type="llama",
    attention_bias=False, mlp_bias=False, pretraining_tp=1,
)  # fmt: skip
MISTRAL_7B = config("Mistral", 4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=10000.0, sliding_window=4096)
QWEN25_7B = config(
    "Qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, rms_norm_eps=1e-6, rope_theta=1000000.0, max_window_layers=28,
    sliding_window=131072, use_sliding_window=False,
)  # fmt: skip
QWEN3_30B_A3B = config(
    "Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, 40960, rms_norm_eps=1e-6, rope_theta=1000000.0, max_window_layers=48,
    **QWEN3, **QWEN3_EXPERTS,
)  # fmt: skip
QWEN3_8B = config(
    "Qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, rms_norm_eps=1e-6, rope_theta=1000000.0, max_window_layers=36, **QWEN3
)
PHI3_MINI = config("Phi3", 3072, 8192, 32, 32, 32, 32064, 4096, rope_theta=1e4, rope_scaling=None, sliding_window=2047, **PHI3)
PHI4_MINI = config(
    "Phi3", 3072, 8192, 32, 24, 8, 200064, 131072, rope_theta=10000.0, rope_scaling=LONGROPE, partial_rotary_factor=0.75,
    sliding_window=262144, **PHI3 | {"tie_word_embeddings": True},
)  # fmt: skip
PHI4 = config("Phi3", 5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=250000, rope_scaling=None, sliding_window=None, **PHI3)
MIXTRAL_8X7B = config("Mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=1000000.0, sliding_window=None, **MIXTRAL)
SMOLLM3_3B = config(
    "SmolLM3", 2048, 11008, 36, 16, 4, 128256, 65536, rms_norm_eps=1e-6, rope_theta=5e6, rope_scaling=None, mlp_bias=False,
    attention_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, layer_types=["full_attention"] * 36,
    use_sliding_window=False, sliding_window=None, max_window_layers=28, tie_word_embeddings=True,
)  # fmt: skip
GRANITE_31_8B = config(
    "Granite", 4096, 12800, 40, 32, 8, 49155, 131072, rope_theta=1e7, rope_scaling=None, attention_bias=False, mlp_bias=False,
    attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0,
    tie_word_embeddings=True,
)  # fmt: skip
GEMMA2_9B = config(
    "Gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, rms_norm_eps=1e-6, head_dim=256, hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    attention_bias=False, cache_implementation="hybrid", rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096,
    tie_word_embeddings=True,
)  # fmt: skip
GEMMA2_27B = GEMMA2_9B | dict(zip(SIZES, (4608, 36864, 46, 32, 16, 256000, 8192), strict=True))
GEMMA2_27B |= {"head_dim": 128, "query_pre_attn_scalar": 144}
GEMMA3_1B = config(
    "Gemma3", 1152, 6912, 26, 4, 1, 262144, 32768, rms_norm_eps=1e-6, head_dim=256, hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False, rope_scaling=None,
    cache_implementation="hybrid", rope_local_base_freq=10000, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
    tie_word_embeddings=True,
)  # fmt: skip
GEMMA3_4B_TEXT = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "text_config": GEMMA3_4B_TEXT, "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14},
}  # fmt: skip
OLMO2_7B = config("Olmo2", 4096, 11008, 32, 32, 32, 100352, 4096, rms_norm_eps=1e-6, rope_theta=500000, rope_scaling=None)
OLMO3_YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
OLMO3_7B = config(
    "Olmo3", 4096, 11008, 32, 32, 32, 100278, 65536, rms_norm_eps=1e-6, rope_theta=500000, rope_scaling=OLMO3_YARN,
    attention_bias=False, sliding_window=4096, layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
)  # fmt: skip
GPT_OSS_20B = config(
    "GptOss", 2880, 2880, 24, 64, 8, 201088, 131072, model_type="gpt_oss", head_dim=64, attention_bias=True, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12, num_local_experts=32, num_experts_per_tok=4, experts_per_token=4,
    initial_context_length=4096, swiglu_limit=7.0, rope_theta=150000, quantization_config={"quant_method": "mxfp4"},
    rope_scaling={
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
)  # fmt: skip
GRANITE4 = config(
    "GraniteMoeHybrid", 2560, 8192, 8, 40, 8, 100352, 131072, num_local_experts=0, shared_intermediate_size=8192,
    layer_types=["attention"] * 8, position_embedding_type="rope",
)  # fmt: skip
GROWTH = "llama_4_scaling_beta"
QWEN2_MOE = config(
    "Qwen2Moe", 2048, 5632, 24, 16, 16, 151936, 8192, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632, norm_topk_prob=False, decoder_sparse_step=1,
)  # fmt: skip
GLM = config(
    "Glm4Moe", 4096, 10944, 46, 96, 8, 151552, 131072, head_dim=128, moe_intermediate_size=1408, n_routed_experts=128,
    num_experts_per_tok=8, n_shared_experts=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    first_k_dense_replace=3, rope_theta=1e6, num_nextn_predict_layers=1, attention_bias=True,
)  # fmt: skip
MISTRAL_3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {key: value for key, value in MISTRAL_7B.items() if key not in ("architectures", "torch_dtype")},
    "vision_config": {"hidden_size": 1024},
    "torch_dtype": "bfloat16",
}
NEMOTRON = {  # small
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "num_hidden_layers": 6, "hybrid_override_pattern": "M-MM*E", "num_attention_heads": 4, "num_key_value_heads": 2,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
BAMBA = {  # small
    "architectures": ["BambaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "mamba_n_heads": 8, "attn_layer_indices": [1, 3], "num_key_value_heads": 2,
}  # fmt: skip
FALCON_H1 = {  # small
    "architectures": ["FalconH1ForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_ssm": 128,
}  # fmt: skip
PUBLISHED = {  # name -> config, parameters
    "Llama-3.1-8B": (LLAMA_31_8B, 8_030_261_248),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Qwen2.5-7B": (QWEN25_7B, 7_615_616_512),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Phi-3-mini": (PHI3_MINI, 3_821_079_552),
    "Phi-4-mini": (PHI4_MINI, 3_836_021_760),
    "Phi-4": (PHI4, 14_659_507_200),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "SmolLM3-3B": (SMOLLM3_3B, 3_075_098_624),
    "Granite-3.1-8B": (GRANITE_31_8B, 8_170_848_256),
    "Gemma-2-9B": (GEMMA2_9B, 9_241_705_984),
    "Gemma-2-27B": (GEMMA2_27B, 27_227_128_320),
    "Gemma-3-1B": (GEMMA3_1B, 999_885_952),
    "Gemma-3-4B": (GEMMA3_4B, 3_880_263_168),  # 4,300,079,472 with the part for images
    "OLMo-2-7B": (OLMO2_7B, 7_298_617_344),
    "OLMo-3-7B": (OLMO3_7B, 7_298_011_136),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}, 116_829_156_672),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert weight_elements(describe_config(config)) == parameters


def test_fields_of_published_models() -> None:
    model = describe_config(LLAMA_31_8B)
    rope = model.attention.rope
    assert (model.head_dim, model.q_size, model.kv_size, model.dtype) == (128, 4096, 1024, "bfloat16")
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 500000.0, 8.0, 8192)
    assert model.layers == (Layer(Attention(32, 8, 128, rope), Mlp(14336)),) * 32
    assert not model.tied_embeddings
    assert windows(MISTRAL_7B) == (4096,) * 32
    assert windows({k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"}) == (4096,) * 32
    model = describe_config(QWEN25_7B)
    assert (model.attention.qkv_bias, model.attention.o_bias, windows(QWEN25_7B)) == (True, False, (0,) * 28)
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    assert windows(QWEN25_7B | changes) == (0,) * 20 + (4096,) * 8
    model = describe_config(QWEN3_30B_A3B)
    assert model.attention.qk_norm
    assert all(model.expert_layers)
    assert model.experts == Experts(128, 8, 768, RouterKind.SOFTMAX_TOP_K, Activation.SILU, normalize=True)
    model = describe_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 5]})
    assert model.expert_layers[:8] == (False, False, False, True, False, False, False, True)
    assert (model.mlp_size, model.experts.size) == (6144, 768)
    model = describe_config(MIXTRAL_8X7B)
    assert all(model.expert_layers)
    assert model.experts == Experts(8, 2, 14336, RouterKind.TOP_K_SOFTMAX, Activation.SILU, normalize=True)
    assert (model.attention.rope.theta, windows(MIXTRAL_8X7B)) == (1e6, (0,) * 32)
    assert windows(PHI3_MINI) == (2047,) * 32
    model = describe_config(SMOLLM3_3B)
    assert [layer.attention.rope.kind for layer in model.layers] == ["default", "default", "default", "none"] * 9
    assert describe_config({k: v for k, v in SMOLLM3_3B.items() if k != "no_rope_layers"}) == model
    model = describe_config(GRANITE_31_8B)
    assert (model.attention.score_scale, model.factors) == (1 / 128, Factors(12.0, 0.22, 1 / 16))
    model = describe_config(GLM)
    assert model.expert_layers == (False,) * 3 + (True,) * 43
    assert model.experts == Experts(128, 8, 1408, RouterKind.SIGMOID_TOP_K, normalize=True, factor=2.5, shared=2816)
    assert (model.attention.rope.rotary_dim, model.attention.qk_norm, model.mlp_size) == (64, None, 10944)
    assert not any(describe_config(GLM | {"first_k_dense_replace": 46}).expert_layers)
    experts = describe_config(GLM | {"n_group": 8, "topk_group": 4}).experts
    assert (experts.groups, experts.kept_groups) == (8, 4)
    model = describe_config(QWEN2_MOE)
    assert model.experts == Experts(60, 4, 1408, shared=5632, shared_gated=True)
    assert model.attention.qkv_bias and not describe_config(QWEN2_MOE | {"qkv_bias": False}).attention.qkv_bias
    rope = describe_config(PHI4_MINI).attention.rope
    assert (rope.kind, rope.rotary_dim, rope.original_max_position, rope.factor) == ("longrope", 96, 4096, 32.0)
    assert abs(rope.attention_factor - 1.1902380714238083) < 1e-9


def test_the_text_of_a_nested_config(caplog: pytest.LogCaptureFixture) -> None:
    """It is that of the model, except for names; the text around it counts."""
    plain, nested = describe_config(MISTRAL_7B), describe_config(MISTRAL_3)
    assert replace(nested, name=plain.name, tensors=plain.tensors) == plain
    assert (nested.dtype, nested.tied_embeddings) == ("bfloat16", False)
    assert describe_config(MISTRAL_3 | {"tie_word_embeddings": True}).tied_embeddings
    assert caplog.messages == []
    key = f"unheard_of_{secrets.token_hex(4)}"
    describe_config(MISTRAL_3 | {"text_config": MISTRAL_7B | {key: 1}})
    assert caplog.messages == [f"config.json: text_config: ignoring keys that are unknown for {nested.name}: {key}"]


LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 8}


def test_fields_of_llama4() -> None:
    model = describe_config(LLAMA4)
    rotated, other = model.layers[0].attention, model.layers[3].attention
    assert [layer.attention.window for layer in model.layers] == [8192, 8192, 8192, 0] * 2 and rotated.chunked
    assert [layer.attention.rope.neighbours for layer in model.layers] == [True, True, True, False] * 2
    assert (rotated.qk_norm, rotated.rope.query_period) == (QkNorm.ROTATED_HEAD, 0)
    assert (other.rope.kind, other.rope.query_growth, other.rope.query_period) == ("none", 0.1, 8192)
    experts = Experts(16, 1, 8192, RouterKind.TOP_K_SIGMOID, shared=8192, scales_inputs=True)
    assert all(model.expert_layers) and model.experts == experts
    assert describe_config(LLAMA4 | {"attn_temperature_tuning": 4, "no_rope_layers": []}) == model
    quiet = describe_config(LLAMA4 | {"attn_temperature_tuning": False}).layers[3].attention.rope
    assert quiet == rotated.rope.unrotated() and quiet.query_factors(9) is None
    model = describe_config(LLAMA4 | {"moe_layers": [5], "attention_chunk_size": None})
    assert model.expert_layers == (False,) * 5 + (True, False, False) and model.layers[0].mlp == Mlp(16384)
    assert {layer.attention.window for layer in model.layers} == {0} and not model.attention.chunked
    assert describe_config(LLAMA4 | {"interleave_moe_layer_step": 2}).expert_layers == (False, True) * 4
    bare = {"moe_layers": [], "attention_chunk_size": None, "use_qk_norm": False, "no_rope_layers": [0] * 8}
    assert lacking_without_torch(describe_config(LLAMA4 | bare)) == ["Rope.query_growth", "Rope.query_period"]
    factors = other.rope.query_factors(16_384)
    assert factors is not None and factors[[0, 8190, 8191, 16_382]].tolist() == [1, 1] + [np.float32(1 + 0.1 * np.log(2))] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_layers": [8]}, r"moe_layers must be a list of layers below 8, not \[8\]"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types must be a list of 8 entries, each chunked_attention or"),
        ({"no_rope_layers": [1]}, "no_rope_layers must be a list of 8"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning must be true or false"),
        ({"num_local_experts": 0}, "num_local_experts must be above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn is not supported for Llama4ForCausalLM"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "quant_method 'fbgemm_fp8' is not supported"),
    ],
)
def test_refused_llama4(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe_config(LLAMA4 | changes)


def test_a_scheme_within_the_text_of_llama4_is_not_overlooked() -> None:
    scheme = {"quantization_config": {"quant_method": "fp8"}}
    nested = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"num_hidden_layers": 4}}
    inner = describe_config(nested | {"text_config": {"num_hidden_layers": 4, **scheme}})
    assert inner.quantization is not None and inner == describe_config(nested | scheme)
    with pytest.raises(ConfigError, match="text_config: quantization_config: quant_method 'other' is not supported"):
        describe_config(nested | {"text_config": {"num_hidden_layers": 4, "quantization_config": {"quant_method": "other"}}})


def test_llama3_scaling_without_a_blend() -> None:
    """Scout has one limit for slow and for fast waves: each is slowed down as a whole, or not at all."""
    rope = Rope("llama3", 5e5, 128, factor=16.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=1.0)
    plain = replace(rope, kind="default").inverse_frequencies(8192)
    slow = 2 * np.pi / plain > 8192
    assert slow.any() and not slow.all()
    assert np.array_equal(rope.inverse_frequencies(8192), np.where(slow, plain / 16, plain))


def test_queries_of_ministral3_grow_behind_the_original_context() -> None:
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, GROWTH: 0.1, "rope_theta": 1e6}
    text = {"model_type": "ministral3", "max_position_embeddings": 262144, "rope_parameters": rope}
    model = describe_config(MISTRAL_3 | {"text_config": MISTRAL_7B | text})
    rotation = model.attention.rope
    assert (model.max_position, rotation.query_growth, rotation.query_period, rotation.query_start) == (262144, 0.1, 16384, 0)
    factors = rotation.query_factors(40_000)
    assert factors is not None
    expected = 1 + 0.1 * np.log(1 + np.arange(40_000) // 16384)  # transformers' get_llama_4_attn_scale
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    both = text | {"rope_scaling": rope, "rope_parameters": {"rope_type": "default"}}  # the first of these counts
    assert describe_config(MISTRAL_3 | {"text_config": MISTRAL_7B | both}).attention.rope.query_period == 16384
    rope = {key: value for key, value in rope.items() if key != GROWTH}
    model = describe_config(MISTRAL_3 | {"text_config": MISTRAL_7B | text | {"rope_parameters": rope}})
    assert (model.max_position, model.attention.rope.query_period) == (262144, 0)


def test_fields_of_gemma_and_olmo() -> None:
    model = describe_config(GEMMA2_27B)
    assert (model.attention.score_scale, model.attention.softcap, model.attention.qk_norm) == (1 / 12, 50.0, None)
    assert model.factors == Factors(embedding=4608**0.5, rounded=True, softcap=30.0)
    assert (model.placement, model.norm) == (NormPlacement.SANDWICH, Norm(1e-6, offset=1.0))
    assert model.layers[0].mlp == Mlp(36864, Activation.GELU_TANH)
    assert windows(GEMMA2_27B) == (4096, 0) * 23
    uncapped = describe_config(GEMMA2_9B | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attention.softcap, uncapped.factors.softcap) == (0, 0)

    model = describe_config(GEMMA3_1B)
    assert model.attention.qk_norm == QkNorm.HEAD
    assert windows(GEMMA3_1B) == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert [rope.theta for rope in ropes(model)] == ([1e4] * 5 + [1e6]) * 4 + [1e4] * 2
    assert describe_config({k: v for k, v in GEMMA3_1B.items() if k != "sliding_window_pattern"}) == model
    assert windows(GEMMA3_1B | {"sliding_window_pattern": 2}) == (512, 0) * 13
    longer = describe_config(GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [(rope.kind, rope.factor) for rope in ropes(longer)[4:6]] == [("default", 1), ("linear", 8)]
    assert longer.default_context == 32768  # the factor is in it
    untied = GEMMA3_4B | {"text_config": GEMMA3_4B_TEXT | {"tie_word_embeddings": False}}
    assert describe_config(untied).tied_embeddings
    assert not describe_config(untied | {"tie_word_embeddings": False}).tied_embeddings
    model = describe_config(GEMMA3_4B)
    assert (model.heads, model.kv_heads, model.head_dim, model.vocab_size, model.dtype) == (8, 4, 256, 262208, "bfloat16")
    assert (model.tied_embeddings, model.default_context) == (True, 131072)

    model = describe_config(OLMO2_7B)
    assert (model.placement, model.attention.qk_norm) == (NormPlacement.POST, QkNorm.WIDTH)
    model = describe_config(OLMO3_7B)
    assert windows(OLMO3_7B) == (4096, 4096, 4096, 0) * 8
    assert describe_config({k: v for k, v in OLMO3_7B.items() if k != "layer_types"}) == model
    assert [rope.kind for rope in ropes(model)] == ["default", "default", "default", "yarn"] * 8
    assert {rope.theta for rope in ropes(model)} == {5e5}
    assert model.default_context == 65536


def ropes(model: DecoderDescription) -> list[Rope]:
    return [layer.attention.rope for layer in model.layers]


def windows(config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(layer.attention.window for layer in describe_config(config).layers)


def test_a_stated_factor_multiplies_the_context() -> None:
    """As on Qwen's and Vicuna's pages; if config.json states the product already, it stays."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for config, changes, context in (
        (QWEN25_7B, {"rope_scaling": yarn}, 131072),
        (QWEN3_8B, {"rope_scaling": yarn}, 131072),
        (QWEN25_7B, {"rope_scaling": yarn, "max_position_embeddings": 131072}, 131072),
        (QWEN25_7B, {"rope_scaling": {"type": "yarn", "factor": 2.5}}, 81920),
        (LLAMA_31_8B, {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (LLAMA_31_8B, {}, 131072),
        (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "factor": 1e30}}, 1 << 31),
    ):
        model = describe_config(config | changes)
        assert model.max_position == model.default_context == context


def test_longrope_keeps_to_its_short_factors_unless_more_is_asked_for() -> None:
    model = describe_config(PHI4_MINI)
    assert (model.max_position, model.default_context) == (131072, 4096)


def test_a_context_before_scaling_that_is_left_out() -> None:
    """Phi-3's has a separate default, by each name of its scaling; other families scale their stated value."""
    transformers = pytest.importorskip("transformers")
    before = transformers.Phi3Config().original_max_position_embeddings
    known = describe_config(PHI4_MINI | {"original_max_position_embeddings": before})
    for name in ("longrope", "su", "yarn"):
        changes = {"original_max_position_embeddings": None, "rope_scaling": {**LONGROPE, "type": name}}
        model = describe_config(PHI4_MINI | changes)
        assert model == known and model.default_context == before
    stated = QWEN3_8B["max_position_embeddings"]
    rope = describe_config(QWEN3_8B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}).attention.rope
    assert rope.original_max_position == stated


def test_a_factor_of_yarn_beside_its_magnitude() -> None:
    """DeepSeek-R1-0528-Qwen3-8B: it takes the magnitude back."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419}
    assert describe_config(QWEN3_8B | {"rope_scaling": yarn}).attention.rope.attention_factor == pytest.approx(1)
    yarn["attention_factor"] = 1.5
    assert describe_config(QWEN3_8B | {"rope_scaling": yarn}).attention.rope.attention_factor == 1.5


def test_dynamic_scaling_begins_beyond_the_context_and_inert_parameters_change_nothing() -> None:
    for scaling in ({"type": "dynamic", "factor": 2.0}, {"type": "dynamic", "factor": 4.0, "finetuned": True}):
        assert describe_config(QWEN25_7B | {"rope_scaling": scaling}) == describe_config(QWEN25_7B)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert describe_config(QWEN25_7B | {"rope_scaling": yarn | {"finetuned": False}}) == describe_config(
        QWEN25_7B | {"rope_scaling": yarn}
    )


def test_layers_of_nemotron_by_a_pattern_and_by_a_list() -> None:
    model = describe_config(NEMOTRON)
    listed = {key: value for key, value in NEMOTRON.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    types = ["mamba", "mlp", "mamba", "linear_attention", "attention", "moe"]
    assert describe_config(listed | {"layers_block_type": types}) == model
    blocks = [(layer.recurrence is not None, type(layer.mlp)) for layer in model.layers]
    assert blocks == [(True, Mlp), (True, type(None)), (True, type(None)), (False, Experts)]
    assert [(model.prefix_of(i), model.mlp_prefix_of(i)) for i in (0, 3)] == [
        ("model.layers.0.", "model.layers.1."), ("model.layers.4.", "model.layers.5."),
    ]  # fmt: skip
    assert not model.gated and model.layers[0].mlp == Mlp(96, Activation.SQUARED_RELU)


def test_bamba_has_attention_where_its_config_lists_layers() -> None:
    model = describe_config(BAMBA)
    assert [layer.recurrence is None for layer in model.layers] == [False, True, False, True]
    assert model.attention.rope.rotary_dim == 8 == model.head_dim // 2
    assert describe_config(BAMBA | {"attn_rotary_emb": 8, "partial_rotary_factor": 0.5}) == model
    assert describe_config(BAMBA | {"attn_layer_indices": None}).recurrent_layers == 4


def test_layers_of_falcon_h1_have_pages_and_states() -> None:
    model = describe_config(FALCON_H1)
    assert (model.recurrent_layers, model.kv_elements) == (2, 2 * 2 * 2 * 16)
    assert describe_config(FALCON_H1 | {"mamba_norm_before_gate": False}) == model
    assert describe_config(FALCON_H1 | {"mamba_d_ssm": None}) == model


def test_mistral_has_windows_where_its_layers_say_so() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    assert windows(MISTRAL_7B | {"layer_types": types}) == (0, 4096) * 16


def test_both_spellings_give_the_same() -> None:
    """rope_theta, rope_scaling, torch_dtype; or rope_parameters, dtype as transformers 5 writes them."""

    def modern(config: dict[str, Any]) -> dict[str, Any]:
        config = dict(config)
        scaling = dict(config.pop("rope_scaling", None) or {})
        parameters = {"rope_theta": config.pop("rope_theta"), "rope_type": scaling.pop("type", "default"), **scaling}
        if "partial_rotary_factor" in config:
            parameters["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        return config | {"rope_parameters": parameters, "dtype": config.pop("torch_dtype")}

    for config in (LLAMA_31_8B, MISTRAL_7B, QWEN3_30B_A3B, PHI3_MINI, PHI4_MINI):
        assert "rope_theta" not in modern(config)
        assert describe_config(modern(config)) == describe_config(config)
    for config in (GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, OLMO3_7B):  # a section for each type
        kept = {k: v for k, v in config.items() if not k.startswith("rope_")}
        local = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", config["rope_theta"])}
        full = {"rope_theta": config["rope_theta"], **config["rope_scaling"]}
        sections = {"full_attention": full, "sliding_attention": local}
        assert describe_config(kept | {"rope_parameters": sections}) == describe_config(config)
    for old in ("su", "yarn"):
        assert describe_config(PHI4_MINI | {"rope_scaling": LONGROPE | {"type": old}}) == describe_config(PHI4_MINI)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (
            LLAMA_31_8B,
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported: it needs LayerNorm, learned positions",
        ),
        (LLAMA_31_8B, {"architectures": []}, "architectures"),
        (LLAMA_31_8B, {"architectures": None, "model_type": "mamba"}, "mamba"),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA_31_8B, {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported for Llama"),
        (LLAMA_31_8B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA_31_8B, {"sliding_window": 4096}, "sliding_window is not supported for LlamaForCausalLM"),
        (LLAMA_31_8B, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA_31_8B, {"layer_types": ["sliding_attention"] * 32}, "sliding_attention, but sliding_window is not set"),
        (LLAMA_31_8B, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_31_8B, {"hidden_size": "4096"}, "hidden_size must be an integer"),
        (LLAMA_31_8B, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA_31_8B, {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA_31_8B, {"num_key_value_heads": 5}, "num_key_value_heads"),
        (
            LLAMA_31_8B,
            {"hidden_size": 4095},
            r"without head_dim, hidden_size \(4095\) must be a multiple of num_attention_heads \(32\)",
        ),
        (LLAMA_31_8B, {"head_dim": 127}, "even"),
        (LLAMA_31_8B, {"vocab_size": 1 << 25}, "vocab_size"),
        (LLAMA_31_8B, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA_31_8B, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA_31_8B, {"attention_bias": "yes"}, "attention_bias"),
        (LLAMA_31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_31_8B, {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'.*longrope"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "factor is missing"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "factor": float("nan")}}, "factor"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 0.9}}, "high_freq_factor"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "mrope_section": [16, 24, 24]}}, "mrope_section"),
        (LLAMA_31_8B, {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA_31_8B, {"rope_theta": 10**400}, "rope_theta must be a number above 0, not 1000"),
        (LLAMA_31_8B, {"quantization_config": {"quant_method": ["fp8"]}}, "quant_method .* is not supported"),
        (QWEN25_7B, {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta must be above 1 with yarn"),
        (PHI4_MINI, {"original_max_position_embeddings": 10**400}, "original_max_position_embeddings must be an integer"),
        (LLAMA_31_8B, {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (PHI4_MINI, {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 47}}, "short_factor must have 48"),
        (PHI4_MINI, {"rope_scaling": {**LONGROPE, "long_factor": None}}, "long_factor"),
        (MIXTRAL_8X7B, {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 9}, "layer_types"),
        (MISTRAL_7B, {"attention_bias": True}, "attention_bias"),
        (QWEN25_7B, {"layer_types": ["linear_attention"] * 28}, "linear_attention"),
        (QWEN25_7B, {"mlp_bias": True}, "mlp_bias"),
        (QWEN3_30B_A3B, {"qkv_bias": True}, "qkv_bias is not supported for Qwen3MoeForCausalLM"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MIXTRAL_8X7B, {"attention_bias": True}, "attention_bias is not supported for MixtralForCausalLM"),
        (SMOLLM3_3B, {"no_rope_layers": [1] * 35}, "no_rope_layers must be a list of 36 zeros and ones"),
        (SMOLLM3_3B, {"no_rope_layers": [2] * 36}, "no_rope_layers"),
        (GRANITE_31_8B, {"residual_multiplier": 0}, "residual_multiplier"),
        (LLAMA_31_8B, {"residual_multiplier": 0.5}, "residual_multiplier is not supported for LlamaForCausalLM"),
        (NEMOTRON, {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern must be a text of M \\* - E, not 'M-X'"),
        (
            NEMOTRON,
            {"layers_block_type": ["mamba", "gru"]},
            "each of attention, mamba, full_attention, linear_attention, mlp, moe",
        ),
        (NEMOTRON, {"hybrid_override_pattern": "-M*E"}, "layer 0 is mlp; it must follow a layer of"),
        (NEMOTRON, {"hybrid_override_pattern": "M*-E"}, "layer 3 is moe; it must follow a layer of"),
        (NEMOTRON, {"hybrid_override_pattern": "M-ME"}, "needs at least one layer of full_attention"),
        (NEMOTRON, {"num_hidden_layers": 5}, r"num_hidden_layers \(5\) must be the number of kinds of layers \(6\)"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        (
            NEMOTRON,
            {"moe_latent_size": 1024},
            r"moe_latent_size 1024 is not supported for NemotronHForCausalLM \(supported: None\)",
        ),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        (NEMOTRON, {"mamba_proj_bias": True}, "mamba_proj_bias True is not supported"),
        (NEMOTRON, {"mlp_bias": True}, "mlp_bias is not supported for NemotronHForCausalLM with experts"),
        (NEMOTRON, {"attention_bias": True}, "attention_bias is not supported"),
        (NEMOTRON, {"sliding_window": 4096}, "sliding_window is not supported"),
        (NEMOTRON, {"n_groups": 3}, r"mamba_num_heads \(8\) must be a multiple of n_groups \(3\)"),
        (NEMOTRON, {"time_step_limit": [0.1, 1]}, r"time_step_limit \[0.1, 1\] is not supported"),
        (NEMOTRON, {"head_dim": 17}, "head_dim must be even, not 17"),
        (NEMOTRON, {"attention_head_dim": 64}, r"attention_head_dim \(64\) must be head_dim \(16\)"),
        (BAMBA, {"attn_layer_indices": [1, 4]}, r"attn_layer_indices must be a list of layers below 4, not \[1, 4\]"),
        (BAMBA, {"attn_layer_indices": 1}, "attn_layer_indices must be a list of layers below 4, not 1"),
        (BAMBA, {"partial_rotary_factor": 1.0}, r"partial_rotary_factor 1.0 is not supported \(supported: 0.5\)"),
        (BAMBA, {"attn_rotary_emb": 16}, r"attn_rotary_emb \(16\) must be the rotated part of a head \(8\)"),
        (BAMBA, {"mamba_n_groups": 3}, r"mamba_n_heads \(8\) must be a multiple of mamba_n_groups \(3\)"),
        (BAMBA, {"time_step_limit": [0.1, 1]}, r"time_step_limit \[0.1, 1\] is not supported"),
        (FALCON_H1, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 numbers above 0"),
        (FALCON_H1, {"mlp_multipliers": [1.0, 0]}, r"mlp_multipliers must be a list of 2 numbers above 0, not \[1.0, 0\]"),
        (FALCON_H1, {"key_multiplier": -1.0}, "key_multiplier must be a number above 0"),
        (FALCON_H1, {"mamba_rms_norm": True}, "mamba_norm_before_gate true is not supported with mamba_rms_norm"),
        (FALCON_H1, {"mamba_d_head": 8}, r"mamba_d_head \(8\) must be mamba_d_ssm \(128\)"),
        (
            FALCON_H1,
            {"mamba_d_ssm": None, "mamba_d_head": 8},
            r"mamba_d_head \(8\) must be mamba_expand times hidden_size \(128\)",
        ),
        (GRANITE4, {"layer_types": ["mamba", "gru"] * 4}, "each of attention, full_attention, mamba, linear_attention"),
        (GRANITE4, {"layer_types": ["mamba"] * 8, "mamba_n_groups": 3}, "must be a multiple of mamba_n_groups"),
        (GRANITE4, {"layer_types": ["mamba"] * 8, "mamba_d_head": 3}, "must be mamba_expand times hidden_size"),
        (GRANITE4, {"layer_types": ["mamba"] * 8, "time_step_limit": [0.1, 1]}, r"time_step_limit \[0.1, 1\] is not supported"),
        (GRANITE4, {"position_embedding_type": "alibi"}, "alibi"),
        (QWEN2_MOE, {"use_sliding_window": True}, "use_sliding_window is not supported for Qwen2MoeForCausalLM"),
        (QWEN2_MOE, {"num_experts_per_tok": 61}, "num_experts_per_tok"),
        (QWEN2_MOE, {"mlp_only_layers": [24]}, "mlp_only_layers"),
        (GLM, {"n_group": 3}, "n_group 3 .* do not fit 128 experts"),
        (GLM, {"topk_group": 5, "n_group": 4}, "do not fit"),
        (GLM, {"n_group": 128, "topk_group": 64}, "do not fit"),
        (GLM, {"n_group": 64, "topk_group": 3}, "topk_group 3 do not fit 128 experts with 8 per token"),
        (GLM, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        (GLM, {"mlp_bias": True}, "mlp_bias is not supported for Glm4MoeForCausalLM"),
        (MISTRAL_3, {"text_config": None}, "text_config must be an object"),
        (MISTRAL_3, {"text_config": {**MISTRAL_7B, "model_type": "mistral9"}}, "model_type 'mistral9' is not supported"),
        (MISTRAL_3, {"text_config": {**MISTRAL_7B, "model_type": ["mistral"]}}, r"model_type \['mistral'\] is not supported"),
        (MISTRAL_3, {"text_config": {**MISTRAL_7B, "attention_bias": True}}, "text_config: attention_bias is not supported"),
        (MISTRAL_3, {"text_config": {**MISTRAL_7B, "hidden_size": None}}, "text_config: hidden_size is missing"),
        (MISTRAL_3, {"quantization_config": {"quant_method": "quanto"}}, "quant_method 'quanto' is not supported"),
        (MISTRAL_3, {"text_config": {**MISTRAL_7B, "rope_scaling": {"type": "linear", "factor": 2.0, GROWTH: 1}}}, GROWTH),
        (MISTRAL_7B, {"rope_scaling": {"type": "yarn", "factor": 2.0, GROWTH: 0.1}}, f"{GROWTH} not supported"),
        (GEMMA2_9B, {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        (GEMMA2_9B, {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number above 0"),
        (GEMMA2_9B, {"sliding_window": None}, "sliding_window is not set"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported for Gemma3ForCausalLM"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3_1B, {"layer_types": ["full_attention"] * 25}, "layer_types must be a list of 26"),
        (OLMO3_7B, {"rope_scaling": {"full_attention": OLMO3_YARN, "other": {}}}, "one section for each of full_attention"),
        (OLMO3_7B, {"rope_scaling": {"full_attention": OLMO3_YARN, "sliding_attention": 3}}, "must be an object"),
        (OLMO3_7B, {"rope_scaling": {"full_attention": OLMO3_YARN | {"factor": 0}}}, "full_attention: factor"),
        (OLMO2_7B, {"clip_qkv": 8.0}, "clip_qkv"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8' is not supported for GptOss"),
        (GPT_OSS_20B, {"quantization_config": ["mxfp4"]}, "quantization_config"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp4", "group_size": 64}}, "group_size not supported"),
        (GPT_OSS_20B, {"hidden_size": 2864}, "multiples of 32"),
        (GPT_OSS_20B, {"swiglu_limit": 0}, "swiglu_limit"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe_config(config | changes)


# Keys that published models and other software add, and that do not change the computation.
ADDED: dict[str, Any] = {
    **dict.fromkeys(["mlp_bias", "attention_bias", "lm_head_bias", "use_mrope", "rope_interleaved"], False),
    "_name_or_path": "somewhere",
    "attention_dropout": 0.0,
    "auto_map": {},
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "transformers_version": "4.46.0",
    "use_cache": True,
    "vision_config": None,
    "unsloth_version": "2025.1",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_without_an_effect_load_in_silence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = PUBLISHED[name]
    assert describe_config(ADDED | config) == describe_config(config)
    assert caplog.messages == []


NAMES = ["Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Mixtral", "SmolLM3", "Granite"]
NAMES += ["Qwen2Moe", "Glm4Moe", "Ministral3", "Gemma2", "Gemma3", "Olmo2", "Olmo3", "GptOss"]


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """All configurations that transformers writes load silently, and missing keys have transformers' defaults."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    given = {"head_dim": 128} if name == "Glm4Moe" else {}  # its own default is not a whole number
    written = json.loads(kind(**given).to_json_string(use_diff=False))
    written["architectures"] = [f"{name}ForCausalLM"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    model = describe_config({key: written[key] for key in (*sizes, "architectures")} | given)
    assert describe_config(written) == model
    assert len(model.layers) == written["num_hidden_layers"]
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["SmolLM3", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo3", "GptOss"])
def test_layer_types_that_are_left_out_are_those_that_transformers_writes(name: str, rng: np.random.Generator) -> None:
    """With windows, of models of any depth."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    for _ in range(5):
        layers = int(rng.integers(2, 12))
        given: dict[str, Any] = {"num_hidden_layers": layers, "sliding_window": 18}
        if name in ("SmolLM3", "Qwen2", "Qwen3"):
            given |= {"use_sliding_window": True, "max_window_layers": int(rng.integers(layers + 1))}
        if name == "SmolLM3":
            given |= {"no_rope_layer_interval": int(rng.integers(2, 5))}
        written = json.loads(kind(**given).to_json_string(use_diff=False)) | {"architectures": [f"{name}ForCausalLM"]}
        types = written.pop("layer_types")
        model = describe_config(written)
        assert [layer.attention.window for layer in model.layers] == [18 if one == "sliding_attention" else 0 for one in types]


def test_unknown_keys_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    keys = [f"unheard_of_{secrets.token_hex(4)}" for _ in range(2)]
    for _ in range(2):
        describe_config(LLAMA_31_8B | dict.fromkeys(keys, 1))
    assert caplog.messages == [f"config.json: ignoring keys that are unknown for LlamaForCausalLM: {', '.join(sorted(keys))}"]


def test_every_kind_of_block_has_both_implementations_or_is_refused() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from blinkpy.models.cpu import numpy_decoder, torch_decoder
    from blinkpy.models.gpu import gpu_decoder

    assert torch_decoder.BLOCKS.keys() == gpu_decoder.BLOCKS.keys() | set(LayerPart), "no kernels compute the parts of Gemma 4"
    assert numpy_decoder.BLOCKS.keys() <= torch_decoder.BLOCKS.keys(), "what it leaves out is torch's"
    for config, block in (
        (LLAMA_31_8B, NormPlacement.PRE),
        (GEMMA2_9B, Activation.GELU_TANH),
        (GEMMA3_1B, QkNorm.HEAD),
        (OLMO2_7B, QkNorm.WIDTH),
        (MIXTRAL_8X7B, RouterKind.TOP_K_SOFTMAX),
    ):
        model = describe_config(config)
        model.require_blocks(torch_decoder.BLOCKS, "it")
        with pytest.raises(ConfigError, match=f"{model.name} needs {block}, which it does not support"):
            model.require_blocks(torch_decoder.BLOCKS.keys() - {block}, "it")


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        (LLAMA_31_8B, ""),
        (QWEN3_8B, ""),
        (QWEN3_30B_A3B, ""),
        (MIXTRAL_8X7B, ""),
        (GRANITE_31_8B, ""),
        (MISTRAL_3, ""),
        (GEMMA2_9B, "Activation.GELU_TANH, NormPlacement.SANDWICH"),
        (OLMO2_7B, "NormPlacement.POST, QkNorm.WIDTH"),
        (QWEN2_MOE, "Experts.shared, Experts.shared_gated, weights shared_down, weights shared_gate, weights shared_gate_up"),
        (GLM, "RouterKind.SIGMOID_TOP_K"),
        (GPT_OSS_20B, "Activation.CLAMPED_SWISH"),
    ],
)
def test_what_needs_torch_on_the_cpu(config: dict[str, Any], lacking: str) -> None:
    assert ", ".join(lacking_without_torch(describe_config(config))) == lacking


def test_without_torch_each_field_beyond_its_blocks_is_refused() -> None:
    """NumPy's decoder refuses gpt-oss for more than its activation, and Gemma for more than gelu."""
    model = describe_config(GPT_OSS_20B)
    plain = [
        Layer(layer.attention, layer.mlp._replace(activation=Activation.SILU, clamp=None))
        for layer in model.layers
        if isinstance(layer.mlp, Experts)
    ]
    expected = {"Attention.sinks", "Experts.bias", "Experts.mxfp4", "Part.interleaved", "Part.packed"}
    expected |= {f"weights {name}" for name in ("down_scales", "gate_up_scales", "router_bias", "sinks")}
    assert set(lacking_without_torch(replace(model, layers=tuple(plain)))) == expected
    plain = [Layer(layer.attention, Mlp(64)) for layer in describe_config(GEMMA2_9B).layers]
    model = replace(describe_config(GEMMA2_9B), layers=tuple(plain), placement=NormPlacement.PRE)
    expected = {"Attention.softcap", "Factors.rounded", "Factors.softcap", "Norm.offset", "Part.offset", "Part.wide"}
    assert set(lacking_without_torch(model)) == expected


def test_sinks_beside_a_softcap_are_refused() -> None:
    model = describe_config(GPT_OSS_20B)
    layers = tuple(Layer(layer.attention._replace(softcap=30.0), layer.mlp) for layer in model.layers)
    with pytest.raises(ConfigError, match="attention sinks together with a softcap"):
        replace(model, layers=layers)


def test_norms_behind_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="norms after experts"):
        replace(describe_config(MIXTRAL_8X7B), placement=NormPlacement.POST)
    with pytest.raises(ConfigError, match="experts parallel to attention are not supported"):
        replace(describe_config(MIXTRAL_8X7B), placement=NormPlacement.PARALLEL)


def test_layer_norm_is_refused_beside_blocks_that_have_no_such_kernel() -> None:
    for config in (MIXTRAL_8X7B, QWEN3_8B, OLMO2_7B):
        with pytest.raises(ConfigError, match="LayerNorm is supported only with an MLP and attention without norms of heads"):
            replace(describe_config(config), norm=Norm(1e-5, centred=True))


COHERE2 = {"architectures": ["Cohere2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
COHERE2 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 256000, "rope_theta": 50000}


def test_cohere2_rotates_heads_only_in_layers_with_a_window() -> None:
    model = describe_config(COHERE2)
    assert (model.placement, model.norm) == (NormPlacement.PARALLEL, Norm(1e-5, centred=True))
    attention = [layer.attention for layer in model.layers]
    assert [some.window for some in attention] == [4096, 4096, 4096, 0] * 8
    assert [some.rope.neighbours for some in attention] == [some.rope.kind == "default" for some in attention]
    assert [some.rope.kind for some in attention] == ["default", "default", "default", "none"] * 8
    assert (model.factors.logits, model.tied_embeddings, model.max_position) == (0.0625, True, 8192)


@pytest.mark.parametrize(
    "change",
    [
        {"use_parallel_block": False},
        {"use_gated_activation": False},
        {"position_embedding_type": "rope"},
        {"order_of_interleaved_layers": "global_attn_first"},
        {"rotary_pct": 0.5},
    ],
)
def test_other_forms_of_cohere_are_refused(change: dict[str, Any]) -> None:
    (key,) = change
    for name in ("CohereForCausalLM", "Cohere2ForCausalLM"):
        with pytest.raises(ConfigError, match=f"config.json: {key} .* is not supported for {name}"):
            describe_config(COHERE2 | {"architectures": [name]} | change)


def test_gpt_oss_has_a_window_in_every_second_layer_and_its_clamp() -> None:
    for layer_types in (GPT_OSS_20B["layer_types"], None):
        model = describe_config(GPT_OSS_20B | {"layer_types": layer_types, "swiglu_alpha": 1.5})
        assert [layer.attention.window for layer in model.layers] == [128, 0] * 12
    assert model.experts.clamp == (1.5, 7.0)
    assert (model.dtype, model.max_position, model.attention.sinks) == ("bfloat16", 131072, True)
    assert describe_config(GPT_OSS_20B | {"sliding_window": None, "layer_types": None}).layers[0].attention.window == 0


def test_layers_that_differ_by_more_than_the_window_are_refused() -> None:
    plain = describe_config(LLAMA_31_8B)
    for other in (
        Layer(plain.attention._replace(heads=8), plain.layers[0].mlp),
        Layer(plain.attention, Mlp(99, Activation.GELU_TANH)),
        Layer(plain.attention._replace(value_norm=True), plain.layers[0].mlp),
    ):
        with pytest.raises(ConfigError, match="layers may differ only in window, rope and head sizes"):
            replace(plain, layers=(plain.layers[0], other))
    replace(plain, layers=(plain.layers[0], Layer(plain.attention._replace(window=7), Experts(8, 2, 16))))


NO_EMBEDDINGS = {"hidden_size_per_layer_input": 0}  # of layers, which Gemma 4 has by default


def test_model_type_stands_in_for_a_missing_class() -> None:
    mistral = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    mistral |= {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    for name, family in families().items():
        base = GRANITE4 if family.model_type == "granitemoehybrid" else QWEN3_30B_A3B | {"text_config": mistral}
        base = base | {"text_config": {"model_type": "gemma4_text", **NO_EMBEDDINGS}} if family.model_type == "gemma4" else base
        base = base | {"layer_types": ["conv"] * 48} if family.model_type == "lfm2_moe" else base
        base = base | {"num_hidden_layers": 4} if family.model_type == "nemotron_h" else base
        config = {k: v for k, v in base.items() if k != "architectures" and v is not None} | {"model_type": family.model_type}
        config |= {"norm_topk_prob": family.model_type != "deepseek_v2", **NO_EMBEDDINGS}
        assert describe_config(config).name == name


def test_the_page_has_each_family_and_the_zoo_a_model_of_each() -> None:
    """The classes on the page are compared with transformers."""
    pytest.importorskip("transformers")
    import transformers
    from support.models.model_zoo import ZOO

    only_names = {"InternVLChatModel", "Glm46VForConditionalGeneration"}  # other names of models that the zoo has
    only_names.add("KimiK25ForConditionalGeneration")  # in test_latent_models.py

    table = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(name for name in listed if name in families()) == sorted(families())
    by_type = {one.model_type: name for name, one in families().items()}
    zoo = {by_type[getattr(transformers, kind).model_type] for kind, _ in ZOO.values()}
    assert zoo | only_names == set(families())


def test_a_refused_class_says_what_is_missing() -> None:
    """And which class serves its text part."""
    with pytest.raises(ConfigError, match="Zamba2ForCausalLM is not supported: it needs state spaces"):
        describe_config({"architectures": ["Zamba2ForCausalLM"]})
    nested = {"architectures": ["SomeImagesForConditionalGeneration"], "text_config": {"model_type": "qwen3"}}
    with pytest.raises(ConfigError, match="its text part is a Qwen3ForCausalLM, which is supported: save that part"):
        describe_config(nested)
    with pytest.raises(ConfigError, match=r"docs/models\.md lists the supported classes"):
        describe_config({"architectures": ["UnheardOf"]})


def test_parameters_next_to_sections_of_a_rope_have_no_effect() -> None:
    """As transformers 5 saves OLMo 3."""
    sections = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    kept = {key: value for key, value in OLMO3_7B.items() if not key.startswith("rope_")}
    both = {**OLMO3_YARN, "rope_theta": 123.0, **sections}
    assert describe_config(kept | {"rope_parameters": both}) == describe_config(kept | {"rope_parameters": sections})


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*config\.json"):
        describe_model(tmp_path)
    for content, words in (
        ("{", "not JSON"),
        ("[" * 100_000, "nests more than"),
        ("[]", "object"),
        ('{"architectures": ["X"]}', f"{tmp_path}.*X is not supported"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=words):
            describe_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    assert len(describe_model(tmp_path).layers) == 32


def test_rotations_are_those_of_transformers(rng: np.random.Generator) -> None:
    """Of random sections of each kind: bases and contexts put the ends of a ramp within the pairs, at their end and beyond."""
    for _ in range(60):
        kind = str(rng.choice(["linear", "llama3", "yarn", "longrope"]))
        head_dim, original = int(rng.choice([16, 64, 128])), int(2 ** rng.integers(6, 21))
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": float(rng.choice([10.0, 100.0, 1e4, 1e6]))}
        rope |= {"factor": float(rng.choice([1.0, 2.0, 40.0])), "original_max_position_embeddings": original}
        if kind == "llama3":
            rope |= {"low_freq_factor": float(rng.choice([0.5, 1, 2])), "high_freq_factor": float(rng.choice([2.5, 4, 32]))}
        elif kind == "longrope":
            stretches = rng.uniform(0.5, 50, (2, head_dim // 2)).tolist()
            rope |= {"short_factor": stretches[0], "long_factor": stretches[1]}
        elif kind == "yarn":
            given = {"beta_fast": 20.0, "beta_slow": 0.1, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
            rope |= {name: value for name, value in given.items() if rng.random() < 0.4}
        sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
        most = int(original * rope["factor"])
        theirs = LlamaConfig(**sizes, max_position_embeddings=most, rope_parameters=rope)
        ours = describe_config({**LLAMA_31_8B, **sizes, "max_position_embeddings": most, "rope_scaling": rope}).attention.rope
        length = int(rng.choice([original, original + 1]))
        wanted, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
        np.testing.assert_allclose(ours.inverse_frequencies(length), wanted.numpy(), rtol=2e-5, err_msg=str(rope))
        assert ours.attention_factor == pytest.approx(scale), rope
