"""FP8 checkpoints of the zoo's models in published layouts, and transformers' model with the same rounding.

Written by hand, after the output of compressed-tensors 0.20, transformers 5.23 (FineGrainedFP8) and modelopt.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.model_zoo import ZOO, auto_class, make_model
from torch.overrides import TorchFunctionMode

LINEAR = re.compile(
    r"(?!.*vision).*layers\.\d+\.(?!.*(norm|router|mlp\.gate\b|moe\.gate\b|shared_expert_gate|sinks|bias|conv1d|A_log|mamba\.D|mixer\.(D|gate)\b|conv\.conv|forward\.gate\b))"
)
KINDS = {  # kinds of matrices, by the first matching pattern; matrices of a kind and a layer have the same inputs here
    "strengths and decays": r"linear_attn\.in_proj_(b|a|ba)\.",
    "qkv": r"(self_attn|mixer)\.(q|k|v|qkv|q_a)_proj|kv_a_proj|(linear_attn|conv|mamba|mixer)\.in_proj",
    "q_b": r"self_attn\.q_b_proj",
    "kv_b": r"self_attn\.kv_b_proj",  # dequantised before it is absorbed, so its inputs are not rounded
    "gate of a layer's inputs": r"per_layer_input_gate",
    "projection of a layer's inputs": r"per_layer_projection",
    "o": r"(self_attn|mixer)\.o_proj|\.out_proj",
    "shared gate and up": r"shared_(experts?|mlp)\.(gate|up)_proj",
    "shared down": r"shared_(experts?|mlp)\.down_proj",
    "experts' gate and up": r"experts\..*(gate|up)_proj|experts\..*w[13]\b|experts\.gate_up_proj",
    "experts' down": r"experts\..*down_proj|experts\..*w2\b|experts\.down_proj",
    "gate and up": r"(gate|up|gate_up)_proj|shared_mlp\.input_linear|forward\.w[13]\b",
    "down": r"down_proj|shared_mlp\.output_linear|forward\.w2\b",
}
TARGETS = {"targets": ["Linear"], "output_activations": None}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True, "observer": "minmax", "group_size": None}
BLOCKS = {"hidden_size": 192, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128}
BLOCKS |= {"intermediate_size_mlp": 256}
"""For `more`: sizes of models whose fused parts begin at multiples of 128; rows of 192 columns end with half a block."""


def compressed(weights: dict[str, Any], inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {**TARGETS, "weights": {**NUMBERS, "dynamic": False, **weights}, "input_activations": {**NUMBERS, **inputs}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return {**config, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, **more}


TOKEN = {"strategy": "token", "dynamic": True}
GROUP = {"strategy": "group", "dynamic": True, "group_size": 128}
TENSOR = {"strategy": "tensor", "dynamic": False}
# name -> quantization_config, unit with a scale of weights, names of the scales, whether scales of inputs are stored
SCHEMES: dict[str, tuple[dict[str, Any], str, tuple[str, str], bool]] = {
    "channel": (compressed({"strategy": "channel"}, TOKEN), "row", ("weight_scale", ""), False),
    "channel-static": (compressed({"strategy": "channel"}, TENSOR), "row", ("weight_scale", "input_scale"), True),
    "tensor": (compressed({"strategy": "tensor"}, TENSOR), "tensor", ("weight_scale", "input_scale"), True),
    "block": (
        compressed({"strategy": "block", "block_structure": [128, 128]}, GROUP), "block", ("weight_scale", ""), False
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "tensor", ("weight_scale", ""), False),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        "tensor", ("weight_scale_inv", "activation_scale"), True,
    ),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "block", ("weight_scale_inv", ""), False,
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "tensor", ("weight_scale", "input_scale"), True,
    ),
}  # fmt: skip


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float32 numbers rounded to the nearest numbers of E4M3, at most 448."""
    step = torch.exp2((torch.frexp(x).exponent - 1).clamp(min=-6) - 3.0)
    return (torch.round(x.double() / step.double()) * step).clamp(-448, 448).float()


def by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers of float32 [..., K], and the scales, [..., 1]."""
    scales = x.abs().amax(-1, keepdim=True) / 448
    scales = torch.where(scales == 0, 1.0, scales)
    return rounded(x / scales), scales


def quantised(weight: torch.Tensor, share: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 numbers and stored scales of a matrix, and the matrix that they represent."""
    if share == "row":
        values, scales = by_rows(weight)
        return values, scales, values * scales
    size = 128 if share == "block" else max(weight.shape)
    grid = [-(-n // size) for n in weight.shape]
    scales = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            scales[i, j] = weight[i * size : (i + 1) * size, j * size : (j + 1) * size].abs().max() / 448
    every = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
    values = rounded(weight / every)
    return values, scales if share == "block" else scales.view(1), values * every


TOGETHER = re.compile(r".*(?:feed_forward|layers\.\d+)\.experts")  # transformers has all of a layer's experts in one tensor


def each_expert_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with the experts of Llama 4 and Gemma 4 in llm-compressor's layout: a linear layer for each matrix."""
    result = {}
    for name, value in tensors.items():
        stem, _, last = name.rpartition(".")
        if not TOGETHER.fullmatch(stem):
            result[name] = value
            continue
        for expert, matrix in enumerate(value if "feed_forward" in stem else value.mT):
            parts = matrix.chunk(2, 1) if last == "gate_up_proj" else (matrix,)
            for kind, part in zip(("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",), parts, strict=True):
                result[f"{stem}.{expert}.{kind}.weight"] = part.t().contiguous()
    return result


def experts_together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of each_expert_apart."""
    result, found = {}, defaultdict[tuple[str, str], list[torch.Tensor]](list)
    for name, value in tensors.items():
        match = re.match(rf"({TOGETHER.pattern})\.(\d+)\.(\w+)_proj", name)
        if match:
            result[f"{match[1]}.{match[3]}.{int(match[2]):04}"] = value.t()
        else:
            result[name] = value
    for name in sorted(name for name in result if TOGETHER.fullmatch(name.rsplit(".", 2)[0])):
        stem, kind, _ = name.rsplit(".", 2)
        found[stem, kind].append(result.pop(name))
    for stem in {stem for stem, _ in found}:
        gate, up, down = (torch.stack(found[stem, kind]) for kind in ("gate", "up", "down"))
        both = {f"{stem}.gate_up_proj": torch.cat([gate, up], 2), f"{stem}.down_proj": down}
        result |= both if "feed_forward" in stem else {key: matrix.mT.contiguous() for key, matrix in both.items()}
    return result


def group(name: str) -> tuple[str, str]:
    """The layer and kind of a matrix."""
    layer = re.search(r"layers\.(\d+)\.", name)
    assert layer is not None
    return layer[1], next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def save_fp8(
    name: str,
    folder: Path,
    seed: int,
    scheme: str,
    kept: Callable[[str], bool] = lambda name: False,
    ignored: dict[str, Any] | None = None,
    *,
    stacked: bool = False,
    **more: Any,
) -> tuple[transformers.PreTrainedModel, "FakeFp8"]:
    """Save a model of the zoo in an FP8 layout. Returns transformers' model of the same numbers, and the mode in which it must
    run. kept: whether a matrix stays unquantised; ignored: the section's entry for it. stacked: quantise experts that are one
    tensor. more: further changes of BASE."""
    config, share, (scale, input_scale), static = SCHEMES[scheme]
    plain = folder / "plain"
    if "shared_expert_intermediate_size" in ZOO[name][1] and share == "block":
        more = {**more, "shared_expert_intermediate_size": 128}
    if "kv_lora_rank" in ZOO[name][1] and share == "block":  # head_dim would replace the size of the rotated part
        sizes = {"q_lora_rank": 128} if ZOO[name][1]["q_lora_rank"] else {}
        more = {key: value for key, value in more.items() if key != "head_dim"} | sizes
    if "global_head_dim" in ZOO[name][1] and share == "block":
        more = {**more, "global_head_dim": 128}
    make_model(name, seed, **more).save_pretrained(plain)
    tensors, stored = each_expert_apart(load_file(plain / "model.safetensors")), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(seed)
    inputs = defaultdict[tuple[str, str], float](float)
    for key, value in list(tensors.items()):
        if stacked and LINEAR.match(key) and value.dim() == 3:  # each expert's matrix has a scale
            of_each = [quantised(matrix, share) for matrix in value]
            numbers, found, exact = (torch.stack([each[at] for each in of_each]) for at in range(3))
            ends = scale.removeprefix("weight"), f"_{input_scale}"
            stored |= {key: numbers.to(torch.float8_e4m3fn), key + ends[0]: found.view(-1, 1, 1)}
            tensors[key] = exact
            if static:
                stored[key + ends[1]] = torch.empty(len(value)).uniform_(0.008, 0.02, generator=generator)
                inputs[group(key)] = float(stored[key + ends[1]].max())
            continue
        if not LINEAR.match(key) or value.dim() != 2 or kept(key.removesuffix(".weight")):
            stored[key] = value
            continue
        values, scales, tensors[key] = quantised(value, share)
        stored |= {key: values.to(torch.float8_e4m3fn), key.removesuffix("weight") + scale: scales}
        if static:
            chosen = torch.empty(()).uniform_(0.008, 0.02, generator=generator)
            stored[key.removesuffix("weight") + input_scale] = chosen
            inputs[group(key)] = max(inputs[group(key)], float(chosen))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(experts_together(tensors), plain / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((plain / "config.json").read_text())
    config = {**config, **({} if ignored is None else ignored)}
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": config}))
    model = auto_class(name).from_pretrained(plain, dtype=torch.float32, experts_implementation="eager").eval()
    return model, FakeFp8(model, share, inputs, kept)


class FakeFp8(TorchFunctionMode):
    """A mode in which products with a model's FP8 matrices round their inputs to FP8 and back. inputs: static scales by layer and
    kind; if empty, each input has its own scale."""

    def __init__(self, model: torch.nn.Module, share: str, inputs: dict[tuple[str, str], float], kept: Callable[[str], bool]):
        super().__init__()
        self.share, self.products, self.static = share, 0, bool(inputs)
        self.scales: dict[int, float] = {}  # by address of the weight
        for name, value in model.named_parameters():
            rounds = LINEAR.match(name) and value.dim() > 1 and "kv_b_proj" not in name
            if rounds and not kept(name.removesuffix(".weight")):
                self.scales[value.untyped_storage().data_ptr()] = inputs[group(name)] if inputs else 0.0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in (torch.nn.functional.linear, torch.bmm):
            x, weight, *rest = arguments
            scale = self.scales.get(weight.untyped_storage().data_ptr())
            if scale is not None:
                self.products += 1
                return function(self._rounded(x, scale), weight, *rest, **(options or {}))
        return function(*arguments, **(options or {}))

    def _rounded(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        if self.static:
            return rounded(x / scale) * scale
        groups = x.split(128, -1) if self.share == "block" else (x,)
        return torch.cat([values * scales for values, scales in map(by_rows, groups)], -1)
