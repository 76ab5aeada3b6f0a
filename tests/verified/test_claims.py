"""docs/verification.md names existing tests, has their claims, and agrees with the code about the order of memory accesses."""

import re
from pathlib import Path

import pytest
from support.front_end.http_bugs import HTTP_BUGS
from support.seeded_bugs import FRONT_BUGS, SCHEDULER_BUGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")


def test_the_page_has_the_claims_of_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from write_claims import claims, written

    assert len(claims(ROOT / "tests")) > 30
    assert written(PAGE) == PAGE, "run `make docs`"


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("Claim state/a: It holds.\n\n    Claim state/a: It holds.", "exists already"),
        ("Claim other/a: It holds.", "its group is not one of"),
        ("Supports claim state/b.", "supports the unknown claim state/b"),
        ("Claim: It holds.", "not a claim"),
    ],
)
def test_wrong_claims_are_errors(docstring: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from write_claims import claims, table

    file = tmp_path / "tests" / "test_it.py"
    file.parent.mkdir()
    file.write_text('def test_it() -> None:\n    """Text.\n\n    Claim state/a (simulator): It\n    holds.\n    """\n')
    assert table(file.parent) == "| claim | tests |\n|---|---|\n| *State.* It holds. * | `tests/test_it.py::test_it` |\n"
    file.write_text(f'def test_it() -> None:\n    """{docstring}"""\n')
    with pytest.raises(ValueError, match=problem):
        claims(file.parent)


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 20
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_code_that_relies_on_the_order_of_accesses_is_listed_there() -> None:
    rows = dict(re.findall(r"^\| (O\d) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE))
    assert sorted(rows) == [f"O{i}" for i in range(1, 9)]
    pointing = {
        (name, str(path.relative_to(ROOT / "blinkpy")))
        for folder in ("scheduler", "dpu", "transport")
        for path in (ROOT / "blinkpy" / folder).rglob("*.py")
        for name in re.findall(r"\bO[1-8]\b", path.read_text(encoding="utf-8"))
    }
    listed = {(name, path) for name, where in rows.items() for path in re.findall(r"`([\w/]+\.py)`", where)}
    assert pointing == listed


def test_page_and_oracle_have_the_same_rules() -> None:
    reported = re.findall(r"^\| (R\d+) \|", PAGE, re.MULTILINE)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "blinkpy" / "verify" / "oracle").glob("*.py"))
    assert reported == [f"R{i + 1}" for i in range(len(reported))]
    assert set(reported) == set(re.findall(r"\bR\d+\b", sources))


def test_the_numbers_of_seeded_bugs_are_right() -> None:
    rows = {row[2].strip(" `"): row[5].strip() for row in (line.split("|") for line in PAGE.splitlines()) if len(row) == 7}
    assert rows["tests/verified/test_simulator.py"] == str(len(SCHEDULER_BUGS))
    assert rows["tests/verified/test_properties.py"] == str(len(FRONT_BUGS))
    assert rows["tests/verified/test_http_oracle.py"] == str(len(HTTP_BUGS))
