"""Gemma 4: sizes of its two kinds of layers, the forms of its config.json, and refusals."""

import copy
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.model_zoo import BASE, GEMMA4_MOE, save_model

from blinkpy.config import Config, ConfigError
from blinkpy.kernels.quantised_matrices import Fp8Matrix
from blinkpy.models.description.blocks import Mlp
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.gpu.gpu_buffers import Buffers
from blinkpy.models.gpu.gpu_memory_plan import activation_bytes, require_kernels
from blinkpy.models.paged_cache import PagedCache, RingSizes, choose_scales, kv_bytes_per_page, ring_bytes
from blinkpy.models.weights.array_weights import unknown_parts
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

PUBLISHED: dict[str, Any] = {
    model.hub_id: model.config
    for model in runpy.run_path(str(Path(__file__).parents[3] / "tools" / "published_models.py"))["MODELS"]
}
OF_31B = PUBLISHED["google/gemma-4-31B-it"]
SIZES = {"num_hidden_layers": 4, "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96}
TEXT = {"architectures": ["Gemma4ForCausalLM"], **OF_31B["text_config"], **SIZES}
SHARED: dict[str, Any] = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 24}
SHARED |= {
    "vocab_size_per_layer_input": 99,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"],
}
LAST_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1}
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


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 7}, SHARED])
def test_a_cache_has_the_memory_that_its_plan_says(changes: dict[str, Any]) -> None:
    """Layers that read the keys of earlier layers have no keys."""
    model = describe_config(TEXT | changes)
    rings = RingSizes.of(model, 16, 2, 64, 2)
    for some in (None, rings):
        cache = PagedCache(model, 3, 16, torch.bfloat16, rings=some)
        memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in cache.keys + cache.values}
        assert sum(memory.values()) == 3 * kv_bytes_per_page(model, 16, 2, some) + ring_bytes(model, some, 2)


def test_layers_of_e2b() -> None:
    """Of 35 layers the last 20 read the keys and values of layers 13 (with a window) and 14."""
    model = describe_config(PUBLISHED["google/gemma-4-E2B-it"])
    assert [layer.attention.keys_of for layer in model.layers] == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [layer.mlp.size for layer in model.layers if isinstance(layer.mlp, Mlp)] == [6144] * 15 + [12288] * 20
    assert model.kv_elements == 12 * 2 * 256 + 3 * 2 * 512
    assert model.layer_inputs == 256 and model.last_readers == {*range(13), 33, 34}
    rings = RingSizes.of(model, 16, 3, 64, 3)
    assert rings is not None and rings.layers == tuple(layer for layer in range(15) if layer % 5 < 4)
    require_kernels(model)
    assert {"Attention.keys_of", "DecoderDescription.layer_inputs"} <= set(unknown_parts(model))


def test_buffers_of_embeddings_for_each_layer_are_planned() -> None:
    """The plan is an upper bound; without them it is smaller by their size."""
    tokens, rows = 4096, 64
    models = [describe_config(TEXT | SHARED | {"hidden_size_per_layer_input": width}) for width in (0, 512)]
    without, planned = (activation_bytes(model, tokens, rows, 1024, 2) for model in models)
    buffers = Buffers(models[1], tokens, rows, torch.bfloat16, "meta", tokens)
    assert planned - without == 2 * (buffers.layer_inputs.numel() + buffers.gated_inputs.numel())
    assert buffers.cut_layer_inputs.numel() == tokens * 6 * 512


def test_keys_of_layers_that_read_others_are_left_out(tmp_path: Path, rng: np.random.Generator, caplog: Any) -> None:
    """Published checkpoints have them. They change nothing; other foreign tensors are refused."""
    save_model("gemma4-e", tmp_path, int(rng.integers(2**31)))
    model, (file,) = describe_model(tmp_path), tmp_path.glob("*.safetensors")
    expected, tensors = load_weights(model, tmp_path, torch.float32), load_file(file)
    unread = {f"model.layers.{layer}.self_attn.{name}.weight": 7 for layer in (2, 4) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | {name: torch.full((4, 4), float(value)) for name, value in unread.items()}, file)
    again = load_weights(model, tmp_path, torch.float32)
    assert "ignoring unused tensors" in caplog.text
    for one, other in zip(expected.layers, again.layers, strict=True):
        assert torch.equal(one.qkv, other.qkv)
    assert again.layers[2].k_norm is None and again.layers[2].qkv.shape == (4 * 16, 64)
    for name in ("model.layers.0.self_attn.k_other.weight", "model.layers.3.self_attn.k_proj_b.weight"):
        save_file(tensors | {name: torch.ones(4)}, file)
        with pytest.raises(ConfigError, match=f"the checkpoint has {name}"):
            load_weights(model, tmp_path, torch.float32)


@pytest.mark.parametrize("missing", ["embed_tokens_per_layer", "layers.4.per_layer_projection", "layers.0.self_attn.k_proj"])
def test_a_missing_tensor_is_named(tmp_path: Path, rng: np.random.Generator, missing: str) -> None:
    save_model("gemma4-e", tmp_path, int(rng.integers(2**31)))
    (file,) = tmp_path.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(file).items() if missing not in name}, file)
    with pytest.raises(ConfigError, match=f"the checkpoint lacks model.{missing}.weight"):
        load_weights(describe_model(tmp_path), tmp_path, torch.float32)


def test_layers_read_an_fp8_cache_with_the_scales_of_its_owner(rng: np.random.Generator) -> None:
    model = describe_config(TEXT | SHARED)
    config = Config().with_options({"kv_cache_dtype": "fp8_e4m3"})
    layers = [SimpleNamespace(k_scale=None, v_scale=None) for _ in model.layers]
    for layer in layers[:3]:
        layer.k_scale, layer.v_scale = rng.uniform(0.5, 2, 2).tolist()
    scales = choose_scales(config, model, layers, lambda: pytest.fail("all are given"))
    assert scales is not None and np.array_equal(scales[3:], scales[[1, 1, 2]])


def test_a_saved_config_means_the_same() -> None:
    """transformers writes the sizes of full layers into per_layer_config; published files have other keys."""
    for changes in ({}, SHARED, {"attention_k_eq_v": False}, {"num_global_key_value_heads": None}, {"num_hidden_layers": 8}):
        config = TEXT | changes
        saved = transformers.Gemma4TextConfig(**copy.deepcopy(config)).to_dict()
        assert "global_head_dim" not in saved and len(saved["per_layer_config"]) > 0
        again = json.loads(json.dumps(saved)) | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
        assert describe_config(again) == describe_config(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size_per_layer_input": 256}, "vocab_size_per_layer_input .262144. must equal vocab_size .99."),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be an integer from 0"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers .4. must be below num_hidden_layers .4."),
        ({"num_kv_shared_layers": 2}, "leaves layer 3, with full_attention, no earlier layer of its type"),
        ({"num_kv_shared_layers": 1.5}, "num_kv_shared_layers must be an integer from 0"),
        (EXPERTS | LAST_SHARED | {"use_double_wide_mlp": True}, "use_double_wide_mlp is not supported together with enable_moe"),
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
