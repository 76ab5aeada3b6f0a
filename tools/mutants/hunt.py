"""Looking for mutants: the stages and the tests that reach the line, likely killers first, each in a process of its own."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.endless_calls import EndlessCallError

from mutants.mutations import Mutant
from mutants.processes import Processes
from mutants.reach import Reach
from mutants.results import HOW, Verdict
from mutants.session import Change, run_tests
from mutants.stages import MACHINE_S, STAGE_S, STAGES

START_S = 20.0  # of the processor, at most, for pytest to begin
TEST_START_S = 15.0  # of it, for a test, beside a multiple of its usual time: for fixtures that another one had before
HANGS = 8  # a multiple of the usual time of a stage or a test: one that takes longer met an endless loop


@dataclass(eq=False)
class Hunted:
    """A mutant, who is still to look for it, and what the others took."""

    mutant: Mutant
    group: str
    stages: list[str] = field(default_factory=list)
    tests: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def verdict(self, by: str = "", said: str = "", died: bool = False) -> Verdict:
        """by: the stage that noticed it, "" for none. said: what it said, or what its process died of."""
        mutant, how = self.mutant, HOW[2 if died else 1 if EndlessCallError.__name__ in said else 0]
        return Verdict(mutant.name, self.group, mutant.line, mutant.rule, by, said[:200], self.seconds, how if by else "")


class Hunt:
    """Hunts mutants, as many at a time as `processes` has room for. folder: for what the tests write."""

    def __init__(self, processes: Processes, reach: Reach, seed: int, folder: str) -> None:
        self._processes, self._reach, self._seed, self._folder = processes, reach, seed, folder

    def verdicts(self, mutants: list[Hunted], until: float) -> Iterator[Verdict]:
        """What became of each, as it comes. until: time.monotonic() after which none begins."""
        waiting = mutants[::-1]
        while waiting or self._processes:
            if time.monotonic() > until:
                waiting.clear()
            while waiting and self._processes.has_room:
                hunted = waiting.pop()
                hunted.stages, hunted.tests = self._reach.of(hunted.mutant)
                tests_s = sum(self._reach.seconds[test] for test in hunted.tests)
                costs = {"simulator": 0.0, "state machine": MACHINE_S, "tests": tests_s}
                hunted.stages = sorted([*hunted.stages, *["tests"] * bool(hunted.tests)], key=costs.__getitem__)
                if not self._begin(hunted):
                    yield hunted.verdict()
            for ended in self._processes.ended():
                hunted, said = ended.key, ended.answer or ended.died_of
                stage = hunted.stages.pop(0)
                hunted.seconds[stage] = round(ended.seconds, 2)
                if said:
                    yield hunted.verdict(stage, said, bool(ended.died_of))
                elif not self._begin(hunted):
                    yield hunted.verdict()

    def _begin(self, hunted: Hunted) -> bool:
        """The next stage, if there is one."""
        if not hunted.stages:
            return False
        mutant, stage = hunted.mutant, hunted.stages[0]
        change = Change(mutant.module, mutant.path, mutant.source)
        if stage == "tests":
            seconds = {test: TEST_START_S + HANGS * self._reach.seconds[test] for test in hunted.tests}
            most = START_S + 2 * TEST_START_S + HANGS * sum(self._reach.seconds[test] for test in hunted.tests)
            self._processes.start(hunted, most, True, run_tests, seconds, change, self._seed, self._folder)
        else:
            self._processes.start(hunted, HANGS * STAGE_S, False, STAGES[stage], change, self._seed)
        return True
