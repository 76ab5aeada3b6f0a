"""Fresh random inputs for every run; a failure prints the seed, and BLINKPY_SEED repeats it."""

import os
import secrets

import numpy as np
import pytest

SEED = int(os.environ.get("BLINKPY_SEED", "0")) or secrets.randbelow(2**31 - 1) + 1
os.environ["BLINKPY_SEED"] = str(SEED)  # that of the processes that share the tests, too


def pytest_report_header() -> str:
    return f"random inputs: BLINKPY_SEED={SEED}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed. It is printed with every failing test."""
    print(f"BLINKPY_SEED={SEED}")
    return SEED


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator seeded from the run's seed."""
    return np.random.default_rng(seed)
