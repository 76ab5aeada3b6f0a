"""Admission: limits at their boundaries, waiting, refusals, and no lost request.

Supports claim decisions/front-end-queue.
"""

import asyncio
import functools
import itertools
import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from support.front_end.fake_engine import SIZES, FakeEngine
from support.front_end.http_server import completion_bytes, serving
from support.front_end.tenants import bearer, make_admission, write_keys
from support.in_loop import in_loop
from support.waiting import BUSY_S, wait_for

from blinkpy.dpu.admission import admission
from blinkpy.dpu.admission.fair_queue import Ticket
from blinkpy.dpu.admission.keys_file import MOST_TENANTS
from blinkpy.dpu.admission.tenant import ANONYMOUS, Tenant
from blinkpy.dpu.admission.tenant_table import COUNTERS, GAUGES, ROWS, TABLE_BYTES, TenantTable
from blinkpy.dpu.api_errors import ApiError

soon = functools.partial(wait_for, timeout_s=60.0)


class Stage:
    """An admission with a clock and slots that tests set."""

    def __init__(self, path: Path | str, slots: int = 8, table: TenantTable | None = None, **options: int):
        self.now, self.free, self.slots = 1000.0, slots, slots
        self.admission = make_admission(path, lambda: self.free, lambda: self.now, table, **options)

    def enter(self, name: str = "", prompt: int = 10, most: int = 20, slots: int = 1, best_effort: int = 0) -> Ticket:
        tenant = self.admission.tenants[name] if name else ANONYMOUS
        ticket = self.admission.enter(tenant, prompt, most, slots, 0, best_effort)
        self.submit(ticket)
        return ticket

    def submit(self, ticket: Ticket) -> None:
        """Instead of a service with an admitted request."""
        if ticket.reserved:
            self.free -= ticket.reserved
            ticket.generations = ticket.generations or [SimpleNamespace(tokens=0)]
            self.admission.submitted(ticket, ticket.reserved)

    def end(self, ticket: Ticket, generated: int = 0) -> None:
        """It has generated tokens, and its slots are free again."""
        ticket.generations[0].tokens = generated
        self.free += ticket.granted - ticket.reserved
        self.admission.remove(ticket)

    def has(self, name: str, column: str) -> float:
        return self.admission.table.total(self.admission.tenants[name].number, column)

    def refused(self, name: str, code: str, **request: int) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.enter(name, **request)
        assert (caught.value.status, caught.value.code) == (429, code)
        assert 1 <= caught.value.retry_s <= 60
        return caught.value


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.toml", a={}, b={})


# ---- fairness --------------------------------------------------------------------------------------------------------


@in_loop
async def test_best_effort_requests_leave_slots_and_their_turn_to_others(keys) -> None:
    """No more than max_flex_requests are in flight. Waiting best-effort requests delay no latency-sensitive
    request, not even of the same tenant."""
    stage = Stage(keys, slots=4, max_flex_requests=2)
    first = [stage.enter("a", best_effort=1) for _ in range(2)]
    waits, urgent = stage.enter("a", best_effort=1), stage.enter("a")
    assert [ticket.inside for ticket in (*first, waits, urgent)] == [True, True, False, True]
    with pytest.raises(ApiError, match="3 slots, but service tier flex is limited to 2"):
        stage.enter("b", slots=3, best_effort=1)
    assert stage.enter("b").inside
    later = stage.enter("b")
    stage.end(first[0])
    assert (waits.inside, later.inside) == (False, True)
    stage.submit(later)
    stage.end(urgent)
    assert waits.inside
    stage.submit(waits)
    for ticket in (first[1], later, waits):
        stage.end(ticket)
    assert [stage.enter("a", best_effort=1).inside for _ in range(3)] == [True, True, False]


@in_loop
async def test_tokens_of_best_effort_that_wait_have_a_limit_of_their_own(keys: Path) -> None:
    """It leaves the rest of max_waiting_tokens to the other class; a request larger than all of it waits alone."""
    stage = Stage(keys, slots=1, max_waiting_tokens=200, max_flex_waiting_tokens=60)
    running = stage.enter("a")
    large = stage.enter("a", prompt=10, most=100, best_effort=1)
    stage.refused("b", "max_flex_waiting_tokens", prompt=1, most=1, best_effort=1)
    stage.admission.remove(large)
    waits = [stage.enter(name, prompt=10, most=30, best_effort=1) for name in "ab"]
    stage.refused("b", "max_flex_waiting_tokens", prompt=1, most=1, best_effort=1)
    urgent = stage.enter("b", prompt=10, most=100)
    stage.end(running)
    assert urgent.inside, "before the requests that came first"
    stage.submit(urgent)
    stage.end(urgent)
    assert sum(ticket.inside for ticket in waits) == 1
    assert not stage.enter("b", prompt=1, most=30, best_effort=1).inside, "one waits less"


@in_loop
async def test_300_requests_of_one_client_delay_another_one_by_one_turn(keys: Path) -> None:
    """However many of a tenant wait: of each two slots that become free, one is the other's."""
    stage = Stage(keys)
    flood = [stage.enter("a") for _ in range(300)]
    assert sum(ticket.inside for ticket in flood) == 8
    others = [stage.enter("b") for _ in range(10)]
    order, running = [], [ticket for ticket in flood if ticket.inside]
    while running:
        stage.end(running.pop(0), generated=10)
        for ticket in [*flood, *others]:
            if ticket.reserved:
                stage.submit(ticket)
                running.append(ticket)
                order.append(ticket.tenant.name)
    assert len(order) == 302
    assert order[:22].count("b") == 10, order[:30]


@in_loop
async def test_slots_that_become_free_together_are_shared(keys: Path, rng: np.random.Generator) -> None:
    """A request of many slots gets QUANTUM at a time while others wait; alone, it gets all."""
    slots = int(rng.integers(2, 6)) * admission.QUANTUM
    stage = Stage(keys, slots=slots)
    running, more = stage.enter(slots=slots), int(rng.integers(1, admission.QUANTUM))
    wide, others = stage.enter("a", prompt=640, most=800, slots=slots), [stage.enter("b") for _ in range(more)]
    stage.end(running)
    assert all(ticket.inside for ticket in others)
    assert wide.reserved == slots - more
    stage.submit(wide)
    for ticket in others:
        stage.submit(ticket)
        stage.end(ticket)
    assert wide.granted == slots


@in_loop
async def test_long_outputs_count_as_service(keys: Path) -> None:
    """Of two tenants that always wait, the tenant with outputs of 90 tokens is admitted less often, so both get
    equal service."""
    stage, served = Stage(keys, slots=4), {"a": 0, "b": 0}
    outputs = {"a": 90, "b": 0}
    live = [stage.enter(name) for _ in range(6) for name in "ab"]
    for _ in range(300):
        ticket = next(ticket for ticket in live if ticket.inside)
        live.remove(ticket)
        name = ticket.tenant.name
        stage.submit(ticket)
        served[name] += ticket.prompt_tokens + outputs[name]
        stage.end(ticket, outputs[name])
        live.append(stage.enter(name))
        for one in live:
            stage.submit(one)
        assert abs(served["a"] - served["b"]) <= 10 + 4 * 100
    assert served["b"] > 1000


@in_loop
async def test_closed_admission_lets_no_new_request_wait(keys: Path) -> None:
    stage = Stage(keys, slots=1)
    running, waits = stage.enter("a"), stage.enter("a")
    stage.admission.refuse_all(ApiError(503, "The end.", code="shutting_down"), permanent=True)
    with pytest.raises(ApiError, match="The end"):
        stage.enter("b")
    assert stage.admission._queue.requests == 0
    stage.admission.remove(waits)
    stage.end(running)
    assert stage.enter("b").inside, "earlier requests may still run"


@in_loop
async def test_requests_beyond_a_limit_are_not_judged_one_by_one(keys: Path) -> None:
    stage, judged = Stage(keys, slots=4, max_flex_requests=2), list[Ticket]()
    running = [stage.enter("a", best_effort=1) for _ in range(2)]
    waiting = [stage.enter("a", best_effort=1) for _ in range(20)]
    may_run = stage.admission._may_run

    def noted(ticket: Ticket) -> bool:
        judged.append(ticket)
        return may_run(ticket)

    stage.admission._may_run = noted  # type: ignore[method-assign]
    stage.admission.admit()
    assert stage.free == 2 and not judged
    stage.end(running[0])
    assert [ticket.inside for ticket in waiting] == [True] + [False] * 19


@in_loop
async def test_a_request_of_many_slots_takes_turns_with_others(keys: Path) -> None:
    """No request waits for all of its slots before it starts, and it gets all of them."""
    for other in "ab":
        stage = Stage(keys, slots=4)
        running = [stage.enter("a") for _ in range(4)]
        large = stage.enter("b", prompt=640, most=800, slots=64)
        small, entered = [stage.enter(other) for _ in range(8)], list[int]()
        reported = list[int]()
        while large.granted < large.slots:
            if running:
                stage.end(running.pop(0))
            else:
                stage.free += 1  # a choice of the large one has ended
                stage.admission.admit()
            await asyncio.sleep(0)
            if large.reserved:
                large.more = functools.partial(reported.append, 1)
                stage.submit(large)
            for ticket in small:
                if ticket.reserved:
                    stage.submit(ticket)
                    entered.append(large.granted)
                    running.append(ticket)
        assert len(entered) == 8
        assert max(entered) < 64, "others enter while it waits for slots"
        assert reported, "it gets its further slots"
        assert stage.has("b", "requests_in_flight") >= 64


@in_loop
async def test_one_tenant_never_holds_all_slots(keys: Path, tmp_path: Path) -> None:
    """Another tenant enters immediately, however long the requests of the first run; without keys, all clients
    are one tenant."""
    stage = Stage(keys, slots=64)
    stage.admission._slots = lambda: 64
    flood = [stage.enter("a") for _ in range(100)]
    large = stage.enter("a", slots=64)
    assert sum(ticket.granted for ticket in (*flood, large)) == 60
    others = [stage.enter("b") for _ in range(6)]
    assert [ticket.inside for ticket in others] == [True] * 4 + [False] * 2
    for ticket in flood[:12]:
        stage.end(ticket)
    assert all(ticket.inside for ticket in others), "after that, they alternate with the first"
    for ticket in [*flood[12:], large, *others]:
        if ticket.granted:
            stage.submit(ticket)
            stage.end(ticket)
    for ticket in (*flood, large):
        if ticket in stage.admission._running:
            stage.submit(ticket)
            stage.end(ticket)
    assert (stage.admission._used_slots, stage.free) == ({}, 64)
    alone = Stage("", slots=64)
    alone.admission._slots = lambda: 64
    assert all(alone.enter().inside for _ in range(64))


@in_loop
async def test_a_request_ends_if_further_slots_do_not_become_free(keys: Path) -> None:
    stage, errors = Stage(keys, slots=2, max_waiting_s=10), list[ApiError]()
    large = stage.enter("a", slots=3)
    assert (large.inside, large.granted) == (True, 2)
    large.refuse = errors.append
    watch = asyncio.ensure_future(stage.admission.watch())
    stage.now += 10.1
    await asyncio.sleep(0.2)
    assert [error.code for error in errors] == ["max_waiting_s"]
    assert stage.has("a", "waiting_requests") == 0
    stage.end(large)
    assert (stage.free, stage.has("a", "requests_in_flight"), stage.admission._reserved) == (2, 0, 0)
    watch.cancel()


@in_loop
async def test_requests_that_wait_for_grammar_slots_block_no_others(keys: Path) -> None:
    """Grammars and token rules beyond the engine's slots for them wait; plain requests, and those with a known
    grammar, overtake them."""
    in_flight = set[int]()
    stage = Stage(keys, slots=20)
    stage.admission._places = lambda: (in_flight, 3)

    def enter(name: str, *names: int) -> Ticket:
        ticket = stage.admission.enter(stage.admission.tenants[name], 10, 20, 1, names=frozenset(names))
        stage.submit(ticket)
        in_flight.update(names if ticket.inside else ())
        return ticket

    first = enter("a", 1)
    assert first.inside and enter("a", 2, 3).inside
    waits = [enter(name, number) for name, number in (("a", 4), ("b", 5), ("a", 6))]
    assert not any(ticket.inside for ticket in waits)
    assert all(enter(name).inside for name in "abab"), "plain ones need no place"
    assert enter("a", 2).inside and enter("b", 3).inside, "their grammars are there already"
    in_flight.discard(1)
    stage.end(first)
    assert sum(ticket.inside for ticket in waits) == 1, "one place came free"
    with_two = enter("b", 7, 8)
    assert not with_two.inside


@in_loop
async def test_a_free_place_goes_to_another_tenant_at_once(keys: Path) -> None:
    in_flight = {1}
    stage = Stage(keys, slots=20)
    stage.admission._places = lambda: (in_flight, 1)
    tickets = []
    for name, number in (("a", 1), ("b", 2)):
        ticket = stage.admission.enter(stage.admission.tenants[name], 10, 20, 1, names=frozenset({number}))
        stage.submit(ticket)
        tickets.append(ticket)
    first, waits = tickets
    assert (first.inside, waits.inside) == (True, False)
    in_flight.clear()
    stage.end(first)
    assert waits.inside


@in_loop
async def test_storms_lose_no_request_and_keep_every_limit(tmp_path: Path, rng: np.random.Generator, monkeypatch) -> None:
    """Random entries, ends and disconnects. All limits hold at every moment, tokens add up to the service, and
    at the end every request was served."""
    limits = {"a": {"requests": 5, "weight": 3}, "b": {"waiting_tokens": 300}, "c": {}}
    options = {"max_waiting_tokens": 900, "max_flex_requests": 5, "max_flex_waiting_tokens": 0}
    stage = Stage(write_keys(tmp_path / "keys.toml", **limits), slots=6, **options)
    live, served, refused = list[Ticket](), dict.fromkeys(limits, 0.0), Counter[str | None]()
    turns, charge = dict.fromkeys(limits, 0.0), stage.admission._queue.charge

    def counting(tenant: Tenant, tokens: float) -> None:
        turns[tenant.name] += tokens
        charge(tenant, tokens)

    monkeypatch.setattr(stage.admission._queue, "charge", counting)
    for _ in range(1500):
        for ticket in live:
            if rng.random() < 0.6:
                stage.submit(ticket)
        what = rng.random()
        if what < 0.55:
            prompt, slots = int(rng.integers(1, 50)), int(rng.choice([1, 1, 1, 2, 5]))
            try:
                live.append(stage.enter(str(rng.choice(list(limits))), prompt, prompt + 20 * slots, slots, int(rng.integers(2))))
            except ApiError as error:
                refused[error.code] += 1
        elif live:
            admit = [ticket for ticket in live if ticket.reserved]
            ticket = admit[0] if admit and rng.random() < 0.3 else live[int(rng.integers(len(live)))]
            live.remove(ticket)
            generated = int(rng.integers(0, 20 * ticket.slots))
            if ticket.generations:
                served[ticket.tenant.name] += ticket.prompt_tokens * ticket.granted / ticket.slots + generated
                stage.end(ticket, generated)
            else:  # it waits, or was admitted and never takes its slots
                served[ticket.tenant.name] += ticket.prompt_tokens * ticket.granted / ticket.slots
                stage.admission.remove(ticket)
        waiting = [ticket for ticket in live if ticket in stage.admission._waiting and not ticket.granted]
        live = [ticket for ticket in live if ticket.inside or ticket in waiting]  # others gave way
        tokens = sum(ticket.tokens for ticket in waiting)
        assert tokens <= 900
        assert stage.admission._queue.tokens == tokens
        assert stage.admission._reserved == sum(ticket.reserved for ticket in live)
        assert stage.admission._best_effort == sum(t.granted for t in live if t.best_effort) <= 5
        assert 0 <= stage.free - stage.admission._reserved
        for name in limits:
            own = [ticket for ticket in live if ticket.tenant.name == name]
            assert stage.has(name, "requests_in_flight") == sum(ticket.granted for ticket in own)
            waits = [ticket for ticket in own if not ticket.granted]
            assert stage.has(name, "waiting_requests") == len(waits)
            assert stage.has(name, "waiting_tokens") == sum(ticket.tokens for ticket in waits)
        assert stage.has("a", "requests_in_flight") <= 5
        assert stage.has("b", "waiting_tokens") <= 300
    for _ in range(3 * len(live) + 3):
        for ticket in [ticket for ticket in live if ticket.inside]:
            stage.submit(ticket)
            live.remove(ticket)
            served[ticket.tenant.name] += ticket.prompt_tokens * ticket.granted / ticket.slots
            stage.end(ticket)
    assert live == []
    assert (stage.free, stage.admission._reserved, stage.admission._queue.requests) == (6, 0, 0)
    tokens_of = {name: stage.has(name, "tokens") for name in limits}
    assert pytest.approx(tokens_of) == turns, "for limits"
    assert pytest.approx(served) == turns, "and for limits, and for whose turn it is"
    assert set(refused) == {"waiting_tokens", "max_waiting_tokens"}


# ---- limits at their boundaries ----------------------------------------------------------------------------------------


@in_loop
async def test_requests_of_a_key_in_flight_are_exact(tmp_path: Path) -> None:
    stage = Stage(write_keys(tmp_path / "k", a={"requests": 3}, b={}))
    first, second = stage.enter("a", slots=2), stage.enter("a")
    third = stage.enter("a")
    assert (first.inside, second.inside, third.inside) == (True, True, False)
    assert stage.enter("b").inside, "its wait delays no other request"
    stage.end(second)
    assert third.inside
    with pytest.raises(ApiError, match="4 slots") as caught:
        stage.enter("a", slots=4)
    assert caught.value.status == 400, "it could never run"


@in_loop
async def test_waiting_tokens_are_exact(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "k", a={"waiting_tokens": 60}, b={"waiting_tokens": 0}, c={})
    stage = Stage(path, slots=1, max_waiting_tokens=100)
    running = stage.enter("c")
    stage.refused("b", "waiting_tokens", most=1)
    waiting = [stage.enter("a", most=30), stage.enter("a", most=30)]
    stage.refused("a", "waiting_tokens", most=1)
    waiting.append(stage.enter("c", most=40))
    stage.admission.remove(waiting.pop(0))
    waiting += [stage.enter("c", most=30)]
    error = stage.refused("c", "max_waiting_tokens", most=1)
    assert "100" in error.message
    assert stage.has("c", "requests_refused") == 1
    stage.end(running)
    assert sum(ticket.inside for ticket in waiting) == 1
    alone = Stage(path, slots=1, max_waiting_tokens=100)
    alone.enter("c")
    assert not alone.enter("c", most=5000).inside, "larger than the bound, it waits alone"
    alone.refused("c", "max_waiting_tokens", most=1)
    none = Stage(path, slots=1, max_waiting_tokens=0)
    none.enter("c")
    none.refused("c", "max_waiting_tokens", most=1)


@in_loop
async def test_a_full_queue_drops_requests_of_the_longest_backlog(keys: Path) -> None:
    """A flood that fills the queue excludes no other tenant: its last requests are refused, each with an error."""
    stage = Stage(keys, slots=1, max_waiting_tokens=100)
    running = stage.enter("a")
    flood = [running, *(stage.enter("a", most=25) for _ in range(4))]
    stage.refused("a", "max_waiting_tokens", most=25)
    last = asyncio.ensure_future(stage.admission.wait(flood[4]))
    await asyncio.sleep(0)
    assert not stage.enter("b", most=25).inside
    assert stage.has("a", "waiting_tokens") == 75
    assert not stage.enter("b", most=25).inside
    assert stage.has("a", "waiting_tokens") == 50
    for waits in (last, stage.admission.wait(flood[3])):  # one before it was dropped, one after that
        with pytest.raises(ApiError) as caught:
            await waits
        assert (caught.value.status, caught.value.code) == (429, "max_waiting_tokens")


@in_loop
async def test_tokens_per_minute_count_prompts_and_generated_output(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(admission, "SETTLE_S", 0.0)
    stage = Stage(write_keys(tmp_path / "k", a={"tokens_per_minute": 120}))
    first = stage.enter("a", prompt=100)
    second = stage.enter("a", prompt=19)
    assert stage.has("a", "tokens") == 119
    stage.submit(first)
    first.generations[0].tokens = 1
    error = stage.refused("a", "tokens_per_minute", prompt=1)
    assert error.retry_s == 1
    stage.now += 0.5
    third = stage.enter("a", prompt=40)
    error = stage.refused("a", "tokens_per_minute", prompt=1)
    assert error.retry_s == 20, "40 tokens, at 2 a second"
    stage.end(third, 30)
    assert stage.refused("a", "tokens_per_minute").retry_s == 35
    stage.now += 35
    stage.enter("a", prompt=1)
    assert stage.has("a", "tokens") == 120 + 40 + 30 + 1
    stage.end(second)
    stage.end(first, 1)
    assert stage.has("a", "tokens") == 191, "tokens charged on arrival are not charged again"


@in_loop
async def test_a_prompt_that_was_not_served_costs_nothing(tmp_path: Path) -> None:
    stage = Stage(write_keys(tmp_path / "k", a={"tokens_per_minute": 100}), slots=1)
    running = stage.enter("a", prompt=10)
    gone = stage.enter("a", prompt=90)
    stage.refused("a", "tokens_per_minute")
    stage.admission.remove(gone)
    assert stage.has("a", "tokens") == 10
    left = stage.enter("a", prompt=90)
    assert not left.inside and left.turn is not None
    left.turn.cancel()  # its client is gone, and all waiting requests are refused before it is notified
    stage.admission.refuse_all(ApiError(503, "gone"))
    stage.admission.remove(left)
    assert stage.has("a", "tokens") == 10
    assert not stage.enter("a", prompt=90).inside
    stage.end(running)


@in_loop
async def test_a_changed_token_limit_refills_its_bucket_and_others_keep_theirs(tmp_path: Path) -> None:
    """When the keys are read again: whatever the key took before."""
    path = write_keys(tmp_path / "k", a={"tokens_per_minute": 100}, b={"tokens_per_minute": 100})
    stage = Stage(path)
    for name in "ab":
        stage.end(stage.enter(name, prompt=500))
        stage.refused(name, "tokens_per_minute")
    write_keys(path, a={"tokens_per_minute": 90}, b={"tokens_per_minute": 100})
    await stage.admission.reload()
    stage.refused("b", "tokens_per_minute")
    stage.end(stage.enter("a", prompt=89))
    assert stage.enter("a", prompt=1).inside, "there was one token left"
    stage.refused("a", "tokens_per_minute")


@in_loop
async def test_waiting_requests_use_the_reloaded_limits(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "k", a={"requests": 1})
    stage = Stage(path)
    stage.enter("a")
    waits = [stage.enter("a") for _ in range(3)]
    write_keys(path, a={"requests": 3})
    await stage.admission.reload()
    assert [ticket.inside for ticket in waits] == [True, True, False]


@in_loop
async def test_requests_that_wait_too_long_get_a_retry_time(keys: Path) -> None:
    stage = Stage(keys, slots=1, max_waiting_s=30)
    running, late = stage.enter("a"), stage.enter("b", most=20)
    watch = asyncio.ensure_future(stage.admission.watch())
    waits = asyncio.ensure_future(stage.admission.wait(late))
    stage.now += 29.9
    await asyncio.sleep(0.2)
    early = stage.enter("b", most=21)
    assert not waits.done()
    stage.now += 0.1
    with pytest.raises(ApiError) as caught:
        await waits
    assert (caught.value.status, caught.value.code) == (429, "max_waiting_s")
    stage.end(running)
    assert early.inside
    assert early.waited == pytest.approx(0.1)
    watch.cancel()


# ---- several workers ---------------------------------------------------------------------------------------------------


@in_loop
async def test_limits_hold_over_all_workers(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "k", a={"requests": 3, "waiting_tokens": 50, "tokens_per_minute": 1000}, b={})
    memory = memoryview(bytearray(2 * TABLE_BYTES))
    one, two = (Stage(path, table=TenantTable(worker, 2, memory)) for worker in range(2))
    running = [one.enter("a"), one.enter("a"), two.enter("a")]
    assert all(ticket.inside for ticket in running)
    waits = [one.enter("a", most=30), two.enter("a", most=20)]
    two.refused("a", "waiting_tokens", most=1)
    assert not any(ticket.inside for ticket in waits)
    one.end(running.pop(0), 930)
    assert [ticket.inside for ticket in waits] == [True, False]
    assert two.has("a", "tokens") == 50 + 930
    one.submit(waits[0])
    waits[0].generations[0].tokens = 20
    one.admission.sweep()
    two.refused("a", "tokens_per_minute")
    one.end(waits[0], 20)
    two.admission.admit()
    assert waits[1].inside, "slots that another worker frees are found at the next look"
    numbers = [tenant.number for tenant in two.admission.tenants.values()]
    for number, name in itertools.product(numbers, (*GAUGES, *COUNTERS)):
        one.admission.table.add(number, name, 5)
    had = {name: two.has("a", name) - one.admission.table.values(two.admission.tenants["a"].number, name)[0] for name in GAUGES}
    counted = {name: two.has("a", name) for name in COUNTERS}
    again = TenantTable(0, 2, memory)
    again.keep(numbers)
    assert {name: two.has("a", name) for name in (*GAUGES, *COUNTERS)} == had | counted, "nothing of it runs or waits"


@in_loop
async def test_a_worker_that_starts_again_finds_its_tenants_buckets(tmp_path: Path) -> None:
    """A tenant that has spent its tokens gets no new ones by the death of a worker; a changed limit begins full."""
    path, memory = write_keys(tmp_path / "k", a={"tokens_per_minute": 600}), memoryview(bytearray(2 * TABLE_BYTES))
    one = Stage(path, table=TenantTable(0, 2, memory))
    one.end(one.enter("a", prompt=700))
    one.refused("a", "tokens_per_minute")
    both = [Stage(path, table=TenantTable(worker, 2, memory)) for worker in (0, 1)]
    for again in both:
        assert again.refused("a", "tokens_per_minute").retry_s == 11
    for again in both:
        again.now += 11
    assert both[0].enter("a").inside
    changed = Stage(write_keys(tmp_path / "c", a={"tokens_per_minute": 500}), table=TenantTable(0, 2, memory))
    assert changed.enter("a").inside


@in_loop
async def test_conversions_are_charged(tmp_path: Path) -> None:
    stage = Stage(write_keys(tmp_path / "k", a={"tokens_per_minute": 100}, b={}))
    tenant = stage.admission.tenants["a"]
    stage.admission.convert(tenant, 60)
    stage.admission.convert(tenant, 60)
    with pytest.raises(ApiError) as caught:
        stage.admission.convert(tenant, 1)
    assert (caught.value.status, caught.value.code) == (429, "tokens_per_minute")
    stage.admission.convert(stage.admission.tenants["b"], 10**9)


@in_loop
async def test_slots_freed_by_another_worker_are_found_by_polling(tmp_path: Path) -> None:
    """Nothing happens in this worker meanwhile. Again after a while without waiting requests."""
    path, memory = write_keys(tmp_path / "k", a={"requests": 2}), memoryview(bytearray(2 * TABLE_BYTES))
    one, two = (Stage(path, table=TenantTable(worker, 2, memory)) for worker in range(2))
    watch = asyncio.ensure_future(two.admission.watch())
    for _ in range(2):
        running = [one.enter("a"), one.enter("a")]
        waits = [two.enter("a"), two.enter("a")]
        for ended, ticket in zip(running, waits, strict=True):
            assert not ticket.inside
            one.end(ended)
            await asyncio.wait_for(two.admission.wait(ticket), 60)
            two.submit(ticket)
        for ticket in waits:
            two.end(ticket)
        await asyncio.sleep(3 * admission.LOOK_S)
    watch.cancel()


def test_the_latest_state_of_a_bucket_counts(rng: np.random.Generator) -> None:
    """Of all workers, and only under the same limit."""
    memory = memoryview(bytearray(3 * TABLE_BYTES))
    tables, states = [TenantTable(worker, 3, memory) for worker in range(3)], dict[int, tuple[int, float, float]]()
    for table in tables:
        table.keep([5])
    for now in rng.permutation(200).tolist():
        worker = int(rng.integers(3))
        states[worker] = int(rng.choice([60, 600])), float(rng.normal(0, 100)), float(now)
        per_minute, level, seen = states[worker]
        tables[worker].set_bucket(5, per_minute, level, seen)
        for limit in (60, 600):
            same = [(level, seen) for known, level, seen in states.values() if known == limit]
            assert tables[int(rng.integers(3))].bucket(5, limit) == max(same, key=lambda state: state[1], default=None)


def test_rows_of_removed_tenants_are_used_again_once_they_are_idle(rng: np.random.Generator) -> None:
    table = TenantTable()
    busy = [int(number) for number in rng.choice(10**6, 300, replace=False)]
    table.keep(busy)
    for number in busy:
        table.add(number, "requests_in_flight", 1)
        table.add(number, "tokens", number)
    for start in range(10**6, 10**6 + 5 * MOST_TENANTS, MOST_TENANTS):
        table.keep(now := range(start, start + MOST_TENANTS))
        assert not any(table.total(number, "tokens") for number in now), "tokens of the previous owner of the row are not theirs"
        for number in now:
            table.add(number, "tokens", 1)
    assert all(table.total(number, "tokens") == number for number in busy)
    assert table.total(10**6, "tokens") == 0, "gone"
    assert ROWS >= 2 * MOST_TENANTS


# ---- over HTTP -----------------------------------------------------------------------------------------------------------


def complete(server, name: str, **fields: object) -> httpx.Response:
    body = {"prompt": [7, 8, 9], "max_tokens": 2, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(name), timeout=60)


def metric(server, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def test_the_engine_gets_requests_of_another_client_between_those_of_a_flood(folder, keys) -> None:
    """The order of submissions: the engine is idle until all requests wait."""
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server, ThreadPoolExecutor(29) as pool:
        engine.hold = True
        waiting = server.server.app.service.admission._waiting
        flood = [pool.submit(complete, server, "a") for _ in range(24)]
        soon(lambda: len(engine.submitted) == SIZES.slots and len(waiting) == 24 - SIZES.slots)
        others = [pool.submit(complete, server, "b") for _ in range(5)]
        soon(lambda: len(waiting) == 29 - SIZES.slots)
        soon(lambda: metric(server, 'blinkpy_tenant_waiting_requests{worker="0",tenant="b"}') == 5)
        soon(lambda: server.client.get("/load").json()["server_load"] == 29)  # counted at the next poll
        engine.hold = False
        assert [answer.result().status_code for answer in [*flood, *others]] == [200] * 29
        numbers = {tenant.number: name for name, tenant in server.server.app.service.admission.tenants.items()}
        order = "".join(numbers[int(request.entry["tenant"])] for request in engine.submitted)
        assert order.startswith("a" * SIZES.slots)
        assert order[SIZES.slots : SIZES.slots + 12].count("b") == 5, order
        server.idle()
        soon(lambda: metric(server, 'blinkpy_waiting_requests{worker="0"}') == 0)
        assert metric(server, 'blinkpy_tenant_tokens_total{worker="0",tenant="a"}') == 24 * 5


def test_a_client_that_leaves_while_it_waits_leaves_the_queue(folder, keys) -> None:
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server, ThreadPoolExecutor(20) as pool:
        engine.hold = True
        admission = server.server.app.service.admission
        running = [pool.submit(complete, server, "a") for _ in range(SIZES.slots)]
        soon(lambda: len(engine.submitted) == SIZES.slots)
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(completion_bytes(prompt=[7]).replace(b"host: x", b"host: x\r\nauthorization: Bearer key-of-b"))
            soon(lambda: len(admission._waiting) == 1)
        soon(lambda: not admission._waiting)
        last = pool.submit(complete, server, "b", n=4)
        soon(lambda: len(admission._waiting) == 1)
        engine.hold = False
        assert len(last.result().json()["choices"]) == 4
        assert [answer.result().status_code for answer in running] == [200] * SIZES.slots
        assert len(engine.submitted) == SIZES.slots + 4
        server.idle()
        assert (admission._reserved, admission._queue.tokens) == (0, 0)


def test_a_key_is_charged_once_for_each_prompt_and_for_each_output(folder, keys) -> None:
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server:
        fields = {"prompt": [[7, 8], [7, 8, 9, 10]], "n": 3, "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=fields, headers=bearer("b"), timeout=BUSY_S)
        usage, admission = answer.json()["usage"], server.server.app.service.admission
        server.idle()
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 30)
        assert admission.table.total(admission.tenants["b"].number, "tokens") == usage["total_tokens"]


def test_a_client_that_disconnects_at_admission_is_not_submitted(folder, keys, monkeypatch) -> None:
    """No task waits for an event that could report the disconnect, and no code would cancel the request."""
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server:
        handler, service = server.server.app._requests, server.server.app.service
        entered = handler.enter

        def leaving(*request: Any) -> Ticket:
            ticket = entered(*request)
            for connection in list(server.server.connections.open):
                connection.transport.abort()
                connection.disconnected = True  # as its protocol notices in this turn of the event loop
            return ticket

        monkeypatch.setattr(handler, "enter", leaving)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": [7], "max_tokens": 1}, headers=bearer("b"), timeout=BUSY_S)
        wait_for(lambda: not server.server.connections.tasks)
        assert engine.submitted == [] and (service.admission._reserved, service.admission._queue.tokens) == (0, 0)


def test_a_slot_that_a_cancel_gives_free_is_given_on_at_once(folder, keys, monkeypatch) -> None:
    """The slot returns after its client has disconnected: by the poll, without a scan of the waiting requests."""
    monkeypatch.setattr("blinkpy.dpu.admission.admission.LOOK_S", 1000.0)
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server, ThreadPoolExecutor(20) as pool:
        engine.hold = True
        running = [pool.submit(complete, server, "a") for _ in range(SIZES.slots - 1)]
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as leaving:
            body = completion_bytes(prompt=[7, 8], max_tokens=9)
            leaving.sendall(body.replace(b"host: x", b"host: x\r\nauthorization: Bearer key-of-a"))
            soon(lambda: len(engine.submitted) == SIZES.slots)
            last = pool.submit(complete, server, "b")
            soon(lambda: server.server.app.service.admission._waiting)
        soon(lambda: len(engine.submitted) == SIZES.slots + 1)
        engine.hold = False
        assert [answer.result().status_code for answer in [*running, last]] == [200] * SIZES.slots


def test_a_drain_immediately_answers_waiting_requests(folder, keys) -> None:
    options = {"api_keys": str(keys), "shutdown_s": 60}
    with FakeEngine() as engine, ThreadPoolExecutor(20) as pool, serving(engine, folder, **options) as server:
        engine.hold = True
        running = [pool.submit(complete, server, "a") for _ in range(SIZES.slots)]
        soon(lambda: len(engine.submitted) == SIZES.slots)
        waits = pool.submit(complete, server, "b")
        soon(lambda: server.server.app.service.admission._waiting)
        server.server.should_exit = True
        answer = waits.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["retry-after"] == "1"
        engine.hold = False
        assert [answer.result().status_code for answer in running] == [200] * SIZES.slots


def test_an_engine_that_is_lost_ends_the_wait(folder, keys) -> None:
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server, ThreadPoolExecutor(20) as pool:
        engine.hold = True
        every = [pool.submit(complete, server, "a") for _ in range(SIZES.slots + 3)]
        soon(lambda: len(server.server.app.service.admission._waiting) == 3)
        engine.fence(0)
        assert {answer.result().status_code for answer in every} == {503}
        engine.hold = False
        server.ready()
        assert complete(server, "b").status_code == 200


def test_the_wait_for_a_slot_is_queue_time_and_is_logged_with_the_tenant(folder, keys, caplog) -> None:
    caplog.set_level("INFO", "blinkpy.access")
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys), log_level="info") as server:
        with ThreadPoolExecutor(20) as pool:
            engine.hold = True
            running = [pool.submit(complete, server, "a") for _ in range(SIZES.slots)]
            soon(lambda: len(engine.submitted) == SIZES.slots)
            waits = pool.submit(complete, server, "b")
            soon(lambda: server.server.app.service.admission._waiting)
            time.sleep(0.2)
            engine.hold = False
            assert {answer.result().status_code for answer in [*running, waits]} == {200}

        def logged() -> list[dict[str, Any]]:
            return [record.fields for record in list(caplog.records) if record.name == "blinkpy.access"]

        soon(lambda: len(logged()) == SIZES.slots + 1)
        fields = logged()
        assert sorted(one["tenant"] for one in fields) == ["a"] * SIZES.slots + ["b"]
        (waited,) = (one for one in fields if one["tenant"] == "b")
        assert 200 <= waited["queue_ms"] <= waited["ms"]
        assert all(one["ms"] - one["queue_ms"] >= 200 for one in fields if one["tenant"] == "a"), "the engine says 0"
        assert "key-of" not in json.dumps(fields)


@in_loop
async def test_the_end_of_a_request_does_not_scan_all_running_requests(tmp_path: Path, monkeypatch) -> None:
    """With thousands that run and some that wait, each end would take a millisecond, and ends would come ever later."""
    stage, looked = Stage(write_keys(tmp_path / "k", a={"tokens_per_minute": 1 << 30}), slots=500), list[Ticket]()
    settle_one = stage.admission._settle_one
    monkeypatch.setattr(stage.admission, "_settle_one", lambda ticket: (looked.append(ticket), settle_one(ticket)))
    tickets = [stage.enter("a") for _ in range(600)]
    for i in range(100):
        stage.end(tickets[i], 7)
        stage.submit(tickets[500 + i])
        assert tickets[500 + i].inside
    assert len(looked) <= 500 + 100, "all once, and each that left"
    stage.now += 2 * admission.SETTLE_S
    looked.clear()
    tickets[200].generations[0].tokens = 9
    before = stage.has("a", "tokens")
    stage.enter("a")
    assert stage.has("a", "tokens") == before + 9 + 10, "generated tokens are charged soon"
    assert len(looked) == 500
