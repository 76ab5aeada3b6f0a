"""What the package knows of numba-cuda stands in one module."""

from __future__ import annotations

import ast
from pathlib import Path

from blinkpy.sources import PACKAGE

HOME = PACKAGE / "device" / "cuda" / "kernel_compiler.py"
OF_NUMBA_CUDA = ("numba.cuda", "numba_cuda")


def imports_numba_cuda(path: Path) -> bool:
    """Whether a file imports numba-cuda or a part of it, anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(f"{name}.".startswith(tuple(f"{own}." for own in OF_NUMBA_CUDA)) for name in names):
            return True
    return False


def test_one_module_imports_numba_cuda() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if imports_numba_cuda(path)] == [HOME]
