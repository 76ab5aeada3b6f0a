"""The contract between a queue pair's client and the memory that it shares with the engine.

A transport gives one process one queue pair. It moves bytes in order, without interpreting them. `shm`
implements it with loads and stores, `rdma` by one-sided reads and writes.

Every transport guarantees:
1. Order. When the engine sees a doorbell, it sees every write_prompt, write_hashes and write_entry that came before it.
2. No torn words. An 8-byte word is read and written whole.
3. Reads may be old, never from the future: a value was in the engine's memory at some time after the
   transport last returned it. A value in the memory is returned after a bounded time, if the caller keeps
   reading.
4. No call waits for the other side. A transport that has failed raises TransportError, in that call or a
   later one, and in every call after it.
5. read_logprobs returns memory contents at least as new as the last result of read_completions, so the
   record of a word with HAS_LOGPROBS is complete.
6. The front end is the only writer of its region, so a write never has to be read back.
7. Succession. Before a pair is claimed again, all writes of an earlier owner to arenas and ring have
   landed, or never will. (Words may land late: they carry their epoch.)
8. A completion head may arrive late: with the next doorbell or heartbeat, or once it is an eighth of the ring ahead.

1, 3, 5 and 7 are the orders that the protocol relies on: O1, O5, O6 and O8 of docs/verification.md.

Positions count entries since the segment was made; a ring's place is the position modulo its size.
"""

from typing import NamedTuple, Protocol

from blinkpy.queues.layout import EngineFacts, QueueLayout
from blinkpy.queues.words import Int32, Int64, Records


class TransportError(OSError):
    """The engine's memory can't be reached (any more)."""


class EngineWords(NamedTuple):
    """The engine's words of a queue pair, by the names PAIR_* of blinkpy.queues.words."""

    sq_head: int
    cq_tail: int
    epoch: int
    attached: int


class Transport(Protocol):
    """The memory of one queue pair, with the guarantees listed above.

    It is used by one thread. A second thread may call write_word of FRONT_HEARTBEAT, read_engine, read_pair,
    read_fault and lost; it must end before close().
    """

    layout: QueueLayout
    facts: EngineFacts
    pair: int

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        """Copy tokens to the prompt arena; offset in tokens. The caller keeps within the arena."""

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        """Copy page hashes to their arena; offset in entries."""

    def write_entry(self, index: int, entry: bytes) -> None:
        """Copy one submission entry (SQ_ENTRY_BYTES) to a place in the ring."""

    def ring_doorbell(self, doorbell: int) -> None:
        """Store FRONT_DOORBELL, behind everything written so far. Ringing again with the same value changes nothing."""

    def write_cancel(self, slot: int, request_id: int) -> None:
        """Store the cancel word of a slot."""

    def write_word(self, index: int, value: int) -> None:
        """Store one of FRONT_CQ_HEAD, FRONT_HEARTBEAT and FRONT_CLAIM."""

    def read_completions(self, position: int, limit: int) -> list[int]:
        """Up to `limit` words of the completion ring from a position on, never past its end; fewer, or none, when the
        transport has no more new ones."""

    def read_logprobs(self, position: int, count: int) -> Records:
        """A copy of `count` records of log probabilities from a position on, within the words that read_completions returned
        last. Only those mean something whose words have HAS_LOGPROBS, and whose place FRONT_CQ_HEAD did not yet give back."""

    def read_hits(self, slot: int) -> int:
        """The hit word of a slot, from after read_completions had returned the first word of its request."""

    def read_pair(self) -> EngineWords:
        """The engine's words of this pair. epoch is read before the others, or attached may be of an earlier grant."""

    def read_engine_state(self) -> int:
        """ENGINE_STATE, one of STATE_*."""

    def read_engine(self) -> list[int]:
        """The engine's block, BLOCK_WORDS words: state, heartbeat, counters, gauges."""

    def read_fault(self) -> int:
        """CONTROL_FAULT: not 0 once the host saw the engine die."""

    def lost(self) -> bool:
        """True once it is certain that the engine behind this memory is gone. May cost a system call."""

    def close(self) -> None:
        """Give the queue pair up. Further calls are errors; a second close is not."""
