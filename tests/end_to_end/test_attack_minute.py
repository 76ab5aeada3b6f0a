"""Fresh seconds of `make attack`: no stream breaks, no lease is lost, each request gets an answer, memory stays below its bound.

Only `make attack` judges times: here, other tests use the same cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS, LIMIT_S = 20, 500


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


def test_a_minute_of_random_attacks(seed: int, tmp_path: Path) -> None:
    from attack.__main__ import TRIALS_A_SITE
    from attack.site import SITE_KINDS

    output = tmp_path / "attack.json"
    first = TRIALS_A_SITE * (seed % len(SITE_KINDS))  # one of the kinds of servers
    options = {"seconds": SECONDS, "seed": seed, "first": first, "timed": 0, "shrink": 0, "output": output}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "tests", "tools"))
    run = subprocess.run(
        [sys.executable, "-m", "attack", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    results = json.loads(output.read_text())["results"]
    assert results["counts"]["trials"] == len(results["trials"]) > 0 and results["counts"]["connections"] > 0
