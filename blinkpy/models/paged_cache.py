"""The KV cache's memory: for each layer one array of keys and one of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import Config, ConfigError
from blinkpy.models.cache_scales import Scales
from blinkpy.models.description.decoder_description import DecoderDescription

if TYPE_CHECKING:
    import torch


MOST_TOKENS = 1 << 31  # of all rings, whose cache slots are 32-bit words


@dataclass(frozen=True)
class RingSizes:
    """Sizes of window rings.

    layers: sliding-window layers.
    window: the widest, tokens.
    pages: of one ring.
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
        """The sizes for a model; None if it has no windows. tokens, rows: of the largest step."""
        layers = tuple(index for index, layer in enumerate(model.layers) if layer.attention.window)
        if not layers:
            return None
        window = max(model.layers[index].attention.window for index in layers)
        pages = 1 - (1 - window) // page_size  # the maximum number of pages that a window spans
        # A row of n tokens spills at most n // page_size + 1: its first token's page still has its place.
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
    slots, scheduler = config.frontend.workers * config.queue.slots, config.scheduler
    rows = min(scheduler.max_num_seqs, slots)
    sizes = RingSizes.of(model, config.cache.page_size, slots, scheduler.max_num_batched_tokens, rows)
    if sizes is None:
        raise ConfigError(f"window_cache ring: no layer of {model.name} has a sliding window; use window_cache full")
    if scheduler.step_groups > 1:  # rings only have tables for one step
        raise ConfigError("window_cache ring does not support step_groups above 1; use window_cache full")
    if sizes.all_pages * sizes.page_size >= MOST_TOKENS:
        raise ConfigError(f"window_cache ring: the rings of {slots} slots exceed {MOST_TOKENS:,} tokens; lower slots")
    return sizes


A = TypeVar("A")


def kv_bytes_per_page(model: DecoderDescription, page_size: int, itemsize: int, rings: RingSizes | None = None) -> int:
    """Bytes of one page of the pool: keys and values of all layers, except layers with rings. If all layers
    have rings, a page takes no memory, and the result is 1.

    itemsize: bytes of a number.
    """
    layers = len(model.layers) - (len(rings.layers) if rings else 0)
    return max(1, layers * 2 * model.kv_size * page_size * itemsize)


def ring_bytes(model: DecoderDescription, rings: RingSizes | None, itemsize: int) -> int:
    """Bytes of all window rings, keys and values, including spill pages."""
    return 0 if rings is None else rings.all_pages * rings.page_size * 2 * model.kv_size * itemsize


def _of_layers(
    model: DecoderDescription, page_size: int, num_pages: int, rings: RingSizes | None, zeros: Callable[[tuple[int, ...]], A]
) -> list[A]:
    """Keys or values of each layer. zeros: makes an array of a shape."""
    page, views = (model.kv_heads, page_size, model.head_dim), dict[int, A]()
    if rings is not None:
        shared: Any = zeros((rings.all_pages, *page))
        views = {layer: shared[rank : rank + rings.layer_pages] for rank, layer in enumerate(rings.layers)}
    return [views[layer] if layer in views else zeros((num_pages, *page)) for layer in range(len(model.layers))]


class PagedCache:
    """The cache as torch tensors.

    keys, values: per layer a tensor [pages, kv_heads, page_size, head_dim], so a page of one head is
        contiguous. Layers with rings share memory.
    num_pages: of the pool, for the other layers.
    dtype: of keys and values before caching, and in the cache, which is FP8 if there are `scales`
        (blinkpy.models.cache_scales).
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
    ):
        import torch

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype if scales is None else torch.float8_e4m3fn, device=device)

        self.num_pages, self.page_size, self.rings, self.dtype = num_pages, page_size, rings, dtype
        self.scales = None if scales is None else torch.from_numpy(scales).to(device)  # float32 [layers, 2, kv_heads]
        self.keys, self.values = (_of_layers(model, page_size, num_pages, rings, zeros) for _ in range(2))

    def largest(self) -> NDArray[np.float32]:
        """The largest magnitude of keys and values of each head, [layers, 2, kv_heads]. Only without
        scales.
        """
        sides = zip(self.keys, self.values, strict=True)
        return np.array([[side.abs().amax((0, 2, 3)).float().cpu().numpy() for side in both] for both in sides])


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

        self.num_pages, self.page_size, self.rings, self.scales = num_pages, page_size, rings, scales
        self.keys, self.values = (_of_layers(model, page_size, num_pages, rings, zeros) for _ in range(2))

    def largest(self) -> NDArray[np.float32]:
        """The largest magnitude of keys and values of each head, [layers, 2, kv_heads]. Only without
        scales.
        """
        sides = zip(self.keys, self.values, strict=True)
        return np.array([[np.abs(side).max((0, 2, 3)) for side in both] for both in sides])
