"""The relevant keys of published models' config.json, and the numbers of parameters.

The parameters are those of the text model that transformers creates from the config. A refused model has
words of the refusal instead.
"""

from typing import Any, NamedTuple

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


class Published(NamedTuple):
    """A model: its hub id, its config.json, and its parameters or the words of the refusal."""

    hub_id: str
    config: dict[str, Any]
    parameters: int = 0
    refusal: str = ""


def config(name: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """A config.json. sizes: as in SIZES."""
    common = {"architectures": [name], "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    return common | {"rms_norm_eps": 1e-5} | dict(zip(SIZES, sizes, strict=True)) | more


def llama3(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    return {"rope_theta": 500000.0, "rope_scaling": {"factor": factor, **scaling}, "model_type": "llama"}


LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}
QWEN3_KEYS = {**QWEN, "head_dim": 128, "attention_bias": False, "sliding_window": None, "rope_scaling": None}
QWEN3_EXPERTS = {**QWEN3_KEYS, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
QWEN2_EXPERTS = {**QWEN, "norm_topk_prob": False, "decoder_sparse_step": 1, "output_router_logits": False}
PHI3 = {"original_max_position_embeddings": 4096, "rope_scaling": None}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True, "model_type": "granite"}
GLM = {
    "model_type": "glm4_moe",
    "head_dim": 128,
    "attention_bias": True,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": None,
}
BIG_GLM = {**GLM, "use_qk_norm": True, "routed_scaling_factor": 2.5, "moe_intermediate_size": 1536, "n_routed_experts": 160}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
VISION = {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral3(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    images = {"image_token_index": 10, "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "torch_dtype": "bfloat16", **images}
    inner = {key: value for key, value in text.items() if key not in ("architectures", "torch_dtype")}
    return outer | {"text_config": inner, "vision_config": VISION, "multimodal_projector_bias": False} | more


def llama4(**text: Any) -> dict[str, Any]:
    inner = {
        "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
        "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "model_type": "llama4_text",
        "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 202048,
    }  # fmt: skip
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "image_token_index": 200092}
    outer |= {"boi_token_index": 200080, "eoi_token_index": 200081, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    return outer | {"text_config": inner | text, "vision_config": {"model_type": "llama4_vision_model"}}


LLAMA_31_8B = config(LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072, **llama3(8.0))
QWEN25_7B = config(QWEN2, 3584, 18944, 28, 28, 4, 152064, 32768, **QWEN)
QWEN3_8B = config(QWEN3, 4096, 12288, 36, 32, 8, 151936, 40960, **QWEN3_KEYS)
R1_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419}
SMALL_3 = config(
    MISTRAL, 5120, 32768, 40, 32, 8, 131072, 131072, head_dim=128, rope_theta=1e9, sliding_window=None, model_type="mistral"
)
MINISTRAL_3 = config(
    "Ministral3ForCausalLM",
    4096,
    14336,
    34,
    32,
    8,
    131072,
    262144,
    head_dim=128,
    model_type="ministral3",
    rope_parameters=MINISTRAL_ROPE,
)
GLM_AIR = config(
    "Glm4MoeForCausalLM",
    4096,
    10944,
    46,
    96,
    8,
    151552,
    131072,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    first_k_dense_replace=1,
    **GLM,
)
GLM_45 = config("Glm4MoeForCausalLM", 5120, 12288, 92, 96, 8, 151552, 131072, first_k_dense_replace=3, **BIG_GLM)
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}
STATIC_FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}}
GEMMA3_270M = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "_sliding_window_pattern": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
OLMO3: dict[str, Any] = {
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.01,
    "static_groups": False,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
}
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "mse",
                "observer_kwargs": {},
            },
        }
    },
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
TIED = {"tie_word_embeddings": True}
QWEN25_14B = config(QWEN2, 5120, 13824, 48, 40, 8, 152064, 32768, **QWEN)
QWEN25_32B = config(QWEN2, 5120, 27648, 64, 40, 8, 152064, 32768, **QWEN)
R1_QWEN = {"max_position_embeddings": 131072, "sliding_window": 131072}
GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "sliding_window": 4096,
    "cache_implementation": "hybrid",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "model_type": "gemma2",
    **TIED,
}


def gemma3(scaling: float, *sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES. scaling: of the layers without a window; 0: none."""
    keys = {key: value for key, value in GEMMA3_270M.items() if not key.startswith(("layer_types", "use_bi", "_sliding"))}
    keys |= {"sliding_window": 1024, "sliding_window_pattern": 6, "model_type": "gemma3_text"}
    rope = {"rope_scaling": {"factor": scaling, "rope_type": "linear"}} if scaling else {}
    return config("Gemma3ForCausalLM", *sizes, **{**keys, **rope, **more})


def gemma3_images(text: dict[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in text.items() if key not in ("architectures", "torch_dtype")}
    outer: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    outer |= {
        "torch_dtype": "bfloat16",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
    }
    return outer | {"text_config": inner, "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152}}


def gemma4(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES."""
    text = {key: value for key, value in config("", *sizes).items() if key not in ("architectures", "hidden_act")}
    text |= {"model_type": "gemma4_text", "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, **TIED}
    text |= {"global_head_dim": 512, "sliding_window": 1024, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}
    text |= {"rope_parameters": GEMMA4_ROPES, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
    outer: dict[str, Any] = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", **TIED}
    outer |= {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882, "audio_config": None}
    return outer | {"text_config": text | more, "vision_config": {"model_type": "gemma4_vision"}}


def gemma4_unified(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES."""
    wrapped = gemma4(*sizes, **more)
    text = {key: value for key, value in wrapped["text_config"].items() if key != "hidden_size_per_layer_input"}
    named = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    text |= {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 0, "num_experts": None, "use_double_wide_mlp": False}
    return wrapped | named | {"text_config": text, "vision_config": {"model_type": "gemma4_unified_vision"}}


GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
GEMMA4_SHARED: dict[str, Any] = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "use_bidirectional_attention": None,
}
GEMMA4_SHARED |= {"sliding_window": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
OLMO2 = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "model_type": "olmo2"}
LONG_PHI = PHI3 | {"rope_scaling": LONGROPE, "sliding_window": 262144}

MORE = (
    Published("meta-llama/Meta-Llama-3-8B-Instruct",
        config(LLAMA, 4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=5e5), 8_030_261_248),
    Published("meta-llama/Llama-3.2-3B-Instruct",
        config(LLAMA, 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **llama3(32.0) | TIED),
            3_212_749_824),
    Published("meta-llama/Llama-3.1-405B-Instruct",
        config(LLAMA, 16384, 53248, 126, 128, 8, 128256, 131072, **llama3(8.0)), 405_853_388_800),
    Published("HuggingFaceTB/SmolLM2-135M-Instruct",
        config(LLAMA, 576, 1536, 30, 9, 3, 49152, 8192, rope_theta=1e5, **TIED), 134_515_008),
    Published("HuggingFaceTB/SmolLM2-360M-Instruct",
        config(LLAMA, 960, 2560, 32, 15, 5, 49152, 8192, rope_theta=1e5, **TIED), 361_821_120),
    Published("HuggingFaceTB/SmolLM2-1.7B-Instruct",
        config(LLAMA, 2048, 8192, 24, 32, 32, 49152, 8192, rope_theta=130000, **TIED), 1_711_376_384),
    Published("tiiuae/Falcon3-7B-Instruct",
        config(LLAMA, 3072, 23040, 28, 12, 4, 131072, 32768, head_dim=256, rope_theta=1000042),
            7_455_550_464),
    Published("mistralai/Ministral-8B-Instruct-2410",
        config(MISTRAL, 4096, 12288, 36, 32, 8, 131072, 32768, head_dim=128, rope_theta=1e8,
            sliding_window=32768), 8_019_808_256),
    Published("mistralai/Mistral-Large-Instruct-2407",
        config(MISTRAL, 12288, 28672, 88, 96, 8, 32768, 131072, head_dim=128, rope_theta=1e6,
            sliding_window=None), 122_610_069_504),
    Published("mistralai/Mixtral-8x22B-Instruct-v0.1",
        config("MixtralForCausalLM", 6144, 16384, 56, 48, 8, 32768, 65536, rope_theta=1e6,
            sliding_window=None, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001),
            140_630_071_296),
    Published("Qwen/Qwen2.5-1.5B-Instruct",
        config(QWEN2, 1536, 8960, 28, 12, 2, 151936, 32768, **QWEN | TIED), 1_543_714_304),
    Published("Qwen/Qwen2.5-3B-Instruct",
        config(QWEN2, 2048, 11008, 36, 16, 2, 151936, 32768, **QWEN | TIED), 3_085_938_688),
    Published("Qwen/Qwen2.5-14B-Instruct", QWEN25_14B, 14_770_033_664),
    Published("Qwen/Qwen2.5-32B-Instruct", QWEN25_32B, 32_763_876_352),
    Published("Qwen/QwQ-32B", QWEN25_32B | {"max_position_embeddings": 40960}, 32_763_876_352),
    Published("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        config(QWEN2, 1536, 8960, 28, 12, 2, 151936, 131072, **QWEN | {"rope_theta": 10000.0,
            "sliding_window": 4096}), 1_777_088_000),
    Published("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", QWEN25_14B | R1_QWEN, 14_770_033_664),
    Published("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", QWEN25_32B | R1_QWEN, 32_763_876_352),
    Published("deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        config(LLAMA, 8192, 28672, 80, 64, 8, 128256, 131072, **llama3(8.0)), 70_553_706_496),
    Published("Qwen/Qwen3-1.7B",
        config(QWEN3, 2048, 6144, 28, 16, 8, 151936, 40960, **QWEN3_KEYS | TIED), 1_720_574_976),
    Published("Qwen/Qwen3-4B",
        config(QWEN3, 2560, 9728, 36, 32, 8, 151936, 40960, **QWEN3_KEYS | TIED), 4_022_468_096),
    Published("Qwen/Qwen3-14B",
        config(QWEN3, 5120, 17408, 40, 40, 8, 151936, 40960, **QWEN3_KEYS), 14_768_307_200),
    Published("microsoft/Phi-3.5-mini-instruct",
        config("Phi3ForCausalLM", 3072, 8192, 32, 32, 32, 32064, 131072, **LONG_PHI), 3_821_079_552),
    Published("microsoft/Phi-3-medium-4k-instruct",
        config("Phi3ForCausalLM", 5120, 17920, 40, 40, 10, 32064, 4096, sliding_window=2047, **PHI3),
            13_960_238_080),
    Published("google/gemma-2-2b-it",
        config("Gemma2ForCausalLM", 2304, 9216, 26, 8, 4, 256000, 8192, **GEMMA2), 2_614_341_888),
    Published("google/gemma-2-9b-it",
        config("Gemma2ForCausalLM", 3584, 14336, 42, 16, 8, 256000, 8192, **GEMMA2), 9_241_705_984),
    Published("google/gemma-2-27b-it",
        config("Gemma2ForCausalLM", 4608, 36864, 46, 32, 16, 256000, 8192, **GEMMA2 | {"head_dim": 128,
            "query_pre_attn_scalar": 144}), 27_227_128_320),
    Published("google/gemma-3-1b-it",
        gemma3(0, 1152, 6912, 26, 4, 1, 262144, 32768, sliding_window=512), 999_885_952),
    Published("google/gemma-3-4b-it",
        gemma3_images(gemma3(8.0, 2560, 10240, 34, 8, 4, 262208, 131072)), 3_880_263_168),
    Published("google/gemma-3-12b-it",
        gemma3_images(gemma3(8.0, 3840, 15360, 48, 16, 8, 262208, 131072)), 11_766_034_176),
    Published("google/gemma-3-27b-it",
        gemma3_images(gemma3(8.0, 5376, 21504, 62, 32, 16, 262208, 131072, head_dim=128,
            query_pre_attn_scalar=168)), 27_009_346_304),
    Published("allenai/OLMo-2-0425-1B-Instruct",
        config("Olmo2ForCausalLM", 2048, 8192, 16, 16, 16, 100352, 4096, **OLMO2), 1_484_916_736),
    Published("allenai/OLMo-2-1124-7B-Instruct",
        config("Olmo2ForCausalLM", 4096, 11008, 32, 32, 32, 100352, 4096, **OLMO2), 7_298_617_344),
    Published("allenai/OLMo-2-1124-13B-Instruct",
        config("Olmo2ForCausalLM", 5120, 13824, 40, 40, 40, 100352, 4096, **OLMO2), 13_716_198_400),
    Published("allenai/OLMo-2-0325-32B-Instruct",
        config("Olmo2ForCausalLM", 5120, 27648, 64, 40, 8, 100352, 4096, **OLMO2), 32_234_279_936),
    Published("allenai/Olmo-3-32B-Think",
        config("Olmo3ForCausalLM", 5120, 27648, 64, 40, 8, 100278, 65536,
            **OLMO3 | {"layer_types": OLMO3["layer_types"] * 2}), 32_233_522_176),
    Published("ibm-granite/granite-3.1-2b-instruct",
        config("GraniteForCausalLM", 2048, 8192, 40, 32, 8, 49155, 131072, rope_theta=5e6,
            attention_multiplier=0.015625, logits_scaling=8.0, **GRANITE), 2_533_531_648),
)  # fmt: skip
"""Further sizes of the same families."""


def wrapped(name: str, model_type: str, text: dict[str, Any], text_type: str, **more: Any) -> dict[str, Any]:
    """A config.json around one of a text model. text_type: model_type of the text."""
    inner = {key: value for key, value in text.items() if key not in ("architectures", "torch_dtype", "tie_word_embeddings")}
    outer = {"architectures": [name], "model_type": model_type, "torch_dtype": "bfloat16", "vision_config": {"depth": 27}}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return outer | tied | {"text_config": inner | {"model_type": text_type}} | more


def qwen3_vl(experts: int, *sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES. experts: of a layer; 0: dense."""
    rope = {"rope_theta": 5e6, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
    keys = {"head_dim": 128, "attention_bias": False, "rms_norm_eps": 1e-6, **rope}
    if experts:
        keys |= {"num_experts": experts, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True}
    kind = "moe_" if experts else ""
    tokens = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
    return wrapped(
        f"Qwen3VL{'Moe' if experts else ''}ForConditionalGeneration", f"qwen3_vl{'_moe' if experts else ''}",
        config("", *sizes, **keys | more), f"qwen3_vl_{kind}text", **tokens,
    )  # fmt: skip


def qwen25_vl(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES. The published config.json is flat."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "max_window_layers": 28, "sliding_window": 32768}
    images = {"vision_config": {"depth": 32}, "image_token_id": 151655, "video_token_id": 151656, "vision_token_id": 151654}
    images |= {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "model_type": "qwen2_5_vl"}
    return config("Qwen2_5_VLForConditionalGeneration", *sizes, **QWEN | rope | images | more)


DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "head_dim": 256,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
}
NEXT_EXPERTS = {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1}


def qwen3_next(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES."""
    keys = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "model_type": "qwen3_next", "mlp_only_layers": [], **NEXT_EXPERTS}
    return config("Qwen3NextForCausalLM", *sizes, **DELTA | keys | more)


def qwen35(value_heads: int, *sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES. value_heads: of a gated delta net."""
    image = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, **image}}
    extra = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mlp_only_layers": []}
    keys = DELTA | rope | extra | {"linear_num_value_heads": value_heads, "mtp_use_dedicated_embeddings": False} | more
    kind = "_moe" if "num_experts" in more else ""
    tokens = {"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054}
    text = config("", *sizes, **keys)
    if kind:
        del text["intermediate_size"]
    return wrapped(f"Qwen3_5{kind.title().replace('_', '')}ForConditionalGeneration", f"qwen3_5{kind}", text,
                   f"qwen3_5{kind}_text", **tokens)  # fmt: skip


def qwen35_experts(count: int, top_k: int, size: int) -> dict[str, int]:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": count, "num_experts_per_tok": top_k, **sizes}


SMALL_EXPERTS = qwen35_experts(256, 8, 512)
RECURRENT = (
    Published("Qwen/Qwen3-Next-80B-A3B-Instruct", qwen3_next(2048, 5120, 48, 16, 2, 151936, 262144, linear_num_value_heads=32,
        moe_intermediate_size=512, shared_expert_intermediate_size=512), 79_674_391_296),
    Published("Qwen/Qwen3.5-0.8B", qwen35(16, 1024, 3584, 24, 8, 2, 248320, 262144, **TIED), 752_393_024),
    Published("Qwen/Qwen3.5-2B", qwen35(16, 2048, 6144, 24, 8, 2, 248320, 262144, **TIED), 1_881_825_088),
    Published("Qwen/Qwen3.5-4B", qwen35(32, 2560, 9216, 32, 16, 4, 248320, 262144, **TIED), 4_205_751_296),
    Published("Qwen/Qwen3.5-9B", qwen35(32, 4096, 12288, 32, 16, 4, 248320, 262144), 8_953_803_264),
    Published("Qwen/Qwen3.5-27B", qwen35(48, 5120, 17408, 64, 24, 4, 248320, 262144), 26_895_998_464),
    Published("Qwen/Qwen3.5-35B-A3B", qwen35(32, 2048, 0, 40, 16, 2, 248320, 262144, **SMALL_EXPERTS), 34_660_610_688),
    Published("Qwen/Qwen3.6-35B-A3B", qwen35(32, 2048, 0, 40, 16, 2, 248320, 262144, **SMALL_EXPERTS), 34_660_610_688),
    Published("Qwen/Qwen3.5-122B-A10B",
        qwen35(64, 3072, 0, 48, 32, 2, 248320, 262144, **qwen35_experts(256, 8, 1024)), 122_111_526_912),
    Published("Qwen/Qwen3.5-397B-A17B",
        qwen35(64, 4096, 0, 60, 32, 2, 248320, 262144, **qwen35_experts(512, 10, 1024)), 396_346_350_336),
)  # fmt: skip
GLM_0414: dict[str, Any] = {
    "model_type": "glm4",
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
GLM_V_ROPE = {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}, "partial_rotary_factor": 0.5}
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2",
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "attn_type_list": [1] * 62,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}
SEED_OSS = config("SeedOssForCausalLM", 5120, 27648, 64, 80, 8, 155136, 524288, head_dim=128, attention_bias=True,
    attention_out_bias=False, mlp_bias=False, rope_theta=1e7, rope_scaling={"rope_type": "default"}, model_type="seed_oss",
    rms_norm_eps=1e-6, residual_dropout=0.1)  # fmt: skip
EXAONE_ROPE = llama3(16.0) | {"rope_theta": 1e6, "model_type": "exaone4"}
EXAONE_32B = config("Exaone4ForCausalLM", 5120, 27392, 64, 40, 8, 102400, 131072, head_dim=128, sliding_window=4096,
    sliding_window_pattern="LLLG", layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16, **EXAONE_ROPE)  # fmt: skip
DOTS = config("Dots1ForCausalLM", 4096, 10944, 62, 32, 32, 152064, 32768, model_type="dots1", moe_intermediate_size=1408,
    n_routed_experts=128, num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True, n_group=1,
    topk_group=1, routed_scaling_factor=2.5, rope_theta=1e7, sliding_window=None, scoring_func="noaux_tc")  # fmt: skip
SOLAR: dict[str, Any] = {
    key: x for key, x in GLM.items() if key not in ("use_qk_norm", "attention_bias", "num_nextn_predict_layers")
}
SOLAR |= {"model_type": "solar_open", "partial_rotary_factor": 1.0, "moe_intermediate_size": 1280, "n_routed_experts": 128}
ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe", "rope_theta": 500000.0, "use_bias": False, "moe_num_experts": 64, "moe_capacity": [64, 64, 64],
    "moe_layer_interval": 1, "moe_use_aux_free": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
HY3 = config("HYV3ForCausalLM", 4096, 13312, 80, 64, 8, 120832, 262144, model_type="hy_v3", head_dim=128, num_experts=192,
    num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1536, router_scaling_factor=2.826, rope_theta=11158840.0,
    first_k_dense_replace=1, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True,
    num_nextn_predict_layers=1)  # fmt: skip
OF_2026 = (
    Published("Qwen/Qwen3-VL-2B-Instruct", qwen3_vl(0, 2048, 6144, 28, 16, 8, 151936, 262144, **TIED), 1_720_574_976),
    Published("Qwen/Qwen3-VL-4B-Instruct", qwen3_vl(0, 2560, 9728, 36, 32, 8, 151936, 262144, **TIED), 4_022_468_096),
    Published("Qwen/Qwen3-VL-8B-Instruct", qwen3_vl(0, 4096, 12288, 36, 32, 8, 151936, 262144), 8_190_735_360),
    Published("Qwen/Qwen3-VL-32B-Instruct", qwen3_vl(0, 5120, 25600, 64, 64, 8, 151936, 262144), 32_762_123_264),
    Published("Qwen/Qwen3-VL-30B-A3B-Instruct",
        qwen3_vl(128, 2048, 6144, 48, 32, 4, 151936, 262144, moe_intermediate_size=768), 30_532_122_624),
    Published("Qwen/Qwen2.5-VL-3B-Instruct", qwen25_vl(2048, 11008, 36, 16, 2, 151936, 128000, **TIED), 3_085_938_688),
    Published("Qwen/Qwen2.5-VL-7B-Instruct", qwen25_vl(3584, 18944, 28, 28, 4, 152064, 128000), 7_615_616_512),
    Published("Qwen/Qwen2.5-VL-72B-Instruct", qwen25_vl(8192, 29568, 80, 64, 8, 152064, 128000), 72_706_203_648),
    Published("OpenGVLab/InternVL3-8B-hf", wrapped("InternVLForConditionalGeneration", "internvl",
        QWEN25_7B | {"vocab_size": 151674}, "qwen2", image_token_id=151667, downsample_ratio=0.5), 7_612_820_992),
    Published("OpenGVLab/InternVL3_5-8B-HF", wrapped("InternVLForConditionalGeneration", "internvl", QWEN3_8B, "qwen3"),
        8_190_735_360),
    Published("zai-org/GLM-4.1V-9B-Thinking", wrapped("Glm4vForConditionalGeneration", "glm4v",
        config("", 4096, 13696, 40, 32, 2, 151552, 65536, attention_bias=True, **GLM_V_ROPE), "glm4v_text"), 9_400_279_040),
    Published("zai-org/GLM-4.5V", wrapped("Glm4vMoeForConditionalGeneration", "glm4v_moe",
        GLM_AIR | GLM_V_ROPE | {"max_position_embeddings": 65536}, "glm4v_moe_text"), 106_852_251_264),
    Published("zai-org/GLM-4-9B-0414", config("Glm4ForCausalLM", 4096, 13696, 40, 32, 2, 151552, 32768,
        attention_bias=True, **GLM_0414), 9_400_279_040),
    Published("zai-org/glm-4-9b-chat-hf", config("GlmForCausalLM", 4096, 13696, 40, 32, 2, 151552, 131072,
        attention_bias=True, **GLM_0414 | {"model_type": "glm", "rms_norm_eps": 1.5625e-7}), 9_399_951_360),
    Published("ByteDance-Seed/Seed-OSS-36B-Instruct", SEED_OSS, 36_151_104_512),
    Published("LGAI-EXAONE/EXAONE-4.0-32B", EXAONE_32B, 32_003_216_384),
    Published("LGAI-EXAONE/EXAONE-4.0-1.2B", config("Exaone4ForCausalLM", 2048, 4096, 30, 32, 8, 102400, 65536, head_dim=64,
        sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 30, **EXAONE_ROPE | TIED),
        1_279_391_488),
    Published("baidu/ERNIE-4.5-0.3B-PT", config("Ernie4_5ForCausalLM", 1024, 3072, 18, 16, 2, 103424, 131072, head_dim=128,
        rope_theta=500000.0, use_bias=False, model_type="ernie4_5", **TIED), 360_748_032),
    Published("baidu/ERNIE-4.5-21B-A3B-PT", config("Ernie4_5_MoeForCausalLM", 2560, 12288, 28, 20, 4, 103424, 131072, moe_k=6,
        moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1, **ERNIE | TIED), 21_825_437_888),
    Published("baidu/ERNIE-4.5-300B-A47B-PT", config("Ernie4_5_MoeForCausalLM", 8192, 28672, 54, 64, 8, 103424, 131072, moe_k=8,
        moe_intermediate_size=3584, moe_num_shared_experts=0, moe_layer_start_index=3, **ERNIE), 299_484_163_264),
    Published("MiniMaxAI/MiniMax-M2", config("MiniMaxM2ForCausalLM", 3072, 1536, 62, 48, 8, 200064, 196608, **MINIMAX),
        228_689_764_864),
    Published("tencent/Hy3-preview", HY3, 295_033_543_488),
    Published("upstage/Solar-Open-100B",
        config("SolarOpenForCausalLM", 4096, 10240, 48, 64, 8, 196608, 131072, **SOLAR), 102_651_799_552),
    Published("rednote-hilab/dots.llm1.inst", DOTS, 142_774_381_696),
    Published("allenai/OLMoE-1B-7B-0924-Instruct", config("OlmoeForCausalLM", 2048, 1024, 16, 16, 16, 50304, 4096,
        model_type="olmoe", num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None, rope_scaling=None),
        6_919_161_856),
    Published("ibm-granite/granite-swash-2b", config("GraniteSWAForCausalLM", 2560, 8192, 24, 20, 4, 100352, 8192,
        model_type="granite_swa", sliding_window=128, **TIED), 2_144_463_840),
    Published("mistralai/Voxtral-Mini-3B-2507", {"audio_config": {"num_hidden_layers": 32}} | wrapped(
        "VoxtralForConditionalGeneration", "voxtral", config("", 3072, 8192, 30, 32, 8, 131072, 131072, head_dim=128,
        rope_theta=1e8), "llama"), 4_014_136_320),

)  # fmt: skip
"""Models of the second round: text parts of models with images or sound, and classes of 2025 and 2026."""


def latent(name: str, *sizes: int, rank: int | None, yarn: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A config.json of a model with latent attention. rank: of queries."""
    heads = {"kv_lora_rank": 512, "q_lora_rank": rank, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    routing = {"moe_layer_freq": 1, "rms_norm_eps": 1e-6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    scaling = {"rope_scaling": {"type": "yarn", "beta_fast": 32, "beta_slow": 1, **yarn}} if yarn else {}
    return config(name, *sizes, **{**heads, **routing, **scaling, **more})


def shares(experts: int, top_k: int, width: int, shared: int, factor: float) -> dict[str, Any]:
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "routed_scaling_factor")
    return dict(zip(keys, (experts, top_k, width, shared, factor), strict=True))


V2_YARN = {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
V3_YARN = {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
K2_YARN = {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
SMALL_4_YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SOFTMAX: dict[str, Any] = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
SIGMOID: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "rope_theta": 1e4}
V3_FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
V3 = latent(
    "DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280, 163840, rank=1536, yarn=V3_YARN, **SIGMOID,
    **shares(256, 8, 2048, 1, 2.5), model_type="deepseek_v3", quantization_config=V3_FP8,
) | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}  # fmt: skip
LATENT = (
    Published(
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
        latent(
            "DeepseekV2ForCausalLM", 2048, 10944, 27, 16, 16, 102400, 163840, rank=None, yarn=V2_YARN, **SOFTMAX,
            **shares(64, 6, 1408, 2, 1.0), model_type="deepseek_v2",
        ),
        15_706_484_224,
    ),
    Published(
        "moonshotai/Moonlight-16B-A3B-Instruct",
        latent(
            "DeepseekV3ForCausalLM", 2048, 11264, 27, 16, 16, 163840, 8192, rank=None, **SIGMOID | {"rope_theta": 5e4},
            **shares(64, 6, 1408, 2, 2.446), model_type="deepseek_v3",
        ),
        15_960_110_208,
    ),
    Published(
        "zai-org/GLM-4.7-Flash",
        latent(
            "Glm4MoeLiteForCausalLM", 2048, 10240, 47, 20, 20, 154880, 202752, rank=768, **SIGMOID | {"rope_theta": 1e6},
            **shares(64, 4, 1536, 1, 1.8), model_type="glm4_moe_lite",
        ) | {"qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5},
        29_943_393_920,
    ),
    Published(
        "mistralai/Mistral-Small-4-119B-2603",
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "tie_word_embeddings": False,
            "vision_config": VISION,
            "text_config": latent(
                "Mistral4ForCausalLM", 4096, 12288, 36, 32, 32, 131072, 1048576, rank=1024, rope_parameters=SMALL_4_YARN,
                **shares(128, 4, 2048, 1, 1.0), model_type="mistral4", norm_topk_prob=True,
            ) | {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "first_k_dense_replace": 0},
        },
        118_972_826_624,
    ),
    Published("deepseek-ai/DeepSeek-V3", V3, 671_026_419_200),
    Published("deepseek-ai/DeepSeek-R1", V3, 671_026_419_200),
    Published("deepseek-ai/DeepSeek-V3.1", V3 | {"quantization_config": V3_FP8 | {"scale_fmt": "ue8m0"}}, 671_026_419_200),
    Published(
        "moonshotai/Kimi-K2-Instruct",
        latent(
            "DeepseekV3ForCausalLM", 7168, 18432, 61, 64, 64, 163840, 131072, rank=1536, yarn=K2_YARN,
            **SIGMOID | {"rope_theta": 5e4}, **shares(384, 8, 2048, 1, 2.827), model_type="kimi_k2", quantization_config=V3_FP8,
        ),
        1_026_408_232_448,
    ),
)  # fmt: skip
"""With latent attention. The numbers of Mistral Small 4 are the defaults of its class in transformers 5.24. Those of Moonlight,
Kimi K2 and GLM-4.7-Flash could not be compared with the published files."""
MODELS = (
    Published("meta-llama/Llama-2-7b-hf", config(LLAMA, 4096, 11008, 32, 32, 32, 32000, 4096), 6_738_415_616),
    Published("TinyLlama/TinyLlama-1.1B-Chat-v1.0", config(LLAMA, 2048, 5632, 22, 32, 4, 32000, 2048), 1_100_048_384),
    Published("meta-llama/Llama-3.1-8B-Instruct", LLAMA_31_8B, 8_030_261_248),
    Published(
        "meta-llama/Llama-3.2-1B-Instruct",
        config(LLAMA, 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **llama3(32.0) | {"tie_word_embeddings": True}),
        1_235_814_400,
    ),
    Published(
        "meta-llama/Llama-3.3-70B-Instruct", config(LLAMA, 8192, 28672, 80, 64, 8, 128256, 131072, **llama3(8.0)), 70_553_706_496
    ),
    Published(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        llama4(
            interleave_moe_layer_step=1,
            num_local_experts=16,
            use_qk_norm=True,
            max_position_embeddings=10485760,
            rope_scaling=llama3(16.0)["rope_scaling"] | {"high_freq_factor": 1.0},
        ),
        107_769_861_120,
    ),
    Published(
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        llama4(
            interleave_moe_layer_step=2,
            num_local_experts=128,
            use_qk_norm=False,
            max_position_embeddings=1048576,
            rope_scaling=None,
        ),
        400_711_848_960,
    ),
    Published("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", LLAMA_31_8B, 8_030_261_248),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        QWEN25_7B | {"max_position_embeddings": 131072, "rope_theta": 10000.0, "sliding_window": 4096},
        7_615_616_512,
    ),
    Published(
        "mistralai/Mistral-7B-Instruct-v0.3",
        config(MISTRAL, 4096, 14336, 32, 32, 8, 32768, 32768, rope_theta=1e6, sliding_window=None),
        7_248_023_552,
    ),
    Published(
        "mistralai/Mistral-Nemo-Instruct-2407",
        config(MISTRAL, 5120, 14336, 40, 32, 8, 131072, 131072, head_dim=128, rope_theta=1e6, sliding_window=None),
        12_247_782_400,
    ),
    Published(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        SMALL_3 | {"max_position_embeddings": 32768, "rope_theta": 1e8},
        23_572_403_200,
    ),
    Published("mistralai/Mistral-Small-3.1-24B-Instruct-2503", mistral3(SMALL_3), 23_572_403_200),
    Published("mistralai/Ministral-3-8B-Reasoning-2512", mistral3(MINISTRAL_3, tie_word_embeddings=False), 8_489_553_920),
    Published(
        "mistralai/Ministral-3-3B-Reasoning-2512",
        mistral3(
            MINISTRAL_3 | {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "tie_word_embeddings": True}
        ),
        3_429_006_336,
    ),
    Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        config(
            "MixtralForCausalLM",
            4096,
            14336,
            32,
            32,
            8,
            32000,
            32768,
            rope_theta=1e6,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.02,
        ),
        46_702_792_704,
    ),
    Published(
        "Qwen/Qwen2.5-0.5B-Instruct",
        config(QWEN2, 896, 4864, 24, 14, 2, 151936, 32768, **QWEN | {"tie_word_embeddings": True}),
        494_032_768,
    ),
    Published("Qwen/Qwen2.5-7B-Instruct", QWEN25_7B, 7_615_616_512),
    Published("Qwen/Qwen2.5-72B-Instruct", config(QWEN2, 8192, 29568, 80, 64, 8, 152064, 32768, **QWEN), 72_706_203_648),
    Published(
        "Qwen/Qwen3-0.6B",
        config(QWEN3, 1024, 3072, 28, 16, 8, 151936, 40960, **QWEN3_KEYS | {"tie_word_embeddings": True}),
        596_049_920,
    ),
    Published("Qwen/Qwen3-8B", QWEN3_8B, 8_190_735_360),
    Published(
        "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        QWEN3_8B | {"max_position_embeddings": 131072, "rope_scaling": R1_YARN},
        8_190_735_360,
    ),
    Published(
        "Qwen/Qwen3-4B-Instruct-2507",
        config(QWEN3, 2560, 9728, 36, 32, 8, 151936, 262144, **QWEN3_KEYS | {"rope_theta": 5e6, "tie_word_embeddings": True}),
        4_022_468_096,
    ),
    Published("Qwen/Qwen3-32B", config(QWEN3, 5120, 25600, 64, 64, 8, 151936, 40960, **QWEN3_KEYS), 32_762_123_264),
    Published(
        "Qwen/Qwen3-30B-A3B",
        config("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, 40960, moe_intermediate_size=768, **QWEN3_EXPERTS),
        30_532_122_624,
    ),
    Published(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        config(
            "Qwen3MoeForCausalLM",
            2048,
            5472,
            48,
            32,
            4,
            151936,
            262144,
            moe_intermediate_size=768,
            qkv_bias=False,
            use_qk_norm=True,
            shared_expert_intermediate_size=0,
            **QWEN3_EXPERTS | {"rope_theta": 10000000},
        ),
        30_532_122_624,
    ),
    Published(
        "Qwen/Qwen3-235B-A22B",
        config("Qwen3MoeForCausalLM", 4096, 12288, 94, 64, 4, 151936, 40960, moe_intermediate_size=1536, **QWEN3_EXPERTS),
        235_093_634_560,
    ),
    Published(
        "Qwen/Qwen1.5-MoE-A2.7B-Chat",
        config(
            "Qwen2MoeForCausalLM",
            2048,
            5632,
            24,
            16,
            16,
            151936,
            8192,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            **QWEN2_EXPERTS,
        ),
        14_315_784_192,
    ),
    Published(
        "Qwen/Qwen2-57B-A14B-Instruct",
        config(
            "Qwen2MoeForCausalLM",
            3584,
            18944,
            28,
            28,
            4,
            151936,
            32768,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480,
            **QWEN2_EXPERTS,
        ),
        57_408_658_944,
    ),
    Published(
        "microsoft/Phi-3-mini-4k-instruct",
        config("Phi3ForCausalLM", 3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047, **PHI3),
        3_821_079_552,
    ),
    Published(
        "microsoft/Phi-4-mini-instruct",
        config(
            "Phi3ForCausalLM",
            3072,
            8192,
            32,
            24,
            8,
            200064,
            131072,
            sliding_window=262144,
            partial_rotary_factor=0.75,
            **PHI3 | {"rope_scaling": LONGROPE, "tie_word_embeddings": True},
        ),
        3_836_021_760,
    ),
    Published(
        "microsoft/phi-4",
        config("Phi3ForCausalLM", 5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=250000, sliding_window=None, **PHI3),
        14_659_507_200,
    ),
    Published(
        "microsoft/Phi-4-reasoning",
        config("Phi3ForCausalLM", 5120, 17920, 40, 40, 10, 100352, 32768, rope_theta=500000, sliding_window=None, **PHI3),
        14_659_507_200,
    ),
    Published(
        "google/gemma-3-270m-it",
        config("Gemma3ForCausalLM", 640, 2048, 18, 4, 1, 262144, 32768, **GEMMA3_270M),
        268_098_176,
    ),
    Published(
        "allenai/Olmo-3-7B-Think",
        config("Olmo3ForCausalLM", 4096, 11008, 32, 32, 32, 100278, 65536, **OLMO3),
        7_298_011_136,
    ),
    Published(
        "HuggingFaceTB/SmolLM3-3B",
        config(
            "SmolLM3ForCausalLM",
            2048,
            11008,
            36,
            16,
            4,
            128256,
            65536,
            rms_norm_eps=1e-6,
            rope_theta=5e6,
            no_rope_layer_interval=4,
            sliding_window=None,
            tie_word_embeddings=True,
        ),
        3_075_098_624,
    ),
    Published(
        "ibm-granite/granite-3.1-8b-instruct",
        config(
            "GraniteForCausalLM",
            4096,
            12800,
            40,
            32,
            8,
            49155,
            131072,
            rope_theta=1e7,
            attention_multiplier=0.0078125,
            logits_scaling=16.0,
            **GRANITE,
        ),
        8_170_848_256,
    ),
    Published(
        "ibm-granite/granite-4.0-micro",
        config(
            "GraniteMoeHybridForCausalLM",
            2560,
            8192,
            40,
            40,
            8,
            100352,
            131072,
            rope_theta=1e7,
            attention_multiplier=0.015625,
            logits_scaling=10.0,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=8192,
            layer_types=["attention"] * 40,
            position_embedding_type="rope",
            **GRANITE | {"model_type": "granitemoehybrid"},
        ),
        3_402_836_480,
    ),
    Published("zai-org/GLM-4.5-Air", GLM_AIR, 106_852_251_264),
    Published("zai-org/GLM-4.5", GLM_45, 352_797_829_024),
    Published("zai-org/GLM-4.6", GLM_45 | {"max_position_embeddings": 202752}, 352_797_829_024),
    Published(
        "openai/gpt-oss-20b",
        config("GptOssForCausalLM", 2880, 2880, 24, 64, 8, 201088, 131072, num_local_experts=32, **GPT_OSS),
        20_914_757_184,
    ),
    Published(
        "openai/gpt-oss-120b",
        config("GptOssForCausalLM", 2880, 2880, 36, 64, 8, 201088, 131072, num_local_experts=128, **GPT_OSS),
        116_829_156_672,
    ),
    Published(  # a number for each layer's output counts here; transformers has it as a buffer
        "google/gemma-4-31B-it",
        gemma4(5376, 21504, 60, 32, 16, 262144, 262144, num_global_key_value_heads=4),
        30_697_345_340,
    ),
    Published(
        "google/gemma-4-26B-A4B-it",
        gemma4(2816, 2112, 30, 16, 8, 262144, 262144, num_global_key_value_heads=2, **GEMMA4_EXPERTS),
        25_233_141_790,
    ),
    Published(
        "google/gemma-4-12B-it",
        gemma4_unified(3840, 15360, 48, 16, 8, 262144, 262144, num_global_key_value_heads=1),
        11_907_350_320,
    ),
    Published(
        "google/gemma-4-E4B-it",
        gemma4(2560, 10240, 42, 8, 2, 262144, 131072, **GEMMA4_SHARED, num_kv_shared_layers=18),
        7_463_013_418,
    ),
    Published(
        "google/gemma-4-E2B-it",
        gemma4(
            1536,
            6144,
            35,
            8,
            1,
            262144,
            131072,
            **GEMMA4_SHARED,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        ),
        4_628_569_379,
    ),
    *MORE,
    *OF_2026,
    *RECURRENT,
    *LATENT,
    Published("Qwen/Qwen3-8B-FP8", QWEN3_8B | FP8, 8_190_735_360),
    Published(
        "mistralai/Ministral-3-8B-Instruct-2512", mistral3(MINISTRAL_3, tie_word_embeddings=False, **STATIC_FP8), 8_489_553_920
    ),
    Published(
        "deepseek-ai/DeepSeek-V3.2",
        {"architectures": ["DeepseekV32ForCausalLM"]},
        refusal="it needs MLA with a sparse indexer",
    ),
    Published(
        "microsoft/Phi-3.5-MoE-instruct",
        {"architectures": ["PhiMoEForCausalLM"]},
        refusal="model class PhiMoEForCausalLM is not supported",
    ),
    Published(
        "ibm-granite/granite-4.0-h-small",
        config(
            "GraniteMoeHybridForCausalLM",
            4096,
            768,
            40,
            32,
            8,
            100352,
            131072,
            num_local_experts=72,
            num_experts_per_tok=10,
            layer_types=["mamba"] * 40,
            **GRANITE | {"model_type": "granitemoehybrid"},
        ),
        refusal="only with attention in all layers",
    ),
)


ON_CPU = (
    Published(
        "zai-org/GLM-4-32B-0414",
        config("Glm4ForCausalLM", 6144, 23040, 61, 48, 2, 151552, 32768, attention_bias=False, **GLM_0414),
        32_566_081_536,
    ),
    Published("Qwen/Qwen2.5-7B-Instruct-AWQ", QWEN25_7B | {"quantization_config": AWQ}, 7_615_616_512),
    Published("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int4", QWEN25_32B | {"quantization_config": GPTQ}, 32_763_876_352),
    Published("RedHatAI/Qwen3-8B-quantized.w4a16", QWEN3_8B | {"quantization_config": W4A16}, 8_190_735_360),
    Published("nvidia/Llama-3.1-8B-Instruct-NVFP4", LLAMA_31_8B | {"quantization_config": NVFP4}, 8_030_261_248),
)
"""Models that only the CPU serves: 4-bit weights, or more query heads for a key head than the GPU's kernels take."""
