"""Where the texts of a stream go: one write has all of a step, in order, and a client that does not read gets no more."""

import asyncio
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blinkpy.dpu.http.answer_sinks import Streamer
from blinkpy.dpu.http.answers import Answer
from blinkpy.dpu.http.fields.http_request import StreamUsage
from blinkpy.dpu.http.held_writes import HeldWrites

CHOICES = 3
Part = tuple[int, str, str | None]  # index, text and finish reason of a choice


class Wire:
    """A connection and its transport. unread: what the client has not taken."""

    def __init__(self) -> None:
        self.writes, self.unread, self.gone, self.transport = list[bytes](), 0, False, self
        self.write, self.get_write_buffer_size = self.writes.append, lambda: self.unread
        self.held = HeldWrites(cast(asyncio.Transport, self))

    def taken(self) -> list[Part]:
        """What the writes had since the last time, in whole chunks of HTTP."""
        parts = [part for data in self.writes for part in parts_of(data)]
        self.writes.clear()
        return parts


def parts_of(data: bytes) -> Iterator[Part]:
    while data:
        size, _, rest = data.partition(b"\r\n")
        chunk, line, data = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert line == b"\r\n"
        for event in chunk.split(b"\n\n")[:-1]:
            found = json.loads(event.removeprefix(b"data: "))["choices"][0]
            yield found["index"], found["text"], found["finish_reason"]


class Scene:
    """A stream of several choices, outside of any server."""

    def __init__(self, max_backlog: int = 1000) -> None:
        self.wire, self.slow = Wire(), list[str]()
        make: Any = Streamer
        answer = Answer(False, "demo", lambda token: ("", b""))
        self.streamer = make(answer, self.wire, max_backlog, StreamUsage(), lambda: self.slow.append("slow"))
        self.choices: list[Any] = [SimpleNamespace(index=i, error=None, finish_reason="stop") for i in range(CHOICES)]
        self.streamer.generations = self.choices

    def step(self, draw: random.Random) -> list[Part]:
        """Texts of some choices; what they are."""
        parts: list[Part] = [(draw.randrange(CHOICES), f"{draw.random()}\n", None) for _ in range(draw.randrange(4))]
        for index, text, _ in parts:
            self.streamer.on_text(self.choices[index], text, [])
        return parts

    def send(self) -> None:
        """As the link does, once for each choice."""
        for _ in self.choices:
            self.streamer.send()


@pytest.fixture(autouse=True)
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the futures of a stream; it never runs."""
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    yield
    loop.close()


def test_one_write_has_all_of_a_step(seed: int) -> None:
    draw, scene = random.Random(seed), Scene()
    early = list[Part]()
    while len(early) < 5:
        early += scene.step(draw)
        scene.send()
        assert scene.streamer.started.done() == (early != [])
    assert scene.wire.writes == [], "nothing goes out before the answer has started"
    scene.streamer.open()
    assert (len(scene.wire.writes), scene.wire.taken()) == (1, early)
    for _ in range(30):
        parts = scene.step(draw)
        assert scene.wire.writes == []
        scene.send()
        assert (len(scene.wire.writes), scene.wire.taken()) == (parts != [], parts)
    scene.streamer.on_text(scene.choices[0], "end", [])
    for choice in scene.choices:
        scene.streamer.ended(choice)
    scene.send()
    ends = [(index, "", "stop") for index in range(CHOICES)]
    assert (len(scene.wire.writes), scene.wire.taken()) == (1, [(0, "end", None), *ends])
    assert scene.streamer.done.done()


def test_events_that_are_not_read_are_counted(seed: int) -> None:
    draw, most = random.Random(seed), 20
    scene, unread = Scene(most), 0
    scene.streamer.open()
    for _ in range(200):
        scene.wire.unread = 0 if draw.random() < 0.2 else 100
        parts = scene.step(draw)
        scene.send()
        assert scene.wire.taken() == ([] if scene.slow and unread > most else parts)
        unread = unread if unread > most or not parts else unread + len(parts) if scene.wire.unread else 0
        assert scene.slow == ["slow"] * (unread > most)


def test_nothing_is_written_for_a_client_that_is_gone() -> None:
    scene = Scene()
    scene.streamer.open()
    scene.wire.gone = True
    scene.streamer.on_text(scene.choices[0], "x", [])
    scene.send()
    scene.wire.gone = False
    scene.send()
    assert scene.wire.writes == []
