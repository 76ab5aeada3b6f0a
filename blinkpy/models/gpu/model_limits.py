"""Models that the GPU's kernels support, by their sizes. Other models are refused before their weights are
read.
"""

from collections.abc import Iterator

from blinkpy.config import ConfigError
from blinkpy.kernels.shape_limits import (
    MAX_EXPERTS,
    MAX_FP8_WIDTH,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_HIDDEN,
    MAX_TOP_K,
    MIN_HEAD_DIM,
)
from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.weight_parts import Part, layer_parts

INSTEAD = "--device cpu serves this model"


def require_kernels(model: DecoderDescription) -> None:
    """Raise ConfigError for the first layer that no kernel supports, with its name, the size, the limit, and
    an alternative.
    """
    for problem in _problems(model):
        raise ConfigError(f"{model.name} on a GPU: {problem}")


def first_layers(model: DecoderDescription) -> list[int]:
    """The first layer of each kind."""
    return sorted({kind: layer for layer, kind in reversed(list(enumerate(model.layers)))}.values())


def _problems(model: DecoderDescription) -> Iterator[str]:
    if model.packing is not None:
        yield f"no kernel takes 4-bit weights ({model.packing.text}); {INSTEAD}"
    first = model.tensors.layer.format(layer=0)
    attention, heads = f"{first}{model.tensors.o.rpartition('.')[0]}", model.heads
    if model.hidden_size > MAX_HIDDEN:
        yield f"{first}{model.tensors.input_norm}: hidden size {model.hidden_size} is over {MAX_HIDDEN}; {INSTEAD}"
    if not MIN_HEAD_DIM <= model.head_dim <= MAX_HEAD_DIM:
        limits = f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        yield f"{attention}: head size {model.head_dim}, and the kernels take sizes {limits}; {INSTEAD}"
    if heads % model.kv_heads or heads // model.kv_heads > MAX_GROUP:
        yield (
            f"{attention}: {heads} query heads over {model.kv_heads} key and value heads, and the kernels take 1 to {MAX_GROUP} "
            f"for each; {INSTEAD}"
        )
    for layer in first_layers(model):
        mlp = model.layers[layer].mlp
        if isinstance(mlp, Experts) and (mlp.number > MAX_EXPERTS or mlp.top_k > MAX_TOP_K):
            router = f"{model.tensors.layer.format(layer=layer)}{model.tensors.router}"
            yield (
                f"{router}: {mlp.top_k} of {mlp.number} experts, and the kernels take at most {MAX_TOP_K} of {MAX_EXPERTS}; "
                f"{INSTEAD}"
            )
        for part in layer_parts(model, layer):
            if part.quantization is not None and part.shape[-1] > MAX_FP8_WIDTH:
                yield _too_wide(part)


def _too_wide(part: Part) -> str:
    name, width = part.sources[0][0].removesuffix(".weight"), part.shape[-1]
    instead = "" if part.quantization is None or part.quantization.stored else "serve it without --quantization fp8, or "
    return f"{name}: {width} inputs as FP8, and the kernels quantise at most {MAX_FP8_WIDTH}; {instead}{INSTEAD}"
