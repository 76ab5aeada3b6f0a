"""Actions of actors without Ray, as plain objects."""

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blinkpy.config import Config, as_table
from blinkpy.ray_fleet import actors
from blinkpy.ray_fleet.actors import PREFIX, EngineActor, FrontEndActor, Started, remove_folders
from blinkpy.transport.segment import segment_path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of actors are here, and the log stays pytest's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("blinkpy.ray_fleet.actors.start_logging", lambda *arguments: None)
    return tmp_path


def table(**values: object) -> dict[str, object]:
    return dict(as_table(Config().with_options(values)))


def test_a_front_end_follows_a_list_that_ends_with_it(temporary: Path) -> None:
    actor = FrontEndActor(table(), 0)
    actor.set_engines(["a", "10.0.0.1:7700"])
    (file,) = temporary.glob(f"{PREFIX}*/*")
    assert file.read_text() == "a\n10.0.0.1:7700\n"
    actor.set_engines([])
    assert file.read_text() == ""
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    actor.end()
    assert not list(temporary.iterdir())


def test_only_folders_of_dead_actors_are_removed(temporary: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folders = [temporary / name for name in (f"{PREFIX}{os.getpid()}-x", f"{PREFIX}{dead.pid}-x", f"{PREFIX}other", "blinkpy")]
    for folder in folders:
        folder.mkdir()
    remove_folders()
    assert [folder.exists() for folder in folders] == [True, False, True, True]


def test_failed_starts_are_reported(temporary: Path) -> None:
    for actor in (EngineActor(table(model="no-such"), 0, False), FrontEndActor(table(model="no-such", port=0), 0)):
        started = actor.start([])
        assert started.hopeless and "no-such" in started.problem and not started.address
        actor.end()
    assert not list(temporary.iterdir())


def test_an_ended_actor_does_not_start(temporary: Path) -> None:
    for actor in (EngineActor(table(), 0, False), FrontEndActor(table(), 0)):
        actor.end()
        assert actor.start([]) == Started(problem="it was asked to end")
    assert not list(temporary.iterdir())


def test_an_actor_that_waits_for_a_lost_engine_can_be_ended() -> None:
    actor, name = EngineActor(table(), 0, False), f"test-ray-{os.getpid()}"
    path = segment_path(name)
    path.write_bytes(b"")
    with path.open() as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a living engine does
        start = pool.submit(actor.start, [name])
        with pytest.raises(TimeoutError):
            start.result(0.3)
        actor.end()
        assert start.result(60) == Started(problem="it was asked to end")
    path.unlink()


def test_an_end_during_a_start_leaves_no_process(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray calls both in threads: the list of engines is written while the end begins."""
    actor, writes = FrontEndActor(table(), 0), threading.Event()
    replace = os.replace

    def slow(*paths: Path) -> None:
        writes.set()
        time.sleep(0.3)
        replace(*paths)

    monkeypatch.setattr("blinkpy.ray_fleet.actors.os.replace", slow)
    monkeypatch.setattr(actor, "_wait_for_address", actor._tick)
    with ThreadPoolExecutor() as pool:
        start = pool.submit(actor.start, [])
        assert writes.wait(60)
        actor.end()
        assert start.result(60) == Started(problem="it was asked to end")
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("address", ["10.0.0.1:7700", "[::1]:7700"])
def test_the_address_of_an_engine_is_what_its_flags_name(address: str) -> None:
    flags = f"--transport rdma --engine {address} --link-key-file '/a b/key'"
    assert actors._address(flags) == address
