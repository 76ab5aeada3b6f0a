"""The load generator against a server whose behaviour is known, and its parser against answers cut at random."""

import itertools
import json
import threading
import time

import numpy as np
import pytest
from support.front_end.scripted_server import Exchange, answer, scripted

from benchmarks.common.load import Answer, Record, Request, Target, events_of, offer

LIMIT_S = 20.0
BUSY_TRIES = 5  # a busy machine may wake the client after the server's next token
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
NONSENSE = {5: b"nonsense\r\n\r\n", 6: CHUNKED + b"zz\r\n", 7: CHUNKED + b"b\r\ndata: [1]\n\n\r\n0\r\n\r\n"}


def requests(count: int, tokens: int = 3, due: float = 0.0) -> list[Request]:
    return [Request(due, [i, i + 1, 7], tokens) for i in range(count)]


def run(port: int, asked: list[Request], streams: int = 0, processes: int = 1, limit_s: float = LIMIT_S) -> list[Record]:
    return offer(Target("127.0.0.1", port, "m"), asked, streams, processes, (), limit_s).records


def test_open_loop_does_not_wait_for_answers() -> None:
    """No answer comes before all requests have come: a client that waits for one would get none."""
    count = 40
    together = threading.Barrier(count)

    def script(exchange: Exchange) -> None:
        together.wait(LIMIT_S)
        answer(exchange)

    with scripted(script) as server:
        records = run(server.port, requests(count), processes=2)
    assert [record.error for record in records] == [""] * count
    assert server.most == count
    assert sorted(body["prompt"] for _, body in server.seen) == [[i, i + 1, 7] for i in range(count)]
    for _, body in server.seen:
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["model"]) == (3, True, True, "m")


@pytest.mark.parametrize("spin", [False, True])
def test_times_are_those_of_the_server(spin: bool) -> None:
    """Each token is sent at a known time, and the client's time is after it and before the server's next one.

    A client that spins between events measures as little work as a client that sleeps.
    """
    sent: list[float] = []

    def script(exchange: Exchange) -> None:
        exchange.head()
        for i in range(4):
            time.sleep(0.3)
            sent.append(time.perf_counter())
            exchange.token(last=i == 3)
        time.sleep(0.3)
        sent.append(time.perf_counter())
        exchange.end(4)

    for _ in range(BUSY_TRIES):
        sent.clear()
        with scripted(script) as server:
            target = Target("127.0.0.1", server.port, "m")
            result = offer(target, [Request(0.2, [1], 4)], 0, 1, (), LIMIT_S, spin=spin)
        (record,) = result.records
        assert record.error == ""
        assert server.seen[0][0] >= result.began + 0.2  # not before it was due
        assert record.due == 0.2 <= record.sent
        came = result.began + record.times
        assert len(came) == 4
        assert (came >= sent[:4]).all()
        if (came <= sent[1:]).all():
            break
    else:
        raise AssertionError("in no try were all times before the next one of the server")
    assert len(result.lags_s) >= 5
    assert (result.lags_s >= 0).all()
    assert 0 < result.busy < 0.5


def test_everything_that_goes_wrong_is_an_error_of_its_request() -> None:
    hold = threading.Event()

    def script(exchange: Exchange) -> None:
        kind = exchange.body["prompt"][0]
        if kind == 0:
            exchange.raw(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\n\r\n")
            time.sleep(0.02)  # in two pieces
            exchange.raw(b"sorry")
        elif kind == 1:
            exchange.head()
            exchange.token()
            exchange.close()
        elif kind == 2:
            exchange.head()
            exchange.token()
            exchange.end(1)
        elif kind == 3:
            exchange.head()
            exchange.event({"error": {"message": "the engine died"}})
            exchange.raw(b"0\r\n\r\n")
        elif kind == 4:
            exchange.head()
            exchange.token()
            hold.wait(60.0)
        elif kind in NONSENSE:
            exchange.raw(NONSENSE[kind])
        else:
            answer(exchange)

    asked = [*requests(5 + len(NONSENSE) + 1), Request(60.0, [9], 3)]
    for limit_s in (3.0, 12.0, 48.0):  # on a busy machine, more is unfinished
        with scripted(script) as server:
            records = run(server.port, asked, limit_s=limit_s)
            hold.set()
        hold.clear()
        errors = [record.error for record in records]
        if errors.count("unfinished") + errors.count("not sent") == 2:
            break
    assert errors[0] == "status 429"
    assert errors[1] in ("connection closed", "connection reset by peer")
    assert errors[2] == "1 tokens instead of 3"
    assert "the engine died" in errors[3]
    assert errors[4] == "unfinished"
    assert all(errors[kind].startswith("malformed answer: ") for kind in NONSENSE)
    assert errors[-2:] == ["", "not sent"]
    assert [len(record.times) for record in records] == [0, 1, 1, 0, 1, *[0] * len(NONSENSE), 3, 0]


def test_parser_on_random_cuts(rng: np.random.Generator) -> None:
    """Events in random chunks, received in random pieces: each gets the time at which its last byte came."""
    for _ in range(30):
        events = [{"i": i, "text": "x" * int(rng.integers(0, 40)) + "é\n"} for i in range(int(rng.integers(1, 12)))]
        separator = [b"\n\n", b"\r\n\r\n"][int(rng.integers(2))]
        blocks = [b"data: " + json.dumps(event).encode() + separator for event in events] + [b"data: [DONE]" + separator]
        text = b"".join(blocks)
        cuts = np.unique([0, *rng.integers(0, len(text), int(rng.integers(0, 10))), len(text)])
        raw = CHUNKED
        place: list[int] = []  # behind each byte of the text, in raw
        for low, high in itertools.pairwise(cuts):
            raw += b"%x\r\n" % (high - low)
            place += range(len(raw) + 1, len(raw) + 1 + high - low)
            raw += text[low:high] + b"\r\n"
        raw += b"0\r\n\r\n"
        ends = np.unique([*rng.integers(1, len(raw), int(rng.integers(0, 15))), len(raw)])
        pieces = [(float(i), raw[low:high]) for i, (low, high) in enumerate(zip([0, *ends], ends, strict=False))]
        whole = np.cumsum([len(block) for block in blocks])
        expected = [(float(np.searchsorted(ends, place[end - 1])), event) for event, end in zip(events, whole, strict=False)]
        found = Answer(0, b"", 0.0)
        cut = int(rng.integers(0, len(pieces)))
        for number, (when, data) in enumerate(pieces):
            if number == cut:
                some = events_of(found.pieces)
                assert some == expected[: len(some)]
            assert found.more(when, data) == (number == len(pieces) - 1)
        assert (found.status, events_of(found.pieces)) == (200, expected)
