"""Llama 3.1 and later: the answer is {"name": ..., "parameters": {...}}, or several of them separated by semicolons,
optionally after <|python_tag|>. Nothing marks a call, so it must name one of the request's tools."""

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.json_call import json_calls
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps

TAG = "<|python_tag|>"


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    source.mark()
    marker = ""
    while True:
        try:
            if not marker:
                yield from source.skip(TAG)
            yield from json_calls(source, known)
            source.mark()
            for separator in (";", ",", TAG):
                yield from source.skip(separator)
            if not (yield from source.follows("{")):
                raise NotACall
            marker = ";"
        except NotACall:
            source.refuse()
            marker = yield from source.content_until((TAG,))
            if not marker:
                return


FORMATS = (
    CallFormat(
        "llama3_json",
        '{"name": NAME, "parameters": JSON}',
        parse,
        CallText('{"name": "', '", "parameters": ', "}", between="; "),
        begins=r"^\s*[\[{]|<\|python_tag\|>",
        tokens=(TAG,),
        signs=((TAG,), ('"parameters": ', "ipython"), ('{"name": function name, "parameters"',)),
        model_types=("llama",),
    ),
)
