"""The contract between a queue pair's client and the memory shared with the engine.

A transport gives one process one queue pair. It moves bytes in order, without interpreting them. `shm`
implements it with loads and stores, `rdma` by one-sided reads and writes.

Every transport guarantees:
1. Order. An engine that sees a doorbell sees every earlier write_prompt, write_hashes and write_entry.
2. No torn words. An 8-byte word is read and written whole.
3. Reads may be old: a value was in the engine's memory at some time after the
   transport last returned it. A value in the memory is returned after a bounded time, if the caller keeps
   reading.
4. No call waits for the other side. A failed transport raises TransportError, in the failing call or a later call, and in all
calls after it. 5. read_logprobs returns memory contents at least as new as the last result of read_completions, so the
   record of a word with HAS_LOGPROBS is complete.
6. The front end is the only writer of its region, so a write never has to be read back.
7. Succession. Before a pair is claimed again, all writes of an earlier owner to arenas and ring have
   arrived, or never will. (Words may arrive late, because they carry their epoch.)
8. A completion head may arrive late: with the next doorbell or heartbeat, or when it is an eighth of the ring
  ahead.

The protocol relies on 1, 3, 5 and 7, which are O1, O5, O6 and O8 of docs/verification.md.

Positions count entries since the segment was created; the index in a ring is the position modulo its size.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

from blinkpy.config import TRANSPORTS, Config, ConfigError
from blinkpy.packages import modules_of
from blinkpy.queues.layout import EngineFacts, QueueLayout
from blinkpy.queues.words import Int32, Int64, Records


class TransportError(OSError):
    """The engine's memory is unreachable."""


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
        """Copy tokens to the prompt arena. offset: in tokens. The range must be inside the arena."""

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        """Copy page hashes to their arena. offset: in entries."""

    def write_entry(self, index: int, entry: bytes) -> None:
        """Copy one submission entry (SQ_ENTRY_BYTES) to an index of the ring."""

    def ring_doorbell(self, doorbell: int) -> None:
        """Store FRONT_DOORBELL, after all earlier writes. Repeating the same value has no effect."""

    def write_cancel(self, slot: int, request_id: int) -> None:
        """Store the cancel word of a slot."""

    def write_word(self, index: int, value: int) -> None:
        """Store one of FRONT_CQ_HEAD, FRONT_HEARTBEAT and FRONT_CLAIM."""

    def read_completions(self, position: int, limit: int) -> list[int]:
        """Up to `limit` words of the completion ring from `position`, never past its end; fewer, or [], if the transport has no
        more new words.
        """

    def read_logprobs(self, position: int, count: int) -> Records:
        """A copy of `count` records of log probabilities from `position`, within the words that
        read_completions returned last. A record is valid only if its word has HAS_LOGPROBS and FRONT_CQ_HEAD has not passed it.
        """

    def read_hits(self, slot: int) -> int:
        """The hit word of a slot. Read it after read_completions has returned the request's first word."""

    def read_pair(self) -> EngineWords:
        """The engine's words of this pair. `epoch` is read before the other words; otherwise `attached` could belong to an
        earlier grant.
        """

    def read_engine_state(self) -> int:
        """ENGINE_STATE, one of STATE_*."""

    def read_engine(self) -> list[int]:
        """The engine's block, BLOCK_WORDS words: state, heartbeat, counters, gauges."""

    def read_fault(self) -> int:
        """CONTROL_FAULT: not 0 after the host saw the engine die."""

    def lost(self) -> bool:
        """Whether the engine is certainly gone. May cost a system call."""

    def close(self) -> None:
        """Release the queue pair. Further calls are errors, except close()."""


# The kinds of transports. File names identify the two ends of a transport: `connect_NAME.py` in blinkpy/dpu/link, the front
# end's, and `listen_NAME.py` in blinkpy/engine/link, the engine's. Each file has an `END`.


class WorkerIdentity(NamedTuple):
    """The identity of a worker that requests a queue pair."""

    pair: int  # the preferred one
    owner: int = 0  # see blinkpy.transport.handshake.Hello; 0: draw a new owner number


class End(NamedTuple):
    """One end of a transport.

    open: front end: (config, WorkerIdentity) -> blinkpy.transport.contract.Transport; engine: config ->
    blinkpy.engine.link.listeners.Listener.
    check: (config, names of the given options); raises ConfigError if the options don't fit. It is called
        before anything starts.
    """

    name: str
    doc: str  # the purpose of the transport
    crosses_machines: bool
    options: type | None  # dataclass with its options, decorated with config.extends
    open: Callable[..., Any]
    check: Callable[[Config, frozenset[str]], None] = lambda config, given: None


@cache
def ends_in(package: str, pattern: str) -> Mapping[str, End]:
    """The transports' ends in a package, by name; ends within one machine come first.

    Registers their options with Config.
    """
    found: list[End] = [module.END for module in modules_of(package, pattern, "END").values()]
    ends = {end.name: end for end in sorted(found, key=lambda end: (end.crosses_machines, end.name))}
    TRANSPORTS.update((end.name, end.doc) for end in ends.values())
    return ends


def chosen_end(ends: Mapping[str, End], config: Config) -> End:
    """The end that --transport names. Raises ConfigError for an unknown name."""
    name = config.transport.transport
    if name not in ends:
        raise ConfigError(f"transport must be one of {', '.join(ends)}, not {name!r}")
    return ends[name]


def check_end(ends: Mapping[str, End], config: Config, given: frozenset[str]) -> None:
    """Raise ConfigError if options of the transports don't fit each other.

    given: names of the options that the user set.
    """
    chosen = chosen_end(ends, config)
    for end in ends.values():
        if end.options is not None and end.options is not chosen.options:
            for item in dataclasses.fields(end.options):
                if item.name in given:
                    raise ConfigError(f"--{item.name.replace('_', '-')} needs --transport {end.name}")
    chosen.check(config, given)
