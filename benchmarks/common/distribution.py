"""Figures of time samples: percentiles with confidence intervals. The samples are not stored.

Samples of one run are not independent, because a disturbance of the machine affects many consecutive
samples. So the intervals come from a block bootstrap (Künsch 1989): it draws blocks of consecutive
samples with replacement, not single samples.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 300
BLOCKS = 100  # number of blocks
CONFIDENCE = 0.95
PERCENTILES = (1.0, 10.0, 50.0, 90.0, 99.0, 99.9)
INTERVAL_SAMPLES = 20_000
TAIL = 10  # minimum samples beyond a reported percentile


def describe(
    samples: ArrayLike, unit: str, seed: int = 0, percentiles: tuple[float, ...] = PERCENTILES, tail: float = TAIL
) -> dict[str, Any]:
    """The figures of samples for a result file. samples: in the order of measurement.

    tail: minimum samples beyond a reported percentile; the median is always reported.
    Keys: unit, count, min, mean, max; p50 and so on, each {"value", "low", "high"} with a 95% interval. The
        intervals of very many samples come from INTERVAL_SAMPLES of them, drawn at random, so they are rather
        too wide than too narrow.
    Raises ValueError without samples, or for a sample that is not finite.
    """
    x = np.asarray(samples, np.float64)
    if x.ndim != 1 or len(x) == 0 or not np.isfinite(x).all():
        raise ValueError(f"samples must be finite numbers, at least one; shape {x.shape}")
    levels = [p for p in percentiles if p == 50 or len(x) * min(p, 100 - p) / 100 >= tail]
    values = np.percentile(x, levels)
    lows, highs = _intervals(x, levels, seed)
    lows, highs = np.minimum(lows, values), np.maximum(highs, values)  # intervals of fewer samples may not include it
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
    """A number with a measurement's significant digits."""
    return float(f"{value:.{digits}g}")
