"""Tensors from files into their places on a device: threads read pieces into staging buffers, copies follow behind them.

For a GPU the buffers are pinned, so that a copy runs while the next pieces are read, and the weights never exist as a whole
on the host. Files are read and not mapped: a file that is cut short meanwhile is an error with a name, and not a SIGBUS.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from io import FileIO
from queue import SimpleQueue

import torch

from blinkpy.models.weights.checkpoint import StoredTensor
from blinkpy.models.weights.weight_reader import open_weights, read_into

THREADS = 8
PIECE_BYTES = 16 << 20
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}


class Staging:
    """One buffer between files and a device. Whoever holds it fills it, copies from it, and hands it on."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream | None):
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        self.memory: memoryview = self.tensor.numpy().data
        self._stream = stream
        self._copied = None if stream is None else torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the last copy has left the buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, count: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Begin to copy the first `count` elements of a dtype to a tensor of as many elements, of any dtype."""
        source = self.tensor[: count * dtype.itemsize].view(dtype)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if target.is_cuda and target.dtype != dtype:
                source = source.to(target.device, non_blocking=True)  # the GPU converts faster
            target.copy_(source, non_blocking=True)
            if self._copied is not None:
                self._copied.record(self._stream)


def load_tensors(
    places: list[tuple[str, StoredTensor, torch.Tensor]],
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    threads: int = THREADS,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Load tensors, given by name and by where they lie, each into one of as many elements: contiguous, of any float dtype.

    progress: called with the share that is done, for each further percent. piece_bytes: of one read and copy. Raises
    ConfigError when a file can't be read to the end, and abandons what is left then.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    free: SimpleQueue[Staging] = SimpleQueue()
    for _ in range(2 * threads):
        free.put(Staging(piece_bytes, stream))
    with ExitStack() as closing:
        files = {path: closing.enter_context(open_weights(path)) for path in {stored.path for _, stored, _ in places}}
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))  # which may still write to the targets
            closing.callback(stream.synchronize)
        pool = ThreadPoolExecutor(threads, "loader")
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = []
        for name, stored, target in places:
            dtype, offset = STORED_DTYPES[stored.dtype], stored.offset
            for part in target.view(-1).split(piece_bytes // dtype.itemsize):
                size = part.numel() * dtype.itemsize
                pieces.append((size, pool.submit(_load_piece, free, files[stored.path], name, offset, dtype, part)))
                offset += size
        total, done, told = sum(size for size, _ in pieces), 0, 0.0
        for size, piece in pieces:
            piece.result()
            done += size
            if done / total >= told + 0.01 or done == total:
                told = done / total
                progress(told)


def _load_piece(
    free: SimpleQueue[Staging], file: FileIO, name: str, offset: int, dtype: torch.dtype, target: torch.Tensor
) -> None:
    staging = free.get()
    try:
        staging.wait()
        read_into(staging.memory[: target.numel() * dtype.itemsize], file, offset, name)
        staging.copy(target.numel(), dtype, target)
    finally:
        free.put(staging)
