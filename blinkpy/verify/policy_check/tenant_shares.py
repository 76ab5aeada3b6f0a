"""Is service shared by weight? Test it with tenants that always wait, with prompts and outputs of different
lengths, on the real scheduler.

A tenant is charged in advance for its requests in the engine, with their expected output. So the services
per weight of two tenants that always wait differ by at most twice what both may have in the engine: each
deviates at most that much from the virtual time, in both directions (blinkpy/scheduler/tenant_service.py).
"""

from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from blinkpy.queues.request_parameters import WEIGHT_ONE
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.tenant_service import OUTPUT_COST
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.timed_server import NEVER, ServerModel, TimedSimulation

ROWS, STEP_TOKENS = 4, 512
LIMIT = 2  # times the output that a request has, it might have had
TURNS = 2500
MOST_REQUESTS = 6000


class TenantLoad(NamedTuple):
    """One tenant's requests. depth: of them are in the engine at any time, more than run."""

    weight: float
    prompt: int  # tokens
    output: int
    depth: int

    @property
    def most_ahead(self) -> float:
        """Maximum tokens that it may have in the engine, divided by its weight."""
        return self.depth * (self.prompt + OUTPUT_COST * LIMIT * self.output) / self.weight


TENANTS = (TenantLoad(1, 30, 10, 8), TenantLoad(1, 400, 4, 12), TenantLoad(2, 120, 20, 8))


class Shares(NamedTuple):
    """served: tokens of each tenant divided by its weight; an output token counts as OUTPUT_COST.
    apart: the largest difference of two tenants at any time.
    bound: the allowed difference under a fair policy.
    """

    served: list[float]
    apart: float
    bound: float

    @property
    def fair(self) -> bool:
        return self.apart <= self.bound


def tenant_shares(policy: Policy, tenants: tuple[TenantLoad, ...] = TENANTS, turns: int = TURNS) -> Shares:
    """Keep requests of all tenants waiting in a small server for some turns."""
    owners = np.arange(MOST_REQUESTS) % len(tenants)
    prompt, output = (np.array([getattr(tenants[owner], name) for owner in owners]) for name in ("prompt", "output"))
    zero = np.zeros(MOST_REQUESTS, np.int64)
    weight = np.array([round(tenant.weight * WEIGHT_ONE) for tenant in tenants])
    words = {"tenant": owners + 1, "tenant_weight": weight[owners]}
    longest = max(tenant.prompt + LIMIT * tenant.output for tenant in tenants)
    pages = (ROWS + 1) * (longest // 16 + 2)
    model = ServerModel(ROWS, STEP_TOKENS, page_size=16, num_pages=pages, step_us=4500.0, row_us=22.0, token_us=27.0)
    server = TimedSimulation(policy, model, Workload(zero, prompt, output, LIMIT * output, zero), words)
    coming = [iter(np.flatnonzero(owners == owner).tolist()) for owner in range(len(tenants))]
    missing, apart, served = [tenant.depth for tenant in tenants], 0.0, np.zeros(len(tenants))
    for _ in range(turns):
        taken = [list(islice(requests, count)) for requests, count in zip(coming, missing, strict=True)]
        if list(map(len, taken)) != missing:
            break  # a tenant has no request left, and would no longer wait
        for number in chain(*taken):
            server.submit(number)
        server.turn()
        missing = np.bincount(owners[server.over], minlength=len(tenants)).tolist()
        tokens = np.where(server.outcome.started == NEVER, 0, prompt) + OUTPUT_COST * server.generated
        served = np.bincount(owners, tokens) * WEIGHT_ONE / weight
        apart = max(apart, float(served.max() - served.min()))
    ahead = sorted(tenant.most_ahead for tenant in tenants)
    return Shares(served.tolist(), apart, 2 * sum(ahead[-2:]))
