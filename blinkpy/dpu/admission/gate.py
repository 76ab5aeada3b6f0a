"""The gate of a worker schedules all work that clients can cause, on the event loop or in a pool.

On the event loop, a turn runs work until its budget of milliseconds is used up; then streams, timers and sockets run. The order
is fair between tenants by weight, and by arrival within a tenant. Clients that have not shown a key are one tenant, shared fairly
between addresses. Their TLS handshakes are a separate tenant, so connections whose handshake has begun go first. Work is charged
by CPU time, not by wall time: an owner charged while its thread had no core could wait a minute behind a thousand addresses.

A pool (`Places`) applies the same rules to threads and processes: a fixed number of places, a bounded queue, fair between
tenants, and cancellation when the client disconnects.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from blinkpy.dpu.admission.fair_line import FairLine
from blinkpy.dpu.metrics import Metrics

TURN_S = 0.002  # time for work per turn of the event loop while streams run
IDLE_TURN_S = 0.01  # and without streams
# Tenants for clients without a key, with their weights. A client that closed its side may still read an answer.
STRANGERS, LEFT = "clients without a key", "clients that have left"
HANDSHAKES, KNOWN = "TLS handshakes", "TLS handshakes from tenants' addresses"  # newest and oldest item alternately
GROUPS = {STRANGERS: 1.0, HANDSHAKES: 1.0, KNOWN: 1.0, LEFT: 1 / 16}

logger = logging.getLogger("blinkpy.frontend")

Result = TypeVar("Result")


class Asker(NamedTuple):
    """The owner of a piece of work."""

    name: str  # the tenant's name, or the address of a client without a key
    weight: float = 1.0
    group: str = ""  # "" for a tenant, otherwise one of GROUPS; STRANGERS and HANDSHAKES have no key


ACCEPTED, ACCEPTING = Asker("accepted connections"), 0.5  # owner of the work of accepting, and its weight per waiting owner


@dataclass(slots=True, eq=False)
class Ask:
    """Work that waits for the event loop. run: None after cancellation."""

    asker: Asker
    run: Callable[[], None] | None
    since: float  # s


class Gate:
    """Work on the event loop. lag_s: maximum wait of an owner's oldest work, in s; beyond it, the owner's new requests are
    refused.
    streaming: whether streams run. cpu: CPU time of the thread, s."""

    def __init__(
        self,
        lag_s: float,
        metrics: Metrics,
        streaming: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ):
        self._lag_s, self._metrics, self._clock, self._cpu = lag_s, metrics, clock, cpu
        self.streaming = streaming
        self._line = FairLine[Ask | None]()  # None: work of a group
        self._groups = {group: FairLine[Ask](group in (HANDSHAKES, KNOWN)) for group in GROUPS}
        self._spent = 0.0  # in this turn of the event loop, s
        self._turned = clock()  # when the last turn ended, s
        self._scheduled = False

    def ask(self, asker: Asker, run: Callable[[], None], *, later: bool = False) -> Ask:
        """Run work now if this turn has time and no other work waits, otherwise in a later turn.

        run: must not raise.
        later: never run it now, because the caller has no time.
        """
        ask = Ask(asker, run, self._clock())
        if not later and not self._line.count and self._spent < self._budget():
            self._run(ask)
        elif asker.group:
            self._groups[asker.group].push(asker.name, asker.weight, ask)
            self._line.push(asker.group, GROUPS[asker.group], None)
        else:
            weight = ACCEPTING * max(1, self._line.owners) if asker is ACCEPTED else asker.weight
            self._line.push(asker.name, weight, ask)
        self._schedule()
        return ask

    async def run(self, asker: Asker, work: Callable[[], Result]) -> Result:
        """Run work in its turn, and return its result. Cancelling the caller cancels the work. Exceptions of the work
        propagate."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        results, errors = list[Result](), list[Exception]()

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)
            if not done.done():
                done.set_result(None)

        ask = self.ask(asker, run)
        try:
            await done
            if errors:
                raise errors.pop()
            return results.pop()
        finally:
            if ask.run is not None:
                self.cancel(ask)
            errors.clear()  # an error keeps this frame

    def cancel(self, ask: Ask) -> None:
        """Cancel waiting work."""
        ask.run = None
        name, _, group = ask.asker
        if not group:
            self._line.remove(name, ask)
        elif self._groups[group].remove(name, ask):
            self._line.remove(group, None)

    def late(self, asker: Asker) -> bool:
        """Whether, at the end of the last turn, an owner's oldest work had waited longer than lag_s. Pauses of the process do not
        count."""
        ask = self._groups[asker.group].head(asker.name) if asker.group else self._line.head(asker.name)
        return ask is not None and self._turned - ask.since > self._lag_s

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a turn."""
        return self._line.count

    def _budget(self) -> float:
        return TURN_S if self.streaming() else IDLE_TURN_S

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled, self._spent = False, 0.0
        budget, lag, began = self._budget(), 0.0, self._clock()
        while self._clock() - began < budget:  # cancelled work takes time, too
            found = self._line.pop()
            if found is None:
                break
            group, ask = found
            if ask is None:
                first = self._groups[group].pop()
                assert first is not None
                ask = first[1]
            lag = self._clock() - ask.since
            self._run(ask)
        self._turned = self._clock()
        self._metrics.gauge("lag_seconds", lag if self._line.count else 0.0)
        if self._line.count or self._spent:
            self._schedule()

    def _run(self, ask: Ask) -> None:
        run, ask.run = ask.run, None
        if run is None:
            return
        began, used = self._clock(), self._cpu()
        try:
            run()
        except Exception:
            logger.exception("work on the event loop failed")
        used = self._cpu() - used
        self._spent += self._clock() - began
        if ask.asker.group:
            self._groups[ask.asker.group].charge(ask.asker.name, used)
            self._line.charge(ask.asker.group, used)
        else:
            self._line.charge(ask.asker.name, used)


class FullError(Exception):
    """The queue of a pool is full."""


class _Waiter(NamedTuple):
    asker: Asker
    turn: asyncio.Future[bool]  # True: it has a place; False: it was dropped in favour of another owner's


class Places:
    """A pool of `count` places; one owner holds at most `of_one` (0: all). At most most_waiting jobs wait or run, with at most
    most_bytes in total. Beyond that, the owner with the most waiting bytes loses its newest job."""

    def __init__(self, count: int, most_waiting: int, most_bytes: float = float("inf"), of_one: int = 0):
        self._count, self._of_one = count, of_one or count
        self.most_waiting, self.most_bytes = most_waiting, most_bytes
        self._line = FairLine[_Waiter]()
        self._places: dict[str, int] = {}  # places of each owner
        self.used = 0
        self._bytes = 0.0  # total of running jobs
        self._mean_s = 0.01  # mean duration of a job; charged to its owner at the start

    @property
    def waiting(self) -> int:
        """Number of waiting and running jobs."""
        return self._line.count + self.used

    @property
    def bytes(self) -> float:
        """Bytes of waiting and running jobs."""
        return self._line.size + self._bytes

    @asynccontextmanager
    async def place(self, asker: Asker, size: int = 1) -> AsyncIterator[None]:
        """Hold a place during the `with` block. size: bytes of the job. Raises FullError."""
        await self._enter(asker, size)
        self._bytes += size
        began, estimate = time.monotonic(), self._mean_s
        try:
            yield
        finally:
            took = time.monotonic() - began
            self._mean_s += (min(took, 1.0) - self._mean_s) / 16
            self._line.charge(asker.name, took - estimate)
            self._bytes -= size
            self._release(asker)

    async def _enter(self, asker: Asker, size: int) -> None:
        free = self.used < self._count and self._places.get(asker.name, 0) < self._of_one and not self._line.count
        if free and self.used < self.most_waiting and self._bytes + size <= self.most_bytes:
            self._take(asker.name)
            return
        waiter = _Waiter(asker, asyncio.get_running_loop().create_future())
        self._line.push(asker.name, asker.weight, waiter, size)
        self._drop(waiter)
        self._hand_out()
        try:
            placed = await waiter.turn
        except asyncio.CancelledError:
            placed = waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.result()
            if not self._line.remove(asker.name, waiter) and placed:
                self._release(asker)
            raise
        if not placed:
            raise FullError

    def _drop(self, newest: _Waiter) -> None:
        """Evict jobs until the newest fits, or drop it."""
        line = self._line
        while line.count and (self.waiting > self.most_waiting or self.bytes > self.most_bytes):
            name = line.largest()
            waiter = newest if name == newest.asker.name else line.last(name)
            line.remove(name, waiter)
            if not waiter.turn.done():  # else its task is cancelled, and has not run yet
                waiter.turn.set_result(False)
            if waiter is newest:
                return

    def _take(self, name: str) -> None:
        self._places[name] = self._places.get(name, 0) + 1
        self.used += 1
        self._line.charge(name, self._mean_s)

    def _release(self, asker: Asker) -> None:
        self.used -= 1
        self._places[asker.name] -= 1
        if not self._places[asker.name]:
            del self._places[asker.name]
        self._hand_out()

    def _hand_out(self) -> None:
        while self.used < self._count:
            full = {name for name, places in self._places.items() if places >= self._of_one}
            found = self._line.pop(full)
            if found is None:
                return
            name, waiter = found
            if not waiter.turn.done():  # else its task is cancelled, and has not run yet
                self._take(name)
                waiter.turn.set_result(True)
