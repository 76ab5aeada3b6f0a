"""The location of an engine's queue memory on a machine with several NUMA nodes."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkpy.config import Config
from blinkpy.engine import engine
from blinkpy.engine import sizing as near_memory
from blinkpy.engine.devices.cuda_device import CudaDevice
from blinkpy.engine.devices.null_device import NullDevice

ADDRESS = "0000:18:00.0"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the list of a node's cores."""
    monkeypatch.setattr(near_memory, "DEVICES", tmp_path)
    (tmp_path / ADDRESS).mkdir()
    return tmp_path / ADDRESS / "local_cpulist"


def test_cores_of_the_node_are_found_in_any_list(node: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(512)))
    for _ in range(50):
        cores, parts = set[int](), list[str]()
        for first in sorted(rng.choice(np.arange(0, 500, 10), int(rng.integers(1, 9)), replace=False).tolist()):
            last = first + int(rng.integers(0, 9))
            cores |= set(range(first, last + 1))
            parts.append(f"{first}-{last}" if last > first else str(first))
        node.write_text(",".join(parts) + "\n")
        assert near_memory.cores_near(ADDRESS) == cores


def test_cores_that_the_engine_may_not_use_are_left_out(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {2, 3, 40})
    node.write_text("0-2,4-39\n")
    assert near_memory.cores_near(ADDRESS) == {2}


@pytest.mark.parametrize("listed", [None, "", "\n", "no list"])
def test_an_unknown_node_has_no_cores(node: Path, listed: str | None) -> None:
    if listed is not None:
        node.write_text(listed)
    assert near_memory.cores_near(ADDRESS) == frozenset()


def test_a_thread_runs_on_the_cores_and_then_on_its_own_again() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset([max(before)])
    others = list[set[int]]()
    with pytest.raises(ZeroDivisionError), near_memory.running_on(one):
        assert os.sched_getaffinity(0) == one
        1 / 0  # noqa: B018
    assert os.sched_getaffinity(0) == before

    def look() -> None:
        ready.wait()
        others.append(os.sched_getaffinity(0))

    ready = threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    with near_memory.running_on(one):
        ready.set()
        thread.join()
    assert others == [before]  # no other thread of the process is moved
    with near_memory.running_on(frozenset()):
        assert os.sched_getaffinity(0) == before


def test_an_engine_makes_its_queues_there(monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = frozenset([max(os.sched_getaffinity(0))]), list[set[int]]()

    class Near(NullDevice):
        def load(self, setup: object) -> Any:
            return None

        def near_cores(self) -> frozenset[int]:
            return one

    def create(*arguments: object) -> None:
        found.append(os.sched_getaffinity(0))
        raise InterruptedError

    monkeypatch.setattr(engine, "create_segment", create)
    with pytest.raises(InterruptedError):
        engine.Engine(Config().with_options({"device": "null", "model": "demo"}), Near()).start()
    assert found == [one]


def test_the_gpus_node_is_that_of_its_address(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime fills a longer text than it needs; without an answer, the engine still serves."""
    bindings = pytest.importorskip("cuda.bindings.runtime")
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)))
    node.write_text("2-3\n")
    known = bindings.cudaError_t.cudaSuccess, ADDRESS.upper().encode() + b"\0" + b" " * 19
    for answer, cores in ((known, {2, 3}), ((bindings.cudaError_t.cudaErrorInvalidDevice, None), set())):
        monkeypatch.setattr(bindings, "cudaDeviceGetPCIBusId", lambda length, device, answer=answer: answer)
        assert CudaDevice().near_cores() == cores
