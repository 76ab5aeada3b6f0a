"""Writes tables of fields again: in docs/policies.md from the comments at the fields of three classes, and in docs/operate.md
from the declarations of the keys file.
"""

import re
import typing
from collections.abc import Iterable
from pathlib import Path

from msgspec import Meta

from blinkpy.dpu.admission.keys_file import TenantTable

ROOT = Path(__file__).resolve().parents[1]
POLICIES, OPERATE = (ROOT / "docs" / f"{name}.md" for name in ("policies", "operate"))
SOURCES = {
    "RequestFields": ROOT / "blinkpy" / "scheduler" / "policies.py",
    "EngineLoad": ROOT / "blinkpy" / "dpu" / "fleet" / "engine_load.py",
    "PlacedRequest": ROOT / "blinkpy" / "dpu" / "fleet" / "placement_rules.py",
}
MARK = re.compile(r"(<!-- (\w+) fields, by make docs -->\n)(\|.*\n)*")


def markdown(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.count("|") + 1
    return f"| {head} |\n|{'---|' * columns}\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def commented(name: str, source: str) -> str:
    """The fields of a class with their comments. Raises ValueError if a field has no comment."""
    body = re.search(rf"^class {name}\b.*?:\n(.*?)(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    if body is None:
        raise ValueError(f"the source has no class {name}")
    rows = re.findall(r"^    (\w+): [^#\n]*(?:#[ ]*(.*))?$", body[1], re.MULTILINE)
    for field, comment in rows:
        if not comment:
            raise ValueError(f"{name}.{field} has no comment")
    return markdown("field | meaning", ((f"`{field}`", comment) for field, comment in rows))


def keys() -> str:
    """The fields of a tenant in the keys file, with defaults and meanings."""
    rows = []
    for field, kind in typing.get_type_hints(TenantTable, include_extras=True).items():
        extra = next(meta.extra for meta in kind.__metadata__ if isinstance(meta, Meta) and meta.extra)
        rows.append((f"`{field}`", extra["default"], extra["meaning"]))
    return markdown("field | default | meaning", rows)


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name in their mark."""
    policies = {name: commented(name, path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
    return {POLICIES: policies, OPERATE: {"keys": keys()}}


def written(page: str, tables: dict[str, str]) -> str:
    """The page with new tables. Raises ValueError if it does not have the mark of each table once."""
    if sorted(match[2] for match in MARK.finditer(page)) != sorted(tables):
        raise ValueError(f"the page must have one mark {MARK.pattern!r} for each of {', '.join(tables)}")
    return MARK.sub(lambda match: match[1] + tables[match[2]], page)


if __name__ == "__main__":
    for path, made in tables().items():
        path.write_text(written(path.read_text(encoding="utf-8"), made), encoding="utf-8")
