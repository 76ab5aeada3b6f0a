"""The contract of transports, for each of them: writes and reads, their places and times. RDMA goes over
strict_verbs.

Supports claim memory/transports.
"""

import contextlib
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.front_end import strict_verbs
from support.front_end.fake_engine import FACTS
from support.front_end.link_storm import looks_clock
from support.front_end.strict_verbs import QPEx, card

from blinkpy.config import Config
from blinkpy.dpu.link import connect_rdma, connectors
from blinkpy.dpu.link.connect_rdma import RdmaTransport, attach_rdma
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.engine.link.listen_rdma import RdmaListener, listen
from blinkpy.queues import words as W
from blinkpy.queues.layout import EngineViews, LayoutError, QueueSizes, engine_views
from blinkpy.queues.words import HAS_LOGPROBS, LOGPROB_ENTRIES, LOGPROB_ENTRY, lap_of, pack_completion
from blinkpy.transport.contract import EngineWords, TransportError, WorkerIdentity
from blinkpy.transport.handshake import introduce
from blinkpy.transport.segment import Segment, create_segment

EPOCH = 5


class Linked:
    """A front end's transport to one of three pairs, of whose segment this is the engine."""

    def __init__(self, kind: str, sizes: QueueSizes, draw: random.Random) -> None:
        self.draw, self.pair = draw, draw.randrange(sizes.pairs)
        self.transport: Any = None
        self.segment: Segment = create_segment(f"test-{secrets.token_hex(6)}", sizes, FACTS)
        self.views: EngineViews = self.segment.views()
        self.listener = RdmaListener("127.0.0.1", 0) if kind == "rdma" else None
        for each in (*self.views[:2], self.views.pair):
            each[...] = np.frombuffer(draw.randbytes(each.nbytes), np.int64).reshape(each.shape)
        self.view("pair")[W.PAIR_EPOCH] = EPOCH
        if self.listener is not None:
            self.listener.start(self.segment)

    def view(self, name: str) -> Any:
        """The engine's view of the pair."""
        return getattr(self.views, name)[self.pair]

    def open(self) -> Any:
        if self.listener is None:
            self.transport = attach_segment(self.segment.name, self.pair)
        else:
            self.listener._grants.update((pair, FULL) for pair in range(self.pair))
            self.transport = attach_rdma(*self.listener.address, owner=7)
        assert self.transport.pair == self.pair
        return self.transport

    def settle(self, doorbell: int) -> None:
        """Let all that was written arrive."""
        self.transport.ring_doorbell(doorbell)
        self.transport.lost()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        if self.listener is not None:
            self.listener.close()
        self.segment.close()


# A grant to somebody else.
FULL: Any = SimpleNamespace(owner=1, since=0.0, epoch=0, received=0.0, end=SimpleNamespace(close=lambda: None))


def sizes_of(draw: random.Random) -> QueueSizes:
    ring = 1 << draw.randint(3, 6)
    return QueueSizes(3, draw.randint(1, ring), ring, 1 << draw.randint(1, 7), draw.randint(100, 3000), draw.randint(20, 300))


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    strict_verbs.install(monkeypatch, card(inline=32 << secrets.randbelow(5)))
    yield
    strict_verbs.uninstall()


@pytest.fixture(params=["shm", "rdma"])
def linked(request: pytest.FixtureRequest, verbs: None, seed: int) -> Iterator[Linked]:
    draw = random.Random(seed)
    made = Linked(request.param, sizes_of(draw), draw)
    made.open()
    yield made
    made.close()


def test_writes_reach_only_their_places_in_the_engine(linked: Linked, rng: np.random.Generator) -> None:
    transport, draw, sizes = linked.transport, linked.draw, linked.segment.layout.sizes
    mirror = bytearray(linked.segment.buffer)
    expected = engine_views(memoryview(mirror), linked.segment.layout)
    front, cancel, sq, hashes, prompt = (
        getattr(expected, name)[linked.pair] for name in ("front", "cancel", "sq", "hashes", "prompt")
    )
    for turn in range(200):
        count, offset = draw.randint(1, 20), draw.randrange(sizes.hash_entries - 19)
        tokens, some = rng.integers(0, 1 << 31, 3 * count, dtype=np.int32), rng.integers(0, 1 << 62, count)
        at, slot, entry = draw.randrange(sizes.prompt_tokens - 59), draw.randrange(sizes.slots), draw.randbytes(256)
        transport.write_prompt(at, tokens)
        prompt[at : at + len(tokens)] = tokens
        if draw.random() < 0.5:
            transport.write_hashes(offset, some)
            hashes[offset : offset + count] = some
        place, value = draw.randrange(sizes.sq_entries), draw.randrange(1 << 63)
        transport.write_entry(place, entry)
        sq[place] = np.frombuffer(entry, np.int32)
        tokens[:], some[:] = 0, 0  # the caller's, to use again
        transport.write_cancel(slot, value)
        cancel[slot] = value
        index = draw.randint(W.FRONT_CQ_HEAD, W.FRONT_CLAIM)
        transport.write_word(index, value ^ turn)
        front[index] = value ^ turn
        front[W.FRONT_DOORBELL] = draw.randrange(1 << 63)
        linked.settle(int(front[W.FRONT_DOORBELL]))
        assert bytes(linked.segment.buffer) == bytes(mirror)
        if linked.listener is not None:  # the given data, and words: one cancel word, or all four
            assert {length for _, length in card_of(transport).writes} <= {12 * count, 8 * count, 256, 8, 32}
            card_of(transport).writes.clear()


def test_what_the_engine_says_is_read_in_time(linked: Linked, rng: np.random.Generator) -> None:
    transport, views = linked.transport, linked.views
    for _ in range(30):
        for words in (views.engine, views.control, linked.view("pair")):
            words[...] = rng.integers(-(1 << 63), 1 << 63, words.shape)
        for _ in range(2):
            transport.read_engine()
            assert transport.read_pair()[:2] == tuple(linked.view("pair")[:2]), "at once where the card is done"
            assert not transport.lost()
        assert transport.read_engine() == views.engine.tolist()
        assert transport.read_engine_state() == views.engine[W.ENGINE_STATE]
        assert transport.read_fault() == views.control[W.CONTROL_FAULT]
        assert transport.read_pair() == EngineWords(*linked.view("pair")[:4].tolist())


def test_completions_and_records_come_in_order_and_soon(linked: Linked, rng: np.random.Generator) -> None:
    transport, draw, ring = linked.transport, linked.draw, linked.view("cq")
    size, records = len(ring), linked.view("records")
    made, read, looks = 0, 0, 0
    words: list[int] = []
    while read < made or made < 12 * size:
        for _ in range(draw.choice((0, 1, 2, size)) if made < 12 * size else 0):
            if made - read < size:
                flags = draw.choice((0, HAS_LOGPROBS, 0x10))
                if flags & HAS_LOGPROBS:
                    records[made % size] = rng.integers(0, 1 << 62, LOGPROB_ENTRIES)
                words.append(pack_completion(draw.randrange(1 << 16), draw.randrange(1 << 24), flags, lap_of(made, size)))
                ring[made % size] = words[-1]
                made += 1
        limit = draw.choice((1, 2, 16, 256))
        got = transport.read_completions(read, limit)
        assert len(got) <= min(limit, size - read % size), "never past the ring's end"
        news = [word for word in got if word >> 48 == lap_of(read, size)]
        assert news == words[read : read + len(news)]
        looks = 0 if news or read == made else looks + 1
        assert looks < 4, "words wait, and are not handed out"
        asked = [i for i, word in enumerate(news) if word >> 40 & HAS_LOGPROBS]
        if asked:
            first, last = asked[0], asked[-1]
            found = transport.read_logprobs(read + first, last - first + 1)
            for i in asked:
                assert found[i - first].tobytes() == records[(read + i) % size].tobytes()
            assert (found.dtype, found.shape) == (LOGPROB_ENTRY, (last - first + 1, LOGPROB_ENTRIES))
        read += len(news)


# ---- RDMA alone --------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(verbs: None, seed: int) -> Iterator[Linked]:
    draw = random.Random(seed)
    made = Linked("rdma", QueueSizes(3, 32, 32, 1024, 4096, 512), draw)
    yield made
    made.close()


def card_of(transport: RdmaTransport) -> QPEx:
    found: QPEx = transport._end.qp
    return found


def test_a_look_reads_as_much_as_news_suggest(far: Linked) -> None:
    """From 16 words on, within the ring: twice as many after a look full of news, half after one with a quarter or less."""
    transport, ring, size = far.open(), far.view("cq"), 1024
    base = transport._welcome.back.address + far.segment.layout.cq
    posted, window, position, published, widths = card_of(transport).reads, 16, 0, 0, set[int]()
    for news in (16, 48, 64, 17, 16, 65, 64, 500, 33, 32, 16, 5, 4, 0, 0, 3, 300, 1000, 9):
        for place in range(published, published + news):
            ring[place % size] = lap_of(place, size) << 48
        published += news
        before, empty = len(posted), 0
        transport.write_cancel(0, 1)  # which does not mention completions
        transport.ring_doorbell(0)
        while empty < 3:
            got = transport.read_completions(position, size)
            position += len(got)
            empty = 0 if got else empty + 1
        transport.lost()
        at = published - news
        for address, length in posted[before:]:
            count = min(window, size - at % size)
            assert (address, length) == (base + at % size * 8, count * 8)
            found = min(count, published - at)
            window = min(2 * window, 256) if found == count else max(window // 2, 16) if 4 * found <= window else window
            widths.add(window)
            at += found
        assert (position, at) == (published, published)
    assert widths == {16, 32, 64, 128, 256}
    for news, more in ((16, 1), (3, 0)):  # after a look full of new words, the next look begins immediately
        for place in range(published, published + news):
            ring[place % size] = lap_of(place, size) << 48
        published += news
        assert len(transport.read_completions(position, size)) == news
        position, before = position + news, len(posted)
        assert transport.read_completions(position, size) == []
        assert len(posted) == before + more
        transport.lost()


def test_a_slow_card_is_waited_for_no_longer_than_said(far: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data is returned later, in order; a look at another place drops it."""
    transport, qp, clock = far.open(), card_of(far.transport), looks_clock()
    monkeypatch.setattr(connect_rdma, "time", clock)
    polls, poll = list[int](), transport.queue._cq.poll
    monkeypatch.setattr(transport.queue._cq, "poll", lambda most: (polls.append(most), poll(most))[1])
    monkeypatch.setattr(qp, "lazy", 1)
    with pytest.raises(TransportError, match="failed to read the log prob"):
        transport.read_logprobs(0, 1)
    for calls, spin in enumerate((0, 3, 7)):
        monkeypatch.setattr(connect_rdma, "READ_SPIN_NS", spin * 1_000_000)
        polls.clear()
        assert transport.read_completions(0, 16) == []
        assert len(polls) == spin + 1 + (calls > 0)
    assert [length for _, length in qp.reads].count(16 * 8) == 1, "one read of a kind at a time"
    transport.lost()
    far.view("cq")[:2] = 1 << 48, 1 << 48 | 1
    transport.write_cancel(0, 1)
    transport.read_engine()
    posted, qp.lazy = len(qp.reads), 2  # the write is done, what was read after it is not
    for _ in range(3):
        transport.lost()
        transport.read_engine()
        transport.read_pair()
    assert len(qp.reads) == posted
    qp.lazy = 0
    with monkeypatch.context() as untimed:
        untimed.setattr(connect_rdma, "time", None)  # nothing is waited for where the answer is there, whatever it says
        for looks in range(3):
            assert transport.read_completions(9, 1) == []
            assert len(qp.reads) == posted + looks + 1
    far.view("cq")[9], qp.lazy = 1 << 48 | 9, 1
    assert transport.read_completions(9, 1) == []
    with monkeypatch.context() as at_last:  # the card is done while a look at another place waits for it
        at_last.setattr(clock, "monotonic_ns", lambda: int(setattr(qp, "lazy", 0) or 1))
        assert transport.read_completions(0, 1) == []
    assert transport.read_completions(0, 1) == [1 << 48]
    with pytest.raises(TransportError, match="failed to read the log probabilities of 1 completions from position 0"):
        transport.read_logprobs(0, 1)
    assert transport.read_completions(1, 5) == [1 << 48 | 1]
    far.view("cq")[2] = 1 << 48 | HAS_LOGPROBS << 40
    far.view("records")[2] = 77
    for qp.lazy in (0, 1):
        assert transport.read_completions(2, 5) == []
    qp.lazy = 0
    transport.lost()  # the word is here, and its record asked for
    posted, qp.lazy = len(qp.reads), 1
    assert transport.read_completions(2, 5) == []
    assert len(qp.reads) == posted
    qp.lazy = 0
    assert transport.read_completions(2, 5) == [1 << 48 | HAS_LOGPROBS << 40]
    for position, count in ((1, 1), (2, 2), (3, 1)):
        with pytest.raises(TransportError, match=f"log probabilities of {count} completions from position {position}"):
            transport.read_logprobs(position, count)
    assert transport.read_logprobs(2, 1).view(np.int64)[0, 0] == 77


def test_heads_wait_and_positions_are_read_before_room_seems_short(far: Linked, seed: int) -> None:
    """Completion heads go out with other words, with a new epoch, and once an eighth of the ring ahead. The engine's words of the
    pair are asked for when a quarter of ring, prompts or hashes was used since, and while a claim is open."""
    transport, draw, front = far.open(), random.Random(seed), far.view("front")
    far.view("pair")[:4] = 0, 0, EPOCH - 1, 1
    for _ in range(6):
        transport.read_engine()
        transport.lost()
        transport.read_pair()
    far.view("pair")[W.PAIR_EPOCH] = EPOCH
    transport.write_word(W.FRONT_CLAIM, EPOCH)
    for _ in range(3):
        transport.read_pair()
        transport.lost()
    assert transport.read_pair() == EngineWords(0, 0, EPOCH, 1)
    reads, epoch = card_of(transport).reads, EPOCH
    used = dict.fromkeys(("sq", "prompt", "hashes"), 0)
    for turn in range(400):
        if turn % 20 == 0:
            phase = draw.choice(("sq", "prompt", "hashes"))  # which one runs short
        kind, count = draw.choice((phase, "head", "look")), draw.randint(1, 9)
        if kind == "sq":
            transport.write_entry(turn % 32, bytes(256))
        elif kind == "prompt":
            count = 256  # four are a quarter of the arena
            transport.write_prompt(0, np.zeros(count, np.int32))
        elif kind == "hashes":
            count = 32
            transport.write_hashes(0, np.zeros(count, np.int64))
        elif kind == "head":
            epoch += draw.random() < 0.1
            value = epoch << 32 | ((front[W.FRONT_CQ_HEAD] + draw.choice((0, 1, 127, 128, 129))) & 0xFFFFFFFF)
            due = value >> 32 != front[W.FRONT_CQ_HEAD] >> 32 or value - front[W.FRONT_CQ_HEAD] >= 1024 // 8
            transport.write_word(W.FRONT_CQ_HEAD, int(value))
            before = int(front[W.FRONT_CQ_HEAD])
            transport.lost()
            assert front[W.FRONT_CQ_HEAD] == (value if due else before)
        else:
            if draw.random() < 0.1:
                transport.write_word(W.FRONT_CLAIM, EPOCH + 1)
                claimed = True
            else:
                transport.write_word(W.FRONT_CLAIM, EPOCH)
                claimed = False
            before = len(reads)
            transport.read_pair()
            short = 4 * used["sq"] > 32 or 4 * used["prompt"] > 4096 or 4 * used["hashes"] > 512
            assert (len(reads) > before) == (short or claimed)
            transport.lost()
            if short or claimed:
                used = dict.fromkeys(used, 0)
        if kind in used:
            used[kind] += 1 if kind == "sq" else count


def test_what_is_used_while_words_of_the_pair_are_read_counts_anew(far: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have read nothing when the card read the words, however late they arrive."""
    transport = far.open()
    card = card_of(transport)
    far.view("pair")[:4] = 0, 0, EPOCH, 1
    transport.write_word(W.FRONT_CLAIM, EPOCH)
    for _ in range(3):
        transport.read_engine()
        transport.lost()
    with monkeypatch.context() as later:
        later.setattr(strict_verbs.CQ, "poll", lambda *most: (0, []))
        transport.read_engine()
        for index in range(9):  # more than a quarter of 32
            transport.write_entry(index, bytes(256))
        transport.read_engine()
    transport.lost()
    before = len(card.reads)
    transport.read_pair()
    assert len(card.reads) == before + 1


@pytest.mark.parametrize(("ring", "step"), [(2, 1), (8, 1), (16, 2), (32, 4)])
def test_heads_of_small_rings_go_out_in_time(verbs: None, seed: int, ring: int, step: int) -> None:
    linked = Linked("rdma", QueueSizes(1, 1, 2, ring, 16, 1), random.Random(seed))
    transport, front = linked.open(), linked.view("front")
    for head in range(5 * step):
        transport.write_word(W.FRONT_CQ_HEAD, EPOCH << 32 | head)
        transport.lost()
        assert front[W.FRONT_CQ_HEAD] & 0xFFFF == head // step * step
    linked.close()


def test_the_card_reaches_what_is_needed_and_no_more(far: Linked) -> None:
    transport, layout = far.open(), far.segment.layout
    mine = {region.address: (region.length, region.access) for region in transport._end.pd.regions}
    window = min(256, layout.sizes.cq_entries)
    landing = window * 8 + window * 168 + layout.sizes.slots * 8 + 4 * 8 + (512 + 2) * 8
    assert mine == {transport._copy.address: (layout.front_region_bytes, 0), transport._landing.address: (landing, 1)}
    start = np.frombuffer(far.segment.buffer, np.uint8).ctypes.data
    (grant,) = [grant for grant in far.listener._grants.values() if grant is not FULL]
    theirs = {region.address - start: (region.length, region.access) for region in grant.end.pd.regions}
    front, back = layout.front_region(far.pair), layout.engine_region(far.pair)
    assert theirs == {4096: (8192, 4), front: (layout.front_region_bytes, 3), back: (layout.engine_region_bytes, 4)}


def test_what_was_written_gets_out_before_the_end(far: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = far.open()
    clock = looks_clock()
    monkeypatch.setattr(connect_rdma, "time", clock)
    transport.write_cancel(3, 99)
    transport.close()
    assert (far.view("cancel")[3], clock.monotonic()) == (99, 0.002), "two looks: no longer than it takes"
    transport.close()


def test_a_dead_card_delays_neither_the_end_nor_the_start_for_long(far: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, looks = far.open(), list[int]()
    clock = looks_clock()
    monkeypatch.setattr(clock, "monotonic", lambda tick=clock.monotonic: (looks.append(1), tick())[1])
    monkeypatch.setattr(connect_rdma, "time", clock)
    monkeypatch.setattr(strict_verbs.QP, "lazy", 1000)
    transport.write_cancel(3, 99)
    transport.close()
    assert len(looks) == 51, "at a millisecond each"
    looks.clear()
    with pytest.raises(TransportError, match="the engine's memory could not be read within 2 s"):
        attach_rdma(*far.listener.address, owner=7)
    assert len(looks) == 2002


@pytest.mark.parametrize("name", ["engine", "front", "back"])
@pytest.mark.parametrize("more", [-8, 8])
def test_regions_of_another_size_are_refused(far: Linked, name: str, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> Any:
        welcome = introduce(*arguments)
        return welcome._replace(**{name: getattr(welcome, name)._replace(length=getattr(welcome, name).length + more)})

    monkeypatch.setattr(connect_rdma, "introduce", other)
    with pytest.raises(LayoutError, match=rf"the engine offers \d+ bytes as region '{name}', not \d+"):
        far.open()


def test_the_flags_for_front_ends_name_the_key(verbs: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = tmp_path / "the key"
    key.write_bytes(b"k" * 40)
    key.chmod(0o600)
    cases: list[dict[str, Any]] = [{}, {"link_key_file": str(key)}, {"insecure_link": True}]
    for options, flags in zip(cases, ("", f" --link-key-file '{key}'", " --insecure-link"), strict=True):
        with contextlib.closing(
            listen(Config().with_options({"transport": "rdma", "listen": "127.0.0.1:0", **options}))
        ) as listener:
            assert listener.flags == f"--transport rdma --engine 127.0.0.1:{listener.address[1]}{flags}"
        assert ("every process that reaches 127.0.0.1" in caplog.text) == ("insecure_link" in options)


@pytest.mark.parametrize(("limits", "owner"), [({}, 0), ({"max_qp_wr": 100}, 1234), ({"max_cqe": 90}, 1)])
def test_options_and_limits_reach_the_card(
    far: Linked, limits: dict[str, int], owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {"max_qp_wr": 1 << 14, "max_cqe": 1 << 14} | limits
    monkeypatch.setattr(strict_verbs.Context, "cards", (card("first", **many), card("second", **many)))
    host, port = far.listener.address
    hellos = list[Any]()
    monkeypatch.setattr(connect_rdma, "introduce", lambda *arguments: (hellos.append(arguments), introduce(*arguments))[1])
    options = {"transport": "rdma", "engine": f"{host}:{port}", "rdma_device": "second", "rdma_gid_index": 0}
    far.transport = connectors.connect(Config().with_options(options), WorkerIdentity(0, owner))
    far.pair = far.transport.pair
    assert hellos[0][:2] == (host, port)
    assert hellos[0][3] == connect_rdma.HANDSHAKE_S
    assert hellos[0][2].owner == owner or (owner == 0 and hellos[0][2].owner > 1)
    assert (far.transport._port.name, far.transport._port.gid_index) == ("second", 0)
    assert far.transport.queue._depth == far.transport._end.cq.cqe == min(4096, *many.values())
