"""Property tests of the whole protocol: a Hypothesis state machine over the real client and the real scheduler.

Every rule is followed by a check of the state, and every read completion is checked. At the end all front ends behave, and every
request must end.
"""

import importlib
import os
import random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.expected_request import ExpectedRequest
from support.front_end.link_storm import hit_tokens
from support.scheduler_cases import Case

from blinkpy.kv.state import DRAINED
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import HEADER
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE, SUBMIT_SCORE_PROMPT
from blinkpy.queues.token_rules import TokenRules
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.grammar_supply import RULES
from blinkpy.verify.sim.world import make_world

_CI = settings(max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
PROFILES = {"ci": _CI, "nightly": settings(_CI, max_examples=2000, stateful_step_count=150)}
PROFILE = PROFILES[os.environ.get("BLINKPY_PROFILE", "ci")]
PAIRS, SEEDS = st.integers(0, 4), st.integers(0, 2**32)
BEAT_EVERY = 8  # calls; a lease is 20


class FrontMachine(RuleBasedStateMachine):
    """Front ends that attach, crash, write late and read slowly. The constructor looks up the modules under test, so that a test
    may plant bugs in them."""

    def __init__(self) -> None:
        super().__init__()
        self.client: Any = importlib.import_module("blinkpy.dpu.link.queue_pair")
        self.drained = False
        self.delayed: set[int] = set()
        self.excused: set[int] = set()  # pairs whose lease may end
        self.calls = 0

    @initialize(seed=st.integers(0, 2**20), policy=st.sampled_from(sorted(SHIPPED)))
    def begin(self, seed: int, policy: str) -> None:
        scheduler = importlib.import_module("blinkpy.scheduler.cycle")
        recorded = seed % 4 == 0
        world = make_world(seed, 1, tight=True, records=recorded)
        turn = scheduler.make_turn(SHIPPED[policy])
        if world.limits.grammar_share:  # space for the largest automaton, the largest token rules, and a few more
            lengths = world.sim.grammars.length, world.sim.rules.length
            arena = sum(int(length.max()) for length in lengths) + 16 * (seed % 5)
            np.ndarray((1,), HEADER, world.segment)["grammar_arena"] = arena
        self.case = Case(world, turn, SHIPPED[policy], self.client.QueuePair, recorded)
        limits = self.case.limits
        self.pairs: list[Any] = [None] * limits.pairs
        draw = np.random.default_rng(seed)
        self.stems = draw.integers(0, limits.vocab_size, (2, limits.max_model_len)).tolist()
        supply = world.sim.grammars
        good = len(supply.following)
        self.grammars = [ByteAutomaton.of_words(w[:n]) for w, n in zip(supply.words[:good], supply.length[:good], strict=True)]
        packed = zip(world.sim.rules.words[:RULES], world.sim.rules.length[:RULES], strict=True)
        self.token_rules = [TokenRules.of_words(words[:n], limits.vocab_size) for words, n in packed]
        for pair in range(limits.pairs):
            self._attach(pair)

    # ---- rules ---------------------------------------------------------------------------------------------------------

    @rule(pair=PAIRS, many=st.integers(1, 6), seed=SEEDS)
    def submit(self, pair: int, many: int, seed: int) -> None:
        """Submit requests of all kinds, drawn from a seed: prompts with a common start, any length, any limit."""
        client, draw = self._living(pair), random.Random(seed)
        for _ in range(many if client else 0):
            sent = ExpectedRequest(self.case.limits, *self._request(draw), self.case.pieces)
            try:
                client.submit(np.array(sent.prompt, np.int32), sent.sampling, sent, sent.grammar, sent.rules)
            except self.client.NoSpaceError:
                assert client.in_flight, "the queue is full without a request"
                return
            except self.client.EngineUnavailableError:
                assert self.drained
                return

    @rule(pair=PAIRS, seed=SEEDS)
    def serve(self, pair: int, seed: int) -> None:
        """The usual events, so that rare events have requests to disturb."""
        draw = random.Random(seed)
        for _ in range(draw.randint(1, 5)):
            self.submit(draw.randrange(5), draw.randint(1, 6), draw.randrange(1 << 30))
            for _ in range(draw.randint(1, 10)):
                self.steps(1)
                self.read(pair)

    @rule(steps=st.integers(1, 8))
    def steps(self, steps: int) -> None:
        """Let time pass. Every live party sends heartbeats; all writes arrive except delayed ones."""
        for _ in range(steps):
            self._beat()
            self.case.turn()

    @rule(pair=PAIRS, which=st.integers(0, 5), at_once=st.booleans())
    def cancel(self, pair: int, which: int, at_once: bool) -> None:
        """Cancel a request in any state: not yet arrived, waiting, computed in chunks, preempted, or just ended."""
        client = self._living(pair)
        live = client.live() if client else []
        if live:
            request = live[which % len(live)]
            request.owner.cancelled = True
            client.cancel(request)
            if at_once:
                client.transport.deliver(1 << 30)

    @rule(pair=PAIRS)
    def read(self, pair: int) -> None:
        client = self._living(pair)
        if client:
            self._read(client)

    @rule(pair=PAIRS, reads=st.integers(0, 6))
    def lag(self, pair: int, reads: int) -> None:
        """Let this front end read old words for a number of reads, but never older words than before."""
        client = self._living(pair)
        if client:
            client.transport.lag = reads

    @rule(pair=PAIRS)
    def delay(self, pair: int) -> None:
        """Keep this front end's writes in flight until `resume`. Its lease may end meanwhile."""
        self.delayed.add(pair % len(self.pairs))
        self.excused.add(pair % len(self.pairs))

    @rule(pair=PAIRS, seed=SEEDS, calls=st.integers(1, 3))
    def trickle(self, pair: int, seed: int, calls: int) -> None:
        """A delayed front end submits; its writes arrive one by one, between calls of the scheduler."""
        self.delay(pair)
        self.submit(pair, 2, seed)
        for _ in range(8):
            client = self._living(pair)
            if client:
                client.transport.deliver(1)
            self.steps(calls)

    @rule(pair=PAIRS)
    def resume(self, pair: int) -> None:
        self.delayed.discard(pair % len(self.pairs))

    @rule(pair=PAIRS, writes=st.integers(0, 8))
    def crash(self, pair: int, writes: int) -> None:
        """A front end crashes between any two of its writes."""
        client = self._living(pair)
        if client:
            client.transport.deliver(writes)
            client.transport.wire.clear()
            self.pairs[pair % len(self.pairs)] = None

    @rule(pair=PAIRS)
    def reattach(self, pair: int) -> None:
        if self._living(pair) is None and not self.drained:
            self._attach(pair % len(self.pairs))

    @rule()
    def silence(self) -> None:
        """All heartbeats are missing for longer than a lease."""
        self.case.now += 2 * self.case.limits.lease_ns
        self.excused |= set(range(len(self.pairs)))

    @rule(pair=PAIRS)
    def look(self, pair: int) -> None:
        """A front end checks that it still has its pair; if not, it attaches again."""
        client = self._living(pair)
        if client:
            self._check(pair % len(self.pairs), client)

    @rule(pair=PAIRS, seed=SEEDS, word=st.sampled_from((W.FRONT_DOORBELL, W.FRONT_CQ_HEAD)))
    def late(self, pair: int, seed: int, word: int) -> None:
        """A late write of an earlier epoch overwrites the latest write."""
        self.submit(pair, 2, seed)
        pair %= len(self.pairs)
        if self.pairs[pair]:
            self.pairs[pair].transport.deliver(1 << 30)
        draw = random.Random(seed)
        epoch = draw.randrange(max(1, int(self.case.views.pair[pair, W.PAIR_EPOCH])))
        self.case.views.front[pair, word] = epoch << W.EPOCH_SHIFT | draw.randrange(1 << 20)

    @precondition(lambda self: not self.drained)
    @rule(sure=st.integers(0, 40))
    def drain(self, sure: int) -> None:
        if sure == 7:
            self.drained = True
            self.case.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN
            self.case.views.engine[W.ENGINE_STATE] = W.STATE_DRAINING

    def teardown(self) -> None:
        """All front ends behave: all requests must end within a bounded number of calls, and free all pages."""
        if not hasattr(self, "case"):
            return
        limits, case = self.case.limits, self.case
        self.delayed.clear()
        bound = 2 * limits.slots * (limits.max_model_len + 40) + 100
        for _ in range(bound):
            for pair, client in enumerate(self.pairs):
                if client is None and not self.drained:
                    self._attach(pair)
                elif client is not None:
                    self._check(pair, client)
            for client in filter(None, self.pairs):
                self._read(client)
            if self.drained and case.bucket == DRAINED:
                break
            if not any(client.in_flight for client in self.pairs if client) and (case.state.requests.status == 0).all():
                break
            self._beat()
            case.turn()
        else:
            raise AssertionError(f"requests do not end within {bound} calls")
        assert (case.state.pages.refcount == 0).all()

    # ---- what the rules share ------------------------------------------------------------------------------------------

    def _living(self, pair: int) -> Any:
        return self.pairs[pair % len(self.pairs)]

    def _attach(self, pair: int) -> None:
        self.pairs[pair] = None
        self.excused.discard(pair)
        self.excused |= self.delayed
        self.pairs[pair] = self.case.attach(pair, self._beat)

    def _beat(self) -> None:
        self.calls += 1
        for pair, client in enumerate(self.pairs):
            if client is not None:
                if self.calls % BEAT_EVERY == 0:
                    client.heartbeat()
                if pair not in self.delayed:
                    client.transport.deliver(1 << 30)
                    self.case.check_named(pair, client)

    def _request(self, draw: random.Random) -> tuple[list[int], RequestParameters, ByteAutomaton | None, TokenRules | None]:
        limits = self.case.limits
        longest = min(limits.max_model_len - 1, limits.pages * limits.page_size)
        length = draw.randint(1, longest if draw.random() < 0.5 else max(1, longest // 3))
        own = draw.randint(0, min(2, length))
        prompt = draw.choice(self.stems)[: length - own] + [draw.randrange(limits.vocab_size) for _ in range(own)]
        space = min(limits.max_model_len, limits.pages * limits.page_size + 1) - length
        sampling = RequestParameters(
            max_tokens=draw.randint(1, space),
            min_tokens=draw.choice((0, 0, 3)),
            seed=draw.randrange(1 << 20),
            priority=draw.randint(-1, 1),
            best_effort=draw.choice((0, 0, 1)),
            cache_salt=draw.choice((0, 0, 9)),
            logprobs=draw.choice((-1, -1, 0, 20)),
            flags=draw.choice((0, 0, SUBMIT_NO_PREFIX_CACHE)) | draw.choice((0, 0, 0, SUBMIT_SCORE_PROMPT)),
            stop_ids=tuple(draw.randrange(limits.vocab_size) for _ in range(draw.randint(0, 2))),
        )
        grammar = draw.choice(self.grammars) if limits.grammar_share and draw.random() < 0.5 else None
        both = grammar is None or limits.grammar_share > 1
        rules = draw.choice(self.token_rules) if limits.grammar_share and both and draw.random() < 0.3 else None
        return prompt, sampling, grammar, rules

    def _check(self, pair: int, client: Any) -> None:
        client.transport.catch_up()
        words = client.transport.read_pair()
        lives = words.epoch == client.epoch and words.attached == 1
        try:
            client.check()
            assert lives, "a client did not notice that its epoch was revoked"
        except self.client.EngineLostError:
            assert not lives, "a client reports that its epoch was revoked, but it was not"
            assert pair in self.excused, "a client lost its epoch without missing a heartbeat"
            client.abandon()
            client.transport.wire.clear()
            self.pairs[pair] = None
            if not self.drained:
                self._attach(pair)

    def _read(self, client: Any) -> None:
        for request, token, flags in client.poll():
            request.owner.take(token, flags, request.records)
            assert request.cached_tokens == hit_tokens(self.case, client.transport.pair, request)
        assert client.stray_completions == 0
