"""Figures of matplotlib: made without a display, and kept as files that say which result they show."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

LEVELS = ("p1", "p10", "p50", "p90", "p99", "p99.9")


def figure_row(columns: int = 1, width: float = 5.5, height: float = 4.2, rows: int = 1) -> Any:
    """A matplotlib figure and a row of axes, or rows of them, without a display. width, height: inches of each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained")


def plain_log(ax: Any, which: str, base: int = 10) -> None:
    """Make one axis ("x" or "y") of a plot logarithmic, with plain numbers: powers of two, or 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set(**{f"{which}scale": "log"})
    axis = {"x": ax.xaxis, "y": ax.yaxis}[which]
    axis.set_major_locator(LogLocator(base, subs=(1.0,) if base == 2 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path, source: str) -> None:
    """Write a figure as a PNG that says what it was made from (see digest), and close it."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": source})
    plt.close(figure)


def digest(results: list[Path]) -> str:
    """Names the content of result files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in results)).hexdigest()


def shows(path: Path, results: list[Path]) -> bool:
    """Whether a PNG is there and was made from what the result files hold."""
    return path.exists() and digest(results).encode() in path.read_bytes()


def percentile_plot(document: dict[str, Any]) -> Any:
    """Every distribution of a result, one panel for each unit: a line from the lowest to the highest percentile, a box from p10
    to p90 with the median."""
    units: dict[str, list[dict[str, Any]]] = {}
    for name, found in distributions(document["results"]):
        values = [found[level]["value"] for level in LEVELS if level in found]
        low, high = (found.get(level, found["p50"])["value"] for level in ("p10", "p90"))
        box = {"label": name, "med": found["p50"]["value"], "q1": low, "q3": high, "whislo": values[0], "whishi": values[-1]}
        units.setdefault(found["unit"], []).append(box)
    most = max(map(len, units.values()))
    figure, axes = figure_row(len(units), 6.0, 1.2 + 0.22 * most)
    for ax, (unit, boxes) in zip(np.atleast_1d(axes), units.items(), strict=True):
        ax.bxp(boxes, showfliers=False, orientation="horizontal")
        plain_log(ax, "x")
        ax.invert_yaxis()
        ax.tick_params("y", labelsize=8)
        ax.set(xlabel=unit or "ratio")
        ax.grid(alpha=0.3)
    figure.suptitle("median, p10 to p90 (box), and the lowest to the highest percentile", fontsize=9)
    return figure


def distributions(results: Any, name: str = "") -> list[tuple[str, dict[str, Any]]]:
    """(name, description) of all that was described; of a list, such as rounds, in its first item."""
    if isinstance(results, list) and results:
        return distributions(results[0], name)
    if not isinstance(results, dict):
        return []
    if "unit" in results and "p50" in results:
        return [(name, results)]
    return [one for key, item in results.items() for one in distributions(item, f"{name} {key}".strip())]
