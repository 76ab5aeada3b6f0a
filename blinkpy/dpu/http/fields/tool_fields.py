"""The fields about tools and templates: tools, and reasoning effort.

Chats and /v1/responses differ: /v1/responses has no `function` object around a tool's description ("flat" here), and has
namespaces and hosted searches.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import orjson
from msgspec import Meta, Struct

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_model import Body, hints, rule
from blinkpy.dpu.tools.custom_input import input_schema

MAX_TOOLS = 128  # of a request; also calls of one message
MAX_TOOLS_BYTES = 1 << 18  # of all tools as JSON
MAX_DEPTH = 32  # of containers in a tool, in the arguments of a call, in chat_template_kwargs
MAX_VALUES_BYTES = 1 << 14  # of chat_template_kwargs as JSON
MAX_NAME = 64
NO_PARAMETERS = {"type": "object", "properties": {}}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
EFFORTS: tuple[str, ...] = get_args(Effort)
# `$` alone would accept a line break after the name.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)"), rule(f"1 to {MAX_NAME} letters, digits, '_' or '-'")]


class Namespace(NamedTuple):
    """Functions that belong together. The model does not see the description."""

    name: str
    description: str

    def full(self, function: str) -> str:
        """The name that the model sees for a function of this namespace."""
        return f"{self.name}__{function}"


class Tool(NamedTuple):
    """A function that the model may call, or a custom tool, which the model sees as a function."""

    name: str  # as the model sees it
    parameters: Mapping[str, Any]
    strict: bool  # whether arguments must follow the schema `parameters`
    described: Mapping[str, Any]  # for chat templates
    namespace: Namespace | None = None
    where: str = ""  # path of the field with `parameters`
    format: Mapping[str, Any] | None = None  # of a custom tool's input, as /v1/responses shows it; None: a function

    @property
    def own_name(self) -> str:
        """Its name in its namespace."""
        return self.name if self.namespace is None else self.name.removeprefix(self.namespace.full(""))


# ---- tools -----------------------------------------------------------------------------------------------------------


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, where: str, namespace: Namespace | None = None, field: str = "parameters") -> Tool:
        """The tool. where: the path of the function; field: the name of its parameters in the request. Raises ApiError if
        the schema of the parameters does not allow an object."""
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        kinds = parameters.get("type", "object")
        if kinds != "object" and not (type(kinds) is list and "object" in kinds):
            place = f"{where}.{field}.type"
            raise bad_request(f"'{place}' must be 'object': the arguments of a call are an object.", place, "invalid_value")
        name = _full_name(self.name, where, namespace)
        described = _described(name, self.description, parameters)
        return Tool(name, parameters, self.strict is True, described, namespace, f"{where}.{field}")


def _full_name(name: str, where: str, namespace: Namespace | None) -> str:
    """The name that the model sees. Raises ApiError for a long one."""
    full = name if namespace is None else namespace.full(name)
    if len(full) > MAX_NAME:
        message = f"'{where}.name' must have at most {MAX_NAME} characters with its namespace, not {len(full)}."
        raise bad_request(message, f"{where}.name", "invalid_value")
    return full


def _described(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function for chat templates."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


Defer = bool | None  # whether a search may load the tool: without effect, as the model sees all tools
Callers = list[str] | None


def check_callers(callers: Callers, where: str) -> None:
    """Raise ApiError for a tool that only code may call."""
    if callers is not None and "direct" not in callers:
        message = f"'{where}.allowed_callers' must have \"direct\": no code runs here that could call a tool."
        raise bad_request(message, f"{where}.allowed_callers", "unsupported_parameter")


class ChatTool(Body, tag_field="type", tag="function"):
    """A tool of a chat."""

    function: Function
    defer_loading: Defer = None
    allowed_callers: Callers = None


class FlatTool(Function, tag_field="type", tag="function"):
    """A tool of /v1/responses."""

    defer_loading: Defer = None
    allowed_callers: Callers = None


_NO_LARK = hints(lark="write a regular expression, or use the format 'text'")


class PlainInput(Body, tag_field="type", tag="text"):
    """Any text."""


class InputGrammar(Body):
    """A regular expression that must match the whole input."""

    syntax: Annotated[Literal["regex"], _NO_LARK]
    definition: Annotated[str, Meta(min_length=1)]


class FlatInputGrammar(InputGrammar, tag_field="type", tag="grammar"):
    """InputGrammar in the form of /v1/responses."""


class ChatInputGrammar(Body, tag_field="type", tag="grammar"):
    """InputGrammar in the form of /v1/chat/completions."""

    grammar: InputGrammar


class ChatCustom(Body):
    """A custom tool: its input is a text."""

    name: Name
    description: str | None = None
    format: PlainInput | ChatInputGrammar | None = None

    def tool(self, where: str) -> Tool:
        """The tool at this path of the request. Raises ApiError."""
        grammar = self.format.grammar if isinstance(self.format, ChatInputGrammar) else None
        return _custom_tool(self.name, self.description, grammar, where, f"{where}.format.grammar.definition")


class ChatCustomTool(Body, tag_field="type", tag="custom"):
    """A custom tool of a chat."""

    custom: ChatCustom
    defer_loading: Defer = None
    allowed_callers: Callers = None


class CustomTool(Body, tag_field="type", tag="custom"):
    """A custom tool of /v1/responses: its input is a text."""

    name: Name
    description: str | None = None
    format: PlainInput | FlatInputGrammar | None = None
    defer_loading: Defer = None
    allowed_callers: Callers = None

    def tool(self, where: str, namespace: Namespace | None = None) -> Tool:
        """The tool at this path of the request. Raises ApiError."""
        grammar = self.format if isinstance(self.format, FlatInputGrammar) else None
        return _custom_tool(self.name, self.description, grammar, where, f"{where}.format.definition", namespace)


def _custom_tool(
    name: str,
    description: str | None,
    grammar: InputGrammar | None,
    where: str,
    definition: str,
    namespace: Namespace | None = None,
) -> Tool:
    """A custom tool, which the model sees as a function of one string. definition: the path of the regular expression."""
    full, pattern = _full_name(name, where, namespace), None if grammar is None else grammar.definition
    parameters = input_schema(pattern)
    shown = {"type": "text"} if pattern is None else {"type": "grammar", "syntax": "regex", "definition": pattern}
    described = _described(full, description, parameters)
    return Tool(full, parameters, pattern is not None, described, namespace, definition, shown)


class NamespaceTool(Body, tag_field="type", tag="namespace"):
    """Functions of one namespace."""

    name: Name
    description: str | None = None
    tools: list[FlatTool | CustomTool] | None = None


class Hosted(Struct):
    """A tool that is not a function, and that OpenAI's agents list with their functions by default. The model does not see it."""


class WebSearch(Hosted, tag_field="type", tag="web_search"):
    """A search by OpenAI's service."""


class DatedWebSearch(Hosted, tag_field="type", tag="web_search_2025_08_26"):
    """A search, by its newer name."""


class PreviewSearch(Hosted, tag_field="type", tag="web_search_preview"):
    """A search, by its older name."""


class DatedPreviewSearch(Hosted, tag_field="type", tag="web_search_preview_2025_03_11"):
    """A search, by its oldest name."""


class ImageGeneration(Hosted, tag_field="type", tag="image_generation"):
    """An image by OpenAI's service."""


class LocalShell(Hosted, tag_field="type", tag="local_shell"):
    """A shell that OpenAI's models were trained to use without a schema."""


class ToolSearch(Hosted, tag_field="type", tag="tool_search"):
    """A search for tools that are loaded later."""


class FileSearch(Hosted, tag_field="type", tag="file_search"):
    """A search in files of OpenAI's service."""


class CodeInterpreter(Hosted, tag_field="type", tag="code_interpreter"):
    """Code that OpenAI's service runs."""


class Mcp(Hosted, tag_field="type", tag="mcp"):
    """A server of tools that OpenAI's service calls."""


HostedTool = (
    WebSearch
    | DatedWebSearch
    | PreviewSearch
    | DatedPreviewSearch
    | ImageGeneration
    | LocalShell
    | ToolSearch
    | FileSearch
    | CodeInterpreter
    | Mcp
)
ChatTools = Annotated[list[ChatTool | ChatCustomTool], Meta(max_length=MAX_TOOLS), rule(f"at most {MAX_TOOLS} tools")]
FlatTools = Annotated[
    list[FlatTool | CustomTool | NamespaceTool | HostedTool],
    Meta(max_length=MAX_TOOLS),
    rule(f"at most {MAX_TOOLS} tools"),
]


def chat_tools(given: Sequence[ChatTool | ChatCustomTool]) -> tuple[Tool, ...]:
    """The tools of a chat. Raises ApiError for a broken rule that the types can't express."""
    found = []
    for i, tool in enumerate(given):
        check_callers(tool.allowed_callers, f"tools[{i}]")
        if isinstance(tool, ChatTool):
            found.append((f"tools[{i}].function", tool.function.tool(f"tools[{i}].function")))
        else:
            found.append((f"tools[{i}].custom", tool.custom.tool(f"tools[{i}].custom")))
    return distinct(found)


def flat_tools(given: Sequence[Any]) -> tuple[Tool, ...]:
    """The tools of /v1/responses, without hosted ones. Raises ApiError."""
    found: list[tuple[str, Tool]] = []
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if isinstance(tool, FlatTool | CustomTool):
            check_callers(tool.allowed_callers, where)
            found.append((where, tool.tool(where)))
        elif isinstance(tool, NamespaceTool):
            namespace = Namespace(tool.name, tool.description or "")
            for j, inner in enumerate(tool.tools or ()):
                check_callers(inner.allowed_callers, f"{where}.tools[{j}]")
                found.append((f"{where}.tools[{j}]", inner.tool(f"{where}.tools[{j}]", namespace)))
    if given and all(isinstance(tool, Hosted) for tool in given):
        message = (
            "'tools[0].type' must be 'function' or 'custom': this server has no hosted tools. Add a function, or remove the tool."
        )
        raise bad_request(message, "tools[0].type", "invalid_value")
    if len(found) > MAX_TOOLS:
        raise bad_request(f"'tools' must hold at most {MAX_TOOLS} functions, not {len(found)}.", "tools", "invalid_value")
    return distinct(found)


def distinct(found: Sequence[tuple[str, Tool]]) -> tuple[Tool, ...]:
    """The tools without their paths. found: (tool, path in the request). Raises ApiError for two tools with one name."""
    names = set[str]()
    for where, tool in found:
        if tool.name in names:
            raise bad_request(f"'tools' has two functions named '{tool.name}': rename one.", f"{where}.name", "invalid_value")
        names.add(tool.name)
    return tuple(tool for _, tool in found)


def hidden_tools(given: Sequence[Any]) -> tuple[str, ...]:
    """The types of hosted tools, which the model does not see."""
    return tuple(dict.fromkeys(str(tool.__struct_config__.tag) for tool in given if isinstance(tool, Hosted)))


def check_size(name: str, value: Any, most_bytes: int) -> None:
    """Raise ApiError for a JSON value beyond the limits of depth and size."""
    depth_checked(name, value)
    try:
        size = len(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except orjson.JSONEncodeError as error:
        raise bad_request(f"'{name}' has a number beyond 64 bits.", name, "invalid_value") from error
    if size > most_bytes:
        raise bad_request(f"'{name}' must have at most {most_bytes} bytes as JSON, not {size}.", name, "invalid_value")


def depth_checked(name: str, value: Any) -> Any:
    """The value, unless it is nested too deep. Raises ApiError."""
    if depth_of(value) > MAX_DEPTH:
        raise bad_request(f"'{name}' is nested more than {MAX_DEPTH} levels deep.", name, "invalid_value")
    return value


def depth_of(value: Any) -> int:
    """The nesting depth of containers, counted up to MAX_DEPTH + 1."""
    layer, depth = [value], 0
    while depth <= MAX_DEPTH:
        inner = [item for item in layer if type(item) in (dict, list)]
        if not inner:
            break
        depth += 1
        layer = [entry for item in inner for entry in (item.values() if type(item) is dict else item)]
    return depth
