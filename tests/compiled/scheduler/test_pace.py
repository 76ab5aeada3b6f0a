"""Paced steps, the rule R17, on the clock of a case: a step takes a turn, and the target is twenty turns.

Claim decisions/pace (simulator): No step is held while a prompt waits, a request is late, or the engine
drains.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.expected_request import ExpectedRequest
from support.scheduler_cases import Case, make_case, tokens

from blinkpy.config import SchedulerOptions
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.queues import words as W
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.scheduler.pace import NEVER, holds_step, next_needed
from blinkpy.verify.sim.world import TICK_NS

TARGET_NS = 20 * TICK_NS
HIGHEST = 24  # tokens of an answer


def paced_case(**sizes: Any) -> Case:
    return make_case(**{"tpot_target_ms": 1, "pages": 64, "lease_ms": 1000} | sizes)


def follow(case: Case, requests: list[ExpectedRequest], until: Callable[[], bool]) -> list[list[int]]:
    """Make turns until a condition holds; returns the times of each request's tokens, ns."""
    times: list[list[int]] = [[] for _ in requests]
    for _ in range(2000):
        if until():
            return times
        case.turn()
        case.read(0, 1)
        for request, own in zip(requests, times, strict=True):
            own += [case.now] * (len(request.got) - len(own))
    raise AssertionError("it does not come about")


def hold(case: Case, max_tokens: int = HIGHEST) -> ExpectedRequest:
    """A request that has its first tokens, and whose next step is held."""
    request = case.submit(tokens(5), max_tokens)
    follow(case, [request], lambda: is_delayed(case))
    assert 1 <= len(request.got) < max_tokens
    return request


def is_delayed(case: Case) -> bool:
    return bool(case.state.pace[S.PACE_DUE_NS] > case.now)


def steps(case: Case) -> int:
    return int(case.state.counts[S.STEPS])


def test_tokens_come_at_the_target_and_not_later(rng: np.random.Generator) -> None:
    case = paced_case()
    request = case.submit(tokens(int(rng.integers(1, 8))), HIGHEST)
    (times,) = follow(case, [request], lambda: bool(request.ended))
    assert len(times) == HIGHEST
    each = (times[-1] - times[0]) / (HIGHEST - 1)
    assert 0.85 * TARGET_NS < each <= TARGET_NS, "the first step, whose time is unknown, is not delayed"
    assert all(time - times[0] <= n * TARGET_NS for n, time in enumerate(times))
    waited = case.counter("paced_ns")
    assert waited == times[-1] - times[0] - (HIGHEST - 1) * TICK_NS, "all time that the steps did not use"


def test_requests_of_different_ages_share_steps() -> None:
    """Four requests that arrive one after another need hardly more steps than one."""
    case, requests = paced_case(rows=4), list[ExpectedRequest]()
    for i in range(4):
        requests.append(case.submit(tokens(5, start=i), HIGHEST))
        for _ in range(33):
            case.turn()
            case.read(0, 1)
    times = follow(case, requests, lambda: all(request.ended for request in requests))
    assert all(len(own) <= HIGHEST for own in times)
    assert steps(case) < 1.5 * HIGHEST


def test_without_a_target_no_step_waits() -> None:
    case = paced_case(tpot_target_ms=0)
    request = case.submit(tokens(5), HIGHEST)
    (times,) = follow(case, [request], lambda: bool(request.ended))
    assert times[-1] - times[0] == (HIGHEST - 1) * TICK_NS and case.counter("paced_ns") == 0


def test_a_prompt_ends_the_wait_at_once() -> None:
    case = paced_case()
    request = hold(case)
    before = len(request.got)
    other = case.submit(tokens(6, start=3), 2, pair=1)
    assert case.turn() >= 0, "the turn that sees the prompt plans its step"
    follow(case, [other], lambda: len(other.got) == 1)
    assert len(request.got) > before, "the waiting request has its token from the same step"


def test_a_cancel_ends_the_wait_at_once() -> None:
    case = paced_case()
    request = hold(case)
    case.cancel(request)
    case.turn(2)
    assert not case.state.requests.status.any() and case.state.counts[S.FREE_COUNT] + case.state.counts[S.CACHED_COUNT] == 64
    assert not case.state.pace[S.PACE_DUE_NS] and case.counter("paced_ns") > 0


@pytest.mark.parametrize(("command", "result"), [(W.COMMAND_DRAIN, 0), (W.COMMAND_STOP, S.STOPPED)])
def test_a_command_ends_the_wait_at_once(command: int, result: int) -> None:
    case = paced_case()
    request = hold(case)
    case.views.control[W.CONTROL_COMMAND] = command
    assert case.turn() == result
    if command == W.COMMAND_DRAIN:
        began, left = case.now, HIGHEST - len(request.got)
        follow(case, [request], lambda: bool(request.ended))
        assert case.now - began == left * TICK_NS, "every turn has a step"
        assert case.turn() == S.DRAINED


def test_the_heartbeat_goes_on_while_a_step_is_held() -> None:
    case = paced_case()
    hold(case)
    seen = []
    while case.turn() == S.NO_BATCH:
        seen.append((int(case.views.engine[W.ENGINE_HEARTBEAT]), int(case.views.engine[W.ENGINE_TIME_NS])))
    assert len(seen) > 10
    assert seen == [(seen[0][0] + i, seen[0][1] + i * TICK_NS) for i in range(len(seen))]


def test_late_requests_catch_up_and_early_ones_wait_at_most_one_pace() -> None:
    case = paced_case()
    late = hold(case)
    case.now += 7 * TARGET_NS
    other = case.submit(tokens(4, start=9), HIGHEST, pair=1)
    for _ in range(6):
        assert case.turn() >= 0, "no step waits while it catches up"
        case.read(0, 1)
    ahead = len(other.got)
    assert ahead >= 4, "the later request gets as many tokens meanwhile"
    (_, times) = follow(case, [late, other], lambda: len(other.got) == ahead + 4)
    gaps = np.diff(times[ahead:])
    assert (gaps <= TARGET_NS).all() and gaps.max() > TARGET_NS / 2


def test_a_slow_reader_does_not_change_the_pace_of_others() -> None:
    """The requests of its queue pair can't continue, so the other requests determine the pace."""
    case = paced_case(cq_entries=4, pairs=2)
    slow = case.submit(tokens(5), HIGHEST)
    own = case.submit(tokens(5, start=2), HIGHEST, pair=1)
    for _ in range(400):
        case.turn()
        case.read(1)
        if case.state.counts[S.STALLED_COUNT] == 1:
            break
    assert len(slow.got) == 0 and case.state.counts[S.STALLED_COUNT] == 1
    before, now = len(own.got), case.now
    while len(own.got) < before + 8:
        case.turn()
        case.read(1)
    assert 0.85 * TARGET_NS < (case.now - now) / 8 <= 1.15 * TARGET_NS
    case.read(0)
    case.turn()
    assert steps(case) and case.bucket >= 0, "it is late, so its step comes immediately"
    case.finish()


def test_steps_that_take_longer_than_the_target_take_the_fast_path() -> None:
    """No step is held then. The same without a pace, and with a pace that steps can keep."""
    fast = {}
    for name, target, jump in (("none", 0, 0), ("kept", 1, 0), ("missed", 1, 2 * TARGET_NS)):
        case = paced_case(tpot_target_ms=target, cq_entries=64)
        request, fast[name] = case.submit(tokens(5), HIGHEST), 0
        while not request.ended:
            case.now += jump if case.bucket >= 0 else 0
            case.turn()
            case.read(0)
            fast[name] += int(case.state.counts[S.FAST_PATH])
        assert (case.counter("paced_ns") > 0) == (name == "kept")
    assert fast["kept"] == 0 < fast["missed"] <= fast["none"] == HIGHEST - 1


def gap_ns(case: Case, *requests: ExpectedRequest) -> float:
    """The mean time between two tokens of the first request, while the other requests run, at the case's pace."""
    follow(case, list(requests), lambda: all(len(request.got) >= 3 for request in requests))
    before = len(requests[0].got)
    (times, *_) = follow(case, list(requests), lambda: len(requests[0].got) >= before + 10)
    return float(np.diff(times[before:]).mean())


@pytest.mark.parametrize("target", [0, 1])
def test_each_class_has_its_pace(target: int) -> None:
    """Best effort has a separate pace, but next to a latency-sensitive request the latter's. Without a target, no request
    waits."""
    case = paced_case(tpot_target_ms=target, flex_tpot_target_ms=3, cq_entries=256, max_model_len=64)
    flex = case.submit(tokens(5), 40, best_effort=1)
    assert 0.9 * 3 * TARGET_NS < gap_ns(case, flex) <= 3 * TARGET_NS
    other = case.submit(tokens(4, start=7), 30, pair=1)
    beside = gap_ns(case, flex, other)
    assert 0.9 * target * TARGET_NS < beside <= max(target * TARGET_NS, TICK_NS)
    follow(case, [flex, other], lambda: bool(other.ended))
    assert case.counter("paced_ns") > 0


def test_when_a_step_is_held_by_the_rule(rng: np.random.Generator) -> None:
    """Random states, and states at each bound, compared with R17 in a few lines."""
    case = paced_case(flex_tpot_target_ms=3, pairs=2, rows=6)
    limits, state, views, seen = case.limits, case.state, as_memoryviews(case.state), set[object]()
    r, pace, inbox, counter = state.requests, state.pace, state.inbox, S.COUNTER_INDEX["paced_ns"]
    for _ in range(1500):
        running = rng.permutation(limits.slots)[: rng.integers(4)].tolist()
        state.running[: len(running)], state.counts[S.RUNNING_COUNT] = running, len(running)
        r.stalled[:] = rng.choice((0, 0, S.STALLED), limits.slots)
        r.prompt_length[:] = rng.integers(1, 9, limits.slots)
        r.length[:] = r.prompt_length + rng.integers(1, 6, limits.slots)
        r.computed[:] = r.length - rng.choice((1, 1, 1, 2, 5), limits.slots)
        r.entry[:, WORD_BEST_EFFORT] = rng.random(limits.slots) < 0.4
        r.first_token_ns[:] = rng.integers(1, 4, limits.slots) * TARGET_NS
        pace[S.PACE_TOKEN_NS], pace[S.PACE_STEP_NS] = rng.integers(3, 8) * TARGET_NS, rng.choice((0, 1, 1, TICK_NS))
        state.counts[S.WAITING_COUNT] = rng.choice((0, 0, 0, 1))
        inbox.command[0] = rng.choice((W.COMMAND_RUN, W.COMMAND_RUN, W.COMMAND_DRAIN))

        free, due = [slot for slot in running if r.stalled[slot] == 0], 0
        needed = NEVER
        for slot in free:
            own = int(limits.best_effort_pace_ns if r.entry[slot, WORD_BEST_EFFORT] else limits.pace_ns)
            by_pace = r.first_token_ns[slot] + (r.length[slot] - r.prompt_length[slot]) * own
            decodes = r.length[slot] - r.computed[slot] == 1
            needed = min(needed, min(by_pace, pace[S.PACE_TOKEN_NS] + own) if decodes else 0)
        assert next_needed(limits, views, 0, 1) == needed
        may = pace[S.PACE_STEP_NS] > 0 and not state.counts[S.WAITING_COUNT] and inbox.command[0] == W.COMMAND_RUN
        due = needed - pace[S.PACE_STEP_NS] if free and may else 0
        now = inbox.now_ns[0] = max(1, due + rng.integers(-1, 2)) if due > 0 else rng.integers(1, 9) * TARGET_NS
        since, before = rng.choice((0, now - 1, now - TICK_NS)), int(state.counters[counter])
        pace[S.PACE_SINCE_NS] = since
        assert holds_step(limits, views, 0, 1) == (now < due)
        assert pace[S.PACE_DUE_NS] == (due if now < due else 0)
        assert pace[S.PACE_SINCE_NS] == ((since or now) if now < due else 0)
        assert state.counters[counter] - before == (now - since if since and now >= due else 0)
        seen.add((bool(now < due), bool(free), bool(may), bool(since), int(np.sign(due - now))))
    assert len(seen) >= 10


def test_the_pace_leaves_a_margin_of_the_target() -> None:
    case = paced_case()
    assert case.limits.pace_ns == case.limits.best_effort_pace_ns == TARGET_NS * 31 // 32
    assert paced_case(flex_tpot_target_ms=2).limits.best_effort_pace_ns == 2 * TARGET_NS * 31 // 32
    assert SchedulerOptions().tpot_target_ms == 0
