"""Cases: the real scheduler with real clients of its queue pairs, and with the model, checks and storms of
`blinkpy.verify.sim`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from support.expected_request import ExpectedRequest
from support.front_end.wire_transport import WireTransport

from blinkpy.device.expect import describe_fault
from blinkpy.device.lanes import in_lanes
from blinkpy.device.tables import as_memoryviews
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.kv import state as S
from blinkpy.kv.invariants.check_state import check_state
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import EngineFacts, QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import SQ_ENTRY
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import COUNTER, ENGINE_STATE, FINISH_REJECTED, PAIR_SQ_HEAD, STATE_READY
from blinkpy.scheduler.cycle import make_turn
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.oracle.second_opinion import SecondOpinion
from blinkpy.verify.sim.grammar_supply import GRAMMAR_WORDS
from blinkpy.verify.sim.recorded_turns import RecordedTurns
from blinkpy.verify.sim.simulation import plain_sim
from blinkpy.verify.sim.synthetic_model import check_padding, compute
from blinkpy.verify.sim.turn_invariants import check_turn
from blinkpy.verify.sim.world import TICK_NS, World, WorldSizes, make_world

VOCAB, MULTIPLIERS = 50, (1_234_567, 7_654_321)


def case_sizes(
    pairs: int = 2, slots: int = 4, cq_entries: int = 16, rows: int = 4, tokens: int = 16, page_size: int = 4, pages: int = 16,
    max_model_len: int = 32, vocab_size: int = VOCAB, lease_ms: int = 1, multipliers: tuple[int, int] = MULTIPLIERS,
    share: int = 0, grammar_arena: int = 0, **options: Any,
) -> WorldSizes:  # fmt: skip
    """Sizes so small that every resource runs out. share: slots for grammars. grammar_arena: words; 0: enough for all requests.
    options: see make_limits."""
    sq, words = max(2, 1 << (slots - 1).bit_length()), GRAMMAR_WORDS if share else 0
    arena = max(16, sq * (max_model_len + 2 * words))
    queue = QueueSizes(pairs, slots, sq, cq_entries, arena, sq * (max_model_len // page_size + 1))
    grammars = share, words, grammar_arena or sq * 2 * words
    facts = EngineFacts(1, *multipliers, max_model_len, vocab_size, page_size, pages, rows, lease_ms, *grammars)
    facts = facts._replace(predictions=int(options.get("speculative") == "ngram"))
    return queue, facts, {"max_num_batched_tokens": tokens, "intake_entries": 4, **options}


def tokens(n: int, start: int = 0) -> list[int]:
    """A prompt of n tokens, equal for equal arguments."""
    return [(start + 7 * i) % VOCAB for i in range(n)]


class Case:
    """One world of the simulator in plain Python. The simulator's checks judge each turn.

    policy: policy of `turn`, for the oracle; None: no oracle. clients: clients that send heartbeats and deliver in each turn,
    unless their pair is in `silent`. judged: whether a turn is checked, too, not only its state. opinion: the oracle, from the
    first turn on, or None. records: also repeat each turn from its record.
    """

    def __init__(
        self, world: World, turn: Callable[..., int], policy: Policy | None, client: Any = QueuePair, records: bool = False
    ) -> None:
        self.world, self._turn, self._client = world, turn, client
        self.limits, self.state, self.views, _, self.segment = world
        self._arguments = self.limits, as_memoryviews(self.views), as_memoryviews(self.state), plain_sim(world)
        self.pieces = TokenBytes(self.state.grammars.token_place, self.state.grammars.token_bytes).pieces()
        self.clients: list[Any] = [None] * self.limits.pairs
        self.awaited: list[ExpectedRequest] = []
        self.done: list[ExpectedRequest] = []
        self.silent: set[int] = set()
        self.now, self.bucket, self.judged = 1, -1, True
        self.views.engine[ENGINE_STATE] = STATE_READY
        rules = policy if self.limits.hash_multiplier_1 else None
        self.opinion = SecondOpinion(self.limits, rules, self.state, self.views) if rules else None
        self._recorded = RecordedTurns(world, policy, "njit") if records and policy else None

    def claim(self, pair: int) -> Any:
        """A front end claims the pair; requests in flight of the previous owner are lost. Returns its client."""
        before, self.clients[pair] = self.clients[pair], None
        for sent in before.live() if before else ():
            self.awaited.remove(sent.owner)
        self.clients[pair] = self.attach(pair)
        return self.clients[pair]

    def attach(self, pair: int, while_attaching: Callable[[], None] = lambda: None) -> Any:
        """A client that owns the pair. while_attaching: actions of other parties in each turn meanwhile."""
        transport = WireTransport(self, pair)
        client = self._client(transport, engine_timeout_s=1e9)
        transport.while_attaching = while_attaching
        client.attach(60.0)  # the engine makes turns while the client waits
        transport.while_attaching = None
        return client

    def turn(self, times: int = 1) -> int:
        """Make turns of the scheduler, and steps of the model. Returns the last turn's result."""
        limits, queues, state, sim = self._arguments
        for _ in range(times):
            self.now += TICK_NS
            for pair, client in enumerate(self.clients):
                if client is not None and pair not in self.silent:
                    client.heartbeat()
                    client.transport.deliver(1 << 30)
            self.bucket = self._turn(limits, queues, state, self.now, 0, 1)
            self.opinion = self.opinion if self.judged else None  # the oracle has to see every turn
            difference = self.opinion.difference(self.now, self.bucket) if self.opinion else ""
            difference = difference or (self._recorded.difference() if self._recorded else "")
            assert not difference, difference
            fault = check_state(limits, state, sim.references, sim.seen)
            if self.judged:
                fault = fault or check_turn(limits, queues, state, sim, self.now)
            assert (self.bucket >= 0) == (state.batch.counts[S.ROWS] > 0)
            if self.bucket >= 0:
                fault = fault or check_padding(state, self.bucket) or compute(limits, queues, state, sim)
            assert fault == 0, describe_fault(fault)
        return self.bucket

    def submit(
        self, prompt: list[int], max_tokens: int = 4, pair: int = 0, *, rejected: bool = False, entry: Any = (),
        grammar: ByteAutomaton | None = None, rules: TokenRules | None = None,
        predicting: Callable[[list[int]], list[int]] | None = None, **sampling: Any,
    ) -> ExpectedRequest:  # fmt: skip
        """Submit a request, and deliver it to the engine's memory. rejected: the engine must reject it. entry: fields of its
        entry to overwrite. predicting: computes its prediction from its expected output."""
        parameters = RequestParameters(**{"max_tokens": max_tokens, "seed": 5} | sampling)
        request = ExpectedRequest(self.limits, prompt, parameters, grammar, rules, self.pieces)
        client = self.clients[pair]
        prediction = None if predicting is None else np.array(predicting(request.expected), np.int32)
        sent = client.submit(np.array(prompt, np.int32), request.sampling, request, grammar, rules, prediction)
        client.transport.deliver(1 << 30)
        for name in entry:
            self.views.sq[pair, sent.after - 1 & self.limits.sq_entries - 1].view(SQ_ENTRY)[name] = entry[name]
        if rejected:
            request.expected, request.finish = [], FINISH_REJECTED
        if not {"slot", "epoch"} & set(entry):  # otherwise it is skipped, without a completion
            self.awaited.append(request)
        return request

    def check_named(self, pair: int, client: Any) -> None:
        """Assert that the automata and token rules of unread entries are in the arena, whether the engine reads them or has
        copies."""
        head, mask = int(self.views.pair[pair, PAIR_SQ_HEAD]), self.limits.sq_entries - 1
        for sent in client.live():
            if sent.after > head:
                entry = self.views.sq[pair, sent.after - 1 & mask].view(SQ_ENTRY)[0]
                for name, given in (("grammar", sent.owner.grammar), ("rules", sent.owner.rules)):
                    first, count = int(entry[f"{name}_offset"]), int(entry[f"{name}_words"])
                    words = [] if given is None else given.words().tolist()
                    assert self.views.prompt[pair, first : first + count].tolist() == words, f"{name} of an unread entry"

    def cancel(self, request: ExpectedRequest) -> None:
        """Cancel a request; the cancel reaches the engine in the next turn."""
        client, sent = next((c, s) for c in self.clients for s in c.live() if s.owner is request)
        request.cancelled = True
        client.cancel(sent)

    def read(self, *pairs: int) -> None:
        """Let front ends read their completions, and check each."""
        for pair in pairs:
            for sent, token, flags in self.clients[pair].poll():
                sent.owner.take(token, flags, sent.records)
                if sent.owner.ended:
                    self.done.append(sent.owner)

    def finish(self, most: int = 2000) -> None:
        """Make turns in which all clients read, until each request has ended. Raises AssertionError after `most` turns."""
        everybody = [pair for pair, client in enumerate(self.clients) if client is not None and pair not in self.silent]
        for _ in range(most):
            self.read(*everybody)
            if all(request.ended for request in self.awaited) and not self.state.requests.status.any():
                return
            self.turn()
        raise AssertionError(f"requests do not end within {most} turns")

    def counter(self, name: str) -> int:
        return int(self.views.engine[COUNTER[name]])

    def word(self, index: int, pair: int = 0) -> int:
        """The published value of a word PAIR_*."""
        return int(self.views.pair[pair, index])


def make_case(policy: Policy = fcfs, lanes: int = 3, *, attached: bool = True, **sizes: Any) -> Case:
    """lanes: several lanes show races, too. sizes: see case_sizes. attached: whether every pair has a client."""
    turn = make_turn(policy)
    case = Case(make_world(1, 1, chosen=case_sizes(**sizes)), turn if lanes == 1 else in_lanes(turn, lanes, races=True), policy)
    for pair in range(case.limits.pairs if attached else 0):
        case.claim(pair)
    return case
