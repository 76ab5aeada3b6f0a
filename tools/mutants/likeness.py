"""Which tests are likely to be about a line: those whose text has the same rare words."""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from mutants.mutations import Mutant

WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]{2,}")  # of names in any case


def words_of(text: str) -> frozenset[str]:
    """Those of all names in it, without a plural's end."""
    return frozenset(word.lower().rstrip("s") for word in WORD.findall(text) if len(word) > 2)


class Likeness:
    """Of the functions of some files of tests. root: of their paths."""

    def __init__(self, files: Iterable[str], root: Path) -> None:
        self._words: dict[str, frozenset[str]] = {}  # of functions, by their names below the root
        for file in files:
            text = (root / file).read_text()
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._words[f"{file}::{node.name}"] = words_of(ast.get_source_segment(text, node) or "")
        having = Counter(word for words in self._words.values() for word in words)
        self._weights = {word: math.log(len(self._words) / times) for word, times in having.items()}

    def alike(self, mutant: Mutant, tests: Iterable[str]) -> list[str]:
        """These tests, without those that have no word of the mutant's line or function's name; the likeliest first."""
        own = words_of(f"{mutant.function} {mutant.before} {_line(mutant.path, mutant.line)}")
        scores = {test: self._score(own, test.partition("[")[0]) for test in tests}
        return sorted((test for test in scores if scores[test]), key=lambda test: -scores[test])

    def _score(self, own: frozenset[str], function: str) -> float:
        words = self._words.get(function, frozenset())
        return sum(self._weights[word] for word in words & own) / math.sqrt(len(words) + 1)


@lru_cache(maxsize=1 << 12)
def _line(path: Path, line: int) -> str:
    return path.read_text().splitlines()[line - 1]
