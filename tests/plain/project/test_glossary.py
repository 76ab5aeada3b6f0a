"""docs/glossary.md: no file uses a word of its last column. Exceptions stand in glossary_exceptions.txt and may only shrink."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GLOSSARY = ROOT / "docs" / "glossary.md"
EXCEPTIONS = Path(__file__).with_name("glossary_exceptions.txt")
FOLDERS = ("blinkpy", "tests", "benchmarks", "tools", "docs")
EXEMPT = {GLOSSARY, Path(__file__)}
"""They name the words. CHANGELOG.md is exempt, too: it keeps the words of its time."""


def forbidden_words(page: str) -> dict[str, re.Pattern[str]]:
    """The last column's words, each with a pattern that finds it: `identifier`, with * for any letters, or "phrase"."""
    cells = " ".join(re.findall(r"^\|.*\|([^|\n]*)\|$", page, re.MULTILINE))
    found = {}
    for identifier, phrase in re.findall(r'`([\w*]+)`|"([^"]+)"', cells):
        if identifier:
            found[identifier] = re.compile(r"(?<!\w)" + identifier.replace("*", r"\w*") + r"(?!\w)")
        else:
            found[phrase] = re.compile(r"\b" + phrase.replace(" ", r"[\s#]+") + r"\b", re.IGNORECASE)
    return found


def words_in(text: str, words: dict[str, re.Pattern[str]]) -> set[str]:
    small = text.lower()  # most words are in no file: a plain search is quick
    return {word for word, pattern in words.items() if word.lower().strip("*").split()[0] in small and pattern.search(text)}


@cache
def forbidden_words_in_use() -> dict[str, set[str]]:
    """Relative path -> its forbidden words, of every source file and page that has some."""
    words = forbidden_words(GLOSSARY.read_text())
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    found = {
        str(path.relative_to(ROOT)): words_in(path.read_text(), words)
        for path in files
        if path not in EXEMPT and ROOT / "benchmarks" / "results" not in path.parents  # what was measured then
    }
    return {path: of_file for path, of_file in sorted(found.items()) if of_file}


def exceptions() -> dict[str, set[str]]:
    """Lines of `path: word, word`."""
    rows = (line.partition(": ") for line in EXCEPTIONS.read_text().splitlines() if line)
    return {path: set(words.split(", ")) for path, _, words in rows}


def write_exceptions() -> None:
    """Make the list anew, after words were added to the glossary: python -c 'import test_glossary as t; t.write_exceptions()'"""
    EXCEPTIONS.write_text("".join(f"{path}: {', '.join(sorted(words))}\n" for path, words in forbidden_words_in_use().items()))


def test_no_file_uses_a_forbidden_word() -> None:
    allowed = exceptions()
    news = {path: words - allowed.get(path, set()) for path, words in forbidden_words_in_use().items()}
    assert {path: words for path, words in news.items() if words} == {}, "see docs/glossary.md for the words to use"


def test_every_exception_is_needed() -> None:
    used = forbidden_words_in_use()
    idle = {path: words - used.get(path, set()) for path, words in exceptions().items()}
    assert {path: words for path, words in idle.items() if words} == {}, f"remove them from {EXCEPTIONS.name}"


def test_no_term_is_forbidden() -> None:
    page = GLOSSARY.read_text()
    terms = [term for row in re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]*\|$", page, re.MULTILINE) for term in row.split(", ")]
    assert len(terms) > 80
    assert len(set(terms) - {"term"}) == sum(term != "term" for term in terms), "a term is listed twice"
    words = forbidden_words(page)
    assert words_in("\n".join(terms), words) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def foresee(state):", {"foresee"}),
        ("rows = foreseen + do_foresee()", set()),
        ("x = my_short_ways", {"*short_way*"}),
        ("# takes the\n    # Short way", {"short way"}),
        ("state.short, way", set()),
    ],
)
def test_words_are_found_whole(text: str, found: set[str]) -> None:
    assert words_in(text, forbidden_words('| a | b | `foresee`, `*short_way*`, "short way" |')) == found
