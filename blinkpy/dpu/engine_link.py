"""The link to one engine on an event loop: its queue pair, one poll for all streams, and reattachment.

blinkpy.dpu.fleet.engines has the links of a worker. It owns the streams, and takes back a stream that a link
can't continue. Heartbeats and checks of the engine run in the link thread (blinkpy.dpu.link.link_thread).

While requests are in flight, a timer polls the completion ring at the pace of blinkpy.dpu.token_feed. One poll
takes all tokens of a step, which makes them cheap. It takes at most MOST_COMPLETIONS, or the ends of
MOST_FINAL requests, before the event loop runs other work. Without requests it does not poll.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from blinkpy.dpu.api_errors import ApiError, bad_request, busy, sentence, shutting_down, unavailable
from blinkpy.dpu.descriptors import WatchedTasks
from blinkpy.dpu.engine_starts import EngineEntry
from blinkpy.dpu.fleet.engine_load import EngineLoad, LoadMeter
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.link.link_thread import CHECK_S, LinkThread
from blinkpy.dpu.link.queue_pair import EngineLostError, EngineUnavailableError, NoSpaceError, QueuePair
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.token_feed import POLL_S, PollPace, feed, note_flights
from blinkpy.queues.layout import LayoutError
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import STATE_READY, Int32
from blinkpy.transport.contract import TransportError

LINK = "the link to the engine"  # in the log
NOT_YET, REMOVED = "The engine is not connected yet.", "The engine is being removed."
STARTING = "The engine is starting: it loads the model."
RECONNECT_S, FIRST_CONNECT_S = 0.2, 0.05  # between two attempts; while the server's first engine starts
# Limits per turn of the event loop: each costs one or two milliseconds.
MOST_COMPLETIONS, MOST_FINAL = 128, 16

logger = logging.getLogger("blinkpy.frontend")

Submission = tuple[Generation, Int32, RequestParameters]  # with its prompt, int32 [n], and parameters


class LinkOwner(Protocol):
    """The interface that a link needs of its worker's engines."""

    several: bool  # there may be more than one engine: the log names each
    keeps_flights: bool  # generations have flights
    metrics: Metrics
    thread: LinkThread

    def take_back(self, generations: Sequence[Generation], error: ApiError) -> None:
        """Take open generations that this link can't continue. error: the reason."""

    def slots_freed(self) -> None:
        """Called when requests may fit again."""

    def link_lost(self, error: ApiError) -> None:
        """Called after a link was lost and its generations were taken back."""

    def gauge(self, index: int, name: str, value: float) -> None:
        """Set a link's part of a gauge."""


class EngineLink:
    """Submits generations to one engine, and passes completions to them. index: its place among the owner's
    links.
    """

    def __init__(self, owner: LinkOwner, index: int, entry: EngineEntry):
        self._owner, self.index = owner, index
        self._metrics, self._thread = owner.metrics, owner.thread
        self.pair: QueuePair | None = None
        self._deferred: list[Submission] = []  # wait for their leaders, or for space in the arenas; slots are reserved for them
        self._poll_timer: asyncio.Handle | None = None
        self._pace = PollPace()
        self._step: tuple[float, bool] | None = None  # unfinished step: start, s; clumped
        self._load = LoadMeter()
        self.removed = False  # the engine is no longer listed: it gets no new requests
        self.vacant = False  # the link has no engine
        self.occupy(entry)

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self, watched: WatchedTasks) -> None:
        """Start to connect, on the running event loop. watched: gets unexpected exceptions, which end the
        polling.
        """
        self._loop, self._watched = asyncio.get_running_loop(), watched
        watched.start(LINK, self._keep_connected())

    def close(self) -> None:
        """End all requests in flight with an error, and release the queue pair. The watched tasks must be
        closed before.
        """
        self.fail_all(shutting_down())
        self._release()

    def occupy(self, entry: EngineEntry) -> None:
        """Assign an engine to this link, which then connects to it."""
        self.label, self._connect, self._starts = entry.label, entry.connect, entry.starts
        self._log_prefix, self._problem = f"engine {entry.label}: " if self._owner.several else "", NOT_YET
        self.removed = self.vacant = False

    def vacate(self) -> None:
        """Release the engine, which must be idle."""
        self.removed = self.vacant = True
        self._connect = _no_engine_attached
        self._release()

    def _release(self) -> None:
        """Release the queue pair, which must be idle."""
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None
        pair, self.pair = self.pair, None
        if pair is not None:
            self._thread.remove(pair)
            pair.close()
            self._detached()

    def _detached(self) -> None:
        for name in ("attached", "slots", "requests_in_flight"):
            self._gauge(name, 0)

    def _gauge(self, name: str, value: float) -> None:
        self._owner.gauge(self.index, name, value)

    # ---- state -------------------------------------------------------------------------------------------------------

    def status(self) -> str | None:
        """None if requests can be served, otherwise the reason, as a sentence."""
        if self.removed:
            return REMOVED
        if self.pair is None:
            return self._problem
        try:
            if self.pair.transport.read_engine_state() != STATE_READY:
                return f"The engine is {self.pair.state_name()}."
        except TransportError as error:
            self._lose(error)
            return self._problem
        return None

    def readiness(self) -> str | None:
        """Like status(), but also reports a missing heartbeat or a blocked event loop: no sign of either within half a lease."""
        problem = self.status()
        return problem if problem is not None or self.pair is None else self._thread.problem_of(self.pair)

    def unavailable(self, problem: str) -> ApiError:
        """A 503 for the reason of status() or readiness(), with the time to retry."""
        return unavailable(problem, 1 if self._starts is None else self._starts.retry_s())

    def restarts(self) -> int | None:
        """Restarts of the engine; None if no process of this server restarts it."""
        return None if self._starts is None else self._starts.restarts

    @property
    def starting(self) -> bool:
        """Whether this server's first engine is starting."""
        return self._starts is not None and self._starts.first

    def engine_words(self) -> list[int] | None:
        """The engine's block, for metrics; None without an engine."""
        try:
            return None if self.pair is None else self.pair.transport.read_engine()
        except TransportError as error:
            self._lose(error)
            return None

    def is_idle(self) -> bool:
        """Whether the link has no request."""
        return not self._deferred and (self.pair is None or not self.pair.in_flight)

    def spare(self) -> int:
        """Slots that are neither used nor reserved."""
        return 0 if self.pair is None else self.pair.free_slots - len(self._deferred)

    def load(self) -> EngineLoad:
        """The load of an engine that accepts requests."""
        now = time.monotonic()
        if self._load.is_old(now):
            self._load.read(self.engine_words(), now)
        return self._load.load(self.index, self.spare())

    # ---- requests ----------------------------------------------------------------------------------------------------

    def require(self) -> QueuePair:
        """The queue pair. Raises ApiError with status 503 if there is no queue pair, or the engine accepts no
        requests.
        """
        problem = self.status()
        if problem is not None or self.pair is None:
            raise self.unavailable(problem or self._problem)
        return self.pair

    def free_slots(self) -> int:
        """Slots for which requests can be submitted now: 0 while earlier requests wait for space in the
        arenas.
        """
        return 0 if self.pair is None or self._waits_for_space() else self.spare()

    def _waits_for_space(self) -> bool:
        return any(generation.leader is None and generation.open for generation, _, _ in self._deferred)

    def submit(self, work: list[Submission]) -> None:
        """Submit all of a request's choices, or none. Choices with a leader follow it; if the arenas are
        full, they wait in order until the engine has read earlier entries.

        Raises ApiError with status 429 or 503, and ValueError for a request that can never fit.
        """
        pair = self.require()
        if len(work) + len(self._deferred) > pair.free_slots:
            raise busy("all slots are in use")
        deferred, submitted = len(self._deferred), list[Generation]()
        try:
            for submission in work:
                if submission[0].leader is not None or not self._may_go(pair, submission):
                    self._deferred.append(submission)
                else:
                    submitted.append(submission[0])
        except (EngineUnavailableError, EngineLostError, TransportError, ValueError) as error:
            del self._deferred[deferred:]
            for generation in submitted:
                generation.open = False
                self.cancel(generation)
            if isinstance(error, ValueError):
                raise
            if not isinstance(error, EngineUnavailableError):
                self._lose(error)
            raise self.unavailable(sentence(error)) from error
        finally:
            if (submitted or self._deferred) and self._poll_timer is None:
                self._pace.restart()
                self._poll_timer = self._loop.call_later(POLL_S, self._poll)

    def _may_go(self, pair: QueuePair, submission: Submission) -> bool:
        """Submit a choice unless the arenas are full or earlier choices wait for space. Returns whether it
        was submitted.
        """
        if self._waits_for_space():
            return False
        try:
            self._hand_over(pair, submission)
        except NoSpaceError:
            return False
        return True

    def _hand_over(self, pair: QueuePair, submission: Submission) -> None:
        generation, prompt, sampling = submission
        given: dict[str, Any] = {"grammar": generation.grammar, "rules": generation.rules}
        given = {name: one for name, one in given.items() if one is not None}
        if generation.prediction is None:
            generation.request = pair.submit(prompt, sampling, generation, **given)
        else:
            prediction = usable_prediction(generation.prediction, len(prompt), pair)
            generation.request = pair.submit(prompt, sampling, generation, **given, prediction=prediction)
        generation.submitted = generation.submitted or time.monotonic()  # phases start at the first engine
        self._metrics.count("prompt_tokens", len(prompt))
        flight = generation.flight
        if flight is not None:
            flight.engine, flight.cost, flight.scores_due = self.index, len(prompt) + sampling.max_tokens, 0
            if generation.scoring and generation.scores is not None:
                flight.scores_due = len(prompt) - len(generation.scores.entries)
            self._load.sent(len(prompt), flight.cost)
        if given:
            written = generation.request.written
            self._metrics.count("grammar_writes", len(written))
            self._metrics.count("grammar_written_bytes", sum(written))
            self._metrics.count("grammar_hits", len(given) - len(written))

    def _submit_deferred(self, pair: QueuePair) -> None:
        """Submit, in order, the choices whose leaders have a token, and the choices that wait for space."""
        waiting, full = list[Submission](), False
        for number, submission in enumerate(self._deferred):
            generation, leader = submission[0], submission[0].leader
            if not generation.open:
                continue
            if full or (leader is not None and leader.tokens == 0 and leader.open):
                waiting.append(submission)
                continue
            try:
                self._hand_over(pair, submission)
            except NoSpaceError:
                full = True
                waiting.append(submission)
            except (EngineUnavailableError, EngineLostError) as error:
                self._owner.take_back([generation], self.unavailable(sentence(error)))
            except ValueError as error:  # it can never fit, which was not checked while others waited
                generation.fail(bad_request(sentence(error)))
            except TransportError:
                self._deferred = waiting + self._deferred[number:]  # earlier ones are in flight, and are taken back as such
                raise
        self._deferred = waiting

    def cancel(self, generation: Generation) -> None:
        """Ask the engine to end a generation. The final completion frees its slot."""
        if self.pair is not None and generation.request is not None:
            try:
                self.pair.cancel(generation.request)
            except TransportError as error:
                self._lose(error)

    def fail_all(self, error: ApiError) -> None:
        """End all requests of this link with an error, and cancel them in the engine."""
        if self.pair is not None:
            for request in self.pair.live():
                self.cancel(request.owner)
                request.owner.fail(error)
        for generation in self._take_deferred():
            generation.fail(error)

    def _take_deferred(self) -> list[Generation]:
        deferred, self._deferred = self._deferred, []
        return [generation for generation, _, _ in deferred]

    # ---- polling -----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Timer callback: take completions, send their text, and restart the timer while requests are in
        flight.
        """
        self._poll_timer = None
        pair = self.pair
        if pair is None:
            return
        try:
            completions = pair.poll(MOST_COMPLETIONS, MOST_FINAL)
            now = time.monotonic()
            began, clumped = self._step or (now, False)
            if completions and self._owner.keeps_flights:
                self._load.ended(note_flights(completions))
            clumped |= bool(completions) and feed(completions, now, began, self._metrics, self.cancel)
            deferred = bool(self._deferred)
            if deferred:
                self._submit_deferred(pair)
            if deferred or completions:
                self._owner.slots_freed()
        except TransportError as error:
            self._lose(error)
            return
        except Exception as error:
            self._watched.failed(LINK, error)
            return
        if pair.stopped_early and self.pair is pair:
            self._step = began, clumped
            self._poll_timer = self._loop.call_soon(self._poll)
            return
        delay = self._pace.delay(now, bool(completions) or self._step is not None, clumped)
        self._step = None
        if self.pair is pair and (pair.in_flight or self._deferred):
            self._poll_timer = self._loop.call_later(delay, self._poll)

    # ---- health ------------------------------------------------------------------------------------------------------

    def _lose(self, error: Exception) -> None:
        """Handle the loss of the engine or the lease: the owner takes back all requests."""
        pair, self.pair, self._step = self.pair, None, None
        if pair is None:
            return
        self._thread.remove(pair)
        self._problem = sentence(error)
        logger.error("%squeue pair lost: %s", self._log_prefix, error)
        self._metrics.count("engine_losses")
        self._detached()
        failure = self.unavailable(self._problem)
        lost = pair.abandon()
        pair.transport.close()
        self._load.lost()
        back = [request.owner for request in lost] + self._take_deferred()
        self._owner.take_back([generation for generation in back if generation.open], failure)
        self._owner.link_lost(failure)

    def _on_loss(self, pair: QueuePair, error: Exception) -> None:
        """In the link thread: report a lost queue pair to the event loop. If the loop is blocked, its streams
        end or move later.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lose_pair, pair, error)

    def _lose_pair(self, pair: QueuePair, error: Exception) -> None:
        if self.pair is pair:
            self._lose(error)

    async def _keep_connected(self) -> None:
        stray = 0
        while True:
            pair = self.pair
            if pair is None:
                pair = await self._try_connect()
                if pair is None:
                    await asyncio.sleep(FIRST_CONNECT_S if self.starting else RECONNECT_S)
                    continue
                stray = 0
            await asyncio.sleep(min(CHECK_S, pair.facts.lease_ms / 4000))
            if self.pair is not pair:
                continue
            try:
                pair.refresh()
            except TransportError as error:
                self._lose(error)
                continue
            self._gauge("slots", pair.sizes.slots)
            self._gauge("requests_in_flight", pair.in_flight)
            if pair.stray_completions > stray:
                self._metrics.count("stray_completions", pair.stray_completions - stray)
                logger.error(
                    "%s%d completions for slots without a request: report this bug with `blinkpy record`",
                    self._log_prefix,
                    pair.stray_completions - stray,
                )
                stray = pair.stray_completions

    async def _try_connect(self) -> QueuePair | None:
        if self.removed:
            return None
        connect = self._connect
        try:
            pair = await asyncio.to_thread(connect)
        except (EngineLostError, LayoutError, OSError) as error:
            problem = STARTING if self.starting else sentence(error)
            if problem not in (self._problem, STARTING):
                logger.warning("%s%s", self._log_prefix, problem)
            self._problem = problem
            return None
        if self._connect is not connect:  # the link got another engine meanwhile
            pair.close()
            return None
        self.pair = pair
        self._thread.add(pair, self._on_loss)
        self._gauge("attached", 1)
        logger.info("%sattached queue pair %d, epoch %d", self._log_prefix, pair.transport.pair, pair.epoch)
        return pair


def usable_prediction(prediction: Int32 | None, prompt_length: int, pair: QueuePair) -> Int32 | None:
    """The part of a prediction that an engine can take: after a move, the prompt includes output, and the engine may have other
    options.
    """
    if prediction is None or not pair.facts.predictions:
        return None
    space = min(pair.context, pair.longest_prompt) - prompt_length
    return prediction[max(0, len(prediction) - space) :] if space > 0 else None


def _no_engine_attached() -> QueuePair:
    raise EngineLostError("no engine is attached")
