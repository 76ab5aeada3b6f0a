"""The offered load: lengths from a data set, arrival times, prompts.

Lengths and arrivals follow from a seed, so every system gets the same load. The prompts' contents are new in each run,
so no cache contains them.
"""

import csv
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.harness import ROOT, UsageError
from benchmarks.common.load import Request

SENSITIVE, BEST_EFFORT = "priority", "flex"  # service tiers
DATA_SETS = "fixed:IN:OUT, spread:LOW-HIGH:LOW-HIGH, lognormal:IN:OUT, sharegpt, azure, azure:FILE"
SPREAD_ROWS = 1000
LOGNORMAL_SIGMA = 1.0  # of the logarithms of both lengths: a tail as long as that of conversations
# Mean tokens of ShareGPT's prompts and answers, as the vLLM paper has them (arXiv 2309.06180, section 6.1). The conversations
# themselves are not distributed with this project.
SHAREGPT = "161.31:337.99"
AZURE = ROOT / "benchmarks" / "data" / "azure_conversations_2023.csv"


def read_dataset(name: str, limit: int) -> NDArray[np.int32]:
    """Tokens of prompts and answers, int32 [n, 2]; sequences of more than limit tokens, both together, are left out.
    name: fixed:IN:OUT; spread:LOW-HIGH:LOW-HIGH, evenly in between; lognormal:IN:OUT, with these means; sharegpt, lognormal with
    SHAREGPT's; azure, the sample that ships; azure:FILE, a trace with its columns. Raises UsageError."""
    kind, _, rest = (f"lognormal:{SHAREGPT}" if name == "sharegpt" else name).partition(":")
    try:
        if kind == "fixed":
            prompt, answer = (int(word) for word in rest.split(":"))
            if min(prompt, answer) < 1:
                raise ValueError("lengths are at least 1")
            found = np.array([[prompt, answer]], np.int32)
        elif kind == "spread":
            bounds = [[int(word) for word in part.split("-")] for part in rest.split(":")]
            (least_in, most_in), (least_out, most_out) = bounds
            low, high = (least_in, least_out), (most_in, most_out)
            found = np.random.default_rng(1).integers(low, high, (SPREAD_ROWS, 2), np.int32, endpoint=True)
        elif kind == "lognormal":
            means = np.array([float(word) for word in rest.split(":")])
            if means.shape != (2,) or not (means >= 1).all():
                raise ValueError("two means of at least 1 are needed")
            drawn = np.random.default_rng(1).lognormal(np.log(means) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA, (SPREAD_ROWS, 2))
            found = np.maximum(1, drawn.round()).astype(np.int32)
        elif kind == "azure":
            with (Path(rest) if rest else AZURE).open(newline="") as lines:
                rows = [(row["ContextTokens"], row["GeneratedTokens"]) for row in csv.DictReader(lines)]
            found = np.array(rows, np.int32)
        else:
            raise ValueError(f"it is none of {DATA_SETS}")
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError(f"data set {name}: {error}") from error
    keep = (found.sum(1) <= limit) & (found.min(1) >= 1)
    if not keep.any():
        raise UsageError(f"data set {name}: nothing fits into {limit} tokens")
    return found[keep]


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Arrival times in [0, seconds) of independent arrivals; rate: mean per second."""
    times = np.empty(0)
    while not len(times) or times[-1] < seconds:
        gaps = rng.exponential(1 / rate, int(rate * seconds) + 16)
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
    return times[times < seconds]


def open_loop(lengths: NDArray[np.int32], rate: float, seconds: float, seed: int, vocabulary: int, text: bool) -> list[Request]:
    """Requests at Poisson arrival times, independent of the server's progress."""
    rng = np.random.default_rng([seed, round(1000 * rate)])
    due = poisson(rate, seconds, rng)
    return _requests(due, lengths[rng.integers(0, len(lengths), len(due))], vocabulary, text)


class Bursts(NamedTuple):
    """Simultaneous best-effort requests: their number, the tokens of each, and the seconds between bursts. The first
    burst is after half of these seconds."""

    requests: int
    prompt: int
    answer: int
    every_s: float


def two_classes(
    lengths: NDArray[np.int32], rate: float, seconds: float, sensitive: float, bursts: Bursts, seed: int, vocabulary: int
) -> list[Request]:
    """Poisson arrivals, partly latency-sensitive (tier priority) and partly best effort (flex), and bursts of best
    effort; in the order of their times. Prompts are token ids."""
    rng = np.random.default_rng([seed, round(1000 * rate)])
    due = poisson(rate, seconds, rng)
    sizes = lengths[rng.integers(0, len(lengths), len(due))]
    urgent = rng.random(len(due)) < sensitive
    starts = np.arange(bursts.every_s / 2, seconds, bursts.every_s)
    more = len(starts) * bursts.requests
    due = np.concatenate([due, np.repeat(starts, bursts.requests)])
    sizes = np.concatenate([sizes, np.full((more, 2), (bursts.prompt, bursts.answer), np.int32)])
    urgent = np.concatenate([urgent, np.zeros(more, bool)])
    order = np.argsort(due, kind="stable")
    requests = _requests(due[order], sizes[order], vocabulary, False)
    tiers = np.where(urgent[order], SENSITIVE, BEST_EFFORT).tolist()
    return [replace(request, tier=tier) for request, tier in zip(requests, tiers, strict=True)]


def closed_loop(lengths: NDArray[np.int32], streams: int, rounds: int, seed: int, vocabulary: int, text: bool) -> list[Request]:
    """Rounds of requests for each stream: request i belongs to stream i % streams, and waits for its predecessor's
    end."""
    rows = np.random.default_rng([seed, streams]).integers(0, len(lengths), streams * rounds)
    return _requests(np.zeros(len(rows)), lengths[rows], vocabulary, text)


def _requests(due: NDArray[np.float64], lengths: NDArray[np.int32], vocabulary: int, text: bool) -> list[Request]:
    fresh = np.random.default_rng()  # contents: new ones each time
    result = []
    for when, (tokens, answer) in zip(due, lengths.tolist(), strict=True):
        prompt: list[int] | str
        if text:
            prompt = " ".join(f"{word:x}" for word in fresh.integers(0, 1 << 16, max(1, tokens // 3)))
        else:
            prompt = fresh.integers(0, vocabulary, tokens).tolist()
        result.append(Request(float(when), prompt, answer))
    return result
