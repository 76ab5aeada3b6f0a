"""The evaluation's measured cells as tables: for each card and table, the loads of all systems side by side; and the README's
claim, the effect of neighbours on each system.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.report.words import word
from benchmarks.serving.load_figures import MODES

Cell = dict[str, Any]
Cells = dict[tuple[str, str], list[Cell]]
CLAIM_MODEL, CLAIM_CARD, CLAIM_RATE = "llama-3-8b", "nvidia-h200", 24.0
CLAIMED = {  # the systems of the claim, in its order
    "blinkpy": "blinkpy, bfloat16",
    "vllm": "vLLM {version}, bfloat16",
    "vllm-reserved": "vLLM {version}, bfloat16, reserved cores",
    "vllm-realtime": "vLLM {version}, bfloat16, reserved cores, real-time priority",
    "blinkpy-fp8": "blinkpy, FP8",
    "vllm-fp8": "vLLM {version}, FP8",
}
LATENCIES = ("ttft_ms", "tpot_ms")
HEAD = ("load", "system", "P99 TTFT ms", "P99 TPOT ms", "output tokens/s", "J per token", "neighbours", "measured")


def read_cells(folder: Path) -> Cells:
    """All cells of a folder, by (card, table)."""
    found: Cells = {}
    for path in sorted(folder.glob("*/*/*.json")):
        found.setdefault((path.parents[1].name, path.parent.name), []).append(json.loads(path.read_text()))
    return found


def evaluation(cells: Cells) -> dict[str, Any]:
    """The values of templates/evaluation.md.j2. cells: by (card, table)."""
    return {"head": HEAD, "parts": [_part(card, name, found) for (card, name), found in cells.items()]}


def claim(cells: Cells) -> dict[str, Any]:
    """The values of templates/claim.md.j2: each system's figures without and with neighbours. cells: by (card, table)."""
    rows, shown = [], []
    for _, name, pair in pairs(cells, CLAIM_RATE):
        latencies = [_effect([cell[kind]["p99"]["value"] for cell in pair]) for kind in LATENCIES]
        lost = " → ".join(f"{sum(cell['errors'].values()):,} of {cell['requests']:,}" for cell in pair)
        rows.append([name, *latencies, _effect([cell["output_tokens_per_s"] for cell in pair]), lost])
        shown += pair
    commits = sorted({str(cell["commit"].get("hash", ""))[:7] for cell in shown if _is_own(cell)})
    neighbours = {cell["load"]["per_core"] for cell in shown if cell["neighbours"]}
    if len(neighbours) > 1:
        raise ValueError(f"the systems had different numbers of neighbours on a core: {sorted(neighbours)}")
    gpu = next((str(cell["gpu"]["gpu"]) for cell in shown), "")
    return {"rows": rows, "gpu": gpu, "neighbours": max(neighbours, default=0), "rate": CLAIM_RATE, "commits": commits}


def pairs(cells: Cells, rate: float | None = None) -> list[tuple[float, str, list[Cell]]]:
    """(rate, title, cells in the order of MODES) of each system of the claim that has a valid cell for each mode.

    rate: requests/s; None: all rates that have cells of ours and of another system.
    """
    by: dict[tuple[float, str], dict[str, Cell]] = {}
    for (card, _), found in cells.items():
        for cell in found:
            key = cell["cell"]
            if card == CLAIM_CARD and cell["model"] == CLAIM_MODEL and cell["client"]["valid"]:
                modes = by.setdefault((key["rate"], key["system"]), {})
                if key["mode"] not in modes or modes[key["mode"]]["date"] < cell["date"]:
                    modes[key["mode"]] = cell
    whole = {key: [modes[mode] for mode in MODES] for key, modes in by.items() if len(modes) == len(MODES)}
    compared = {at for at, _ in whole if len({_is_own(pair[0]) for (other, _), pair in whole.items() if other == at}) == 2}
    return [
        (at, title.format(version=whole[at, system][0]["server"].get("version", "")), whole[at, system])
        for at in sorted(compared)
        for system, title in CLAIMED.items()
        if (at, system) in whole and rate in (None, at)
    ]


def _effect(values: list[float]) -> str:
    return " → ".join(map(word, values))


def _part(card: str, name: str, found: list[Cell]) -> dict[str, Any]:
    valid = [cell for cell in found if cell["client"]["valid"]]
    commits = sorted({str(cell["commit"].get("hash", ""))[:7] for cell in valid if _is_own(cell)} - {""})
    order = sorted(valid, key=lambda cell: (cell["cell"]["rate"], MODES.index(cell["cell"]["mode"]), cell["cell"]["system"]))
    return {
        "card": card,
        "name": name,
        "commits": commits,
        "rows": [_row(cell) for cell in order],
        "invalid": len(found) - len(valid),
    }


def _is_own(cell: Cell) -> bool:
    return "blinkpy" in cell["server"]["command"]


def _row(cell: Cell) -> list[str]:
    key, joules = cell["cell"], cell["energy"].get("joules_per_token")
    work = ", ".join(f"{done['per_s']:g} {done['unit']}/s" for done in cell["neighbours_work"].values())
    errors = sum(cell["errors"].values())
    return [
        f"{key['rate']:g} requests/s, {key['mode']}",
        key["system"] + (f" ({errors} of {cell['requests']} failed)" if errors else ""),
        *(f"{cell[name]['p99']['value']:g}" if name in cell else "" for name in ("ttft_ms", "tpot_ms")),
        f"{cell['output_tokens_per_s']:g}",
        "" if joules is None else f"{joules:.3g}",
        work,
        f"{cell['date'][:10]}, `{str(cell['commit'].get('hash', ''))[:7]}`",
    ]
