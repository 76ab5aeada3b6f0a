"""The model as a worker serves it, and the way of a checked request to submissions."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.api_errors import ApiError, bad_request, busy
from blinkpy.dpu.banned_words import banned_sequences
from blinkpy.dpu.engine_link import EngineLink, Submission
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.grammar.grammar_compiler import GrammarBusyError, GrammarCompiler
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.http.answer_sinks import Collector
from blinkpy.dpu.http.answers import Answer
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.grammar_fields import GrammarField
from blinkpy.dpu.http.fields.request_fields import Request, token_limit
from blinkpy.dpu.http.message_answer import MessageAnswer
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.prompt_scores import PromptScores, scoring_parameters
from blinkpy.dpu.text.chat_template import ChatError, load_template
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.array_types import Int32
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import TokenRules

INLINE_CHARACTERS = 2048  # longer texts are tokenized in a thread; a text of this length takes under a millisecond
TEMPLATE_SLACK = 1 << 20  # characters that a chat template may add to the messages


class Service:
    """Model name, tokenizer, template and defaults of one worker. Raises ConfigError for a folder that can't be used."""

    def __init__(self, config: Config, folder: Path, engine: EngineLink, metrics: Metrics):
        self.engine, self.metrics = engine, metrics
        self.model = config.model.served_model_name or config.model.model
        self.api_key = config.frontend.api_key or os.environ.get("BLINKPY_API_KEY", "")
        self.started = int(time.time())
        self.tokenizer = Tokenizer(folder)
        try:
            self.defaults = RequestParameters.of_model(self.tokenizer.generation_config)
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from error
        limit = config.frontend.max_body_bytes + TEMPLATE_SLACK
        self.template = load_template(folder, self.tokenizer.config, config.model.chat_template, limit)
        self.dialect = ChatDialect(self.template, config.model, self.tokenizer.model_type)
        self._threads = ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1)), thread_name_prefix="tokenize")
        frontend = config.frontend
        self._grammars = GrammarCompiler(frontend.grammar_compile_ms / 1000, frontend.grammar_cache_mib << 20)

    def close(self) -> None:
        """End the threads, after running tokenizations, and the processes that compile grammars."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._grammars.close()

    def check_model(self, model: str | None) -> None:
        """Raise ApiError with status 404 for another model's name."""
        if model is not None and model != self.model:
            raise ApiError(404, f"The model '{model}' does not exist.", param="model", code="model_not_found")

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Raise ApiError with status 400 for a token id that the model does not have."""
        vocabulary = self.engine.require().facts.vocab_size
        for token in tokens:
            if not 0 <= token < vocabulary:
                message = f"Token id {token} is outside the vocabulary of {vocabulary} tokens."
                raise bad_request(message, param, "invalid_value")

    async def run(self, length: int, work: Callable[[Any], Any], text: Any) -> Any:
        """work(text), in a thread if the text is a long one. length: of it, in characters or tokens."""
        if length <= INLINE_CHARACTERS:
            return work(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, text)

    async def prompts(self, request: Request) -> list[Int32]:
        """Token ids of each prompt; the request's grammar is compiled, too. Raises ApiError with status 400 for what can't be."""
        if request.messages is not None:
            characters = sum(len(message["content"]) for message in request.messages)
            if request.tools or any("tool_calls" in message for message in request.messages):
                characters += INLINE_CHARACTERS  # their size was not counted
            prompts = [await self.run(characters, self._chat_prompt, request)]
        else:
            prompts = [await self._prompt(prompt, request) for prompt in request.prompts]
        if any(len(prompt) == 0 for prompt in prompts):
            raise bad_request("The prompt is empty.", "prompt", "invalid_value")
        grammar = request.grammar
        if grammar is not None and (grammar.needed or self.engine.require().facts.grammar_share > 0):
            request.automaton = await self.compile(grammar)
        if request.logit_bias or request.allowed_token_ids or request.bad_words:
            request.rules = self._token_rules(request)
        return prompts

    def _token_rules(self, request: Request) -> TokenRules:
        """Raises ApiError with status 400 for tokens that the model does not have, and for rules that the engine never takes."""
        self.check_tokens(list(request.logit_bias), "logit_bias")
        self.check_tokens(list(request.allowed_token_ids), "allowed_token_ids")
        pair, allowed = self.engine.require(), request.allowed_token_ids or None
        try:
            banned = banned_sequences(request.bad_words, partial(self.tokenizer.encode, add_special_tokens=False))
        except ValueError as error:
            raise bad_request(f"'bad_words': {error}.", "bad_words", "invalid_value") from error
        rules = TokenRules(pair.facts.vocab_size, request.logit_bias, allowed, banned)
        try:
            pair.require_room(request.automaton, rules)
        except ValueError as error:
            raise self._unfit(request, error) from error
        return rules

    @staticmethod
    def _unfit(request: Request, error: ValueError) -> ApiError:
        """The error for a grammar or token rules that never fit."""
        if request.grammar is not None:
            return bad_request(f"'{request.grammar.param}': {error}.", request.grammar.param, "invalid_grammar")
        param = next(name for name in ("logit_bias", "allowed_token_ids", "bad_words") if getattr(request, name))
        return bad_request(f"'{param}': {error}.", param, "invalid_value")

    async def compile(self, field: GrammarField) -> ByteAutomaton:
        """The automaton of a grammar. Raises ApiError with status 400, 429 where too many are waiting."""
        try:
            return await self._grammars.automaton(field.grammar)
        except GrammarError as error:
            place = "" if error.path == "#" else f" At {error.path}."
            raise bad_request(f"'{field.param}': {error.message}{place}", field.param, "invalid_grammar") from error
        except GrammarBusyError as error:
            raise busy("too many grammars wait to be compiled") from error

    def _chat_prompt(self, request: Request) -> Int32:
        try:
            text, request.expected = self.dialect.prompt(request, self.tokenizer.specials)
            return self.tokenizer.encode(text, request.add_special_tokens is True, parse_special=True)
        except ChatError as error:
            raise bad_request(f"{error}", "messages", "invalid_messages") from error

    def answer(self, request: Request, chat: bool | None) -> Answer | ResponseAnswer:
        """The envelope of a request's answer, once it has its prompts. chat: None for /v1/responses."""
        spell = self.tokenizer.spell
        if chat is None:
            request.expected = None
            return ResponseAnswer(request, self.model, spell)
        if request.expected is not None:
            return MessageAnswer(self.model, spell, request.expected, request.include_reasoning, request.request_id)
        return Answer(chat, self.model, spell, request.request_id)

    async def _prompt(self, prompt: str | list[int], request: Request) -> Int32:
        if isinstance(prompt, str):
            encode = partial(
                self.tokenizer.encode,
                add_special_tokens=request.add_special_tokens is not False,
                parse_special=request.parse_special,
            )
            return await self.run(len(prompt), encode, prompt)
        pair = self.engine.require()
        if len(prompt) > pair.context:  # no array of unlimited size; the exact check follows
            return np.zeros(len(prompt), np.int32)
        self.check_tokens(prompt, "prompt")
        return np.array(prompt, np.int32)

    def submit(self, request: Request, prompts: list[Int32], sink: Collector, arrival: float) -> None:
        """Submit all choices to the engine, or none. Raises ApiError."""
        pair = self.engine.require()
        stop_ids = tuple(dict.fromkeys((*request.stop_ids, *(() if request.ignore_eos else self.tokenizer.eos_ids))))
        if len(stop_ids) > STOP_IDS:
            own = STOP_IDS - len(self.tokenizer.eos_ids)
            message = f"'stop_token_ids' can hold at most {own} token ids, beside the model's end-of-sequence ids."
            raise bad_request(message, "stop_token_ids", "invalid_value")
        choices = request.best_of or request.n
        if len(prompts) * choices > pair.sizes.slots:
            message = (
                f"{len(prompts)} prompts with {choices} choices each are more than the {pair.sizes.slots} requests in flight"
            )
            raise bad_request(f"{message} that this server allows.", "n" if choices > 1 else "prompt", "invalid_value")
        work: list[Submission] = []
        for index, prompt in enumerate(prompts):
            limit = token_limit(request, len(prompt), pair.context)
            if len(prompt) > pair.longest_prompt:  # of small arenas, set by hand
                message = f"The prompt has {len(prompt)} tokens; this server takes at most {pair.longest_prompt}."
                raise bad_request(message, "prompt", "context_length_exceeded")
            parameters = replace(request.parameters, max_tokens=limit, stop_ids=stop_ids)
            scores, echo = self._prompt_scores(request, prompt, index)
            if choices > request.n:  # they are compared by their log probabilities
                parameters = replace(parameters, logprobs=max(0, parameters.logprobs))
            leader = None
            for choice, sampling in enumerate(parameters.variants(choices)):
                showing = () if request.expected is None else self.dialect.tokens
                detokenizer = self.tokenizer.detokenizer(prompt, request.skip_special_tokens, showing)
                number = index * choices + choice
                stops, included = request.stop, request.include_stop
                generation = Generation(
                    number, len(prompt), detokenizer, stops, arrival, sink, sampling.logprobs, leader, include_stop=included
                )
                generation.grammar, generation.rules = request.automaton, request.rules
                generation.scores, generation.echo, generation.echo_only = scores, echo, request.max_tokens == 0
                if scores is not None and choice == 0 and not scores.complete:
                    generation.scoring, sampling = True, scoring_parameters(sampling)
                work.append((generation, prompt, sampling))
                if len(prompt) > pair.facts.page_size or generation.scoring:  # a whole page is there to share, or scores are
                    leader = leader or generation
        sink.choices = choices
        sink.generations = [generation for generation, _, _ in work]
        try:
            self.engine.submit(work)
        except ValueError as error:  # of a grammar or token rules that the engine never takes
            if request.grammar is None and request.rules is None:
                raise
            raise self._unfit(request, error) from error

    def _prompt_scores(self, request: Request, prompt: Int32, index: int) -> tuple[PromptScores | None, str | None]:
        """What the answer shows of a prompt: its log probabilities, and its text."""
        if not (request.echo or request.scores_prompts):
            return None, None
        tokens, text, offsets = prompt.tolist(), "", list[int]()
        if request.echo:
            detokenizer = self.tokenizer.detokenizer(None, request.skip_special_tokens)
            for token in tokens:
                offsets.append(len(text))
                text += detokenizer.push(token)
            given = request.prompts[index]
            text = given if isinstance(given, str) else text + detokenizer.finish()
        scores = None
        if request.scores_prompts:
            count = max(request.prompt_logprobs or 0, request.parameters.logprobs if request.echo else 0)
            try:
                scores = PromptScores(tokens, count, offsets or None)
            except ValueError as error:
                name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
                raise bad_request(f"'{name}': {error}.", name, "invalid_value") from error
        return scores, text if request.echo else None
