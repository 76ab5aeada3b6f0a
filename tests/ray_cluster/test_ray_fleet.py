"""A fleet in a local cluster, with engines that make synthetic tokens: deaths and scaling under load, and the ends."""

import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
import ray
from ray_cluster.conftest import SERVES, RayFleet, fleet, oldest, processes, write_plan
from ray_cluster.steady_load import SteadyLoad
from support.commands import START_S
from support.waiting import wait_for

from benchmarks.serving.systems import free_port
from blinkpy.ray_fleet.actors import remove_folders
from blinkpy.serving.engine_process import remove_leftovers

pytestmark = pytest.mark.usefixtures("clean_end")
FEW, MANY = 2, 12  # clients: for one engine, and for three


def wait_text(server: RayFleet, pattern: str, count: int, timeout_s: float) -> float:
    """Wait until the log has a pattern as often; the seconds that it took."""
    return wait_for(lambda: len(re.findall(pattern, server.text)) >= count, timeout_s, lambda: server.text[-3000:])


def wait_restart(server: RayFleet, count: int) -> float:
    """Wait until the log has this number of restarts; the duration in seconds."""
    return wait_text(server, r"restart \d+ in", count, 120)


def test_deaths_and_scaling_from_one_to_three_to_one_fail_no_request(cluster: str, tmp_path: Path) -> None:
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 1, "most": 3}) as server:
        server.wait_engines(1)
        load = SteadyLoad(server.url)
        load.learn()
        load.set_clients(FEW)
        time.sleep(2)
        assert server.metric("each_engine_up") == [1]

        load.set_clients(MANY)
        print(f"1 to 3 engines after {server.wait_engines(3):.1f} s")

        for number, kind in enumerate(("ray.kill", "ray::EngineActor", "children engine"), 1):
            starts, asked = server.text.count(" is ready after "), load.asked
            if kind == "ray.kill":
                ray.kill(next(iter(server.actors("engine").values())))
            else:
                os.kill(oldest(kind), signal.SIGKILL)
            noticed = wait_restart(server, number)
            took = wait_text(server, " is ready after ", starts + 1, START_S)
            print(f"{kind}: noticed after {noticed:.2f} s, another engine serves after {took:.1f} s more")
            server.wait_engines(3)
            assert load.asked > asked, "nobody was served meanwhile"

        load.set_clients(FEW)
        print(f"3 to 1 engines after {server.wait_engines(1):.1f} s")
        time.sleep(2)
        load.end()
        moves = sum(server.metric("moves_total"))
        print(f"{load.asked} requests, {len(load.failures)} failed, {moves} moves, the longest took {load.longest_s:.1f} s")
        assert load.failures == []
        assert load.asked > 50
        assert moves > 0, "nothing was there to move"
        assert len(server.actors("engine")) == 1


def test_a_front_end_with_a_killed_actor_is_restarted(cluster: str, tmp_path: Path) -> None:
    """On its port, while the other one serves on."""
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 1}, front_ends=2) as server:
        assert int(server.urls[1].rpartition(":")[2]) == int(server.url.rpartition(":")[2]) + 1
        server.wait_engines(1)
        engines = server.actors("engine").keys()
        other = SteadyLoad(server.urls[1])
        other.learn()
        other.set_clients(2)
        for number in range(2):
            if number:  # the last start is that of the first front end
                os.kill(max(pid for pid, line in processes().items() if "ray::FrontEndActor" in line), signal.SIGKILL)
            else:
                ray.kill(server.actors("front-end-0-").popitem()[1])
            noticed = wait_restart(server, number + 1)
            took = wait_text(server, "front end 0 serves", number + 2, START_S)
            print(f"the front end's death noticed after {noticed:.2f} s, it listens again after {took:.1f} s more")
            server.wait_engines(1, 60)
            load = SteadyLoad(server.url, kinds=2)
            load.learn()
            assert load.answers == {number: other.answers[number] for number in range(2)}
        other.end()
        print(f"{other.asked} requests to the other front end, {len(other.failures)} failed")
        assert other.failures == [] and other.asked > 10
        assert server.actors("engine").keys() == engines, "engines went on"


def test_without_an_engine_requests_are_refused_until_one_is_back(cluster: str, tmp_path: Path) -> None:
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 1}, move_timeout_s=1) as server:
        server.wait_engines(1)
        body = {"model": "demo", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(oldest("ray::EngineActor"), signal.SIGSTOP)  # the engine's end is not reported yet
            os.kill(oldest("children engine"), signal.SIGKILL)
            wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 20)
            refused = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, timeout=20)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            rest = list(lines)
        assert any("engine_unavailable" in line for line in rest) and rest[-2:] != ["data: [DONE]", ""]
        os.kill(oldest("ray::EngineActor"), signal.SIGCONT)
        wait_restart(server, 1)
        server.wait_engines(1)
        SteadyLoad(server.url, kinds=2).learn()


def test_the_end_of_the_driver_is_the_end_of_all(cluster: str, tmp_path: Path) -> None:
    """A killed process can't clean up: actors end, and with them their children."""
    with fleet(tmp_path / "fleet.toml", cluster, {"least": 2}) as server:
        server.wait_engines(2)
        assert len(processes()) >= 6
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait(20)
        print(f"nothing runs any more after {wait_for(lambda: not processes(), 60, lambda: f'{processes()}'):.1f} s")
    remove_leftovers()  # as the next start does
    remove_folders()


def test_a_cluster_of_its_own_ends_with_control_c(tmp_path: Path) -> None:
    """As a terminal sends it: to all that runs in it."""
    with fleet(tmp_path / "fleet.toml", "", {"least": 1}) as server:
        server.wait_engines(1)
        SteadyLoad(server.url, kinds=2).learn()
        server.send(signal.SIGINT)
        assert server.wait(60) == 0, server.text[-3000:]
        assert "front end 0 has ended\n" in server.text and "engine 0 has ended\n" in server.text


@pytest.mark.parametrize(
    ("engines", "options", "problem"),
    [
        ({"least": 1}, {"device": "auto"}, "no node of the Ray cluster has 1 GPU, as 1 engines need"),
        ({"least": 1}, {"model": "no-such-model"}, "model 'no-such-model' is not a folder, a hub id"),
        ({"least": 1}, {"num_pages": 1}, "pages"),
    ],
)
def test_plans_that_can_not_start_are_refused(
    cluster: str, tmp_path: Path, engines: dict[str, int], options: dict[str, object], problem: str
) -> None:
    write_plan(tmp_path / "fleet.toml", engines, {}, **{"port": free_port(), **options})
    command = RayFleet(tmp_path / "fleet.toml", cluster)
    try:
        assert command.wait(120) == 2, command.text
        assert SERVES.search(command.text) is None
        assert problem in command.said[-1], command.text
    finally:
        command.kill()
        print(command.text)


def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    write_plan(tmp_path / "fleet.toml", {"least": 1}, {}, port=free_port())
    command = RayFleet(tmp_path / "fleet.toml", f"127.0.0.1:{free_port()}")
    try:
        assert command.wait(60) == 2, command.text
        assert "can't reach a Ray cluster at 127.0.0.1:" in command.text
    finally:
        command.kill()
