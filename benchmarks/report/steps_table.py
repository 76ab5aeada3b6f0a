"""The table of benchmarks.parts.whole_steps, for a terminal and for a page."""

from __future__ import annotations

from typing import Any

Step = dict[str, Any]
HEAD = ("step", "tokens", "ms", "W", "J", "MHz", "TFLOP", "TFLOP/s", "of the read floor")


def title(step: Step) -> str:
    """What a step computes, in words."""
    lengths = step["prompts"]
    if step["kind"] == "decode":
        return f"decode, {rows(step['decodes'])} at {step['decode_context']:,}"
    if step["kind"] == "prompts":
        return f"{len(lengths)} prompts of {lengths[0]:,}" if len(lengths) > 1 else f"a prompt of {lengths[0]:,}"
    behind = f" behind {step['cached']:,} cached" if step["cached"] else ""
    beside = f"{rows(step['decodes'])} at {step['decode_context']:,}, " if step["decodes"] else ""
    return f"mixed: {beside}chunk of {lengths[0]:,}{behind}"


def rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def table(steps: list[Step]) -> list[str]:
    """Lines of a Markdown table, a line a step; what was not read is left empty."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for step in steps:
        words = [
            title(step),
            f"{step['tokens']:,}",
            f"{step['step_ms']:.3g}",
            f"{step['mean_w']:.0f}" if "mean_w" in step else "",
            f"{step['joules']:.3g}" if "joules" in step else "",
            f"{step['clock_mhz']:,}" if "clock_mhz" in step else "",
            f"{sum(step['tflop'].values()):.3g}",
            f"{step['tflop_per_s']:.0f}",
            f"{100 * step['share_of_floor']:.0f} %" if "share_of_floor" in step else "",
        ]
        lines.append("| " + " | ".join(words) + " |")
    return lines
