"""Mistral: [TOOL_CALLS] before a list of {"name": ..., "arguments": {...}}; since version 11 of its tokenizer
[TOOL_CALLS]NAME[ARGS]{...} for each call."""

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.json_call import NAME, json_calls, stream_arguments
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps

OPEN, CALL_ID, ARGS = TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    while (yield from source.content_until((OPEN,))):
        try:
            if (yield from source.peek()) in ("[", "{"):
                yield from json_calls(source)
            else:
                yield from _named(source)
        except NotACall:
            source.refuse()


def _named(source: OutputSource) -> Steps[None]:
    name = yield from source.match(NAME)
    source.check_name(name)
    if (yield from source.skip(CALL_ID)):
        yield from source.match(NAME)
    yield from source.skip(ARGS)
    if (yield from source.peek()) != "{":
        raise NotACall
    yield from stream_arguments(source, name)


FORMATS = (
    CallFormat(
        "mistral",
        f"{OPEN}[JSON, ...]",
        parse,
        CallText('{"name": "', '", "arguments": ', "}", begin=f"{OPEN} [", between=", ", end="]"),
        begins=r"\[TOOL_CALLS\]",
        tokens=TOKENS,
        signs=((OPEN,),),
        model_types=("mistral", "mixtral"),
        id_length=9,
    ),
    CallFormat(
        "mistral_v11",
        f"{OPEN}NAME{ARGS}JSON",
        parse,
        CallText(OPEN, ARGS, ""),
        begins=r"\[TOOL_CALLS\]",
        tokens=TOKENS,
        signs=((OPEN, ARGS),),
        id_length=9,
    ),
)
