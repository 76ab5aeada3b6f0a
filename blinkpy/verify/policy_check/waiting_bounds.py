"""Finds how long a policy can let a request wait, from the policy's ranks, and demonstrates the result on the scheduler.

A request's rank is fixed while it waits, so under endless load the request is served only if new requests get greater ranks. The
*overtaking window* is the longest time after which a new request can still get a lower rank than a waiting request. The window is
0 for first come, first served. It is bounded if ranks grow with arrival or arrival_us, and unbounded if a request may starve. The
search uses ordinary requests and arrivals up to a day apart, so its result is evidence, not a proof.
"""

import random
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blinkpy.config import YIELD_STEPS
from blinkpy.queues.request_parameters import WEIGHT_ONE
from blinkpy.scheduler.phases.waiting_list import make_rank_of
from blinkpy.scheduler.policies import Policy, RequestFields
from blinkpy.scheduler.policy_trial import ordinary, show
from blinkpy.scheduler.policy_vetting import Finding
from blinkpy.scheduler.tenant_service import OUTPUT_COST
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.timed_server import NEVER, ServerModel, TimedSimulation

RankMany = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def compile_ranks(function: Policy) -> RankMany:
    """Compile a policy to a function from int64 [n, fields], one request per row, to ranks, int64 [n]."""
    rank_of = make_rank_of(function)

    @njit
    def rank_many(table: Any) -> Any:
        ranks, faults = np.zeros(len(table), np.int64), np.zeros(1, np.int64)
        for i in range(len(table)):
            row = table[i]
            fields = RequestFields(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10])
            ranks[i] = rank_of(fields, faults, 0)
        return ranks

    return rank_many


def compare_compiled(function: Policy, rank_many: RankMany, requests: list[RequestFields], ranks: list[int]) -> list[Finding]:
    """Check that compiled code gives the same ranks as Python, and the same ranks in a second call."""
    table = np.array(requests, np.int64)
    first, again = rank_many(table).tolist(), rank_many(table).tolist()
    for request, rank, compiled, later in zip(requests, ranks, first, again, strict=True):
        if compiled != later:
            text = f"compiled, {show(request)} has rank {compiled} first and {later} later"
        elif compiled != rank:
            text = f"Python gives {rank}, but compiled code gives {compiled} for {show(request)}: check for values over 64 bits"
        else:
            continue
        return [Finding("error", "determinism", text, function.__code__.co_firstlineno)]
    return []


def compile_for_gpu(function: Policy) -> Finding:
    """Compile for sm_90; no GPU is needed."""
    from blinkpy.device.portable import register_cuda

    try:
        from blinkpy.device.cuda.kernel_compiler import compile_kernel, types

        register_cuda()
    except ImportError:
        return Finding("note", "compiles", "for the CPU; GPU not tried, since numba-cuda is not installed")

    rank_of = make_rank_of(function)

    def kernel(fields: Any, ranks: Any, faults: Any) -> None:
        f = fields
        request = RequestFields(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10])
        ranks[0] = rank_of(request, faults, 0)

    try:
        compile_kernel(kernel, types.void(types.int64[::1], types.int64[::1], types.int64[::1]))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Finding("error", "compiles", f"not for a GPU: {lines[0] if lines else type(error).__name__}")
    return Finding("fine", "compiles", "for the CPU, and for a GPU (sm_90)")


KINDS = 512  # number of requests to compare pairwise
BEGINNINGS_S = (1, 3600, 30 * 86_400)  # engine clocks at which the waiting request arrives
LATER_S = (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 86_400)
REFINEMENTS = 6  # halvings of the interval in which the window ends
ARRIVALS_PER_S = 20
SERVICE_PER_S = 1_000_000  # service of a tenant that always runs: 1,000 prompt tokens/s

FLOOD_TOKENS = 8192  # longest sequence in the demonstration
FLOOD_ROWS = 4
FLOOD_OUTPUT = 4  # output tokens of each overtaking request
FLOOD_QUEUE = 4 * FLOOD_ROWS  # requests in the server at any time
FLOOD_REQUESTS = 2000


class Overtaking(NamedTuple):
    """The worst pair found. window_s: longest time between their arrivals."""

    window_s: float
    waits: RequestFields
    overtakes: RequestFields

    @property
    def bounded(self) -> bool:
        """Whether requests that arrive later than the window no longer overtake."""
        return self.window_s < LATER_S[-1]


def overtaking(rank_many: RankMany, seed: int, preempted: bool = False) -> Overtaking:
    """Search for the overtaking window. preempted: the waiting requests were preempted before."""
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
    """The approximate longest time, between the smallest and greatest of LATER_S, after which `overtakes` is
    true; 0 if it never is.
    """
    longest = max((later for later in LATER_S if overtakes(later)), default=0.0)
    beyond = next((later for later in LATER_S if later > longest), longest)
    for _ in range(REFINEMENTS):
        middle = (longest + beyond) / 2
        longest, beyond = (middle, beyond) if overtakes(middle) else (longest, middle)
    return longest


def arriving(requests: list[RequestFields], at_s: float) -> list[RequestFields]:
    """Copies of the requests that arrive at at_s seconds."""
    return [
        r._replace(
            arrival=int(at_s * ARRIVALS_PER_S) + 1,
            arrival_us=int(at_s * 1e6),
            tenant_service=int(at_s * SERVICE_PER_S) + r.tenant_service,  # the drawn value is the tenant's lead
        )
        for r in requests
    ]


def _ranked(rank_many: RankMany, requests: list[RequestFields], at_s: float) -> Iterator[tuple[int, RequestFields]]:
    """(rank, request) of requests that arrive at a time."""
    there = arriving(requests, at_s)
    return zip(rank_many(np.array(there, np.int64)).tolist(), there, strict=True)


class Flood(NamedTuple):
    """The outcome of one request under a load of overtaking requests."""

    waited_s: float  # until the request started or the demonstration ended
    started: bool
    overtaken_by: int
    last_arrived_s: float  # between its arrival and that of the last overtaking request


def flood(policy: Policy, worst: Overtaking) -> Flood:
    """Keep a small server full of overtaking requests, and submit the waiting request near the start."""
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


CLASSES = ("latency-sensitive", "best-effort")  # by RequestFields.best_effort
PROMPT, URGENT_PROMPT, OUTPUT = 4096, 768, 4  # tokens
STEP_TOKENS, ROWS, QUEUE = 512, 8, 8
TURNS = 40 * YIELD_STEPS
"""Of a demonstration: with one turn of YIELD_STEPS + 1 the prompt needs PROMPT / STEP_TOKENS of those."""


def class_window(rank_many: RankMany, seed: int, waits: int) -> Overtaking:
    """Search for the overtaking window between requests that differ only in class and time. waits: class of
    the overtaken request.
    """
    draw = random.Random(seed)
    kinds = [ordinary(draw)._replace(generated=0, preemptions=0) for _ in range(KINDS)]
    own, others = ([kind._replace(best_effort=number) for kind in kinds] for number in (waits, 1 - waits))
    return max((_window(rank_many, own, others, beginning) for beginning in BEGINNINGS_S), key=lambda found: found.window_s)


def _window(rank_many: RankMany, own: list[RequestFields], others: list[RequestFields], beginning: float) -> Overtaking:
    """The widest window between request i of `own`, waiting since `beginning`, and request i of `others`."""
    first = arriving(own, beginning)
    ranks = rank_many(np.array(first, np.int64))

    def overtaken(later: float) -> NDArray[np.bool_]:
        return rank_many(np.array(arriving(others, beginning + later), np.int64)) < ranks

    longest = longest_time(lambda later: bool(overtaken(later).any()))
    place = int(overtaken(longest).argmax())
    return Overtaking(longest, first[place], arriving(others, beginning + longest)[place])


class YieldOutcome(NamedTuple):
    """The outcome of a running best-effort prompt under a stream of latency-sensitive prompts."""

    most_turns: int  # most consecutive turns in which the prompt yielded
    turns: int  # turns to its first token, or until the end of the demonstration
    ended: bool


def yield_outcome(policy: Policy) -> YieldOutcome:
    """Start a best-effort prompt, then keep a small server full of latency-sensitive prompts."""
    n = TURNS + QUEUE
    urgent = np.arange(n) > 0
    prompt = np.where(urgent, URGENT_PROMPT, PROMPT)
    zero, output = np.zeros(n, np.int64), np.full(n, OUTPUT)
    requests = Workload(zero, prompt, output, output, zero)
    pages = (PROMPT + ROWS * (URGENT_PROMPT + OUTPUT)) // 16 + 4 * ROWS
    model = ServerModel(ROWS, STEP_TOKENS, page_size=16, num_pages=pages, step_us=4500.0, row_us=22.0, token_us=27.0)
    server = TimedSimulation(policy, model, requests, {"best_effort": np.where(urgent, 0, 1)})
    server.submit(0)
    server.turn()
    submitted = most = turns = 1
    while turns < TURNS and server.outcome.first_token[0] == NEVER:
        while submitted - server.ended < QUEUE + 1:
            server.submit(submitted)
            submitted += 1
        server.turn()
        turns += 1
        most = max(most, server.yielded_turns)
    return YieldOutcome(most, turns, bool(server.outcome.first_token[0] != NEVER))


TENANT_ROWS, TENANT_STEP_TOKENS = 4, 512
LIMIT = 2  # max_tokens divided by the real output
TENANT_TURNS = 2500
MOST_REQUESTS = 6000


class TenantLoad(NamedTuple):
    """One tenant's load. depth: number of its requests in the engine at any time, more than can run."""

    weight: float
    prompt: int  # tokens
    output: int
    depth: int

    @property
    def most_ahead(self) -> float:
        """Maximum tokens of its requests in the engine, divided by its weight."""
        return self.depth * (self.prompt + OUTPUT_COST * LIMIT * self.output) / self.weight


TENANTS = (TenantLoad(1, 30, 10, 8), TenantLoad(1, 400, 4, 12), TenantLoad(2, 120, 20, 8))


class Shares(NamedTuple):
    """The result of tenant_shares.

    served: tokens of each tenant divided by its weight; an output token counts as OUTPUT_COST.
    apart: the largest difference between two tenants at any time.
    bound: the permitted difference under a fair policy.
    """

    served: list[float]
    apart: float
    bound: float

    @property
    def fair(self) -> bool:
        return self.apart <= self.bound


def tenant_shares(policy: Policy, tenants: tuple[TenantLoad, ...] = TENANTS, turns: int = TENANT_TURNS) -> Shares:
    """Keep requests of all tenants waiting in a small server for some turns."""
    owners = np.arange(MOST_REQUESTS) % len(tenants)
    prompt, output = (np.array([getattr(tenants[owner], name) for owner in owners]) for name in ("prompt", "output"))
    zero = np.zeros(MOST_REQUESTS, np.int64)
    weight = np.array([round(tenant.weight * WEIGHT_ONE) for tenant in tenants])
    words = {"tenant": owners + 1, "tenant_weight": weight[owners]}
    longest = max(tenant.prompt + LIMIT * tenant.output for tenant in tenants)
    pages = (TENANT_ROWS + 1) * (longest // 16 + 2)
    model = ServerModel(
        TENANT_ROWS, TENANT_STEP_TOKENS, page_size=16, num_pages=pages, step_us=4500.0, row_us=22.0, token_us=27.0
    )
    server = TimedSimulation(policy, model, Workload(zero, prompt, output, LIMIT * output, zero), words)
    coming = [iter(np.flatnonzero(owners == owner).tolist()) for owner in range(len(tenants))]
    missing, apart, served = [tenant.depth for tenant in tenants], 0.0, np.zeros(len(tenants))
    for _ in range(turns):
        taken = [list(islice(requests, count)) for requests, count in zip(coming, missing, strict=True)]
        if list(map(len, taken)) != missing:
            break  # stop: a tenant without a waiting request would distort the comparison
        for number in chain(*taken):
            server.submit(number)
        server.turn()
        missing = np.bincount(owners[server.over], minlength=len(tenants)).tolist()
        tokens = np.where(server.outcome.started == NEVER, 0, prompt) + OUTPUT_COST * server.generated
        served = np.bincount(owners, tokens) * WEIGHT_ONE / weight
        apart = max(apart, float(served.max() - served.min()))
    ahead = sorted(tenant.most_ahead for tenant in tenants)
    return Shares(served.tolist(), apart, 2 * sum(ahead[-2:]))
