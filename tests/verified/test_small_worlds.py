"""All that can happen in worlds of the smallest sizes, with the real code. docs/verification.md has the counts.
BLINKPY_PROFILE=nightly goes further."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.seeded_bugs import FRONT_BUGS, SCHEDULER_BUGS, planted
from verified.small_worlds.exploration import SmallWorld, WrongError, explore
from verified.small_worlds.page_world import PageWorld
from verified.small_worlds.pair_world import PairWorld

PAGE = (Path(__file__).parents[2] / "docs" / "verification.md").read_text(encoding="utf-8")
UNBOUNDED = 1000
# Sizes, most events, states. Pools: requests at a time, pages, page size. Queue pairs: slots, entries of the completion ring.
POOLS = [
    ((1, 1, 1), UNBOUNDED, 7),
    ((1, 2, 1), UNBOUNDED, 82),
    ((2, 2, 1), UNBOUNDED, 394),
    ((3, 2, 1), UNBOUNDED, 394),
    ((2, 1, 2), UNBOUNDED, 19),
    ((1, 3, 1), UNBOUNDED, 3_042),
    ((2, 2, 2), UNBOUNDED, 2_922),
    ((3, 3, 1), 5, 1_577),
]
PAIRS = [((1, 2), 5, 2_988), ((2, 2), 4, 1_368)]
if os.environ.get("BLINKPY_PROFILE") == "nightly":
    POOLS += [((2, 3, 1), UNBOUNDED, 0)]
    PAIRS += [((1, 2), 7, 0), ((2, 2), 6, 0)]


@pytest.mark.parametrize(("sizes", "longest", "states"), POOLS)
def test_all_that_can_happen_to_a_small_pool(sizes: tuple[int, ...], longest: int, states: int) -> None:
    """Requests with every prompt of two kinds of tokens begin, compute together, grow and end, in every order."""
    _explored(PageWorld, sizes, longest, states)


@pytest.mark.parametrize(("sizes", "longest", "states"), PAIRS)
def test_all_that_can_happen_on_a_small_queue_pair(sizes: tuple[int, ...], longest: int, states: int) -> None:
    """One client, two owners after each other: writes arrive one by one, between turns, reads, cancels, beats and silence."""
    _explored(PairWorld, sizes, longest, states)


def _explored(world: Callable[..., SmallWorld], sizes: tuple[int, ...], longest: int, states: int) -> None:
    """states: how many there are; 0 for sizes of which docs/verification.md says nothing."""
    found = explore(world(*sizes), longest)
    print(f"{world.__name__} {sizes}: {found}")
    assert found.complete == (longest == UNBOUNDED)
    if states:
        sequences = "all" if found.complete else f"{found.sequences:,} of up to {longest}"
        row = f"| {', '.join(map(str, sizes))} | {found.states:,} | {found.transitions:,} | {sequences} |"
        assert found.states == states
        assert row in PAGE, row


BUGS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "a page is freed twice": (PageWorld, (2, 3, 1), 4),
    "compaction loses a page": (PageWorld, (2, 2, 2), 6),
    "eviction skips a page": (PageWorld, (2, 2, 1), 9),
    "two requests get the same page": (PageWorld, (1, 3, 1), 2),
    "the whole prompt may be a hit": (PageWorld, (2, 2, 1), 5),
    "an equal page is indexed twice": (PageWorld, (2, 2, 1), 4),
    "a heartbeat does not repeat the doorbell": (PairWorld, (1, 2), 4),
    "a heartbeat is always the same": (PairWorld, (1, 2), 2),
    "an arena gives out what is in use": (PairWorld, (2, 2), 3),
    "a lease never ends": (PairWorld, (1, 2), 1),
    "the doorbell is rung before the entry": (PairWorld, (1, 2), 4),
    "a completion of the last lap is read again": (PairWorld, (1, 2), 1),
    "positions of before a claim are kept": (PairWorld, (1, 2), 3),
    "doorbells carry no epoch": (PairWorld, (1, 2), 2),
}


@pytest.mark.parametrize("what", BUGS)
def test_a_seeded_bug_is_found_in_a_small_world(what: str) -> None:
    world, sizes, longest = BUGS[what]
    (bug,) = (bug for bug in (*SCHEDULER_BUGS, *FRONT_BUGS) if bug.what == what)
    with planted(bug), pytest.raises(WrongError):
        explore(world(*sizes), longest)
