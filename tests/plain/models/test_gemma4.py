"""Gemma 4: sizes of its two kinds of layers, the forms of its config.json, and refusals."""

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.models.model_zoo import BASE, GEMMA4_MOE, save_model

from blinkpy.config import ConfigError
from blinkpy.kernels.fp8_rows import Fp8Matrix
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.gpu.gpu_memory_plan import require_kernels
from blinkpy.models.paged_cache import PagedCache, RingSizes, kv_bytes_per_page, ring_bytes
from blinkpy.models.weights.array_weights import unknown_parts
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.decoder_weights import dummy_weights, load_weights

PUBLISHED: dict[str, Any] = {
    model.hub_id: model.config
    for model in runpy.run_path(str(Path(__file__).parents[3] / "tools" / "published_models.py"))["MODELS"]
}
OF_31B = PUBLISHED["google/gemma-4-31B-it"]
SIZES = {"num_hidden_layers": 4, "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96}
TEXT = {"architectures": ["Gemma4ForCausalLM"], **OF_31B["text_config"], **SIZES}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}


def published() -> DecoderDescription:
    return describe_config(OF_31B)


def test_layers_of_31b() -> None:
    model = published()
    sizes = [(layer.attention.head_dim, layer.attention.kv_heads, layer.attention.window) for layer in model.layers]
    assert sizes == ([(256, 16, 1024)] * 5 + [(512, 4, 0)]) * 10
    assert [layer.attention.keys_are_values for layer in model.layers] == [window == 0 for _, _, window in sizes]
    assert {layer.attention.score_scale for layer in model.layers} == {1.0}
    full, sliding = 2 * 4 * 512, 2 * 16 * 256
    assert model.kv_elements == 10 * full + 50 * sliding
    assert kv_bytes_per_page(model, 16, 2) == 2 * 16 * model.kv_elements
    rings = RingSizes.of(model, 16, 3, 64, 3)
    assert rings is not None and kv_bytes_per_page(model, 16, 2, rings) == 2 * 16 * 10 * full
    assert ring_bytes(model, rings, 2) == 2 * 16 * rings.all_pages * sliding


def test_a_cache_has_the_memory_that_its_plan_says() -> None:
    model = describe_config(TEXT | {"num_hidden_layers": 7})
    rings = RingSizes.of(model, 16, 2, 64, 2)
    for some in (None, rings):
        cache = PagedCache(model, 3, 16, torch.bfloat16, rings=some)
        memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in cache.keys + cache.values}
        assert sum(memory.values()) == 3 * kv_bytes_per_page(model, 16, 2, some) + ring_bytes(model, some, 2)


def test_a_saved_config_means_the_same() -> None:
    """transformers writes the sizes of full layers into per_layer_config; published files have other keys."""
    for changes in ({}, {"attention_k_eq_v": False}, {"num_global_key_value_heads": None}, {"num_hidden_layers": 8}):
        config = TEXT | changes
        saved = transformers.Gemma4TextConfig(**copy.deepcopy(config)).to_dict()
        assert "global_head_dim" not in saved and len(saved["per_layer_config"]) > 0
        again = json.loads(json.dumps(saved)) | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
        assert describe_config(again) == describe_config(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not supported .*E2B"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 is not supported .*E2B"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"num_attention_heads": 30}, "num_attention_heads .30. is not a multiple of the 4 key and value heads"),
        ({"rope_parameters": {"rope_type": "default"}}, "needs rope_parameters with one section for each of"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "needs rope_parameters with one section for each of"),
        (
            {"rope_parameters": {kind: {"rope_type": "yarn"} for kind in ("full_attention", "sliding_attention")}},
            "rope_parameters.full_attention: rope type 'yarn' is not supported",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "needs rope_parameters with one section"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "gives layers with sliding_attention different sizes"),
        ({"per_layer_config": {"0": {"hidden_size": 64}}}, "per_layer_config.0 must be an object with the keys head_dim"),
        ({"per_layer_config": {"4": {"head_dim": 64}}}, "numbers of layers below 4 as keys"),
        ({"per_layer_config": {"3": {"head_dim": "64"}}}, "per_layer_config.3: head_dim must be an integer"),
        ({"per_layer_config": [3]}, "per_layer_config must be an object"),
        (EXPERTS | {"top_k_experts": 9}, "top_k_experts .9. is above num_experts .8."),
        (EXPERTS | {"num_experts": None}, "num_experts is missing"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ],
)
def test_values_without_a_block_are_refused(changes: dict[str, Any], words: str) -> None:
    describe_config(TEXT)
    with pytest.raises(ConfigError, match=words) as caught:
        describe_config(TEXT | changes)
    assert "\n" not in str(caught.value)


def test_kernels_take_its_layers() -> None:
    """Those of NumPy do not; and a size that no kernel takes is named with its own layer."""
    for model in (published(), describe_config(PUBLISHED["google/gemma-4-26B-A4B-it"])):
        require_kernels(model)
        assert {"Attention.value_norm", "weights layer_scale"} <= set(unknown_parts(model))
    for changes, words in (
        ({"global_head_dim": 640}, "layers.3.self_attn: head size 640, and the kernels take sizes from 16 to 512"),
        ({"num_global_key_value_heads": 1}, "layers.3.self_attn: 32 query heads over 1 key and value heads"),
    ):
        with pytest.raises(ConfigError, match=words):
            require_kernels(describe_config(TEXT | changes))


def test_experts_are_quantised_as_they_are_loaded(tmp_path: Path, rng: np.random.Generator) -> None:
    save_model("gemma4-moe", tmp_path, int(rng.integers(2**31)))
    described = (as_stored(describe_model(tmp_path, kind), tmp_path) for kind in ("auto", "fp8"))
    plain, quantised = (load_weights(model, tmp_path, torch.float32) for model in described)
    for ours, theirs in zip(quantised.layers, plain.layers, strict=True):
        for field in ("qkv", "gate_up", "down", "shared_down"):
            matrix, exact = getattr(ours, field), getattr(theirs, field)
            assert isinstance(matrix, Fp8Matrix)
            assert (matrix.values.float() * matrix.scales[..., None] - exact).abs().max() < exact.abs().max() / 14
        assert torch.equal(ours.router_norm, theirs.router_norm)


def test_dummy_weights_leave_factors_at_one() -> None:
    """With random ones the residual stream would vanish layer by layer."""
    model = describe_config({"architectures": ["Gemma4ForCausalLM"], **BASE, **GEMMA4_MOE})
    for layer in dummy_weights(model, 1, torch.float32).layers:
        for found in (layer.layer_scale, layer.expert_factors, layer.router_norm, layer.experts_in_norm):
            assert found is not None and bool((found == 1).all())
