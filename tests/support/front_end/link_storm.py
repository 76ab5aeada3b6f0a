"""Storms over a link: the real scheduler and real clients, with transports from a test. Every expected token and record is known.

Front ends submit, cancel, read, stay alive and crash; a successor claims the pair while words of the dead front end are in
flight. No front end breaks the protocol, so any fault of a front end in the engine's counters is a fault of the link.
"""

import random
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.expected_request import ExpectedRequest
from support.scheduler_cases import Case, case_sizes, tokens

from blinkpy.kv.state import COUNTER_INDEX
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import hits_of
from blinkpy.verify.sim.world import make_world

PATIENCE = 500  # turns until all requests have ended


def hit_tokens(case: Case, pair: int, request: Any) -> int:
    """Tokens that the engine found in the prefix cache for a request, read from the engine's memory before its slot is reused."""
    word = int(case.views.hits[pair, request.slot])
    return hits_of(word, request.request_id) * case.limits.page_size


def looks_clock() -> Any:
    """A stand-in for the module time: each look at the clock advances it by a millisecond, and no thread sleeps."""
    looks = count()
    return SimpleNamespace(
        monotonic=lambda: next(looks) / 1e3, monotonic_ns=lambda: next(looks) * 1_000_000, sleep=lambda seconds: None
    )


class LinkStorm:
    """turn: the scheduler's turn. queue_pair: the client's module. connect(pair): makes a transport for a new owner; the creator
    sets it."""

    connect: Callable[[int], Any]

    def __init__(self, seed: int, turn: Callable[..., int], queue_pair: Any) -> None:
        self.draw, self.queue_pair = random.Random(seed), queue_pair
        sizes = case_sizes(slots=4, cq_entries=4 << seed % 2 * 2, pages=24, lease_ms=1000, intake_entries=1)
        world = make_world(seed, 1, chosen=sizes)
        world = world._replace(limits=world.limits._replace(claim_ns=0))  # owners change often
        self.case = Case(world, turn, None)
        self.case.judged = False  # published words may be old
        self.clients: list[Any] = [None] * self.case.limits.pairs
        self.taking_turn = False
        self.late_words = False  # a hit word may arrive after the first completion, and then counts as no hit

    def turn(self) -> None:
        """Make a turn, also between two accesses of a front end, but not within another turn."""
        if not self.taking_turn:
            self.taking_turn = True
            self.case.turn()
            self.taking_turn = False

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for pair in range(len(self.clients)):
                self._act(pair)
            self.turn()
        for pair in range(len(self.clients)):
            self._change_owner(pair)
        for _ in range(PATIENCE):
            for pair, client in enumerate(self.clients):
                if client is None:
                    self._attach(pair)
                else:
                    client.heartbeat()
                    self._read(client)
            if not self.case.state.requests.status.any() and not any(client.in_flight for client in self.clients):
                break
            self.turn()
        else:
            raise AssertionError(f"requests do not end within {PATIENCE} turns")
        counters = self.case.state.counters
        for name in ("stale_entries", "requests_rejected", "leases_expired"):
            assert counters[COUNTER_INDEX[name]] == 0, name

    def _attach(self, pair: int) -> None:
        client = self.queue_pair.QueuePair(self.connect(pair), engine_timeout_s=1e9)
        client.attach(1.0)
        client.check()
        self.clients[pair] = client

    def _change_owner(self, pair: int) -> None:
        """The new owner submits while words of the old owner are in flight, and then only sends heartbeats."""
        for _ in range(2):
            if self.clients[pair] is None:
                self._attach(pair)
            for _ in range(self.draw.randint(1, 4)):
                self._submit(self.clients[pair])
            if self.draw.random() < 0.5:
                for _ in range(self.draw.randint(1, 4)):
                    self.turn()
                self._read(self.clients[pair])
            self._crash(pair)
        self._attach(pair)
        self._submit(self.clients[pair])

    def _crash(self, pair: int) -> None:
        self.clients[pair].transport.crash()
        self.clients[pair] = None

    def _act(self, pair: int) -> None:
        client, draw = self.clients[pair], self.draw
        if client is None:
            self._attach(pair)
            return
        for _ in range(draw.choice((0, 0, 1, 3))):
            self._submit(client)
        live = client.live()
        if live and draw.random() < 0.05:
            request = draw.choice(live)
            request.owner.cancelled = True
            client.cancel(request)
        if draw.random() < 0.7:
            self._read(client)
        if draw.random() < 0.2:
            client.heartbeat()
            client.check()
        if draw.random() < 0.05:
            self._crash(pair)

    def _submit(self, client: Any) -> None:
        draw = self.draw
        prompt = tokens(draw.randint(1, 20), draw.choice((0, draw.randrange(50))))
        sampling = RequestParameters(
            max_tokens=draw.randint(1, 8), seed=draw.randrange(1 << 20), logprobs=draw.choice((-1, -1, 0, 20))
        )
        try:
            client.submit(np.array(prompt, np.int32), sampling, ExpectedRequest(self.case.limits, prompt, sampling))
        except self.queue_pair.NoSpaceError:
            assert client.in_flight, "no free slot, although no request is in flight"

    def _read(self, client: Any) -> None:
        for request, token, flags in client.poll():
            request.owner.take(token, flags, request.records)
            hits = hit_tokens(self.case, self.clients.index(client), request)
            assert request.cached_tokens == hits or (self.late_words and request.cached_tokens == 0)
        assert client.stray_completions == 0
