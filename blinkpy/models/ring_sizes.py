"""Window rings: the keys and values of sliding-window layers with --window-cache ring.

Each slot has a ring of a few pages in each such layer, and page k of its sequence has place k % pages
there. A page before the window is overwritten by a later page of the same place. In a step with a chunk,
early queries may still need a page whose place a later page of the chunk takes: that one becomes a spill
page, and is copied to its place once the layer's attention has run. Layers run one after the other, so they
share the memory of spill pages.

The pages of all these layers are in one array: layer by layer at consecutive pages, for each place of each
slot, then the spill pages. A layer's cache is a view that begins at its first page, so that one page table,
with the layers' number as its stride, serves all layers, and the spill pages of each layer begin one page
after those of the layer before.
"""

from dataclasses import dataclass
from typing import Self

from blinkpy.config import Config, ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription

MOST_TOKENS = 1 << 31  # of all rings, whose cache slots are 32-bit words


@dataclass(frozen=True)
class RingSizes:
    """layers: sliding-window layers.
    window: the widest, tokens.
    pages: of one ring.
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
        """None for a model without windows. tokens, rows: of the largest step."""
        layers = tuple(index for index, layer in enumerate(model.layers) if layer.attention.window)
        if not layers:
            return None
        window = max(model.layers[index].attention.window for index in layers)
        pages = 1 - (1 - window) // page_size  # the maximum number of pages that a window spans
        # A row of n tokens spills at most n // page_size + 1: its first token's page still has its place.
        return cls(layers, window, page_size, pages, slots, tokens // page_size + rows)

    @property
    def layer_pages(self) -> int:
        """Pages of the view that is one layer's cache."""
        return len(self.layers) * self.slots * self.pages + self.spill

    @property
    def all_pages(self) -> int:
        """Pages of all layers together, spill pages included."""
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
    if scheduler.step_groups > 1:  # the rings' tables are those of one step
        raise ConfigError("window_cache ring does not support step_groups above 1; use window_cache full")
    if sizes.all_pages * sizes.page_size >= MOST_TOKENS:
        raise ConfigError(f"window_cache ring: the rings of {slots} slots exceed {MOST_TOKENS:,} tokens; lower slots")
    return sizes
