"""A fleet behind Ray Serve's proxy, in a local cluster: what clients see there is what front ends answer."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray_cluster.conftest import SERVES, RayFleet, fleet, oldest, write_plan
from ray_cluster.steady_load import SteadyLoad
from support.commands import START_S
from support.waiting import wait_for

from benchmarks.serving.systems import free_port, tree
from blinkpy.ray_fleet.front_end_actor import remove_folders
from blinkpy.serving.segment_names import remove_leftovers

pytestmark = pytest.mark.usefixtures("clean_end", "serve_ends")
SHOWS = re.compile(r"Ray Serve's proxy shows demo at (\S+)")
CLIENTS = 4
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "stream": True}


@pytest.fixture
def serve_ends(cluster: str) -> Iterator[None]:
    """Nothing of Ray Serve is left for the next test."""
    from ray import serve

    yield
    serve.shutdown()


def applications() -> dict[str, Any]:
    """Of Ray Serve, by name."""
    from ray import serve

    return dict(serve.status().applications)


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a streamed chat, without what differs from answer to answer."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [{name: value for name, value in json.loads(line).items() if name not in ("id", "created")} for line in lines[:-1]]


def kill_front_end() -> None:
    """One of them, with its actor, at once."""
    for pid in tree(oldest("ray::FrontEndActor")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lost_until_back(server: RayFleet, load: SteadyLoad, restarts: int) -> int:
    """Requests that have failed once that many restarts were begun; later ones go on while it starts, and then."""
    wait_for(lambda: len(re.findall(r"restart \d+ in", server.text)) >= restarts, 60)
    time.sleep(1)
    lost, asked = len(load.failures), load.asked
    wait_for(lambda: len(re.findall(r"front end \d serves", server.text)) == 2 + restarts, START_S)
    wait_for(lambda: load.asked > asked + 3 * CLIENTS, 60)
    assert len(load.failures) == lost, load.failures
    return lost


def text(of: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in of if event["choices"])


def test_what_the_proxy_answers_is_what_front_ends_answer(cluster: str, tmp_path: Path) -> None:
    serve = {"route": "/llm", "port": free_port()}
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 1}, front_ends=2, serve=serve, null_step_us=100_000) as server:
        url = server.find(SHOWS, START_S)[1]
        assert url == f"http://127.0.0.1:{serve['port']}/llm"
        server.wait_engines(1)
        wait_for(lambda: httpx.get(f"{server.urls[1]}/health").status_code == 200, 20)

        body = {**CHAT, "max_tokens": 20, "seed": 7}
        through, direct = events(url, body), events(server.url, body)
        assert text(through) == text(direct) != ""
        assert through[0] == direct[0] and through[-1] == direct[-1]

        for method, path, content in (
            ("POST", "/v1/chat/completions", b'{"model": "other"}'),
            ("POST", "/v1/completions", b"no JSON"),
            ("GET", "/v1/completions", b""),
            ("GET", "/nothing/%2F?x=1", b""),
            ("GET", "/v1/models/other", b""),
            ("HEAD", "/v1/models", b""),
        ):
            kind = {"content-type": "application/json", "accept": "*/*"}
            seen, wanted = (httpx.request(method, one + path, content=content, headers=kind) for one in (url, server.url))
            assert (seen.status_code, seen.content) == (wanted.status_code, wanted.content), path
            assert len(seen.headers.get_list("date")) == len(seen.headers.get_list("x-request-id")) == 1
            for name in ("content-type", "content-length", "allow", "retry-after"):
                assert seen.headers.get(name) == wanted.headers.get(name), (path, name)
        assert httpx.get(url).headers["location"] == "/llm/", "the live page, whose links are relative"

        pieces = iter([b'{"model": "demo", "prompt": "x"', b', "max_tokens"', b": 3}"])
        chunked = httpx.post(f"{url}/v1/completions", content=pieces, headers=kind, timeout=60)
        assert chunked.json()["usage"]["completion_tokens"] == 3

        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 400}, timeout=60) as stream:
            lines = stream.iter_lines()  # kept: its end would close the connection
            assert next(lines).startswith("data: ")
            wait_for(lambda: server.metric("engine_requests_running") == [1], 15, "the answer comes as it is generated")
        wait_for(lambda: server.metric("engine_requests_running") == [0], 15, "the request ends with its client")
    wait_for(lambda: not applications(), 20)


def test_requests_go_on_when_a_front_end_is_killed_and_all_ends_with_the_driver(cluster: str, tmp_path: Path) -> None:
    serve = {"port": free_port(), "replicas": 2}
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 1}, front_ends=2, serve=serve) as server:
        load = SteadyLoad(server.find(SHOWS, START_S)[1].rstrip("/"))
        server.wait_engines(1)
        wait_for(lambda: httpx.get(f"{server.urls[1]}/health").status_code == 200, 20)
        load.learn()
        load.set_clients(CLIENTS)
        wait_for(lambda: load.asked > CLIENTS, 60)
        ray.kill(server.actors("front-end-0-").popitem()[1])  # what it started ends in order, and refuses what is new
        assert lost_until_back(server, load, 1) == 0
        time.sleep(2)  # until replicas know that it is back
        kill_front_end()
        lost = lost_until_back(server, load, 2)
        print(f"{load.asked} requests, {lost} ended with the front end: {load.failures}")
        assert lost <= CLIENTS and not any("503" in failure for failure in load.failures), load.failures
        load.end()
        assert len(load.failures) == lost, load.failures

        kill_front_end()
        kill_front_end()
        wait_for(lambda: httpx.get(f"{load.url}/v1/models").headers.get("retry-after") == "1", 20)
        wait_for(lambda: httpx.get(f"{load.url}/v1/models").status_code == 200, 60)

        os.kill(server.process.pid, signal.SIGKILL)
        server.wait(20)
        print(f"the application is gone after {wait_for(lambda: not applications(), 60):.1f} s")
    remove_leftovers()
    remove_folders()


def test_a_serve_that_runs_already_is_used_and_stays(cluster: str, tmp_path: Path) -> None:
    from ray import serve

    port = free_port()

    async def other(request: Any) -> str:
        return "other"

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(serve.deployment(ray_actor_options={"num_cpus": 0})(other).bind(), name="other", route_prefix="/other")
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 1}, serve={"route": "/llm"}) as server:
        assert server.find(SHOWS, START_S)[1] == "/llm"
        server.wait_engines(1)
        SteadyLoad(f"http://127.0.0.1:{port}/llm", kinds=2).learn()
    assert list(applications()) == ["other"]
    assert httpx.get(f"http://127.0.0.1:{port}/other").text == "other"
    for table, problem in (({"name": "other"}, "an application other already"), ({"route": "/other"}, "does not take")):
        write_plan(tmp_path / "fleet.toml", {"least": 1}, {}, serve=table, port=free_port())
        command = RayFleet(tmp_path / "fleet.toml", cluster)
        try:
            assert command.wait(120) == 2, command.text
            assert problem in command.said[-1] and SERVES.search(command.text) is None, command.text
        finally:
            command.kill()
    assert list(applications()) == ["other"]
