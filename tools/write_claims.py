"""Writes four tables of docs/verification.md: testers and claims from the docstrings of tests, rules from the oracle's
docstrings, and assumptions about the order of memory accesses from the memory model's.

A paragraph `Tester NAME: code under test | extent in make test` in the docstring of a test file makes a row of testers. BUGS has
their seeded bugs.

A paragraph `Claim GROUP/NAME: text` in the docstring of a test or of a test file makes a row.
`Claim GROUP/NAME (simulator): text` also states that each run of the simulator checks the claim.
`Supports claim GROUP/NAME.` adds a test to the row of another test.
A paragraph `R1. text` in the docstring of the oracle's package is a rule.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PAGE = ROOT / "docs" / "verification.md"
PACKAGE = ROOT / "blinkpy"
ORACLE = PACKAGE / "verify" / "oracle"
PROTOCOL = ROOT / "tests" / "verified" / "memory_model" / "queue_protocol.py"
GROUPS = {
    "state": "State",
    "decisions": "Decisions",
    "policies": "Policies",
    "front-ends": "Front ends",
    "memory": "Memory order",
    "outputs": "Outputs",
    "fleet": "Fleet",
    "ranks": "Several GPUs",
    "recordings": "Recordings",
    "testers": "Testers",
}
BUGS = {  # lists of seeded bugs, by the test that must find them
    "tests/plain/front_end/test_fleet.py": "support.front_end.fleet_bugs:FLEET_BUGS",
    "tests/verified/test_fleet_worlds.py": "support.front_end.fleet_bugs:WORLD_BUGS",
    "tests/verified/test_http_oracle.py": "support.front_end.http_bugs:HTTP_BUGS",
    "tests/verified/test_memory_model.py": "verified.memory_model.queue_protocol:BUGS",
    "tests/verified/test_properties.py": "support.seeded_bugs:FRONT_BUGS",
    "tests/verified/test_simulator.py": "support.seeded_bugs:SCHEDULER_BUGS",
}
TESTER = re.compile(r"^Tester ([^:]+): ([^|]+) \| ([^|]+)$")
CLAIM = re.compile(r"^Claim ([\w-]+/[\w-]+)( \(simulator\))?:\s+(.*)", re.DOTALL)
SUPPORT = re.compile(r"^Supports claims? (.*)\.$", re.DOTALL)


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """(test, docstring) of every test file and test below a folder, by path."""
    for path in sorted(folder.rglob("test_*.py")):
        name = path.relative_to(folder.parent).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield name, ast.get_docstring(tree) or ""
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        yield from ((f"{name}::{node.name}", ast.get_docstring(node) or "") for node in functions)


def claims(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Name -> text, tests. Raises ValueError for two claims of one name, an unknown group, and support of an unknown claim."""
    found: dict[str, tuple[str, list[str]]] = {}
    support: list[tuple[str, str]] = []
    for test, text in docstrings(folder):
        for paragraph in (" ".join(part.split()) for part in text.split("\n\n")):
            if claim := CLAIM.match(paragraph):
                if claim[1] in found or claim[1].partition("/")[0] not in GROUPS:
                    raise ValueError(f"{test}: claim {claim[1]} exists already, or its group is not one of {', '.join(GROUPS)}")
                found[claim[1]] = (claim[3] + (" *" if claim[2] else ""), [test])
            elif names := SUPPORT.match(paragraph):
                support += [(name, test) for name in names[1].split(", ")]
            elif paragraph.startswith(("Claim", "Supports claim")):
                raise ValueError(f"{test}: not a claim: {paragraph!r}")
    for name, test in support:
        if name not in found:
            raise ValueError(f"{test} supports the unknown claim {name}")
        found[name][1].append(test)
    return found


def bug_count(test: str) -> str:
    """The number of bugs that a test must find, or ""."""
    if test not in BUGS:
        return ""
    module, _, name = BUGS[test].partition(":")
    return str(len(getattr(import_module(module), name)))


def tester_table(folder: Path) -> str:
    """A Markdown table of the testers, by the path of their tests."""
    lines = ["| tester | tests | code under test | in `make test` | seeded bugs |", "|---|---|---|---|---|"]
    for test, text in docstrings(folder):
        for found in filter(None, (TESTER.match(" ".join(part.split())) for part in text.split("\n\n"))):
            lines.append(f"| {found[1]} | `{test}` | {found[2]} | {found[3]} | {bug_count(test)} |")
    return "\n".join(lines) + "\n"


def table(folder: Path) -> str:
    """A Markdown table of all claims, group by group."""
    rows = claims(folder)
    ordered = sorted(rows, key=lambda name: (list(GROUPS).index(name.partition("/")[0]), name))
    lines, before = ["| claim | tests |", "|---|---|"], ""
    for name in ordered:
        text, tests = rows[name]
        group = GROUPS[name.partition("/")[0]]
        lines.append(f"| {'' if group == before else f'*{group}.* '}{text} | {', '.join(f'`{test}`' for test in tests)} |")
        before = group
    return "\n".join(lines) + "\n"


def named(module: Path, letter: str) -> dict[str, str]:
    """Name -> text of each paragraph `R1. text` (with the letter R), in order, of a module's docstring."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return {rule[1]: rule[2] for part in paragraphs if (rule := re.match(rf"({letter}\d+)\. (.*)", part))}


def assumption_table(module: Path) -> str:
    """Assumptions of the memory model, how each is ensured, and the files of the package that refer to it."""
    files = [path for folder in ("scheduler", "dpu", "transport") for path in sorted((PACKAGE / folder).rglob("*.py"))]
    names = {path: set(re.findall(r"\bO[1-8]\b", path.read_text(encoding="utf-8"))) for path in files}
    rows = "".join(
        f"| {name} | {text} | {', '.join(f'`{path.relative_to(PACKAGE)}`' for path in files if name in names[path])} |\n"
        for name, text in named(module, "O").items()
    )
    return f"| | assumption | ensured by | where |\n|---|---|---|---|\n{rows}"


def rule_table(folder: Path) -> str:
    rows = "".join(f"| {name} | {text} |\n" for name, text in named(folder / "__init__.py", "R").items())
    return "| | rule |\n|---|---|\n" + re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", rows)


def written(page: str, tests: Path = ROOT / "tests", oracle: Path = ORACLE) -> str:
    """The page with new tables."""
    made = (
        ("testers", tester_table(tests)),
        ("claims", table(tests)),
        ("rules", rule_table(oracle)),
        ("assumptions", assumption_table(PROTOCOL)),
    )
    for mark, lines in made:
        pattern = rf"(<!-- {mark}, by make docs -->\n)(\|.*\n)*"
        page, found = re.subn(pattern, lambda match, lines=lines: match[1] + lines, page)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"{PAGE} must have one line <!-- {mark}, by make docs -->")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
