"""The recording of a scheduler that runs on the GPU.

The ring is host memory that the GPU writes in place, a few words per row and step, and never reads. So the ring survives a
failure of the GPU. The loop copies the state between two steps: all arrays are in one block of GPU memory, and a graph of one
node copies it at the memory's speed. The host process fetches these copies on a separate stream. If the host process is stopped,
it misses copies, without other effects.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from blinkpy.device.cuda.cuda_graphs import MappedMemory
from blinkpy.device.tables import map_arrays, named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.recording.recording_memory import RecordingMemory

CURSOR_BYTES = 64


def place_state(state: State, offsets: Mapping[str, int], memory: torch.Tensor) -> State:
    """A state as tensors on the device of `memory`, uint8: arrays with an offset share this memory; all other
    arrays have separate memory.
    """
    tensors = iter(
        [
            _copied(array, memory, offsets[name]) if name in offsets else torch.from_numpy(array.copy()).to(memory.device)
            for name, array in named_arrays(state)
        ]
    )
    placed: State = map_arrays(lambda array: next(tensors), state)
    return placed


def _copied(array: np.ndarray, memory: torch.Tensor, at: int) -> torch.Tensor:
    """A copy of an array at an offset of a device's memory."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    piece = memory[at : at + array.nbytes].view(source.dtype).view(source.shape)
    piece.copy_(source)
    return piece


class GpuRecording:
    """state: the scheduler's state on the GPU, with its recorder in `recording`'s memory. progress: tensor of
    Recorder.progress.

    state: the host's state, from make_state(). Raises CudaError if host memory can't be mapped.
    """

    def __init__(self, recording: RecordingMemory, state: State):
        self._recording = recording
        self._mapped = MappedMemory(recording.shared, "the flight recorder's memory")
        size = recording.layout.copied_bytes
        self._memory = torch.zeros(size + CURSOR_BYTES, dtype=torch.uint8, device="cuda")
        self._copy = torch.zeros_like(self._memory)
        self._fetched, self._stream = 0, torch.cuda.Stream()
        self.state = self._placed(state, size)
        self.progress: Any = self.state.recorder.progress

    def _placed(self, state: State, cursor_at: int) -> State:
        """The state on the GPU: the copied arrays contiguous in one block of memory, as in a snapshot; the ring in
        host memory.
        """
        recorder, shared = state.recorder, self._recording.recorder
        small = state._replace(recorder=recorder._replace(words=recorder.words[:1]))
        placed = place_state(small, self._recording.layout.offsets, self._memory)
        ring, progress = (torch.as_tensor(self._mapped.moved(array), device="cuda") for array in (shared.words, shared.progress))
        cursor = _copied(recorder.cursor, self._memory, cursor_at)
        return placed._replace(recorder=placed.recorder._replace(words=ring, progress=progress, cursor=cursor))

    @property
    def block(self) -> torch.Tensor:
        """The copied arrays of the state, uint8."""
        return self._memory[: self._recording.layout.copied_bytes]

    def capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """The graph that copies the state. This object must outlive the graph."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                self._copy.copy_(self._memory)
            finally:
                graph.capture_end()
            stream.synchronize()
        return graph

    def fetch(self) -> None:
        """Fetch the latest copy of the state to the host, unless a newer copy is overwriting it. Call it periodically."""
        progress, size = self._recording.recorder.progress, self._recording.layout.copied_bytes
        begun = int(progress[S.COPIES_BEGUN])
        if begun == self._fetched or progress[S.COPIES_DONE] != begun:
            return
        content = self._recording.begin_snapshot()
        with torch.cuda.stream(self._stream):
            torch.from_numpy(content).copy_(self._copy[:size])
            cursor = self._copy[size:].cpu().numpy().view(np.int64)
            if progress[S.COPIES_BEGUN] == begun:
                self._recording.finish_snapshot(int(cursor[S.POSITION]))
                self._fetched = begun

    def close(self) -> None:
        """Unmap the ring. Call it only after the loop's end."""
        self._mapped.close()
