"""Sinks of a stream's texts: one write has all texts of a step, in order, and a client that does not read gets
no more."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.front_end.tiny_tokenizer import write_model

from blinkpy.dpu.generation import Generation
from blinkpy.dpu.http.answer_sinks import Collector, Streamer
from blinkpy.dpu.http.answers import Answer, Usage
from blinkpy.dpu.http.fields.http_request import StreamUsage
from blinkpy.dpu.metrics import HISTOGRAMS, Metrics
from blinkpy.dpu.text.detokenizer import Detokenizer
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.dpu.token_feed import feed
from blinkpy.queues.words import FINISH_LENGTH, HAS_TOKEN, WAS_DRAFTED, WAS_PREDICTED

CHOICES = 3
Part = tuple[int, str, str | None]  # index, text and finish reason of a choice


class Wire:
    """A connection and its transport. unread: bytes that the client has not read."""

    def __init__(self) -> None:
        self.writes, self.unread, self.transport = list[bytes](), 0, self
        self.write, self.get_write_buffer_size = self.writes.append, lambda: self.unread
        self.is_closing, self.disconnected = lambda: False, False

    def taken(self) -> list[Part]:
        """The bytes written since the last call, in whole HTTP chunks."""
        parts = [part for data in self.writes for part in parts_of(data)]
        self.writes.clear()
        return parts


def chunks_of(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, rest = data.partition(b"\r\n")
        chunk, line, data = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert line == b"\r\n" and chunk
        yield chunk


def parts_of(data: bytes) -> Iterator[Part]:
    for event in b"".join(chunks_of(data)).split(b"\n\n")[:-1]:
        found = json.loads(event.removeprefix(b"data: "))["choices"][0]
        yield found["index"], found["text"], found["finish_reason"]


class Scene:
    """A stream of several choices, outside of any server."""

    def __init__(self, max_backlog: int = 1000, usage: StreamUsage | None = None) -> None:
        self.wire, self.slow = Wire(), list[str]()
        make: Any = Streamer
        answer = Answer(False, "demo", lambda token: ("", b""))
        self.streamer = make(answer, self.wire, max_backlog, usage or StreamUsage(), lambda: self.slow.append("slow"))
        self.choices: list[Any] = [
            SimpleNamespace(index=i, error=None, finish_reason="stop", stop_text="", is_plain=False) for i in range(CHOICES)
        ]
        self.streamer.generations = self.choices

    def step(self, draw: random.Random) -> list[Part]:
        """Texts of some choices, and their ends."""
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
    scene.streamer.open(b"head")
    head, scene.wire.writes[0] = scene.wire.writes[0][:4], scene.wire.writes[0][4:]
    assert (head, len(scene.wire.writes), scene.wire.taken()) == (b"head", 1, early)
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
    scene.streamer.open(b"")
    scene.wire.writes.clear()
    for _ in range(200):
        scene.wire.unread = 0 if draw.random() < 0.2 else 100
        parts = scene.step(draw)
        scene.send()
        assert scene.wire.taken() == ([] if scene.slow and unread > most else parts)
        unread = unread if unread > most or not parts else unread + len(parts) if scene.wire.unread else 0
        assert scene.slow == ["slow"] * (unread > most)


def test_nothing_is_written_to_a_disconnected_client() -> None:
    scene = Scene()
    scene.streamer.open(b"")
    scene.wire.writes.clear()
    scene.streamer.stop()
    scene.streamer.on_text(scene.choices[0], "x", [])
    scene.send()
    assert scene.wire.writes == []


def test_the_shortcut_makes_an_event_of_each_token_with_text(seed: int, tmp_path: Path) -> None:
    """Whole characters, parts of some, tokens without text and unknown ones, several in a step; against the events one by one."""
    draw, scene, tokenizer = random.Random(seed), Scene(), Tokenizer(write_model(tmp_path))
    answer = scene.streamer.answer
    metrics, cancelled, reference = Metrics(), list[Generation](), tokenizer.detokenizer()
    choice = Generation(0, 1, tokenizer.detokenizer(), (), 0.0, scene.streamer)
    request: Any = SimpleNamespace(owner=choice)
    scene.streamer.generations = [choice]
    scene.streamer.open(b"")
    scene.wire.writes.clear()
    count = drafted = predicted = 0
    for now in range(1, 400):
        step = [draw.randrange(520) for _ in range(1 if now == 1 else draw.choice((1, 1, 1, 2, 3)))]
        texts = [text for text in map(reference.push, step) if text or now == 1]
        assert (choice.plain is None) == (now == 1), "the first event is made in full"
        flags = [HAS_TOKEN | draw.choice((0, WAS_DRAFTED, WAS_DRAFTED | WAS_PREDICTED)) for _ in step]
        drafted += sum(flag != HAS_TOKEN for flag in flags)
        predicted += sum(flag & WAS_PREDICTED != 0 for flag in flags)
        events = [(request, token, flag) for token, flag in zip(step, flags, strict=True)]
        feed(events, float(now), float(now), metrics, cancelled.append)
        assert (choice.drafted, choice.predicted) == (drafted, predicted)
        count += len(step)
        assert list(chunks_of(b"".join(scene.wire.writes))) == [answer.event(0, text) for text in texts]
        assert (len(scene.wire.writes), choice.tokens, choice.last_event) == (bool(texts), count, float(now))
        scene.wire.writes.clear()
    feed([(request, 70, HAS_TOKEN), (request, 71, HAS_TOKEN | FINISH_LENGTH)], 400.0, 400.0, metrics, cancelled.append)
    texts = [text for text in map(reference.push, (70, 71)) if text]
    expected = [*(answer.event(0, text) for text in texts), answer.last_event(0, "length")]
    assert (list(chunks_of(scene.wire.writes[0])), choice.open, choice.tokens) == (expected, False, count + 2)


def test_each_gap_of_each_request_counts_once(rng: np.random.Generator, tmp_path: Path) -> None:
    """However many requests share a step, with the shortcut and without. The gaps add up to the time from first to last."""
    tokenizer, metrics, scene = Tokenizer(write_model(tmp_path)), Metrics(), Scene()
    made = [Generation(i % CHOICES, 1, tokenizer.detokenizer(), ("\ufffe",) * (i % 2), 0.0, scene.streamer) for i in range(6)]
    scene.streamer.generations = made
    scene.streamer.open(b"")
    requests: list[Any] = [SimpleNamespace(owner=one) for one in made]
    times: list[list[float]] = [[] for _ in made]
    for now in range(1, 200):
        chosen = np.flatnonzero(rng.random(len(made)) < rng.choice((0.3, 1)))
        events = [(requests[i], int(rng.integers(70, 90)), HAS_TOKEN) for i in chosen for _ in range(rng.integers(1, 3))]
        feed(events, float(now), float(now), metrics, lambda generation: None)
        for i in chosen:
            times[i].append(float(now))
    for which, wanted in (
        ("time_to_first_token", [own[0] for own in times]),
        ("inter_token_latency", np.concatenate(list(map(np.diff, times)))),
    ):
        place = next(i for i, shape in enumerate(HISTOGRAMS) if shape.attribute == which)
        ((counts, total),) = metrics.histogram(place)
        assert (sum(counts), total) == (len(wanted), sum(wanted)), which


@pytest.mark.parametrize(
    "more", [{"stops": ("x",)}, {"top_logprobs": 0}, {"reasoning": object()}, {"scoring": True}, {"echo": "x"}]
)
def test_texts_that_hang_on_more_than_their_tokens_take_no_shortcut(more: dict[str, Any]) -> None:
    scene = Scene()
    fields: dict[str, Any] = {"stops": (), **more}
    choice = Generation(0, 1, cast(Detokenizer, None), arrival=0.0, sink=scene.streamer, **fields)
    scene.streamer.on_text(choice, "a", [])
    assert choice.plain is None and not choice.is_plain


def test_events_with_token_counts_take_no_shortcut() -> None:
    scene, choice = Scene(usage=StreamUsage(True, True)), SimpleNamespace(index=0, is_plain=True, plain=None, detokenizer=None)
    choice.prompt_length = choice.tokens = choice.cached_tokens = choice.drafted = 1
    choice.reasoning = choice.prediction = None
    scene.streamer.generations = [cast(Generation, choice)]
    scene.streamer.on_text(cast(Generation, choice), "a", [])
    assert choice.plain is None


def test_usage_counts_right_drafts_if_there_were_some() -> None:
    tables = [Usage(5, 9, drafted_tokens=drafted).table()["completion_tokens_details"] for drafted in (0, 4)]
    assert tables == [{"reasoning_tokens": 0}, {"reasoning_tokens": 0, "accepted_prediction_tokens": 4}]


def test_usage_of_predictions_counts_only_their_drafts() -> None:
    """Of two choices, which also have drafts from other places. A choice may repeat its prediction."""
    common = {"prompt_length": 3, "tokens": 30, "cached_tokens": 0, "reasoning": None, "prediction": range(10)}
    counts = [(9, 5), (20, 14)]  # accepted drafts, and those of the prediction of 10 tokens
    generations = [SimpleNamespace(**common, drafted=drafted, predicted=predicted) for drafted, predicted in counts]
    usage = Collector.usage(cast(Collector, SimpleNamespace(generations=generations, choices=2)))
    details = usage.table()["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 19, "rejected_prediction_tokens": 5}
