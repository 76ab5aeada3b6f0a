"""Prepares requests for the engine outside the event loop: in bounded queues for threads and for processes."""

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from blinkpy.config import Config, FrontendOptions, as_table
from blinkpy.dpu.admission.gate import Asker, FullError, Places
from blinkpy.dpu.api_errors import ApiError, shutting_down
from blinkpy.dpu.descriptors import started_threads
from blinkpy.dpu.fork_server.fork_server import ForkServer
from blinkpy.dpu.http.preparation.job_server import pack_head
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, RequestReader
from blinkpy.dpu.metrics import Metrics

# Requests that are prepared in separate processes, by blinkpy.dpu.http.preparation.job_server.

SERVER = "blinkpy.dpu.http.preparation.job_server"
MARGIN_S = 20.0  # for processes to start and to get their share of the CPU, in addition to the time to prepare


class JobForks:
    """folder: the model's."""

    def __init__(self, config: Config, folder: Path):
        limit_s = 2 * config.frontend.prepare_ms / 1000 + MARGIN_S
        self._forks = ForkServer(SERVER, [dict(as_table(config)), str(folder)], limit_s)
        self.start, self.close = self._forks.start, self._forks.close

    async def run(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """The job's result. Cancelling this kills the process. Raises ApiError, with status 413 for a job that exceeds
        the time or memory of the options, and RuntimeError for a fault of the job."""
        answer = await self._forks.run(pack_head(kind, limits), body)
        outcome: str = "too much"
        result: Any = None
        if answer:
            outcome, result = pickle.loads(answer)  # of this process
        if outcome == "too much":
            message = "Parsing and tokenizing the request takes too much time or memory: shorten it."
            raise ApiError(413, message, code="too_costly", limit="prepare_ms")
        if outcome == "error":
            status, message, param, code, limit = result
            raise ApiError(status, message, param=param, code=code, limit=limit)
        if outcome == "fault":
            raise RuntimeError(f"a request's preparation failed:\n{result}")
        return result


# A thread can't be killed, so it only prepares bodies up to this size, in under 0.1 s; larger ones get a process.
THREAD_BYTES = 1 << 16
AT_ONCE = max(1, min(4, os.cpu_count() or 1))  # threads, and processes


def body_budget(options: FrontendOptions) -> int:
    """Maximum bytes of arriving bodies, and of bodies in each queue: half the option, but at least one body."""
    return max(options.body_budget_mib << 19, options.max_body_bytes)


class PreparationQueue:
    """Runs JOBS. Large and small bodies have separate queues, each bounded in number and bytes. Cancelling run() removes the job
    from the queue immediately, and kills its process.
    """

    def __init__(self, reader: RequestReader, config: Config, folder: Path, metrics: Metrics):
        options = config.frontend
        self._reader, self._metrics = reader, metrics
        self._threads = started_threads(AT_ONCE, "prepare")
        self._forks = JobForks(config, folder)
        half = body_budget(options)
        self._middling = Places(AT_ONCE, options.max_preparing, half)
        # Jobs in processes are long, so one owner may not have all places.
        self._large = Places(2 * AT_ONCE, options.max_preparing, half, of_one=AT_ONCE)
        self._closed = False

    def start(self) -> None:
        """Start the process for large bodies now."""
        self._forks.start()

    def refuse(self) -> None:
        """Refuse waiting and later requests with status 503, and end the processes."""
        self._closed = True
        self._forks.close()

    def close(self) -> None:
        """End the threads after their current jobs, and the processes."""
        self.refuse()
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Bodies in the queues, waiting or in preparation."""
        return self._middling.waiting + self._large.waiting

    async def run(self, kind: str, body: bytearray, limits: EngineLimits, asker: Asker) -> Any:
        """The result of a job. Raises ApiError: the job's error, or status 429 if the queue is full."""
        if len(body) <= THREAD_BYTES:
            return await self._queue(self._middling, asker, len(body), lambda: self._in_thread(kind, body, limits))
        return await self._queue(self._large, asker, len(body), lambda: self._forks.run(kind, body, limits))

    async def _queue(self, places: Places, asker: Asker, size: int, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with places.place(asker, size):
                self._metrics.gauge("preparing", self.waiting)
                if self._closed:
                    raise shutting_down()
                return await work()
        except FullError:
            self._metrics.count("preparations_refused")
            message = "The server is busy: too many prompts are waiting for tokenization."
            raise ApiError(429, message, code="too_many_prompts") from None
        except ApiError:
            if self._closed:  # its process was killed
                raise shutting_down() from None
            raise
        finally:
            self._metrics.gauge("preparing", self.waiting)

    async def _in_thread(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """Run a job in a thread. A cancelled caller keeps its place until the thread is free."""
        running = self._threads.submit(JOBS[kind], self._reader, body, limits)
        waiter = asyncio.wrap_future(running)
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be cancelled
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            await _ended(running)
            raise
        finally:
            del running, waiter  # the error keeps this frame alive, and the frame the error


async def _ended(running: Future[Any]) -> None:
    while not running.done():
        await asyncio.sleep(0.005)
