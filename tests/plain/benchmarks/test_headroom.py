"""Steps between those of today and the least that a GPU needs for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.harness import UsageError
from benchmarks.common.model_shapes import SHAPES
from benchmarks.common.roofline import READ_GBPS
from benchmarks.headroom import Between, least_times, measured
from benchmarks.report.headroom_table import page
from benchmarks.tuning.capacity import StepTimes
from blinkpy.models.families.describe_model import describe_config
from blinkpy.verify.policy_check.timed_server import Work

DECODE = ((1, 4.0), (64, 5.0))


def test_the_least_of_a_step_is_what_must_be_read_and_multiplied() -> None:
    """Counted from the sizes of the matrices alone."""
    a = describe_config(SHAPES["llama-3-8b"])
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    norms, head = 65 * 4096, 4096 * 128256
    least = least_times(a, StepTimes(DECODE), product_tflops=500.0)
    read_ms = 2 * (32 * layer + norms + head) / READ_GBPS / 1e6
    assert least.step_ms(Work(8, 8, 0, 0, 0)) == pytest.approx(read_ms, rel=1e-3)
    cached = least.step_ms(Work(8, 8, 0, 1_000_000, 0)) - least.step_ms(Work(8, 8, 0, 0, 0))
    assert cached == pytest.approx(1_000_000 * 2 * 32 * 8 * 128 * 2 / READ_GBPS / 1e6, rel=1e-6)
    # A layer's products for all tokens but the last layer's, which computes keys and values for them alone; attention is free.
    tokens = 200_000
    multiplied_ms = 2 * tokens * (31 * layer + 4096 * (4096 + 2 * 1024)) / 500e12 * 1e3
    assert least.step_ms(Work(tokens, 0, tokens, 0, 10**9)) == pytest.approx(multiplied_ms, rel=2e-3)


def test_a_share_of_the_way(rng: np.random.Generator) -> None:
    slow = StepTimes(DECODE, outside_ms=7.0)
    least = replace(slow, overhead_ms=0.1, attention_ns=0.0, weights_ms=3.0)
    work = Work(512, 30, 482, 30_000, 100_000)
    for share in rng.uniform(0, 1, 20):
        times = Between(slow, least, share)
        assert times.step_ms(work) == pytest.approx((1 - share) * slow.step_ms(work) + share * least.step_ms(work))
        assert times.outside_ms == 7.0


def test_a_file_without_the_load_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    with pytest.raises(UsageError, match="no load of blinkpy at 16 requests/s"):
        measured(path)
    path.write_text(json.dumps({"results": {"model": "llama-3-8b", "cells": []}}))
    with pytest.raises(UsageError, match="no load of blinkpy at 16 requests/s"):
        measured(path)


def test_the_page() -> None:
    figures = {"ttft_p99": 250.4, "tpot_p99": 12.34, "e2e_mean": 1500.2}
    lines = page({"shares": [{"share": 0.25, **figures}], "measured": {"vllm": figures}}).splitlines()
    assert lines[2:] == [
        "| simulated, 25 % of the way to the least | 250 | 12.3 | 1,500 |",
        "| measured, vllm | 250 | 12.3 | 1,500 |",
    ]
    assert page(None) == "Not simulated yet.\n"
