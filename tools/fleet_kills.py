"""`make fleet-kills`: one of two engines is killed or stopped under streams, again and again.

Two engines of the CPU (float32, batch-invariant), a front end, and streams of all kinds: log probabilities, stop strings, several
choices and prompts, penalties, biases, echoes, grammars. Each set of streams is first played undisturbed; then a random engine
gets a signal after a random number of the streams' events, and each client must get exactly the text, the log probabilities and
the ends of the undisturbed run (tests/support/fleet_kills.py). The engine is started again, and the next one is killed. At the
end no process, segment, slot or stray completion may be left. A pause is the longest silence of any stream, less the time until
the front end must notice (0.1 s for a process that is gone, --engine-timeout-ms for one that is stopped), and less the longest
silence of the undisturbed run, which the model's own work makes.

--processes plays several such fleets beside each other, each on cores of its own where there are enough. --gpus 0 1 puts the two
engines on GPUs; a stopped process leaves its loop there running, so kills alone make sense.
"""

import argparse
import itertools
import os
import random
import secrets
import signal
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from support.fleet_kills import Kill, survive

from benchmarks.common.harness import Flag, Run, main, parser

NOTICED_S = {"SIGKILL": 0.1, "SIGSTOP": 1.0, "SIGTERM": 0.1}  # as of docs/fleet.md; --engine-timeout-ms is 1000 there
STOPS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
CORES = 2  # of a fleet, at least, where it has its own


def play(number: int, cores: set[int], options: argparse.Namespace, kills: int) -> tuple[list[Kill], int]:
    """The kills of one fleet, in a process of its own."""
    os.sched_setaffinity(0, cores)
    signals = STOPS if options.stops else STOPS[:1]

    def tell(kill: int, moves: int) -> None:
        print(f"fleet {number}: {kill + 1} of {kills}, {moves} requests moved", flush=True)

    draw, deadline = random.Random(options.seed * 1000 + number), time.monotonic() + (options.seconds or float("inf"))
    chosen = kills, options.streams, options.tokens, signals
    return survive(draw, *chosen, repeats=options.repeats, on_kill=tell, deadline=deadline, gpus=options.gpus)


def shares(processes: int) -> list[set[int]]:
    """Cores of each fleet: its own, or all where there are too few."""
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // processes
    if each < CORES:
        return [set(usable)] * processes
    return [set(usable[i * each : (i + 1) * each]) for i in range(processes)]


def pauses(kills: list[Kill]) -> dict[str, Any]:
    """By signal: how many, and the pauses beyond detection and beyond the undisturbed run, s."""
    found: dict[str, Any] = {}
    for how in sorted({kill.how for kill in kills}):
        beyond = [kill.silence_s - kill.calm_s - NOTICED_S[how] for kill in kills if kill.how == how]
        silences = [kill.silence_s for kill in kills if kill.how == how]
        found[how] = {
            "count": len(beyond),
            "pause_beyond_detection_s": {"median": round(statistics.median(beyond), 3), "max": round(max(beyond), 3)},
            "longest_silence_s": {"median": round(statistics.median(silences), 3), "max": round(max(silences), 3)},
        }
    return found


def kill_all(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    print(f"--seed {options.seed}", flush=True)
    counts = Counter(itertools.islice(itertools.cycle(range(options.processes)), options.kills))
    kills, moves = list[Kill](), 0
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        fleets = [
            pool.submit(play, number, cores, options, counts[number])
            for number, cores in enumerate(shares(options.processes))
            if counts[number]
        ]
        for fleet in as_completed(fleets):
            its, moved = fleet.result()
            kills, moves = kills + its, moves + moved
    found = pauses(kills)
    worst = max(one["pause_beyond_detection_s"]["max"] for one in found.values())
    run.target("kills with every answer right", len(kills), 200, "", at_most=False)
    run.target("streams at a time", options.streams, 64, "", at_most=False)
    run.target("longest pause beyond detection", worst, 1.0, "s")
    run.write(__doc__, {"kills": len(kills), "streams": options.streams, "moved": moves, "wrong_answers": 0, "signals": found})


if __name__ == "__main__":
    arguments = parser(
        "tools.fleet_kills",
        "An engine of two is killed under streams.",
        kills=Flag(200, "of all fleets together"),
        streams=Flag(64, "of a fleet at a time"),
        tokens=Flag(60, "of a stream"),
        repeats=Flag(4, "kills for each drawn set of streams"),
        processes=Flag(1, "fleets beside each other"),
        seconds=Flag(0.0, "after which no kill begins; 0: no limit"),
        seed=Flag(0, "of all; 0: a random one"),
    )
    arguments.add_argument("--gpus", nargs=2, default=(), help="of the two engines, by their numbers")
    arguments.add_argument("--stops", action="store_true", help="SIGSTOP and SIGTERM, too, not SIGKILL alone")
    sys.exit(main(lambda options: kill_all(Run("tools.fleet_kills", options)), arguments.parse_args()))
