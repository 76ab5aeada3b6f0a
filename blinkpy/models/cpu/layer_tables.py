"""Page tables and cache slots of all layers, from the scheduler or from window rings, for attention on the CPU."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.numpy_products import address
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import RingSizes


class LayerTables:
    """Tables of all layers of a model.

    rings: window rings of the layers that have them, or None.
    table_width: pages of the longest sequence.
    max_tokens: maximum tokens of a step.
    """

    def __init__(self, model: DecoderDescription, rings: RingSizes | None, table_width: int, max_tokens: int):
        self._ringed = [layer for layer in range(len(model.layers)) if rings and model.keys_of(layer) in rings.layers]
        self._last_readers = model.last_readers
        self._rings = HostRings(rings, table_width, max_tokens) if rings else None
        self._page_table = np.zeros((0, 0), np.int32)

    def begin(self, batch: Batch, page_table: NDArray[np.int32], arguments: NDArray[Any]) -> None:
        """Read one step, and write the tables' addresses to the arguments of the layers' compiled passes
        (`ARGUMENTS`).
        """
        self._page_table = page_table
        arguments["page_table"], arguments["cache_slots"] = address(page_table), address(batch.cache_slots)
        arguments["slots"], arguments["table_width"] = page_table.shape
        if self._rings is not None:
            own, (slots, width) = self._rings, self._rings.page_table.shape
            own.place(batch)
            for name, value in {"page_table": address(own.page_table), "cache_slots": address(own.cache_slots)}.items():
                arguments[name][self._ringed] = value
            arguments["slots"][self._ringed], arguments["table_width"][self._ringed] = slots, width

    def pages(self, layer: int, slot: int) -> NDArray[np.int32]:
        """The pages of a slot's sequence, in order."""
        table: NDArray[np.int32] = (self._rings.page_table if self._rings and layer in self._ringed else self._page_table)[slot]
        return table

    def end(self, layer: int, *sides: Any) -> None:
        """Call it after the attention of a layer. sides: the layer's keys and values."""
        if self._rings is not None and layer in self._ringed and layer in self._last_readers:
            self._rings.keep(*sides)


class HostRings:
    """Page tables of layers with rings, which replace the scheduler's (blinkpy.models.paged_cache).

    page_table: int32 [slots, pages of a sequence], written by `place` for one step.
    cache_slots: int32 [tokens], likewise.
    """

    def __init__(self, sizes: RingSizes, table_width: int, max_tokens: int):
        self._sizes = sizes
        self.page_table = np.zeros((sizes.slots, table_width), np.int32)
        self.cache_slots = np.zeros(max_tokens, np.int32)
        self._spilled = self._places = np.zeros(0, np.int64)

    def place(self, batch: Batch) -> None:
        """Find the ring slot of each page that the step reads or writes. Raises ValueError for a step beyond the sizes."""
        sizes, rows, tokens = self._sizes, int(batch.counts[S.ROWS]), int(batch.counts[S.TOKENS])
        if tokens // sizes.page_size + rows > sizes.spill:
            raise ValueError(f"{tokens} tokens in {rows} rows may need more than {sizes.spill} spill pages")
        starts, contexts = batch.query_starts[: rows + 1].astype(np.int64), batch.context_lengths[:rows].astype(np.int64)
        slots, counts = batch.row_slots[:rows].astype(np.int64), np.diff(starts)
        oldest = self._first_seen(contexts - counts)
        spilling = oldest + sizes.pages  # first page whose ring slot still holds a page that the step reads
        spill = len(sizes.layers) * sizes.slots * sizes.pages + starts[:-1] // sizes.page_size + np.arange(rows)

        def ring_place(row: NDArray[np.int64], page: NDArray[np.int64]) -> NDArray[np.int64]:
            return (slots[row] * sizes.pages + page % sizes.pages) * len(sizes.layers)

        def place(row: NDArray[np.int64], page: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(page < spilling[row], ring_place(row, page), spill[row] + page - spilling[row])

        ends = -(-contexts // sizes.page_size)
        row, page = _ranges(oldest, ends)
        self.page_table[slots[row], page] = place(row, page)
        page, offset = np.divmod(batch.positions[:tokens].astype(np.int64), sizes.page_size)
        self.cache_slots[:tokens] = place(np.repeat(np.arange(rows), counts), page) * sizes.page_size + offset
        row, page = _ranges(np.maximum(spilling, self._first_seen(contexts)), ends)
        self._spilled, self._places = place(row, page), ring_place(row, page)

    def keep(self, *sides: Any) -> None:
        """Copy the spill pages that later steps may read to their ring slots. sides: keys and values of the layer."""
        if len(self._spilled):
            for side in sides:
                side[self._places] = side[self._spilled]

    def _first_seen(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first page that the token at a position may see."""
        return np.maximum(position - self._sizes.window + 1, 0) // self._sizes.page_size


def _ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, number) of all numbers in [begins[row], ends[row]), row by row."""
    counts = np.maximum(ends - begins, 0)
    row = np.repeat(np.arange(len(begins)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts - begins)[row]
