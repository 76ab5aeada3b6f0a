"""Hermes, Qwen 2.5, Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call."""

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.json_call import json_calls
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    while (yield from source.content_until((OPEN,))):
        try:
            yield from json_calls(source)
            while (yield from source.follows("{")):
                source.mark()
                yield from json_calls(source)
            yield from source.skip(CLOSE)
        except NotACall:
            source.refuse()


FORMATS = (
    CallFormat(
        "hermes",
        f"{OPEN}JSON{CLOSE}",
        parse,
        CallText(f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", between="\n"),
        begins=OPEN,
        tokens=(OPEN, CLOSE),
        signs=((OPEN,),),
        model_types=("qwen2", "qwen3", "qwen3_moe"),
    ),
)
