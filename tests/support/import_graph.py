"""The imports between the package's files, read from their text."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from blinkpy.sources import PACKAGE


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each import of a file, at its top or inside of a function: the module, and the names imported from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                yield from ((alias.name, []) for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module, [alias.name for alias in node.names]
            case ast.ImportFrom():
                raise AssertionError(f"{path}: a relative import")


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for module, names in imports_of(path):
        below = {f"{module}.{name}" for name in names}
        yield from below & modules.keys()
        if module in modules and (not names or below - modules.keys()):
            yield module


@cache
def import_graph() -> dict[str, set[str]]:
    """For each module the modules that it imports."""
    modules = package_modules()
    return {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}


@cache
def importers_of(module: str) -> frozenset[str]:
    """The modules that import a module, directly or through others. Raises KeyError for a module that does not exist."""
    graph = import_graph()
    found, new = {module}, {module} if graph[module] is not None else set()
    while new:
        new = {name for name, imports in graph.items() if imports & new} - found
        found |= new
    return frozenset(found - {module})
