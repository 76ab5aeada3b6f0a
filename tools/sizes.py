"""Lines of Python by folder, as `make lint` prints them, and docs/sizes.md, which has the words of docs/ too.

Growth is explained in the commit.

python tools/sizes.py [--markdown] [--against COMMIT]
"""

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED_PAGES = ("cli.md", "messages.md")
GENERATED_PARTS = re.compile(r"<!-- measured: .*?<!-- end of measured -->|(?<=, by make docs -->\n)(?:\|[^\n]*\n)*", re.DOTALL)
HEAD = """\
# Sizes

For hackers: lines of Python by folder, and words of the pages here. `python tools/sizes.py --markdown` writes this page,
`make lint` prints the lines; growth is explained in the commit.
"""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def folder_of(path: str) -> str:
    """The folder that a file counts for: two levels deep in the package, one elsewhere."""
    parts = Path(path).parts
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


def lines_now() -> Counter[str]:
    """Lines of each folder of the work tree, new files included."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    sizes: Counter[str] = Counter()
    for path in listed:
        file = ROOT / path
        if file.is_file():
            sizes[folder_of(path)] += len(file.read_bytes().splitlines())
    return sizes


def lines_at(commit: str) -> Counter[str]:
    """Lines of each folder at a commit."""
    sizes: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if path.endswith(".py"):
            sizes[folder_of(path)] += len(git("show", f"{commit}:{path}").splitlines())
    return sizes


def rows(sizes: Counter[str], before: Counter[str] | None) -> list[tuple[str, ...]]:
    """Folder, lines and, with an earlier state, the change; totals of the top folders first."""
    found: list[tuple[str, ...]] = []
    for top in sorted({name.split("/")[0] for name in sizes}):
        inside = [name for name in sorted(sizes) if name.split("/")[0] == top]
        for name, group in [(top, inside), *((name, [name]) for name in inside if "/" in name)]:
            now = sum(sizes[one] for one in group)
            change = "" if before is None else f"{now - sum(before[one] for one in group):+,}"
            found.append((name, f"{now:,}", change))
    return found


def words(text: str) -> int:
    """Those of a text with letters or digits in them, without comments."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)))


def words_of_page(name: str, text: str) -> tuple[int, int, int]:
    """Words of a page that are written by hand, that stand in its examples of code, and that a tool writes."""
    own = "" if name in GENERATED_PAGES else GENERATED_PARTS.sub("", text)
    prose = re.sub(r"^ {4}.*$", "", own, flags=re.MULTILINE)
    return words(prose), words(own) - words(prose), words(text) - words(own)


def page() -> str:
    """docs/sizes.md."""
    shown = [row for row in rows(lines_now(), None) if "/" not in row[0] or row[0].startswith("blinkpy/")]
    lines = [f"| `{name}/` | {count} |" for name, count, _ in shown]
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "sizes.md"]
    counts: dict[str, tuple[int, ...]] = {
        f"[{path.name}]({path.name})": words_of_page(path.name, path.read_text()) for path in pages
    }
    counts["all"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    table = [f"| {name} | {hand:,} | {code:,} | {tool:,} |" for name, (hand, code, tool) in counts.items()]
    head = ["| page: words | by hand | in examples | generated |", "|---|---|---|---|"]
    return "\n".join([HEAD, "| folder | lines |", "|---|---|", *lines, "", *head, *table])


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines of Python by folder.")
    parser.add_argument("--markdown", action="store_true", help="docs/sizes.md")
    parser.add_argument("--against", metavar="COMMIT", help="show the change since a commit")
    options = parser.parse_args()
    if options.markdown:
        print(page())
        return
    for name, lines, change in rows(lines_now(), lines_at(options.against) if options.against else None):
        print(f"{'  ' if '/' in name else ''}{name:<28}{lines:>8}{change:>10}".rstrip())


if __name__ == "__main__":
    main()
