"""Corrects Triton's interpreter (TRITON_INTERPRET=1) for the kernels of this package; only tests import this module.

Faults of Triton 3.6 that `install()` corrects:

- `range(0, tensor)` fails on NumPy 2.4 and newer, because a one-element array no longer converts to an index;
- float32 -> bfloat16 cuts bits off, but the GPU rounds to nearest even;
- float32 -> float8e4nv rounds ties away from zero, cuts small numbers off and wraps large numbers around, but the GPU
  (cvt.rn.satfinite) rounds to nearest even and saturates, as torch's conversion of clamped numbers does;
- `tl.dot` and `*` of bfloat16 multiply the bit patterns as integers: operands are widened to float32 first.

`install()` also caches the objects that Triton makes at each call of a function, which takes two thirds of its time, and the
result types of two operands. Sums are not checked for overflow, which the interpreter would not report. NumPy replaces `tl.sort`
along the last dimension, whose network of exchanges takes seconds. Other element-wise arithmetic on bfloat16 remains wrong:
kernels convert to float32 before it. Programs run one after another, so a kernel must not wait for another program.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def install() -> None:
    """Patch the interpreter of this process, once. TRITON_INTERPRET=1 must have been set before Triton was first imported."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        original_patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])

    original_convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _round_to_bfloat16(data)
        if source == tl.bfloat16 and target == tl.float32:
            return _widen_bfloat16(data)
        if source == tl.float32 and target == tl.float8e4nv:
            return _round_to_float8(data)
        return original_convert(data, source, target, rounding)

    builder = interpreter.InterpreterBuilder
    original_dot, original_multiply = builder.create_dot, builder.create_fmul

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_widen_bfloat16(handle.data), tl.float32)
        return handle

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        return original_dot(self, widen(a), widen(b), accumulator, *rest)

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        product = original_multiply(self, widen(a), widen(b))
        if a.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bfloat16(product.data), tl.bfloat16)
        return product

    def sort(x: Any, dim: Any = None, descending: Any = False) -> Any:
        order = np.sort(x.handle.data, axis=-1)
        order = order[..., ::-1] if bool(getattr(descending, "value", descending)) else order
        return tl.tensor(interpreter.TensorHandle(np.ascontiguousarray(order), x.dtype.scalar), x.type)

    tl.sort = sort
    interpreter._patch_lang_tensor = patch_tensor
    _patch_language_once()
    _share_shapes()
    _combine_known_types_at_once()
    interpreter._convert_float = convert_float
    builder.create_dot = create_dot
    builder.create_fmul = create_fmul


def _patch_language_once() -> None:
    """Put the interpreter's functions into triton.language permanently. At each launch and each call of a device function, Triton
    would search the whole language for functions to replace, which takes longer than most kernels of these tests."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    patch, kept = interpreter._patch_lang, SimpleNamespace(restore=lambda: None)  # attributes that a launch restores at its end
    patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: kept


def _share_shapes() -> None:
    """Share the attributes of equal types, and of tensors of one type: Triton makes new objects for each number of a shape with
    every tensor."""
    import triton.language.core as core
    import triton.runtime.interpreter as interpreter

    make_type, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types, tensors, numpy_types = dict[Any, dict[str, Any]](), dict[str, dict[str, Any]](), dict[str, np.dtype]()

    def share_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *map(core._unwrap_if_constexpr, shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def share_tensor(self: Any, handle: Any, its_type: Any) -> None:
        if its_type.name not in tensors:
            make_tensor(self, handle, its_type)
            tensors[its_type.name] = vars(self).copy()
        vars(self).update(tensors[its_type.name], handle=handle)

    def share_numpy_type(its_type: Any) -> np.dtype:
        if its_type.name not in numpy_types:
            numpy_types[its_type.name] = numpy_type(its_type)
        return numpy_types[its_type.name]

    core.block_type.__init__, core.tensor.__init__ = share_type, share_tensor
    interpreter._get_np_dtype = share_numpy_type


def _combine_known_types_at_once() -> None:
    """Skip checks of two operands of known types: the types, and a number's value, determine conversions and shapes. Triton
    checks them at each operation. For a sum of integers it also checks the range, but only for device_assert, which has no effect
    here."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter
    from triton.language.semantic import TritonSemantic

    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    repeated, numbers = dict[tuple[str, str], tuple[Any, ...]](), dict[Any, Any]()
    converts = dict[Any, bool]()  # whether an operation on two types converts one of them

    def repeat(tensor: Any, its_type: Any) -> Any:
        if its_type is None:
            return tensor
        shape = tuple(its_type.get_block_shapes())
        return tl.tensor(interpreter.TensorHandle(np.broadcast_to(tensor.handle.data, shape), its_type.scalar), its_type)

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        if key not in repeated:
            both = broadcast(self, lhs, rhs)
            repeated[key] = tuple(None if new is old else new.type for new, old in zip(both, (lhs, rhs), strict=True))
            return both
        left, right = repeated[key]
        return repeat(lhs, left), repeat(rhs, right)

    def check_once(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        first, second = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if named or not (first or second):
            return check(self, lhs, rhs, *options, **named)
        if first and second:
            types = lhs.type.name, rhs.type.name, options
            if converts.get(types, True):
                both = check(self, lhs, rhs, *options)
                converts[types] = any(new.type.scalar != old.type.scalar for new, old in zip(both, (lhs, rhs), strict=True))
                return both
            return broadcast_once(self, lhs, rhs)
        tensor, number = (lhs, rhs) if first else (rhs, lhs)
        key = tensor.type.name, type(number), number, first, options
        if key not in numbers:
            both = check(self, lhs, rhs, *options)
            if both[not first] is tensor:
                numbers[key] = both[first]
            return both
        return (tensor, numbers[key]) if first else (numbers[key], tensor)

    assert not interpreter.interpreter_builder.options.debug
    interpreter.TensorHandle.__post_init__ = lambda self: None  # a check of Triton's own arrays
    TritonSemantic.broadcast_impl_value = broadcast_once
    TritonSemantic.binary_op_type_checking_impl = check_once
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None


def stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a kernel fails if it reads or writes outside of the storage of its arguments. Tensors may be views of one
    storage, such as queries, keys and values."""
    import triton.runtime.interpreter as interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    take_arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    bounds: list[tuple[int, int]] = []  # (first address, address after the last)

    def taking(self: Any, arguments: Any, named: Any) -> Any:
        taken = take_arguments(self, arguments, named)
        given = [getattr(each, "base", each) for each in (*taken[0], *taken[1].values())]  # descriptors have a base
        memory = {each.untyped_storage() for each in given if hasattr(each, "data_ptr") and each.numel()}
        bounds[:] = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in memory]
        return taken

    def check(pointers: Any, mask: Any) -> None:
        at, kept = pointers.data, np.asarray(mask.data)
        at = at if kept.all() else at[kept != 0]  # a mask may consist of integers, which must not act as indices
        if not at.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        lowest, highest = int(at.min()), int(at.max()) + size
        if any(first <= lowest and highest <= past for first, past in bounds):  # inside one tensor, as nearly always
            return
        inside = [(at >= np.uint64(first)) & (at + np.uint64(size) <= np.uint64(past)) for first, past in bounds]
        if not np.logical_or.reduce(inside).all():
            raise IndexError("an access outside of all tensors")

    def loading(self: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *others, **named)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    monkeypatch.setattr(executor, "_init_args_hst", taking)
    monkeypatch.setattr(builder, "create_masked_load", loading)
    monkeypatch.setattr(builder, "create_masked_store", storing)


def store_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a kernel's stores reach memory only at its next barrier, the last store first: other threads of a program may
    see any order. A kernel must end with a barrier."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    store, late = builder.create_masked_store, list[tuple[Any, ...]]()

    def barrier(self: Any) -> None:
        while late:
            store(*late.pop())

    monkeypatch.setattr(builder, "create_masked_store", lambda *arguments: late.append(arguments))
    monkeypatch.setattr(builder, "create_barrier", barrier)


def _round_to_bfloat16(data: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bit patterns (uint16), round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def _round_to_float8(data: np.ndarray) -> np.ndarray:
    """float32 -> E4M3 bit patterns (uint8); NaN stays NaN."""
    numbers = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _widen_bfloat16(data: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) -> float32, exact."""
    return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
