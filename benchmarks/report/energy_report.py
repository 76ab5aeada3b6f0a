"""Why a token costs what it costs: joules for each token as joules for each step over tokens for each step.

No server says how often it stepped. It follows from the answers: while n requests receive tokens, one every t seconds each, the
server makes a step every t seconds, and n tokens in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.report.grid_summary import Document, counts, load_name, placement, systems

OURS, PEER = "blinkpy", "vllm"
Cell = dict[str, Any]


@dataclass(frozen=True)
class Steps:
    """per_s: steps a second over the window; rows: tokens a step; joules: of the GPU for each step, idle power included."""

    per_s: float
    rows: float
    joules: float


def steps_of(cell: Cell) -> Steps | None:
    """The steps within a load's window; None without energy or answers."""
    watts, end_ms = cell["energy"].get("mean_w"), 1000 * cell["window_s"]
    samples = cell["samples"]
    changes = []  # (ms, requests more, tokens/ms more)
    for due, first, last, tpot in zip(*(samples[name] for name in ("due_ms", "ttft_ms", "e2e_ms", "tpot_ms")), strict=True):
        if first >= 0 and tpot > 0:
            changes += [(min(due + first, end_ms), 1, 1 / tpot), (min(due + last, end_ms), -1, -1 / tpot)]
    steps = tokens = rate = at = 0.0
    running = 0
    for when, more, faster in sorted(changes):
        if running:
            steps += (when - at) * rate / running
            tokens += (when - at) * rate
        at, running, rate = when, running + more, rate + faster
    if not watts or not steps:
        return None
    return Steps(steps / cell["window_s"], tokens / steps, watts * cell["window_s"] / steps)


def energy_table(document: Document) -> list[str]:
    """Each isolated load, system by system, in Markdown; for OURS the ratios to PEER. Empty without an energy counter."""
    found: dict[str, dict[str, tuple[Cell, Steps]]] = {}
    for cell in document["cells"]:
        key = cell["cell"]
        plain = key["mode"] == "isolated" and key["front_end"] == placement(document) and not key["repeat"]
        if plain and counts(document, cell) and (steps := steps_of(cell)):
            found.setdefault(load_name(cell), {})[key["system"]] = cell, steps
    lines = []
    for load, by_system in sorted(found.items(), key=lambda item: (item[0].endswith("/s"), float(item[0].split()[0]))):
        for name in systems(document):
            if name in by_system:
                cell, steps = by_system[name]
                energy = cell["energy"]
                words = [load, name, f"{energy['mean_w']:.0f}", str(energy.get("clock_mhz") or "not read"), f"{steps.per_s:.0f}"]
                words += [f"{steps.rows:.3g}", f"{steps.joules:.3g}", f"{steps.joules / steps.rows:.3g}"]
                words.append(shares(steps, by_system[PEER][1]) if name == OURS and PEER in by_system else "")
                lines.append(f"| {' | '.join(words)} |")
    titles = f"load | system | power, W | clock, MHz | steps/s | tokens a step | J a step | J/token | to {PEER}"
    return [f"| {titles} |", "|---" * len(titles.split("|")) + "|", *lines] if lines else []


def shares(ours: Steps, peers: Steps) -> str:
    """The ratio of joules for each token as a product: of joules for each step, and of steps for each token."""
    step, steps = ours.joules / peers.joules, peers.rows / ours.rows
    return f"{step * steps:.2f} = {step:.2f} x {steps:.2f}"
