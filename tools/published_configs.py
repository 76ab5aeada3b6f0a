"""The keys of config.json that sizes of one family share, and the type of a published model."""

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
    """sizes: as in SIZES. scaling: scaling in the layers without a window; 0: off."""
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
