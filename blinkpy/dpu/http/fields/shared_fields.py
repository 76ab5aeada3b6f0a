"""The fields that several endpoints share, and their part of a Request.

A field is declared once: its type, its bounds, and its line for docs/api.md. Sampling parameters come from the table of
blinkpy.queues.request_parameters, unsupported fields from that of blinkpy.dpu.http.fields.unsupported_fields.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.generation import MAX_CHOICES, MOST_SCORES
from blinkpy.dpu.http.fields.body_errors import typed
from blinkpy.dpu.http.fields.body_model import Body, doc, rule
from blinkpy.dpu.http.fields.grammar_fields import (
    STRUCTURES,
    Choices,
    GrammarField,
    Regex,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    format_grammar,
    schema_grammar,
    structures_grammar,
)
from blinkpy.dpu.http.fields.http_request import Request, StreamUsage
from blinkpy.dpu.http.fields.request_body import refuse_unsupported
from blinkpy.dpu.http.fields.tool_fields import MAX_VALUES_BYTES, check_size
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.request_parameters import (
    FLOAT32_LEAST,
    INT32_MAX,
    INT32_RANGE,
    INT64_RANGE,
    PARAMETER,
    PARAMETERS,
    Bounds,
    Parameter,
    RequestParameters,
)
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import HIGHEST_BIAS, MAX_BAD_WORD, MOST_BAD_WORDS, MOST_BIASES, SEQUENCE_TOKENS
from blinkpy.queues.words import TOP_LOGPROBS

MAX_DIGITS = 10  # of a token id as text
Limit = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[
    str,
    Meta(min_length=1, max_length=MAX_BAD_WORD, pattern=r"\S"),
    rule(f"1 to {MAX_BAD_WORD} characters that are not only spaces"),
]
TemplateValues = Annotated[dict[str, Any] | None, doc("an object: variables of the model's chat template")]
PromptLogprobs = Annotated[
    TopLogprobs | None,
    doc(
        f"0 to {TOP_LOGPROBS}: `logprobs` for the prompt's tokens, one step each, at most {MOST_SCORES:,} in all; "
        "not with `stream`",
        "none",
    ),
]
Biases = Annotated[
    dict[str, Any],
    Meta(
        max_length=MOST_BIASES,
        extra_json_schema={
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -HIGHEST_BIAS, "maximum": HIGHEST_BIAS},
        },
    ),
]
_LIKE_STRUCTURES = doc("as `structured_outputs` with this key", "none")


def _parameter_field(p: Parameter) -> tuple[str, Any, None]:
    """The field of a sampling parameter: name, type and default."""
    low, high = p.bounds
    kind: Any
    if p.name == "cache_salt":
        kind = Annotated[str, Meta(min_length=1)]
    elif p.is_float:
        kind = Annotated[float, Meta(ge=low + FLOAT32_LEAST if p.above_low else low, le=high), rule(p.bounds_text)]
    else:
        kind = Annotated[int, Meta(ge=int(low), le=int(high))]
    ranges: dict[Bounds, str] = {INT32_RANGE: "a 32-bit integer", INT64_RANGE: "a 64-bit integer"}
    values = f"above {low:g}, to {high:g}" if p.above_low else f"at least {low}" if high == INT32_MAX else f"{low:g} to {high:g}"
    values = p.kind or ranges.get(p.bounds) or values
    default = "random" if p.neutral is None else "none" if p.kind or p.default is None else f"{p.neutral:g}"
    line = doc(f"{values}; {p.doc}" if p.doc else values, f"the model's, else {default}" if p.from_model else default)
    return p.name, Annotated[kind | None, line], None


def sampling_fields(name: str, endpoints: str, base: type[Body]) -> Any:
    """A model that adds the sampling parameters of some endpoints: a value of Parameter.http."""
    fields: list[Any] = [_parameter_field(p) for p in PARAMETERS if p.http == endpoints]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


class StreamOptions(Body):
    """Token counts in a stream. Events are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_OF_TABLE = frozenset(p.name for p in PARAMETERS if p.http)
if TYPE_CHECKING:
    _Sampling = Body
else:
    _Sampling = sampling_fields("_Sampling", "both", Body)


class Generation(_Sampling):
    """The fields of all endpoints that generate."""

    model: Annotated[str | None, doc("the served name; other names cause a 404", "the served model")] = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None,
        doc(
            f"a string, or up to {MAX_STOPS}, of 1 to {MAX_STOP_LENGTH:,} characters each; no effect before `min_tokens`",
            "none",
        ),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=STOP_IDS)] | None,
        doc(f"up to {STOP_IDS} ids of the vocabulary, the model's end-of-sequence ids included", "none"),
    ] = None
    ignore_eos: Annotated[bool | None, doc("true: end-of-sequence ids don't end the output", "false")] = None
    service_tier: Annotated[
        Literal["auto", "default", "priority", "flex"] | None,
        doc("`priority`: latency-sensitive; `flex`: best effort; `auto`, `default`: the key's, else `priority`", "`auto`"),
    ] = None
    stream: Annotated[bool | None, doc("true: server-sent events", "false")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("true: the text includes its stop string or token", "false")] = None
    skip_special_tokens: Annotated[bool | None, doc("false: the text shows special tokens", "true")] = None
    spaces_between_special_tokens: bool | None = None
    request_id: Annotated[
        Annotated[str, Meta(pattern=r"^[!-~]{1,128}$(?!\n)"), rule("1 to 128 printable characters of ASCII, without spaces")]
        | None,
        doc("the answer's `id`: 1 to 128 characters of ASCII", "random"),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, doc(f"an object with one of {', '.join(STRUCTURES)}", "none")] = None
    guided_json: Annotated[Schema | None, _LIKE_STRUCTURES] = None
    guided_regex: Annotated[Regex | None, _LIKE_STRUCTURES] = None
    guided_choice: Annotated[Choices | None, _LIKE_STRUCTURES] = None
    response_format: Annotated[
        ResponseFormat | None,
        doc(
            '`{"type": "text"}`, `json_object` (also with a `schema`), or '
            '`{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}`: '
            "[structured output](structured-output.md)",
            "none",
        ),
    ] = None
    logit_bias: Annotated[
        Biases | None,
        doc(
            f"an object: up to {MOST_BIASES:,} token ids, each with {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g} to add to its logit",
            "none",
        ),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1)] | None, doc("ids: no other token is generated", "all")
    ] = None
    bad_words: Annotated[
        Annotated[list[BadWord], Meta(max_length=MOST_BAD_WORDS)] | None,
        doc(
            f"up to {MOST_BAD_WORDS} texts of 1 to {MAX_BAD_WORD} characters and {SEQUENCE_TOKENS} tokens, which are not "
            "generated at the start of a text or after a space",
            "none",
        ),
    ] = None
    # Remarks for the operator of a service. Nothing is stored here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None

    def parameters(self, defaults: RequestParameters, names: Iterable[str]) -> RequestParameters:
        """The sampling parameters of the request, or else the defaults."""
        given: dict[str, Any] = {}
        for name in _OF_TABLE.intersection(names):
            value = getattr(self, name)
            if type(value) in (int, float):  # a chat's `logprobs` is a boolean
                given[name] = PARAMETER[name].from_request(value)
            elif name == "cache_salt" and value is not None:
                given[name] = _salt(value)
        return defaults.changed(**given) if given else defaults

    def generation(self, defaults: RequestParameters, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a Request from these fields. given: the fields as the client sent them. Raises ApiError."""
        refuse_unsupported(self, names=given)
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        return {
            "parameters": self.parameters(defaults, given),
            "model": self.model,
            "stop": tuple(dict.fromkeys(stop)),
            "stop_ids": tuple(dict.fromkeys(self.stop_token_ids or ())),
            "ignore_eos": self.ignore_eos is True,
            "service_tier": self.service_tier,
            "stream": self.stream is True,
            "include_stop": self.include_stop_str_in_output is True,
            "skip_special_tokens": self.skip_special_tokens is not False,
            "request_id": self.request_id,
            "grammar": self.grammar(),
            "logit_bias": {} if self.logit_bias is None else biases("logit_bias", self.logit_bias),
            "allowed_token_ids": tuple(dict.fromkeys(self.allowed_token_ids or ())),
            "bad_words": tuple(dict.fromkeys(self.bad_words or ())),
        }

    def grammar(self) -> GrammarField | None:
        """The grammar that a field asks for. Raises ApiError if two fields ask for one."""
        found = []
        if self.structured_outputs is not None:
            found.append(structures_grammar("structured_outputs", self.structured_outputs))
        if self.guided_json is not None:
            found.append(schema_grammar("guided_json", self.guided_json))
        if self.guided_regex is not None:
            found.append(GrammarField("guided_regex", {"regex": self.guided_regex}))
        if self.guided_choice is not None:
            found.append(GrammarField("guided_choice", {"choice": self.guided_choice}))
        if self.response_format is not None:
            found.append(format_grammar("response_format", self.response_format))
        return one_grammar(found)


class Completing(Generation):
    """The fields of chats and completions."""

    max_tokens: Annotated[
        Limit | None,
        doc(
            "maximum tokens of the output: at least 1; prompt and output must fit into the context",
            "the model's `max_new_tokens`, else the rest of the context",
        ),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None, doc(f"1 to {MAX_CHOICES} choices; each uses the next seed", "1")
    ] = None
    stream_options: Annotated[
        StreamOptions | None,
        doc(
            "`include_usage`: a last event with token counts, null in the others; `continuous_usage_stats`: counts in "
            "each event; with `stream` only"
        ),
    ] = None

    def completing(self, defaults: RequestParameters, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a Request from these fields. given: the fields as the client sent them. Raises ApiError."""
        values = self.generation(defaults, given)
        values["max_tokens"], values["n"] = self.max_tokens, self.n or 1
        if self.stream_options is not None:
            values["stream_usage"] = self._stream_usage(self.stream_options)
        return values

    def _stream_usage(self, options: StreamOptions) -> StreamUsage:
        if options.include_obfuscation:
            message = "'stream_options.include_obfuscation' is not supported: events are not padded. Leave it out."
            raise bad_request(message, "stream_options.include_obfuscation", "unsupported_parameter")
        usage = StreamUsage(options.include_usage is True, options.continuous_usage_stats is True)
        if any(usage) and not self.stream:
            message = "'stream_options' can only be used with 'stream': true."
            raise bad_request(message, "stream_options", "invalid_value")
        return usage


def one_grammar(found: Sequence[GrammarField | None]) -> GrammarField | None:
    """The only grammar among the fields. Raises ApiError if two fields give one."""
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        message = f"'{grammars[0].param}' and '{grammars[1].param}' contradict each other: keep one of them."
        raise bad_request(message, grammars[1].param, "invalid_value")
    return grammars[0] if grammars else None


def biases(name: str, value: dict[str, Any]) -> dict[int, float]:
    """Biases of logits by token id. Raises ApiError."""
    found: dict[int, float] = {}
    for key, bias in value.items():
        if not (len(key) <= MAX_DIGITS and key.isascii() and key.isdecimal() and int(key) <= INT32_MAX):
            raise bad_request(f"'{name}' must have token ids as keys, not {key[:100]!r}.", name, "invalid_value")
        number = float(typed(f"{name}.{key}", bias, float, int))
        if not abs(number) <= HIGHEST_BIAS or math.isnan(number):
            message = f"'{name}.{key}' must be {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g}, not {bias}."
            raise bad_request(message, f"{name}.{key}", "invalid_value")
        if int(key) in found:
            raise bad_request(f"'{name}' has token {int(key)} twice.", name, "invalid_value")
        found[int(key)] = number + 0.0  # -0.0 becomes 0.0
    return found


def template_values(given: dict[str, Any] | None) -> dict[str, Any]:
    """The variables of `chat_template_kwargs`. Raises ApiError beyond the limits."""
    if given:
        check_size("chat_template_kwargs", given, MAX_VALUES_BYTES)
    return given or {}


def _salt(value: str) -> int:
    """Hash a salt: requests share cached prefixes only with requests of the same salt. It is never 0, which means no salt."""
    return max(1, int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "little") >> 1)


def token_limit(request: Request, prompt_length: int, context: int, default: int | None = None) -> int:
    """The maximum output tokens of a request, at least 1: max_tokens, or else the rest of the context after the prompt.

    prompt_length, context: in tokens. default: a model's own limit, if a request sets none; min_tokens raises it.
    Raises ApiError if the context is too short.
    """
    prompt = request.conversation_field if request.messages is not None else "prompt"
    space = context - prompt_length
    own = space if default is None else min(space, max(default, request.parameters.min_tokens))
    limit = max(1, request.max_tokens) if request.max_tokens is not None else own
    if space < 1 or limit > space:
        asked = "" if request.max_tokens is None else f" and {request.max_tokens} in the completion"
        at_fault = prompt if space < 1 or request.max_tokens is None else request.limit_field
        message = f"This model's maximum context length is {context} tokens. However, you requested {prompt_length} tokens in"
        raise bad_request(f"{message} the prompt{asked}.", at_fault, "context_length_exceeded")
    if request.parameters.min_tokens > limit:
        message = f"'min_tokens' ({request.parameters.min_tokens}) is above the {limit} tokens that may be generated."
        raise bad_request(message, "min_tokens", "invalid_value")
    return limit
