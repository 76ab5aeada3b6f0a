"""The dtype in which a model's weights are kept, and its steps computed."""

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import DTYPES
from blinkpy.models.description.decoder_description import DecoderDescription


def dtype_name(model: DecoderDescription, requested: str, device: str) -> str:
    """One of DTYPES. requested: an option's value; "auto" uses the checkpoint's type, with float16 widened on
    the CPU.
    """
    name = model.dtype if requested == "auto" else requested
    if name not in DTYPES:
        raise ConfigError(f"dtype {requested!r} is not supported (supported: auto, {', '.join(DTYPES)})")
    if name == "float16" and device == "cpu":
        if requested != "auto":
            raise ConfigError("dtype float16 is not supported on the CPU (supported: float32, bfloat16)")
        name = "float32"
    return name
