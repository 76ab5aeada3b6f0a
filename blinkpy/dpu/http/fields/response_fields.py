"""Requests of /v1/responses, from a body to a Request: their fields, and their input as messages."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_model import Body, SentBack, doc, hints, only, rule
from blinkpy.dpu.http.fields.call_fields import (
    CallItem,
    CodeCall,
    CustomCallItem,
    CustomResultItem,
    FileSearchCall,
    ItemPart,
    ListedTools,
    McpCall,
    ResultItem,
    SearchCall,
    ServedItem,
)
from blinkpy.dpu.http.fields.chat_fields import MAX_MESSAGES, RefusalPart, refuse_refusals
from blinkpy.dpu.http.fields.choice_fields import FlatChoice, check_choice, tool_choice
from blinkpy.dpu.http.fields.grammar_fields import TEXT, FlatFormat, TextFormat, format_grammar
from blinkpy.dpu.http.fields.http_request import Message, Request
from blinkpy.dpu.http.fields.request_body import load, read, refuse_unsupported
from blinkpy.dpu.http.fields.shared_fields import (
    Generation,
    Limit,
    TemplateValues,
    TopLogprobs,
    one_grammar,
    template_values,
)
from blinkpy.dpu.http.fields.tool_fields import (
    MAX_TOOLS_BYTES,
    Effort,
    FlatTools,
    Verbosity,
    check_size,
    flat_tools,
    hidden_tools,
)
from blinkpy.dpu.http.fields.unsupported_fields import RESPONSES, unsupported_fields
from blinkpy.queues.request_parameters import RequestParameters

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

# ---- input items -----------------------------------------------------------------------------------------------------


_TEXT_ONLY = hints(**dict.fromkeys(("input_image", "input_file", "input_audio"), "models accept text only"))


class MessageItem(SentBack, tag_field="type", tag="message"):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[ItemPart | RefusalPart, _TEXT_ONLY]]
    id: Any = None
    status: Any = None
    phase: Any = None

    def message(self, where: str) -> Message:
        """The item as a message. Raises ApiError for a refusal that is not an assistant's."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        if self.role != "assistant":
            refuse_refusals(f"{where}.content", self.content)
        texts = [part.refusal if isinstance(part, RefusalPart) else part.text for part in self.content]
        return {"role": self.role, "content": "\n".join(texts)}


class ReasoningText(SentBack):
    """A text of reasoning."""

    text: str
    type: Literal["reasoning_text", "summary_text", "text"] | None = None


class ReasoningItem(SentBack, tag_field="type", tag="reasoning"):
    """Reasoning. Encrypted reasoning of another server can't be read; the plain text next to it counts."""

    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: Any = None
    id: Any = None
    status: Any = None

    @property
    def text(self) -> str:
        """Its content, or else its summary."""
        return "\n".join(part.text for part in self.content or self.summary or ())


Items = Annotated[
    list[
        Annotated[
            MessageItem
            | CallItem
            | ResultItem
            | ReasoningItem
            | CustomCallItem
            | CustomResultItem
            | SearchCall
            | FileSearchCall
            | CodeCall
            | McpCall
            | ListedTools,
            hints(
                item_reference="responses are not stored; with `store` false, clients send the items",
                image_generation_call="models accept text only",
            ),
        ]
    ],
    Meta(min_length=1, max_length=MAX_MESSAGES),
    rule(f"1 to {MAX_MESSAGES} items"),
]


def messages(items: Any) -> list[Message]:
    """Items as messages: consecutive output items of a model become one assistant message. Raises ApiError."""
    found: list[Message] = []
    open_turn = False  # the last message is an assistant's
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if isinstance(item, ListedTools):
            continue
        if isinstance(item, MessageItem):
            message = item.message(where)
            begun = open_turn and "tool_calls" not in found[-1] and not found[-1]["content"]  # by its reasoning
            if begun and message["role"] == "assistant":
                found[-1]["content"] = message["content"]
            else:
                found.append(message)
        elif isinstance(item, ResultItem | CustomResultItem):
            found.append(item.message())
        else:
            reasons = isinstance(item, ReasoningItem)
            if not open_turn or (reasons and (found[-1]["content"] or "tool_calls" in found[-1])):
                found.append({"role": "assistant", "content": ""})
            if isinstance(item, ReasoningItem):
                thoughts = (found[-1].get("reasoning_content", ""), item.text)
                found[-1]["reasoning_content"] = "\n".join(filter(None, thoughts))
            elif isinstance(item, ServedItem):
                call, result = item.messages(where)
                found[-1].setdefault("tool_calls", []).append(call)
                found.append(result)
            else:
                found[-1].setdefault("tool_calls", []).append(item.message(where))
        open_turn = found[-1]["role"] == "assistant"
    return found


# ---- the body --------------------------------------------------------------------------------------------------------


class ReasoningOptions(Body):
    """How the model reasons. Reasoning is never summarized."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[Any, only("auto")] = None
    mode: Annotated[Any, only("standard")] = None


class TextOptions(Body):
    """The format of the answer's text."""

    format: FlatFormat | None = None
    verbosity: Verbosity | None = None


class ResponseStreamOptions(Body):
    """Events are never padded, and the last one always has the token counts."""

    include_obfuscation: Annotated[Any, only(False, why="events are not padded")] = None
    include_usage: bool | None = None


if TYPE_CHECKING:
    _Base = Generation
else:
    _Base = unsupported_fields("_ResponseBase", RESPONSES, Generation)


class ResponseBody(_Base, kw_only=True):
    """The body of /v1/responses."""

    metadata: Annotated[dict[str, Any] | None, doc("returned with the answer")] = None
    input: Annotated[
        str | Items,
        doc(
            f'a text, or 1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, `function_call`, '
            "`function_call_output`, `custom_tool_call`, `custom_tool_call_output` and `reasoning`, whose `encrypted_content` is "
            "not read; calls that OpenAI's service has answered: `code_interpreter_call`, `file_search_call`, `mcp_call` and "
            "`web_search_call`. Content may be a list of "
            '`{"type": "input_text", "text": ...}`, an assistant\'s also of `{"type": "refusal", "refusal": ...}`'
        ),
    ]
    instructions: Annotated[str | None, doc("a system message before the input")] = None
    max_output_tokens: Annotated[Limit | None, doc("same as `max_tokens`")] = None
    client_metadata: dict[str, Any] | None = None
    include: Annotated[
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None,
        doc(
            f'`"{LOGPROBS}"`: log probabilities of the generated tokens; `"{ENCRYPTED}"`, without effect, as reasoning is '
            "returned as plain text; OpenAI's other values, without effect, as answers have no hosted calls and no images"
        ),
    ] = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1), rule("at least 1")] | None, doc("accepted, without effect: answers have no hosted calls")
    ] = None
    top_logprobs: Annotated[TopLogprobs | None, doc("0 to 20, with `include`")] = None
    reasoning: Annotated[
        ReasoningOptions | None,
        doc(
            "`effort`: as `reasoning_effort`; `summary`: `auto`, `concise` or `detailed`, without effect, as reasoning is "
            'returned as plain text; `context`: `"auto"`'
        ),
    ] = None
    text: Annotated[
        TextOptions | None,
        doc(
            '`format`: `{"type": "text"}`, `json_object`, or `{"type": "json_schema", "name": NAME, "schema": SCHEMA}`; '
            "`verbosity`: low, medium or high, for a template with this variable"
        ),
    ] = None
    tools: Annotated[
        FlatTools | None,
        doc(
            '`{"type": "function", "name", "description", "parameters", "strict"}`, limits as in chats; `strict` is false by '
            'default; `{"type": "namespace", "name", "description", "tools"}`: functions, known to the model as '
            "`NAMESPACE__NAME`; custom tools (docs/tools.md). "
            "In addition, with a warning in the log and hidden from the model: `code_interpreter`, `file_search`, "
            "`image_generation`, `local_shell`, `mcp`, `tool_search`, `web_search`"
        ),
    ] = None
    tool_choice: Annotated[
        FlatChoice | None,
        doc(
            '`none`, `auto`, `required`, `{"type": "function" or "custom", "name": NAME}`, or `{"type": "allowed_tools", '
            '"mode": "auto" or "required", "tools": [FUNCTION, ...]}` with functions of this form'
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("false: at most one call in an answer", "true")] = None
    chat_template_kwargs: TemplateValues = None
    stream_options: Annotated[
        ResponseStreamOptions | None, doc('`{"include_obfuscation": false}`; `include_usage`, without effect')
    ] = None


def parse_response(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """The request of a body of /v1/responses. defaults: the model's defaults. Raises ApiError with status 400."""
    fields = load(body)
    items = fields.get("input")
    if type(items) is list:  # `type` is optional for messages
        fields["input"] = [{"type": "message", **item} if type(item) is dict else item for item in items]
    given = read(fields, ResponseBody)
    for name in ("reasoning", "text", "stream_options"):
        if getattr(given, name) is not None:
            refuse_unsupported(getattr(given, name), name)
    if given.tools:
        check_size("tools", fields["tools"], MAX_TOOLS_BYTES)
    request = Request(
        **given.generation(defaults, fields),
        messages=[{"role": "user", "content": given.input}] if isinstance(given.input, str) else messages(given.input),
        max_tokens=given.max_output_tokens,
        limit_field="max_output_tokens",
        conversation_field="input",
        effort_field="reasoning.effort",
        instructions=given.instructions,
        metadata=given.metadata,
        logprobs=LOGPROBS in (given.include or ()),
        top_logprobs=given.top_logprobs or 0,
        tools=flat_tools(given.tools) if given.tools else (),
        hidden_tools=hidden_tools(given.tools or ()),
        tool_choice=None if given.tool_choice is None else tool_choice(given.tool_choice),
        parallel_tool_calls=given.parallel_tool_calls is not False,
        template_values=template_values(given.chat_template_kwargs),
        reasoning_effort=given.reasoning.effort if given.reasoning else None,
        verbosity=given.text.verbosity if given.text else None,
    )
    if given.text is not None:
        request.text_format = _text_format(given.text, fields["text"])
        request.grammar = one_grammar([request.grammar, request.text_format.grammar])
    check_choice(request.tool_choice, request.tools)
    if request.logprobs:
        request.parameters = request.parameters.changed(logprobs=request.top_logprobs)
    elif request.top_logprobs:
        message = f"'top_logprobs' can only be used with 'include': [\"{LOGPROBS}\"]."
        raise bad_request(message, "top_logprobs", "invalid_value")
    if request.instructions:  # an empty text means no instructions: a template may have defaults
        request.messages = [{"role": "system", "content": request.instructions}, *(request.messages or ())]
    return request


def _text_format(options: TextOptions, raw: dict[str, Any]) -> TextFormat:
    if options.format is None:
        return TextFormat(TEXT, None)
    return TextFormat(raw["format"], format_grammar("text.format", options.format))
