"""The tests of this folder need an NVIDIA GPU. Without a GPU, each test is skipped with a message."""

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import model_zoo

WITHOUT = "needs an NVIDIA GPU, and torch finds none on this machine: nothing was tested"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # After a fault, destructors of torch and of the driver's objects fail, too: that is shown, but fails no test.
            item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=WITHOUT))


@pytest.fixture
def folder(rng: np.random.Generator, tmp_path: Path) -> Path:
    """The folder of a small model. The engine reads no tokenizer, but a model's folder has one."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Free the memory that torch keeps after a test: other processes share the GPU, and need it."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
