"""The RDMA transport from end to end over verbs that refuse what pyverbs and cards refuse: see strict_verbs.

Supports claim front-ends/handshake.
"""

import contextlib
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
from rdma import test_transport
from support.front_end import strict_verbs
from support.front_end.strict_verbs import Trouble

from blinkpy.dpu.link.connect_rdma import attach_rdma
from blinkpy.engine.link import handshake_server, listen_rdma
from blinkpy.queues.words import PAIR_ATTACHED, PAIR_EPOCH
from blinkpy.transport.contract import TransportError

globals().update(
    (name, it) for name, it in vars(test_transport).items() if name.startswith("test_") or name in ("fabric", "leased")
)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    strict_verbs.install(monkeypatch, strict_verbs.card())
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", 0.3)
    yield
    strict_verbs.uninstall()


def test_any_failing_verbs_call_is_an_error_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_recently_attached_front_ends_keep_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was stopped for longer than a lease claims again over the same one. The clock is the test's."""
    monkeypatch.setattr(handshake_server, "WATCH_S", 60.0)
    with test_transport.weaving() as fabric:
        pair = fabric.pair().transport.pair
        listener, lease_s = fabric.listener, fabric.engine.facts.lease_ms / 1000
        clock = SimpleNamespace(now=listener._grants[pair].since)
        clock.monotonic = lambda: clock.now
        monkeypatch.setattr(listen_rdma, "time", clock)
        # Not in the queue pair's memory: the running engine would end the lease of a front end without heartbeats.
        words = {PAIR_ATTACHED: 0}
        monkeypatch.setattr(listener, "_word", lambda queue_pair, index: words.get(index, 0))
        for words[PAIR_ATTACHED], later_s, kept in ((1, 1000 * lease_s, True), (0, 2 * lease_s, True), (0, 0.01, False)):
            clock.now += later_s
            listener._free_absent()
            assert (pair in listener._grants) == kept
        assert len(strict_verbs.QP.all) == 1, "the front end's own"


def test_a_returning_front_end_has_one_lease_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile all pairs are in use, and a stranger asks. The clock is the test's, and so is what the engine granted."""
    monkeypatch.setattr(handshake_server, "WATCH_S", 60.0)
    with test_transport.weaving() as fabric, contextlib.ExitStack() as opened:
        listener, lease_s = fabric.listener, fabric.engine.facts.lease_ms / 1000
        clock, words = SimpleNamespace(now=1000.0), {PAIR_ATTACHED: 0, PAIR_EPOCH: 1}
        clock.monotonic = lambda: clock.now
        monkeypatch.setattr(listen_rdma, "time", clock)
        monkeypatch.setattr(listener, "_word", lambda queue_pair, index: words.get(index, 0))

        def ask(owner: int) -> int:
            transport = opened.enter_context(contextlib.closing(attach_rdma(*listener.address, owner=owner)))
            return int(transport.pair)

        pairs = {owner: ask(owner) for owner in range(1, listener._layout.sizes.pairs + 1)}
        for epoch, claimed in ((2, True), (2, False)):
            clock.now, words[PAIR_EPOCH] = clock.now + 5 * lease_s, epoch
            for grant in listener._grants.values():
                grant.since = grant.since if grant.owner == 1 else clock.now
            assert ask(1) == pairs[1]
            if claimed:
                with pytest.raises(TransportError, match="queue pairs are in use"):
                    ask(99)
            else:
                assert ask(99) == pairs[1]
