"""The digest of functions outside of a policy's files, and the compilation of a policy's turn."""

import math
import random
import statistics
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import case_sizes

from blinkpy.scheduler import host_scheduler
from blinkpy.scheduler.policies import fcfs
from blinkpy.scheduler.policy_key import policy_digest
from blinkpy.verify.sim.world import make_world


def ranking(source: str, **values: Any) -> Any:
    """A function that returns an expression, in a user's module with these globals."""
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


def calls(function: Any) -> str | None:
    """The digest of a policy that calls the function by one name."""
    return policy_digest(ranking("lambda request: function(request.pair, 2)", function=function))


def test_library_functions_are_keyed_by_name() -> None:
    digests = [calls(f) for f in (math.floor, math.ceil, np.minimum, np.maximum, np.array, int, np.int64, statistics.mean, math)]
    assert len(set(digests) - {None}) == len(digests)


def test_functions_of_users_are_followed_whatever_their_name_is() -> None:
    digests = []
    for weight in (3, 4, 3):
        function = ranking(f"lambda x, y: x * y * {weight}")
        function.__name__ = function.__qualname__ = "math"
        digests.append(calls(function))
    assert digests[0] == digests[2] != digests[1] and None not in digests


def test_code_inside_of_the_code_counts_with_its_globals() -> None:
    digests = []
    for number, weight in ((1, 3), (2, 3), (1, 4), (1, 3)):
        source = f"lambda request: (lambda x: x * WEIGHT + {number})(request.pair)"
        digests.append(policy_digest(ranking(source, WEIGHT=weight)))
    assert digests[0] == digests[3] and len(set(digests) - {None}) == 3


def test_what_a_closure_holds_has_to_be_there() -> None:
    def make(known: bool) -> Any:
        if known:
            late = 7
        return lambda request: request.arrival + late

    assert policy_digest(make(True)) is not None is policy_digest(make(False))


def test_sets_have_no_order() -> None:
    """0 and 64 collide in a small set, so it iterates over them in order of insertion."""
    sets = [frozenset(numbers) for numbers in ((0, 64), (64, 0), (0, 65))]
    assert list(sets[0]) != list(sets[1])
    digests = [policy_digest(ranking("lambda request: request.pair in SOME", SOME=some)) for some in sets]
    assert digests[0] == digests[1] != digests[2] and None not in digests


@pytest.mark.parametrize("modules", [False, True])
def test_the_digest_distinguishes_which_object_is_repeated(modules: bool) -> None:
    """Of two functions or modules that the digest has already visited."""
    digests = []
    for again in (0, 1, 0):
        each: list[Any] = [ModuleType(f"helpers{n}") for n in range(2)]
        for n, module in enumerate(each):
            module.f = ranking(f"lambda x: x + {n}")
        a, b, c = (each[n] if modules else each[n].f for n in (0, 1, again))
        source = "lambda request: a.f(1) + b.f(2) + c.f(3)" if modules else "lambda request: a(1) + b(2) + c(3)"
        digests.append(policy_digest(ranking(source, a=a, b=b, c=c)))
    assert digests[0] == digests[2] != digests[1] and None not in digests


def test_versions_of_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's version for its own libraries."""
    before = calls(np.minimum), calls(math.floor)
    monkeypatch.setattr(np, "__version__", "another")
    monkeypatch.setattr(sys, "version", "another")
    assert not {calls(np.minimum), calls(math.floor)} & {*before, None}


def test_methods_and_instances_of_libraries_cannot_be_compared() -> None:
    """Their names do not identify their values."""
    assert calls((1, 2).count) is calls("abc".find) is calls(random.Random(3)) is None


def test_arrays_of_objects_cannot_be_compared() -> None:
    for table, kept in ((np.array([1, 2]), True), (np.array([1, None]), False)):
        assert (policy_digest(ranking("lambda request: TABLE[request.pair]", TABLE=table)) is not None) == kept


def test_the_queues_that_are_attached_are_of_the_kind_that_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    monkeypatch.setattr(host_scheduler, "compiled_turn", lambda policy: None)
    monkeypatch.setattr(host_scheduler, "compiled_for", lambda function, given: kinds.extend(given))
    limits, state, views, *_ = make_world(1, 1, chosen=case_sizes())
    scheduler = host_scheduler.Scheduler(limits, state)
    scheduler.attach(views)
    assert kinds[:3] == [scheduler._limits.kind, scheduler._queues.kind, scheduler.state_argument.kind]


def test_turns_hold_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without cached code: the front end's threads continue while the scheduler runs."""
    monkeypatch.setattr(host_scheduler, "cached_njit", lambda function, key, **options: (key, options))
    monkeypatch.setattr(host_scheduler, "njit", lambda function, **options: (None, options))
    made = host_scheduler.compiled_turn.__wrapped__
    assert made(fcfs) == ((policy_digest(fcfs),), {"nogil": True})
    monkeypatch.setattr(host_scheduler, "policy_digest", lambda policy: None)
    assert made(fcfs) == (None, {"nogil": True})
