"""The keys of config.json of models with images, recurrent layers or latent attention, and of classes of 2025 and 2026."""

from typing import Any

from published_configs import GLM, GRANITE, QWEN, config, llama3


def wrapped(name: str, model_type: str, text: dict[str, Any], text_type: str, **more: Any) -> dict[str, Any]:
    """A config.json around one of a text model. text_type: model_type of the text."""
    inner = {key: value for key, value in text.items() if key not in ("architectures", "torch_dtype", "tie_word_embeddings")}
    outer = {"architectures": [name], "model_type": model_type, "torch_dtype": "bfloat16", "vision_config": {"depth": 27}}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return outer | tied | {"text_config": inner | {"model_type": text_type}} | more


def qwen3_vl(experts: int, *sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES. experts: experts of a layer; 0: dense."""
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


COHERE = {"layer_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": True}
COHERE2 = {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_switch": 4, "position_embedding_type": "rope_gptj"}
COHERE2 |= {"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0, "rope_scaling": None, "rope_theta": 50000}
COHERE2 |= {"use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False, "logit_scale": 0.25}


def cohere(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES."""
    found = config("CohereForCausalLM", *sizes, **COHERE | {"model_type": "cohere", "use_qk_norm": False} | more)
    return {key: value for key, value in found.items() if key != "rms_norm_eps"}


def cohere2(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES."""
    found = config("Cohere2ForCausalLM", *sizes, **COHERE | COHERE2 | {"model_type": "cohere2", "head_dim": 128} | more)
    return {key: value for key, value in found.items() if key != "rms_norm_eps"}


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
    """sizes: as in SIZES. value_heads: value heads of a gated delta net."""
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


def granite_h(*sizes: int, mamba_heads: int, shared: int, attention: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Granite 4 with state-space layers. sizes: as in SIZES, with the width of an expert.

    shared: width of the MLP that all tokens visit. attention: numbers of the layers with attention.
    """
    types = ["attention" if layer in attention else "mamba" for layer in range(sizes[2])]
    keys: dict[str, Any] = {
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    keys |= {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_chunk_size": 256, "layer_types": types}
    keys |= {"position_embedding_type": "nope", "shared_intermediate_size": shared, "num_local_experts": 0}
    keys |= {"num_experts_per_tok": 0, **GRANITE, "model_type": "granitemoehybrid"}
    return config("GraniteMoeHybridForCausalLM", *sizes, **keys | more)


NEMOTRON: dict[str, Any] = {"model_type": "nemotron_h", "head_dim": 128, "mlp_hidden_act": "relu2", "mlp_bias": False}
NEMOTRON |= {"ssm_state_size": 128, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "n_groups": 8, "conv_kernel": 4}
NEMOTRON |= {"use_bias": False, "use_conv_bias": True, "chunk_size": 128, "expand": 2, "attention_bias": False}
NEMOTRON |= {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4, "layer_norm_epsilon": 1e-5}
NEMOTRON_EXPERTS: dict[str, Any] = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
NEMOTRON_EXPERTS |= {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}


def nemotron_h(pattern: str, *sizes: int, mamba: tuple[int, int], **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES. mamba: heads of a state space, and the size of a head."""
    keys = {"hybrid_override_pattern": pattern, "mamba_num_heads": mamba[0], "mamba_head_dim": mamba[1]}
    found = config("NemotronHForCausalLM", *sizes, **NEMOTRON | keys | more)
    return {key: value for key, value in found.items() if key not in ("rms_norm_eps", "hidden_act")}


BAMBA: dict[str, Any] = {"model_type": "bamba", "attn_rotary_emb": 64, "mamba_chunk_size": 256, "mamba_conv_bias": True}
BAMBA |= {"mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_dt_rank": 256, "mamba_expand": 2}
BAMBA |= {"mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "num_logits_to_keep": 1, "use_mamba_kernels": True}
FALCON_H1: dict[str, Any] = {"model_type": "falcon_h1", "attention_bias": False, "attention_in_multiplier": 1.0}
FALCON_H1 |= {
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "key_multiplier": 0.39062499999999994,
}
FALCON_H1 |= {"lm_head_multiplier": 0.0390625, "mlp_multipliers": [0.8838834764831844, 0.5859375], "ssm_in_multiplier": 1.25}
FALCON_H1 |= {"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], "mlp_bias": False}
FALCON_H1 |= {"ssm_out_multiplier": 0.23570226039551587, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4}
FALCON_H1 |= {"mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
FALCON_H1 |= {"mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False}
FALCON_H1 |= {"mamba_use_mlp": True, "projectors_bias": False, "rope_scaling": None, "rope_theta": 1e11, "head_dim": 64}
LFM2 = {"model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1e6, "use_pos_enc": True}
LFM2 |= {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_use_swiglu": True}
LFM2_EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2}
LFM2_EXPERTS |= {"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0}


def lfm2(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: as in SIZES, with the stated width of the MLP. more: `full_attn_idxs`, and others."""
    found = config("Lfm2ForCausalLM", *sizes, **{**LFM2, "block_ff_dim": sizes[1], "tie_embedding": True, **more})
    return {key: value for key, value in found.items() if key not in ("rms_norm_eps", "tie_word_embeddings", "hidden_act")}


def lfm2_moe(*sizes: int, attention: tuple[int, ...]) -> dict[str, Any]:
    """sizes: as in SIZES. attention: numbers of the layers with attention."""
    types = ["full_attention" if layer in attention else "conv" for layer in range(sizes[2])]
    keys = {"model_type": "lfm2_moe", "tie_embedding": True, "layer_types": types, **LFM2_EXPERTS}
    keys |= {key: LFM2[key] for key in ("norm_eps", "conv_bias", "conv_L_cache", "rope_theta")}
    found = config("Lfm2MoeForCausalLM", *sizes, **keys)
    return {key: value for key, value in found.items() if key not in ("rms_norm_eps", "tie_word_embeddings", "hidden_act")}


def qwen35_experts(count: int, top_k: int, size: int) -> dict[str, int]:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": count, "num_experts_per_tok": top_k, **sizes}


SMALL_EXPERTS = qwen35_experts(256, 8, 512)
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
