"""Small random models of every supported family, made and saved by transformers.

Weights are drawn so wide that logits spread over several units: with the usual 0.02, rounding would hide a wrong rotation or a
missing bias.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

VOCAB = 199
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}


def _longrope(original: int) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.7 * i for i in range(6)]}
    return {"original_max_position_embeddings": original, "rope_parameters": rope | factors}


GRANITE = {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 0.7}
HYBRID = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80, "layer_types": ["full_attention"] * 3}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 21}
FULL, SLIDING, CHUNKED, RECURRENT = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
CONV = "conv"
LOCAL_ROPES = {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}
OSS = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "sliding_window": 20}
OSS_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
SHARED = {"shared_expert_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GLM = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "num_mtp_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
LLAMA4 = {
    "head_dim": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "attention_chunk_size": 22,
    "floor_scale": 12,
    "attn_scale": 0.4,
    "no_rope_layers": [1, 0, 1],
    "interleave_moe_layer_step": 2,
}
SEED = {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True, "rope_parameters": YARN}
EXAONE = {"sliding_window": 18, "layer_types": [SLIDING, FULL, SLIDING], "head_dim": 16}
HY3 = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
MINIMAX = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": 32}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "tie_word_embeddings": False}
SOLAR = {**{key: value for key, value in GLM.items() if key != "num_mtp_layers"}, "rope_parameters": YARN, "attention_bias": True}
DOTS = {"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 2}
SWA = {**GRANITE, "sliding_window": 20, "layer_types": [SLIDING, FULL, SLIDING]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
GLM4V = {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
QWEN3_VL_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
QWEN3_VL_MOE |= {"rope_parameters": {**MROPE, "mrope_section": [4, 6, 6], "mrope_interleaved": True}, "mlp_only_layers": [1]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
DELTA |= {"head_dim": 32, "full_attention_interval": 2}
DELTA_MOE = {
    **DELTA,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GROWING = {**YARN, "original_max_position_embeddings": 21, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}

PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA4: dict[str, Any] = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "sliding_window": 19}
GEMMA4 |= {"rope_parameters": {FULL: PROPORTIONAL, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}}
GEMMA4_MOE: dict[str, Any] = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
GEMMA4_MOE |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0}

GEMMA4_SHARED: dict[str, Any] = {**GEMMA4, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 199}
GEMMA4_SHARED |= {"num_hidden_layers": 5, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
GEMMA4_SHARED |= {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "final_logit_softcapping": 5.0}

UNIFIED = {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}
UNIFIED |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}

LATENT: dict[str, Any] = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28}
LATENT |= {"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT |= {"num_key_value_heads": 4}
DEEP_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 1e4}
FLASH = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"} | {
    "v_head_dim": 36,
    "num_attention_heads": 5,
}
FLASH |= {"num_key_value_heads": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
GROWING_LATENT = {"rope_parameters": {**GROWING, "rope_theta": 1e4, "mscale_all_dim": 0.8}, "max_position_embeddings": 1024}

SPACE: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80, "mamba_n_heads": 8}
SPACE |= {"mamba_d_state": 20, "mamba_n_groups": 2}
SPACE_MOE = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "mamba_n_groups": 1,
    "mamba_proj_bias": True,
}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16}
NEMOTRON |= {"time_step_min": 1e-30}  # transformers 5.24 raises a prompt's time steps to it, but not those of later tokens
NEMOTRON_MOE = {"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5}
NEMOTRON_MOE |= {"moe_shared_expert_intermediate_size": 48, "n_group": 3, "topk_group": 2}
NEMOTRON_DENSE: dict[str, Any] = {"use_bias": True, "mlp_bias": True, "num_experts_per_tok": 0, "conv_kernel": 3}
NEMOTRON_DENSE |= {"layers_block_type": [RECURRENT, "mlp", RECURRENT, FULL, "mlp", RECURRENT]}
BAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 20, "mamba_n_groups": 2, "attn_layer_indices": [1]}
BAMBA_BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
BAMBA_BIASED |= {"head_dim": 32, "mamba_d_conv": 3, "mamba_n_groups": 1, "attn_layer_indices": [0, 2]}
FALCON_H1: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_ssm": 120, "mamba_d_state": 16, "mamba_n_groups": 2, "head_dim": 32}
FALCON_H1 |= {"embedding_multiplier": 2.3, "lm_head_multiplier": 0.6, "key_multiplier": 0.4, "attention_in_multiplier": 1.2}
FALCON_H1 |= {"attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.9, 0.6]}
FALCON_H1 |= {"ssm_multipliers": [0.8, 0.5, 0.7, 0.6, 1.4]}
FALCON_H1_NORMED: dict[str, Any] = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True}
FALCON_H1_NORMED |= {"mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True, "mamba_d_ssm": None, "mamba_n_heads": 8}
LFM2_BIASED = {"layer_types": [FULL, CONV, FULL], "block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4}
LFM2_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1}
LFM2_MOE |= {"routed_scaling_factor": 1.5}

# name -> (class of the config, differences from BASE)
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biased-mqa": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "rope_parameters": LINEAR},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("MistralConfig", {"sliding_window": 21}),
    "ministral": ("MinistralConfig", {"head_dim": 32, "sliding_window": 21, "layer_types": [FULL, SLIDING, FULL]}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window-yarn": ("Qwen2Config", {**WINDOW, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-biased": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": ("Qwen3MoeConfig", {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3-moe-stride": ("Qwen3MoeConfig", {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False, "rope_parameters": YARN}),
    "smollm3-window": ("SmolLM3Config", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 18}),
    "granite": ("GraniteConfig", {**GRANITE, "logits_scaling": 0.5, "tie_word_embeddings": True}),
    "granite-biased": ("GraniteConfig", {**GRANITE, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "granite4-micro": ("GraniteMoeHybridConfig", {**GRANITE, **HYBRID, "position_embedding_type": "rope"}),
    "granite4-nope": ("GraniteMoeHybridConfig", {**GRANITE, **HYBRID, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2-uncapped": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True, "sliding_window": 9},
    ),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "rope_parameters": LOCAL_ROPES, "layer_types": [SLIDING, FULL, SLIDING]}),
    "gemma3-mqa": ("Gemma3TextConfig", {**GEMMA, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma3-nested": ("Gemma3Config", {**GEMMA, "layer_types": [SLIDING, SLIDING, FULL]}),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "layer_types": [SLIDING, FULL, FULL], "attention_bias": True}),
    "gemma4-moe": ("Gemma4TextConfig", {**GEMMA4_MOE, "layer_types": [FULL, SLIDING, FULL], "tie_word_embeddings": False}),
    "gemma4-nested": (
        "Gemma4Config",
        {
            **GEMMA4,
            "pad_token_id": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": [SLIDING, SLIDING, FULL],
        },
    ),
    "gemma4-e": ("Gemma4TextConfig", GEMMA4_SHARED),
    "gemma4-e-nested": (
        "Gemma4Config",
        {
            **GEMMA4_SHARED,
            "pad_token_id": 0,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "use_double_wide_mlp": False,
        },
    ),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", {**UNIFIED, "layer_types": [SLIDING, FULL, FULL]}),
    "gemma4-unified-nested": (
        "Gemma4UnifiedConfig",
        {**UNIFIED, "pad_token_id": 0, "final_logit_softcapping": 5.0, "layer_types": [SLIDING, SLIDING, FULL]},
    ),
    "olmo2": ("Olmo2Config", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3Config", {"sliding_window": 18, "rope_parameters": LOCAL_ROPES, "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen2-moe": ("Qwen2MoeConfig", {**SHARED, "norm_topk_prob": False}),
    "qwen2-moe-mixed": ("Qwen2MoeConfig", {**SHARED, "norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False}),
    "glm4-moe": ("Glm4MoeConfig", {**GLM, "use_qk_norm": True, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "glm4-moe-air": ("Glm4MoeConfig", {**GLM, "attention_bias": True, "n_shared_experts": 2, "norm_topk_prob": False}),
    "ministral3": ("Ministral3Config", {"head_dim": 32, "max_position_embeddings": 1024, "rope_parameters": GROWING}),
    "mistral3": ("Mistral3Config", {"model_type": "mistral", "head_dim": 32, "sliding_window": None}),
    "gpt-oss": ("GptOssConfig", {**OSS, "attention_bias": False, "layer_types": [FULL, FULL, SLIDING], "swiglu_limit": 1.0}),
    "gpt-oss-mxfp4": ("GptOssConfig", {**OSS, "head_dim": 32, "rope_parameters": OSS_YARN}),
    "llama4": ("Llama4TextConfig", {**LLAMA4, "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}),
    "llama4-wide": (
        "Llama4TextConfig",
        {**LLAMA4, "num_experts_per_tok": 2, "moe_layers": [0, 1], "use_qk_norm": False, "attention_bias": True},
    ),
    "llama4-nested": ("Llama4Config", {**LLAMA4, "interleave_moe_layer_step": 1, "layer_types": [CHUNKED, CHUNKED, FULL]}),
    "seed-oss": ("SeedOssConfig", SEED),
    "exaone4": ("Exaone4Config", EXAONE),
    "exaone4-full": ("Exaone4Config", {"sliding_window": None, "layer_types": [FULL] * 3, "tie_word_embeddings": True}),
    "exaone-moe": ("ExaoneMoeConfig", {**HY3, "sliding_window": 18, "layer_types": [FULL, SLIDING, SLIDING], "n_group": 2}),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", {**ERNIE, "rope_parameters": YARN}),
    "ernie4.5-moe-late": ("Ernie4_5_MoeConfig", {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 2}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True, "rope_parameters": YARN}),
    "minimax-m2": ("MiniMaxM2Config", {**MINIMAX, "rotary_dim": 16}),
    "hy3": (
        "HYV3Config",
        {**HY3, "num_shared_experts": 2, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "solar-open": ("SolarOpenConfig", {**SOLAR, "n_group": 3, "topk_group": 2}),
    "deepseek-v2-lite": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None, "rope_parameters": DEEP_YARN}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**LATENT, "rope_parameters": DEEP_YARN, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3Config",
        {**LATENT, "rope_interleave": False, "attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", FLASH),
    "mistral4": ("Mistral4Config", {**LATENT, **GROWING_LATENT, "norm_topk_prob": False, "routed_scaling_factor": 1.7}),
    "mistral4-nested": ("Mistral3Config", {**LATENT, **GROWING_LATENT, "model_type": "mistral4"}),
    "dots1": ("Dots1Config", {**DOTS, "first_k_dense_replace": 1, "sliding_window": 19, "max_window_layers": 1}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "norm_topk_prob": True}),
    "granite-swa": ("GraniteSWAConfig", {**SWA, "layer_rope_theta": [1e4, 0, 100.0], "tie_word_embeddings": False}),
    "granite-swa-biased": ("GraniteSWAConfig", {**SWA, "attention_bias": True, "mlp_bias": True, "layer_types": None}),
    "cohere": ("CohereConfig", {"logit_scale": 0.8, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.4, "sliding_window": 19, "layer_types": [SLIDING, SLIDING, FULL]}),
    "cohere2-biased": (
        "Cohere2Config",
        {"logit_scale": 0.7, "sliding_window": 20, "layer_types": [FULL, SLIDING, FULL], "attention_bias": True},
    ),
    "glm": ("GlmConfig", {"head_dim": 32}),
    "glm4": ("Glm4Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2-vl": ("Qwen2VLConfig", {"rope_parameters": MROPE}),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", {"rope_parameters": MROPE, **WINDOW}),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {"head_dim": 32, "rope_parameters": {**MROPE, "mrope_section": [4, 6, 6], "mrope_interleaved": True}},
    ),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", QWEN3_VL_MOE),
    "internvl-qwen2": ("InternVLConfig", {"model_type": "qwen2"}),
    "internvl-qwen3-moe": ("InternVLConfig", {**MOE, "model_type": "qwen3_moe"}),
    "llava": ("LlavaConfig", {"model_type": "llama", "rope_parameters": LLAMA3}),
    "llava-next": ("LlavaNextConfig", {"model_type": "mistral", "sliding_window": 21}),
    "llava-onevision": ("LlavaOnevisionConfig", {"model_type": "qwen2"}),
    "glm4v": ("Glm4vConfig", GLM4V),
    "glm4v-moe": ("Glm4vMoeConfig", {**GLM, "head_dim": 32, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}),
    "exaone4.5": ("Exaone4_5_Config", {**EXAONE, "model_type": "exaone4"}),
    "smolvlm": ("SmolVLMConfig", {"model_type": "llama"}),
    "idefics3": ("Idefics3Config", {"model_type": "llama"}),
    "voxtral": ("VoxtralConfig", {"model_type": "llama", "head_dim": 32}),
    "qwen2-audio": ("Qwen2AudioConfig", {"model_type": "qwen2"}),
    "qwen3-next": ("Qwen3NextConfig", {**DELTA_MOE, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5TextConfig", {**DELTA, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA_MOE, "attention_bias": True, "linear_num_value_heads": 2}),
    "qwen3.5-nested": ("Qwen3_5Config", {**DELTA, "model_type": "qwen3_5_text", "layer_types": [RECURRENT, FULL, RECURRENT]}),
    "qwen3.5-moe-nested": ("Qwen3_5MoeConfig", {**DELTA_MOE, "model_type": "qwen3_5_moe_text"}),
    "granite4-h": ("GraniteMoeHybridConfig", {**GRANITE, **SPACE, "layer_types": [RECURRENT, FULL, RECURRENT]}),
    "granite4-h-moe": ("GraniteMoeHybridConfig", {**GRANITE, **SPACE, **SPACE_MOE, "layer_types": [RECURRENT, RECURRENT, FULL]}),
    "nemotron-h": ("NemotronHConfig", {**NEMOTRON, **NEMOTRON_DENSE}),
    "nemotron-h-moe": (
        "NemotronHConfig",
        {**NEMOTRON, **NEMOTRON_MOE, "layers_block_type": [RECURRENT, "moe", RECURRENT, FULL, "moe"], "n_groups": 1},
    ),
    "nemotron-h-mixed": ("NemotronHConfig", {**NEMOTRON, **NEMOTRON_MOE, "layers_block_type": [RECURRENT, "moe", FULL, "mlp"]}),
    "bamba": ("BambaConfig", {**BAMBA, "tie_word_embeddings": True}),
    "bamba-biased": ("BambaConfig", {**BAMBA, **BAMBA_BIASED, "rope_parameters": YARN}),
    "falcon-h1": ("FalconH1Config", FALCON_H1),
    "falcon-h1-normed": ("FalconH1Config", {**FALCON_H1, **FALCON_H1_NORMED, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2Config", {"layer_types": [CONV, FULL, CONV], "block_multiple_of": 24}),
    "lfm2-biased": ("Lfm2Config", LFM2_BIASED),
    "lfm2-moe": ("Lfm2MoeConfig", {**LFM2_MOE, "layer_types": [CONV, CONV, FULL]}),
    "phi3": ("Phi3Config", {"sliding_window": 17}),
    "phi4-mini-short": ("Phi3Config", {**_longrope(256), "max_position_embeddings": 1024, "tie_word_embeddings": True}),
    "phi4-mini-long": ("Phi3Config", _longrope(16)),
}
SMALL_VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
GEMMA4_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
GEMMA4_VISION |= {"num_key_value_heads": 2}
SIGLIP = {**SMALL_VISION, "model_type": "siglip_vision_model"}
CLIP = {**SMALL_VISION, "model_type": "clip_vision_model", "projection_dim": 16}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64}
DEEPSTACK = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
SOUND = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32}
VOXTRAL_SOUND = {"num_mel_bins": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 32}
VISION_SECTIONS: dict[str, dict[str, Any]] = {  # the section next to text_config, which has the differences from BASE
    "Mistral3Config": SMALL_VISION,
    "Gemma3Config": SIGLIP,
    "Gemma4Config": GEMMA4_VISION,
    "Gemma4UnifiedConfig": {"mm_embed_dim": 32, "output_proj_dims": 64, "mm_posemb_size": 8},
    "Llama4Config": LLAMA4_VISION,
    "Qwen2VLConfig": QWEN2_VISION,
    "Qwen2_5_VLConfig": QWEN_VISION,
    "Qwen3VLConfig": DEEPSTACK,
    "Qwen3VLMoeConfig": DEEPSTACK,
    "Qwen3_5Config": {**QWEN_VISION, "num_position_embeddings": 16},
    "Qwen3_5MoeConfig": {**QWEN_VISION, "num_position_embeddings": 16},
    "InternVLConfig": {**SMALL_VISION, "model_type": "internvl_vision"},
    "LlavaConfig": CLIP,
    "LlavaNextConfig": CLIP,
    "LlavaOnevisionConfig": SIGLIP,
    "Glm4vConfig": QWEN_VISION,
    "Glm4vMoeConfig": QWEN_VISION,
    "Exaone4_5_Config": QWEN_VISION,
    "SmolVLMConfig": {**SMALL_VISION, "model_type": "smolvlm_vision"},
    "Idefics3Config": {**SMALL_VISION, "model_type": "idefics3_vision"},
    "VoxtralConfig": VOXTRAL_SOUND,
    "Qwen2AudioConfig": SOUND,
}
SOUND_CLASSES = ("VoxtralConfig", "Qwen2AudioConfig")
# The contexts of these models. phi4-mini-short stays within its original context and so uses its short factors; phi4-mini-long
# uses its long ones, as transformers does once a sequence is longer than the original 16.
MAX_MODEL_LEN = 256
ADDS_1 = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5")  # added to the weights of norms


def auto_class(name: str) -> Any:
    """transformers' arguments for a model of the zoo."""
    kind = ZOO[name][0]
    if kind in SOUND_CLASSES:
        return transformers.AutoModelForMultimodalLM
    of_images = kind in VISION_SECTIONS or kind == "Mistral4Config"
    return transformers.AutoModelForImageTextToText if of_images else transformers.AutoModelForCausalLM


def text_model(model: torch.nn.Module) -> torch.nn.Module:
    """The part that computes text: for Llama 4 with images, its text model, because transformers 5.24 requires images."""
    nested = isinstance(model, transformers.Llama4ForConditionalGeneration)
    return model.language_model if nested else model  # type: ignore[return-value]


def make_model(name: str, seed: int, dtype: torch.dtype = torch.float32, **more: Any) -> transformers.PreTrainedModel:
    """The transformers model, with random weights. more: further changes of BASE."""
    kind, changes = ZOO[name]
    values = deepcopy({**BASE, **changes, **more})  # configs of transformers change given values
    if kind in VISION_SECTIONS:
        beside = "audio_config" if kind in SOUND_CLASSES else "vision_config"
        tied = values.get("tie_word_embeddings", kind in ("Gemma3Config", "Gemma4Config", "Gemma4UnifiedConfig"))
        values = {"text_config": values, beside: deepcopy(VISION_SECTIONS[kind]), "tie_word_embeddings": tied}
    config = getattr(transformers, kind)(**values)
    torch.manual_seed(seed)
    model = auto_class(name).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "norm_f.weight")):
                added = kind.startswith(ADDS_1) and not parameter_name.endswith("linear_attn.norm.weight")
                parameter.uniform_(0.5, 1.5).sub_(1 if added else 0)
            elif parameter_name.endswith(("router.scale", "per_expert_scale", "layernorm_1.weight", "layernorm_2.weight")):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("sinks"):
                parameter.normal_(2, 1)
            elif parameter_name.endswith("router.proj.weight"):  # its inputs are scaled down: otherwise experts are nearly equal
                parameter.normal_(0, 1.2)
            elif parameter_name.endswith("e_score_correction_bias"):  # added to shares of a softmax
                parameter.uniform_(-0.1, 0.1)
            elif parameter_name.endswith("bias") or "embed_tokens" in parameter_name or "embeddings" in parameter_name:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(-0.2, 0.2)
            elif buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def save_model(
    name: str, folder: Path, seed: int, *, sharded: bool = False, dtype: torch.dtype = torch.float32, **more: Any
) -> transformers.PreTrainedModel:
    """Save a model of the zoo as a checkpoint folder; returns the model. sharded: over several files. more: further changes of
    BASE."""
    model = make_model(name, seed, dtype, **more)
    if name.endswith("mxfp4"):
        save_mxfp4(model, folder)
        return model
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    return model


def save_mxfp4(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Redraw the experts' matrices as MXFP4 and save them. The model gets transformers' values of them."""
    tensors = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        experts, width, rows = value.shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, rows, width // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        value.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed = {"dtype": str(model.dtype).removeprefix("torch."), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | changed))
