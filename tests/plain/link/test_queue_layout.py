"""The binary layout that front ends and engines share."""

import itertools
import math

import numpy as np
import pytest
from support.front_end.fake_engine import FACTS

from blinkpy.queues import words as C
from blinkpy.queues.layout import (
    ALIGNMENT,
    HEADER,
    VERSION,
    LayoutError,
    QueueLayout,
    QueueSizes,
    engine_views,
    read_header,
    write_header,
)
from blinkpy.queues.submission import SQ_ENTRY
from blinkpy.queues.words import LAPS, LOGPROB_ENTRY, NO_LOGPROB_ENTRY, RECORD_BYTES, lap_of, pack_completion


def segment(sizes: QueueSizes) -> bytearray:
    buffer = bytearray(QueueLayout(sizes).total_bytes)
    write_header(memoryview(buffer), sizes, FACTS)
    return buffer


def drawn(rng: np.random.Generator) -> QueueSizes:
    entries = 1 << int(rng.integers(3, 8))
    return QueueSizes(
        pairs=int(rng.integers(1, 5)),
        slots=int(rng.integers(1, entries + 1)),
        sq_entries=entries,
        cq_entries=1 << int(rng.integers(1, 12)),
        prompt_tokens=int(rng.integers(16, 5000)),
        hash_entries=int(rng.integers(1, 500)),
    )


@pytest.fixture
def sizes(rng: np.random.Generator) -> QueueSizes:
    return drawn(rng)


def test_records_have_the_documented_sizes() -> None:
    assert SQ_ENTRY.itemsize == 256
    assert RECORD_BYTES == 168
    pair = np.array([NO_LOGPROB_ENTRY]).view(LOGPROB_ENTRY)[0]
    assert (pair["token"], pair["logprob"]) == (-1, -np.inf)
    assert all(offset % dtype.base.itemsize == 0 for dtype, offset in (f[:2] for f in SQ_ENTRY.fields.values()))


def test_no_two_regions_share_a_byte(sizes: QueueSizes) -> None:
    """Every view gets a different value; no view may change another, or the header."""
    buffer = segment(sizes)
    views = engine_views(memoryview(buffer), QueueLayout(sizes))
    named = [(name, view) for name, view in views._asdict().items() if name != "sq_long"]  # the same memory as sq
    for number, (_, view) in enumerate(named, 1):
        for pair in range(sizes.pairs):
            (view[pair] if view.shape[0] == sizes.pairs and view.ndim > 1 else view)[...] = number * 100 + pair
    for number, (name, view) in enumerate(named, 1):
        if view.ndim > 1:
            for pair in range(sizes.pairs):
                assert (view[pair] == number * 100 + pair).all(), name
        else:
            assert (view // 100 == number).all(), name
    layout, facts = read_header(memoryview(buffer))
    assert (layout.sizes, facts) == (sizes, FACTS)


LIMITS = {  # least and most of each size
    "pairs": (1, 64), "slots": (1, 0xFFFF), "sq_entries": (2, 1 << 24), "cq_entries": (2, 1 << 24),
    "prompt_tokens": (16, 2**31 - 1), "hash_entries": (1, 2**31 - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_have_bounds(name: str) -> None:
    fine = {"pairs": 1, "slots": 1, "sq_entries": 1 << 24, "cq_entries": 2, "prompt_tokens": 16, "hash_entries": 1}
    least, most = LIMITS[name]
    for value in (least, most):
        assert getattr(QueueSizes(**fine | {name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(LayoutError, match=f"{name} must be {least} to {most}: .*{name}={value}"):
            QueueSizes(**fine | {name: value})
    if name.endswith("q_entries"):
        with pytest.raises(LayoutError, match=f"{name} must be a power of two"):
            QueueSizes(**fine | {name: 6})
    assert QueueSizes(**fine | {"sq_entries": 4, "slots": 4}).slots == 4
    with pytest.raises(LayoutError, match="sq_entries must be at least slots"):
        QueueSizes(**fine | {"sq_entries": 4, "slots": 5})


@pytest.mark.parametrize("skipped", range(5))
def test_everything_is_where_the_documented_sizes_put_it(rng: np.random.Generator, skipped: int) -> None:
    """In order and without gaps, except regions, which begin and end on pages; and each view has its shape,
    place and type."""
    sizes = [drawn(rng) for _ in range(skipped + 1)][-1]
    parts = [
        ("front", "<i8", (64,)), ("sq", "<i4", (sizes.sq_entries, 64)), ("cancel", "<i8", (sizes.slots,)),
        ("hashes", "<i8", (sizes.hash_entries,)), ("prompt", "<i4", (sizes.prompt_tokens,)), ("", "", ()),
        ("pair", "<i8", (64,)), ("cq", "<i8", (sizes.cq_entries,)), ("records", "<i8", (sizes.cq_entries, 21)),
        ("hits", "<i8", (sizes.slots,)), ("", "", ()),
    ]  # fmt: skip
    places, at = dict[str, tuple[int, str, tuple[int, ...]]](), 3 * 4096  # behind header, engine words and control words
    for name, dtype, shape in parts:
        if name:
            places[name] = at, dtype, (sizes.pairs, *shape)
            at += math.prod(shape) * int(dtype[-1])
        else:
            at = -(-at // 4096) * 4096
    places["sq_long"] = places["sq"][0], "<i8", (sizes.pairs, sizes.sq_entries, 32)
    places |= {"engine": (4096, "<i8", (512,)), "control": (8192, "<i8", (512,))}
    buffer = segment(sizes)
    assert len(buffer) == 3 * 4096 + sizes.pairs * (at - 3 * 4096)
    assert not any(buffer[HEADER.itemsize :])
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    for name, view in engine_views(memoryview(buffer), QueueLayout(sizes))._asdict().items():
        assert (view.ctypes.data - start, view.dtype.str, view.shape) == places[name], name
        assert view[0].flags.c_contiguous
        assert len(view) != sizes.pairs or view.ndim == 1 or view.strides[0] == at - 3 * 4096
    layout, facts = read_header(bytes(buffer[: HEADER.itemsize]))  # as much as a handshake sends
    assert (layout.sizes, layout.total_bytes, facts) == (sizes, len(buffer), FACTS)
    with pytest.raises(LayoutError, match=f"the segment has {len(buffer) - 1} bytes, but the layout needs {len(buffer)}"):
        write_header(memoryview(buffer)[:-1], sizes, FACTS)


def test_regions_can_be_registered_on_their_own(sizes: QueueSizes) -> None:
    layout = QueueLayout(sizes)
    for pair in range(sizes.pairs):
        assert layout.front_region(pair) % ALIGNMENT == 0
        assert layout.engine_region(pair) % ALIGNMENT == 0
    assert layout.engine_region(sizes.pairs - 1) + layout.engine_region_bytes == layout.total_bytes


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("magic", b"SOMETHNG", "not a blinkpy queue segment"),
        ("version", VERSION + 1, f"version {VERSION + 1}, but this front end has {VERSION}"),
        ("sq_entry_bytes", 64, "sq_entry_bytes 64, but this front end has 256"),
        ("sq_entry_fields", 7, "sq_entry_fields 7"),
        ("cq_entry_bytes", 16, "cq_entry_bytes 16, but this front end has 8"),
        ("record_bytes", 88, "record_bytes 88, but this front end has 168"),
        ("header_bytes", 8, "header_bytes 8"),
        ("total_bytes", 4096, "total_bytes 4096"),
        ("cq_entries", 3, "power of two"),
        ("pairs", 0, "pairs must be 1 to 64"),
    ],
)
def test_a_mismatch_names_both_sides(sizes: QueueSizes, field: str, value: object, said: str) -> None:
    buffer = segment(sizes)
    np.ndarray((1,), HEADER, buffer)[field] = value
    with pytest.raises(LayoutError, match=said):
        read_header(memoryview(buffer))


def test_a_short_segment_is_refused() -> None:
    with pytest.raises(LayoutError, match="only 10 bytes"):
        read_header(b"x" * 10)


def test_completions_survive_packing(rng: np.random.Generator) -> None:
    for _ in range(200):
        masks = (C.SLOT_MASK, C.TOKEN_MASK, C.FLAG_MASK, C.LAP_MASK)
        fields = [int(rng.integers(0, mask + 1)) for mask in masks]
        word = pack_completion(*fields)
        assert 0 <= word < 1 << 63
        shifts = (0, C.TOKEN_SHIFT, C.FLAG_SHIFT, C.LAP_SHIFT)
        assert [word >> shift & mask for shift, mask in zip(shifts, masks, strict=True)] == fields


def test_laps_distinguish_adjacent_rounds_and_written_entries() -> None:
    size = 4
    assert [lap_of(position, size) for position in range(12)] == [1] * 4 + [2] * 4 + [3] * 4
    laps = [lap_of(position, size) for position in range(0, size * (LAPS + 3), size)]
    assert all(a != b for a, b in itertools.pairwise(laps))
    assert min(laps) == 1
    assert max(laps) == LAPS
