"""Admission of requests to slots: the limits of tenants, and the waiting queue of one worker.

A request enters, may wait, is admitted, and leaves after its end, also after an error or a disconnect. Each worker has
its own slots and its own queue. Limits count a tenant's usage over all workers (blinkpy.dpu.admission.tenant_table).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from blinkpy.config import ConfigError
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.fair_queue import FairQueue, Ticket
from blinkpy.dpu.admission.keys_file import KeyRing, KeysFile
from blinkpy.dpu.admission.tenant import ANONYMOUS, Tenant
from blinkpy.dpu.admission.tenant_table import TenantTable
from blinkpy.dpu.admission.token_rates import RecentRate, TokenBucket
from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.metrics import Metrics

RESERVED = 16  # 1/RESERVED of the slots stay free for other tenants: no single tenant may take the last ones
QUANTUM = 4  # slots that a request of many choices gets at a time while others wait
LOOK_S = 0.05  # interval of checks of the waiting queue: for deadlines, and for limits that other workers no longer exhaust
MOST_REFUSED = 8  # requests in a turn of the event loop that have waited too long: their tasks end in the next turn
SETTLE_S = 0.05  # interval of charges to running requests: thousands of them take a millisecond

logger = logging.getLogger("blinkpy.frontend")


class Admission:
    """Decides which requests get slots.

    free_slots: the number of free slots in the queue pair.
    places: names of the grammars and token rules in flight, and the engine's limit on different names.
    slots: total slots of all queue pairs, free and used.

    Raises ConfigError for keys that can't be used.
    """

    def __init__(
        self,
        options: AdmissionOptions,
        keys: KeysFile,
        table: TenantTable,
        metrics: Metrics,
        free_slots: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        places: Callable[[], tuple[set[int], int]] = lambda: (set(), 1 << 30),
        slots: Callable[[], int] = lambda: 0,  # total of all queue pairs
    ):
        self._options, self._keys, self.table = options, keys, table
        self._metrics, self._free_slots, self._clock = metrics, free_slots, clock
        self._places = places  # see `places` above
        self._slots, self._used_slots = slots, dict[str, int]()  # slots of each tenant in this worker
        self._known: tuple[set[int], int] | None = None  # names of admitted requests, cached for one pass over the queue
        self._queue, self._rate, self._buckets = FairQueue(), RecentRate(), dict[str, TokenBucket]()
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}  # resolved at admission or refusal; in arrival order
        self._running: dict[Ticket, None] = {}
        self._numbers = self._reserved = self._best_effort = 0
        self._settled = -math.inf  # the last charge of all running requests, s
        self._somebody = asyncio.Event()  # waits
        self._reading = asyncio.Lock()  # concurrent reloads must install keys in the order of their reads
        self._closed: ApiError | None = None
        self._install(keys.read())

    # ---- keys --------------------------------------------------------------------------------------------------------

    def _install(self, ring: KeyRing | None) -> None:
        tenants = {ANONYMOUS.name: ANONYMOUS} if ring is None else ring.tenants
        self.table.keep([tenant.number for tenant in tenants.values()])
        self._ring, self.tenants = ring, tenants
        self._queue.forget(tenants)
        now, old = self._clock(), self._buckets
        self._buckets = {}
        self._queue.recall()
        for tenant in tenants.values():
            if tenant.tokens_per_minute is not None:
                same = old.get(tenant.name)
                if same is None or same.per_minute != tenant.tokens_per_minute:
                    same = self._bucket(tenant, tenant.tokens_per_minute, now)
                self._buckets[tenant.name] = same

    def _bucket(self, tenant: Tenant, per_minute: int, now: float) -> TokenBucket:
        """A tenant's token bucket, in the state that a worker stored last, also before a restart; full if no state is stored."""
        state = self.table.bucket(tenant.number, per_minute)
        level, seen = (float(per_minute), now) if state is None or state[1] > now else state
        return TokenBucket(per_minute, seen, self.table.total(tenant.number, "tokens"), level)

    async def reload(self) -> None:
        """Read the keys again. If that fails, the current keys stay."""
        if not self._keys.path:
            return
        async with self._reading:
            try:
                self._install(await asyncio.to_thread(self._keys.read))
            except ConfigError as error:
                logger.error("keeping the previous keys: %s; correct the file, then send SIGHUP", error)
                return
        logger.info("read %s: %d tenants", self._keys.path, len(self.tenants))
        self.admit()

    def tenant_of(self, authorization: bytes) -> Tenant:
        """The tenant of a header "Authorization". Raises ApiError with status 401."""
        if self._ring is None:
            return ANONYMOUS
        scheme, _, key = authorization.partition(b" ")
        found = self._ring.find(key.strip())
        if found is None or scheme.lower() != b"bearer":
            message = "The API key is missing or wrong: send a valid one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise ApiError(401, message, code="invalid_api_key")
        return found

    # ---- one request -------------------------------------------------------------------------------------------------

    def enter(
        self,
        tenant: Tenant,
        prompt_tokens: int,
        tokens: int,
        slots: int,
        priority: int = 0,
        best_effort: int = 0,
        names: frozenset[int] = frozenset(),
    ) -> Ticket:
        """Begin a request; the arguments are fields of Ticket.

        If ticket.inside is False, call `wait` next; call `leave` in any case. An admitted request may have only some
        of its slots: the others follow one by one, through ticket.more.

        Raises ApiError with status 400, and with 429 if a limit keeps the request out of the queue.
        """
        now = self._clock()
        tenant = self.tenants.get(tenant.name, tenant)
        if tenant.requests is not None and slots > tenant.requests:
            raise bad_request(
                f"The request needs {slots} slots, but its API key is limited to {tenant.requests}.", "n", "invalid_value"
            )
        most = self._options.max_flex_requests
        if best_effort and most and slots > most:
            raise bad_request(
                f"The request needs {slots} slots, but service tier flex is limited to {most}.", "n", "invalid_value"
            )
        self._check_rate(tenant, now)
        self._numbers += 1
        self._known = None
        ticket = Ticket(tenant, prompt_tokens, tokens, slots, priority, self._numbers, now, best_effort=best_effort, names=names)
        if not self._queue.requests and slots <= self._free() and self._allowed(ticket) >= slots:
            self._queue.pass_through(ticket)
            ticket.granted = slots
            self._take(ticket, slots, now)
            return ticket
        self._queue.push(ticket)
        ticket.turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._count_waiting(ticket, 1)
        self._show_queue()
        self._charge(ticket, prompt_tokens)
        self.admit()
        if not ticket.inside:
            try:
                self._find_place(ticket, now)
            except ApiError:
                if ticket in self._waiting:
                    self._stop_waiting(ticket)
                    self._charge(ticket, -ticket.charged)
                raise
        self._somebody.set()
        return ticket

    def convert(self, tenant: Tenant, tokens: int) -> None:
        """Charge a tenant for tokens that no engine generates, as for /tokenize. Raises ApiError with status 429 if
        its bucket is empty."""
        self._check_rate(tenant, self._clock())
        self.table.add(tenant.number, "tokens", tokens)

    def _check_rate(self, tenant: Tenant, now: float) -> None:
        bucket = self._buckets.get(tenant.name)
        if bucket is not None:
            self._settle(now)
            self._update(bucket, tenant, now)
            if bucket.level <= 0:
                raise self._refuse(tenant, "tokens_per_minute", f"{bucket.per_minute} tokens per minute", bucket.retry_s())

    def _update(self, bucket: TokenBucket, tenant: Tenant, now: float) -> None:
        bucket.update(now, self.table.total(tenant.number, "tokens"))
        self.table.set_bucket(tenant.number, bucket.per_minute, bucket.level, now)

    def _find_place(self, ticket: Ticket, now: float) -> None:
        """Raise ApiError if the request may not wait. A request that alone exceeds a limit may wait if the queue is empty."""
        if self._closed is not None:
            raise self._closed.again()
        tenant = ticket.tenant
        if tenant.waiting_tokens is not None:
            own = int(self.table.total(tenant.number, "waiting_tokens")) - ticket.tokens
            if not tenant.waiting_tokens or (own and own + ticket.tokens > tenant.waiting_tokens):
                text = f"{own} tokens of this key wait for a slot, and at most {tenant.waiting_tokens} may"
                raise self._refuse(tenant, "waiting_tokens", text, self._rate.retry_s(now, own + ticket.tokens))
        most = self._options.max_flex_waiting_tokens
        others = self._queue.best_effort_tokens - ticket.tokens
        if ticket.best_effort and most and others > 0 and others + ticket.tokens > most:
            text = f"at most {most} tokens of service tier flex may wait for a slot"
            raise self._refuse(tenant, "max_flex_waiting_tokens", text, self._rate.retry_s(now, self._queue.tokens))
        most = self._options.max_waiting_tokens
        for dropped in [ticket] if not most else self._queue.overflow(ticket, most):
            text, ahead = f"at most {most} tokens may wait for a slot", self._queue.tokens
            error = self._refuse(dropped.tenant, "max_waiting_tokens", text, self._rate.retry_s(now, ahead))
            if dropped is ticket:
                raise error.again()
            self._fail(dropped, error)

    async def wait(self, ticket: Ticket) -> None:
        """Wait for admission. Raises ApiError: status 429 after max_waiting_s, or 503."""
        if ticket.turn is not None:
            await ticket.turn
            if ticket.refusal is not None:
                raise ticket.refusal.again()

    def submitted(self, ticket: Ticket, slots: int) -> None:
        """Record that choices of a request have taken their slots of the queue pair."""
        self._reserved -= slots
        ticket.reserved -= slots

    def remove(self, ticket: Ticket) -> None:
        """End a request in any state: waiting, running or finished."""
        if ticket in self._waiting:
            self._stop_waiting(ticket)
        if ticket in self._running:
            self._settle_one(ticket)
            self._charge(ticket, -ticket.prompt_tokens * (1 - ticket.granted / ticket.slots))  # refund for choices without a slot
            del self._running[ticket]
            self.table.add(ticket.tenant.number, "requests_in_flight", -ticket.granted)
            self._best_effort -= ticket.granted if ticket.best_effort else 0
            self._used_slots[ticket.tenant.name] -= ticket.granted
            if not self._used_slots[ticket.tenant.name]:
                del self._used_slots[ticket.tenant.name]
            self.submitted(ticket, ticket.reserved)
        else:
            self._charge(ticket, -ticket.charged)
        ticket.more = ticket.refuse = None
        if self._queue.requests:
            self._queue.recall(None if ticket.names else ticket.tenant.name)  # its names or slots became free
            self.admit()

    # ---- the waiting queue --------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give free slots to waiting requests, in fair order. Call it when slots may have become free."""
        self._known = None
        if not self._queue.requests:
            return
        now = self._clock()
        if self._queue.tenants > 1:  # a charge costs time per request, and a single tenant needs no fairness
            self._settle(now)
        while (free := self._free()) > 0:
            ticket = self._queue.first(self._may_run, self._may_begin, (1,) if self._class_left() <= 0 else ())
            if ticket is None:
                return
            # A request that needs many slots takes turns with other waiting requests.
            most = free if self._queue.requests == 1 else QUANTUM
            self._grant(ticket, min(free, most, self._allowed(ticket)), now)

    def _grant(self, ticket: Ticket, slots: int, now: float) -> None:
        """Give a waiting request some of its slots, and notify it."""
        self._numbers += 1
        self._queue.grant(ticket, slots, self._numbers)
        future, first = self._waiting.pop(ticket), not ticket.inside
        self._take(ticket, slots, now)
        if first:
            self._count_waiting(ticket, -1)
        self._show_queue()
        if ticket.granted < ticket.slots:
            ticket.since = now
            self._waiting[ticket] = future
        if first and not future.done():
            future.set_result(None)
        elif not first:
            asyncio.get_running_loop().call_soon(_continue, ticket)  # the poll that freed the slot must finish first

    def refuse_all(self, error: ApiError, permanent: bool = False) -> None:
        """Refuse all waiting requests. permanent: also refuse later requests."""
        self._closed = error if permanent else self._closed
        for ticket in list(self._waiting):
            self._fail(ticket, error)

    def sweep(self) -> None:
        """Charge tenants for generated tokens. Call it about once a second."""
        for ticket in self._running:
            self._settle_one(ticket)
        now = self._clock()
        for name, bucket in self._buckets.items():
            self._update(bucket, self.tenants[name], now)

    def _free(self) -> int:
        return self._free_slots() - self._reserved

    def _may_run(self, ticket: Ticket) -> bool:
        return self._allowed(ticket) > 0

    def _may_begin(self, tenant: Tenant, best_effort: int) -> bool:
        """Whether the limits of a tenant and a class permit a first slot."""
        tenant = self.tenants.get(tenant.name, tenant)
        return min(self._within_limits(tenant, best_effort), self._beyond_reserve(tenant)) > 0

    def _allowed(self, ticket: Ticket) -> int:
        """How many more slots the limits of tenant and class permit this request; 0 if the engine can't store its grammar now."""
        tenant = self.tenants.get(ticket.tenant.name, ticket.tenant)
        missing, unreserved = ticket.slots - ticket.granted, self._beyond_reserve(tenant)
        if unreserved < missing:  # slots of ended choices are free
            unreserved += sum(not generation.open for generation in ticket.generations[: ticket.granted])
        allowed = int(min(missing, unreserved, self._within_limits(tenant, ticket.best_effort)))
        return 0 if allowed > 0 and ticket.names and not self._has_places(ticket.names) else allowed

    def _class_left(self) -> float:
        """How many more slots best effort may take under max_flex_requests."""
        most = self._options.max_flex_requests
        return most - self._best_effort if most else math.inf

    def _within_limits(self, tenant: Tenant, best_effort: int) -> float:
        """How many more slots max_flex_requests and the tenant's limit permit."""
        left = self._class_left() if best_effort else math.inf
        if tenant.requests is not None:
            left = min(left, tenant.requests - self.table.total(tenant.number, "requests_in_flight"))
        return left

    def _beyond_reserve(self, tenant: Tenant) -> float:
        """How many more slots a tenant may take without using the reserve of other tenants."""
        slots = self._slots()
        reserve = slots // RESERVED if len(self.tenants) > 1 else 0
        return slots - reserve - self._used_slots.get(tenant.name, 0) if reserve else math.inf

    def _has_places(self, names: frozenset[int]) -> bool:
        """Whether the engine can store this grammar and these token rules now."""
        if self._known is None:
            known, most = self._places()
            known = known.union(*(ticket.names for ticket in self._running if ticket.reserved and ticket.names))
            self._known = known, most
        known, most = self._known
        if len(known) >= most:
            return names <= known
        return len(known | names) <= most

    def _take(self, ticket: Ticket, slots: int, now: float) -> None:
        """Record that an admitted request got more slots."""
        self._known = None
        self._used_slots[ticket.tenant.name] = self._used_slots.get(ticket.tenant.name, 0) + slots
        self._best_effort += slots if ticket.best_effort else 0
        self._reserved += slots
        ticket.reserved += slots
        if not ticket.inside:
            ticket.inside, ticket.waited = True, now - ticket.since
            self._running[ticket] = None
            self._rate.add(now, ticket.tokens)
            if not ticket.charged:
                self._charge(ticket, ticket.prompt_tokens)
            self.table.add(ticket.tenant.number, "requests", 1)
        self.table.add(ticket.tenant.number, "requests_in_flight", slots)

    async def watch(self) -> None:
        """Serve the waiting queue until cancelled."""
        while True:
            await self._somebody.wait()
            await asyncio.sleep(LOOK_S)
            while self._look():
                await asyncio.sleep(0)

    def _look(self) -> bool:
        """Refuse up to MOST_REFUSED requests that waited too long, and admit others. Returns whether to call it again soon."""
        deadline = self._clock() - self._options.max_waiting_s
        for refused in range(MOST_REFUSED + 1):
            ticket = next(iter(self._waiting), None)
            if ticket is None or ticket.since > deadline:
                break
            if refused == MOST_REFUSED:
                return True
            text = f"the request has waited {self._options.max_waiting_s} s for a slot"
            retry_s = self._rate.retry_s(self._clock(), self._queue.tokens)
            self._fail(ticket, self._refuse(ticket.tenant, "max_waiting_s", text, retry_s))
        self._queue.recall()  # other workers may have ended requests of tenants at their limits
        self.admit()
        if not self._waiting:
            self._somebody.clear()
        return False

    def _stop_waiting(self, ticket: Ticket) -> asyncio.Future[None]:
        self._queue.remove(ticket)
        if not ticket.granted:
            self._count_waiting(ticket, -1)
        self._show_queue()
        return self._waiting.pop(ticket)

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        future = self._stop_waiting(ticket)
        if ticket.inside:  # it already has some slots
            if ticket.refuse is not None:
                ticket.refuse(error)
            return
        self._charge(ticket, -ticket.charged)
        ticket.refusal = error
        if not future.done():
            future.set_result(None)

    # ---- accounts ----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Charge all running requests for their generated tokens, at most once per SETTLE_S."""
        if now - self._settled >= SETTLE_S:
            self._settled = now
            for ticket in self._running:
                self._settle_one(ticket)

    def _settle_one(self, ticket: Ticket) -> None:
        """Charge a request for the tokens generated since the last charge."""
        more = ticket.prompt_tokens + sum(generation.tokens for generation in ticket.generations) - ticket.charged
        if more > 0:
            self._charge(ticket, more)
            self._queue.charge(ticket.tenant, more)

    def _charge(self, ticket: Ticket, tokens: float) -> None:
        ticket.charged += tokens
        self.table.add(ticket.tenant.number, "tokens", tokens)

    def _count_waiting(self, ticket: Ticket, sign: int) -> None:
        self.table.add(ticket.tenant.number, "waiting_requests", sign)
        self.table.add(ticket.tenant.number, "waiting_tokens", sign * ticket.tokens)

    def _show_queue(self) -> None:
        self._metrics.gauge("waiting_requests", self._queue.requests)
        self._metrics.gauge("waiting_tokens", self._queue.tokens)

    def _refuse(self, tenant: Tenant, limit: str, text: str, retry_s: int) -> ApiError:
        """Count a refusal, and return its 429. The error's code is the limit's name."""
        self._metrics.count(f"refused_{limit}")
        self.table.add(tenant.number, "requests_refused", 1)
        return ApiError(429, f"The server is busy: {text} ({limit}).", code=limit, retry_s=retry_s)


def _continue(ticket: Ticket) -> None:
    if ticket.more is not None:
        ticket.more()
