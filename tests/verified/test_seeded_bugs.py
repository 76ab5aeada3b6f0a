"""A test of the testers: each bug of seeded_bugs.py, planted in the source, is found. docs/verification.md has their numbers.

Claim testers/seeded-bugs: The testers find each seeded bug. A failure is shrunk, saved, and repeats exactly.
"""

import importlib
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
from support.hunts import found_by_properties, found_by_simulator, hunt
from support.import_graph import importers_of
from support.seeded_bugs import FRONT_BUGS, SCHEDULER_BUGS, Bug, patched_source, planted

from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.simulation import simulate

NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
BUGS = (*SCHEDULER_BUGS, *FRONT_BUGS)
DRAWN = BUGS if NIGHTLY else random.Random(int(os.environ["BLINKPY_SEED"])).sample(BUGS, len(BUGS) // 10)  # of this run


@pytest.fixture(scope="module")
def findings() -> dict[str, str]:
    """The report on each bug of DRAWN, from two processes that inherit the compiled checks."""
    for policy in SHIPPED.values():  # compiled schedulers repeat its records
        simulate(1, 1, policy, mode="python", records=True)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        return dict(zip((bug.what for bug in DRAWN), pool.map(hunt, DRAWN), strict=True))


@pytest.mark.timeout(900)  # the first test waits for the findings on all bugs
@pytest.mark.parametrize("bug", DRAWN, ids=lambda bug: bug.what)
def test_a_seeded_bug_is_found(bug: Bug, findings: dict[str, str]) -> None:
    assert findings[bug.what], f"nobody notices that {bug.what}"
    print(findings[bug.what])


def test_without_a_bug_nothing_is_found() -> None:
    assert found_by_simulator(None, calls=5_000) == ""


# ---- slow machines, and calls that never return ------------------------------------------------------------------------

COMMIT = "    rows = batch.counts[S.ROWS]\n"


def spent(hunt: Callable[[], str]) -> tuple[str, float]:
    """The report of a hunt, and its CPU time."""
    before = time.process_time()
    return hunt(), time.process_time() - before


def test_a_slow_machine_is_no_reason_to_report_a_bug() -> None:
    """Every call of the scheduler is slow here, and all calls together take many times the limit of a single call."""
    slow = Bug("a turn takes long", "commit", COMMIT, COMMIT + "    for _ in range(200_000):\n        pass\n")
    said, seconds = spent(lambda: found_by_simulator(slow, calls=400, call_s=0.2))
    assert (said, seconds > 0.4) == ("", True)
    said, seconds = spent(lambda: found_by_properties(slow, examples=3, call_s=0.2))
    assert (said, seconds > 0.4) == ("", True)


@pytest.mark.parametrize("finds", [found_by_simulator, found_by_properties])
def test_a_call_that_does_not_return_is_found(finds: Callable[..., str]) -> None:
    endless = Bug("a turn does not end", "commit", COMMIT, COMMIT + "    while rows > 0:\n        pass\n")
    said, seconds = spent(lambda: finds(endless, call_s=0.5))
    assert said and 0.4 < seconds < 20


def test_all_bugs_differ_and_fit() -> None:
    assert len({bug.what for bug in BUGS}) == len(BUGS) == len([patched_source(bug) for bug in BUGS])


def test_a_patch_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        patched_source(Bug("nothing", "plan", "no such line", ""))


def test_all_importers_of_a_patched_module_are_reloaded() -> None:
    """Otherwise a bug would be planted in a part of the scheduler only."""
    assert {"blinkpy.scheduler.cycle", "blinkpy.scheduler.host_scheduler"} <= importers_of("blinkpy.kv.page_allocator")
    with planted(BUGS[0]):
        cycle = importlib.import_module("blinkpy.scheduler.cycle")
        allocator = importlib.import_module("blinkpy.kv.page_allocator")
        assert sys.modules["blinkpy.scheduler.phases.admit"].take_pages is allocator.take_pages
    assert cycle is not importlib.import_module("blinkpy.scheduler.cycle")


def test_planting_leaves_the_real_modules_alone() -> None:
    from blinkpy.scheduler import cycle

    with planted(BUGS[0]):
        assert "blinkpy.scheduler.cycle" not in sys.modules
    assert sys.modules["blinkpy.scheduler.cycle"] is cycle
