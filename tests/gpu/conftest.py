"""The tests of this folder need an NVIDIA GPU. Without one each is skipped, with a line that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WITHOUT = "needs an NVIDIA GPU, and torch finds none on this machine: nothing was tested"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))
