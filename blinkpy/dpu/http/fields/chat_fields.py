"""Requests of /v1/chat/completions, from a body to a Request; `LLM.chat` makes its requests from the same model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_model import Body, Part, SentBack, doc, hints, rule
from blinkpy.dpu.http.fields.call_fields import Call
from blinkpy.dpu.http.fields.choice_fields import ChatChoice, check_choice, tool_choice
from blinkpy.dpu.http.fields.http_request import Message, Request
from blinkpy.dpu.http.fields.request_body import load, read, refuse_nul
from blinkpy.dpu.http.fields.shared_fields import (
    Completing,
    Limit,
    PromptLogprobs,
    TemplateValues,
    TopLogprobs,
    template_values,
)
from blinkpy.dpu.http.fields.tool_fields import (
    EFFORTS,
    MAX_DEPTH,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    ChatTools,
    Effort,
    Verbosity,
    chat_tools,
    check_size,
)
from blinkpy.dpu.http.fields.unsupported_fields import CHAT, unsupported_fields
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import TOP_LOGPROBS

MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")

# ---- messages --------------------------------------------------------------------------------------------------------


class TextPart(Part, tag_field="type", tag="text"):
    """A text."""

    text: str
    cache_control: Any = None  # prefixes are cached anyway
    prompt_cache_breakpoint: Any = None


class RefusalPart(Part, tag_field="type", tag="refusal"):
    """A refusal of an assistant, shown to the model as text."""

    refusal: str
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


_TEXT_ONLY = hints(**dict.fromkeys(("image_url", "input_audio", "file"), "models accept text only"))
Content = str | list[Annotated[TextPart | RefusalPart, _TEXT_ONLY]]


class _Given(SentBack, tag_field="role"):
    content: Content
    name: str | None = None

    def message(self, where: str) -> Message:
        """The message for chat templates. Raises ApiError."""
        given: Any = self.content
        if type(given) is not str:
            refuse_refusals(f"{where}.content", given)
            given = content(given)
        message = {"role": self.__struct_config__.tag, "content": given}
        if self.name is not None:
            message["name"] = self.name
        return message


class SystemMessage(_Given, tag="system"):
    """Instructions."""


class DeveloperMessage(_Given, tag="developer"):
    """Instructions, as OpenAI's newer models call them."""


class UserMessage(_Given, tag="user"):
    """A message of a user."""


class ToolMessage(_Given, kw_only=True, tag="tool"):
    """The result of a call."""

    tool_call_id: str

    def message(self, where: str) -> Message:
        """The message for chat templates."""
        return {**_Given.message(self, where), "tool_call_id": self.tool_call_id}


class AssistantMessage(SentBack, tag_field="role", tag="assistant"):
    """A message of the model, with its reasoning and calls."""

    content: Content | None = None
    name: str | None = None
    refusal: str | None = None  # instead of content
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_TOOLS), rule(f"at most {MAX_TOOLS} calls")] | None = None
    # Three names of the reasoning; the last name in this order counts.
    thinking: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # OpenAI's client parses it from `content`.
    parsed: Any = None
    # For other servers: citations, OpenRouter's form of `reasoning`, and LiteLLM's copies of them.
    annotations: Any = None
    reasoning_details: Any = None
    provider_specific_fields: Any = None

    def message(self, where: str) -> Message:
        """The message for chat templates. Raises ApiError."""
        said: Any = "" if self.content is None else content(self.content)
        message: Message = {"role": "assistant", "content": said or self.refusal or said}
        for thoughts in (self.thinking, self.reasoning, self.reasoning_content):
            if thoughts is not None:
                message["reasoning_content"] = thoughts
        if self.tool_calls:
            message["tool_calls"] = [call.message(f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls)]
        if self.name is not None:
            message["name"] = self.name
        return message


class Prediction(Body):
    """A text that the output may repeat."""

    type: Literal["content"]
    content: str | list[TextPart]


def refuse_refusals(where: str, parts: Sequence[Any]) -> None:
    """Raise ApiError for a refusal among the parts of a message."""
    for i, part in enumerate(parts):
        if isinstance(part, RefusalPart):
            message = f"'{where}[{i}].type' must be 'text': only an assistant's message can hold a refusal."
            raise bad_request(message, f"{where}[{i}]", "unsupported_content")


def content(given: str | list[Any]) -> str | list[dict[str, str]]:
    """A text, or the parts of one."""
    if isinstance(given, str):
        return given
    return [{"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal} for part in given]


def _text(given: str | list[TextPart]) -> str:
    return given if isinstance(given, str) else "".join(part.text for part in given)


Messages = Annotated[
    list[SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage],
    Meta(min_length=1, max_length=MAX_MESSAGES),
    rule(f"1 to {MAX_MESSAGES} messages"),
]


def messages(given: Messages) -> list[Message]:
    """Messages for chat templates. Raises ApiError."""
    return [message.message(f"messages[{i}]") for i, message in enumerate(given)]


# ---- the body --------------------------------------------------------------------------------------------------------


# Fields of /tokenize, too.
GenerationPrompt = Annotated[bool | None, doc("false: the prompt ends with the last message", "true")]
Continue = Annotated[
    bool | None, doc("true: the answer continues the last message's text; not with `add_generation_prompt`", "false")
]
Tools = Annotated[
    ChatTools | None,
    doc(
        f'up to {MAX_TOOLS} of `{{"type": "function", "function": {{"name", "description", "parameters", "strict"}}}}`, '
        f"or of custom tools (docs/tools.md), together {MAX_TOOLS_BYTES >> 10} KiB, nested {MAX_DEPTH} levels deep"
    ),
]
if TYPE_CHECKING:
    _Base = Completing
else:
    _Base = unsupported_fields("_ChatBase", CHAT, Completing)


class ChatBody(_Base, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[
        Messages,
        doc(
            f'1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, where `ROLE` is one of {", ".join(ROLES)}. Content '
            'may be a list of `{"type": "text", "text": ...}`. An assistant\'s message may have `tool_calls` and '
            '`reasoning_content` (or `thinking`), and parts `{"type": "refusal", "refusal": ...}`. A tool\'s message has '
            "`tool_call_id`"
        ),
    ]
    max_completion_tokens: Annotated[Limit | None, doc("same as `max_tokens`")] = None
    logprobs: Annotated[bool | None, doc("true: log probabilities of the generated tokens")] = None
    top_logprobs: Annotated[
        TopLogprobs | None,
        doc(f"0 to {TOP_LOGPROBS}: also the log probabilities of this many most likely tokens; needs `logprobs`"),
    ] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continue = None
    add_special_tokens: Annotated[bool | None, doc("true: add the tokenizer's special tokens to the template's", "false")] = None
    tools: Tools = None
    tool_choice: Annotated[
        ChatChoice | None,
        doc(
            '`none`, `auto`, `required`, `{"type": "function", "function": {"name": NAME}}`, the same with `custom`, or '
            '`{"type": "allowed_tools", '
            '"allowed_tools": {"mode": "auto" or "required", "tools": [FUNCTION, ...]}}` with functions of this form'
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("false: at most one call in an answer", "true")] = None
    chat_template_kwargs: TemplateValues = None
    reasoning_effort: Annotated[
        Effort | None,
        doc(
            f"{', '.join(EFFORTS)}; needs a chat template with this variable; `none` also for models without reasoning, and for "
            "templates with `enable_thinking` or `thinking`"
        ),
    ] = None
    verbosity: Annotated[Verbosity | None, doc("low, medium or high, for a chat template with this variable")] = None
    include_reasoning: Annotated[bool | None, doc("false: no `reasoning_content` in the answer", "true")] = None
    prompt_logprobs: PromptLogprobs = None
    prediction: Annotated[
        Prediction | None,
        doc(
            '`{"type": "content", "content": text}`: [drafts](speculation.md#predictions) of the output, with `--speculative '
            "ngram`; together with the prompt at most the context",
            "none",
        ),
    ] = None


def parse_chat(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """The request of a body of /v1/chat/completions. defaults: the model's defaults. Raises ApiError with status 400."""
    return _request(load(body), defaults)


def chat_request(content: Mapping[str, Any], defaults: RequestParameters) -> Request:
    """The request that parse_chat would make, from a body that is already parsed into Python objects."""
    refuse_nul(content)
    return _request(content, defaults)


def _request(fields: Mapping[str, Any], defaults: RequestParameters) -> Request:
    body = read(fields, ChatBody)
    if body.tools:
        check_size("tools", fields["tools"], MAX_TOOLS_BYTES)
    request = Request(
        **body.completing(defaults, fields),
        messages=messages(body.messages),
        logprobs=body.logprobs is True,
        top_logprobs=body.top_logprobs or 0,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message is True,
        add_special_tokens=body.add_special_tokens,
        tools=chat_tools(body.tools) if body.tools else (),
        tool_choice=None if body.tool_choice is None else tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_values=template_values(body.chat_template_kwargs),
        reasoning_effort=body.reasoning_effort,
        verbosity=body.verbosity,
        include_reasoning=body.include_reasoning is not False,
        prompt_logprobs=body.prompt_logprobs,
        prediction=None if body.prediction is None else _text(body.prediction.content),
    )
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            message = "'max_tokens' and 'max_completion_tokens' contradict each other: keep one of them."
            raise bad_request(message, "max_completion_tokens", "invalid_value")
        request.max_tokens, request.limit_field = body.max_completion_tokens, "max_completion_tokens"
    if request.logprobs:
        request.parameters = request.parameters.changed(logprobs=request.top_logprobs)
    elif request.top_logprobs:
        raise bad_request("'top_logprobs' can only be used with 'logprobs': true.", "top_logprobs", "invalid_value")
    check_choice(request.tool_choice, request.tools)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("'prompt_logprobs' can't be used with 'stream': true.", "prompt_logprobs", "invalid_value")
    return request
