"""A cluster of Ray's on this machine, and `blinkpy ray up` in it. Everything is on 127.0.0.1."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import START_S, Command
from support.waiting import wait_for

from benchmarks.serving.systems import command_line, free_port, tree

MARK = "BLINKPY_RAY_TEST"
os.environ[MARK] = secrets.token_hex(8)
# Ray reads them when it is imported, which happens later: stay on 127.0.0.1, and write no key into the home.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

SERVES = re.compile(r"blinkpy serves (\S+) on (http://\S+) ")
OPTIONS = {
    "model": "demo",
    "device": "null",
    "null_step_us": 20_000,
    "max_model_len": 512,
    "num_pages": 512,
    "record_steps": 0,
    "shutdown_s": 3,
    "access_log": False,
}
SCALE = {"requests": 4, "free_pages": 0.0, "interval_s": 0.5, "up_s": 1.0, "down_s": 5.0}


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_plan(
    path: Path,
    engines: dict[str, Any],
    scale: dict[str, Any],
    front_ends: int = 1,
    **more: Any,
) -> None:
    lines = [f"{name} = {toml(value)}" for name, value in {**OPTIONS, **more}.items()]
    tables = {"engines": engines, "scale": scale, "front_ends": {"number": front_ends}}
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {toml(value)}" for name, value in values.items())]
    path.write_text("\n".join(lines))


def folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("blinkpy-ray-*")}


def processes() -> dict[int, str]:
    """Engines, front ends and actors that these tests started, by process id: below this process, or with MARK
    from it. Other clusters may run on the machine, and must not be touched."""
    kinds = ["ray::EngineActor", "ray::FrontEndActor", "blinkpy.serving.children", "blinkpy.dpu.worker"]
    own = set(tree(os.getpid())) | {
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and marked(entry)
    }
    found = {pid: command_line(pid) for pid in own}
    return {pid: line for pid, line in found.items() if any(kind in line for kind in kinds)}


def marked(entry: Path) -> bool:
    """Whether a process, a folder of /proc, has MARK. A process that changed its title may have lost it."""
    try:
        return f"{MARK}={os.environ[MARK]}".encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def oldest(kind: str) -> int:
    """Process id of one of processes()."""
    return min(pid for pid, line in processes().items() if kind in line)


def segments_of(pids: set[int]) -> list[str]:
    """Queue memory of engines whose actors had these process ids."""
    return [path.name for pid in pids for path in Path("/dev/shm").glob(f"blinkpy.serve-{pid}-*")]


class RayFleet(Command):
    """A running `blinkpy ray up`. urls: the URLs of its front ends; url: the URL of the first front end."""

    def __init__(self, path: Path, address: str) -> None:
        arguments = ["--address", address] if address else []
        super().__init__("ray", "up", str(path), *arguments, env={"RAY_DEDUP_LOGS": "0"})

    def connect(self, front_ends: int) -> None:
        """Wait until it serves."""
        self.find(SERVES, START_S)
        wait_for(lambda: len(SERVES.findall(self.text)) == front_ends, 20)
        self.urls = [url for _, url in SERVES.findall(self.text)]
        self.url = self.urls[0]

    @property
    def text(self) -> str:
        return "".join(self.said)

    def metric(self, name: str) -> list[int]:
        """Values of all labels; empty without an answer."""
        time.sleep(0.2)  # a waiting caller asks repeatedly
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"{self.url}/metrics", timeout=5).text
            return [int(float(value)) for value in re.findall(rf"^blinkpy_{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)]
        return []

    def wait_engines(self, number: int, timeout_s: float = START_S) -> float:
        """Wait until the front end lists and reaches as many engines; the seconds that it took."""
        return wait_for(lambda: self.metric("each_engine_up") == [1] * number, timeout_s, lambda: self.text[-4000:])

    def actors(self, kind: str) -> dict[str, Any]:
        """Living actors of engines, or of front ends, by name."""
        import ray
        from ray.util import list_named_actors

        space = f"blinkpy-{self.process.pid}"
        names = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == space]
        found = dict[str, Any]()
        for name in sorted(names):
            with contextlib.suppress(ValueError):  # it has just ended
                found |= {name: ray.get_actor(name, space)} if name.startswith(kind) else {}
        return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a running cluster."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-test-")  # its sockets' paths must be short
    ray.init(
        address="local",
        _temp_dir=folder,
        include_dashboard=False,
        num_cpus=2,
        num_gpus=0,
        object_store_memory=80 << 20,
        logging_level="ERROR",
    )
    try:
        address = ray.get_runtime_context().gcs_address
        assert address.startswith("127.0.0.1:")
        yield address
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def clean_end() -> Iterator[None]:
    """Processes, queue memory and files of the fleet are gone at the end of a test."""
    before, actors, ended = folders(), set[int](), threading.Event()

    def look() -> None:
        while not ended.wait(1.0):
            actors.update(pid for pid, line in processes().items() if "ray::EngineActor" in line)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
        wait_for(lambda: not processes(), 60, lambda: f"{processes()}")
    finally:
        ended.set()
        looking.join()
    assert not segments_of(actors)
    assert folders() <= before


@contextlib.contextmanager
def fleet(
    path: Path,
    address: str,
    engines: dict[str, Any],
    scale: dict[str, Any] = SCALE,
    front_ends: int = 1,
    **more: Any,
) -> Iterator[RayFleet]:
    """A fleet until the end of the block, which ends it in order if the test has not done so."""
    write_plan(path, engines, scale, front_ends, port=free_port(), **more)
    command = RayFleet(path, address)
    try:
        command.connect(front_ends)
        yield command
        if command.process.poll() is None:
            command.process.send_signal(signal.SIGTERM)
            assert command.wait(60) == 0, command.text[-4000:]
    finally:
        for pid in [] if command.process.poll() is not None else tree(command.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        print(command.text)
