"""Engines that are lost at random: links with scripted queue pairs, in simulated time. Every choice must end with the tokens of
an undisturbed run, or with an error if an error is permitted.

A scripted engine's next token is a hash of the seed and of the whole sequence, so a lost, doubled or misplaced
token changes all later ones. It obeys stop ids, min_tokens, max_tokens, grammars and banned sequences; with penalties its draws
depend only on the output that this engine knows.
"""

import heapq
import importlib
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from blinkpy.queues import words as C
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import BLOCK_WORDS
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import STATE_DRAINING, STATE_READY
from blinkpy.verify.sim.grammar_supply import with_a_string

PIECES = [b"", *(bytes([65 + i]) for i in range(12)), b"AB", b"BC", b"CAD"]
VOCABULARY, STOP_ID, SLOTS = len(PIECES), 0, 6
STEP_S = 0.01
LABELS = 5  # of engines that appear and vanish
HALF_STOPS = ("><4", "><7", "><9")  # stop strings; each token's text ends with a prefix of them


class StormError(AssertionError):
    """A violated requirement. The message begins with the seed."""


# ---- engines ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Asked:
    """A request in the engine, in the role of an InFlightRequest."""

    prompt: list[int]
    sampling: RequestParameters
    grammar: ByteAutomaton | None
    rules: TokenRules | None
    owner: Any = None
    cancelled: bool = False
    ended: bool = False
    cached_tokens: int = 0
    waited_ns: int = 0
    scored: int = 1
    state: int = 0
    made: list[int] = field(default_factory=list)
    records: deque[Any] = field(default_factory=deque)
    written: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.state = 0 if self.grammar is None else self.grammar.start

    def step(self) -> tuple[int, int]:
        """The next completion: its token and flags."""
        sampling = self.sampling
        if sampling.flags & SUBMIT_SCORE_PROMPT and self.scored < len(self.prompt):
            token = self.prompt[self.scored]
            self.scored += 1
            self.records.append([(token, -1.0)])
            return token, C.HAS_TOKEN | C.HAS_LOGPROBS
        token = self._drawn()
        self.made.append(token)
        place = len(self.prompt) + len(self.made)  # the same in all engines
        flags = C.HAS_TOKEN | (0, C.WAS_DRAFTED, C.WAS_DRAFTED | C.WAS_PREDICTED)[(place + token) % 3]
        if sampling.logprobs >= 0:
            self.records.append([(token, -float(len(self.prompt) + len(self.made)))])
            flags |= C.HAS_LOGPROBS
        if token == STOP_ID:
            flags |= C.FINISH_STOP
        elif self.grammar is not None and self.grammar.must_end(self._follow(token)):
            flags |= C.FINISH_COMPLETE
        elif len(self.made) >= sampling.max_tokens:
            flags |= C.FINISH_LENGTH
        if self.grammar is not None and token != STOP_ID:
            self.state = self._follow(token)
        self.ended = flags & C.FINISH_MASK != 0
        return token, flags

    def _follow(self, token: int) -> int:
        assert self.grammar is not None
        return self.grammar.advance(self.state, PIECES[token]) if PIECES[token] else -1

    def _legal(self, token: int) -> bool:
        if token == STOP_ID:
            ends = self.grammar is None or self.grammar.may_end(self.state)
            return ends and len(self.made) >= self.sampling.min_tokens and bool(self.sampling.stop_ids)
        banned = () if self.rules is None else self.rules.banned
        if any(list(one) == [*self._output, token][-len(one) :] for one in banned):
            return False
        return self.grammar is None or self._follow(token) >= 0

    @property
    def _output(self) -> list[int]:
        """The output so far, including tokens from other engines."""
        return [*self.prompt[len(self.prompt) - self.sampling.output_tokens :], *self.made]

    def _drawn(self) -> int:
        sampling = self.sampling
        seen = self._output if sampling.presence_penalty or sampling.frequency_penalty else [*self.prompt, *self.made]
        draw = random.Random(zlib.crc32(repr((sampling.seed, len(self.prompt) + len(self.made), seen)).encode()))
        legal = [token for token in range(VOCABULARY) if self._legal(token)]
        return draw.choice(legal) if legal else STOP_ID


class ScriptedPair:
    """A QueuePair and its engine, scripted."""

    def __init__(self, draw: random.Random, instance: int, errors: Any):
        self._draw, self._errors = draw, errors
        self.facts = SimpleNamespace(page_size=4, num_pages=64, instance=instance, lease_ms=4000, predictions=draw.random() < 0.8)
        self.context = draw.choice((39, 45, 256))  # 39: the longest prompt with its output
        self.longest_prompt = draw.choice((39, 60))
        self.sizes = SimpleNamespace(slots=SLOTS)
        self.state, self.lives, self.stray_completions, self.epoch = STATE_READY, True, 0, 1
        self.stopped_early = False
        self.requests: list[Asked] = []
        self._ready: deque[tuple[Asked, int, int]] = deque()
        self.transport = SimpleNamespace(
            read_engine_state=lambda: self.state,
            read_engine=lambda: [self.state] + [0] * (BLOCK_WORDS - 1),
            close=lambda: None,
            pair=0,
        )

    @property
    def free_slots(self) -> int:
        return SLOTS - len(self.requests)

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    def state_name(self) -> str:
        return "of another mind"

    def submit(
        self, prompt: Any, sampling: Any, owner: Any, grammar: Any = None, rules: Any = None, prediction: Any = None
    ) -> Asked:
        if not owner.open:
            raise StormError("an engine gets requests that no client waits for")
        if ([] if prediction is None else prediction.tolist()) != self._usable(owner.sink.prediction, len(prompt)):
            raise StormError(f"an engine gets the prediction {prediction}")
        if self._draw.random() < 0.05:
            raise self._errors.EngineLostError("the engine is gone")
        if self._draw.random() < 0.03:
            raise self._errors.TransportError("the card fell out")
        if self.state != STATE_READY:
            raise self._errors.EngineUnavailableError("the engine is draining")
        if not self.free_slots or self._draw.random() < 0.1:
            raise self._errors.NoSpaceError("the prompt arena is full")
        if sampling.seed is None:
            sampling = sampling.changed(seed=self._draw.getrandbits(62))
        request = Asked(prompt.tolist(), sampling, grammar, rules, owner, cached_tokens=self._draw.randrange(len(prompt)))
        owner.sink.homes += 1
        self.requests.append(request)
        return request

    def _usable(self, prediction: list[int], length: int) -> list[int]:
        """The last tokens of a prediction, as many as fit after a prompt of this length."""
        fits = range(min(len(prediction), min(self.context, self.longest_prompt) - length) + 1)
        return prediction[len(prediction) - max(fits, default=0) :] if self.facts.predictions else []

    def turn(self) -> None:
        """Make a step's completions."""
        for request in self.requests:
            if request.cancelled and not request.ended:
                request.ended = True
                self._ready.append((request, 0, C.FINISH_CANCELLED))
            elif not request.ended and self._draw.random() < 0.9:
                self._ready.append((request, *request.step()))

    def poll(self, *most: int) -> list[tuple[Asked, int, int]]:
        taken = [self._ready.popleft() for _ in range(min(len(self._ready), self._draw.choice((1, 3, 100))))]
        for request, _, flags in taken:
            if flags & C.FINISH_MASK:
                self.requests.remove(request)
        return taken

    def cancel(self, request: Asked) -> None:
        request.cancelled = True
        if self._draw.random() < 0.2:
            raise self._errors.TransportError("the card fell out")

    def live(self) -> list[Asked]:
        return list(self.requests)

    def abandon(self) -> list[Asked]:
        lost, self.requests, self.lives = self.requests, [], False
        return lost

    def close(self) -> None:
        self.abandon()


# ---- clients ------------------------------------------------------------------------------------------------------------


class Client:
    """One choice and its sink."""

    def __init__(self, asked: Asked, stops: tuple[str, ...], prediction: Sequence[int] = ()):
        self.asked, self.stops, self.prediction = asked, stops, list(prediction)
        self.drafts = 0, 0  # of an undisturbed run: accepted drafts, and those from the prediction; set by `expected`
        self.text, self.logprobs, self.ends = "", list[float](), 0
        self.homes = self.placed = 0  # engines that had it; links that accepted it, whether they hold it or not
        self.gone = False
        self.generation: Any = None
        self.submitted = 0.0  # when first submitted, s
        self.paused_s, self.since = 0.0, -1.0  # pauses without an engine: total of ended ones; start of the present one, or -1

    def on_text(self, generation: Any, text: str, logprobs: list[Any]) -> None:
        self.text += text
        self.logprobs += [entry.logprob for entry in logprobs]

    def ended(self, generation: Any) -> None:
        self.ends += 1

    def send(self) -> None:
        pass

    def _stop(self, text: str, free: int) -> int:
        """The end of the output at the stop string that ends first, the longest if several do; -1 without a stop string. free:
        characters of the first min_tokens tokens, in which no stop string counts."""
        ends = [(i + len(stop), i) for stop in self.stops for i in range(len(text)) if text.startswith(stop, i)]
        return min((each for each in ends if each[0] > free), default=(0, -1))[1]

    def expected(self) -> tuple[str, list[float], str]:
        """Text, log probabilities and finish reason of an undisturbed run."""
        asked, sampling = self.asked, self.asked.sampling
        if sampling.seed is None:  # drawn once for all engines
            sampling = sampling.changed(seed=self.generation.flight.sampling.seed)
        alone = Asked(asked.prompt, sampling, asked.grammar, asked.rules, scored=len(asked.prompt))
        text, logprobs, free = "", list[float](), 0
        self.drafts = 0, 0
        while True:
            token, flags = alone.step()
            drafted, predicted = (flags & flag != 0 for flag in (C.WAS_DRAFTED, C.WAS_PREDICTED))
            self.drafts = self.drafts[0] + drafted, self.drafts[1] + predicted
            if alone.records:
                logprobs.append(alone.records.popleft()[0][1])
            text += "" if flags & C.FINISH_MASK == C.FINISH_STOP else f"<{token}>"
            free = len(text) if len(alone.made) <= sampling.min_tokens else free
            if (end := self._stop(text, free)) >= 0:
                return text[:end], logprobs, "stop"
            if flags & C.FINISH_MASK:
                return text, logprobs, "length" if flags & C.FINISH_MASK == C.FINISH_LENGTH else "stop"


class Texts:
    """Texts of tokens, in the role of a detokenizer."""

    def push(self, token: int) -> str:
        return f"<{token}>"


# ---- the storm ----------------------------------------------------------------------------------------------------------


class Storm:
    """A storm of one seed. Imports its modules when it begins, so that a test may plant bugs in them."""

    def __init__(self, seed: int):
        self.seed, self.draw, self.look, self.now = seed, random.Random(seed), random.Random(seed), 100.0
        self.modules = {
            name: importlib.import_module(f"blinkpy.dpu.{name}")
            for name in ("fleet.engines", "fleet.moves", "engine_link", "generation", "link.queue_pair")
        }
        self.limit = self.draw.choice((1, 2, 1000, 1000, 1000))
        self.timeout_s = self.draw.choice((0.3, 1e9, 1e9))
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._instances = count(), count(1)
        self.clients: list[Client] = []
        self.reported: dict[int, set[tuple[int, ...]]] = {}  # prompts whose placement was reported, by the engine's instance
        self.failures: list[BaseException] = []

    def run(self, steps: int) -> "Storm":
        clock = SimpleNamespace(monotonic=lambda: self.now)
        drawing, engines = SimpleNamespace(randbits=self.draw.getrandbits), self.modules["fleet.engines"]
        submit = engines.EngineLink.submit

        def counting(link: Any, work: list[Any]) -> None:
            submit(link, work)
            for generation, _, _ in work:
                generation.sink.placed += 1

        with (
            patch.object(engines, "time", clock),
            patch.object(self.modules["fleet.moves"], "time", clock),
            patch.object(self.modules["engine_link"], "time", clock),
            patch.object(self.modules["engine_link"], "asyncio", SimpleNamespace(get_running_loop=lambda: self._loop)),
            patch.object(engines, "secrets", drawing),
            patch.object(engines, "Placement", engines.Placement),
            patch.object(engines.EngineLink, "submit", counting),
        ):
            self._open()
            for _ in range(steps):
                self._step()
            self._finish()
        return self

    def require(self, fine: bool, what: str) -> None:
        if not fine:
            raise StormError(f"seed {self.seed}: {what}")

    def _open(self) -> None:
        module = self.modules["fleet.engines"]
        silent = SimpleNamespace(observe=lambda *_: None)
        self.counts: dict[str, float] = {}

        def counting(name: str, amount: float = 1.0) -> None:
            self.counts[name] = self.counts.get(name, 0) + amount

        metrics: Any = SimpleNamespace(
            count=counting, gauge=lambda *_: None, inter_token_latency=silent, time_to_first_token=silent, request_duration=silent
        )
        reported, fleet_of = self.reported, self

        class Noting(module.Placement):  # type: ignore[name-defined, misc]
            def sent(self, engine: int, prompt: Any, salt: int) -> None:
                reported.setdefault(fleet_of.fleet._all[engine].pair.facts.instance, set()).add(tuple(prompt.tolist()))
                super().sent(engine, prompt, salt)

        vars(module)["Placement"] = Noting
        self._listed = [module.EngineEntry(f"e{i}", lambda: None) for i in range(self.draw.choice((2, 2, 3)))]
        thread: Any = SimpleNamespace(add=lambda *_: None, remove=lambda _: None)
        limits = {"most_moves": self.limit, "move_timeout_s": self.timeout_s}
        self.fleet = module.Engines(self._listed, metrics, True, thread, lambda: PIECES, **limits)
        self.fleet.on_failure = lambda error: self.require(
            self.fleet.pair is None, "a waiting request is refused although an engine is free"
        )
        watched = SimpleNamespace(failed=lambda name, error: self.failures.append(error), start=lambda name, work: work.close())
        self._loop = SimpleNamespace(call_later=self._later)
        for part in (self.fleet, self.fleet.moves, *self.fleet.links):
            part._loop, part._watched = self._loop, watched
        for link in self.fleet.links:
            self._attach(link)

    def _later(self, delay: float, call: Callable[[], None]) -> Any:
        entry = (self.now + delay, next(self._order), call)
        heapq.heappush(self._timers, entry)
        return SimpleNamespace(cancel=lambda: None)

    def _attach(self, link: Any) -> None:
        if not link.removed:
            link.pair = ScriptedPair(self.draw, next(self._instances), self.modules["link.queue_pair"])

    def _pass(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            due, _, call = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            call()
        self.now = until

    def _step(self) -> None:
        event = self.draw.random()
        if event < 0.25:
            self._submit()
        elif event < 0.30:
            self._lose(self.draw.choice(self.fleet.links))
        elif event < 0.42:
            for link in self.fleet.links:
                if link.pair is None and self.draw.random() < 0.7:
                    self._attach(link)
        elif event < 0.44:
            link = self.draw.choice(self.fleet.links)
            if link.pair is not None:
                link.pair.state = STATE_DRAINING
        elif event < 0.46 and self.clients:
            self._leave(self.draw.choice(self.clients))
        elif event < 0.48:
            labels = self.draw.sample(range(LABELS), self.draw.randint(1, 3))
            self._listed = [self.modules["fleet.engines"].EngineEntry(f"e{i}", lambda: None) for i in labels]
            self._list()
        else:
            for link in self.fleet.links:
                if link.pair is not None:
                    link.pair.turn()
            self._pass(STEP_S)
        self._check()

    def _list(self) -> None:
        """Update the list of engines, as its watcher does, repeatedly."""
        self.fleet.set_engines(self._listed)
        listed = {entry.label for entry in self._listed}
        self.require(listed == {link.label for link in self.fleet.links if not link.removed}, "not the engines that are listed")
        self.require(len(self.fleet._all) <= LABELS, "places of engines that left are not used again")

    def _lose(self, link: Any) -> None:
        if link.pair is not None:
            link._lose(self.modules["link.queue_pair"].EngineLostError("the engine is gone"))

    def _leave(self, client: Client) -> None:
        """Cancel a choice, as a lost connection does."""
        if client.generation.open:
            client.gone, client.generation.open = True, False
            self.fleet.cancel(client.generation)

    def _submit(self) -> None:
        draw, module = self.draw, self.modules["generation"]
        prompt = np.array([draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 9))], np.int32)
        stops = draw.choice(((), (), ("<3><4>", "<5>"), HALF_STOPS))
        rules = draw.choice(
            (
                None,
                None,
                TokenRules(VOCABULARY, {}, None, ((1, 2), (3,), (4, 3), (2, 6), (2, 5), (7, 8))),
                TokenRules(VOCABULARY, {1: 2.0}),
            )
        )
        grammar = _automaton(draw) if draw.random() < 0.3 else None
        base = RequestParameters(
            max_tokens=draw.choice((1, 5, 30)), min_tokens=draw.choice((0, 0, 4)), seed=draw.choice((None, draw.getrandbits(62))),
            presence_penalty=draw.choice((0.0, 0.0, 0.0, 0.5)), frequency_penalty=draw.choice((0.0, 0.0, 0.0, 0.5)),
            repetition_penalty=draw.choice((1.0, 1.2)), logprobs=draw.choice((-1, 0)), stop_ids=draw.choice(((), (STOP_ID,))),
        )  # fmt: skip
        scores = self.modules["generation"].PromptScores(prompt.tolist(), 0) if draw.random() < 0.2 else None
        leader, work, clients, led = None, list[Any](), list[Client](), scores is not None or draw.random() < 0.5
        predicted = [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 3, 30)))] if draw.random() < 0.5 else None
        for choice, sampling in enumerate(base.variants(draw.choice((1, 1, 2, 4, 6)))):
            client = Client(Asked(prompt.tolist(), sampling, grammar, rules), stops, predicted or ())
            made = module.Generation(choice, len(prompt), Texts(), stops, self.now, client, sampling.logprobs, leader)
            made.grammar, made.rules, made.scores, made.min_tokens = grammar, rules, scores, base.min_tokens
            made.prediction = None if predicted is None else np.array(predicted, np.int32)
            if scores is not None and choice == 0:
                made.scoring, sampling = True, self.modules["generation"].scoring_parameters(sampling)
            client.generation = made
            work.append((made, prompt, sampling))
            clients.append(client)
            leader = leader or (made if led else None)
        if len(work) > self.fleet.free_slots():
            return
        try:
            self.fleet.submit(work)
        except Exception as error:
            self.require(getattr(error, "status", 0) in (429, 503), f"{error!r}")
            for client in clients:
                self.require(client.text == "", "a request that was refused has text")
                client.generation.open = False
                self.require(self._places(client.generation) == 0, "a refused request continues")
            return
        self.clients += clients

    def _places(self, generation: Any) -> int:
        """The number of engines and waiting queues that hold a choice."""
        links = [link for link in self.fleet.links if link.pair is not None]
        live = sum(request.owner is generation and not request.cancelled for link in links for request in link.pair.requests)
        deferred = [each[0] for link in self.fleet.links for each in link._deferred]
        lines = deferred + [move.generation for move in self.fleet.moves._waiting]
        return live + sum(each is generation and each.open for each in lines)

    def _check(self) -> None:
        self.require(not self.failures, f"{self.failures}")
        for client in self.clients:
            generation = client.generation
            if generation.open and generation.finish_reason is None:
                self.require(self._places(generation) == 1, f"a choice is at {self._places(generation)} places")
                flight = generation.flight
                moves_now = any(move.generation is generation for move in self.fleet.moves._waiting)
                if moves_now and client.since < 0:
                    client.since = flight.paused_at
                elif not moves_now and client.since >= 0:
                    client.paused_s, client.since = client.paused_s + self.now - STEP_S - client.since, -1.0
                waits = client.paused_s + (self.now - client.since if moves_now else 0.0)
                self.require(waits <= self.timeout_s + 0.1, "a choice waits for too long")
            self.require(client.homes <= self.limit + 1, "a choice has moved too often")
            self.require(generation.cached_tokens <= len(client.asked.prompt), "output counts as cached tokens of the prompt")
            self.require(generation.flight.moves == client.placed - 1, "moves are counted that were none")
            client.submitted = client.submitted or generation.submitted
            self.require(generation.submitted == client.submitted, "phases are not counted from the first engine on")
        moving, ready = len(self.fleet.moves._waiting), [link for link in self.fleet.links if link.status() is None]
        spare = sum(link.pair.free_slots for link in ready) - moving
        self.require(self.fleet.free_slots() <= max(0, spare), "others get the slots that choices without an engine wait for")
        self._check_links()

    def _asked(self, pair: Any) -> list[tuple[Sequence[int], int]]:
        """Prompt and max_tokens of each request that an engine has."""
        return [(request.prompt, request.sampling.max_tokens) for request in pair.requests]

    def _check_links(self) -> None:
        """The fleet's view of its engines, compared with their state."""
        prompt = self.look.choice(self.clients).asked.prompt if self.clients else []
        if self.fleet._has_placement():
            self.fleet._loads()  # as before each choice: this notices a restarted engine
        for link in self.fleet.links:
            if link.pair is None:
                continue
            asked = self._asked(link.pair)
            costs = sum(len(prompt) + max_tokens for prompt, max_tokens in asked)
            self.require(link.load().tokens_in_flight == costs, f"{link.load().tokens_in_flight} tokens in flight, not {costs}")
            reported = self.reported.get(link.pair.facts.instance, set())
            received = all(tuple(prompt) in reported for prompt, _ in asked)
            self.require(received, "a placement is not notified of requests that an engine got")
            if prompt and self.fleet._has_placement() and link.status() is None:
                known = self.fleet._placement._record.match(np.array(prompt, np.int32), 0)[link.index]
                most = max((_common(prompt, other) for other in reported), default=0)
                self.require(known <= most, "a placement confuses an engine with its predecessor")

    def _finish(self) -> None:
        for _ in range(400):
            for link in self.fleet.links:
                if link.pair is not None and link.pair.state != STATE_READY:
                    self._lose(link)
                if link.pair is None:
                    self._attach(link)
                if link.pair is not None:
                    link.pair.turn()
            self._pass(STEP_S)
            self._list()
        self.moved = sum(client.generation.flight.moves > 0 for client in self.clients)
        self.whole = 0
        for client in self.clients:
            self._judge(client)
        for link in self.fleet.links:
            self.require(not link.removed, "an engine leaves for ever")
            self.require(not link.pair.requests and not link._deferred, "something is left behind")
            self.require(link.load().tokens_in_flight == 0, f"{link.load().tokens_in_flight} tokens are outstanding for ever")
        self.require(self.fleet.free_slots() == SLOTS * len(self.fleet.links), "room is lost")

    def _judge(self, client: Client) -> None:
        generation, (text, logprobs, finish) = client.generation, client.expected()
        self.require(text.startswith(client.text), f"{client.text} is no begin of {text}")
        self.require(
            client.logprobs == (logprobs if client.asked.sampling.logprobs >= 0 else [])[: len(client.logprobs)], "logprobs"
        )
        if client.gone:
            return
        self.require(not generation.open and client.ends == 1, f"a choice has ended {client.ends} times")
        if generation.error is None:
            self.whole += 1
            self.require((client.text, generation.finish_reason) == (text, finish), f"{client.text} instead of {text}")
            self._judge_drafts(client)
            if client.asked.sampling.logprobs >= 0:
                self.require(client.logprobs == logprobs, "log probabilities are lost")
            if generation.scores is not None and generation.leader is None:  # other choices wait for the leader's scores
                known = [entry.token for entry in generation.scores.entries]
                self.require(known == client.asked.prompt, "the scores are not the prompt's")
                self.require(len(generation.scores.ranks) == len(known), "a token has more or less than one rank")
            return
        allowed = generation.flight.moves >= self.limit or self.timeout_s < 1
        self.require(allowed, f"a choice ended without need: {generation.error.message}")

    def _judge_drafts(self, client: Client) -> None:
        counts = client.generation.drafted, client.generation.predicted
        self.require(counts == client.drafts, f"{counts} drafts, and of the prediction, not {client.drafts}")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens in the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _automaton(draw: random.Random) -> ByteAutomaton:
    """An automaton of some strings over the bytes of PIECES."""
    while True:
        states = draw.randint(2, 7)
        class_of = np.zeros(256, np.uint8)
        class_of[65:77] = [1 + i % 4 for i in range(12)]
        table = np.array([[-1, *(draw.randrange(-1, states) for _ in range(4))] for _ in range(states)])
        accepting = np.array([draw.random() < 0.3 for _ in range(states)])
        try:
            automaton = ByteAutomaton.trimmed(class_of, table, accepting)
        except ValueError:
            continue
        if automaton.must_end(0):
            continue
        if draw.random() < 0.5:
            rng = np.random.default_rng(draw.randrange(1 << 30))
            automaton = with_a_string(
                rng, class_of, automaton.next_state.astype(np.int64), automaton.accepting, draw.randint(1, 3)
            )
        return automaton
