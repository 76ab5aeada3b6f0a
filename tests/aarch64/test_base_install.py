"""The base install on an aarch64 machine: `make test-aarch64` runs this in emulation."""

import importlib
import importlib.util
import platform
import re
import subprocess
import sys

import pytest

from blinkpy.dpu.link import store_fence
from blinkpy.transport import verbs
from blinkpy.transport.contract import TransportError

if platform.machine() != "aarch64":
    pytest.skip(f"this is a {platform.machine()}; `make test-aarch64` emulates an aarch64", allow_module_level=True)


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_it_has_nothing_of_an_engine(name: str) -> None:
    assert importlib.util.find_spec(name) is None


def test_what_it_starts_is_aarch64_as_well() -> None:
    asked = [sys.executable, "-c", "import platform; print(platform.machine())"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "aarch64\n"


def test_stores_are_ordered_by_the_kernel() -> None:
    assert store_fence.store_fence() is store_fence.membarrier


@pytest.mark.parametrize("name", ["device", "pd", "mr", "cq", "qp", "wr", "addr", "enums", "pyverbs_error"])
def test_the_distributions_pyverbs_can_be_loaded(name: str) -> None:
    """And has the names that blinkpy uses: see verbs.module for those of its modules."""
    assert importlib.import_module(f"pyverbs.{name}").__file__.endswith(("aarch64-linux-gnu.so", ".py"))


def test_a_machine_without_rdma_is_told_so() -> None:
    with pytest.raises(TransportError, match="RDMA"):
        verbs.Port()


def test_an_engine_says_what_it_lacks() -> None:
    engine = [sys.executable, "-m", "blinkpy", "engine", "demo", "--device", "cpu"]
    done = subprocess.run(engine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.search(r"an engine needs (torch|numba): pip install 'blinkpy-serve\[cpu\]'$", done.stderr.strip())
