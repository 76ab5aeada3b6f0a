"""Writes blinkpy/serving/tried_widths.json, which `blinkpy check-model` reads, from the results of the runs on GPUs.

The results (benchmarks/results/published_widths.json) are named by hub ids; the file has the widths of these models instead.
"""

import json
from pathlib import Path
from typing import Any

from published_models import MODELS

from blinkpy.models.families.family import describe_config
from blinkpy.serving.model_facts import FILE, Tried, widths_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "published_widths.json"


def runs(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By widths, the runs of a result file. Raises KeyError for a model that published_models.py lacks."""
    widths = {model.hub_id: widths_of(describe_config(model.config)) for model in MODELS if not model.refusal}
    environment, found = document.get("environment", {}), dict[str, list[dict[str, Any]]]()
    commit = environment.get("commit") or ""
    everywhere = {
        "gpu": environment.get("gpu", ""),
        "date": environment.get("date", ""),
        "commit": commit.get("hash", "") if isinstance(commit, dict) else commit,
    }
    for case in document["cases"]:
        run = {name: (everywhere | case)[name] for name in Tried._fields}
        of_widths = found.setdefault(widths[case["model"]], [])
        if run not in of_widths:
            of_widths.append(run)
    return dict(sorted(found.items()))


def written(results: Path = RESULTS) -> str:
    """The file's text; without results it has no runs."""
    document = json.loads(results.read_text()) if results.exists() else {"cases": []}
    return json.dumps({"runs": runs(document)}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(written())
