"""`make attack`: random attacks, two at a time, during a victim's streams and requests, for SECONDS.

A seed and a number make a trial: a server (HTTP or TLS, tenants or no keys) and two attacks of the grammar
(benchmarks/serving/attack_grammar.py) on kinds of work (benchmarks/serving/attack_kinds.py). The victim reads
streams, and requests a token and /health on new connections: first undisturbed, then during the attacks, on the
same server.

A trial that breaks a bar (tools/attack/trial.py) is repeated on a new server. If it breaks a bar again, smaller
attacks are tried. The smallest attack that breaks the bar is kept in build/attack as JSON, for --replay.

The result file lists each trial: its server, attacks, figures, and the bars that it broke.
"""

import json
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from attack.known import KNOWN
from attack.site import SITE_KINDS, Site, SiteKind, make_certificate, site_of
from attack.trial import TIMED, Actors, Plan, Trial, run_trial
from benchmarks.common.harness import Flag, Run, check, run_benchmark
from benchmarks.serving.attack_grammar import Attack

KEPT = Path("build/attack")
MOST_TRIES = 12  # maximum attempts to shrink a finding
TRIALS_A_SITE = 12  # before the next kind of server


class Field:
    """Servers, one at a time, and the processes that act on them."""

    def __init__(self) -> None:
        self._closing, self._site_closing = ExitStack(), ExitStack()
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        self._certificate = make_certificate(folder)
        self.actors = Actors()
        self._closing.callback(self.actors.close)
        self._site: Site | None = None

    def site(self, kind: SiteKind, *, new: bool = False) -> Site:
        """A server of a kind: the running server if it fits, or a new server."""
        if self._site is None or new or self._site.kind != kind or not self._site.alive():
            self.leave()
            self._site = self._site_closing.enter_context(site_of(kind, self._certificate))
        return self._site

    def leave(self) -> None:
        self._site_closing.close()
        self._site = None

    def close(self) -> None:
        self.leave()
        self._closing.close()


def drawn(seed: int, number: int) -> tuple[SiteKind, Plan]:
    """The trial of a number."""
    rng = random.Random(f"{seed}:{number}")
    kind = SITE_KINDS[number // TRIALS_A_SITE % len(SITE_KINDS)]
    return kind, Plan((Attack.drawn(rng), Attack.drawn(rng)), f"{seed}:{number}")


def attempt(field: Field, kind: SiteKind, plan: Plan, *, new: bool = False) -> Trial:
    """A trial on an idle server. A server that does not become idle again is a finding, too."""
    site = field.site(kind, new=new)
    trial = run_trial(site, field.actors, plan)
    if not site.rest():
        trial.broken["rest"] = "requests still run a minute after the attack"
        field.leave()
    return trial


def confirmed(field: Field, kind: SiteKind, plan: Plan) -> Trial | None:
    """A second trial on a fresh server: its outcome if it breaks the bar again."""
    trial = attempt(field, kind, plan, new=True)
    return trial if trial.broken else None


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are one step smaller: one attack instead of two, then smaller attacks."""
    if len(plan.attacks) > 1:
        yield from (replace(plan, attacks=(attack,)) for attack in plan.attacks)
    for at, attack in enumerate(plan.attacks):
        for simpler in attack.simpler():
            yield replace(plan, attacks=(*plan.attacks[:at], simpler, *plan.attacks[at + 1 :]))


def shrunk(field: Field, kind: SiteKind, plan: Plan, trial: Trial) -> tuple[Plan, Trial]:
    """The smallest plan found that breaks one of the same bars."""
    tries = 0
    better = True
    while better and tries < MOST_TRIES:
        better = False
        for candidate in smaller(plan):
            if tries >= MOST_TRIES:
                break
            tries += 1
            found = attempt(field, kind, candidate, new=not field.site(kind).alive())
            if found.broken.keys() & trial.broken.keys():
                plan, trial, better = candidate, found, True
                break
    return plan, trial


def document(kind: SiteKind, plan: Plan, trial: Trial) -> dict[str, Any]:
    """A finding as JSON; --replay reads it."""
    return {
        "site": {"tls": kind.tls, "tenants": kind.tenants},
        "attacks": [attack.as_json() for attack in plan.attacks],
        "seed": plan.seed,
        "quiet_s": plan.quiet_s,
        "attack_s": plan.attack_s,
        "broken": trial.broken,
        "figures": trial.figures,
        "log": trial.log,
    }


def read_document(path: Path) -> tuple[SiteKind, Plan]:
    """The trial of a finding. Raises OSError, ValueError, KeyError or TypeError."""
    found = json.loads(path.read_text())
    attacks = tuple(Attack.of(values) for values in found["attacks"])
    return SiteKind(**found["site"]), Plan(attacks, str(found["seed"]), float(found["quiet_s"]), float(found["attack_s"]))


def keep(kind: SiteKind, plan: Plan, trial: Trial, name: str) -> Path:
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name}.json"
    path.write_text(json.dumps(document(kind, plan, trial), indent=1) + "\n")
    return path


def say(kind: SiteKind, plan: Plan, trial: Trial) -> str:
    gaps = [trial.figures[when]["gap_p99_ms"] for when in ("quiet", "attacked")]
    answers = [trial.figures[when]["answer_p99_ms"] for when in ("quiet", "attacked")]
    words = "; ".join(f"{bar}: {what}" for bar, what in trial.broken.items()) or "holds"
    shown = f"gap {gaps[0]:.0f} -> {gaps[1]:.0f} ms, answer {answers[0]:.0f} -> {answers[1]:.0f} ms"
    return f"{kind}: {plan}: {shown}, {trial.figures['worker_mib']['peak']:.0f} MiB: {words}"


class Record:
    """The trials of a run, for its result file."""

    def __init__(self) -> None:
        self.counts, self._statuses = Counter[str](), Counter[str]()
        self._trials, self._findings = list[dict[str, Any]](), list[dict[str, Any]]()

    def add(self, kind: SiteKind, plan: Plan, trial: Trial, name: int | str) -> None:
        """Count a trial, and list it with its figures and the bars that it broke. name: a known attack's, or a drawn number."""
        print(f"{name}: {say(kind, plan, trial)}", flush=True)
        self.counts["trials"] += 1
        self.counts["broken"] += bool(trial.broken)
        for one in trial.figures["seen"]:
            self.counts["connections"] += one.get("connections", 0)
            self._statuses.update({status: count for status, count in one.items() if status.isdecimal()})
        listed = {"name": name} | document(kind, plan, trial)
        del listed["log"]
        self._trials.append(listed)

    def find(self, kind: SiteKind, plan: Plan, trial: Trial, name: int | str) -> None:
        """Add a finding, with the server's log."""
        self._findings.append({"name": name} | document(kind, plan, trial))

    def results(self) -> dict[str, Any]:
        counts, statuses = dict(self.counts), dict(sorted(self._statuses.items()))
        return {"counts": counts, "statuses": statuses, "trials": self._trials, "findings": self._findings}


def known(field: Field, names: tuple[str, ...]) -> dict[str, Any]:
    """Attacks of tools/attack/known.py; returns the results."""
    unknown = set(names) - {"all", *KNOWN}
    check(not unknown, f"unknown attacks: {', '.join(sorted(unknown))}; known are all, {', '.join(KNOWN)}")
    record = Record()
    for name, (kind, attacks) in KNOWN.items():
        if "all" in names or name in names:
            plan = Plan(attacks, name)
            trial = attempt(field, kind, plan)
            record.add(kind, plan, trial, name)
            if trial.broken:
                record.find(kind, plan, trial, name)
    return record.results()


def replay(field: Field, paths: list[str]) -> int:
    """Trials of findings again; the number that still break the bar."""
    broken = 0
    for path in paths:
        kind, plan = read_document(Path(path))
        trial = attempt(field, kind, plan, new=True)
        print(say(kind, plan, trial), flush=True)
        broken += bool(trial.broken)
    return broken


def hunt(run: Run, field: Field) -> dict[str, Any]:
    """Trials until the time is over; returns the results."""
    options, began, number = run.options, time.monotonic(), run.options.first
    record = Record()
    judged = None if options.timed else TIMED
    while time.monotonic() - began < options.seconds and number < options.first + options.count:
        run.progress("attack", time.monotonic() - began, options.seconds)
        kind, plan = drawn(options.seed, number)
        trial = attempt(field, kind, plan)
        trial.broken = {bar: what for bar, what in trial.broken.items() if judged is None or bar not in judged}
        record.add(kind, plan, trial, number)
        if trial.broken:
            again = confirmed(field, kind, plan)
            if again is None or not again.broken.keys() & trial.broken.keys():
                record.counts["not seen again"] += 1
            else:
                small, last = shrunk(field, kind, plan, again) if options.shrink else (plan, again)
                path = keep(kind, small, last, f"{options.seed}-{number}")
                print(f"FINDING {path}: {say(kind, small, last)}", flush=True)
                record.find(kind, small, last, number)
        number += 1
    return record.results()


def main(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with this process
    field = Field()
    try:
        if options.replay != ("",):
            broken = replay(field, list(options.replay))
            check(not broken, f"{broken} of {len(options.replay)} still break the bar")
            return
        print(f"seed {options.seed}", flush=True)
        if options.known != ("",):
            results = known(field, tuple(options.known))
        else:
            results = hunt(run, field)
    finally:
        field.close()
    run.write(__doc__, results)
    print(results["counts"], file=sys.stderr)
    check(not results["findings"], f"--seed {options.seed}: {len(results['findings'])} findings in {KEPT}")


if __name__ == "__main__":
    run_benchmark(
        "tools.attack",
        "Random attacks beside a victim.",
        main,
        seconds=Flag(3600.0, "how long", 60.0),
        seed=Flag(0, "of all; 0: a random one"),
        first=Flag(0, "number of the first trial"),
        count=Flag(1 << 30, "number of trials, at most"),
        shrink=Flag(1, "0: keep findings as large as they were found"),
        timed=Flag(1, "0: judge no times, for a busy machine", 0),
        known=Flag(("",), "names of attacks that were found once, or all: these instead of drawn ones"),
        replay=Flag(("",), "findings to try again"),
    )
