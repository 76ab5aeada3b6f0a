"""Chat templates render messages to the prompt's text, in a sandbox, with Hugging Face's conventions.

A template comes from the model or the operator, never from a request. It still reads clients' text, so it
runs in Jinja's immutable sandbox (no unsafe attributes, bounded `range`), and its output is bounded.

Templates rely on these conventions:
- variables: `messages`, `add_generation_prompt`, `tools`, `documents` (always none), `bos_token`, `eos_token`
  and the other special tokens
- functions: `raise_exception(text)`, `strftime_now(format)`, and `tojson` without HTML escapes
- loop controls, trimmed blocks, and `{% generation %}` marks, which only matter for training
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from blinkpy.config import ConfigError
from blinkpy.dpu.text.tokenizer import SpecialTokens, special_token
from blinkpy.model_files import TEMPLATE_BYTES, has_file, read_json, read_own_template, read_text

OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
PLAIN, WITH_TOOLS = "default", "tool_use"  # names of a model's templates; others are ignored
ADDITIONAL = "additional_chat_templates"  # folder of the named templates
TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class ChatError(ValueError):
    """The template can't render the messages. The error's text is for the client."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own spelling)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise ChatError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template.

    tokens: text of each special token, by its name, such as bos_token.
    max_characters: maximum length of the rendered text.
    with_tools: the template for chats with tools; by default this one.
    variables: names of further variables that the template reads.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], max_characters: int, with_tools: "ChatTemplate | None" = None):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, **tokens)
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.source, self.max_characters = source, max_characters
        self.with_tools = with_tools or self
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self.variables = frozenset(read) - environment.globals.keys() - OWN_VARIABLES - set(TOKENS)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation to the prompt's text.

        add_generation_prompt: end with the start of the assistant's answer.
        variables: values for `variables`.
        Raises ChatError.
        """
        parts: list[str] = []
        length = 0
        try:
            values = {
                **variables,
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "tools": tools,
                "documents": None,
            }
            for part in self._template.generate(values):
                length += len(part)
                if length > self.max_characters:
                    raise ChatError(f"the rendered messages exceed {self.max_characters} characters")
                parts.append(part)
        except ChatError:
            raise
        except Exception as error:  # a template may raise any exception
            raise ChatError(f"the chat template rejects these messages: {error}") from error
        return "".join(parts)


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any], override: str = "") -> dict[str, str]:
    """Find the sources of the templates, by name; a single template is PLAIN.

    They come from the operator's file; else from chat_template.jinja and ADDITIONAL; else from
    tokenizer_config.json or chat_template.json (of models with images, such as Mistral Small 3.1).
    Raises ConfigError.
    """
    if override:
        return {PLAIN: read_own_template(Path(override).expanduser())}
    files = {PLAIN: "chat_template.jinja", WITH_TOOLS: f"{ADDITIONAL}/{WITH_TOOLS}.jinja"}
    if has_file(folder, files[PLAIN]):
        return {name: read_text(folder, file) for name, file in files.items() if has_file(folder, file)}
    found = tokenizer_config.get("chat_template")
    found = found or read_json(folder, "chat_template.json", optional=True).get("chat_template")
    entries = found if isinstance(found, list) else [{"name": PLAIN, "template": found}] * (found is not None)
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    sources: dict[str, Any] = {name: named[name] for name in (PLAIN, WITH_TOOLS) if name in named}
    if any(not isinstance(source, str) or len(source) > TEMPLATE_BYTES for source in sources.values()):
        raise ConfigError(f"{folder}: chat_template in tokenizer_config.json or chat_template.json must be a template")
    return sources


def load_template(folder: Path, tokenizer_config: dict[str, Any], override: str, max_characters: int) -> ChatTemplate | None:
    """The model's chat template, or None if it has no template. Raises ConfigError for an invalid one."""
    sources = find_templates(folder, tokenizer_config, override)
    tokens = {name: text for name in TOKENS if (text := special_token(tokenizer_config, name)) is not None}
    with_tools = ChatTemplate(sources[WITH_TOOLS], tokens, max_characters) if WITH_TOOLS in sources else None
    return ChatTemplate(sources[PLAIN], tokens, max_characters, with_tools) if PLAIN in sources else with_tools


def chat_text(
    template: ChatTemplate,
    specials: SpecialTokens,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Render a conversation, and mark clients' texts that are spelled like special tokens. Tokenizer.encode
    with parse_special removes the marks.

    continue_final_message: the text ends with the last message's content, unfinished.
    tools, variables: as of ChatTemplate.render.
    Raises ChatError.
    """
    marked = specials.mark([dict(message) for message in messages])
    if continue_final_message:
        last, key = marked[-1], "content"
        if isinstance(last[key], list) and last[key]:
            last, key = last[key][-1], "text"
        last[key] = f"{last[key] or ''}{specials.end_mark}"
    generation = add_generation_prompt and not continue_final_message
    values = {name: specials.mark(value) for name, value in variables.items()}
    text = template.render(marked, generation, specials.mark(list(tools)) if tools else None, values)
    if continue_final_message:
        text, found, _ = text.rpartition(specials.end_mark)
        if not found:
            raise ChatError("the chat template does not mark the end of the last message, so the message can't be continued")
    return text


ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles
TOOL, CALL, RESULT, PART, LATE = (f"probe_of_a_{what}" for what in ("tool", "call", "result", "part", "late_message"))
SECOND, THOUGHT = "probe_of_a_second_call", "probe_of_a_thought"
CALL_ID = "abcdefghi"
_FUNCTION = {"name": TOOL, "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION | {"description": ""}}]
_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
_CALL = {"id": CALL_ID, "type": "function", "function": {"name": CALL, "arguments": {}}}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "content": RESULT, "tool_call_id": CALL_ID}
_PARTS = [{"type": "text", "text": PART}, {"type": "text", "text": PART}]
_BEFORE: dict[str, list[dict[str, Any]]] = {"assistant": [_QUESTION], "tool": [_QUESTION, _ANSWER]}


class TemplateProbe:
    """Finds by trial which conversations a template supports. If the template refuses a probe, support is
    assumed.

    takes_tools, takes_calls, takes_results: whether it renders tools, tool calls, and their results.
    """

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        silent = self._render([_QUESTION, _ANSWER | {"content": None}, _RESULT]) or ""
        self._no_content = None if CALL in silent and "None" not in silent else ""  # content of a message with calls only
        self.takes_tools = self._writes(TOOL, [_QUESTION])
        self.takes_calls = self._no_content is None or self._writes(CALL, [_QUESTION, _ANSWER, _RESULT])
        self.takes_results = self._writes(RESULT, [_QUESTION, _ANSWER, _RESULT])
        self._takes_parts = {role: self._reads_parts(role) for role in ROLES}
        second = _CALL | {"function": {"name": SECOND, "arguments": {}}}
        self._takes_calls_together = self._writes(SECOND, [_QUESTION, _ANSWER | {"tool_calls": [_CALL, second]}, _RESULT])
        self._wants_descriptions = self._render([_QUESTION], [{"type": "function", "function": _FUNCTION}]) is None
        thinking = [_QUESTION, _ANSWER | {"thinking": THOUGHT}, _RESULT]
        self._thinking = THOUGHT in (self._render(thinking) or "")  # its name for reasoning is `thinking`
        thinking[1] = thinking[1] | {"content": "x"}
        self._thinking_alone = (
            self._thinking and self._render(thinking) is None
        )  # with calls, it takes either reasoning or content
        late = {"role": "system", "content": LATE}
        self._takes_several = self._writes(LATE, [late | {"content": "x"}, late, _QUESTION])
        self._takes_late = self._writes(LATE, [_QUESTION, {"role": "assistant", "content": "x"}, late, _QUESTION])
        developers = self._render([late | {"role": "developer"}, _QUESTION])
        self._takes_developers = self._render([late, _QUESTION]) is None if developers is None else LATE in developers

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = _TOOLS) -> str | None:
        """The rendered conversation, or None if the template refuses it."""
        try:
            return "" if self._template is None else self._template.render(messages, tools=tools)
        except ChatError:
            return None

    def _writes(self, name: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template renders `name`, or refuses the conversation."""
        text = self._render(messages)
        return text is None or name in text

    def _reads_parts(self, role: str) -> bool:
        """Whether the template renders the parts of a role's message one by one, instead of printing the
        list.
        """
        after = [] if role in _BEFORE else [_QUESTION] * (role != "user")
        text = self._render([*_BEFORE.get(role, ()), {"role": role, "content": _PARTS, "tool_call_id": CALL_ID}, *after]) or ""
        return text.count(PART) == len(_PARTS) and "'text'" not in text and '"text"' not in text

    def described(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Tools with an empty description added if the template requires one."""
        if not self._wants_descriptions:
            return list(tools)
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adapt a conversation to the template.

        Content parts are joined unless the template reads parts, and empty content next to calls gets the
        form that it needs. Messages with several calls are split, and several leading instructions are
        joined, if it renders only the first. Developer messages become system messages if it drops or refuses
        them.
        Raises ChatError for messages that it would drop.
        """
        fitted = [self._message(message) for message in messages]
        leading = next((i for i, message in enumerate(fitted) if message["role"] not in INSTRUCTIONS), len(fitted))
        if not self._takes_late and any(message["role"] in INSTRUCTIONS for message in fitted[leading:]):
            raise ChatError("this model's chat template accepts system messages only at the beginning")
        if not self._takes_several and leading > 1:
            whole = "\n\n".join(_text(message["content"]) for message in fitted[:leading])
            fitted[:leading] = [fitted[0] | {"content": whole}]
        return fitted if self._takes_calls_together else list(self._one_by_one(fitted))

    def _message(self, given: dict[str, Any]) -> dict[str, Any]:
        content, message = given["content"], dict(given)
        if not self._takes_parts[message["role"]]:
            content = _text(content)
        message["content"] = self._no_content if not content and "tool_calls" in message else content
        if message["role"] == "developer" and not self._takes_developers:
            message["role"] = "system"
        if self._thinking and "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
            if self._thinking_alone and message["content"] and "tool_calls" in message:  # the template renders one of them
                message["thinking"] += f"\n{_text(content)}"
                message["content"] = self._no_content
        return message

    def _one_by_one(self, messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Split each message with several calls into messages with one call, each followed by its results."""
        at = 0
        while at < len(messages):
            message, at = messages[at], at + 1
            calls = message.get("tool_calls", ())
            if len(calls) < 2:
                yield message
                continue
            end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            results, at = messages[at:end], end
            known = [call.get("id") for call in calls]
            for result in results:
                if known.count(result["tool_call_id"]) != 1:
                    raise ChatError(f"tool_call_id {result['tool_call_id'][:100]!r} does not match a preceding tool call")
            for call in calls:
                yield message | {"tool_calls": [call]}
                yield from (result for result in results if result["tool_call_id"] == call.get("id"))
                message = {"role": "assistant", "content": self._no_content}


def _text(content: str | list[dict[str, str]] | None) -> str:
    """Content as one text."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
