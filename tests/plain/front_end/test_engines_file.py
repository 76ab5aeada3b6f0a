"""Engines that come and go while a front end runs: the file of --engines-file."""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import RunningServer, serving
from support.waiting import wait_for

from blinkpy.config import MOST_ENGINES, Config, ConfigError
from blinkpy.dpu.engine_starts import EngineEntry
from blinkpy.dpu.fleet.engine_list import MOST_BYTES, EnginesFile, check_engines, engine_configs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engines"


def write(file: Path, *engines: FakeEngine | str) -> None:
    """In one step, as the page for operators says."""
    names = [one if isinstance(one, str) else one.segment_name for one in engines]
    file.with_suffix(".new").write_text("# the engines\n\n" + "".join(f"{name}  # one\n" for name in names))
    os.replace(file.with_suffix(".new"), file)


def engines_of(server: RunningServer) -> list[str]:
    """The engines that accept requests."""
    return sorted(link.label for link in server.engine_client.links if link.status() is None)


def wait_engines(server: RunningServer, *engines: FakeEngine) -> None:
    names = sorted(one.segment_name for one in engines)
    wait_for(lambda: engines_of(server) == names, 60, lambda: f"{names}, not {engines_of(server)}")


@pytest.fixture
def first() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


def test_engines_are_added_and_removed(folder: Path, file: Path, first: FakeEngine) -> None:
    write(file, first)
    with (
        FakeEngine() as second,
        ThreadPoolExecutor(1) as pool,
        serving(first, folder, engines_file=str(file)) as server,
    ):
        wait_engines(server, first)
        first.hold = True
        begun = pool.submit(server.complete, [7, 8], max_tokens=20, ignore_eos=True)
        wait_for(lambda: len(first.submitted) == 1)
        write(file, second)
        wait_engines(server, second)
        assert [server.complete([9], max_tokens=1).status_code for _ in range(3)] == [200] * 3
        assert (len(first.submitted), len(second.submitted)) == (1, 3), "an engine that leaves gets nothing new"
        assert not begun.done()
        first.hold = False
        answer = begun.result(60).json()
        assert answer["usage"]["completion_tokens"] == 20, "what it had in flight has ended there"
        assert 'moves_total{worker="0"} 0\n' in server.client.get("/metrics").text
        wait_for(lambda: first.segment_name not in server.client.get("/metrics").text)
        write(file, first, second)
        wait_engines(server, first, second)
        assert len(server.engine_client._all) == 2, "places are used again"


def test_requests_of_a_removed_engine_continue_in_another(folder: Path, file: Path, first: FakeEngine) -> None:
    write(file, first)
    with (
        FakeEngine() as second,
        ThreadPoolExecutor(1) as pool,
        serving(first, folder, engines_file=str(file)) as server,
    ):
        wait_engines(server, first)
        first.hold = True
        begun = pool.submit(server.complete, [7, 8], max_tokens=20, ignore_eos=True)
        wait_for(lambda: len(first.submitted) == 1)
        write(file, second)
        wait_engines(server, second)
        first.stop()
        assert begun.result(60).json()["usage"]["completion_tokens"] == 20
        assert len(second.submitted) == 1
        wait_for(lambda: len(server.engine_client.links) == 1)


def test_without_engines_requests_get_503_until_one_is_added(folder: Path, file: Path, first: FakeEngine) -> None:
    write(file)
    with serving(first, folder, wait_ready=False, engines_file=str(file)) as server:
        refused = server.complete([7], max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "No engine is listed: add one to the file of --engines-file."
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/metrics").status_code == 200
        write(file, first)
        wait_engines(server, first)
        assert server.complete([7], max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "bad", ["a\na\n", "10.0.0.1:7700\n", "../b\n", "\n".join(f"e{i}" for i in range(MOST_ENGINES + 1)), None]
)
def test_an_invalid_list_changes_nothing(
    folder: Path, file: Path, first: FakeEngine, bad: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, first)
    with serving(first, folder, engines_file=str(file)) as server, caplog.at_level("INFO", "blinkpy.frontend"):
        wait_engines(server, first)
        if bad is None:
            file.unlink()
        else:
            file.write_text(bad)
        wait_for(lambda: "keeping the previous engines" in caplog.text)
        assert server.complete([7], max_tokens=1).status_code == 200
        write(file)
        wait_engines(server)


def test_an_added_engine_must_serve_the_same_model(
    folder: Path, file: Path, first: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, first)
    with (
        FakeEngine(facts=FACTS._replace(max_model_len=64)) as other,
        serving(first, folder, engines_file=str(file)) as server,
        caplog.at_level("INFO", "blinkpy.frontend"),
    ):
        wait_engines(server, first)
        write(file, first, other)
        named = f"{other.segment_name} is refused: it differs from engine {first.segment_name} in context (64, not 128)"
        wait_for(lambda: named in caplog.text)
        assert engines_of(server) == [first.segment_name]


def test_engines_may_be_added_and_removed_at_any_moment(folder: Path, file: Path, seed: int) -> None:
    """Under requests: none fails, as long as one engine stays."""
    draw = random.Random(seed)
    engines = [FakeEngine() for _ in range(4)]
    try:
        for engine in engines:
            engine.start()
        write(file, engines[0])
        with ThreadPoolExecutor(8) as pool, serving(engines[0], folder, engines_file=str(file)) as server:
            wait_engines(server, engines[0])
            answers = []
            for _ in range(12):
                listed = [engines[0], *draw.sample(engines[1:], draw.randrange(4))]
                write(file, *listed)
                answers += [pool.submit(server.complete, [7, 8], max_tokens=draw.randint(1, 40)) for _ in range(6)]
                wait_engines(server, *listed)
            assert [answer.result(60).status_code for answer in answers] == [200] * len(answers)
            assert sum(len(engine.submitted) for engine in engines[1:]) > 0
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.parametrize(
    ("values", "content", "problem"),
    [
        ({}, None, "can't read .*engines: No such file"),
        ({}, b"\xff\n", "is not UTF-8 text"),
        ({}, b"#" * (MOST_BYTES + 1), f"has more than {MOST_BYTES} bytes"),
        ({}, b"a\nb # b\na\n", "engines: names 'a' twice"),
        ({}, b"10.0.0.1:7700\n", "engines: 10.0.0.1:7700 needs --transport rdma"),
        ({"transport": "rdma"}, b"10.0.0.1:7700\n", "is reachable from other machines: use --link-key-file"),
        ({"transport": "rdma", "insecure_link": True}, b"b\n", "engine must be HOST:PORT, not 'b'"),
        ({"engine": "a"}, b"b\n", "--engines-file replaces --engine and --name"),
        ({"name": "a"}, b"b\n", "--engines-file replaces --engine and --name"),
    ],
)
def test_a_file_that_can_not_be_is_refused(file: Path, values: dict[str, Any], content: bytes | None, problem: str) -> None:
    if content is not None:
        file.write_bytes(content)
    given = {**values, "engines_file": str(file)}
    with pytest.raises(ConfigError, match=problem):
        check_engines(Config().with_options(given), frozenset(given))


def test_each_state_of_the_file_is_read_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also an invalid list: no log is flooded."""
    made = list[str]()
    write(file, "aa")
    config = Config().with_options({"engines_file": str(file)})

    def entry(label: str, one: Config) -> Any:
        made.append(label)
        return EngineEntry(label, lambda: pytest.fail("nobody connects"))

    engines = EnginesFile(config, entry)
    for names, expected in ((["aa"], ["aa"]), (["b", "b"], []), (["ab"], ["ab"]), (["ab", "c"], ["ab", "c"]), ([], [])):
        if names != ["aa"]:
            made.clear()
            before = file.stat()
            write(file, *names)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if it was replaced in one tick of the clock
        caplog.clear()
        seen = [engines.look() for _ in range(3)]
        assert made == expected
        assert all(each is seen[0] for each in seen)
        assert caplog.text.count("keeping the previous engines") == (names == ["b", "b"])
        if names != ["b", "b"]:
            assert [entry.label for entry in engines.entries] == names


def test_a_file_names_engines_as_the_option_does(file: Path) -> None:
    file.write_text("10.0.0.1:7700\nshm:b\n")
    given = {"transport": "rdma", "insecure_link": True, "engines_file": str(file)}
    config = Config().with_options(given)
    check_engines(config, frozenset(given))
    found = engine_configs(config)
    assert {label: one.transport.transport for label, one in found.items()} == {"10.0.0.1:7700": "rdma", "shm:b": "shm"}
