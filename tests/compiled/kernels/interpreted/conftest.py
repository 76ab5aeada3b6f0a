"""These tests run kernels in Triton's interpreter, in a separate process: see ../test_triton_interpreted.py."""

import os
import zlib

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob: list[str] = []
if INTERPRETED:
    from support.models import triton_interpreter

    triton_interpreter.install()
else:
    collect_ignore_glob.append("*")  # the wrapper test runs these files


def pytest_runtest_setup() -> None:
    """Fail outside of the interpreter: a file named on the command line is not ignored."""
    if not INTERPRETED:
        pytest.fail("run it with TRITON_INTERPRET=1, which must be set before Triton is imported", pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one of every CASES_OF cases of a test; the wrapper test sets this by day. Successive seeds select different cases."""
    parts, seed = int(os.environ.get("CASES_OF", "1")), int(os.environ["BLINKPY_SEED"])
    cases = dict[str, list[pytest.Item]]()
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items[:] = [item for of_test in cases.values() for item in of_test[seed % min(parts, len(of_test)) :: parts]]


@pytest.fixture
def either_dtype(request: pytest.FixtureRequest, seed: int) -> torch.dtype:
    """One of two dtypes: half of the tests get each, and the next seed swaps them."""
    chosen = (torch.float32, torch.bfloat16)[(zlib.crc32(request.node.name.encode()) + seed) % 2]
    print(chosen)
    return chosen


REACHES_PEERS = ("test_all_reduce.py", "test_rank_steps.py")  # ranks access each other's memory by address


@pytest.fixture(autouse=True)
def _inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each access outside of a launch's tensors fail."""
    if request.path.name not in REACHES_PEERS:
        triton_interpreter.stay_inside(monkeypatch)
