"""A slow RDMA card and network for the RDMA transport, without verbs: all permitted behaviour of a reliable connection.

Posted work is done later, word by word in any order, between turns of the engine. Writes keep their order; a read may happen
after writes that were posted after it. Completions arrive in the order of posting, some of them only at a later poll.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks.parts.rdma_cpu import Card

WORD = 8
MEANWHILE = 0.05  # how often another party acts between two words


class SlowCard(Card):
    """meanwhile: actions of other parties between two steps of the card. status: status of all further completions."""

    def __init__(self, draw: random.Random, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._draw, self._meanwhile, self.status = draw, meanwhile, 0
        self._posted: deque[Any] = deque()
        self._batch: list[Any]
        self._begun: tuple[int, bool]
        self._working = False  # turns that the work itself calls must not work again

    def wr_start(self) -> None:
        self._batch = []

    def wr_rdma_read(self, rkey: int, remote: int) -> None:
        super().wr_rdma_read(rkey, remote)
        self._begun = self.wr_id, bool(self.wr_flags & 1)  # a driver reads them now

    def wr_rdma_write(self, rkey: int, remote: int) -> None:
        super().wr_rdma_write(rkey, remote)
        self._begun = self.wr_id, bool(self.wr_flags & 1)

    def wr_complete(self) -> None:
        self._posted.extend(self._batch)
        del self._batch

    def wr_set_inline_data(self, address: int, length: int) -> None:
        self._post(address, length, ctypes.string_at(address, length))

    def wr_set_sge(self, sge: Any) -> None:
        self._post(sge.addr, sge.length, None)

    def poll(self, most: int) -> tuple[int, list[Any]]:
        self.work(self._draw.randint(0, 6))
        count = self._draw.randint(0, min(most, len(self._done)))
        done, self._done = self._done[:count], self._done[count:]
        return count, done

    def work(self, most: int) -> None:
        """Do at most this much of the posted work."""
        for _ in range(most):
            ready = [work for work in self._posted if not work.done]
            if not ready or self._working:
                return
            after_reads = next((work for work in ready if not work.read), ready[0])
            self._working = True
            self._do(self._draw.choice((ready[0], after_reads)))
            self._working = False
            while self._posted and self._posted[0].done:
                work = self._posted.popleft()
                if work.signaled:
                    self._done.append(SimpleNamespace(status=self.status, wr_id=work.tag))

    def crash(self) -> None:
        """End the connection: some posted work is done, and the rest never."""
        self.work(self._draw.randint(0, len(self._posted)))
        self._posted.clear()

    def _post(self, local: int, length: int, source: bytes | None) -> None:
        """source: bytes of inline data; other bytes stay at `local` until the work is done."""
        tag, signaled = self._begun
        self._batch.append(
            SimpleNamespace(
                read=self._read, remote=self._remote, local=local, length=length, source=source, tag=tag,
                signaled=signaled, done=False,
            )
        )  # fmt: skip

    def _do(self, work: Any) -> None:
        first = -work.remote % WORD
        cuts = sorted({0, *range(first, work.length, WORD)})
        pieces = list(zip(cuts, [*cuts[1:], work.length], strict=True))
        self._draw.shuffle(pieces)
        for begin, end in pieces:
            if self._draw.random() < MEANWHILE:
                self._meanwhile()
            if work.read:
                ctypes.memmove(work.local + begin, work.remote + begin, end - begin)
            else:
                source = work.source or ctypes.string_at(work.local, work.length)
                ctypes.memmove(work.remote + begin, source[begin:end], end - begin)
        work.done = True
