"""The queue protocol on all machines, and the checker itself on programs whose outcomes are known.

Claim memory/protocol: The protocol is correct on four machines, and needs each of its assumptions.

Tester [memory model](#the-memory-model): order of accesses of the queue protocol | all interleavings, on four machines
"""

from typing import Any

import pytest
from verified.memory_model.machines import RDMA, WEAK, X86, Checker, MemoryOrder
from verified.memory_model.operations import Bulk, Fence, Load, LoadLater, Program, Store, Value
from verified.memory_model.queue_protocol import BUGS, SCENARIOS, TRANSPORTS, Transport, check

CPU, GPU, ARM, REMOTE = TRANSPORTS
ALL = {CPU, GPU, ARM, REMOTE}
# Machines that must find each bug: a missing order does no harm on a machine that always keeps it.
FOUND_ON = dict.fromkeys(BUGS, ALL) | {
    "front_fence": {ARM},
    "grant_fence": {ARM},
    "doorbell_acquired": {GPU, ARM, REMOTE},
    "head_released": {GPU, ARM, REMOTE},
    "grant_released": {GPU, ARM, REMOTE},
    "record_released": {GPU, ARM, REMOTE},
    "record_fence_before": {ARM},
    "record_fence_after": {ARM},
}


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_protocol_is_right(scenario: Any, transport: Transport) -> None:
    violation, states = check(scenario, transport)
    assert not violation, violation
    assert states > 20


@pytest.mark.parametrize("name", BUGS)
def test_a_protocol_with_a_bug_is_found_where_it_matters(name: str) -> None:
    found = {t for t in TRANSPORTS if any(check(scenario, t, BUGS[name])[0] for scenario in SCENARIOS)}
    assert found == FOUND_ON[name]


# ---- litmus tests: the possible results on each machine -----------------------------------------------------------------


def reachable(machine: MemoryOrder, first: Program, second: Program, words: dict[str, Any]) -> bool:
    """Whether an assertion of the programs can fail."""
    return Checker([first, second], [machine, machine], words).run() != ""


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("acquire", [False, True])
@pytest.mark.parametrize("machine", [X86, RDMA, WEAK])
def test_message_passing_needs_release_and_acquire_on_weak_machines(machine: MemoryOrder, release: bool, acquire: bool) -> None:
    def writer() -> Any:
        yield Store("data", 1)
        yield Store("flag", 1, release)

    def reader() -> Any:
        yield Load("flag", acquire, bool)
        data = yield Load("data")
        assert data == 1

    shows = machine is WEAK and not (release and acquire)
    assert reachable(machine, writer, reader, {"data": 0, "flag": 0}) == shows


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("machine", [X86, WEAK])
def test_store_buffers_delay_stores_behind_loads(machine: MemoryOrder, fenced: bool) -> None:
    def party(own: str, other: str) -> Program:
        def run() -> Any:
            yield Store(own, 1)
            if fenced:
                yield Fence()
            value = yield Load(other)
            yield Store(f"{own} saw", value)
            if own == "y":
                yield Fence()
                seen = yield Load("x saw", wanted=lambda value: value is not None)
                assert value or seen, "both saw 0"

        return run

    words = {"x": 0, "y": 0, "x saw": None, "y saw": None}
    assert reachable(machine, party("x", "y"), party("y", "x"), words) == (not fenced)


def test_loads_of_one_word_do_not_go_back_in_time() -> None:
    def writer() -> Any:
        yield Store("x", 1)
        yield Store("x", 2)

    def reader() -> Any:
        first = yield Load("x")
        second = yield Load("x")
        assert second >= first

    assert not reachable(WEAK, writer, reader, {"x": 0})


@pytest.mark.parametrize(("machine", "shows"), [(X86, False), (WEAK, True)])
def test_a_load_may_happen_after_a_later_store(machine: MemoryOrder, shows: bool) -> None:
    def copier() -> Any:
        ticket = yield LoadLater("x")
        yield Store("y", 1)
        value = yield Value(ticket)
        assert value == 0

    def writer() -> Any:
        yield Load("y", wanted=bool)
        yield Store("x", 1)

    assert reachable(machine, copier, writer, {"x": 0, "y": 0}) == shows


def test_bulk_writes_have_no_order_of_their_own() -> None:
    def writer() -> Any:
        yield Bulk((("a", 1), ("b", 1)))
        yield Store("c", 1)

    def reader(first: str, second: str) -> Program:
        def run() -> Any:
            yield Load(first, wanted=bool)
            value = yield Load(second)
            assert value

        return run

    words = {"a": 0, "b": 0, "c": 0}
    assert reachable(X86, writer, reader("b", "a"), words)
    assert reachable(X86, writer, reader("a", "b"), words)
    assert not reachable(X86, writer, reader("c", "a"), words)


def test_a_program_that_waits_for_ever_is_found() -> None:
    def waiter() -> Any:
        yield Load("x", wanted=bool)

    def other() -> Any:
        yield Store("y", 1)

    violation = Checker([waiter, other], [WEAK, WEAK], {"x": 0, "y": 0}).run()
    assert "nobody can go on" in violation


def test_too_many_states_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="more than 10 states"):
        Checker(*SCENARIOS[0](CPU, BUGS["laps"])).run(most_states=10)
