"""Scales of FP8 weights, of their inputs and of an FP8 cache, read from a checkpoint and checked before any weight is."""

from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.quantization import BLOCK, Scales
from blinkpy.models.weights.array_loader import load_piece
from blinkpy.models.weights.safetensors_files import StoredTensor
from blinkpy.models.weights.weight_parts import Part, ScaleTensor, all_parts, cache_scales
from blinkpy.models.weights.weight_reader import open_weights

Float32 = NDArray[np.float32]


class PartScales(NamedTuple):
    """Scales of one FP8 matrix. weights: float32 [scale_shape of the part]. inputs: of all its inputs, if
    stored.
    """

    weights: Float32
    inputs: float | None


class StoredScales(NamedTuple):
    """of_parts: by the name of a part's first source.
    of_cache: for each layer, the stored fields of LayerWeights.
    """

    of_parts: dict[str, PartScales]
    of_cache: list[dict[str, float]]


class _Reader:
    """Numbers of small tensors. stored: of open_checkpoint."""

    def __init__(self, stored: dict[str, StoredTensor], closing: ExitStack):
        self._stored, self._closing, self._files = stored, closing, dict[Path, FileIO]()

    def read(self, tensor: ScaleTensor) -> Float32:
        """float32, of the shape as stored. Raises ConfigError unless all are finite and above 0."""
        name, place = tensor.names[0], self._stored[tensor.names[0]]
        if place.path not in self._files:
            self._files[place.path] = self._closing.enter_context(open_weights(place.path))
        found = np.empty(place.shape, np.float32)
        with np.errstate(over="ignore", under="ignore"):  # of float64; the check below finds both
            load_piece(self._files[place.path], name, place.dtype, place.offset, found.reshape(-1))
        wrong = found[~(np.isfinite(found) & (found > 0))]
        if wrong.size:
            raise ConfigError(f"{place.path}: {name} has the value {wrong[0]:g}; scales must be finite and above 0")
        return found


def read_scales(model: DecoderDescription, stored: dict[str, StoredTensor]) -> StoredScales:
    """All scales of a checkpoint. stored: of open_checkpoint. Raises ConfigError that names the tensor."""
    with ExitStack() as closing:
        reader = _Reader(stored, closing)
        of_cache: list[dict[str, float]] = [{} for _ in model.layers]
        for layer, field, tensor in cache_scales(model):
            if tensor.names[0] in stored:
                of_cache[layer][field] = float(reader.read(tensor).reshape(-1)[0])
        parts = [part for part in all_parts(model) if part.stored_scales]
        return StoredScales({part.sources[0][0]: _read_part(part, reader) for part in parts}, of_cache)


def _read_part(part: Part, reader: _Reader) -> PartScales:
    """One scale of a whole tensor becomes that of each of its rows. Inputs of fused matrices have the largest of theirs."""
    scales = np.empty(part.scale_shape, np.float32)
    blocks = part.quantization is not None and part.quantization.scales == Scales.BLOCK
    for (_, (rows, *_), expert, row), tensor in zip(part.sources, part.stored_scales, strict=True):
        target, found = scales if expert < 0 else scales[expert], reader.read(tensor)
        if blocks:
            target[row // BLOCK : row // BLOCK + len(found)] = found
        else:
            target[row : row + rows] = found.reshape(-1)
    inputs = [float(reader.read(tensor).reshape(-1)[0]) for tensor in part.stored_input_scales]
    return PartScales(scales, max(inputs) if inputs else None)
