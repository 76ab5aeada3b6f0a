"""Replays each record of a simulation next to the scheduler that wrote it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from blinkpy.device.tables import named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.queues.layout import read_header
from blinkpy.recording.recording_layout import NOT_COPIED
from blinkpy.recording.recording_reader import Capture
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.replay.replayer import BrokenRecordError, Replay, parse_turns, ring_words
from blinkpy.verify.sim.world import World

# A turn without a batch writes no record but increments S.TURNS. A cancel is not recorded if its request
# ended
# by itself; then the replay may take the fast path although the scheduler did not, with the same result.
NOT_REPEATED = (S.TURNS, S.FAST_PATH)


class RecordedTurns:
    """Replays a world's records from its first turn, by the shipped scheduler with its own recorder.

    world: a world of make_world, with a recorder.
    mode: execution mode of the replay.
    Raises ValueError if the recorder is off.
    """

    def __init__(self, world: World, policy: Policy, mode: Literal["njit", "python"]) -> None:
        limits, state = world.limits, world.state
        if limits.record_turns == 0:
            raise ValueError("the world has no recorder")
        about = {"limits": limits._asdict(), "buckets": np.stack(state.buckets, axis=1).tolist()}
        about["queue"] = dataclasses.asdict(read_header(world.segment)[0].sizes)
        arrays = {name: array for name, array in named_arrays(state) if not name.startswith(NOT_COPIED)}
        self._replay = Replay(Capture(about, np.zeros(0, np.int64), arrays), policy, mode)
        self._state = state
        self._pairs, self._drafts = limits.pairs, limits.step_drafts
        self._read = 0

    def difference(self) -> str:
        """Replay the last turn from its record. Returns the first difference from the original turn, or "".

        Call it after each turn of the scheduler.
        """
        for what, ours, theirs in self._compared():
            if ours != theirs:
                return f"{what}: {theirs} in the replay, {ours} recorded"
        return ""

    def _compared(self) -> Iterator[tuple[str, Any, Any]]:
        recorder, replayed = self._state.recorder, self._replay.state
        begin, self._read = self._read, int(recorder.progress[S.POSITION])
        try:
            turns = list(parse_turns(ring_words(recorder.words, begin, self._read), self._pairs, self._drafts))
        except BrokenRecordError as error:
            yield "the record", str(error), ""
            return
        for turn in turns:
            yield f"turn {turn.number}", "", "; ".join(self._replay.repeat(turn))
            yield "its number", turn.number, int(self._state.counts[S.TURNS]) - 1
            yield "its time", turn.now_ns, int(self._state.inbox.now_ns[0])
        yield "records of a turn", len(turns), min(len(turns), 1)
        yield "counts", repeated_counts(self._state), repeated_counts(replayed)
        yield "counters", self._state.counters.tolist(), replayed.counters.tolist()
        for name in ("progress", "cursor", "seen"):
            yield f"recorder.{name}", getattr(recorder, name).tolist(), getattr(replayed.recorder, name).tolist()


def repeated_counts(state: State) -> list[int]:
    """State.counts with zeros at NOT_REPEATED."""
    counts: list[int] = state.counts.tolist()
    for index in NOT_REPEATED:
        counts[index] = 0
    return counts
