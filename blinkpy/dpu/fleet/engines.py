"""A worker's engines, at least one. `Engines` owns every stream, and a link to each engine.

A placement chooses the engine of each request. A link gives back the generations that it can't continue,
because its engine was lost or accepts no more requests. They continue on another engine, or on the same one
after its restart (blinkpy.dpu.fleet.moves); with a single engine they end with the error. Late completions of the old engine
reach no stream, because its queue pair is closed and the pair's next owner has another epoch.

An engine that is no longer listed drains: its link submits no requests, and becomes vacant when its requests have ended or moved.
The next new engine gets a vacant link.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from typing import Any

from blinkpy.dpu.api_errors import ApiError, busy, shutting_down, unavailable
from blinkpy.dpu.descriptors import WatchedTasks
from blinkpy.dpu.engine_link import EngineLink, Submission
from blinkpy.dpu.engine_starts import EngineEntry
from blinkpy.dpu.fleet.engine_load import EngineLoad
from blinkpy.dpu.fleet.moves import Moves, Pieces
from blinkpy.dpu.fleet.placement import Placement
from blinkpy.dpu.fleet.placement_rules import Rule, prefix
from blinkpy.dpu.generation import Flight, Generation
from blinkpy.dpu.link.link_thread import LinkThread
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.dpu.metrics import Metrics
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import ENGINE_STATE, STATE_DRAINING, STATE_READY, STATE_STARTING

CONNECT_POLL_S = 0.005
HEARTBEAT, PROGRESS, WATCH = "the link thread", "the report of progress", "the watch over the list of engines"  # in the log

logger = logging.getLogger("blinkpy.frontend")

Watch = Callable[[Callable[[Sequence[EngineEntry]], None]], Coroutine[Any, Any, None]]


class Engines:
    """Submits requests to engines, and passes completions to generations. It owns the links.

    engines: the initial engines.
    several: whether there may be more than one engine. Then requests may move, and messages name the engine.
    thread: sends heartbeats for all links.
    pieces: see blinkpy.dpu.fleet.moves.
    most_moves: maximum moves of a generation.
    move_timeout_s: maximum total time of a generation's pauses.
    rule: the placement rule.
    watch: coroutine function that repeatedly calls its argument with the listed engines, until cancelled.
    records_output: keep the token ids of each generation's output in its flight; always done with several
        engines.
    """

    def __init__(
        self,
        engines: Sequence[EngineEntry],
        metrics: Metrics,
        several: bool = True,
        thread: LinkThread | None = None,
        pieces: Pieces = lambda: None,
        most_moves: int = 3,
        move_timeout_s: float = 30.0,
        rule: Rule = prefix,
        watch: Watch | None = None,
        records_output: bool = False,
    ):
        self.keeps_flights = several or records_output
        self.metrics, self.several, self.thread = metrics, several, thread or LinkThread()
        self._rule, self._watch = rule, watch
        self.on_space: Callable[[], None] = lambda: None  # called when requests may fit again
        self.on_failure: Callable[[ApiError], None] = lambda error: None  # called when no engine is left
        self.moves = Moves(self._place, pieces, metrics, most_moves, move_timeout_s, self.slots_freed)
        self._gauges: dict[str, dict[int, float]] = {}
        self._instances = [0] * len(engines)  # per link: the engine instance in the placement's record; 0: no record
        self._all = [EngineLink(self, index, entry) for index, entry in enumerate(engines)]
        self.links = list(self._all)  # links with an engine; always the same list

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self, watched: WatchedTasks) -> None:
        """Start to connect, on the running event loop. watched: receives unexpected exceptions, which end this object's work."""
        self._loop, self._watched = asyncio.get_running_loop(), watched
        self.moves.start(watched)
        self.thread.on_failure = self._thread_failed
        self.thread.start()
        watched.start(PROGRESS, self.thread.report_progress())
        for link in self.links:
            link.start(watched)
        if self._watch is not None:
            watched.start(WATCH, self._watch(self.set_engines))

    def _thread_failed(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._watched.failed, HEARTBEAT, error)

    def set_engines(self, entries: Sequence[EngineEntry]) -> None:
        """Set the listed engines, by label. Call it regularly, because engines take time to drain."""
        listed = {entry.label for entry in entries}
        for link in self.links:
            link.removed = link.label not in listed
            if link.removed and link.is_idle():
                logger.info("engine %s was removed", link.label)
                link.vacate()
                self._forget(link.index)
        known = {link.label for link in self._all if not link.vacant}
        free = [link for link in self._all if link.vacant]
        for entry in entries:
            if entry.label in known:
                continue
            if free:
                free.pop(0).occupy(entry)
            else:
                self._add(entry)
        self.links[:] = [link for link in self._all if not link.vacant]

    def _add(self, entry: EngineEntry) -> None:
        link = EngineLink(self, len(self._all), entry)
        self._all.append(link)
        self._instances.append(0)
        if self._has_placement():
            self._placement.grow(len(self._all))
        link.start(self._watched)

    def _forget(self, index: int) -> None:
        self._instances[index] = 0
        if self._has_placement():
            self._placement.forget(index)

    async def connected(self, timeout_s: float) -> bool:
        """Wait until all engines have granted their queue pairs. Returns False if no engine did within
        timeout_s seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self.attached and time.monotonic() < deadline:
            await asyncio.sleep(CONNECT_POLL_S)
        return self.pair is not None

    def close(self) -> None:
        """End all requests with an error, and release the queue pairs. Close the watched tasks first."""
        self.moves.close()
        self.moves.fail_all(shutting_down())
        for link in self.links:
            link.close()
        self.thread.close()

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def pair(self) -> QueuePair | None:
        """Any attached queue pair, or None. Checks of requests use facts that all queue pairs share."""
        return next((link.pair for link in self.links if link.pair is not None), None)

    @property
    def attached(self) -> bool:
        """Whether all engines have granted their queue pairs."""
        return all(link.pair is not None for link in self.links)

    @property
    def starting(self) -> bool:
        """Whether this server's first engine is still starting."""
        return any(link.starting for link in self.links)

    def pairs(self) -> list[QueuePair]:
        """The attached queue pairs."""
        return [link.pair for link in self.links if link.pair is not None]

    def status(self) -> str | None:
        """None if an engine serves, otherwise the reason, as a sentence."""
        return self._why_none([link.status() for link in self.links])

    def readiness(self) -> str | None:
        """Like status(), but also reports missing heartbeats of all queue pairs, or a blocked event loop, within half a lease."""
        return self._why_none([link.readiness() for link in self.links])

    def _why_none(self, problems: list[str | None]) -> str | None:
        if None in problems:
            return None
        if not problems:
            return "No engine is listed: add one to the file of --engines-file."
        known = " ".join(dict.fromkeys(problem for problem in problems if problem is not None))
        return f"None of {len(problems)} engines serves. {known}".strip() if self.several else known

    def unavailable(self, problem: str) -> ApiError:
        """A 503 with the time until the first engine is expected."""
        return unavailable(problem, min((link.unavailable(problem).retry_s for link in self.links), default=1))

    def restarts(self) -> int | None:
        """Number of engine restarts; None if another process restarts engines."""
        counts = [count for link in self.links if (count := link.restarts()) is not None]
        return sum(counts) if counts else None

    def engine_words(self) -> list[int] | None:
        """The sums of all engines' blocks, with the best of their states; None without an engine."""
        blocks = [words for link in self.links if (words := link.engine_words()) is not None]
        if len(blocks) < 2:
            return blocks[0] if blocks else None
        total = [sum(column) for column in zip(*blocks, strict=True)]
        states = [words[ENGINE_STATE] for words in blocks]
        best = (STATE_READY, STATE_DRAINING, STATE_STARTING)
        total[ENGINE_STATE] = next((state for state in best if state in states), states[0])
        return total

    def blocks(self) -> list[tuple[str, list[int] | None]]:
        """Label and block of each of several engines; an unattached engine has the block None."""
        return [(link.label, link.engine_words()) for link in self.links] if self.several else []

    # ---- requests ----------------------------------------------------------------------------------------------------

    def require(self) -> QueuePair:
        """A queue pair whose engine accepts requests. Raises ApiError with status 503."""
        for link in self.links:
            if link.status() is None and link.pair is not None:
                return link.pair
        raise self.unavailable(self.status() or "No engine serves.")

    def free_slots(self) -> int:
        """Number of slots free for new requests. Requests that lost their engine have priority."""
        if not self.several:  # also while the engine drains: the next submit() raises the error
            return self.links[0].free_slots()
        return max(0, sum(link.free_slots() for link in self.links if link.status() is None) - len(self.moves))

    def submit(self, work: list[Submission]) -> None:
        """Submit all choices of a request, or raise. Choices with a leader follow the leader. Choices of one prompt go to one
        engine while it has slots. If an engine's arenas are full, choices wait in order.

        Raises ApiError with status 429 or 503, and ValueError for a request that can never fit.
        """
        if self.keeps_flights:
            work = [(generation, prompt, self._seeded(sampling)) for generation, prompt, sampling in work]
            for generation, prompt, sampling in work:
                generation.flight = Flight(prompt, sampling, generation.grammar)
        for attempt in range(len(self.links), 0, -1):
            self.require()
            try:
                self._submit(work)
                return
            except ApiError as error:  # an engine was lost meanwhile
                if error.status != 503 or attempt == 1 or not all(generation.open for generation, _, _ in work):
                    raise
        raise self.unavailable("No engine is listed: add one to the file of --engines-file.")

    @staticmethod
    def _seeded(sampling: RequestParameters) -> RequestParameters:
        """Parameters with a seed. A missing seed is drawn here, so that every engine of the request uses the
        same one.
        """
        return sampling.changed(seed=secrets.randbits(63)) if sampling.seed is None else sampling

    def _submit(self, work: list[Submission]) -> None:
        begun = list[Generation]()
        try:
            for link, part in self._placed(work) if self.several else [(self.links[0], work)]:
                link.submit(part)
                begun += [generation for generation, _, _ in part]
        except (ApiError, ValueError):
            for generation in begun:
                generation.open = False
                self.cancel(generation)
            raise

    def cancel(self, generation: Generation) -> None:
        """Ask its engine to end a generation. A closed generation without an engine is not moved."""
        engine = 0 if generation.flight is None else generation.flight.engine
        if engine >= 0:
            self._all[engine].cancel(generation)

    def fail_all(self, error: ApiError) -> None:
        """End all requests with an error, and cancel them in the engines."""
        self.moves.fail_all(error)
        for link in self.links:
            link.fail_all(error)
        self.on_failure(error)

    # ---- placement ---------------------------------------------------------------------------------------------------

    def _placed(self, work: list[Submission]) -> list[tuple[EngineLink, list[Submission]]]:
        """The links, and the choices for each of them. Raises ApiError with status 429."""
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
        return [(self._all[engine], part) for engine, part in parts.items()]

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
            max(len(self._all), 1 if self._watch is None else 2),  # record the first engine's pages before a second one exists
            facts.page_size,
            rule=self._rule,
            record_pages=facts.num_pages,
            on_fault=lambda: self.metrics.count("placement_faults"),
        )

    def _place(self, work: Submission, grammar: ByteAutomaton | None) -> bool:
        """Submit the request that continues a generation to an engine with free slots. Returns False if all engines are full. For
        Moves.
        """
        generation, prompt, sampling = work
        loads = list(self._loads().values())
        engine = self._placement.choose(prompt, sampling.cache_salt, loads) if loads else None
        if engine is None:
            return False
        generation.grammar = grammar
        self._all[engine].submit([work])
        self._placement.sent(engine, prompt, sampling.cache_salt)
        return True

        # ---- for the links -----------------------------------------------------------------------------------------------

    def take_back(self, generations: Sequence[Generation], error: ApiError) -> None:
        """See LinkOwner: move the generations to another engine."""
        self.moves.add(generations, error)

    def slots_freed(self) -> None:
        """See LinkOwner: report free slots, unless generations wait for an engine."""
        if not self.moves:
            self.on_space()

    def link_lost(self, error: ApiError) -> None:
        """See LinkOwner: report the error if no engine is left."""
        if self.pair is None:
            self.on_failure(error)

    def gauge(self, index: int, name: str, value: float) -> None:
        """See LinkOwner: the gauge is the sum over the links."""
        values = self._gauges.setdefault(name, {})
        values[index] = value
        self.metrics.gauge(name, sum(values.values()))
