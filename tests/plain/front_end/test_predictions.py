"""`prediction` of a chat: the tokens for the engine, their count in usage, and refusals."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import MODEL, serving
from support.front_end.tiny_tokenizer import write_model
from support.waiting import wait_for

from blinkpy.dpu.engine_link import usable_prediction
from blinkpy.dpu.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "the quick brown fox"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    with (
        FakeEngine(facts=FACTS._replace(predictions=1)) as engine,
        serving(engine, tokenizer.folder) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield engine, client


def post(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post(CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": "the"}], "max_tokens": 6, **fields})


def prediction_counters(client: httpx.Client) -> dict[str, int]:
    line = r'^blinkpy_((?:accepted_)?prediction_tokens)_total\{worker="0"\} (\d+)$'
    found = re.findall(line, client.get("/metrics").text, re.MULTILINE)
    return {name: int(value) for name, value in found}


def predicted(content: Any, **more: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content, **more}}


@pytest.mark.parametrize(
    "content", [TEXT, "", [{"type": "text", "text": "the quick"}, {"type": "text", "text": " brown fox"}], []]
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_gets_the_tokens_and_usage_counts_them(
    served: tuple[FakeEngine, httpx.Client], tokenizer: Tokenizer, content: Any, stream: bool
) -> None:
    """Two choices say the first tokens of the prediction, then others. The prompt does not change."""
    engine, client = served
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    engine.script = [*tokens[:3], 7, 8, 9]
    assert post(client).status_code == 200
    counted = prediction_counters(client)
    alone = engine.submitted[-1]
    answer = post(client, **predicted(content), n=2, stream=stream, stream_options={"include_usage": True} if stream else None)
    assert answer.status_code == 200, answer.text
    expected = tokens if content else []
    for request in engine.submitted[-2:]:
        assert request.prediction == expected
        assert (request.prompt, request.hashes) == (alone.prompt, alone.hashes)
    said = b"".join(answer.content.split(b"data: ")[-2:-1]) if stream else answer.content
    usage = httpx.Response(200, content=said).json()["usage"]
    details = usage["completion_tokens_details"]
    right = min(3, len(expected))
    assert details["accepted_prediction_tokens"] == 2 * right
    assert details["rejected_prediction_tokens"] == 2 * (len(expected) - right)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(alone.prompt), 12)
    more = {"prediction_tokens": 2 * len(expected), "accepted_prediction_tokens": 2 * right}
    wait_for(lambda: prediction_counters(client) == {name: counted[name] + value for name, value in more.items()})


@pytest.mark.parametrize(
    ("fields", "at_fault", "code"),
    [
        ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
        ({"prediction": {"content": "a"}}, "prediction.type", "missing_required_parameter"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type", "invalid_value"),
        ({"prediction": "a"}, "prediction", "invalid_type"),
        (predicted(7), "prediction.content", "invalid_type"),
        (predicted([{"type": "image_url", "image_url": "x"}]), "prediction.content[0]", "unsupported_content"),
        (predicted([{"type": "text"}]), "prediction.content[0]", None),
        (predicted("a", more=1), "prediction.more", None),
        (predicted("a b " * 70), "prediction", "context_length_exceeded"),
        (predicted("a b " * 70000), "prediction", "context_length_exceeded"),
    ],
)
def test_refusals_name_the_field(
    served: tuple[FakeEngine, httpx.Client], fields: dict[str, Any], at_fault: str, code: str | None
) -> None:
    answer = post(served[1], **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, at_fault), error
    assert code in (None, error["code"]), error


def test_prompt_and_prediction_fill_the_context(served: tuple[FakeEngine, httpx.Client], tokenizer: Tokenizer) -> None:
    """The longest prediction is taken, whatever max_tokens is; one token more is not."""
    engine, client = served
    assert post(client).status_code == 200
    longest = FACTS.max_model_len - len(engine.submitted[-1].prompt)
    (one,) = tokenizer.encode("7", add_special_tokens=False).tolist()
    assert tokenizer.encode("7" * longest, add_special_tokens=False).tolist() == [one] * longest
    assert post(client, **predicted("7" * longest)).status_code == 200
    assert len(engine.submitted[-1].prediction) == longest
    answer = post(client, **predicted("7" * (longest + 1)))
    assert answer.status_code == 400 and "shorten 'prediction'" in answer.text


def test_an_engine_without_drafts_of_texts_takes_none(tokenizer: Tokenizer) -> None:
    with FakeEngine() as engine, serving(engine, tokenizer.folder) as server, httpx.Client(base_url=server.url) as client:
        answer = post(client, **predicted(TEXT))
        assert answer.status_code == 400 and "--speculative ngram" in answer.text
        assert answer.json()["error"]["param"] == "prediction"
        assert post(client, prediction=None).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a", **predicted("a")}).status_code == 400


@pytest.mark.parametrize(
    ("context", "longest", "prompt", "kept"), [(128, 512, 100, 20), (128, 512, 118, 10), (300, 130, 125, 5), (128, 512, 128, 0)]
)
def test_after_a_move_the_end_of_a_prediction_counts(context: int, longest: int, prompt: int, kept: int) -> None:
    """The prompt of the next engine includes output."""
    pair: Any = SimpleNamespace(context=context, longest_prompt=longest, facts=SimpleNamespace(predictions=1))
    given = np.arange(20, dtype=np.int32)
    left = usable_prediction(given, prompt, pair)
    assert ([] if left is None else left.tolist()) == given[20 - kept :].tolist()
    pair.facts.predictions = 0
    assert usable_prediction(given, 1, pair) is None
    assert usable_prediction(None, 1, pair) is None
