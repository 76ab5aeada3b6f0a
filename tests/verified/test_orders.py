"""The order of accesses in the code itself: O1 to O8 of docs/verification.md, on machines that reorder as much as they may.

Claim memory/orders: The code's accesses satisfy O1 to O8. A moved or weakened access, or a missing fence, is
found.
"""

from typing import Any

import pytest
from support.front_end.weak_link import weak_storms
from support.weak_memory import ACQUIRE, PLAIN, RELAXED, RELEASE
from verified.memory_model.machines import WEAK, X86

from blinkpy.queues import words as W

MACHINES = {"x86": (X86, X86), "x86 and a GPU": (X86, WEAK), "Arm": (WEAK, WEAK)}  # of front ends, and of the engine


@pytest.mark.parametrize("machines", MACHINES)
def test_tokens_and_records_are_complete_under_reordering(seed: int, machines: str) -> None:
    link = weak_storms(seed, *MACHINES[machines])
    assert link.storm.case.counter("requests_finished") > 10


def test_each_word_is_accessed_as_the_protocol_says(seed: int) -> None:
    """Even if a plain or relaxed access would suffice on all known machines."""
    queues: Any = weak_storms(seed, WEAK, WEAK).queues
    assert queues.front.kinds == {
        W.FRONT_DOORBELL: {ACQUIRE},
        W.FRONT_CQ_HEAD: {RELAXED},
        W.FRONT_HEARTBEAT: {RELAXED},
        W.FRONT_CLAIM: {RELAXED},
    }
    assert queues.pair.kinds == {
        W.PAIR_SQ_HEAD: {RELEASE},
        W.PAIR_EPOCH: {RELEASE},
        W.PAIR_ATTACHED: {RELEASE},
        W.PAIR_CQ_TAIL: {RELAXED},
    }
    assert queues.control.kinds == {W.CONTROL_COMMAND: {RELAXED}}
    kinds = {name: set().union(*array.kinds.values()) for name, array in queues._asdict().items()}
    assert kinds["cq"] == {RELEASE, RELAXED}  # with a record, and without
    assert kinds["cancel"] == kinds["engine"] == kinds["hits"] == {RELAXED}
    assert all(kinds[name] == {PLAIN} for name in ("sq", "prompt", "hashes", "records"))
