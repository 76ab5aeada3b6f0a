"""The search for a test that detects a mutant: stages and tests that reach its line, likely killers first,
each in a separate process.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from support.endless_calls import EndlessCallError

from mutants.collected import UNCHANGED, run_collected
from mutants.mutations import Mutant
from mutants.processes import FRESH, HERE, Ended, Processes
from mutants.reach import Reach, file_of
from mutants.results import HOW, Verdict
from mutants.session import Change, run_tests
from mutants.stages import MACHINE_S, STAGE_S, STAGES

START_S = 20.0  # maximum processor time for pytest to begin
TEST_START_S = 15.0  # additional processor time of a test, for fixtures that an earlier test already had
HANGS = 8  # a multiple of the usual time of a stage or a test, after which it counts as an endless loop
FIRST_S = 2.5  # processor time of the tests that run before the stages
KILLERS = 6  # tests of each kind of neighbours that run first
STARVED_S = 1.0  # a test that waited longer for a processor may have failed for that reason
BROKEN, BROKEN_SHARE = 8, 0.05  # if more processes die without their mutant, the machine or a tool is broken
TESTS = "tests"

Stage = tuple[str, list[str]]  # its name, and which tests


class Killers:
    """Tests that killed mutants of the same function, with the same change, or of the same file: likely to kill the
    next one."""

    def __init__(self, killed: Iterable[tuple[str, str]] = ()) -> None:
        """killed: names of mutants, and the test or stage that detected each."""
        self._of: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant, by in killed:
            self.add(mutant, by)

    def add(self, mutant: str, by: str) -> None:
        for place in self._places(mutant):
            self._of[place][by] += 1

    def likely(self, mutant: str) -> list[str]:
        """The likeliest first."""
        found = [by for place in self._places(mutant) for by, _ in self._of[place].most_common(KILLERS)]
        return list(dict.fromkeys(found))

    def _places(self, mutant: str) -> list[str]:
        file, _, rest = mutant.partition("::")
        function, _, change = rest.rpartition(" [")[0].partition(": ")
        return [f"{file}::{function}", change, file]


@dataclass(eq=False)
class Hunted:
    """A mutant, the remaining stages, and the processor time of the previous ones, s."""

    mutant: Mutant
    group: str
    stages: list[Stage] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    forks: bool = True  # from the process that has collected all tests
    claim: Verdict | None = None  # of a test that must not fail without the mutant
    broken: bool = False  # a process died without the mutant, too: it gets no verdict

    def verdict(self, stage: str = "", said: str = "", died: bool = False, tests: Iterable[str] = ()) -> Verdict:
        """stage: the stage that detected it, or "". said: its message, or the cause of its process's death. tests: the
        tests that ran."""
        how = HOW[2 if died else 1 if EndlessCallError.__name__ in said else 0] if stage else ""
        by = next((test for test in tests if said.startswith(f"{test}: ")), stage)
        return Verdict.of(self.mutant, self.group, by, how, round(sum(self.seconds.values()), 2), said[:200])


class Hunt:
    """Hunts mutants, at most `processes` concurrently.

    collected: paths of the processes that have imported all tests; used in turn.
    folder: for files of the tests.
    """

    def __init__(
        self, processes: Processes, reach: Reach, killers: Killers, collected: Sequence[str], seed: int, folder: str
    ) -> None:
        self._processes, self._reach, self._killers, self._collected = processes, reach, killers, cycle(collected)
        self._seed, self._folder, self._broken = seed, folder, 0
        self._over = 0  # processes
        self._fit, self._unfit = set[str](), set[str]()  # tests that were tried in such a process without a mutant

    def verdicts(self, mutants: list[Hunted], until: float) -> Iterator[Verdict]:
        """The verdict of each mutant, as it arrives. until: time.monotonic() at the end; later mutants get no
        verdict.
        """
        waiting = mutants[::-1]
        while (waiting or self._processes) and time.monotonic() < until:
            while waiting and self._processes.has_space:
                hunted = waiting.pop()
                self._plan(hunted)
                if not self._begin(hunted):
                    yield hunted.verdict()
            for ended in self._processes.ended():
                if verdict := self._judge(ended):
                    self._killers.add(verdict.name, verdict.by)
                    yield verdict
                elif not ended.key.broken and not self._begin(ended.key):
                    yield ended.key.verdict()

    def _judge(self, ended: Ended) -> Verdict | None:
        """The verdict after a process's answer.

        The test is repeated without the mutant in four cases: it is the test's first kill, a call seems
        endless, other processes had the processor, or the process died. Raises SystemExit if processes
        die without a mutant, too.
        """
        hunted, said, claim = ended.key, ended.answer or ended.died_of, ended.key.claim
        self._over += 1
        stage, tests = hunted.stages.pop(0)
        if claim:
            test = claim.by if claim.by in tests else hunted.verdict(stage, said, tests=tests).by
            if said and test not in tests:
                self._break(hunted, f"without {claim.name}, too, {stage}: {said}")
                return None
            slow = claim.how == HOW[1] and test in tests and ended.seconds > self._limit(test) / 2  # alone it needs as much
            (self._unfit if said or slow else self._fit).add(test)
            hunted.claim = None
            hunted.stages.insert(0, (stage, tests))
            return None if said or slow else claim
        hunted.seconds[stage] = hunted.seconds.get(stage, 0.0) + ended.seconds
        if said == UNCHANGED:
            hunted.forks, later = False, [t for name, some in hunted.stages if name == TESTS for t in some]
            hunted.stages = [(TESTS, tests + later), *(other for other in hunted.stages if other[0] != TESTS)]
        elif said:
            verdict: Verdict = hunted.verdict(stage, said, bool(ended.died_of), tests)
            tried = verdict.by in self._fit and ended.starved_s < STARVED_S and verdict.how != HOW[1]
            if not ended.died_of and (verdict.by not in tests or tried):
                return verdict
            hunted.claim = verdict
            hunted.stages.insert(0, (stage, tests))
        return None

    def _limit(self, test: str) -> float:
        """Seconds of the processor that a test may take."""
        return TEST_START_S + HANGS * self._reach.seconds[test]

    def _break(self, hunted: Hunted, said: str) -> None:
        print(said, flush=True)
        hunted.broken, self._broken = True, self._broken + 1
        if self._broken > BROKEN + BROKEN_SHARE * self._over:
            raise SystemExit(said)

    def _plan(self, hunted: Hunted) -> None:
        """Plan the stages: a stage that kills neighbours; quick tests, and tests that kill neighbours; then the rest,
        quickest first."""
        stages, tests, at_import = self._reach.of(hunted.mutant)
        likely = self._killers.likely(hunted.mutant.name)
        seconds, files = self._reach.seconds, defaultdict[str, float](float)
        for test in tests:
            files[file_of(test)] += seconds[test]
        known = list(dict.fromkeys(test for test in likely if test in tests))
        others = sorted(set(tests) - set(known), key=lambda t: (files[file_of(t)], file_of(t), seconds[t], t))
        first, left = list(known), FIRST_S
        for test in others:
            if (left := left - seconds[test]) >= 0:
                first.append(test)
        hunted.forks = not at_import
        first = first if hunted.forks else known + others  # each start of another process takes as long as many tests
        later = [test for test in others if test not in set(first)]
        costs = {"simulator": 0.0, "state machine": MACHINE_S, TESTS: sum(seconds[test] for test in later)}
        behind: list[Stage] = [*((stage, []) for stage in stages), *([(TESTS, later)] if later else [])]
        hunted.stages = [(TESTS, first)] if first else []
        hunted.stages += sorted(behind, key=lambda stage: costs[stage[0]])
        if likely and likely[0] in stages:
            hunted.stages.sort(key=lambda stage: stage[0] != likely[0])

    def _begin(self, hunted: Hunted) -> bool:
        """The next stage, if there is one."""
        if not hunted.stages:
            return False
        mutant, (stage, tests) = hunted.mutant, hunted.stages[0]
        change = Change(mutant.module, mutant.path, mutant.source)
        tests = [test for test in tests if test not in self._unfit]
        if hunted.claim:
            tests = [hunted.claim.by] if hunted.claim.by in tests else tests
            change = change._replace(source=mutant.path.read_text())
        if stage != TESTS:
            self._processes.start(hunted, HANGS * STAGE_S, HERE, STAGES[stage], change, self._seed)
            return True
        seconds = {test: self._limit(test) for test in tests}
        most = START_S + 2 * TEST_START_S + HANGS * sum(self._reach.seconds[test] for test in tests)
        if hunted.forks:
            self._processes.start(hunted, most, next(self._collected), run_collected, seconds, change, mutant.function)
        else:
            self._processes.start(hunted, most, FRESH, run_tests, seconds, change, self._seed, self._folder)
        return True
