"""Fault codes, and `expect`, which checks a condition. A code is a number that represents a text, because compiled code can't
return text.

A *fault* is a fault code, with a place in its upper half: a page, a slot or an index. 0 means no fault.
"""

import zlib

from numba.extending import overload, register_jitable

from blinkpy.device.tables import TableArrayType, TableType

FAULT_TEXTS: dict[int, str] = {}
PLACE_SHIFT = 32
CODE_MASK = (1 << PLACE_SHIFT) - 1


class BrokenInvariantError(RuntimeError):
    """A required condition does not hold, in plain Python. fault: its code."""

    def __init__(self, fault: int):
        super().__init__(describe_fault(fault))
        self.fault = fault


def fault_code(text: str) -> int:
    """The code of a fault, above 0. It depends only on the text, because compiled code outlives the process.

    text: a clause, with {} for the place.
    Raises ValueError if another text has the same code.
    """
    number = zlib.crc32(text.encode()) or 1
    if FAULT_TEXTS.setdefault(number, text) != text:
        raise ValueError(f"two faults have the code {number}: {FAULT_TEXTS[number]!r} and {text!r}")
    return number


def describe_fault(fault: int) -> str:
    """The text of a fault, with its place."""
    return FAULT_TEXTS[fault & CODE_MASK].format(fault >> PLACE_SHIFT)


@register_jitable
def fault_at(code, place):
    """The fault with a code and a place, as an int64 that is at least 0."""
    return code | place << PLACE_SHIFT


def expect(state, condition, code):
    """Check a condition that must hold. Any lane may call it. Conditions must not write.

    Plain Python raises BrokenInvariantError. Compiled code checks only if the state was made with checks, which its type shows.
    Then state.fault keeps the first fault, and the turn continues.
    """
    if not condition:
        raise BrokenInvariantError(code)


def is_faulted(state):
    """Whether an `expect` of compiled code has failed since the state was made. Equal for all lanes after a
    barrier.
    """
    return False


def is_checked(state_type):
    """Whether the type of a table belongs to a state with a fault word."""
    return isinstance(state_type, TableType) and isinstance(state_type.fields["fault"][1], TableArrayType)


def _compile_expect(state, condition, code):
    def set_fault(state, condition, code):
        if not condition and state.fault[0] == 0:
            state.fault[0] = code

    return set_fault if is_checked(state) else lambda state, condition, code: None


def _compile_is_faulted(state):
    return (lambda state: state.fault[0] != 0) if is_checked(state) else lambda state: False


def register_expect(overload, target):
    """Register the compiled bodies for a target. overload: the decorator of its compiler."""
    overload(expect, target=target)(_compile_expect)
    overload(is_faulted, target=target)(_compile_is_faulted)


register_expect(overload, "cpu")
