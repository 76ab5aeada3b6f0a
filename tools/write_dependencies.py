"""Writes the tables of docs/dependencies.md again, from the requirements of pyproject.toml and the comments behind them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
GROUP = re.compile(r"^([\w-]+) = \[\n(.*?)^\]", re.MULTILINE | re.DOTALL)
REQUIREMENT = re.compile(r'^ +"([\w-]+(?:\[\w+\])?)([^"]*)",(?: +# (.*))?$', re.MULTILINE)
MARK = re.compile(r"(<!-- ([\w, -]+) dependencies, by make docs -->\n)(\|.*\n)*")


def table(group: str, text: str) -> str:
    """A Markdown table of one list of pyproject.toml. Raises ValueError if a requirement has no comment."""
    lists = dict(GROUP.findall(text))
    rows = ["| package | range | reason |\n", "|---|---|---|\n"]
    for name, limits, reason in REQUIREMENT.findall(lists[group]):
        if name.startswith("blinkpy-serve"):
            continue
        if not reason:
            raise ValueError(f"pyproject.toml: {name} of {group} has no comment with its reason")
        rows.append(f"| {name} | {limits.replace(',', ', ')} | {reason} |\n")
    return "".join(rows)


def written(page: str) -> str:
    """The page with new tables: one for each comment `GROUP dependencies, by make docs`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return MARK.sub(lambda found: found[1] + table(found[2], text), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
