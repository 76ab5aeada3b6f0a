"""An engine for callers without an event loop: runs the server's link on an event loop in a separate thread."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.descriptors import WatchedTasks
from blinkpy.dpu.engine_link import Submission
from blinkpy.dpu.engine_starts import EngineEntry
from blinkpy.dpu.fleet.engines import Engines
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.dpu.metrics import Metrics

SHOW_S = 0.1  # between two calls of on_tick
END_S = 5.0  # time limit for closing the loop

T = TypeVar("T")


class Work(Protocol):
    """One request."""

    submission: Submission

    @property
    def may_start(self) -> bool:
        """Whether to submit this request now, after all earlier requests."""


class EngineLoop:
    """Runs batches of requests on one engine. Between two calls of run(), it has no requests. connect: as in EngineEntry."""

    def __init__(self, connect: Callable[[], QueuePair]):
        self.engines = Engines([EngineEntry("", connect)], Metrics(), several=False, records_output=True, most_moves=0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()
        self._call(self._start())

    def connected(self, timeout_s: float) -> bool:
        """Wait until the engine has granted the queue pair. Returns False after timeout_s seconds."""
        return self._call(self.engines.connected(timeout_s))

    def run(self, works: Iterable[Work], on_tick: Callable[[int], None]) -> None:
        """Submit requests in order, as many at a time as the engine has slots, and wait for all.

        on_tick: called several times per second, in the caller's thread, with the number of ended requests.
        Raises ApiError if a request fails or the engine refuses it, and ValueError if it can never fit. Then, and if on_tick
        raises or the caller is interrupted, all other requests are cancelled.
        """
        batch = _Batch(self.engines, works)
        future = asyncio.run_coroutine_threadsafe(batch.run(), self._loop)
        try:
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    future.exception(SHOW_S)
                on_tick(batch.ended)
            on_tick(batch.ended)
            future.result()
        finally:
            if not future.done():
                future.cancel()

    def close(self) -> None:
        """Release the queue pair and end the thread. A second call has no effect."""
        if (
            self._loop.is_closed() or threading.current_thread() is self._thread
        ):  # the garbage collector calls it in the loop's thread
            return
        with contextlib.suppress(TimeoutError):
            self._call(self._end(), END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout_s)

    async def _start(self) -> None:
        self._watched = WatchedTasks(
            lambda: self.engines.fail_all(ApiError(500, "The link to the engine has failed; try again."))
        )
        self.engines.start(self._watched)

    async def _end(self) -> None:
        await self._watched.close()
        self.engines.close()
        await self._loop.shutdown_default_executor()


class _Batch:
    """One call of EngineLoop.run. ended: number of ended requests."""

    def __init__(self, engines: Engines, works: Iterable[Work]):
        self._engines = engines
        self._waiting = deque(works)
        self._running = list[Work]()
        self.ended = 0

    async def run(self) -> None:
        news, engines = asyncio.Event(), self._engines
        engines.on_space, engines.on_failure = news.set, lambda error: news.set()
        try:
            while self._waiting or self._running:
                while self._waiting and self._waiting[0].may_start and engines.free_slots() > 0:
                    engines.submit([self._waiting[0].submission])
                    self._running.append(self._waiting.popleft())
                self._collect()
                if self._running:
                    await news.wait()
                    news.clear()
                elif self._waiting:
                    engines.require()  # raises unless the engine serves
                    await asyncio.sleep(SHOW_S)
        finally:
            for work in self._running:
                generation = work.submission[0]
                if generation.open:
                    generation.open = False
                    engines.cancel(generation)

    def _collect(self) -> None:
        """Count the requests that have ended. Raises the ApiError of a failed request."""
        running = list[Work]()
        for work in self._running:
            generation = work.submission[0]
            if generation.error is not None:
                raise generation.error
            if generation.open:
                running.append(work)
        self.ended += len(self._running) - len(running)
        self._running = running
