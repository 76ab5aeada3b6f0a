"""Check the prose of pages, error texts, help texts, docstrings and comments for sentences that are hard to read.

    python tools/prose.py [FILE ...]        print each finding: file, line, rule, sentence
    python tools/prose.py --write           lower the counts in tests/plain/project/prose_counts.txt; they never rise
    python tools/prose.py --words           count the words of docs/ that are written by hand

The rules are in prose_rules.toml.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "tests" / "plain" / "project" / "prose_counts.txt"
GENERATED = ("cli", "messages")  # pages of docs/ that are generated as a whole
MOST_WORDS = 30
MOST_THATS = 2
# Strings of these sources are data: names of bugs, templates, texts to compare, texts to train on.
WITH_OTHER_STRINGS = ("tests/", "benchmarks/", "tools/demo_corpus.py")

FILE = tomllib.loads(Path(__file__).with_name("prose_rules.toml").read_text())
PERSON = "".join(f"(?<!{person} )" for person in FILE["words"]["persons"].split())
RULES = [(re.compile(text.replace("PERSON", PERSON), re.IGNORECASE), hint) for text, hint in FILE["clumsy"].items()]
KNOWN = frozenset(FILE["words"]["known"].split())
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ABBREVIATION = re.compile(r"(?<![\w./`$<-])([A-Z]{2,6})s?(?![\w/`$>_-]|\.\w|\()")


class Finding(NamedTuple):
    path: str
    line: int
    rule: str
    sentence: str


def plain(text: str) -> str:
    """Markdown's inline marks removed; code becomes one word."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"``?[^`]+`?`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*?|\s+", lambda found: " " if found[0].isspace() else "", text).strip()


def sentences(block: str) -> Iterator[str]:
    yield from (found for found in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)\"']?\s+", plain(block)) if found)


def blocks_of_page(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, item and table cell; no headings, examples or comments."""
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    fenced, begin, lines = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        example = fenced or fence or (line.startswith("    ") and not lines)
        fresh = example or not line.strip() or line.startswith(("|", "#")) or re.match(r"\s*([-*]|\d+\.) ", line)
        if fresh and lines:
            yield begin, " ".join(lines)
            lines = []
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            yield from ((number, cell) for cell in cells if re.search(r"[A-Za-z]", cell))
        elif line.strip() and not example and not line.startswith("#"):
            begin = begin if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def text_of(node: ast.AST) -> str:
    """The words of a string, an f-string, or several of them added; values become `code`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return "`x`"


def is_prose(text: str) -> bool:
    """Whether a string has five words or more, and is neither code nor a long list of words."""
    words = len(re.findall(r"[A-Za-z]{2,}", text))
    return (
        words >= 5 and not re.search(r";$", text, re.MULTILINE) and (words <= 30 or re.search(r"[.,:](\s|$)", text) is not None)
    )


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """The nodes of all docstrings."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and node.body)
    return {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}


def blocks_of_source(source: str, strings: bool = True) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, comment, and, with `strings`, string of five words or more; no indented examples."""
    tree = ast.parse(source)
    seen: set[ast.AST] = set()
    wanted: Iterable[ast.AST] = ast.walk(tree) if strings else docstrings(tree)
    for node in wanted:  # from the outside in: an f-string comes before its parts
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in seen:
            seen.update(ast.walk(node))
            text = inspect.cleandoc(text_of(node))
            if is_prose(text):
                parts = re.split(r"\n\s*\n|\n(?=\s*(?:- |\w+: ))", text)
                yield from ((node.lineno, part) for part in parts if not re.fullmatch(r"(    .*\n?)+", part))
    begin, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (type|noqa|mypy|ruff)\b|#!", token.string):
            if lines and (token.start[0] != last + 1 or token.line.lstrip()[0] != "#"):  # a whole line continues a comment
                yield begin, " ".join(lines)
                lines = []
            begin, last = (begin if lines else token.start[0]), token.start[0]
            lines.append(token.string.lstrip("# "))
    yield begin, " ".join(lines)


def faults_of(sentence: str) -> Iterator[str]:
    parts = re.split(r": |; ", sentence) if re.search(r": .*; .*; ", sentence) else [sentence]  # items of a list count alone
    if (words := max(len(re.findall(r"\S*\w\S*", part)) for part in parts)) > MOST_WORDS:
        yield f"{words} words"
    if len(re.findall(r"\bthat\b", sentence)) > MOST_THATS:
        yield "three times `that`"
    yield from (f"{found[0].strip()!r} -> {hint}" for rule, hint in RULES if (found := rule.search(sentence)))


def undefined(blocks: list[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Abbreviations whose first use on a page is not `words (ABC)` or `ABC (words)`: line, abbreviation, text."""
    known = set(KNOWN)
    for line, block in blocks:
        text = plain(block)
        for found in ABBREVIATION.finditer(text):
            if found[1] not in known:
                known.add(found[1])
                if not (text[found.start() - 1 : found.start()] == "(" or text[found.end() :].startswith(" (")):
                    yield line, found[1], text


def findings(path: Path, text: str | None = None) -> Iterator[Finding]:
    """All faults of a page (.md) or a source file (.py)."""
    text = path.read_text(encoding="utf-8") if text is None else text
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    own = not name.startswith(WITH_OTHER_STRINGS)
    blocks = list(blocks_of_page(text) if path.suffix == ".md" else blocks_of_source(text, own))
    for line, block in blocks:
        yield from (Finding(name, line, fault, sentence) for sentence in sentences(block) for fault in faults_of(sentence))
    if path.suffix == ".md":
        yield from (Finding(name, line, f"undefined {word}", text[:80]) for line, word, text in undefined(blocks))


def files() -> list[Path]:
    """Every page, and every source file of package, tests, tools and benchmarks."""
    pages = ("*.md", "docs/*.md", "tools/*.md", "benchmarks/*.md", "benchmarks/results/README.md")
    places = (*pages, *(f"{folder}/**/*.py" for folder in ("blinkpy", "tests", "tools", "benchmarks")))
    return [path for place in places for path in sorted(ROOT.glob(place))]


def words_by_hand(text: str) -> int:
    """Words of a page, without headings, examples, and tables that `make docs` and `make tables` write."""
    text = re.sub(r"<!-- measured: \w+ -->.*?<!-- end of measured -->", "", text, flags=re.DOTALL)
    text = re.sub(r"(<!-- [\w, -]+, by make docs -->\n)(\|.*\n)*", r"\1", text)
    return sum(bool(re.search(r"\w", word)) for _, block in blocks_of_page(text) for word in block.split())


def group_of(path: str) -> str:
    """A page, a file of a top folder, or a folder two or three levels deep: files may be merged and renamed within it."""
    parts = Path(path).parts
    return path if path.endswith(".md") or len(parts) < 3 else "/".join(parts[: min(3, len(parts) - 1)])


def counts() -> Counter[str]:
    """The number of findings in each group now."""
    return Counter(group_of(found.path) for path in files() for found in findings(path))


def permitted() -> Counter[str]:
    """The number that each group may have: lines of `group: number`. A group without a line has no finding."""
    rows = (line.partition(": ") for line in COUNTS.read_text().splitlines() if line)
    return Counter({group: int(number) for group, _, number in rows})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="pages and sources; all without an argument")
    parser.add_argument("--write", action="store_true", help=f"lower the counts of {COUNTS.name}")
    parser.add_argument("--words", action="store_true", help="count the words of docs/ that are written by hand")
    arguments = parser.parse_args()
    if arguments.words:
        pages = [path for path in sorted(ROOT.glob("docs/*.md")) if path.stem not in GENERATED]
        words = {path.name: words_by_hand(path.read_text(encoding="utf-8")) for path in pages}
        print(*(f"{number:>7,} {name}" for name, number in {**words, "all": sum(words.values())}.items()), sep="\n")
        return 0
    if arguments.write:
        now = counts()
        lower = {group: min(now[group], number) for group, number in permitted().items()} if COUNTS.exists() else now
        COUNTS.write_text("".join(f"{group}: {number}\n" for group, number in sorted(lower.items()) if number))
        return 0
    found = [one for path in arguments.files or files() for one in findings(path.resolve())]
    for one in found:
        print(f"{one.path}:{one.line}: {one.rule}: {one.sentence}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
