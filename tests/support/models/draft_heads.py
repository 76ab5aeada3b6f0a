"""Small checkpoints with a layer for multi-token prediction, whose drafts are sometimes correct."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models import model_zoo

FAMILIES = ("glm4-moe", "glm4-moe-air", "deepseek-v3", "glm4-moe-lite")
QUIET = 0.1  # factor of the layers' results: the next token then often depends on the last one alone


def save_drafting_model(name: str, folder: Path, seed: int, *, quiet: float = QUIET, **more: Any) -> None:
    """Save a model of the zoo with a draft layer: the last of its layers, with random weights around it.

    The projection takes the next token's embedding unchanged, and a little of the hidden state. quiet: factor of the results
    of all layers.
    """
    layers = model_zoo.BASE["num_hidden_layers"]
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * layers} if name == "glm4-moe-lite" else {}
    model_zoo.save_model(name, folder, seed, num_hidden_layers=layers + 1, **kinds, **more)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    embedding = tensors["model.embed_tokens.weight"]
    width, prefix = embedding.shape[1], f"model.layers.{layers}."
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(quiet)
    both = torch.cat([torch.eye(width), 0.1 * torch.randn(width, width, generator=generator) / width**0.5], 1)
    tensors[f"{prefix}eh_proj.weight"] = both
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config.pop("num_mtp_layers", None)
    if kinds:
        config["mlp_layer_types"] = kinds["mlp_layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
