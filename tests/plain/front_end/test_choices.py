"""Several choices of one prompt: computed once, and one of them in front of the others."""

import random
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.front_end.fake_engine import FACTS
from support.front_end.http_server import NO_DETAILS, RunningServer, completion_bytes, events, serving
from support.waiting import wait_for

from blinkpy.dpu.generation import TokenLogprobs
from blinkpy.dpu.http.answers import Choice, likeliest
from blinkpy.queues.request_parameters import INT64_MAX, INT64_RANGE
from blinkpy.queues.words import REJECT_PAGES

PROMPT = list(range(20, 20 + 3 * FACTS.page_size))  # three whole pages


@pytest.fixture
def server(engine, folder) -> Iterator[RunningServer]:
    with serving(engine, folder) as server:
        yield server
        server.idle()
        assert server.engine_client.pair.free_slots == engine.sizes.slots


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


def test_choices_of_two_prompts_come_in_order_and_prompts_count_once(server, engine) -> None:
    other = PROMPT[::-1]
    body = server.complete([PROMPT, other], max_tokens=5, n=3, ignore_eos=True).json()
    first, second = (server.complete(prompt, max_tokens=5, ignore_eos=True).json()["choices"][0] for prompt in (PROMPT, other))
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == [first["text"]] * 3 + [second["text"]] * 3
    usage = {"prompt_tokens": 2 * len(PROMPT), "completion_tokens": 30, "total_tokens": 2 * len(PROMPT) + 30}
    assert body["usage"] == usage | NO_DETAILS


def test_streams_of_a_chat_have_a_role_and_an_end_each(server) -> None:
    options = {"include_usage": True}
    *chunks, usage = events(server.chat("the dog", n=2, max_tokens=4, stream=True, stream_options=options, ignore_eos=True))
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("prompt", "at_once"),
    [(PROMPT[: FACTS.page_size], 3), (PROMPT[: FACTS.page_size + 1], 1), ([PROMPT, PROMPT[::-1]], 2), ([PROMPT[:1], PROMPT], 4)],
)
def test_others_wait_for_the_first_token_where_a_page_can_be_shared(server, engine, pool, prompt, at_once) -> None:
    """Of the same prompt."""
    engine.hold = True
    answer = pool.submit(server.complete, prompt, n=3, max_tokens=2)
    wait_for(lambda: len(engine.submitted) >= at_once)
    engine.pause()
    assert len(engine.submitted) == at_once
    assert server.engine_client.pair.in_flight == at_once
    engine.paused = engine.hold = False
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    assert len(answer.result(60).json()["choices"]) == 3 * len(prompts)
    assert sorted(request.prompt for request in engine.submitted) == sorted(prompts * 3)


def test_slots_are_kept_for_waiting_choices(server, engine, pool) -> None:
    engine.hold = True
    answer = pool.submit(server.complete, PROMPT, n=engine.sizes.slots, max_tokens=1)
    wait_for(lambda: engine.submitted)
    later = pool.submit(server.complete, [7], max_tokens=1)
    wait_for(lambda: server.server.app.service.admission._waiting)
    assert len(engine.submitted) == 1
    engine.hold = False
    assert len(answer.result(60).json()["choices"]) == engine.sizes.slots
    assert later.result(60).status_code == 200
    assert engine.submitted[-1].prompt == [7]


def test_a_disconnect_cancels_waiting_choices(server, engine) -> None:
    engine.hold = True
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(completion_bytes(prompt=PROMPT, n=4))
        wait_for(lambda: engine.submitted)
    wait_for(lambda: engine.cancels)
    engine.hold = False
    server.idle()
    assert server.complete([7], max_tokens=1, n=2).status_code == 200
    assert len(engine.submitted) == 3


def test_a_rejected_first_choice_fails_the_request(server, engine) -> None:
    engine.reject = REJECT_PAGES
    assert server.complete(PROMPT, n=4, max_tokens=1).status_code == 400
    server.idle()
    assert server.complete(PROMPT, n=2, max_tokens=1).status_code == 200


def test_the_death_of_an_engine_fails_waiting_choices(engine, folder, pool) -> None:
    with serving(engine, folder) as server:
        engine.hold = True
        answer = pool.submit(server.complete, PROMPT, n=3, max_tokens=1)
        wait_for(lambda: engine.submitted)
        engine.pause()
        server.engine_client.pair.engine_timeout_s = 0.5
        assert answer.result(60).status_code == 503
        engine.paused = engine.hold = False
        wait_for(lambda: server.engine_client.status() is None)


def test_seeds_count_up_and_wrap_around(server, engine) -> None:
    server.complete(PROMPT, n=3, max_tokens=1, seed=INT64_MAX - 1)
    assert [int(request.entry["seed"]) for request in engine.submitted] == [INT64_MAX - 1, INT64_MAX, INT64_RANGE[0]]
    server.complete(PROMPT, n=3, max_tokens=1)
    assert len({int(request.entry["seed"]) for request in engine.submitted[3:]}) == 3
    server.complete([PROMPT, [7], [8]], n=2, max_tokens=1, seed=5)  # from the same one for each prompt
    seeds = [(len(request.prompt), int(request.entry["seed"])) for request in engine.submitted[6:]]
    assert sorted(seeds) == [(1, 5), (1, 5), (1, 6), (1, 6), (len(PROMPT), 5), (len(PROMPT), 6)]


def test_best_of_returns_the_likeliest(server, engine) -> None:
    logprobs = [-3.0, -1.0, -2.0, -4.0]
    given = iter(logprobs)
    engine.likely = lambda token: ([token] * 21, [next(given)] * 21)
    body = server.complete(PROMPT, n=2, best_of=4, max_tokens=1, logprobs=0).json()
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[-1.0], [-2.0]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(PROMPT), 4)
    given = iter(logprobs)
    assert [choice["logprobs"] for choice in server.complete(PROMPT, best_of=4, max_tokens=1).json()["choices"]] == [None]
    given = iter(logprobs)
    body = server.complete([[7], [8, 9]], best_of=2, max_tokens=1).json()
    assert len(body["choices"]) == 2
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 4), "each prompt counts once"
    assert {int(request.entry["logprobs"]) for request in engine.submitted} == {0}, "of each choice, to compare it"


def test_likeliest_against_a_sort_by_hand() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        prompts, generated = draw.randint(1, 3), draw.randint(1, 6)
        n = draw.randint(1, generated)
        values = [[-draw.random() for _ in range(draw.randint(1, 5))] for _ in range(prompts * generated)]
        entries = [[TokenLogprobs(0, value, [], 0) for value in each] for each in values]
        kept = likeliest([Choice(i, str(i), "stop", entry) for i, entry in enumerate(entries)], generated, n)
        assert [choice.index for choice in kept] == list(range(prompts * n))
        means = [sum(each) / len(each) for each in values]
        for p in range(prompts):
            numbers = range(p * generated, (p + 1) * generated)
            wanted = sorted(numbers, key=lambda i: -means[i])[:n]
            assert [int(choice.text) for choice in kept[p * n : (p + 1) * n]] == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 9}, "n"),  # the engine has 8 slots
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_numbers_that_cannot_be_served(server, fields, param) -> None:
    assert refused(server.complete(PROMPT, max_tokens=1, **fields)) == (400, param)
