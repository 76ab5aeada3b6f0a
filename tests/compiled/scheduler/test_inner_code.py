"""Functions that only compiled code calls have no separate machine code, but behave as if they had."""

import ctypes
from typing import Any

import numpy as np
import pytest
from numba import njit, types
from numba.core import event

from blinkpy.device.portable import SharedLibrary, device

INNER = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


@INNER
def rest(values: Any, divisor: int) -> int:
    if len(values) == 0:
        raise ValueError("no values at all")
    return values[0] % divisor


@device
def sum_of_rests(values, divisor):
    total = 0
    for i in range(len(values)):
        total += rest(values[i:], divisor)
    return total


@njit
def entry(values: Any, divisor: int) -> int:
    return sum_of_rests(values, divisor) if divisor != 7 else rest(values, divisor)


def library(function: Any) -> SharedLibrary:
    (compiled,) = function.overloads.values()
    assert isinstance(compiled.library, SharedLibrary)
    return compiled.library


def test_only_what_python_calls_is_machine_code(rng: np.random.Generator) -> None:
    values = rng.integers(0, 1000, 20)
    assert entry(values, 10) == int((values % 10).sum())
    assert library(rest).put_off and not library(entry).put_off


def test_llvm_calls_notify_no_timer() -> None:
    with event.install_recorder("numba:llvm_lock") as recorded:
        njit(lambda number: number + 1)(1)
    assert not recorded.buffer


def test_errors_of_inner_functions_arrive() -> None:
    with pytest.raises(ZeroDivisionError):
        entry(np.arange(1, 4), 0)
    with pytest.raises(ValueError, match="no values at all"):
        entry(np.arange(0), 7)


def test_the_address_of_an_inner_function_is_its_machine_code() -> None:
    @INNER
    def twice(number: int) -> int:
        return 2 * number

    twice.compile((types.int64,))
    (compiled,) = twice.overloads.values()
    assert compiled.library.get_pointer_to_function("no such function") == 0 and compiled.library.put_off
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    assert address and not compiled.library.put_off
    result, error = ctypes.c_int64(), ctypes.c_void_p()
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64)
    assert kind(address)(result, error, 21) == 0 and result.value == 42
    again = njit(lambda number: twice(number) + 1)
    assert again(4) == 9, "other code can still call it"
