"""The registry of call formats: how models write tool calls. One file each in this folder, NAME_calls.py, found by its name, with
its formats in FORMATS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from blinkpy.config import TOOL_CALL_PARSERS, ConfigError
from blinkpy.dpu.tools.output_source import OutputSource, Steps
from blinkpy.packages import modules_of

AUTO, NONE = "auto", "none"


class ArgumentText(NamedTuple):
    """The text around an argument outside of a JSON object: open, name, middle, value, close. between: the text of two arguments.

    raw: strings are unescaped, with `quote` on both sides, or without a quote up to `close`.
    """

    open: str
    middle: str
    close: str
    between: str = ""
    raw: bool = True
    quote: str = ""


KEYWORDS = ArgumentText("", "=", "", ", ", raw=False)


class CallText(NamedTuple):
    """What stands around names and arguments where a model writes calls as it was trained to: begin, then each call as open,
    name, middle, arguments, close, with between among them, then end."""

    open: str
    middle: str
    close: str
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: ArgumentText | None = None  # None: a JSON object


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls. name: as --tool-call-parser takes it, with vLLM's name where it has one."""

    name: str
    doc: str
    parse: Callable[[OutputSource, frozenset[str]], Steps[None]]  # given the names of the tools; takes all of the text
    text: CallText
    tokens: tuple[str, ...] = ()  # which the parser must see, though they may be special
    signs: tuple[tuple[str, ...], ...] = ()  # each a set of texts that stand together in chat templates of this format alone
    model_types: tuple[str, ...] = ()  # of config.json, where a template has no sign
    # A regular expression: where it matches, the parser may find a call; {names} for those of the tools; behind ^ where none can
    # come later.
    begins: str = ""
    id_length: int = 0  # characters of an id, if the format's templates insist; 0: OpenAI's form
    # Of a format of all of an answer, reasoning and content too, whose parser takes special tokens as marks: (name, mark).
    marks: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()  # tokens that end an answer, whether the model's folder says it or not

    @property
    def whole(self) -> bool:
        """Whether it is a format of all of an answer."""
        return bool(self.marks)


@cache
def call_formats() -> Mapping[str, CallFormat]:
    """All formats, by name. Their names are known to Config afterwards."""
    modules = modules_of("blinkpy.dpu.tools", "*_calls", "FORMATS")
    formats = {entry.name: entry for module in modules.values() for entry in module.FORMATS}
    TOOL_CALL_PARSERS.update(
        {AUTO: "detected from the chat template", NONE: "no tools", **{e.name: e.doc for e in formats.values()}}
    )
    return formats


def choose_format(option: str, template: str, model_type: str) -> CallFormat | None:
    """The format of a model. option: --tool-call-parser; template: source of the chat template; model_type: of config.json. Of
    several formats with a sign in the template, the one with the longest. Raises ConfigError for an unknown option."""
    formats = call_formats()
    if option == NONE:
        return None
    if option != AUTO:
        if option not in formats:
            raise ConfigError(f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, not {option!r}")
        return formats[option]
    signs = [(sign, entry.name) for entry in formats.values() for sign in entry.signs]
    found = [(sum(map(len, sign)), name) for sign, name in signs if all(text in template for text in sign)]
    if found:
        return formats.get(max(found)[1])
    return next((entry for entry in formats.values() if model_type in entry.model_types), None)
