"""One trial: a quiet period and an attack on the same server, and the limits for its figures."""

import contextlib
import http.client
import math
import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

from attack.site import SLOTS, Site
from attack.victim import ANSWER, CLOSED, HEALTH, LATE, PATIENCE_S, STREAMS, Diary, victim
from benchmarks.common.harness import check
from benchmarks.serving.attack_clients import attacker
from benchmarks.serving.attack_grammar import NEIGHBOUR, STRANGER, Attack
from benchmarks.serving.attack_kinds import KINDS

MOST_TIMES, STRANGER_TIMES = 3.0, 2.0  # the P99 gap to the quiet one
LEAST_GAP_S = 0.06  # a P99 below three steps is not a finding
MARGIN = 64  # slots of the victim and of prompts that take several
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
BURST_GAP_S, LONGEST_GAP_S = 0.1, 1.0  # the longest gap: with clients that connect only once, and with other clients
ASKED_S = 1.0  # P99 of a new request, and of /health
REFUSED = 0.02  # share of the victim's requests that may be refused
LEAD_S, TRAIL_S, LOOK_S = 1.0, 1.0, 0.1
READY_S, END_S = 120.0, 150.0  # a busy machine takes long to answer the last requests
LINES, LINE = 30, 500  # of the log, and characters of each
TIMED = {"gap", "longest gap", "answer", "health", "refused", "late"}  # findings that a busy machine may cause, too


@dataclass(frozen=True)
class Plan:
    """The attacks of a trial, and the seconds of its two parts. seed: seed of the attackers' values."""

    attacks: tuple[Attack, ...]
    seed: str
    quiet_s: float = 3.0
    attack_s: float = 5.0

    def __str__(self) -> str:
        return "; beside ".join(map(str, self.attacks))


@dataclass
class Trial:
    """The outcome. broken: a sentence for each violated limit."""

    figures: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # the server's last lines


class Actors:
    """Processes that live for many trials: a victim, and attackers. They wait for orders."""

    def __init__(self, attackers: int = 2):
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for target in (victim, *[attacker] * attackers):
            here, there = spawn.Pipe()
            process = spawn.Process(target=target, args=(there,), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    @property
    def victim(self) -> Pipe:
        return self._pipes[0]

    def attackers(self, count: int) -> list[Pipe]:
        return self._pipes[1 : 1 + count]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def take(pipe: Pipe, limit_s: float, what: str) -> Any:
    check(pipe.poll(limit_s), f"{what} does not answer within {limit_s:.0f} s")
    return pipe.recv()


def run_trial(site: Site, actors: Actors, plan: Plan) -> Trial:
    """Run the quiet period, the attack, and the end. Raises WrongAnswer if the victim or an attacker
    fails.
    """
    attackers = actors.attackers(len(plan.attacks))
    for number, (pipe, attack) in enumerate(zip(attackers, plan.attacks, strict=True)):
        pipe.send((attack.as_json(), site.goal, f"{plan.seed}:{number}"))
    for pipe in attackers:
        check(take(pipe, READY_S, "an attacker") == "ready", "an attacker is not ready")
    losses, memory = site.losses(), site.memory()
    quiet = time.monotonic() + LEAD_S
    begin = quiet + plan.quiet_s
    end = begin + plan.attack_s + TRAIL_S
    actors.victim.send((site.goal, end))
    for pipe in attackers:
        pipe.send((begin, begin + plan.attack_s))
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        memory.look()
    seen = [take(pipe, END_S, "an attacker") for pipe in attackers]
    diary: Diary = take(actors.victim, END_S, "the victim")
    trial = Trial()
    trial.figures = figures_of(diary, (quiet, begin), (begin, end)) | memory.figures() | {"seen": seen}
    judge(trial, plan, site, diary, memory.peak)
    lost = "it does not answer"
    with contextlib.suppress(OSError, http.client.HTTPException):
        lost = str(site.losses() - losses)
    trial.figures["leases_lost"] = lost
    if lost != "0":
        trial.broken["lease"] = f"lost {lost}"
    if not site.alive():
        trial.broken["worker"] = "it ended"
    trial.log = [line.rstrip()[:LINE] for line in site.command.said[-LINES:]]
    return trial


def p99(values: list[float]) -> float:
    """The 99th percentile by rank; the maximum of up to 100 values."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0


def figures_of(diary: Diary, quiet: tuple[float, float], attacked: tuple[float, float]) -> dict[str, Any]:
    """Figures of both periods: gaps that overlap them, and requests that ended in them."""
    figures: dict[str, Any] = {}
    for name, (begin, end) in (("quiet", quiet), ("attacked", attacked)):
        gaps = [seconds for when, seconds in diary.gaps if when >= begin and when - seconds < end]
        own = {"gap_p99_ms": 1000 * p99(gaps), "gap_longest_ms": 1000 * max(gaps, default=0.0), "gaps": len(gaps)}
        for kind in (ANSWER, HEALTH):
            asked = [one for one in diary.asked[kind] if one[0] >= begin and one[0] - one[1] < end]
            own[f"{kind}_p99_ms"] = 1000 * p99([seconds for _, seconds, _ in asked])
            own[f"{kind}s"] = len(asked)
            own[f"{kind}s_refused"] = sum(status != 200 for _, _, status in asked)
            own[f"{kind}s_lost"] = sum(status == CLOSED for _, _, status in asked)
            own[f"{kind}s_late"] = sum(status == LATE for _, _, status in asked)
        figures[name] = {key: round(value, 1) for key, value in own.items()}
    return figures


def slots_of(attack: Attack) -> int:
    """Maximum number of the engine's slots that an attack uses."""
    kind = KINDS[attack.work]
    if kind.method != "POST" or not kind.needs_key or not kind.body or kind.path not in GENERATING:
        return 0
    prompts = kind.body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], str) else 1
    grows = attack.size if kind.grows == "n" or (kind.grows == "prompt" and isinstance(prompts, list)) else 1
    return attack.connections * count * int(kind.body.get("n", 1)) * grows


def waits_for_itself(plan: Plan, site: Site) -> bool:
    """Whether requests of the victim's own tenant may take all slots, so that its new requests wait for its
    earlier ones.
    """
    own = [attack for attack in plan.attacks if attack.who == NEIGHBOUR or not site.kind.tenants]
    return sum(map(slots_of, own)) > SLOTS - MARGIN


def judge(trial: Trial, plan: Plan, site: Site, diary: Diary, peak_mib: float) -> None:
    """Enter each violated limit."""
    quiet, attacked = trial.figures["quiet"], trial.figures["attacked"]
    keyless = all(attack.who == STRANGER for attack in plan.attacks)
    times = STRANGER_TIMES if keyless else MOST_TIMES
    gap, usual = attacked["gap_p99_ms"], quiet["gap_p99_ms"]
    broken = trial.broken
    if gap > times * usual and gap > 1000 * LEAST_GAP_S:
        broken["gap"] = f"P99 {usual:.0f} -> {gap:.0f} ms, longest {attacked['gap_longest_ms']:.0f}"
    longest, before = attacked["gap_longest_ms"], quiet["gap_longest_ms"]
    burst = all(attack.rounds == 1 for attack in plan.attacks)  # too short for a P99
    if longest > 1000 * (BURST_GAP_S if burst else LONGEST_GAP_S) and longest > times * before:
        broken["longest gap"] = f"{before:.0f} -> {longest:.0f} ms"
    own = waits_for_itself(plan, site)
    if not own and attacked["answer_p99_ms"] > 1000 * ASKED_S:
        broken["answer"] = f"P99 of a new request {quiet['answer_p99_ms']:.0f} -> {attacked['answer_p99_ms']:.0f} ms"
    if not own and attacked["answers_refused"] > max(1, REFUSED * attacked["answers"]):
        broken["refused"] = f"{attacked['answers_refused']} of {attacked['answers']} new requests"
    if attacked["health_p99_ms"] > 1000 * ASKED_S:
        broken["health"] = f"P99 of /health {attacked['health_p99_ms']:.0f} ms"
    if lost := attacked["answers_lost"] + attacked["healths_lost"]:
        broken["unanswered"] = f"{lost} of the victim's requests got no answer"
    if late := attacked["answers_late"] + attacked["healths_late"]:
        broken["late"] = f"{late} of the victim's requests got no answer within {PATIENCE_S:.0f} s"
    if diary.broken:
        broken["streams"] = f"{len(diary.broken)} of {STREAMS}: {diary.broken[0][:200]}"
    if peak_mib > site.most_mib:
        broken["memory"] = f"{peak_mib:.0f} MiB, above {site.most_mib:.0f}"
