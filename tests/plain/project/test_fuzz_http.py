"""Tests of the requests of `make fuzz-http`, and that it detects forbidden answers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
FIELDS = {
    path: ["prompt", "messages", "input", "tokens", "max_tokens", "user", "stream", "n"]
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    )
}


@pytest.fixture
def fuzz_http(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import fuzz_http

    monkeypatch.setattr(fuzz_http, "KEPT", tmp_path)
    return fuzz_http


def test_a_request_is_made_again_by_seed_and_number(fuzz_http: Any, seed: int) -> None:
    first, again, other = (fuzz_http.Requests(number, FIELDS) for number in (seed, seed, seed + 1))
    made = [first.make(number) for number in range(3000)]
    assert made == [again.make(number) for number in range(3000)]
    assert made[:50] != [other.make(number) for number in range(50)]
    assert len({each.data for each in made}) > 1500
    kinds = Counter(each.kind for each in made)
    assert min(kinds.values()) > 30 and len(kinds) == 5, kinds
    assert sum(each.data.startswith(b"POST /v1/") for each in made) > 600
