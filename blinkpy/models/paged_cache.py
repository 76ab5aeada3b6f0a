"""The KV cache's memory: for each layer one array of keys and one of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import Config, ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.recurrent_states import RecurrentStates

if TYPE_CHECKING:
    import torch


# Scales of an FP8 KV cache, for keys and values of each layer and key/value head: from the checkpoint, or
# measured.
# Scales are fixed at the start, on constant tokens, and no request changes them, so the same request always gets
# the same text. A measured scale is a power of two, with a margin for numbers twice as large as the measured
# ones. Rounding to a power of two costs a floating-point format nothing, and hides differences between machines
# in the last bits.

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
    _require_numbers(model)
    if config.model.load_format == "dummy":
        return np.ones((len(layers), 2, model.kv_heads), np.float32)
    given = [_given(layer, number) for number, layer in enumerate(layers)]
    own = [model.keys_of(layer) for layer in range(len(layers))]
    measured = any(None in given[layer] for layer in own)
    scales = scales_for(measure()) if measured else np.ones((len(layers), 2, model.kv_heads), np.float32)
    for layer in range(len(layers)):
        for side, scale in enumerate(given[own[layer]]):
            if scale is not None:
                scales[layer, side] = scale
    return scales


def _require_numbers(model: DecoderDescription) -> None:
    """Raise ConfigError if a model's cache can't be FP8."""
    if model.attention.latent:
        raise ConfigError(f"kv_cache_dtype {FP8} is not supported for {model.name}, which caches latent vectors; use auto")


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
    return Batch(ids, at, at, np.zeros_like(at), one, whole, whole[1:], one, one.copy(), logprobs, counts, one[:, None])


def with_inverses(layers: int, kv_heads: int, scales: Scales | None) -> NDArray[np.float32]:
    """[layers, 4, kv_heads]: scales, then their inverses; 1 without scales."""
    known = np.ones((layers, 2, kv_heads), np.float32) if scales is None else scales
    return np.ascontiguousarray(np.concatenate([known, np.float32(1) / known], 1))


MOST_TOKENS = 1 << 31  # maximum tokens of all rings, because cache slots are 32-bit words


@dataclass(frozen=True)
class RingSizes:
    """Sizes of window rings.

    layers: sliding-window layers that cache keys and values.
    window: the widest, tokens.
    pages: pages of one ring.
    slots: requests.
    spill: maximum pages that a step may spill.
    """

    layers: tuple[int, ...]
    window: int
    page_size: int
    pages: int
    slots: int
    spill: int

    @classmethod
    def of(cls, model: DecoderDescription, page_size: int, slots: int, tokens: int, rows: int) -> Self | None:
        """The sizes for a model; None if it has no windows. tokens, rows: size of the largest step."""
        windowed = [(index, layer.attention) for index, layer in enumerate(model.layers) if layer.attention.window]
        layers = tuple(index for index, attention in windowed if attention.keys_of is None)
        if not layers:
            return None
        ringed = [model.layers[index].attention for index in layers]
        if len({(attention.kv_heads, attention.head_dim) for attention in ringed}) > 1:
            raise ConfigError(
                f"window_cache ring: layers of {model.name} with windows differ in head size; use window_cache full"
            )
        window = max(attention.window for attention in ringed)
        pages = 1 - (1 - window) // page_size  # the maximum number of pages that a window spans
        # A row of n tokens spills at most n // page_size + 1 pages, because its first token's page keeps its ring slot.
        return cls(layers, window, page_size, pages, slots, tokens // page_size + rows)

    @property
    def layer_pages(self) -> int:
        """Pages of one layer's view of the cache."""
        return len(self.layers) * self.slots * self.pages + self.spill

    @property
    def all_pages(self) -> int:
        """Pages of all layers, including spill pages."""
        return self.layer_pages + len(self.layers) - 1


def ring_sizes(config: Config, model: DecoderDescription) -> RingSizes | None:
    """Sizes of the rings; None if all layers keep all tokens. Raises ConfigError if rings are requested but the
    model has no windows, or too many slots.
    """
    if config.cache.window_cache == "full":
        return None
    slots, scheduler = config.all_slots, config.scheduler
    rows = min(scheduler.max_num_seqs, slots)
    sizes = RingSizes.of(model, config.cache.page_size, slots, scheduler.max_num_batched_tokens, rows)
    if sizes is None:
        raise ConfigError(f"window_cache ring: no layer of {model.name} has a sliding window; use window_cache full")
    if scheduler.speculative != "off":  # a wrong draft would overwrite a key that its request still needs
        raise ConfigError(f"window_cache ring does not support speculative {scheduler.speculative}; use window_cache full")
    if scheduler.step_groups > 1:  # rings only have tables for one step
        raise ConfigError("window_cache ring does not support step_groups above 1; use window_cache full")
    if sizes.all_pages * sizes.page_size >= MOST_TOKENS:
        raise ConfigError(f"window_cache ring: the rings of {slots} slots exceed {MOST_TOKENS:,} tokens; lower slots")
    return sizes


A = TypeVar("A")


def kv_bytes_per_page(model: DecoderDescription, page_size: int, itemsize: int, rings: RingSizes | None = None) -> int:
    """Bytes of one page of the pool: keys and values of all layers, except layers with rings or with a recurrent
    state. If no other layer is left, a page takes no memory, and the result is 1.

    itemsize: bytes of a number; 1 for FP8. Raises ConfigError if the model's cache can't be FP8.
    """
    if itemsize == 1:
        _require_numbers(model)
    return max(1, model.cached_elements(rings.layers if rings else ()) * page_size * itemsize)


def page_bytes_of(config: Config, model: DecoderDescription, itemsize: int) -> int:
    """Bytes of one page of an engine's pool, with the keys and values of a draft head, which are never FP8.

    itemsize: bytes of a number of the type in which the model computes.
    Raises ConfigError for rings or FP8 that the model does not support.
    """
    page_size, rings = config.cache.page_size, ring_sizes(config, model)
    own = kv_bytes_per_page(model, page_size, cache_itemsize(config, itemsize), rings)
    return own if model.draft_head is None else own + kv_bytes_per_page(model.draft_head, page_size, itemsize)


def ring_bytes(model: DecoderDescription, rings: RingSizes | None, itemsize: int) -> int:
    """Bytes of all window rings, keys and values, including spill pages."""
    if rings is None:
        return 0
    return rings.all_pages * rings.page_size * model.layers[rings.layers[0]].attention.cached_size * itemsize


def _of_layers(
    model: DecoderDescription, page_size: int, num_pages: int, rings: RingSizes | None, zeros: Callable[[tuple[int, ...]], A]
) -> list[A]:
    """Keys or values of each layer; a layer without attention has no pages. zeros: makes an array of a shape."""
    pages_of = [(layer.attention.kv_heads, page_size, layer.attention.head_dim) for layer in model.layers]
    views = dict[int, A]()
    if rings is not None:
        shared: Any = zeros((rings.all_pages, *pages_of[rings.layers[0]]))
        views = {layer: shared[rank : rank + rings.layer_pages] for rank, layer in enumerate(rings.layers)}
    pages = [num_pages if layer.attends else 0 for layer in model.layers]
    for layer in range(len(model.layers)):
        source = model.keys_of(layer)
        views[layer] = views[source] if source in views else zeros((pages[layer], *pages_of[layer]))
    return [views[layer] for layer in range(len(model.layers))]


class PagedCache:
    """The cache as torch tensors.

    keys, values: per layer a tensor [pages, kv_heads, page_size, head_dim], so a page of one head is
        contiguous. Layers may differ in kv_heads and head_dim. Layers with rings share memory. A layer that reads the keys of
        another layer has that layer's tensors. With latent attention, values are views of the first elements of keys.
    states: states of recurrent layers, for `slots` requests with up to `drafts` drafts, with `snapshots` copies.
    num_pages: pages of the pool, for the other layers.
    dtype: dtype of keys and values before caching, and in the cache, which is FP8 if there are `scales`
        (blinkpy.models.paged_cache).
    """

    def __init__(
        self,
        model: DecoderDescription,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        rings: RingSizes | None = None,
        scales: Scales | None = None,
        slots: int = 1,
        snapshots: int = 0,
        drafts: int = 0,
    ):
        import torch

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype if scales is None else torch.float8_e4m3fn, device=device)

        self.num_pages = num_pages
        self.page_size = page_size
        self.rings = rings
        self.dtype = dtype
        self.scales = None if scales is None else torch.from_numpy(scales).to(device)  # float32 [layers, 2, kv_heads]
        latent, self.keys = model.attention.latent, _of_layers(model, page_size, num_pages, rings, zeros)
        if latent:
            self.values = [pages[..., : latent.rank] for pages in self.keys]
        else:
            self.values = _of_layers(model, page_size, num_pages, rings, zeros)
        own = torch.float32 if torch.device(device).type == "cpu" else dtype
        self.states = RecurrentStates(model, slots, own, device, snapshots, drafts)

    def largest(self) -> NDArray[np.float32]:
        """The largest magnitude of keys and values of each head, [layers, 2, kv_heads]; 0 for layers without pages and heads
        that a layer lacks. Only for a cache without scales.
        """
        found = np.zeros((len(self.keys), 2, max(pages.shape[1] for pages in self.keys)), np.float32)
        for layer, both in enumerate(zip(self.keys, self.values, strict=True)):
            for kind, side in enumerate(both):
                if len(side):
                    found[layer, kind, : side.shape[1]] = side.abs().amax((0, 2, 3)).float().cpu().numpy()
        return found


class ArrayCache:
    """The cache as NumPy arrays: float32, or the bits of FP8 numbers, uint8."""

    def __init__(
        self,
        model: DecoderDescription,
        num_pages: int,
        page_size: int,
        rings: RingSizes | None = None,
        scales: Scales | None = None,
    ):
        def zeros(shape: tuple[int, ...]) -> np.ndarray:
            return np.zeros(shape, np.float32 if scales is None else np.uint8)

        self.num_pages = num_pages
        self.page_size = page_size
        self.rings = rings
        self.scales = scales
        self.keys, self.values = (_of_layers(model, page_size, num_pages, rings, zeros) for _ in range(2))

    def largest(self) -> NDArray[np.float32]:
        """The largest magnitude of keys and values of each head, [layers, 2, kv_heads]. Only without
        scales.
        """
        sides = zip(self.keys, self.values, strict=True)
        return np.array([[np.abs(side).max((0, 2, 3)) for side in both] for both in sides])
