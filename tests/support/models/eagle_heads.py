"""Small EAGLE-3 heads with random weights, and a plain computation of their drafts (Li et al., arXiv 2503.01840)."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from support.models import model_zoo
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

ROWS = 120  # of the output head
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": model_zoo.VOCAB,
    "draft_vocab_size": ROWS,
    "max_position_embeddings": 64,  # fewer than the model's
    "tie_word_embeddings": True,  # without effect
    "torch_dtype": "float32",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
COPYING, SHARP = 0.05, 1.6  # weight of the noise, and of queries and keys, in a head with many correct drafts


def save_head(model: Path, folder: Path, seed: int, *, right: bool = False, embedding: bool = False, **changes: Any) -> Path:
    """Save a head for the model in a folder. Its tokens are a random part of the vocabulary, in random order.

    right: its attention copies the embedding of the last token, so that many of its drafts are correct for a model with quiet
    layers. embedding: give the head its own embedding. changes: keys of its config.
    """
    config, draw = HEAD | changes, torch.Generator().manual_seed(seed)
    hidden, inner, rows, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "draft_vocab_size", "vocab_size"))
    width, keys = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    wide = config.get("target_hidden_size", hidden)
    base = load_file(model / "model.safetensors")

    def matrix(out: int, size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(out, size, generator=draw) * scale * size**-0.5

    tokens = torch.randperm(vocab, generator=draw)[:rows]
    tensors = {
        "fc.weight": matrix(hidden, 3 * wide),
        "midlayer.self_attn.q_proj.weight": matrix(width, 2 * hidden, 2),
        "midlayer.self_attn.k_proj.weight": matrix(keys, 2 * hidden, 2),
        "midlayer.self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, width),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "lm_head.weight": matrix(rows, hidden, 3),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(hidden, generator=draw) for name in norms}
    if config.get("attention_bias"):
        tensors |= {f"midlayer.self_attn.{n}_proj.bias": torch.randn(s, generator=draw) for n, s in _biases(width, keys, hidden)}
    if right:
        for name in ("q", "k", "v", "o"):
            noise = tensors[f"midlayer.self_attn.{name}_proj.weight"].mul_(COPYING)
            noise[:, :hidden] += (SHARP if name in "qk" else 2) * torch.eye(hidden)
        for name in ("fc", "midlayer.mlp.down_proj"):
            tensors[f"{name}.weight"].mul_(COPYING)
        tensors["midlayer.input_layernorm.weight"] = torch.ones(hidden)
        tensors["norm.weight"] = base["model.norm.weight"].clone()
        tensors["lm_head.weight"] = base.get("lm_head.weight", base["model.embed_tokens.weight"])[tokens].contiguous()
    if embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden, 8)
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[tokens] = True
    tensors |= {"d2t": tokens - torch.arange(rows), "t2d": marked}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _biases(width: int, keys: int, hidden: int) -> list[tuple[str, int]]:
    return [("q", width), ("k", keys), ("v", keys), ("o", hidden)]


def save_quiet_model(name: str, folder: Path, seed: int, quiet: float = 0.1, **more: Any) -> None:
    """A model of the zoo whose layers change the residual stream little: the next token often depends only on the last."""
    model_zoo.save_model(name, folder, seed, **more)
    tensors = load_file(folder / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(quiet)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Reference:
    """A head on transformers' model, which recomputes everything for each draft.

    layers: the numbers of layers before which the head reads the residual stream.
    """

    def __init__(self, model: Path, head: Path, layers: tuple[int, ...]):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        self.config, self.layers = json.loads((head / "config.json").read_text()), layers
        self.weights = load_file(head / "model.safetensors")
        keys = ("head_dim", "num_attention_heads", "hidden_size", "max_position_embeddings", "rope_theta", "rope_scaling")
        rope = transformers.LlamaConfig(**{key: self.config[key] for key in keys if key in self.config})
        self.rotary = LlamaRotaryEmbedding(rope)

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """The residual streams that the head reads, side by side, [tokens, 3 * hidden]."""
        found: dict[int, torch.Tensor] = {}
        blocks = self.model.model.layers

        def note(layer: int, value: Any) -> None:
            found[layer] = (value[0] if isinstance(value, tuple) else value).reshape(len(tokens), -1)

        hooks = [blocks[0].register_forward_pre_hook(lambda _, args: note(0, args[0]))]
        hooks += [b.register_forward_hook(lambda _, __, out, i=i: note(i + 1, out)) for i, b in enumerate(blocks)]  # type: ignore[misc]
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat([found[layer] for layer in self.layers], -1)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def result(self, hidden: torch.Tensor, following: list[int]) -> torch.Tensor:
        """The head's result for the last token, before the last norm, [hidden]. hidden: its inputs, [tokens, hidden]."""
        embedding = self.weights.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        embedded = self.norm(embedding[torch.tensor(following)], "midlayer.input_layernorm")
        both = torch.cat([embedded, self.norm(hidden, "midlayer.hidden_norm")], -1)
        size, prefix = self.config["head_dim"], "midlayer.self_attn."
        q, k, v = (self.linear(both, f"{prefix}{name}_proj").unflatten(-1, (-1, size)).transpose(0, 1) for name in "qkv")
        q, k = apply_rotary_pos_emb(q[None], k[None], *self.rotary(hidden, torch.arange(len(hidden))[None]))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v[None].repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q[:, :, -1:], k, v)[0, :, 0].flatten()
        x = hidden[-1] + self.linear(mixed, f"{prefix}o_proj")
        inner = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (self.linear(inner, f"midlayer.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, "midlayer.mlp.down_proj")

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, states: torch.Tensor | None = None) -> list[tuple[int, float]]:
        """(Draft, distance from the next most probable token) of each draft after some tokens. states: residual streams of at
        least these tokens."""
        states = self.states(tokens) if states is None else states
        hidden, following, found = self.linear(states[: len(tokens) - 1], "fc"), tokens[1:], list[tuple[int, float]]()
        while len(found) < count:
            x = self.result(hidden, following)
            best = self.linear(self.norm(x, "norm"), "lm_head").topk(2)
            row = int(best.indices[0])
            found.append((row + int(self.weights["d2t"][row]), float(best.values[0] - best.values[1])))
            hidden, following = torch.cat([hidden, x[None]]), [*following, found[-1][0]]
        return found
