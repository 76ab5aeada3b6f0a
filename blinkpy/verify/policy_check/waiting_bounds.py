"""How long can a policy let a request wait? From its ranks alone, then shown on the scheduler.

A request's rank is fixed while it waits, so under a load that never lets up it is served only when those that arrive have
greater ranks. The *overtaking window* is the longest time after which a new request can still get a lower rank than one that
waits: 0 for first come, first served; bounded when ranks grow with arrival or arrival_us; a request may starve when there is no
bound. It is searched for on ordinary requests and arrivals up to a day apart, so it is evidence, and no proof.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from blinkpy.scheduler.policies import Policy, RequestFields
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.policy_calls import RankMany
from blinkpy.verify.policy_check.sample_requests import ordinary
from blinkpy.verify.policy_check.timed_server import NEVER, ServerModel, TimedSimulation

KINDS = 512  # of requests that are compared, each with each
BEGINNINGS_S = (1, 3600, 30 * 86_400)  # engine clocks at which the one that waits arrived
LATER_S = (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 86_400)
REFINEMENTS = 6  # halvings of the interval in which the window ends
ARRIVALS_PER_S = 20

FLOOD_TOKENS = 8192  # longest sequence in the demonstration
FLOOD_ROWS = 4
FLOOD_OUTPUT = 4  # tokens of each request that overtakes
FLOOD_QUEUE = 4 * FLOOD_ROWS  # requests in the server at any time
FLOOD_REQUESTS = 2000


@dataclass(frozen=True)
class Overtaking:
    """The worst pair that was found. window_s: longest time between their arrivals; bounded: whether that was the end of it."""

    window_s: float
    bounded: bool
    waits: RequestFields
    overtakes: RequestFields


def overtaking(rank_many: RankMany, seed: int, preempted: bool = False) -> Overtaking:
    """Search for the overtaking window. preempted: of requests that wait again after a preemption."""
    draw = random.Random(seed)
    newcomers = [ordinary(draw)._replace(generated=0, preemptions=0) for _ in range(KINDS)]
    waiting = newcomers
    if preempted:
        waiting = [r._replace(generated=draw.randint(0, r.max_tokens - 1), preemptions=draw.randint(1, 3)) for r in newcomers]
    found = Overtaking(0.0, True, waiting[0], newcomers[0])
    for beginning in BEGINNINGS_S:
        before = np.array([_arriving(request, beginning) for request in waiting], np.int64)
        ranks = rank_many(before)
        worst = int(ranks.argmax())
        slowest = RequestFields(*before[worst].tolist())

        longest = 0.0
        for later in LATER_S:
            first = _first_rank(rank_many, newcomers, beginning + later)
            if first[0] < ranks[worst]:
                longest, found = later, _longer(found, later, slowest, first[1])
        beyond = next((later for later in LATER_S if later > longest), longest)
        shorter = longest
        for _ in range(REFINEMENTS):
            middle = (shorter + beyond) / 2
            first = _first_rank(rank_many, newcomers, beginning + middle)
            if first[0] < ranks[worst]:
                shorter, found = middle, _longer(found, middle, slowest, first[1])
            else:
                beyond = middle
    return found


def _first_rank(rank_many: RankMany, requests: list[RequestFields], at_s: float) -> tuple[int, RequestFields]:
    """The lowest rank among requests that arrive at a time, and whose it is."""
    table = np.array([_arriving(request, at_s) for request in requests], np.int64)
    ranks = rank_many(table)
    best = int(ranks.argmin())
    return int(ranks[best]), RequestFields(*table[best].tolist())


def _longer(found: Overtaking, window_s: float, waits: RequestFields, overtakes: RequestFields) -> Overtaking:
    if window_s <= found.window_s:
        return found
    return Overtaking(window_s, window_s < LATER_S[-1], waits, overtakes)


def _arriving(request: RequestFields, at_s: float) -> RequestFields:
    return request._replace(arrival=int(at_s * ARRIVALS_PER_S) + 1, arrival_us=int(at_s * 1e6))


@dataclass(frozen=True)
class Flood:
    """What the scheduler did with one request under a load of those that overtake it."""

    waited_s: float  # until it started, or until the end of the demonstration
    started: bool
    overtaken_by: int
    last_arrived_s: float  # how long after it the last one of those arrived


def flood(policy: Policy, worst: Overtaking) -> Flood:
    """Keep a small server full of requests that overtake, and submit the one that waits among the first of them."""
    n, victim = FLOOD_REQUESTS, FLOOD_QUEUE
    prompt = np.full(n, min(worst.overtakes.prompt_length, FLOOD_TOKENS // 2))
    limit = np.full(n, min(worst.overtakes.max_tokens, FLOOD_TOKENS // 2))
    priority = np.full(n, worst.overtakes.priority)
    prompt[victim] = min(worst.waits.prompt_length, FLOOD_TOKENS // 2)
    limit[victim] = min(worst.waits.max_tokens, FLOOD_TOKENS // 2)
    priority[victim] = worst.waits.priority
    requests = Workload(np.zeros(n, np.int64), prompt, np.minimum(limit, FLOOD_OUTPUT), limit, priority)
    pages = FLOOD_TOKENS // 16 * (FLOOD_ROWS + 1)
    server = TimedSimulation(policy, ServerModel(FLOOD_ROWS, 2048, 16, pages, 4500.0, 22.0, 27.0), requests)
    arrived = np.zeros(n, np.int64)
    submitted = 0
    while submitted < n and server.outcome.started[victim] == NEVER:
        while submitted < n and submitted - server.ended < FLOOD_QUEUE + 1:
            arrived[submitted] = server.now
            server.submit(submitted)
            submitted += 1
        server.turn()
    started = server.outcome.started
    overtook = np.flatnonzero(started[victim + 1 :] != NEVER) + victim + 1
    end = server.now if started[victim] == NEVER else int(started[victim])
    return Flood(
        waited_s=(end - int(arrived[victim])) / 1e9,
        started=bool(started[victim] != NEVER),
        overtaken_by=len(overtook),
        last_arrived_s=(int(arrived[overtook[-1]]) - int(arrived[victim])) / 1e9 if len(overtook) else 0.0,
    )
