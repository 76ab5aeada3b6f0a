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
def test_base_install_lacks_engine_packages(name: str) -> None:
    assert importlib.util.find_spec(name) is None


def test_child_processes_are_aarch64() -> None:
    asked = [sys.executable, "-c", "import platform; print(platform.machine())"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "aarch64\n"


def test_stores_are_ordered_by_the_kernel() -> None:
    assert store_fence.store_fence() is store_fence.membarrier


@pytest.mark.parametrize("name", ["device", "pd", "mr", "cq", "qp", "wr", "addr", "enums", "pyverbs_error"])
def test_the_distributions_pyverbs_can_be_loaded(name: str) -> None:
    """And has the names that blinkpy uses: see verbs.module for those of its modules."""
    assert importlib.import_module(f"pyverbs.{name}").__file__.endswith(("aarch64-linux-gnu.so", ".py"))


def test_a_machine_without_rdma_gets_a_transport_error() -> None:
    with pytest.raises(TransportError, match="RDMA"):
        verbs.Port()


def test_an_engine_names_its_missing_packages() -> None:
    engine = [sys.executable, "-m", "blinkpy", "engine", "demo", "--device", "cpu"]
    done = subprocess.run(engine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.search(r"an engine needs (torch|numba): pip install 'blinkpy-serve\[cpu\]'$", done.stderr.strip())
