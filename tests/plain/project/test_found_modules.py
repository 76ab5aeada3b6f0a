"""Modules found by their file names: which are imported, and the error of a broken one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blinkpy.config import ConfigError
from blinkpy.packages import modules_of


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty package `toys`, which is gone afterwards."""
    folder = tmp_path / "toys"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "toys"]:
        del sys.modules[name]


def test_modules_are_found_by_their_file_names(toys: Path) -> None:
    for name in ("b_toy", "a_toy"):
        (toys / f"{name}.py").write_text(f"KIND = {name!r}\n")
    (toys / "toy_shop.py").write_text("raise AssertionError('not a toy')\n")
    assert {name: module.KIND for name, module in modules_of("toys", "*_toy", "KIND").items()} == {
        "a_toy": "a_toy",
        "b_toy": "b_toy",
    }
    assert list(modules_of("toys", "*_toy")) == ["a_toy", "b_toy"]
    assert modules_of("toys", "*_game") == {}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("\n\nKIND = UNKNOWN\n", r"bad_toy.py:3: import failed: NameError: name 'UNKNOWN' is not defined"),
        ("KIND = 1\nif:\n", r"bad_toy.py:2: import failed: SyntaxError"),
        ("import no_such_package\n", r"bad_toy.py:1: import failed: ModuleNotFoundError: .*no_such_package"),
        ("KIN = 1\n", r"bad_toy.py: KIND is not defined; each \*_toy.py file must define it"),
    ],
    ids=["raises", "syntax", "needs a package", "lacks the name"],
)
def test_a_broken_module_is_an_error_with_its_file_and_line(source: str, problem: str, toys: Path) -> None:
    (toys / "bad_toy.py").write_text(source)
    with pytest.raises(ConfigError, match=problem):
        modules_of("toys", "*_toy", "KIND")
