"""Replays a recording: the scheduler's source, as plain Python or compiled, on the recorded state and inputs.

Every turn must make the recorded decisions: bucket, rows with their tokens, and free pages. The replay's recorder must write an
identical record.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.tables import named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.layout import QueueLayout, QueueSizes, engine_views
from blinkpy.queues.submission import SQ_ENTRY, SQ_ENTRY_WORDS
from blinkpy.queues.words import CONTROL_COMMAND, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL, FRONT_HEARTBEAT
from blinkpy.recording.recording_layout import CANCEL_WORDS, NOT_COPIED, OPEN_TURN, RecordingError
from blinkpy.recording.recording_reader import Capture
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.phases.recorder import GROUP_BITS, SUSPENDED_BIT
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.suspension import step_ended

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

HALF, LOW = 32, 0xFFFFFFFF


class BrokenRecordError(ValueError):
    """The words are not a valid record."""


@dataclass(frozen=True)
class Entry:
    """A submission entry consumed in a turn.

    prompt: int32 [n], the part of prompt and prediction that was read.
    hashes: int64, of its full pages.
    automaton, rules: int32, empty if they were not read.
    """

    pair: int
    words: Int32
    prompt: Int32
    hashes: Int64
    automaton: Int32
    rules: Int32

    def __getitem__(self, field: str) -> int:
        return int(self.words.view(SQ_ENTRY)[0][field])


@dataclass(frozen=True)
class Turn:
    """One turn: inputs and decisions.

    planned: int64 [rows, 2], slot and tokens of each row.
    bucket: -1 without a new batch.
    words: int64, its record.
    cancel_words: int64 [S], only for an unfinished turn (not `ended`), whose decisions are unknown.
    group: the layer group with which a cut step continues; 0 if a step begins.
    groups: number of groups of the cut step.
    suspended: whether another step is suspended.
    """

    number: int
    now_ns: int
    command: int
    inbox: Int64  # [Q, 4] heartbeat, claim, completion head, doorbell
    sampled: Int64
    drafted: Int64  # [rows of `sampled`, Limits.step_drafts]
    entries: tuple[Entry, ...]
    cancelled: tuple[int, ...]
    planned: Int64
    free: int
    cached: int
    bucket: int
    words: Int64
    cancel_words: Int64
    group: int = 0
    groups: int = 0
    suspended: bool = False

    @property
    def ended(self) -> bool:
        return self.bucket != OPEN_TURN


def parse_turns(words: Int64, pairs: int, step_drafts: int) -> Iterator[Turn]:
    """Parse consecutive records, int64 [n]. pairs, step_drafts: values of the scheduler's limits. Raises BrokenRecordError
    at words that are not a record.
    """
    at = 0
    while at < len(words):
        length = int(words[at]) & LOW
        if int(words[at]) >> HALF != S.RECORD_MARK or length < S.RECORD_HEADER + 4 * pairs or at + length > len(words):
            raise BrokenRecordError(f"no record at word {at}")
        yield _turn(words[at : at + length], pairs, step_drafts)
        at += length


def ring_words(ring: Int64, begin: int, end: int) -> Int64:
    """The words between two positions of a recorder's ring, int64 [2 ** n]; possibly a view. The positions differ by at most the
    ring's length.
    """
    first, last = begin & (len(ring) - 1), end & (len(ring) - 1)
    return ring[first:last] if first <= last and end - begin < len(ring) else np.concatenate([ring[first:], ring[:last]])


def _turn(words: Int64, pairs: int, step_drafts: int) -> Turn:
    _, number, now, command, rows, notes, pages, bucket = words[: S.RECORD_HEADER].tolist()
    cut, notes = notes >> HALF, notes & LOW
    lengths = (S.RECORD_HEADER, 4 * pairs, rows & LOW, (rows & LOW) * step_drafts, notes, rows >> HALF)
    if sum(lengths) != len(words) or min(lengths) < 0:
        raise BrokenRecordError(f"the record of turn {number} is inconsistent")
    bounds = pairwise(accumulate(lengths, initial=0))
    _, inbox, sampled, drafted, note_words, row_words = (words[first:last] for first, last in bounds)
    entries, cancelled, cancel_words = _notes(note_words, number)
    planned = np.empty((len(row_words), 2), np.int64)
    planned[:, 0], planned[:, 1] = row_words & LOW, row_words >> HALF
    inputs = (
        number,
        now,
        command,
        inbox.reshape(pairs, 4),
        sampled,
        drafted.reshape(len(sampled), step_drafts),
        entries,
        cancelled,
    )
    groups = cut & (1 << GROUP_BITS) - 1, cut >> GROUP_BITS & (1 << GROUP_BITS) - 1, cut & SUSPENDED_BIT != 0
    return Turn(*inputs, planned, pages & LOW, pages >> HALF, bucket, words, cancel_words, *groups)


def _notes(words: Int64, number: int) -> tuple[tuple[Entry, ...], tuple[int, ...], Int64]:
    entries, cancelled, cancel_words, at = [], [], words[:0], 0
    while at < len(words):
        kind, length = int(words[at]) & (1 << S.NOTE_SHIFT) - 1, int(words[at]) >> S.NOTE_SHIFT
        note = words[at + 1 : at + length]
        if length < 1 or at + length > len(words):
            raise BrokenRecordError(f"a note of turn {number} is truncated")
        if kind == S.RECORDED_ENTRY and length >= 3 + SQ_ENTRY_WORDS // 2:
            entries.append(_entry(note))
        elif kind == S.RECORDED_CANCELS:
            cancelled += [slot for slot in note.tolist() if slot >= 0]
        elif kind == CANCEL_WORDS:
            cancel_words = note
        else:
            raise BrokenRecordError(f"turn {number} has a note of unknown kind {kind}")
        at += length
    return tuple(entries), tuple(cancelled), cancel_words


def _entry(note: Int64) -> Entry:
    pair, copied, lengths = int(note[0]) & LOW, int(note[0]) >> HALF, [int(note[1]) & LOW, int(note[1]) >> HALF]
    entry, prompt, rest = np.split(note[2:], np.cumsum([SQ_ENTRY_WORDS // 2, (copied + 1) // 2]))
    halves = [(length + 1) // 2 for length in lengths]
    if copied > 2 * len(prompt) or not all(0 <= half <= len(rest) for half in (*halves, sum(halves))):
        raise BrokenRecordError("a prompt, automaton or set of token rules is truncated")
    hashes, *packed = np.split(rest, [len(rest) - sum(halves), len(rest) - halves[1]])
    words = (part.view(np.int32)[:length] for part, length in zip(packed, lengths, strict=True))
    return Entry(pair, entry.view(np.int32), prompt.view(np.int32)[:copied], hashes, *words)


INBOX_WORDS = [FRONT_HEARTBEAT, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL]  # in record order


class Replay:
    """A recording, replayed turn by turn.

    limits, state: the scheduler's limits, and its state after the last turn.
    failed: whether the last turn raised an exception.
    policy: the policy of the recording.
    mode: "python" interprets the source; "njit" compiles it first, and is about a hundred times faster.
    Raises RecordingError for a recording of another version.
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
            self.turns: list[Turn] = list(parse_turns(capture.words, sizes.pairs, self.limits.step_drafts))
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
        """Yield each turn after its replay, with its differences from the recording. The last turn also has
        the faults of the final state. Stops if a turn raises an exception. For an unfinished turn, the rows planned here are
        filled in.
        """
        for turn in self.turns:
            differences = self.repeat(turn)
            if turn is self.turns[-1] and not self.failed:
                differences += [f"the state is broken: {fault}" for fault in self._scheduler.check()]
            yield (turn if turn.ended else dataclasses.replace(turn, planned=self._planned())), differences
            if self.failed:
                return

    def repeat(self, turn: Turn) -> list[str]:
        """Run the next turn. Returns its differences from the record."""
        self._set_inputs(turn)
        begin = int(self.state.recorder.cursor[S.POSITION])
        try:
            self._scheduler.turn(turn.now_ns)
        except Exception as error:  # a failed `expect`, or the exception that also stopped the engine
            self.failed = True
            return [f"it fails: {type(error).__name__}: {error}"]
        return self._differences(turn, begin) if turn.ended else []

    def _set_inputs(self, turn: Turn) -> None:
        state, views = self.state, self.views
        state.counts[S.TURNS] = turn.number  # turns without an event were not recorded
        views.control[CONTROL_COMMAND] = turn.command
        views.front[:, INBOX_WORDS] = turn.inbox
        views.cancel[:] = 0  # a stale word would cancel a later request with the same id (of a faulty front end)
        for slot in turn.cancelled:
            pair, local = divmod(slot, self.limits.slots_per_pair)
            views.cancel[pair, local] = state.requests.request_id[slot]
        if not turn.ended:
            views.cancel[:] = turn.cancel_words.reshape(views.cancel.shape)
            views.sq[:] = 0  # entries beyond the turn are unknown; epoch 0 marks them as stale
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
        state.batch.drafted[: len(turn.drafted), : self.limits.step_drafts] = turn.drafted

    def _planned(self) -> Int64:
        """Turn.planned of the last replayed turn."""
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
        """The first difference between the replayed record, from position `begin`, and the recorded one."""
        end = int(self.state.recorder.cursor[S.POSITION])
        own = ring_words(self.state.recorder.words, begin, end)
        if len(own) != len(turn.words):
            return [("words of the record", len(own), len(turn.words))]
        if own.tobytes() == turn.words.tobytes():
            return []
        return [(f"word {i} of the record", int(own[i]), int(turn.words[i])) for i in np.flatnonzero(own != turn.words)[:1]]
