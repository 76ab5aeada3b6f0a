"""Tensors from files into their places on a device: threads read pieces into staging buffers, copies follow behind them.

For a GPU the buffers are pinned, so that a copy runs while the next pieces are read, and the weights never exist as a whole
on the host. Files are read and not mapped: a file that is cut short meanwhile is an error with a name, and not a SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch

from blinkpy.config import ConfigError
from blinkpy.models.weights.checkpoint import StoredTensor

THREADS = 8
PIECE_BYTES = 16 << 20
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        """Begin to copy the first `count` elements of a dtype to a tensor of so many elements, of any dtype."""
        source = self.tensor[: count * dtype.itemsize].view(dtype)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if target.is_cuda and target.dtype != dtype:
                source = source.to(target.device, non_blocking=True)  # the GPU converts faster
            target.copy_(source, non_blocking=True)
            if self._copied is not None:
                self._copied.record(self._stream)


class TensorLoader:
    """Loads tensors into place, as a context: add() each of them, then finish().

    Leaving the context without finish() abandons what is left. piece_bytes: of one read and copy.
    """

    def __init__(self, device: torch.device, threads: int = THREADS, piece_bytes: int = PIECE_BYTES):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._piece_bytes = piece_bytes
        self._free: SimpleQueue[Staging] = SimpleQueue()
        for _ in range(2 * threads):
            self._free.put(Staging(piece_bytes, self._stream))
        self._threads = ThreadPoolExecutor(threads, "loader")
        self._pieces: list[tuple[int, Future[None]]] = []
        self._files: dict[Path, int] = {}
        self._closing = ExitStack()

    def __enter__(self) -> TensorLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._closing.close()

    def add(self, name: str, stored: StoredTensor, target: torch.Tensor) -> None:
        """Load a tensor into another one of its shape: contiguous, of any float dtype. What the current stream was given before
        comes first."""
        dtype, flat = STORED_DTYPES[stored.dtype], target.view(-1)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(target.device))
        file = self._open(stored.path)
        step = self._piece_bytes // dtype.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            offset = stored.offset + begin * dtype.itemsize
            future = self._threads.submit(self._load, name, stored.path, file, offset, dtype, part)
            self._pieces.append((part.numel() * dtype.itemsize, future))

    def finish(self, progress: Callable[[float], None] | None = None) -> None:
        """Wait for everything. progress: called with the share that is done, for each further percent.

        Raises ConfigError when a file can't be read to the end.
        """
        total, done, told = sum(size for size, _ in self._pieces), 0, 0.0
        for size, future in self._pieces:
            future.result()
            done += size
            if progress is not None and (done / total >= told + 0.01 or done == total):
                told = done / total
                progress(told)
        self._pieces.clear()
        if self._stream is not None:
            self._stream.synchronize()

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"can't read {path}: {error.strerror}") from error
            self._closing.callback(os.close, self._files[path])
        return self._files[path]

    def _load(self, name: str, path: Path, file: int, offset: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Load one piece; in a thread of the pool."""
        staging = self._free.get()
        try:
            staging.wait()
            wanted = staging.memory[: target.numel() * dtype.itemsize]
            while wanted:
                try:
                    read = os.preadv(file, [wanted], offset)
                except OSError as error:
                    raise ConfigError(f"can't read {name} from {path}: {error.strerror}") from error
                if read == 0:
                    raise ConfigError(f"{path} was cut short while it was read: {name} lacks {len(wanted)} bytes or more")
                wanted, offset = wanted[read:], offset + read
            staging.copy(target.numel(), dtype, target)
        finally:
            self._free.put(staging)
