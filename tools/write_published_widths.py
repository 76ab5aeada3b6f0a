"""What tests/gpu/test_published_widths.py said on a GPU, as a result file: from pytest's own reports.

    python tools/write_published_widths.py build/widths.xml [more.xml] > benchmarks/results/published_widths.json

A case that several reports have is that of the last one.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from benchmarks.common.nvml import gpu_environment

FAILED = {"failure", "error"}


def cases_of(path: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By model, form and type of the cache."""
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


def main(paths: list[str]) -> int:
    if not paths:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in paths:
        found |= cases_of(path)
    cases = [found[key] for key in sorted(found)]
    json.dump({"environment": gpu_environment(), "cases": cases}, sys.stdout, indent=1)
    print(file=sys.stdout)
    agreeing = sum(case["agrees"] for case in cases)
    print(f"{agreeing} of {len(cases)} models and forms agree", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
