"""Figures and paragraphs as text: the filters of the templates."""

import textwrap

WIDTH = 130


def wrap(text: str) -> str:
    """A text as lines of a paragraph."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:z.{digits}f} %"


def word(value: float | None) -> str:
    """A number with three digits; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float, unit: str) -> str:
    """A number with two digits, or all digits of a whole number, and its unit; ratios as 3x."""
    text = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"{text}x" if unit == "x" else f"{text} {unit}"


def milliseconds(us: float) -> str:
    return f"{us / 1000:.3g}"
