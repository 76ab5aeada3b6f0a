"""Preparation of a body before submission, in one thread: parse, check, apply the chat template, tokenize.

JOBS has a job for each kind of request. Jobs do not use the event loop: a worker runs them in place, in a thread, or
in a separate process, depending on the size of the body.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from blinkpy.config import Config
from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.anthropic_fields import parse_anthropic, parse_count
from blinkpy.dpu.http.fields.chat_fields import parse_chat
from blinkpy.dpu.http.fields.completion_fields import parse_completion, parse_detokenize, parse_tokenize
from blinkpy.dpu.http.fields.http_request import Echo, Request
from blinkpy.dpu.http.fields.response_fields import parse_response
from blinkpy.dpu.text.chat_template import ChatError, load_template
from blinkpy.dpu.text.conversation_edits import Cleared, cleared, number_of_calls
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.token_rules import TokenRules, banned_sequences
from blinkpy.queues.words import Int32

# Limits on the shape of JSON, found in its bytes before a parser makes objects of them.

# A string, also an unterminated one, which a parser rejects: so no byte is scanned twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_shape(body: bytes | bytearray, max_values: int, max_depth: int) -> None:
    """Raise ApiError with status 413 for too many values, and 400 for deep nesting. Invalid JSON may pass."""
    if len(body) <= max_depth:
        return
    opened = body.count(b"[") + body.count(b"{")
    # Each value but the first follows a comma, or is inside a container.
    if opened <= max_depth and (len(body) < max_values or opened + body.count(b",") < max_values):
        return
    bare = _STRING.sub(b"", body)
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{") + 1
    if values > max_values:
        raise ApiError(413, f"The body has more than {max_values} values.", code="too_many_values", limit="max_body_values")
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    if steps.size and int(np.cumsum(steps, dtype=np.int64).max()) > max_depth:
        raise ApiError(400, f"The body is nested more than {max_depth} levels deep.", code="too_deep", limit="max_body_depth")


# Of bodies that are prepared on the event loop, within a millisecond (benchmarks/parts/request_costs.py). The most expensive
# bytes are strings (messages, prompts, banned words), and tools, whatever their number.
INLINE_BYTES, INLINE_QUOTES = 2048, 96
TEMPLATE_SLACK = 1 << 20  # characters that a chat template may add to the messages

Body = bytes | bytearray


def is_brief(body: Body) -> bool:
    """Whether a body is prepared in under a millisecond. Escaped names may hide any field."""
    if len(body) > INLINE_BYTES or body.count(b'"') > INLINE_QUOTES:
        return False
    return b'"tools"' not in body and b"\\u00" not in body


class EngineLimits(NamedTuple):
    """The engine's limits for prompts, in tokens."""

    context: int
    vocabulary: int


class RequestReader:
    """Name, tokenizer, chat template and defaults of a model. Raises ConfigError for an unusable folder."""

    def __init__(self, config: Config, folder: Path):
        self.model = config.model.served_model_name or config.model.model
        self.options = config.frontend
        self.tokenizer = Tokenizer(folder)
        self.defaults = self.tokenizer.request_defaults()
        limit = config.frontend.max_body_bytes + TEMPLATE_SLACK
        template = load_template(folder, self.tokenizer.config, config.model.chat_template, limit)
        self.dialect = ChatDialect(template, config.model, self.tokenizer.model_type)
        self.tokenizer.end_with(self.dialect.ends)

    def check(self, body: Body) -> None:
        """Raise ApiError for JSON of too many values, or too deep."""
        check_shape(body, self.options.max_body_values, self.options.max_body_depth)

    def check_model(self, model: str | None) -> None:
        """Raise ApiError with status 404 for another model's name."""
        if model is not None and model != self.model:
            raise ApiError(
                404, f"The model '{model}' does not exist: /v1/models lists the names.", param="model", code="model_not_found"
            )

    def prompts(self, request: Request, limits: EngineLimits | None, empty: bool = False) -> list[Int32]:
        """Token ids of each prompt.

        limits: None: no limit of length. empty: whether a prompt may be empty. Raises ApiError with status 400 for
        prompts beyond the limits.
        """
        if request.messages is not None:
            prompts = [self._chat_prompt(request, limits)]
        else:
            prompts = [self._prompt(prompt, request, limits) for prompt in request.prompts]
        if not empty and any(len(prompt) == 0 for prompt in prompts):
            raise bad_request("The prompt is empty.", "prompt", "invalid_value")
        return prompts

    def prediction(self, request: Request, limits: EngineLimits) -> Int32 | None:
        """The tokens of the request's prediction, if any. Raises ApiError with status 400 if it is too long."""
        if request.prediction is None:
            return None
        self._check_length(request.prediction, "prediction", limits)
        return self.tokenizer.encode(request.prediction, add_special_tokens=False)

    def echoes(self, request: Request, prompts: list[Int32], limits: EngineLimits) -> list[Echo]:
        """The part of the answer that shows each prompt, if requested. Prompts that are too long are not shown."""
        if not request.echo or any(len(prompt) > limits.context for prompt in prompts):
            return []
        return [self._echo(request, *pair) for pair in zip(request.prompts, prompts, strict=True)]

    def _echo(self, request: Request, given: str | list[int], prompt: Int32) -> Echo:
        if isinstance(given, str) and not request.scores_prompts:
            return Echo(given)
        detokenizer = self.tokenizer.detokenizer(None, request.skip_special_tokens)
        pieces = [detokenizer.push(token) for token in prompt.tolist()]
        offsets = np.cumsum([0, *map(len, pieces[:-1])], dtype=np.int32)
        return Echo("".join(pieces) + detokenizer.finish(), offsets)  # with special tokens, as the offsets count

    def token_rules(self, request: Request, limits: EngineLimits) -> TokenRules | None:
        """The request's rules for single tokens. Raises ApiError with status 400 for unknown tokens, also among stop
        tokens."""
        check_tokens(request.stop_ids, limits.vocabulary, "stop_token_ids")
        if not (request.logit_bias or request.allowed_token_ids or request.bad_words):
            return None
        check_tokens(request.logit_bias, limits.vocabulary, "logit_bias")
        check_tokens(request.allowed_token_ids, limits.vocabulary, "allowed_token_ids")
        try:
            banned = banned_sequences(request.bad_words, partial(self.tokenizer.encode, add_special_tokens=False))
        except ValueError as error:
            raise bad_request(f"'bad_words': {error}.", "bad_words", "invalid_value") from error
        return TokenRules(limits.vocabulary, request.logit_bias, request.allowed_token_ids or None, banned)

    def _chat_prompt(self, request: Request, limits: EngineLimits | None) -> Int32:
        """The tokens of a conversation, with old results cleared if the request asks for it."""
        clearing, given, grammar = request.clearing, request.messages or [], request.grammar
        fewer, calls = ([], 0) if clearing is None else cleared(given, clearing)
        if clearing is None or calls == 0:
            return self._rendered(request, limits)
        before = self._rendered(request, None)
        if clearing.due(len(before), number_of_calls(given)):
            request.messages, request.grammar = fewer, grammar
            after = self._rendered(request, None)
            saved = len(before) - len(after)
            if saved >= clearing.least:
                request.cleared = Cleared(calls, saved)
                return after
            request.messages, request.grammar = given, grammar
            return self._rendered(request, limits)
        return before

    def _rendered(self, request: Request, limits: EngineLimits | None) -> Int32:
        try:
            text, request.expected = self.dialect.prompt(request, self.tokenizer.specials)
        except ChatError as error:
            raise bad_request(f"{error}", request.conversation_field, "invalid_messages") from error
        except GrammarError as error:
            param, message = error.with_param("tools")
            raise bad_request(message, param, "invalid_grammar") from error
        self._check_length(text, request.conversation_field, limits)
        return self.tokenizer.encode(text, request.add_special_tokens is True, parse_special=True)

    def _prompt(self, prompt: str | list[int], request: Request, limits: EngineLimits | None) -> Int32:
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt", limits)
            return self.tokenizer.encode(prompt, request.add_special_tokens is not False, request.parse_special)
        if limits is not None:
            if len(prompt) > limits.context:  # no array of unlimited size; the exact check follows
                return np.zeros(len(prompt), np.int32)
            check_tokens(prompt, limits.vocabulary, "prompt")
        return np.array(prompt, np.int32)

    def _check_length(self, text: str, param: str, limits: EngineLimits | None) -> None:
        """Before tokenization, reject a text that exceeds the context however it is split into tokens."""
        if limits is None or len(text) <= limits.context:
            return
        if (least := self.tokenizer.least_tokens(text)) > limits.context:
            what = param if param == "prediction" else "prompt"
            message = (
                f"This model's maximum context length is {limits.context} tokens. However, your {what} has at least {least}."
            )
            raise bad_request(message, param, "context_length_exceeded")


def check_tokens(tokens: Iterable[int], vocabulary: int, param: str) -> None:
    """Raise ApiError with status 400 for a token id that the model does not have."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            message = f"Token id {token} of '{param}' is outside the vocabulary of {vocabulary} tokens."
            raise bad_request(message, param, "invalid_value")


def _generation(read: Callable[[Body, RequestParameters], Request]) -> Callable[[RequestReader, Body, EngineLimits], Any]:
    def job(reader: RequestReader, body: Body, limits: EngineLimits) -> tuple[Request, list[Int32]]:
        reader.check(body)
        request = read(body, reader.defaults)
        reader.check_model(request.model)
        _clear_beyond(request, limits)
        prompts = reader.prompts(request, limits)
        request.prompt_tokens = sum(map(len, prompts))
        request.rules = reader.token_rules(request, limits)
        request.echoes = reader.echoes(request, prompts, limits)
        request.predicted, request.prediction = reader.prediction(request, limits), None
        # The source of the prompts is no longer needed, and may be large.
        request.messages, request.prompts = None if request.messages is None else [], []
        return request, prompts

    return job


def _clear_beyond(request: Request, limits: EngineLimits) -> None:
    """Results are also cleared if the prompt and the answer would not fit into the context."""
    if request.clearing is not None and request.clearing.calls is None:
        room = max(0, limits.context - (request.max_tokens or 0))
        request.clearing = request.clearing._replace(tokens=min(request.clearing.tokens, room))


def _count(read: Callable[[Body, RequestParameters], Request]) -> Callable[[RequestReader, Body, EngineLimits], Any]:
    def job(reader: RequestReader, body: Body, limits: EngineLimits) -> tuple[Request, int]:
        """A body, and the number of tokens of its prompt, which may exceed the context."""
        reader.check(body)
        request = read(body, reader.defaults)
        reader.check_model(request.model)
        _clear_beyond(request, limits)
        (prompt,) = reader.prompts(request, None)
        reader.token_rules(request, limits)
        request.messages = []
        return request, len(prompt)

    return job


def _tokenize(reader: RequestReader, body: Body, limits: EngineLimits) -> bytes:
    reader.check(body)
    request, with_strings = parse_tokenize(body)
    reader.check_model(request.model)
    tokens = reader.prompts(request, None, empty=True)[0].tolist()
    answer = {"count": len(tokens), "max_model_len": limits.context, "tokens": tokens}
    if with_strings:
        answer["token_strs"] = [reader.tokenizer.encoder.id_to_token(token) for token in tokens]
    return _bounded(orjson.dumps(answer), reader)


def _detokenize(reader: RequestReader, body: Body, limits: EngineLimits) -> bytes:
    reader.check(body)
    model, tokens = parse_detokenize(body)
    reader.check_model(model)
    check_tokens(tokens, limits.vocabulary, "tokens")
    return _bounded(orjson.dumps({"prompt": reader.tokenizer.decode(tokens, skip_special_tokens=False)}), reader)


def _bounded(answer: bytes, reader: RequestReader) -> bytes:
    limit = reader.options.max_body_bytes
    if len(answer) > limit:
        raise ApiError(
            413, f"The response would exceed {limit} bytes (max_body_bytes): shorten the request.", code="answer_too_large"
        )
    return answer


JOBS: dict[str, Callable[[RequestReader, Body, EngineLimits], Any]] = {
    "chat": _generation(parse_chat),
    "completion": _generation(parse_completion),
    "response": _generation(parse_response),
    "message": _generation(parse_anthropic),
    "input_tokens": _count(parse_response),
    "message_tokens": _count(parse_count),
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}
