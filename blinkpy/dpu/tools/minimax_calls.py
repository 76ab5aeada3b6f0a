"""MiniMax M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>."""

from blinkpy.dpu.tools.call_format import ArgumentText, CallFormat, CallText
from blinkpy.dpu.tools.output_source import OutputSource, Steps
from blinkpy.dpu.tools.tagged_call import Tags, tagged_calls

MINIMAX = Tags(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    head='<invoke name="',
    head_end='">',
    close="</invoke>",
    argument='<parameter name="',
    argument_end=('">',),
    value_close="</parameter>",
    lines=True,
)


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    return tagged_calls(source, MINIMAX)


FORMATS = (
    CallFormat(
        "minimax_m2",
        '<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE',
        parse,
        CallText(
            '<invoke name="', '">\n', "</invoke>\n", begin="<minimax:tool_call>\n", end="</minimax:tool_call>",
            arguments=ArgumentText('<parameter name="', '">', "</parameter>\n"),
        ),
        begins="<minimax:tool_call>",
        tokens=(MINIMAX.begin, MINIMAX.end),
        signs=(("minimax:tool_call",),),
        model_types=("minimax_m2",),
    ),
)  # fmt: skip
