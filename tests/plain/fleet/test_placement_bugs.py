"""Placement against its plain form, and bugs on purpose, which that must find.

Claim fleet/placement: A request goes to the engine that has its prompt's pages, within bounds. A failing rule
ends no worker.
"""

import importlib

import numpy as np
import pytest
from support.fleet.placement_bugs import PLACEMENT_BUGS
from support.fleet.plain_placement import placement_storm
from support.seeded_bugs import Bug, planted

STORMS, REQUESTS = 12, 150


def test_it_chooses_as_its_plain_form_does(rng: np.random.Generator) -> None:
    for _ in range(STORMS):
        assert placement_storm(rng, REQUESTS) == ""


@pytest.mark.parametrize("bug", PLACEMENT_BUGS, ids=lambda bug: bug.what)
def test_a_bug_of_placement_is_found(bug: Bug) -> None:
    """By the same seeds each time."""
    with planted(bug):
        module = importlib.import_module("blinkpy.dpu.fleet.placement")
    found = ""
    for seed in range(60):
        found = _outcome_of(seed, module)
        if found:
            break
    assert found


def _outcome_of(seed: int, module: object) -> str:
    try:
        return placement_storm(np.random.default_rng(seed), REQUESTS, module)  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__
