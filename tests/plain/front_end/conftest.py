"""Fixtures of a front end's tests: a small model's folder, its tokenizer, and an engine without a scheduler."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.tiny_tokenizer import write_model

from blinkpy.dpu.text.tokenizer import Tokenizer


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
