"""Requests of /v1/messages, Anthropic's API, from a body to a Request."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.anthropic.anthropic_blocks import TEXT_ONLY, MessageParam, TextBlock
from blinkpy.dpu.http.fields.anthropic.anthropic_tools import AnthropicTools, own_tools, read_tools
from blinkpy.dpu.http.fields.body_errors import missing
from blinkpy.dpu.http.fields.body_model import Body, doc, hints, only, rule
from blinkpy.dpu.http.fields.chat_fields import MAX_MESSAGES
from blinkpy.dpu.http.fields.choice_fields import ToolChoice, check_choice
from blinkpy.dpu.http.fields.grammar_fields import GrammarField, Schema, schema_grammar
from blinkpy.dpu.http.fields.http_request import Message, Request
from blinkpy.dpu.http.fields.request_body import load, read, refuse_unsupported
from blinkpy.dpu.http.fields.shared_fields import Limit, Stop
from blinkpy.dpu.http.fields.tool_fields import MAX_TOOLS_BYTES, Name, check_size
from blinkpy.dpu.text.conversation_edits import Clearing
from blinkpy.dpu.text.stop_strings import MAX_STOPS
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETER, RequestParameters

_CACHED = "prefixes are cached until their pages are evicted"


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

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
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


_Count = Annotated[int, Meta(ge=0, le=INT32_MAX), rule(f"0 to {INT32_MAX}")]


class TokensAmount(Body, tag_field="type", tag="input_tokens"):
    """A number of tokens of the prompt."""

    value: _Count


class UsesAmount(Body, tag_field="type", tag="tool_uses"):
    """A number of calls."""

    value: _Count


class ToolUsesEdit(Body, tag_field="type", tag="clear_tool_uses_20250919"):
    """Results of old calls are cleared in a long conversation."""

    trigger: TokensAmount | UsesAmount | None = None
    keep: UsesAmount | None = None
    clear_at_least: TokensAmount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None

    def clearing(self) -> Clearing:
        """The edit in the words of blinkpy.dpu.text.conversation_edits."""
        given: dict[str, Any] = {}
        if self.trigger is not None:
            given["calls" if isinstance(self.trigger, UsesAmount) else "tokens"] = self.trigger.value
        if self.keep is not None:
            given["keep"] = self.keep.value
        if self.clear_at_least is not None:
            given["least"] = self.clear_at_least.value
        inputs = self.clear_tool_inputs
        arguments = frozenset(inputs) if isinstance(inputs, list) else inputs is True
        return Clearing(**given, excluded=frozenset(self.exclude_tools or ()), arguments=arguments)


class ContextManagement(Body):
    """Changes of the conversation before the model sees it."""

    edits: list[Annotated[ThinkingEdit | ToolUsesEdit, hints(compact_20260112="the server writes no summaries")]] | None = None

    def clearing(self) -> Clearing | None:
        """How results are cleared, if at all. Raises ApiError for two such edits."""
        found = [(i, edit.clearing()) for i, edit in enumerate(self.edits or ()) if isinstance(edit, ToolUsesEdit)]
        if len(found) > 1:
            place = f"context_management.edits[{found[1][0]}]"
            raise bad_request(f"'{place}' is the second edit of its type: keep one of them.", place, "invalid_value")
        return found[0][1] if found else None


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
            "be a list of blocks. All roles have `text`. An assistant also has `tool_use`, `thinking`, and calls that "
            "Anthropic's service has answered, with their results. A user also has `tool_result`, `search_result`, and "
            "`document` with text. The answer continues a last message of an assistant"
        ),
    ]
    system: Annotated[str | list[Annotated[TextBlock, TEXT_ONLY]] | None, doc("instructions: a text, or `text` blocks")] = None
    tools: Annotated[
        AnthropicTools | None,
        doc(
            '`{"name", "description", "input_schema", "strict"}`, limits as in chats; `bash`, `text_editor` and `memory` of '
            "Anthropic's types, as functions with their published schemas; `defer_loading`, without effect. "
            "Tools that Anthropic runs by itself, such as `web_search_20250305`, are hidden from the model"
        ),
    ] = None
    tool_choice: Annotated[
        AnthropicChoice | None,
        doc('`{"type": TYPE}`, `TYPE` one of auto, any, none and tool (with `name`); `disable_parallel_tool_use`'),
    ] = None
    thinking: Annotated[
        Thinking | None,
        doc(
            "`enabled` or `adaptive`: the answer shows reasoning; `disabled`: none; `between_tools`: after a result. It sets "
            "the template's `enable_thinking` or `thinking`, if it has one; `budget_tokens` has no effect",
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
        doc(
            "`edits`: `clear_tool_uses_20250919` also clears old results if the prompt would not fit into the context; "
            "`clear_thinking_20251015`, without effect: the chat template decides about earlier reasoning"
        ),
    ] = None
    mcp_servers: Annotated[Any, only([], why="clients connect to them")] = None
    speed: Annotated[Any, only("standard", why="see `service_tier`")] = None
    fallbacks: Annotated[Any, doc("accepted, without effect: this server never declines a request")] = None
    compaction: Annotated[Any, only(why="the server writes no summaries")] = None
    thread: Annotated[Any, only(why="conversations are not stored: clients send the whole conversation")] = None
    diagnostics: Annotated[Any, only({}, why="see `usage.cache_read_input_tokens`")] = None


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
    hidden: tuple[str, ...] = ()
    if "tools" in fields:
        fields["tools"], hidden = own_tools(fields["tools"])
    return fields, hidden


def _conversation(given: CountTokensBody, fields: Mapping[str, Any], defaults: RequestParameters) -> Request:
    refuse_unsupported(given)
    if given.tools:
        check_size("tools", fields["tools"], MAX_TOOLS_BYTES)
    messages, places = _messages(given)
    thinking = None if given.thinking is None else given.thinking.type != "disabled"
    if given.thinking is not None and given.thinking.type == "between_tools":
        thinking = messages[-1]["role"] == "tool"
    omitted = given.thinking is not None and given.thinking.display == "omitted"
    request = Request(
        parameters=defaults,
        model=given.model,
        messages=messages,
        places=places,
        tools=read_tools(given.tools or ()),
        tool_choice=None if given.tool_choice is None else given.tool_choice.choice(),
        parallel_tool_calls=not (given.tool_choice and given.tool_choice.disable_parallel_tool_use),
        thinking=thinking,
        wished_effort=None if given.output_config is None else given.output_config.effort,
        include_reasoning=thinking is True and not omitted,
        grammar=_format(given),
        clearing=given.context_management.clearing() if given.context_management else None,
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
    last_user = max((i for i, message in enumerate(given.messages) if message.role == "user"), default=-1)
    for i, message in enumerate(given.messages):
        if message.clear_at == "next_user_message" and message.role == "system" and i < last_user:
            continue
        made = message.messages(f"messages[{i}]")
        messages += made
        places += [f"messages[{i}]"] * len(made)
    return messages, tuple(places)


def _format(given: CountTokensBody) -> GrammarField | None:
    """The grammar of the answer's text. Raises ApiError for two formats."""
    nested = None if given.output_config is None else given.output_config.format
    if nested is not None and given.output_format is not None:
        message = "'output_format' and 'output_config.format' contradict each other: keep one of them."
        raise bad_request(message, "output_format", "invalid_value")
    if nested is not None:
        return schema_grammar("output_config.format.schema", nested.schema)
    return None if given.output_format is None else schema_grammar("output_format.schema", given.output_format.schema)
