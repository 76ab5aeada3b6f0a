"""Posting RDMA writes and reads, and taking their completions, without making an object for each.

Work requests are posted in batches, of which the last one is signalled: a reliable connection works them off in order, so its
completion says that all before it are done. Nothing waits. After the first failure the queue pair is in its error state for
good, and every call raises TransportError with the first reason.
"""

from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import QueuePairEnd, constants, module

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


# One write or read: address in registered memory (of a short write, which is taken at once: any memory), length in bytes, and
# address at the engine. A plain tuple, since there are four for every request.
WritePiece = tuple[int, int, int]


class SendQueue:
    """depth: work requests that may be outstanding. posted, reads, batches: since the start, for counting."""

    def __init__(self, end: QueuePairEnd, depth: int):
        e = constants()
        self._qp, self._cq, self._inline_bytes, self._depth = end.qp, end.cq, end.inline, depth
        self._signaled, self._inlined, self._success = int(e.IBV_SEND_SIGNALED), int(e.IBV_SEND_INLINE), int(e.IBV_WC_SUCCESS)
        self._reasons = {int(getattr(e, name)): reason for name, reason in REASONS.items()}
        self._error_type = module("pyverbs_error").PyverbsError
        self._sge = module("wr").SGE(0, 0, 0)
        self.posted = self.done = self.batches = self.reads = 0
        self.failure: TransportError | None = None

    def write(self, pieces: list[WritePiece], lkey: int, rkey: int, tag: int) -> None:
        """Post writes, in order; reap() returns the tag when all of them are done. lkey, rkey: of the regions here and there."""
        qp, sge, inline, inlined = self._qp, self._sge, self._inline_bytes, self._inlined
        left = len(pieces)
        self._begin(left, tag)
        for local, length, remote in pieces:
            left -= 1
            flags = 0 if left else self._signaled
            if length <= inline:
                qp.wr_flags = flags | inlined
                qp.wr_rdma_write(rkey, remote)
                qp.wr_set_inline_data(local, length)
            else:
                qp.wr_flags = flags
                qp.wr_rdma_write(rkey, remote)
                sge.addr, sge.length, sge.lkey = local, length, lkey
                qp.wr_set_sge(sge)
        self._end()

    def read(self, piece: WritePiece, lkey: int, rkey: int, tag: int) -> None:
        """Post one read; otherwise as write()."""
        qp, sge = self._qp, self._sge
        local, length, remote = piece
        self._begin(1, tag)
        self.reads += 1
        qp.wr_flags = self._signaled
        qp.wr_rdma_read(rkey, remote)
        sge.addr, sge.length, sge.lkey = local, length, lkey
        qp.wr_set_sge(sge)
        self._end()

    def _begin(self, count: int, tag: int) -> None:
        """Open a batch. All of it has the id of its last work request, the one whose completion counts."""
        if self.failure is not None:
            raise self.failure
        self.posted += count
        if self.posted - self.done > self._depth:
            self._fail(f"{self._depth} RDMA requests are outstanding: the engine's network card does not answer")
        self._qp.wr_start()
        self._qp.wr_id = self.posted << TAG_BITS | tag

    def _end(self) -> None:
        try:
            self._qp.wr_complete()
        except self._error_type as error:
            self._fail(f"could not post to the RDMA queue pair: {error}")
        self.batches += 1

    def reap(self) -> list[int]:
        """Tags of the batches that were completed since the last call, in order."""
        if self.failure is not None:
            raise self.failure
        tags: list[int] = []
        while self.done != self.posted:
            count, completions = self._cq.poll(AT_ONCE)
            for completion in completions:
                if completion.status != self._success:
                    status = f"completion status {completion.status}"
                    self._fail(f"RDMA failed ({self._reasons.get(completion.status, status)})")
                done = completion.wr_id
                self.done = done >> TAG_BITS
                tags.append(done & TAG_MASK)
            if count < AT_ONCE:
                break
        return tags

    def _fail(self, message: str) -> None:
        self.failure = TransportError(message)
        raise self.failure
