"""GLM-4.5 to 5: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

from blinkpy.dpu.tools.call_format import ArgumentText, CallFormat, CallText
from blinkpy.dpu.tools.output_source import OutputSource, Steps
from blinkpy.dpu.tools.tagged_call import Tags, tagged_calls

GLM = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    head="",
    head_end="",
    close="",
    argument="<arg_key>",
    argument_end=("</arg_key>", "<arg_value>"),
    value_close="</arg_value>",
    lines=False,
)


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    return tagged_calls(source, GLM)


FORMATS = (
    CallFormat(
        "glm45",
        "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE",
        parse,
        CallText(
            "<tool_call>", "\n", "</tool_call>", between="\n",
            arguments=ArgumentText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        begins="<tool_call>",
        tokens=(GLM.begin, GLM.end, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=(("<tool_call>", "<arg_key>"),),
        model_types=("glm4_moe",),
    ),
)  # fmt: skip
