"""The pace of polls, compared with its rule in other words; cost of steps and waiting time of tokens with a
simulated clock."""

import random
from collections.abc import Callable

import pytest

from blinkpy.dpu.token_feed import EARLY_SHARE, POLL_S, QUIET_LIMIT_S, SPARE_S, STEPS, PollPace

TIMER_S = POLL_S * 1.2  # the time that a timer of a millisecond takes


def test_a_wait_is_the_shortest_of_the_last_steps_less_a_little(seed: int) -> None:
    draw, pace = random.Random(seed), PollPace()
    now, last, lengths, before = 100.0, 0.0, [0.0], False
    for _ in range(1000):
        now += draw.choice((0.0005, 0.001, 0.004, 0.02, 0.04, 0.3))
        found, clumped = draw.random() < 0.8, draw.random() < 0.03
        expected = POLL_S
        if draw.random() < 0.01:
            pace.restart()
            lengths.append(0.0)
        if found:
            length = 0.0 if clumped else (now - last) * (EARLY_SHARE if before else 1)
            lengths.append(length)
            expected = sorted((POLL_S, min(lengths[-STEPS:]) - SPARE_S, QUIET_LIMIT_S))[1]
            last = now
        before = found
        assert pace.delay(now, found, clumped and found) == pytest.approx(expected)


def played(length: Callable[[int], float], steps: int) -> tuple[float, list[float]]:
    """Polls a step, and the seconds that the tokens of each step wait, once the pace has seen some steps."""
    pace, now, end, polls, waits = PollPace(), 0.0, 0.0, 0, list[float]()
    step = 0
    while step < steps:
        now += TIMER_S
        polls += step >= STEPS
        came = 0
        while end <= now:
            waits.append(now - end)
            step, came = step + 1, came + 1
            end += length(step)
        now += max(0.0, pace.delay(now, came > 0, came > 1) - POLL_S)
    return polls / (steps - STEPS), waits[STEPS:]


@pytest.mark.parametrize("step_ms", [5.0, 13.1, 20.2, 30.3])
def test_regular_steps_cost_few_polls_and_tokens_wait_for_less_than_one(step_ms: float, seed: int) -> None:
    draw = random.Random(seed)
    polls, waits = played(lambda _: step_ms / 1000 * draw.uniform(0.99, 1.01), 500)
    assert polls < 5, f"{polls} polls a step"
    assert sum(wait > TIMER_S for wait in waits) < 25
    assert sum(waits) / len(waits) < 0.8 * TIMER_S


def test_a_decode_step_after_mixed_ones_is_found_in_time(seed: int) -> None:
    draw = random.Random(seed)
    _, waits = played(lambda step: 0.013 if step % 3 else draw.uniform(0.02, 0.07), 500)
    assert max(waits) <= TIMER_S + 1e-9


def test_the_wait_adapts_to_shorter_steps(seed: int) -> None:
    share = random.Random(seed).uniform(0.3, 0.95)
    _, waits = played(lambda step: 0.02 if step < 50 else 0.02 * share, 100)
    assert max(waits) < 0.02
    assert max(waits[-40:]) <= 3 * TIMER_S
