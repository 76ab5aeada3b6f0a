"""The race detector of blinkpy.device.lanes, and its findings in functions of the allocator in several lanes.

Supports claim state/lanes.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from blinkpy.device.lanes import LaneRaceError, Team
from blinkpy.device.portable import barrier, block_max, block_scan, block_sum
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.kv.page_allocator import evict_pages, release_pages
from blinkpy.kv.state_memory import snapshot
from blinkpy.verify.sim.world import World, make_world

LANES = 4


class Words(NamedTuple):
    data: Any


def reads_what_another_writes(words: Words, lane: int, lanes: int) -> None:
    if lane == 0:
        words.data[2] = 0  # its present value
    if lane == 3:
        assert words.data[2] == 0
    barrier(lanes)


def writes_what_another_writes(words: Words, lane: int, lanes: int) -> None:
    words.data[2] = 5
    barrier(lanes)


def is_a_barrier_short(words: Words, lane: int, lanes: int) -> None:
    words.data[lane] = lane
    block_sum(1, lane, lanes)
    if lane == 0:
        words.data[1] = words.data[3]
    words.data[lane] += 8
    block_max(1, lane, lanes)


def reads_before_the_start(words: Words, lane: int, lanes: int) -> None:
    assert words.data[lane - 1] == 0
    barrier(lanes)


def is_right(words: Words, lane: int, lanes: int) -> None:
    words.data[lane] = lane + words.data[lane]
    block_sum(1, lane, lanes)
    words.data[lanes + lane] = words.data[lane]
    block_scan(1, lane, lanes)
    assert words.data[2] == words.data[lanes + 2] == 2
    block_max(1, lane, lanes)
    if lane == 1:
        words.data[2] = words.data[7] = 1
    barrier(lanes)
    assert words.data[2] == 1


@pytest.mark.parametrize("seed", range(4))  # for any order of the lanes
@pytest.mark.parametrize(
    ("work", "error"),
    [
        (reads_what_another_writes, r"data\[2\]"),
        (writes_what_another_writes, r"writes what is written: data\[2\]"),
        (is_a_barrier_short, r"data\[[13]\]"),
        (is_right, ""),
    ],
)
def test_a_race_is_found_in_every_order(work: Callable[..., None], error: str, seed: int) -> None:
    words = Words(np.zeros(8, np.int64).data)
    Team(LANES, seed).run(work, words)
    words = Words(np.zeros(8, np.int64).data)
    if error:
        with pytest.raises(LaneRaceError, match=error):
            Team(LANES, seed, races=True).run(work, words)
    else:
        Team(LANES, seed, races=True).run(work, words)


class Table(NamedTuple):
    """A table with scratch words, or with a table that has them."""

    scratch: Any = 0
    state: Any = 0


class Found(NamedTuple):
    found: Any
    profound: Any


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(("field", "factor", "allowed"), [("found", 0, True), ("found", 1, False), ("profound", 0, False)])
def test_equal_writes_are_allowed_for_one_array(outer: bool, field: str, factor: int, allowed: bool) -> None:
    """Whether the state is an argument or an argument's field; different values are never allowed."""

    def work(table: Table, lane: int, lanes: int) -> None:
        scratch = table.state.scratch if outer else table.scratch
        getattr(scratch, field)[2] = factor * lane
        barrier(lanes)

    table = Table(scratch=Found(np.zeros(8, np.int64).data, np.zeros(8, np.int64).data))
    with contextlib.nullcontext() if allowed else pytest.raises(LaneRaceError, match=rf"scratch\.{field}\[2\]"):
        Team(LANES, races=True).run(work, Table(state=table) if outer else table)


def test_an_index_below_0_is_outside() -> None:
    words = Words(np.zeros(8, np.int64).data)
    Team(LANES).run(reads_before_the_start, words)
    with pytest.raises(IndexError, match=r"data\[-1\]"):
        Team(LANES, races=True).run(reads_before_the_start, words)


@pytest.mark.parametrize("collective", [block_sum, block_scan, block_max])
def test_collectives_have_words_of_64_bits(collective: Callable[..., Any]) -> None:
    most = (1 << 63) - 1

    def work(value: int, lane: int, lanes: int) -> None:
        block_sum(0, lane, lanes)
        collective(value if lane == 2 else 0, lane, lanes)

    Team(LANES).run(work, most)
    with pytest.raises(OverflowError):
        Team(LANES).run(work, most + 1)


# ---- the allocator, in rings of several tiles ---------------------------------------------------------------------------


def full_ring(stale: int, cached: int) -> World:
    """The ring has `stale` stale entries, then `cached` pages, which are one chain of the index. The next page belongs to slot 0;
    all other pages are free."""
    world = make_world(1, 1)
    limits, state = world.limits, world.state
    pages, counts = state.pages, state.counts
    assert cached < limits.pages
    pages.ring[:] = 0
    for page in range(cached):
        pages.ring[stale + page & (limits.ring_entries - 1)] = page
        pages.ring_position[page], pages.key[page] = stale + page, 0
        pages.bucket_next[page], pages.bucket_previous[page] = page - 1, page + 1 if page + 1 < cached else -1
    pages.bucket_head[0] = cached - 1
    counts[S.RING_TAIL], counts[S.CACHED_COUNT] = stale + cached, cached
    counts[S.FREE_COUNT] = limits.pages - cached - 1
    pages.free[: counts[S.FREE_COUNT]] = np.arange(limits.pages - 1, cached, -1)
    state.requests.page_table[0, 0], state.requests.num_pages[0], pages.refcount[cached] = cached, 1, 1
    return world


def released(lanes: int, stale_short: int) -> World:
    cached = 6
    world = full_ring(make_world(1, 1).limits.ring_entries - cached - 1 - stale_short, cached)
    arrays = as_memoryviews(world.state)
    Team(lanes, lanes, races=True).run(release_pages, world.limits, arrays.requests, arrays.pages, arrays.counts, 0)
    return world


def test_a_ring_is_compacted_when_a_release_might_not_fit() -> None:
    for lanes in (1, 2, 4):
        for short in (0, 1):
            world = released(lanes, short)
            assert world.state.counts[S.RING_TAIL] == world.limits.ring_entries - 1 - short  # it fits
        world = released(lanes, -1)
        assert world.state.counts[S.RING_TAIL] == world.state.counts[S.RING_HEAD] + 6
        assert world.state.pages.ring[:6].tolist() == list(range(6))
        assert world.state.counts[S.FREE_COUNT] == world.limits.pages - 6


@pytest.mark.parametrize("missing", [1, 3, 5, 6])
def test_lanes_evict_as_many_pages_as_are_missing(missing: int) -> None:
    left = []
    for lanes in (1, 2, 4):
        world = full_ring(3, 6)
        arrays, free = as_memoryviews(world.state), int(world.state.counts[S.FREE_COUNT])
        wanted = free + missing
        Team(lanes, lanes, races=True).run(evict_pages, world.limits, arrays.pages, arrays.counts, arrays.counters, wanted)
        assert world.state.counts[[S.FREE_COUNT, S.CACHED_COUNT, S.RING_HEAD]].tolist() == [wanted, 6 - missing, 3 + missing]
        assert world.state.pages.free[free:wanted].tolist() == list(range(missing))
        left.append(snapshot(world.state))
    assert all(np.array_equal(left[0][name], other[name]) for other in left for name in other)
