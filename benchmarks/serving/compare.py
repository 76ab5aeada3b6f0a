"""Serving under load: latency, throughput, goodput and energy of one or several servers, each offered the same requests in turn.

    python -m benchmarks.serving.compare --model llama-3-8b --system blinkpy --system vllm --streams 1 8 64 256 --rate 4 16

Closed loops (--streams) keep so many requests in flight; open loops (--rate) send at times of their own, whether or not the
server keeps up. --idle-s also measures power without load: a loop on the GPU that polls has a price there. What the figures mean:
benchmarks/serving/load_figures.py and docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.common.harness import Run, main, parser
from benchmarks.serving.cell import Bench, Load, add_options, bench, table
from benchmarks.serving.systems import ServerError

METHOD = """Each system is started on the same cores, warmed up, offered the same loads in the same order, and ended. Lengths
and arrival times follow from the seed and are the same for all; the prompts' token ids are random and new each time. All
answers are asked for with ignore_eos and must bring exactly the tokens that were asked for. The client runs in several
processes and measures its own lag; a load in which it fell behind is marked invalid. TTFT counts from when a request was due
(open loop) or sent (closed loop) to its first text; TPOT is one figure for each request, from first to last text over its
tokens but one; ITL is between two events of a stream. Latencies are those of the requests that were answered completely; the
others are counted under errors. Throughput, goodput and energy are taken over window_s from the start: the time of the
arrivals, or until the first stream had nothing more to ask. Energy is the GPU's own counter, idle power included. Intervals:
95%, block bootstrap."""


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.streams, options.rate, options.seconds, options.rounds = [4], [8.0], 2.0, 1
        options.closed_data = options.open_data = "fixed:16:8"
    run = Run("serving.compare", options)
    with bench(options, run.progress) as means:
        before = means.meter.watts(options.idle_s) if options.idle_s else None
        results = compare(means, loads(options), run.keep, options.idle_s)
        results["idle_w"] = before
    run.write(METHOD, results)
    print(table((name, cell) for name, found in results["systems"].items() for cell in found["cells"]))
    end(found.get("error", "") for found in results["systems"].values())


def loads(options: argparse.Namespace) -> list[Load]:
    """The loads of the options: closed loops first."""
    common: dict[str, Any] = {"seed": options.seed, "drain_s": options.drain_s, "text": options.text}
    closed = [Load(options.closed_data, streams=n, rounds=options.rounds, **common) for n in options.streams]
    common |= {"seconds": options.seconds, "kinds": tuple(options.kinds)}
    open_ = [Load(options.open_data, rate, per_core=n, **common) for n in options.per_core for rate in options.rate]
    return closed + open_


def compare(means: Bench, loads: list[Load], keep: Callable[[dict[str, Any]], None], idle_s: float = 0.0) -> dict[str, Any]:
    """All loads for each system. A system that fails is a result too: its error is kept, and the others go on.

    keep: gets the results so far after each load; idle_s: seconds in which the power of the idle server is measured.
    """
    results: dict[str, Any] = {**means.facts(), "systems": {}}
    for system in means.systems:
        cells: list[dict[str, Any]] = []
        found: dict[str, Any] = {"starts": [], "cells": cells}
        results["systems"][system.name] = found
        try:
            with means.server(system) as server:
                found["starts"].append(server.facts)
                if idle_s:
                    server.facts["idle_w"] = means.meter.watts(idle_s)
                for load in loads:
                    cells.append(means.measure(server, load))
                    keep(results)
        except ServerError as error:
            found["error"] = str(error)
            print(f"error: {error}", file=sys.stderr)
    return results


def end(errors: Iterable[str]) -> None:
    """Leave with exit code 1 if a system failed; the results of the others are written."""
    if any(errors):
        sys.exit(1)


def options() -> argparse.Namespace:
    result = parser("serving.compare", "Latency, throughput, goodput and energy of servers under load.")
    add_options(result)
    result.add_argument("--streams", type=int, nargs="*", default=[], help="closed loops with so many requests in flight")
    result.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    result.add_argument("--closed-data", default="fixed:128:256", metavar="DATA", help="lengths of the closed loops")
    result.add_argument("--rate", type=float, nargs="*", default=[], help="open loops with so many requests a second")
    help_text = "the open loops are repeated beside so many neighbours on each of the server's cores"
    result.add_argument("--per-core", type=int, nargs="+", default=[0], help=help_text)
    result.add_argument("--seconds", type=float, default=60.0, help="of arrivals, of an open loop")
    result.add_argument("--drain-s", type=float, default=60.0, help="after which what hasn't ended is given up")
    result.add_argument("--open-data", default="azure", metavar="DATA", help="fixed:IN:OUT, azure, azure:FILE")
    help_text = "for which the power of the idle GPU, and with the server idle, is measured"
    result.add_argument("--idle-s", type=float, default=0.0, help=help_text)
    result.add_argument("--text", action="store_true", help="prompts are texts, which the server has to tokenize")
    result.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    found = result.parse_args()
    if not found.smoke and not found.streams and not found.rate:
        result.error("nothing to offer: give --streams, --rate or both")
    return found


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
