"""Harmony, the format of gpt-oss: an answer consists of messages, each with a header that names its channel, and the recipient
of a call:

<|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>

Surrogates, which no text contains, represent the format's special tokens here: a text that only spells a token is
text.
"""

import re
from typing import NamedTuple

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.output_source import Content, OutputSource, Steps

MARKS = {
    "<|start|>": "\udc01",
    "<|channel|>": "\udc02",
    "<|constrain|>": "\udc03",
    "<|message|>": "\udc04",
    "<|end|>": "\udc05",
    "<|return|>": "\udc06",
    "<|call|>": "\udc07",
}
START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = MARKS.values()
BEGINS, ENDS = (START, CHANNEL), (END, RETURN, CALL)  # of a header; of a message
FUNCTIONS = "functions."  # the tools of a request in prompts
MOST_HEADER = 512  # characters
_NAMES = re.compile("|".join(map(re.escape, MARKS)))
_MARK = re.compile(f"([{''.join(MARKS.values())}])")
# A header, or the start of a header: a role after its token, a recipient, and the text after each token.
_HEADER = re.compile(rf"(?:{START}[\w.\-]*)?\s*(?:t|to|to=[\w.\-]*)?\s*(?:[{CHANNEL}{CONSTRAIN}][\w.=\- {CHANNEL}{CONSTRAIN}]*)?")
_CHANNEL, _RECIPIENT = re.compile(rf"{CHANNEL}\s*(\w+)"), re.compile(r"\bto=([\w.\-]+)")


def marked(text: str) -> str:
    """A text with marks instead of the names of tokens."""
    return _NAMES.sub(lambda found: MARKS[found[0]], text)


def unmarked(text: str) -> str:
    """A text with the names of tokens instead of marks."""
    return _MARK.sub(lambda found: next(name for name, mark in MARKS.items() if mark == found[0]), text)


def answer_begun(prompt: str) -> str:
    """The header, with marks, of the message in which a prompt ends; "" without an open message."""
    header, found, text = prompt.rpartition("<|start|>assistant")[2].partition("<|message|>")
    return marked(header + found) if found and not _NAMES.search(text) else ""


def is_header(text: str) -> bool:
    """Whether a text with marks may be the start of a header."""
    return len(text) <= MOST_HEADER and _HEADER.fullmatch(text) is not None


class Header(NamedTuple):
    """The header of a message. tool: the called function, "" if it is not a call."""

    channel: str
    tool: str

    @property
    def reasons(self) -> bool:
        return self.channel == "analysis" and not self.tool


def header_of(text: str, known: frozenset[str], only_known: bool = False) -> Header:
    """Parse a header.

    known: the request's tools. Without tools, no message is a call. With tools, a call may name other functions,
    unless only_known. Recipients that are not functions of the client, such as gpt-oss's built-in tools, are ignored.
    """
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    given = recipient[1] if recipient is not None else ""
    name = given.removeprefix(FUNCTIONS)
    is_other = bool(known) and name != given and not only_known
    return Header(channel[1] if channel is not None else "", name if name in known or is_other else "")


class _Messages:
    """The position in an answer: in a header, in a message, or between messages, where text is content."""

    def __init__(self, source: OutputSource, known: frozenset[str]):
        self._source, self._known = source, known
        self._header: str | None = ""  # header text so far, with marks; None outside headers
        self._calls = False  # whether the message is a call
        self._arguments = False  # whether some arguments have arrived

    def read(self, text: str) -> None:
        """Parse more of the answer."""
        for i, part in enumerate(_MARK.split(text)):
            if i % 2:
                self._mark(part)
            elif part:
                self._text(part)

    def finish(self) -> None:
        """Parse the rest at the end of the answer. An incomplete header gives no text."""
        if self._header is None:
            self._end_message()
        elif not _MARK.search(self._header):
            self._refuse()

    def _mark(self, mark: str) -> None:
        if mark in (MESSAGE, CONSTRAIN):
            if self._header is not None and mark == CONSTRAIN:
                self._header += mark
            elif self._header is not None:
                self._begin_message(header_of(self._header, self._known, self._source.allowed is not None))
        elif mark == CHANNEL and self._header is not None:
            self._header += mark
        else:
            if self._header is None:
                self._end_message()
            else:
                self._refuse()
            self._header = mark if mark in BEGINS else None

    def _text(self, text: str) -> None:
        if self._header is not None:
            self._header += text
            if not is_header(self._header):
                self._refuse()
        elif self._calls:
            text = text if self._arguments else text.lstrip()
            self._arguments = self._arguments or bool(text)
            self._source.arguments(text)
        else:
            self._source.content(text)

    def _begin_message(self, header: Header) -> None:
        self._header, self._calls, self._arguments = None, bool(header.tool), False
        if header.tool:
            self._source.begin(header.tool)
        else:
            self._source.kind = self._source.reasoning if header.reasons else Content
            self._source.next_message()

    def _end_message(self) -> None:
        if self._calls and not self._arguments:
            self._source.arguments("{}")
        self._calls, self._source.kind = False, Content

    def _refuse(self) -> None:
        """Treat a text that looked like a header as content."""
        self._source.content(_MARK.sub("", self._header or ""))
        self._header = None


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    messages = _Messages(source, known)
    messages.read(source.text_here())
    while (yield from source.more()):
        messages.read(source.text_here())
    messages.finish()


FORMATS = (
    CallFormat(
        "openai",
        "harmony, the channels of gpt-oss",
        parse,
        CallText("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        signs=(("<|channel|>", "<|message|>"),),
        model_types=("gpt_oss",),
        marks=tuple(MARKS.items()),
        ends=("<|return|>", "<|call|>"),
    ),
)
