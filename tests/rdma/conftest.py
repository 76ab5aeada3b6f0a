"""These tests need an RDMA device; `make test-rdma` runs them in a virtual machine that has one."""

import pytest
from rdma.limits import HANDSHAKE_S

from blinkpy.dpu.link import connect_rdma
from blinkpy.engine.link import handshake_server
from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import Port


def pytest_sessionstart(session: pytest.Session) -> None:
    try:
        Port().close()
    except TransportError as error:
        pytest.exit(f"tests/rdma: {error}. `make test-rdma` runs them on any machine.", returncode=2)


@pytest.fixture(autouse=True)
def patient_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer time limits for handshakes in the tests' own process. Separate front ends retry."""
    monkeypatch.setattr(connect_rdma, "HANDSHAKE_S", HANDSHAKE_S)
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", HANDSHAKE_S)
