"""Writes the tables of fields in docs/api.md again, from the rows of blinkpy.dpu.http.request_fields."""

import re
from pathlib import Path

from blinkpy.dpu.http.request_fields import CHAT_ONLY_FIELDS, COMMON_FIELDS, COMPLETION_ONLY_FIELDS, Field

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
TABLES = {"common": COMMON_FIELDS, "chat": CHAT_ONLY_FIELDS, "completions": COMPLETION_ONLY_FIELDS}


def table(fields: dict[str, Field]) -> str:
    """A Markdown table; the column of defaults where there are any."""
    rows = [("field", "values", "default"), *((f"`{name}`", f.values, f.default) for name, f in fields.items())]
    columns = 3 if any(default for _, _, default in rows[1:]) else 2
    lines = ["| " + " | ".join(row[:columns]) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * columns, *lines[1:]])


def written(page: str) -> str:
    """The page with its tables, each between a comment with its name and an empty line, made anew."""
    for name, fields in TABLES.items():
        mark = f"<!-- {name} fields, by make docs -->\n"
        page, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _: mark + table(fields) + "\n", page)  # noqa: B023
        if found != 1:
            raise SystemExit(f"{PAGE} must have one line {mark!r}")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
