"""A cluster for FleetKeeper in simulated time: a test, or a random draw, decides when actors start, serve, end and die."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blinkpy.ray_fleet.actors import Started
from blinkpy.ray_fleet.ray_cluster import ActorLostError
from blinkpy.top.server_sample import ServerSample


@dataclass(eq=False)
class PlayCall:
    """A call of a method. due: time of its end, s; problem: the loss with which it ends."""

    actor: "PlayActor"
    method: str
    due: float
    result: Any = None
    problem: str = ""


@dataclass(eq=False)
class PlayActor:
    """engines: engines of a front end; serves: its process runs; gone: the actor is dead."""

    is_engine: bool
    number: int
    start: int
    address: str
    engines: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    serves: bool = False
    gone: bool = False
    calls: list[PlayCall] = field(default_factory=list)


class PlayCluster:
    """start_s, end_s: durations of a start and an end. problem: problem of the next starts, as in Started; sample: the metrics of
    front ends."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.now = draw, 1000.0
        self.actors: list[PlayActor] = []
        self.start_s: Callable[[], float] = lambda: 2.0
        self.end_s: Callable[[], float] = lambda: 1.0
        self.problem: Callable[[], Started | None] = lambda: None
        self.sample: Callable[[PlayActor], ServerSample] = lambda actor: ServerSample(self.now, {"each_engine_up": 1.0})

    def clock(self) -> float:
        return self.now

    def place_engine(self, number: int, start: int) -> PlayActor:
        return self._place(True, number, start)

    def place_front_end(self, number: int, start: int) -> PlayActor:
        return self._place(False, number, start)

    def _place(self, is_engine: bool, number: int, start: int) -> PlayActor:
        twins = [a for a in self.actors if (a.is_engine, a.number) == (is_engine, number) and not a.gone]
        assert not twins, "two actors have one number"
        address = f"{'e' if is_engine else 'f'}{len(self.actors)}"
        self.actors.append(PlayActor(is_engine, number, start, address))
        return self.actors[-1]

    def call(self, actor: PlayActor, method: str, *arguments: Any) -> PlayCall:
        call = PlayCall(actor, method, float("inf"))
        if method == "start":
            problem = self.problem()
            call.due = self.now + self.start_s()
            call.result = tuple(problem or Started(actor.address, actor.address if actor.is_engine else ""))
            if actor.is_engine:
                actor.lost = arguments[0]
            else:
                actor.engines = arguments[0]
        elif method == "end":
            call.due = self.now + self.end_s()
        elif method == "set_engines":
            call.due = self.now
            actor.engines = arguments[0]
        elif method == "look":
            call.due, call.result = self.now, self.sample(actor)
        if actor.gone:
            call.due, call.problem = self.now, "the actor is gone"
        actor.calls.append(call)
        return call

    def wait(self, calls: Sequence[PlayCall], timeout_s: float) -> list[PlayCall]:
        first = min(call.due for call in calls)
        self.now = min(max(self.now, first), self.now + timeout_s) if first < float("inf") else self.now + timeout_s
        ended = [call for call in calls if call.due <= self.now]
        for call in ended:
            if call.method == "start" and not call.problem and not call.result[2]:
                call.actor.serves = True
            if call.method == "end":
                call.actor.serves = False
        if ended:
            self.now += 0.01  # every action takes time
        return ended

    def result(self, call: PlayCall) -> Any:
        assert call.due <= self.now
        if call.problem:
            raise ActorLostError(call.problem)
        return call.result

    def kill(self, actor: PlayActor) -> None:
        actor.gone, actor.serves = True, False
        for call in actor.calls:
            if call.due > self.now:
                call.due, call.problem = self.now, "the actor was killed"

    def lose_process(self, actor: PlayActor, how: str = "was ended by SIGKILL") -> None:
        """Let an actor's process die; the actor reports the loss."""
        actor.serves = False
        for call in actor.calls:
            if call.method == "wait_end" and call.due > self.now:
                call.due, call.result = self.now, how

    def alive(self, is_engine: bool) -> list[PlayActor]:
        return [actor for actor in self.actors if actor.is_engine == is_engine and not actor.gone]
