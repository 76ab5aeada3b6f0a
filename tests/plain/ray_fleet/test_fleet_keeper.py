"""A fleet is kept as its plan says, in a simulated cluster: starts, deaths, scaling, and the end."""

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.ray_cluster_play import PlayActor, PlayCluster

from blinkpy.config import Config, ConfigError
from blinkpy.ray_fleet.actors import Started
from blinkpy.ray_fleet.fleet_keeper import END_S, HURRY_S, START_S, FleetKeeper
from blinkpy.ray_fleet.fleet_plan import EnginesPlan, FleetPlan, FrontEndsPlan
from blinkpy.ray_fleet.scaling_rule import ScaleTargets
from blinkpy.top.server_sample import ServerSample


class Played:
    """A keeper in a simulated cluster. load: requests that run, which front ends show."""

    def __init__(self, draw: random.Random, least: int = 1, most: int = 3, front_ends: int = 1, **scale: Any) -> None:
        targets = ScaleTargets(**{"requests": 10, "free_pages": 0.0, "interval_s": 1.0, "up_s": 5.0, "down_s": 30.0, **scale})
        plan = FleetPlan(Config(), EnginesPlan(least, most), FrontEndsPlan(front_ends), targets)
        self.cluster, self.load, self.urls = PlayCluster(draw), 0.0, list[str]()
        self.cluster.sample = self.sample
        self.keeper = FleetKeeper(plan, self.cluster, self.urls.extend, self.cluster.clock)

    def sample(self, actor: PlayActor) -> ServerSample:
        serving = [one for one in self.cluster.actors if one.is_engine and one.serves]
        up = sum(one.address in actor.engines for one in serving)
        return ServerSample(self.cluster.now, {"each_engine_up": float(up), "engine_requests_running": self.load})

    def run(self, seconds: float) -> None:
        until = self.cluster.now + seconds
        while self.cluster.now < until:
            before = self.cluster.now
            self.keeper.turn()
            self.cluster.now = max(self.cluster.now, before + 0.001)

    @property
    def front_end(self) -> PlayActor:
        (only,) = self.cluster.alive(False)
        return only

    def serving(self) -> list[str]:
        return sorted(actor.address for actor in self.cluster.alive(True) if actor.serves)


@pytest.fixture(autouse=True)
def short_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.ray_fleet.fleet_keeper.time.sleep", lambda seconds: None)


@pytest.fixture
def draw(seed: int) -> random.Random:
    return random.Random(seed)


def test_all_members_are_started_and_reported(draw: random.Random) -> None:
    played = Played(draw, least=2, front_ends=2)
    played.run(1.5)
    assert not played.urls, "nothing serves yet"
    played.run(2)
    assert len(played.serving()) == 2
    assert played.urls == [actor.address for actor in played.cluster.alive(False)]
    assert all(sorted(front_end.engines) == played.serving() for front_end in played.cluster.alive(False))


@pytest.mark.parametrize("whole_actor", [False, True])
def test_an_engine_that_died_is_left_out_and_started_again(
    draw: random.Random, whole_actor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(draw, least=2)
    played.run(5)
    victim = played.cluster.alive(True)[0]
    (played.cluster.kill if whole_actor else played.cluster.lose_process)(victim)
    played.run(0.3)
    assert played.front_end.engines == played.serving() != [victim.address]
    assert "engine 0 lost its actor" in caplog.text if whole_actor else "engine 0 was ended by SIGKILL" in caplog.text
    assert "restart 1 in 0.5 s" in caplog.text
    played.run(5)
    assert len(played.serving()) == 2 and sorted(played.front_end.engines) == played.serving()
    assert played.cluster.alive(True)[-1].lost == [victim.address], "it may still hold its GPU"
    assert played.keeper.restarts == 1


def test_a_front_end_that_died_is_started_again_with_its_engines(draw: random.Random) -> None:
    played = Played(draw)
    played.run(5)
    old = played.front_end
    played.cluster.kill(old)
    played.run(5)
    assert played.front_end is not old
    assert played.front_end.serves and played.front_end.engines == played.serving()


def test_restarts_come_at_growing_intervals(draw: random.Random) -> None:
    played = Played(draw)
    played.run(5)
    played.cluster.problem = lambda: Started(problem="the GPU is gone", hopeless=True)
    played.cluster.lose_process(played.cluster.alive(True)[0])
    played.run(600)
    starts = [actor.start for actor in played.cluster.actors if actor.is_engine]
    assert 10 <= len(starts) <= 18, "not again and again"
    played.cluster.problem = lambda: None
    played.run(70)
    assert len(played.serving()) == 1


def test_a_member_that_can_never_start_ends_the_fleet(draw: random.Random) -> None:
    played = Played(draw)
    played.cluster.problem = lambda: Started(problem="no such model", hopeless=True)
    with pytest.raises(ConfigError, match="no such model"):
        played.run(10)


@pytest.mark.parametrize("later_s", [0.0, 0.5])
def test_members_started_beside_a_failed_one_end_in_order(draw: random.Random, later_s: float) -> None:
    """later_s: time between the errors of the two engines."""
    played, engines = Played(draw, least=2), iter((0.0, later_s))
    place = played.cluster.place_engine

    def refused(number: int, start: int) -> PlayActor:
        problem, due = Started(problem="too few pages", hopeless=True), 2.0 + next(engines)
        played.cluster.problem, played.cluster.start_s = lambda: problem, lambda: due
        return place(number, start)

    played.cluster.place_engine = refused  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="too few pages"):
        played.run(10)
    played.keeper.end(lambda: False)
    assert all(actor.gone for actor in played.cluster.actors)
    ended = [actor.is_engine for actor in played.cluster.actors if "end" in [call.method for call in actor.calls]]
    assert ended == [False, True], "the front end, then the engine whose error came first"


def test_a_start_that_takes_too_long_is_given_up(draw: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    played = Played(draw)
    played.cluster.start_s = lambda: 1e9
    played.run(40)
    assert "engine 0 has been starting for 30 s" in caplog.text
    played.cluster.start_s = lambda: 1.0
    played.run(START_S)
    assert "failed to start within" in caplog.text
    assert len(played.serving()) == 1


def test_the_fleet_follows_its_load(draw: random.Random) -> None:
    played = Played(draw)
    played.run(10)
    played.load = 25
    played.run(20)
    assert len(played.serving()) == 3 and sorted(played.front_end.engines) == played.serving()
    first = played.cluster.alive(True)[0]
    played.load = 3
    played.run(25)
    assert len(played.serving()) == 3, "load may come back"
    played.run(20)
    assert played.serving() == played.front_end.engines == [first.address], "those that came last go"
    assert [call.method for actor in played.cluster.actors[-2:] for call in actor.calls].count("end") == 2, "in order"


def test_without_answers_nothing_changes(draw: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    played = Played(draw)
    played.run(5)
    played.load = 25
    played.run(20)
    played.load = 3
    played.run(10)
    played.cluster.sample = lambda actor: ServerSample(played.cluster.now, problem="gone: timed out")
    played.run(200)
    assert len(played.serving()) == 3
    assert caplog.text.count("front end 0: gone: timed out") == 1
    played.cluster.sample = played.sample
    played.run(20)
    assert len(played.serving()) == 3, "nobody knows what the load was meanwhile"
    played.run(30)
    assert len(played.serving()) == 1


def test_slow_answers_are_answers(draw: random.Random) -> None:
    """Each takes longer than it is from look to look."""
    played = Played(draw, interval_s=0.2)
    played.run(10)
    call = played.cluster.call

    def slow(actor: PlayActor, method: str, *arguments: Any) -> Any:
        begun = call(actor, method, *arguments)
        begun.due += 0.7 if method == "look" else 0.0
        return begun

    played.cluster.call = slow  # type: ignore[method-assign]
    played.load = 25
    played.run(20)
    assert len(played.serving()) == 3
    played.load = 3
    played.run(50)
    assert len(played.serving()) == 1


def test_the_end_is_in_order_and_has_a_bound(draw: random.Random) -> None:
    played = Played(draw, least=3, most=3, front_ends=2)
    played.run(10)
    ends = dict[str, float]()
    call = played.cluster.call

    def noted(actor: PlayActor, method: str, *arguments: Any) -> Any:
        if method == "end":
            ends[actor.address] = played.cluster.now
        return call(actor, method, *arguments)

    played.cluster.call = noted  # type: ignore[method-assign]
    stuck = played.cluster.alive(True)[1]
    played.cluster.end_s = lambda: 1e9 if len(ends) == 4 else 1.0
    began = played.cluster.now
    played.keeper.end(lambda: False)
    assert max(at for name, at in ends.items() if name[0] == "f") + 1 <= min(at for name, at in ends.items() if name[0] == "e")
    assert not played.cluster.alive(True) + played.cluster.alive(False), stuck
    assert played.cluster.now - began < Config().frontend.shutdown_s + END_S + 5


def test_a_second_signal_hurries_the_end(draw: random.Random) -> None:
    played = Played(draw, least=2)
    played.run(10)
    played.cluster.end_s = lambda: 1e9
    began = played.cluster.now
    played.keeper.end(lambda: True)
    assert not played.cluster.alive(True) + played.cluster.alive(False)
    assert played.cluster.now - began < 2 * HURRY_S + 2


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
def test_any_deaths_at_any_time(seed: int) -> None:
    """Random loads, deaths, failing and slow starts: the size keeps to its bounds, lists name what serves, and all comes back."""
    for number in range(15):
        draw = random.Random(seed * 100 + number)
        played = Played(draw, least=draw.randint(1, 2), most=4, front_ends=draw.randint(1, 2), down_s=10.0)
        cluster = played.cluster
        played.run(10)
        cluster.start_s = lambda draw=draw: draw.choice((0.1, 2.0, 30.0))
        cluster.end_s = lambda draw=draw: draw.choice((0.1, 5.0, 100.0))
        cluster.problem = lambda draw=draw: Started(problem="no luck") if draw.random() < 0.2 else None
        for _ in range(60):
            played.load = draw.choice((0.0, 15.0, 35.0))
            alive = cluster.alive(draw.random() < 0.8)
            if alive and draw.random() < 0.4:
                (cluster.kill if draw.random() < 0.5 else cluster.lose_process)(draw.choice(alive))
            played.run(draw.choice((0.1, 2.0, 20.0)))
            least, most = played.keeper._bounds
            assert least <= played.keeper.size <= most
            listed = set(played.keeper.addresses)
            assert all(set(one.engines) == listed for one in cluster.alive(False) if one.serves)
        cluster.start_s, cluster.problem = (lambda: 1.0), (lambda: None)
        played.load = 100.0
        played.run(200)
        assert len(played.keeper.addresses) == 4 and all(one.serves for one in cluster.alive(False))
        assert set(played.keeper.addresses) == set(played.serving())
        played.keeper.end(lambda: False)
        assert not cluster.alive(True) + cluster.alive(False)
