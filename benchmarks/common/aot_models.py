"""Steps of published models on meta tensors: the launches of the GPU's decoder for each served form.

The list is complete by construction: a model of tools/published_models.py is described as by the engine,
in each form, and the decoder and its step are the engine's own. Equal layers are launched once.
"""

import runpy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.common.aot_cases import DRAFTS, MAX_MODEL_LEN, SLOTS, SNAPSHOTS, meta, meta_grammars, meta_packed, meta_requests
from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import gpus_with_tables
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.moe.expert_variants import ExpertTable
from blinkpy.kernels.quantised_matrices import FP8, Fp8Matrix
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.draft_heads import describe_head
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import describe_config
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.gpu_memory_plan import require_kernels
from blinkpy.models.gpu.gpu_step import GpuStep
from blinkpy.models.gpu.kernel_tables import KernelTables
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights, Matrix, Weights, own_dtype
from blinkpy.models.weights.parts.part import Part
from blinkpy.models.weights.parts.weight_parts import layer_parts, outer_parts
from blinkpy.queues.words import LOGPROB_ENTRIES

ROOT = Path(__file__).parents[2]
PAGE_SIZE = 16
STATIC_SCALE = 2.0**-5
WITH_HEADS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B")
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
W4A16 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
KEPT = [f"linear_attn.in_proj_{kind}" for kind in ("a", "b", "ba")]  # strengths and decays of gated delta nets
ONE, FEW, MANY, MIXED = StepShape(1, 1, False), StepShape(8, 8, False), StepShape(64, 64, False), StepShape(2048, 256, True)
STEPS = (ONE, FEW, MANY, MIXED, replace(FEW, drafted=True), replace(ONE, whole=True), replace(MIXED, whole=True))
"""What is launched of each model in each form; those that are whole by a batch-invariant decoder."""


class Form(NamedTuple):
    """A model as it is served.

    name: as in benchmarks/results/published_widths.json, or "float32" with or without another name; "mtp", with the
        draft layer; or "eagle3", with a draft head.
    """

    hub_id: str
    name: str
    model: DecoderDescription
    dtype: torch.dtype


@dataclass(frozen=True)
class MetaStep:
    """A step of a form. gpu: the GPU whose tables are used; "" for defaults."""

    form: Form
    shape: StepShape
    gpu: str = ""
    fp8_cache: bool = False
    pdl: bool = True

    @property
    def label(self) -> str:
        whole, cache = " batch-invariant" if self.shape.whole else "", " FP8 cache" if self.fp8_cache else ""
        table = f"table of {self.gpu}" if self.gpu else "defaults"
        return f"{self.form.hub_id} {self.form.name}{cache} {self.shape.name}{whole}, {table}"

    def launch(self) -> None:
        """Launch everything. A draft layer or head reads all tokens."""
        step_of(self).launch(replace(self.shape, whole=self.shape.whole or self.form.model.drafts_tokens))


@lru_cache
def published() -> list[Any]:
    """The served models of tools/published_models.py."""
    models = runpy.run_path(str(ROOT / "tools" / "published_models.py"))["MODELS"]
    return [model for model in models if not model.refusal]


def forms_of(hub_id: str, config: dict[str, Any]) -> list[Form | str]:
    """The forms of a model; for a refused form the text of the refusal."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("bfloat16", plain, "auto"),
        ("fp8", plain, "fp8"),
        ("fp8_blocks", plain | {"quantization_config": BLOCKS | {"modules_to_not_convert": KEPT}}, "auto"),
        ("w4a16", plain | {"quantization_config": W4A16}, "auto"),
        ("nvfp4", plain | {"quantization_config": NVFP4}, "auto"),
    ]
    stored = config.get("quantization_config")
    if stored is not None and stored != BLOCKS:
        asked.append(("mxfp4" if stored["quant_method"] == "mxfp4" else "stored", config, "auto"))
    found: list[Form | str] = []
    for name, values, quantization in asked:
        try:
            model = briefly(describe_config(values, quantization))
            if model.packing is not None:
                require_kernels(model)
        except ConfigError as error:
            found.append(f"{hub_id} {name}: {error}")
            continue
        found.append(Form(hub_id, name, model, torch.bfloat16))
        if name == "bfloat16" and len(model.further_layers) == 1:
            found.append(Form(hub_id, "mtp", model.with_draft_layer(), torch.bfloat16))
        if name == "bfloat16" and hub_id in WITH_HEADS:
            found.append(Form(hub_id, "eagle3", with_head(model), torch.bfloat16))
        if name not in ("fp8_blocks", "w4a16", "nvfp4"):
            found.append(Form(hub_id, "float32" if name == "bfloat16" else f"float32 {name}", model, torch.float32))
    return found


def with_head(model: DecoderDescription) -> DecoderDescription:
    """The description with a head of the widths that published ones have, which reads the first layers."""
    sizes = {"hidden_size": model.hidden_size, "intermediate_size": model.mlp_size, "vocab_size": model.vocab_size}
    heads = {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    read = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": 32000, "num_hidden_layers": 1}
    return replace(
        model, draft_head=describe_head({"architectures": ["LlamaForCausalLMEagle3"], **sizes, **heads, **read}, model)
    )


def briefly(model: DecoderDescription) -> DecoderDescription:
    """A description with one layer of each kind, and the last layer again, which may compute only last
    tokens.
    """
    kinds = [*dict.fromkeys(model.layers)]
    layers = [*kinds, model.layers[-1]]
    for index, layer in enumerate(layers):  # a layer may read the keys of another, by its number
        if (source := layer.attention.keys_of) is not None:
            own = layer.attention._replace(keys_of=kinds.index(model.layers[source]))
            layers[index] = layer._replace(attention=own)
    return replace(model, layers=tuple(layers))


def all_forms() -> list[Form]:
    """The served forms of all published models."""
    return [form for model in published() for form in forms_of(model.hub_id, model.config) if isinstance(form, Form)]


def steps_of(form: Form) -> Iterator[MetaStep]:
    """Every step of a form: with and without a table, with both kinds of cache."""
    for gpu in ("", *gpus_with_tables()):
        for fp8_cache in (False,) if form.model.attention.latent else (False, True):
            for shape in STEPS:
                if not (gpu and shape.whole):  # a batch-invariant decoder has defaults alone
                    yield MetaStep(form, shape, gpu, fp8_cache)


def meta_weights(model: DecoderDescription, dtype: torch.dtype, embedding: torch.Tensor | None = None) -> Weights:
    """Weights like those of a checkpoint of the model. embedding: that of a draft head's model."""

    def parts(described: list[Part]) -> dict[str, Any]:
        return {part.field: meta_weight(part, dtype) for part in described}

    outer: dict[str, Any] = parts(outer_parts(model))
    layers = [LayerWeights(**parts(layer_parts(model, layer))) for layer in range(len(model.layers))]
    if embedding is not None:
        return Weights(**{"embedding": embedding} | outer, layers=layers)
    weights = Weights(**({"lm_head": outer["embedding"]} | outer), layers=layers)
    if model.draft_head is not None:
        weights.draft_head = meta_weights(model.draft_head, dtype, weights.embedding)
        weights.head_tokens = meta(model.draft_head.head_rows)
    return weights


def meta_weight(part: Part, dtype: torch.dtype) -> Matrix:
    if part.packing is not None and not part.dequantised:
        packing, (*experts, rows, width) = part.packing, part.shape
        return meta_packed(rows, width, packing.group, packing.is_float, packing.ordered, *experts)
    if part.quantization is None or part.dequantised:
        return meta(*part.shape, dtype=own_dtype(part, dtype))
    scale = STATIC_SCALE if part.quantization.static else None
    return Fp8Matrix(meta(*part.shape, dtype=FP8), meta(*part.scale_shape, dtype=torch.float32), scale)


@lru_cache
def tables(gpu: str) -> KernelTables:
    """gpu: "" for defaults."""
    return KernelTables.load(gpu) if gpu else KernelTables("", LinearTable(), ExpertTable())


KEPT_ANGLES = lru_cache(maxsize=None)(Rope.tables)  # of equal ropes: half of the time of a step


def step_of(asked: MetaStep) -> GpuStep:
    """The engine's step, on meta tensors."""
    (_, _, model, dtype), shape = asked.form, asked.shape
    batch: Any = SimpleNamespace(
        **{name: meta(shape.tokens) for name in ("token_ids", "positions", "cache_slots", "token_rows")},
        **{name: meta(shape.rows) for name in ("row_slots", "context_lengths", "emits", "sampled")},
        query_starts=meta(shape.rows + 1),
        counts=meta(8, dtype=torch.int64),
        logprobs=meta(shape.rows, LOGPROB_ENTRIES, dtype=torch.int64),
        drafted=meta(shape.rows, DRAFTS),
    )
    snapshots = {name: meta(SLOTS) for name in ("snapshot_source", "snapshot_target")}
    requests: Any = SimpleNamespace(page_table=meta(SLOTS, MAX_MODEL_LEN // PAGE_SIZE), **snapshots, **meta_requests()._asdict())
    scales = np.ones((len(model.layers), 2, model.kv_heads), np.float32) if asked.fp8_cache else None
    places: dict[str, Any] = {"slots": SLOTS, "snapshots": SNAPSHOTS, "drafts": DRAFTS if shape.drafted else 0}
    cache = PagedCache(model, 1024, PAGE_SIZE, dtype, "meta", scales=scales, **places)
    head = None if model.draft_head is None else PagedCache(model.draft_head, 1024, PAGE_SIZE, dtype, "meta")
    of_gpu = tables(asked.gpu)
    with patch.object(Rope, "tables", KEPT_ANGLES):
        decoder = GpuDecoder(
            model,
            meta_weights(model, dtype),
            cache,
            batch,
            requests,
            [replace(shape, whole=shape.whole or model.drafts_tokens)],
            MAX_MODEL_LEN,
            of_gpu.linear,
            asked.pdl,
            expert_table=of_gpu.experts,
            invariant=shape.whole,
            head_cache=head,
        )
    return GpuStep(decoder, meta_grammars(model.vocab_size, model.drafting))
