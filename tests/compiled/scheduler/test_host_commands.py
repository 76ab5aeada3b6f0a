"""What the host asks of the scheduler and is told by it."""

from __future__ import annotations

from support.attached_world import prompt, world
from support.scheduler_world import Sizes, World

from blinkpy.engine.devices.null_device import made_up_token
from blinkpy.kv.state import DRAINED, NO_BATCH, STOPPED
from blinkpy.queues.completion import FINISH_LENGTH, unpack_completion
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
from blinkpy.scheduler.host_scheduler import Scheduler


def test_drain_ends_what_was_accepted_and_takes_nothing_new() -> None:
    made = world(pairs=1, rows=1)
    sent = [made.fronts[0].submit(prompt(3), 3) for _ in range(2)]
    made.step()
    made.views.control[CONTROL_COMMAND] = COMMAND_DRAIN
    made.fronts[0].submit(prompt(3), 3)
    for _ in range(20):
        made.step()
        made.fronts[0].poll()
    assert made.bucket == DRAINED
    assert [request.ended for request in sent] == [FINISH_LENGTH] * 2
    assert made.counter("requests_accepted") == 2


def test_stop_publishes_what_was_computed_and_returns_at_once() -> None:
    made = world()
    made.fronts[0].submit(prompt(3), 9)
    made.step()
    made.views.control[CONTROL_COMMAND] = COMMAND_STOP
    assert made.step() == made.step() == STOPPED
    assert made.state.inbox.command[0] == COMMAND_STOP
    assert made.fronts[0].word(PAIR_CQ_TAIL) == 1


def test_the_engine_reports_gauges_and_its_heartbeat() -> None:
    made = world(pairs=1)
    assert made.step() == NO_BATCH
    made.fronts[0].submit(prompt(6), 2)
    made.step()
    engine = made.views.engine
    gauges = {name: int(engine[index]) for name, index in GAUGE.items()}
    assert gauges == {
        "requests_running": 1,
        "requests_waiting": 0,
        "pages_free": 14,
        "pages_cached": 0,
        "pages_held": 2,
        "batch_rows": 1,
        "batch_tokens": 6,
    }
    assert (engine[ENGINE_HEARTBEAT], engine[ENGINE_STEPS], engine[ENGINE_TIME_NS]) == (3, 1, made.now)


def test_the_null_engine_serves_made_up_tokens() -> None:
    made = World(Sizes(lease_ms=4_000_000_000), "njit")  # the loop has another clock
    made.attach()
    front = made.fronts[0]
    front.submit(prompt(6), 5, seed=-(2**62))
    scheduler = Scheduler(made.limits, made.state)
    scheduler.attach(made.views)
    assert scheduler.run_null(range(10, 40), 0, 5_000_000, 1 << 62) == NO_BATCH
    words = [unpack_completion(int(word)) for word in made.views.cq[0, :5]]
    expected = [made_up_token(-(2**62), position, 10, 40) for position in range(6, 11)]
    assert [word.token for word in words] == expected
    assert all(10 <= token < 40 for token in expected)
    assert words[-1].finish == FINISH_LENGTH
    made.views.control[CONTROL_COMMAND] = COMMAND_STOP
    assert scheduler.run_null(range(10, 40), 0, 5_000_000, 1 << 62) == STOPPED
