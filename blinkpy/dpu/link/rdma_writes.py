"""Posts RDMA writes and reads, and takes their completions, without an allocation per request.

Work requests are posted in batches, and only the last one of a batch is signalled. A reliable connection
executes them in order, so its completion implies those of all earlier ones. No call waits. After the first
failure the queue pair stays in its error state, and every call raises TransportError with the first reason.
"""

from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import QueuePairEnd, constants, module

TAG_BITS = 4  # of a work request's id; the higher bits count the posted work requests
TAG_MASK = (1 << TAG_BITS) - 1
AT_ONCE = 16  # completions per poll
REASONS = {
    "IBV_WC_REM_ACCESS_ERR": "the engine's memory is not, or no longer, accessible to this front end",
    "IBV_WC_RETRY_EXC_ERR": "the engine's machine or its queue pair does not answer",
    "IBV_WC_WR_FLUSH_ERR": "the queue pair is in its error state",
    "IBV_WC_REM_OP_ERR": "the engine's network card could not reach its memory",
    "IBV_WC_REM_INV_REQ_ERR": "the engine's network card refused the request",
}


# One write or read: address in registered memory (any memory for a short inline write), length in bytes, and
# address at the engine. A plain tuple, because there are four for every request.
WritePiece = tuple[int, int, int]


class SendQueue:
    """Posts work requests and reaps their completions.

    depth: maximum outstanding work requests.
    posted, reads, batches: counts since the start.
    """

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
        """Post writes, in order. reap() returns the tag when all of them are done. lkey, rkey: keys of the local
        and the remote region.
        """
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
        """Post one read; otherwise like write()."""
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
        """Begin a batch. All its work requests share one id; only the last one signals a completion."""
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
        """Tags of the batches completed since the last call, in order."""
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
