"""Random requests against a server with the null engine: no 5xx, no hang, no leak. `make fuzz-http` runs it.

Requests begin as valid ones and are damaged as values, as JSON, as bytes and as HTTP. Each has a seed of its own, made of the
run's seed and its number; those that the server fails at are kept in build/fuzz-http. With --schemathesis, a command, requests
made from /openapi.json follow.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from support.commands import Command

from benchmarks.serving.systems import command_line, tree

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
KEPT = Path("build/fuzz-http")
ANSWER_S = 0.2  # until a client takes its request for incomplete and half-closes
HANG_S = 20.0  # until an answer, or the end of a half-closed connection
LEAK_MIB, LEAK_FILES = 64, 8  # of a worker, over a run
LINES = 60  # of the log that are shown
STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3})")

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    1e308,
    -0.0,
    "",
    "\0",
    "é\ud800",
    "x" * 300,
)
VALUES += (
    [],
    {},
    [[]],
    {"": {}},
    [None],
    {"type": "text"},
    {"type": "json_object"},
    ["a"] * 20,
    "auto",
    "required",
    "user",
    [7, 8],
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the dog", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "store": False},
    "/tokenize": {"prompt": "the dog", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
PATHS = (
    *BODIES,
    "/health",
    "/livez",
    "/metrics",
    "/v1/models",
    "/v1/models/%2e%2e",
    "/openapi.json",
    "/nowhere",
    "*",
    "//",
    "/\xff",
)
PIECES = (
    b"\r\n",
    b"\0",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b": ",
    b'"',
    b"\\",
    b"{",
    b"]",
    b"HTTP/1.1",
    b"\xff\xfe",
    b"Transfer-Encoding: chunked\r\n",
)
HEADERS: tuple[bytes, ...] = (
    b"content-length: 5",
    b"content-length: -1",
    b"transfer-encoding: chunked",
    b"expect: 100-continue",
    b"connection: close",
)
HEADERS += (
    b"connection: upgrade\r\nupgrade: websocket",
    b"content-encoding: gzip",
    b"x: " + b"y" * 9000,
    b"authorization: Bearer \xff",
    b"host:",
)


class Requests:
    """Makes the bytes of requests. fields: names that /openapi.json has for each path."""

    def __init__(self, seed: int, fields: dict[str, list[str]]):
        self.seed, self._fields = seed, fields

    def make(self, number: int) -> bytes:
        """One or a few requests on a connection."""
        rng = np.random.default_rng([self.seed, number])
        made = b"".join(self._request(rng) for _ in range(1 if rng.random() < 0.9 else 3))
        for _ in range(int(rng.integers(0, 4)) if rng.random() < 0.4 else 0):
            made = self._damaged(rng, made)
        return made

    def _request(self, rng: np.random.Generator) -> bytes:
        path = str(rng.choice(PATHS))
        if path not in BODIES and rng.random() < 0.5:
            path = str(rng.choice(list(BODIES)))
        body = self._body(rng, path) if path in BODIES else b""
        method = "POST" if path in BODIES else "GET"
        if rng.random() < 0.05:
            method = str(rng.choice(["PUT", "HEAD", "OPTIONS", "get", "CONNECT", "PRI"]))
        head = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"host: x", b"content-type: application/json"]
        head += [HEADERS[i] for i in rng.integers(0, len(HEADERS), int(rng.random() < 0.1))]
        if rng.random() < 0.2:
            head.append(b"transfer-encoding: chunked")
            cuts = sorted(rng.integers(0, len(body) + 1, 3).tolist())
            parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a < b]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            head.append(b"content-length: %d" % len(body))
        return b"\r\n".join(head) + b"\r\n\r\n" + body

    def _body(self, rng: np.random.Generator, path: str) -> bytes:
        content = dict(BODIES[path])
        for _ in range(int(rng.integers(0, 4))):
            content[str(rng.choice(self._fields[path]))] = self._value(rng, 3)
        if rng.random() < 0.02:
            content["user"] = "u" * int(rng.integers(2_000, 200_000))  # for threads and processes
        if content.get("max_tokens") is None and content.get("max_output_tokens") is None and path.startswith("/v1"):
            content["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 2
        text = json.dumps(content, allow_nan=True).encode()
        return text.replace(b":", b" :\n", 1) if rng.random() < 0.1 else text

    def _value(self, rng: np.random.Generator, depth: int) -> Any:
        if depth and rng.random() < 0.3:
            inside = [self._value(rng, depth - 1) for _ in range(rng.integers(0, 4))]
            names = ("type", "role", "content", "function", "name", "schema", "text")
            return inside if rng.random() < 0.5 else dict(zip(rng.choice(names, len(inside)).tolist(), inside, strict=True))
        return VALUES[rng.integers(0, len(VALUES))]

    def _damaged(self, rng: np.random.Generator, made: bytes) -> bytes:
        at, length = int(rng.integers(0, len(made) + 1)), int(rng.integers(0, 20))
        kinds: tuple[Callable[[], bytes], ...] = (
            lambda: made[:at] + made[at + length :],
            lambda: made[:at] + made[at : at + length] * 2 + made[at + length :],
            lambda: made[:at] + PIECES[rng.integers(0, len(PIECES))] + made[at:],
            lambda: made[:at] + rng.bytes(length) + made[at + length :],
            lambda: made[:at],
        )
        return kinds[rng.integers(0, len(kinds))]()


class Clients:
    """Sends requests, and counts what became of them."""

    def __init__(self, port: int, requests: Requests):
        self._port, self._requests = port, requests
        self.number = 0
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, seconds: float, at_once: int) -> None:
        """Until the time is over. at_once: connections."""
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(deadline) for _ in range(at_once)))

    async def _client(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            number, self.number = self.number, self.number + 1
            data = self._requests.make(number)
            try:
                async with asyncio.timeout(HANG_S):
                    answer = await self._exchange(data)
            except TimeoutError:
                self._fail(number, data, "hang")
                continue
            found = [match.decode() for match in STATUS.findall(answer)]
            self.statuses.update(found or ["closed"])
            for status in found:
                if status >= "500":
                    self._fail(number, data, status)

    async def _exchange(self, data: bytes) -> bytes:
        """All that comes back: a while without anything ends a request that is complete, otherwise half-closing does."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = b""
        with contextlib.suppress(OSError):
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    answer = await reader.read(1 << 16)
            writer.write_eof()
            while piece := await reader.read(1 << 16):
                answer += piece
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return answer

    def _fail(self, number: int, data: bytes, why: str) -> None:
        self.failures.append(f"request {number}: {why}")
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{self._requests.seed}-{number}-{why}").write_bytes(data)


def worker_of(command: Command) -> int:
    """Process id of the server's worker."""
    return next(pid for pid in tree(command.process.pid) if "blinkpy.dpu.worker" in command_line(pid))


def size_of(pid: int) -> tuple[float, int]:
    """Memory of a process, MiB, and its open files."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), len(os.listdir(f"/proc/{pid}/fd"))


def fuzz(command: Command, port: int, seed: int, seconds: float, at_once: int) -> list[str]:
    """Run the clients; returns what is wrong."""
    url = f"http://127.0.0.1:{port}"
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    fields = {
        path: list(paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]) for path in BODIES
    }
    clients, worker = Clients(port, Requests(seed, fields)), worker_of(command)
    asyncio.run(clients.run(min(10.0, seconds / 4), at_once))
    before = size_of(worker)
    asyncio.run(clients.run(seconds, at_once))
    time.sleep(2.0)
    after, wrong = size_of(worker), clients.failures[:20]
    if after[0] > before[0] + LEAK_MIB or after[1] > before[1] + LEAK_FILES:
        wrong.append(f"a leak: {before} MiB and files became {after}")
    if worker_of(command) != worker:
        wrong.append("the worker ended and was replaced")
    if (httpx.get(f"{url}/health").status_code, httpx.get(f"{url}/load").json()["server_load"]) != (200, 0):
        wrong.append("the server is not as healthy and idle as before")
    told = ", ".join(f"{count:,} {status}" for status, count in sorted(clients.statuses.items()))
    print(
        f"{clients.number:,} connections: {told}; {before[0]:.0f} to {after[0]:.0f} MiB; {len(clients.failures) or 'no'} failures"
    )
    return wrong


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=600.0, help="how long [600]")
    arguments.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of the run [random]")
    arguments.add_argument("--at-once", type=int, default=32, help="connections [32]")
    arguments.add_argument("--schemathesis", default="", help="its command; it gets half of the time")
    options = arguments.parse_args()
    print(f"--seed {options.seed}", flush=True)
    command = Command("serve", "--device", "null", "--port", "0", "--log-level", "error")
    try:
        port = int(command.find(ADDRESS)[1])
        share = options.seconds / 2 if options.schemathesis else options.seconds
        wrong = fuzz(command, port, options.seed, share, options.at_once)
        if options.schemathesis:
            run = [*options.schemathesis.split(), "run", f"http://127.0.0.1:{port}/openapi.json", "--seed", str(options.seed)]
            run += ["--checks", "not_a_server_error", "--max-time", str(int(share))]
            if subprocess.run(run, check=False).returncode:
                wrong.append("schemathesis found something")
        if command.end() != 0:
            wrong.append("the server did not end in order")
        if any(mark in line for line in command.said for mark in ("Traceback", "CRITICAL", "never retrieved")):
            wrong += ["the server complains:", *command.said[-LINES:]]
    finally:
        command.kill()
    print("\n".join(line.rstrip() for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
