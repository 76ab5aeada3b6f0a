"""`make fleet-kills`: repeatedly kill or stop one of two engines under streams.

Streams have random prompts, penalties, biases, echoes and grammars. Each set of streams first runs
undisturbed. Then a random engine gets a signal after a random number of the streams' events. Each client
must get exactly the text, the log probabilities and the ends of the undisturbed run
(tests/support/fleet_kills.py). The engine is restarted, and the next one is killed. At the end, no
process, segment, slot or stray completion may be left.

A pause is the longest gap of any stream, minus two times. These are the time until the front end must notice (0.1 s for a dead
process, --engine-timeout-ms for a stopped one), and the longest gap of the undisturbed run.

--processes runs several such fleets concurrently, each on its own cores if there are enough. --gpus 0 1
runs the two engines on GPUs. There only kills are useful, because the loop of a stopped process
continues.
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
CORES = 2  # minimum of a fleet with its own cores


def play(number: int, cores: set[int], options: argparse.Namespace, kills: int) -> tuple[list[Kill], int]:
    """The kills of one fleet, in a separate process."""
    os.sched_setaffinity(0, cores)
    signals = STOPS if options.stops else STOPS[:1]

    def report(kill: int, moves: int) -> None:
        print(f"fleet {number}: {kill + 1} of {kills}, {moves} requests moved", flush=True)

    draw, deadline = random.Random(options.seed * 1000 + number), time.monotonic() + (options.seconds or float("inf"))
    chosen = kills, options.streams, options.tokens, signals
    return survive(draw, *chosen, repeats=options.repeats, on_kill=report, deadline=deadline, gpus=options.gpus)


def shares(processes: int) -> list[set[int]]:
    """Cores of each fleet: its own, or all cores if there are too few."""
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // processes
    if each < CORES:
        return [set(usable)] * processes
    return [set(usable[i * each : (i + 1) * each]) for i in range(processes)]


def pauses(kills: list[Kill]) -> dict[str, Any]:
    """By signal: the number of kills, and the pauses in s beyond detection and beyond the undisturbed run."""
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
