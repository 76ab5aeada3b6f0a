"""The attacks of benchmarks.serving.attacks: each runs against a server for a given time, in a separate process.

Most attacks are of the grammar (attack_grammar.py); attacks that need more than connections have a function here.
Attackers have valid keys if needed, so only the limits stop them. `seen` counts the answers.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import resource
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe

import uvloop

from benchmarks.common.load import get
from benchmarks.serving.attack_clients import STATUS, Assault, Goal, Seen
from benchmarks.serving.attack_grammar import (
    CHUNKED,
    DRIPPED,
    IMMEDIATELY,
    NEVER,
    PIPELINED,
    RESET,
    STALLED,
    STRANGER,
    TENANT,
    Attack,
)
from benchmarks.serving.attack_kinds import KINDS
from benchmarks.serving.attack_requests import pieces_of
from benchmarks.serving.systems import command_line, free_port, tree
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.engine.link.handshake_server import HandshakeServer
from blinkpy.queues import words as W
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import HandshakeError, Hello, Region, Welcome, introduce, new_nonce
from blinkpy.transport.link_key import LinkKey
from blinkpy.transport.verbs import Endpoint

MANY = 1000  # addresses of clients: one has too few ports
PAUSE_S = 0.02  # pause after a connection that the server closed; between two turns of a hostile front end it is 0.1 ms
PATIENCE_S = 60.0  # for an answer, and for the end of a process
CROWD, CROWD_S, PREPARED = 3000, 5.0, 200  # connections, seconds until the next crowd, different requests
GUESSED_TOKENS, GUESSED_IDS = 1900, (500, 4000)  # tokens of a prompt: more than a page, with ids of the model


@dataclass(frozen=True)
class Site:
    """The attacked server.

    key: a valid key. segment: of the engine. front_end: process id that gets SIGTERM. scale: factor of the number of
    connections. victim: the key of another tenant.
    """

    port: int
    key: str
    segment: str
    front_end: int
    scale: float = 1.0
    victim: str = ""

    def head(self, length: int | None, path: str = "/v1/completions", key: str | None = None) -> bytes:
        """The head of a POST. length: of its body; None: in chunks; key: None: the attacker's."""
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        key = key or self.key
        words = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n{size}"
        return words.encode() + b"\r\n\r\n"


OwnAttack = Callable[[Site, float, Seen], Awaitable[None]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answer_of(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Count the statuses until the server closes the connection."""
    tail, found = b"", False
    while piece := await reader.read(1 << 16):
        for status in STATUS.findall(tail + piece):
            seen[status.decode()] += 1
            found = True
        tail = (tail + piece)[-11:]
    seen["closed without an answer"] += not found


@contextlib.asynccontextmanager
async def listening(reader: asyncio.StreamReader, seen: Seen) -> AsyncIterator[asyncio.Task[None]]:
    """Counts statuses during the block, and at its end until the server closes the connection."""
    answer = asyncio.create_task(answer_of(reader, seen))
    try:
        with contextlib.suppress(OSError):
            yield answer
        await answer
    finally:
        answer.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await answer


async def again_and_again(site: Site, until: float, seen: Seen, at_once: int, talk: Talk) -> None:
    """Hold this number of connections. Each calls `talk`, and is reopened when that or the connection ends."""

    async def one() -> None:
        while time.monotonic() < until:
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((f"127.0.{random.randrange(1, 255)}.{random.randrange(1, 255)}", 0))  # one address has too few ports
            writer = None
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", site.port))
                    reader, writer = await asyncio.open_connection(sock=sock)
                    await talk(reader, writer)
            except TimeoutError:
                seen["open at the end"] += 1
            except (OSError, EOFError) as error:
                seen[f"ended: {type(error).__name__}"] += 1
            finally:
                (writer.transport.abort if writer else sock.close)()
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(one() for _ in range(max(1, round(site.scale * at_once)))))


async def endless_trailers(site: Site, until: float, seen: Seen) -> None:
    """H2: 8 connections whose bodies end with a trailer that does not"""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with listening(reader, seen) as answer:
            writer.write(site.head(None) + b"2\r\n[]\r\n0\r\nx: ")
            while not answer.done():
                writer.write(b"y" * 65536)
                await writer.drain()

    await again_and_again(site, until, seen, 8, talk)


async def claiming_front_end(site: Site, until: float, seen: Seen) -> None:
    """H6: a front end that claims its queue pair, and rings for garbage entries, 5,000 times a second"""
    rng, deadline = random.Random(time.time_ns()), time.monotonic() + 20
    while True:
        try:
            transport = attach_segment(site.segment, 1, 5.0)
            break
        except TransportError:
            if time.monotonic() > deadline:
                raise
    with contextlib.closing(transport):
        entries = transport.layout.sizes.sq_entries
        while time.monotonic() < until:
            words = transport.read_pair()
            transport.write_word(W.FRONT_HEARTBEAT, rng.getrandbits(62))
            transport.write_word(W.FRONT_CLAIM, words.epoch + 1)
            seen["claims"] += 1
            if words.epoch > seen["epochs"]:
                seen["epochs"], seen["claims granted"] = words.epoch, seen["claims granted"] + 1
            for _ in range(4):
                transport.write_entry(rng.randrange(entries), rng.randbytes(256))
                seen["garbage entries"] += 1
            transport.ring_doorbell(words.epoch << W.EPOCH_SHIFT | (words.sq_head + rng.randrange(entries)) & W.POSITION_MASK)
            time.sleep(0.0001)
    del seen["epochs"]


async def silent_handshakes(site: Site, until: float, seen: Seen) -> None:
    """H7: 200 silent clients of an engine's handshake port without a card, and a front end that connects"""
    key, point = LinkKey(secrets.token_bytes(32)), Endpoint(17, 1, "::1", 3, 5, 16)
    welcome = Welcome(bytes(128), 0, point, Region(4096, 1, 4096), Region(8192, 1, 4096), Region(0, 1, 4096))
    listening = socket.create_server(("127.0.0.1", 0))
    door = HandshakeServer(listening, lambda hello: welcome, lambda: None, key)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        seen["strangers sent away"] += 1

    async def shake_hands() -> None:
        address: tuple[str, int] = listening.getsockname()
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                await asyncio.to_thread(introduce, *address, Hello(7, point, new_nonce()), 10.0, key)
                seen["handshakes"] += 1
            except (TransportError, HandshakeError):
                seen["handshakes refused"] += 1
            seen["slowest handshake, ms"] = max(seen["slowest handshake, ms"], round(1000 * (time.monotonic() - began)))
            await asyncio.sleep(0.1)

    log = logging.getLogger("blinkpy.engine")
    level = log.level
    log.setLevel(logging.ERROR)  # a log line for each client
    door.start()
    try:
        at_door = replace(site, port=listening.getsockname()[1])
        await asyncio.gather(shake_hands(), again_and_again(at_door, until, seen, 200, talk))
    finally:
        door.close()
        log.setLevel(level)


async def killed_workers(site: Site, until: float, seen: Seen) -> None:
    """killed workers: of another front end of the same engine, each as soon as it serves"""
    port = free_port()
    words = f"frontend demo --port {port} --name {site.segment} --workers 1 --no-access-log --log-level error"
    command = [sys.executable, "-m", "blinkpy", *words.split()]
    front = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        while time.monotonic() < until and front.returncode is None:
            status, _ = await asyncio.to_thread(get, "127.0.0.1", port, "/health")
            workers = [pid for pid in tree(front.pid) if "blinkpy.dpu.worker" in command_line(pid)] if status == 200 else []
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
                seen["workers killed"] += 1
            await asyncio.sleep(5 * PAUSE_S)
        seen["front ends that ended"] += front.returncode is not None
    finally:
        with contextlib.suppress(ProcessLookupError):
            front.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(front.wait(), PATIENCE_S)
            front.kill()
        await front.wait()


async def guessed_prompts(site: Site, until: float, seen: Seen) -> None:
    """guessed prompts: an attempt to detect another tenant's prompts, by prefix hits and by the time of the first
    token"""

    async def ask(prompt: list[int], key: str) -> tuple[int, float]:
        """(tokens found in the prefix cache, seconds)."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        try:
            writer.write(site.head(len(body), key=key).replace(b"Host", b"Connection: close\r\nHost") + body)
            head, _, answer = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
        finally:
            writer.transport.abort()
        if STATUS.findall(head) != [b"200"]:
            raise ConnectionError(head)
        return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]), time.monotonic() - began

    def fresh() -> list[int]:
        return [random.randrange(*GUESSED_IDS) for _ in range(GUESSED_TOKENS)]

    while time.monotonic() < until:
        secret = fresh()
        await ask(secret, site.victim)
        cases = {"another's": (secret, site.key), "nobody's": (fresh(), site.key), "one's own": (secret, site.victim)}
        times = {}
        for whose in random.sample(sorted(cases), len(cases)):
            hits, times[whose] = await ask(*cases[whose])
            seen[f"hit tokens of {whose} prompts"] += hits
        seen["prompts"] += 1
        seen["prompts guessed by their time"] += times["another's"] < times["nobody's"]
        seen["own prompts known by their time"] += times["one's own"] < times["nobody's"]


async def drain_under_load(site: Site, until: float, seen: Seen) -> None:
    """drain: SIGTERM, while 20 clients continue to send requests, on old and new connections"""
    body = b'{"prompt":"the king","max_tokens":4}'
    request = site.head(len(body)) + body
    signalled = asyncio.get_running_loop().call_later(0.5, os.kill, site.front_end, signal.SIGTERM)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(20):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            seen[STATUS.findall(head)[0].decode()] += 1
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            await asyncio.sleep(PAUSE_S)
            if b"connection: close" in head.lower():
                return

    await again_and_again(site, until, seen, 20, talk)
    signalled.cancel()


async def crowd_at_once(site: Site, until: float, seen: Seen) -> None:
    """crowd at once: 3,000 connections, each with one request of a random kind of work, all at one moment, again and
    again"""
    rng = random.Random()
    works = [kind.name for kind in KINDS.values() if kind.path]
    requests = [b"".join(pieces_of(Attack(rng.choice(works)), site.key, rng)) for _ in range(PREPARED)]

    async def one(request: bytes) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        writer = None
        try:
            sock.bind((f"127.0.{rng.randrange(1, 255)}.{rng.randrange(1, 255)}", 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", site.port))
            reader, writer = await asyncio.open_connection(sock=sock)
            async with listening(reader, seen):
                writer.write(request)
        except OSError as error:
            seen[f"ended: {type(error).__name__}"] += 1
        finally:
            (writer.transport.abort if writer else sock.close)()

    while time.monotonic() < until:
        seen["crowds"] += 1
        crowd = [asyncio.create_task(one(rng.choice(requests))) for _ in range(round(site.scale * CROWD))]
        _, unanswered = await asyncio.wait(crowd, timeout=min(CROWD_S, until - time.monotonic()))
        seen["open at the end"] += len(unanswered)
        for client in unanswered:
            client.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


ATTACKS: dict[str, Attack | OwnAttack] = {
    "idle connections": Attack("accept", STRANGER, 1500, addresses=MANY),
    "endless trailers": endless_trailers,
    "unread pipelines": Attack("GET /openapi.json", STRANGER, 60, pace=PIPELINED, reading=NEVER),
    "nested bodies": Attack("empty lists", TENANT, 8, 340_000),
    "abandoned prompts": Attack("huge request", TENANT, 60, 40, leaves=IMMEDIATELY),
    "unfinished bodies": Attack("huge request", TENANT, 250, 40, pace=STALLED),
    "claiming front end": claiming_front_end,
    "silent handshakes": silent_handshakes,
    "killed workers": killed_workers,
    "guessed prompts": guessed_prompts,
    "refused connections": Attack("invalid", STRANGER, 500, addresses=MANY),
    "flood of requests": Attack("short request", TENANT, 300),
    "tiny chunks": Attack("large request", TENANT, 50, pace=CHUNKED),
    "dripping bodies": Attack("large request", TENANT, 1000, 10, pace=DRIPPED),
    "heavy answers": Attack("log probabilities", TENANT, 2, 12),
    "reset requests": Attack("log probabilities", TENANT, 200, 12, leaves=RESET),
    "crowd at once": crowd_at_once,
    "drain": drain_under_load,
}


async def carry_out(name: str, site: Site, until: float, seen: Seen) -> None:
    """Run one of ATTACKS until a time of time.monotonic(); `seen` counts the answers."""
    attack = ATTACKS[name]
    if isinstance(attack, Attack):
        scaled = replace(attack, connections=max(1, round(site.scale * attack.connections)))
        await Assault(scaled, Goal(site.port, tenant_key=site.key), name, seen).run(until)
    else:
        await attack(site, until, seen)


def attack(pipe: Pipe, name: str, site: Site, seconds: float) -> None:
    """The process of an attack: it sends "ready", waits for the start signal, and sends the counts at the end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    seen: Seen = Counter()
    pipe.send("ready")
    pipe.recv()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(carry_out(name, site, time.monotonic() + seconds, seen))
    pipe.send(dict(sorted(seen.items())))
