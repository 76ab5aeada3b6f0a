"""Chat templates: render messages to the prompt's text, in a sandbox, with Hugging Face's conventions.

A template comes from the model or the operator, never from a request. It still reads clients' text, so it
runs in Jinja's immutable sandbox (no unsafe attributes, bounded `range`), and its output is bounded.

Templates rely on these conventions:
- variables: `messages`, `add_generation_prompt`, `tools`, `documents` (always none), `bos_token`, `eos_token`
  and the other special tokens
- functions: `raise_exception(text)`, `strftime_now(format)`, `dict`, `namespace`, and `tojson` without HTML escapes
- loop controls, trimmed blocks, and `{% generation %}` blocks, which mark answers for training
"""

import json
from collections.abc import Callable, Mapping, Sequence
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
import jinja2.utils

from blinkpy.config import ConfigError
from blinkpy.dpu.text.tokenizer import SpecialTokens
from blinkpy.dpu.text.tokenizer_files import NAMED, special_tokens
from blinkpy.model_files import TEMPLATE_BYTES, has_file, read_json, read_own_template, read_text

OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
PLAIN, WITH_TOOLS = "default", "tool_use"  # names of a model's templates; others are ignored
ADDITIONAL = "additional_chat_templates"  # folder of the named templates


class ChatError(ValueError):
    """The template can't render the messages. The error's text is for the client."""


class TemplateRefusalError(ChatError):
    """The template itself raises an error for these messages."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} renders its content unchanged. As in transformers, it is a separate block:
    variables that it sets are not visible after it.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja's own spelling)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without names that begin with an underscore, as in transformers."""

    def __init__(*given: Any, **attributes: Any) -> None:
        own, *values = given
        found = dict(*values, **attributes)
        for name in found:
            _require_public(name)
        jinja2.utils.Namespace.__init__(own, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have the attribute {name[:200]!r}")


class _Dict:
    """`dict` without the other attributes of Python's type, as in transformers."""

    def __call__(self, *values: Any, **items: Any) -> dict[Any, Any]:
        return dict(*values, **items)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


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
        environment.globals |= {"dict": _Dict(), "namespace": _Namespace}
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.source, self.max_characters = source, max_characters
        self.with_tools = with_tools or self
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self.variables = frozenset(read) - environment.globals.keys() - OWN_VARIABLES - set(NAMED)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:  # {% break %} outside of a loop
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
            raise TemplateRefusalError(f"the chat template rejects these messages: {error}") from error
        return "".join(parts)


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any], override: str = "") -> dict[str, str]:
    """Find the sources of the templates, by name; a single template is PLAIN.

    They come from the operator's file; else from chat_template.jinja and ADDITIONAL; else from
    tokenizer_config.json or chat_template.json (of models with images, such as Mistral Small 3.1). Without
    chat_template.jinja, a template of ADDITIONAL replaces another template of that name. Raises ConfigError.
    """
    if override:
        return {PLAIN: read_own_template(Path(override).expanduser())}
    files = {PLAIN: "chat_template.jinja", WITH_TOOLS: f"{ADDITIONAL}/{WITH_TOOLS}.jinja"}
    own = {name: read_text(folder, file) for name, file in files.items() if has_file(folder, file)}
    if PLAIN in own:
        return own
    found = tokenizer_config.get("chat_template")
    found = found or read_json(folder, "chat_template.json", optional=True).get("chat_template")
    entries = found if isinstance(found, list) else [{"name": PLAIN, "template": found}] * (found is not None)
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if isinstance(found, dict):
        named = found
    sources: dict[str, Any] = {name: named[name] for name in (PLAIN, WITH_TOOLS) if name in named}
    if any(not isinstance(source, str) or len(source) > TEMPLATE_BYTES for source in sources.values()):
        raise ConfigError(f"{folder}: chat_template in tokenizer_config.json or chat_template.json must be a template")
    return {**sources, **own}


def load_template(folder: Path, tokenizer_config: dict[str, Any], override: str, max_characters: int) -> ChatTemplate | None:
    """The model's chat template, or None if it has no template. Raises ConfigError for an invalid one."""
    sources = find_templates(folder, tokenizer_config, override)
    tokens = special_tokens(tokenizer_config)
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
    tools, variables: see ChatTemplate.render.
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
