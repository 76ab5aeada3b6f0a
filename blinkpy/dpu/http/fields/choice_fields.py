"""The field `tool_choice` of chats and of /v1/responses."""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_model import Body
from blinkpy.dpu.http.fields.tool_fields import MAX_TOOLS, Name, Tool

Mode = Literal["auto", "required"]
Word = Literal["none", "auto", "required"]


class ToolChoice(NamedTuple):
    """Whether the model may, must or must not call a function, and which."""

    mode: str = "auto"  # none, auto or required
    name: str | None = None  # the function that must be called
    allowed: tuple[str, ...] | None = None  # None: all
    custom: frozenset[str] = frozenset()  # of these names, those of custom tools

    @property
    def names(self) -> tuple[str, ...]:
        """The named tools."""
        return (self.name,) if self.name is not None else self.allowed or ()

    def allows(self, tool: str) -> bool:
        """Whether the model may call a function."""
        return self.allowed is None or tool in self.allowed


class FunctionName(Body):
    """The name of a function."""

    name: Name


class NamedFunction(Body, tag_field="type", tag="function"):
    """A function of a chat's tools."""

    function: FunctionName


class NamedCustom(Body, tag_field="type", tag="custom"):
    """A custom tool of a chat's tools, or the call of one."""

    custom: FunctionName


class ChatFunctionChoice(Body, tag_field="type", tag="function"):
    """The call of one function."""

    function: FunctionName


class AllowedTools(Body):
    """The functions that the model may call; it also sees the other functions."""

    mode: Mode
    tools: Annotated[list[NamedFunction | NamedCustom], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChatAllowedChoice(Body, tag_field="type", tag="allowed_tools"):
    """Calls of some functions."""

    allowed_tools: AllowedTools


class FlatNamedTool(FunctionName):
    """A tool of /v1/responses."""

    type: Literal["function", "custom"]


class FlatFunctionChoice(FunctionName, tag_field="type", tag="function"):
    """The call of one function, in /v1/responses."""


class FlatCustomChoice(FunctionName, tag_field="type", tag="custom"):
    """The call of one custom tool, in /v1/responses."""


class FlatAllowedChoice(Body, tag_field="type", tag="allowed_tools"):
    """Calls of some functions, in /v1/responses."""

    mode: Mode
    tools: Annotated[list[FlatNamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ChatChoice = Word | ChatFunctionChoice | NamedCustom | ChatAllowedChoice
FlatChoice = Word | FlatFunctionChoice | FlatCustomChoice | FlatAllowedChoice


def tool_choice(given: ChatChoice | FlatChoice) -> ToolChoice:
    """The choice. A function that is named twice counts once."""
    match given:
        case ChatFunctionChoice():
            return ToolChoice("required", given.function.name)
        case FlatFunctionChoice():
            return ToolChoice("required", given.name)
        case NamedCustom(custom=named):
            return ToolChoice("required", named.name, custom=frozenset((named.name,)))
        case FlatCustomChoice():
            return ToolChoice("required", given.name, custom=frozenset((given.name,)))
        case ChatAllowedChoice(allowed_tools=allowed):
            return _allowed(
                allowed.mode,
                [
                    (one.custom.name, True) if isinstance(one, NamedCustom) else (one.function.name, False)
                    for one in allowed.tools
                ],
            )
        case FlatAllowedChoice():
            return _allowed(given.mode, [(tool.name, tool.type == "custom") for tool in given.tools])
        case word:
            return ToolChoice(word)


def _allowed(mode: Mode, tools: Sequence[tuple[str, bool]]) -> ToolChoice:
    """Tools that may be called. tools: the name of each, and whether it is a custom tool."""
    custom = frozenset(name for name, is_custom in tools if is_custom)
    return ToolChoice(mode, None, tuple(dict.fromkeys(name for name, _ in tools)), custom)


def check_choice(choice: ToolChoice | None, given: Sequence[Tool]) -> None:
    """Raise ApiError if the choice does not fit the tools."""
    if choice is None:
        return
    if choice.mode == "required" and not given:
        raise bad_request("'tool_choice' requires a call, but the request has no 'tools'.", "tool_choice", "invalid_value")
    known = {tool.name: tool.format is not None for tool in given}
    for name in choice.names:
        if name not in known:
            raise bad_request(f"'tool_choice' names '{name}', which is not in 'tools'.", "tool_choice", "invalid_value")
        if known[name] != (name in choice.custom):
            kind = "custom" if known[name] else "function"
            message = f"'tool_choice' must name '{name}' with the type '{kind}', as 'tools' does."
            raise bad_request(message, "tool_choice", "invalid_value")
