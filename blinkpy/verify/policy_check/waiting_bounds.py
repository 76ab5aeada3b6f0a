"""How long can a policy let a request wait? From its ranks alone, then shown on the scheduler.

A request's rank is fixed while it waits, so under a load that never lets up it is served only when those
that arrive have greater ranks. The *overtaking window* is the longest time after which a new request can
still get a lower rank than one that waits: 0 for first come, first served; bounded when ranks grow with
arrival or arrival_us; a request may starve when there is no bound. It is searched for on ordinary requests
and arrivals up to a day apart, so it is evidence, and no proof.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from blinkpy.scheduler.policies import Policy, RequestFields
from blinkpy.scheduler.policy_trial import ordinary
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.policy_calls import RankMany
from blinkpy.verify.policy_check.timed_server import NEVER, ServerModel, TimedSimulation

KINDS = 512  # of requests that are compared, each with each
BEGINNINGS_S = (1, 3600, 30 * 86_400)  # engine clocks at which the one that waits arrived
LATER_S = (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 86_400)
REFINEMENTS = 6  # halvings of the interval in which the window ends
ARRIVALS_PER_S = 20
SERVICE_PER_S = 1_000_000  # of tenants who are always served: 1,000 tokens of a prompt

FLOOD_TOKENS = 8192  # longest sequence in the demonstration
FLOOD_ROWS = 4
FLOOD_OUTPUT = 4  # tokens of each request that overtakes
FLOOD_QUEUE = 4 * FLOOD_ROWS  # requests in the server at any time
FLOOD_REQUESTS = 2000


class Overtaking(NamedTuple):
    """The worst pair that was found. window_s: longest time between their arrivals."""

    window_s: float
    waits: RequestFields
    overtakes: RequestFields

    @property
    def bounded(self) -> bool:
        """Whether later ones don't overtake."""
        return self.window_s < LATER_S[-1]


def overtaking(rank_many: RankMany, seed: int, preempted: bool = False) -> Overtaking:
    """Search for the overtaking window. preempted: of requests that wait again after a preemption."""
    draw = random.Random(seed)
    newcomers = [ordinary(draw)._replace(generated=0, preemptions=0) for _ in range(KINDS)]
    waiting = newcomers
    if preempted:
        waiting = [r._replace(generated=draw.randint(0, r.max_tokens - 1), preemptions=draw.randint(1, 3)) for r in newcomers]
    found = Overtaking(0.0, waiting[0], newcomers[0])
    for beginning in BEGINNINGS_S:
        greatest, slowest = max(_ranked(rank_many, waiting, beginning))

        def overtakes(later: float, beginning: float = beginning, greatest: int = greatest) -> bool:
            return min(_ranked(rank_many, newcomers, beginning + later))[0] < greatest

        longest = longest_time(overtakes)
        if longest > found.window_s:
            found = Overtaking(longest, slowest, min(_ranked(rank_many, newcomers, beginning + longest))[1])
    return found


def longest_time(overtakes: Callable[[float], bool]) -> float:
    """About the longest of LATER_S, and of the times between these, after which something overtakes; 0: after none."""
    longest = max((later for later in LATER_S if overtakes(later)), default=0.0)
    beyond = next((later for later in LATER_S if later > longest), longest)
    for _ in range(REFINEMENTS):
        middle = (longest + beyond) / 2
        longest, beyond = (middle, beyond) if overtakes(middle) else (longest, middle)
    return longest


def arriving(requests: list[RequestFields], at_s: float) -> list[RequestFields]:
    """The requests as they are when they arrive at a time."""
    return [
        r._replace(
            arrival=int(at_s * ARRIVALS_PER_S) + 1,
            arrival_us=int(at_s * 1e6),
            tenant_service=int(at_s * SERVICE_PER_S) + r.tenant_service,  # its own part is how far its tenant is ahead
        )
        for r in requests
    ]


def _ranked(rank_many: RankMany, requests: list[RequestFields], at_s: float) -> Iterator[tuple[int, RequestFields]]:
    """(rank, request) of requests that arrive at a time."""
    there = arriving(requests, at_s)
    return zip(rank_many(np.array(there, np.int64)).tolist(), there, strict=True)


class Flood(NamedTuple):
    """What the scheduler did with one request under a load of those that overtake it."""

    waited_s: float  # until it started, or until the end of the demonstration
    started: bool
    overtaken_by: int
    last_arrived_s: float  # how long after it the last one of those arrived


def flood(policy: Policy, worst: Overtaking) -> Flood:
    """Keep a small server full of requests that overtake, and submit the one that waits among the first of them."""
    n, victim = FLOOD_REQUESTS, FLOOD_QUEUE
    prompt, limit, priority = (
        np.where(np.arange(n) == victim, getattr(worst.waits, name), getattr(worst.overtakes, name))
        for name in ("prompt_length", "max_tokens", "priority")
    )
    prompt, limit = np.minimum([prompt, limit], FLOOD_TOKENS // 2)
    requests = Workload(np.zeros(n, np.int64), prompt, np.minimum(limit, FLOOD_OUTPUT), limit, priority)
    classes = {"best_effort": np.where(np.arange(n) == victim, worst.waits.best_effort, worst.overtakes.best_effort)}
    pages = FLOOD_TOKENS // 16 * (FLOOD_ROWS + 1)
    model = ServerModel(FLOOD_ROWS, 2048, page_size=16, num_pages=pages, step_us=4500.0, row_us=22.0, token_us=27.0)
    server = TimedSimulation(policy, model, requests, classes)
    arrived, submitted, started = np.zeros(n, np.int64), 0, server.outcome.started
    while submitted < n and started[victim] == NEVER:
        while submitted < n and submitted - server.ended < FLOOD_QUEUE + 1:
            arrived[submitted] = server.now
            server.submit(submitted)
            submitted += 1
        server.turn()
    overtook = np.flatnonzero(started[victim + 1 :] != NEVER) + victim + 1
    end = server.now if started[victim] == NEVER else int(started[victim])
    return Flood(
        waited_s=(end - int(arrived[victim])) / 1e9,
        started=bool(started[victim] != NEVER),
        overtaken_by=len(overtook),
        last_arrived_s=(int(arrived[overtook[-1]]) - int(arrived[victim])) / 1e9 if len(overtook) else 0.0,
    )
