"""Ports, queue pair ends and posting over strict_verbs: exact attributes, contents, errors, and nothing left open."""

import ipaddress
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.front_end import strict_verbs
from support.front_end.strict_verbs import C, Context, card

from blinkpy.dpu.link import rdma_writes
from blinkpy.dpu.link.connect_rdma import RegisteredMemory
from blinkpy.dpu.link.rdma_writes import SendQueue
from blinkpy.transport import verbs
from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import Port, QueuePairEnd


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cards that differ."""
    cards = card("a", mtu=4, max_qp_rd_atom=4), card("b", mtu=3, max_qp_rd_atom=40, lid=9)
    strict_verbs.install(monkeypatch, *cards)
    yield
    strict_verbs.uninstall()


# ---- ports -------------------------------------------------------------------------------------------------------------

ADDRESSES = [str(ipaddress.IPv6Address(each)) for each in ("::", "fe80::1", "fe80::2", "::ffff:10.0.0.1", "::ffff:10.0.0.2")]


def expected_port(cards: list[Any], device: str, wanted: int) -> tuple[Any, ...] | str:
    """Port's result for these cards, or the start of its error."""
    chosen = [it for it in cards if device in ("", it.name)]
    if device and not chosen:
        return f"unknown RDMA device '{device}'; this machine has {', '.join(it.name for it in cards) or 'none'}"
    if not cards:
        return "this machine has no RDMA device"
    active = [(it, i) for it in chosen for i, (state, _, _) in enumerate(it.ports) if state == C.IBV_PORT_ACTIVE]
    if not active:
        return f"no port of {', '.join(it.name for it in chosen)} is active"
    it, number = active[0]
    _, layer, table = it.ports[number]
    ethernet = layer == C.IBV_LINK_LAYER_ETHERNET
    gids = []
    for index, (address, v2) in sorted(table.items()):
        if address != "::" and index < 64:
            gids.append((index, address, ("RoCE v2" if v2 else "RoCE v1") if ethernet else "InfiniBand"))
    if wanted >= 0:
        gids = [gid for gid in gids if gid[0] == wanted] or [str(sorted(gid[0] for gid in gids))]
        if isinstance(gids[0], str):
            return f"{it.name} has no GID with index {wanted}; it has {gids[0]}"
    elif not gids:
        return f"{it.name} has no GID; bring"
    ranked = [[gid for gid in gids if (gid[2] != "RoCE v1", "ffff" in gid[1]) == rank] for rank in RANKS]
    best = next(some[0] for some in ranked if some)
    return (it.name, number + 1, ethernet, it.mtu, max(1, min(16, it.max_qp_rd_atom)), *best)


RANKS = ((True, True), (True, False), (False, True), (False, False))  # RoCE v2 before v1, IPv4 before IPv6


def test_the_best_port_and_gid_are_chosen(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        Context.cards = tuple(
            card(
                f"rxe{i}",
                ports=[
                    (
                        draw.choice((C.IBV_PORT_ACTIVE, C.IBV_PORT_DOWN, C.IBV_PORT_DOWN)),
                        draw.choice((C.IBV_LINK_LAYER_ETHERNET, C.IBV_LINK_LAYER_INFINIBAND)),
                        {
                            draw.choice((0, 1, 2, 3, 62, 63, 64)): (draw.choice(ADDRESSES), draw.randrange(2))
                            for _ in range(draw.randrange(6))
                        },
                    )
                    for _ in range(draw.randint(1, 3))
                ],
                mtu=draw.randint(1, 5),
                max_qp_rd_atom=draw.choice((0, 1, 2, 15, 16, 17, 128)),
            )
            for i in range(draw.choice((0, 1, 2, 2, 2)))
        )
        wanted, device = draw.choice((-1, -1, 0, 1, 2)), draw.choice(("", "", "rxe0", "rxe1", "mlx5"))
        expected = expected_port(list(Context.cards), device, wanted)
        if isinstance(expected, str):
            with pytest.raises(TransportError, match=re.escape(expected)):
                Port(device, wanted)
            continue
        port = Port(device, wanted)
        found = port.name, port.number, port.ethernet, port.mtu, port.reads, port.gid_index, port.gid, port.gid_kind
        assert found == expected
        port.close()


def test_a_missing_pyverbs_error_states_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    strict_verbs.install(monkeypatch, card(), enums="libibverbs_enums")
    assert verbs.constants().IBV_QPT_RC == C.IBV_QPT_RC
    monkeypatch.delattr(verbs.constants(), "IBV_GID_TYPE_SYSFS_ROCE_V2")  # as some releases lack it
    port = Port()
    assert (port.gid_kind, port.gid_index) == ("RoCE v2", 1)
    port.close()
    strict_verbs.uninstall()
    for name in ("device", "pyverbs_error"):
        monkeypatch.setitem(sys.modules, f"pyverbs.{name}", None)
    for call in (verbs.constants, verbs.device_names):
        with pytest.raises(TransportError, match=r"needs pyverbs .*install the distribution's pyverbs"):
            call()


# ---- ends --------------------------------------------------------------------------------------------------------------


LENGTH = 1 << 18


class Connected:
    """A front end's end on card a, an engine's on card b, and memory of both: all local, the engine's readable and writable."""

    def __init__(self, depth: int = 64, length: int = LENGTH):
        self.ports = Port("a"), Port("b")
        self.near, self.far = QueuePairEnd(self.ports[0], depth), QueuePairEnd(self.ports[1])
        self.here, self.there = RegisteredMemory(length), RegisteredMemory(length)
        self.lkey = self.near.register(self.here.address, length, 1).lkey
        self.rkey = self.far.register(self.there.address, length, 7).rkey
        self.far.answer(self.near.endpoint())
        self.near.send_to(self.far.endpoint())
        self.queue = SendQueue(self.near, depth)

    def close(self) -> None:
        for part in (self.near, self.near, self.far, *self.ports):  # an end may be closed twice
            part.close()


@pytest.fixture
def connected() -> Iterator[Connected]:
    made = Connected()
    yield made
    made.close()


def test_the_two_ends_agree(connected: Connected) -> None:
    near, far = connected.near, connected.far
    for end, peer, access in ((near, far, 0), (far, near, 6)):
        states = {name: dict(vars(attributes)) for name, attributes in end.qp.transitions.items()}
        assert states["INIT"] == {"port_num": 1, "qp_access_flags": access}
        rtr, port = states["RTR"], end.port
        route = rtr.pop("ah_attr")
        assert (route.is_global, route.port_num, route.dlid) == (1, port.number, 9 if peer is far else 0)
        assert (route.gr.dgid.gid, route.gr.sgid_index, route.gr.hop_limit) == ("0000:0000:0000:0000:0000:ffff:0a00:0001", 1, 64)
        agreed = {"path_mtu": 3, "max_dest_rd_atomic": 4, "min_rnr_timer": 12, "dest_qp_num": peer.qp.qp_num, "rq_psn": peer.psn}
        assert rtr == {"port_num": 1} | agreed
        assert end.endpoint() == (
            end.qp.qp_num,
            end.psn,
            ADDRESSES[3],
            0 if end is near else 9,
            4 if end is near else 3,
            port.reads,
        )
        cap = end.qp.cap
        assert (end.cq.cqe, cap.max_send_wr, cap.max_inline_data) == ((64, 64, 256) if end is near else (1, 1, 0))
    patience = {"timeout": verbs.ACK_TIMEOUT, "retry_cnt": verbs.RETRIES, "rnr_retry": verbs.RETRIES}
    assert vars(near.qp.transitions["RTS"]) == {"port_num": 1, "sq_psn": near.psn, "max_rd_atomic": 4} | patience
    assert set(far.qp.transitions) == {"INIT", "RTR"}


def test_sequences_begin_anywhere() -> None:
    port = Port()
    numbers = set()
    for _ in range(40):
        end = QueuePairEnd(port)
        numbers.add(end.psn)
        end.close()
    assert len(numbers) > 30
    assert 1 << 23 < max(numbers) < 1 << 24
    port.close()


@pytest.mark.parametrize(("can", "has"), [(31, None), (32, 32), (255, 32), (256, 256), (512, 256)])
def test_as_much_is_inline_as_a_card_can(can: int, has: int | None) -> None:
    Context.cards = (card(inline=can),)
    port = Port()
    if has is None:
        with pytest.raises(TransportError, match="could not make an RDMA queue pair: Failed to create QP"):
            QueuePairEnd(port, 8)
    else:
        end = QueuePairEnd(port, 8)
        assert end.inline == has
        end.close()
    port.close()


def test_errors_of_verbs_keep_their_number_and_reason(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "mr_limit", 4095)
    with pytest.raises(
        TransportError, match=r"could not register 4 KiB of memory for RDMA .*: Failed to register a MR"
    ) as caught:
        connected.near.register(connected.here.address, 4096, 1)
    assert caught.value.errno == strict_verbs.ENOMEM
    for error in (strict_verbs.PyverbsError("No such thing."), strict_verbs.PyverbsRDMAError("No such thing.")):
        with pytest.raises(TransportError, match=r"^could not try: No such thing$") as caught, verbs.reported("try"):
            raise error
        assert caught.value.errno is None
    for number in (0, 1):
        with pytest.raises(TransportError) as caught, verbs.reported("try"):
            raise strict_verbs.PyverbsRDMAError("No", number)
        assert caught.value.errno == (number or None)


# ---- posting -----------------------------------------------------------------------------------------------------------


def test_batches_bring_their_bytes_and_their_tags_in_order(connected: Connected, rng: np.random.Generator, seed: int) -> None:
    """Inline data may be overwritten immediately, all else after the batch."""
    draw, queue, half = random.Random(seed), connected.queue, LENGTH // 2
    here, there = (np.frombuffer(memory.buffer, np.uint8) for memory in (connected.here, connected.there))
    expected, tags, reads, used = there.copy(), list[int](), list[tuple[int, int, int]](), 0
    posted = read = 0
    for turn in range(300):
        tag = draw.randrange(16)
        tags.append(tag)
        if draw.random() < 0.3:
            size, at = draw.randint(1, 600), half + draw.randrange(half - 600)
            there[at : at + size] = expected[at : at + size] = rng.integers(0, 256, size)
            local = half + used, at, size
            queue.read(
                (connected.here.address + half + used, size, connected.there.address + at), connected.lkey, connected.rkey, tag
            )
            reads.append(local)
            used, posted, read = used + size, posted + 1, read + 1
        else:
            sizes = [draw.choice((1, 8, 255, 256, 257, 1000)) for _ in range(draw.randint(1, 4))]
            starts, targets = [used + sum(sizes[:i]) for i in range(len(sizes))], [draw.randrange(half - 1000) for _ in sizes]
            for size, start, to in zip(sizes, starts, targets, strict=True):
                here[start : start + size] = expected[to : to + size] = rng.integers(0, 256, size)
            bases = connected.here.address, connected.there.address
            pieces = [(bases[0] + start, size, bases[1] + to) for size, start, to in zip(sizes, starts, targets, strict=True)]
            queue.write(pieces, connected.lkey, connected.rkey, tag)
            for size, start in zip(sizes, starts, strict=True):
                if size <= connected.near.inline:
                    here[start : start + size] = 0
            used, posted = used + sum(sizes), posted + len(sizes)
        assert (queue.posted, queue.batches, queue.reads) == (posted, turn + 1, read)
        if queue.posted - queue.done > 50 or draw.random() < 0.3:
            assert queue.reap() == tags
            assert (queue.done, queue.reap()) == (posted, [])
            assert (there == expected).all()
            for to, at, size in reads:
                assert (here[to : to + size] == expected[at : at + size]).all()
            tags, reads, used = [], [], 0


def test_the_depth_is_what_may_be_outstanding(connected: Connected) -> None:
    queue, piece = connected.queue, (connected.here.address, 8, connected.there.address)
    for batches in (1, 16, 40):
        for _ in range(batches):
            queue.write([piece], connected.lkey, connected.rkey, 5)
        assert queue.reap() == [5] * batches
    queue.write([piece] * 64, connected.lkey, connected.rkey, 1)
    with pytest.raises(TransportError, match="64 RDMA requests are outstanding"):
        queue.read(piece, connected.lkey, connected.rkey, 2)
    assert queue.reads == 0


def test_completions_are_taken_and_never_waited_for(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many together as there are, 16 in one call of verbs."""
    queue, cq, polls = connected.queue, connected.near.cq, list[int]()
    poll = cq.poll

    def counted(most: int) -> tuple[int, list[Any]]:
        assert len(polls) < 9, "it waits"
        polls.append(most)
        return poll(most)

    monkeypatch.setattr(cq, "poll", counted)
    for batches, lazy, calls in (
        (0, 0, 0),
        (5, 0, 1),
        (20, 3, 2),
        (0, 3, 1),
        (16, 2, 2),
        (33, 33, 1),
        (0, 0, 3),
        (9, 2, 1),
        (0, 0, 1),
    ):
        for _ in range(batches):
            queue.write([(connected.here.address, 8, connected.there.address)], connected.lkey, connected.rkey, 5)
        monkeypatch.setattr(connected.near.qp, "lazy", lazy)
        polls.clear()
        queue.reap()
        assert polls == [16] * calls
        assert queue.posted - queue.done == lazy


@pytest.mark.parametrize("name", [*rdma_writes.REASONS, "IBV_WC_LOC_PROT_ERR", "posting"])
def test_the_first_failure_has_its_reason_and_is_final(connected: Connected, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, qp, piece = connected.queue, connected.near.qp, (connected.here.address, 8, connected.there.address)
    arguments = connected.lkey, connected.rkey, 3
    number = getattr(C, name, 0)
    reason = rdma_writes.REASONS.get(name, f"completion status {number}")
    if name == "posting":
        reason = "could not post to the RDMA queue pair: Failed to post"
    with monkeypatch.context() as changed, pytest.raises(TransportError) as first:
        changed.setattr(*(qp, "state", "ERR") if name == "posting" else (qp, "_status", lambda work: number))
        queue.write([piece], *arguments)
        queue.reap()
    assert reason in str(first.value)
    posted = queue.posted
    for call in (lambda: queue.write([piece], *arguments), lambda: queue.read(piece, *arguments), queue.reap):
        with pytest.raises(TransportError) as again:
            call()
        assert again.value is first.value
    assert queue.posted == posted
