"""The tests of this folder need an NVIDIA GPU. Without one each is skipped, with a line that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WITHOUT = "needs an NVIDIA GPU, and torch finds none on this machine: nothing was tested"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # After a fault, destructors of torch and of the driver's objects fail too: shown, and no failure of a test.
            item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=WITHOUT))
