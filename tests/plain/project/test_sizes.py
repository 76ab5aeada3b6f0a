"""tools/sizes.py counts lines that hold code, and their tokens."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = '''"""A module.

Of three lines of text."""

import os  # a comment


def f(a):
    """Text."""
    # another comment
    return """
    two lines""" + a[
        0
    ]
'''


def test_code_is_counted_and_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from sizes import size_of, sizes

    assert size_of(SOURCE) == (6, 15)
    assert size_of(SOURCE.replace("import os", "import os; import io"))[0] == 6, "packing does not pay"
    found = sizes({"a/b/c.py": SOURCE, "a/d.py": "x = 1\n", "e.py": "\n"})
    assert {name: tuple(size.values()) for name, size in found.items()} == {
        "a": (2, 7, 18), "a/b": (1, 6, 15), "e.py": (1, 0, 0),
    }  # fmt: skip
