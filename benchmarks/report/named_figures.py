"""Figures that prose cites: <!-- figure: NAME -->value<!-- / --> in the README or in docs/ is filled by benchmarks.report.pages.

NAMED lists every name, with what makes its value from the result files, or from the sources that it counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.common.harness import ROOT
from benchmarks.report.part_tables import Results, measured_steps, spread
from benchmarks.report.serving_tables import slowdown
from benchmarks.report.words import milliseconds, percent

Source = Callable[[Results], str]


def decode_ms(shape: str, rows: int) -> Source:
    """Median time of a decode step within the loop, ms."""
    return lambda results: milliseconds(results.read(f"decode-{shape}")["rows"][str(rows)]["step_us"]["p50"])


def bandwidth_share(shape: str, rows: int) -> Source:
    """The share of the memory's read bandwidth that a decode step reaches."""
    return lambda results: percent(results.read(f"decode-{shape}")["rows"][str(rows)]["share_of_floor"])


def between_steps(what: str) -> Source:
    """Smallest to largest median over all measured decode steps, us."""
    return lambda results: spread(measured_steps(results), what)


def interference(shape: str, system: str, figure: str) -> Source:
    """How many times a figure is, beside neighbours, what it is without: geometric mean over rates."""

    def ratio(results: Results) -> str:
        found = slowdown(results.read(f"paper-{shape}")["results"], system, figure)
        if found is None:
            raise LookupError(f"{system} was not measured with neighbours and without")
        return f"{found:.2f}"

    return ratio


def bugs(file: str) -> Source:
    """How many patches a file of seeded bugs has: Bug("what", ...), or a line of a table that begins with ("what"."""
    return lambda results: str(len(re.findall(r'Bug\(\s*"|^        \("', (ROOT / file).read_text(), re.MULTILINE)))


def simulator_calls(results: Results) -> str:
    """Calls of the scheduler that each run of the tests simulates, at least."""
    text = (ROOT / "tests" / "verified" / "test_simulator.py").read_text()
    least = re.search(r"report\.calls >= ([\d_]+)", text)
    if least is None:
        raise LookupError("tests/verified/test_simulator.py holds no number of calls")
    return f"{int(least[1]):,}"


NAMED: dict[str, Source] = {
    "gap-us": between_steps("gap_us"),
    "scheduler-us": between_steps("scheduler_us"),
    "general-gap-us": between_steps("general_gap_us"),
    "general-scheduler-us": between_steps("general_scheduler_us"),
    "decode-ms-llama": decode_ms("llama-3-8b", 1),
    "decode-ms-qwen": decode_ms("qwen3-30b-a3b", 1),
    "bandwidth-share-llama": bandwidth_share("llama-3-8b", 1),
    "bandwidth-share-qwen": bandwidth_share("qwen3-30b-a3b", 1),
    **{
        f"interference-{what}-{system}-{short}": interference(shape, system, figure)
        for what, figure in (("tpot", "P99 TPOT"), ("ttft", "P99 TTFT"), ("throughput", "throughput"))
        for system in ("blinkpy", "vllm")
        for short, shape in (("llama", "llama-3-8b"), ("qwen", "qwen3-30b-a3b"))
    },
    "seeded-bugs": bugs("tests/support/seeded_bugs.py"),
    "seeded-bugs-rdma": bugs("tests/rdma/seeded_bugs.py"),
    "simulator-calls": simulator_calls,
    "gpu-tests": lambda results: str(results.read("gpu_tests")["tests"]["passed"]),
}
