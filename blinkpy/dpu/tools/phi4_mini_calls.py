"""Phi-4-mini: functools[{"name": ..., "arguments": {...}}, ...], or the list between <|tool_call|> and <|/tool_call|>."""

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.json_call import json_calls
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps

WORD, OPEN, CLOSE = "functools", "<|tool_call|>", "<|/tool_call|>"
BEGINS = r"functools\s*\[|<\|tool_call\|>"


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    while marker := (yield from source.content_until((WORD, OPEN))):
        try:
            if marker == WORD and not (yield from source.follows("[")):
                raise NotACall
            yield from json_calls(source)
            if marker == OPEN:
                yield from source.skip(CLOSE)
        except NotACall:
            source.refuse()


def _text(begin: str, end: str) -> CallText:
    return CallText('{"name": "', '", "arguments": ', "}", begin, ", ", end)


FORMATS = (
    CallFormat(
        "phi4_mini_json",
        f"{WORD}[JSON, ...]",
        parse,
        _text(f"{WORD}[", "]"),
        begins=BEGINS,
        signs=((WORD,),),
        model_types=("phi3",),
    ),
    CallFormat(
        "phi4_mini",
        f"{OPEN}[JSON, ...]{CLOSE}",
        parse,
        _text(f"{OPEN}[", f"]{CLOSE}"),
        begins=BEGINS,
        tokens=(OPEN, CLOSE),
        signs=((OPEN,), ("<|tool|>",)),
    ),
)
