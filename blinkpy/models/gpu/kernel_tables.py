"""A GPU's tables of measured configurations, and the layers of a model that have entries; other layers have
defaults.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import FOLDER
from blinkpy.kernels.linear.linear_table import ROW_BUCKETS, InvariantLinearTable, LinearTable, key
from blinkpy.kernels.linear.linear_variants import WORDS, LinearShape
from blinkpy.kernels.moe.expert_variants import ExpertShape, ExpertTable, InvariantExpertTable
from blinkpy.kernels.quantised_matrices import FP8
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_memory_plan import first_layers
from blinkpy.models.weights.parts.weight_parts import layer_parts, outer_parts


@dataclass(frozen=True)
class KernelTables:
    """Tables of one GPU model. gpu: its name."""

    gpu: str
    linear: LinearTable
    experts: ExpertTable

    @classmethod
    def load(cls, gpu: str, folder: Path = FOLDER) -> Self:
        """The shipped tables, or empty ones. Raises ConfigError, naming file and entry, for an invalid
        configuration.
        """
        return cls(gpu, LinearTable.load(gpu, folder), ExpertTable.load(gpu, folder))

    def require(self, model: DecoderDescription, dtype: torch.dtype, rows: set[int], *, invariant: bool = False) -> None:
        """Raise ConfigError unless each layer has a configuration that passes its check. rows: all numbers of
        rows of steps.
        """
        linear, experts = (InvariantLinearTable(), InvariantExpertTable()) if invariant else (self.linear, self.experts)
        for name, shape in linear_layers(model, dtype).items():
            for count in rows:
                with named(name):
                    linear.config(shape._replace(rows=count))
        if any(model.expert_layers):
            for count in rows:
                with named(f"experts of {model.name}"):
                    experts.config(expert_shape(model), count, dtype)

    def measured(self, model: DecoderDescription, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
        """By kind of layer: (number of its shapes with entries, number of its shapes). dtype: of
        activations.
        """
        shapes, found = set(linear_layers(model, dtype).values()), dict[str, tuple[int, int]]()
        rows = {shape: [shape._replace(rows=bucket) for bucket in ROW_BUCKETS] for shape in shapes}
        known = [shape for shape in shapes if any(key(some) in self.linear.entries for some in rows[shape])]
        found["linear layers"] = len(known), len(shapes)
        if any(model.expert_layers):
            found["experts"] = int(expert_shape(model).key(dtype) in self.experts.entries), 1
        return found

    def describe(self, model: DecoderDescription, dtype: torch.dtype, *, invariant: bool = False) -> str:
        """The source of the configurations of a model's kernels, as text."""
        if invariant:
            return "configurations of kernels: defaults for linear layers and experts, because of --batch-invariant"
        words = []
        for kind, (known, all_shapes) in self.measured(model, dtype).items():
            few = f"{known} of {all_shapes} shapes measured on {self.gpu}, defaults for the others"
            words.append(f"{kind}: {few if 0 < known < all_shapes else f'measured on {self.gpu}' if known else 'defaults'}")
        return f"configurations of kernels: {'; '.join(words)}; attention: by its rule"


@contextmanager
def named(layer: str) -> Iterator[None]:
    """Prepend the name of a layer to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{layer}: {error}") from None


def linear_layers(model: DecoderDescription, dtype: torch.dtype) -> dict[str, LinearShape]:
    """The shapes of a model's products, without rows, by the checkpoint's name. Only the first of several equal layers is
    included. Experts have a separate table.
    """
    found = dict[str, LinearShape]()
    parts = [*outer_parts(model), *(part for layer in first_layers(model) for part in layer_parts(model, layer))]
    for part in parts:
        if len(part.shape) != 2 or part.packed or part.field.endswith("_bias"):
            continue
        if part.field == "layer_embedding" or (part.field == "embedding" and not model.tied_embeddings):
            continue
        outputs, inputs = part.shape
        shape = LinearShape(0, outputs, inputs, dtype=dtype)
        if part.quantization is not None and not part.dequantised:
            shape = shape._replace(dtype=FP8, result=dtype, blocks=len(part.scale_shape) == 2)
        if part.packing is not None and not part.dequantised:
            group, fp4 = part.packing.group, part.packing.is_float
            group = 0 if group == inputs and not fp4 else group
            shape = shape._replace(dtype=WORDS, inputs=dtype, group=group, fp4=fp4, ordered=part.packing.ordered)
        if part.field.endswith("gate_up") and model.gated:
            shape = shape._replace(n=outputs // 2, swiglu=True)
        found[part.sources[0][0].removesuffix(".weight")] = shape
    return found


def expert_shape(model: DecoderDescription) -> ExpertShape:
    """The shape of a model's expert layers."""
    block, fp8, packing = model.experts, "", None
    layer = model.expert_layers.index(True)
    for part in layer_parts(model, layer):
        if part.field == "gate_up" and part.quantization is not None and not part.dequantised:
            fp8 = "blocks" if len(part.scale_shape) == len(part.shape) else "rows"
        packing = part.packing if part.field == "gate_up" else packing
    shape = ExpertShape(block.number, block.top_k, model.hidden_size, block.size, block.mxfp4, fp8, gated=model.gated)
    return shape if packing is None else replace(shape, packed=packing.kind, ordered=packing.ordered)
