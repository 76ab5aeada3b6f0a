"""The arithmetic of users' policies: total functions on 64-bit integers. An operation without a result sets a fault and returns
0.

The source runs in Python, with unbounded integers, and compiled, with wrapping integers; so each function checks before it
computes. The last arguments of each function are: faults, int64 [n] words in the form of policy_fault; at, the request's index in
`faults`; place, the number of the source line.
"""

from typing import NamedTuple

from blinkpy.device.portable import device

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
    """The place and kind of a fault. places: the policy's places. Raises ValueError for an unknown number."""
    place, kind = fault >> KIND_BITS, fault & KIND_MASK
    if not (0 <= place < len(places) and kind in FAULT_TEXTS):
        raise ValueError(f"{fault} is not a fault of this policy")
    return places[place], FAULT_TEXTS[kind]


LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
HALF = 1 << 31  # products of factors below this fit


@device
def set_fault(faults, at, place, kind):
    """Record a fault if it is the first one."""
    if faults[at] >> FAULT_SHIFT == 0:
        faults[at] |= (place << KIND_BITS | kind) << FAULT_SHIFT


@device
def add(a, b, faults, at, place):
    """a + b."""
    if (b >= 0 and a > HIGHEST - b) or (b < 0 and a < LOWEST - b):
        set_fault(faults, at, place, OVERFLOW)
        return 0
    return a + b


@device
def subtract(a, b, faults, at, place):
    """a - b."""
    if (b >= 0 and a < LOWEST + b) or (b < 0 and a > HIGHEST + b):
        set_fault(faults, at, place, OVERFLOW)
        return 0
    return a - b


@device
def multiply(a, b, faults, at, place):
    """a * b."""
    if -HALF <= a < HALF and -HALF <= b < HALF:
        return a * b
    if product_fits(a, b):
        return a * b
    set_fault(faults, at, place, OVERFLOW)
    return 0


@device
def product_fits(a, b):
    """Whether a * b is a 64-bit integer."""
    if a == 0 or b == 0 or a == 1 or b == 1:
        return True
    if a == LOWEST or b == LOWEST:
        return False
    if a == -1 or b == -1:
        return True
    x, y = abs(a), abs(b)
    most = HIGHEST // y
    if (a < 0) != (b < 0) and HIGHEST % y == y - 1:
        most += 1  # the lowest integer's magnitude exceeds the highest integer's by one
    return x <= most


@device
def floor_divide(a, b, faults, at, place):
    """a // b, rounded down."""
    if b == 0:
        set_fault(faults, at, place, ZERO_DIVISION)
        return 0
    if a == LOWEST and b == -1:
        set_fault(faults, at, place, OVERFLOW)
        return 0
    return a // b


@device
def modulo(a, b, faults, at, place):
    """a % b, with the sign of b."""
    if b == 0:
        set_fault(faults, at, place, ZERO_DIVISION)
        return 0
    if b == -1:
        return 0  # the processor also computes a // b, which overflows for the lowest integer
    return a % b


@device
def power(a, b, faults, at, place):
    """a ** b."""
    if b < 0:
        set_fault(faults, at, place, BAD_SHIFT)
        return 0
    if b == 0:
        return 1
    if -1 <= a <= 1:
        return a if a != -1 or b % 2 == 1 else 1
    result = a
    for _ in range(min(b, 64) - 1):  # 2 ** 63 already overflows
        result = multiply(result, a, faults, at, place)
    return result


@device
def shift_left(a, b, faults, at, place):
    """a << b."""
    if b < 0:
        set_fault(faults, at, place, BAD_SHIFT)
        return 0
    if a == 0:
        return 0
    if b > 63 or a > HIGHEST >> b or a < LOWEST >> b:
        set_fault(faults, at, place, OVERFLOW)
        return 0
    return a << b


@device
def shift_right(a, b, faults, at, place):
    """a >> b, rounded down."""
    if b < 0:
        set_fault(faults, at, place, BAD_SHIFT)
        return 0
    return a >> min(b, 63)


@device
def negate(a, faults, at, place):
    """-a."""
    return subtract(0, a, faults, at, place)


@device
def magnitude(a, faults, at, place):
    """abs(a)."""
    return a if a >= 0 else subtract(0, a, faults, at, place)


@device
def smaller(a, b):
    """min(a, b) of two values of one kind."""
    return b if b < a else a


@device
def larger(a, b):
    """max(a, b) of two values of one kind."""
    return b if b > a else a


@device
def element(index, length, faults, at, place):
    """The index of array[index], counted from 0. A fault if it is out of range."""
    if index < 0:
        index += length
    if index < 0 or index >= length:
        set_fault(faults, at, place, BAD_INDEX)
        return 0
    return index


@device
def range_length(first, last, step, faults, at, place):
    """len(range(first, last, step))."""
    low, high, stride = first, last, step
    if step < 0:
        low, high, stride = last, first, -max(step, -HIGHEST)
    if step == 0 or (low < 0 and high > HIGHEST + low):
        set_fault(faults, at, place, BAD_STEP)
        return 0
    return (high - low - 1) // stride + 1 if high > low else 0


@device
def out_of_rounds(faults, at, place):
    """Count a round of a loop. Returns whether the loop must end, after too many rounds or a fault."""
    if faults[at] >> FAULT_SHIFT != 0:
        return True
    if faults[at] & ROUNDS_MASK >= MOST_ROUNDS:
        set_fault(faults, at, place, ENDLESS)
        return True
    faults[at] += 1
    return False


@device
def checked_rank(rank, faults, at):
    """The policy's rank, or WORST_RANK if it faulted or is greater."""
    if rank > WORST_RANK:
        set_fault(faults, at, 0, BAD_RANK)
    return rank if faults[at] >> FAULT_SHIFT == 0 else WORST_RANK
