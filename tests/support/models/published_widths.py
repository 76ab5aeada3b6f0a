"""Two layers of a published model at its real widths, in each served form, and their reference.

The weights are random; transformers makes and writes them. Three sizes of the model are cut: layers, vocabulary, and the number
of experts, if two layers of them would not fit a GPU next to their float32 reference.
"""

import copy
import json
import math
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from support.models.fp8_checkpoints import LINEAR, FakeFp8
from support.models.model_zoo import save_mxfp4
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blinkpy.config import ConfigError
from blinkpy.models.families.family import describe_config
from blinkpy.models.families.wrapped_text import TEXT_TYPES, WRAPPERS, plain_rotation

ROOT = Path(__file__).parents[3]
VOCAB = 2048
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_MIDDLES = (E2M1[1:] + E2M1[:-1]) / 2
EXPERT_NUMBERS = 1_200_000_000
"""Maximum weights of a layer's experts; a model with more gets fewer experts."""
BLOCK = 128
BLOCK_SCALES = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3",
}  # fmt: skip
FOUR_BITS = {"num_bits": 4, "dynamic": False, "symmetric": True}
INT4_NUMBERS = FOUR_BITS | {"type": "int", "strategy": "group", "group_size": 128}
FP4_NUMBERS = FOUR_BITS | {"type": "float", "strategy": "tensor_group", "group_size": 16}
PACKINGS: dict[str, dict[str, Any]] = {
    kind: {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head", "re:.*in_proj.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": None}},
    }
    for kind, layout, numbers in (
        ("int4", "pack-quantized", INT4_NUMBERS), ("fp4", "nvfp4-pack-quantized", FP4_NUMBERS)
    )
}  # fmt: skip
IN_FOUR_BITS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "google/gemma-3-270m-it",
    "microsoft/phi-4",
)
"""Models whose widths also have forms with 4-bit weights."""
WITH_STATES = {"linear_attention", "conv", "hybrid"}
"""Types of layers, in transformers, that keep a state."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LEFT_OUT = (
    "quantization_config",
    "num_nextn_predict_layers",
    "torch_dtype",
    "dtype",
    "_sliding_window_pattern",
    "sliding_window_pattern",
    "attn_type_list",
    "vision_config",
)


@dataclass(frozen=True)
class Form:
    """The form in which a model is served. quantization, kv_cache: as the options of the same name; blocks: an FP8 checkpoint
    with a scale for each block of 128 x 128 weights; packing: section of a checkpoint with 4-bit weights."""

    name: str
    quantization: str = "auto"
    kv_cache: str = "auto"
    blocks: bool = False
    packing: str = ""

    @property
    def section(self) -> dict[str, Any]:
        """quantization_config of the checkpoint, if it has one."""
        return PACKINGS[self.packing] if self.packing else BLOCK_SCALES if self.blocks else {}

    @property
    def fp8(self) -> str:
        """The unit with a scale, "row" or "block"; "" if the weights are not FP8."""
        return "block" if self.blocks else "row" if self.quantization == "fp8" else ""


BF16 = Form("bfloat16")
FP8_ROWS = Form("fp8", quantization="fp8", kv_cache="fp8_e4m3")
FP8_ROWS_OF_LATENTS = Form("fp8", quantization="fp8")
FP8_BLOCKS = Form("fp8_blocks", blocks=True)
W4A16 = Form("w4a16", packing="int4")
NVFP4 = Form("nvfp4", packing="fp4")
MXFP4 = Form("mxfp4")
MXFP4_FP8_CACHE = Form("mxfp4", kv_cache="fp8_e4m3")


@dataclass(frozen=True)
class Widths:
    """A model cut to two layers. names: hub ids of the models that have these widths; config: of transformers, flat."""

    names: tuple[str, ...]
    architecture: str
    config: dict[str, Any]

    @property
    def numbers(self) -> int:
        """The number of weights in two layers' MLPs."""
        hidden, wide = self.config["hidden_size"], self.config.get("moe_intermediate_size") or self.config["intermediate_size"]
        return int(2 * next((self.config[key] for key in EXPERTS if self.config.get(key)), 1) * 3 * hidden * wide)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that the config does not exclude."""
        if self.config["model_type"] == "gpt_oss":
            return MXFP4, MXFP4_FP8_CACHE
        # Llama 4's experts are single tensors, for which no layout of blocks is published.
        rows = FP8_ROWS_OF_LATENTS if "kv_lora_rank" in self.config else FP8_ROWS
        some: tuple[Form, ...] = (BF16, rows) if self.config["model_type"] == "llama4_text" else (BF16, rows, FP8_BLOCKS)
        some += (W4A16, NVFP4) if set(self.names) & set(IN_FOUR_BITS) else ()
        return tuple(form for form in some if not self.refusal(form))

    def refusal(self, form: Form) -> str:
        """The reason why the model is not served in a form, or ""."""
        config = copy.deepcopy(self.config) | ({"quantization_config": form.section} if form.section else {})
        try:
            describe_config(config, form.quantization)
        except ConfigError as error:
            return str(error)
        return ""


def cut(published: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The class and config of two layers of a model, only its text part, from its published config.json."""
    text = copy.deepcopy(published.get("text_config", published))  # transformers changes given dictionaries
    wrapper = next((one for one in WRAPPERS if one.name in published["architectures"]), None)
    kind_of_text = wrapper.text if wrapper is not None and "text_config" not in published else text.get("model_type", "")
    if kind_of_text in TEXT_TYPES:
        text = plain_rotation(text) | {"architectures": [TEXT_TYPES[kind_of_text].like]}
    of_text = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    architecture = text["architectures"][0] if "architectures" in text else of_text[text["model_type"]]
    config = {key: value for key, value in text.items() if key not in LEFT_OUT}
    kind = getattr(transformers, architecture).config_class
    config |= {"architectures": [architecture], "model_type": kind.model_type, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if layers := config.get("layer_types"):  # one layer of each kind
        config["layer_types"] = [layers[0], next((kind for kind in reversed(layers) if kind != layers[0]), layers[0])]
    elif "full_attn_idxs" in config:
        config["full_attn_idxs"] = [1]
    elif "full_attention_interval" in config:
        config["layer_types"] = ["linear_attention", "full_attention"]
    elif pattern := config.get("hybrid_override_pattern"):  # a state space and attention, each with an MLP or experts
        config |= {"hybrid_override_pattern": f"M{pattern[-1]}*{pattern[-1]}", "num_hidden_layers": 4}
        config["time_step_min"] = 1e-30  # transformers 5.24 raises time steps to this value, but only in prefill
    elif config.get("attn_layer_indices"):
        config["attn_layer_indices"] = [1]
    elif kind.model_type == "cohere2":
        config["layer_types"] = ["sliding_attention", "full_attention"]
    if config.get("num_kv_shared_layers"):  # two kinds, then two layers that reuse their keys
        config |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB}
        config["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if "no_rope_layers" in config or "no_rope_layer_interval" in config:
        config["no_rope_layers"] = [1, 0]
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    if "num_dense_layers" in config:
        config["num_dense_layers"] = 1
    if "moe_layer_start_index" in config:
        config["moe_layer_start_index"] = 1
    rope = config.get("rope_scaling") or {}
    if "attn_factor" in rope:  # of vLLM, which multiplies YaRN's own factor by it; transformers takes the product
        own = 0.1 * math.log(rope["factor"]) + 1
        rest = {key: value for key, value in rope.items() if key != "attn_factor"}
        config["rope_scaling"] = rest | {"attention_factor": own * rope["attn_factor"]}
    for key in EXPERTS:
        if config.get(key):
            width = config.get("moe_intermediate_size") or config["intermediate_size"]
            config[key] = min(config[key], EXPERT_NUMBERS // (3 * width * config["hidden_size"]) // 8 * 8 or 8)
    return architecture, config


def published_widths() -> list[Widths]:
    """The widths of every served model of tools/published_models.py; models of the same widths share an entry."""
    found: dict[str, Widths] = {}
    for model in runpy.run_path(str(ROOT / "tools" / "published_models.py"))["MODELS"]:
        if model.refusal:
            continue
        architecture, config = cut(model.config)
        key = json.dumps([architecture, {k: v for k, v in config.items() if k != "max_position_embeddings"}], sort_keys=True)
        names = (*found[key].names, model.hub_id) if key in found else (model.hub_id,)
        found[key] = Widths(names, architecture, config)
    return list(found.values())


def make_model(widths: Widths, seed: int, device: str) -> transformers.PreTrainedModel:
    """The transformers model in bfloat16, with weights drawn so wide that logits spread over several units."""
    kind = getattr(transformers, widths.architecture)
    torch.manual_seed(seed)
    config = kind.config_class(**widths.config)
    config._experts_implementation = "eager"
    with torch.device(device):
        model = kind._from_config(config, dtype=torch.bfloat16)
    adds_1 = any(name in widths.architecture for name in ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5"))  # added to norms' weights
    unscaled = "Gemma4" in widths.architecture  # attention without head_size**-0.5: its norms have this factor
    scale = getattr(config, "logit_scale", 1.0) * getattr(config, "lm_head_multiplier", 1.0)  # of logits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if unscaled and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.5, 1.5).mul_(len(parameter) ** -0.25)
            elif name.endswith(("norm.weight", "norm_f.weight")):
                parameter.uniform_(0.5, 1.5).sub_(1 if adds_1 and not name.endswith("linear_attn.norm.weight") else 0)
            elif name.endswith(("router.scale", "per_expert_scale", "layernorm_1.weight", "layernorm_2.weight")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("router.proj.weight"):  # its inputs are scaled down: otherwise experts are nearly equal
                parameter.normal_(0, 1.2)
            elif name.endswith("sinks"):
                parameter.normal_(2, 1)
            elif name.endswith("e_score_correction_bias"):  # small, like shares of a softmax
                parameter.uniform_(-0.02, 0.02)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "embed_tokens" in name or name.endswith("embeddings.weight"):  # if tied, it is also the matrix of the logits
                parameter.normal_(0, 2 / scale * parameter.shape[-1] ** -0.5 if config.tie_word_embeddings else 0.5)
            else:
                spread = 1.2 / scale if name.endswith("lm_head.weight") else 1.2
                parameter.normal_(0, spread * _inputs(name, parameter, widths) ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(-0.2, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def _inputs(name: str, parameter: torch.Tensor, widths: Widths) -> int:
    return parameter.shape[-2] if _transposed(name, widths) else parameter.shape[-1]


def _transposed(name: str, widths: Widths) -> bool:
    """Whether transformers keeps an expert's matrix as [inputs, outputs]."""
    return "experts." in name and widths.config["model_type"] in ("llama4_text", "gpt_oss")


def save(model: transformers.PreTrainedModel, widths: Widths, folder: Path, form: Form) -> None:
    """Write the model in a form. The model becomes a float32 model of the checkpoint's values."""
    if form.name == "mxfp4":
        save_mxfp4(model, folder)
    elif not (folder / "config.json").exists():
        model.save_pretrained(folder, max_shard_size="50GB")
    (folder / "tokenizer.json").write_text("{}")
    if form.blocks:
        _save_blocks(folder, model.device)
    model.float()
    if form.packing:
        _save_packed(model, folder, form)
    if form.fp8:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if LINEAR.match(name) and parameter.dim() > 1:
                    matrix = parameter.mT if _transposed(name, widths) else parameter
                    values, scales = _by_blocks(matrix) if form.blocks else _by_rows(matrix)
                    matrix.copy_(_numbers(values, scales, form.blocks))


def _save_blocks(folder: Path, device: torch.device) -> None:
    """Quantise the matrices of a checkpoint that transformers wrote."""
    (file,) = folder.glob("*.safetensors")
    tensors, stored = load_file(file), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if LINEAR.match(name) and tensor.dim() == 2 and name.endswith("weight"):
            values, scales = _by_blocks(tensor.to(device))
            stored |= {name: values.cpu(), f"{name}_scale_inv": scales.cpu()}
        elif LINEAR.match(name) and tensor.dim() == 3:
            raise ValueError(f"{name}: experts that are one tensor have no published layout of blocks")
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"] = BLOCK_SCALES
    (folder / "config.json").write_text(json.dumps(facts))


@torch.no_grad()
def _save_packed(model: transformers.PreTrainedModel, folder: Path, form: Form) -> None:
    """Quantise the matrices of a model and of its checkpoint to 4 bits, packed by compressed-tensors."""
    (file,) = folder.glob("*.safetensors")
    stored = load_file(file)
    for name, parameter in model.named_parameters():
        if not LINEAR.match(name) or parameter.dim() != 2 or "in_proj" in name:
            continue
        stem, width = name.removesuffix("weight"), parameter.shape[1]
        grouped = parameter.unflatten(1, (-1, 16 if form.packing == "fp4" else 128))
        most = grouped.abs().amax(-1).clamp_min(2.0**-60)
        del stored[name]
        if form.packing == "int4":
            scales = (most / 7).bfloat16()
            numbers = (grouped / scales[..., None].float()).round().clamp(-8, 7)
            parameter.copy_((numbers * scales[..., None].float()).flatten(1))
            packed = pack_to_int32(numbers.flatten(1).to(torch.int8).cpu(), 4)
            stored |= {f"{stem}weight_packed": packed, f"{stem}weight_scale": scales.cpu()}
            stored[f"{stem}weight_shape"] = torch.tensor([len(parameter), width])
        else:
            factor = 448 * 6 / most.max()  # the checkpoint divides by it
            blocks = (most / 6 * factor).to(torch.float8_e4m3fn)
            each = (blocks.float() / factor).clamp_min(2.0**-60)[..., None]
            parts = (grouped / each).flatten(1)
            numbers = E2M1.to(parts.device)[torch.bucketize(parts.abs(), E2M1_MIDDLES.to(parts.device))].copysign(parts)
            parameter.copy_((numbers.unflatten(1, (-1, 16)) * blocks.float()[..., None] / factor).flatten(1))
            stored |= {f"{stem}weight_packed": pack_fp4_to_uint8(numbers.bfloat16().cpu()), f"{stem}weight_scale": blocks.cpu()}
            stored[f"{stem}weight_global_scale"] = factor.reshape(1).cpu()
    save_file(stored, file, metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"quantization_config": form.section}))


def _by_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers of a matrix [..., n, k], and a scale for each row."""
    scales = matrix.float().abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / 448
    return (matrix.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def _by_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As _by_rows, with a scale for each block, [..., ceil(n / 128), ceil(k / 128)]."""
    n, k = matrix.shape[-2:]
    padded = torch.nn.functional.pad(matrix.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., rows, BLOCK, columns, BLOCK]
    scales = blocks.abs().amax((-3, -1)).clamp_min(2.0**-100) / 448
    values = (blocks / scales[..., :, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    flat = values.view(torch.uint8).flatten(-2).flatten(-3, -2)[..., :n, :k].contiguous()
    return flat.view(torch.float8_e4m3fn), scales


def _numbers(values: torch.Tensor, scales: torch.Tensor, blocks: bool) -> torch.Tensor:
    if blocks:
        n, k = values.shape[-2:]
        scales = scales.repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
    return values.float() * scales


class RoundedCache(transformers.DynamicCache):
    """A cache that rounds keys and values to FP8 numbers with a power of two as the scale of each head."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **options: Any) -> Any:
        return super().update(_through_fp8(keys), _through_fp8(values), layer, *more, **options)


def _through_fp8(side: torch.Tensor) -> torch.Tensor:
    largest = side.float().abs().amax((0, 2, 3), keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 224)))
    return ((side.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(side.dtype)


@contextmanager
def narrowed(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Within the block the model computes in bfloat16: each part's weights are narrowed while the part runs."""
    wide: dict[torch.Tensor, torch.Tensor] = {}

    def stored(module: torch.nn.Module) -> list[torch.Tensor]:
        return [*module.parameters(), *(buffer for name, buffer in module.named_buffers() if name.endswith("layer_scalar"))]

    def narrow(module: torch.nn.Module, arguments: Any) -> None:
        for tensor in stored(module):
            wide[tensor], tensor.data = tensor.data, tensor.data.bfloat16()

    def restore(module: torch.nn.Module, arguments: Any, result: Any) -> None:
        for tensor in stored(module):
            tensor.data = wide.pop(tensor)

    children = [child for child in model.model.children() if child is not model.model.layers]
    parts = (*children, *model.model.layers, model.lm_head)
    hooks = [hook for part in parts for hook in (part.register_forward_pre_hook(narrow), part.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Reference:
    """Log probabilities of transformers' model, [texts, tokens after the prompt, vocabulary]."""

    model: transformers.PreTrainedModel  # float32, with the checkpoint's values
    form: Form

    def three(self, texts: list[list[int]], prompt: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities in float32; in bfloat16; and in float32 with inputs, keys and values rounded as in the form.

        texts: token ids, all of one length.
        prompt: tokens of the prompt.
        """
        share, cache = self.form.fp8, self.form.kv_cache != "auto"
        exact = self._run(texts, prompt, nullcontext, False)
        narrow = self._run(texts, prompt, lambda: narrowed(self.model), False)
        around = (lambda: FakeFp8(self.model, share, {}, lambda name: False)) if share else nullcontext
        return exact, narrow, self._run(texts, prompt, around, cache) if share or cache else exact

    @torch.inference_mode()
    def _run(
        self, texts: list[list[int]], prompt: int, around: Callable[[], AbstractContextManager[Any]], fp8_cache: bool
    ) -> torch.Tensor:
        found = []
        for some in _parts(texts):
            ids = torch.tensor(some, device=self.model.device)
            cache: dict[str, Any] = {"use_cache": fp8_cache}
            if fp8_cache:  # with a config, layers with windows would keep only their windows
                recurrent = not WITH_STATES.isdisjoint(getattr(self.model.config, "layer_types", None) or ())
                cache["past_key_values"] = RoundedCache(config=self.model.config) if recurrent else RoundedCache()
            with around():
                logits = self.model(ids[:, :-1], **cache).logits
            found.append(torch.log_softmax(logits[:, prompt - 1 :].float(), -1))
        return torch.cat(found)


def _parts(texts: list[list[int]], tokens: int = 4096) -> Iterator[list[list[int]]]:
    size = max(1, tokens // len(texts[0]))
    for first in range(0, len(texts), size):
        yield texts[first : first + size]


def label(name: str) -> str:
    """A label of a hub id for the name of a test."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name.partition("/")[2] or name)
