"""Scales of an FP8 KV cache, for keys and values of each layer and key/value head: from the checkpoint, or
measured.

They are fixed at the start, on constant tokens, and no request changes them, so the same request always gets
the same text. A measured scale is a power of two, with a margin for numbers twice as large as the measured
ones. Rounding to a power of two costs a floating-point format nothing, and hides differences between machines
in the last bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import Config, ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.description.decoder_description import DecoderDescription

Scales = NDArray[np.float32]  # [layers, 2, kv_heads], of keys and of values
FP8 = "fp8_e4m3"
LARGEST = 448.0  # FP8 number
HEADROOM = 2.0
TOKENS = 128  # number of tokens for measuring scales


def _numbers() -> NDArray[np.float32]:
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    size = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


FP8_NUMBERS = _numbers()
"""float32 [256]: the numbers of E4M3 without infinities, by their bits."""


def cache_itemsize(config: Config, itemsize: int) -> int:
    """Bytes of a number in the KV cache of a model that computes in a type of `itemsize` bytes."""
    return 1 if config.cache.kv_cache_dtype == FP8 else itemsize


def choose_scales(
    config: Config, model: DecoderDescription, layers: Sequence[Any], measure: Callable[[], NDArray[np.float32]]
) -> Scales | None:
    """The scales of an FP8 cache, or None for a cache of the model's own type. Dummy weights have scales of 1.

    layers: their weights.
    measure: returns the largest magnitude of keys and values of each head, float32 [layers, 2, kv_heads];
        called if the checkpoint lacks a scale.

    Raises ConfigError for a scale that is not a positive number.
    """
    if config.cache.kv_cache_dtype != FP8:
        return None
    if config.model.load_format == "dummy":
        return np.ones((len(layers), 2, model.kv_heads), np.float32)
    given = [_given(layer, number) for number, layer in enumerate(layers)]
    measured = any(None in both for both in given)
    scales = scales_for(measure()) if measured else np.ones((len(layers), 2, model.kv_heads), np.float32)
    for layer, both in enumerate(given):
        for side, scale in enumerate(both):
            if scale is not None:
                scales[layer, side] = scale
    return scales


def _given(layer: Any, number: int) -> list[float | None]:
    """A layer's stored scales of keys and of values."""
    found = [getattr(layer, name, None) for name in ("k_scale", "v_scale")]
    for name, scale in zip(("k_scale", "v_scale"), found, strict=True):
        if scale is not None and not 2.0**-100 <= scale <= 2.0**100:  # also refuses NaN
            raise ConfigError(f"the checkpoint's {name} of layer {number} is {scale:g}; it must be positive and finite")
    return found


def scales_for(largest: NDArray[np.float32]) -> Scales:
    """Power-of-two scales. largest: [layers, 2, kv_heads], float32. Raises ConfigError if one is not finite."""
    if not np.isfinite(largest).all():
        layer = int(np.argwhere(~np.isfinite(largest))[0, 0])
        raise ConfigError(f"kv_cache_dtype {FP8}: keys or values of layer {layer} are not finite")
    wanted = np.maximum(largest.astype(np.float64), 2.0**-100) * (HEADROOM / LARGEST)
    return np.where(largest > 0, np.exp2(np.ceil(np.log2(wanted))), 1.0).astype(np.float32)


def calibration_tokens(model: DecoderDescription) -> int:
    """Number of tokens for measuring scales."""
    return min(TOKENS, model.default_context)


def calibration_batch(model: DecoderDescription) -> Batch:
    """A constant prompt, whose page k is page k of the pool."""
    tokens = calibration_tokens(model)
    at, one = np.arange(tokens, dtype=np.int32), np.zeros(1, np.int32)
    counts = np.zeros(S.BATCH_COUNTS, np.int64)
    counts[[S.ROWS, S.TOKENS, S.MAX_CONTEXT]] = 1, tokens, tokens
    ids = np.random.default_rng(0).integers(0, model.vocab_size, tokens, np.int32)
    whole, logprobs = np.array([0, tokens], np.int32), np.zeros((1, 1), np.int64)
    return Batch(ids, at, at, np.zeros_like(at), one, whole, whole[1:], one, one.copy(), logprobs, counts)


def with_inverses(layers: int, kv_heads: int, scales: Scales | None) -> NDArray[np.float32]:
    """[layers, 4, kv_heads]: scales, then their inverses; 1 without scales."""
    known = np.ones((layers, 2, kv_heads), np.float32) if scales is None else scales
    return np.ascontiguousarray(np.concatenate([known, np.float32(1) / known], 1))
