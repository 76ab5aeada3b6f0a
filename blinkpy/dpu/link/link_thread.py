"""The link thread of a worker: it sends heartbeats and checks the engines, independently of the event loop's work.

It publishes two signs of life:
- *alive*: this thread runs. The engine's lease depends on it (FRONT_HEARTBEAT). A worker whose event loop is
  blocked keeps its slots, and the completions of its requests wait in the ring.
- *progress*: the event loop runs. /health and the supervisor use it. A loop blocked for longer than the stall
  limit counts as dead: the heartbeats end, the lease expires, and the supervisor replaces the worker.

The thread only sleeps between its rounds, so it gets the GIL within a switch interval. A single call that
holds the GIL delays it by the call's duration; the margin is three quarters of a lease.
benchmarks/parts/beat_gap.py measures such calls.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from blinkpy.dpu.link.queue_pair import EngineLostError, QueuePair
from blinkpy.kept_process import BeatWatch
from blinkpy.transport.contract import TransportError

CHECK_S = 0.1  # maximum time between two rounds; a quarter of the shortest lease if that is less
STALL_SHOWN_S = 5.0  # time after which the stack of a blocked event loop is logged
STALL_LIMIT_S = 120  # the default of --worker-hang-s
ALIVE, PROGRESS = range(2)  # int64 words of a worker: counts of the thread's and the event loop's rounds
WORDS_BYTES = 16

logger = logging.getLogger("blinkpy.frontend")

OnLoss = Callable[[QueuePair, Exception], None]


@dataclass(slots=True, eq=False)
class _Watched:
    """One queue pair. on_loss: called once, in the link thread, with the reason."""

    pair: QueuePair
    on_loss: OnLoss
    checked: float  # when the engine was last seen alive, s of the monotonic clock


class LinkThread:
    """Sends heartbeats for queue pairs and checks their engines, in a separate thread.

    words: WORDS_BYTES of shared memory, for the supervisor; None without a supervisor.
    stall_limit_s: the leases end if the event loop is blocked for longer; 0: no limit.
    on_failure: called in the link thread with an exception that ended it.
    """

    def __init__(
        self,
        words: memoryview | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        self._words = (words if words is not None else memoryview(bytearray(WORDS_BYTES))).cast("B").cast("q")
        self._stall_limit_s, self.on_failure = stall_limit_s, on_failure
        self._pairs = dict[int, _Watched]()  # by id(pair)
        self._lock = threading.Lock()  # for _pairs; held during one queue pair's heartbeat and check
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.progressed = time.monotonic()  # last progress of the event loop, s
        self._loop_thread = 0  # its thread id
        self._stall = BeatWatch(stall_limit_s)
        self._stalled = False  # the loop's stack was logged

    # ---- from the event loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Call it in the event loop's thread; a second call has no effect."""
        if self._thread is None:
            self._loop_thread = threading.get_ident()
            self.progress()
            self._thread = threading.Thread(target=self._run, name="link", daemon=True)
            self._thread.start()

    def progress(self) -> None:
        """Report that the event loop runs. Call it several times per second."""
        self.progressed = time.monotonic()
        self._words[PROGRESS] += 1

    async def report_progress(self) -> None:
        """Report progress of the running event loop until cancelled."""
        while True:
            self.progress()
            await asyncio.sleep(CHECK_S)

    def add(self, pair: QueuePair, on_loss: OnLoss) -> None:
        """Send heartbeats for a newly attached queue pair until its loss or remove()."""
        with self._lock:
            self._pairs[id(pair)] = _Watched(pair, on_loss, time.monotonic())
        self._wake.set()

    def remove(self, pair: QueuePair) -> None:
        """Stop using a queue pair. On return, no call of this thread uses it."""
        with self._lock:
            self._pairs.pop(id(pair), None)

    def checked(self, pair: QueuePair) -> float:
        """When its engine was last seen alive, s of the monotonic clock; 0 after its loss."""
        watched = self._pairs.get(id(pair))
        return 0.0 if watched is None else watched.checked

    def problem_of(self, pair: QueuePair) -> str | None:
        """The problem, as a sentence, if for half a lease the queue pair had no heartbeat or the event loop did not run.
        Otherwise None.
        """
        oldest = time.monotonic() - pair.facts.lease_ms / 2000
        if self.checked(pair) < oldest:
            return "The queue pair has had no heartbeat for half its lease."
        return "The event loop has not run for half a lease." if self.progressed < oldest else None

    def close(self) -> None:
        """End the thread. All queue pairs must be removed before."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CHECK_S)

    # ---- in the link thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self.round()
                self._wake.wait(self._pause_s())
                self._wake.clear()
        except Exception as error:
            self.on_failure(error)

    def _pause_s(self) -> float:
        return min([CHECK_S, *(one.pair.facts.lease_ms / 4000 for one in list(self._pairs.values()))])

    def round(self) -> None:
        """Send one heartbeat and check the engine of each queue pair, unless the event loop counts as
        dead.
        """
        self._words[ALIVE] += 1
        if self._loop_is_dead():
            return
        for one in list(self._pairs.values()):
            self._beat(one)

    def _beat(self, one: _Watched) -> None:
        error: Exception | None = None
        with self._lock:
            if self._pairs.get(id(one.pair)) is not one:
                return
            try:
                one.pair.beat()
                one.pair.check()
                one.checked = time.monotonic()
            except (EngineLostError, TransportError) as lost:
                del self._pairs[id(one.pair)]
                error = lost
        if error is not None:
            one.on_loss(one.pair, error)

    def _loop_is_dead(self) -> bool:
        """Whether the event loop is blocked for longer than the limit. Logs its stack earlier."""
        dead = self._stall.is_over(self._words[PROGRESS], time.monotonic())
        still_s = self._stall.still_s
        if self._stalled and still_s < STALL_SHOWN_S:
            self._stalled = False
            logger.warning("the event loop is running again")
        elif not self._stalled and still_s >= STALL_SHOWN_S:
            self._stalled = True
            limit = f"for {self._stall_limit_s:g} s" if self._stall_limit_s else "without a limit"
            logger.warning(
                "the event loop has been blocked for %.0f s; its requests keep their slots %s. Its stack:\n%s",
                still_s, limit, _stack_of(self._loop_thread),
            )  # fmt: skip
        return dead


def _stack_of(thread: int) -> str:
    """The stack of a thread, as text."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  a thread that has ended"
