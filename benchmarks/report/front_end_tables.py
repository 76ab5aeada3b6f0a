"""Contexts of the templates for a front end under attack, and with many clients."""

from typing import Any

from benchmarks.report.part_tables import Document, Results, when
from benchmarks.report.words import number, percent

ATTACK_HEAD = (
    "attack",
    "gap, P99, ms: quiet",
    "during the attack (max)",
    "a token, P99, ms",
    "worker, MiB",
)
CROWD_TARGETS = ("streams of one worker", "requests during these streams", "P99 of `/health`", "failed requests")
CROWD_HEAD = (
    *(
        "load",
        "requests/s",
        "tokens/s",
        "share of a core",
        "gap, P99, ms",
        "short request, P50 (P99), ms",
        "`/health`, P50 (P99), ms",
    ),
)


def attacks(results: Results) -> dict[str, Any]:
    """A row for each attack: its effect on streams and new requests, and the maximum memory."""
    found = results.read("attacks")
    if not found:
        return {"rows": []}
    rows = []
    for row in found["results"]["attacks"]:
        quiet, beside = (row["gap_ms"][when] for when in ("quiet", "beside"))
        waits, most = tail(row["answer_ms"]["beside"]), f"{row['worker_mib']['peak']:.0f}"
        rows.append([row["attack"], tail(quiet), tail(beside, True), waits, most])
    times, memory = (number(target["value"], unit) for target, unit in zip(found["targets"], ("", "MiB"), strict=True))
    return {"head": ATTACK_HEAD, "rows": rows, "times": times.strip(), "memory": memory, **circumstances(found)}


def crowd(results: Results) -> dict[str, Any]:
    """A row for each load."""
    found = results.read("crowd")
    if not found:
        return {"rows": []}
    rows = []
    for row in found["results"]["loads"]:
        name = " and ".join(
            [*([f"{row['streams']:,} streams"] if row["streams"] else []), *(["requests"] if "request_ms" in row else [])]
        )
        gap = tail(row["gap_ms"]) if "gap_ms" in row else ""
        waits = [middle_and_tail(row[key]) if key in row else "" for key in ("request_ms", "health_ms")]
        rates = [f"{row[key]:,.0f}" for key in ("requests_per_s", "token_events_per_s")]
        rows.append([name, *rates, percent(row["worker_core_share"]), gap, *waits])
    return {"head": CROWD_HEAD, "rows": rows, "targets": held_against(found), **circumstances(found)}


def circumstances(found: Document) -> dict[str, str]:
    return {
        "when": when(found),
        "cores": f"{found['machine']['cores']} cores ({found['machine']['cpu']})",
        "others": percent(found["others"]["other_processes"]),
    }


def held_against(found: Document) -> str:
    """The comparison of a result with its targets, in words."""
    return "; ".join(
        f"{name} {'at most' if target['at_most'] else 'at least'} {number(target['limit'], target['unit'])}, "
        f"measured {number(target['value'], target['unit'])}{'' if target['met'] else ' (**missed**)'}"
        for name, target in zip(CROWD_TARGETS, found["targets"], strict=True)
    )


def tail(figures: Document, with_max: bool = False) -> str:
    """P99 in ms, or the maximum if there are too few samples."""
    p99 = figures["p99"]["value"] if "p99" in figures else figures["max"]
    return f"{p99:,.0f} ({figures['max']:,.0f})" if with_max else f"{p99:,.0f}"


def middle_and_tail(figures: Document) -> str:
    return f"{figures['p50']['value']:,.0f} ({tail(figures)})"
