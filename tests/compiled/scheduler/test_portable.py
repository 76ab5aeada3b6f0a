"""The primitives with several implementations, and the lanes of plain Python that stand for a GPU's."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit
from support.scheduler_cases import make_case

from blinkpy.device import portable as p
from blinkpy.device.lanes import LanesDivergedError, Team, in_lanes
from blinkpy.device.portable import barrier, block_max, block_scan, block_sum
from blinkpy.device.tables import ArgumentTable, make_table
from blinkpy.queues.layout import EngineViews, QueueLayout, QueueSizes, engine_views
from blinkpy.scheduler.phases.completions import publish_deferred
from blinkpy.scheduler.phases.ownership import apply_verdicts, read_inbox


@pytest.mark.parametrize("lanes", [1, 2, 5, 32])
def test_collectives_of_lanes(lanes: int, rng: np.random.Generator) -> None:
    values = rng.integers(-(2**40), 2**40, lanes).tolist()

    def work(lane: int, lanes: int) -> tuple[int, int, int, int]:
        before, total = block_scan(values[lane], lane, lanes)
        return before, total, block_sum(values[lane], lane, lanes), block_max(values[lane], lane, lanes)

    results = Team(lanes, int(rng.integers(1000))).run(work)
    assert results == [(sum(values[:i]), sum(values), sum(values), max(values)) for i in range(lanes)]


def test_collectives_of_one_lane() -> None:
    @njit
    def compiled(value: int) -> tuple[int, int, int, int]:
        before, total = block_scan(value, 0, 1)
        barrier(1)
        return before, total, block_sum(value, 0, 1), block_max(value, 0, 1)

    assert compiled(-7) == compiled.py_func(-7) == (0, -7, -7, -7)


def test_a_missing_barrier_shows_in_some_order() -> None:
    """Without a barrier, some lanes see a write of lane 0, and some do not."""

    def work(data: list[int], lane: int, lanes: int) -> int:
        barrier(lanes)
        if lane == 0:
            data[0] = 1
        return data[0]

    assert len({tuple(Team(4, seed).run(work, [0])) for seed in range(20)}) > 1
    team = Team(4, 3)
    orders = [team.run(work, [0]) for _ in range(20)]
    again = Team(4, 3)
    assert [again.run(work, [0]) for _ in range(20)] == orders  # the seed repeats the orders


def test_diverging_lanes_are_detected() -> None:
    def work(lane: int, lanes: int) -> None:
        if lane:
            barrier(lanes)

    with pytest.raises(LanesDivergedError, match="1 of 4 lanes returned"):
        Team(4).run(work)


def test_lanes_in_different_collectives_are_detected() -> None:
    def work(lane: int, lanes: int) -> int:
        return block_sum(1, lane, lanes) if lane else block_max(1, lane, lanes)

    with pytest.raises(LanesDivergedError, match="different collectives: block_max, block_sum"):
        Team(4).run(work)


def test_different_results_of_lanes_are_detected() -> None:
    def work(data: str, lane: int, lanes: int) -> int:
        barrier(lanes)
        return lane

    with pytest.raises(LanesDivergedError, match=r"different results: \[0, 1, 2\]"):
        in_lanes(work, 3)("data", 0, 1)


def test_the_code_of_a_lane_is_that_of_the_source() -> None:
    """Closures, nested calls, loops, conditions, and globals with their values at run time."""
    added = 10

    def inner(value: int, lane: int, lanes: int) -> int:
        return added + block_sum(value, lane, lanes)

    def outer(lane: int, lanes: int) -> list[int]:
        found: list[int] = []
        while len(found) < 3 and inner(1, lane, lanes) > 0:
            found.append(inner(len(found) * lane, lane, lanes) + LATE)
        return found

    assert Team(3).run(outer) == [[110, 113, 116]] * 3


LATE = 100


def test_an_error_in_one_lane_ends_all() -> None:
    def work(lane: int, lanes: int) -> None:
        barrier(lanes)
        if lane == 2:
            raise KeyError("lane 2")
        barrier(lanes)

    with pytest.raises(KeyError, match="lane 2"):
        Team(4).run(work)


def test_several_lanes_need_a_team() -> None:
    with pytest.raises(RuntimeError, match="must be run by"):
        barrier(4)
    with pytest.raises(ValueError, match="at least 1"):
        Team(0)
    with pytest.raises(ValueError, match="has no barrier"):
        Team(3).run(p.nanosleep)


def test_compiled_loads_and_stores_reach_strided_memory() -> None:
    array = np.zeros((3, 8), np.int64)[:, ::2]
    small = np.zeros(4, np.int32)

    @njit
    def work(array: np.ndarray, small: np.ndarray, i: int) -> int:
        p.store_release(array, (i, 2), 5)
        p.store_relaxed(array, (i + 1, 3), -6)
        p.store_relaxed(small, i, 7)
        p.fence()
        return p.load_acquire(array, (i, 2)) * 100 + p.load_relaxed(array, (i + 1, 3)) + p.load_acquire(small, i) * 10_000

    expected = work.py_func(array.copy(), small.copy(), 1)
    assert work(array, small, 1) == expected == 70_494
    assert array[1, 2] == 5
    assert array[2, 3] == -6
    assert np.count_nonzero(array) == 2
    assert atomics(work) == ["release", "monotonic", "monotonic", "fence", "acquire", "monotonic", "acquire"]


def atomics(compiled: Any) -> list[str]:
    """The orders of an njit function's atomic accesses, from LLVM's text."""
    (text,) = compiled.inspect_llvm().values()
    found = re.findall(r"(?:load|store) atomic i(?:32|64).*? (acquire|release|monotonic), align|(fence) seq_cst", text)
    return ["".join(groups) for groups in found]


ORDERS = {
    "inbox": (lambda *tables: read_inbox(*tables, 1, 0, 1), {"acquire", "monotonic"}),  # the doorbell, and all other words
    "ownership": (lambda *tables: apply_verdicts(*tables, 0, 1), {"release"}),
    "publish": (lambda *tables: publish_deferred(*tables, 0, 1), {"release", "monotonic"}),  # words with and without a record
}


@pytest.mark.parametrize("phase", ORDERS)
def test_compiled_phases_access_words_as_their_source_does(phase: str) -> None:
    """Supports claim memory/atomics."""
    function, orders = ORDERS[phase]
    case, compiled = make_case(attached=False), njit(function)
    compiled(case.limits, ArgumentTable(case.views, strided=True), ArgumentTable(case.state))
    assert set(atomics(compiled)) == orders


def test_a_message_is_complete_when_its_word_is_seen() -> None:
    """Two compiled threads, no lock of the interpreter: data, then a release store; an acquire load, then the data."""
    rounds = 20_000

    @njit(nogil=True)
    def write(data: np.ndarray, word: np.ndarray, ack: np.ndarray) -> None:
        for i in range(1, rounds + 1):
            for k in range(data.shape[0]):
                data[k] = i
            p.store_release(word, 0, i)
            while p.load_acquire(ack, 0) != i:
                p.nanosleep(0)

    @njit(nogil=True)
    def read(data: np.ndarray, word: np.ndarray, ack: np.ndarray) -> int:
        wrong = 0
        for i in range(1, rounds + 1):
            while p.load_acquire(word, 0) != i:
                p.nanosleep(0)
            for k in range(data.shape[0]):
                if data[k] != i:
                    wrong += 1
            p.store_release(ack, 0, i)
        return wrong

    def run(data: np.ndarray, word: np.ndarray, ack: np.ndarray) -> int:
        thread = threading.Thread(target=write, args=(data, word, ack), daemon=True)
        thread.start()
        wrong = read(data, word, ack)
        thread.join(10)
        return wrong

    assert run(np.zeros(64, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)) == 0


def test_the_compiled_clock_is_the_monotonic_one() -> None:
    clock: Callable[[], int] = njit(lambda: p.now_ns())
    sleep = njit(lambda n: p.nanosleep(n))
    clock()
    sleep(0)
    before = time.monotonic_ns()
    between = clock()
    sleep(2_000_000)
    assert before <= between <= time.monotonic_ns() - 2_000_000


def test_tables_say_where_arrays_are() -> None:
    layout = QueueLayout(QueueSizes(3, 2, 2, 2, 16, 4))
    views = engine_views(memoryview(bytearray(layout.total_bytes)), layout)

    @njit
    def touch(queues: EngineViews) -> int:
        queues.front[2, 1] = 11
        queues.sq[1, 1, 31] = 12
        queues.engine[5] += 13
        return queues.front[2, 1] + queues.sq[1, 1, 31]

    assert touch(ArgumentTable(views, strided=True)) == 23
    assert (views.front[2, 1], views.sq[1, 1, 31], views.engine[5]) == (11, 12, 13)
    one = engine_views(memoryview(bytearray(1 << 20)), QueueLayout(QueueSizes(1, 1, 2, 2, 16, 1)))
    assert make_table(views, strided=True)[0] == make_table(one, strided=True)[0]
    with pytest.raises(TypeError, match="front is not contiguous"):
        make_table(views)
    with pytest.raises(TypeError, match="float64"):
        make_table(views._replace(engine=np.zeros(3)))


def test_device_code_is_imported_without_numba_cuda() -> None:
    block = "import sys; sys.modules['numba_cuda'] = sys.modules['numba.cuda'] = None\n"
    code = block + "import blinkpy.scheduler.cycle, blinkpy.device.portable as p\np.now_ns()\n"
    code += "try:\n    p.register_cuda()\nexcept ImportError:\n    print('no CUDA')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "no CUDA\n"
