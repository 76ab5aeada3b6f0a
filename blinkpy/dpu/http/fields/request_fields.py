"""The fields of requests to /v1/chat/completions and /v1/completions.

CHAT_FIELDS and COMPLETION_FIELDS are all that is accepted: a row for each field, from which its check, its schema in
/openapi.json and its line in docs/api.md come. Request parameters have their rows from the table of
blinkpy.queues.request_parameters, fields without support from that of blinkpy.dpu.http.fields.unsupported_fields.
"""

from collections.abc import Callable
from typing import Any

from blinkpy.dpu.banned_words import MAX_BAD_WORD, MOST_BAD_WORDS
from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.http.fields import prompt_checks, token_rule_fields, tool_fields
from blinkpy.dpu.http.fields.field import STRING, Field, only, takes, unsupported_fields
from blinkpy.dpu.http.fields.field_checks import (
    boolean,
    choices,
    ids,
    limit,
    limit_or_none,
    request_id,
    salt,
    scalar,
    service_tier,
    stop_ids,
    stop_texts,
    stream_options,
    text,
    top_logprobs,
)
from blinkpy.dpu.http.fields.grammar_fields import (
    STRUCTURES,
    GrammarField,
    choice_field,
    regex_field,
    response_format,
    schema_field,
    structured_outputs,
)
from blinkpy.dpu.http.fields.prompt_checks import MAX_MESSAGES, MAX_PROMPTS, ROLES
from blinkpy.dpu.http.fields.unsupported_fields import CHAT, COMPLETIONS
from blinkpy.dpu.http.fields.value_checks import typed
from blinkpy.dpu.prompt_scores import MOST_SCORES
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.request_parameters import INT32_MAX, INT32_RANGE, INT64_RANGE, PARAMETERS, Bounds, Parameter
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import HIGHEST_BIAS, MOST_BIASES, SEQUENCE_TOKENS

_BIAS = {"type": "number", "minimum": -HIGHEST_BIAS, "maximum": HIGHEST_BIAS}
_BIASES = {
    "type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": _BIAS, "maxProperties": MOST_BIASES
}  # fmt: skip
_WORD = {"type": "string", "pattern": "\\S", "maxLength": MAX_BAD_WORD}
_WORDS = {"type": "array", "items": _WORD, "maxItems": MOST_BAD_WORDS}


def _parameter_field(p: Parameter) -> Field:
    low, high = p.bounds
    ranges: dict[Bounds, str] = {INT32_RANGE: "a 32-bit integer", INT64_RANGE: "a 64-bit integer"}
    values = f"above {low:g}, to {high:g}" if p.above_low else f"at least {low}" if high == INT32_MAX else f"{low:g} to {high:g}"
    values = p.kind or ranges.get(p.bounds) or values
    default = "random" if p.neutral is None else "none" if p.kind or p.default is None else f"{p.neutral:g}"
    default = f"the model's, else {default}" if p.from_model else default
    check = salt if p.name == "cache_salt" else scalar(p)
    return Field(f"parameters.{p.name}", check, f"{values}; {p.doc}" if p.doc else values, default)


_BIAS_VALUES = f"an object: up to {MOST_BIASES:,} token ids, each with {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g} to add to its logit"
_BAD_WORDS_VALUES = (
    f"up to {MOST_BAD_WORDS} texts of 1 to {MAX_BAD_WORD} characters and {SEQUENCE_TOKENS} tokens, which are not generated, at "
    "the start of a text or behind a space; the same text of other tokens may be"
)
_PROMPT_LOGPROBS_VALUES = (
    f"0 to {TOP_LOGPROBS}: `logprobs` for the prompt's tokens, each in a step of its own, {MOST_SCORES:,} in all; "
    "not with `stream`"
)
_ECHO_VALUES = "true: the text begins with the prompt, and `logprobs` (not with `stream`) with its tokens"
_ECHO_LIMIT_VALUES = "at least 1, with `echo` 0; prompt and output have to fit into the context"
_STOP_VALUES = (
    f"a string, or up to {MAX_STOPS}, of 1 to {MAX_STOP_LENGTH:,} characters each; they end nothing before `min_tokens`"
)
_STOP_IDS_VALUES = f"up to {STOP_IDS} ids of the vocabulary, with the model's end-of-sequence ids"
_LIMIT_VALUES = "at least 1; prompt and output have to fit into the context"
_USAGE_VALUES = (
    "`include_usage`: a last event with token counts, null in the others; `continuous_usage_stats`: counts in each event; with "
    "`stream` only"
)
_TIER_VALUES = "`priority`: latency-sensitive; `flex`: best effort; `auto`, `default`: the key's, else `priority`"
_MESSAGES_VALUES = (
    f'1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, where ROLE is {", ".join(ROLES)}; content may '
    'be a list of `{"type": "text", "text": ...}`; an assistant\'s may have `tool_calls` and `reasoning_content` '
    '(or `thinking`), and parts `{"type": "refusal", "refusal": ...}`; a tool\'s has `tool_call_id`'
)
_CONTINUE_VALUES = "true: the answer goes on with the last message's text; not with `add_generation_prompt`"
_PARSE_VALUES = "true: what is spelled like a special token is one, not text"
_FORMAT_VALUES = (
    '`{"type": "text"}`, `json_object`, or `{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}`'
    ": [structured output](structured-output.md)"
)
_TOP_LOGPROBS_VALUES = f"0 to {TOP_LOGPROBS}: also of this number of likeliest tokens; with `logprobs` only"
_TOOLS_VALUES = (
    f'up to {tool_fields.MAX_TOOLS} of `{{"type": "function", "function": {{"name", "description", "parameters", "strict"}}}}`, '
    f"together {tool_fields.MAX_TOOLS_BYTES >> 10} KiB, nested {tool_fields.MAX_DEPTH} deep"
)
_CHOICE_VALUES = (
    '`none`, `auto`, `required`, `{"type": "function", "function": {"name": NAME}}`, or `{"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [FUNCTION, ...]}}` with functions of this form'
)
_KWARGS_VALUES = "an object: variables of the model's chat template"
_EFFORT_VALUES = (
    f"{', '.join(tool_fields.EFFORTS)}; where the chat template takes it; `none` also where the model does not reason"
)


def _grammar_field(check: Callable[[str, Any], GrammarField | None], values: str, *kinds: str, **more: Any) -> Field:
    """A field that says what the output may be. kinds: of JSON; more: of its schema."""
    return Field("grammar", takes(type=list(kinds), **more)(check), values, "none")


COMMON_FIELDS = {
    "model": Field("model", text, "the served name; another is a 404", "the served model"),
    "max_tokens": Field("max_tokens", limit, _LIMIT_VALUES, "the rest of the context"),
    **{p.name: _parameter_field(p) for p in PARAMETERS if p.http == "both"},
    "stop": Field("stop", stop_texts, _STOP_VALUES, "none"),
    "stop_token_ids": Field("stop_ids", stop_ids, _STOP_IDS_VALUES, "none"),
    "ignore_eos": Field("ignore_eos", boolean, "true: end-of-sequence ids don't end the output", "false"),
    "service_tier": Field("service_tier", service_tier, _TIER_VALUES, "`auto`"),
    "stream": Field("stream", boolean, "true: server-sent events", "false"),
    "stream_options": Field("stream_usage", stream_options, _USAGE_VALUES),
    "include_stop_str_in_output": Field("include_stop", boolean, "true: the text has its stop string or token", "false"),
    "skip_special_tokens": Field("skip_special_tokens", boolean, "false: the text shows special tokens", "true"),
    "spaces_between_special_tokens": Field("", boolean),
    "request_id": Field("request_id", request_id, "the answer's `id`: 1 to 128 characters of ASCII", "random"),
    "n": Field("n", choices, f"1 to {MAX_CHOICES} choices of a prompt; seeds count up", "1"),
    "structured_outputs": _grammar_field(structured_outputs, f"an object with one of {', '.join(STRUCTURES)}", "object"),
    "guided_json": _grammar_field(schema_field, "as `structured_outputs` with this key", "object", "string", "boolean"),
    "guided_regex": _grammar_field(regex_field, "as `structured_outputs` with this key", "string", minLength=1),
    "guided_choice": _grammar_field(choice_field, "as `structured_outputs` with this key", "array", items=STRING, minItems=1),
    "response_format": _grammar_field(response_format, _FORMAT_VALUES, "object"),
    "logit_bias": Field("logit_bias", takes(**_BIASES)(token_rule_fields.logit_bias), _BIAS_VALUES, "none"),
    "allowed_token_ids": Field(
        "allowed_token_ids",
        takes(**ids(minItems=1))(token_rule_fields.allowed_token_ids),
        "ids: no other token is generated",
        "all",
    ),
    "bad_words": Field("bad_words", takes(**_WORDS)(token_rule_fields.bad_words), _BAD_WORDS_VALUES, "none"),
    # Remarks for the operator of a service. Nothing is stored here.
    "user": Field("", text),
    "metadata": Field("", takes(type="object")(lambda name, value: typed(name, value, dict))),
    "safety_identifier": Field("", text),
    "session_id": Field("", text),
    "prompt_cache_key": Field("", text),
}
_PROMPT_LOGPROBS = Field("prompt_logprobs", top_logprobs, _PROMPT_LOGPROBS_VALUES, "none")
CHAT_ONLY_FIELDS = {
    "messages": Field("messages", prompt_checks.messages, _MESSAGES_VALUES),
    "max_completion_tokens": Field("max_tokens", limit, "as `max_tokens`"),
    "logprobs": Field("logprobs", boolean, "true: log probabilities of the generated tokens"),
    "top_logprobs": Field("top_logprobs", top_logprobs, _TOP_LOGPROBS_VALUES),
    "add_generation_prompt": Field("add_generation_prompt", boolean, "false: the prompt ends with the last message", "true"),
    "continue_final_message": Field("continue_final_message", boolean, _CONTINUE_VALUES, "false"),
    "add_special_tokens": Field("add_special_tokens", boolean, "true: the tokenizer's beside the template's", "false"),
    "tools": Field("tools", takes(type="array", items={"type": "object"})(tool_fields.tools), _TOOLS_VALUES),
    "tool_choice": Field("tool_choice", takes(type=["string", "object"])(tool_fields.tool_choice), _CHOICE_VALUES),
    "parallel_tool_calls": Field("parallel_tool_calls", boolean, "false: only the first call comes", "true"),
    "chat_template_kwargs": Field("template_values", takes(type="object")(tool_fields.template_values), _KWARGS_VALUES),
    "reasoning_effort": Field("reasoning_effort", takes(**STRING)(tool_fields.reasoning_effort), _EFFORT_VALUES),
    "include_reasoning": Field("include_reasoning", boolean, "false: no `reasoning_content` in the answer", "true"),
    "echo": only(False, why="see `continue_final_message`"),
    "best_of": only(1, why="a prompt has one choice"),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    **unsupported_fields(CHAT),
}
COMPLETION_ONLY_FIELDS = {
    "prompt": Field("prompts", prompt_checks.prompts, f"a text, a list of token ids, or up to {MAX_PROMPTS} of these"),
    "add_special_tokens": Field("add_special_tokens", boolean, "false: no BOS token and the like", "true"),
    "parse_special": Field("parse_special", boolean, _PARSE_VALUES, "false"),
    "echo": Field("echo", boolean, _ECHO_VALUES, "false"),
    "max_tokens": Field("max_tokens", limit_or_none, _ECHO_LIMIT_VALUES, "the rest of the context"),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "best_of": Field(
        "best_of",
        choices,
        f"`n` to {MAX_CHOICES}: the `n` of highest mean log probability; not with `stream` or `echo`",
        "`n`",
    ),
    **{p.name: _parameter_field(p) for p in PARAMETERS if p.http == "completions"},
    **unsupported_fields(COMPLETIONS),
}
CHAT_FIELDS = COMMON_FIELDS | CHAT_ONLY_FIELDS
COMPLETION_FIELDS = COMMON_FIELDS | COMPLETION_ONLY_FIELDS
