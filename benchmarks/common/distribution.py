"""Samples of a time as figures: percentiles with confidence intervals. The samples themselves are not kept.

Samples of one run are not independent: a disturbance of the machine hits many in a row. So the intervals come from a block
bootstrap (Künsch 1989): whole stretches of consecutive samples are drawn with replacement, not single samples.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 300
BLOCKS = 100  # stretches that the samples are cut into
CONFIDENCE = 0.95
PERCENTILES = (1.0, 10.0, 50.0, 90.0, 99.0, 99.9)
INTERVAL_SAMPLES = 20_000
TAIL = 10  # samples that must lie beyond a percentile for it to be given


def describe(
    samples: ArrayLike, unit: str, seed: int = 0, percentiles: tuple[float, ...] = PERCENTILES, tail: float = TAIL
) -> dict[str, Any]:
    """All that a result file keeps of samples, in the order in which they were taken.

    Keys: unit, count, min, mean, max; p50 and so on, each {"value", "low", "high"} with a 95% interval.
    tail: samples that must lie beyond a percentile for it to be given; the median always is. The intervals of very many
    samples come from INTERVAL_SAMPLES of them, drawn at random: they are then a little too wide rather than too narrow.
    Raises ValueError when there are none, or one is not a finite number."""
    x = np.asarray(samples, np.float64)
    if x.ndim != 1 or len(x) == 0 or not np.isfinite(x).all():
        raise ValueError(f"samples must be finite numbers, at least one; shape {x.shape}")
    levels = [p for p in percentiles if p == 50 or len(x) * min(p, 100 - p) / 100 >= tail]
    values = np.percentile(x, levels)
    lows, highs = _intervals(x, levels, seed)
    result: dict[str, Any] = {"unit": unit, "count": len(x)}
    result |= {"min": rounded(x.min()), "mean": rounded(x.mean()), "max": rounded(x.max())}
    for level, value, low, high in zip(levels, values, lows, highs, strict=True):
        result[f"p{level:g}"] = {"value": rounded(value), "low": rounded(low), "high": rounded(high)}
    return result


def _intervals(x: NDArray[np.float64], levels: list[float], seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper ends of the intervals of percentiles."""
    if len(x) > INTERVAL_SAMPLES:
        x = x[np.sort(np.random.default_rng(seed).choice(len(x), INTERVAL_SAMPLES, replace=False))]
    rng = np.random.default_rng(seed)
    length = max(1, len(x) // BLOCKS)
    count = -(-len(x) // length)
    found = np.empty((RESAMPLES, len(levels)))
    for i in range(RESAMPLES):
        starts = rng.integers(0, len(x), count)
        drawn = x[(starts[:, None] + np.arange(length)).ravel()[: len(x)] % len(x)]
        found[i] = np.percentile(drawn, levels)
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(found, [outside, 100 - outside], axis=0)
    return low, high


def rounded(value: float, digits: int = 4) -> float:
    """A number with the digits that a measurement is worth, and small in a file."""
    return float(f"{value:.{digits}g}")
