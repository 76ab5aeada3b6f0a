"""What the package's files import of each other, read from their text: at their top and inside of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from blinkpy.sources import PACKAGE

TYPING = "TYPE_CHECKING"


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imported(path: Path, modules: dict[str, Path], *, at_start: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and ast.unparse(node.test) == TYPING)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if at_start and node in later:
            continue
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name in modules)
            case ast.ImportFrom(module=str(module), level=0) if module in modules:
                below = [f"{module}.{alias.name}" for alias in node.names]
                yield from (name for name in below if name in modules)
                if any(name not in modules for name in below):
                    yield module
            case ast.ImportFrom(level=level) if level > 0:
                raise AssertionError(f"{path}: a relative import")


@lru_cache(maxsize=2)
def import_graph(*, at_start: bool = False) -> dict[str, set[str]]:
    """For each module the modules that it imports. at_start: those alone that it needs to be imported, without the imports
    inside of functions and those for type checkers."""
    modules = package_modules()
    return {name: set(_imported(path, modules, at_start=at_start)) - {name} for name, path in modules.items()}


@lru_cache(maxsize=64)
def importers_of(module: str) -> frozenset[str]:
    """The modules that import a module, directly or through others. Raises KeyError for a module that does not exist."""
    graph = import_graph()
    found, new = {module}, {module} if graph[module] is not None else set()
    while new:
        new = {name for name, imports in graph.items() if imports & new} - found
        found |= new
    return frozenset(found - {module})
