"""Ranks of one model make the same decisions: storms of honest and hostile front ends, late and differing ranks, seeded bugs.

Claim ranks/state: Ranks end each turn in equal states, with honest and hostile front ends. A late or differing rank ends the
engine.
"""

import importlib
import threading
from typing import Any

import numpy as np
import pytest
from numba import njit
from support.ranked_turns import WORDS_OF_OTHERS, RankedTurns, blank, exchanges, plain, queues_of_rank
from support.scheduler_cases import make_case
from support.seeded_bugs import Bug, planted

from blinkpy.device.tables import ArgumentTable, as_memoryviews
from blinkpy.queues import submission as E
from blinkpy.queues.words import FRONT_HEARTBEAT
from blinkpy.scheduler import rank_exchange as X
from blinkpy.scheduler.policies import SHIPPED, fcfs
from blinkpy.verify.sim.simulation import Simulation, simulate

TURNS = 150
FINDS_HASHES = 59  # the world of this seed finds missing hashes


class Scribbler:
    """Overwrites all words of the front ends while the other ranks make their turn: only rank 0 may read them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._kept = rng, dict[str, np.ndarray]()

    def __call__(self, rank: int, queues: Any) -> None:
        arrays = {name: np.asarray(getattr(queues, name)) for name in WORDS_OF_OTHERS}
        if rank == 1:
            self._kept = {name: array.copy() for name, array in arrays.items()}
            for array in arrays.values():
                array[:] = self._rng.integers(-(2**31), 2**31, array.shape)
        elif rank == -1:
            for name, array in arrays.items():
                array[:] = self._kept[name]


@pytest.mark.parametrize("hostile", [False, True], ids=["honest", "hostile"])
def test_all_ranks_have_the_same_state(hostile: bool, rng: np.random.Generator) -> None:
    for ranks in (2, 3):
        policy = SHIPPED[str(rng.choice(sorted(SHIPPED)))]
        turns = RankedTurns(policy, ranks, Scribbler(rng))
        outcome = Simulation(int(rng.integers(2**31)), TURNS, policy, scheduler=turns, hostile=hostile).run()
        assert outcome.failure is None, str(outcome.failure)


@pytest.mark.parametrize("lanes", [3])
def test_ranks_of_several_lanes(lanes: int, rng: np.random.Generator) -> None:
    """Like a block of a GPU: without races between lanes."""
    turns = RankedTurns(fcfs, 2, lanes=lanes)
    outcome = Simulation(int(rng.integers(2**31)), 60, fcfs, scheduler=turns).run()
    assert outcome.failure is None, str(outcome.failure)


# ---- copies of rank 0 -----------------------------------------------------------------------------------------------------

BUGS = [
    Bug("a prompt is not copied", "rank_exchange", "copied = copy_arena(source.prompt", "copied = copy_arena(mirror.prompt"),
    Bug("hashes are not copied", "rank_exchange", "        copy_arena(source.hashes", "        copy_arena(mirror.hashes"),
    Bug("token rules are not copied", "rank_exchange", "        if automaton == 1:", "        if automaton == 2:"),
    Bug("a grammar is not copied", "rank_exchange", "    for automaton in range(2):", "    for automaton in range(1, 2):"),
    Bug("cancels of requests that wait are lost", "rank_exchange",
        "copy_cancels(limits, source, mirror, state, state.waiting, counts[S.WAITING_COUNT]",
        "copy_cancels(limits, source, mirror, state, state.waiting, 0"),
    Bug("an entry is announced that was not copied", "rank_exchange", "((doorbell - announced[pair]) & POSITION_MASK)",
        "(doorbell & POSITION_MASK)"),
    Bug("half of an entry is not copied", "rank_exchange", "strided(lane, E.SQ_ENTRY_WORDS, lanes):",
        "strided(lane, E.SQ_ENTRY_WORDS // 2, lanes):"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_an_uncopied_word_is_detected(bug: Bug) -> None:
    with planted(bug):
        rank_phases = importlib.import_module("blinkpy.scheduler.rank_exchange").rank_phases
        phases = rank_phases(importlib.import_module("blinkpy.scheduler.cycle").make_phases(fcfs))
    for seed in (FINDS_HASHES, *range(1, 60)):  # always the same ones
        try:
            if simulate(seed, 400, fcfs, scheduler=RankedTurns(fcfs, 2, phases=phases)).failure:
                return
        except AssertionError:
            return
    pytest.fail(f"nobody notices that {bug.what}")


PARTS = {  # words of offset and length, the arena, and the limits of the arena and the part
    "prompt": (E.WORD_PROMPT_OFFSET, E.WORD_PROMPT_LENGTH, "prompt", "prompt_tokens", "max_model_len"),
    "prediction": (E.WORD_PROMPT_OFFSET, E.WORD_PREDICTED_TOKENS, "prompt", "prompt_tokens", "max_model_len"),
    "hashes": (E.WORD_HASH_OFFSET, E.WORD_HASH_COUNT, "hashes", "hash_entries", "max_model_len"),
    "grammar": (E.WORD_GRAMMAR_OFFSET, E.WORD_GRAMMAR_WORDS, "prompt", "prompt_tokens", "grammar_words"),
    "rules": (E.WORD_RULES_OFFSET, E.WORD_RULES_WORDS, "prompt", "prompt_tokens", "grammar_words"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_entry_is_copied_if_it_lies_in_its_arena(part: str, rng: np.random.Generator) -> None:
    """For offsets and lengths around the ends of the arena and the limit of the part, all words are copied, or no word."""
    where, how_long, arena, size_of, most_of = PARTS[part]
    made = make_case(attached=False)
    limits, source, copied = made.limits._replace(grammar_words=17), made.views, 0
    size, most = (getattr(limits, name) for name in (size_of, most_of))
    getattr(source, arena)[0] = rng.integers(1, 1 << 30, size)
    for count in (-1, 0, 1, 2, size, most, most + 1):
        for offset in {-1, 0, 1, size - count - 1, size - count, size - count + 1, size}:
            source.sq[0, 0], mirror = 0, blank(source)
            if part == "hashes":  # of a prompt outside of the arena
                source.sq[0, 0, [E.WORD_PROMPT_OFFSET, E.WORD_PROMPT_LENGTH]] = -1, most
            source.sq[0, 0, [where, how_long]] = offset, count
            X.copy_entry(limits, as_memoryviews(source), as_memoryviews(mirror), 0, 0, 0, 1)
            expected = np.zeros(size, np.int64)
            if 0 <= offset and 0 < count <= most and offset + count <= size:
                expected[offset : offset + count] = getattr(source, arena)[0, offset : offset + count]
                copied += 1
            assert np.array_equal(getattr(mirror, arena)[0], expected), (offset, count)
    assert copied > 4


# ---- the protocol ---------------------------------------------------------------------------------------------------------


def made_ranks(ranks: int) -> tuple[Any, list[X.RankArguments]]:
    """A case of the simulator, and arguments of each rank over its words. All ranks share rank 0's state, which does not
    change."""
    made = make_case(attached=False)
    mirror, watched = blank(made.views), [np.zeros(5000, np.int64) for _ in range(ranks)]
    queues = [queues_of_rank(mirror, made.views if rank == 0 else blank(made.views)) for rank in range(ranks)]
    found = exchanges(ranks, watched)
    return made, [X.RankArguments(made.limits, made.views, queues[rank], found[rank], made.state) for rank in range(ranks)]


@njit(nogil=True)
def play(engine, first, turns, heartbeats, clocks):
    """Make turns of one rank, and record the words that it reads. Returns the turns before a fault."""
    for turn in range(turns):
        clock = X.begin_turn(engine.limits, engine.source, engine.queues, engine.exchange, engine.state, first + turn, 0, 1)
        if clock == X.FAULTY:
            return turn
        clocks[turn], heartbeats[turn] = clock, engine.queues.front[0, FRONT_HEARTBEAT]
        X.end_turn(engine.exchange, 0, 1)
    return turns


def test_ranks_in_parallel_read_the_same_words(rng: np.random.Generator) -> None:
    """Each rank runs compiled in a thread, while a front end keeps writing. Then one rank stops, and all other ranks have a
    fault."""
    ranks, turns, first = 3, int(rng.integers(300, 600)), int(rng.integers(1, 1000))
    made, arguments = made_ranks(ranks)
    tables = [ArgumentTable(each, strided=True) for each in arguments]
    read = [(np.zeros(turns, np.int64), np.zeros(turns, np.int64)) for _ in range(ranks)]
    play(tables[0], 0, 0, *read[0])  # compiles
    threads = [threading.Thread(target=play, args=(tables[rank], first, turns, *read[rank])) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        made.views.front[0, FRONT_HEARTBEAT] += 1
    heartbeats, clocks = zip(*read, strict=True)
    assert all(np.array_equal(each, heartbeats[0]) for each in heartbeats)
    assert all(each.tolist() == list(range(first, first + turns)) for each in clocks)
    assert [each.exchange.own[X.EPOCH] for each in arguments] == [turns] * ranks


def overlap_and_fault(engine: X.RankArguments, clock: int = 1) -> tuple[int, int]:
    """The words of a turn in plain Python, and the rank's decision."""
    own = engine._replace(
        queues=as_memoryviews(engine.queues), source=as_memoryviews(engine.source), exchange=plain(engine.exchange),
        state=as_memoryviews(engine.state),
    )  # fmt: skip
    found = X.begin_turn(own.limits, own.source, own.queues, own.exchange, own.state, clock, 0, 1)
    if found != X.FAULTY:
        X.end_turn(own.exchange, 0, 1)
    assert X.is_broken(own.exchange) == (found == X.FAULTY)
    return int(own.exchange.own[X.FAULT]), int(own.exchange.own[X.FAULT_RANK])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEADLINE_NS", "FIRST_DEADLINE_NS"):
        monkeypatch.setattr(X, name, 20_000_000)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_is_late_ends_all(rng: np.random.Generator) -> None:
    """Even if it comes after the other ranks have given up: it sees the reason."""
    _, ranks = made_ranks(3)
    for turn in range(int(rng.integers(1, 6))):
        assert [overlap_and_fault(rank, turn) for rank in ranks] == [(0, 0)] * 3
    late = int(rng.integers(1, 3))
    assert all(overlap_and_fault(rank) == (0, 0) for rank in ranks if rank.exchange.rank != late)
    assert overlap_and_fault(ranks[0]) == (X.RANK_LATE, late)
    assert overlap_and_fault(ranks[3 - late]) == (X.RANK_LATE, late)


@pytest.mark.usefixtures("impatient")
def test_rank_0_that_is_late_is_a_fault() -> None:
    _, ranks = made_ranks(2)
    assert overlap_and_fault(ranks[1]) == (X.RANK_LATE, 0)
    assert overlap_and_fault(ranks[1]) == (X.RANK_LATE, 0), "a fault stays"


def test_a_word_of_an_old_turn_is_not_taken(rng: np.random.Generator) -> None:
    """Neither a word of an earlier turn, nor 0: the wait continues until a word of the present turn."""
    word, epoch = np.zeros(1, np.int64), int(rng.integers(X.FIRST_EPOCHS + 2, 1 << 40))
    seen = list[int]()

    def next_word(nanoseconds: int) -> None:
        seen.append(int(word[0]))
        word[0] = (epoch - 2, epoch - 1, epoch)[min(len(seen) - 1, 2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(X, "nanosleep", next_word)
        assert X.await_word(word.data, 0, epoch)
    assert seen == [0, epoch - 2, epoch - 1]


def test_each_word_of_the_state_is_compared(rng: np.random.Generator) -> None:
    """A difference anywhere is found in its window's turn, and remains."""
    _, ranks = made_ranks(2)
    place, change = int(rng.integers(5000)), int(rng.integers(1, 1 << 62)) * int(rng.choice([-1, 1]))
    for rank in ranks:
        rank.exchange.watched[:] = rng.integers(-(2**63), 2**63 - 1, 5000) if rank is ranks[0] else ranks[0].exchange.watched
    ranks[1].exchange.watched[place] ^= change
    for _ in range(place // X.WINDOW):
        assert both_digests(ranks)
    assert not both_digests(ranks)
    ranks[1].exchange.watched[place] ^= change
    assert not any(both_digests(ranks) for _ in range(10))
    assert [overlap_and_fault(rank) for rank in ranks] == [(0, 0)] * 2, "posted with this turn"
    assert [overlap_and_fault(rank) for rank in ranks] == [(X.STATES_DIFFER, 1)] * 2


def both_digests(ranks: list[X.RankArguments]) -> bool:
    """Whether the digests are equal after another window."""
    for rank in ranks:
        X.add_to_digest(plain(rank.exchange), 0, 1)
    return bool(ranks[0].exchange.own[X.DIGEST] == ranks[1].exchange.own[X.DIGEST])


def test_a_late_sum_breaks_only_its_own_rank() -> None:
    _, ranks = made_ranks(2)
    ranks[1].exchange.late_sum[:] = 1, 0
    assert X.is_broken(ranks[1].exchange)
    assert not X.is_broken(ranks[0].exchange)
