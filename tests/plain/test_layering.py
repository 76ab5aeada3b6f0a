"""Imports go one way: what each part of the package may import is the table of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "blinkpy"
EVERYTHING = "everything"


def part_of(module: str) -> str:
    """The folder or the top-level module that a dotted name of the package belongs to; "" for the package itself."""
    return ".".join(module.split(".")[1:2])


def imported(file: Path) -> Iterator[str]:
    """Parts of the package that a file imports, at its top or inside of functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                yield from (part_of(name.name) for name in node.names if name.name.split(".")[0] == "blinkpy")
            case ast.ImportFrom(module="blinkpy"):
                yield from (alias.name for alias in node.names if not alias.name.startswith("_"))
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "blinkpy":
                yield part_of(module)
            case ast.ImportFrom(level=level) if level > 0:
                raise AssertionError(f"{file}: a relative import")


def imports_of_parts() -> dict[str, set[str]]:
    """What each part of the package imports of the others."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(PACKAGE.rglob("*.py")):
        part = file.relative_to(PACKAGE).with_suffix("").parts[0]
        found[part] |= set(imported(file)) - {part, ""}
    return found


def allowed_imports() -> dict[str, set[str]]:
    """The table of CONTRIBUTING.md: what each part may import."""
    allowed = {}
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if line.startswith("| `blinkpy/"):
            files, _, rule = (cell.strip() for cell in line.strip("|").split("|"))
            names = {name.removesuffix(".py") for name in re.findall(r"`(?:blinkpy/)?([\w.]+)/?`", files)}
            group = set() if len(names) == 1 else names  # parts of one row may import each other
            for name in names:
                allowed[name] = {EVERYTHING} if rule == EVERYTHING else set(re.findall(r"`(\w+)`", rule.split(";")[0])) | group
    return allowed


def test_imports_follow_the_table() -> None:
    allowed, found = allowed_imports(), imports_of_parts()
    assert allowed.keys() == found.keys() - {"__init__", "__main__"}
    for part, others in allowed.items():
        if others != {EVERYTHING}:
            assert found[part] <= others, f"{part} imports {sorted(found[part] - others)}"


def test_the_table_goes_one_way() -> None:
    """A row may import rows below it, and its own."""
    rows: list[set[str]] = []
    for part, others in allowed_imports().items():
        if rows and part in rows[-1]:
            continue
        rows.append({part} | {name for name in others if part in allowed_imports().get(name, ())})
        above = set().union(*rows[:-1])
        assert not others & above, f"{part} may import {sorted(others & above)}, which stand above it"
