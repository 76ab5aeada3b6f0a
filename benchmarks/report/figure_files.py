"""Figures of matplotlib: made without a display, and kept as files that say which result they show."""

import hashlib
from pathlib import Path
from typing import Any


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
