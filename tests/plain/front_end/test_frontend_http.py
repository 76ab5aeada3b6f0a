"""HTTP end to end: a real worker in front of an engine in plain Python that echoes the prompt."""

import contextlib
import gc
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import (
    COMPLETIONS_HEAD,
    MODEL,
    NO_DETAILS,
    RunningServer,
    completion_bytes,
    events,
    serving,
    text_and_end,
)
from support.waiting import BUSY_S, wait_for

from blinkpy.dpu.api_errors import ApiError, unavailable
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.http.answer_sinks import Collector
from blinkpy.dpu.http.wire.connection import Connection
from blinkpy.dpu.http.wire.exchange import Exchange
from blinkpy.dpu.link.queue_pair import InFlightRequest
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.words import REJECT_PAGES, REJECT_SLOT_BUSY, REJECT_TOKEN

JSON = {"content-type": "application/json"}


@pytest.fixture
def server(engine, folder) -> Iterator[RunningServer]:
    with serving(engine, folder, max_body_bytes=65536) as server:
        yield server
        server.idle()
        assert server.engine_client.pair.free_slots == engine.sizes.slots


def error(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def echo(tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    return tokenizer.decode([prompt[i % len(prompt)] for i in range(count)])


def test_completion(server, engine, tokenizer) -> None:
    prompt = tokenizer.encode("Tell me a story").tolist()
    body = server.complete("Tell me a story", max_tokens=20).json()
    assert body["choices"][0]["text"] == echo(tokenizer, prompt, 20)
    assert body["choices"][0]["finish_reason"] == "length"
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 20, "total_tokens": len(prompt) + 20}
    assert body["usage"] == usage | NO_DETAILS
    assert body["model"] == MODEL
    assert engine.submitted[0].prompt == prompt
    assert engine.submitted[0].entry["stop_ids"].tolist() == [1] + [-1] * 7
    assert engine.submitted[0].entry["temperature"] == pytest.approx(0.6)


def test_chat_uses_the_template_without_a_second_bos(server, engine, tokenizer) -> None:
    body = server.chat("Hello", max_tokens=3).json()
    text = "<s><|start|>user: Hello\n<|start|>assistant: "
    assert engine.submitted[0].prompt == tokenizer.encode(text, add_special_tokens=False, parse_special=True).tolist()
    assert engine.submitted[0].prompt.count(0) == 1
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["prompt_tokens"] == len(engine.submitted[0].prompt)


def test_stream_is_the_same_text(server, tokenizer) -> None:
    text = "naïve café 😀 日本語 the dog"
    whole = server.chat(text, max_tokens=60, ignore_eos=True).json()["choices"][0]["message"]["content"]
    response = server.chat(text, max_tokens=60, stream=True, stream_options={"include_usage": True}, ignore_eos=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == whole
    assert "😀" in whole
    assert not any("\ufffd" in delta.get("content", "") for delta in deltas)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 60
    assert not any(chunk.get("usage") for chunk in chunks)


def test_first_chunk_has_the_first_token(server, engine) -> None:
    """Nothing is sent before there is a token: clients time their first token by the first chunk."""
    engine.hold = True
    threading.Timer(0.15, lambda: setattr(engine, "hold", False)).start()
    body = {"prompt": "the dog", "max_tokens": 4, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert not engine.hold
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[0][6:])["choices"][0]["finish_reason"] is None
    assert lines[-1] == "data: [DONE]"


def test_stop_token_and_stop_string(server, engine, tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False).tolist()
    # The model's own end of text, then a requested id: neither is part of the text.
    response = server.complete([*ids, 1, 5], max_tokens=50)
    assert text_and_end(response) == ("the lazy dog", "stop")
    assert response.json()["usage"]["completion_tokens"] == len(ids) + 1
    assert text_and_end(server.complete([*ids, 7], max_tokens=50, stop_token_ids=[7])) == ("the lazy dog", "stop")
    response = server.complete([*ids, 1], max_tokens=len(ids) * 2 + 2, ignore_eos=True)
    assert text_and_end(response) == ("the lazy dog" * 2, "length")
    cancels, engine.most_tokens = engine.cancels, 40
    for stream in (False, True):
        response = server.complete(ids, max_tokens=50, stop=["zy dogt", "never"], stream=stream)
        assert text_and_end(response) == ("the la", "stop")
        response = server.complete(ids, max_tokens=len(ids), stop="dogs", stream=stream)
        assert text_and_end(response) == ("the lazy dog", "length"), "text that was held back comes at the end"
    server.idle()
    assert engine.cancels == cancels + 2, "the engine was told to stop"


def test_stop_strings_wait_for_the_least_tokens(server, tokenizer) -> None:
    """As stop ids do, and as in vLLM; a stop string that is complete earlier hides and removes no text."""
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False).tolist()
    for stream in (False, True):
        for least, text in ((0, "the la"), (len(ids), "the lazy dogthe la"), (len(ids) * 2, "the lazy dogthe lazy dogthe la")):
            response = server.complete(ids, max_tokens=len(ids) * 3, min_tokens=least, stop="zy", stream=stream)
            assert text_and_end(response) == (text, "stop")
    response = server.complete(ids, max_tokens=len(ids), min_tokens=len(ids), stop="dog")
    assert text_and_end(response) == ("the lazy dog", "length")


def test_several_prompts(server, tokenizer) -> None:
    body = server.complete(["the dog", "a king", "cat"], max_tokens=5).json()
    prompts = [tokenizer.encode(text).tolist() for text in ("the dog", "a king", "cat")]
    assert [choice["text"] for choice in body["choices"]] == [echo(tokenizer, prompt, 5) for prompt in prompts]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    chunks = events(server.complete([[10, 11], [12, 13]], max_tokens=4, stream=True))
    assert not any("usage" in chunk for chunk in chunks), "it was not asked for"
    for index, ids in enumerate(([10, 11], [12, 13])):
        text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
        assert text == tokenizer.decode(ids * 2)


def test_without_a_limit_the_context_is_used(server) -> None:
    body = server.complete([7, 8, 9]).json()
    assert body["usage"]["total_tokens"] == FACTS.max_model_len
    assert body["choices"][0]["finish_reason"] == "length"


def test_long_prompts_are_tokenized_in_a_thread(server, engine) -> None:
    """Too long for the context, which shows that all of it was seen; /health answers meanwhile."""
    slow = threading.Thread(target=lambda: error(server.complete("the dog " * 7000, max_tokens=1), 400))
    slow.start()
    assert httpx.get(f"{server.url}/health", timeout=BUSY_S).status_code == 200
    slow.join(10)
    assert engine.submitted == []


def test_other_routes(server) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.head("/health").status_code == 200
    assert set(server.client.get("/version").json()) == {"version"}
    card = server.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (MODEL, FACTS.max_model_len)
    assert server.client.get(f"/v1/models/{MODEL}").json() == card


def test_errors_of_requests(server, engine) -> None:
    assert error(server.complete(model="other"), 404)["code"] == "model_not_found"
    assert error(server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert error(server.client.get("/nowhere"), 404)["code"] == "not_found"
    assert error(server.client.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert error(server.client.post("/health"), 405)
    assert error(server.complete(max_tokens=1000), 400)["code"] == "context_length_exceeded"
    assert error(server.complete("the dog " * 200), 400)["code"] == "context_length_exceeded"
    assert error(server.complete([7] * 128), 400)["code"] == "context_length_exceeded"
    assert error(server.complete([7] * 5000), 400)["code"] == "context_length_exceeded"
    assert error(server.complete([7, 600], max_tokens=1), 400)["param"] == "prompt"
    assert error(server.complete([-1], max_tokens=1), 400)["param"] == "prompt"
    refused = error(server.chat("refuse"), 400)
    assert refused["param"] == "messages[0].content"
    assert refused["message"] == "'messages[0].content' does not fit this model's chat template: refused by the template"
    assert error(server.complete(stop_token_ids=list(range(10, 18))), 400)["param"] == "stop_token_ids"
    assert error(server.complete(nonsense=1), 400)["param"] == "nonsense"
    assert error(server.client.post("/v1/completions", content=b"[" * 5000, headers=JSON), 400)["code"] == "too_deep"
    assert error(server.client.post("/v1/completions", content=b"", headers=JSON), 400)["code"] == "invalid_json"
    assert engine.submitted == []


def test_content_types(server) -> None:
    def post(**headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return server.client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=names)

    for headers in ({"content_type": "text/plain"}, {}, {"content_type": "application/x-www-form-urlencoded"}):
        assert error(post(**headers), 415)
    assert post(content_type="Application/JSON; charset=utf-8").status_code == 200
    packed = post(content_type="application/json", content_encoding="gzip")
    assert error(packed, 415)["code"] == "unsupported_encoding"


def test_bodies_over_the_limit(server) -> None:
    response = server.complete("x" * 70_000)
    assert error(response, 413)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"
    with contextlib.suppress(httpx.WriteError):  # the answer came and the connection closed while the rest was being written
        chunks = (b"x" * 10_000 for _ in range(100))
        assert error(httpx.post(f"{server.url}/v1/completions", content=chunks, headers=JSON), 413)
    assert b" 413 " in server.raw(COMPLETIONS_HEAD + b"content-length: 99999999999999\r\n\r\n")
    assert b" 400 " in server.raw(COMPLETIONS_HEAD + b"content-length: -5\r\n\r\n")
    assert b" 400 " in server.raw(COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
    # A length that is too small: the following bytes are not a request, and the server ignores all bytes after them.
    answer = server.raw(COMPLETIONS_HEAD + b'content-length: 2\r\n\r\n{}{"prompt"')
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") <= 2


def test_requests_that_are_no_http(server) -> None:
    assert b"HTTP/1.1 400" in server.raw(b"nonsense\r\n\r\n")
    assert b"application/json" in server.raw(b"GET / HTTP/9.9\r\n\r\n")
    assert b" 431 " in server.raw(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000)
    assert b" 431 " in server.raw(b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(200)) + b"\r\n")
    assert server.client.get("/health").status_code == 200
    assert 'status="431"' in server.client.get("/metrics").text


def test_engine_rejections(server, engine) -> None:
    for reason, status in ((REJECT_PAGES, 400), (REJECT_TOKEN, 400), (REJECT_SLOT_BUSY, 500)):
        for stream in (False, True):
            engine.reject = reason
            error(server.complete([7], max_tokens=1, stream=stream), status)


def test_no_slot_is_429_where_none_may_wait_and_others_go_on(folder, engine) -> None:
    engine.hold = True
    slots = engine.sizes.slots
    with serving(engine, folder, max_waiting_tokens=0) as server, ThreadPoolExecutor(slots) as pool:
        answers = [pool.submit(server.complete, [7], max_tokens=3) for _ in range(slots)]
        wait_for(lambda: server.engine_client.pair.free_slots == 0)
        response = server.complete([7], max_tokens=3)
        assert error(response, 429)["type"] == "rate_limit_error"
        assert error(response, 429)["code"] == "max_waiting_tokens"
        assert response.headers["retry-after"].isdigit()
        engine.hold = False
        assert [answer.result().status_code for answer in answers] == [200] * slots


def test_several_prompts_need_several_slots_and_take_them_as_they_come(server, engine) -> None:
    assert error(server.complete([[7]] * (engine.sizes.slots + 1), max_tokens=1), 400)["param"] == "prompt"
    engine.hold = True
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(server.complete, [7], max_tokens=1)
        wait_for(lambda: engine.submitted)
        all_slots = pool.submit(server.complete, [[7]] * engine.sizes.slots, max_tokens=1)
        wait_for(lambda: server.server.app.service.admission._waiting)
        wait_for(lambda: server.engine_client.pair.in_flight == engine.sizes.slots)
        assert len(server.server.app.service.admission._waiting) == 1, "one prompt has no slot yet"
        engine.hold = False
        assert one.result(60).status_code == all_slots.result(60).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_slot(server, engine, stream) -> None:
    engine.most_tokens = 5
    cancels = engine.cancels
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(completion_bytes(prompt=[7, 8], max_tokens=120, stream=stream))
        if stream:
            assert sock.recv(100)
        else:
            wait_for(lambda: server.engine_client.pair.in_flight == 1)
    wait_for(lambda: engine.cancels == cancels + 1)
    server.idle()
    assert server.complete([7], max_tokens=1).status_code == 200


def test_a_slow_reader_is_cancelled_and_blocks_no_other_client(folder) -> None:
    facts = FACTS._replace(max_model_len=100_000, num_pages=100_000)
    limits = {"max_output_backlog": 50, "send_buffer": 4096}
    with FakeEngine(facts=facts, step_s=0.0002) as engine, serving(engine, folder, **limits) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(completion_bytes(prompt=[7, 8], max_tokens=90_000, stream=True))
            wait_for(lambda: server.engine_client.pair.in_flight == 1)
            while engine.cancels == 0:
                assert server.complete([7], max_tokens=3).status_code == 200
            server.idle()
        assert 'blinkpy_slow_clients_total{worker="0"} 1' in server.client.get("/metrics").text


def test_fast_reader_of_a_long_answer_is_not_slow(folder, tokenizer) -> None:
    facts = FACTS._replace(max_model_len=10_000, num_pages=10_000)
    with FakeEngine(facts=facts, step_s=0.0002) as engine, serving(engine, folder, max_output_backlog=16) as server:
        *chunks, last = events(server.complete([7, 8], max_tokens=3000, stream=True, stream_options={"include_usage": True}))
        assert last["usage"]["completion_tokens"] == 3000
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echo(tokenizer, [7, 8], 3000)


def test_api_key(folder) -> None:
    with FakeEngine() as engine, serving(engine, folder, api_key="sécret") as server:
        for path in ("/v1/models", "/version"):
            response = server.client.get(path)
            assert error(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer", "Bearer secret", "Bearer sécretx", "Basic sécret", "sécret"):
            response = server.client.get("/v1/models", headers={"authorization": wrong.encode()})
            assert error(response, 401)
        error(server.complete([7], max_tokens=1), 401)
        assert engine.submitted == []
        for path in ("/health", "/metrics"):
            assert server.client.get(path).status_code == 200
        key = {"authorization": "bearer sécret".encode()}
        assert server.client.get("/v1/models", headers=key).status_code == 200


def test_requests_that_have_ended_need_no_garbage_collection(server) -> None:
    """Whole ones, streams and refused ones: nothing of them refers to itself."""
    kinds = (Generation, InFlightRequest, Collector, Exchange)
    gc.collect()
    before = {id(one) for one in gc.get_objects() if isinstance(one, kinds)}  # of other tests
    gc.disable()
    try:
        assert server.complete([7], max_tokens=3).status_code == 200
        assert server.chat(max_tokens=3, stream=True).status_code == 200
        assert server.complete([7], max_tokens=3, n=2, stop=["none"], logprobs=1).status_code == 200
        assert server.complete([7], max_tokens=0).status_code == 400
        wait_for(lambda: not any(isinstance(one, kinds) and id(one) not in before for one in gc.get_objects()))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "fate", ["no room", "engine gone", "waited long", "large", "grammar", "body late", "reset", "reset later"]
)
def test_requests_that_fail_need_no_garbage_collection(engine, folder, fate: str) -> None:
    """An error that was raised has the frames that it came through: none of them may lead back to it."""
    kinds = (Generation, InFlightRequest, Collector, Exchange, ApiError, Connection)
    options = {"no room": {"max_waiting_tokens": 0}, "waited long": {"max_waiting_s": 1}, "body late": {"body_timeout_s": 0.1}}
    late = COMPLETIONS_HEAD + b"content-length: 5\r\nconnection: close\r\n\r\n{"
    with serving(engine, folder, **options.get(fate, {})) as server, ThreadPoolExecutor(8) as pool:
        engine.hold = fate != "reset later"
        if fate in ("no room", "waited long"):
            for _ in range(engine.sizes.slots):
                pool.submit(server.complete, [7], max_tokens=3)
            wait_for(lambda: server.engine_client.pair.free_slots == 0)
        gc.collect()
        before = {id(one) for one in gc.get_objects() if isinstance(one, kinds)}
        gc.disable()
        try:
            if fate in ("no room", "waited long"):
                assert server.complete([7], max_tokens=3, stream=True).status_code == 429
            elif fate == "engine gone":
                asked = [pool.submit(server.complete, [7], max_tokens=3, stream=stream) for stream in (False, True, True)]
                wait_for(lambda: server.engine_client.pair.in_flight == len(asked))
                loop = next(iter(server.server.connections.open)).loop
                loop.call_soon_threadsafe(server.engine_client.fail_all, unavailable("It is gone."))
                assert [one.result(60).status_code for one in asked] == [503] * 3
            elif fate == "large":
                assert server.complete("x" * 9000, max_tokens=0).status_code == 400  # next to the event loop
            elif fate == "grammar":
                never = {"structured_outputs": {"regex": "(?=x)"}}  # refused in a process; a 429 if its start takes long
                wait_for(lambda: server.complete([7], **never).status_code == 400)
            elif fate == "body late":
                assert server.raw(late).startswith(b"HTTP/1.1 408")
            else:
                with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    sock.sendall(completion_bytes(prompt=[7], max_tokens=9, stream=fate == "reset"))
                    if fate == "reset":
                        wait_for(lambda: server.engine_client.pair.in_flight == 1)
                    else:
                        assert sock.recv(9000).startswith(b"HTTP/1.1 200")
            server.client.close()
            engine.hold = False

            def left() -> list[object]:
                return [one for one in gc.get_objects() if isinstance(one, kinds) and id(one) not in before]

            wait_for(lambda: not left(), 60, lambda: str([(type(one), gc.get_referrers(one)) for one in left()])[:2000])
        finally:
            gc.enable()


def test_a_shared_error_keeps_no_reference_to_its_requests() -> None:
    reported = ApiError(503, "no", param="x", code="c", retry_s=7, limit="l", allow="GET")
    for _ in range(3):
        with pytest.raises(ApiError) as caught:
            raise reported.again()
        assert vars(caught.value) == vars(reported) and caught.value.args == reported.args
    assert reported.__traceback__ is None
