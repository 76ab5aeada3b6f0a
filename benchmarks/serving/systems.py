"""The servers that are compared: how each is started, on which cores, when it is healthy, and how it ends.

A system is a name of SYSTEMS, NAME=SYSTEM for one of these with other options under its own name, NAME=URL for a server
that runs already, or NAME=COMMAND with {model}, {name}, {port}, {length} and {python} in it; `env VARIABLE=value command` sets
variables. All built-in commands ask for the same: random weights where the model is a shape, the same longest sequence, batch
and share of memory, and no prefix cache, since every prompt is new.
"""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from benchmarks.common.harness import ROOT, UsageError, on_cores
from benchmarks.common.load import get
from blinkpy.progress import ProgressCallback

STOP_S = 20.0
POLL_S = 0.05
LOWEST_PORT, PORT_TRIES = 10_000, 100
LOG_TAIL = 2000  # bytes of the log that a failed start shows
BLINKPY = (
    "{python} -m blinkpy serve {model} --served-model-name {name} --port {port} --max-model-len {length} {dummy} --slots 512 "
    "--max-num-seqs 256 --gpu-memory-utilization 0.85 --no-enable-prefix-caching --log-level warning"
)
ONE_SIZE = " --policy fcfs --max-num-batched-tokens 8192 --mixed-step-tokens 8192"  # of all steps, in order of arrival: as vLLM
VLLM = (
    "{python} -m vllm.entrypoints.cli.main serve {model} --served-model-name {name} --host 127.0.0.1 --port {port} "
    "--max-model-len {length} {dummy} --max-num-seqs 256 --gpu-memory-utilization 0.85 --no-enable-prefix-caching "
    "--disable-uvicorn-access-log"
)
SGLANG = (
    "{python} -m sglang.launch_server --model-path {model} --served-model-name {name} --host 127.0.0.1 --port {port} "
    "--context-length {length} {dummy} --max-running-requests 256 --mem-fraction-static 0.85 --disable-radix-cache "
    "--attention-backend fa3 --sampling-backend pytorch --log-level warning"
)
REALTIME_PRIORITY = 50  # of SCHED_FIFO


class ServerError(Exception):
    """A server that can't be measured: not started, not healthy, ended. The message is for the user."""


@dataclass(frozen=True)
class System:
    """One server.

    command: a template, or empty for a server that runs at url.
    front_end: a pattern for the command lines of those of its processes that a DPU could take over (HTTP and text). They can be
        given separate cores.
    engine: a pattern for its processes that start each step, if these get separate cores.
    realtime: whether the engine's processes get real-time priority (SCHED_FIFO).
    """

    name: str
    command: str = ""
    url: str = ""
    front_end: str = ""
    engine: str = ""
    realtime: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    extra: str = ""


VLLM_FRONT_END = r"vllm\.entrypoints|APIServer"
DPU_PART = r"blinkpy\.serving\.children frontend|blinkpy\.dpu\.worker"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
VLLM_VARIABLES = {**OFFLINE, "VLLM_NO_USAGE_STATS": "1"}
SYSTEMS = {
    system.name: system
    for system in (
        System("blinkpy", BLINKPY, front_end=DPU_PART),
        System("blinkpy-host", BLINKPY + " --control host", front_end=DPU_PART),
        System("blinkpy-8192", BLINKPY + ONE_SIZE, front_end=DPU_PART),
        System("vllm", VLLM, front_end=VLLM_FRONT_END, environment=VLLM_VARIABLES),
        System("vllm-reserved", VLLM, front_end=VLLM_FRONT_END, engine="EngineCore", environment=VLLM_VARIABLES),
        System("vllm-realtime", VLLM, front_end=VLLM_FRONT_END, engine="EngineCore", realtime=True, environment=VLLM_VARIABLES),
        System("sglang", SGLANG, front_end=r"sglang\.launch_server|sglang::detokenizer", environment=OFFLINE),
    )
}


def find_system(text: str, extras: Sequence[str] = (), environment: Sequence[str] = (), front_ends: Sequence[str] = ()) -> System:
    """The system of one --system, with the changes by --extra, --env and --front-end. Raises UsageError for an unknown
    name."""
    name, given, rest = text.partition("=")
    if not given:
        if name not in SYSTEMS:
            raise UsageError(f"unknown system {name!r}: one of {', '.join(SYSTEMS)}, NAME=SYSTEM, NAME=URL or NAME=COMMAND")
        system = SYSTEMS[name]
    elif rest in SYSTEMS:
        system = SYSTEMS[rest]
    elif rest.startswith("http://"):
        system = System(name, url=rest.rstrip("/"))
    else:
        system = System(name, command=rest)

    def own(options: Sequence[str]) -> list[str]:
        return [words for owner, _, words in (option.partition(":") for option in options) if owner == name]

    variables = dict(assignment.partition("=")[::2] for assignment in own(environment))
    front_end = [system.front_end, *own(front_ends)][-1]
    extra, environs = " ".join(own(extras)), {**system.environment, **variables}
    return replace(system, name=name, extra=extra, environment=environs, front_end=front_end)


@dataclass(frozen=True)
class Model:
    """The served model.

    folder: a path, or another name that the server understands.
    name: in the API and in results.
    length: longest sequence.
    vocabulary: ids of random prompts are below it.
    shape: random weights.
    """

    folder: str
    name: str
    length: int
    vocabulary: int
    shape: bool


@dataclass(frozen=True)
class Cores:
    """Cores by number.

    client: empty for any core.
    front_end, engine: cores of the server's front-end processes and of its engine's, if they get separate cores.
    """

    server: tuple[int, ...]
    client: tuple[int, ...] = ()
    front_end: tuple[int, ...] = ()
    engine: tuple[int, ...] = ()

    def of(self, system: System) -> Self:
        """The cores for a system: only systems whose engine is known by a pattern have `engine`."""
        return self if system.engine else replace(self, engine=())

    @property
    def shared(self) -> Self:
        """Cores for the front ends and all others together."""
        return replace(self, front_end=())

    @property
    def contended(self) -> tuple[int, ...]:
        """The cores of neighbours: the server's, without those reserved for front ends and engine."""
        return tuple(core for core in self.server if core not in (*self.front_end, *self.engine))

    @property
    def loading(self) -> tuple[int, ...]:
        """The cores of client processes: the client's without the last one, if it has several."""
        return self.client[:-1] or self.client

    def spare(self, processes: int) -> bool:
        """Whether this number of client processes have a core each that is no server's: they may then spin."""
        return processes <= len(set(self.loading)) and not set(self.loading) & set(self.server)

    @property
    def watching(self) -> tuple[int, ...]:
        """The core of the benchmark itself. No client runs there, since reading the energy counter may block a core
        for milliseconds."""
        return self.client[-1:]


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers from a list such as 0-3,8. Raises UsageError."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        if not re.fullmatch(r"\d+(-\d+)?", part):
            raise UsageError(f"{part!r} is neither a core nor a range of cores")
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    if missing := sorted(set(found) - os.sched_getaffinity(0)):
        raise UsageError(f"this process may not use core {missing[0]}")
    return tuple(found)


class Running:
    """A running server. facts: its description in a result file."""

    def __init__(self, system: System, host: str, port: int, process: subprocess.Popen[bytes] | None):
        self.system, self.host, self.port, self.process = system, host, port, process
        self.facts: dict[str, Any] = {
            "command": " ".join([system.command, system.extra]).strip() or "was running already",
            "environment": {name: "a path" if os.sep in value else value for name, value in system.environment.items()},
        }

    def check(self) -> None:
        """Raise ServerError if the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise ServerError(f"{self.system.name} ended with exit code {self.process.returncode}")

    def healthy(self) -> bool:
        return get(self.host, self.port, "/health")[0] == 200

    def version(self) -> str:
        """The version that the server reports; empty if it reports none."""
        with contextlib.suppress(ValueError, AttributeError):
            return str(json.loads(get(self.host, self.port, "/version")[1]).get("version", ""))
        return ""

    def place(self, cores: Cores) -> None:
        """Pin the processes of front end and engine, and the others, to their cores, with all their threads."""
        moved = engines = 0
        for pid in tree(self.process.pid) if self.process else ():  # otherwise another user has started it
            own = cores.contended
            if cores.front_end and self.system.front_end and re.search(self.system.front_end, command_line(pid)):
                own, moved = cores.front_end, moved + 1
            elif cores.engine and self._of_engine(pid):
                own, engines = cores.engine, engines + 1
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):  # it has just ended
                    os.sched_setaffinity(int(task.name), own)
        self.facts["front_end_processes"] = moved
        if cores.front_end and not moved:
            reason = "no process is known to be a front end, so none can have cores of its own (--front-end)"
            raise UsageError(f"{self.system.name}: {reason}")

        if cores.engine and not engines:
            raise ServerError(f"{self.system.name}: no process matches {self.system.engine!r}, so none gets the engine's cores")

    def _of_engine(self, pid: int) -> bool:
        pattern = self.system.engine
        return bool(pattern and re.search(pattern, command_line(pid) + process_title(pid)))

    def prioritise(self) -> None:
        """Give the engine's processes real-time priority, with all their threads. Raises ServerError if that is not
        permitted, or none is known."""
        threads = 0
        for pid in tree(self.process.pid) if self.process else ():
            if self._of_engine(pid):
                for task in Path(f"/proc/{pid}/task").glob("*"):
                    try:
                        os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
                    except OSError as error:
                        reason = f"real-time priority needs CAP_SYS_NICE: {error.strerror}"
                        raise ServerError(f"{self.system.name}: {reason}") from error
                    threads += 1
        if not threads:
            raise ServerError(f"{self.system.name}: no process matches {self.system.engine!r}")
        self.facts["realtime_threads"] = threads


@contextlib.contextmanager
def running(system: System, model: Model, cores: Cores, log: Path, limit_s: float, report: ProgressCallback) -> Iterator[Running]:
    """Start a server, and end it afterwards in any case. log: its output.

    Raises ServerError with the end of the log if it is not healthy within limit_s.
    """
    if system.url:
        parts = urllib.parse.urlsplit(system.url)
        server = Running(system, parts.hostname or "127.0.0.1", parts.port or 80, None)
        if not server.healthy():
            raise ServerError(f"{system.name}: {system.url}/health does not answer 200")
        server.facts["version"] = server.version()
        yield server
        return
    if system.engine and not system.realtime and not cores.engine:
        raise ServerError(f"{system.name} reserves cores for its engine: name some of the server's with --engine-cores")
    port = free_port()
    command = command_of(system, model, port)
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, **system.environment}
    began = time.monotonic()
    with log.open("wb") as out, on_cores(cores.server):
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        try:
            process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        except OSError as error:
            raise ServerError(f"{system.name}: can't start {command[0]}: {error.strerror}") from error
    server = Running(system, "127.0.0.1", port, process)
    try:
        while not server.healthy():
            report(f"starting {system.name}", time.monotonic() - began, limit_s)
            try:
                server.check()
                if time.monotonic() - began > limit_s:
                    raise ServerError(f"{system.name} was not healthy within {limit_s:.0f} s")
            except ServerError as error:
                tail = log.read_bytes()[-LOG_TAIL:].decode(errors="replace")
                raise ServerError(f"{error}; the end of its output:\n{tail}") from None
            time.sleep(POLL_S)
        server.facts["start_to_healthy_s"] = round(time.monotonic() - began, 2)
        server.facts["version"] = server.version()
        if cores.front_end or cores.engine:
            server.place(cores)
        if system.realtime:
            server.prioritise()
        yield server
    finally:
        stop(process)


def command_of(system: System, model: Model, port: int) -> list[str]:
    """The words of a system's command."""
    dummy = "--load-format dummy" if model.shape else ""  # random weights
    values = {"python": sys.executable, "model": model.folder, "name": model.name, "port": port, "length": model.length}
    return shlex.split(system.command.format(dummy=dummy, **values)) + shlex.split(system.extra)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server in order, and the rest of its processes by SIGKILL; returns when all have ended, or after STOP_S."""
    everybody = tree(process.pid)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for pid in filter(alive, everybody):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + STOP_S
    while (process.poll() is None or any(map(alive, everybody))) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def tree(pid: int) -> list[int]:
    """A process and its descendants, parents first. Reads every process's parent, since not every kernel lists
    children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def parent_of(pid: int) -> int:
    """Raises OSError if there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def process_title(pid: int) -> str:
    """The short name of a process, which it may have chosen itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def free_port(host: str = "127.0.0.1") -> int:
    """A free port outside the range that the kernel gives to connections.

    A server may bind its port minutes after it gets the number, while another benchmark's client connects. Raises
    ServerError.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(PORT_TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, random.randrange(LOWEST_PORT, max(low, LOWEST_PORT + 1000))))
            return int(probe.getsockname()[1])
    raise ServerError(f"none of {PORT_TRIES} ports is free")
