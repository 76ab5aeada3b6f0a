"""Random checkpoints with 4-bit weights in every stored form, written independently of blinkpy; and models packed in memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from support.models.model_zoo import make_model

from blinkpy.kernels.quantised_matrices import PackedMatrix, fp4_scales, int4_scales, pack_words
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights

GROUP = 32
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 2}
EXPERTS = SIZES | {"moe_intermediate_size": 64}
Stored = dict[str, torch.Tensor]


class Drawn:
    """Random numbers of a matrix, its scales and zero points, and the weights that they represent."""

    def __init__(self, rng: np.random.Generator, rows: int, width: int, group: int, zeros: bool, order: np.ndarray | None):
        group = group or width
        self.order = np.arange(width) // group if order is None else order
        self.numbers = rng.integers(0, 16, (rows, width))
        self.scales = torch.from_numpy(rng.uniform(0.005, 0.02, (rows, width // group))).to(torch.float16)
        self.zeros = rng.integers(0, 16, self.scales.shape) if zeros else np.full(self.scales.shape, 8)
        offsets = torch.from_numpy(self.numbers - self.zeros[:, self.order])
        self.weight = offsets.float() * self.scales.float()[:, self.order]


def write_compressed(stem: str, drawn: Drawn, zeros: bool, ordered: bool) -> Stored:
    made = {
        "weight_packed": pack_to_int32(torch.from_numpy(drawn.numbers - 8).to(torch.int8), 4),
        "weight_scale": drawn.scales,
        "weight_shape": torch.tensor(drawn.numbers.shape),
    }
    if zeros:
        points = torch.from_numpy(drawn.zeros - 8).to(torch.int8)
        made["weight_zero_point"] = pack_to_int32(points, 4, packed_dim=0).contiguous()
    if ordered:
        made["weight_g_idx"] = torch.from_numpy(drawn.order).int()
    return {f"{stem}{name}": tensor for name, tensor in made.items()}


def packed_along(numbers: np.ndarray, axis: int, order: list[int]) -> torch.Tensor:
    """int32 words: number order[i] of eight is at bits 4 i."""
    numbers = np.moveaxis(numbers, axis, -1)
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.int64)
    for place, which in enumerate(order):
        words |= numbers[..., which::8].astype(np.int64) << 4 * place
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)))


def write_awq(stem: str, drawn: Drawn, zeros: bool, ordered: bool) -> Stored:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    made = {
        "qweight": packed_along(drawn.numbers.T, 1, order),
        "qzeros": packed_along(drawn.zeros.T, 1, order),
        "scales": drawn.scales.T.contiguous(),
    }
    return {f"{stem}{name}": tensor for name, tensor in made.items()}


def write_gptq(stem: str, drawn: Drawn, zeros: bool, ordered: bool, offset: int = 1) -> Stored:
    plain = list(range(8))
    made = {
        "qweight": packed_along(drawn.numbers.T, 0, plain),
        "qzeros": packed_along(drawn.zeros.T - offset & 15, 1, plain),
        "scales": drawn.scales.T.contiguous(),
        "g_idx": torch.from_numpy(drawn.order).int(),
    }
    return {f"{stem}{name}": tensor for name, tensor in made.items()}


def write_gptq_v2(stem: str, drawn: Drawn, zeros: bool, ordered: bool) -> Stored:
    return write_gptq(stem, drawn, zeros, ordered, 0)


def compressed(**weights: Any) -> dict[str, Any]:
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "actorder": None,
    } | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    rest = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {**rest, "config_groups": groups, "ignore": ["lm_head", "re:.*mlp.gate$"]}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AWQ |= {"modules_to_not_convert": ["mlp.gate"]}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": False,
    "modules_to_not_convert": ["mlp.gate"],
}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "data_type": "int"}
ROUND |= {"extra_config": {f"model.layers.{i}.mlp.gate": {"bits": 16} for i in range(2)}}
# name: section, writer, zero points, ordered, group
FORMS: dict[str, tuple[dict[str, Any], Callable[..., Stored], bool, bool, int]] = {
    "w4a16": (compressed(), write_compressed, False, False, GROUP),
    "w4a16-zeros": (compressed(symmetric=False), write_compressed, True, False, GROUP),
    "w4a16-channel": (compressed(strategy="channel", group_size=None), write_compressed, False, False, 0),
    "w4a16-order": (compressed(actorder="group"), write_compressed, False, True, GROUP),
    "awq": (AWQ, write_awq, True, False, GROUP),
    "gptq": (GPTQ, write_gptq, True, False, GROUP),
    "gptq-order": (GPTQ | {"desc_act": True}, write_gptq, True, True, GROUP),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, write_gptq_v2, True, False, GROUP),
    "gptq-row": (GPTQ | {"group_size": -1}, write_gptq, True, False, 0),
    "round-gptq": (ROUND | {"packing_format": "auto_round:auto_gptq"}, write_gptq, True, False, GROUP),
    "round-awq": (ROUND | {"packing_format": "auto_round:auto_awq"}, write_awq, True, False, GROUP),
}


MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
MXFP4_WEIGHTS |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
MXFP4 = compressed() | {"format": "mxfp4-pack-quantized"}
MXFP4["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": MXFP4_WEIGHTS, "input_activations": None}}


def draw_mxfp4(rng: np.random.Generator, stem: str, rows: int, width: int) -> tuple[Stored, torch.Tensor]:
    """Tensors of a matrix, packed by compressed-tensors, and its weights. A row's scales differ by up to 2**30; a row and a group
    are zero, with the scale 2**-127."""
    numbers = VALUES[torch.from_numpy(rng.integers(0, 8, (rows, width)))]
    numbers = numbers * torch.from_numpy(rng.choice([-1.0, 1.0], (rows, width))).float()
    powers = rng.integers(-8, -4, (rows, width // GROUP))
    row = rng.integers(rows)
    powers[row, rng.integers(width // GROUP)] = powers[row].max() - 30
    numbers[rng.integers(rows)] = 0.0
    row, group = rng.integers(rows), int(rng.integers(width // GROUP))
    numbers[row, group * GROUP : (group + 1) * GROUP] = 0.0
    powers[(numbers.view(rows, -1, GROUP) == 0).all(-1).numpy()] = -127
    weight = numbers * torch.from_numpy(np.ldexp(np.float32(1), powers).repeat(GROUP, axis=1))
    packed, scales = pack_fp4_to_uint8(numbers.to(torch.bfloat16)), torch.from_numpy((powers + 127).astype(np.uint8))
    return {f"{stem}weight_packed": packed, f"{stem}weight_scale": scales}, weight


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight") and ".layers." in name


def save_packed(rng: np.random.Generator, folder: Path, form: str, zoo: str, **more: int) -> tuple[Stored, Stored]:
    """Save a model of the zoo with 4-bit weights. Returns the tensors of the file, and the weights that they represent. form: key
    of FORMS, or "mxfp4". more: further sizes."""
    section, write, zeros, ordered, group = FORMS.get(form, (MXFP4, None, False, False, GROUP))
    make_model(zoo, int(rng.integers(2**31)), **(EXPERTS if "moe" in zoo else SIZES) | more).save_pretrained(folder)
    whole = load_file(folder / "model.safetensors")
    orders: dict[tuple[str, int], np.ndarray] = {}
    tensors, exact = Stored(), Stored()
    for name, weight in whole.items():
        if not is_linear(name):
            tensors[name] = weight
            continue
        rows, width = weight.shape
        if write is None:
            stored, exact[name] = draw_mxfp4(rng, name.removesuffix("weight"), rows, width)
            tensors |= stored
            continue
        shared = name.rpartition(".")[0].rpartition(".")[0], width  # matrices that are fused have one order
        if ordered and shared not in orders:
            orders[shared] = rng.permutation(np.arange(width) // (group or width))
        drawn = Drawn(rng, rows, width, group, zeros, orders.get(shared))
        exact[name] = drawn.weight
        tensors |= write(name.removesuffix("weight"), drawn, zeros, ordered)
    save(folder, tensors, section)
    return tensors, whole | exact


def save(folder: Path, tensors: Stored, section: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


DENSE = ("qkv", "q_b", "o", "gate_up", "down")  # matrices of layers without experts


def packed_matrix(weight: torch.Tensor, group: int, *, zeros: bool, fp4: bool, ordered: bool) -> PackedMatrix:
    """A matrix [N, K], or [experts, N, K], rounded to 4 bits. group: 0 for a row."""
    if weight.dim() == 3:  # of experts
        each = [packed_matrix(one, group, zeros=zeros, fp4=fp4, ordered=ordered) for one in weight]
        fields = [[getattr(one, name) for one in each] for name in ("words", "scales", "factors", "columns")]
        words, of_groups, of_rows, orders = (None if some[0] is None else torch.stack(some) for some in fields)
        return PackedMatrix(words, of_groups, weight.shape[2], of_rows, orders)
    width, values = weight.shape[1], VALUES.to(weight.device)
    order = torch.from_numpy(np.random.default_rng(width).permutation(width) if ordered else np.arange(width)).to(weight.device)
    grouped = weight.float()[:, order].unflatten(1, (-1, 16 if fp4 else group or width))
    most = grouped.abs().amax(-1)
    columns = order.int() if ordered else None
    if fp4:
        factors = most.amax(1) / (448 * 6)
        scales = (most / 6 / factors[:, None]).to(torch.float8_e4m3fn).float()
        parts = (grouped / (scales * factors[:, None])[..., None].clamp_min(1e-12)).flatten(1)
        numbers = (parts.abs()[..., None] - values).abs().argmin(-1) + 8 * (parts < 0)
        return PackedMatrix(pack_words(numbers.to(torch.uint8)), fp4_scales(scales), width, factors, columns)
    points = (grouped.amin(-1) / (2 * most) * -15).round().clamp(0, 15) if zeros else torch.full_like(most, 8)
    scales = most / 7
    numbers = ((grouped / scales[..., None]).round() + points[..., None]).clamp(0, 15).flatten(1)
    return PackedMatrix(pack_words(numbers.to(torch.uint8)), int4_scales(scales, points).T.contiguous(), width, None, columns)


def packed_weights(
    weights: Weights, group: int = GROUP, *, zeros: bool = False, fp4: bool = False, ordered: bool = False,
    kept: tuple[str, ...] = (),
) -> Weights:  # fmt: skip
    """The same model with 4-bit matrices, except those kept, and those whose inputs do not fill whole groups."""

    def layer(of: LayerWeights) -> LayerWeights:
        given = {name: getattr(of, name) for name in DENSE if name not in kept}
        how: dict[str, Any] = {"zeros": zeros, "fp4": fp4, "ordered": ordered}
        whole = {name: it for name, it in given.items() if it is not None and it.shape[-1] % (16 if fp4 else group or 8) == 0}
        return replace(of, **{name: packed_matrix(it, group, **how) for name, it in whole.items()})

    return replace(weights, layers=[layer(of) for of in weights.layers])
