"""The table of one model on several GPUs."""

from typing import Any

from benchmarks.report.part_tables import Results, hardware, when

PREFIX = "ranks-"
HEAD = ["GPUs", "streams", "TPOT, ms", "faster than with one GPU", "tokens/s"]


def ranks(results: Results) -> dict[str, Any]:
    """For each model, time per output token by number of GPUs and streams."""
    tables = []
    for title, found in results.by_shape(PREFIX).items():
        if not found:
            continue
        engines = found["results"]["engines"]
        rows = [
            [gpus, streams, f"{one['tpot_ms']:.3g}", f"{faster(engines, streams, gpus):.2f}x", f"{one['tokens_per_s']:,.0f}"]
            for gpus, by_streams in engines.items()
            for streams, one in by_streams.items()
        ]
        tables.append({"title": title, "origin": f"{hardware(found)}, {when(found)}", "setup": found["arguments"], "rows": rows})
    return {"head": HEAD, "tables": tables}


def faster(engines: dict[str, Any], streams: str, gpus: str) -> float:
    return float(engines["1"][streams]["tpot_ms"] / engines[gpus][streams]["tpot_ms"])
