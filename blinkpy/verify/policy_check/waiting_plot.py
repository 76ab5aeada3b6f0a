"""The plot of a check: which share of the requests waited longer than so many seconds, for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FLOOR_S = 1e-3  # of the logarithmic axis: less is drawn there


def plot_outcomes(outcomes: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write the plot. outcomes: of blinkpy.verify.policy_check.check_child.summary."""
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
