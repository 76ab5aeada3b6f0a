"""From the records of a load to its figures: latencies, throughput, goodput, energy, and whether the client kept up.

TTFT    from when a request was due (open loop) or sent (closed loop) to its first text; of a request that was given up before
        any, the time that it had waited until then
TPOT    from the first text to the last, over the tokens but one: one figure for each request
ITL     between two events of a stream; tokens that came together share one
E2E     from when it was due or sent to the last text
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.distribution import describe, rounded
from benchmarks.common.load import UNFINISHED, LoadResult, Record
from benchmarks.common.nvml import EnergyMeter

MODES = ("isolated", "interfered")  # without neighbours, and with
LEVELS = (50.0, 90.0, 99.0)
LAG_LIMIT_MS = 2.0  # lag that the 99th percentile may always have
LAG_SHARE = 0.05  # share of a figure that the lag may have


class Slo(NamedTuple):
    """The limits of a request that counts for goodput, milliseconds."""

    ttft_ms: float
    tpot_ms: float


def figures(result: LoadResult, window_s: float, slo: Slo, meter: EnergyMeter) -> dict[str, Any]:
    """The figures of one load.

    window_s: the time, from the start, over which throughput, goodput and energy are taken; 0 (closed loop): until the
    first stream has sent all its requests.
    """
    records = result.records
    fine = [record for record in records if not record.error]
    window_s = window_s or _closed_window(records)
    tokens = sum(tokens_within(record, window_s) for record in records)
    in_time = [record for record in fine if record.due < window_s and 1000 * (record.times[0] - record.due) <= slo.ttft_ms]
    good = sum(1000 * (tpot_s(record) or 0.0) <= slo.tpot_ms for record in in_time)
    found: dict[str, Any] = {
        "requests": len(records),
        "completed": len(fine),
        "errors": dict(Counter(record.error for record in records if record.error).most_common()),
        "window_s": round(window_s, 3),
        "output_tokens_per_s": rounded(tokens / window_s),
        "requests_per_s": rounded(sum(record.times[-1] <= window_s for record in fine) / window_s),
        "goodput_per_s": rounded(good / window_s),
        "slo": slo._asdict(),
        "energy": _energy(result, window_s, tokens, meter),
        "client": client_figures(result),
    }
    if fine:
        tpots = [tpot for record in fine if (tpot := tpot_s(record)) is not None]
        ends = np.concatenate([record.times[1:] for record in fine])
        gaps = np.concatenate([np.diff(record.times) for record in fine])[np.argsort(ends, kind="stable")]
        whole = [record.times[-1] - record.due for record in fine]
        for name, seconds in (("ttft_ms", waits_s(result)), ("tpot_ms", tpots), ("itl_ms", gaps), ("e2e_ms", whole)):
            if len(seconds):
                found[name] = describe(1000 * np.array(seconds), "ms", percentiles=LEVELS, tail=0)
    found["client"] |= verdict(found)
    found["steps"] = steps_of(records, window_s)
    return found


def waits_s(result: LoadResult) -> list[float]:
    """TTFT of the requests that were answered or cancelled at the end; without the latter, a server could let requests
    wait."""
    counted = [record for record in result.records if record.error in ("", UNFINISHED)]
    return [(record.times[0] if len(record.times) else result.limit_s) - record.due for record in counted]


def tpot_s(record: Record) -> float | None:
    """None for an answer of one token."""
    return float(record.times[-1] - record.times[0]) / (record.tokens - 1) if record.tokens > 1 else None


def tokens_within(record: Record, window_s: float) -> float:
    """Tokens that arrived within the window, spread evenly over an answer's events. For an incomplete answer, the
    events count."""
    if not len(record.times):
        return 0.0
    per_event = record.tokens / len(record.times) if record.tokens else 1.0
    return per_event * int(np.searchsorted(record.times, window_s, side="right"))


def steps_of(records: Sequence[Record], window_s: float) -> dict[str, float] | None:
    """Steps per second within the window, and tokens in each, derived from the answers; None without answers.

    While n requests receive tokens, one every t seconds each, the server makes a step every t seconds, with n tokens.
    """
    changes: list[tuple[float, int, float]] = []  # (seconds, requests more, tokens/s more)
    for record in records:
        if len(record.times) and (tpot := tpot_s(record)):
            changes += [(min(record.times[0], window_s), 1, 1 / tpot), (min(record.times[-1], window_s), -1, -1 / tpot)]
    steps = tokens = rate = at = 0.0
    running = 0
    for when, more, faster in sorted(changes):
        if running:
            steps += (when - at) * rate / running
            tokens += (when - at) * rate
        at, running, rate = when, running + more, rate + faster
    return {"per_s": rounded(steps / window_s, 6), "tokens": rounded(tokens / steps, 6)} if steps else None


def client_figures(result: LoadResult) -> dict[str, Any]:
    """The lag of the client."""
    lags = 1000 * result.lags_s if len(result.lags_s) else np.zeros(1)
    late = 1000 * np.array([record.sent - record.due for record in result.records])
    p50, p99 = (float(np.percentile(lags, level)) for level in (50, 99))
    return {
        "lag_ms": {"p50": rounded(p50), "p99": rounded(p99), "max": rounded(float(lags.max())), "ticks": len(result.lags_s)},
        "sent_late_ms": {"p99": rounded(float(np.percentile(late, 99))), "max": rounded(float(late.max()))},
        "busiest_core_share": round(result.busy, 4),
    }


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Whether a load counts, from its figures: "valid", and "why_invalid".

    No figure may be off by more than a twentieth. Every event has the median lag, which is compared with the medians
    of TTFT and TPOT. Rare lags only add to rare waits, so the 99th percentile is compared with that of TTFT. A load
    that a file excludes with a reason does not count either.
    """
    lag, reasons = found["client"]["lag_ms"], []
    for level, name in (("p99", "ttft_ms"), ("p50", "ttft_ms"), ("p50", "tpot_ms")):
        limit = LAG_SHARE * found[name][level]["value"] if name in found else 0.0
        limit = max(limit, LAG_LIMIT_MS) if level == "p99" else limit
        if lag[level] > limit and (name in found or level == "p99"):
            figure = name.removesuffix("_ms").upper()
            reasons.append(f"the client's lag ({level}) of {lag[level]:.3g} ms is above {limit:.3g} ms: see {level} of {figure}")
    if excluded := found.get("excluded"):
        reasons.append(excluded)
    return {"valid": not reasons, "why_invalid": "; ".join(reasons)}


def levels(cell: dict[str, Any], what: str) -> str:
    """Median and 99th percentile."""
    found = cell.get(what)
    return f"{found['p50']['value']:g} / {found['p99']['value']:g}" if found else "none"


def _closed_window(records: list[Record]) -> float:
    """Until the first stream ended its last request: the period in which all streams were busy."""
    ends = [float(record.times[-1]) for record in records if len(record.times)]
    last_sent = max((record.sent for record in records), default=0.0)
    after = [end for end in ends if end > last_sent]
    return min(after, default=max(ends, default=1.0))


def _energy(result: LoadResult, window_s: float, tokens: float, meter: EnergyMeter) -> dict[str, Any]:
    joules = meter.joules(result.began, result.began + window_s)
    if joules is None:
        return {"missing": meter.missing or "the counter was not read meanwhile"}
    clock = meter.clock_mhz(result.began, result.began + window_s)
    return {
        "joules": rounded(joules),
        "mean_w": rounded(joules / window_s),
        "joules_per_token": rounded(joules / tokens) if tokens else None,
        "clock_mhz": None if clock is None else round(clock),
    }
