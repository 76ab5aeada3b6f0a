"""Imports among benchmarks go one way: report -> tuning -> parts, serving -> common; only report makes pages and plots."""

from pathlib import Path

from support.import_graph import imports_of

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
    for module, names in imports_of(file):
        found |= {f"{module}.{name}" for name in names} if module.count(".") == 1 else {module}
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
