"""The registry of call formats: how models write tool calls. Each has a file NAME_calls.py in this folder, found by its name,
with its formats in FORMATS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from blinkpy.config import TOOL_CALL_PARSERS, ConfigError
from blinkpy.dpu.tools.output_source import OutputSource, Steps
from blinkpy.packages import modules_of

AUTO, NONE = "auto", "none"


class ArgumentText(NamedTuple):
    """The text around an argument outside of a JSON object: open, name, middle, value, close. between: the text between two
    arguments.

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
    """The text around names and arguments in the format that a model was trained on.

    An answer is `begin`; each call as `open`, name, `middle`, arguments, `close`; `between` between two calls; `end`.
    """

    open: str
    middle: str
    close: str
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: ArgumentText | None = None  # None: a JSON object


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls. name: its value for --tool-call-parser, equal to vLLM's if vLLM has the format."""

    name: str
    doc: str
    parse: Callable[[OutputSource, frozenset[str]], Steps[None]]  # given the names of the tools; consumes the whole text
    text: CallText
    tokens: tuple[str, ...] = ()  # special tokens that the parser must see
    signs: tuple[
        tuple[str, ...], ...
    ] = ()  # sets of texts; chat templates that contain all texts of a set have this format, and no other
    model_types: tuple[str, ...] = ()  # of config.json, for models whose template has no sign
    # A regular expression: the parser may find a call at each match. {names}: names of the tools. With ^, only at the start of an
    # answer.
    begins: str = ""
    id_length: int = 0  # length of an id, if templates require one; 0: OpenAI's form.
    # Only if the format covers the whole answer: (name, mark) of the special tokens that the parser sees as marks.
    marks: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()  # tokens that end an answer, in addition to those of the model's folder

    @property
    def whole(self) -> bool:
        """Whether the format covers the whole answer."""
        return bool(self.marks)


@cache
def call_formats() -> Mapping[str, CallFormat]:
    """All formats, by name. Also registers their names as values of the option."""
    modules = modules_of("blinkpy.dpu.tools", "*_calls", "FORMATS")
    formats = {entry.name: entry for module in modules.values() for entry in module.FORMATS}
    TOOL_CALL_PARSERS.update(
        {AUTO: "detected from the chat template", NONE: "no tools", **{e.name: e.doc for e in formats.values()}}
    )
    return formats


def choose_format(option: str, template: str, model_type: str) -> CallFormat | None:
    """The format of a model.

    option: --tool-call-parser; template: source of the chat template; model_type: value in config.json. If the template has
    signs of several formats, the longest sign wins.

    Raises ConfigError for an unknown option.
    """
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
