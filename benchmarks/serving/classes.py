"""Latency-sensitive requests next to best-effort ones that come in bursts of long prompts, with classes and without.

    python -m benchmarks.serving.classes --model llama-3-8b --system blinkpy --system short=blinkpy \\
        --extra "short:--best-effort-step-tokens 512"

Each system is started once, and offered the same requests in several arms: as one class; with the tiers priority and flex; with
a priority number each, for systems that order by it. A cell takes --seconds, and --drain-s at most. Comparisons are with the
first cell of the same rate and share.
"""

import argparse
import datetime
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.distribution import describe, rounded
from benchmarks.common.harness import Run, UsageError, WrongAnswer, main, parser, table
from benchmarks.common.load import UNFINISHED, LoadResult, Request, get
from benchmarks.serving.cell import Bench, Load, add_options, bench
from benchmarks.serving.load_figures import LEVELS, figures, tokens_within, tpot_s, waits_s
from benchmarks.serving.systems import Running, ServerError
from benchmarks.serving.workload import BEST_EFFORT, DATA_SETS, SENSITIVE, Bursts, read_dataset, two_classes

METHOD = """Each system gets the same requests at the same times in each of its arms: as one class, without a service tier; with a
service tier; with a priority number. Of Poisson arrivals with lengths from the data set a share is latency-sensitive, the
others and all requests of the bursts are of best effort. TTFT of the latency-sensitive ones counts prompts up to short_prompt
tokens. Turnaround is from when a request was due to its last text; one that was given up counts until then. Throughput of best
effort: its output tokens within the time of the arrivals. Intervals: 95%, block bootstrap."""
ARMS: dict[str, Callable[[Request], Request]] = {  # the ways in which a server learns the classes
    "one class": lambda request: replace(request, tier=""),
    "priority": lambda request: replace(request, tier="", priority=int(request.tier == BEST_EFFORT)),
    "classes": lambda request: request,
}
USUAL_ARMS = ("one class", "classes")
SHORT_PROMPT = 512  # tokens, of the latency-sensitive requests whose TTFT counts
NO_BURSTS = "none"
SUSPENSIONS = re.compile(rb"^blinkpy_engine_suspensions_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
SMOKE = {"rate": [6.0], "sensitive": [0.5], "seconds": 2.0, "drain_s": 20.0, "data": "fixed:24:12"}
SMOKE |= {"burst": "4:96:8", "burst_every_s": 1.0}


class Mix(NamedTuple):
    """Arrivals without the bursts: requests a second, and the share of them that is latency-sensitive."""

    rate: float
    sensitive: float


def class_figures(requests: Sequence[Request], result: LoadResult, window_s: float) -> dict[str, Any]:
    """The outcome of each class. requests: as offered, with the tiers that they have or would have; window_s: of the
    arrivals."""
    pairs = list(zip(requests, result.records, strict=True))
    parts = {tier: [record for request, record in pairs if request.tier == tier] for tier in (SENSITIVE, BEST_EFFORT)}
    short = [record for request, record in pairs if request.tier == SENSITIVE and len(request.prompt) <= SHORT_PROMPT]
    counted = [record for record in parts[BEST_EFFORT] if record.error in ("", UNFINISHED)]
    turnarounds = [(result.limit_s if record.error else float(record.times[-1])) - record.due for record in counted]
    waits = waits_s(replace(result, records=short))
    tpots = [tpot for record in parts[SENSITIVE] if not record.error and (tpot := tpot_s(record)) is not None]
    samples = {"ttft_ms": waits, "tpot_ms": tpots, "turnaround_ms": turnarounds}
    found: dict[str, Any] = {
        name: describe(1000 * np.array(values), "ms", percentiles=LEVELS, tail=0) for name, values in samples.items() if values
    }
    found["best_effort_tokens_per_s"] = rounded(sum(tokens_within(r, window_s) for r in parts[BEST_EFFORT]) / window_s)
    for tier, records in parts.items():
        errors = Counter(record.error for record in records if record.error)
        found[tier] = {"requests": len(records), "errors": dict(errors.most_common())}
    return found


def compared(cells: list[dict[str, Any]]) -> None:
    """Add to each cell its ratios to the first cell of its mix: throughput and turnaround of best effort, and the
    speed-up of the mean first token."""
    firsts: dict[Mix, dict[str, Any]] = {}
    for cell in cells:
        own, against = cell["classes"], {}
        first = firsts.setdefault(Mix(**cell["mix"]), own)
        if first["best_effort_tokens_per_s"]:
            against["best_effort_throughput"] = rounded(own["best_effort_tokens_per_s"] / first["best_effort_tokens_per_s"])
        if "turnaround_ms" in own and "turnaround_ms" in first:
            against["best_effort_turnaround"] = rounded(own["turnaround_ms"]["mean"] / first["turnaround_ms"]["mean"])
        if "ttft_ms" in own and "ttft_ms" in first:
            against["ttft_better"] = rounded(first["ttft_ms"]["mean"] / own["ttft_ms"]["mean"])
        cell["against_first"] = against


def suspensions(server: Running) -> int | None:
    """Steps that the server has suspended so far; None if it does not count them."""
    status, body = get(server.host, server.port, "/metrics")
    found = SUSPENSIONS.findall(body) if status == 200 else []
    return round(sum(map(float, found))) if found else None


def measure(means: Bench, server: Running, mix: Mix, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell. Raises UsageError for an empty load, and ServerError if the server has ended."""
    data = read_dataset(options.data, means.model.length)
    bursts, vocabulary = bursts_of(options, means), means.model.vocabulary
    requests = two_classes(data, mix.rate, options.seconds, mix.sensitive, bursts, options.seed, vocabulary)
    if {request.tier for request in requests} != {SENSITIVE, BEST_EFFORT}:
        raise UsageError(f"within {options.seconds:g} s no request of one of the classes comes; use more seconds or another seed")
    sent = list(map(ARMS[arm], requests))
    load = Load(options.data, mix.rate, options.seconds, options.drain_s, seed=options.seed)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    before = suspensions(server)
    result = means.offer(server, sent, load, f"{server.system.name}, {arm}, {mix.rate:g}/s, {mix.sensitive:.0%}")
    server.check()
    after = suspensions(server)
    whole = figures(result, options.seconds, means.slo, means.meter)
    cell: dict[str, Any] = {"system": server.system.name, "arm": arm, "mix": mix._asdict(), "date": date, "load": asdict(load)}
    cell |= {"server": server.facts, "suspensions": None if before is None or after is None else after - before}
    return cell | {"whole": whole, "classes": class_figures(requests, result, options.seconds)}


def bursts_of(options: argparse.Namespace, means: Bench) -> Bursts:
    """Raises UsageError if a burst does not match its option."""
    if options.burst == NO_BURSTS:
        return Bursts(0, 1, 1, options.burst_every_s)
    try:
        count, prompt, answer = (int(word) for word in options.burst.split(":"))
    except ValueError as error:
        raise UsageError(f"--burst {options.burst}: it must be REQUESTS:IN:OUT, or {NO_BURSTS}") from error
    if min(count, options.burst_every_s) <= 0 or min(prompt, answer) < 1 or prompt + answer > means.model.length:
        raise UsageError(
            f"--burst {options.burst}: a request has 1 to {means.model.length} tokens, and a burst comes again after a time"
        )
    return Bursts(count, prompt, answer, options.burst_every_s)


def arms_of(options: argparse.Namespace, systems: Sequence[str]) -> dict[str, list[str]]:
    """The arms of each system. Raises UsageError for an unknown system or arm."""
    chosen: dict[str, list[str]] = {name: [] for name in systems}
    for option in options.arm:
        name, _, arm = option.partition(":")
        if name not in chosen or arm not in ARMS:
            raise UsageError(f"--arm {option}: it must be SYSTEM:ARM, one of {', '.join(systems)} and one of {', '.join(ARMS)}")
        chosen[name].append(arm)
    return {name: arms or list(USUAL_ARMS) for name, arms in chosen.items()}


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        vars(options).update(SMOKE)
    if options.chat or options.text:
        raise UsageError("the classes are measured with token ids as prompts, without --chat and --text")
    if not all(0 < share < 1 for share in options.sensitive):
        raise UsageError(f"--sensitive must be above 0 and below 1, not {' '.join(f'{share:g}' for share in options.sensitive)}")
    mixes = list(itertools.starmap(Mix, itertools.product(options.rate, options.sensitive)))
    options.system = options.system or ["blinkpy"]
    run, cells, errors = Run("serving.classes", options), list[dict[str, Any]](), dict[str, str]()
    with bench(options, run.progress) as means:
        bursts_of(options, means)
        arms = arms_of(options, [system.name for system in means.systems])
        for system in means.systems:
            try:
                with means.server(system) as server:
                    cells += [measure(means, server, mix, arm, options) for mix in mixes for arm in arms[system.name]]
            except (ServerError, WrongAnswer, TimeoutError) as error:
                errors[system.name] = str(error)
                print(f"error: {error}", file=sys.stderr)
        if cells:
            compared(cells)
        run.write(METHOD, {**means.facts(), "short_prompt": SHORT_PROMPT, "errors": errors, "cells": cells})
    print(shown(cells))
    if errors:
        sys.exit(1)


def shown(cells: list[dict[str, Any]]) -> str:
    """The figures of each class, for a terminal."""

    def levels(cell: dict[str, Any], name: str) -> str:
        found = cell["classes"].get(name)
        return f"{found['mean']:g} / {found['p50']['value']:g} / {found['p99']['value']:g}" if found else "none"

    rows = []
    for cell in cells:
        own, against = cell["classes"], cell["against_first"]
        ratios = [f"{against.get(name, float('nan')):g}" for name in ("best_effort_throughput", "best_effort_turnaround")]
        turnaround = own.get("turnaround_ms", {}).get("mean", float("nan"))
        lost = sum(sum(own[tier]["errors"].values()) for tier in (SENSITIVE, BEST_EFFORT))
        words = [f"{cell['system']}, {cell['arm']}", f"{cell['mix']['rate']:g}/s, {cell['mix']['sensitive']:.0%}"]
        words += [levels(cell, "ttft_ms"), levels(cell, "tpot_ms")]
        words += [f"{own['best_effort_tokens_per_s']:g} ({ratios[0]})", f"{turnaround:g} ({ratios[1]})", str(lost)]
        rows.append([*words, "kept up" if cell["whole"]["client"]["valid"] else "INVALID"])
    head = ("system", "arrivals", "LS TTFT mean / p50 / p99 ms", "LS TPOT", "BE tok/s (of first)", "BE mean turnaround ms")
    return table((*head, "errors", "client"), rows)


def options() -> argparse.Namespace:
    result = parser("serving.classes", "Latency-sensitive requests beside best-effort ones, with classes and without.")
    add_options(result)
    arms = f"{', '.join(ARMS)}: how a system is told of the classes; several times (default: {' and '.join(USUAL_ARMS)})"
    result.add_argument("--arm", action="append", default=[], metavar="SYSTEM:ARM", help=arms)
    result.add_argument("--rate", type=float, nargs="+", default=[16.0], help="requests a second, without the bursts")
    result.add_argument("--sensitive", type=float, nargs="+", default=[0.2], help="share of these that is latency-sensitive")
    result.add_argument("--data", default="azure", help=f"lengths: {DATA_SETS}")
    burst = f"of best effort, all at once; or {NO_BURSTS}"
    result.add_argument("--burst", default="64:4000:64", metavar="REQUESTS:IN:OUT", help=burst)
    result.add_argument("--burst-every-s", type=float, default=30.0, help="from one burst to the next")
    result.add_argument("--seconds", type=float, default=60.0, help="of arrivals in a cell")
    result.add_argument("--drain-s", type=float, default=60.0, help="after which what hasn't ended is given up")
    result.add_argument("--seed", type=int, default=1, help="of lengths, classes and arrivals")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
