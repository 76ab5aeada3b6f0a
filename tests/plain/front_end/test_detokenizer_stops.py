"""Stop strings against a naive reference: nothing of them leaks, wherever the tokens' borders are."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blinkpy.dpu.text.stop_strings import StopStrings


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of several at once, before the longest."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


LETTERS = "ab"  # so that texts almost match
TEXTS = st.lists(st.text(LETTERS, max_size=4), max_size=20)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4, unique=True).map(tuple)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)  # the machine may be busy
@given(pieces=TEXTS, stops=STOPS)
def test_equals_the_reference_and_holds_back_no_more_than_needed(pieces, stops) -> None:
    filter_ = StopStrings(stops)
    whole, _ = reference("".join(pieces), stops)
    text = out = ""
    for piece in pieces:
        text += piece
        out += filter_.push(piece)
        assert whole.startswith(out), "something was sent that had to be held back"
        assert filter_.stopped == reference(text, stops)[1]
        held = text[len(out) :]
        assert filter_.stopped or not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert out + filter_.finish() == whole


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
