"""Posting RDMA writes and reads, and taking their completions, without making an object for each.

Work requests are posted in batches, of which the last one is signalled: a reliable connection works them off in order, so its
completion says that all before it are done. Nothing waits. After the first failure the queue pair is in its error state for
good, and every call raises TransportError with the first reason.
"""

from __future__ import annotations

from blinkpy.dpu.transport import TransportError
from blinkpy.dpu.verbs import QueuePairEnd, constants, module

TAG_BITS = 4  # of a work request's id; above it stands how many had been posted with it
TAG_MASK = (1 << TAG_BITS) - 1
AT_ONCE = 16  # completions taken by one call
REASONS = {
    "IBV_WC_REM_ACCESS_ERR": "the engine's memory is not (any more) ours to reach",
    "IBV_WC_RETRY_EXC_ERR": "the engine's machine or its queue pair does not answer",
    "IBV_WC_WR_FLUSH_ERR": "the queue pair is in its error state",
    "IBV_WC_REM_OP_ERR": "the engine's network card could not reach its memory",
    "IBV_WC_REM_INV_REQ_ERR": "the engine's network card refused the request",
}


# One write or read: whether it reads, address in registered memory (of an inline write: any memory), length in bytes, address at
# the engine, and the key of the region there. A plain tuple, since there are four for every request.
Piece = tuple[bool, int, int, int, int]


class SendQueue:
    """See the module. depth: work requests that may be outstanding. posted, batches: since the start, for counting."""

    def __init__(self, end: QueuePairEnd, depth: int):
        e = constants()
        self._qp, self._cq, self._inline, self._depth = end.qp, end.cq, end.inline, depth
        self._signaled, self._inlined, self._success = int(e.IBV_SEND_SIGNALED), int(e.IBV_SEND_INLINE), int(e.IBV_WC_SUCCESS)
        self._error_type = module("pyverbs_error").PyverbsError
        self._sge = module("wr").SGE(0, 0, 0)
        self.posted = self.done = self.batches = self.reads = 0
        self.failure: TransportError | None = None

    def post(self, pieces: list[Piece], lkey: int, tag: int) -> None:
        """Post a batch, in order; reap() returns the tag when all of it is done. lkey: of the local memory."""
        if self.failure is not None:
            raise self.failure
        if self.posted - self.done + len(pieces) > self._depth:
            self._fail(f"{self.posted - self.done} RDMA requests are outstanding: the engine's network card does not answer")
        qp, sge, last = self._qp, self._sge, len(pieces) - 1
        qp.wr_start()
        for i, (read, local, length, remote, rkey) in enumerate(pieces):
            self.posted += 1
            inline = not read and length <= self._inline
            qp.wr_id = self.posted << TAG_BITS | tag
            qp.wr_flags = (self._signaled if i == last else 0) | (self._inlined if inline else 0)
            if read:
                qp.wr_rdma_read(rkey, remote)
                self.reads += 1
            else:
                qp.wr_rdma_write(rkey, remote)
            if inline:
                qp.wr_set_inline_data(local, length)
            else:
                sge.addr, sge.length, sge.lkey = local, length, lkey
                qp.wr_set_sge(sge)
        try:
            qp.wr_complete()
        except self._error_type as error:
            self._fail(f"could not post to the RDMA queue pair: {error}")
        self.batches += 1

    def reap(self) -> list[int]:
        """Tags of the batches that were completed since the last call, in order."""
        if self.failure is not None:
            raise self.failure
        tags: list[int] = []
        while True:
            count, completions = self._cq.poll(AT_ONCE)
            for completion in completions:
                if completion.status != self._success:
                    self._fail(f"RDMA failed ({describe_status(completion.status)})")
                self.done = completion.wr_id >> TAG_BITS
                tags.append(completion.wr_id & TAG_MASK)
            if count < AT_ONCE:
                return tags

    def _fail(self, message: str) -> None:
        self.failure = TransportError(message)
        raise self.failure


def describe_status(status: int) -> str:
    """A completion's status in words."""
    for name, reason in REASONS.items():
        if status == int(getattr(constants(), name)):
            return reason
    return f"completion status {status}"
