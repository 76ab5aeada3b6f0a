"""Imports go one way: the permitted imports of each part are the table of CONTRIBUTING.md."""

import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.import_graph import import_graph, imports_of, package_modules

ROOT = Path(__file__).parents[3]
EVERYTHING = "everything"
ROOT_MODULES = {"blinkpy", "blinkpy.__main__"}  # they lead to commands and to the offline API
MOST_LINES = 500  # of a file; 80 to 400 are usual


def table() -> list[tuple[list[str], set[str]]]:
    """The rows of CONTRIBUTING.md: parts, as dotted names below the package, and their permitted imports."""
    rows = []
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if line.startswith("| `blinkpy/"):
            files, _, rule = (cell.strip() for cell in line.strip("|").split("|"))
            found = re.findall(r"`(?:blinkpy/)?([\w./]+)`", files)
            names = [name.removesuffix(".py").strip("/").replace("/", ".") for name in found]
            rows.append((names, {EVERYTHING} if rule == EVERYTHING else set(re.findall(r"`([\w.]+)`", rule))))
    return rows


def part_of(module: str, parts: list[str]) -> str:
    """The innermost part that a module belongs to. Raises ValueError if the table has no row."""
    name = module.removeprefix("blinkpy.")
    matching = [part for part in parts if name == part or name.startswith(f"{part}.")]
    if not matching:
        raise ValueError(f"CONTRIBUTING.md's table has no row for {module}")
    return max(matching, key=len)


def test_imports_follow_the_table() -> None:
    rows = table()
    parts = [name for names, _ in rows for name in names]
    for module, imports in import_graph().items():
        if module in ROOT_MODULES:
            continue
        own = part_of(module, parts)
        (names, allowed), *_ = [row for row in rows if own in row[0]]
        if EVERYTHING not in allowed:
            found = {part_of(name, parts) for name in imports - ROOT_MODULES} | {"blinkpy" for name in imports & ROOT_MODULES}
            assert found <= allowed | set(names), f"{module} imports {sorted(found - allowed - set(names))}"


def test_the_table_goes_one_way() -> None:
    """A row may import rows below it, and its own."""
    above: set[str] = set()
    for names, allowed in table():
        assert not allowed & (above | set(names)), f"{names} may import {sorted(allowed & above)}, which stand above"
        above |= set(names)
    rows = [name for names, _ in table() for name in names]
    assert len(rows) == len(set(rows))


def test_every_part_of_the_package_has_a_row() -> None:
    parts = {name.split(".")[0] for names, _ in table() for name in names}
    assert parts == {module.split(".")[1] for module in package_modules() if module not in ROOT_MODULES}


def test_no_circle_of_files() -> None:
    try:
        TopologicalSorter({name: imports - ROOT_MODULES for name, imports in import_graph().items()}).prepare()
    except CycleError as error:
        pytest.fail(f"files that import each other: {' <- '.join(error.args[1])}")


def test_file_names_differ_and_files_are_short() -> None:
    files = [path for path in package_modules().values() if path.stem not in ("__init__", "__main__")]
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []
    long = [path.name for path in files if len(path.read_text().splitlines()) > MOST_LINES]
    assert long == [], "a file has 80 to 400 lines: split these by subject"


def test_only_the_fleet_imports_ray() -> None:
    importers = {
        name for name, path in package_modules().items() for module, _ in imports_of(path) if module.split(".")[0] == "ray"
    }
    assert importers == {f"blinkpy.ray_fleet.{name}" for name in ("actors", "ray_cluster")}


def test_one_module_imports_numba_cuda() -> None:
    """Only this module depends on it."""

    def imports_it(path: Path) -> bool:
        names = [f"{name}." for module, below in imports_of(path) for name in (module, *(f"{module}.{n}" for n in below))]
        return any(name.startswith(("numba.cuda.", "numba_cuda.")) for name in names)

    assert [name for name, path in package_modules().items() if imports_it(path)] == ["blinkpy.device.cuda.kernel_compiler"]
