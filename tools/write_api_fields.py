"""Writes the tables in docs/api.md again, from those of blinkpy.dpu.http: endpoints, fields, and fields without support."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from blinkpy.dpu.http.endpoints import ENDPOINTS
from blinkpy.dpu.http.fields.field import Field
from blinkpy.dpu.http.fields.request_fields import CHAT_ONLY_FIELDS, COMMON_FIELDS, COMPLETION_ONLY_FIELDS
from blinkpy.dpu.http.fields.response_fields import RESPONSE_FIELDS
from blinkpy.dpu.http.fields.token_fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
OWN = {name: row for name, row in RESPONSE_FIELDS.items() if COMMON_FIELDS.get(name) is not row}  # of /v1/responses alone
TABLES: dict[str, Mapping[str, Field]] = {
    "common": COMMON_FIELDS,
    "chat": CHAT_ONLY_FIELDS,
    "completions": COMPLETION_ONLY_FIELDS,
    "responses": OWN,
    "tokenize": TOKENIZE_FIELDS,
    "detokenize": DETOKENIZE_FIELDS,
}
GENERATING = {"all": COMMON_FIELDS, "chat": CHAT_ONLY_FIELDS, "completions": COMPLETION_ONLY_FIELDS, "responses": OWN}


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table, without a last column that is empty."""
    columns = len(head) if any(row[-1] for row in rows) else len(head) - 1
    lines = ["| " + " | ".join(row[:columns]) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * columns, *lines[1:]])


def field_table(fields: Mapping[str, Field]) -> str:
    """Fields that have a meaning here."""
    rows = [(f"`{name}`", row.values, row.default) for name, row in fields.items() if row.supported]
    return table(("field", "values", "default"), rows)


def unsupported_table() -> str:
    """Fields without support of all endpoints that generate, by name."""
    places: dict[tuple[str, str], list[str]] = {}
    for where, fields in GENERATING.items():
        for name, row in fields.items():
            if not row.supported:
                places.setdefault((name, row.values), []).append(where)
    rows = [(f"`{name}`", ", ".join(where), values) for (name, values), where in sorted(places.items())]
    return table(("field", "of", "accepted; why nothing else"), rows)


def endpoint_table() -> str:
    """All paths."""
    rows = [(f"`{one.method} {one.path}`", "no" if one.open else "yes", one.answer) for one in ENDPOINTS]
    return table(("endpoint", "key", "answer"), rows)


def written(page: str) -> str:
    """The page with its tables, each between a comment with its name and an empty line, made anew."""
    made = {f"{name} fields": field_table(fields) for name, fields in TABLES.items()}
    for name, text in {"endpoints": endpoint_table(), **made, "fields without support": unsupported_table()}.items():
        mark = f"<!-- {name}, by make docs -->\n"
        page, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _: mark + text + "\n", page)  # noqa: B023
        if found != 1:
            raise SystemExit(f"{PAGE} must have one line {mark!r}")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
