"""The RDMA front end with the real scheduler and client, over a card and network that are late: see slow_card.

Claim memory/transports: A late card, and words of one transfer in any order, cause no error. Each transport
keeps its contract.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.front_end.link_storm import LinkStorm, looks_clock
from support.front_end.slow_card import SlowCard

from benchmarks.parts.rdma_cpu import connect
from blinkpy.dpu.link import connect_rdma, queue_pair, rdma_writes
from blinkpy.queues.layout import read_header
from blinkpy.scheduler.cycle import make_turn
from blinkpy.transport.contract import TransportError


@pytest.fixture
def storm(monkeypatch, seed: int) -> LinkStorm:
    for module, name in ((rdma_writes, "module"), (rdma_writes, "constants"), (connect_rdma, "constants")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the replaced modules return afterwards
    clock, turn, cards = looks_clock(), make_turn(), list[SlowCard]()
    monkeypatch.setattr(connect_rdma, "time", clock)
    monkeypatch.setattr(queue_pair, "time", clock)

    def cards_and_turn(*arguments: Any) -> int:
        for card in cards:
            card.work(made.draw.randint(0, 8))
        return turn(*arguments)

    def connect_pair(pair: int) -> Any:
        case = made.case
        layout = read_header(case.segment)[0]
        base = int(np.frombuffer(case.segment, np.uint8).ctypes.data)
        card = SlowCard(made.draw, made.turn)
        cards.append(card)
        segment: Any = SimpleNamespace(layout=layout, buffer=case.segment)
        transport: Any = connect(segment, card, base + layout.first_pair + pair * layout.pair_bytes)
        transport.card, transport.crash = card, card.crash
        return transport

    made = LinkStorm(seed, cards_and_turn, queue_pair)
    made.connect = connect_pair
    return made


def test_tokens_and_records_are_complete_with_a_late_card(storm: LinkStorm) -> None:
    for _ in range(8):
        storm.run(5)
    assert storm.case.counter("requests_finished") > 10
    for client in storm.clients:
        for _ in range(1000):
            client.transport.lost()
        assert client.transport.queue.done == client.transport.queue.posted


def test_the_first_failure_is_final(storm: LinkStorm) -> None:
    storm.run(2)
    client = storm.clients[0]
    transport = client.transport
    transport.card.status = 1
    with pytest.raises(TransportError, match="RDMA failed"):
        for _ in range(100):
            client.heartbeat()
    calls: list[Callable[[], Any]] = [
        client.heartbeat, client.poll, client.check, transport.lost, transport.read_pair, transport.read_engine_state,
        lambda: transport.ring_doorbell(1), lambda: transport.write_cancel(0, 1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TransportError, match="RDMA failed"):
            call()


def test_a_stalled_card_gets_one_read_of_each_kind_and_is_detected(storm: LinkStorm, monkeypatch) -> None:
    storm.run(2)
    client = storm.clients[0]
    depth = client.transport.queue._depth = 50
    monkeypatch.setattr(SlowCard, "work", lambda card, most: None)
    before = client.transport.queue.reads
    for _ in range(5):
        client.poll()
        client.check()
    assert client.transport.queue.reads <= before + 3, "completions, words of the pair, words of the engine"
    with pytest.raises(TransportError, match="50 RDMA requests are outstanding"):
        for _ in range(depth + 1):
            client.heartbeat()
