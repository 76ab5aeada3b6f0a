"""Writes the table of keywords in docs/structured-output.md again, from blinkpy.dpu.grammar.schema_keywords."""

import re
from collections.abc import Iterable
from pathlib import Path

from blinkpy.dpu.grammar.schema_keywords import ANNOTATIONS, KEYWORDS, PLACES, REFERENCE, REFUSED

PAGE = Path(__file__).parents[1] / "docs" / "structured-output.md"
MARK = "<!-- keywords, by make docs -->\n"


def table() -> str:
    """A Markdown table of all keywords that are known."""
    remarks = dict.fromkeys(["", *(keyword.remark for keyword in KEYWORDS.values())])
    rows = [(_list(name for name in KEYWORDS if KEYWORDS[name].remark == remark), remark or "supported") for remark in remarks]
    rows += [(_list((REFERENCE, *PLACES)), "supported within the schema; recursion is unrolled")]
    rows += [(_list(ANNOTATIONS), "no effect; the same holds for unknown keywords, unless they look like a misspelt keyword")]
    reasons = dict.fromkeys(REFUSED.values())
    rows += [(_list(name for name, why in REFUSED.items() if why == reason), f"**refused**: {reason}") for reason in reasons]
    return "".join(f"| {names} | {text} |\n" for names, text in [("keyword", ""), ("---", "---"), *rows])


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(page: str) -> str:
    """The page with a new table."""
    page, found = re.subn(re.escape(MARK) + r"(\|.*\n)*", lambda _: MARK + table(), page)
    if found != 1:
        raise SystemExit(f"{PAGE} must have one line {MARK!r}")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
