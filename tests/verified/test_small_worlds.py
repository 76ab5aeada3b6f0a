"""All sequences of events in worlds of the smallest sizes, with the real code. docs/verification.md has the sizes;
BLINKPY_PROFILE=nightly explores more.

Claim state/small-worlds: In the smallest pools and queue pairs, every reachable state is valid.

Tester [small worlds](#small-worlds): allocator and prefix cache; client and scheduler | all sequences of events
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from support.seeded_bugs import FRONT_BUGS, SCHEDULER_BUGS, planted
from verified.small_worlds.exploration import SmallWorld, WrongError, explore
from verified.small_worlds.page_world import PageWorld
from verified.small_worlds.pair_world import PairWorld

UNBOUNDED = 1000
Counts = tuple[int, int, int] | None
# Sizes, maximum events, and numbers of states, transitions and sequences (0: unlimited; None: not compared). Sizes of pools:
# concurrent requests, pages, page size; of queue pairs: slots, entries of the completion ring.
POOLS: list[tuple[tuple[int, ...], int, Counts]] = [
    ((1, 1, 1), UNBOUNDED, (7, 12, 0)),
    ((1, 2, 1), UNBOUNDED, (82, 208, 0)),
    ((2, 2, 1), UNBOUNDED, (394, 3_396, 0)),
    ((3, 2, 1), UNBOUNDED, (394, 4_452, 0)),
    ((2, 1, 2), UNBOUNDED, (19, 140, 0)),
    ((1, 3, 1), UNBOUNDED, (3_042, 12_288, 0)),
    ((2, 2, 2), UNBOUNDED, (2_922, 55_452, 0)),
    ((3, 3, 1), 5, (1_577, 11_464, 1_290_400)),
]
PAIRS: list[tuple[tuple[int, ...], int, Counts]] = [
    ((1, 2), 5, (2_988, 10_223, 160_471)),
    ((2, 2), 4, (1_368, 3_451, 15_001)),
]
if os.environ.get("BLINKPY_PROFILE") == "nightly":
    POOLS += [((2, 3, 1), UNBOUNDED, (27_846, 347_088, 0))]
    PAIRS += [((1, 2), 7, None), ((2, 2), 6, None)]


@pytest.mark.parametrize(("sizes", "longest", "counts"), POOLS)
def test_all_that_can_happen_to_a_small_pool(sizes: tuple[int, ...], longest: int, counts: Counts) -> None:
    """Requests with every prompt of two kinds of tokens begin, compute together, grow and end, in every order."""
    _explored(PageWorld, sizes, longest, counts)


@pytest.mark.parametrize(("sizes", "longest", "counts"), PAIRS)
def test_all_that_can_happen_on_a_small_queue_pair(sizes: tuple[int, ...], longest: int, counts: Counts) -> None:
    """One client, two successive owners: writes arrive one by one, between turns, reads, cancels, heartbeats and silence."""
    _explored(PairWorld, sizes, longest, counts)


def _explored(world: Callable[..., SmallWorld], sizes: tuple[int, ...], longest: int, counts: Counts) -> None:
    found = explore(world(*sizes), longest)
    print(f"{world.__name__} {sizes}: {found}")
    assert found.complete == (longest == UNBOUNDED)
    if counts:
        assert (found.states, found.transitions, 0 if found.complete else found.sequences) == counts


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
