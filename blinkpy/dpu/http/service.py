"""The model as a worker serves it, and the path of a checked request to its submissions."""

import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

from blinkpy.config import Config
from blinkpy.dpu.admission.admission import Admission
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.fair_queue import Ticket
from blinkpy.dpu.admission.gate import Asker, Gate
from blinkpy.dpu.admission.keys_file import keys_of
from blinkpy.dpu.admission.tenant import TIERS, Tenant, shown_tier
from blinkpy.dpu.admission.tenant_table import TenantTable
from blinkpy.dpu.api_errors import ApiError, bad_request, busy, unavailable
from blinkpy.dpu.engine_link import Submission
from blinkpy.dpu.fleet.engines import Engines
from blinkpy.dpu.generation import Generation, PromptScores, excluding, scoring_parameters
from blinkpy.dpu.grammar.grammar_compiler import GrammarBusyError, GrammarCompiler
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError, located
from blinkpy.dpu.http.answer_sinks import AnyAnswer, Collector
from blinkpy.dpu.http.answers import Answer
from blinkpy.dpu.http.anthropic_answer import AnthropicAnswer
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.shared_fields import token_limit
from blinkpy.dpu.http.message_answer import MessageAnswer
from blinkpy.dpu.http.preparation.preparation_queue import PreparationQueue
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, RequestReader, is_brief
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.http.response_store import ResponseStore
from blinkpy.dpu.link.queue_pair import part_name
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.text.tokenizer import NOTHING
from blinkpy.queues.request_parameters import WEIGHT_ONE, RequestParameters
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.words import Int32


class Service:
    """Model name, tokenizer, template, defaults and admission of one worker. secret: the server's secret, for salts of the prefix
    cache; default: a new one. Raises ConfigError for a folder or keys that can't be used."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: Engines,
        metrics: Metrics,
        tenants: TenantTable | None = None,
        secret: bytes = b"",
    ):
        self.engine, self.metrics = engine, metrics
        keys = keys_of(config, secret or secrets.token_bytes(32))
        options = config.extension(AdmissionOptions)
        self.admission = Admission(
            options, keys, tenants or TenantTable(), metrics, engine.free_slots, places=self._grammar_places, slots=self._slots
        )
        engine.on_space, engine.on_failure = self.admission.admit, self.admission.refuse_all
        self.started = int(time.time())
        self._reader = RequestReader(config, folder)
        self.tokenizer, self.dialect = self._reader.tokenizer, self._reader.dialect
        self.model = self._reader.model
        stored = config.frontend.response_store_mib << 20
        self.responses = ResponseStore(stored, config.frontend.response_store_count) if stored else None
        self._queue = PreparationQueue(self._reader, config, folder, metrics)
        frontend = config.frontend
        self.gate = Gate(frontend.max_lag_ms / 1000, metrics, self._streaming)
        compile_s, compile_bytes = frontend.grammar_compile_ms / 1000, frontend.grammar_compile_mib << 20
        self._grammars = GrammarCompiler(
            compile_s, compile_bytes, frontend.grammar_cache_mib << 20, frontend.grammar_digits, self.tokenizer.spells_bytes
        )

    def _streaming(self) -> bool:
        pair = self.engine.pair
        return pair is not None and pair.in_flight > 0

    def _slots(self) -> int:
        return sum(pair.sizes.slots for pair in self.engine.pairs())

    def _grammar_places(self) -> tuple[set[int], int]:
        """Names of the grammars and token rules in flight, and the limit of each engine."""
        pairs = self.engine.pairs()
        most = min((pair.facts.grammar_share for pair in pairs), default=0)
        return set().union(*(pair.names_in_flight() for pair in pairs)), most

    def end_preparations(self) -> None:
        """Refuse requests that wait for preparation with status 503."""
        self._queue.refuse()

    def start_children(self) -> None:
        """Start the processes for large bodies and for grammars, from the same version of the files as this worker."""
        self._queue.start()
        self._grammars.start()

    def close(self) -> None:
        """End threads and processes."""
        self._queue.close()
        self._grammars.close()

    def limits(self) -> EngineLimits:
        """The limits of prompts. Raises ApiError with status 503 without an engine."""
        pair = self.engine.require()
        return EngineLimits(pair.context, pair.facts.vocab_size)

    def is_short(self, body: bytearray) -> bool:
        """Whether the request is prepared in place, in under a millisecond."""
        return is_brief(body)

    def prepare_short(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """The result of a job of JOBS. Raises ApiError."""
        return JOBS[kind](self._reader, body, limits)

    async def prepare(self, kind: str, body: bytearray, limits: EngineLimits, asker: Asker) -> Any:
        """`prepare_short` without blocking the event loop; cancelling it cancels the job. Raises ApiError."""
        return await self._queue.run(kind, body, limits, asker)

    def needs_automaton(self, request: Request) -> bool:
        """Whether the request's grammar must be compiled: an optional grammar is used only if the engine supports
        grammars."""
        grammar = request.grammar
        return grammar is not None and (grammar.needed or self.engine.require().facts.grammar_share > 0)

    async def compile_grammar(self, request: Request, asker: Asker) -> None:
        """Set the automaton of the request's grammar. Raises ApiError with status 400, or 429 if too many grammars
        wait."""
        field = request.grammar
        if field is None:
            return
        try:
            request.automaton = await self._grammars.automaton(field.grammar, asker)
        except GrammarError as error:
            param, message = error.with_param(field.param)
            raise ApiError(400, message, param=param, code="invalid_grammar", limit=error.limit) from error
        except GrammarBusyError as error:
            raise busy("too many grammars are waiting for compilation; try again") from error

    def _unfit(self, request: Request, error: ValueError) -> ApiError:
        """The error for a grammar or token rules that exceed the engine's limits."""
        if request.grammar is not None:
            refusal, pair = GrammarTooLargeError(f"{error}."), self.engine.pair
            if (
                request.automaton is not None
                and pair is not None
                and len(request.automaton.words()) > pair.facts.grammar_words > 0
            ):
                refusal.message = f"{error}; the server's option '--grammar-kib' sets it."
                located(request.grammar.grammar, refusal)
            param, message = refusal.with_param(request.grammar.param)
            return bad_request(message, param, "invalid_grammar")
        param = next(name for name in ("logit_bias", "allowed_token_ids", "bad_words") if getattr(request, name))
        return bad_request(f"'{param}': {error}.", param, "invalid_value")

    def answer(self, request: Request, kind: str) -> AnyAnswer:
        """The format of a request's answer, once it has its prompts. kind: of JOBS."""
        spell = self.tokenizer.spell
        if kind == "message":
            return AnthropicAnswer(request, self.model)
        if kind == "response":
            return ResponseAnswer(request, self.model, spell)
        usage = request.stream_usage
        shared = (request.request_id, request.service_tier, usage.at_end and not usage.with_each_event)
        if request.expected is not None:
            return MessageAnswer(self.model, spell, request.expected, request.include_reasoning, *shared)
        return Answer(kind == "chat", self.model, spell, *shared)

    def enter(self, request: Request, prompts: list[Int32], tenant: Tenant) -> Ticket:
        """Put the request into its tenant's queue for slots, and return its ticket: see Admission.enter. Raises ApiError."""
        parameters, choices = request.parameters, request.best_of or request.n
        _, limits = self._check(request, prompts)
        priority = tenant.settle_priority(parameters.priority)
        if priority is None:
            allowed = "none" if tenant.priorities is None else "{} to {}".format(*tenant.priorities)
            message = f"The priority {parameters.priority} is not allowed for this key; allowed tiers: {allowed}."
            raise ApiError(403, message, param="priority", code="priority_not_allowed")
        tier = tenant.settle_tier(request.service_tier)
        if tier is None:
            allowed = ", ".join(tenant.service_tiers)
            message = f"The service tier {request.service_tier} is not allowed for this key; allowed tiers: {allowed}."
            raise ApiError(403, message, param="service_tier", code="service_tier_not_allowed")
        tokens = sum(map(len, prompts))
        most = sum((len(prompt) + limit) * choices for prompt, limit in zip(prompts, limits, strict=True))
        parts = (request.automaton, request.rules)
        pair = self.engine.require()
        names = frozenset(part_name(part) for part in parts if part is not None and pair.facts.grammar_share)
        if names:  # an engine without places for any refuses the submission
            try:
                pair.require_space(*parts)
            except ValueError as error:  # size of a grammar or token rules that the engine never accepts
                raise self._unfit(request, error) from error
        ticket = self.admission.enter(tenant, tokens, most, len(prompts) * choices, priority, TIERS[tier], names)
        request.service_tier = shown_tier(request.service_tier, tier)
        return ticket

    def _check(self, request: Request, prompts: list[Int32]) -> tuple[tuple[int, ...], list[int]]:
        """A request's stop ids, and the max_tokens of each prompt. Raises ApiError for requests that can never be
        served."""
        pair = self.engine.require()
        if request.checked is not None and request.checked[0] is pair:
            return request.checked[1:]
        stop_ids = tuple(dict.fromkeys((*request.stop_ids, *(() if request.ignore_eos else self.tokenizer.eos_ids))))
        if len(stop_ids) > STOP_IDS:
            own = STOP_IDS - len(self.tokenizer.eos_ids)
            message = f"'stop_token_ids' can hold at most {own} token ids, in addition to the model's end-of-sequence ids."
            raise bad_request(message, "stop_token_ids", "invalid_value")
        choices = request.best_of or request.n
        if len(prompts) * choices > pair.sizes.slots:
            message = (
                f"{len(prompts)} prompts with {choices} choices each are more than the {pair.sizes.slots} requests in flight"
            )
            raise bad_request(f"{message} that this server allows.", "n" if choices > 1 else "prompt", "invalid_value")
        limits = []
        for prompt in prompts:
            limits.append(token_limit(request, len(prompt), pair.context))
            if len(prompt) > pair.longest_prompt:  # of small arenas set by options
                message = f"The prompt has {len(prompt)} tokens; this server takes at most {pair.longest_prompt}."
                raise bad_request(message, "prompt", "context_length_exceeded")
        request.checked = pair, stop_ids, limits
        return stop_ids, limits

    def submit(self, request: Request, prompts: list[Int32], sink: Collector, arrival: float, ticket: Ticket) -> None:
        """Submit all choices of an admitted request to the engine, or none. Raises ApiError."""
        pair = self.engine.require()
        stop_ids, limits = self._check(request, prompts)
        choices, own = request.best_of or request.n, _of_ticket(ticket, request.parameters)
        work: list[Submission] = []
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            parameters = request.parameters.changed(max_tokens=limit, stop_ids=stop_ids, **own)
            scores, echo = self._prompt_scores(request, prompt, index)
            if choices > request.n:  # choices are compared by their log probabilities
                parameters = parameters.changed(logprobs=max(0, parameters.logprobs))
            leader = None
            for choice, sampling in enumerate(parameters.variants(choices)):
                showing = NOTHING if request.expected is None else self.dialect.shown
                detokenizer = self.tokenizer.detokenizer(prompt, request.skip_special_tokens, showing)
                number = index * choices + choice
                stops, included = request.stop, request.include_stop
                generation = Generation(
                    number, len(prompt), detokenizer, stops, arrival, sink, sampling.logprobs, leader, include_stop=included
                )
                generation.grammar, generation.rules, generation.waited = request.automaton, request.rules, ticket.waited
                generation.min_tokens = parameters.min_tokens
                generation.excluding = excluding(request.rules, request.automaton, request.stop_ids)
                generation.reasoning = None if request.expected is None else request.expected.reasoning_counter()
                generation.scores, generation.echo, generation.echo_only = scores, echo, request.max_tokens == 0
                if scores is not None and choice == 0 and not scores.complete:
                    generation.scoring, sampling = True, scoring_parameters(sampling)
                work.append((generation, prompt, sampling))
                if len(prompt) > pair.facts.page_size or generation.scoring:  # a full page can be shared, or scores are requested
                    leader = leader or generation
        sink.choices = choices
        sink.expect(sum({id(one.scores): one.scores.bytes for one, _, _ in work if one.scores is not None}.values()))
        sink.generations = ticket.generations = [generation for generation, _, _ in work]
        try:
            self._submit_granted(work, ticket)
        except ValueError as error:  # size of a grammar or token rules that the engine never accepts
            if request.grammar is None and request.rules is None:
                raise
            raise self._unfit(request, error) from error
        ticket.more, ticket.refuse = partial(self._submit_more, work, ticket), partial(_refuse, work)

    def _submit_granted(self, work: list[Submission], ticket: Ticket) -> None:
        """Submit as many choices as the request has slots, and remove them from `work`."""
        count = ticket.reserved
        self.engine.submit(work[:count])
        del work[:count]
        self.admission.submitted(ticket, count)

    def _submit_more(self, work: list[Submission], ticket: Ticket) -> None:
        """Submit further choices of a request. A failure ends all choices that are not submitted yet."""
        if not ticket.reserved or not work or not work[0][0].open:  # the request has ended meanwhile
            return
        try:
            self._submit_granted(work, ticket)
        except ApiError as error:
            _refuse(work, error)
        except ValueError as error:
            _refuse(work, bad_request(f"{error}.", code="invalid_value"))

    def _prompt_scores(self, request: Request, prompt: Int32, index: int) -> tuple[PromptScores | None, str | None]:
        """The part of the answer that shows a prompt: its log probabilities, and its text."""
        if request.echo and not request.echoes:  # too long for the engine that was attached then
            raise unavailable("The engine was replaced while the request was prepared; try again.")
        text, offsets = request.echoes[index] if request.echo else (None, None)
        scores = None
        if request.scores_prompts:
            count = max(request.prompt_logprobs or 0, request.parameters.logprobs if request.echo else 0)
            try:
                places = None if offsets is None else offsets.tolist()
                scores = PromptScores(prompt.tolist(), count, places, request.prompt_logprobs)
            except ValueError as error:
                name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
                raise bad_request(f"'{name}': {error}.", name, "invalid_value") from error
        return scores, text


def _refuse(work: list[Submission], error: ApiError) -> None:
    """End the choices that were not submitted."""
    while work:
        work.pop()[0].fail(error)


def _of_ticket(ticket: Ticket, asked: RequestParameters) -> dict[str, Any]:
    """The parameters of a request that depend on its key, and on its admission."""
    tenant = ticket.tenant
    return {
        "priority": ticket.priority,
        "tenant": tenant.number,
        "tenant_weight": round(tenant.weight * WEIGHT_ONE),
        "cache_salt": tenant.cache_salt(asked.cache_salt),
        "best_effort": ticket.best_effort,
    }
