"""Records of the scheduler's turns, as objects. The layout is explained in blinkpy/scheduler/phases/recorder.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.queues.submission import SQ_ENTRY, SQ_ENTRY_WORDS
from blinkpy.recording.recording_layout import CANCEL_WORDS, OPEN_TURN
from blinkpy.scheduler.phases.recorder import GROUP_BITS, SUSPENDED_BIT

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

HALF, LOW = 32, 0xFFFFFFFF


class BrokenRecordError(ValueError):
    """Words that are no records."""


@dataclass(frozen=True)
class Entry:
    """A submission entry that a turn consumed. prompt: int32 [n], as far as it was read; hashes: int64, of its full pages;
    automaton, rules: int32, empty if they were not read."""

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
    """One turn: inputs and decisions. planned: int64 [rows, 2], slot and tokens of each row. bucket: -1 without
    a new batch.
    group: of layers, with which a step continues that is cut into `groups`; 0: it begins. suspended: whether
        another one is.

    words: int64, its record.
    cancel_words: int64 [S], only of an unfinished turn (not `ended`), whose decisions are unknown.
    """

    number: int
    now_ns: int
    command: int
    inbox: Int64  # [Q, 4] heartbeat, claim, completion head, doorbell
    sampled: Int64
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


def parse_turns(words: Int64, pairs: int) -> Iterator[Turn]:
    """The turns of consecutive records, int64 [n]. Raises BrokenRecordError at words that are no record."""
    at = 0
    while at < len(words):
        length = int(words[at]) & LOW
        if int(words[at]) >> HALF != S.RECORD_MARK or length < S.RECORD_HEADER + 4 * pairs or at + length > len(words):
            raise BrokenRecordError(f"no record at word {at}")
        yield _turn(words[at : at + length], pairs)
        at += length


def ring_words(ring: Int64, begin: int, end: int) -> Int64:
    """The words of a recorder's ring, int64 [2 ** n], between two positions, no further apart than it is long; perhaps a view."""
    first, last = begin & (len(ring) - 1), end & (len(ring) - 1)
    return ring[first:last] if first <= last and end - begin < len(ring) else np.concatenate([ring[first:], ring[:last]])


def _turn(words: Int64, pairs: int) -> Turn:
    _, number, now, command, rows, notes, pages, bucket = words[: S.RECORD_HEADER].tolist()
    cut, notes = notes >> HALF, notes & LOW
    lengths = (S.RECORD_HEADER, 4 * pairs, rows & LOW, notes, rows >> HALF)
    if sum(lengths) != len(words) or min(lengths) < 0:
        raise BrokenRecordError(f"the record of turn {number} is inconsistent")
    _, first, second, third, fourth, _ = accumulate(lengths, initial=0)
    inbox, sampled, note_words, row_words = words[first:second], words[second:third], words[third:fourth], words[fourth:]
    entries, cancelled, cancel_words = _notes(note_words, number)
    planned = np.empty((len(row_words), 2), np.int64)
    planned[:, 0], planned[:, 1] = row_words & LOW, row_words >> HALF
    inputs = number, now, command, inbox.reshape(pairs, 4), sampled, entries, cancelled
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
