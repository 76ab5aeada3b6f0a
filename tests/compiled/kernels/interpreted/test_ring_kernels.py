"""The kernels of window rings in the interpreter, against the rings of the CPU's decoders."""

import numpy as np
import pytest
import torch
from support.models.paged_batch import PagedBatches
from support.models.ring_storm import ring_storm

from blinkpy.kernels.attention.attention_variants import PagedKV
from blinkpy.kernels.attention.rotate_and_cache import WindowRings, keep_spilled, place_pages
from blinkpy.kernels.launch import BatchView
from blinkpy.kv.state import TOKENS, Batch
from blinkpy.models.cpu.layer_tables import HostRings
from blinkpy.models.paged_cache import RingSizes

SLOTS, ROWS_AT_MOST, WIDTH = 5, 4, 20


def rings_of(sizes: RingSizes, width: int, tokens: int) -> tuple[HostRings, WindowRings]:
    """The rings of the CPU's decoders, and of the kernels."""
    table, slots = torch.zeros(SLOTS, width, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    return HostRings(sizes, width, tokens), WindowRings(table, slots, sizes.window, sizes.pages, len(sizes.layers))


def place(batches: PagedBatches, batch: Batch, sizes: RingSizes, host: HostRings, rings: WindowRings) -> BatchView:
    """Place the pages of a step with both, and compare."""
    used, page, table = int(batch.counts[TOKENS]), sizes.page_size, rings.page_table.numpy()
    view = BatchView.of(batch._replace(**{name: torch.from_numpy(getattr(batch, name)) for name in BatchView._fields}))
    host.place(batch)
    place_pages(rings, view, rows=ROWS_AT_MOST, page_size=page)
    assert (rings.cache_slots.numpy()[:used] == host.cache_slots[:used]).all()
    for sequence, count in batches.work:
        oldest, end = max(sequence.computed - sizes.window + 1, 0) // page, -(-(sequence.computed + count) // page)
        assert (table[sequence.slot, oldest:end] == host.page_table[sequence.slot, oldest:end]).all()
        before = table[sequence.slot, max(0, oldest - 256 // page) : oldest]  # positions that the first tile may load
        of_ring = sizes.pages * len(sizes.layers)
        assert (before // of_ring == sequence.slot).all()
    return view


@pytest.mark.parametrize("attempt", range(2))
def test_places_and_copies(rng: np.random.Generator, attempt: int) -> None:
    """Places of all pages that a step reads and of its tokens, and contents of its spill pages; no other part of a cache
    changes."""
    page, window, layers = int(rng.choice([8, 16])), int(rng.integers(1, 60)), int(rng.integers(1, 4))
    tokens, length = int(rng.integers(40, 120)), WIDTH * page
    spill, pages = tokens // page + ROWS_AT_MOST, 1 - (1 - window) // page
    sizes = RingSizes(tuple(range(layers)), window, page, pages, SLOTS, spill)
    host, rings = rings_of(sizes, WIDTH, tokens)
    batches = PagedBatches(
        rng, page_size=page, num_pages=SLOTS * WIDTH, slots=SLOTS, max_model_len=length, max_tokens=tokens, max_rows=ROWS_AT_MOST
    )
    storm = ring_storm(rng, batches, 9, longest=length - 4, new_tokens=3, rows=ROWS_AT_MOST, tokens=tokens, prompts=6)
    spilled = 0
    for batch in storm:
        view = place(batches, batch, sizes, host, rings)
        sides = [torch.from_numpy(rng.random((sizes.layer_pages, 2, page, 4), np.float32)) for _ in range(2)]
        if attempt:
            sides = [side.to(torch.float8_e4m3fn) for side in sides]
        expected = [side.clone() for side in sides]
        host.keep(*expected)
        scales = torch.ones(2, 2) if attempt else None
        keep_spilled(rings, PagedKV(sides[0], sides[1], rings.page_table, scales), view, rows=ROWS_AT_MOST)
        for side, right in zip(sides, expected, strict=True):
            assert torch.equal(side.float(), right.float())
        spilled += len(host._spilled) > 0
        batch.sampled[: len(batches.work)] = 1
    assert spilled > 0


def test_long_rows(rng: np.random.Generator) -> None:
    """More tokens and pages than one program of a row handles."""
    page, window, length = 4, int(rng.integers(500, 800)), 2000
    sizes = RingSizes((0, 1), window, page, 1 - (1 - window) // page, SLOTS, 300)
    host, rings = rings_of(sizes, length // page, 1000)
    batches = PagedBatches(rng, page_size=page, num_pages=900, slots=SLOTS, max_model_len=length, max_tokens=1000, max_rows=4)
    first, second = (batches.add([1] * length) for _ in range(2))
    for work in ([(first, 900)], [(first, 1), (second, 400)], [(first, 600), (second, 300)]):
        batch = batches.batch(work)
        place(batches, batch, sizes, host, rings)
        batches.commit(batch)


def test_what_does_not_fit_is_refused() -> None:
    ids = torch.zeros(9, dtype=torch.int32)
    view, rings = BatchView(torch.zeros(8, dtype=torch.int64), *[ids] * 6), WindowRings(torch.zeros(2, 3), ids, 5, 2, 1)
    with pytest.raises(TypeError, match="page_table"):
        place_pages(rings, view, rows=8, page_size=8)
    rings = WindowRings(torch.zeros(2, 3, dtype=torch.int32), ids, 5, 2, 1)
    with pytest.raises(ValueError, match="query_starts"):
        place_pages(rings, view, rows=9, page_size=8)
    cache = torch.zeros(3, 1, 8, 4)
    with pytest.raises(ValueError, match="keys"):
        keep_spilled(rings, PagedKV(cache, cache, rings.page_table), view, rows=8)
