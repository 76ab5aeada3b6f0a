"""A fleet in simulated time: several schedulers, each as in timed_server, and one worker that places requests."""

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from blinkpy.dpu.fleet.placement import EngineLoad, Placement
from blinkpy.queues.array_types import Int64
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.fleet_check.fleet_workloads import NOBODY, FleetWorkload
from blinkpy.verify.policy_check.timed_server import IDLE_NS, NEVER, ServerModel, StuckError, TimedSimulation

SLOTS = 256  # of each engine
MOST_IDLE = 1000  # turns of an engine in a row that run nothing, although requests are there


@dataclass
class FleetOutcome:
    """What became of the requests, int64 [n]: engine of each, and ns from the arrival to the first token. computed: tokens that
    each engine computed, int64 [engines]. hit_rate: share of all prompts' tokens that were found in a prefix cache."""

    engine: Int64
    ttft_ns: Int64
    computed: Int64
    hit_rate: float
    faults: int

    @property
    def balance(self) -> float:
        """The busiest engine's tokens, by their mean."""
        return float(self.computed.max() / self.computed.mean())


class FleetSimulation:
    """One worker, and engines that are all alike. slots: of each engine. Depends on its arguments alone."""

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
        self._in_flight, self._unseen, self._accepted = [0] * engines, [0] * engines, [0] * engines
        self._engine = np.full(len(workload), NEVER)
        self._due = workload.requests.arrival_ns.copy()
        self._coming = [(int(self._due[i]), i) for i in np.flatnonzero(workload.follows == NOBODY).tolist()]
        heapify(self._coming)
        self._followers = {int(before): i for i, before in enumerate(workload.follows.tolist()) if before != NOBODY}
        self._door: deque[int] = deque()  # those that arrived when no engine had a slot

    def run(self) -> FleetOutcome:
        """Serve all requests. Raises StuckError if some never end."""
        ended = idle = 0
        while ended < len(self._workload):
            busy = [server for server in self._servers if self._live(server)]
            first = min(busy, key=lambda server: server.now) if busy else None
            if self._coming and (first is None or self._coming[0][0] <= first.now):
                due, number = heappop(self._coming)
                self._door.append(number)
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
        """Send who is at the door to engines, in order, as long as some accept."""
        while self._door:
            number, workload = self._door[0], self._workload
            prompt = workload.prompts[number]
            chosen = self._placement.choose(prompt, 0, [self._load(i) for i in range(len(self._servers))])
            if chosen is None:
                return
            self._door.popleft()
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
        """As a worker knows it: from what the engine published last, and what is in flight."""
        server = self._servers[index]
        prompts, accepted = server.counter("prompt_tokens"), server.counter("requests_accepted")
        if accepted != self._accepted[index]:
            self._accepted[index], self._unseen[index] = accepted, 0
        waiting = server.gauge("requests_waiting") * prompts // max(1, accepted)
        free_pages = server.gauge("pages_free") + server.gauge("pages_cached")
        loads = len(server.free), waiting, server.gauge("requests_running"), free_pages
        return EngineLoad(index, *loads, self._in_flight[index], self._unseen[index], bool(server.free))

    def _note(self, server: TimedSimulation) -> int:
        """Take what a turn of an engine completed; the number of requests that ended."""
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
