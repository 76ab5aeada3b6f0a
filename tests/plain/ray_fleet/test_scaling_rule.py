"""How many engines a fleet should have: bounds, no flapping, more load never means fewer, and simulated days of load."""

import math
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blinkpy.ray_fleet.scaling_rule import FleetGauges, ScaleHistory, ScaleTargets, fleet_gauges, needed_engines, wanted_engines
from blinkpy.top.server_sample import ServerSample, parse_metrics

TARGETS = st.builds(
    ScaleTargets,
    requests=st.integers(0, 100),
    waiting_tokens=st.integers(0, 5000),
    free_pages=st.floats(0, 0.9),
    ttft_ms=st.integers(0, 5000),
    up_s=st.floats(0, 60),
    down_s=st.floats(1, 600),
)
GAUGES = st.builds(
    FleetGauges,
    engines=st.integers(0, 64),
    running=st.floats(0, 1e4),
    waiting=st.floats(0, 1e4),
    waiting_tokens=st.floats(0, 1e6),
    free_pages=st.floats(0, 1),
    ttft_s=st.none() | st.floats(0, 100),
)
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
BOUNDS = st.tuples(st.integers(1, 64), st.integers(0, 63)).map(lambda pair: (pair[0], min(64, pair[0] + pair[1])))
TIME_STEPS = st.floats(0.1, 100)
LOOKS = st.lists(st.tuples(TIME_STEPS, GAUGES), max_size=30)


def play(looks: list[tuple[float, FleetGauges]], targets: ScaleTargets, bounds: tuple[int, int]) -> list[tuple[float, int]]:
    """(s, size) behind each look, from the least size on, with all of the engines at the same time."""
    now, history, sizes = 1000.0, ScaleHistory(bounds[0]), [(1000.0, bounds[0])]
    for pause, gauges in looks:
        now += pause
        gauges = gauges._replace(engines=history.size)
        wanted = wanted_engines(gauges, now, history, targets, bounds)
        history = history.after(gauges, now, wanted, targets)
        assert history.size == wanted
        sizes.append((now, wanted))
    return sizes


def check_sizes(sizes: list[tuple[float, int]], targets: ScaleTargets, bounds: tuple[int, int]) -> None:
    assert all(bounds[0] <= size <= bounds[1] for _, size in sizes)
    changed_at = -math.inf
    for (_, before), (now, size) in pairwise(sizes):
        if size > before:
            assert now - changed_at >= targets.up_s
        elif size < before:
            assert now - changed_at >= targets.down_s
        if size != before:
            changed_at = now


@RELAXED
@given(LOOKS, TARGETS, BOUNDS)
def test_the_size_keeps_to_its_bounds_and_does_not_flap(
    looks: list[tuple[float, FleetGauges]], targets: ScaleTargets, bounds: tuple[int, int]
) -> None:
    check_sizes(play(looks, targets, bounds), targets, bounds)


@RELAXED
@given(st.lists(st.integers(0, 8), min_size=10, max_size=60), st.integers(0, 4), st.integers(1, 8))
def test_the_size_does_not_flap_under_a_load_that_comes_and_goes(loads: list[int], up_s: int, down_s: int) -> None:
    """A look each second, and an engine for each request: many more changes than under loads without any bound."""
    targets = ScaleTargets(1, 0, 0.0, 0, up_s=up_s, down_s=down_s)
    looks = [(1.0, FleetGauges(0, load, 0, 0, 1.0, None)) for load in loads for _ in range(1 + load % 4)]
    check_sizes(play(looks, targets, (1, 8)), targets, (1, 8))


@RELAXED
@given(LOOKS, GAUGES, GAUGES, TARGETS, BOUNDS)
def test_more_load_never_means_fewer_engines(
    looks: list[tuple[float, FleetGauges]], one: FleetGauges, other: FleetGauges, targets: ScaleTargets, bounds: tuple[int, int]
) -> None:
    now, history = 1000.0, ScaleHistory(bounds[0])
    for pause, gauges in looks:
        now += pause
        history = history.after(gauges, now, wanted_engines(gauges, now, history, targets, bounds), targets)
    low = FleetGauges(one.engines, *map(min, one[1:4], other[1:4]), max(one.free_pages, other.free_pages), None)
    high = FleetGauges(one.engines, *map(max, one[1:4], other[1:4]), min(one.free_pages, other.free_pages), None)
    times = sorted(time for time in (one.ttft_s, other.ttft_s) if time is not None)
    if len(times) == 2:
        low, high = low._replace(ttft_s=times[0]), high._replace(ttft_s=times[1])
    assert needed_engines(low, targets) <= needed_engines(high, targets)
    now += 1
    assert wanted_engines(low, now, history, targets, bounds) <= wanted_engines(high, now, history, targets, bounds)


@RELAXED
@given(GAUGES, TARGETS, BOUNDS)
def test_a_steady_load_gets_what_it_needs_and_keeps_it(
    gauges: FleetGauges, targets: ScaleTargets, bounds: tuple[int, int]
) -> None:
    """Without a target for time: that depends on the size, and the search may repeat."""
    targets = ScaleTargets(targets.requests, targets.waiting_tokens, 0.0, 0, up_s=targets.up_s, down_s=targets.down_s)
    pause = max(targets.up_s, targets.down_s / 3, 0.1)
    sizes = [size for _, size in play([(pause, gauges)] * 12, targets, bounds)]
    needed = min(max(needed_engines(gauges, targets), bounds[0]), bounds[1])
    assert sizes[1:] == [needed] * 12, "at once, and never again"


def gauges(**changes: Any) -> FleetGauges:
    return FleetGauges(**{**FleetGauges(2, 0, 0, 0, 1.0, None)._asdict(), **changes})


@pytest.mark.parametrize(
    ("targets", "load", "needed"),
    [
        ({"requests": 10}, {"running": 15, "waiting": 5}, 2),
        ({"requests": 10}, {"running": 15, "waiting": 6}, 3),
        ({"waiting_tokens": 1000}, {"waiting_tokens": 3001}, 4),
        ({"free_pages": 0.25}, {"free_pages": 0.25}, 2),
        ({"free_pages": 0.25}, {"free_pages": 0.2}, 3),
        ({"free_pages": 0.25}, {"free_pages": 1.0}, 0),
        ({"ttft_ms": 500}, {"ttft_s": 0.6}, 3),
        ({"ttft_ms": 500}, {"ttft_s": 0.4}, 2),
        ({"ttft_ms": 500}, {"ttft_s": 0.2}, 0),
        ({"ttft_ms": 500}, {"ttft_s": None}, 0),
        ({"requests": 10, "ttft_ms": 500}, {"running": 41, "ttft_s": 0.6}, 5),
    ],
)
def test_what_each_target_asks_for(targets: dict[str, Any], load: dict[str, Any], needed: int) -> None:
    none = {"requests": 0, "waiting_tokens": 0, "free_pages": 0.0, "ttft_ms": 0}
    assert needed_engines(gauges(**load), ScaleTargets(**{**none, **targets})) == needed


def test_no_engine_goes_while_one_still_starts_or_while_nothing_was_seen() -> None:
    targets, bounds = ScaleTargets(requests=10, down_s=10), (1, 4)
    history = ScaleHistory(3)
    for now in range(12):
        history = history.after(gauges(), float(now), 3, targets)
    assert wanted_engines(gauges(engines=3), 12.0, history, targets, bounds) == 1
    assert wanted_engines(gauges(engines=2), 12.0, history, targets, bounds) == 3
    assert wanted_engines(gauges(engines=3), 12.0, history.interrupted(), targets, bounds) == 3
    peak = history.after(gauges(engines=3, running=15), 12.0, 3, targets)
    assert wanted_engines(gauges(engines=3), 13.0, peak, targets, bounds) == 2, "as many as the peak of the time needs"


def test_a_simulated_day(seed: int) -> None:
    """Load that swings over a day, with noise and bursts, on engines that take minutes to start. The rule makes few changes, and
    the engines are hardly ever overloaded."""
    draw, targets, bounds = random.Random(seed), ScaleTargets(requests=64, interval_s=5, up_s=30, down_s=600), (1, 8)
    history, serving, starting = ScaleHistory(1), 1, list[float]()
    changes = over = looks = 0
    for now in range(0, 86_400, 5):
        level = 200 * (1 - math.cos(now / 86_400 * 2 * math.pi))
        load = max(0.0, draw.gauss(level, 8)) + (150 if now % 14_400 < 120 else 0)
        starting = [at for at in starting if at > now]
        serving = history.size - len(starting)
        look = gauges(engines=serving, running=load, free_pages=1.0)
        wanted = wanted_engines(look, float(now), history, targets, bounds)
        changes += wanted != history.size
        if wanted > history.size:
            starting += [now + 120.0] * (wanted - history.size)
        history = history.after(look, float(now), wanted, targets)
        over += load > 64 * serving
        looks += 1
        assert len(history.seen) <= 600 / 5 + 2, "what is kept in mind has a bound"
    assert changes <= 60
    assert over < looks * 0.03


# ---- from the gauges of front ends --------------------------------------------------------------------------------------

TEXT = """
blinkpy_engine_up 1
blinkpy_each_engine_up{engine="a"} 1
blinkpy_each_engine_up{engine="b"} 1
blinkpy_each_engine_up{engine="c"} 0
blinkpy_engine_requests_running 7
blinkpy_engine_requests_waiting 3
blinkpy_waiting_requests{worker="0"} 2
blinkpy_waiting_requests{worker="1"} 1
blinkpy_engine_prompt_tokens_total 1000
blinkpy_engine_requests_accepted_total 10
blinkpy_engine_pages_free 10
blinkpy_engine_pages_cached 20
blinkpy_engine_pages_held 70
"""


def test_gauges_are_those_of_all_front_ends() -> None:
    def sample(ttft: dict[float, float], text: str = TEXT) -> ServerSample:
        found = parse_metrics(text, 1.0)
        found.buckets["time_to_first_token_seconds"] = ttft
        return found

    before = {0: sample({0.1: 5, 1.0: 5, math.inf: 5})}
    now = {0: sample({0.1: 15, 1.0: 15, math.inf: 15}), 1: sample({0.1: 0, 1.0: 10, math.inf: 10})}
    now[1].values["engine_pages_held"] = 90.0  # it looked a little later
    now[2] = ServerSample(1.0, problem="gone")
    found = fleet_gauges(now, before)
    assert found is not None
    assert (found.engines, found.running, found.waiting, found.waiting_tokens) == (2, 7, 3 + 6, 900)
    assert found.free_pages == pytest.approx(30 / 120)
    assert found.ttft_s == pytest.approx(0.1 + 0.9 * 0.9), "of the slower one"
    assert fleet_gauges({2: now[2]}, {}) is None
    assert fleet_gauges({}, {}) is None
    empty = fleet_gauges({0: parse_metrics("blinkpy_engine_up 0\n", 1.0)}, {})
    assert empty == FleetGauges(0, 0, 0, 0, 1.0, None)
