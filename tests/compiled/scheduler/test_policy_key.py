"""The digest of functions that no file of a policy holds, and how a policy's turn is compiled."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from blinkpy.scheduler import host_scheduler
from blinkpy.scheduler.policies import fcfs
from blinkpy.scheduler.policy_key import policy_digest


def ranking(source: str, **values: Any) -> Any:
    """The function of an expression in a module of the user, with these globals."""
    return eval(source, {"__name__": "mine", **values})


def test_defaults_count() -> None:
    digests = {policy_digest(ranking(f"lambda request, bonus={bonus}: request.arrival + bonus")) for bonus in (1, 2, 1)}
    assert len(digests - {None}) == 2


def test_a_module_that_holds_itself_is_followed_once() -> None:
    digests = []
    for weight in (3, 4, 3):
        helpers: Any = ModuleType("helpers")
        helpers.again, helpers.weight = helpers, weight
        digests.append(policy_digest(ranking("lambda request: request.arrival * helpers.again.weight", helpers=helpers)))
    assert digests[0] == digests[2] != digests[1] and None not in digests


def test_arrays_of_objects_cannot_be_compared() -> None:
    for table, kept in ((np.array([1, 2]), True), (np.array([1, None]), False)):
        assert (policy_digest(ranking("lambda request: TABLE[request.pair]", TABLE=table)) is not None) == kept


def test_turns_hold_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether their code is kept or not: the front end's threads go on while the scheduler runs."""
    monkeypatch.setattr(host_scheduler, "cached_njit", lambda function, key, **options: (key, options))
    monkeypatch.setattr(host_scheduler, "njit", lambda function, **options: (None, options))
    made = host_scheduler.compiled_turn.__wrapped__
    assert made(fcfs) == ((policy_digest(fcfs),), {"nogil": True})
    monkeypatch.setattr(host_scheduler, "policy_digest", lambda policy: None)
    assert made(fcfs) == (None, {"nogil": True})
