"""Fixtures of a front end's tests: a small model's folder, its tokenizer, and an engine without a scheduler."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.tiny_tokenizer import write_model

from blinkpy.dpu.engine_link import EngineLink
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.byte_automaton import ByteAutomaton


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[ByteAutomaton | None]:
    """The grammars of submissions, which the engine does not get: it answers a given text."""
    found: list[ByteAutomaton | None] = []
    submit = EngineLink.submit

    def spy(link: EngineLink, work: Any) -> None:
        for generation, _, _ in work:
            found.append(generation.grammar)
            generation.grammar = None
        submit(link, work)

    monkeypatch.setattr(EngineLink, "submit", spy)
    return found
