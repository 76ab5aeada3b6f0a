"""Tests of the answers that `make soak` expects of the null engine, and that it finds wrong answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).parents[3] / "tools"
VOCABULARY = 4096


@pytest.fixture
def soak_requests(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    from soak import soak_requests

    return soak_requests


def test_each_wrong_answer_is_a_fault(soak_requests: Any, rng: np.random.Generator) -> None:
    """A token that is lost, repeated or of another request; a choice too few; and a beginning that differs."""
    pool = [soak_requests.draw(rng, VOCABULARY) for _ in range(60)]
    kinds = set()
    for number, request in enumerate(pool):
        if not request.prompt or request.kind in ("schema", "choice"):
            continue
        kinds.add(request.kind)
        judge = soak_requests.Judge(pool)
        fine = soak_requests.Answer(whole=True, prompt_tokens=len(request.prompt))
        fine.texts = dict(enumerate(judge._expected(request, len(request.prompt))))
        fine.ends = dict.fromkeys(fine.texts, "length")
        fine.scores = len(request.prompt) + request.body["max_tokens"] if request.kind == "scores" else 0
        assert judge.fault(number, fine) == ""
        cut = replace(fine, whole=False, texts={0: fine.texts[0][: len(fine.texts[0]) // 2]}, ends={})
        assert judge.fault(number, cut) == ""
        whole = fine.texts[0]
        for wrong in (whole[: len(whole) // 2], whole + whole[-9:] + "x", whole[:-9] + "x", "x" + whole):
            assert wrong == whole or judge.fault(number, replace(fine, texts=fine.texts | {0: wrong}))
        assert judge.fault(number, replace(cut, texts={0: "x" + fine.texts[0]}))
        assert judge.fault(number, replace(fine, prompt_tokens=len(request.prompt) + 1))
        if len(fine.texts) > 1:
            assert judge.fault(number, replace(fine, texts={0: fine.texts[0]}))
    assert len(kinds) >= 2
