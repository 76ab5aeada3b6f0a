"""Checkpoints that compressed-tensors itself writes: its presets with FP8 weights and inputs, read as it says."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from support.models.fp8_checkpoints import quantised
from support.models.model_zoo import make_model
from support.models.packed_checkpoints import draw_mxfp4

from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.packed_matrix import dense
from blinkpy.models.weights.weight_loader import load_weights

SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
PRESETS = {"FP8_DYNAMIC": "row", "FP8": "tensor", "FP8_BLOCK": "block"}  # and the numbers that share a scale
KEPT = r"model\.layers\.1\..*o_proj"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, tmp_path: Path, rng: np.random.Generator) -> None:
    model: Any = make_model("llama2", int(rng.integers(2**31)), **SIZES)
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])}, ignore=["lm_head", f"re:{KEPT}"]
    )
    apply_quantization_config(model, config)
    exact, inputs = dict[str, torch.Tensor](), dict[str, float]()
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            _, scales, exact[name] = quantised(module.weight.data, PRESETS[preset])
            module.weight_scale.data.copy_(scales.view(module.weight_scale.shape))
        if hasattr(module, "input_scale"):
            inputs[name] = float(rng.uniform(0.01, 0.03))
            module.input_scale.data.fill_(inputs[name])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))

    layers = load_weights(describe_model(tmp_path), tmp_path, torch.float32).layers
    assert not isinstance(layers[1].o, Fp8Matrix)
    assert "model.layers.1.self_attn.o_proj" not in exact and "model.layers.0.self_attn.o_proj" in exact
    for index, layer in enumerate(layers):
        names = [f"model.layers.{index}.self_attn.{name}_proj" for name in "qkv"]
        assert isinstance(layer.qkv, Fp8Matrix)
        scales = layer.qkv.scales
        every = scales.repeat_interleave(128, 0).repeat_interleave(128, 1) if layer.qkv.blocks else scales[:, None]
        expected = torch.cat([exact[name] for name in names])
        assert torch.equal(layer.qkv.values.float() * every, expected)
        given = [inputs[name] for name in names if name in inputs]
        assert layer.qkv.input_scale is None if not given else math.isclose(layer.qkv.input_scale or 0, max(given), rel_tol=1e-6)


@pytest.mark.parametrize("preset", ["MXFP4A16", "MXFP4"])
def test_mxfp4(preset: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Inputs are not quantised, whatever the preset does with them."""
    model: Any = make_model("llama2", int(rng.integers(2**31)), **SIZES)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    exact = dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            rows, width = module.weight.shape
            _, exact[name] = draw_mxfp4(rng, "", rows, width)
            module.weight.data.copy_(exact[name])
            least = exact[name].view(rows, -1, 32).abs().amax(-1).clamp_min(2.0**-40)
            module.weight_scale.data.copy_(torch.exp2(torch.ceil(torch.log2(least / 6))).view(module.weight_scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    for index, layer in enumerate(load_weights(describe_model(tmp_path), tmp_path, torch.float32).layers):
        assert isinstance(layer.down, PackedMatrix)
        assert torch.equal(dense(layer.down, torch.float32), exact[f"model.layers.{index}.mlp.down_proj"])
