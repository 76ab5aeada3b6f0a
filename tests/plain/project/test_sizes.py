"""tools/sizes.py counts lines by folder, and the words of a page by who writes them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


def test_words_are_counted_by_who_writes_them(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A page of random pieces: prose with figures, examples, and what tools write."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from sizes import words_of_page

    def table(rows: int) -> str:
        return "| a | b |\n|---|---|\n" + "| `x` | 1,000 |\n" * rows

    text, expected = "", np.zeros(3, int)
    for _ in range(20):
        count = int(rng.integers(1, 9))
        text, words = (
            (text + "word, " * count + "about <!-- figure: some-name -->90 %<!-- / --> - of it.\n\n", (count + 4, 0, 0)),
            (text + "    run --it 3\n" * count + "\n", (0, 3 * count, 0)),
            (text + table(count) + "\n", (2 + 2 * count, 0, 0)),
            (text + f"<!-- fields, by make docs -->\n{table(count)}\n", (0, 0, 2 + 2 * count)),
            (
                text + f"<!-- measured: x -->\nAt last\n\n    4 it\n{table(count)}<!-- end of measured -->\n\n",
                (0, 0, 6 + 2 * count),
            ),
        )[int(rng.integers(5))]
        expected += words
    assert words_of_page("some.md", text) == tuple(expected), text
    assert words_of_page("cli.md", text) == (0, 0, expected.sum()), "a tool writes all of it"


def test_lines_and_their_changes_are_summed_by_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from sizes import rows

    now, before = Counter({"a/b": 1200, "a/c": 30, "d": 7}), Counter({"a/b": 1000, "d": 9})
    assert rows(now, None) == [("a", "1,230", ""), ("a/b", "1,200", ""), ("a/c", "30", ""), ("d", "7", "")]
    assert [change for _, _, change in rows(now, before)] == ["+230", "+200", "+30", "-2"]
