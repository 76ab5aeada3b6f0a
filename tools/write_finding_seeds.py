"""Rewrites tests/support/finding_seeds.py: for each bug that the first seed doesn't find soon, the seed that finds it within the
fewest turns. A seed that still finds its bug soon stays.

A seed makes another world when the simulator's draws change; a hunt that begins with an old seed takes longer.

    PYTHONPATH=.:tests python tools/write_finding_seeds.py --processes 2
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from support.endless_calls import EndlessCallError, endless_calls_end
from support.finding_seeds import FINDING_SEEDS
from support.hunts import CALL_S, UNDER_TEST, SimulatorHunt
from support.seeded_bugs import SCHEDULER_BUGS, Bug

FILE = Path(__file__).parents[1] / "tests" / "support" / "finding_seeds.py"
BEGIN = "FINDING_SEEDS: dict[str, int] = {bug: seed for seed, bugs in {\n"
SOON = 300  # turns: a bug found within these needs no other seed
FEW = 150  # turns within which a new seed is good enough
SEEDS, MOST_SEEDS = 30, 400  # seeds to try, after the first finding and before it


def finding_seed(bug: Bug) -> int:
    """The seed to begin with, or 0: the first seed is good enough, or no seed finds the bug."""
    found, worlds, before = list[tuple[int, int]](), SimulatorHunt(bug), FINDING_SEEDS.get(bug.what, 0)
    try:
        with endless_calls_end(CALL_S, UNDER_TEST):
            if before and (outcome := worlds.world(seed := before)).failure and outcome.calls <= SOON:
                return before
            for seed in range(1, MOST_SEEDS + 1):
                outcome = worlds.world(seed)
                if outcome.failure:
                    if seed == 1 and outcome.calls <= SOON:
                        return 0
                    found.append((outcome.calls, seed))
                if found and (min(found)[0] <= FEW or seed >= SEEDS):
                    break
    except EndlessCallError:
        return seed
    return min(found)[1] if found else 0


def written(seeds: dict[str, int]) -> str:
    """The lines of a table: seeds, each with its bugs."""
    groups = ((seed, [what for what, own in seeds.items() if own == seed]) for seed in sorted(set(seeds.values()) - {0}))
    lines = (f"    {seed}: (\n" + "".join(f'        "{what}",\n' for what in bugs) + "    ),\n" for seed, bugs in groups)
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    bugs = SCHEDULER_BUGS
    with ProcessPoolExecutor(parser.parse_args().processes, multiprocessing.get_context("fork")) as pool:
        seeds = dict(zip((bug.what for bug in bugs), pool.map(finding_seed, bugs), strict=True))
    head = FILE.read_text().partition(BEGIN)[0]
    FILE.write_text(f"{head}{BEGIN}{written(seeds)}}}.items() for bug in bugs}}\n")
    print(f"{sum(seed > 0 for seed in seeds.values())} of {len(seeds)} bugs have a seed to begin with")


if __name__ == "__main__":
    main()
