"""The port for handshakes in the engine's process, or in a process of its own, while silent connections arrive.

    python -m benchmarks.parts.door_place

A null engine gives eight streams a token in each step of STEP_US. An attacker opens connections as fast as it can, from ADDRESSES
addresses, and says nothing; when the port closes a connection, it opens the next one. A front end on another address runs
handshakes one after another, HANDSHAKE_PAUSE_S apart. gap_ms: the time between two tokens of a stream. handshake_ms: from the
connection to the answer. failed: handshakes without an answer within HANDSHAKE_S. Only TCP is measured: no queue pair is granted.
The engine's process and the port's share the cores with all others.
"""

import contextlib
import errno
import multiprocessing
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, run_benchmark
from benchmarks.serving.null_server import START_S, STOP_S
from blinkpy.config import Config
from blinkpy.dpu.link.connectors import open_queue_pair
from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.engine.link.handshake_server import HANDSHAKE_S, HandshakeServer
from blinkpy.models.weights.checkpoint import find_model
from blinkpy.processes import Child, Reporter, child_main
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_MASK
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import Hello, Region, Welcome, introduce, new_nonce, new_owner
from blinkpy.transport.link_key import LinkKey
from blinkpy.transport.transport_kinds import WorkerIdentity
from blinkpy.transport.verbs import Endpoint

STREAMS, TOKENS, STEP_US = 8, 1000, 5000
ADDRESSES, OPEN = 40, 256  # of the attacker, and connections that it keeps open
HANDSHAKE_PAUSE_S, POLL_S = 0.05, 0.0002
PLACES = {"the engine's process": "engine_with_door", "a process of its own": "door_alone"}
KEY = LinkKey(b"the key of this benchmark, 32 bytes or more")
POINT = Endpoint(17, 1, "::ffff:127.0.0.1", 3, 5, 16)
WELCOME = Welcome(b"BLINKPYQ" * 16, 0, POINT, Region(0, 1, 8192), Region(0, 7, 4096), Region(0, 7, 4096))


def opened_door() -> tuple[HandshakeServer, int]:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    door = HandshakeServer(listening, lambda hello: WELCOME, lambda: None, KEY)
    door.start()
    return door, listening.getsockname()[1]


def engine_with_door(config: Config, reporter: Reporter) -> int:
    """A child process: an engine, with the port in a thread."""
    from blinkpy.serving.engine_process import run_engine

    start_logging("engine", config.frontend.log_level, config.watch.log_format)
    door, port = opened_door()
    with contextlib.closing(door):
        return run_engine(config, reporter, lambda flags: reporter.ready(port=port))


def engine_alone(config: Config, reporter: Reporter) -> int:
    """A child process: an engine without a port."""
    from blinkpy.serving.engine_process import run_engine

    return run_engine(config, reporter, lambda flags: reporter.ready(port=0))


def door_alone(config: Config, reporter: Reporter) -> int:
    """A child process: the port alone."""
    ended = threading.Event()
    start_logging("door", config.frontend.log_level, config.watch.log_format)
    door, port = opened_door()
    with contextlib.closing(door), contextlib.suppress(KeyboardInterrupt):
        reporter.ready(port=port)
        ended.wait()
    return 0


def attack(port: int, stop: Any, opened: Any) -> None:
    """A process that keeps OPEN silent connections open, and counts how many it opens."""
    number, waiting = 0, selectors.DefaultSelector()
    while not stop.is_set():
        while len(waiting.get_map()) < OPEN:
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.bind((f"127.0.1.{1 + number % ADDRESSES}", 0))
            number += 1
            if sock.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS):
                waiting.register(sock, selectors.EVENT_READ)
                opened.value += 1
            else:
                sock.close()
        for key, _ in waiting.select(0.01):
            ended = True
            with contextlib.suppress(OSError):
                ended = b"error" in (said := key.fileobj.recv(4096)) or not said  # type: ignore[union-attr]
            if ended:
                waiting.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def attacker(port: int, attacked: bool) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    stop, opened = context.Event(), context.Value("q", 0)
    process = context.Process(target=attack, args=(port, stop, opened), daemon=True)
    if attacked:
        process.start()
        time.sleep(2.0)  # for the process to begin
    try:
        yield opened
    finally:
        stop.set()
        if attacked:
            process.join()


class Handshakes(threading.Thread):
    """Handshakes one after another, until it is told to end."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self._port, self.ended = port, threading.Event()
        self.seconds, self.failed = list[float](), 0

    def run(self) -> None:
        while not self.ended.wait(HANDSHAKE_PAUSE_S):
            began = time.perf_counter()
            try:
                introduce("127.0.0.1", self._port, Hello(new_owner(), POINT, new_nonce()), HANDSHAKE_S, KEY)
                self.seconds.append(time.perf_counter() - began)
            except TransportError:
                self.failed += 1


def gaps(config: Config, seconds: float) -> list[float]:
    """Times between two tokens of each stream, s."""
    pair = open_queue_pair(config, WorkerIdentity(0))

    def begin() -> None:
        pair.submit(np.array([7], np.int32), RequestParameters(max_tokens=TOKENS))

    try:
        for _ in range(STREAMS):
            begin()
        last, found = dict[Any, float](), list[float]()
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            for request, _, flags in pair.poll():
                if request in last:
                    found.append(now - last[request])
                last[request] = now
                if flags & FINISH_MASK:
                    begin()
            pair.heartbeat()
            time.sleep(POLL_S)
        return found
    finally:
        pair.close()


def measured(run: Run, place: str, attacked: bool) -> dict[str, Any]:
    name = f"door-{os.getpid()}-{secrets.token_hex(4)}"
    values = {"name": name, "model": "demo", "device": "null", "load_format": "dummy", "null_step_us": STEP_US}
    config = find_model(Config().with_options(values), run.progress)
    within = PLACES[place] == "engine_with_door"
    with contextlib.ExitStack() as stack:
        engine = Child("engine_with_door" if within else "engine_alone", config, __spec__.name)
        stack.callback(engine.end, STOP_S)
        port = engine.wait_ready(START_S)["port"]
        if not within:
            door = Child("door_alone", config, __spec__.name)
            stack.callback(door.end, 0.0)
            port = door.wait_ready(START_S)["port"]
        opened, handshakes = stack.enter_context(attacker(port, attacked)), Handshakes(port)
        before = opened.value
        handshakes.start()
        found = gaps(config, run.options.seconds)
        rate = (opened.value - before) / run.options.seconds
        handshakes.ended.set()
        handshakes.join()
    check(bool(found), "no tokens came")
    return {
        "place": place,
        "attacked": attacked,
        "connections_per_s": round(rate),
        "gap_ms": describe(1000 * np.array(found), "ms"),
        "handshake_ms": describe(1000 * np.array(handshakes.seconds or [1000 * HANDSHAKE_S]), "ms", tail=1),
        "handshakes": len(handshakes.seconds),
        "failed": handshakes.failed,
    }


def benchmark(run: Run) -> None:
    rows = [measured(run, place, attacked) for attacked in (False, True) for place in PLACES]
    run.write(__doc__, {"door": rows})


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        entries = {entry.__name__: entry for entry in (engine_with_door, engine_alone, door_alone)}
        sys.exit(child_main(entries, sys.argv[1], int(sys.argv[2])))
    run_benchmark(
        "parts.door_place",
        "The port for handshakes in the engine's process, or in a process of its own, under silent connections.",
        benchmark,
        seconds=Flag(10.0, "of each measurement", smoke=1.0),
    )
