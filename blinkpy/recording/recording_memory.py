"""The memory of an engine's recording, which other processes of the same user can read without involving the
engine.

It is an anonymous file in memory, which takes no space in /dev/shm and vanishes with its last user; a symbolic link next to the
queue segment points to it. It holds a JSON description, the recorder's ring, and two *snapshots*: copies of the scheduler's state
between two turns. A replay must start from a snapshot, because the state before the ring's first record is unknown.

After every half of the ring, a new snapshot overwrites the older snapshot. So one snapshot is always at most half a ring old, and
all later records are still in the ring. A dump covers between a quarter and three quarters of it.

A record is complete once its turn has made its decisions. The scheduler stores a turn's inputs in the same memory
(`share_inputs`) before it decides. If a turn fails, a reader builds the last record from them.
"""

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.tables import named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import Recorder, State
from blinkpy.recording.recording_layout import (
    CURSOR,
    MAGIC,
    NOT_COPIED,
    OPENED,
    OPENED_AT,
    OPENED_NS,
    OPENED_TURN,
    TAKEN_AT,
    WRITES,
    RecordingError,
    RecordingLayout,
    RecordingViews,
    link_path,
    padded_bytes,
)

SNAPSHOT_LIMIT = 2 << 30  # bytes of one copy of the state


def copied_arrays(state: State) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of the state's arrays that a snapshot contains."""
    return [(n, a.dtype.str, list(a.shape)) for n, a in named_arrays(state) if not n.startswith(NOT_COPIED)]


def state_offsets(state: State) -> tuple[dict[str, int], int]:
    """Offsets of these arrays in one block of memory, as in a snapshot, and the block's bytes."""
    offsets, at = dict[str, int](), 0
    for name, dtype, shape in copied_arrays(state):
        offsets[name] = at
        at += padded_bytes(dtype, tuple(shape))
    return offsets, at


class RecordingMemory:
    """The engine's side of a recording.

    recorder: the arrays of State.recorder, which the scheduler writes.
    copy_every: words between two snapshots.

    facts: data that a replay needs in addition to the state (JSON).
    limits: record_turns must not be 0.

    Raises RecordingError if snapshots would be too large.
    """

    def __init__(self, limits: Limits, state: State, facts: Mapping[str, Any]):
        self.copy_every = limits.record_words // 2
        self._due = 0
        self._next = 0
        self._link: Path | None = None
        arrays = copied_arrays(state)
        buckets = np.stack(state.buckets, axis=1).tolist()
        self.layout = layout = RecordingLayout({"limits": limits._asdict(), "buckets": buckets, "arrays": arrays, **facts})
        if layout.snapshot_bytes > SNAPSHOT_LIMIT:
            size = layout.snapshot_bytes >> 20
            raise RecordingError(
                f"a snapshot of the scheduler's state needs {size} MiB, but the limit is {SNAPSHOT_LIMIT >> 20}: lower slots"
            )
        self._fd = os.memfd_create("blinkpy-recording", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, layout.total_bytes)  # memory is allocated on write
        self.memory = mmap.mmap(self._fd, layout.total_bytes)
        self._views = RecordingViews(self.memory, layout)
        self.shared = memoryview(self.memory)[layout.progress : layout.first_snapshot]
        """Written by the scheduler itself, on page boundaries: recorder.progress and recorder.words."""
        self.memory[8:16] = len(layout.text).to_bytes(8, "little")
        self.memory[16 : 16 + len(layout.text)] = layout.text
        self.memory[0:8] = MAGIC
        self.recorder = Recorder(
            words=self._views.ring,
            progress=self._views.progress,
            cursor=self._views.inputs[CURSOR],
            seen=state.recorder.seen,
        )
        self._opened = self._views.inputs[OPENED]

    @property
    def _target(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def publish(self, name: str) -> None:
        """Publish the recording under the segment's name, whose lock this engine holds."""
        self._link = link_path(name)
        self._link.unlink(missing_ok=True)  # the link of a dead engine
        self._link.symlink_to(self._target)

    def keep(self, state: State) -> None:
        """Take a snapshot if one is due, between a turn of the scheduler and the planned step."""
        position = int(state.recorder.cursor[S.POSITION])
        if position < self._due:
            return
        arrays, copies = dict(named_arrays(state)), self._views.copies[self._next]
        self.begin_snapshot()
        for name, copy in copies.items():
            if name == "requests.tokens":  # the largest array, mostly unused
                for slot in np.flatnonzero(state.requests.status != S.EMPTY).tolist():
                    length = max(state.requests.length[slot], state.requests.prompt_length[slot])  # whole scored prompts
                    copy[slot, :length] = arrays[name][slot, :length]
            else:
                np.copyto(copy, arrays[name])
        self.finish_snapshot(position)
        self._due = position + self.copy_every

    def share_inputs(self, state: State) -> State:
        """The state, with a turn's inputs in this memory. For a host that calls open_turn before each turn."""
        shared = self._views.inputs
        inbox = state.inbox._replace(**{name: shared[f"inbox.{name}"] for name in state.inbox._fields})
        batch = state.batch._replace(sampled=shared["batch.sampled"], drafted=shared["batch.drafted"])
        return state._replace(inbox=inbox, batch=batch)

    def open_turn(self, now_ns: int, number: int) -> None:
        """Record the beginning of a turn."""
        opened = self._opened
        opened[OPENED_TURN], opened[OPENED_AT] = number, self.recorder.cursor[S.POSITION]
        opened[OPENED_NS] = now_ns

    def close_turn(self) -> None:
        """Record the end of the turn."""
        self._opened[OPENED_NS] = 0

    def begin_snapshot(self) -> NDArray[np.uint8]:
        """The content of the older snapshot, to overwrite. Readers skip this snapshot until finish_snapshot()."""
        self._views.heads[self._next][WRITES] |= 1
        return self._views.contents[self._next]

    def finish_snapshot(self, position: int) -> None:
        """Complete the snapshot. position: position of the first record after it."""
        head = self._views.heads[self._next]
        head[TAKEN_AT] = position
        head[WRITES] += 1
        self._next ^= 1

    def close(self) -> None:
        """Remove the link. The last user of the memory frees it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if self._link is not None and os.readlink(self._link) == self._target:
                    self._link.unlink()
            os.close(self._fd)
            self._fd = -1
