"""Writes the tables in docs/api.md again, from those of blinkpy.dpu.http: endpoints, fields, and fields without support."""

import re
from collections.abc import Sequence
from pathlib import Path

from blinkpy.dpu.http.endpoints import ENDPOINTS
from blinkpy.dpu.http.fields.anthropic_fields import AnthropicBody
from blinkpy.dpu.http.fields.body_model import Row, rows
from blinkpy.dpu.http.fields.chat_fields import ChatBody
from blinkpy.dpu.http.fields.completion_fields import CompletionBody, DetokenizeBody, TokenizeBody
from blinkpy.dpu.http.fields.response_fields import ResponseBody
from blinkpy.dpu.http.fields.shared_fields import Completing

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
COMMON, CHAT = rows(Completing), rows(ChatBody)


def own(kind: type) -> dict[str, Row]:
    """The fields of an endpoint that differ from the common ones."""
    return {name: row for name, row in rows(kind).items() if COMMON.get(name) != row}


GENERATING = {"all": COMMON, "chat": own(ChatBody), "completions": own(CompletionBody), "responses": own(ResponseBody)}
TABLES = {
    "common": COMMON,
    **{name: table for name, table in GENERATING.items() if name != "all"},
    "messages": rows(AnthropicBody),
    "tokenize": rows(TokenizeBody),
    "detokenize": rows(DetokenizeBody),
}


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table, without a last column that is empty."""
    columns = len(head) if any(row[-1] for row in rows) else len(head) - 1
    lines = ["| " + " | ".join(row[:columns]) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * columns, *lines[1:]])


def field_table(name: str) -> str:
    """Fields that have a meaning here. Fields with equal entries share a row, as do those of chats in the table of
    tokens."""
    rows: dict[tuple[str, str], list[str]] = {}
    for field, row in TABLES[name].items():
        if row.supported:
            known = name in ("tokenize", "detokenize") and CHAT.get(field) == row
            rows.setdefault(("as in chats", "") if known else (row.values, row.default), []).append(f"`{field}`")
    return table(("field", "values", "default"), [(", ".join(fields), *row) for row, fields in rows.items()])


def unsupported_table() -> str:
    """Fields without support, by their accepted values. An endpoint is named if another supports the field."""
    supported = {name for fields in GENERATING.values() for name, row in fields.items() if row.supported}
    rows: dict[str, set[str]] = {}
    for where, fields in GENERATING.items():
        for name, row in fields.items():
            if not row.supported:
                accepted = row.values.rpartition("; ")[0] or "nothing"
                rows.setdefault(accepted, set()).add(f"`{name}`" + f" of {where}" * (name in supported))
    several = [(accepted, ", ".join(sorted(rows[accepted]))) for accepted in sorted(rows) if len(rows[accepted]) > 1]
    single = sorted(f"{name} ({accepted})" for accepted, names in rows.items() for name in names if len(names) == 1)
    return table(("accepted", "fields"), [*several, ("the value in brackets", ", ".join(single))])


def endpoint_table() -> str:
    """All paths."""
    rows = [(f"`{', '.join(one.methods)} {one.path}`", "no" if one.open else "yes", one.answer) for one in ENDPOINTS]
    return table(("endpoint", "key", "answer"), rows)


def written(page: str) -> str:
    """The page with new tables, each between a comment with its name and an empty line."""
    made = {f"{name} fields": field_table(name) for name in TABLES}
    for name, text in {"endpoints": endpoint_table(), **made, "fields without support": unsupported_table()}.items():
        mark = f"<!-- {name}, by make docs -->\n"
        linked = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text).replace("|  |", "| |")
        page, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _: f"{mark}{linked}\n", page)  # noqa: B023
        if found != 1:
            raise SystemExit(f"{PAGE} must have one line {mark!r}")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
