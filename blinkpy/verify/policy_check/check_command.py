"""`blinkpy check`: runs the checks, and reports results on the terminal, as a plot and as JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.packages import require_packages
from blinkpy.process_exit import print_error
from blinkpy.progress import Progress
from blinkpy.scheduler.policy_vetting import Finding, run_child
from blinkpy.tool_options import CheckOptions
from blinkpy.verify.policy_check.check_workload import load_workload

MARKS = {"fine": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}
CHECK = "blinkpy.verify.policy_check.check_child"  # module of the process that runs the policy
PLOT_TYPES = (".png", ".svg", ".pdf")
FLOOR_S = 1e-3  # start of the plot's logarithmic axis; shorter times are clamped to it
COLUMNS = (
    ("waiting P50", "waiting_s", "p50"),
    ("P90", "waiting_s", "p90"),
    ("P99", "waiting_s", "p99"),
    ("max", "waiting_s", "p100"),
    ("TTFT P50", "ttft_s", "p50"),
    ("P90", "ttft_s", "p90"),
    ("P99", "ttft_s", "p99"),
    ("end P50", "end_to_end_s", "p50"),
    ("P99", "end_to_end_s", "p99"),
)


def run_check(options: CheckOptions) -> int:
    """Check a policy, or placements. Returns the exit code: 1 if an error was found, else 0. Raises
    ConfigError for wrong options.
    """
    require_packages("check", "numba", extra="cpu")
    if options.fleet:
        _check_output(options)
        from blinkpy.verify.policy_check.fleet_report import run_fleet_check

        return run_fleet_check(options)
    load_workload(options.workload)
    _check_output(options)
    progress, findings, outcomes = Progress(), [], []
    try:
        for message in run_child(CHECK, dataclasses.asdict(options)):
            if "stage" in message:
                progress(f"checking {options.policy}: {message['stage']}")
            elif "finding" in message:
                findings.append(Finding(*message["finding"]))
            elif "outcome" in message:
                outcomes.append(message["outcome"])
    finally:
        progress.close()
    print(_report(options, findings, outcomes))
    if options.json:
        facts = {"options": dataclasses.asdict(options), "findings": [f._asdict() for f in findings], "outcomes": outcomes}
        try:
            Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            print_error(f"can't write {options.json}: {error.strerror}")
    if options.plot and outcomes:
        _plot(outcomes, _what(options), Path(options.plot))
    return int(any(finding.level == "error" for finding in findings))


def _check_output(options: CheckOptions) -> None:
    """Check the output options before the simulations."""
    if options.plot:
        if Path(options.plot).suffix not in PLOT_TYPES:
            raise ConfigError(f"plot must end in {', '.join(PLOT_TYPES)}, not {options.plot!r}")
        require_packages("--plot", "matplotlib", extra="bench")
    for name in (options.plot, options.json):
        if name and not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"can't write {name}: folder {Path(name).absolute().parent} does not exist")


def _report(options: CheckOptions, findings: list[Finding], outcomes: list[dict[str, Any]]) -> str:
    lines = [f"blinkpy check {options.policy}", ""]
    for finding in findings:
        where = f"line {finding.line}: " if finding.line else ""
        lines.append(f"  {finding.part:<12} {MARKS[finding.level]:<8} {where}{finding.text}")
    if outcomes:
        lines += ["", f"{_what(options)}; seconds:", "", *_table(outcomes)]
    errors = sum(finding.level == "error" for finding in findings)
    lines += ["", f"{errors} error{'s' if errors != 1 else ''} found" if errors else "no errors found"]
    return "\n".join(lines)


def _table(outcomes: list[dict[str, Any]]) -> list[str]:
    rows = [["policy", *(title for title, _, _ in COLUMNS), "preemptions", "most overtaken"]]
    for outcome in outcomes:
        times = [_seconds(outcome[key][p]) for _, key, p in COLUMNS]
        rows.append([Path(outcome["policy"]).name, *times, f"{outcome['preemptions']:,}", f"{outcome['most_overtaken']:,}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _what(o: CheckOptions) -> str:
    workload = "Azure conversations" if o.workload == "azure" else Path(o.workload).name
    rate = f"{o.rate:g} requests/s" if o.rate else "arrivals as recorded"
    step = f"{o.step_us:g} us + {o.row_us:g} us a row + {o.token_us:g} us a prefill token"
    return f"{workload}, {rate}, {o.max_num_seqs} rows, {o.num_pages:,} pages of {o.page_size}; step {step}"


def _plot(outcomes: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot the distribution of waiting times and times to first token for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, key, label in ((axes[0], "waiting_s", "waiting, s"), (axes[1], "ttft_s", "time to first token, s")):
        for i, outcome in enumerate(outcomes):
            samples = outcome[f"{key}_samples"]
            n = len(samples)
            shares = [(n - j) / n for j in range(n)]
            style = {"linewidth": 2.2} if i == 0 else {"linewidth": 1.2, "linestyle": "--"}
            axis.step([max(FLOOR_S, s) for s in samples], shares, label=Path(outcome["policy"]).name, **style)
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests with as much or more")
    axes[0].legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
