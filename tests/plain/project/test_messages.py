"""docs/messages.md lists the messages in the source."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


def found(source: str) -> list[str]:
    from write_messages import messages_of

    return [message.text for message in messages_of(source, "dpu")]


def test_the_page_is_up_to_date() -> None:
    from write_messages import PAGE, page

    assert PAGE.read_text() == page(), "messages changed: run `make docs`"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('raise ConfigError("a plain text")', ["a plain text"]),
        ('raise ConfigError(f"{self.path}: {name!r} is {MOST:,} bytes")', ["{path}: {name} is {most} bytes"]),
        ('raise ConfigError(f"a file {parts[0]} of " + "two parts")', ["a file {...} of two parts"]),
        ('raise ApiError(400, "one text" if a else "another text", code="a b")', ["one text", "another text"]),
        ('def f():\n    text = "from a variable"\n    raise bad_request(text)', ["from a variable"]),
        ('logger.warning("%s failed", name)', ["%s failed"]),
        ('raise fault(place, "not", "must be a schema")', ["'{keyword}' must be a schema"]),
        ('print("no message")\nraise KeyError("not for users")', []),
    ],
)
def test_messages_are_found(source: str, texts: list[str]) -> None:
    assert found(source) == texts
