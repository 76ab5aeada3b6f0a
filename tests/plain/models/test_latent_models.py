"""Models with latent attention: their cache, their weights in other forms, and configs that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.fp8_checkpoints import BLOCKS, save_fp8
from support.models.model_zoo import save_model

from blinkpy.config import Config, ConfigError
from blinkpy.models.cpu.torch_decoder import BLOCKS as ON_CPU
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.gpu.gpu_memory_plan import require_kernels
from blinkpy.models.paged_cache import PagedCache, choose_scales, kv_bytes_per_page
from blinkpy.models.weights.array_weights import unknown_parts
from blinkpy.models.weights.checkpoint import open_checkpoint
from blinkpy.models.weights.parts.weight_parts import all_parts
from blinkpy.models.weights.parts.weight_sizes import weight_bytes
from blinkpy.models.weights.weight_loader import load_weights

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
SIZES |= {"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1}
SIZES |= {"topk_group": 1}


def config(kind: str = "DeepseekV3", **more: Any) -> dict[str, Any]:
    return {"architectures": [f"{kind}ForCausalLM"], **SIZES, **more}


def test_a_token_of_a_published_model_takes_576_elements() -> None:
    """Of all heads together: 512 of the latent vector, which are its values too, and 64 that are rotated."""
    model = describe_config(config())
    assert (model.head_dim, model.kv_heads, model.cached_size, model.kv_elements) == (576, 1, 576, 2 * 576)
    assert kv_bytes_per_page(model, 16, 2) == 2 * 576 * 16 * 2
    cache = PagedCache(model, 3, 16, torch.float32)
    cache.keys[1][2, 0, 5, :512] = 7
    assert cache.keys[0].shape == (3, 1, 16, 576) and bool((cache.values[1][2, 0, 5] == 7).all())
    assert cache.values[1].data_ptr() == cache.keys[1].data_ptr()


def test_an_fp8_cache_is_refused() -> None:
    asked = Config().with_options({"kv_cache_dtype": "fp8_e4m3"})
    with pytest.raises(ConfigError, match="is not supported for DeepseekV3ForCausalLM, which caches latent vectors; use auto"):
        choose_scales(asked, describe_config(config()), [], lambda: np.zeros(0, np.float32))
    with pytest.raises(ConfigError, match="which caches latent vectors; use auto"):  # before anything is loaded
        kv_bytes_per_page(describe_config(config()), 16, 1)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for DeepseekV3ForCausalLM"),
        ("DeepseekV3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias without q_lora_rank is not supported"),
        ("DeepseekV3", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer from 1"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "rotary embedding needs an even number of dimensions, not 7"),
        ("DeepseekV3", {"n_group": 3}, "do not fit 8 experts"),
        ("DeepseekV3", {"partial_rotary_factor": 0.25}, "does not match qk_rope_head_dim 64"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob true is not supported for DeepseekV2ForCausalLM"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("DeepseekV2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5}, "n_group 4 and topk_group 5"),
        ("DeepseekV2", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("Glm4MoeLite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 2 entries"),
        ("Mistral4", {"n_group": 4, "topk_group": 2}, "2 of 4 groups of experts"),
        (
            "Mistral4",
            {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            "is supported only with rope type yarn",
        ),
        ("DeepseekV32", {}, "model class DeepseekV32ForCausalLM is not supported: it needs MLA with a sparse indexer"),
        ("GlmMoeDsa", {}, "it needs MLA with a sparse indexer"),
    ],
)
def test_configs_that_are_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_config(config(kind, **changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_factor_of_scores_contains_that_of_yarn() -> None:
    """DeepSeek V3's: 192 ** -0.5 times (0.1 ln 40 + 1) squared."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    model = describe_config(config(rope_scaling=yarn, max_position_embeddings=163840))
    assert model.attention.score_scale == pytest.approx(192**-0.5 * 1.36888794541**2)
    assert model.attention.rope.attention_factor == 1 and model.max_position == 163840


def test_batch_invariant_is_refused_on_the_cpu(tmp_path: Path, rng: np.random.Generator) -> None:
    save_model("deepseek-v3", tmp_path, int(rng.integers(2**31)))
    model = describe_model(tmp_path)
    weights, cache = load_weights(model, tmp_path, torch.float32), PagedCache(model, 4, 16, torch.float32)
    with pytest.raises(ConfigError, match="batch_invariant is not supported on the CPU for DeepseekV3ForCausalLM"):
        TorchDecoder(model, weights, cache, 64, 64, TorchProgress(invariant=True))


def test_decoders_name_what_they_lack() -> None:
    model = describe_config(config())
    assert not model.lacking_blocks(ON_CPU)
    assert any("latent" in part for part in unknown_parts(model))
    require_kernels(model)
    changes, words = (
        {"kv_lora_rank": 768},
        "latent vectors of 768 elements with 64 rotated ones, and the kernels take at most 512 with 128",
    )
    with pytest.raises(ConfigError, match=f"{words}; --device cpu serves this model"):
        require_kernels(describe_config(config(**changes)))


@pytest.mark.parametrize("powers", [False, True])
def test_keys_and_values_are_dequantised(powers: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """Of an FP8 checkpoint, whose scales may be powers of two (ue8m0), in float32 or in 8 bits."""
    save_fp8("deepseek-v3", tmp_path, int(rng.integers(2**31)), "fp8-block", **BLOCKS)
    tensors = load_file(tmp_path / "model.safetensors")
    if powers:
        names = [name for name in tensors if name.endswith("scale_inv")]
        found = {name: torch.exp2(torch.ceil(torch.log2(tensors[name]))) for name in names}
        tensors |= {name: value.to(torch.float8_e8m0fnu) if rng.integers(2) else value for name, value in found.items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((tmp_path / "config.json").read_text())
        values["quantization_config"]["scale_fmt"] = "ue8m0"
        (tmp_path / "config.json").write_text(json.dumps(values))
    model = describe_model(tmp_path)
    weights = load_weights(model, tmp_path, torch.bfloat16)
    for number, layer in enumerate(weights.layers):
        name = f"model.layers.{number}.self_attn.kv_b_proj.weight"
        scales = tensors[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        expected = tensors[name].float() * scales[: tensors[name].shape[0], : tensors[name].shape[1]]
        assert layer.kv_b is not None and torch.equal(layer.kv_b, expected.to(torch.bfloat16))
    sizes = {part.field: part.nbytes(2) for part in all_parts(model)}
    assert weights.layers[0].kv_b is not None and sizes["kv_b"] == 2 * weights.layers[0].kv_b.numel()
    assert weight_bytes(model, 2) > 0


def test_quantization_while_loading_leaves_keys_and_values(tmp_path: Path, rng: np.random.Generator) -> None:
    save_model("deepseek-v3", tmp_path, int(rng.integers(2**31)))
    model = describe_model(tmp_path, "fp8")
    layer = load_weights(model, tmp_path, torch.float32).layers[1]
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"]
    assert layer.kv_b is not None and torch.equal(layer.kv_b, stored)


def test_kimi_k25_as_published(tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Its text has the names of DeepSeek V3 within those of another model; images, and layers for multi-token prediction, are
    left out in one line."""
    save_model("deepseek-v3", tmp_path, int(rng.integers(2**31)))
    before, tensors = describe_model(tmp_path), load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": value for name, value in tensors.items()}
    tensors |= {name: torch.ones(2) for name in ("vision_tower.patch.weight", "mm_projector.linear_1.weight")}
    tensors["language_model.model.layers.3.eh_proj.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"vision_config": {}, "media_placeholder_token_id": 5}))
    caplog.clear()
    model = describe_model(tmp_path)
    assert replace(model, name=before.name, tensors=before.tensors) == before
    open_checkpoint(model, tmp_path)
    assert "ignoring unused tensors" in caplog.messages[-1] and "and 0 more" not in caplog.messages[-1]
