"""Text parts of models with images or sound: names and keys of published checkpoints that transformers itself does not write."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.models.model_zoo import save_model

from blinkpy.config import ConfigError
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.weights.checkpoint import open_checkpoint

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
