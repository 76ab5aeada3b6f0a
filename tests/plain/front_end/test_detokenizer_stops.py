"""Stop strings against a naive reference: nothing of them leaks, wherever the tokens' borders are."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blinkpy.dpu.text.stop_strings import StopStrings

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of several at once, before the longest."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


LETTERS = "ab."
TEXTS = st.lists(st.text(LETTERS, max_size=4), max_size=20)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4, unique=True).map(tuple)


@RELAXED
@given(pieces=TEXTS, stops=STOPS)
def test_equals_the_reference(pieces, stops) -> None:
    filter_ = StopStrings(stops)
    out = ""
    for piece in pieces:
        out += filter_.push(piece)
        sent_all, stopped = reference("".join(pieces), stops)
        assert sent_all.startswith(out), "something was sent that had to be held back"
    assert filter_.stopped == stopped if pieces else True
    out += filter_.finish()
    assert out == reference("".join(pieces), stops)[0]


def test_equals_the_reference_on_texts_that_almost_match(rng) -> None:
    for _ in range(3000):
        stops = tuple({"".join(rng.choice(["a", "b"], rng.integers(1, 6))) for _ in range(int(rng.integers(1, 4)))})
        text = "".join(rng.choice(["a", "b"], 12))
        filter_ = StopStrings(stops)
        cut = int(rng.integers(0, 12))
        out = filter_.push(text[:cut]) + filter_.push(text[cut:]) + filter_.finish()
        assert out == reference(text, stops)[0], (text, stops, cut)


@RELAXED
@given(pieces=TEXTS, stops=STOPS)
def test_holds_back_no_more_than_needed(pieces, stops) -> None:
    filter_ = StopStrings(stops)
    text = out = ""
    for piece in pieces:
        text += piece
        out += filter_.push(piece)
        if filter_.stopped:
            break
        held = text[len(out) :]
        assert out + held == text
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_stop_string_over_three_tokens_and_a_false_start() -> None:
    filter_ = StopStrings(("\n\nUser:",))
    assert [filter_.push(piece) for piece in ("Hi.\n", "\nUs", "age\n", "\nUser", ":", " more")] == [
        "Hi.",
        "",
        "\n\nUsage",
        "",
        "",
        "",
    ]
    assert filter_.stopped
    assert filter_.finish() == ""


def test_special_characters_are_plain() -> None:
    for stop in ("]", "^", "-", "\\", ".*", "[a]"):
        filter_ = StopStrings((stop,))
        assert filter_.push(f"x{stop}y") == "x"
        assert filter_.stopped


def test_many_long_stops_stay_cheap() -> None:
    """Periodic stop strings, and a text that keeps almost matching them all."""
    stops = tuple("a" * 1000 + chr(ord("b") + i) for i in range(16))
    filter_ = StopStrings(stops)
    start = time.perf_counter()
    total = sum(len(filter_.push("aaaa")) for _ in range(2500))
    assert total == 10_000 - 1000
    assert time.perf_counter() - start < 2.0
