"""The choice of the decoder on the CPU: NumPy's in float32, or torch's if it is installed."""

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.array_weights import unknown_parts
from blinkpy.models.weights.weight_parts import dtype_name
from blinkpy.packages import installed

TORCH = "pip install 'blinkpy-serve[torch]'"


def torch_dtype_name(model: DecoderDescription, requested: str) -> str | None:
    """The dtype in which torch computes a model; None: NumPy computes it in float32.

    requested: value of --dtype; "auto": the checkpoint's with torch, float32 without.

    Raises ConfigError if the model needs torch and it is not installed.
    """
    name, torch_is_there = dtype_name(model, requested, "cpu"), installed("torch")
    if name != "float32":
        if torch_is_there:
            return name
        if requested != "auto":
            raise ConfigError(f"dtype {name} on the CPU needs torch ({TORCH}); float32 does not")
    lacking = lacking_without_torch(model)
    if not lacking:
        return None
    if not torch_is_there:
        raise ConfigError(f"{model.name} needs {', '.join(lacking)}, which needs torch on the CPU: {TORCH}")
    return "float32"


def lacking_without_torch(model: DecoderDescription) -> list[str]:
    """The blocks and weights of a model that NumPy's decoder does not support."""
    from blinkpy.models.arrays.numpy_decoder import BLOCKS

    return model.lacking_blocks(BLOCKS) or unknown_parts(model)
