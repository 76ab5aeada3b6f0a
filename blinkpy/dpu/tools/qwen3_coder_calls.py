"""Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>; Seed-OSS: the same
between other tags.
"""

from blinkpy.dpu.tools.call_format import ArgumentText, CallFormat, CallText
from blinkpy.dpu.tools.output_source import OutputSource, Steps
from blinkpy.dpu.tools.tagged_call import Tags, tagged_calls

CODER = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    head="<function=",
    head_end=">",
    close="</function>",
    argument="<parameter=",
    argument_end=(">",),
    value_close="</parameter>",
    lines=True,
)
SEED = CODER._replace(begin="<seed:tool_call>", end="</seed:tool_call>")


def parse_coder(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    return tagged_calls(source, CODER)


def parse_seed(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    return tagged_calls(source, SEED)


def _text(tags: Tags) -> CallText:
    arguments = ArgumentText("<parameter=", ">\n", "\n</parameter>\n")
    return CallText(f"{tags.begin}\n<function=", ">\n", f"</function>\n{tags.end}", between="\n", arguments=arguments)


FORMATS = (
    CallFormat(
        "qwen3_coder",
        "<tool_call><function=NAME><parameter=KEY>VALUE",
        parse_coder,
        _text(CODER),
        begins="<tool_call>",
        tokens=(CODER.begin, CODER.end),
        signs=(("<tool_call>", "<function="),),
    ),
    CallFormat(
        "seed_oss",
        "<seed:tool_call><function=NAME><parameter=KEY>VALUE",
        parse_seed,
        _text(SEED),
        begins="<seed:tool_call>",
        tokens=(SEED.begin, SEED.end),
        signs=(("seed:tool_call",), ("<seed:tool_call>", "<function=")),
        model_types=("seed_oss",),
    ),
)
