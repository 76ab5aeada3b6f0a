"""Pages and sources pass tools/prose.py, apart from the counts of prose_counts.txt, which may only shrink."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


def rules(text: str, name: str = "page.md") -> list[str]:
    """The faults of a text, without the hints."""
    from prose import findings

    return [found.rule.partition(" -> ")[0] for found in findings(Path(name), text)]


def test_no_group_has_more_findings_than_it_may() -> None:
    from prose import counts, permitted

    more = {group: (number, permitted()[group]) for group, number in counts().items() if number > permitted()[group]}
    assert more == {}, "group: (findings, permitted); `python tools/prose.py FILE ...` prints them"


def test_every_count_belongs_to_a_group_that_exists() -> None:
    from prose import files, group_of, permitted

    assert set(permitted()) <= {group_of(str(path.relative_to(ROOT))) for path in files()}


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("Unknown field 'x'; known fields: a, b.", []),
        ("It evicts the least recently used page.", []),
        ("Requests wait until the server has a free slot.", []),
        ("What is a page?", []),
        ("The engine notifies clients who subscribed.", []),
        ("The body has a field that there is not.", ["'that there is not'"]),
        ("Nobody waits for it here.", ["'Nobody'"]),
        ("The function who hears of it.", ["'hears'", "'who'"]),
        ("It takes all what comes.", ["'what comes'"]),
        ("It calls the one that serves.", ["'the one that'", "'one that'"]),
        ("It reads 0 where there is a gap.", ["'where there'"]),
        ("It waits for the page, which holds " + "a and " * 15 + "a.", ["38 words"]),
        ("A page that says that it is the one thing that grows.", ["three times `that`"]),
        ("Two limits. " + "Each has a default, " * 4 + "always.", []),
    ],
)
def test_sentences_are_judged(sentence: str, found: list[str]) -> None:
    assert rules(sentence) == found
    assert rules(f'def f():\n    """{sentence}"""\n', "module.py") == found
    assert rules(f"value = 1  # {sentence}\n", "module.py") == found


def test_examples_and_code_are_left_out() -> None:
    code = "Text:\n\n    nobody\n\n```\nnobody\n```\n\n`nobody`, [a link](nobody.md)\n\n"
    assert rules(code + "<!-- nobody -->\n") == []
    assert rules("| a | b |\n|---|---|\n| x | nobody |\n") == ["'nobody'"]


def test_of_tests_only_docstrings_and_comments_are_judged() -> None:
    from prose import ROOT as ROOT_OF_TOOL

    text = 'def f():\n    """Nobody reads this text twice."""\n    return "it is nobody that reads this"  # nobody here\n'
    assert rules(text, "module.py") == ["'Nobody'", "'nobody'", "'nobody'"]
    assert rules(text, str(ROOT_OF_TOOL / "tests" / "test_module.py")) == ["'Nobody'", "'nobody'"]


def test_generated_tables_are_not_written_by_hand() -> None:
    from prose import words_by_hand

    page = "# Head\n\nTwo words.\n\n    an example\n\n| a | cell of five words |\n|---|---|\n"
    made = "<!-- keys fields, by make docs -->\n| a | b |\n|---|---|\n\n<!-- measured: x -->\n1 ms\n<!-- end of measured -->\n"
    assert words_by_hand(page + "\n" + made) == 7


def test_an_f_string_is_one_sentence() -> None:
    text = 'raise ValueError(f"{name}: the field is unknown to all" f" of them but for {other} here")\n'
    assert rules(text, "module.py") == ["'but for'"]
    assert rules(text.replace("but for", "except"), "module.py") == []


def test_an_abbreviation_is_defined_at_its_first_use() -> None:
    assert rules("The TPOT is low.") == ["undefined TPOT"]
    assert rules("The time per output token (TPOT) is low. TPOT grows on a GPU.") == []
    assert rules("TPOT (time per output token) is low.\n\nA TPOT of 3 ms.") == []
