"""Calls and their results in a conversation: in messages of chats, and as input items of /v1/responses."""

import json
from contextlib import suppress
from hashlib import sha256
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_errors import missing
from blinkpy.dpu.http.fields.body_model import Body, Part, SentBack, rule
from blinkpy.dpu.http.fields.tool_fields import Name, Namespace, depth_checked
from blinkpy.dpu.tools.custom_input import input_arguments

MAX_CALLED = 512
# The name in a call that comes back: models also call functions that do not exist, and the server passes those on.
CalledName = Annotated[str, Meta(min_length=1, max_length=MAX_CALLED), rule(f"1 to {MAX_CALLED} characters")]


class Called(Body):
    """The function of a call. OpenAI's client makes `parsed_arguments` from `arguments`."""

    name: CalledName
    arguments: str | dict[str, Any] | list[Any] | None = None
    parsed_arguments: Any = None


class CalledCustom(Body):
    """The custom tool of a call."""

    name: CalledName
    input: str


class Call(SentBack):
    """A call in an assistant's message: of a function, or of a custom tool."""

    function: Called | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: Any = None
    # For other servers: Gemini's signatures, and LiteLLM's copies of them.
    extra_content: Any = None
    provider_specific_fields: Any = None

    def message(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it. Raises ApiError."""
        kind = self.type or ("function" if self.custom is None else "custom")
        other = "custom" if kind == "function" else "function"
        if getattr(self, kind) is None:
            raise missing(f"{where}.{kind}")
        if getattr(self, other) is not None:
            raise bad_request(f"'{where}.{other}' can't be used in a call of type '{kind}'.", f"{where}.{other}", "invalid_value")
        if self.function is not None:
            call = _call(where + ".function", self.function.name, self.function.arguments)
        else:
            assert self.custom is not None
            call = _call(where + ".custom", self.custom.name, input_arguments(self.custom.input))
        return call if self.id is None else {"id": self.id, **call}


class CallItem(Body, tag_field="type", tag="function_call"):
    """A call as an input item of /v1/responses."""

    call_id: str
    name: CalledName
    namespace: Name | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None
    id: Any = None
    status: Any = None

    def message(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it. Raises ApiError."""
        name = self.name if self.namespace is None else Namespace(self.namespace, "").full(self.name)
        return {"id": self.call_id, **_call(where, name, self.arguments)}


class CustomCallItem(Body, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool as an input item of /v1/responses."""

    call_id: str
    name: CalledName
    input: str
    namespace: Name | None = None
    id: Any = None
    status: Any = None

    def message(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it."""
        name = self.name if self.namespace is None else Namespace(self.namespace, "").full(self.name)
        return {"id": self.call_id, **_call(where, name, input_arguments(self.input))}


class _ResultText(Part, tag_field="type"):
    text: str
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    annotations: Any = None
    logprobs: Any = None


class InputTextPart(_ResultText, tag="input_text"):
    """A text."""


class OutputTextPart(_ResultText, tag="output_text"):
    """A text that a model wrote."""


class PlainTextPart(_ResultText, tag="text"):
    """A text in the form of /v1/chat/completions."""


ItemPart = InputTextPart | OutputTextPart | PlainTextPart


class _Result(Body, tag_field="type"):
    call_id: str
    output: str | list[ItemPart]
    id: Any = None
    status: Any = None
    name: Any = None
    namespace: Any = None

    def message(self) -> dict[str, Any]:
        """The result as a message."""
        output = self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)
        return {"role": "tool", "content": output, "tool_call_id": self.call_id}


class ResultItem(_Result, tag="function_call_output"):
    """The result of a call as an input item of /v1/responses."""


class CustomResultItem(_Result, tag="custom_tool_call_output"):
    """The result of a custom tool's call."""


# ---- calls that OpenAI's service has answered ------------------------------------------------------------------------------


class ServedItem(Struct, tag_field="type", kw_only=True):
    """A call with its result, from the history of another server. Fields without a meaning for a model are not read."""

    id: str | None = None
    status: Any = None

    @property
    def called(self) -> tuple[str, Any, Any]:
        """Name, arguments and result."""
        raise NotImplementedError

    def messages(self, where: str) -> list[dict[str, Any]]:
        """The call and its result as chat templates expect them. Raises ApiError."""
        name, arguments, result = self.called
        given = arguments if isinstance(arguments, str | dict) else {}
        call_id = self.id or f"served_{sha256(where.encode()).hexdigest()[:12]}"
        content = depth_checked(where, result)
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
        return [{"id": call_id, **_call(where, name, given)}, {"role": "tool", "content": text, "tool_call_id": call_id}]


class SearchCall(ServedItem, tag="web_search_call", kw_only=True):
    """A search, or a page that was opened."""

    action: dict[str, Any] | None = None

    @property
    def called(self) -> tuple[str, Any, Any]:
        """The result is the list of sources."""
        action = dict(self.action or {})
        return "web_search", action, action.pop("sources", None)


class FileSearchCall(ServedItem, tag="file_search_call", kw_only=True):
    """A search in files."""

    queries: Any = None
    results: Any = None

    @property
    def called(self) -> tuple[str, Any, Any]:
        """The result is the list of texts."""
        return "file_search", {"queries": self.queries}, self.results


class CodeCall(ServedItem, tag="code_interpreter_call", kw_only=True):
    """Code that was run."""

    code: str | None = None
    outputs: Any = None

    @property
    def called(self) -> tuple[str, Any, Any]:
        """The result is the list of outputs."""
        return "code_interpreter", {"code": self.code}, self.outputs


class McpCall(ServedItem, tag="mcp_call", kw_only=True):
    """A call of a tool of an MCP server."""

    name: CalledName
    arguments: str | None = None
    output: Any = None
    error: Any = None

    @property
    def called(self) -> tuple[str, Any, Any]:
        """The result is the output, or the error."""
        return self.name, self.arguments, self.output if self.error is None else {"error": self.error}


class ListedTools(Struct, tag_field="type", tag="mcp_list_tools"):
    """The tools of an MCP server that OpenAI's service has listed. The model does not see them."""


def _call(where: str, name: str, given: str | dict[str, Any] | list[Any] | None) -> dict[str, Any]:
    """A call for templates, with its arguments as an object. Other arguments, such as incomplete JSON, stay text."""
    written = json.dumps(given, ensure_ascii=False) if isinstance(given, dict | list) else given or ""
    arguments: Any = written
    for _ in range(2):  # some clients write the text of an object as a string of JSON
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    arguments = {} if arguments is None else arguments
    depth_checked(f"{where}.arguments", arguments)
    return {"type": "function", "function": {"name": name, "arguments": arguments if type(arguments) is dict else written}}
