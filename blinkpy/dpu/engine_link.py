"""The queue pair on an event loop: one poll for all streams, and reattachment. Heartbeats and checks of the engine are made in
a thread of their own (blinkpy.dpu.link.link_thread), which no work of the event loop delays.

While requests are in flight a timer polls the completion ring, at the pace of blinkpy.dpu.poll_pace, and takes a step's tokens
together, which makes them cheap, but no more than MOST_COMPLETIONS, or the ends of MOST_FINAL requests, before everybody else on
the event loop has had a turn. Without requests nothing is polled.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from blinkpy.dpu.api_errors import ApiError, bad_request, busy, shutting_down, unavailable
from blinkpy.dpu.engine_starts import EngineStarts
from blinkpy.dpu.generation import Generation, Sink
from blinkpy.dpu.link.link_thread import CHECK_S, LinkThread
from blinkpy.dpu.link.queue_pair import CompletionEvent, EngineLostError, EngineUnavailableError, NoRoomError, QueuePair
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.poll_pace import POLL_S, PollPace
from blinkpy.dpu.watched_tasks import WatchedTasks
from blinkpy.queues.array_types import Int32
from blinkpy.queues.completion import HAS_TOKEN
from blinkpy.queues.layout import LayoutError
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import STATE_READY
from blinkpy.transport.contract import TransportError

LINK, HEARTBEAT, PROGRESS = "the link to the engine", "the link thread", "the report of progress"  # in the log
NOT_YET = "The engine is not connected yet."
RECONNECT_S = 0.2
CONNECT_POLL_S = 0.005
# In one turn of the event loop: one or two milliseconds, and as much for what requests that have ended take after it.
MOST_COMPLETIONS, MOST_FINAL = 128, 16

logger = logging.getLogger("blinkpy.frontend")

Submission = tuple[Generation, Int32, RequestParameters]  # with its prompt, int32 [n]


class EngineLink:
    """Submits generations and passes completions to them.

    connect: returns an attached QueuePair, within about a second.
    starts: of the engine, if a process of this server restarts it.
    label: the engine's in the log, if there are several.
    thread: of all links of this worker; shared: this link neither starts nor ends it.
    """

    def __init__(
        self,
        connect: Callable[[], QueuePair],
        metrics: Metrics,
        starts: EngineStarts | None = None,
        label: str = "",
        thread: LinkThread | None = None,
        shared: bool = False,
    ):
        self._connect, self._metrics, self._starts = connect, metrics, starts
        self.thread, self._shared = thread or LinkThread(), shared
        self._log_prefix = label and f"{label}: "
        self.pair: QueuePair | None = None
        self.on_room: Callable[[], None] = lambda: None  # called when slots may have become free
        self.on_failure: Callable[[ApiError], None] = lambda error: None  # when everything in flight has failed
        self._problem = NOT_YET
        self._held: list[Submission] = []  # wait for their leaders, or for room in the arenas; slots are kept free for them
        self._poll_timer: asyncio.Handle | None = None
        self._pace = PollPace()
        self._step: tuple[float, bool] | None = None  # of completions that go on in the next turn: begin, s, and whether clumped

    def start(self, watched: WatchedTasks) -> None:
        """Begin to connect, on the running event loop. watched: gets unexpected exceptions, which end heartbeats or polls."""
        self._loop, self._watched = asyncio.get_running_loop(), watched
        if not self._shared:
            start_thread(self.thread, watched)
        watched.start(LINK, self._keep_connected())

    async def connected(self, timeout_s: float) -> bool:
        """Wait until the engine has granted the queue pair. False when it did not within timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        while self.pair is None and time.monotonic() < deadline:
            await asyncio.sleep(CONNECT_POLL_S)
        return self.pair is not None

    def close(self) -> None:
        """End what is in flight with an error, and give the queue pair up. The watched tasks have been closed."""
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        if self.pair is not None:
            self.fail_all(shutting_down())
            self._drop(self.pair)
        if not self._shared:
            self.thread.close()

    def _drop(self, pair: QueuePair) -> None:
        """Give a queue pair up, which is this link's no more."""
        self.pair = None
        self.thread.remove(pair)
        pair.close()

    def status(self) -> str | None:
        """None when requests can be served, otherwise why not, as a sentence."""
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
        """As status(), with proof: within half a lease the queue pair had a heartbeat, and the event loop ran."""
        problem, pair = self.status(), self.pair
        if problem is not None or pair is None:
            return problem
        oldest = time.monotonic() - pair.facts.lease_ms / 2000
        if self.thread.checked(pair) < oldest:
            return "The queue pair has had no heartbeat for half its lease."
        if self.thread.progressed < oldest:
            return "The event loop has not run for half a lease."
        return None

    def unavailable(self, problem: str) -> ApiError:
        """A 503 for what status() or readiness() tells, with the time to ask again."""
        return unavailable(problem, 1 if self._starts is None else self._starts.retry_s())

    def restarts(self) -> int | None:
        """Times that the engine was started again; None where nobody here does so."""
        return None if self._starts is None else self._starts.restarts

    def engine_words(self) -> list[int] | None:
        """The engine's block, for metrics; None without an engine."""
        try:
            return None if self.pair is None else self.pair.transport.read_engine()
        except TransportError as error:
            self._lose(error)
            return None

    def blocks(self) -> list[tuple[str, list[int] | None]]:
        """Label and block of each of several engines."""
        return []

    # ---- requests ----------------------------------------------------------------------------------------------------

    def require(self) -> QueuePair:
        """The queue pair. Raises ApiError with status 503 when there is none or the engine accepts nothing."""
        problem = self.status()
        if problem is not None or self.pair is None:
            raise self.unavailable(problem or self._problem)
        return self.pair

    def room(self) -> int:
        """Slots for which requests can be submitted now: none while others wait for room in the arenas."""
        pair = self.pair
        if pair is None or any(generation.leader is None and generation.open for generation, _, _ in self._held):
            return 0
        return pair.free_slots - len(self._held)

    def submit(self, work: list[Submission]) -> None:
        """Submit all of a request's choices, or none; those with a leader follow it, and where the arenas are full they wait in
        order for the engine to read what is before them. Raises ApiError with status 429 or 503, and ValueError for what can
        never fit."""
        pair = self.require()
        if len(work) + len(self._held) > pair.free_slots:
            raise busy("all slots are in use")
        held, submitted = len(self._held), list[Generation]()
        try:
            for submission in work:
                if submission[0].leader is not None or not self._may_go(pair, submission):
                    self._held.append(submission)
                else:
                    submitted.append(submission[0])
        except (EngineUnavailableError, EngineLostError, TransportError, ValueError) as error:
            del self._held[held:]
            for generation in submitted:
                generation.open = False
                self.cancel(generation)
            if isinstance(error, ValueError):
                raise
            if not isinstance(error, EngineUnavailableError):
                self._lose(error)
            raise self.unavailable(_sentence(error)) from error
        finally:
            if (submitted or self._held) and self._poll_timer is None:
                self._pace.restart()
                self._poll_timer = self._loop.call_later(POLL_S, self._poll)

    def _may_go(self, pair: QueuePair, submission: Submission) -> bool:
        """Hand a submission over, unless others wait for room or there is none."""
        if any(generation.leader is None and generation.open for generation, _, _ in self._held):
            return False
        try:
            self._hand_over(pair, submission)
        except NoRoomError:
            return False
        return True

    def _hand_over(self, pair: QueuePair, submission: Submission) -> None:
        generation, prompt, sampling = submission
        both = {"grammar": generation.grammar, "rules": generation.rules}
        given: dict[str, Any] = {name: one for name, one in both.items() if one is not None}
        generation.request = pair.submit(prompt, sampling, generation, **given)
        generation.submitted = time.monotonic()
        self._metrics.count("prompt_tokens", len(prompt))
        if given:
            written = generation.request.written
            self._metrics.count("grammar_writes", len(written))
            self._metrics.count("grammar_written_bytes", sum(written))
            self._metrics.count("grammar_hits", len(given) - len(written))

    def _submit_held(self, pair: QueuePair) -> None:
        """Submit the choices whose leaders have a token, and those that wait for room, in order."""
        waiting, full = list[Submission](), False
        for number, submission in enumerate(self._held):
            generation, leader = submission[0], submission[0].leader
            if not generation.open:
                continue
            if full or (leader is not None and leader.tokens == 0 and leader.open):
                waiting.append(submission)
                continue
            try:
                self._hand_over(pair, submission)
            except NoRoomError:
                full = True
                waiting.append(submission)
            except (EngineUnavailableError, EngineLostError) as error:
                self._give_up([generation], self.unavailable(_sentence(error)))
            except ValueError as error:  # what can never fit, and was not tried before: others waited
                generation.fail(bad_request(_sentence(error)))
            except TransportError:
                self._held = waiting + self._held[number:]  # those before are in flight, and lost as such
                raise
        self._held = waiting

    def cancel(self, generation: Generation) -> None:
        """Ask the engine to end it. Its slot comes back with the final completion."""
        if self.pair is not None and generation.request is not None:
            try:
                self.pair.cancel(generation.request)
            except TransportError as error:
                self._lose(error)

    def fail_all(self, error: ApiError) -> None:
        """End everything in flight with an error, and tell the engine."""
        if self.pair is None:
            return
        for request in self.pair.live():
            self.cancel(request.owner)
            request.owner.fail(error)
        self._fail_held(error)
        self.on_failure(error)

    def _fail_held(self, error: ApiError) -> None:
        for generation in self._take_held():
            generation.fail(error)

    def _take_held(self) -> list[Generation]:
        held, self._held = self._held, []
        return [generation for generation, _, _ in held]

    def _give_up(self, generations: list[Generation], error: ApiError) -> None:
        """This engine can't go on with them, for this reason."""
        for generation in generations:
            generation.fail(error)

    def _gauge(self, name: str, value: float) -> None:
        self._metrics.gauge(name, value)

    # ---- polling -----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Timer: take completions, write their text out, and set the timer again while anything is in flight."""
        self._poll_timer = None
        pair = self.pair
        if pair is None:
            return
        try:
            completions = pair.poll(MOST_COMPLETIONS, MOST_FINAL)
            now = time.monotonic()
            began, clumped = self._step or (now, False)
            clumped |= bool(completions) and self._feed(completions, now, began)
            held = bool(self._held)
            if held:
                self._submit_held(pair)
            if held or completions:
                self.on_room()
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
        if self.pair is pair and (pair.in_flight or self._held):
            self._poll_timer = self._loop.call_later(delay, self._poll)

    def _feed(self, completions: list[CompletionEvent], now: float, began: float) -> bool:
        """Hand completions to their generations. Returns whether one of them had several since `began`, s."""
        touched, sinks, tokens = list[Generation](), list[Sink](), 0
        before: dict[float, int] = {}  # when the last events went out, mostly those of one step, and how many
        for request, token, flags in completions:
            generation: Generation = request.owner
            plain = generation.plain
            if flags == HAS_TOKEN and plain is not None and generation.open:  # most of them
                tokens += 1
                generation.tokens += 1
                plain.push(token)
                last = generation.last_event
                if last != now:
                    generation.last_event = now
                    before[last] = before.get(last, 0) + 1
                    sinks.append(generation.sink)
                continue
            if generation.scoring and flags & HAS_TOKEN:
                generation.push_score()
                continue
            if flags & HAS_TOKEN:
                tokens += 1
            if not generation.open or generation.finish_reason is not None:
                continue  # sent before the engine saw the cancel word
            if generation.push(token, flags):
                self.cancel(generation)
            if not generation.touched:
                generation.touched = True
                touched.append(generation)
        metrics = self._metrics
        metrics.count("generated_tokens", tokens)
        for generation in touched:
            generation.touched = False
            last = generation.last_event
            generation.flush()
            generation.last_event = now
            if last != now:  # else its plain tokens have put it there
                sinks.append(generation.sink)
            if last and last != now:
                before[last] = before.get(last, 0) + 1
            elif not last and generation.error is None:
                generation.first_event = now
                metrics.time_to_first_token.observe(now - generation.arrival)
            if generation.finish_reason is not None:
                metrics.request_duration.observe(now - generation.arrival)
        for last, times in before.items():
            metrics.inter_token_latency.observe(now - last, times)
        # All texts first, then all writes: in turns, Python and the kernel push each other out of the caches.
        for sink in sinks:
            sink.send()
        return tokens > len(sinks) or max(before, default=0.0) >= began

    # ---- health ------------------------------------------------------------------------------------------------------

    def _lose(self, error: Exception) -> None:
        """The engine or the lease is gone: end every request in flight with an error."""
        pair, self.pair, self._step = self.pair, None, None
        if pair is None:
            return
        self.thread.remove(pair)
        self._problem = _sentence(error)
        logger.error("%squeue pair lost: %s", self._log_prefix, error)
        self._metrics.count("engine_losses")
        self._gauge("attached", 0)
        failure = self.unavailable(self._problem)
        lost = pair.abandon()
        pair.transport.close()
        self._give_up([request.owner for request in lost] + self._take_held(), failure)
        self.on_failure(failure)

    def _on_loss(self, pair: QueuePair, error: Exception) -> None:
        """In the link thread: a queue pair is lost. If the event loop stands still, its streams end or move when it goes on."""
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
                    await asyncio.sleep(RECONNECT_S)
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
                logger.error("%d completions for slots without a request", pair.stray_completions - stray)
                stray = pair.stray_completions

    async def _try_connect(self) -> QueuePair | None:
        try:
            pair = await asyncio.to_thread(self._connect)
        except (EngineLostError, LayoutError, OSError) as error:
            problem = _sentence(error)
            if problem != self._problem:
                logger.warning("%s%s", self._log_prefix, problem)
            self._problem = problem
            return None
        self.pair = pair
        self.thread.add(pair, self._on_loss)
        self._gauge("attached", 1)
        logger.info("%sattached queue pair %d, epoch %d", self._log_prefix, pair.transport.pair, pair.epoch)
        return pair


def start_thread(thread: LinkThread, watched: WatchedTasks) -> None:
    """Start a link thread from the running event loop, which reports its progress to it from now on."""
    loop = asyncio.get_running_loop()

    def failed(error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(watched.failed, HEARTBEAT, error)

    thread.on_failure = failed
    thread.start()
    watched.start(PROGRESS, thread.report_progress())


def _sentence(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
