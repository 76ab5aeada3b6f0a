"""A fleet in simulated time: several schedulers, each simulated as in timed_server, and one worker that
places requests.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush

import numpy as np

from blinkpy.dpu.fleet.placement import EngineLoad, Placement
from blinkpy.queues.words import Int32, Int64
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.policy_check.check_workload import Workload, load_workload
from blinkpy.verify.policy_check.timed_server import IDLE_NS, NEVER, OTHER, STOP, VOCAB, ServerModel, StuckError, TimedSimulation

NONE = -1
QUESTION = (16, 512)  # range of the number of tokens after a common prefix
GROUPS, GROUP_TOKENS, ZIPF = 192, (512, 2560), 0.9  # system prompts
CHAT_TURNS, CHAT_SYSTEMS, CHAT_SYSTEM_TOKENS, PAUSE_S, MOST_ANSWER = (2, 9), 8, 600, 12.0, 400
BURST_EVERY_S, BURST_REQUESTS, BURST_TOKENS, BURST_LASTS_S, BURST_SHARE = 10.0, 12, 1500, 0.2, 0.3


@dataclass(frozen=True)
class FleetWorkload:
    """Requests with their prompts.

    requests: in the order of their numbers.
    prompts: int32, of each request.
    follows: int64 [n]: request i arrives pause_ns[i] after the end of request follows[i]; if NONE, at its arrival time.
    """

    requests: Workload
    prompts: list[Int32]
    follows: Int64
    pause_ns: Int64

    def __len__(self) -> int:
        return len(self.prompts)


def azure(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Lengths of the Azure trace; no two prompts share a prefix. Arrivals are a Poisson process, except in
    `chats`.
    """
    lengths = _lengths(count, rng)
    prompts = [_tokens(int(n), rng) for n in lengths.prompt]
    return _open_loop(_poisson(count, rate, rng), prompts, lengths)


def shared_prefix(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Prompts of a system prompt, drawn from many by Zipf's law, and a question."""
    groups = GROUPS * engines // 4 + 1
    systems = [_tokens(int(n), rng) for n in rng.integers(*GROUP_TOKENS, groups)]
    weights = 1 / np.arange(1, groups + 1) ** ZIPF
    chosen = rng.choice(groups, count, p=weights / weights.sum())
    prompts = [np.concatenate((systems[group], _tokens(int(rng.integers(*QUESTION)), rng))) for group in chosen]
    return _open_loop(_poisson(count, rate, rng), prompts, _lengths(count, rng))


def chats(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Chats of several turns. A turn's prompt contains all previous turns and answers. It arrives after the user's time to read
    and write.
    """
    lengths = _lengths(count, rng)
    output = np.minimum(lengths.output, MOST_ANSWER)
    systems = [_tokens(CHAT_SYSTEM_TOKENS, rng) for _ in range(CHAT_SYSTEMS)]
    prompts: list[Int32] = []
    follows: list[int] = []
    while len(prompts) < count:
        text = systems[rng.integers(CHAT_SYSTEMS)]
        for turn in range(min(int(rng.integers(*CHAT_TURNS)), count - len(prompts))):
            number = len(prompts)
            text = np.concatenate((text, _tokens(int(rng.integers(*QUESTION)), rng)))
            prompts.append(text)
            follows.append(number - 1 if turn else NONE)
            text = np.concatenate((text, np.full(output[number] - 1, OTHER, np.int32), np.array([STOP], np.int32)))
    first = np.array(follows) == NONE
    arrival = np.zeros(count, np.int64)
    arrival[first] = _poisson(int(first.sum()), rate * first.mean(), rng)
    pause = (rng.exponential(PAUSE_S, count) * 1e9).astype(np.int64)
    requests = Workload(arrival, _sizes(prompts), output, np.minimum(lengths.max_tokens, 2 * MOST_ANSWER), lengths.priority)
    return FleetWorkload(requests, prompts, np.array(follows), pause)


def bursts(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Lengths of the Azure trace, with occasional bursts of requests with a common prefix, as in batch jobs."""
    lengths = _lengths(count, rng)
    job = rng.permutation(count) < BURST_SHARE * count  # requests of jobs
    arrival = _poisson(count, rate, rng)
    prompts = [_tokens(int(n), rng) for n in lengths.prompt]
    span, members = arrival[-1], np.flatnonzero(job)
    for part in np.array_split(members, max(1, len(members) // (BURST_REQUESTS * engines))):
        start, begin = _tokens(BURST_TOKENS, rng), int(rng.integers(0, span))
        for i in part:
            prompts[i] = np.concatenate((start, _tokens(int(rng.integers(*QUESTION)), rng)))
        arrival[part] = begin + (rng.random(len(part)) * BURST_LASTS_S * 1e9).astype(np.int64)
    return _open_loop(arrival, prompts, lengths)


FLEET_WORKLOADS: dict[str, Callable[[int, float, int, np.random.Generator], FleetWorkload]] = {
    "azure": azure,
    "shared-prefix": shared_prefix,
    "chats": chats,
    "bursts": bursts,
}
"""count: requests. rate: mean arrivals, requests/s, of the whole fleet. engines: number of engines."""


def _lengths(count: int, rng: np.random.Generator) -> Workload:
    """Lengths of the trace, drawn with replacement."""
    whole = load_workload("azure")
    drawn = rng.integers(0, len(whole), count)
    return Workload(*(getattr(whole, field.name)[drawn] for field in fields(whole)))


def _tokens(count: int, rng: np.random.Generator) -> Int32:
    return rng.integers(STOP + 1, VOCAB, count, dtype=np.int32)


def _poisson(count: int, rate: float, rng: np.random.Generator) -> Int64:
    return (np.cumsum(rng.exponential(1 / rate, count)) * 1e9).astype(np.int64)


def _sizes(prompts: list[Int32]) -> Int64:
    return np.array([len(prompt) for prompt in prompts])


def _open_loop(arrival: Int64, prompts: list[Int32], lengths: Workload) -> FleetWorkload:
    count = len(prompts)
    requests = Workload(arrival, _sizes(prompts), lengths.output, lengths.max_tokens, lengths.priority)
    return FleetWorkload(requests, prompts, np.full(count, NONE), np.zeros(count, np.int64))


SLOTS = 256  # of each engine
MOST_IDLE = 1000  # consecutive idle turns after which an engine with requests counts as stuck


@dataclass
class FleetOutcome:
    """Outcomes of the requests, int64 [n].

    engine: each request's engine.
    ttft_ns: time from arrival to first token.
    computed: int64 [engines], tokens computed by each engine.
    hit_rate: fraction of all prompts' tokens found in a prefix cache.
    faults: requests for which the placement failed.
    """

    engine: Int64
    ttft_ns: Int64
    computed: Int64
    hit_rate: float
    faults: int

    @property
    def balance(self) -> float:
        """Tokens computed by the busiest engine, divided by the mean."""
        return float(self.computed.max() / self.computed.mean())


class FleetSimulation:
    """One worker and several equal engines. The result depends only on the arguments. slots: slots of each
    engine.
    """

    def __init__(
        self,
        policy: Policy,
        machine: ServerModel,
        workload: FleetWorkload,
        engines: int,
        placement: Placement,
        slots: int = SLOTS,
    ):
        self._workload, self._placement = workload, placement
        self._servers = [
            TimedSimulation(policy, machine, workload.requests, prompts=workload.prompts, most_slots=slots)
            for _ in range(engines)
        ]
        self._slots = len(self._servers[0].free)
        self._in_flight = [0] * engines
        self._unseen = [0] * engines
        self._accepted = [0] * engines
        self._engine = np.full(len(workload), NEVER)
        self._due = workload.requests.arrival_ns.copy()
        self._coming = [(int(self._due[i]), i) for i in np.flatnonzero(workload.follows == NONE).tolist()]
        heapify(self._coming)
        self._followers = {int(before): i for i, before in enumerate(workload.follows.tolist()) if before != NONE}
        self._waiting: deque[int] = deque()  # requests that arrived when no engine had a slot

    def run(self) -> FleetOutcome:
        """Serve all requests. Raises StuckError if some never end."""
        ended = idle = 0
        while ended < len(self._workload):
            busy = [server for server in self._servers if self._live(server)]
            first = min(busy, key=lambda server: server.now) if busy else None
            if self._coming and (first is None or self._coming[0][0] <= first.now):
                due, number = heappop(self._coming)
                self._waiting.append(number)
                self._place(due)
                continue
            if first is None:
                raise StuckError(f"{len(self._workload) - ended} requests wait forever: no engine accepts them")
            ran = first.turn()
            ended += self._note(first)
            idle = 0 if ran or first.over else idle + 1
            if not ran and not first.over:
                first.now += IDLE_NS
                if idle > MOST_IDLE:
                    raise StuckError(f"{len(self._workload) - ended} requests wait forever: no request runs")
            self._place(first.read_ns)
        return self._outcome()

    def _live(self, server: TimedSimulation) -> bool:
        return len(server.free) < self._slots

    def _place(self, now: int) -> None:
        """Send waiting requests to engines, in order, while the placement finds an engine."""
        while self._waiting:
            number, workload = self._waiting[0], self._workload
            prompt = workload.prompts[number]
            chosen = self._placement.choose(prompt, 0, [self._load(i) for i in range(len(self._servers))])
            if chosen is None:
                return
            self._waiting.popleft()
            self._placement.sent(chosen, prompt, 0)
            server = self._servers[chosen]
            if not self._live(server):
                server.now = max(server.now, now)
            server.submit(number)
            self._engine[number] = chosen
            self._in_flight[chosen] += self._size(number)
            self._unseen[chosen] += len(prompt)

    def _size(self, number: int) -> int:
        requests = self._workload.requests
        return int(requests.prompt[number] + requests.max_tokens[number])

    def _load(self, index: int) -> EngineLoad:
        """An engine's load as a worker knows it: last published values, and requests in flight."""
        server = self._servers[index]
        prompts, accepted = server.counter("prompt_tokens"), server.counter("requests_accepted")
        if accepted != self._accepted[index]:
            self._accepted[index], self._unseen[index] = accepted, 0
        waiting = server.gauge("requests_waiting") * prompts // max(1, accepted)
        free_pages = server.gauge("pages_free") + server.gauge("pages_cached")
        loads = len(server.free), waiting, server.gauge("requests_running"), free_pages
        return EngineLoad(index, *loads, self._in_flight[index], self._unseen[index], bool(server.free))

    def _note(self, server: TimedSimulation) -> int:
        """Count the requests that ended in an engine's last turn, and schedule the requests that follow them."""
        index, workload = self._servers.index(server), self._workload
        for number in server.over:
            self._in_flight[index] -= self._size(number)
            follower = self._followers.get(number)
            if follower is not None:
                self._due[follower] = server.read_ns + workload.pause_ns[follower]
                heappush(self._coming, (int(self._due[follower]), follower))
        return len(server.over)

    def _outcome(self) -> FleetOutcome:
        servers, everyone = self._servers, range(len(self._workload))
        first = np.array([servers[self._engine[i]].outcome.first_token[i] for i in everyone])
        computed, hits, looked_up = (
            np.array([server.counter(name) for server in servers])
            for name in ("computed_tokens", "prefix_hit_tokens", "prefix_lookup_tokens")
        )
        share = float(hits.sum() / max(1, looked_up.sum()))
        return FleetOutcome(self._engine, first - self._due, computed, share, self._placement.faults)
