"""Results of the tests that need a GPU, as a result file from pytest's reports.

    python -m pytest tests/gpu -n 8 -m 'not whole_gpu' --junitxml=build/gpu-tests.xml
    python -m pytest tests/gpu -m whole_gpu --junitxml=build/gpu-tests-alone.xml
    python -m benchmarks.report.gpu_tests build/gpu-tests.xml build/gpu-tests-alone.xml --gpu 'NVIDIA H200'

A report's commit is the one after an @, or the working tree's, or BLINKPY_COMMIT's. The page names all
commits; the tested code must not differ between them. A test that failed in one of them counts as failed,
and so does an interrupted one. pytest writes a report when it ends, also on SIGINT, but not if it is
killed.
"""

import argparse
import datetime
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.common.harness import RESULTS, UsageError, main, revision, to_json

CUT_OFF = "a test that was cut off"
OUTCOMES = ("failed", "skipped", "passed")  # the first that a test had in any of the runs is its outcome


def read_report(path: Path) -> dict[str, Any]:
    """One run: its start, its duration, and the outcomes of each test. Raises UsageError."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(f"{path}: {error}") from error
    outcomes: dict[str, set[str]] = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        kinds = {child.tag for child in case}
        found = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        # A test and its teardown may be two cases. A run that SIGINT ended has no name.
        name, found = (f"{case.get('classname')}::{case.get('name')}", found) if case.get("name") else (CUT_OFF, "failed")
        outcomes.setdefault(name, set()).add(found)
    if not outcomes:
        raise UsageError(f"{path}: no test in it")
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    return {"date": suites[0].get("timestamp", ""), "seconds": round(seconds, 1), "outcomes": outcomes}


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Names of failed and skipped tests over all runs, and the number of passed tests."""
    named: dict[str, list[str]] = {kind: [] for kind in OUTCOMES}
    for name in sorted({name for run in runs for name in run["outcomes"]}):
        had = {outcome for run in runs for outcome in run["outcomes"].get(name, ())}
        named[min(had, key=OUTCOMES.index)].append(name)
    return {**named, "passed": len(named["passed"])}


def gpu_tests(found: dict[str, Any]) -> str:
    """The result as text for the README."""
    where, tests = found["environment"], found["tests"]
    passed = tests["passed"]
    total = passed + len(tests["failed"]) + len(tests["skipped"])
    minutes = " and ".join(f"{run['seconds'] / 60:.1f}" for run in found["runs"])
    hashes = dict.fromkeys(run.get("commit", where["commit"]["hash"])[:7] for run in found["runs"])
    commits = " and ".join(f"`{commit}`" for commit in hashes) + (" with changes" if where["commit"].get("dirty") else "")
    text = (
        f"{passed:,} of {total:,} tests of `tests/gpu` passed on one {where['gpu']} at {commits}, "
        f"{where['date'][:10]}, in {minutes} minutes; {len(tests['failed'])} failed, {len(tests['skipped'])} skipped."
    )
    named = [f"- {kind}: `{name}`" for kind in OUTCOMES[:2] for name in tests[kind]]
    return "\n".join([text, "", *named] if named else [text])


def benchmark(options: argparse.Namespace) -> None:
    if not (commit := revision()):
        raise UsageError("the commit is not known: set BLINKPY_COMMIT")
    runs = []
    for words in options.reports:
        path, _, named = words.partition("@")
        if named and not re.fullmatch("[0-9a-f]{40}", named):
            raise UsageError(f"{words}: {named} is not a whole commit hash, of 40 digits")
        runs.append(read_report(Path(path)) | {"commit": named or commit["hash"]})
    if all(run["commit"] != commit["hash"] for run in runs):
        commit = {"hash": runs[-1]["commit"], "dirty": False}
    now = max(run["date"] for run in runs) or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {
        "environment": {"gpu": options.gpu, "date": now, "commit": commit},
        "runs": [{key: run[key] for key in ("date", "seconds", "commit")} | {"tests": len(run["outcomes"])} for run in runs],
        "tests": joined(runs),
    }
    options.output.write_text(to_json(result) + "\n")
    print(gpu_tests(result))


def options() -> argparse.Namespace:
    result = argparse.ArgumentParser(prog="python -m benchmarks.report.gpu_tests", description=(__doc__ or "").splitlines()[0])
    result.add_argument("reports", metavar="REPORT[@COMMIT]", nargs="+", help="what pytest --junitxml wrote")
    result.add_argument("--gpu", required=True, help="what they ran on")
    result.add_argument("--output", type=Path, default=RESULTS / "gpu_tests.json")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
