"""Offers requests to a server over HTTP from several processes, and measures its own lag.

Each process runs one epoll loop over raw sockets. It stores received data with the time, and parses it
only after the load. An event takes some microseconds, so a process handles tens of thousands of events
per second.

Lag: a tick is due every TICK_S. Its delay bounds the delay of any other event. The cause does not matter: too
    much work for the
loop, or a core that the kernel gave to another process.
"""

import contextlib
import gc
import http.client
import multiprocessing
import os
import re
import resource
import select
import socket
import time
from collections import ChainMap, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import httptools
import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.common.harness import WrongAnswer

TICK_S = 0.02
START_LEAD_S = 0.2  # between "all client processes are ready" and the start
READY_S = 60.0
PARSE_S = 120.0  # time for parsing the answers afterwards
RECEIVE = 1 << 16
EVENT_END = re.compile(rb"\n\n|\r\n\r\n")
UNFINISHED = "unfinished"  # the error of a request that had not ended when the load was over
RETRIES = 2  # of a request whose idle connection the server closed meanwhile


@dataclass(frozen=True)
class Request:
    """A request to offer.

    due: seconds after the start of the load.
    prompt: token ids, or a text.
    tier: its service_tier; empty: not sent.
    priority: lower first, for servers that order by it; 0: not sent.
    """

    due: float
    prompt: list[int] | str
    max_tokens: int
    tier: str = ""
    priority: int = 0


Requests = list[tuple[int, Request]]  # with their numbers


@dataclass(frozen=True)
class Target:
    """A server.

    model: its name in the API.
    chat: send prompts, which are texts then, to /v1/chat/completions.
    schema: schema of all answers.
    """

    host: str
    port: int
    model: str
    chat: bool = False
    api_key: str = ""
    schema: dict[str, Any] | None = None

    def request_bytes(self, request: Request) -> bytes:
        """The POST request, streaming, for exactly request.max_tokens tokens."""
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"messages": [{"role": "user", "content": request.prompt}]} if self.chat else {"prompt": request.prompt}
        if request.tier:
            body["service_tier"] = request.tier
        if request.priority:
            body["priority"] = request.priority
        if self.schema:
            named = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        content = orjson.dumps(body)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n{key}"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def load_name(rate: float, streams: int) -> str:
    """The name of a load: an open loop by its rate, a closed loop by its streams."""
    return f"{streams:g} stream{'' if streams == 1 else 's'}" if streams else f"{rate:g} requests/s"


def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 without an answer."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    return 0, b""


@dataclass
class Record:
    """The outcome of one request, in seconds since the start of the load.

    error: empty if all tokens arrived.
    times: times of the events with text; several tokens may share one event.
    """

    due: float
    sent: float
    tokens: int
    error: str
    times: NDArray[np.float64]


@dataclass
class LoadResult:
    """The outcome of a load.

    records: in the order of the requests.
    lags_s: lags of all processes' ticks.
    busy: the largest busy share of a process's time.
    began: time.perf_counter() at the start.
    limit_s: seconds after the start in which requests had to end.
    """

    records: list[Record]
    lags_s: NDArray[np.float64]
    busy: float
    began: float
    limit_s: float


def offer(
    target: Target, requests: Sequence[Request], streams: int, processes: int, cores: Sequence[int], limit_s: float,
    on_tick: Callable[[float], None] = lambda now: None, spin: bool = False,
) -> LoadResult:  # fmt: skip
    """Offer requests to a server. Returns when all have ended, or limit_s after the start, when the rest is
    given up.

    streams: 0 for an open loop, in which each request has its time; otherwise request i waits for the end of
        request i - streams.
    cores: for the client processes, one after another; empty: any cores.
    on_tick: called with seconds a few times per second.
    spin: never sleep; for reserved cores, because waking an idle core takes milliseconds on some virtual
        machines.
    Raises WrongAnswer if a client process fails.
    """
    processes = max(1, min(processes, streams or len(requests)))
    context = multiprocessing.get_context("spawn")
    workers, pipes = [], []
    try:
        for i in range(processes):
            mine = [(k, request) for k, request in enumerate(requests) if (k % streams if streams else k) % processes == i]
            here, there = context.Pipe()
            own = [cores[i % len(cores)]] if cores else []
            worker = context.Process(target=_client, args=(there, own, target, mine, streams, limit_s, spin), daemon=True)
            worker.start()
            there.close()
            workers.append(worker)
            pipes.append(here)
        for pipe in pipes:
            _receive(pipe, READY_S)
        began = time.perf_counter() + START_LEAD_S
        for pipe in pipes:
            pipe.send(began)
        results = []
        for pipe in pipes:
            deadline = began + limit_s + PARSE_S
            while not pipe.poll(0.25):
                on_tick(time.perf_counter() - began)
                if time.perf_counter() > deadline:
                    raise WrongAnswer("a client process does not answer")
            results.append(_receive(pipe, 0))
    finally:
        for worker in workers:
            worker.join(1)
            worker.kill()
    found, lags, busy = zip(*results, strict=True)
    records = dict(ChainMap(*found))
    return LoadResult([records[k] for k in range(len(requests))], np.concatenate(lags), max(busy), began, limit_s)


def _receive(pipe: Pipe, timeout: float) -> Any:
    with contextlib.suppress(EOFError):
        if pipe.poll(timeout):
            return pipe.recv()
    raise WrongAnswer("a client process failed")


# ---- one client process -------------------------------------------------------------------------------------------------


class Answer:
    """One request and its received answer.

    pieces: (time.perf_counter(), bytes of the body), as received.
    status: 0 before an answer.
    follower: the next request of a closed loop's stream.
    """

    def __init__(self, index: int, data: bytes, due: float):
        self.index, self.data, self.due = index, data, due
        self.sent = self.last = 0.0  # last: when something came
        self.tries = self.status = 0
        self.whole = False
        self.pieces: list[tuple[float, bytes]] = []
        self.follower: Answer | None = None
        self.error = ""
        self._parser = httptools.HttpResponseParser(self)  # calls the methods on_*

    def more(self, now: float, data: bytes) -> bool:
        """Take received data. Returns whether the answer is complete. Raises HttpParserError."""
        self.last = now
        self._parser.feed_data(data)
        return self.whole

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self.last, body))

    def on_message_complete(self) -> None:
        self.whole = True


class Connection:
    """A non-blocking socket. unsent: bytes of the request that the kernel has not yet taken."""

    def __init__(self, host: str, port: int):
        self.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BlockingIOError):
            self.sock.connect((host, port))
        self.unsent = memoryview(b"")
        self.answer: Answer | None = None
        self.used = False


class Client:
    """One process's share of the load."""

    def __init__(self, target: Target, requests: Requests, streams: int, limit_s: float, spin: bool):
        self.target, self.limit_s, self._spin = target, limit_s, spin
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._live = 0
        self.answers = [Answer(index, target.request_bytes(request), request.due) for index, request in requests]
        self._arrivals: deque[Answer] = deque()  # not sent yet, and waiting for no other answer
        last: dict[int, Answer] = {}  # of each stream
        for answer in self.answers:
            stream = answer.index % streams if streams else answer.index
            if stream in last:
                last[stream].follower = answer
            else:
                self._arrivals.append(answer)
            last[stream] = answer
        self.lags: list[float] = []
        self.busy_s = 0.0

    def run(self, began: float) -> None:
        """Send everything at its time and collect the answers, from time.perf_counter() == began on."""
        end, tick = began + self.limit_s, began + TICK_S
        while time.perf_counter() < began:
            time.sleep(0.001)
        while (self._live or self._arrivals) and (now := time.perf_counter()) < end:
            wake = min(tick, end, began + self._arrivals[0].due if self._arrivals else end)
            if wake > now and not self._spin:  # epoll's own timeout has whole milliseconds
                select.select([self._poll], [], [], wake - now)
                now = time.perf_counter()
            looked, events = now, self._poll.poll(0)
            for fd, mask in events:
                self._event(self._connections[fd], mask, began)
            now = time.perf_counter()
            waiting = len(self._arrivals)
            while self._arrivals and began + self._arrivals[0].due <= now:
                self._send(self._arrivals.popleft(), now - began)
            if events or len(self._arrivals) < waiting:
                self.busy_s += time.perf_counter() - looked
            if now >= tick:
                self.lags.append(now - tick)
                tick = now + TICK_S
        for connection in self._connections.values():
            if connection.answer is not None:
                connection.answer.error = UNFINISHED
            connection.sock.close()
        for answer in self.answers:
            if not answer.tries:
                answer.error = "not sent"

    def _send(self, answer: Answer, now: float) -> None:
        """now: seconds since the start."""
        if not answer.tries:
            answer.sent = now
            self._live += 1
        answer.tries += 1
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except OSError as error:  # no port, or no descriptor, is left
            answer.error = os.strerror(error.errno or 0).lower()
            self._live -= 1
            return
        connection.answer, connection.unsent = answer, memoryview(answer.data)
        self._poll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _connect(self) -> Connection:
        connection = Connection(self.target.host, self.target.port)
        self._connections[connection.sock.fileno()] = connection
        self._poll.register(connection.sock, 0)
        return connection

    def _event(self, connection: Connection, mask: int, began: float) -> None:
        answer = connection.answer
        try:
            if mask & select.EPOLLOUT and connection.unsent:
                connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
                if not connection.unsent:
                    self._poll.modify(connection.sock, select.EPOLLIN)
            if not mask & ~select.EPOLLOUT:
                return
            data = connection.sock.recv(RECEIVE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(connection, os.strerror(error.errno or 0).lower(), began)
            return
        whole, why = False, "connection closed"
        if data and answer is not None:
            try:
                whole, why = answer.more(time.perf_counter(), data), ""
            except httptools.HttpParserError as error:
                why = f"malformed answer: {error}"
        if why:
            self._lost(connection, why, began)
        elif whole and answer is not None:
            connection.answer, connection.used = None, True
            self._idle.append(connection)
            self._ended(answer, began)

    def _lost(self, connection: Connection, why: str, began: float) -> None:
        """Handle a lost connection. A request on a reused connection without an answer is sent again."""
        answer = connection.answer
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        if connection in self._idle:
            self._idle.remove(connection)
        if answer and connection.used and not answer.last and answer.tries <= RETRIES:
            self._send(answer, time.perf_counter() - began)
        elif answer:
            answer.error = why
            self._ended(answer, began)

    def _ended(self, answer: Answer, began: float) -> None:
        self._live -= 1
        answer.data = b""
        if answer.follower is not None:
            self._send(answer.follower, time.perf_counter() - began)


def _client(pipe: Pipe, cores: list[int], target: Target, requests: Requests, streams: int, limit_s: float, spin: bool) -> None:
    """A client process: prepare, report, wait for the start, run, parse the answers, send the records."""
    if cores:
        os.sched_setaffinity(0, cores)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one connection for each request in flight
    client = Client(target, requests, streams, limit_s, spin)
    gc.collect()
    gc.disable()  # a collection would stop the loop for longer than a token takes
    pipe.send("ready")
    began = pipe.recv()
    client.run(began)
    busy = client.busy_s / max(1e-9, time.perf_counter() - began)
    asked = dict(requests)
    records = {answer.index: record_of(answer, asked[answer.index], began, bool(streams)) for answer in client.answers}
    pipe.send((records, np.array(client.lags), busy))


# ---- afterwards: figures from the answers -------------------------------------------------------------------------------


def record_of(answer: Answer, request: Request, began: float, closed: bool) -> Record:
    """The record of an answer. closed: a closed loop, where a request is due when it is sent."""
    tokens, times = 0, []
    errors = [answer.error]
    try:
        events = events_of(answer.pieces) if answer.status == 200 else []
    except ValueError as error:
        events, errors = [], [*errors, f"malformed answer: {error}"]
    if answer.status != 200:
        errors.append(f"status {answer.status}" if answer.status else "no answer")
    for when, event in events:
        if "error" in event:
            errors.append(f"error event: {str(event['error'])[:80]}")
        for choice in event.get("choices", ()):
            # Text may be empty, when a token is half a character; an end that brings nothing is not a token.
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text or ("text" in choice and choice.get("finish_reason") is None):
                times.append(when - began)
        tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
    if tokens != request.max_tokens:
        errors.append(f"{tokens} tokens instead of {request.max_tokens}" if tokens else "no usage")
    if not times:
        errors.append("no text")
    first_error = next(filter(None, errors), "")
    return Record(answer.sent if closed else answer.due, answer.sent, tokens, first_error, np.array(times))


def events_of(pieces: list[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """(time of arrival, event) of the whole events in a body of server-sent events, without [DONE]. Raises ValueError."""
    text = b"".join(data for _, data in pieces)
    arrived = np.cumsum([len(data) for _, data in pieces])
    result: list[tuple[float, dict[str, Any]]] = []
    position = 0
    for end in EVENT_END.finditer(text):
        block, position = text[position : end.start()], end.end()
        data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        if data and data != b"[DONE]":
            event = orjson.loads(data)
            if not isinstance(event, dict):
                raise ValueError(f"not an event: {data[:60]!r}")
            result.append((pieces[int(np.searchsorted(arrived, position))][0], event))
    return result
