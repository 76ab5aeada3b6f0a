"""Requests that generate, from the body to the answer.

A request is read, checked and tokenized. Its grammar is compiled, and it waits for admission. Then its choices are submitted,
and its answer is written, whole or as server-sent events.
"""

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from blinkpy.config.front_options import FrontendOptions
from blinkpy.dpu.admission.fair_queue import Ticket
from blinkpy.dpu.admission.tenant import TIERS, Tenant, shown_tier
from blinkpy.dpu.api_errors import ApiError, bad_request, unavailable
from blinkpy.dpu.engine_link import Submission
from blinkpy.dpu.generation import Generation, PromptScores, excluding, scoring_parameters
from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError, located
from blinkpy.dpu.http.answer_sinks import AnyAnswer, Collector, Streamer
from blinkpy.dpu.http.answers import Answer, at_once
from blinkpy.dpu.http.anthropic_answer import AnthropicAnswer
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.shared_fields import token_limit
from blinkpy.dpu.http.message_answer import MessageAnswer
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, is_brief
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.http.wire.exchange import JSON, ClientDisconnected, Exchange
from blinkpy.dpu.link.queue_pair import QueuePair, part_name
from blinkpy.dpu.text.tokenizer import NOTHING
from blinkpy.queues.request_parameters import WEIGHT_ONE, RequestParameters
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.words import Int32

EVENTS = b"text/event-stream; charset=utf-8"
OF_RESPONSES = ("response", "input_tokens")  # kinds of JOBS
CONVERSIONS = ("tokenize", "detokenize", "input_tokens", "message_tokens")
STREAM_HEADERS = [(b"content-type", EVENTS), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
BYTES_OF_TOKEN = 4  # bytes of a body that are charged as one token if the engine generates none
OBJECT_COST = 8  # bytes of Python objects per byte of JSON
LONG_SCORES = 64  # tokens of scored prompts whose answer takes more than a millisecond to write

logger = logging.getLogger("blinkpy.frontend")


class RequestHandler:
    """Handles the requests of one worker that generate."""

    def __init__(self, service: Service, options: FrontendOptions):
        self.service, self.options = service, options
        self._logged_tools = set[str]()  # types of hidden tools that were already logged

    def prepare_short(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """Run one of JOBS on a body, and return its result. Raises ApiError."""
        return JOBS[kind](self.service.reader, body, limits)

    async def prepare(self, kind: str, exchange: Exchange) -> Any:
        """Run one of JOBS on the request's body, and return its result. A disconnect cancels it. Raises ApiError."""
        service = self.service
        body = await exchange.read_body(self.options.max_body_bytes)
        stored, conversation = service.responses, None
        if stored is not None and kind in OF_RESPONSES:
            conversation = await service.gate.run(exchange.asker, partial(stored.resolve, body, exchange.tenant.name))
        if kind in CONVERSIONS:
            service.admission.convert(exchange.tenant, len(body) // BYTES_OF_TOKEN)

        def prepare() -> Any:
            if exchange.connection.disconnected:
                raise ClientDisconnected
            return self.prepare_short(kind, body, service.limits())

        try:
            if is_brief(body):
                prepared = await service.gate.run(exchange.asker, prepare)
            else:
                prepared = await exchange.unless_disconnected(service.prepare(kind, body, service.limits(), exchange.asker))
            if stored is not None and conversation is not None:
                request = prepared[0]
                request.previous_response_id = conversation.previous
                request.keep = partial(stored.keep, conversation) if conversation.stored else None
            return prepared
        finally:
            with contextlib.suppress(BufferError):  # another task still reads it, and frees it soon
                body.clear()  # the error keeps this frame alive until it is collected

    async def generate(self, kind: str, exchange: Exchange) -> None:
        """Answer a request that generates. kind: of JOBS."""
        service = self.service
        request, prompts = await self.prepare(kind, exchange)
        for hidden in set(request.hidden_tools) - self._logged_tools:
            self._logged_tools.add(hidden)
            logger.warning("clients list tools of type %s, which are not functions: they are hidden from the model", hidden)
        if exchange.chosen_id and request.request_id is None:
            request.request_id = exchange.request_id
        elif not exchange.chosen_id:
            request.request_id = exchange.request_id = request.request_id or exchange.request_id
        if service.needs_automaton(request):
            await exchange.unless_disconnected(service.compile_grammar(request, exchange.asker))
        admission, ticket = service.admission, self.enter(request, prompts, exchange.tenant)
        if request.tools or request.metadata or request.grammar is not None:  # memory kept for a body until the answer ends
            connection = exchange.connection
            connection.all.answers.hold(
                exchange, OBJECT_COST * exchange.size, lambda error: connection.abort(), exchange.asker.name
            )
        try:
            if not ticket.inside:
                await exchange.unless_disconnected(admission.wait(ticket))
            await self._answer(request, prompts, kind, exchange, ticket)
        finally:
            admission.remove(ticket)
            exchange.connection.all.answers.release(exchange)

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
        pair = self.service.engine.require()
        names = frozenset(part_name(part) for part in parts if part is not None and pair.facts.grammar_share)
        if names:  # an engine without places for any refuses the submission
            try:
                pair.require_space(*parts)
            except ValueError as error:  # size of a grammar or token rules that the engine never accepts
                raise self._unfit(request, error) from error
        ticket = self.service.admission.enter(tenant, tokens, most, len(prompts) * choices, priority, TIERS[tier], names)
        request.service_tier = shown_tier(request.service_tier, tier)
        return ticket

    def _check(self, request: Request, prompts: list[Int32]) -> tuple[tuple[int, ...], list[int]]:
        """A request's stop ids, and the max_tokens of each prompt. Raises ApiError for requests that can never be
        served."""
        pair = self.service.engine.require()
        if request.checked is not None and request.checked[0] is pair:
            return request.checked[1:]
        stop_ids = tuple(dict.fromkeys((*request.stop_ids, *(() if request.ignore_eos else self.service.tokenizer.eos_ids))))
        if len(stop_ids) > STOP_IDS:
            own = STOP_IDS - len(self.service.tokenizer.eos_ids)
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
            limits.append(token_limit(request, len(prompt), pair.context, self.service.tokenizer.longest_output))
            if len(prompt) > pair.longest_prompt:  # of small arenas set by options
                message = f"The prompt has {len(prompt)} tokens; this server takes at most {pair.longest_prompt}."
                raise bad_request(message, "prompt", "context_length_exceeded")
            check_prediction(request.predicted, len(prompt), pair)
        request.checked = pair, stop_ids, limits
        return stop_ids, limits

    def _unfit(self, request: Request, error: ValueError) -> ApiError:
        """The error for a grammar or token rules that exceed the engine's limits."""
        if request.grammar is not None:
            refusal, pair = GrammarTooLargeError(f"{error}."), self.service.engine.pair
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

    async def _answer(self, request: Request, prompts: list[Int32], kind: str, exchange: Exchange, ticket: Ticket) -> None:
        """Submit an admitted request, and write its answer."""
        service, connection = self.service, exchange.connection

        def drop(counter: str) -> None:
            service.metrics.count(counter)
            self._drop(sink)
            if counter == "slow_clients":
                connection.abort()

        if connection.disconnected:  # since the last wait; a later submission could not be cancelled
            raise ClientDisconnected
        answer = self.answer(request, kind)
        if request.stream:
            options, slow = self.options, partial(drop, "slow_clients")
            most, most_bytes = options.max_output_backlog, options.max_output_backlog_mib << 20
            chunked = exchange.http_version != "1.0"
            sink: Collector = Streamer(answer, connection, most, request.stream_usage, slow, most_bytes, chunked)
        else:
            budget = connection.all.answers
            sink = Collector(
                answer,
                request.n,
                request.parameters.logprobs >= 0,
                request.prompt_logprobs is not None,
                budget,
                exchange.asker.name,
            )
        self.submit(request, prompts, sink, exchange.arrival, ticket)
        exchange.generations = sink.generations
        connection.on_lost = partial(drop, "disconnects")
        try:
            if isinstance(sink, Streamer):
                await self._stream(sink, exchange)
            else:
                await _reached(sink.done, sink)
                scored = sum(map(len, prompts)) if request.scores_prompts else 0
                is_long = sink.is_long or scored > LONG_SCORES
                body = await self._written(sink, exchange) if is_long else at_once(sink.body())
                await exchange.drained()
                exchange.write(200, JSON, body)
        finally:
            self._drop(sink)  # does nothing unless something failed
            sink.close()

    def answer(self, request: Request, kind: str) -> AnyAnswer:
        """The format of a request's answer, once it has its prompts. kind: of JOBS."""
        spell = self.service.tokenizer.spell
        if kind == "message":
            return AnthropicAnswer(request, self.service.model)
        if kind == "response":
            return ResponseAnswer(request, self.service.model, spell)
        usage = request.stream_usage
        shared = (request.request_id, request.service_tier, usage.at_end and not usage.with_each_event)
        if request.expected is not None:
            return MessageAnswer(self.service.model, spell, request.expected, request.include_reasoning, *shared)
        return Answer(kind == "chat", self.service.model, spell, *shared)

    def submit(self, request: Request, prompts: list[Int32], sink: Collector, arrival: float, ticket: Ticket) -> None:
        """Submit all choices of an admitted request to the engine, or none. Raises ApiError."""
        pair = self.service.engine.require()
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
                showing = NOTHING if request.expected is None else self.service.dialect.shown
                detokenizer = self.service.tokenizer.detokenizer(prompt, request.skip_special_tokens, showing)
                number = index * choices + choice
                stops, included = request.stop, request.include_stop
                generation = Generation(
                    number, len(prompt), detokenizer, stops, arrival, sink, sampling.logprobs, leader, include_stop=included
                )
                generation.grammar, generation.rules, generation.waited = request.automaton, request.rules, ticket.waited
                generation.prediction = request.predicted
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
        self.service.engine.submit(work[:count])
        del work[:count]
        self.service.admission.submitted(ticket, count)

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

    async def _written(self, sink: Collector, exchange: Exchange) -> bytes:
        """The body of a long answer, built in turns of the gate. Raises ClientDisconnected."""
        turns, body = sink.body(), list[bytes]()

        def build_more() -> None:
            try:
                next(turns)
            except StopIteration as end:
                body.append(end.value)

        while not body:
            if exchange.connection.disconnected:
                raise ClientDisconnected
            await self.service.gate.run(exchange.asker, build_more)
        return body.pop()

    def _drop(self, sink: Collector) -> None:
        """Cancel the running generations, and wake all tasks that wait for the answer."""
        sink.stop()
        sink.dropped = True
        for generation in sink.generations:
            if generation.open:
                generation.open = False
                self.service.engine.cancel(generation)
        for future in sink.awaited:
            if not future.done():
                future.set_result(None)

    async def _stream(self, sink: Streamer, exchange: Exchange) -> None:
        await _reached(sink.started, sink)
        await exchange.drained()
        sink.open(exchange.stream_head(STREAM_HEADERS))
        await sink.done
        if sink.dropped:
            raise ClientDisconnected
        if sink.error is not None:
            exchange.keep_alive = False
        exchange.finish(sink.end())


async def _reached(point: asyncio.Future[None], sink: Collector) -> None:
    """Wait for an event of an answer. Raises ClientDisconnected, and ApiError if the answer fails first. The error is a new
    object, because an error kept in a future or in the sink would form a reference cycle with this request's frames.
    """
    await point
    if sink.dropped:
        raise ClientDisconnected
    if sink.error is not None:
        raise sink.error.again()


def check_prediction(predicted: Int32 | None, prompt_length: int, pair: QueuePair) -> None:
    """Raise ApiError for a prediction that the engine of a queue pair can't take. predicted: its tokens."""
    if predicted is None:
        return
    if not pair.facts.predictions:
        message = "'prediction' needs a server with '--speculative ngram': this server makes no drafts from it."
        raise bad_request(message, "prediction", "unsupported_parameter")
    most = min(pair.context, pair.longest_prompt)
    if prompt_length + len(predicted) > most:
        message = f"The prompt has {prompt_length} tokens and 'prediction' has {len(predicted)}, together above the limit of"
        raise bad_request(f"{message} {most}: shorten 'prediction'.", "prediction", "context_length_exceeded")


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
