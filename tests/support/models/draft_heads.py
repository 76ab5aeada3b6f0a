"""Small checkpoints with a layer for multi-token prediction, whose drafts are sometimes correct."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import model_zoo

FAMILIES = ("glm4-moe", "glm4-moe-air", "deepseek-v3", "glm4-moe-lite")
RECURRENT_FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")  # transformers has no draft layer for these
ENDS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")  # matrices of the layers' outputs
QUIET = 0.1  # factor of the layers' outputs: then the next token often depends only on the last


def save_drafting_model(name: str, folder: Path, seed: int, *, quiet: float = QUIET, **more: Any) -> None:
    """Save a model of the zoo with a draft layer: its last layer, with random weights around it.

    The projection keeps the next token's embedding unchanged, and adds a little of the hidden state. quiet: factor of all layers'
    outputs.
    """
    if name in RECURRENT_FAMILIES:
        _save_recurrent_model(name, folder, seed, quiet, more)
    else:
        _save_model(name, folder, seed, quiet, more)


def _save_model(name: str, folder: Path, seed: int, quiet: float, more: dict[str, Any]) -> None:
    layers = model_zoo.BASE["num_hidden_layers"]
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * layers} if name == "glm4-moe-lite" else {}
    model_zoo.save_model(name, folder, seed, num_hidden_layers=layers + 1, **kinds, **more)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    embedding = tensors["model.embed_tokens.weight"]
    width, prefix = embedding.shape[1], f"model.layers.{layers}."
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(ENDS[:2]):
            tensor.mul_(quiet)
    tensors[f"{prefix}eh_proj.weight"] = _projection(width, generator)
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


def _projection(width: int, generator: torch.Generator) -> torch.Tensor:
    """[width, 2 * width]."""
    return torch.cat([torch.eye(width), 0.1 * torch.randn(width, width, generator=generator) / width**0.5], 1)


def _save_recurrent_model(name: str, folder: Path, seed: int, quiet: float, more: dict[str, Any]) -> None:
    """Save a model with gated delta nets, whose draft layer is the only layer of another model."""
    model_zoo.save_model(name, folder, seed, **more)
    tensors = load_file(folder / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(ENDS) or ".experts.down_proj" in tensor_name:
            tensor.mul_(quiet)
    with tempfile.TemporaryDirectory() as other:
        model_zoo.save_model(name, Path(other), seed + 1, num_hidden_layers=1, layer_types=["full_attention"], **more)
        drafting = load_file(Path(other) / "model.safetensors")
    embedding, generator = tensors["model.embed_tokens.weight"], torch.Generator().manual_seed(seed)
    for tensor_name, tensor in drafting.items():
        if tensor_name.startswith("model.layers.0."):
            tensors[tensor_name.replace("model.", "mtp.", 1)] = tensor.mul_(quiet) if "down_proj" in tensor_name else tensor
    width = embedding.shape[1]
    tensors["mtp.fc.weight"] = _projection(width, generator)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):  # norms add 1
        tensors[f"mtp.{norm}.weight"] = 0.1 * torch.randn(width, generator=generator)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


class RecurrentReference:
    """The draft layer of a model with gated delta nets, as a one-layer transformers model over given inputs."""

    def __init__(self, folder: Path):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        stored = load_file(folder / "model.safetensors")
        own = {name.replace("mtp.", "model.", 1): tensor for name, tensor in stored.items() if name.startswith("mtp.")}
        with tempfile.TemporaryDirectory() as alone:
            kept = {name: tensor for name, tensor in own.items() if not name.startswith(("model.pre_fc", "model.fc"))}
            kept |= {name: stored[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in stored}
            save_file(kept, Path(alone) / "model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(alone)
            self.layer = type(self.model).from_pretrained(alone).eval()
        self.projection = own["model.fc.weight"]
        self.norms = [copy.deepcopy(self.layer.model.norm) for _ in range(2)]
        for norm, name in zip(self.norms, ("embedding", "hidden"), strict=True):
            norm.weight.data = own[f"model.pre_fc_norm_{name}.weight"]

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[tuple[int, float]]:
        """(Draft, distance from the next most probable token) of each draft after some tokens. The layer runs repeatedly."""
        hidden = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        inputs, found = self._inputs(torch.tensor([tokens[1:]]), hidden), list[tuple[int, float]]()
        while len(found) < count:
            result = self.layer.model(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, -1:]
            best = self.model.lm_head(result)[0, -1].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            inputs = torch.cat([inputs, self._inputs(best.indices[None, :1], result)], 1)
        return found

    def _inputs(self, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.norms[0](self.model.model.embed_tokens(following))
        return torch.cat([embedded, self.norms[1](hidden)], -1) @ self.projection.T
