"""DeepSeek V3 and R1: calls between tags, each with its kind, its name, and a block of JSON. V3.1: with name and JSON
only."""
# ruff: noqa: RUF001 - the bars of these tags are not ASCII

from blinkpy.dpu.tools.call_format import CallFormat, CallText
from blinkpy.dpu.tools.json_call import NAME, stream_arguments
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps, calls_within

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE, BETWEEN = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
TOKENS = (BEGIN, END, OPEN, CLOSE, BETWEEN)
KIND, FENCE, FENCE_END = f"function{BETWEEN}", "```json", "```"


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    """Parse either form."""
    return calls_within(source, BEGIN, END, OPEN, _call)


def _call(source: OutputSource) -> Steps[None]:
    if not (yield from source.skip(OPEN)):
        raise NotACall
    yield from source.skip(KIND)
    yield from source.peek()
    name = yield from source.match(NAME)
    source.check_name(name)
    yield from source.skip(BETWEEN)
    fenced = yield from source.skip(FENCE)
    if (yield from source.peek()) != "{":
        raise NotACall
    whole = yield from stream_arguments(source, name)
    if whole and fenced:
        yield from source.skip(FENCE_END)
    yield from source.skip(CLOSE)


FORMATS = (
    CallFormat(
        "deepseek_v3",
        f"{OPEN}function{BETWEEN}NAME, JSON",
        parse,
        CallText(f"{OPEN}{KIND}", f"\n{FENCE}\n", f"\n{FENCE_END}{CLOSE}", begin=BEGIN, between="\n", end=END),
        begins=BEGIN,
        tokens=TOKENS,
        signs=(("tool▁calls▁begin", FENCE),),
        model_types=("deepseek_v3",),
    ),
    CallFormat(
        "deepseek_v31",
        f"{OPEN}NAME{BETWEEN}JSON",
        parse,
        CallText(OPEN, BETWEEN, CLOSE, begin=BEGIN, end=END),
        begins=BEGIN,
        tokens=TOKENS,
        signs=(("tool▁calls▁begin",),),
    ),
)
