"""Benchmarks run, check their answers and write whole result files. Nothing here is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.part_of_cases import part_of

from benchmarks.common.distribution import describe

ROOT = Path(__file__).parents[3]
KEYS = {"benchmark", "commit", "date", "machine", "software", "others", "arguments", "method", "targets", "results"}
TARGETS = {  # of a smoke run
    "serving.first_answer": 2,
    "serving.fleet_throughput": 2,
    "tuning.capacity": 0,
    "tuning.class_capacity": 0,
    "tuning.fleet_placement": 6,
    "parts.control_overhead": 0,
    "parts.cpu_engine": 2,
    "parts.front_end_cpu": 1,
    "parts.grammar_compile": 2,
    "parts.placement_choice": 1,
    "parts.queue_round_trip": 1,
    "parts.rdma_cpu": 4,
    "parts.recurrent_prompts": 0,
    "parts.request_costs": 1,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", part_of(sorted(TARGETS), 5))
def test_smoke(name: str, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2 and name in ("parts.front_end_cpu", "parts.queue_round_trip", "serving.fleet_throughput"):
        pytest.skip("two processes that poll need two cores")
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document.keys() >= KEYS
    assert (document["benchmark"], document["smoke"]) == (name, True)
    assert len(document["targets"]) == TARGETS[name]
    assert document["results"]
    assert all(0 <= document["others"][share] < 1.1 for share in ("other_processes", "steal")), "own work counts as others'"
    assert str(ROOT) not in output.read_text()


def test_description_of_samples(rng: np.random.Generator) -> None:
    samples = rng.lognormal(3, 0.5, 30_000)
    found = describe(samples, "us")
    for level in (1, 10, 50, 90, 99, 99.9):
        figure = found[f"p{level:g}"]
        assert figure["value"] == pytest.approx(np.percentile(samples, level), rel=1e-3)
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert found["count"] == len(samples)
