"""The RDMA transport and the engine's handshake server against an engine in plain Python: contents, counts, rights, faults."""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from rdma.limits import ATTACH_S, HANDSHAKE_S, TEST_S
from support.front_end.fake_engine import FACTS, FakeEngine, drain
from support.front_end.hash_reference import page_hashes
from support.waiting import wait_for

from blinkpy.dpu.link.connect_rdma import RdmaTransport, attach_rdma
from blinkpy.dpu.link.queue_pair import EngineLostError, NoSpaceError, QueuePair
from blinkpy.engine.link.listen_rdma import RdmaListener
from blinkpy.queues.layout import EngineFacts, QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import SQ_ENTRY_BYTES
from blinkpy.queues.words import COUNTER, EPOCH_SHIFT, FRONT_CQ_HEAD, FRONT_HEARTBEAT
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import Hello, new_nonce, new_owner
from blinkpy.transport.link_key import LinkKey
from blinkpy.transport.verbs import Endpoint, Port

SIZES = QueueSizes(pairs=2, slots=32, sq_entries=32, cq_entries=256, prompt_tokens=1 << 16, hash_entries=1 << 12)
BIG = FACTS._replace(max_model_len=8192, page_size=16, num_pages=1 << 14, lease_ms=60_000)  # most tests send no heartbeats
pytestmark = pytest.mark.timeout(TEST_S)
NOTICED_S = 60.0  # longest time until a fault is noticed; the emulation is slow, and machines are busy


class Fabric:
    """An engine in plain Python with a listener, and the transports attached to it."""

    def __init__(self, engine: FakeEngine, listener: RdmaListener, key: LinkKey | None):
        self.engine, self.listener, self.key, self.transports = engine, listener, key, list[RdmaTransport]()

    def transport(self, owner: int = 0) -> RdmaTransport:
        made = attach_rdma(*self.listener.address, owner or new_owner(), key=self.key)
        self.transports.append(made)
        return made

    def pair(self, owner: int = 0) -> QueuePair:
        pair = QueuePair(self.transport(owner))
        pair.attach(ATTACH_S)
        return pair


@contextlib.contextmanager
def weaving(sizes: QueueSizes = SIZES, facts: EngineFacts = BIG, key: LinkKey | None = None) -> Iterator[Fabric]:
    with FakeEngine(sizes=sizes, facts=facts, step_s=0.001) as engine:
        listener = RdmaListener("127.0.0.1", 0, key=key)
        fabric = Fabric(engine, listener, key)
        try:
            listener.start(engine.segment)
            yield fabric
        finally:
            for transport in fabric.transports:
                transport.close()
            listener.close()


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with weaving() as made:
        yield made


def wait(condition: Callable[[], bool]) -> float:
    return wait_for(condition, NOTICED_S, "what the test waits for")


def test_prompts_hashes_tokens_and_log_probabilities_arrive(fabric, rng) -> None:
    """More completions than the ring has places, with and without records, from prompts of all lengths."""
    pair, engine = fabric.pair(), fabric.engine
    wanted = {}
    for turn in range(6):
        for _ in range(12):
            prompt = rng.integers(0, FACTS.vocab_size, int(rng.choice([1, 15, 16, 100, 4096])), dtype=np.int32)
            asked = int(rng.choice([-1, 0, 5]))
            sampling = RequestParameters(max_tokens=int(rng.integers(1, 12)), logprobs=asked)
            wanted[pair.submit(prompt, sampling, prompt)] = sampling
        if turn % 2:
            pair.heartbeat()
            pair.check()
        got = drain(pair)
        for request, tokens in got.items():
            sampling, prompt = wanted.pop(request), request.owner
            expected = [int(prompt[i % len(prompt)]) for i in range(sampling.max_tokens)]
            assert [token for token, _ in tokens] == expected
            assert len(request.records) == (sampling.max_tokens if sampling.logprobs >= 0 else 0)
            for token, record in zip(expected, request.records, strict=False):
                assert record == list(zip(*engine.likely(token), strict=True))
    assert not wanted
    multipliers = (BIG.hash_multiplier_1, BIG.hash_multiplier_2)
    for request in engine.submitted:
        assert request.hashes == page_hashes(request.prompt, BIG.page_size, multipliers)
    assert pair.stray_completions == 0


def test_a_request_costs_four_verbs_and_a_look_one(fabric, rng) -> None:
    pair = fabric.pair()
    queue = pair.transport.queue
    refreshes, count = 0, 60
    for _ in range(count):
        prompt = rng.integers(0, FACTS.vocab_size, int(rng.integers(1, 4097)), dtype=np.int32)
        posted, reads, batches = queue.posted, queue.reads, queue.batches
        pair.submit(prompt, RequestParameters(max_tokens=3))
        refreshes += queue.reads - reads
        assert queue.posted - posted - (queue.reads - reads) <= 4
        assert queue.batches - batches <= 1 + queue.reads - reads
        posted, polls, deadline = queue.posted, 0, time.monotonic() + 60
        while pair.in_flight:
            pair.poll()
            polls += 1
            time.sleep(0.001)
            assert time.monotonic() < deadline
        assert queue.posted - posted <= polls + 1, "and one read of the hit words"
    assert refreshes <= count / 4, "reads of the engine's position, before the arena may seem full"


FORBIDDEN = {
    "write to the engine's region": lambda w, o: (False, w.back, 0),
    "write to the engine's words": lambda w, o: (False, w.engine, 0),
    "read of the front end's own region": lambda w, o: (True, w.front, 0),
    "write past the end": lambda w, o: (False, w.front, w.front.length - 4),
    "read past the end": lambda w, o: (True, w.back, w.back.length - 4),
    "read before the start": lambda w, o: (True, w.engine, -8),
    "wrong key": lambda w, o: (False, w.front._replace(rkey=w.front.rkey ^ 0x55), 0),
    "another front end's key": lambda w, o: (False, o.front, 0),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_a_front_end_reaches_its_own_queues_and_nothing_else(fabric, case) -> None:
    other, bad = fabric.pair(), fabric.transport()
    memory = bytes(fabric.engine.segment.buffer[fabric.engine.segment.layout.front_region(0) :][: SIZES.slots * SQ_ENTRY_BYTES])
    read, region, offset = FORBIDDEN[case](bad._welcome, other.transport._welcome)
    bad._words[0] = 0x0DDBA11
    if read:
        bad.queue.read((bad._landing.address, 8, region.address + offset), bad._landing_key, region.rkey, 0)
    else:
        bad.queue.write([(bad._copy.address, 8, region.address + offset)], bad._copy_key, region.rkey, 0)
    with pytest.raises(TransportError, match="RDMA failed"):
        wait(lambda: bad.queue.reap() == [0])
    with pytest.raises(TransportError, match="RDMA failed"):
        bad.read_engine_state()
    with pytest.raises(TransportError, match="RDMA failed"):
        bad.ring_doorbell(1 << 32)
    now = bytes(fabric.engine.segment.buffer[fabric.engine.segment.layout.front_region(0) :][: SIZES.slots * SQ_ENTRY_BYTES])
    assert now[32:] == memory[32:]  # the other's heartbeat may have changed, nothing else
    other.submit(np.arange(1, 9, dtype=np.int32), RequestParameters(max_tokens=2))
    assert [len(tokens) for tokens in drain(other).values()] == [2]


def test_each_heartbeat_arrives_with_the_completion_head(fabric) -> None:
    pair = fabric.pair()
    front = fabric.engine.views.front[pair.transport.pair]
    for count in (1, 3, 2):
        for _ in range(count):
            pair.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=1))
        drain(pair)
        before = int(front[FRONT_HEARTBEAT])
        pair.heartbeat()
        wait(lambda before=before: front[FRONT_HEARTBEAT] > before)
        wait(lambda: front[FRONT_CQ_HEAD] == pair.epoch << EPOCH_SHIFT | pair._cq_position)


@pytest.fixture
def leased() -> Iterator[Fabric]:
    """A fabric whose leases end soon."""
    with weaving(facts=BIG._replace(lease_ms=4000)) as made:
        yield made


def test_what_an_old_epoch_writes_changes_nothing(leased) -> None:
    """A front end that was silent beyond its lease wakes up: first its pair is only revoked, then another front end owns it."""
    old = leased.pair()
    engine, owner = leased.engine, new_owner()
    other = leased.pair()
    prompt = np.arange(1, 20, dtype=np.int32)
    wait(lambda: other.heartbeat() or engine.fences == 1)
    taken = len(engine.submitted)
    old.submit(prompt, RequestParameters(max_tokens=3))  # its front end has not noticed yet
    old.poll()
    time.sleep(0.1)
    assert len(engine.submitted) == taken
    assert engine.views.engine[COUNTER["requests_accepted"]] == taken

    def revoked() -> bool:
        old.check()
        return False

    with pytest.raises(EngineLostError, match="was revoked"):
        wait(revoked)
    new = leased.pair(owner)  # the first pair, whose owner is dead
    assert new.transport.pair == old.transport.pair
    assert new.epoch == old.epoch + 1

    def refused() -> bool:
        old.transport.write_word(FRONT_HEARTBEAT, 1 << 40)
        return False

    with pytest.raises(TransportError, match="RDMA failed"):
        wait(refused)
    new.submit(prompt, RequestParameters(max_tokens=4))
    assert [len(tokens) for tokens in drain(new).values()] == [4]


def test_pairs_go_to_their_owners_and_then_to_who_asks(fabric) -> None:
    owner = new_owner()
    first, second = fabric.pair(owner), fabric.pair()
    assert {first.transport.pair, second.transport.pair} == {0, 1}
    with pytest.raises(TransportError, match="all 2 queue pairs are in use"):
        fabric.transport()
    again = fabric.pair(owner)  # its successor does not wait for the lease
    assert (again.transport.pair, again.epoch) == (first.transport.pair, first.epoch + 1)
    again.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=1))
    assert len(drain(again)) == 1


def test_only_who_has_the_key_gets_a_queue_pair() -> None:
    with weaving(key=LinkKey(b"a key of thirty-two bytes or more")) as fabric:
        for key in (None, LinkKey(b"another key of thirty-two bytes..")):
            with pytest.raises(TransportError, match=r"need the same --link-key-file"):
                attach_rdma(*fabric.listener.address, new_owner(), key=key)
        assert fabric.listener._grants == {}
        pair = fabric.pair()
        pair.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=1))
        assert len(drain(pair)) == 1


def test_silent_strangers_delay_no_handshake(fabric) -> None:
    """A silent connection may stay open for the time limit of a whole handshake."""
    strangers = [socket.create_connection(fabric.listener.address, 3 * HANDSHAKE_S) for _ in range(20)]
    pair = fabric.pair()
    pair.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=1))
    assert len(drain(pair)) == 1
    for stranger in strangers:
        stranger.close()


def test_a_pair_that_stays_unclaimed_goes_to_another_client(leased) -> None:
    """Two clients that claim nothing attach repeatedly and hold both pairs. A third gets a pair that stays unclaimed for a
    lease."""
    owners, pairs = (new_owner(), new_owner()), list[QueuePair]()

    def served() -> bool:
        for owner in owners:
            with contextlib.suppress(TransportError):
                attach_rdma(*leased.listener.address, owner).close()
        with contextlib.suppress(TransportError):
            pairs.append(leased.pair())
        return bool(pairs)

    assert not served(), "both pairs are taken"
    wait(served)


def test_nothing_of_a_front_end_that_is_gone_stays_open() -> None:
    """A dead front end's connections are closed, whether it served or claimed nothing; a live front end keeps its connection."""
    with weaving(dataclasses.replace(SIZES, pairs=3), BIG._replace(lease_ms=4000)) as fabric:
        alive, gone, unclaimed = fabric.pair(), fabric.pair(), fabric.transport()
        grants = fabric.listener._grants
        assert len({alive.transport.pair, gone.transport.pair, unclaimed.pair}) == len(grants) == 3
        wait(lambda: alive.heartbeat() or set(grants) == {alive.transport.pair})
        alive.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=1))
        assert len(drain(alive)) == 1
        for transport in (gone.transport, unclaimed):
            with pytest.raises(TransportError, match="RDMA failed"):
                wait(lambda transport=transport: transport.write_word(FRONT_HEARTBEAT, 1 << 40))


def test_a_full_submission_ring_is_busy_and_drains(fabric) -> None:
    pair, engine = fabric.pair(), fabric.engine
    engine.consume_nothing = True
    for _ in range(SIZES.slots):
        pair.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=2))
    with pytest.raises(NoSpaceError):
        pair.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=2))
    engine.consume_nothing = False
    assert [len(tokens) for tokens in drain(pair).values()] == [2] * SIZES.slots


def test_a_full_completion_ring_loses_nothing(fabric, rng) -> None:
    """A sleeping reader stalls its own requests; afterwards it gets each token once and in order."""
    pair, engine = fabric.pair(), fabric.engine
    prompts = [rng.integers(0, FACTS.vocab_size, 40, dtype=np.int32) for _ in range(SIZES.slots)]
    requests = [pair.submit(prompt, RequestParameters(max_tokens=20)) for prompt in prompts]  # 640 tokens, 256 places
    wait(lambda: engine.stalls > 0)
    got = drain(pair)
    for request, prompt in zip(requests, prompts, strict=True):
        assert [token for token, _ in got[request]] == prompt[:20].tolist()


def everything(connection: socket.socket) -> bytes:
    """All data that the peer sends until it closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"x" * 40_000, b"silence"])
def test_nonsense_at_the_door_hurts_nobody(fabric, said) -> None:
    with socket.create_connection(fabric.listener.address, 3 * HANDSHAKE_S) as stranger:
        if said != b"silence":
            with contextlib.suppress(OSError):  # the server closes in the middle of too long a message
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
        answer = everything(stranger)
        assert said[:1] == b"x" or b'"error"' in answer
    pair = fabric.pair()
    pair.submit(np.arange(1, 5, dtype=np.int32), RequestParameters(max_tokens=1))
    assert len(drain(pair)) == 1


def test_an_impossible_peer_is_refused(fabric) -> None:
    """A client that speaks the protocol repeatedly sends an address that the network card can't connect to."""
    for _ in range(5):
        hello = Hello(new_owner(), Endpoint(1, 1, "::1", 0, 3, 1), new_nonce()).encode()
        with socket.create_connection(fabric.listener.address, 3 * HANDSHAKE_S) as stranger:
            stranger.sendall(hello)
            assert everything(stranger).count(b"\n") == 2, "a challenge and an answer"


def test_a_port_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match="has no GID with index 77; it has"):
        Port(gid_index=77)
    with pytest.raises(TransportError, match="unknown RDMA device 'mlx5_9'; this machine has"):
        Port("mlx5_9")
