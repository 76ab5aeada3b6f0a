"""Run a recording again: the scheduler's source, as plain Python or compiled, from the same state with the same inputs.

Every turn must decide what the recording has: bucket, rows with their tokens, and the pages that are left.
"""

from collections.abc import Iterator
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
from blinkpy.verify.recording.recording_layout import NOT_COPIED
from blinkpy.verify.recording.recording_links import RecordingError
from blinkpy.verify.recording.recording_reader import Snapshot
from blinkpy.verify.replay.turn_records import BrokenRecordError, Turn, parse_turns


class Replay:
    """One recording, ready to be run turn by turn. limits, state: as of the last turn; its own recorder is off.

    policy: the one that the recording was made with. mode: "python" runs the source as it is; "njit" compiles it first, and
    is some hundred times faster. Raises RecordingError for a recording that does not fit this version.
    """

    def __init__(self, capture: Snapshot, policy: Policy, mode: Literal["python", "njit"] = "python"):
        about = capture.description
        try:
            self.limits = Limits(**{**about["limits"], "record_turns": 0, "record_words": 1})
            self.state: State = make_state(self.limits, [(tokens, rows) for tokens, rows in about["buckets"]])
            sizes = QueueSizes(**about["queue"])
            for name, array in named_arrays(self.state):
                if not name.startswith(NOT_COPIED):
                    np.copyto(array, capture.arrays[name])
            self.turns: list[Turn] = list(parse_turns(capture.words, sizes.pairs))
        except BrokenRecordError as error:
            raise RecordingError(f"the recording is damaged: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"the recording was made by another version of blinkpy: {error}") from error
        layout = QueueLayout(sizes)
        self.views = engine_views(memoryview(bytearray(layout.total_bytes)), layout)
        self._scheduler = Scheduler(self.limits, self.state, policy, mode=mode)
        self._scheduler.attach(self.views)

    def run(self) -> Iterator[tuple[Turn, list[str]]]:
        """Each turn after it was run again, with what differs from the recording. Plain Python ends where an expect fails."""
        for turn in self.turns:
            self._set_inputs(turn)
            try:
                self._scheduler.turn(turn.now_ns)
            except BrokenInvariantError as error:
                yield turn, [f"the state is broken: {error}"]
                return
            yield turn, self._differences(turn)

    def _set_inputs(self, turn: Turn) -> None:
        state, views = self.state, self.views
        state.counts[S.TURNS] = turn.number  # turns without news were not recorded
        views.control[CONTROL_COMMAND] = turn.command
        views.front[:, [FRONT_HEARTBEAT, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL]] = turn.inbox
        for slot in turn.cancelled:
            pair, local = divmod(slot, self.limits.slots_per_pair)
            views.cancel[pair, local] = state.requests.request_id[slot]
        heads = state.pairs.sq_head.copy()
        for entry in turn.entries:
            views.sq[entry.pair, heads[entry.pair] & (self.limits.sq_entries - 1)] = entry.words
            heads[entry.pair] += 1
            if len(entry.prompt):
                views.prompt[entry.pair, entry["prompt_offset"] :][: len(entry.prompt)] = entry.prompt
                views.hashes[entry.pair, entry["hash_offset"] :][: len(entry.hashes)] = entry.hashes
            if len(entry.automaton):
                views.prompt[entry.pair, entry["grammar_offset"] :][: len(entry.automaton)] = entry.automaton
        state.batch.sampled[: len(turn.sampled)] = turn.sampled

    def _differences(self, turn: Turn) -> list[str]:
        batch, counts = self.state.batch, self.state.counts
        rows = int(batch.counts[S.ROWS])
        tokens = np.diff(batch.query_starts[: rows + 1])
        planned = np.stack([batch.row_slots[:rows], tokens], axis=1).astype(np.int64)
        compared: list[tuple[str, Any, Any]] = [
            ("bucket", int(batch.counts[S.BUCKET]) if rows else -1, turn.bucket),
            ("rows (slot, tokens)", planned.tolist(), turn.planned.tolist()),
            ("free pages", int(counts[S.FREE_COUNT]), turn.free),
            ("cached pages", int(counts[S.CACHED_COUNT]), turn.cached),
        ]
        return [f"{what}: {ours} here, {theirs} recorded" for what, ours, theirs in compared if ours != theirs]
