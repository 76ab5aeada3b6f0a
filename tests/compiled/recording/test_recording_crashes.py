"""The recording of an engine that dies in a turn holds all inputs of the turn, so a replay shows it.

Claim recordings/crashes: The recording of an engine that dies in a turn contains all inputs of the turn.
"""

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recorded_cases import RecordedCase, RecordedStorm, changed_by_replay
from support.scheduler_cases import tokens
from support.seeded_bugs import SCHEDULER_BUGS, Bug, planted

from blinkpy import cli
from blinkpy.kv.invariants.check_state import state_faults
from blinkpy.kv.state import ARRIVALS, TURNS
from blinkpy.recording.recording_reader import write_dump
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.phases.intake import intake
from blinkpy.scheduler.policies import Policy, fcfs, priority, shortest_first
from blinkpy.verify.replay.replayer import Replay

STORM = 120
MOST_STORMS = 200  # at most, if the first fatal turns read too little: one turn of four reads entries


class DiedError(Exception):
    """The error at which an engine ends."""


def dying(policy: Policy, turn: int, where: str) -> Callable[..., int]:
    """The scheduler in plain Python, which raises in a turn: before or after its decision, or after all writes."""
    phases = make_phases(policy)

    def run(limits: Any, queues: Any, state: Any, now: int, lane: int, lanes: int) -> int:
        here = where if state.counts[TURNS] == turn else ""
        phases.overlap(limits, queues, state, now, lane, lanes)
        if here == "undecided":
            raise DiedError
        bucket = phases.schedule(limits, queues, state, lane, lanes)
        if here == "decided":
            raise DiedError
        phases.publish(limits, queues, state, lane, lanes)
        if here == "recorded":
            raise DiedError
        return bucket

    return run


def died(number: int, policy: Policy, turn: int, where: str) -> RecordedStorm:
    storm = RecordedStorm(number, STORM, policy, scheduler=dying(policy, turn, where))
    with pytest.raises(DiedError):
        for _ in range(STORM):
            assert storm.advance()
    return storm


@pytest.mark.parametrize("where", ["undecided", "decided"])
def test_the_turn_that_an_engine_dies_in_is_replayed_from_what_it_read(where: str, seed: int) -> None:
    draw = random.Random(seed)
    entries: Any = 0
    cancels: Any = 0
    sampled: Any = 0
    for number in range(seed, seed + MOST_STORMS):
        if number >= seed + 12 and entries and cancels and sampled:
            break
        policy, last = (fcfs, priority, shortest_first)[number % 3], draw.randrange(STORM)
        storm, lived = died(number, policy, last, where), RecordedStorm(number, STORM, policy)
        assert all(lived.advance() for _ in range(last + 1))
        replay = Replay(storm.recording.reader.capture(), policy, "njit")
        *others, (fatal, differences) = replay.run()
        assert [d for _, d in others if d] == [] == differences
        assert (fatal.number, fatal.ended) == (last, False)
        assert changed_by_replay(lived.world, replay) == []
        entries, cancels, sampled = (
            entries + len(fatal.entries),
            cancels + int(fatal.cancel_words.any()),
            sampled + len(fatal.sampled),
        )
    assert entries and cancels and sampled, "the fatal turns read too little to prove much"


def test_a_turn_is_not_taken_for_one_that_did_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = died(1, fcfs, 50, "recorded").recording.reader.capture()
    assert all(turn.ended for turn in Replay(recorded, fcfs).turns)  # it died after the record
    storm = died(1, fcfs, 50, "decided")
    memory = storm.recording.memory
    assert not Replay(storm.recording.reader.capture(), fcfs).turns[-1].ended
    monkeypatch.setattr("blinkpy.recording.recording_reader.time.sleep", lambda _: memory.close_turn())  # it ends meanwhile
    assert all(turn.ended for turn in Replay(storm.recording.reader.capture(), fcfs).turns)
    monkeypatch.undo()
    memory.open_turn(1 << 60, 51)  # the turn has read nothing yet
    assert all(turn.ended for turn in Replay(storm.recording.reader.capture(), fcfs).turns)


def test_entries_that_a_turn_did_not_get_to_are_none_of_the_replay() -> None:
    ends = "        if counts[S.ARRIVALS] == 3:\n            raise KeyError\n"
    with planted(Bug("", "intake", "        entries += 1\n", "        entries += 1\n" + ends)):
        turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn(fcfs)
    case = RecordedCase(pairs=1)
    case._turn = case.recording.opens(turn)
    for i in range(4):
        case.submit(tokens(2, i), 9)
    with pytest.raises(KeyError):
        case.turn()
    replay = Replay(case.recording.reader.capture(), fcfs)
    assert [d for _, d in replay.run() if d] == []
    assert len(replay.turns[-1].entries) == replay.state.counts[ARRIVALS] == 3


def test_a_replay_shows_what_a_turn_died_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a bug of this version, which the replay meets, too."""

    def failing(limits: Any, queues: Any, state: Any, *lanes: Any) -> Any:
        if state.counts[ARRIVALS] == 1:
            raise ZeroDivisionError
        return intake(limits, queues, state, *lanes)

    monkeypatch.setattr("blinkpy.scheduler.cycle.intake", failing)
    case = RecordedCase(pairs=1)
    case._turn = case.recording.opens(case._turn)
    case.submit(tokens(5), 4)
    case.turn()
    case.submit(tokens(9), 4)
    with pytest.raises(ZeroDivisionError):
        case.turn()
    capture = case.recording.reader.capture()
    about = {**capture.description, "policy": "fcfs", "device": "cpu"}
    write_dump(tmp_path / "it.recording", capture._replace(description=about), "ZeroDivisionError: of intake")
    assert cli.main(["replay", str(tmp_path / "it.recording")]) == 1
    out, number = capsys.readouterr().out, int(case.state.counts[TURNS])
    assert f"turn {number}, the last one, did not end" in out
    assert f"turn {number} differs: it fails: ZeroDivisionError" in out
    assert "1 of " in out


def test_a_replay_shows_how_a_turn_broke_the_state() -> None:
    """By a bug of the recorded version; a version without the bug decides otherwise."""
    bug = next(bug for bug in SCHEDULER_BUGS if bug.what == "a page is never freed")
    with planted(bug):
        turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn(fcfs)
    case = RecordedCase(pairs=1)
    case._turn, case.opinion = case.recording.opens(turn), None
    case.submit(tokens(5), 2)
    with pytest.raises(AssertionError) as broken:
        case.finish()
    replay = Replay(case.recording.reader.capture(), fcfs)
    replay._scheduler._function = turn
    *_, (last, differences) = replay.run()
    (fault,) = state_faults(case.limits, case.state)
    assert fault in str(broken.value)
    assert differences == [f"the state is broken: {fault}"]
    assert last.ended and last.number == int(case.state.counts[TURNS]) - 1
    fixed = [d for _, d in Replay(case.recording.reader.capture(), fcfs).run() if d]
    assert fixed[-1][0].startswith(("free pages", "cached pages"))
