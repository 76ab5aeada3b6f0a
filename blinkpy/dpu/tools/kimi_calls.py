"""Kimi K2: calls between tags, each with an id, functions.NAME:NUMBER, and JSON."""

import re

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.json_call import NAME, stream_arguments
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps, calls_within

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = (BEGIN, END, OPEN, ARGUMENTS, CLOSE)
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,96}")


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    return calls_within(source, BEGIN, END, OPEN, _call)


def _call(source: OutputSource) -> Steps[None]:
    if not (yield from source.skip(OPEN)):
        raise NotACall
    yield from source.peek()
    written = yield from source.match(_ID)
    name = written.removeprefix("functions.").partition(":")[0]
    if not NAME.fullmatch(name):
        raise NotACall
    source.check_name(name)
    if not (yield from source.skip(ARGUMENTS)) or (yield from source.peek()) != "{":
        raise NotACall
    yield from stream_arguments(source, name)
    yield from source.skip(CLOSE)


FORMATS = (
    CallFormat(
        "kimi_k2",
        f"{OPEN}functions.NAME:0{ARGUMENTS}JSON",
        parse,
        CallText(f"{OPEN}functions.", f":0{ARGUMENTS}", CLOSE, begin=BEGIN, end=END),
        begins=re.escape(BEGIN),
        tokens=TOKENS,
        signs=((BEGIN,), (OPEN, ARGUMENTS)),
    ),
)
