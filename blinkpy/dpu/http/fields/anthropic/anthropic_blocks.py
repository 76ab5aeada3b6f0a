"""Messages of Anthropic's API, and the content blocks in them, as messages for chat templates."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_model import Body, Part, SentBack, hints, only
from blinkpy.dpu.http.fields.call_fields import CalledName
from blinkpy.dpu.http.fields.http_request import Message
from blinkpy.dpu.http.fields.request_body import refuse_unsupported
from blinkpy.dpu.http.fields.tool_fields import MAX_TOOLS, depth_checked
from blinkpy.dpu.text.conversation_forms import WRAPPED

_ONLY_TEXT = "models accept text only"
TEXT_ONLY = hints(**dict.fromkeys(("image", "browser_state"), _ONLY_TEXT))
_Citations = Annotated[Any, only({"enabled": False}, why="answers have no citations")]

# ---- texts -------------------------------------------------------------------------------------------------------------


class TextBlock(Part, tag_field="type", tag="text"):
    """A text."""

    text: str
    cache_control: Any = None
    citations: Any = None  # of an answer


class SearchResultBlock(SentBack, tag_field="type", tag="search_result"):
    """A text that a client has found."""

    source: str
    title: str
    content: list[TextBlock]
    citations: _Citations = None
    cache_control: Any = None

    @property
    def text(self) -> str:
        """Its title, its source, and its texts."""
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class PlainSource(Body, tag_field="type", tag="text"):
    """The text of a document."""

    data: str
    media_type: Literal["text/plain"] | None = None


class BlocksSource(Body, tag_field="type", tag="content"):
    """The texts of a document."""

    content: str | list[Annotated[TextBlock, TEXT_ONLY]]


class DocumentBlock(SentBack, tag_field="type", tag="document"):
    """A document of text."""

    source: Annotated[PlainSource | BlocksSource, hints(**dict.fromkeys(("base64", "url", "file"), _ONLY_TEXT))]
    title: str | None = None
    context: str | None = None
    citations: _Citations = None
    cache_control: Any = None

    @property
    def text(self) -> str:
        """Its title, the remark about it, and its text."""
        content = self.source.data if isinstance(self.source, PlainSource) else self.source.content
        texts = [content] if isinstance(content, str) else [block.text for block in content]
        return "\n".join(filter(None, (self.title, self.context, *texts)))


class ToolReferenceBlock(SentBack, tag_field="type", tag="tool_reference"):
    """A tool that a search has found. The model knows all tools already."""

    tool_name: str
    cache_control: Any = None

    @property
    def text(self) -> str:
        """The name."""
        return self.tool_name


Written = TextBlock | SearchResultBlock | DocumentBlock


class ThinkingBlock(SentBack, tag_field="type", tag="thinking"):
    """Reasoning in an assistant's message. Signatures are not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(SentBack, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server, which can't be read."""

    data: str | None = None


# ---- calls and results -------------------------------------------------------------------------------------------------


class _CallBlock(SentBack, tag_field="type"):
    id: str
    name: CalledName
    input: Any = None  # clients assemble it from the events of a stream: a model may write no object
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None

    def call(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it. Raises ApiError."""
        given = {} if self.input is None else self.input if type(self.input) is dict else {WRAPPED: self.input}
        arguments = depth_checked(f"{where}.input", given)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolUseBlock(_CallBlock, tag="tool_use"):
    """A call in an assistant's message."""


class ServerToolUseBlock(_CallBlock, tag="server_tool_use"):
    """A call that Anthropic's service has answered."""


class McpToolUseBlock(_CallBlock, tag="mcp_tool_use"):
    """A call that an MCP server has answered."""

    server_name: str | None = None


class ToolResultBlock(SentBack, tag_field="type", tag="tool_result"):
    """The result of a call in a user's message."""

    tool_use_id: str
    content: str | list[Annotated[Written | ToolReferenceBlock, TEXT_ONLY]] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None

    def message(self, where: str) -> Message:
        """The result as a message. Raises ApiError."""
        for i, block in enumerate(self.content if isinstance(self.content, list) else ()):
            refuse_unsupported(block, f"{where}.content[{i}]")
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return _result(self.tool_use_id, text, self.is_error)


class _ServedResult(SentBack, tag_field="type"):
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None
    cache_control: Any = None
    caller: Any = None

    def message(self, where: str) -> Message:
        """The result as a message. Raises ApiError."""
        return _result(self.tool_use_id, _readable(depth_checked(f"{where}.content", self.content)), self.is_error)


class WebSearchResult(_ServedResult, tag="web_search_tool_result"):
    """Pages that Anthropic's service has found."""


class WebFetchResult(_ServedResult, tag="web_fetch_tool_result"):
    """A page that it has fetched."""


class CodeResult(_ServedResult, tag="code_execution_tool_result"):
    """The output of code that it has run."""


class BashCodeResult(_ServedResult, tag="bash_code_execution_tool_result"):
    """The output of a command."""


class EditorCodeResult(_ServedResult, tag="text_editor_code_execution_tool_result"):
    """The result of an edit of a file."""


class ToolSearchResult(_ServedResult, tag="tool_search_tool_result"):
    """Tools that it has found."""


class AdvisorResult(_ServedResult, tag="advisor_tool_result"):
    """The advice of another model."""


class McpResult(_ServedResult, tag="mcp_tool_result"):
    """The answer of an MCP server."""


Served = (
    WebSearchResult
    | WebFetchResult
    | CodeResult
    | BashCodeResult
    | EditorCodeResult
    | ToolSearchResult
    | AdvisorResult
    | McpResult
)
Block = Annotated[
    Written
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ServerToolUseBlock
    | McpToolUseBlock
    | ToolResultBlock
    | Served,
    TEXT_ONLY,
]


def _result(call_id: str, text: str, is_error: bool | None) -> Message:
    """A result as a message. Chat templates have no mark for errors, so the text mentions the error."""
    return {"role": "tool", "content": f"Error: {text}" if is_error else text, "tool_call_id": call_id}


def _readable(content: Any) -> str:
    """The result of another service as text. Content other than texts is JSON, without parts that only that service can read."""
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return content if isinstance(content, str) else "" if content is None else orjson.dumps(_without_secrets(content)).decode()


def _without_secrets(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_secrets(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    hidden = {"data"} if value.get("type") == "base64" else set()
    return {k: _without_secrets(v) for k, v in value.items() if k not in hidden and not str(k).startswith("encrypted_")}


# ---- messages ----------------------------------------------------------------------------------------------------------


class MessageParam(SentBack):
    """A message of a conversation. clear_at: whether an instruction only counts until the user's next message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Annotated[Any, only({}, why="an answer has the effort of the request")] = None

    def messages(self, where: str) -> list[Message]:
        """The messages for chat templates; each result of a call becomes a separate message. Raises ApiError for a block that
        its role can't have.
        """
        refuse_unsupported(self, where)
        if self.clear_at is not None and self.role != "system":
            raise bad_request(f"'{where}.clear_at' is for system messages.", f"{where}.clear_at", "invalid_value")
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        for i, block in enumerate(self.content):
            refuse_unsupported(block, f"{where}.content[{i}]")
            _check_role(block, self.role, f"{where}.content[{i}]")
        if self.role == "assistant":
            found = list(_of_assistant(self.content, where))
            count = sum(len(message.get("tool_calls", ())) for message in found)
            if count > MAX_TOOLS:
                raise bad_request(f"'{where}.content' must hold at most {MAX_TOOLS} calls, not {count}.", f"{where}.content")
            return found
        texts = [{"type": "text", "text": block.text} for block in self.content if isinstance(block, Written)]
        results = [
            block.message(f"{where}.content[{i}]") for i, block in enumerate(self.content) if isinstance(block, ToolResultBlock)
        ]
        return results + ([{"role": self.role, "content": texts}] if texts or not results else [])


def _check_role(block: Block, role: str, place: str) -> None:
    """Raise ApiError for a block that a message of this role can't have."""
    kind = str(block.__struct_config__.tag)
    if isinstance(block, TextBlock):
        return
    wanted = "user" if isinstance(block, SearchResultBlock | DocumentBlock | ToolResultBlock) else "assistant"
    if role != wanted:
        article = "a" if wanted == "user" else "an"
        message = f"'{place}': only {article} {wanted}'s message can have a {kind} block."
        raise bad_request(message, place, "invalid_value")


def _of_assistant(blocks: list[Block], where: str) -> Iterator[Message]:
    """An assistant's blocks as messages: one up to each result of a served call, and one after the results."""
    begin = 0
    for end in range(len(blocks) + 1):
        served = blocks[end] if end < len(blocks) else None
        if served is not None and not isinstance(served, Served):
            continue
        if end > begin or not blocks:
            yield _turn(blocks, range(begin, end), where)
        if served is not None:
            yield served.message(f"{where}.content[{end}]")
        begin = end + 1


def _turn(blocks: list[Block], span: range, where: str) -> Message:
    own = [(f"{where}.content[{i}]", blocks[i]) for i in span]
    message: Message = {"role": "assistant", "content": "\n".join(block.text for _, block in own if isinstance(block, TextBlock))}
    thoughts = [block.thinking for _, block in own if isinstance(block, ThinkingBlock) and block.thinking]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block.call(place) for place, block in own if isinstance(block, _CallBlock)]
    return message | ({"tool_calls": calls} if calls else {})
