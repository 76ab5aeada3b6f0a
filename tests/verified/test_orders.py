"""The order of accesses that the code itself has: O1 to O8 of docs/verification.md, on machines that reorder what they may."""

from __future__ import annotations

import pytest
from support.front_end.weak_link import WeakLink
from support.order_bugs import ORDER_BUGS
from support.seeded_bugs import Bug, planted
from support.weak_memory import ACQUIRE, PLAIN, RELAXED, RELEASE
from verified.memory_model.machines import WEAK, X86, MemoryOrder

from blinkpy.queues import words as W

MACHINES = {"x86": (X86, X86), "x86 and a GPU": (X86, WEAK), "Arm": (WEAK, WEAK)}  # of front ends, and of the engine
STORMS, ROUNDS = 8, 5
SEEDS = 40  # of links on which a bug is looked for


def storms(seed: int, front: MemoryOrder, engine: MemoryOrder) -> WeakLink:
    with pytest.MonkeyPatch.context() as patch:
        link = WeakLink(seed, front, engine, patch)
        for _ in range(STORMS):
            link.storm.run(ROUNDS)
        return link


@pytest.mark.parametrize("machines", MACHINES)
def test_tokens_and_records_come_whole_on_machines_that_reorder(seed: int, machines: str) -> None:
    link = storms(seed, *MACHINES[machines])
    assert link.storm.case.counter("requests_finished") > 10


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=f"{name}-{bug.what}") for name, bugs in ORDER_BUGS.items() for bug in bugs]
)
def test_an_access_that_is_moved_or_weakened_is_found(bug: Bug) -> None:
    with planted(bug):
        for seed in range(SEEDS):
            try:
                storms(seed, WEAK, WEAK)
            except Exception:  # whatever it is, it was noticed
                return
    raise AssertionError("not found")


def test_each_word_is_accessed_as_the_protocol_says(seed: int) -> None:
    """Also where a plain or a relaxed access would do on all machines that there are."""
    queues = storms(seed, WEAK, WEAK).queues
    assert queues.front.kinds == {
        W.FRONT_DOORBELL: {ACQUIRE},
        **dict.fromkeys((W.FRONT_CQ_HEAD, W.FRONT_HEARTBEAT, W.FRONT_CLAIM), {RELAXED}),
    }
    assert queues.pair.kinds == {
        **dict.fromkeys((W.PAIR_SQ_HEAD, W.PAIR_EPOCH, W.PAIR_ATTACHED), {RELEASE}),
        W.PAIR_CQ_TAIL: {RELAXED},
    }
    assert queues.control.kinds == {W.CONTROL_COMMAND: {RELAXED}}
    kinds = {name: set().union(*array.kinds.values()) for name, array in queues._asdict().items()}
    assert kinds["cq"] == {RELEASE, RELAXED}  # with a record, and without
    assert kinds["cancel"] == kinds["engine"] == {RELAXED}
    assert all(kinds[name] == {PLAIN} for name in ("sq", "prompt", "hashes", "records"))
