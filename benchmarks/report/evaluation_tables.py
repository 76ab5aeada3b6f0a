"""The evaluation's measured cells as tables: for each card and table, the loads of all systems side by side."""

import json
from pathlib import Path
from typing import Any

from benchmarks.serving.load_figures import MODES

Cells = dict[tuple[str, str], list[dict[str, Any]]]
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


def _part(card: str, name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
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


def _is_own(cell: dict[str, Any]) -> bool:
    return "blinkpy" in cell["server"]["command"]


def _row(cell: dict[str, Any]) -> list[str]:
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
