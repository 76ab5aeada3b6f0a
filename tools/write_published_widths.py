"""The results of tests/gpu/test_published_widths.py on a GPU, as a result file: from pytest's own reports.

    python tools/write_published_widths.py build/widths.xml [more.xml] > widths.json
    python tools/write_published_widths.py --cell cell.json build/widths.xml > widths.json
    python tools/write_published_widths.py first.json second.json > benchmarks/results/published_widths.json

The first command runs on the tests' machine. Elsewhere, the second command takes machine, versions, commit and date from a cell
of the evaluation that the same machine measured at the same commit. The third command joins result files. Each case keeps the
commit and the date of its run; the last run of a case counts. A case without a comparison, for example for lack of memory, is
left out.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.common.harness import to_json
from benchmarks.common.nvml import gpu_environment

FAILED = {"failure", "error"}


def cases_of(path: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Cases by model, form and type of the cache."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        said = {it.get("name", ""): it.get("value", "") for it in case.iter("property")}
        kinds = {child.tag for child in case}
        if "form" not in said or "skipped" in kinds:
            continue
        figures = {key: float(value) for key, value in said.items() if key.startswith(("error", "ratio"))}
        errors = [value for key, value in figures.items() if key.startswith("error, ")]
        for model in said["models"].split():
            found[model, said["form"], said["kv_cache"]] = {
                "model": model, "form": said["form"], "kv_cache": said["kv_cache"], "agrees": not kinds & FAILED,
                "largest_error": max(errors, default=None), **figures,
            }  # fmt: skip
    return found


def environment_of(cell: str) -> dict[str, Any]:
    """The fields of gpu_environment, from a cell of the evaluation."""
    document = json.loads(Path(cell).read_text())
    gpu = {name: document["gpu"][name] for name in ("gpu", "driver", "power_limit_w")}
    return {**gpu, **document["software"], "commit": document["commit"], "date": document["date"]}


def main(paths: list[str]) -> int:
    environment: dict[str, Any] = {}
    if paths[:1] == ["--cell"] and len(paths) > 2:
        environment, paths = environment_of(paths[1]), paths[2:]
    if not paths:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in paths:
        if path.endswith(".json"):
            document = json.loads(Path(path).read_text())
            environment = document["environment"]
            cases = {(case["model"], case["form"], case["kv_cache"]): case for case in document["cases"]}
        else:
            environment, cases = environment or gpu_environment(), cases_of(path)
        run = {"gpu": environment["gpu"], "commit": environment["commit"].get("hash", ""), "date": environment["date"]}
        found |= {key: run | case for key, case in cases.items() if case["largest_error"] is not None}
    print(to_json({"environment": environment, "cases": [found[key] for key in sorted(found)]}))
    agreeing = sum(case["agrees"] for case in found.values())
    print(f"{agreeing} of {len(found)} models and forms agree", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
