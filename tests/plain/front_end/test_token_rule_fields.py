"""logit_bias, allowed_token_ids and bad_words over HTTP: submitted rules, and refusals."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine
from support.front_end.http_server import MODEL, serving
from support.front_end.tiny_tokenizer import write_model
from support.waiting import BUSY_S, wait_for

from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.token_rules import TokenRules, banned_sequences
from blinkpy.queues.words import FINISH_ERROR

WORDS = FACTS._replace(grammar_share=2, grammar_words=512, grammar_arena=1024)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=[2, 0])
def served(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    facts = WORDS if request.param else FACTS
    sizes = SIZES.__class__(**{**SIZES.__dict__, "prompt_tokens": 4096})
    with (
        FakeEngine(sizes=sizes, facts=facts) as engine,
        serving(engine, tokenizer.folder) as server,
        httpx.Client(base_url=server.url, timeout=BUSY_S) as client,
    ):
        yield engine, client


def post(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    start = {"prompt": "the"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "the"}]}
    return client.post(path, json={"model": MODEL, "max_tokens": 2, **start, **fields})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_engine_gets_the_rules(served: tuple[FakeEngine, httpx.Client], tokenizer: Tokenizer, path: str) -> None:
    engine, client = served
    fields = {"logit_bias": {"7": -100, "3": 1.5}, "allowed_token_ids": [3, 7, 599, 3], "bad_words": ["dog", " lazy dog"]}
    answer = post(client, path, **fields)
    if engine.facts.grammar_share == 0:
        assert answer.status_code == 400 and "the engine does not support token rules" in answer.text
        return
    assert answer.status_code == 200, answer.text
    rules = TokenRules.of_words(engine.submitted[-1].rules, WORDS.vocab_size)
    assert rules.biases == {3: 1.5, 7: -100.0} and rules.allowed == [3, 7, 599]
    encode = [tokenizer.encode(text, add_special_tokens=False).tolist() for text in ("dog", " dog", "lazy dog", " lazy dog")]
    for alone, spaced in (encode[:2], encode[2:]):
        assert alone in rules.banned
        assert (spaced in rules.banned) == (len(spaced) == len(alone))
    for name, value in (("logit_bias", {}), ("allowed_token_ids", None), ("bad_words", [])):
        assert post(client, path, **{name: value}).status_code == 200
        assert len(engine.submitted[-1].rules) == 0


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"logit_bias": {"600": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias.1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),  # as SamplingParams, and vLLM
        ({"allowed_token_ids": [600]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": {"1": 1}}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["word"] * 129}, "bad_words"),
        ({"bad_words": [3]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["\u65e5" * 40]}, "bad_words"),
        ({"bad_words": [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]}, "bad_words"),  # more than the engine's words
    ],
)
def test_invalid_token_rules_are_refused(served: tuple[FakeEngine, httpx.Client], fields: dict[str, Any], at_fault: str) -> None:
    answer = post(served[1], **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == at_fault, answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"])
def test_stop_ids_are_of_the_vocabulary(served: tuple[FakeEngine, httpx.Client], path: str) -> None:
    """None else ever comes, so that they would be without effect; vLLM refuses them, too."""
    body: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    fields = body.get(path, {"input": "x"})
    assert served[1].post(path, json={**fields, "stop_token_ids": [599]}).status_code == 200
    answer = served[1].post(path, json={**fields, "stop_token_ids": [599, 600]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("stop_token_ids", "invalid_value")
    assert "'stop_token_ids'" in error["message"] and "600 tokens" in error["message"]


@pytest.mark.parametrize("served", [2], indirect=True)
@pytest.mark.parametrize(
    ("fields", "status", "at_fault"),
    [
        ({"allowed_token_ids": [1], "min_tokens": 2}, 400, "allowed_token_ids"),
        ({"bad_words": ["dog"]}, 400, "bad_words"),
        ({"stop_token_ids": [7], "guided_choice": ["the"]}, 400, "stop_token_ids"),  # a grammar allows them at its end alone
        ({"guided_choice": ["the"], "logit_bias": {"7": -100}}, 500, None),  # excludes no token
    ],
)
def test_rules_that_leave_no_token_are_the_requests_fault(
    served: tuple[FakeEngine, httpx.Client], fields: dict[str, Any], status: int, at_fault: str | None
) -> None:
    """A client would send the same again after a 500."""
    engine, client = served
    engine.hold = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, client, **fields)
        wait_for(lambda: bool(engine.pairs[0].requests))
        slot, _ = engine.pairs[0].requests.popitem()
        engine.pairs[0].owed.append((slot, 0, FINISH_ERROR))
        error = answer.result(60).json()["error"]
    engine.hold = False
    assert (answer.result().status_code, error["param"]) == (status, at_fault)
    assert error["code"] == ("engine_error" if at_fault is None else "no_token_left")


def test_bad_words_are_banned_in_both_spellings(tokenizer: Tokenizer) -> None:
    """If a space makes another first token, and no more of them."""

    def encode(text: str) -> Any:
        tables = {"a": [1], " a": [2], "b": [3], " b": [4, 3], "cd": [5, 6], " cd": [7, 6], "e": [8], " e": [8]}
        return __import__("numpy").array(tables[text])

    assert banned_sequences(["a", " b", "  cd", "e"], encode) == [[1], [2], [3], [5, 6], [7, 6], [8]]
