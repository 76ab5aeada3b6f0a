"""The recording of a scheduler that runs on the GPU.

Its ring is host memory that the GPU writes in place, a few words a row and step, and never reads: so it is there when the GPU has
failed. The copies of the state are made by the loop itself, between two steps, into GPU memory: a graph of copies at the
memory's speed, which takes some 0.1 ms, twice in a ring. The host's process fetches them from there when it looks after the loop,
on a stream of its own. When it is stopped for longer than that, copies are missed, and nothing else happens.
"""

from __future__ import annotations

import numpy as np
import torch

from blinkpy.kernels.device_views import MappedMemory
from blinkpy.kv.state import COPIES_BEGUN, COPIES_DONE, POSITION, State, named_arrays
from blinkpy.recording.memory import NOT_COPIED, RecordingMemory

CURSOR = "recorder.cursor"


class GpuRecording:
    """state: the scheduler's on the GPU, with the recorder in `recording`'s memory. graph: copies it; the loop runs it.

    Raises CudaError where host memory can't be mapped.
    """

    def __init__(self, recording: RecordingMemory, state: State, stream: torch.cuda.Stream):
        self._recording = recording
        self._mapped = MappedMemory(recording.shared, "the flight recorder's memory")
        ring, progress = (
            torch.as_tensor(self._mapped.moved(array), device="cuda")
            for array in (recording.recorder.words, recording.recorder.progress)
        )
        self.state = state._replace(recorder=state.recorder._replace(words=ring, progress=progress))
        chosen = {name: tensor for name, tensor in named_arrays(self.state) if not name.startswith(NOT_COPIED)}
        self._copied = chosen | {CURSOR: self.state.recorder.cursor}
        self._copies = {name: torch.empty_like(tensor) for name, tensor in self._copied.items()}
        self._fetched = 0
        self._stream = torch.cuda.Stream()
        self.graph = self._capture(stream)

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                for name, tensor in self._copied.items():
                    self._copies[name].copy_(tensor)
            finally:
                graph.capture_end()
            stream.synchronize()
        return graph

    def fetch(self) -> None:
        """The host's part, now and then: take the last copy over, if there is a new one and no newer one overwrites it."""
        progress = self._recording.recorder.progress
        begun = int(progress[COPIES_BEGUN])
        if begun == self._fetched or progress[COPIES_DONE] != begun:
            return
        with torch.cuda.stream(self._stream):
            arrays = {name: tensor.cpu().numpy() for name, tensor in self._copies.items()}
        if progress[COPIES_BEGUN] == begun:
            self._fetched = begun
            position = int(arrays.pop(CURSOR)[POSITION])
            self._recording.snapshot({name: np.asarray(array) for name, array in arrays.items()}, position)

    def close(self) -> None:
        """Unmap the ring. Not while the loop runs."""
        self._mapped.close()
