"""Segments under /dev/shm: owners, permission to attach, leftovers of dead processes; and the store fence."""

import contextlib
import dataclasses
import errno
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.descriptors import descriptors_of
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine

from blinkpy.config import Config
from blinkpy.dpu.link import connect_shm, connectors, store_fence
from blinkpy.dpu.link.connect_shm import attach_segment, connect
from blinkpy.dpu.link.queue_pair import EngineLostError
from blinkpy.queues.layout import HEADER, LayoutError
from blinkpy.queues.submission import SQ_ENTRY_BYTES
from blinkpy.queues.words import (
    ENGINE_STATE,
    FRONT_CLAIM,
    FRONT_DOORBELL,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    STATE_READY,
)
from blinkpy.transport import segment as segment_module
from blinkpy.transport.contract import TransportError, WorkerIdentity
from blinkpy.transport.segment import create_segment, segment_path, unlink_stale

HOLDER = """
import sys, time
sys.path[:0] = {path!r}
from support.descriptors import descriptors_of
from support.front_end.fake_engine import SIZES, FACTS
from blinkpy.transport import segment as segment_module
from blinkpy.transport.segment import create_segment
from blinkpy.dpu.link.connect_shm import attach_segment
held = {action}
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def name():
    name = f"test-{secrets.token_hex(6)}"
    yield name
    segment_path(name).unlink(missing_ok=True)


@pytest.fixture
def segment(name):
    segment = create_segment(name, SIZES, FACTS)
    yield segment
    segment.close()


@contextlib.contextmanager
def holding(action: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds something within the block, at whose end it is killed."""
    program = HOLDER.format(path=sys.path, action=action)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_worker_takes_a_free_queue_pair(name, segment) -> None:
    config = Config().with_options({"name": name})
    held = connect(config, WorkerIdentity(0))
    assert held.facts == FACTS
    with pytest.raises(TransportError, match="all 1 queue pairs are in use"):
        connect(config, WorkerIdentity(0))
    held.close()


def test_a_queue_pair_is_attached_or_given_back(name, segment, monkeypatch) -> None:
    config = Config().with_options({"name": name, "engine_timeout_ms": 1500})
    monkeypatch.setattr(connectors, "GRANT_TIMEOUT_S", 0.05)
    for _ in range(2):  # it is free again
        with pytest.raises(EngineLostError, match=r"did not grant the queue pair within 0\.05 s"):
            connectors.open_queue_pair(config, WorkerIdentity(0))
    monkeypatch.setattr(connectors, "GRANT_TIMEOUT_S", 5.0)
    with FakeEngine() as engine:
        pair = connectors.open_queue_pair(config.with_options({"name": engine.segment_name}), WorkerIdentity(0))
        assert (pair.engine_timeout_s, pair.epoch) == (1.5, 1)
        pair.close()


def test_segment_is_private_and_goes_with_its_engine(name, segment) -> None:
    status = os.stat(segment_path(name))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= status.st_size == segment.layout.total_bytes, "the memory is there, not promised"
    transport = attach_segment(name, 0)
    assert transport.facts == FACTS
    assert transport.layout.sizes == SIZES
    assert not transport.lost()
    segment.close()
    segment.close()
    assert transport.lost()
    assert not segment_path(name).exists()
    transport.close()
    transport.close()


def test_a_process_without_descriptors_sees_whether_its_engine_lives(segment, name, monkeypatch) -> None:
    """Strangers' connections may take the last descriptor."""
    transport = attach_segment(name, 0)

    def failing(path: Any, *arguments: Any, **options: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        for _ in range(3):
            assert not transport.lost()
        segment.close()
        assert transport.lost()
    transport.close()


def test_dead_engines_segment_is_replaced_or_removed(name) -> None:
    with holding(f"create_segment({name!r}, SIZES, FACTS)") as process:
        transport = attach_segment(name, 0)
        os.kill(process.pid, signal.SIGSTOP)
        assert not transport.lost(), "a stopped engine is alive"
        with pytest.raises(TransportError, match="is already running"):
            create_segment(name, SIZES, FACTS)
        assert not unlink_stale(name)
    assert transport.lost()
    with pytest.raises(TransportError, match="it is dead"):
        attach_segment(name, 0)
    segment = create_segment(name, SIZES, FACTS._replace(instance=2))
    assert transport.lost(), "the name belongs to another engine now"
    before = bytes(segment.buffer)
    transport.write_entry(0, b"\1" * SQ_ENTRY_BYTES)
    transport.ring_doorbell(1)
    transport.write_word(FRONT_CLAIM, 1)
    assert bytes(segment.buffer) == before, "a client of the dead engine reaches its memory alone"
    segment.views().engine[ENGINE_STATE] = STATE_READY
    assert transport.read_engine_state() != STATE_READY
    new = attach_segment(name, 0)
    assert new.facts.instance == 2
    for opened in (new, transport, segment):
        opened.close()
    with holding(f"create_segment({name!r}, SIZES, FACTS)"):
        pass
    assert unlink_stale(name)
    assert unlink_stale(name)
    assert not list(segment_path(name).parent.glob(f"blinkpy.{name}*"))


def test_one_front_end_for_a_pair(name) -> None:
    segment = create_segment(name, dataclasses.replace(SIZES, pairs=2), FACTS)
    with holding(f"attach_segment({name!r}, 0)") as process:
        with pytest.raises(TransportError, match="in use"):
            attach_segment(name, 0, 0.05)
        other = attach_segment(name, 0, or_another=True)
        assert other.pair == 1
        with pytest.raises(TransportError, match="all 2 queue pairs are in use"):
            attach_segment(name, 0, or_another=True)
        other.close()
        attach_segment(name, 1).close()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(TransportError, match="in use"):
            attach_segment(name, 0)
    attach_segment(name, 0, 1.0).close()
    mine = attach_segment(name, 0)
    with pytest.raises(TransportError, match="in use"):
        attach_segment(name, 0)  # within one process as well
    mine.close()
    attach_segment(name, 0).close()
    segment.close()


def test_attaching_waits_for_the_engine_until_a_deadline(name, monkeypatch) -> None:
    start = time.monotonic()
    with pytest.raises(TransportError, match="no engine"):
        attach_segment(name, 0, 0.1)
    assert 0.1 <= time.monotonic() - start < 20
    now, sleeps = [5.0], list[float]()

    def passing(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    slept = SimpleNamespace(monotonic=lambda: passing(0.001), sleep=lambda seconds: sleeps.append(seconds) or passing(seconds))
    monkeypatch.setattr(connect_shm, "time", slept)
    with pytest.raises(TransportError, match="no engine"):
        attach_segment(name, 0, 0.1)
    assert set(sleeps) == {segment_module.RETRY_S} and 0.05 < sum(sleeps) < 0.1 + segment_module.RETRY_S, "between two looks"
    monkeypatch.setattr(connect_shm, "time", SimpleNamespace(monotonic=lambda: 5.0, sleep=pytest.fail))
    with pytest.raises(TransportError, match="no engine"):
        attach_segment(name, 0, 0.0)


def test_a_name_reused_by_another_engine_is_kept(name, segment) -> None:
    segment_path(name).unlink()
    other = create_segment(name, SIZES, FACTS)
    segment.close()
    assert segment_path(name).exists()
    other.close()
    assert not segment_path(name).exists()


def test_wrong_pair_and_wrong_layout(name, segment) -> None:
    for pair in (-1, 1):
        with pytest.raises(TransportError, match="has only queue pairs"):
            attach_segment(name, pair)
    segment.buffer[HEADER.fields["version"][1]] = 99
    with pytest.raises(LayoutError, match="99"):
        attach_segment(name, 0)


def test_failures_leave_no_descriptor_open(name, segment) -> None:
    before = descriptors_of(name)
    assert before
    for refused in (lambda: attach_segment(name, 9), lambda: create_segment(name, SIZES, FACTS)):
        with contextlib.suppress(TransportError):
            refused()
            pytest.fail("it was not refused")
    assert not unlink_stale(name)
    assert descriptors_of(name) == before
    segment.close()
    assert len(descriptors_of(name)) == len(before) - 1  # The mapping keeps a separate one.


def test_files_of_others_are_not_trusted(name, segment) -> None:
    os.chmod(segment_path(name), 0o666)
    with pytest.raises(TransportError, match="only your own or root's engines"):
        attach_segment(name, 0)
    segment.close()
    target = segment_path(name + "x")
    target.write_bytes(b"secret")
    segment_path(name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        attach_segment(name, 0)
    target.unlink()


def test_pairs_that_are_given_out_in_another_way_are_locked(name) -> None:
    """All of them, and only while no process has any."""
    pairs = range(3)
    with contextlib.closing(create_segment(name, dataclasses.replace(SIZES, pairs=len(pairs)), FACTS)) as segment:
        for taken in pairs:
            transport = attach_segment(name, taken)
            with pytest.raises(TransportError, match="a front end is attached"):
                segment.lock_pairs()
            transport.close()
        segment.lock_pairs()
        for pair in pairs:
            with pytest.raises(TransportError, match=f"queue pair {pair} is in use"):
                attach_segment(name, pair)


@pytest.mark.parametrize("size", [8192, -1])
def test_truncated_segment(name, segment, size) -> None:
    total = segment.layout.total_bytes
    os.truncate(segment_path(name), size % total)
    with pytest.raises(TransportError, match=f"has {size % total} bytes, but its header states {total}"):
        attach_segment(name, 0)


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [(7, 0o600, True), (0, 0o644, True), (1, 0o600, False), (8, 0o600, False), (7, 0o620, False), (7, 0o602, False)],
)
def test_only_private_segments_of_this_user_or_root_are_trusted(name, segment, monkeypatch, owner, mode, trusted) -> None:
    actual = os.fstat

    def fstat(fd: int) -> SimpleNamespace:
        return SimpleNamespace(st_uid=owner, st_mode=mode, st_size=actual(fd).st_size, st_ino=actual(fd).st_ino)

    with monkeypatch.context() as changed:
        changed.setattr(os, "geteuid", lambda: 7)
        changed.setattr(os, "fstat", fstat)
        if not trusted:
            with pytest.raises(
                TransportError, match=f"belongs to user {owner} with mode {mode:o}; only your own or root's engines are trusted"
            ):
                attach_segment(name, 0)
            return
        made = attach_segment(name, 0)
    made.close()


def test_other_pairs_are_tried_in_order(name) -> None:
    segment, held = create_segment(name, dataclasses.replace(SIZES, pairs=3), FACTS), list[Any]()
    for pair in (1, 2, 0):
        held.append(attach_segment(name, 1, or_another=True))
        assert held[-1].pair == pair
    for opened in (*held, segment):
        opened.close()


@pytest.mark.parametrize("looks", [2, 3])
def test_a_briefly_attached_front_end_does_not_count_as_a_live_engine(name, monkeypatch, looks) -> None:
    segment_path(name).touch()
    held, slept, lock = [False] * looks, list[float](), segment_module.lock_file
    monkeypatch.setattr(segment_module, "lock_file", lambda fd: held.pop() if held else lock(fd))
    monkeypatch.setattr(segment_module, "time", SimpleNamespace(sleep=slept.append))
    if looks == 3:
        with pytest.raises(TransportError, match=f"an engine with the name 'blinkpy.{name}' is already running"):
            create_segment(name, SIZES, FACTS)
    else:
        create_segment(name, SIZES, FACTS).close()
    assert slept == [segment_module.RETRY_S] * 2


def test_replacing_a_contested_name_ends_after_bounded_tries(name, monkeypatch) -> None:
    tries = []

    def taken(*names: object) -> None:
        tries.append(names)
        raise FileExistsError

    monkeypatch.setattr(os, "link", taken)
    with pytest.raises(TransportError, match="other engines keep creating it"):
        create_segment(name, SIZES, FACTS)
    assert len(tries) == 50
    assert not list(segment_path(name).parent.glob(f"blinkpy.{name}*"))


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "x" * 101, "a b"])
def test_names_stay_in_the_folder(bad) -> None:
    with pytest.raises(TransportError, match="segment name"):
        segment_path(bad)


def test_a_full_filesystem_is_an_error_and_leaves_no_segment(name, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=f"/dev/shm has no space for {2**20 >> 20} MiB of queues") as caught:
        create_segment(name, dataclasses.replace(SIZES, prompt_tokens=2**18), FACTS)
    assert caught.value.errno == errno.ENOSPC
    assert not list(segment_path(name).parent.glob(f"blinkpy.{name}*"))


def test_ordered_machines_need_no_fence() -> None:
    assert store_fence.store_fence("x86_64") is store_fence.no_fence


def test_other_machines_get_membarrier() -> None:
    """The system call works here as well, so that it is tested wherever these tests run."""
    if platform.machine().lower() not in store_fence.SYSTEM_CALL:
        pytest.fail(f"no membarrier number for {platform.machine()}: the fence has to learn this machine")
    barrier = store_fence.store_fence("aarch64")
    assert barrier is store_fence.membarrier
    barrier()


def test_missing_and_refused_membarriers_are_errors(monkeypatch) -> None:
    with monkeypatch.context() as refused:
        refused.setattr(store_fence, "MEMBARRIER_CMD_GLOBAL_EXPEDITED", 1 << 20)
        with pytest.raises(store_fence.FenceError, match=r"membarrier\(2\) failed: Invalid argument") as caught:
            store_fence.membarrier()
        assert caught.value.errno == errno.EINVAL
    with monkeypatch.context() as failing:
        failing.setattr(store_fence, "membarrier", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # it is tried
            store_fence.store_fence("aarch64")
    monkeypatch.setattr(store_fence, "_membarrier", lambda command: 0)
    with pytest.raises(store_fence.FenceError, match="needs membarrier"):
        store_fence.store_fence("aarch64")


def test_an_unknown_machine_is_named(monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "Toaster")
    store_fence._system_call.cache_clear()
    with pytest.raises(store_fence.FenceError, match="no store barrier is implemented for machine type 'Toaster'"):
        store_fence.store_fence()


class Accesses:
    """Memory whose accesses are noted, as (what, place)."""

    def __init__(self, memory: object, log: list[tuple[str, object]]) -> None:
        self.memory, self.log = memory, log

    def __getitem__(self, place):
        self.log.append(("load", place))
        return self.memory[place]

    def __setitem__(self, place, value) -> None:
        self.log.append(("store", place))
        self.memory[place] = value


def test_a_machine_that_reorders_has_fences_where_order_counts(name, segment, monkeypatch) -> None:
    log: list[tuple[str, object]] = []
    monkeypatch.setattr(connect_shm, "store_fence", lambda: lambda: log.append(("fence", None)))
    transport = attach_segment(name, 0)
    words, records = transport._words, transport._records
    monkeypatch.setattr(transport, "_words", Accesses(words, log))
    monkeypatch.setattr(transport, "_records", Accesses(records, log))
    front, back = (at // 8 for at in (segment.layout.front_region(0), segment.layout.engine_region(0)))
    fence = ("fence", None)
    transport.ring_doorbell(5)
    assert log == [fence, ("store", front + FRONT_DOORBELL)]
    log.clear()
    transport.read_pair()
    others = [("load", back + word) for word in (PAIR_SQ_HEAD, PAIR_CQ_TAIL, PAIR_ATTACHED)]
    assert log == [("load", back + PAIR_EPOCH), fence, *others]
    log.clear()
    transport.read_logprobs(3, 2)
    assert log == [fence, ("load", slice(3, 5)), fence], "after the word, and before the head"
    monkeypatch.undo()
    transport.close()
