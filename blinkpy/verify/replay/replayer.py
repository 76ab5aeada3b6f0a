"""Run a recording again: the scheduler's source, as plain Python or compiled, from the same state with the same inputs.

Every turn must decide what the recording has: bucket, rows with their tokens, and the pages that are left; and its recorder,
which is on as well, must write the same record, word for word.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from blinkpy.device.array_trees import named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.layout import QueueLayout, QueueSizes
from blinkpy.queues.views import engine_views
from blinkpy.queues.words import CONTROL_COMMAND, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL, FRONT_HEARTBEAT
from blinkpy.recording.recording_layout import NOT_COPIED, RecordingError
from blinkpy.recording.recording_reader import Capture
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.suspension import step_ended
from blinkpy.verify.replay.turn_records import BrokenRecordError, Int64, Turn, parse_turns, ring_words

INBOX_WORDS = [FRONT_HEARTBEAT, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL]  # in the order of a record


class Replay:
    """One recording, ready to be run turn by turn. limits, state: as of the last turn. failed: the last turn raised.

    policy: the one that the recording was made with. mode: "python" runs the source as it is; "njit" compiles it first, and
    is some hundred times faster. Raises RecordingError for a recording that does not fit this version.
    """

    def __init__(self, capture: Capture, policy: Policy, mode: Literal["python", "njit"] = "python"):
        about = capture.description
        try:
            self.limits = Limits(**about["limits"])
            self.state: State = make_state(self.limits, [(tokens, rows) for tokens, rows in about["buckets"]])
            sizes = QueueSizes(**about["queue"])
            for name, array in named_arrays(self.state):
                if not name.startswith(NOT_COPIED):
                    np.copyto(array, capture.arrays[name])
            batch = self.state.batch
            self.state.recorder.cursor[S.COMMITS] = batch.counts[S.ROWS] if step_ended(batch) else 0
            self.turns: list[Turn] = list(parse_turns(capture.words, sizes.pairs))
        except BrokenRecordError as error:
            raise RecordingError(f"the recording is damaged: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"the recording was made by another version of blinkpy: {error}") from error
        layout = QueueLayout(sizes)
        self.views = engine_views(memoryview(bytearray(layout.total_bytes)), layout)
        self._scheduler = Scheduler(self.limits, self.state, policy, mode=mode)
        self._scheduler.attach(self.views)
        self.failed = False

    def run(self) -> Iterator[tuple[Turn, list[str]]]:
        """Each turn after it was run again, with what differs from the recording, and at the end the faults with
        the state. Ends where a turn raises. One that did not end has the rows that it plans here.
        """
        for turn in self.turns:
            differences = self.repeat(turn)
            if turn is self.turns[-1] and not self.failed:
                differences += [f"the state is broken: {fault}" for fault in self._scheduler.check()]
            yield (turn if turn.ended else dataclasses.replace(turn, planned=self._planned())), differences
            if self.failed:
                return

    def repeat(self, turn: Turn) -> list[str]:
        """Run the next turn; what differs from its record."""
        self._set_inputs(turn)
        begin = int(self.state.recorder.cursor[S.POSITION])
        try:
            self._scheduler.turn(turn.now_ns)
        except Exception as error:  # an expect of plain Python, or what an engine dies of
            self.failed = True
            return [f"it fails: {type(error).__name__}: {error}"]
        return self._differences(turn, begin) if turn.ended else []

    def _set_inputs(self, turn: Turn) -> None:
        state, views = self.state, self.views
        state.counts[S.TURNS] = turn.number  # turns without news were not recorded
        views.control[CONTROL_COMMAND] = turn.command
        views.front[:, INBOX_WORDS] = turn.inbox
        views.cancel[:] = 0  # an old word would cancel a later request with the same id, which only a faulty front end submits
        for slot in turn.cancelled:
            pair, local = divmod(slot, self.limits.slots_per_pair)
            views.cancel[pair, local] = state.requests.request_id[slot]
        if not turn.ended:
            views.cancel[:] = turn.cancel_words.reshape(views.cancel.shape)
            views.sq[:] = 0  # an entry that it did not get to is unknown: here it is of another epoch
        heads = state.pairs.sq_head.tolist()
        for entry in turn.entries:
            views.sq[entry.pair, heads[entry.pair] & (self.limits.sq_entries - 1)] = entry.words
            heads[entry.pair] += 1
            if len(entry.prompt):
                views.prompt[entry.pair, entry["prompt_offset"] :][: len(entry.prompt)] = entry.prompt
                views.hashes[entry.pair, entry["hash_offset"] :][: len(entry.hashes)] = entry.hashes
            if len(entry.automaton):
                views.prompt[entry.pair, entry["grammar_offset"] :][: len(entry.automaton)] = entry.automaton
            if len(entry.rules):
                views.prompt[entry.pair, entry["rules_offset"] :][: len(entry.rules)] = entry.rules
        state.batch.sampled[: len(turn.sampled)] = turn.sampled

    def _planned(self) -> Int64:
        """Turn.planned of the last turn, as it was run here."""
        batch = self.state.batch
        rows = int(batch.counts[S.ROWS]) if batch.counts[S.GROUP] == 0 else 0
        planned = np.empty((rows, 2), np.int64)
        starts = batch.query_starts[: rows + 1]
        planned[:, 0], planned[:, 1] = batch.row_slots[:rows], starts[1:] - starts[:-1]
        return planned

    def _differences(self, turn: Turn, begin: int) -> list[str]:
        batch, counts = self.state.batch, self.state.counts
        planned = self._planned()
        compared: list[tuple[str, Any, Any]] = [
            ("bucket", int(batch.counts[S.BUCKET]) if len(planned) else -1, turn.bucket),
            ("rows (slot, tokens)", planned.tolist(), turn.planned.tolist()),
            ("free pages", int(counts[S.FREE_COUNT]), turn.free),
            ("cached pages", int(counts[S.CACHED_COUNT]), turn.cached),
        ]
        if all(ours == theirs for _, ours, theirs in compared):
            compared = self._record_words(turn, begin)
        return [f"{what}: {ours} here, {theirs} recorded" for what, ours, theirs in compared if ours != theirs]

    def _record_words(self, turn: Turn, begin: int) -> list[tuple[str, Any, Any]]:
        """The record that was written here from a position on, and the recorded one, up to the first difference."""
        end = int(self.state.recorder.cursor[S.POSITION])
        own = ring_words(self.state.recorder.words, begin, end)
        if len(own) != len(turn.words):
            return [("words of the record", len(own), len(turn.words))]
        if own.tobytes() == turn.words.tobytes():
            return []
        return [(f"word {i} of the record", int(own[i]), int(turn.words[i])) for i in np.flatnonzero(own != turn.words)[:1]]
