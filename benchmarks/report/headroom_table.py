"""The table of benchmarks.headroom, for a terminal and for a page."""

from __future__ import annotations

from typing import Any

from benchmarks.report.serving_tables import percent


def way(share: float) -> str:
    return {0.0: "as they are", 1.0: "the least"}.get(share, f"{percent(share)} of the way to the least")


def page(results: Any) -> str:
    """A Markdown table: tails with steps of each share, and what was measured. results: of a result file, or nothing."""
    if not results:
        return "Not simulated yet.\n"
    lines = ["| steps | P99 TTFT, ms | P99 TPOT, ms | end to end, mean, ms |", "|---|---|---|---|"]
    for row in results["shares"]:
        words = f"{row['ttft_p99']:.0f} | {row['tpot_p99']:.1f} | {row['e2e_mean']:,.0f}"
        lines.append(f"| simulated, {way(row['share'])} | {words} |")
    for system, found in results["measured"].items():
        words = f"{found['ttft_p99']:.0f} | {found['tpot_p99']:.1f} | {found['e2e_mean']:,.0f}"
        lines.append(f"| measured, {system} | {words} |")
    return "\n".join([*lines, ""])
