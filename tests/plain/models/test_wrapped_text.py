"""Text parts of models with images or sound: names and keys of published checkpoints that transformers itself does not write."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from support.models.fp8_checkpoints import SCHEMES, by_rows
from support.models.model_zoo import save_model
from support.models.published_widths import PACKINGS

from blinkpy.config import ConfigError
from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.families.wrapped_text import WRAPPERS
from blinkpy.models.gpu.gpu_memory_plan import first_layers
from blinkpy.models.weights.checkpoint import as_stored, check_names, open_checkpoint
from blinkpy.models.weights.parts.weight_parts import layer_parts
from blinkpy.models.weights.weight_loader import load_weights

PREFIXES = (("vision_tower.", "vision_model."), ("multi_modal_projector.", "mlp1."))
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
QWEN3 |= {"intermediate_size": 96, "num_key_value_heads": 2}


def test_internvl_as_published(tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Its text is in llm_config, and other names stand before the tensors. Images are left out in one line."""
    save_model("internvl-qwen2", tmp_path, int(rng.integers(2**31)), tie_word_embeddings=False)
    before = describe_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in PREFIXES:
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: value for name, value in tensors.items()}
    assert any(name.startswith("mlp1.") for name in tensors) and "language_model.model.norm.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config") | {"architectures": ["Qwen2ForCausalLM"]}
    more = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": text, "template": "internvl2_5"}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    caplog.clear()
    model = describe_model(tmp_path)
    assert replace(model, name=before.name) == before
    open_checkpoint(model, tmp_path)
    (line,) = caplog.messages
    assert "ignoring unused tensors: mlp1." in line


def test_glm46v_has_the_text_of_glm41v_or_of_glm45v() -> None:
    for kind, sizes in (("glm4v_text", {}), ("glm4v_moe_text", {"moe_intermediate_size": 32, "n_routed_experts": 8})):
        text = QWEN3 | sizes | {"model_type": kind, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
        found = describe_config({"architectures": ["Glm46VForConditionalGeneration"], "text_config": text})
        other = "Glm4vMoe" if "moe" in kind else "Glm4v"
        expected = describe_config({"architectures": [f"{other}ForConditionalGeneration"], "text_config": text})
        assert replace(found, name=expected.name) == expected


def test_a_quantization_within_the_text_counts() -> None:
    scheme = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    inner = describe_config(outer | {"text_config": QWEN3 | {"model_type": "qwen3_vl_text"} | scheme})
    assert inner.quantization is not None
    assert inner == describe_config(outer | scheme | {"text_config": QWEN3 | {"model_type": "qwen3_vl_text"}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"model_type": "mamba2"}, "text_config: model_type 'mamba2' is not supported as the text model of Llava"),
        ({"model_type": "llava"}, "text_config: model_type 'llava' is not supported as the text"),
        ({"model_type": 5}, "text_config: model_type 5 is not supported"),
        ("qwen3", "text_config must be an object, not qwen3"),
        (None, "text_config must be an object, not None"),
        (QWEN3 | {"mlp_bias": True}, "text_config: mlp_bias is not supported for LlavaForConditionalGeneration"),
    ],
)
def test_other_texts_are_refused(text: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    assert words in str(caught.value) and "\n" not in str(caught.value)


LISTS = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "published_models.py"))
FORMS: dict[str, dict[str, Any]] = {name: LISTS[name] for name in ("AWQ", "GPTQ", "W4A16", "NVFP4")}
FORMS |= {name: LISTS[name]["quantization_config"] for name in ("FP8", "STATIC_FP8")} | PACKINGS
FORMS |= {f"FP8 {name}": scheme for name, (scheme, *_) in SCHEMES.items()}
WRAPPED = {
    model.hub_id: model.config
    for model in LISTS["MODELS"]
    if model.config["architectures"][0] in {wrapper.name for wrapper in WRAPPERS} and not model.refusal
}
REASONS = (
    "inputs are not a multiple of",  # a scale's group or a block, of widths such as 2,112 or 10,944
    "does not start at a multiple of 128 rows",
    "the inputs of .* are gated first",
)


@pytest.mark.parametrize("hub_id", WRAPPED)
def test_every_form_of_weights_is_accepted_or_refused_by_name(hub_id: str, rng: np.random.Generator) -> None:
    """Of each published model that takes images or sound; four forms in a run. In an accepted form, each expert
    has separate matrices, as in quantised checkpoints.
    """
    plain, refusals = describe_config(WRAPPED[hub_id]), list[str]()
    for name in rng.choice(list(FORMS), 4, replace=False):
        form = FORMS[name]
        try:
            model = describe_config(WRAPPED[hub_id] | {"quantization_config": form})
        except ConfigError as error:
            refusals.append(str(error))
            continue
        assert (model.packing is None) != (model.quantization is None)
        assert replace(model, packing=None, quantization=None) == plain
        parts = [part for layer in first_layers(model) for part in layer_parts(model, layer)]
        quantised = [part for part in parts if part.packing is not None or part.quantization is not None]
        assert {"gate_up", "down", "o"} <= {part.field for part in quantised}
        assert all(len(shape) == 2 for part in quantised for _, shape, _, _ in part.sources)
    for words in refusals:
        assert "model.language_model.layers." in words and "\n" not in words
        assert any(re.search(reason, words) for reason in REASONS), words


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_experts_of_qwen3_vl(tmp_path: Path, rng: np.random.Generator, bits: int) -> None:
    """transformers has one tensor for all experts, and quantised checkpoints have tensors of each."""
    save_model("qwen3-vl-moe", tmp_path, int(rng.integers(2**31)))
    plain = load_weights(as_stored(describe_model(tmp_path), tmp_path), tmp_path, torch.float32)
    tensors = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if ".experts." not in name}
    exact = dict[tuple[int, int, str], torch.Tensor]()
    for index, layer in enumerate(plain.layers):
        if layer.router is None:
            continue
        for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
            gate, up = gate_up.chunk(2)
            for kind, matrix in {"gate": gate, "up": up, "down": down}.items():
                stem = f"model.language_model.layers.{index}.mlp.experts.{expert}.{kind}_proj."
                stored, exact[index, expert, kind] = (in_8_bits if bits == 8 else in_4_bits)(stem, matrix)
                tensors |= stored
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    form = SCHEMES["channel"][0] if bits == 8 else IN_4_BITS
    ignored = {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*visual.*", "re:.*mlp.gate$", "re:.*mlp.(gate|up|down)_proj$"]}
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": form | ignored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = describe_model(tmp_path)
    check_names(model, list(tensors), tmp_path)
    loaded = load_weights(as_stored(model, tmp_path), tmp_path, torch.float32)
    assert exact
    for (index, expert, kind), matrix in exact.items():
        found = dense(loaded.layers[index].down if kind == "down" else loaded.layers[index].gate_up, expert)
        some = found if kind == "down" else found.chunk(2)[kind == "up"]
        torch.testing.assert_close(some, matrix, rtol=1e-6, atol=0)


IN_4_BITS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        }
    },
}


def in_8_bits(stem: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix [n, k] with a scale for each row, and the matrix that they stand for."""
    values, scales = by_rows(matrix)
    return {f"{stem}weight": values.to(torch.float8_e4m3fn), f"{stem}weight_scale": scales}, values * scales


def in_4_bits(stem: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Likewise, with scales of bfloat16."""
    scales = (matrix.abs().amax(1, keepdim=True) / 7).bfloat16()
    numbers = (matrix / scales.float()).round().clamp(-8, 7)
    stored = {f"{stem}weight_packed": pack_to_int32(numbers.to(torch.int8), 4), f"{stem}weight_scale": scales}
    return stored | {f"{stem}weight_shape": torch.tensor(matrix.shape)}, numbers * scales.float()


def dense(weight: Any, expert: int) -> torch.Tensor:
    """A quantised matrix of an expert, float32."""
    if isinstance(weight, Fp8Matrix):
        return weight.values[expert].float() * weight.scales[expert][:, None]
    assert isinstance(weight, PackedMatrix)
    return weight[expert].unpack(slice(0, weight[expert].shape[0]), torch.float32)
