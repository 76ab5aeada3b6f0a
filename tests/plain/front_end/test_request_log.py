"""A front end's notes of a request at its end: its id, a log line, its phases, a trace."""

import io
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import RunningServer, completion_bytes, serving
from support.waiting import wait_for

from blinkpy.dpu.metrics import HISTOGRAMS, Metrics
from blinkpy.dpu.watch.access_log import ACCEPTED, AccessLog
from blinkpy.dpu.watch.log_output import FIELDS, MOST_LINES, SPAN_S, WAITING_LINES, JsonLines, LineBound, LogThread, TextLines
from blinkpy.dpu.watch.traces import RequestTracer

WAITED_NS = 30 << 20


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        engine.waited_ns = WAITED_NS
        yield engine


@pytest.fixture(scope="module")
def server(engine, folder) -> Iterator[RunningServer]:
    with serving(engine, folder) as server:
        yield server


@pytest.fixture
def lines(caplog) -> pytest.LogCaptureFixture:
    """Access lines of the test, of GETs too."""
    caplog.set_level(logging.DEBUG, "blinkpy.access")
    return caplog


def access_lines(lines: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in list(lines.records) if record.name == "blinkpy.access"]


def line_of(lines: pytest.LogCaptureFixture, request_id: str) -> dict:
    """The one line of a request, which may come after its answer."""

    def found() -> list[logging.LogRecord]:
        return [record for record in access_lines(lines) if getattr(record, FIELDS)["request_id"] == request_id]

    wait_for(found)
    (record,) = found()
    return {"level": record.levelname, "message": record.getMessage(), **getattr(record, FIELDS)}


def test_every_answer_has_a_request_id(server) -> None:
    client = server.client
    for call in (
        lambda headers: client.get("/health", headers=headers),
        lambda headers: client.get("/nothing", headers=headers),
        lambda headers: client.post("/v1/completions", content=b"{", headers={"content-type": "application/json", **headers}),
        lambda headers: client.post("/v1/completions", json={"prompt": [7], "max_tokens": 2}, headers=headers),
        lambda headers: client.post("/v1/completions", json={"prompt": [7], "max_tokens": 2, "stream": True}, headers=headers),
    ):
        assert call({"x-request-id": "mine/1:a=b"}).headers["x-request-id"] == "mine/1:a=b"
        first, second = (call({}).headers["x-request-id"] for _ in range(2))
        assert first != second
        assert re.fullmatch("[0-9a-f]{24}", first)


def test_the_id_names_the_answer_too(server) -> None:
    def ids(headers: dict, **fields: object) -> tuple[str, str]:
        body = {"prompt": [7], "max_tokens": 1, **fields}
        answer = server.client.post("/v1/completions", json=body, headers=headers)
        return answer.headers["x-request-id"], answer.json()["id"]

    assert ids({"x-request-id": "abc"}) == ("abc", "cmpl-abc")
    assert ids({"x-request-id": "abc"}, request_id="of-body") == ("abc", "cmpl-of-body")
    assert ids({}, request_id="of-body") == ("of-body", "cmpl-of-body")
    own, answered = ids({})
    assert answered == f"cmpl-{own}"


def test_an_id_that_could_forge_a_line_is_replaced(server, lines, rng) -> None:
    odd = [b"a b", b'a"b', b"a\tb", b"a\\nb", b"x" * 129, "ä".encode(), b"a,b", b"\x1b[31m", b"{}"]
    for _ in range(20):
        text = bytes(rng.integers(32, 256, int(rng.integers(1, 140)), np.uint8).tolist()).replace(b"\x7f", b"!").strip()
        odd += [text] if text and not ACCEPTED.fullmatch(text) else []
    for given in odd:
        answer = server.raw(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: " + given + b"\r\n\r\n")
        if answer.startswith(b"HTTP/1.1 200"):  # the parser itself may refuse a byte
            (shown,) = re.findall(rb"x-request-id: (.*)\r\n", answer)
            assert re.fullmatch(rb"[0-9a-f]{24}", shown), given
        else:
            assert answer.startswith(b"HTTP/1.1 400")
    assert server.client.get("/livez", headers={"x-request-id": "x" * 128}).headers["x-request-id"] == "x" * 128


def test_a_line_for_each_request(server, lines, engine) -> None:
    def post(name: str, **fields: object) -> dict:
        server.client.post("/v1/completions", json=fields, headers={"x-request-id": name})
        return line_of(lines, name)

    whole = post("whole", prompt=[7, 8, 9], max_tokens=5)
    assert whole["level"] == "INFO"
    assert whole["message"] == 'POST "/v1/completions"'
    expected = {"status": 200, "prompt_tokens": 3, "cached_tokens": 0, "generated_tokens": 5, "choices": 1, "ended": "length"}
    assert expected.items() <= whole.items()
    request_id = int(engine.submitted[-1].entry["request_id"])
    assert whole["engine_request"] == f"{request_id >> 32}:{request_id & 0xFFFFFFFF}"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", whole["client"])
    assert post("several", prompt=[7], max_tokens=4, n=3, stream=True).items() >= {"choices": 3, "generated_tokens": 12}.items()
    wrong = post("wrong", prompt=[7], max_tokens=-1)
    assert wrong["status"] == 400
    assert "prompt_tokens" not in wrong
    server.client.get("/health", headers={"x-request-id": "fine"})
    assert line_of(lines, "fine")["level"] == "DEBUG"
    server.client.get("/no%22pe", headers={"x-request-id": "missing"})
    assert line_of(lines, "missing").items() >= {"level": "INFO", "status": 404, "message": r'GET "/no\"pe"'}.items()


def test_a_client_that_leaves_is_in_the_log(server, lines, engine) -> None:
    engine.hold, before = True, len(engine.submitted)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(completion_bytes(prompt=[7], max_tokens=4).replace(b"host: x", b"host: x\r\nx-request-id: left"))
            wait_for(lambda: len(engine.submitted) > before)
        assert line_of(lines, "left").items() >= {"status": 0, "ended": "abort", "generated_tokens": 0}.items()
    finally:
        engine.hold = False


def test_phases_add_up(server, lines, engine) -> None:
    engine.most_tokens, body = 5, {"prompt": [7, 8], "max_tokens": 30, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "phases"}) as answer:
        events = answer.iter_lines()
        next(events)
        time.sleep(0.03)
        engine.most_tokens = 100
        assert "data: [DONE]" in list(events)
    line = line_of(lines, "phases")
    phases = [line[f"{name}_ms"] for name in ("front_end", "queue", "prefill", "decode")]
    assert all(value >= 0 for value in phases)
    assert sum(phases) <= line["ms"] + 0.5
    in_engine = line["queue_ms"] + line["prefill_ms"]
    assert line["queue_ms"] == pytest.approx(min(WAITED_NS / 1e6, in_engine), abs=0.2)
    assert line["decode_ms"] >= 30
    values = dict(re.findall(r'^blinkpy_(\w+_sum)\{worker="0"\} (\S+)$', server.client.get("/metrics").text, re.M))
    assert float(values["queue_time_seconds_sum"]) > 0
    assert float(values["request_prompt_tokens_sum"]) >= 2


def test_times_of_a_request_add_up_in_the_metrics(rng: np.random.Generator) -> None:
    """Laws, for random times on a clock of 1 / 1024 s: the phases are the whole time, and the times of tokens are the decode."""
    about = partial(pytest.approx, abs=1e-6)  # waits are whole nanoseconds
    for tokens in (1, 2, 3, int(rng.integers(4, 100))):
        metrics, (waited, *steps) = Metrics(), (rng.integers(0, 4096, 5) / 1024).tolist()
        arrival, submitted, first, last = np.cumsum([1000.0, waited + steps[0], steps[1], steps[2] * (tokens > 1)]).tolist()
        in_engine = min(steps[3], steps[1])
        request = SimpleNamespace(waited_ns=int(in_engine * 1e9), request_id=0)
        one: Any = SimpleNamespace(
            arrival=arrival, submitted=submitted, waited=waited, first_event=first, last_event=last, request=request,
            finish_reason="stop", error=None, tokens=tokens, prompt_length=7,
        )  # fmt: skip
        AccessLog(metrics, False).ended(cast(Any, SimpleNamespace(generations=[one], method="POST", status=200)))
        found = {shape.attribute: metrics.histogram(i)[0] for i, shape in enumerate(HISTOGRAMS)}
        sums = {name: total for name, (_, total) in found.items()}
        assert sum(sums[f"{name}_time"] for name in ("front_end", "queue", "prefill", "decode")) == about(last - arrival)
        assert sums["queue_time"] == about(waited + in_engine)
        assert sums["inference_time"] == about(last - submitted - in_engine)
        assert sums["time_per_output_token"] * (tokens - 1) == about(sums["decode_time"])
        assert (sums["prompt_length"], sums["output_length"]) == (7, tokens)
        assert all(sum(counts) == 1 for name, (counts, _) in found.items() if name in OF_ITS_END or (tokens > 1 and name in GAPS))


OF_ITS_END = ("front_end_time", "queue_time", "prefill_time", "decode_time", "inference_time", "prompt_length", "output_length")
GAPS = ("time_per_output_token",)


def test_access_log_off_writes_no_lines(engine, folder, lines) -> None:
    with FakeEngine() as own, serving(own, folder, access_log=False) as server:
        server.client.headers["x-request-id"] = "unwanted"  # an earlier test's server may still have a line to write
        server.complete([7], max_tokens=1)
        server.client.get("/nothing")
        assert 'requests_ended_total{worker="0",reason="length"} 1' in server.client.get("/metrics").text, "metrics go on"
    assert [record for record in access_lines(lines) if getattr(record, FIELDS)["request_id"] == "unwanted"] == []


@pytest.mark.parametrize("kind", [TextLines, JsonLines])
def test_lines_are_lines(kind) -> None:
    form = kind("frontend/3")
    fields = {"request_id": "abc", "status": 200}
    record = logging.makeLogRecord(
        {"name": "blinkpy.access", "msg": "%s %s", "args": ("GET", '"/a"'), "levelname": "INFO", FIELDS: fields}
    )
    line = form.format(record)
    assert "\n" not in line
    if kind is JsonLines:
        parsed = json.loads(line)
        assert parsed.items() >= {"process": "frontend/3", "level": "info", "message": 'GET "/a"', **fields}.items()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", parsed["time"])
        try:
            raise KeyError("lost")
        except KeyError:
            failed = logging.makeLogRecord({"msg": "went wrong", "exc_info": sys.exc_info()})
        assert "KeyError: 'lost'" in json.loads(form.format(failed))["exception"]
    else:
        assert line.endswith(' frontend/3 INFO GET "/a" request_id=abc status=200')


def test_a_stopped_log_reader_blocks_no_request() -> None:
    gate, out, in_time = threading.Event(), io.StringIO(), list[bool]()

    class Stuck(logging.StreamHandler):
        def emit(self, record: logging.LogRecord) -> None:
            in_time.append(gate.wait(60))
            super().emit(record)

    handler = LogThread(Stuck(out))
    count = WAITING_LINES + 500
    for i in range(count):
        handler.handle(logging.makeLogRecord({"msg": f"line {i}"}))
    gate.set()
    handler.close()
    assert all(in_time), "a line waited for the reader"
    written = out.getvalue().splitlines()
    assert WAITING_LINES <= len(written) <= WAITING_LINES + 2
    assert written[0] == "line 0"
    dropped = [int(n) for n in re.findall(r"\[(\d+) lines were dropped", out.getvalue())]
    assert sum(dropped) == count - len(written)


def bounded(clock: Callable[[], float], out: io.StringIO) -> logging.Handler:
    """A handler as start_logging makes it, with a clock of the test's own."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(TextLines("frontend/0"))
    handler.addFilter(LineBound(clock))
    return handler


def test_log_lines_of_invalid_requests_are_bounded(server, monkeypatch, rng) -> None:
    """Lines for invalid requests, are counted beyond a number in a time. An offer of another protocol leaves no
    trace."""
    now, out = [1000.0], io.StringIO()
    handler, library = bounded(lambda: now[0], out), logging.getLogger("blinkpy.frontend")
    library.addHandler(handler)
    monkeypatch.setattr(library, "level", logging.WARNING)
    sent = MOST_LINES + int(rng.integers(2, 40))
    upgrade = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: rubbish\r\n\r\n"
    try:
        for _ in range(sent):
            assert server.raw(b"rubbish\r\n\r\n").startswith(b"HTTP/1.1 400")
            assert server.raw(upgrade).startswith(b"HTTP/1.1 200")
        first = out.getvalue().splitlines()
        now[0] += SPAN_S
        server.raw(b"rubbish\r\n\r\n")
    finally:
        library.removeHandler(handler)
    assert {line.split(" WARNING ")[1].split(" [")[0] for line in first} == {"Invalid HTTP request received."}
    assert len(first) == MOST_LINES
    assert sum(f"are omitted for {SPAN_S:.0f} s]" in line for line in first) == 1
    last = out.getvalue().splitlines()[-1]
    assert last.endswith(f"[{sent - MOST_LINES} lines of this kind were omitted] Invalid HTTP request received.")


def test_each_statement_has_a_bound_of_its_own_and_the_access_log_has_none(rng) -> None:
    """Compared with a count of the permitted number of each span, at random times."""
    now, out = [0.0], io.StringIO()
    handler = bounded(lambda: now[0], out)
    begun, lines, expected = dict[int, float](), Counter[int](), Counter[str]()
    for _ in range(3000):
        now[0] += float(rng.exponential(0.1)) if rng.random() < 0.999 else SPAN_S
        line, access = int(rng.integers(3)), rng.random() < 0.2
        name = "blinkpy.access" if access else "a.library"
        record = logging.makeLogRecord(
            {"name": name, "pathname": "file.py", "lineno": line, "msg": f"{name} %d", "args": (line,)}
        )
        handler.handle(record)
        if not access:
            if now[0] - begun.setdefault(line, now[0]) >= SPAN_S:
                begun[line], lines[line] = now[0], 0
            lines[line] += 1
        expected[f"{name} {line}"] += access or lines[line] <= MOST_LINES
    seen = Counter(re.search(r"(blinkpy\.access|a\.library) \d", line)[0] for line in out.getvalue().splitlines())
    assert seen == expected


class Spans:
    """Instead of OpenTelemetry's exporter."""

    def __init__(self) -> None:
        self.ended: list = []

    def on_start(self, span: object, parent_context: object = None) -> None: ...
    def _on_ending(self, span: object) -> None: ...
    def on_end(self, span: object) -> None:
        self.ended.append(span)

    def shutdown(self) -> None: ...
    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def test_a_trace_of_each_request(server, engine, monkeypatch) -> None:
    spans = Spans()
    monkeypatch.setattr(server.server.app._access_log, "_tracer", RequestTracer(spans, "tiny"))
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "traced"}
    before = time.time_ns()
    server.client.post("/v1/completions", json={"prompt": [7, 8], "max_tokens": 9}, headers=headers)
    wait_for(lambda: len(spans.ended) == 5)
    *phases, whole = spans.ended
    assert [span.name for span in phases] == ["front_end", "queue", "prefill", "decode"]
    assert f"{whole.context.trace_id:032x}" == trace
    assert f"{whole.parent.span_id:016x}" == parent
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    assert before <= whole.start_time == phases[0].start_time <= phases[-1].end_time <= whole.end_time <= time.time_ns()
    assert all(a.end_time == b.start_time for a, b in pairwise(phases))
    assert (
        whole.attributes.items()
        >= {
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 9,
            "gen_ai.request.id": "traced",
            "gen_ai.response.finish_reasons": ("length",),
        }.items()
    )
    server.client.get("/health", headers=headers)
    server.client.post("/v1/completions", json={"prompt": [7], "max_tokens": 1}, headers={"traceparent": "rubbish"})
    wait_for(lambda: len(spans.ended) == 10)
    assert spans.ended[-1].parent is None
    assert spans.ended[-1].resource.attributes["service.name"] == "blinkpy"
    unsampled = {"traceparent": f"00-{trace}-{parent}-00"}
    server.client.post("/v1/completions", json={"prompt": [7], "max_tokens": 1}, headers=unsampled)
    time.sleep(0.05)
    assert len(spans.ended) == 10, "who called decides what is sampled"


def test_warnings_and_exceptions_are_log_lines_and_libraries_chatter_is_none() -> None:
    """In a separate process. A library's note that all is well is left out, at every level; ours depends on the
    level."""
    program = """
import logging, sys, threading, warnings
from blinkpy.dpu.watch.log_output import start_logging
start_logging("engine", sys.argv[1], "json")
for name in ("numba.cuda", "blinkpy.engine"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "a line")
warnings.warn("an old call")
for _ in range(100):
    logging.getLogger("blinkpy.engine").critical("again")
    logging.getLogger("blinkpy.access").critical("a request")
thread = threading.Thread(target=lambda: 1 / 0, name="watch")
thread.start()
thread.join()
{}["the end"]
"""
    for level, shown in (("debug", 3), ("info", 2), ("error", 0)):
        done = subprocess.run([sys.executable, "-c", program, level], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        said = [(line["logger"], line["message"]) for line in lines]
        assert said.count(("blinkpy.engine", "a line")) == shown
        assert said.count(("numba.cuda", "a line")) == (level != "error")
        assert sum(name == "py.warnings" and "an old call" in text for name, text in said) == (level != "error")
        assert sum(text.startswith("again") for _, text in said) == MOST_LINES
        assert said.count(("blinkpy.access", "a request")) == 100
        ends = {line["message"]: line["exception"].splitlines()[-1] for line in lines if "exception" in line}
        assert ends == {
            "watch ends by an exception": "ZeroDivisionError: division by zero",
            "MainThread ends by an exception": "KeyError: 'the end'",
        }
        assert {line["process"] for line in lines} == {"engine"}


def test_log_lines_of_refused_clients_are_bounded(server, caplog, monkeypatch) -> None:
    """Beyond it, lines are counted; lines of other requests continue."""
    monkeypatch.setattr("blinkpy.dpu.watch.access_log.MOST_STRANGERS", 3)
    log = server.server.app._access_log
    log._span = (time.monotonic(), 0)
    with caplog.at_level(logging.INFO, "blinkpy.access"):
        for _ in range(8):
            assert server.client.get("/nothing").status_code == 404
        assert server.complete([7], max_tokens=1).status_code == 200
        wait_for(lambda: any("/v1/completions" in record.getMessage() for record in caplog.records))
        assert sum("/nothing" in record.getMessage() for record in caplog.records) == 3


def test_log_lines_for_unauthenticated_clients_are_bounded_in_each_span(caplog, monkeypatch, rng: np.random.Generator) -> None:
    """At random times: each span begins with a line after the last one's end, and first reports what that one left out."""
    monkeypatch.setattr("blinkpy.dpu.watch.access_log.MOST_STRANGERS", 3)
    now, begun, count, wanted = 1000.0, 0.0, 0, list[str]()
    monkeypatch.setattr("blinkpy.dpu.watch.access_log.time", SimpleNamespace(monotonic=lambda: now))
    log = AccessLog(Metrics(), True)
    tenant = SimpleNamespace(name="")
    with caplog.at_level(logging.INFO, "blinkpy.access"):
        for number in range(200):
            now += float(rng.choice([0.0, 1.0, 10.0, 59.0, 60.0, 200.0], p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05]))
            one: Any = SimpleNamespace(method="POST", path=f"/{number}", headers=[], client="", request_id="", tenant=tenant,
                                       arrival=now, status=401, generations=[])  # fmt: skip
            log.ended(one, stranger=True)
            if now - begun >= 60.0:
                wanted += [f"{count - 3} lines for refused clients without a key were left out"] if count > 3 else []
                begun, count = now, 0
            count += 1
            wanted += [f'POST "/{number}"'] if count <= 3 else []
    assert [record.getMessage() for record in caplog.records] == wanted
