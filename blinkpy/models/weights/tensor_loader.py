"""Loads tensors from files to a device: threads read pieces into staging buffers, and copies follow.

For a GPU the buffers are pinned, so that a copy runs during the next reads, and the host never holds all weights. Files are
read, not mapped, so a file that is truncated meanwhile causes an error with its name instead of a SIGBUS.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from io import FileIO
from queue import SimpleQueue
from typing import NamedTuple

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.quantised_matrices import quantised_rows
from blinkpy.models.weights.stored_tensor import StoredTensor, open_weights
from blinkpy.progress import finish_pieces

THREADS = 8
PIECE_BYTES = 16 << 20
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
STORED_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn}


class QuantisedRows(NamedTuple):
    """Rows of a matrix that are quantised to FP8 while loading."""

    values: torch.Tensor  # float8_e4m3fn [rows, columns]
    scales: torch.Tensor  # float32 [rows]

    def fill(self, source: torch.Tensor) -> None:
        """Quantise the source, which has as many numbers as the target, of any type."""
        values, scales = quantised_rows(source.view(self.values.shape))
        self.values.copy_(values)
        self.scales.copy_(scales)

    def pieces(self, numbers: int) -> list["QuantisedRows"]:
        """Pieces of whole rows, with at most `numbers` numbers each."""
        rows = numbers // self.values.shape[1]
        if rows == 0:
            raise ConfigError(
                f"can't quantize while loading: a row of {self.values.shape[1]} numbers is too long; use quantization auto"
            )
        return [QuantisedRows(*some) for some in zip(self.values.split(rows), self.scales.split(rows), strict=True)]


Target = torch.Tensor | QuantisedRows


def _split(target: Target, numbers: int) -> list[Target]:
    """Parts of a target, with at most `numbers` numbers each."""
    return [*target.pieces(numbers)] if isinstance(target, QuantisedRows) else [*target.view(-1).split(numbers)]


def _numel(target: Target) -> int:
    return target.values.numel() if isinstance(target, QuantisedRows) else target.numel()


class Staging:
    """A buffer between files and a device. Its holder fills it, copies from it, and releases it."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream | None):
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        self.memory: memoryview = self.tensor.numpy().data
        self._stream = stream
        self._copied = None if stream is None else torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the last copy has left the buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, dtype: torch.dtype, target: Target) -> None:
        """Start copying as many elements of a dtype as the target has. The target may have another dtype."""
        source = self.tensor[: _numel(target) * dtype.itemsize].view(dtype)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if isinstance(target, QuantisedRows):
                target.fill(source.to(target.values.device, non_blocking=True))
            elif target.is_cuda and target.dtype != dtype:
                target.copy_(source.to(target.device, non_blocking=True))  # the GPU converts faster
            else:
                target.copy_(source, non_blocking=True)
            if self._copied is not None:
                self._copied.record(self._stream)


def load_tensors(
    places: list[tuple[str, StoredTensor, Target]],
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    threads: int = THREADS,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Load tensors, given by name and place, each into a contiguous target with as many elements. The target's dtype may be any
    float dtype.

    progress: called with the completed fraction, at each percent.
    piece_bytes: bytes of one read and copy.
    Raises ConfigError, and stops, if a file can't be read to the end.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    free: SimpleQueue[Staging] = SimpleQueue()
    for _ in range(2 * threads):
        free.put(Staging(piece_bytes, stream))
    with ExitStack() as closing:
        files = {path: closing.enter_context(open_weights(path)) for path in {stored.path for _, stored, _ in places}}
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))  # it may still write to the targets
            closing.callback(stream.synchronize)
        pool = ThreadPoolExecutor(threads, "loader")
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = []
        for name, stored, target in places:
            dtype, position = STORED_DTYPES[stored.dtype], 0
            for part in _split(target, piece_bytes // dtype.itemsize):
                size = _numel(part) * dtype.itemsize
                pieces.append((size, pool.submit(_load_piece, free, files[stored.path], name, stored, position, part)))
                position += size
        finish_pieces(pieces, progress)


def _load_piece(free: SimpleQueue[Staging], file: FileIO, name: str, stored: StoredTensor, position: int, target: Target) -> None:
    staging, dtype = free.get(), STORED_DTYPES[stored.dtype]
    try:
        staging.wait()
        stored.read(staging.memory[: _numel(target) * dtype.itemsize], file, position, name)
        staging.copy(dtype, target)
    finally:
        free.put(staging)
