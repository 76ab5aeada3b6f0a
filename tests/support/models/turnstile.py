"""Ranks that launch kernels in Triton's interpreter, whose programs can't wait: threads that take turns."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from blinkpy.kernels import all_reduce as kernels
from blinkpy.models.gpu import gpu_decoder

WAIT_S = 300.0


class Turnstile:
    """In a kernel of all ranks, each rank runs the next phase only after all ranks have run the previous phase."""

    def __init__(self, patch: pytest.MonkeyPatch, ranks: int):
        self._ranks, self._turn, self._failed = ranks, 0, False
        self._changed = threading.Condition()
        patch.setattr(gpu_decoder, "all_reduce", self._all_reduce)
        patch.setattr(gpu_decoder, "gather_logits", self._gather_logits)

    def run(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """The results of a call for each rank. Raises the first error of a call."""
        results: list[Any] = [None] * self._ranks

        def of_rank(rank: int) -> None:
            try:
                self._await(rank)
                results[rank] = calls[rank]()
            except BaseException as error:  # raised again by the caller's thread
                results[rank] = error
                self._failed = True
            self._pass_on(rank)

        self._turn, self._failed = 0, False
        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self._ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _await(self, rank: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == rank or self._failed, WAIT_S) or self._failed:
                raise RuntimeError(f"rank {rank} waits for a rank that has failed")

    def _pass_on(self, rank: int) -> None:
        with self._changed:
            self._turn = (rank + 1) % self._ranks
            self._changed.notify_all()

    def _all_reduce(self, out: torch.Tensor, counts: torch.Tensor, peers: kernels.Peers, **options: Any) -> None:
        for phases in (1, 2, 4):
            kernels.all_reduce(out, counts, peers, phases=phases, **options)
            self._pass_on(peers.rank)
            self._await(peers.rank)

    def _gather_logits(self, rows: int, counts: torch.Tensor, peers: kernels.Peers, **options: Any) -> torch.Tensor:
        for phases in (1, 2):
            whole = kernels.gather_logits(rows, counts, peers, phases=phases, **options)
            self._pass_on(peers.rank)
            self._await(peers.rank)
        return whole
