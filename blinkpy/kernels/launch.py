"""Common parts of the launchers of Triton kernels: checks of tensors, and programmatic dependent launch.

Programmatic dependent launch (PDL). A launcher's `pdl=True` lets its kernel start while the kernel before
it still runs; the kernel then waits (`gdc_wait`) before it accesses data of an earlier kernel. A kernel
lets its own successor start (`gdc_launch_dependents`) right away: the successor's programs only use
resources that this kernel leaves free, since they start after all of its programs. Rules for a correct
chain of such kernels:
- every program of a kernel waits before it may leave early, so that "my predecessor is done" includes all before it;
- before the wait, a kernel writes nothing, and reads only data that no kernel of the step writes: weights,
  constants, the batch, and cached tokens of earlier steps. Batch and cache change between steps: read them past
  the L1 cache (`cache_modifier=".cg"`). Two exceptions: expert_gemv.py; and attention of a mixed step, where prefill
  releases decode after its own wait. Decode does not depend on prefill, so it begins immediately, and one
  of its programs waits before it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, TypeVar

import torch
import triton
import triton.language as tl

V = TypeVar("V", bound=Any)

STORAGE_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes in which weights and activations are stored; all arithmetic is in float32."""

HEADER = ((8,), torch.int64)  # shape and dtype of a batch header, for `check_tensors`

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which knows no instructions of a GPU."""

COUNT_ROWS = tl.constexpr(0)
COUNT_TOKENS = tl.constexpr(1)
COUNT_DECODE_ROWS = tl.constexpr(2)
"""Indices into `counts`, the int64 [8] header of a batch. Kernels import constants by name: Triton keeps compiled kernels by the
values of the names they use, but not of the attributes of modules."""


@contextmanager
def noted(what: Callable[[], str]) -> Iterator[None]:
    """Add a note to errors of the launches in this context. `what` is called only after an error."""
    try:
        yield
    except Exception as error:
        error.add_note(what())
        raise


class AtLeast(int):
    """A size of a dimension that may be larger, for `check_tensors`."""

    def __str__(self) -> str:
        return f"at least {int(self)}"


def check_tensors(*declared: tuple[Any, ...]) -> None:
    """Raise ValueError or TypeError unless all tensors are as declared, and on one device.

    Each is declared as (tensor, name, shape, dtypes, row_strided); None instead of a tensor is skipped.
    Otherwise the tensor must be contiguous.

    shape: sizes, AtLeast, or None for any.
    dtypes: one or several; default STORAGE_DTYPES.
    row_strided: the first dimension may have any stride (a slice of the columns of a wider tensor).
    """
    for tensor, *expected in declared:
        if tensor is not None:
            _check_tensor(tensor, *expected)
    devices = {tensor.device for tensor, *_ in declared if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"tensors on different devices: {', '.join(sorted(map(str, devices)))}")


def _check_tensor(
    tensor: torch.Tensor,
    name: str,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype] = STORAGE_DTYPES,
    row_strided: bool = False,
) -> None:
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name}: dtype {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
    found = tuple(tensor.shape)
    if len(found) != len(shape) or not all(map(_is_size, shape, found)):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: shape {list(found)}, expected [{expected}]")
    if tensor.numel() == 0:
        raise ValueError(f"{name}: empty tensor of shape {list(found)}")
    dense = tensor[0] if row_strided else tensor
    if not dense.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} of shape {list(found)} are not row-major")


def _is_size(want: int | None, have: int) -> bool:
    return want is None or (have >= want if isinstance(want, AtLeast) else have == want)


def by_name(*variants: V) -> dict[str, V]:
    """Variants of an operation by their `name`. Raises ValueError for equal names."""
    found = {variant.name: variant for variant in variants}
    if len(found) < len(variants):
        raise ValueError(f"two variants of one name: {', '.join(variant.name for variant in variants)}")
    return found


def options(pdl: bool) -> dict[str, Any]:
    """Launch options for a kernel. pdl: it is part of a chain of programmatic dependent launches."""
    return {"launch_pdl": True} if pdl else {}


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: three tf32 products keep float32's accuracy on tensor cores. Products of bfloat16 are exact in
    any case.
    """
    return "tf32x3" if dtype == torch.float32 else "ieee"


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until all writes of earlier kernels are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_successor(PDL: tl.constexpr):
    """Let the next kernel start; it still waits for this kernel's end before it reads results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


class BatchView(NamedTuple):
    """B rows and T tokens of a bucket; arrays may be longer. A part of `blinkpy.kv.state.Batch`."""

    counts: torch.Tensor  # int64 [8] batch header
    row_slots: torch.Tensor  # int32 [B] request slot of each row
    query_starts: torch.Tensor  # int32 [B + 1] first token of each row
    context_lengths: torch.Tensor  # int32 [B] tokens in the cache after this step
    emits: torch.Tensor  # int32 [B] 1: the row's last token yields a sampled token
    positions: torch.Tensor  # int32 [T] of each token in its sequence
    cache_slots: torch.Tensor  # int32 [T] page * page size + offset; negative: not written

    @classmethod
    def of(cls, batch: Any) -> Self:
        """The view of a `kv.state.Batch` of tensors."""
        return cls(*(getattr(batch, name) for name in cls._fields))

    def declared(self, size: int, *names: str) -> list[tuple[Any, ...]]:
        """For `check_tensors`: counts, and these arrays for at least `size` rows or tokens."""
        sizes = {name: AtLeast(size + 1 if name == "query_starts" else size) for name in names}
        arrays = [(getattr(self, name), name, (least,), torch.int32) for name, least in sizes.items()]
        return [(self.counts, "counts", *HEADER), *arrays]
