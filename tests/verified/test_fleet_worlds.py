"""Moves between engines, which are worlds of the simulator: real fleet, real queue pairs, real schedulers.

Claim fleet/moves: Moves between engines lose, double and change no token.

Tester storm over worlds of the simulator: the fleet, with real schedulers | one storm
"""

import logging
from collections.abc import Iterator

import pytest
from support.front_end.fleet_bugs import WORLD_BUGS
from support.front_end.scheduler_storm import SchedulerStorm
from support.part_of_cases import part_of
from support.seeded_bugs import Bug, patched_source, planted

STEPS, STORMS, HUNTS = 160, 12, 40


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # thousands of warnings about lost engines
    yield
    logging.disable(logging.NOTSET)


def test_requests_move_between_schedulers_token_for_token(seed: int) -> None:
    storms = list[SchedulerStorm]()
    while len(storms) < STORMS or (sum(storm.cuts for storm in storms) <= 5 and len(storms) < 5 * STORMS):
        storms.append(SchedulerStorm(seed * 1000 + len(storms)))
        storms[-1].run(STEPS)
    requests, moved = sum(len(storm.clients) for storm in storms), sum(storm.moved for storm in storms)
    assert requests > 100 and moved > 20, "the storms had too few requests or moves"
    assert sum(storm.predicted for storm in storms) > 0, "predictions gave no drafts"
    assert sum(storm.cuts for storm in storms) > 5, "no engine survived the loss of its front end"
    assert sum(storm.whole for storm in storms) > requests // 4


@pytest.mark.parametrize("bug", part_of(WORLD_BUGS, 2), ids=lambda bug: bug.what)
def test_a_seeded_bug_is_found_between_schedulers(bug: Bug) -> None:
    """The seeds are fixed; each run tries half of the bugs."""
    with planted(bug):
        for seed in range(HUNTS):
            try:
                SchedulerStorm(seed).run(STEPS)
            except Exception:  # any exception means that the bug was noticed
                return
    pytest.fail(f"nobody notices that {bug.what}")


def test_every_patch_fits() -> None:
    assert len({bug.what for bug in WORLD_BUGS}) == len(WORLD_BUGS) == len([patched_source(bug) for bug in WORLD_BUGS])
