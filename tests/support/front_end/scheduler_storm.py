"""The storm of fleet_storm over worlds of the simulator: each engine is a real scheduler with a real queue pair, the simulator's
model, and its checks after each turn.

Engines are killed and restarted, drain, and lose their link. If only the link is lost, the old owner's requests continue in the
live scheduler, whose late writes must reach no client. The next token is a hash of all cache entries in a request's page table.
So a wrong token, position or page changes the text.
"""

import importlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.expected_request import ExpectedRequest
from support.front_end.fleet_storm import STEP_S, Client, Storm, Texts
from support.scheduler_cases import Case, case_sizes

from blinkpy.queues import words as C
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import HEADER
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.grammar_supply import RULES
from blinkpy.verify.sim.world import make_world

ENGINE_SLOTS, CONTEXT, PAGE, PAGES = 4, 40, 4, 28
KILLED_SHARE = 0.6  # share of the losses; otherwise the link is cut, and the engine survives
LONGEST_PROMPT = 16
CALM_STEPS = 900
DRAFTING = 4  # every fourth storm has engines with drafts
DRAFTS: dict[str, Any] = {"speculative": "ngram", "speculative_tokens": 3, "speculative_match": 3}


class ScheduledPair:
    """A mix-in for QueuePair with the storm's view of it. The class itself may have a planted bug."""

    case: Case
    transport: Any
    live: Any

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.asked: dict[Any, tuple[tuple[int, ...], int]] = {}  # by request: prompt and max_tokens

    @property
    def state(self) -> int:
        return int(self.case.views.engine[W.ENGINE_STATE])

    @state.setter
    def state(self, state: int) -> None:
        self.case.views.engine[W.ENGINE_STATE] = state
        self.case.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN if state == W.STATE_DRAINING else W.COMMAND_RUN

    @property
    def requests(self) -> list[Any]:
        return list(self.live())

    def turn(self) -> None:
        self.case.turn()

    def submit(self, prompt: Any, sampling: Any, owner: Any = None, **more: Any) -> Any:
        request = super().submit(prompt, sampling, owner, **more)  # type: ignore[misc]
        self.asked[request] = tuple(prompt.tolist()), sampling.max_tokens
        owner.sink.homes += 1
        return request

    def poll(self, *most: int) -> Any:
        events = super().poll(*most)  # type: ignore[misc]
        for request, _, flags in events:
            drafts, said = request.owner.sink.drafts, (C.WAS_DRAFTED, C.WAS_PREDICTED)
            request.owner.sink.drafts = tuple(count + (flags & flag != 0) for count, flag in zip(drafts, said, strict=True))
        return events


class WorldClient(Client):
    """A client whose engines are schedulers of the simulator. sent: the tokens of an undisturbed engine. drafts: published
    numbers of all drafts, and of those from the prediction."""

    def __init__(self, sent: ExpectedRequest):
        super().__init__(sent, ())  # type: ignore[arg-type]
        self.sent = sent

    def expected(self) -> tuple[str, list[float], str]:
        stopped = self.sent.finish == C.FINISH_STOP
        text = "".join(f"<{token}>" for token in (self.sent.expected[:-1] if stopped else self.sent.expected))
        return text, [], "length" if self.sent.finish == C.FINISH_LENGTH else "stop"


class SchedulerStorm(Storm):
    """A storm over real schedulers. cuts: number of lost links whose engines survived."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.cuts = self.predicted = 0
        self.drafting, self.predicting = seed % DRAFTING == 0, random.Random(f"predictions {seed}")
        self.policy = SHIPPED[self.draw.choice(sorted(SHIPPED))]
        self._turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn(self.policy)
        self._cases: dict[int, Case] = {}

    def _open(self) -> None:
        module = self.modules["link.queue_pair"]
        self.pair_class = type("ScheduledPair", (ScheduledPair, module.QueuePair), {})
        super()._open()
        case = self._cases[0]
        self.fleet.moves.pieces = lambda: case.pieces
        # The simulator's model takes small seeds. The storm patches this module, and restores it at the end.
        vars(self.modules["fleet.engines"])["secrets"] = SimpleNamespace(randbits=lambda bits: self.draw.getrandbits(31))

    def _asked(self, pair: Any) -> list[tuple[Sequence[int], int]]:
        return [pair.asked[request] for request in pair.requests]

    def _attach(self, link: Any) -> None:
        case = self._cases.get(link.index)
        if case is None:
            case = self._cases[link.index] = self._world()
        link.pair = case.clients[0] = case.attach(0)
        link.pair.case = case

    def _world(self) -> Case:
        """A fresh engine; all engines have the same sizes and tokens."""
        sizes = case_sizes(
            pairs=1, slots=ENGINE_SLOTS, page_size=PAGE, pages=PAGES, max_model_len=CONTEXT, lease_ms=1000, share=2,
            **(DRAFTS if self.drafting else {}),
        )  # fmt: skip
        world = make_world(self.seed, 1, chosen=sizes)
        world = world._replace(limits=world.limits._replace(claim_ns=0))
        np.ndarray((1,), HEADER, world.segment)["instance"] = next(self._instances)
        return Case(world, self._turn, self.policy, self.pair_class)

    def _lose(self, link: Any) -> None:
        if link.pair is None:
            return
        if link.pair.state != W.STATE_READY or self.draw.random() < KILLED_SHARE:
            case = self._cases.pop(link.index)
        else:
            case, self.cuts = self._cases[link.index], self.cuts + 1
        case.clients[0] = None
        super()._lose(link)

    def _step(self) -> None:
        super()._step()
        for link in self.fleet.links:
            if link.pair is None and link.index in self._cases:  # an engine without a link continues
                self._cases[link.index].turn()

    def _submit(self) -> None:
        draw, case = self.draw, self._cases.get(0) or next(iter(self._cases.values()), None)
        if case is None:
            return
        supply, rules = case.world.sim.grammars, case.world.sim.rules
        prompt = [draw.randrange(case.limits.vocab_size) for _ in range(draw.randint(1, LONGEST_PROMPT))]
        sampling = RequestParameters(
            max_tokens=draw.randint(1, CONTEXT - len(prompt)), min_tokens=draw.choice((0, 4)), seed=draw.getrandbits(31),
            priority=draw.randint(-1, 1), best_effort=draw.choice((0, 0, 1)), cache_salt=draw.choice((0, 0, 9)),
            stop_ids=tuple(draw.randrange(case.limits.vocab_size) for _ in range(draw.randint(0, 2))),
        )  # fmt: skip
        grammar, token_rules = None, None
        if draw.random() < 0.3:
            number = draw.randrange(len(supply.following))
            grammar = ByteAutomaton.of_words(supply.words[number][: supply.length[number]])
        elif draw.random() < 0.2:
            number = draw.randrange(RULES)
            token_rules = TokenRules.of_words(rules.words[number][: rules.length[number]], case.limits.vocab_size)
        sent = ExpectedRequest(case.limits, prompt, sampling, grammar, token_rules, case.pieces)
        if sent.finish == C.FINISH_ERROR:
            return
        drawn = grammar is None and draw.random() < 0.3
        if drawn:  # all engines must get the seed that the fleet has drawn
            sampling = sampling.changed(seed=None)
        client, module = WorldClient(sent), self.modules["generation"]
        made = module.Generation(0, len(prompt), Texts(), (), self.now, client, sampling.logprobs, None)
        made.grammar, made.rules, client.generation = grammar, token_rules, made
        made.prediction = self._prediction(prompt, sent.expected) if self.drafting else None
        if self.fleet.free_slots() < 1:
            return
        try:
            self.fleet.submit([(made, np.array(prompt, np.int32), sampling)])
        except Exception as error:
            self.require(getattr(error, "status", 0) in (429, 503), f"{error!r}")
            made.open = False
            return
        if drawn:
            sampling = sampling.changed(seed=made.flight.sampling.seed)
            client.sent = ExpectedRequest(case.limits, prompt, sampling, grammar, token_rules, case.pieces)
        self.clients.append(client)

    def _prediction(self, prompt: list[int], expected: list[int]) -> np.ndarray | None:
        """For most requests: the output, sometimes with other first tokens."""
        draw = self.predicting
        if draw.random() < 0.3:
            return None
        behind = expected[draw.randrange(len(expected) + 1) :]
        tokens = [prompt[0]] * draw.randint(0, 2) + behind if draw.random() < 0.5 else expected
        return np.array(tokens[: CONTEXT - len(prompt)], np.int32)

    def _finish(self) -> None:
        """All parties behave: all requests must end and free their pages."""
        for _ in range(CALM_STEPS):
            for link in self.fleet.links:
                if link.pair is not None and link.pair.state != W.STATE_READY:
                    self._lose(link)
                if link.pair is None:
                    self._attach(link)
                link.pair.turn()
            self._pass(STEP_S)
            if not any(client.generation.open and client.generation.finish_reason is None for client in self.clients):
                break
        for _ in range(50):
            for link in self.fleet.links:
                link.pair.turn()
            self._pass(STEP_S)
        self.moved = sum(client.generation.flight.moves > 0 for client in self.clients)
        self.whole, self.predicted = 0, sum(client.generation.predicted for client in self.clients)
        for client in self.clients:
            self._judge(client)
        for link in self.fleet.links:
            self.require(not link.pair.requests and not link._deferred, "something is left behind")
            self.require(link.load().tokens_in_flight == 0, "tokens are outstanding for ever")
            self.require(link.pair.stray_completions == 0, "a completion has no request")
            self.require(not self._cases[link.index].state.pages.refcount.any(), "pages are held without a request")
