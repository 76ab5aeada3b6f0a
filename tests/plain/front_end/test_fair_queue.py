"""The order of waiting requests: fair between tenants within a bound, without starvation.

Claim decisions/front-end-queue: The front end's queue serves by weight, and no tenant starves. Limits are
exact (tokens per minute lag by up to 50 ms), and no slot is lost when clients disconnect.
"""

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkpy.dpu.admission.fair_queue import MOST_AHEAD, MOST_PASSED, FairQueue, Ticket
from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.dpu.admission.token_rates import RETRY_S, RecentRate, TokenBucket

NAMES = ("a", "b", "c")
SLOTS, PROMPT, OUTPUT = 5, 100, 40  # of a simulated server: slots, and most tokens
WEIGHTS = st.tuples(*(st.sampled_from((0.25, 1.0, 2.0, 3.5)) for _ in NAMES))
COUNTS = ("_served", "_last", "_ahead", "_waiting", "_tokens", "tokens", "requests", "best_effort", "best_effort_tokens")
SERVED = st.integers(0, 2**32)  # a seed: lists of Hypothesis are short


def work_of(seed: int) -> list[tuple[int, int, int]]:
    """Requests in service: tokens of prompt and output, and the running requests that end before."""
    draw = random.Random(seed)
    largest = draw.choice((1, PROMPT // 4, PROMPT))
    return [(draw.randint(1, largest), draw.randint(0, OUTPUT), draw.randrange(SLOTS)) for _ in range(draw.randint(1, 250))]


def admit_all(ticket: Ticket) -> bool:
    return True


def any_tenant(tenant: Tenant, best_effort: int) -> bool:
    return True


class Clients:
    """Tenants that always have a few requests waiting. served: tokens of each, counted here."""

    def __init__(self, weights: tuple[float, ...]):
        self.tenants = {name: Tenant(name, weight=weight) for name, weight in zip(NAMES, weights, strict=True)}
        self.queue, self.served, self.running = FairQueue(), dict.fromkeys(NAMES, 0), list[tuple[str, int]]()
        self.number = 0

    def fill(self, name: str, prompt: int) -> None:
        """See to it that two requests of a tenant wait."""
        while len(self.queue._waiting.get(name, ())) < 2:
            self.number += 1
            self.queue.push(Ticket(self.tenants[name], prompt, prompt + OUTPUT, 1, number=self.number))

    def serve(self, output: int, ending: int) -> str:
        """The next one gets a slot; if all are taken, one ends first, and its output is charged."""
        if len(self.running) == SLOTS:
            name, tokens = self.running.pop(ending)
            self.charge(name, tokens)
        ticket = self.queue.first(admit_all, any_tenant)
        assert ticket is not None
        self.queue.remove(ticket)
        self.charge(ticket.tenant.name, ticket.prompt_tokens)
        self.running.append((ticket.tenant.name, output))
        return ticket.tenant.name

    def charge(self, name: str, tokens: int) -> None:
        self.queue.charge(self.tenants[name], tokens)
        self.served[name] += tokens

    def shares(self, since: dict[str, int]) -> list[float]:
        """Service by weight since a moment."""
        return [(self.served[name] - since.get(name, 0)) / self.tenants[name].weight for name in NAMES]


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, SERVED)
def test_backlogged_tenants_are_served_by_weight_within_the_bound(weights, work) -> None:
    """The bound of the module: one prompt and the outputs that run, by the lesser weight. At every moment."""
    clients = Clients(weights)
    for prompt, output, ending in work_of(work):
        for name in NAMES:
            clients.fill(name, prompt)
        clients.serve(output, ending)
        shares = clients.shares({})
        assert max(shares) - min(shares) <= (PROMPT + SLOTS * OUTPUT) / min(weights)


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, SERVED, SERVED)
def test_a_newcomer_has_no_credit(weights, before, after) -> None:
    """The last tenant comes late: afterwards its service is bounded as if all had begun there."""
    clients = Clients(weights)
    for prompt, output, ending in work_of(before):
        for name in NAMES[:2]:
            clients.fill(name, prompt)
        clients.serve(output, ending)
    since = dict(clients.served)
    for prompt, output, ending in work_of(after):
        for name in NAMES:
            clients.fill(name, prompt)
        clients.serve(output, ending)
        shares = clients.shares(since)
        assert max(shares) - min(shares) <= 2 * (PROMPT + SLOTS * OUTPUT) / min(weights)


def test_service_without_competition_leaves_no_debt() -> None:
    """A newcomer, too, begins where the last one left."""
    queue, a, b = FairQueue(), Tenant("a"), Tenant("b")
    for number in range(50):
        alone = Ticket(a, 100, 100, 1, number=number)
        queue.push(alone)
        queue.remove(alone)
        queue.charge(a, 100)
    for number, tenant in enumerate((b, b, b, a, a, a)):
        queue.push(Ticket(tenant, 100, 100, 1, number=100 + number))
    order = []
    while (ticket := queue.first(admit_all, any_tenant)) is not None:
        queue.remove(ticket)
        queue.charge(ticket.tenant, 100)
        order.append(ticket.tenant.name)
    assert order in (list("babbaa"), list("bbabaa"), list("bababa")), "the last 100 tokens of the other may count"


def test_bypassing_an_empty_queue_is_equivalent_to_waiting(rng) -> None:
    queues, tenants = (FairQueue(), FairQueue()), [Tenant(name, weight=float(rng.uniform(0.5, 4))) for name in "abc"]
    number = 0
    for _ in range(300):
        crowd = [] if rng.random() < 0.7 else rng.integers(3, size=int(rng.integers(1, 12))).tolist()
        for which in (*crowd, int(rng.integers(3))):
            number += 1
            facts = {"prompt_tokens": int(rng.integers(1, 99)), "best_effort": int(rng.random() < 0.3), "number": number}
            for queue in queues:
                ticket = Ticket(tenants[which], tokens=100, slots=1, **facts)
                if crowd:
                    queue.push(ticket)
                elif queue is queues[0]:
                    queue.pass_through(ticket)
                else:
                    queue.push(ticket)
                    queue.admit(ticket)
        for queue in queues:
            while (first := queue.first(admit_all, any_tenant)) is not None:
                (queue.admit if first.number % 3 else queue.remove)(first)  # some give up
        assert all(getattr(queues[0], name) == getattr(queues[1], name) for name in COUNTS)


def test_waiting_requests_of_a_tenant_at_its_limits_are_not_judged_one_by_one(rng) -> None:
    """The requests that may run are the same as with a look at each."""
    for _ in range(50):
        queue, tenants = FairQueue(), [Tenant(name) for name in "abcd"]
        limited = {(tenant.name, kind) for tenant in tenants for kind in (0, 1) if rng.random() < 0.5}
        for number in range(200):
            ticket = Ticket(tenants[rng.integers(4)], 1, 2, 2, best_effort=int(rng.random() < 0.5), number=number)
            ticket.granted = int(rng.random() < 0.05)
            queue.push(ticket)
        odd = {number for number in range(200) if rng.random() < 0.3}
        judged = list[Ticket]()

        def may_begin(tenant: Tenant, best_effort: int, limited: set[tuple[str, int]] = limited) -> bool:
            return (tenant.name, best_effort) not in limited

        def may_run(ticket: Ticket, odd: set[int] = odd, judged: list[Ticket] = judged) -> bool:
            judged.append(ticket)
            return ticket.number in odd and bool(ticket.granted or may_begin(ticket.tenant, ticket.best_effort))

        while (found := queue.first(may_run, may_begin)) is not None:
            queue.recall()
            assert found is queue.first(may_run, any_tenant)
            judged.clear()
            queue.recall()
            queue.first(may_run, may_begin)
            assert all(one.granted or may_begin(one.tenant, one.best_effort) for one in judged)
            queue.remove(found)
        queue.recall()
        assert queue.first(may_run, any_tenant) is None


class ScannedQueue:
    """The order of the module's docstring, by a look at every request."""

    def __init__(self) -> None:
        self.waiting, self.served = list[Ticket](), dict[str, float]()
        self.last, self.ahead = 0.0, 0

    def push(self, ticket: Ticket) -> None:
        name = ticket.tenant.name
        others = {one.tenant.name for one in self.waiting}
        if name not in others:
            self.served[name] = max(self.served.get(name, 0.0), min((self.served[other] for other in others), default=self.last))
        self.waiting.append(ticket)

    def next(self, may_run: Callable[[Ticket], bool]) -> Ticket | None:
        def heads(name: str, best_effort: int) -> list[Ticket]:
            own = [one for one in self.waiting if (one.tenant.name, one.best_effort) == (name, best_effort)]
            return sorted(own, key=lambda one: one.order)

        for best_effort in (0, 1) if self.ahead < MOST_AHEAD else (1, 0):
            lines = [line for name in self.served if (line := heads(name, best_effort))]
            for line in sorted(lines, key=lambda line: (self.served[line[0].tenant.name], line[0].number)):
                for ticket in line[:MOST_PASSED]:
                    if may_run(ticket):
                        return ticket
        return None

    def leave(self, ticket: Ticket) -> None:
        self.waiting.remove(ticket)
        if not self.waiting:
            self.last = self.served[ticket.tenant.name]


def test_the_order_is_that_of_a_look_at_every_request(rng) -> None:
    """Random requests of tenants with limits, of two classes, that need places or not, come, get some or all of their slots, and
    leave. A tenant is recalled only if its limit, or a place, may have changed; more slots for its own requests recall none."""
    for _ in range(12):
        names = [f"t{number}" for number in range(int(rng.integers(1, 12)))]
        tenants = {name: Tenant(name, weight=float(rng.uniform(0.3, 4)), by_priority=rng.random() < 0.3) for name in names}
        queue, scan = FairQueue(), ScannedQueue()
        limited, placed, closed = set[tuple[str, int]](), set[int](range(4)), set[int]()
        stuck = set[str]()  # tenants whose requests with slots get no further ones

        def may_begin(tenant: Tenant, best_effort: int, limited: set[tuple[str, int]] = limited) -> bool:
            return (tenant.name, best_effort) not in limited

        def may_run(
            ticket: Ticket, limited: set[tuple[str, int]] = limited, placed: set[int] = placed, stuck: set[str] = stuck
        ) -> bool:
            name = ticket.tenant.name
            able = name not in stuck if ticket.granted else (name, ticket.best_effort) not in limited
            return able and ticket.names <= placed

        def open_to(ticket: Ticket, closed: set[int] = closed, may_run: Callable[[Ticket], bool] = may_run) -> bool:
            return ticket.best_effort not in closed and may_run(ticket)

        for number in range(1, 400):
            act, name = rng.random(), names[rng.integers(len(names))]
            stuck.symmetric_difference_update({name} if rng.random() < 0.1 else ())
            if act < 0.4:
                facts = {"priority": int(rng.integers(3)), "best_effort": int(rng.random() < 0.3), "number": number}
                needs = frozenset({int(rng.integers(8))} if rng.random() < 0.3 else ())
                ticket = Ticket(tenants[name], int(rng.integers(1, 99)), 100, int(rng.integers(1, 5)), names=needs, **facts)
                queue.push(ticket)
                scan.push(ticket)
            elif act < 0.7:
                expected, found = scan.next(open_to), queue.first(may_run, may_begin, closed)
                assert found is expected
                if found is not None:
                    slots = int(rng.integers(1, found.slots - found.granted + 1))
                    whole = found.granted + slots == found.slots
                    others = any(one.best_effort for one in scan.waiting if not (whole and one is found))
                    queue.grant(found, slots, number)
                    if found.granted == found.slots:
                        scan.leave(found)
                    scan.ahead = 0 if found.best_effort or not others else scan.ahead + 1
                    scan.served[found.tenant.name] += found.prompt_tokens * slots / found.slots / found.tenant.weight
            elif act < 0.8 and scan.waiting:
                gone = scan.waiting[rng.integers(len(scan.waiting))]
                queue.remove(gone)
                scan.leave(gone)
            elif act < 0.9:
                more = float(rng.uniform(0, 50))
                queue.charge(tenants[name], more)
                scan.served[name] = scan.served.get(name, 0.0) + more / tenants[name].weight
            elif act < 0.95:
                limited.symmetric_difference_update({(name, int(rng.integers(2)))})
                closed.symmetric_difference_update({1} if rng.random() < 0.2 else ())
                queue.recall(name)
            else:
                placed.symmetric_difference_update({int(rng.integers(8))})
                queue.recall()


def test_a_freed_slot_costs_the_logarithm_of_the_tenants(rng) -> None:
    """Of 500 waiting tenants, few are looked at for each slot, whether they are at their limits or not."""
    for share in (0.0, 0.5, 1.0):
        queue, tenants = FairQueue(), [Tenant(f"t{number}") for number in range(500)]
        for number in range(1500):
            queue.push(Ticket(tenants[number % 500], int(rng.integers(1, 99)), 100, 1, number=number))
        limited, looked = {tenant.name for tenant in tenants if rng.random() < share}, Counter[str]()

        def may_begin(tenant: Tenant, best_effort: int, limited: set[str] = limited, looked: Counter[str] = looked) -> bool:
            looked["judged"] += 1
            return tenant.name not in limited

        queue.first(admit_all, may_begin)  # sets those aside that are at their limits and come first
        for line in queue._lines:
            key = line._key
            line._key = lambda name, key=key, looked=looked: (looked.update(["keys"]), key(name))[1]
        looked.clear()
        slots = 300
        for _ in range(slots):
            freed = tenants[rng.integers(500)]
            limited.discard(freed.name)
            queue.recall(freed.name)
            found = queue.first(admit_all, may_begin)
            assert found is not None
            queue.admit(found)
        assert looked["judged"] <= 500 * share + 3 * slots, "each tenant at its limit is set aside once"
        assert looked["keys"] <= 500 * share + 16 * slots


def test_classes_take_turns_within_a_bound(rng) -> None:
    """Latency-sensitive requests go first, except for one best-effort request behind MOST_AHEAD of them; each
    in fair order."""
    for _ in range(20):
        queue, tenants, number, ahead = FairQueue(), [Tenant(name) for name in "abc"], 0, 0
        for _ in range(300):
            waiting = [ticket for own in queue._waiting.values() for ticket in own]
            if not waiting or rng.random() < 0.6:
                number += 1
                tenant = tenants[rng.integers(3)]
                queue.push(Ticket(tenant, int(rng.integers(1, 9)), 9, 1, best_effort=int(rng.random() < 0.3), number=number))
                continue
            barred = {kind for kind in (0, 1) if rng.random() < 0.1}
            ticket = queue.first(admit_all, any_tenant, barred)
            classes = {one.best_effort for one in waiting} - barred
            if not classes:
                assert ticket is None
                continue
            assert ticket is not None
            assert ticket.best_effort == (max(classes) if ahead == MOST_AHEAD else min(classes))
            peers = [one for one in waiting if one.best_effort == ticket.best_effort]
            assert ticket is min(peers, key=lambda one: (queue._served[one.tenant.name], one.number))
            queue.admit(ticket)
            ahead = 0 if ticket.best_effort or not any(one.best_effort for one in waiting) else min(ahead + 1, MOST_AHEAD)


def test_within_a_tenant_in_the_order_of_arrival_or_by_priority(rng) -> None:
    """Of one class; latency-sensitive ones go first."""
    priorities, classes = rng.integers(-3, 4, 40).tolist(), rng.choice(2, 40, p=(0.7, 0.3)).tolist()
    for by_priority in (False, True):
        queue, tenant = FairQueue(), Tenant("a", by_priority=by_priority)
        for number, (priority, best_effort) in enumerate(zip(priorities, classes, strict=True)):
            queue.push(Ticket(tenant, 1, 2, 1, priority, number, best_effort=best_effort))
        seen = []
        while (ticket := queue.first(admit_all, any_tenant)) is not None:
            queue.remove(ticket)
            seen.append((ticket.best_effort, ticket.priority, ticket.number))
        expected = list(zip(classes, priorities, range(40), strict=True))
        assert seen == sorted(expected, key=None if by_priority else lambda one: (one[0], one[2]))
        assert (queue.tokens, queue.requests) == (0, 0)


def test_a_tenant_at_its_limit_blocks_no_other_tenant() -> None:
    queue = FairQueue()
    for number, name in enumerate("aab"):
        queue.push(Ticket(Tenant(name), 1, 2, 1, number=number))
    found = queue.first(lambda ticket: ticket.tenant.name != "a", any_tenant)
    assert found is not None
    assert found.tenant.name == "b"
    assert queue.first(lambda ticket: False, any_tenant) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 60)), min_size=10, max_size=60), st.integers(20, 200), WEIGHTS)
def test_a_full_queue_drops_the_last_requests_of_the_longest_backlog(pushes, most, weights) -> None:
    """The bound holds after each newcomer, unless a single request is larger; a tenant within its share loses
    nothing."""
    queue, tenants = FairQueue(), {n: Tenant(n, weight=w) for n, w in zip(NAMES, weights, strict=True)}
    held = dict.fromkeys(NAMES, 0)
    for number, (name, tokens) in enumerate(pushes):
        ticket = Ticket(tenants[name], 1, tokens, 1, number=number)
        queue.push(ticket)
        held[name] += tokens
        share = most / sum(tenants[n].weight for n in NAMES if held[n])
        dropped = queue.overflow(ticket, most)
        assert ticket not in dropped or dropped == [ticket], "nobody else gives way for nothing"
        for one in dropped:
            assert held[one.tenant.name] / one.tenant.weight > share
            assert one is ticket or one.tenant.name != name
            queue.remove(one)
            held[one.tenant.name] -= one.tokens
        assert queue.tokens == sum(held.values())
        assert queue.tokens <= most or queue.requests == 1


def test_a_forgotten_tenant_starts_anew() -> None:
    queue, tenant = FairQueue(), Tenant("a")
    queue.charge(tenant, 500)
    waiting = Ticket(Tenant("b"), 1, 2, 1)
    queue.push(waiting)
    queue.forget(["c"])
    assert set(queue._served) == {"b"}, "who waits keeps its counter"


# ---- tokens against time ---------------------------------------------------------------------------------------------


def test_a_bucket_lets_in_what_its_minutes_allow(rng: np.random.Generator) -> None:
    """At every moment, the rate allows the tokens taken, except for the excess of the last request of each
    burst; and it admits as many."""
    per_minute, now, taken, refused = int(rng.integers(50, 5000)), 100.0, 0.0, 0
    bucket, largest = TokenBucket(per_minute, now), per_minute // 3
    for _ in range(2000):
        now += float(rng.exponential(2.0))
        bucket.update(now, taken)
        if bucket.level > 0:
            taken += int(rng.integers(1, largest + 2))
        else:
            refused += 1
            bucket.update(now, taken)
            again = TokenBucket(per_minute, now)
            again._level = bucket.level
            again.update(now + bucket.retry_s(), 0.0)
            assert again.level > 0 or bucket.retry_s() == RETRY_S[1]
        assert taken <= per_minute * (1 + (now - 100.0) / 60) + largest + 1
    assert refused > 50
    assert taken >= per_minute * (now - 100.0) / 60 * 0.5


def test_a_bucket_is_exact_at_its_boundary() -> None:
    bucket = TokenBucket(60, 0.0)
    for taken, level in ((59, 1), (60, 0), (61, -1)):
        fresh = TokenBucket(60, 0.0)
        fresh.update(0.0, taken)
        assert fresh.level == level
    bucket.update(0.0, 90)
    assert (bucket.level, bucket.retry_s()) == (-30, 31)
    bucket.update(30.0, 90)
    assert bucket.level == 0, "not yet"
    bucket.update(31.0, 90)
    assert bucket.level == 1
    bucket.update(1000.0, 90)
    assert bucket.level == 60, "a minute's tokens are the most that it keeps"
    bucket.update(1000.0, 50)
    assert bucket.level == 60, "a worker started again: its count is gone"
    bucket.update(2000.0, 150)
    assert bucket.level == -40, "what was taken since then counts against a minute's tokens"


def test_how_long_tokens_take_is_that_of_the_last_seconds() -> None:
    rate, (low, high) = RecentRate(), RETRY_S
    assert rate.retry_s(0.0, 100) == high, "nothing was served"
    for second in range(100, 110):
        rate.add(second + 0.5, 50)
    assert [rate.retry_s(109.9, ahead) for ahead in (0, 50, 51, 1000, 10**6)] == [low, 1, 2, 20, high]
    assert rate.retry_s(114.0, 1000) == 40, "half of it is over"
    assert rate.retry_s(500.0, 1) == high
