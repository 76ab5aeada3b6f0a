"""Figures cited in prose: benchmarks.report.pages fills <!-- figure: NAME -->value<!-- / --> in the README
and in docs/.

NAMED maps every name to a function that computes its value from the result files, or from the counted
sources.
"""

import re
from collections.abc import Callable
from functools import partial

from benchmarks.common.harness import ROOT
from benchmarks.report.part_tables import Document, Results, measured_steps, simulated_turns, spread
from benchmarks.report.serving_tables import schema_pairs, schema_tpot, slowdown
from benchmarks.report.words import milliseconds, percent

Source = Callable[[Results], str]
# Of random schemas, as tools/fuzz_schemas.py counts them.
OUTPUTS = (
    *("outputs that ended", "outputs cut by max_tokens"),
    *("outputs of the engine that ended", "of the engine cut by max_tokens"),
)


def first_row(results: Results, shape: str) -> Document:
    """The decode step of one row."""
    found: Document = results.read(f"decode-{shape}")["rows"]["1"]
    return found


def decode_ms(shape: str, rows: str, results: Results) -> str:
    """A decode step, in ms."""
    return milliseconds(results.read(f"decode-{shape}")["rows"][rows]["step_us"]["p50"])


def share_of_floor(shape: str, rows: str, results: Results) -> str:
    """The time to read a decode step's data, as a share of the step's time."""
    return percent(results.read(f"decode-{shape}")["rows"][rows]["share_of_floor"])


def between_steps(what: str) -> Source:
    """The smallest to the largest median over all measured decode steps, us."""
    return lambda results: spread(measured_steps(results), what)


def invariant_price(results: Results) -> str:
    """Ratio of decode steps with --batch-invariant to steps without, in one run: minimum to maximum over the
    rows.
    """
    found, plain = (results.read(f"decode-llama-3-8b-{name}")["rows"] for name in ("batch-invariant", "beside-it"))
    ratios = [found[rows]["step_us"]["p50"] / plain[rows]["step_us"]["p50"] for rows in plain]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def interference(shape: str, system: str, figure: str, results: Results) -> str:
    """Ratio of a figure with neighbours to the figure without: geometric mean over rates."""
    found = slowdown(results.read(f"paper-{shape}")["results"], system, figure)
    if found is None:
        raise LookupError(f"{system} was not measured with neighbours and without")
    return f"{found:.2f}"


def schema_ratio(system: str, interfered: bool, results: Results) -> str:
    """Ratio of the median TPOT of 64 streams with a JSON schema to that without, both with or without
    neighbours.
    """
    for free, bound in schema_pairs(results.read("schemas-llama-3-8b")["results"]):
        if (free["cell"]["system"], free["cell"]["streams"], free["neighbours"] > 0) == (system, 64, interfered):
            without, with_schema = schema_tpot(free, bound, "p50")
            return f"{with_schema / without:.2f}"
    raise LookupError(f"{system} was not measured with a schema")


def fuzzed(results: Results) -> Document:
    """The counts of the random schemas and outputs."""
    found: Document = results.read("fuzz_schemas")["results"]
    return found


def attack_memory(results: Results) -> str:
    """The maximum memory of a worker over all attacks, MiB."""
    return f"{max(row['worker_mib']['peak'] for row in results.read('attacks')['results']['attacks']):.0f}"


def bugs(file: str) -> Source:
    """Number of patches in a file of seeded bugs: Bug("what", ...), or a line of a table that begins with
    ("what".
    """
    return lambda results: str(len(re.findall(r'Bug\(\s*"|^        \("', (ROOT / file).read_text(), re.MULTILINE)))


def simulator_calls(results: Results) -> str:
    """Minimum number of scheduler calls that each run of the tests simulates."""
    text = (ROOT / "tests" / "verified" / "test_simulator.py").read_text()
    least = re.search(r"^TURNS = ([\d_]+)$", text, re.MULTILINE)
    if least is None:
        raise LookupError("tests/verified/test_simulator.py holds no number of calls")
    return f"{int(least[1]):,}"


def counted_turns(mode: str, results: Results) -> str:
    """Turns of a mode of the simulator in the ledger."""
    return f"{simulated_turns(results, mode):,}"


NAMED: dict[str, Source] = {
    "gap-us": between_steps("gap_us"),
    "scheduler-us": between_steps("scheduler_us"),
    "general-gap-us": between_steps("general_gap_us"),
    "general-scheduler-us": between_steps("general_scheduler_us"),
    "decode-ms-llama": lambda results: milliseconds(first_row(results, "llama-3-8b")["step_us"]["p50"]),
    **{f"decode-ms-llama-fp8-{rows}": partial(decode_ms, "llama-3-8b-fp8", rows) for rows in ("1", "64", "256")},
    "decode-ms-qwen": lambda results: milliseconds(first_row(results, "qwen3-30b-a3b")["step_us"]["p50"]),
    "bandwidth-share-llama": lambda results: percent(first_row(results, "llama-3-8b")["share_of_floor"]),
    **{
        f"bandwidth-share-{shape}-{rows}": partial(share_of_floor, shape, rows)
        for shape in ("mixtral-8x7b", "gpt-oss-20b", "gemma-3-1b")
        for rows in ("1", "64")
    },
    "invariant-price": invariant_price,
    "bandwidth-share-qwen": lambda results: percent(first_row(results, "qwen3-30b-a3b")["share_of_floor"]),
    **{
        f"interference-{what}-{system}-{short}": partial(interference, shape, system, figure)
        for what, figure in (("tpot", "P99 TPOT"), ("ttft", "P99 TTFT"), ("throughput", "throughput"))
        for system in ("blinkpy", "vllm")
        for short, shape in (("llama", "llama-3-8b"), ("qwen", "qwen3-30b-a3b"))
    },
    **{
        f"schema-ratio-{system}{place}": partial(schema_ratio, system, bool(place))
        for system in ("blinkpy", "vllm")
        for place in ("", "-interfered")
    },
    "fuzzed-schemas": lambda results: f"{fuzzed(results)['schemas']:,}",
    "fuzzed-outputs": lambda results: f"{sum(fuzzed(results)[kind] for kind in OUTPUTS):,}",
    "invalid-outputs": lambda results: str(fuzzed(results)["invalid"]),
    "attack-memory": attack_memory,
    "seeded-bugs": bugs("tests/support/seeded_bugs.py"),
    "seeded-bugs-rdma": bugs("tests/rdma/seeded_bugs.py"),
    "simulator-calls": simulator_calls,
    **{f"simulated-{mode}": partial(counted_turns, mode) for mode in ("compiled", "compared")},
    "gpu-tests": lambda results: f"{results.read('gpu_tests')['tests']['passed']:,}",
    "gpu-tests-run": lambda results: f"{sum(run['tests'] for run in results.read('gpu_tests')['runs']):,}",
}
