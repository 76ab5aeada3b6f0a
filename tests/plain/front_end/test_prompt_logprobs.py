"""Echo, and log probabilities of prompts, over HTTP: in the shapes of OpenAI's and vLLM's APIs, and as lm-eval asks for them."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import httpx
import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import MODEL, completion_bytes, serving
from support.front_end.tiny_tokenizer import write_model
from support.waiting import BUSY_S, wait_for

from blinkpy.dpu.http.answer_sinks import Collector
from blinkpy.dpu.http.answers import Turns
from blinkpy.dpu.http.preparation.request_jobs import INLINE_BYTES
from blinkpy.dpu.text.detokenizer import Detokenizer
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.submission import SUBMIT_SCORE_PROMPT

TEXTS = ["naïve 😀 the dog", "the lazy dog the lazy dog", "a"]


class Served(NamedTuple):
    engine: FakeEngine
    tokenizer: Tokenizer
    client: httpx.Client
    port: int

    def ask(self, path: str = "/v1/completions", **fields: Any) -> Any:
        answer = self.client.post(path, json={"model": MODEL, "temperature": 0, "ignore_eos": True, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with FakeEngine() as engine, serving(engine, folder) as server, httpx.Client(base_url=server.url, timeout=BUSY_S) as client:
        yield Served(engine, Tokenizer(folder), client, server.port)


def loglikelihood(choice: Any, context: int) -> tuple[float, bool]:
    """lm-eval's view of a choice: of all tokens behind the context except the generated one."""
    values = choice["logprobs"]["token_logprobs"][context:-1]
    greedy = all(
        value == max(top.values()) for value, top in zip(values, choice["logprobs"]["top_logprobs"][context:-1], strict=True)
    )
    return sum(values), greedy


@pytest.mark.parametrize("limit", [0, 1])
def test_the_request_of_lm_eval(served: Served, limit: int) -> None:
    """Lists of token ids, echo, one token or none, and one log probability at each place; then text."""
    for prompts in ([served.ids(text) for text in TEXTS], TEXTS[1]):
        several = prompts if isinstance(prompts, list) else [served.ids(prompts)]
        answer = served.ask(prompt=prompts, max_tokens=limit, logprobs=1, echo=True, seed=1234)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, several))
        assert answer["usage"]["completion_tokens"] == limit * len(several)
        for choice, ids in zip(answer["choices"], several, strict=True):
            logprobs = choice["logprobs"]
            expected = [*ids, *ids[:limit]]  # the engine repeats the prompt
            assert [len(logprobs[name]) for name in logprobs] == [len(expected)] * 4
            assert logprobs["token_logprobs"] == [None, *[-2.5] * (len(expected) - 1)]
            assert logprobs["top_logprobs"][0] is None
            shown = "".join(served.tokenizer.decode([token]) for token in ids)
            if limit == 1 and len(ids) > 2:
                assert loglikelihood(choice, 1) == (-2.5 * (len(ids) - 1), False)
            if "\ufffd" not in shown:
                assert choice["text"] == served.tokenizer.decode(expected)
                pieces = [served.tokenizer.decode([token]) for token in expected]
                assert logprobs["text_offset"] == [0, *accumulate(map(len, pieces))][: len(expected)]
            assert choice["finish_reason"] == "length"


def test_an_echo_without_log_probabilities(served: Served) -> None:
    """Whole and streamed; several choices; nothing is scored."""
    text, ids = TEXTS[1], served.ids(TEXTS[1])
    expected = text + served.tokenizer.decode(ids[:3])
    answer = served.ask(prompt=text, max_tokens=3, echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [expected] * 2
    assert served.ask(prompt=text, max_tokens=0, echo=True)["choices"][0]["text"] == text
    with served.client.stream(
        "POST",
        "/v1/completions",
        json={"model": MODEL, "prompt": text, "max_tokens": 3, "echo": True, "stream": True, "ignore_eos": True},
    ) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(httpx.Response(200, text=line).json()["choices"][0]["text"] for line in lines) == expected
    assert not any(request.entry["flags"] & SUBMIT_SCORE_PROMPT for request in served.engine.submitted[-4:])


@pytest.mark.parametrize("choices", [1, 3])
def test_prompt_logprobs_of_completions_and_chats(served: Served, choices: int) -> None:
    """Of each prompt once, in all of its choices; the generated tokens have scores only on request."""
    before = len(served.engine.submitted)
    texts = TEXTS[-2:] if choices > 1 else TEXTS  # the engine has 8 slots
    answer = served.ask(prompt=texts, max_tokens=2, prompt_logprobs=3, n=choices)
    submitted = served.engine.submitted[before:]
    assert sum(bool(request.entry["flags"] & SUBMIT_SCORE_PROMPT) for request in submitted) == sum(
        len(served.ids(text)) > 1 for text in texts
    )
    for i, choice in enumerate(answer["choices"]):
        ids, scores = served.ids(texts[i // choices]), choice["prompt_logprobs"]
        assert choice["logprobs"] is None and len(scores) == len(ids) and scores[0] is None
        for token, table in zip(ids[1:], scores[1:], strict=True):
            listed, values = served.engine.likely(token)
            expected = dict(zip(listed[1:4], values[1:4], strict=True)) | {token: -2.5}
            assert {int(key): entry["logprob"] for key, entry in table.items()} == expected
            assert table[str(token)]["rank"] == 3
            assert all(entry["decoded_token"] == served.tokenizer.spell(int(key))[0] for key, entry in table.items())
    messages = [{"role": "user", "content": "dog"}]
    chat = served.ask("/v1/chat/completions", messages=messages, max_tokens=2, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == len(served.engine.submitted[-1].prompt) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in served.ask(prompt="a", max_tokens=2)["choices"][0]


def test_scores_and_log_probabilities_of_the_output_together(served: Served) -> None:
    ids = served.ids(TEXTS[1])
    (choice,) = served.ask(prompt=ids, max_tokens=4, prompt_logprobs=1, logprobs=2)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-2.5] * 4 and len(choice["prompt_logprobs"]) == len(ids)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "best_of": 2}, "best_of"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 2}, "min_tokens"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "max_tokens": False}, "max_tokens"),
    ],
)
def test_conflicting_fields_are_refused(served: Served, fields: dict[str, Any], at_fault: str) -> None:
    answer = served.client.post("/v1/completions", json={"model": MODEL, "prompt": "a", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == at_fault, answer.text


def test_a_prompt_that_is_cancelled_while_it_is_scored(served: Served) -> None:
    """The client leaves, and the next one is served."""
    served.engine.hold = True
    begun, cancels = len(served.engine.submitted), served.engine.cancels
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(completion_bytes(model=MODEL, prompt=TEXTS[1], echo=True, logprobs=0, max_tokens=1))
        wait_for(lambda: len(served.engine.submitted) > begun)
    wait_for(lambda: served.engine.cancels > cancels)
    served.engine.hold = False
    assert served.ask(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert FACTS.max_model_len > len(TEXTS[1])


def test_long_answers_are_written_in_turns_and_block_no_other_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, body = threading.Event(), threading.Event(), Collector.body

    def held(sink: Collector) -> Turns[bytes]:
        begun.set()
        while not go.is_set():
            yield
        return (yield from body(sink))

    monkeypatch.setattr(Collector, "body", held)
    monkeypatch.setattr(Collector, "is_long", True)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(served.ask, prompt=[7], max_tokens=1, logprobs=1, echo=True) for _ in range(4)]
        try:
            assert begun.wait(60)
            assert served.client.get("/livez").status_code == 200
        finally:
            go.set()
        assert all(answer.result(60)["usage"]["completion_tokens"] == 1 for answer in answers)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("prompt", [[7, 8, 9] * 20, TEXTS[1]], ids=["ids", "text"])
def test_texts_of_echoes_are_made_beside_the_event_loop(served: Served, prompt: Any, more: dict[str, int]) -> None:
    """With the prompt: that of a long one takes half a second."""
    counts, push = Counter[str](), Detokenizer.push

    def watched(detokenizer: Detokenizer, token: int) -> str:
        counts["prepare" if threading.current_thread().name.startswith("prepare") else "event loop"] += 1
        return push(detokenizer, token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Detokenizer, "push", watched)
        answer = served.ask(prompt=prompt, max_tokens=0, echo=True, user="u" * INLINE_BYTES, **more)
    assert answer["choices"][0]["text"] == (prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt))
    needed = answer["usage"]["prompt_tokens"] if more or not isinstance(prompt, str) else 0
    assert counts["prepare"] == needed
    assert counts["event loop"] < 10, "what a text goes on behind"
