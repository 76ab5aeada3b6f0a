"""These tests need an RDMA device; `make test-rdma` runs them in a virtual machine that has one."""

import pytest

from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import Port


def pytest_sessionstart(session: pytest.Session) -> None:
    try:
        Port().close()
    except TransportError as error:
        pytest.exit(f"tests/rdma: {error}. `make test-rdma` runs them on any machine.", returncode=2)
