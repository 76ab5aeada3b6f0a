"""Requests on their way to the engine, beside an event loop: in bounded lines, for threads and for processes."""

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
from blinkpy.dpu.fork_server.fork_server import ForkServer
from blinkpy.dpu.http.preparation.job_server import pack_head
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, RequestReader
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.started_threads import started_threads

# Requests that are prepared in processes of their own, by blinkpy.dpu.http.preparation.job_server.

SERVER = "blinkpy.dpu.http.preparation.job_server"
MARGIN_S = 20.0  # for processes to start and to get their share of the CPU, beside the time to prepare


class JobForks:
    """folder: the model's."""

    def __init__(self, config: Config, folder: Path):
        limit_s = 2 * config.frontend.prepare_ms / 1000 + MARGIN_S
        self._forks = ForkServer(SERVER, [dict(as_table(config)), str(folder)], limit_s)
        self.start, self.close = self._forks.start, self._forks.close

    async def run(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """The job's result. Whoever cancels this ends the process. Raises ApiError, with status 413 for a job of more time or
        memory than the options allow, and RuntimeError for a fault of the job."""
        answer = await self._forks.run(pack_head(kind, limits), body)
        outcome: str = "too much"
        result: Any = None
        if answer:
            outcome, result = pickle.loads(answer)  # of our own process
        if outcome == "too much":
            message = "Parsing and tokenizing the request takes too much time or memory."
            raise ApiError(413, message, code="too_costly", limit="prepare_ms")
        if outcome == "error":
            status, message, param, code, limit = result
            raise ApiError(status, message, param=param, code=code, limit=limit)
        if outcome == "fault":
            raise RuntimeError(f"a request's preparation failed:\n{result}")
        return result


THREAD_BYTES = 1 << 16  # of one that a thread prepares: under 0.1 s, and it can't be stopped; a larger one gets a process
AT_ONCE = max(1, min(4, os.cpu_count() or 1))  # threads, and processes


def body_room(options: FrontendOptions) -> int:
    """Bytes of bodies that may arrive at a time, and again wait in a line: half the option, but at least one body."""
    return max(options.body_room_mib << 19, options.max_body_bytes)


class PreparationQueue:
    """Runs JOBS. Large bodies and middling ones have their own lines, each bounded in number and bytes. Whoever
    cancels run() leaves the line at once, and ends the process that works for him.
    """

    def __init__(self, reader: RequestReader, config: Config, folder: Path, metrics: Metrics):
        options = config.frontend
        self._reader, self._metrics = reader, metrics
        self._threads = started_threads(AT_ONCE, "prepare")
        self._forks = JobForks(config, folder)
        half = body_room(options)
        self._middling = Places(AT_ONCE, options.max_preparing, half)
        # Jobs in processes are long: another owner finds a place while one has all that it may have.
        self._large = Places(2 * AT_ONCE, options.max_preparing, half, of_one=AT_ONCE)
        self._closed = False

    def start(self) -> None:
        """Start the process for large bodies now."""
        self._forks.start()

    def refuse(self) -> None:
        """Who waits from now on is refused with status 503, and the processes end."""
        self._closed = True
        self._forks.close()

    def close(self) -> None:
        """End threads, after what they do, and processes."""
        self.refuse()
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Bodies in the lines, with those that are being prepared."""
        return self._middling.waiting + self._large.waiting

    async def run(self, kind: str, body: bytearray, limits: EngineLimits, asker: Asker) -> Any:
        """The result of a job. Raises ApiError: what the job raises, or status 429 where the line is full."""
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
            if self._closed:  # its process was ended
                raise shutting_down() from None
            raise
        finally:
            self._metrics.gauge("preparing", self.waiting)

    async def _in_thread(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """Who is cancelled keeps his place until the thread is free."""
        running = self._threads.submit(JOBS[kind], self._reader, body, limits)
        waiter = asyncio.wrap_future(running)
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to ask for it
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            await _ended(running)
            raise
        finally:
            del running, waiter  # an error keeps this frame, and they the error


async def _ended(running: Future[Any]) -> None:
    while not running.done():
        await asyncio.sleep(0.005)
