"""Faults of a user's policy, as words that all executions share.

While a policy runs for a request it has one int64 word: the rounds of its loops so far, and from
FAULT_SHIFT on its first fault, 0 while there is none. A fault is a kind, and from KIND_BITS on a place: the
number of a source line with a possible fault.
"""

from typing import NamedTuple

FAULT_SHIFT = 32
KIND_BITS = 4
KIND_MASK = (1 << KIND_BITS) - 1
ROUNDS_MASK = (1 << FAULT_SHIFT) - 1

MOST_ROUNDS = 1 << 16
"""Rounds of loops in one call, of all of them together; on a GPU a few milliseconds."""
WORST_RANK = (1 << 63) - 2
"""The rank of a request whose policy faulted, and the greatest rank: only stalled requests go before it when pages run out."""

ZERO_DIVISION, OVERFLOW, BAD_INDEX, BAD_SHIFT, BAD_STEP, ENDLESS, BAD_RANK = range(1, 8)
FAULT_TEXTS = {
    ZERO_DIVISION: "division by zero",
    OVERFLOW: "the result does not fit into 64 bits",
    BAD_INDEX: "index out of range",
    BAD_SHIFT: "a shift by a negative number, or a power with a negative exponent",
    BAD_STEP: "a range with step 0, or that spans more than 64 bits",
    ENDLESS: f"loops of more than {MOST_ROUNDS:,} rounds in all",
    BAD_RANK: f"a rank above {WORST_RANK}",
}


class Place(NamedTuple):
    """A line of a policy's source."""

    file: str
    line: int


def describe_policy_fault(fault: int, places: tuple[Place, ...]) -> tuple[Place, str]:
    """The place and kind of a fault. places: the policy's. Raises ValueError for an unknown number."""
    place, kind = fault >> KIND_BITS, fault & KIND_MASK
    if not (0 <= place < len(places) and kind in FAULT_TEXTS):
        raise ValueError(f"{fault} is not a fault of this policy")
    return places[place], FAULT_TEXTS[kind]
