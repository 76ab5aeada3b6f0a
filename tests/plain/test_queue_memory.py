"""Registering GPU memory with a network card, against stand-ins for pyverbs that answer with the documented errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from blinkpy.dpu import verbs
from blinkpy.dpu.handshake import Region
from blinkpy.dpu.transport import TransportError
from blinkpy.engine import queue_memory
from blinkpy.engine.queue_memory import GpuMemory, HostMemory

ADDRESS, LENGTH = 0x7F00_0000_0000, 1 << 20


class PyverbsError(Exception):
    """As pyverbs has it: error_code only where the kernel gave one."""


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message: str, error_code: int):
        super().__init__(message)
        self.error_code = error_code


class End:
    """A queue pair's end that registers anything, or fails. made: (kind, start, length, access)."""

    def __init__(self, peer_memory_error: int = 0):
        self.pd, self.error, self.made = object(), peer_memory_error, list[tuple[Any, ...]]()

    def register(self, address: int, length: int, access: int) -> Any:
        with verbs.reported("register memory"):
            if self.error:
                raise PyverbsRDMAError("Failed to register a MR", self.error)
        self.made.append(("memory", address, length, access))
        return SimpleNamespace(rkey=11)

    def keep(self, region: Any) -> Any:
        self.made.append(region.what)
        return region


@pytest.fixture
def card(monkeypatch) -> Callable[[int], None]:
    """Sets what registering a dma-buf answers: 0 or an errno."""
    answer = [0]

    class DmaBufMR:
        rkey = 22

        def __init__(self, pd: object, length: int, access: int, dmabuf: int, offset: int):
            if answer[0]:
                raise PyverbsRDMAError("Failed to register a dma-buf MR", answer[0])
            os.fstat(dmabuf)  # an open descriptor
            self.what = ("dma-buf", offset, length, access)

    modules = {
        "mr": SimpleNamespace(DmaBufMR=DmaBufMR),
        "pyverbs_error": SimpleNamespace(PyverbsError=PyverbsError, PyverbsRDMAError=PyverbsRDMAError),
    }
    monkeypatch.setattr(queue_memory, "module", modules.__getitem__)
    monkeypatch.setattr(verbs, "module", modules.__getitem__)
    return lambda error: answer.__setitem__(0, error)


def exporting(calls: list[tuple[int, int]], error: int = 0) -> Callable[[int, int], int]:
    def export(address: int, length: int) -> int:
        calls.append((address, length))
        if error:
            raise OSError(error, os.strerror(error))
        return os.open(os.devnull, os.O_RDONLY)

    return export


def test_a_dma_buf_is_exported_once_and_registered_by_offset(card) -> None:
    calls: list[tuple[int, int]] = []
    memory, end = GpuMemory(ADDRESS, LENGTH, exporting(calls)), End()
    assert memory.register(end, 4096, 8192, 5) == Region(4096, 22, 8192)
    assert memory.register(end, 65536, 4096, 4) == Region(65536, 22, 4096)
    assert (memory.way, calls) == ("dma-buf", [(ADDRESS, LENGTH)])
    assert end.made == [("dma-buf", 4096, 8192, 5), ("dma-buf", 65536, 4096, 4)]
    memory.close()
    memory.close()


@pytest.mark.parametrize("error", sorted(queue_memory.NO_DMABUF))
@pytest.mark.parametrize("where", ["export", "registration"])
def test_without_dma_buf_peer_memory_is_used(card, error, where) -> None:
    card(error if where == "registration" else 0)
    memory = GpuMemory(ADDRESS, LENGTH, exporting([], error if where == "export" else 0))
    end = End()
    assert memory.register(end, 4096, 8192, 5) == Region(ADDRESS + 4096, 11, 8192)
    assert (memory.way, end.made) == ("peer-memory", [("memory", ADDRESS + 4096, 8192, 5)])
    memory.close()


@pytest.mark.parametrize("error", sorted(queue_memory.NO_PEER_MEMORY))
def test_with_neither_both_reasons_are_said(card, error) -> None:
    card(errno.EOPNOTSUPP)
    memory = GpuMemory(ADDRESS, LENGTH, exporting([]))
    with pytest.raises(TransportError) as caught:
        memory.register(End(error), 0, 4096, 5)
    text = str(caught.value)
    assert f"dma-buf: {os.strerror(errno.EOPNOTSUPP)}" in text
    assert f"peer-memory: {os.strerror(error)}" in text
    assert "nvidia-peermem" in text


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EPERM, errno.ENOSPC])
def test_other_errors_are_not_taken_for_a_missing_way(card, error) -> None:
    card(error)
    with pytest.raises(TransportError) as caught:
        GpuMemory(ADDRESS, LENGTH, exporting([])).register(End(), 0, 4096, 5)
    assert caught.value.errno == error


def test_a_way_that_worked_once_is_not_left(card) -> None:
    """A second front end must not get keys of another kind because something failed in between."""
    memory, end = GpuMemory(ADDRESS, LENGTH, exporting([])), End()
    memory.register(end, 0, 4096, 5)
    card(errno.EOPNOTSUPP)
    with pytest.raises(TransportError):
        memory.register(end, 0, 4096, 5)
    memory.close()


def test_host_memory_is_registered_where_it_lies() -> None:
    end = End()
    assert HostMemory(ADDRESS).register(end, 4096, 8192, 3) == Region(ADDRESS + 4096, 11, 8192)
    assert end.made == [("memory", ADDRESS + 4096, 8192, 3)]
