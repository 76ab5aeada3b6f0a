"""The storms on weak machines find each bug in the order of accesses: see support/order_bugs.py."""

from __future__ import annotations

import pytest
from support.front_end.weak_link import weak_storms
from support.order_bugs import ORDER_BUGS
from support.seeded_bugs import Bug, planted
from verified.memory_model.machines import WEAK

SEEDS = 40  # of the links on which a bug is looked for; most are found on the first


@pytest.mark.parametrize("bug", [pytest.param(bug, id=f"{name}-{bug.what}") for name, bugs in ORDER_BUGS.items() for bug in bugs])
def test_an_access_that_is_moved_or_weakened_is_found(bug: Bug) -> None:
    with planted(bug):
        for seed in range(SEEDS):
            try:
                weak_storms(seed, WEAK, WEAK)
            except Exception:  # whatever it is, it was noticed
                return
    raise AssertionError("not found")
