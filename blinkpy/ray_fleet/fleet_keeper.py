"""Keeps a fleet as planned: places actors, restarts dead ones, and adapts the number of engines to the load.

It waits for calls of actors' methods, so it notices a death immediately. `start` returns when the actor's
process serves, `wait_end` when it has stopped serving. Both fail if the actor is lost.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from blinkpy.config import ConfigError
from blinkpy.dpu.supervisor import END_GRACE_S
from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.kept_process import pause_before_start
from blinkpy.process_exit import Signals, Stopped
from blinkpy.ray_fleet.actors import Started
from blinkpy.ray_fleet.fleet_plan import FleetPlan, read_plan
from blinkpy.ray_fleet.ray_cluster import ActorLostError, RayCluster
from blinkpy.ray_fleet.scaling_rule import ScaleHistory, fleet_gauges, wanted_engines
from blinkpy.serving.engine_process import ENGINE_STOP_S
from blinkpy.serving.kept_engine import PAUSES_S
from blinkpy.tool_options import RayOptions
from blinkpy.top.server_sample import ServerSample

WAIT_S = 0.25  # maximum wait for calls, between two checks for signals
PLACE_S = 30.0  # time after which an actor without a node is logged
START_S = 1800.0  # maximum duration of a start, including the wait for Ray's autoscaler
END_S = 3 * END_GRACE_S + ENGINE_STOP_S  # in addition to shutdown_s, before an actor that should end is killed
HURRY_S = 3.0  # the same after a second signal
SILENT_S = 5.0  # earlier samples are discarded if no front end answers for this time and that of three samples
LOST = 16  # number of lost engines whose segments are remembered

STARTING, SERVING, ENDING, PAUSING = "starting", "serving", "ending", "pausing"

logger = logging.getLogger("blinkpy.ray")


class Cluster(Protocol):
    """The part of RayCluster that a keeper uses."""

    def place_engine(self, number: int, start: int) -> Any: ...
    def place_front_end(self, number: int, start: int) -> Any: ...
    def call(self, actor: Any, method: str, *arguments: Any) -> Any: ...
    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]: ...
    def result(self, call: Any) -> Any: ...
    def kill(self, actor: Any) -> None: ...


@dataclass(eq=False)
class Member:
    """An engine or a front end, and its actor.

    call: start, wait_end or end.
    since: start of the phase, in s.
    address, segment: see Started.
    starts: number of starts; pause_s: pause before the last one.
    due: time of the next start, s.
    logged: whether the log has reported that its start takes long.
    look: a front end's open call of look().
    """

    is_engine: bool
    number: int
    actor: Any = None
    call: Any = None
    phase: str = PAUSING
    since: float = 0.0
    address: str = ""
    segment: str = ""
    starts: int = 0
    pause_s: float = 0.0
    due: float = 0.0
    logged: bool = False
    look: Any = None

    def __str__(self) -> str:
        return f"{'engine' if self.is_engine else 'front end'} {self.number}"


@dataclass
class Looks:
    """The last metrics of each front end, by number, and the previous ones."""

    now: dict[int, ServerSample] = field(default_factory=dict)
    before: dict[int, ServerSample] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)  # as logged


class FleetKeeper:
    """Starts, watches and scales a fleet.

    on_ready: called once with the front ends' URLs, when all of them and the minimum number of engines serve.
    clock: returns s.
    restarts: number of starts after a death.
    """

    def __init__(
        self,
        plan: FleetPlan,
        cluster: Cluster,
        on_ready: Callable[[list[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._plan = plan
        self._cluster = cluster
        self._clock = clock
        self._on_ready: Callable[[list[str]], None] | None = on_ready
        self._targets = plan.scale
        self._bounds = plan.engines.least, plan.most
        self.front_ends = [Member(False, number) for number in range(plan.front_ends.number)]
        self.engines = [Member(True, number) for number in range(plan.engines.least)]
        self._history = ScaleHistory(plan.engines.least)
        self._lost: deque[str] = deque(maxlen=LOST)
        self._list_calls: list[Any] = []  # open calls of set_engines
        self._looks = Looks()
        self._looked_at = 0.0  # time of the last samples, s
        self._answered_at = 0.0  # time of the last sample that a front end answered, s
        self.restarts = 0

    # ---- the fleet ---------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The addresses of the serving engines."""
        return [engine.address for engine in self.engines if engine.phase == SERVING]

    @property
    def size(self) -> int:
        """Number of engines that are not ending."""
        return sum(engine.phase != ENDING for engine in self.engines)

    def turn(self) -> None:
        """Wait briefly for events, and react. Raises ConfigError if a member can never start."""
        now = self._clock()
        for member in self._members():
            if member.phase == PAUSING and now >= member.due:
                self._start(member)
        self._wait(WAIT_S)
        now = self._clock()
        for member in self._members():
            self._check_time(member, now)
        if self._on_ready is None and now - self._looked_at >= self._targets.interval_s:
            self._looked_at = now
            self._scale(now)
            self._look()
        ready = all(front_end.phase == SERVING for front_end in self.front_ends)
        if self._on_ready is not None and ready and len(self.addresses) >= self._plan.engines.least:
            on_ready, self._on_ready = self._on_ready, None
            on_ready([front_end.address for front_end in self.front_ends])

    def end(self, hurry: Callable[[], bool]) -> None:
        """End all members: front ends finish their requests, then engines end. hurry: returns whether they
        get only HURRY_S.
        """
        self._on_ready = None  # after this, a failed start no longer ends the fleet
        for members in (self.front_ends.copy(), self.engines.copy()):
            for member in members:
                if member.phase in (STARTING, SERVING):
                    self._end(member)
                elif member.phase == PAUSING:
                    self._forget(member)
            hurried_at: float | None = None
            while any(member.phase == ENDING for member in members):
                self._wait(WAIT_S)
                now = self._clock()
                if hurry() and hurried_at is None:
                    hurried_at = now
                for member in members:
                    if hurried_at is not None and now - hurried_at > HURRY_S and member.phase == ENDING:
                        self._forget(member)
                    self._check_time(member, now)

    def _members(self) -> list[Member]:
        return [*self.front_ends, *self.engines]

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> None:
        """Wait for calls, and react to finished ones."""
        members = {member.call: member for member in self._members() if member.call is not None}
        looks = {member.look: member for member in self.front_ends if member.look is not None}
        calls = [*members, *looks, *self._list_calls]
        if not calls:
            time.sleep(timeout_s)
            return
        for call in self._cluster.wait(calls, timeout_s):
            try:
                result, problem = self._cluster.result(call), ""
            except ActorLostError as error:
                result, problem = None, str(error)
            if call in members:
                self._ended(members[call], result, problem)
            elif call in looks:
                looks[call].look = None
                sample = result if problem == "" else ServerSample(self._clock(), problem=problem)
                self._looks.now[looks[call].number] = sample
            else:
                self._list_calls.remove(call)
                if problem:  # wait_end() also reports its end
                    logger.warning("a front end rejected its list of engines: %s", problem)

    def _ended(self, member: Member, result: Any, problem: str) -> None:
        """React to the end of a call, according to the member's phase."""
        member.call = None
        if member.phase == STARTING and not problem:
            self._started(member, Started(*result))
        elif member.phase == STARTING:
            self._died(member, f"failed to start: {problem}")
        elif member.phase == SERVING:
            self._died(member, f"lost its actor: {problem}" if problem else str(result))
        elif member.phase == ENDING:
            logger.info("%s has ended%s", member, f": {problem}" if problem else "")
            self._forget(member)

    def _start(self, member: Member) -> None:
        place = self._cluster.place_engine if member.is_engine else self._cluster.place_front_end
        member.actor = place(member.number, member.starts)
        self._enter(member, STARTING)
        member.starts += 1
        member.logged = False
        member.call = self._cluster.call(member.actor, "start", list(self._lost) if member.is_engine else self.addresses)

    def _started(self, member: Member, started: Started) -> None:
        if started.problem:
            if started.hopeless and self._on_ready is not None:
                raise ConfigError(f"{member}: {started.problem}")
            self._died(member, f"failed to start: {started.problem}")
            return
        seconds = self._clock() - member.since
        member.address, member.segment = started.address, started.segment
        self._enter(member, SERVING)
        member.call = self._cluster.call(member.actor, "wait_end")
        logger.info("%s is ready after %.1f s at %s", member, seconds, member.address)
        if member.is_engine:
            self._notify()
        else:
            self._notify_one(member)

    def _died(self, member: Member, how: str) -> None:
        """Schedule a restart after a pause."""
        now = self._clock()
        served_s = now - member.since if member.phase == SERVING else 0.0
        self._cluster.kill(member.actor)
        was_serving = member.phase == SERVING
        if member.is_engine and was_serving:
            self._lost.append(member.segment)
        member.pause_s = pause_before_start(member.pause_s, served_s, PAUSES_S)
        member.due = now + member.pause_s
        self._enter(member, PAUSING)
        self.restarts += 1
        logger.error("%s %s; restart %d in %g s", member, how, member.starts, member.pause_s)
        if member.is_engine and was_serving:
            self._notify()

    def _end(self, member: Member) -> None:
        """Ask a member to shut down."""
        listed = member.is_engine and member.phase == SERVING
        self._enter(member, ENDING)
        if listed:
            self._notify()
        member.call = self._cluster.call(member.actor, "end")

    def _forget(self, member: Member) -> None:
        """Remove a member that has ended."""
        if member.actor is not None:
            self._cluster.kill(member.actor)
        self._enter(member, PAUSING)
        member.due = float("inf")
        if member.is_engine:
            self.engines.remove(member)

    def _enter(self, member: Member, phase: str) -> None:
        member.phase = phase
        member.since = self._clock()
        member.call = None
        member.look = None

    def _check_time(self, member: Member, now: float) -> None:
        """Report or end a member whose phase takes too long."""
        spent = now - member.since
        if member.phase == STARTING:
            if spent > PLACE_S and not member.logged:
                member.logged = True
                logger.warning(
                    "%s has been starting for %.0f s: it is loading, or no node has the resources (see `ray status`)",
                    member,
                    spent,
                )
            if spent > START_S:
                self._died(member, f"failed to start within {START_S:.0f} s")
        elif member.phase == ENDING and spent > self._plan.config.frontend.shutdown_s + END_S:
            logger.error("%s did not exit in time and was killed", member)
            self._forget(member)

    def _notify(self) -> None:
        """Send the list of engines to all front ends."""
        for front_end in self.front_ends:
            self._notify_one(front_end)

    def _notify_one(self, front_end: Member) -> None:
        if front_end.phase == SERVING:
            self._list_calls.append(self._cluster.call(front_end.actor, "set_engines", self.addresses))

    # ---- scale -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for front_end in self.front_ends:
            if front_end.phase == SERVING and front_end.look is None:
                front_end.look = self._cluster.call(front_end.actor, "look")

    def _scale(self, now: float) -> None:
        """Adapt the number of engines to the last metrics."""
        looks = self._looks
        for number, sample in looks.now.items():
            if sample.problem != looks.problems.get(number, ""):
                logger.warning("front end %d: %s", number, sample.problem or "metrics available again")
            looks.problems[number] = sample.problem
        if self._bounds[0] == self._bounds[1]:
            return
        gauges = fleet_gauges(looks.now, looks.before)
        looks.before, looks.now = {**looks.before, **looks.now}, {}
        if gauges is None:
            if now - self._answered_at > SILENT_S + 3 * self._targets.interval_s:
                self._history = self._history.interrupted()
            return
        self._answered_at = now
        size = self.size
        wanted = wanted_engines(gauges, now, self._history, self._targets, self._bounds)
        self._history = self._history.after(gauges, now, wanted, self._targets)
        if wanted != size:
            logger.info(
                "scaling from %d to %d engines: %s",
                size,
                wanted,
                " ".join(f"{k}={v:g}" for k, v in gauges._asdict().items() if v),
            )
        for _ in range(size, wanted):
            number = next(n for n in range(len(self.engines) + 1) if n not in {engine.number for engine in self.engines})
            self.engines.append(Member(True, number, due=now))
        for _ in range(wanted, size):
            last = max((engine for engine in self.engines if engine.phase != ENDING), key=lambda engine: engine.number)
            if last.phase == PAUSING:
                self._forget(last)
            else:
                self._end(last)


# `blinkpy ray up CONFIG`: a fleet in a Ray cluster, for as long as this process runs.


def run_ray(options: RayOptions) -> int:
    """Run the fleet until a signal. Returns the exit code. Raises ConfigError."""
    plan = read_plan(options.path)
    start_logging("ray", plan.config.frontend.log_level, plan.config.watch.log_format)
    name = plan.config.model.served_model_name or plan.config.model.model

    def ready(urls: list[str]) -> None:
        for url in urls:
            print(f"blinkpy serves {name} on {url} (Ctrl-C ends it)", flush=True)

    with contextlib.suppress(Stopped), contextlib.ExitStack() as stack:
        cluster = RayCluster(plan, options.address)
        stack.callback(cluster.close)
        signals = stack.enter_context(Signals().caught())  # after Ray's own handlers
        keeper = FleetKeeper(plan, cluster, ready)
        stack.callback(keeper.end, lambda: signals.count > 1)
        while True:
            signals.check()
            keeper.turn()
    return 0
