"""Requests of the OpenAI API, from bytes to checked values. A field that has no effect here is refused, never ignored.

CHAT_FIELDS and COMPLETION_FIELDS are all that is accepted: a row for each field, from which its check, its schema in
/openapi.json and its line in docs/api.md come. Request parameters have their rows from the table of
blinkpy.queues.request_parameters, fields without support from that of blinkpy.dpu.http.fields.unsupported_fields. A field that
is null counts as absent, as in OpenAI's API. Of a key that comes twice the last one counts, as in most JSON parsers.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.admission.service_tiers import KEYS_TIER, TIERS
from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.banned_words import MAX_BAD_WORD, MOST_BAD_WORDS
from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.http.fields import token_rule_fields, tool_fields, value_checks
from blinkpy.dpu.http.fields.grammar_fields import (
    STRUCTURES,
    GrammarField,
    TextFormat,
    choice_field,
    ebnf_field,
    regex_field,
    response_format,
    schema_field,
    structured_outputs,
)
from blinkpy.dpu.http.fields.tool_fields import MORE_MESSAGE_FIELDS, Tool, ToolChoice, check_choice, tool_message_fields
from blinkpy.dpu.http.fields.unsupported_fields import CHAT, COMPLETIONS, UNSUPPORTED
from blinkpy.dpu.http.fields.value_checks import says_nothing
from blinkpy.dpu.http.fields.value_checks import typed as _typed
from blinkpy.dpu.http.fields.value_checks import unsupported as _unsupported
from blinkpy.dpu.prompt_scores import MOST_SCORES
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.request_parameters import (
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
from blinkpy.queues.token_rules import HIGHEST_BIAS, MOST_BIASES, SEQUENCE_TOKENS, TokenRules

MAX_PROMPTS = 128  # in one request
MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")
# Of a message; templates do not use `name` and `refusal`.
MESSAGE_FIELDS = frozenset({"role", "content", "name", "refusal"})

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_STOP = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}

Message = dict[str, Any]


@dataclass(slots=True)
class Request:
    """One checked request. Exactly one of messages and prompts is set."""

    parameters: RequestParameters  # everything but max_tokens and the model's end-of-sequence ids
    model: str | None = None
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)  # texts or lists of token ids
    max_tokens: int | None = None  # None leaves it to the context
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # the request's own
    ignore_eos: bool = False
    service_tier: str | None = None  # as asked for; once it has entered, what it is served as
    stream: bool = False
    stream_usage: "StreamUsage" = field(default_factory=lambda: StreamUsage())
    n: int = 1  # choices for each prompt
    best_of: int | None = None  # generated for each prompt, from which the n likeliest are the answer
    logprobs: bool = False  # of a chat; parameters.logprobs combines it with top_logprobs
    top_logprobs: int = 0
    add_special_tokens: bool | None = None  # None: those of a text for a prompt, none for messages
    parse_special: bool = False  # what is spelled like a special token in a prompt is one
    skip_special_tokens: bool = True
    include_stop: bool = False
    add_generation_prompt: bool | None = None  # None: unless continue_final_message is set
    continue_final_message: bool = False
    request_id: str | None = None
    instructions: str | None = None  # of /v1/responses, as is metadata
    metadata: dict[str, Any] | None = None
    text_format: TextFormat | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    template_values: dict[str, Any] = field(default_factory=dict)  # for the chat template
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    expected: Expected | None = None  # what its answer may hold beside content; known with its prompt
    grammar: GrammarField | None = None  # what the output may be
    automaton: ByteAutomaton | None = None  # of the grammar, once it is compiled
    logit_bias: dict[int, float] = field(default_factory=dict)  # by token id
    allowed_token_ids: tuple[int, ...] = ()  # none: all are
    bad_words: tuple[str, ...] = ()
    rules: TokenRules | None = None  # of these three, with the prompt
    echo: bool = False
    prompt_logprobs: int | None = None  # most likely tokens at each place of the prompt

    @property
    def scores_prompts(self) -> bool:
        """Whether the answer has log probabilities of prompts."""
        return self.prompt_logprobs is not None or (self.echo and self.parameters.logprobs >= 0)


class StreamUsage(NamedTuple):
    """Token counts that a stream shows."""

    at_end: bool = False
    with_each_event: bool = False


# ---- checks of single values -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """The check of a field's value: run(name, value) returns what the service gets, or raises ApiError. schema: JSON Schema of
    the values, which may take more than `run` does."""

    run: Callable[[str, Any], Any]
    schema: Mapping[str, Any]

    def __call__(self, name: str, value: Any) -> Any:
        return self.run(name, value)


def takes(**schema: Any) -> Callable[[Callable[[str, Any], Any]], Check]:
    """Makes a function with a schema to a check."""
    return lambda run: Check(run, schema)


def one_of(*schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of values of several kinds."""
    return {"anyOf": list(schemas)}


def _scalar(parameter: Parameter) -> Check:
    """The check of a field with the type and bounds of a parameter. Returns what the engine gets."""
    low, high = parameter.bounds
    bounds = f"{low:g} to {high:g}" if parameter.is_float else f"{low} to {high}"
    if parameter.above_low:
        bounds = f"above {low:g} and at most {high:g}"
    kinds = (float, int) if parameter.is_float else (int,)
    least = "exclusiveMinimum" if parameter.above_low else "minimum"

    @takes(**{"type": "number" if parameter.is_float else "integer", least: low, "maximum": high})
    def check(name: str, value: Any) -> Any:
        if not parameter.in_bounds(_typed(name, value, *kinds)):
            raise bad_request(f"'{name}' must be {bounds}, not {value}.", name, "invalid_value")
        return parameter.from_request(value)

    return check


BOOLEAN = {"type": "boolean"}
STRING = {"type": "string"}
_text = takes(**STRING)(value_checks.text)


@takes(**BOOLEAN)
def _boolean(name: str, value: Any) -> bool:
    return bool(_typed(name, value, bool))


@takes(type="integer", minimum=0, maximum=INT32_MAX)
def _limit_or_none(name: str, value: Any) -> int:
    """max_tokens, which is 0 for an echo alone."""
    return 0 if value == 0 and type(value) is int else int(_limit(name, value))


_BIAS = {"type": "number", "minimum": -HIGHEST_BIAS, "maximum": HIGHEST_BIAS}
_BIASES = {
    "type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": _BIAS, "maxProperties": MOST_BIASES
}  # fmt: skip
_WORD = {"type": "string", "pattern": "\\S", "maxLength": MAX_BAD_WORD}
_WORDS = {"type": "array", "items": _WORD, "maxItems": MOST_BAD_WORDS}


@takes(type="integer", minimum=1, maximum=MAX_CHOICES)
def _choices(name: str, value: Any) -> int:
    if not 1 <= _typed(name, value, int) <= MAX_CHOICES:
        raise bad_request(f"'{name}' must be 1 to {MAX_CHOICES}, not {value}.", name, "invalid_value")
    return int(value)


@takes(**one_of({"type": "string"} | _STOP, {"type": "array", "items": {"type": "string"} | _STOP, "maxItems": MAX_STOPS}))
def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = value if type(value) is list else [value]
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'{name}' can hold at most {MAX_STOPS} strings, not {len(stops)}.", name, "invalid_value")
    for stop in stops:
        if not 1 <= len(_text(name, stop)) <= MAX_STOP_LENGTH:
            raise bad_request(f"each string of '{name}' must have 1 to {MAX_STOP_LENGTH} characters.", name, "invalid_value")
    return tuple(dict.fromkeys(stops))


def _ids(**more: int) -> Mapping[str, Any]:
    """The schema of a list of token ids."""
    return {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, **more}


@takes(**_ids(maxItems=STOP_IDS))
def _stop_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(token) is int for token in value):
        raise bad_request(f"'{name}' must be an array of token ids.", name, "invalid_type")
    if len(value) > STOP_IDS:
        raise bad_request(f"'{name}' can hold at most {STOP_IDS} token ids, not {len(value)}.", name, "invalid_value")
    for token in value:
        if not 0 <= token <= INT32_MAX:
            raise bad_request(f"'{name}' must be 0 to {INT32_MAX}, not {token}.", name, "invalid_value")
    return tuple(dict.fromkeys(value))


# Of include_obfuscation only false, for events have no padding here.
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@takes(type="object", properties=dict.fromkeys(STREAM_OPTIONS, BOOLEAN), additionalProperties=False)
def _stream_options(name: str, value: Any) -> StreamUsage:
    given = dict.fromkeys(STREAM_OPTIONS, False)
    for key, option in _typed(name, value, dict).items():
        if key not in given:
            raise _unsupported(f"{name}.{key}")
        given[key] = option is not None and _boolean(f"{name}.{key}", option)
    if given["include_obfuscation"]:
        raise _unsupported(f"{name}.include_obfuscation")
    return StreamUsage(given["include_usage"], given["continuous_usage_stats"])


@takes(type="string", minLength=1)
def _salt(name: str, value: Any) -> int:
    """Requests share cached prefixes only with requests of the same salt; 0, no salt, is never the hash of one."""
    if not _text(name, value):
        raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return max(1, int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "little") >> 1)


_ROLE = {"enum": list(ROLES)}
_PART = {"type": "object", "properties": {"type": {"enum": ["text"]}, "text": STRING}, "required": ["type", "text"]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": _ROLE, "content": one_of(STRING, {"type": "array", "items": _PART}), "name": STRING},
    "required": ["role", "content"],
}


@takes(type="array", items=_MESSAGE, minItems=1, maxItems=MAX_MESSAGES)
def _messages(name: str, value: Any) -> list[Message]:
    if not 1 <= len(_typed(name, value, list)) <= MAX_MESSAGES:
        raise bad_request(f"'{name}' must hold 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "invalid_value")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    role = _typed(where, value, dict).get("role")
    for key, entry in value.items():
        if key not in MESSAGE_FIELDS and key not in MORE_MESSAGE_FIELDS.get(str(role), ()) and not says_nothing(entry):
            raise _unsupported(f"{where}.{key}")
    if role not in ROLES:
        raise bad_request(f"'{where}.role' must be one of {', '.join(ROLES)}.", f"{where}.role", "invalid_value")
    more = tool_message_fields(where, value)
    silent = "tool_calls" in more or (role == "assistant" and "content" in value)  # as clients repeat an answer
    content = "" if value.get("content") is None and silent else value.get("content")
    message: Message = {"role": role, "content": _content(f"{where}.content", content), **more}
    if value.get("name") is not None:
        message["name"] = _text(f"{where}.name", value["name"])
    return message


def _content(where: str, value: Any) -> str | list[dict[str, str]]:
    """A text, or parts of one."""
    if type(value) is list:
        parts = []
        for i, part in enumerate(value):
            if type(part) is not dict or part.get("type") != "text" or set(part) != {"type", "text"}:
                message = f"'{where}[{i}]' must be an object of type 'text' with a 'text'; other content is not supported."
                raise bad_request(message, f"{where}[{i}]", "unsupported_content")
            parts.append({"type": "text", "text": _text(f"{where}[{i}].text", part["text"])})
        return parts
    return _text(where, value)


_PROMPT_IDS = {"type": "array", "items": {"type": "integer"}}
_SEVERAL = {"type": "array", "items": one_of(STRING, _PROMPT_IDS), "maxItems": MAX_PROMPTS}


@takes(**one_of(STRING, _PROMPT_IDS, _SEVERAL))
def _prompts(name: str, value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of several of one of these."""
    several = value if type(value) is list and value and type(value[0]) in (str, list) else [value]
    if len(several) > MAX_PROMPTS:
        raise bad_request(f"'{name}' can hold at most {MAX_PROMPTS} prompts, not {len(several)}.", name, "invalid_value")
    for prompt in several:
        if type(prompt) is list and not set(map(type, prompt)) <= {int}:
            raise bad_request(f"'{name}' must be text, or an array of token ids, or an array of those.", name, "invalid_type")
        if not (prompt if type(prompt) is list else _text(name, prompt)):
            raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return several


@takes(enum=[*KEYS_TIER, *TIERS])
def _service_tier(name: str, value: Any) -> str:
    if _typed(name, value, str) not in (*KEYS_TIER, *TIERS):
        raise bad_request(f"'{name}' must be one of {', '.join((*KEYS_TIER, *TIERS))}.", name, "invalid_value")
    return str(value)


@takes(type="string", pattern="^[!-~]{1,128}$")
def _request_id(name: str, value: Any) -> str:
    if not _REQUEST_ID.fullmatch(_typed(name, value, str)):
        raise bad_request(f"'{name}' must be 1 to 128 printable characters of ASCII.", name, "invalid_value")
    return str(value)


# ---- the fields ------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a request's body."""

    attribute: str  # of Request, or of RequestParameters after "parameters.", or "" when there is none
    check: Callable[[str, Any], Any]
    values: str = "accepted; no effect on the answer"  # for docs/api.md, as is default
    default: str = ""
    supported: bool = True  # False: only values that ask for nothing are accepted

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of the field's values."""
        return {**getattr(self.check, "schema", {}), "description": self.values}


_NULLS = {"type": "object", "additionalProperties": {"type": "null"}}


def _only(*allowed: Any, why: str = "") -> Field:
    """A field of which values that ask for nothing are accepted, and others refused by name."""
    shown = [orjson.dumps(one).decode() for one in allowed]

    @takes(**(one_of({"enum": list(allowed)}, _NULLS) if {} in allowed else {"enum": list(allowed)}))
    def check(name: str, value: Any) -> None:
        given = {key: entry for key, entry in value.items() if entry is not None} if type(value) is dict else value
        if not any(given == one and type(given) is type(one) for one in allowed):
            rule = f"supported with the value {' or '.join(shown)} only" if allowed else "not supported"
            raise bad_request(f"'{name}' is {rule}{f': {why}' if why else ''}.", name, "unsupported_parameter")

    return Field("", check, (f"`{'`, `'.join(shown)}`; " if allowed else "") + why, supported=False)


def unsupported_fields(endpoint: str) -> dict[str, Field]:
    """Those of an endpoint of blinkpy.dpu.http.fields.unsupported_fields."""
    return {row.name: _only(*row.harmless, why=row.why) for row in UNSUPPORTED if endpoint in row.endpoints}


def _parameter_field(p: Parameter) -> Field:
    low, high = p.bounds
    ranges: dict[Bounds, str] = {INT32_RANGE: "a 32-bit integer", INT64_RANGE: "a 64-bit integer"}
    values = f"above {low:g}, to {high:g}" if p.above_low else f"at least {low}" if high == INT32_MAX else f"{low:g} to {high:g}"
    values = p.kind or ranges.get(p.bounds) or values
    default = "random" if p.neutral is None else "none" if p.kind or p.default is None else f"{p.neutral:g}"
    default = f"the model's generation_config.json, else {default}" if p.from_model else default
    check = _salt if p.name == "cache_salt" else _scalar(p)
    return Field(f"parameters.{p.name}", check, f"{values}; {p.doc}" if p.doc else values, default)


_limit, _top_logprobs = _scalar(PARAMETER["max_tokens"]), _scalar(PARAMETER["logprobs"])
_BIAS_VALUES = (
    f"an object from token ids to {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g}, up to {MOST_BIASES:,} of them; added to logits"
)
_BAD_WORDS_VALUES = (
    f"up to {MOST_BAD_WORDS} texts of 1 to {MAX_BAD_WORD} characters and {SEQUENCE_TOKENS} tokens, which are not generated, at "
    "the start of a text or behind a space"
)
_PROMPT_LOGPROBS_VALUES = (
    f"0 to {TOP_LOGPROBS}: log probabilities of the prompt's tokens, and of this number of most likely ones at each place; one "
    f"step a token, {MOST_SCORES:,} in all; not with `stream`"
)
_ECHO_VALUES = "true: the text begins with the prompt, and `logprobs` with its tokens; these not with `stream`"
_ECHO_LIMIT_VALUES = "at least 1, or with `echo` 0; prompt and output together have to fit into the context"
_LIMIT_VALUES = "at least 1; prompt and output together have to fit into the context"
_USAGE_VALUES = (
    "`include_usage`: a last event with the token counts; `continuous_usage_stats`: counts so far with each event; both only "
    "with `stream`"
)
_TIER_VALUES = (
    "`priority`: latency-sensitive; `flex`: best effort; `auto`, `default`: that of the key, else `priority`; "
    "the answer has what was used"
)
_REMARK = "a remark for whoever reads the requests; no effect on the answer"
_MESSAGES_VALUES = (
    f'1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, where ROLE is {", ".join(ROLES)}; content may '
    'also be a list of `{"type": "text", "text": ...}`; an assistant\'s may have `tool_calls` and `reasoning_content` '
    "(or `thinking`), a tool's has `tool_call_id`"
)
_CONTINUE_VALUES = "true: the answer goes on with the last message's text; not with `add_generation_prompt`"
_PARSE_VALUES = "true: what is spelled like a special token in a text is one; otherwise it is text"
_FORMAT_VALUES = (
    '`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}`'
    ": [structured output](structured-output.md)"
)
_TOP_LOGPROBS_VALUES = f"0 to {TOP_LOGPROBS}: also of this number of most likely tokens at each place; only with `logprobs`"
_TOOLS_VALUES = (
    f'up to {tool_fields.MAX_TOOLS} of `{{"type": "function", "function": {{"name", "description", "parameters", "strict"}}}}`, '
    f"together {tool_fields.MAX_TOOLS_BYTES >> 10} KiB, nested {tool_fields.MAX_DEPTH} deep"
)
_CHOICE_VALUES = '`none`, `auto`, `required`, or `{"type": "function", "function": {"name": NAME}}`'
_KWARGS_VALUES = "an object: variables of the model's chat template; others are refused"
_EFFORT_VALUES = f"{', '.join(tool_fields.EFFORTS)}; only where the model's chat template takes it"


def _grammar_field(check: Callable[[str, Any], GrammarField | None], values: str, *kinds: str, **more: Any) -> Field:
    """A field that says what the output may be. kinds: of JSON; more: of its schema."""
    return Field("grammar", takes(type=list(kinds), **more)(check), values, "none")


COMMON_FIELDS = {
    "model": Field("model", _text, "the served name; another one is a 404", "the served model"),
    "max_tokens": Field("max_tokens", _limit, _LIMIT_VALUES, "the rest of the context"),
    **{p.name: _parameter_field(p) for p in PARAMETERS if p.http == "both"},
    "stop": Field("stop", _stop, f"a string, or up to {MAX_STOPS}, of 1 to {MAX_STOP_LENGTH:,} characters each", "none"),
    "stop_token_ids": Field("stop_ids", _stop_ids, f"up to {STOP_IDS} ids, the model's end-of-sequence ids included", "none"),
    "ignore_eos": Field("ignore_eos", _boolean, "true: end-of-sequence ids don't end the output", "false"),
    "service_tier": Field("service_tier", _service_tier, _TIER_VALUES, "`auto`"),
    "stream": Field("stream", _boolean, "true: server-sent events", "false"),
    "stream_options": Field("stream_usage", _stream_options, _USAGE_VALUES),
    "include_stop_str_in_output": Field(
        "include_stop", _boolean, "true: the text has the stop string or the stop token", "false"
    ),
    "skip_special_tokens": Field("skip_special_tokens", _boolean, "false: the text has generated special tokens", "true"),
    "spaces_between_special_tokens": Field("", _boolean, "accepted; tokenizers here put no spaces"),
    "request_id": Field("request_id", _request_id, "1 to 128 characters of ASCII for the answer's `id`", "random"),
    "n": Field("n", _choices, f"1 to {MAX_CHOICES} choices for each prompt, which is computed once; seeds count up", "1"),
    "structured_outputs": _grammar_field(structured_outputs, f"an object with one of {', '.join(STRUCTURES)}", "object"),
    "guided_json": _grammar_field(schema_field, "the same as `structured_outputs.json`", "object", "string", "boolean"),
    "guided_regex": _grammar_field(regex_field, "the same as `structured_outputs.regex`", "string", minLength=1),
    "guided_choice": _grammar_field(choice_field, "the same as `structured_outputs.choice`", "array", items=STRING, minItems=1),
    "guided_grammar": _grammar_field(ebnf_field, "the same as `structured_outputs.grammar`", "string", minLength=1),
    "response_format": _grammar_field(response_format, _FORMAT_VALUES, "object"),
    "logit_bias": Field("logit_bias", takes(**_BIASES)(token_rule_fields.logit_bias), _BIAS_VALUES, "none"),
    "allowed_token_ids": Field(
        "allowed_token_ids",
        takes(**_ids(minItems=1))(token_rule_fields.allowed_token_ids),
        "ids: no other token is generated",
        "all",
    ),
    "bad_words": Field("bad_words", takes(**_WORDS)(token_rule_fields.bad_words), _BAD_WORDS_VALUES, "none"),
    # Remarks for the operator of a service. Nothing is stored here.
    "user": Field("", _text, _REMARK),
    "metadata": Field("", takes(type="object")(lambda name, value: _typed(name, value, dict)), _REMARK),
    "safety_identifier": Field("", _text, _REMARK),
    "session_id": Field("", _text, _REMARK),
    "prompt_cache_key": Field("", _text, "accepted; prefixes are shared in any case"),
}
_PROMPT_LOGPROBS = Field("prompt_logprobs", _top_logprobs, _PROMPT_LOGPROBS_VALUES, "none")
CHAT_ONLY_FIELDS = {
    "messages": Field("messages", _messages, _MESSAGES_VALUES),
    "max_completion_tokens": Field("max_tokens", _limit, "the same as `max_tokens`"),
    "logprobs": Field("logprobs", _boolean, "true: log probabilities of the generated tokens"),
    "top_logprobs": Field("top_logprobs", _top_logprobs, _TOP_LOGPROBS_VALUES),
    "add_generation_prompt": Field("add_generation_prompt", _boolean, "false: the prompt ends behind the last message", "true"),
    "continue_final_message": Field("continue_final_message", _boolean, _CONTINUE_VALUES, "false"),
    "add_special_tokens": Field("add_special_tokens", _boolean, "true: those of the tokenizer beside the template's", "false"),
    "tools": Field("tools", takes(type="array", items={"type": "object"})(tool_fields.tools), _TOOLS_VALUES),
    "tool_choice": Field("tool_choice", takes(type=["string", "object"])(tool_fields.tool_choice), _CHOICE_VALUES),
    "parallel_tool_calls": Field("parallel_tool_calls", _boolean, "false: only the first call of an answer is given", "true"),
    "chat_template_kwargs": Field("template_values", takes(type="object")(tool_fields.template_values), _KWARGS_VALUES),
    "reasoning_effort": Field("reasoning_effort", takes(**STRING)(tool_fields.reasoning_effort), _EFFORT_VALUES),
    "include_reasoning": Field("include_reasoning", _boolean, "false: `reasoning_content` is left out of the answer", "true"),
    "echo": _only(False, why="an answer is new text alone; see `continue_final_message`"),
    "best_of": _only(1, why="a prompt has one choice"),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    **unsupported_fields(CHAT),
}
COMPLETION_ONLY_FIELDS = {
    "prompt": Field("prompts", _prompts, f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} of one of these"),
    "add_special_tokens": Field("add_special_tokens", _boolean, "false: a text gets no BOS token and the like", "true"),
    "parse_special": Field("parse_special", _boolean, _PARSE_VALUES, "false"),
    "echo": Field("echo", _boolean, _ECHO_VALUES, "false"),
    "max_tokens": Field("max_tokens", _limit_or_none, _ECHO_LIMIT_VALUES, "the rest of the context"),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "best_of": Field(
        "best_of", _choices, f"`n` to {MAX_CHOICES}: the `n` of highest mean log probability; not with `stream` or `echo`", "`n`"
    ),
    **{p.name: _parameter_field(p) for p in PARAMETERS if p.http == "completions"},
    **unsupported_fields(COMPLETIONS),
}
CHAT_FIELDS = COMMON_FIELDS | CHAT_ONLY_FIELDS
COMPLETION_FIELDS = COMMON_FIELDS | COMPLETION_ONLY_FIELDS


def read_fields(body: bytes | bytearray, fields: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checked values of a body, by the attributes of the fields, and those of request parameters. Raises ApiError."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if type(content) is not dict:
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    values: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value in content.items():
        if name not in fields:
            raise _unsupported(name[:100])
        if value is None:
            continue
        attribute = fields[name].attribute
        checked = fields[name].check(name, value)
        if attribute.startswith("parameters."):
            parameters[attribute.removeprefix("parameters.")] = checked
        elif attribute:
            if attribute in values and values[attribute] != checked:
                other = next(one for one in content if one in fields and fields[one].attribute == attribute)
                raise bad_request(f"'{other}' and '{name}' contradict each other.", name, "invalid_value")
            values[attribute] = checked
    return values, parameters


def missing(name: str) -> ApiError:
    """The error for a body without a field that it needs."""
    return bad_request(f"'{name}' is missing.", name, "missing_required_parameter")


def read_request(body: bytes | bytearray, fields: Mapping[str, Field], defaults: RequestParameters) -> Request:
    """Check a body with fields of Request, alone and in what all endpoints have in common. Raises ApiError with status 400."""
    values, parameters = read_fields(body, fields)
    request = Request(parameters=replace(defaults, **parameters) if parameters else defaults, **values)
    if request.logprobs:
        request.parameters = replace(request.parameters, logprobs=request.top_logprobs)
    return request


def parse(body: bytes | bytearray, fields: dict[str, Field], defaults: RequestParameters) -> Request:
    """Check a request's body. fields: CHAT_FIELDS or COMPLETION_FIELDS. Raises ApiError with status 400."""
    request = read_request(body, fields, defaults)
    if request.messages is None and not request.prompts:
        raise missing("messages" if "messages" in fields else "prompt")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("'top_logprobs' can only be used with 'logprobs': true.", "top_logprobs", "invalid_value")
    if request.best_of is not None and request.best_of < request.n:
        raise bad_request(f"'best_of' must be at least 'n', {request.n}, not {request.best_of}.", "best_of", "invalid_value")
    if request.best_of not in (None, request.n) and request.stream:
        raise bad_request("'best_of' above 'n' can't be used with 'stream': true.", "best_of", "invalid_value")
    check_choice(request.tool_choice, request.tools)
    _check_scores(request)
    if any(request.stream_usage) and not request.stream:
        raise bad_request("'stream_options' can only be used with 'stream': true.", "stream_options", "invalid_value")
    if request.continue_final_message and request.add_generation_prompt:
        message = "'continue_final_message' leaves no room for 'add_generation_prompt'."
        raise bad_request(message, "add_generation_prompt", "invalid_value")
    return request


def _check_scores(request: Request) -> None:
    """What does not go with log probabilities of prompts, or with their text."""
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("'max_tokens' must be at least 1 without 'echo': true.", "max_tokens", "invalid_value")
    if request.scores_prompts and request.stream:
        name = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
        what = "'echo' with 'logprobs'" if name == "echo" else f"'{name}'"
        raise bad_request(f"{what} can't be used with 'stream': true.", name, "invalid_value")
    if request.echo and request.best_of not in (None, request.n):
        raise bad_request("'best_of' above 'n' can't be used with 'echo': true.", "best_of", "invalid_value")


def token_limit(request: Request, prompt_length: int, context: int) -> int:
    """max_tokens of a request, at least 1 for the engine; without one, what its prompt leaves of the context. Raises ApiError
    where that is too little."""
    prompt = "messages" if request.messages is not None else "prompt"
    room = context - prompt_length
    limit = max(1, request.max_tokens) if request.max_tokens is not None else room
    if room < 1 or limit > room:
        asked = "" if request.max_tokens is None else f" and {request.max_tokens} in the completion"
        at_fault = prompt if room < 1 or request.max_tokens is None else "max_tokens"
        message = f"This model's maximum context length is {context} tokens. However, you requested {prompt_length} tokens in"
        raise bad_request(f"{message} the prompt{asked}.", at_fault, "context_length_exceeded")
    if request.parameters.min_tokens > limit:
        message = f"'min_tokens' ({request.parameters.min_tokens}) is above the {limit} tokens that may be generated."
        raise bad_request(message, "min_tokens", "invalid_value")
    return limit
