"""Lines and branches of scheduler and queues that storms and unit tests seldom reach: rare ends, and several lanes."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.front_end.fake_engine import FACTS, SIZES
from support.front_end.wire_transport import WireTransport
from support.scheduler_cases import Case, make_case

from blinkpy.device.lanes import Team
from blinkpy.device.tables import as_memoryviews
from blinkpy.dpu.link import store_fence
from blinkpy.dpu.link.queue_pair import REQUEST_LIMIT, EngineLostError, QueuePair
from blinkpy.engine.devices.null_step import run_turns, synthetic_step, synthetic_token
from blinkpy.kv import state as S
from blinkpy.kv.page_allocator import compact_ring
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.queues import words as W
from blinkpy.queues.layout import LayoutError, write_header
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH, FINISH_MASK, HAS_TOKEN, lap_of, pack_completion
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.phases.fast_path import prefetch_forecast
from blinkpy.scheduler.policies import fcfs
from blinkpy.transport import segment
from blinkpy.transport.contract import TransportError
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import make_world

PROMPT, ONE_TOKEN = np.array([1, 0, 1], np.int32), RequestParameters(max_tokens=1, seed=1)

# ---- several lanes ------------------------------------------------------------------------------------------------------


def test_lanes_compact_the_ring_as_one_lane_does() -> None:
    """A ring with stale entries in it, from the end of its memory back to the start."""

    def compacted(lanes: int) -> dict[str, Any]:
        world = make_world(1, 1)
        limits, state = world.limits, world.state
        mask = limits.ring_entries - 1
        head = limits.ring_entries - 3
        for i in range(limits.pages):  # each page twice, the later entry counts
            for position in (head + i, head + limits.pages + i):
                state.pages.ring[position & mask] = i
                state.pages.ring_position[i] = position
        state.pages.ring_position[1] = -1  # was revived
        state.counts[S.RING_HEAD], state.counts[S.RING_TAIL] = head, head + 2 * limits.pages
        arrays = as_memoryviews(state)
        Team(lanes, 1, races=True).run(compact_ring, limits, arrays.pages, arrays.counts)
        assert state.counts[S.RING_TAIL] == head + limits.pages - 1
        kept = [int(state.pages.ring[(head + i) & mask]) for i in range(limits.pages - 1)]
        assert kept == [page for page in range(limits.pages) if page != 1]
        return snapshot(state)

    assert not differences(compacted(1), compacted(5))


# ---- the host's handle --------------------------------------------------------------------------------------------------


def test_a_scheduler_needs_its_queues_first() -> None:
    world = make_world(1, 1)
    scheduler = Scheduler(world.limits, world.state, mode="python")
    with pytest.raises(RuntimeError, match="attach"):
        scheduler.turn(1)
    assert scheduler.check() == []
    world.state.requests.status[0] = S.RUNNING
    assert "running does not list" in scheduler.check()[0]


@pytest.mark.parametrize(("mode", "step_ns", "logprobs"), [("python", 0, 2), ("python", 5_000_000, -1), ("njit", 0, -1)])
def test_the_null_engine_makes_tokens_up(mode: Any, step_ns: int, logprobs: int) -> None:
    case = make_case(lease_ms=4_000_000_000)  # the loop has another clock
    client = case.clients[0]
    sent = client.submit(PROMPT, RequestParameters(max_tokens=4, seed=-(2**62), logprobs=logprobs))
    client.transport.deliver(1 << 30)
    scheduler = Scheduler(case.limits, case.state, mode=mode)
    scheduler.attach(case.views)
    calls: list[int] = []
    step = synthetic_step(scheduler, range(10, 40), step_ns)
    assert run_turns(scheduler, step, 20_000_000, 1 << 62, lambda: calls.append(1)) == S.NO_BATCH
    assert len(calls) > 4
    completions = client.poll()
    tokens = [token for _, token, _ in completions]
    assert tokens == [synthetic_token(-(2**62), len(PROMPT) + i, 10, 40) for i in range(4)]
    assert all(10 <= token < 40 for token in tokens) and completions[-1][2] & FINISH_MASK == FINISH_LENGTH
    assert [[pair[0] for pair in record[:3]] for record in sent.records] == [[token, 10, 11] for token in tokens if logprobs >= 0]
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_STOP
    assert run_turns(scheduler, step, 20_000_000, 0) == S.NO_BATCH  # its deadline has passed
    assert run_turns(scheduler, step, 20_000_000, 1 << 62) == S.STOPPED


def test_what_a_turn_fetches_ahead_it_does_not_change() -> None:
    storm = Simulation(3, 60, fcfs, mode="python")
    storm.run()
    world = storm.world
    before = snapshot(world.state)
    for lane in range(3):
        prefetch_forecast(world.limits, world.state, lane, 3)
    assert not differences(before, snapshot(world.state))


def test_snapshots_say_where_they_differ() -> None:
    world = make_world(1, 1)
    before = snapshot(world.state)
    world.state.requests.status[1] = S.RUNNING
    assert differences(before, snapshot(world.state)) == ["requests.status[1]: 0 != 2 (1 differ)"]


# ---- the client's rare ends ---------------------------------------------------------------------------------------------


@pytest.fixture
def case() -> Case:
    """A scheduler with one front end, which has claimed its pair."""
    return make_case(pairs=1)


def test_a_lost_engine_is_detected_by_every_sign(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    client = case.clients[0]
    with monkeypatch.context() as lost:
        lost.setattr(client.transport, "lost", lambda: True)
        with pytest.raises(EngineLostError, match="gone"):
            client.check()
    client._requests = REQUEST_LIMIT
    with pytest.raises(EngineLostError, match="ids of this epoch"):
        client.submit(PROMPT, ONE_TOKEN)
    epoch = case.views.pair[0, W.PAIR_EPOCH :][:1]
    monkeypatch.setattr(client.transport, "write_word", lambda index, value: epoch.fill(7))
    with pytest.raises(EngineLostError, match="granted epoch 7, but this front end claimed 2"):
        client.attach(1)
    epoch[0] = W.EPOCH_LIMIT
    with pytest.raises(EngineLostError, match="used up its epochs"):
        client.attach(1)


def test_a_client_without_a_pair_beats_looks_and_reads_nothing() -> None:
    unclaimed = make_case(pairs=1, attached=False)
    client = QueuePair(WireTransport(unclaimed, 0))
    client.heartbeat()
    client.check()
    assert client.poll() == []
    assert unclaimed.views.front[0, W.FRONT_DOORBELL] == 0
    assert client.context == min(client.facts.max_model_len, client.facts.num_pages * client.facts.page_size)


def test_closing_without_an_engine_is_no_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    client = case.clients[0]
    client.submit(PROMPT, ONE_TOKEN)
    monkeypatch.setattr(client.transport, "write_cancel", Mock(side_effect=TransportError("no engine")))
    client.close()
    assert client.in_flight == 0


def test_a_request_that_has_ended_was_consumed(case: Case) -> None:
    """Its place in ring and arenas is free, however old the last read of the engine's position is."""
    client = case.clients[0]
    position = client._cq_position
    for number in range(2 * case.limits.sq_entries):
        request = client.submit(PROMPT, ONE_TOKEN)
        lap = lap_of(position + number, case.limits.cq_entries)
        word = pack_completion(request.slot, 1, FINISH_LENGTH | HAS_TOKEN, lap)
        case.views.cq[0, (position + number) % case.limits.cq_entries] = word
        assert len(client.poll()) == 1


# ---- memory -------------------------------------------------------------------------------------------------------------


def test_a_header_needs_its_whole_segment() -> None:
    with pytest.raises(LayoutError, match="the segment has 100 bytes"):
        write_header(memoryview(bytearray(100)), SIZES, FACTS)


def test_a_machine_without_a_known_fence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store_fence._system_call.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(store_fence.FenceError, match="'vax'"):
        store_fence.membarrier()
    store_fence._system_call.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    return tmp_path


def test_closing_a_segment_keeps_a_reused_name(folder: Path) -> None:
    first = segment.create_segment("one", SIZES, FACTS)
    path = segment.segment_path("one")
    path.unlink()
    path.write_text("another engine's")
    first.close()
    assert path.read_text() == "another engine's"


def test_a_name_that_passes_on_while_its_lock_is_taken_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = segment.segment_path("one")
    path.write_text("dead")
    lock = segment.lock_file

    def passes_on(fd: int) -> bool:
        os.unlink(path)
        path.write_text("new")
        return lock(fd)

    monkeypatch.setattr(segment, "lock_file", passes_on)
    segment._remove_stale(path)
    assert path.read_text() == "new"


def test_engines_that_keep_making_a_segment_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment.segment_path("one").write_text("again and again")
    monkeypatch.setattr(segment, "_remove_stale", lambda path: None)
    with pytest.raises(TransportError, match="keep creating it"):
        segment.create_segment("one", SIZES, FACTS)
