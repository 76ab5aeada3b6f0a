"""Run a recording again: the scheduler's source, as plain Python or compiled, from the same state with the same inputs.

Every call must decide what the recording says: bucket, rows with their tokens, and the pages that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from blinkpy.device.array_trees import named_arrays
from blinkpy.device.expect import BrokenInvariantError
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.layout import QueueLayout, QueueSizes
from blinkpy.queues.views import engine_views
from blinkpy.queues.words import CONTROL_COMMAND, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL, FRONT_HEARTBEAT
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.recording.recording_errors import RecordingError
from blinkpy.verify.recording.recording_layout import NOT_COPIED
from blinkpy.verify.recording.recording_reader import Snapshot
from blinkpy.verify.replay.call_records import BrokenRecordError, Call, parse_calls


def empty_state(description: Mapping[str, Any]) -> tuple[Limits, State]:
    """Limits and a fresh state for a replay; its own recorder is off."""
    limits = Limits(**{**description["limits"], "record_turns": 0, "record_words": 1})
    return limits, make_state(limits, [(t, r) for t, r in description["buckets"]])


class Replay:
    """One recording, ready to be run call by call. limits, state: as of the last call.

    policy: the one that the recording was made with. mode: "python" runs the source as it is; "njit" compiles it first, and
    is some hundred times faster. Raises RecordingError for a recording that does not fit this version.
    """

    def __init__(self, capture: Snapshot, policy: Policy, mode: Literal["python", "njit"] = "python"):
        self.about = capture.description
        try:
            self.limits: Limits
            self.state: State
            self.limits, self.state = empty_state(self.about)
            sizes = QueueSizes(**self.about["queue"])
            for name, array in named_arrays(self.state):
                if name in capture.arrays:
                    np.copyto(array, capture.arrays[name])
                elif not name.startswith(NOT_COPIED):
                    raise KeyError(f"state.{name}")
            self.calls: list[Call] = list(parse_calls(capture.words, sizes.pairs))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BrokenRecordError):
                raise RecordingError(f"the recording is damaged: {error}") from error
            raise RecordingError(f"the recording was made by another version of blinkpy: {error}") from error
        layout = QueueLayout(sizes)
        self.views = engine_views(memoryview(bytearray(layout.total_bytes)), layout)
        self._scheduler = Scheduler(self.limits, self.state, policy, mode=mode)
        self._scheduler.attach(self.views)

    def run(self) -> Iterator[tuple[Call, list[str]]]:
        """Each call after it was run again, with what differs from the recording. Plain Python ends where an expect fails."""
        for call in self.calls:
            self._set_inputs(call)
            try:
                bucket = self._scheduler.turn(call.now_ns)
            except BrokenInvariantError as error:
                yield call, [f"the state is broken: {error}"]
                return
            yield call, self._differences(call, bucket)

    def _set_inputs(self, call: Call) -> None:
        state, views = self.state, self.views
        state.counts[S.TURNS] = call.number  # calls without news were not recorded
        views.control[CONTROL_COMMAND] = call.command
        words = (FRONT_HEARTBEAT, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL)
        for i, word in enumerate(words):
            views.front[:, word] = call.inbox[:, i]
        for slot in call.cancelled:
            pair, local = divmod(slot, self.limits.slots_per_pair)
            views.cancel[pair, local] = state.requests.request_id[slot]
        heads = state.pairs.sq_head.copy()
        for entry in call.entries:
            views.sq[entry.pair, heads[entry.pair] & (self.limits.sq_entries - 1)] = entry.words
            heads[entry.pair] += 1
            if len(entry.prompt):
                views.prompt[entry.pair, entry["prompt_offset"] :][: len(entry.prompt)] = entry.prompt
                views.hashes[entry.pair, entry["hash_offset"] :][: len(entry.hashes)] = entry.hashes
        state.batch.sampled[: len(call.sampled)] = call.sampled

    def _differences(self, call: Call, bucket: int) -> list[str]:
        batch, counts = self.state.batch, self.state.counts
        rows = int(batch.counts[S.ROWS])
        tokens = np.diff(batch.query_starts[: rows + 1])
        planned = np.stack([batch.row_slots[:rows], tokens], axis=1).astype(np.int64)
        pairs: list[tuple[str, Any, Any]] = [
            ("bucket", int(batch.counts[S.BUCKET]) if rows else -1, call.bucket),
            ("rows (slot, tokens)", planned.tolist(), call.planned.tolist()),
            ("free pages", int(counts[S.FREE_COUNT]), call.free),
            ("cached pages", int(counts[S.CACHED_COUNT]), call.cached),
        ]
        return [f"{what}: {ours} here, {theirs} recorded" for what, ours, theirs in pairs if ours != theirs]
