"""Several engines behind one front end: what a worker uses in place of one EngineLink.

Each engine has a link of its own, with its queue pair, its heartbeat and its reconnection; a placement says which engine gets a
request. When a link is lost, or an engine takes nothing any more, what it had in flight goes on in another engine
(blinkpy.dpu.fleet.continuation). What the old engine still writes goes nowhere: its queue pair is closed, and the next owner
of the pair has another epoch.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blinkpy.dpu.api_errors import ApiError, bad_request, busy, shutting_down, unavailable
from blinkpy.dpu.engine_link import CONNECT_POLL_S, Submission, start_thread
from blinkpy.dpu.fleet.continuation import NoContinuationError, Pieces, continuation
from blinkpy.dpu.fleet.engine_places import EngineEntry, EnginePlaces
from blinkpy.dpu.fleet.fleet_link import FleetLink
from blinkpy.dpu.fleet.flight import Flight
from blinkpy.dpu.fleet.placement import EngineLoad, Placement
from blinkpy.dpu.fleet.placement_rules import Rule, prefix
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.link.link_thread import LinkThread
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.watched_tasks import WatchedTasks
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import ENGINE_STATE, STATE_DRAINING, STATE_READY, STATE_STARTING

MOVE_POLL_S = 0.02  # between two looks for an engine that takes what has lost its own
MOVES, WATCH = "the moves between engines", "the watch over the list of engines"  # in the log

logger = logging.getLogger("blinkpy.frontend")

Watch = Callable[[Callable[[Sequence[EngineEntry]], None]], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class Move:
    """A generation that has lost its engine. error: what it ends with where no other one takes it. work: what continues it."""

    generation: Generation
    error: ApiError
    work: Submission | None = None
    grammar: ByteAutomaton | None = None


class Fleet:
    """See the module. It has the methods of EngineLink that a worker uses. pieces: see continuation. most_moves: of one
    generation; move_timeout_s: the longest that all of its pauses together may take. rule: of the placement. watch: where the
    engines may change, what calls the function that it gets with those that there are now; it never ends."""

    def __init__(
        self,
        engines: Sequence[EngineEntry],
        metrics: Metrics,
        pieces: Pieces = lambda: None,
        most_moves: int = 3,
        move_timeout_s: float = 30.0,
        rule: Rule = prefix,
        watch: Watch | None = None,
        thread: LinkThread | None = None,
    ):
        self._thread = thread or LinkThread()
        self._metrics, self.pieces, self._rule, self._watch = metrics, pieces, rule, watch
        self._most_moves, self._move_timeout_s = most_moves, move_timeout_s
        self.on_room: Callable[[], None] = lambda: None
        self.on_failure: Callable[[ApiError], None] = lambda error: None
        self._gauges: dict[str, dict[int, float]] = {}
        self._moving: list[Move] = []  # in order
        self._move_timer: asyncio.TimerHandle | None = None
        self._instances = [0] * len(engines)
        self._places = EnginePlaces(self._link, engines)
        self.links = self._places.links

    def _link(self, index: int, one: EngineEntry) -> FleetLink:
        link = FleetLink(index, one.label, one.connect, self._metrics, one.starts, self._on_lost, self._on_gauge, self._thread)
        link.on_room, link.on_failure = self._room_came, self._link_failed
        return link

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self, watched: WatchedTasks) -> None:
        """As of EngineLink, for all."""
        self._loop, self._watched = asyncio.get_running_loop(), watched
        start_thread(self._thread, watched)
        for link in self.links:
            link.start(watched)
        if self._watch is not None:
            watched.start(WATCH, self._watch(self.set_engines))

    def set_engines(self, engines: Sequence[EngineEntry]) -> None:
        """These are the engines from now on, by their labels; again and again, for one that leaves is let go later."""
        made, gone = self._places.put(engines)
        for link in made:
            self._instances.append(0)
            if self._has_placement():
                self._placement.grow(len(self._places))
            link.start(self._watched)
        for index, label in gone.items():
            logger.info("engine %s has left", label)
            self._instances[index] = 0
            if self._has_placement():
                self._placement.forget(index)

    async def connected(self, timeout_s: float) -> bool:
        """Wait until all engines have granted their queue pairs. False when none did within timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        while any(link.pair is None for link in self.links) and time.monotonic() < deadline:
            await asyncio.sleep(CONNECT_POLL_S)
        return self.pair is not None

    def close(self) -> None:
        """As of EngineLink, for all."""
        if self._move_timer is not None:
            self._move_timer.cancel()
        self._fail_moving(shutting_down())
        for link in self.links:
            link.close()
        self._thread.close()

    @property
    def pair(self) -> QueuePair | None:
        """One of the queue pairs: what requests are checked by is the same in all."""
        return next((link.pair for link in self.links if link.pair is not None), None)

    def status(self) -> str | None:
        """None when some engine serves, otherwise why none does."""
        return self._why_none([link.status() for link in self.links])

    def readiness(self) -> str | None:
        """As of EngineLink, for some engine."""
        return self._why_none([link.readiness() for link in self.links])

    def _why_none(self, problems: list[str | None]) -> str | None:
        if None in problems:
            return None
        if not problems:
            return "No engine is listed."
        told = dict.fromkeys(problem for problem in problems if problem is not None)
        return f"None of {len(problems)} engines serves. {' '.join(told)}".strip()

    def unavailable(self, problem: str) -> ApiError:
        """A 503 with the time until the first engine is expected."""
        return unavailable(problem, min((link.unavailable(problem).retry_s for link in self.links), default=1))

    def restarts(self) -> int | None:
        """Times that engines were started again; None where nobody here does so."""
        counts = [count for link in self.links if (count := link.restarts()) is not None]
        return sum(counts) if counts else None

    def engine_words(self) -> list[int] | None:
        """The sums of all engines' blocks, with the best of their states; None without any."""
        blocks = [words for link in self.links if (words := link.engine_words()) is not None]
        if not blocks:
            return None
        total = [sum(column) for column in zip(*blocks, strict=True)]
        states = [words[ENGINE_STATE] for words in blocks]
        best = (STATE_READY, STATE_DRAINING, STATE_STARTING)
        total[ENGINE_STATE] = next((state for state in best if state in states), states[0])
        return total

    def blocks(self) -> list[tuple[str, list[int] | None]]:
        """Label and block of each engine, None without it."""
        return [(link.label, link.engine_words()) for link in self.links]

    # ---- requests ----------------------------------------------------------------------------------------------------

    def require(self) -> QueuePair:
        """A queue pair whose engine takes requests. Raises ApiError with status 503."""
        for link in self.links:
            if link.status() is None and link.pair is not None:
                return link.pair
        raise self.unavailable(self.status() or "No engine serves.")

    def room(self) -> int:
        """Slots for which requests can be submitted now: who lost an engine comes first."""
        return max(0, sum(link.room() for link in self.links if link.status() is None) - len(self._moving))

    def submit(self, work: list[Submission]) -> None:
        """Submit all of a request's choices, or none; as of EngineLink. Those of one prompt go to the same engine while it has
        slots."""
        work = [(generation, prompt, self._seeded(sampling)) for generation, prompt, sampling in work]
        for generation, prompt, sampling in work:
            generation.flight = Flight(prompt, sampling, generation.grammar)
        for _ in self.links:
            self.require()
            try:
                self._submit(work)
                return
            except ApiError as error:  # an engine was lost at this moment
                if error.status != 503 or not all(generation.open for generation, _, _ in work):
                    raise
        raise self.unavailable("No engine took the request.")

    @staticmethod
    def _seeded(sampling: RequestParameters) -> RequestParameters:
        """A random seed is drawn here: every engine that has the request gets the same."""
        return sampling.changed(seed=secrets.randbits(63)) if sampling.seed is None else sampling

    def _submit(self, work: list[Submission]) -> None:
        begun = list[Generation]()
        try:
            for link, part in self._placed(work):
                link.submit(part)
                begun += [generation for generation, _, _ in part]
        except (ApiError, ValueError):
            for generation in begun:
                generation.open = False
                self.cancel(generation)
            raise

    def _placed(self, work: list[Submission]) -> list[tuple[FleetLink, list[Submission]]]:
        """Which engine gets what. Raises ApiError with status 429."""
        loads, parts = self._loads(), dict[int, list[Submission]]()
        engine: int | None = None
        for submission in work:
            generation, prompt, sampling = submission
            if engine is None or generation.leader is None or not loads[engine].accepts:
                engine = self._placement.choose(prompt, sampling.cache_salt, list(loads.values()))
                if engine is None:
                    raise busy("all slots are in use")
                self._placement.sent(engine, prompt, sampling.cache_salt)
            load = loads[engine]
            load.free_slots -= 1
            load.accepts = load.free_slots > 0
            load.tokens_in_flight += len(prompt) + sampling.max_tokens
            load.unseen_tokens += len(prompt)
            parts.setdefault(engine, []).append(submission)
        return [(self._places[engine], part) for engine, part in parts.items()]

    def _loads(self) -> dict[int, EngineLoad]:
        loads = dict[int, EngineLoad]()
        for link in self.links:
            if link.status() is not None or link.pair is None:
                continue
            instance = link.pair.facts.instance
            if instance != self._instances[link.index]:
                if self._instances[link.index]:
                    self._placement.forget(link.index)
                self._instances[link.index] = instance
            loads[link.index] = link.load()
        return loads

    def _has_placement(self) -> bool:
        return "_placement" in vars(self)

    @cached_property
    def _placement(self) -> Placement:
        facts = self.require().facts
        return Placement(
            max(len(self._places), 1 if self._watch is None else 2),  # what the first one has counts once there is a second
            facts.page_size,
            rule=self._rule,
            record_pages=facts.num_pages,
            on_fault=lambda: self._metrics.count("placement_faults"),
        )

    def cancel(self, generation: Generation) -> None:
        """Ask its engine to end it. Between two engines it has nothing to end: it is not moved on."""
        flight = generation.flight
        if flight is not None and flight.engine >= 0:
            self._places[flight.engine].cancel(generation)

    def fail_all(self, error: ApiError) -> None:
        """End everything in flight with an error, and tell the engines."""
        self._fail_moving(error)
        for link in self.links:
            link.fail_all(error)
        self.on_failure(error)

    def _fail_moving(self, error: ApiError) -> None:
        moving, self._moving = self._moving, []
        for move in moving:
            move.generation.fail(error)

    # ---- moves -------------------------------------------------------------------------------------------------------

    def _on_lost(self, generations: Sequence[Generation], error: ApiError) -> None:
        """Generations have lost their engine. They go on later: completions that were read with others may still be pushed."""
        now = time.monotonic()
        for generation in generations:
            flight = generation.flight
            if flight is None:
                generation.fail(error)
                continue
            flight.engine, flight.paused_at = -1, now
            self._moving.append(Move(generation, error))
        self._plan_moves(0.0)

    def _plan_moves(self, delay_s: float) -> None:
        if self._moving and self._move_timer is None:
            self._move_timer = self._loop.call_later(delay_s, self._move_all)

    def _move_all(self) -> None:
        """Timer: what has no engine goes on in one that has room, in order."""
        self._move_timer = None
        moving, self._moving = self._moving, []
        try:
            for move in moving:
                if move.generation.open and not self._settle(move):
                    self._moving.append(move)
        except Exception as error:
            self._watched.failed(MOVES, error)
            return
        self._plan_moves(MOVE_POLL_S)
        self._room_came()

    def _settle(self, move: Move) -> bool:
        """Whether a generation needs no more looking after: it has an engine, or has ended."""
        flight = move.generation.flight
        assert flight is not None
        pause_s = time.monotonic() - flight.paused_at
        if flight.moves >= self._most_moves or flight.paused_s + pause_s > self._move_timeout_s:
            return self._refuse(move, move.error)
        if move.work is None:
            try:
                prompt, sampling, move.grammar = continuation(move.generation, self.pieces)
            except NoContinuationError as reason:
                logger.warning("a request can't go on in another engine: %s", reason)
                return self._refuse(move, move.error)
            move.work = move.generation, prompt, sampling
        return self._resubmit(move, move.work, flight, pause_s)

    def _resubmit(self, move: Move, work: Submission, flight: Flight, pause_s: float) -> bool:
        generation, prompt, sampling = work
        loads = list(self._loads().values())
        engine = self._placement.choose(prompt, sampling.cache_salt, loads) if loads else None
        if engine is None:
            return False
        generation.grammar = move.grammar
        try:
            self._places[engine].submit([work])
        except ApiError:  # lost at this moment
            return False
        except ValueError as never:
            return self._refuse(move, bad_request(str(never)))
        flight.moves += 1
        flight.paused_s += pause_s
        self._placement.sent(engine, prompt, sampling.cache_salt)
        self._metrics.count("moves")
        return True

    def _refuse(self, move: Move, error: ApiError) -> bool:
        self._metrics.count("moves_refused")
        move.generation.fail(error)
        return True

    # ---- what links tell ---------------------------------------------------------------------------------------------

    def _room_came(self) -> None:
        if not self._moving:
            self.on_room()

    def _link_failed(self, error: ApiError) -> None:
        if self.pair is None:
            self.on_failure(error)

    def _on_gauge(self, index: int, name: str, value: float) -> None:
        values = self._gauges.setdefault(name, {})
        values[index] = value
        self._metrics.gauge(name, sum(values.values()))
