"""The check of the scheduler's state finds what is broken in it."""

from __future__ import annotations

from typing import Any

import pytest
from support.attached_world import prompt, world
from support.scheduler_world import World

from blinkpy.kv.invariants.check_state import state_faults
from blinkpy.kv.state import FREE_COUNT, RING_TAIL, RUNNING


def _break(name: str, index: Any, value: Any) -> Any:
    def change(made: World) -> None:
        tree: Any = made.state
        for part in name.split("."):
            tree = getattr(tree, part)
        tree[index] = value(tree[index]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("requests.status", 3, RUNNING, "running lists"),
        ("requests.status", 0, 9, "no legal status"),
        ("running", 1, 0, "running lists"),
        ("requests.computed", 0, lambda v: v + 50, "nothing to compute"),
        ("requests.page_table", (0, 1), lambda v: v + 1, "page"),
        ("requests.num_pages", 0, lambda v: v + 1, "page table"),
        ("pages.refcount", 0, lambda v: v + 1, "reference count"),
        ("pages.free", 0, 0, "exactly one of"),
        ("counts", FREE_COUNT, lambda v: v - 1, "exactly one of"),
        ("counts", RING_TAIL, 1 << 40, "ring"),
        ("pages.key", 0, lambda v: v ^ 1, "bucket"),
        ("pages.bucket_next", 0, 0, "twice in the index"),
        ("pages.tokens", (0, 0), lambda v: v + 1, "canonical"),
        ("pairs.attached", 0, 0, "owner is gone"),
        ("pairs.cq_tail", 0, 1 << 20, "overflowed"),
        ("requests.tokens", (0, 0), 50, "vocabulary"),
        ("batch.cache_slots", 0, lambda v: v + 1, "cache slot"),
        ("batch.positions", 0, 9, "wrong position"),
        ("batch.emits", 0, 0, "emits"),
        ("batch.row_slots", 1, lambda v: v - 1, "two rows"),
    ],
)
def test_the_integrity_check_finds_what_is_broken(name: str, index: Any, value: Any, message: str) -> None:
    made = world(pairs=1)
    for start in (0, 1):
        made.fronts[0].submit(prompt(4, start), 9)
    for _ in range(2):
        made.step()
    assert made.state.requests.indexed[0] == 1
    _break(name, index, value)(made)
    problems = state_faults(made.limits, made.state)
    assert any(message in problem for problem in problems), problems
