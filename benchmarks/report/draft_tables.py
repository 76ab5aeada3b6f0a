"""Tables and plots of drafts: time per output token and energy, with and without them."""

from typing import Any

import numpy as np

from benchmarks.report.figure_files import figure_row
from benchmarks.report.part_tables import SHAPES, Document, Results, hardware, when
from benchmarks.report.words import percent

PREFIX = "drafts-"
OF_HEADS = "heads-"  # begins the names of results of draft layers and heads
PLOTTED = f"{OF_HEADS}llama-3-8b-fp8"
COMPARED = ["TPOT without drafts, ms", "with drafts, ms", "faster"]
ENERGY = ["J/token without", "with drafts"]
HEAD = ["outputs", "streams", *COMPARED, "accepted drafts", *ENERGY]
HEAD_OF_HEADS = ["model, drafts", "rate", "streams", "tokens per step", *COMPARED, *ENERGY]
KINDS = {"eagle3": "EAGLE-3", "mtp": "`mtp`"}


def drafts(results: Results) -> dict[str, Any]:
    """A table for each model."""
    tables = [
        {
            "title": title, "origin": f"{hardware(found)}, {when(found)}", "setup": found["arguments"], "rows": rows(found),
            "plot": f"{PREFIX}{found['results']['shape']}.png",
        }
        for title, found in results.by_shape(PREFIX).items()
        if found
    ]  # fmt: skip
    return {"head": HEAD, "tables": tables}


def rows(found: Document) -> list[list[str]]:
    engines = found["results"]["engines"]
    some = []
    for outputs, by_streams in engines["off"].items():
        for streams, off in by_streams.items():
            on = engines["ngram"][outputs][streams]
            right = percent(on["right"] / on["drafts"]) if on["drafts"] else "no drafts"
            some.append([outputs, streams, *times(off, on), right, *energy(off, on)])
    return some


def draft_heads(results: Results) -> dict[str, Any]:
    """Drafts of layers and heads: one table for all models."""
    rows, origins = list[list[str]](), dict[str, None]()
    for name in (name for name in results.names if name.startswith(OF_HEADS)):
        found = results.read(name)
        setup, (off, on) = found["arguments"], found["results"]["engines"].values()
        origins[f"{hardware(found)}, {when(found)}"] = None
        weights = "bfloat16" if setup["quantization"] == "auto" else setup["quantization"]
        what = f"{SHAPES.get(setup['shape'], setup['shape'])} {weights}, {setup['drafts']} of {KINDS[setup['kind']]}"
        for rate, by_streams in off.items():
            for streams, without in by_streams.items():
                drafted = on[rate][streams]
                tokens = f"{drafted['tokens_per_step']:.2f}"
                rows.append([what, rate, streams, tokens, *times(without, drafted), *energy(without, drafted)])
    return {"head": HEAD_OF_HEADS, "rows": rows, "origin": "; ".join(origins), "plot": f"{PLOTTED}.png"}


def times(off: Document, on: Document) -> list[str]:
    return [f"{off['tpot_ms']:.3g}", f"{on['tpot_ms']:.3g}", f"{faster(off, on):.2f}x"]


def energy(off: Document, on: Document) -> list[str]:
    return [f"{one['joules_per_token']:.3g}" if one["joules_per_token"] else "unknown" for one in (off, on)]


def faster(off: Document, on: Document) -> float:
    return float(off["tpot_ms"] / on["tpot_ms"])


def draw_drafts(document: Document) -> Any:
    """How many times faster a token comes with drafts, by kind of outputs, or rate of correct drafts, and number of streams."""
    off, on = document["results"]["engines"].values()
    figure, ax = figure_row(width=7.0, height=3.2)
    streams = list(next(iter(off.values())))
    for place, count in enumerate(streams):
        values = [faster(off[outputs][count], on[outputs][count]) for outputs in off]
        at = np.arange(len(off)) + 0.8 * place / len(streams)
        bars = ax.bar(at, values, 0.75 / len(streams), label=f"{count} streams" if count != "1" else "1 stream")
        ax.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7, padding=2)
    names = [f"rate {one}" if one[0].isdigit() else one for one in off]
    ax.set_xticks(np.arange(len(off)) + 0.4 * (len(streams) - 1) / len(streams), names)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.margins(y=0.1)
    ax.set(ylabel="times faster per output token with drafts")
    ax.grid(alpha=0.3, axis="y")
    ax.legend(fontsize=7)
    return figure
