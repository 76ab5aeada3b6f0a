"""Tools of Anthropic's API: functions of the client, and tools whose schemas Anthropic has published.

The schemas follow the documentation and the types of Anthropic's client.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_model import Body, hints, rule
from blinkpy.dpu.http.fields.tool_fields import MAX_TOOLS, Callers, Defer, Function, Name, Tool, check_callers, distinct

# Tools that Anthropic's service runs by itself. Agents list them with their own; the model does not see them.
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "advisor_", "mcp_toolset")
_SCREENS = (
    "computer_20241022",
    "computer_20250124",
    "computer_20251124",
    "computer_toolset_20260801",
    "browser_toolset_20260801",
)


class _Tool(Body, tag_field="type"):
    name: Name
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: list[Any] | None = None
    defer_loading: Defer = None
    allowed_callers: Callers = None

    @property
    def about(self) -> tuple[str | None, dict[str, Any]]:
        """The description, and the schema of the input."""
        raise NotImplementedError

    def tool(self, where: str) -> Tool:
        """The tool. Raises ApiError for a schema that does not describe an object."""
        description, schema = self.about
        if self.input_examples:
            schema = schema | {"examples": self.input_examples}
        function = Function(name=self.name, description=description, parameters=schema, strict=self.strict)
        return function.tool(where, field="input_schema")


class CustomTool(_Tool, tag="custom", kw_only=True):
    """A function that the model may call."""

    input_schema: dict[str, Any]
    description: str | None = None

    @property
    def about(self) -> tuple[str | None, dict[str, Any]]:
        """As the client gives them."""
        return self.description, {key: value for key, value in self.input_schema.items() if value is not None}


# ---- tools with known schemas ------------------------------------------------------------------------------------------


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2, "description":
          "for view: the first and the last line, from 1; a last line of -1 is the end of the file"}  # fmt: skip
_EDITS = {
    "path": _text("absolute path of a file or folder"),
    "view_range": _LINES,
    "file_text": _text("for create: the content of the new file"),
    "old_str": _text("for str_replace: the text to replace, which must occur exactly once"),
    "new_str": _text("for str_replace: the new text"),
    "insert_line": {
        "type": "integer",
        "description": "for insert: the line after which the text is inserted; 0 is the beginning",
    },
}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


class _Bash(_Tool):
    @property
    def about(self) -> tuple[str | None, dict[str, Any]]:
        """A command, or a restart."""
        restart = {"type": "boolean", "description": "true: restart the shell, without a command"}
        schema = _object((), command=_text("the command to run"), restart=restart)
        return "Run a command in a bash shell that keeps its state between calls.", schema


class Bash2024(_Bash, tag="bash_20241022"):
    """A shell of the client."""


class Bash(_Bash, tag="bash_20250124"):
    """A shell of the client."""


class _Editor(_Tool):
    max_characters: Annotated[int, Meta(ge=1), rule("at least 1")] | None = None

    @property
    def about(self) -> tuple[str | None, dict[str, Any]]:
        """Commands for files. Later versions can't undo, and have a separate field for inserted text."""
        old = isinstance(self, Editor2024 | EditorJanuary)
        edits = _EDITS | ({"new_str": _text("for str_replace and insert: the new text")} if old else
                          {"insert_text": _text("for insert: the text to insert")})  # fmt: skip
        commands = ("view", "create", "str_replace", "insert", *(("undo_edit",) if old else ()))
        said = "View, create and edit text files."
        if self.max_characters is not None:
            said += f" A view shows at most {self.max_characters} characters."
        return said, _object(("command", "path"), command=_commands(*commands), **edits)


class Editor2024(_Editor, tag="text_editor_20241022"):
    """An editor of the client."""


class EditorJanuary(_Editor, tag="text_editor_20250124"):
    """An editor of the client."""


class EditorApril(_Editor, tag="text_editor_20250429"):
    """An editor of the client."""


class EditorJuly(_Editor, tag="text_editor_20250728"):
    """An editor of the client."""


class Memory(_Tool, tag="memory_20250818"):
    """Files of the client that outlive a conversation."""

    @property
    def about(self) -> tuple[str | None, dict[str, Any]]:
        """Commands for the files."""
        renames = {"old_path": _text("for rename: the present path"), "new_path": _text("for rename: the new path")}
        edits = _EDITS | {"path": _text("path below /memories; for all commands but rename")}
        commands = _commands("view", "create", "str_replace", "insert", "delete", "rename")
        said = "Notes in the folder /memories, which outlive this conversation. View the folder before a task, and note progress."
        schema = _object(("command",), command=commands, **edits, insert_text=_text("for insert: the text to insert"), **renames)
        return said, schema


AnthropicTools = Annotated[
    list[
        Annotated[
            CustomTool | Bash2024 | Bash | Editor2024 | EditorJanuary | EditorApril | EditorJuly | Memory,
            hints(**dict.fromkeys(_SCREENS, "its results are images, and models accept text only")),
        ]
    ],
    Meta(max_length=MAX_TOOLS),
    rule(f"at most {MAX_TOOLS} tools"),
]


def own_tools(given: Any) -> tuple[Any, tuple[str, ...]]:
    """The field `tools` without the tools that Anthropic's service runs itself, and the kinds of these tools. A tool without a
    type is a custom one. Raises ApiError if no other tool is left.
    """
    if type(given) is not list:
        return given, ()
    own = [{**tool, "type": tool.get("type") or "custom"} if type(tool) is dict else tool for tool in given if not _hosted(tool)]
    if given and not own:
        message = "'tools[0].type' must be 'custom': this server has no hosted tools. Add a tool with 'input_schema'."
        raise bad_request(message, "tools[0].type", "invalid_value")
    return own, tuple(dict.fromkeys(filter(None, map(_hosted, given))))


def _hosted(tool: Any) -> str:
    """The kind of a tool that Anthropic's service runs itself, else ""."""
    kind = tool.get("type") if type(tool) is dict else None
    return next((start.rstrip("_") for start in HOSTED if type(kind) is str and kind.startswith(start)), "")


def read_tools(given: Sequence[Any]) -> tuple[Tool, ...]:
    """The tools. Raises ApiError for a broken rule that the types do not hold."""
    found = []
    for i, tool in enumerate(given):
        check_callers(tool.allowed_callers, f"tools[{i}]")
        found.append((f"tools[{i}]", tool.tool(f"tools[{i}]")))
    return distinct(found)
