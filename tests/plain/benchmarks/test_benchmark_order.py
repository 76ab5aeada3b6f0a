"""Imports among benchmarks go one way: report -> tuning -> parts, serving -> common; only report makes pages and plots."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAY_IMPORT = {
    "report": {"tuning", "parts", "serving", "common"},
    "tuning": {"parts", "serving", "common"},
    "parts": {"common"},
    "serving": {"common"},
    "common": set(),
}
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Modules of benchmarks that a file imports anywhere, as folder.name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module.count(".") > 1
            found |= {node.module} if whole else {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("benchmarks.") for name in found if name.startswith("benchmarks.")}


def test_imports_go_one_way() -> None:
    for file in FILES:
        folder = file.parent.name
        for name in imported(file):
            assert (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").exists(), f"{file}: benchmarks.{name} is not there"
            assert name.partition(".")[0] in MAY_IMPORT[folder] | {folder}, f"{file} imports {name}"


def test_only_report_draws() -> None:
    drawing = {file.parent.name for file in FILES if "matplotlib" in file.read_text()}
    assert drawing == {"report"}
