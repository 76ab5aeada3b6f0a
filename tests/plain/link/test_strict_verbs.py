"""The RDMA transport from end to end over verbs that refuse what pyverbs and cards refuse: see strict_verbs."""

import contextlib
from collections.abc import Iterator
from itertools import count

import pytest
from rdma import test_transport
from support.front_end import strict_verbs
from support.front_end.strict_verbs import Trouble

from blinkpy.dpu.link.connect_rdma import attach_rdma
from blinkpy.engine.link import handshake_door
from blinkpy.transport.contract import TransportError

globals().update(
    (name, it) for name, it in vars(test_transport).items() if name.startswith("test_") or name in ("fabric", "leased")
)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    strict_verbs.install(monkeypatch, strict_verbs.card())
    monkeypatch.setattr(handshake_door, "HANDSHAKE_S", 0.3)
    yield
    strict_verbs.uninstall()


def test_whichever_call_of_verbs_fails_is_an_error_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends' calls, one after another, from opening the device to the connection. (A GID that can't be read is left out.)"""
    with test_transport.weaving() as fabric:
        for number in count(1):
            monkeypatch.setattr(Trouble, "fails", number)
            with contextlib.suppress(TransportError):
                attach_rdma(*fabric.listener.address, owner=7).close()
                if Trouble.fails > 0:
                    break
            assert [context.open for context in strict_verbs.Context.made].count(True) == 1, "the listener's"
            assert len(strict_verbs.QP.all) <= 1
        assert number > 20
