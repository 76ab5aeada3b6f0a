"""A greedy tenant leaves an honest tenant of equal weight at least 45 % of each resource, while both have work. The
resources are those of the gate's table, `blinkpy/dpu/admission/work_kinds.py`.

The loads are random; the parts that share the resource are a worker's own, with its own sizes. Clocks are the tests'.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import pytest
from support.front_end.tenants import make_admission, write_keys
from support.in_loop import in_loop

from blinkpy.config import Config
from blinkpy.dpu.admission import gate, work_kinds
from blinkpy.dpu.admission.gate import Asker, Gate, Places
from blinkpy.dpu.admission.work_kinds import WORK_KINDS
from blinkpy.dpu.grammar.grammar_compiler import GrammarCompiler
from blinkpy.dpu.http.preparation.preparation_queue import PreparationQueue
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.connections import Connections
from blinkpy.dpu.metrics import Metrics

SHARE = 0.45
HONEST, GREEDY = Asker("honest"), Asker("greedy")
SLOTS, STEP_S = 64, 0.02
Shares = dict[str, float]


async def of_the_loop(draw: random.Random, tmp_path: Path) -> Shares:
    """Work of the greedy one is much and long; of the honest one, short and in order."""
    now, spent = [100.0], defaultdict[str, float](float)
    turns = Gate(1.0, Metrics(), clock=lambda: now[0], cpu=lambda: now[0])

    def come(asker: Asker, cost: Callable[[], float]) -> None:
        def work() -> None:
            seconds = cost()
            now[0] += seconds
            spent[asker.name] += seconds
            come(asker, cost)

        turns.ask(asker, work, later=True)

    longest = draw.uniform(0.0001, 0.01)
    for _ in range(draw.randrange(1, 1000)):
        come(GREEDY, lambda: draw.uniform(0, longest))
    for _ in range(draw.randrange(2, 10)):
        come(HONEST, lambda: draw.uniform(0, 0.001))
    while now[0] < 105.0:
        await asyncio.sleep(0)
    return spent


async def of_places(places: Places, draw: random.Random) -> Shares:
    """Seconds in the places of a pool."""
    now, spent, ends = [0.0], defaultdict[str, float](float), list[tuple[float, int, asyncio.Future[None]]]()
    places.most_waiting = 1 << 20
    longest = draw.uniform(0.02, 0.5)

    async def job(asker: Asker, seconds: float) -> None:
        async with places.place(asker):
            end = asyncio.get_running_loop().create_future()
            heappush(ends, (now[0] + seconds, id(end), end))
            await end
            spent[asker.name] += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now[0]))
        jobs = [asyncio.ensure_future(job(GREEDY, draw.uniform(0.01, longest))) for _ in range(2000)]
        jobs += [asyncio.ensure_future(job(HONEST, draw.uniform(0.002, 0.02))) for _ in range(8000)]
        await asyncio.sleep(0)
        while ends and now[0] < 15.0:
            now[0], _, end = heappop(ends)
            end.set_result(None)
            for _ in range(5):
                await asyncio.sleep(0)
        assert places.waiting > places.used
        for one in jobs:
            one.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    return spent


@contextmanager
def preparation() -> Iterator[PreparationQueue]:
    queue = PreparationQueue(ANY, Config(), Path(), Metrics())
    try:
        yield queue
    finally:
        queue.close()


async def of_threads(draw: random.Random, tmp_path: Path) -> Shares:
    with preparation() as queue:
        return await of_places(queue._middling, draw)


async def of_processes(draw: random.Random, tmp_path: Path) -> Shares:
    with preparation() as queue:
        return await of_places(queue._large, draw)


async def of_grammar_compiles(draw: random.Random, tmp_path: Path) -> Shares:
    compiler = GrammarCompiler(1.0, 1 << 30, 1 << 20)
    try:
        return await of_places(compiler._places, draw)
    finally:
        compiler.close()


async def of_slots(draw: random.Random, tmp_path: Path) -> Shares:
    """Steps in slots, while the requests of both wait. The greedy one was there first."""
    now, free, running = [100.0], [SLOTS], dict[Any, list[int]]()  # steps left of each choice
    keys = write_keys(tmp_path / f"{draw.random()}.toml", honest={}, greedy={})
    admission = make_admission(keys, lambda: free[0], lambda: now[0])
    admission._slots = lambda: SLOTS
    kinds: dict[str, Callable[[], tuple[int, int, int]]] = {
        "greedy": lambda: (draw.randint(1, most_prompt), draw.randint(1, most_tokens), draw.choice((1, 1, most_choices))),
        "honest": lambda: (draw.randint(1, 5), draw.randint(5, 30), 1),
    }
    most_prompt, most_tokens, most_choices = draw.randint(1, 500), draw.randint(1, 100), draw.randint(1, SLOTS)
    tokens_of = dict[Any, int]()
    waiting, spent = dict[str, list[Any]](greedy=[], honest=[]), defaultdict[str, float](float)
    wanted = {"greedy": draw.randint(SLOTS, 100), "honest": SLOTS}
    for step in range(1200):
        now[0] += STEP_S
        for name in kinds if step > 5 else ("greedy",):
            waiting[name] = [ticket for ticket in waiting[name] if ticket.granted < ticket.slots]
            while len(waiting[name]) < wanted[name]:
                prompt, tokens, choices = kinds[name]()
                ticket = admission.enter(admission.tenants[name], prompt * choices, (prompt + tokens) * choices, choices)
                tokens_of[ticket] = tokens
                waiting[name].append(ticket)
                running[ticket] = []
        for ticket, steps in list(running.items()):
            if ticket.reserved:
                for _ in range(ticket.reserved):
                    ticket.generations.append(SimpleNamespace(tokens=0, open=True))
                    steps.append(tokens_of[ticket])
                free[0] -= ticket.reserved
                admission.submitted(ticket, ticket.reserved)
            for number, left in enumerate(steps):
                if left:
                    steps[number] -= 1
                    ticket.generations[number].tokens += 1
                    spent[ticket.tenant.name] += step > 400
                    if left == 1:
                        ticket.generations[number].open = False
                        free[0] += 1
            if len(steps) == ticket.slots and not any(steps):
                del running[ticket]
                admission.remove(ticket)
        admission.admit()
        await asyncio.sleep(0)
    return spent


async def of_memory(draw: random.Random, tmp_path: Path) -> Shares:
    """Bytes of a budget: the honest one takes its share and keeps it; the greedy one takes whatever it gets."""
    budget, kept = ByteBudget(1 << 20, Mock(), largest=draw.random() < 0.5), dict[str, dict[object, int]](greedy={}, honest={})

    def hold(name: str, size: int) -> None:
        holder = object()
        kept[name][holder] = size
        budget.hold(holder, size, lambda _: kept[name].pop(holder), name)

    while sum(kept["honest"].values()) < SHARE * budget.limit:
        for _ in range(draw.randrange(20)):
            hold("greedy", draw.randrange(1, 1 << 16))
        hold("honest", draw.randrange(1, 1 << 12))
    for _ in range(500):
        hold("greedy", draw.randrange(1, 1 << 18))
    assert budget.used == sum(sum(own.values()) for own in kept.values()) <= budget.limit
    return {name: sum(own.values()) for name, own in kept.items()}


async def of_connections(draw: random.Random, tmp_path: Path) -> Shares:
    """Connections with requests: the greedy one has all of them first, and opens more."""
    most = draw.randrange(20, 200)
    every = Connections(Mock(max_connections=most, max_lag_ms=1, unread_budget_mib=1, answer_budget_mib=1), 1, Metrics(), Mock())

    def come(asker: Asker) -> None:
        one = Mock(asker=asker, is_answering=False)
        every.enter(one)
        every.busy(one)
        if every.too_many_requests() and not every.close_another(one):
            every.remove(one)

    for _ in range(2 * most):
        come(GREEDY)
    for _ in range(round(SHARE * most) + 1):
        come(HONEST)
        for _ in range(draw.randrange(3)):
            come(GREEDY)
    for _ in range(most):
        come(GREEDY)
    assert len(every.open) <= most
    return {name: sum(one.asker.name == name for one in every.open) for name in ("greedy", "honest")}


# How the two share each resource.
DRIVERS = {
    work_kinds.LOOP: [of_the_loop],
    work_kinds.THREAD: [of_threads],
    work_kinds.PROCESS: [of_processes, of_grammar_compiles],
    work_kinds.ENGINE: [of_slots],
    work_kinds.MEMORY: [of_memory],
    work_kinds.SOCKETS: [of_connections],
}


@pytest.mark.parametrize("driver", [driver for drivers in DRIVERS.values() for driver in drivers])
@in_loop
async def test_any_load_leaves_another_tenant_its_share(driver: Any, seed: int, tmp_path: Path) -> None:
    got = await driver(random.Random(seed), tmp_path)
    assert got["honest"] >= SHARE * sum(got.values()), dict(got)


def test_each_resource_of_the_table_is_shared_here() -> None:
    assert {kind.resource for kind in WORK_KINDS} == set(DRIVERS)
