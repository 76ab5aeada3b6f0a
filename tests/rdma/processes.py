"""Engines and front ends as separate processes: the users' command starts front ends; engines are started by it or forked."""

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import httpx
from rdma.forked_engines import ForkedEngine
from support.commands import Command
from support.waiting import wait_for

from benchmarks.serving.systems import free_port
from blinkpy.queues.layout import HEADER, read_header
from blinkpy.queues.words import COUNTER, GAUGE
from blinkpy.transport.segment import segment_path

ADDRESS = re.compile(r"--engine (\S+:\d+)")
EMULATED_START_S = 1500.0  # two engines with a model, in one of two virtual machines on two busy cores
URL = re.compile(r"on (http://\S+) ")


def free_address(host: str = "127.0.0.1") -> str:
    """HOST:PORT of a port that is free now."""
    return f"{host}:{free_port(host)}"


@contextlib.contextmanager
def engine(*options: str, listen: str = "127.0.0.1:0", wait: bool = True) -> Iterator[tuple[ForkedEngine, tuple[str, ...]]]:
    """A forked engine with a unique name, and the options with which front ends find it. wait: wait until it accepts front
    ends."""
    name = () if "--name" in options else ("--name", f"test-{secrets.token_hex(4)}")
    forked = ForkedEngine("--transport", "rdma", "--listen", listen, *name, *options)
    try:
        yield forked, ("--transport", "rdma", "--engine", forked.find(ADDRESS)[1] if wait else listen)
    finally:
        forked.end()


@contextlib.contextmanager
def frontends(count: int, *options: str, env: dict[str, str] | None = None) -> Iterator[list[tuple[Command, httpx.Client]]]:
    """Front ends on free ports, started at the same time, and a client for each. env: added to the environment."""
    commands = [Command("frontend", "--port", "0", *options, env=env) for _ in range(count)]
    try:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=command.find(URL)[1], timeout=60)) for command in commands]
            yield list(zip(commands, clients, strict=True))
        for command in commands:
            assert not any("ended with exit code" in line for line in command.said), "".join(command.said)  # a worker died
    finally:
        for command in commands:
            command.end()


def lives(command: Command | ForkedEngine) -> bool:
    return command.lives() if isinstance(command, ForkedEngine) else command.process.poll() is None


def health(client: httpx.Client) -> int:
    """The status of /health, over a new connection: a kept connection may just be closing."""
    return httpx.get(client.base_url.join("/health"), timeout=60).status_code


def counter(name: str, counted: str) -> int:
    """A counter or gauge of an engine on this machine, by the name of its segment."""
    with open(segment_path(name), "rb") as file:
        layout, _ = read_header(file.read(HEADER.itemsize))
        file.seek(layout.engine_words + 8 * (COUNTER | GAUGE)[counted])
        return int.from_bytes(file.read(8), "little")


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Callable[..., AbstractContextManager[dict[str, httpx.Client]]]]:
    """A front end for each transport, with these options, and a function that starts an engine for each, with its own options,
    and yields the clients. The users' commands start all of them."""
    address, name, rdma = free_address(), f"test-{secrets.token_hex(4)}", ("--transport", "rdma")
    ways = {
        "shm": (("--name", name), ("--name", name)),
        "rdma": ((*rdma, "--listen", address, "--name", name + "r"), (*rdma, "--engine", address)),
    }
    fronts = {name: Command("frontend", "--port", "0", *transport, *options) for name, (_, transport) in ways.items()}
    clients = dict[str, httpx.Client]()

    def wait_until(served: bool, commands: Sequence[Command] = ()) -> None:
        def reached(client: httpx.Client) -> bool:
            ended = [command.said for command in commands if not lives(command)]
            assert not ended, f"an engine ended: {ended}"
            return (health(client) == 200) == served

        def last_lines() -> str:
            return f"an engine serves: {served}; {[command.said[-8:] for command in (*fronts.values(), *commands)]}"

        for client in clients.values():
            wait_for(partial(reached, client), EMULATED_START_S, last_lines)

    @contextlib.contextmanager
    def engines(*own: str) -> Iterator[dict[str, httpx.Client]]:
        commands = [Command("engine", *transport, *own) for transport, _ in ways.values()]
        try:
            for transport, front in fronts.items():
                if transport not in clients:
                    clients[transport] = opened.enter_context(httpx.Client(base_url=front.find(URL)[1], timeout=120))
            wait_until(True, commands)
            yield clients
        finally:
            for command in commands:
                command.end()
        wait_until(False)

    try:
        with contextlib.ExitStack() as opened:
            yield engines
    finally:
        for command in fronts.values():
            command.end()
