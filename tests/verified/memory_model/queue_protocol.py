"""The queue protocol as small programs for the memory model, with the order of accesses that the code has.

`SCENARIOS` are all parts of the protocol that depend on the order of memory accesses; `check` explores one on the machines of a
transport. The code refers to these assumptions by name. The text after the bar is how the code ensures each. `make docs` writes
them, and the code that refers to each, into docs/verification.md.

O1. a party that sees a doorbell sees the entry, prompt and hashes before it | stores in order (x86, RDMA)
or a fence (Arm); the engine loads the doorbell with acquire

O2. a party that sees `PAIR_SQ_HEAD` knows that the engine has read the entries before it | a release store

O3. a completion word is complete by itself | one store of 8 bytes, with a lap that distinguishes it from an
older word

O4. a completion entry is overwritten only after its reader's head was seen | the head depends on the word
that was read; the engine's store follows a branch on the head

O5. a party that sees a grant sees the positions from which it counts | the epoch's release store follows the positions; on Arm, a
fence follows the read of the epoch

O6. late writes of an earlier owner cause no error | words and entries carry their epoch; a heartbeat
repeats doorbell and head, in case a late write has overwritten them

O7. a cancel may arrive at any time | it names its request, and ids are never reused

O8. a party that sees a completion word with log probabilities sees its record, and reads it before it moves the head | a release
store; on Arm, fences around the read

The model assumes, but does not check, that bulk writes of an earlier owner (entries, prompts, hashes) land before its successor
submits, or never. Shared memory ensures this because the owner is dead: its lock on the pair is free. An RDMA transport must tear
down the old connection before it accepts another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from verified.memory_model.machines import RDMA, WEAK, X86, Checker, MemoryOrder
from verified.memory_model.operations import Bulk, Fence, Load, LoadLater, Program, Silence, Steps, Store, Value

Scenario = tuple[list[Program], list[MemoryOrder], dict[str, Any]]


class Transport(NamedTuple):
    """A front end's machine, whether it fences (dpu/link/store_fence.py), and the engine's machine."""

    name: str
    front: MemoryOrder
    fences: bool
    engine: MemoryOrder


TRANSPORTS = (
    Transport("shared memory, x86, engine on the CPU", X86, False, X86),
    Transport("shared memory, x86, engine on a GPU", X86, False, WEAK),
    Transport("shared memory, Arm", WEAK, True, WEAK),
    Transport("RDMA, engine on a GPU", RDMA, False, WEAK),
)


class Protocol(NamedTuple):
    """The protocol; a field that is False leaves out one of its measures, and so makes a bug."""

    doorbell_last: bool = True
    front_fence: bool = True
    doorbell_acquired: bool = True
    head_released: bool = True
    laps: bool = True
    head_respected: bool = True
    head_after_read: bool = True
    grant_released: bool = True
    positions_before_epoch: bool = True
    grant_fence: bool = True
    epoch_before_attached: bool = True
    doorbell_epochs: bool = True
    doorbell_repeated: bool = True
    cancel_names_request: bool = True
    record_released: bool = True
    record_fence_before: bool = True
    record_fence_after: bool = True


PROTOCOL = Protocol()


def at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: bool(value >= least)


def fence(transport: Transport, wanted: bool) -> Steps:
    if transport.fences and wanted:
        yield Fence()


# ---- submission: O1, O2 -------------------------------------------------------------------------------------------------

REQUESTS = 2  # through a ring of one entry, so that entry and prompt are overwritten


def submission(transport: Transport, protocol: Protocol) -> Scenario:
    """A front end submits requests through a ring with space for one; the engine copies each."""

    def front() -> Steps:
        for request in range(1, REQUESTS + 1):
            yield Load("sq_head", wanted=at_least(request - 1))
            if not protocol.doorbell_last:
                yield Store("doorbell", request)
            yield Store("prompt", request)
            yield Bulk((("entry 0", request), ("entry 1", request)))
            yield from fence(transport, protocol.front_fence)
            if protocol.doorbell_last:
                yield Store("doorbell", request)

    def engine() -> Steps:
        for request in range(1, REQUESTS + 1):
            yield Load("doorbell", protocol.doorbell_acquired, at_least(request))
            tickets = []
            for word in ("entry 0", "entry 1", "prompt"):
                tickets.append((yield LoadLater(word)))
            yield Store("sq_head", request, protocol.head_released)
            for ticket in tickets:
                value = yield Value(ticket)
                assert value == request, f"request {request} is read as {value}"

    initial = dict.fromkeys(("sq_head", "doorbell", "prompt", "entry 0", "entry 1"), 0)
    return [front, engine], [transport.front, transport.engine], initial


# ---- completion: O3, O4 -------------------------------------------------------------------------------------------------

RING, TOKENS = 2, 5


def completion(transport: Transport, protocol: Protocol) -> Scenario:
    """The engine publishes more tokens than the ring has entries; the front end reads each once and in order."""

    def lap_of(position: int) -> int:
        return position // RING + 1

    def engine() -> Steps:
        head = 0
        for position in range(TOKENS):
            if position - head >= RING and protocol.head_respected:
                head = yield Load("cq_head", wanted=at_least(position - RING + 1))
            yield Store(f"cq {position % RING}", (lap_of(position), position))

    def front() -> Steps:
        for position in range(TOKENS):
            if not protocol.head_after_read:
                yield Store("cq_head", position + 1)
            laps = {lap_of(position)} if protocol.laps else range(1, TOKENS + 1)
            word = yield Load(f"cq {position % RING}", wanted=lambda word, laps=laps: word[0] in laps)  # type: ignore[misc]
            assert word[1] == position, f"token {position} is read as {word[1]}"
            if protocol.head_after_read:
                yield Store("cq_head", position + 1)

    return [front, engine], [transport.front, transport.engine], {"cq_head": 0, **{f"cq {i}": (0, -1) for i in range(RING)}}


# ---- ownership: O5, O6 --------------------------------------------------------------------------------------------------


def ownership(transport: Transport, protocol: Protocol) -> Scenario:
    """An owner dies while its last doorbell is in flight; its successor claims the pair and submits."""

    def predecessor() -> Steps:
        yield Store("doorbell", (1, 1))  # announces an entry that was never written whole

    def engine() -> Steps:
        yield Store("cq_tail", 1)  # a token for the predecessor
        sq_head = 0
        yield Load("claim", wanted=lambda claim: claim == 2)
        epoch, tail = yield Load("doorbell", True)
        if epoch == 1:
            sq_head = tail  # announced but unconsumed entries are skipped
        released = protocol.grant_released
        if not protocol.positions_before_epoch:
            yield Store("epoch", 2, released)
        yield Store("attached", 0, released)
        yield Store("sq_head", sq_head, released)
        if protocol.positions_before_epoch:
            yield Store("epoch", 2, released)
        yield Store("attached", 1, released)

        def believed(bell: Any) -> bool:
            return bool(bell[1] > sq_head and (bell[0] == 2 or not protocol.doorbell_epochs))

        yield Load("doorbell", True, believed)
        entry = yield Load(f"entry {sq_head}")
        assert entry == "of the successor", f"an entry {entry} is taken in"

    def successor() -> Steps:
        yield Store("claim", 2)
        attached = 0
        if not protocol.epoch_before_attached:
            attached = yield Load("attached")
        yield Load("epoch", wanted=lambda epoch: epoch == 2)
        yield from fence(transport, protocol.grant_fence)
        if attached != 1:
            yield Load("attached", wanted=lambda value: value == 1)
        again = yield Load("attached")
        assert again == 1, "a grant seems to be revoked"
        sq_head = yield Load("sq_head")
        cq_tail = yield Load("cq_tail")
        assert cq_tail == 1, "the successor reads completions of its predecessor"
        yield Store(f"entry {sq_head}", "of the successor")
        yield from fence(transport, protocol.front_fence)
        yield Store("doorbell", (2, sq_head + 1))
        if protocol.doorbell_repeated:
            yield Silence(0)
            yield from fence(transport, protocol.front_fence)
            yield Store("doorbell", (2, sq_head + 1))

    initial = {"doorbell": (1, 0), "claim": 1, "epoch": 1, "attached": 1, "sq_head": 0, "cq_tail": 0}
    initial |= {"entry 0": "of nobody", "entry 1": "of nobody"}
    return [predecessor, successor, engine], [transport.front, transport.front, transport.engine], initial


# ---- cancel: O7 ---------------------------------------------------------------------------------------------------------


def cancellation(transport: Transport, protocol: Protocol) -> Scenario:
    """A cancel arrives when its request has just ended, and its slot holds a new request."""

    def front() -> Steps:
        yield Store("cancel", 1 if protocol.cancel_names_request else True)
        yield Load("cq 0", wanted=lambda word: word == 1)  # the end of request 1
        yield Store("entry", 2)
        yield from fence(transport, protocol.front_fence)
        yield Store("doorbell", 2)

    def engine() -> Steps:
        yield Store("cq 0", 1)
        yield Load("doorbell", True, lambda tail: tail == 2)
        request = yield Load("entry")
        word = yield Load("cancel")
        assert word != (request if protocol.cancel_names_request else True), "the engine cancels a request without a cancel"

    return [front, engine], [transport.front, transport.engine], {"cancel": 0, "cq 0": 0, "entry": 0, "doorbell": 1}


# ---- log probabilities: O8 ----------------------------------------------------------------------------------------------


def record(transport: Transport, protocol: Protocol) -> Scenario:
    """Completions with records, through a ring of one entry, so that a record is overwritten."""
    tokens = 2

    def engine() -> Steps:
        for position in range(tokens):
            yield Load("cq_head", wanted=at_least(position))
            yield Bulk((("record 0", position), ("record 1", position)))
            yield Store("cq", position, protocol.record_released)

    def front() -> Steps:
        for position in range(tokens):
            yield Load("cq", wanted=at_least(position))
            yield from fence(transport, protocol.record_fence_before)
            first = yield LoadLater("record 0")
            second = yield LoadLater("record 1")
            yield from fence(transport, protocol.record_fence_after)
            yield Store("cq_head", position + 1)
            for ticket in (first, second):
                value = yield Value(ticket)
                assert value == position, f"the record of token {position} is that of {value}"

    return [front, engine], [transport.front, transport.engine], {"cq": -1, "cq_head": 0, "record 0": -1, "record 1": -1}


SCENARIOS = (submission, completion, ownership, cancellation, record)

# Protocols with a bug. A missing fence or order does no harm on machines that always keep the order.
BUGS = {name: PROTOCOL._replace(**{name: False}) for name in Protocol._fields}


def check(scenario: Callable[..., Scenario], transport: Transport, protocol: Protocol = PROTOCOL) -> tuple[str, int]:
    """The violation of a part of the protocol on a transport, or "", and the number of states."""
    checker = Checker(*scenario(transport, protocol))
    return checker.run(), checker.states
