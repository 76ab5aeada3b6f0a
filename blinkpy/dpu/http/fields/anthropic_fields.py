"""Requests of /v1/messages, Anthropic's API, from a body to a Request: their fields, and their content blocks as messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_errors import missing
from blinkpy.dpu.http.fields.body_model import Body, Part, SentBack, doc, hints, only, rule
from blinkpy.dpu.http.fields.call_fields import CalledName
from blinkpy.dpu.http.fields.chat_fields import MAX_MESSAGES
from blinkpy.dpu.http.fields.choice_fields import ToolChoice, check_choice
from blinkpy.dpu.http.fields.grammar_fields import GrammarField, Schema, schema_grammar
from blinkpy.dpu.http.fields.http_request import Message, Request
from blinkpy.dpu.http.fields.request_body import load, read, refuse_unsupported
from blinkpy.dpu.http.fields.shared_fields import Limit, Stop
from blinkpy.dpu.http.fields.tool_fields import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    Function,
    Name,
    Tool,
    check_size,
    depth_checked,
    distinct,
)
from blinkpy.dpu.text.conversation_forms import WRAPPED
from blinkpy.dpu.text.stop_strings import MAX_STOPS
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETER, RequestParameters

# Tools that Anthropic's service runs by itself. Agents list them with their own; the model does not see them.
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_toolset")
_TEXT_ONLY = hints(**dict.fromkeys(("image", "document", "search_result"), "models accept text only"))
_CACHED = "prefixes are cached until their pages are evicted"

# ---- content blocks --------------------------------------------------------------------------------------------------


class TextBlock(Part, tag_field="type", tag="text"):
    """A text."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ToolUseBlock(SentBack, tag_field="type", tag="tool_use"):
    """A call in an assistant's message."""

    id: str
    name: CalledName
    input: Any = None  # clients assemble it from the events of a stream: a model may write no object
    cache_control: Any = None
    caller: Any = None

    def call(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it. Raises ApiError."""
        given = {} if self.input is None else self.input if type(self.input) is dict else {WRAPPED: self.input}
        arguments = depth_checked(f"{where}.input", given)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResultBlock(SentBack, tag_field="type", tag="tool_result"):
    """The result of a call in a user's message."""

    tool_use_id: str
    content: str | list[Annotated[TextBlock, _TEXT_ONLY]] | None = None
    is_error: bool | None = None
    cache_control: Any = None

    def message(self) -> Message:
        """The result as a message. Chat templates have no mark for errors, so the text mentions the error."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return {"role": "tool", "content": f"Error: {text}" if self.is_error else text, "tool_call_id": self.tool_use_id}


class ThinkingBlock(SentBack, tag_field="type", tag="thinking"):
    """Reasoning in an assistant's message. Signatures are not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(SentBack, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server, which can't be read."""

    data: str | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, _TEXT_ONLY]


class MessageParam(SentBack):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def messages(self, where: str) -> list[Message]:
        """The messages for chat templates; each result of a call becomes a separate message. Raises ApiError for a block that
        its role can't have.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        for i, block in enumerate(self.content):
            place = f"{where}.content[{i}]"
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise bad_request(f"'{place}': only a user's message can have a tool_result.", place, "invalid_value")
            if isinstance(block, ToolUseBlock | ThinkingBlock) and self.role != "assistant":
                kind = "tool_use" if isinstance(block, ToolUseBlock) else "thinking"
                raise bad_request(f"'{place}': only an assistant's message can have a {kind} block.", place, "invalid_value")
        texts = [{"type": "text", "text": block.text} for block in self.content if isinstance(block, TextBlock)]
        results = [block.message() for block in self.content if isinstance(block, ToolResultBlock)]
        if self.role != "assistant":
            return results + ([{"role": self.role, "content": texts}] if texts or not results else [])
        message: Message = {"role": "assistant", "content": "\n".join(text["text"] for text in texts)}
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock) and block.thinking]
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        calls = [block.call(f"{where}.content[{i}]") for i, block in enumerate(self.content) if isinstance(block, ToolUseBlock)]
        if len(calls) > MAX_TOOLS:
            raise bad_request(f"'{where}.content' must hold at most {MAX_TOOLS} calls, not {len(calls)}.", f"{where}.content")
        return [message | ({"tool_calls": calls} if calls else {})]


# ---- tools -----------------------------------------------------------------------------------------------------------


class CustomTool(Body):
    """A function that the model may call."""

    name: Name
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: list[Any] | None = None
    defer_loading: Annotated[Any, only(False, why="tools are never loaded later")] = None
    allowed_callers: Annotated[Any, only(["direct"], why="no code runs here that could call a tool")] = None

    def tool(self, where: str) -> Tool:
        """The tool. Raises ApiError for a schema that does not describe an object."""
        schema = {key: value for key, value in self.input_schema.items() if value is not None}
        function = Function(name=self.name, description=self.description, parameters=schema, strict=self.strict)
        return function.tool(where, field="input_schema")


class AnthropicChoice(Body):
    """The choice among tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        """The choice in the form of /v1/chat/completions. Raises ApiError for a function without a name."""
        if self.type == "tool":
            if self.name is None:
                raise missing("tool_choice.name")
            return ToolChoice("required", self.name)
        return ToolChoice({"any": "required"}.get(self.type, self.type))


# ---- the body --------------------------------------------------------------------------------------------------------


class Thinking(Body):
    """Whether the model reasons. Reasoning has no separate limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Body):
    """Effort, and format of the answer's text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingEdit(Body, tag_field="type", tag="clear_thinking_20251015"):
    """Earlier reasoning may be omitted. keep: turns that keep it."""

    keep: Any = None


class ContextManagement(Body):
    """Changes of the conversation before the model sees it."""

    edits: list[ThinkingEdit] | None = None


class AnthropicMetadata(Body):
    """Metadata for the operator of a service; nothing is stored."""

    user_id: str | None = None


class CountTokensBody(Body, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    model: Annotated[str | None, doc("the served name; other names cause a 404", "the served model")] = None
    messages: Annotated[
        Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES), rule(f"1 to {MAX_MESSAGES} messages")],
        doc(
            f'1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, `ROLE` one of user, assistant, system. Content may '
            "be a list of blocks: `text`, of an assistant also `tool_use` and `thinking`, of a user also `tool_result`. The "
            "answer continues a last message of an assistant"
        ),
    ]
    system: Annotated[str | list[Annotated[TextBlock, _TEXT_ONLY]] | None, doc("instructions: a text, or `text` blocks")] = None
    tools: Annotated[
        Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS), rule(f"at most {MAX_TOOLS} tools")] | None,
        doc(
            '`{"name", "description", "input_schema", "strict"}`, limits as in chats; tools that Anthropic runs by itself, such '
            "as `web_search_20250305`, are hidden from the model"
        ),
    ] = None
    tool_choice: Annotated[
        AnthropicChoice | None,
        doc('`{"type": TYPE}`, `TYPE` one of auto, any, none and tool (with `name`); `disable_parallel_tool_use`'),
    ] = None
    thinking: Annotated[
        Thinking | None,
        doc(
            "`enabled` or `adaptive`: the answer shows reasoning; `disabled`: none. It sets the template's `enable_thinking` or "
            "`thinking`, if it has one; `budget_tokens` has no effect",
            "not shown",
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        doc('`effort`: for a template with `reasoning_effort`; `format`: `{"type": "json_schema", "schema": SCHEMA}`'),
    ] = None
    output_format: Annotated[OutputFormat | None, doc("as `output_config.format`")] = None
    cache_control: Annotated[Any, doc(f"accepted, without effect: {_CACHED}")] = None
    context_management: Annotated[
        ContextManagement | None,
        doc("`edits`: only `clear_thinking_20251015`, without effect: the chat template decides about earlier reasoning"),
    ] = None
    mcp_servers: Annotated[Any, only([], why="clients connect to them")] = None
    speed: Annotated[Any, only("standard", why="see `service_tier`")] = None


class AnthropicBody(CountTokensBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Annotated[Limit, doc("at least 1; prompt and output must fit into the context")]
    stop_sequences: Annotated[
        Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None, doc(f"up to {MAX_STOPS} strings", "none")
    ] = None
    stream: Annotated[bool | None, doc("true: named server-sent events", "false")] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=100), rule("0 to 100")] | None, doc("0 to 100", "the model's")] = None
    top_p: Annotated[Annotated[float, Meta(ge=0, le=1), rule("0 to 1")] | None, doc("0 to 1; 0 and 1 are off", "the model's")] = (
        None
    )
    top_k: Annotated[Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None, doc("at least -1; -1 and 0 are off", "the model's")] = None
    metadata: Annotated[AnthropicMetadata | None, doc("accepted, without effect")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only", "priority", "flex"] | None,
        doc("`flex`: best effort; `priority`: latency-sensitive; otherwise the key's, else `priority`", "`auto`"),
    ] = None
    container: Annotated[Any, only(why="no code runs here")] = None
    inference_geo: Annotated[Any, only(why="this server has one location")] = None


def parse_anthropic(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """The request of a body of /v1/messages. defaults: the model's defaults. Raises ApiError with status 400."""
    fields, hosted = _loaded(body)
    given = read(fields, AnthropicBody)
    request = _conversation(given, fields, defaults)
    request.hidden_tools = hosted
    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k")}
    if sampling["top_p"] == 0:
        sampling["top_p"] = 1.0
    asked = {name: PARAMETER[name].from_request(value) for name, value in sampling.items() if value is not None}
    request.parameters = defaults.changed(**asked) if asked else defaults
    request.max_tokens, request.stream = given.max_tokens, given.stream is True
    request.stop = tuple(dict.fromkeys(given.stop_sequences or ()))
    request.service_tier = {"standard_only": "default"}.get(given.service_tier or "", given.service_tier)
    return request


def parse_count(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """The request of a body of /v1/messages/count_tokens. Raises ApiError with status 400."""
    fields, _ = _loaded(body)
    return _conversation(read(fields, CountTokensBody), fields, defaults)


def _loaded(body: bytes | bytearray) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a body without the tools that Anthropic's service runs itself, and the kinds of these tools. Raises
    ApiError.
    """
    fields = load(body)
    tools = fields.get("tools")
    if type(tools) is list:
        own = [tool for tool in tools if not _hosted(tool)]
        if tools and not own:
            message = "'tools[0].type' must be 'custom': this server has no hosted tools. Add a tool with 'input_schema'."
            raise bad_request(message, "tools[0].type", "invalid_value")
        fields["tools"] = own
    return fields, tuple(dict.fromkeys(filter(None, map(_hosted, tools if type(tools) is list else ()))))


def _hosted(tool: Any) -> str:
    """The kind of a tool that Anthropic's service runs itself, else ""."""
    kind = tool.get("type") if type(tool) is dict else None
    return next((start.rstrip("_") for start in HOSTED if type(kind) is str and kind.startswith(start)), "")


def _conversation(given: CountTokensBody, fields: Mapping[str, Any], defaults: RequestParameters) -> Request:
    refuse_unsupported(given)
    if given.tools:
        check_size("tools", fields["tools"], MAX_TOOLS_BYTES)
    messages, places = _messages(given)
    thinking = None if given.thinking is None else given.thinking.type != "disabled"
    omitted = given.thinking is not None and given.thinking.display == "omitted"
    request = Request(
        parameters=defaults,
        model=given.model,
        messages=messages,
        places=places,
        tools=_tools(given.tools or ()),
        tool_choice=None if given.tool_choice is None else given.tool_choice.choice(),
        parallel_tool_calls=not (given.tool_choice and given.tool_choice.disable_parallel_tool_use),
        thinking=thinking,
        wished_effort=None if given.output_config is None else given.output_config.effort,
        include_reasoning=thinking is True and not omitted,
        grammar=_format(given),
    )
    check_choice(request.tool_choice, request.tools)
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last and last["content"]:
        request.add_generation_prompt, request.continue_final_message = False, True
    return request


def _messages(given: CountTokensBody) -> tuple[list[Message], tuple[str, ...]]:
    """The messages for chat templates, and the path of each."""
    messages: list[Message] = []
    places: list[str] = []
    system = given.system if isinstance(given.system, str) else "\n\n".join(block.text for block in given.system or ())
    if system:
        messages.append({"role": "system", "content": system})
        places.append("system")
    for i, message in enumerate(given.messages):
        made = message.messages(f"messages[{i}]")
        messages += made
        places += [f"messages[{i}]"] * len(made)
    return messages, tuple(places)


def _tools(given: Sequence[CustomTool]) -> tuple[Tool, ...]:
    found = []
    for i, tool in enumerate(given):
        refuse_unsupported(tool, f"tools[{i}]")
        found.append((f"tools[{i}]", tool.tool(f"tools[{i}]")))
    return distinct(found)


def _format(given: CountTokensBody) -> GrammarField | None:
    """The grammar of the answer's text. Raises ApiError for two formats."""
    nested = None if given.output_config is None else given.output_config.format
    if nested is not None and given.output_format is not None:
        message = "'output_format' and 'output_config.format' contradict each other: keep one of them."
        raise bad_request(message, "output_format", "invalid_value")
    if nested is not None:
        return schema_grammar("output_config.format.schema", nested.schema)
    return None if given.output_format is None else schema_grammar("output_format.schema", given.output_format.schema)
