"""What the host asks of the scheduler and is told by it."""

from __future__ import annotations

from support.scheduler_cases import make_case, tokens

from blinkpy.kv.state import DRAINED, NO_BATCH, STOPPED
from blinkpy.queues.completion import FINISH_LENGTH
from blinkpy.queues.words import (
    COMMAND_DRAIN,
    COMMAND_STOP,
    CONTROL_COMMAND,
    ENGINE_HEARTBEAT,
    ENGINE_STEPS,
    ENGINE_TIME_NS,
    GAUGE,
    PAIR_CQ_TAIL,
)


def test_drain_ends_what_was_accepted_and_takes_nothing_new() -> None:
    case = make_case(pairs=1, rows=1)
    accepted = [case.submit(tokens(3), 3) for _ in range(2)]
    case.turn()
    case.views.control[CONTROL_COMMAND] = COMMAND_DRAIN
    case.submit(tokens(3), 3)
    for _ in range(20):
        case.turn()
        case.read(0)
    assert case.bucket == DRAINED
    assert [request.ended for request in accepted] == [FINISH_LENGTH] * 2
    assert case.counter("requests_accepted") == 2


def test_stop_publishes_what_was_computed_and_returns_at_once() -> None:
    case = make_case()
    case.submit(tokens(3), 9)
    case.turn()
    case.views.control[CONTROL_COMMAND] = COMMAND_STOP
    assert case.turn() == case.turn() == STOPPED
    assert case.state.inbox.command[0] == COMMAND_STOP
    assert case.word(PAIR_CQ_TAIL) == 1


def test_the_engine_reports_gauges_and_its_heartbeat() -> None:
    case = make_case(pairs=1)
    engine = case.views.engine
    calls = int(engine[ENGINE_HEARTBEAT])
    assert case.turn() == NO_BATCH
    case.submit(tokens(6), 2)
    case.turn()
    assert {name: int(engine[index]) for name, index in GAUGE.items()} == {
        "requests_running": 1,
        "requests_waiting": 0,
        "pages_free": 14,
        "pages_cached": 0,
        "pages_held": 2,
        "batch_rows": 1,
        "batch_tokens": 6,
    }
    assert (engine[ENGINE_HEARTBEAT], engine[ENGINE_STEPS], engine[ENGINE_TIME_NS]) == (calls + 2, 1, case.now)
