"""Looking for mutants: the stages and the tests that reach the line, likely killers first, each in a process of its own."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from mutants.mutations import Mutant
from mutants.processes import Processes
from mutants.reach import Reach
from mutants.results import Verdict
from mutants.session import Change, run_tests
from mutants.stages import STAGE_S, STAGES

START_S = 20.0  # of the processor, at most, for pytest to begin
HANGS = 8  # a multiple of a stage's usual time: one that takes longer met an endless loop


@dataclass(eq=False)
class Hunted:
    """A mutant, who is still to look for it, and what the others took."""

    mutant: Mutant
    group: str
    stages: list[str] = field(default_factory=list)
    tests: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def verdict(self, by: str, said: str) -> Verdict:
        mutant = self.mutant
        return Verdict(mutant.name, self.group, mutant.line, mutant.rule, by, said[:200], self.seconds)


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
                hunted.stages += ["tests"] if hunted.tests else []
                if not self._begin(hunted):
                    yield hunted.verdict("", "")
            for ended in self._processes.ended():
                hunted, said = ended.key, ended.answer or ended.died_of
                stage = hunted.stages.pop(0)
                hunted.seconds[stage] = round(ended.seconds, 2)
                if said or not self._begin(hunted):
                    yield hunted.verdict(stage if said else "", said)

    def _begin(self, hunted: Hunted) -> bool:
        """The next stage, if there is one."""
        if not hunted.stages:
            return False
        mutant, stage = hunted.mutant, hunted.stages[0]
        change = Change(mutant.module, mutant.path, mutant.source)
        if stage == "tests":
            most = START_S + HANGS * sum(self._reach.seconds[test] for test in hunted.tests)
            self._processes.start(hunted, most, True, run_tests, hunted.tests, change, self._seed, self._folder)
        else:
            self._processes.start(hunted, HANGS * STAGE_S, False, STAGES[stage], change, self._seed)
        return True
