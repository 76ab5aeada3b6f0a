"""What is asked of a server: lengths from a data set, arrival times, prompts.

Lengths and arrivals follow from a seed, so that every system is offered the same; the prompts' contents are drawn anew for each
run, so that no cache has met them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.harness import ROOT, UsageError
from benchmarks.common.load import Request

AZURE = ROOT / "benchmarks" / "data" / "azure_conversations_2023.csv"


class DatasetError(UsageError):
    """A data set that can't be used; the message is one line."""


@dataclass(frozen=True)
class Dataset:
    """lengths: int32 [n, 2], tokens of prompt and answer."""

    name: str
    lengths: NDArray[np.int32]


def read_dataset(name: str, limit: int) -> Dataset:
    """A data set by name; sequences of more than limit tokens (prompt and answer) are left out.

    name: fixed:IN:OUT; azure, the sample that ships; azure:FILE, the whole trace or another one with its columns. Raises
    DatasetError.
    """
    kind, _, rest = name.partition(":")
    try:
        if kind == "fixed":
            prompt, answer = (int(word) for word in rest.split(":"))
            if min(prompt, answer) < 1:
                raise ValueError("lengths are at least 1")
            found = Dataset(name, np.array([[prompt, answer]], np.int32))
        elif kind == "azure":
            found = _read_azure(Path(rest) if rest else AZURE)
        else:
            raise ValueError("it is none of fixed:IN:OUT, azure, azure:FILE")
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise DatasetError(f"data set {name}: {error}") from error
    keep = (found.lengths.sum(1) <= limit) & (found.lengths.min(1) >= 1)
    if not keep.any():
        raise DatasetError(f"data set {name}: nothing fits into {limit} tokens")
    return Dataset(f"{kind}:{Path(rest).name}" if kind != "fixed" and rest else name, found.lengths[keep])


def _read_azure(path: Path) -> Dataset:
    """Columns ContextTokens, GeneratedTokens."""
    with path.open(newline="") as lines:
        rows = [(row["ContextTokens"], row["GeneratedTokens"]) for row in csv.DictReader(lines)]
    return Dataset(str(path), np.array(rows, np.int32))


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Arrival times in [0, seconds) of independent arrivals, rate a second on average."""
    times = np.empty(0)
    while not len(times) or times[-1] < seconds:
        gaps = rng.exponential(1 / rate, int(rate * seconds) + 16)
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
    return times[times < seconds]


def open_loop(data: Dataset, rate: float, seconds: float, seed: int, vocabulary: int, text: bool) -> list[Request]:
    """Requests at times of their own, Poisson, whether or not the server keeps up."""
    rng = np.random.default_rng([seed, round(1000 * rate)])
    due = poisson(rate, seconds, rng)
    return _requests(data, due, rng.integers(0, len(data.lengths), len(due)), vocabulary, text)


def closed_loop(data: Dataset, streams: int, rounds: int, seed: int, vocabulary: int, text: bool) -> list[Request]:
    """rounds requests for each of the streams: request i belongs to stream i % streams, and waits for its predecessor's end."""
    rows = np.random.default_rng([seed, streams]).integers(0, len(data.lengths), streams * rounds)
    return _requests(data, np.zeros(len(rows)), rows, vocabulary, text)


def _requests(data: Dataset, due: NDArray[np.float64], rows: NDArray[np.int64], vocabulary: int, text: bool) -> list[Request]:
    fresh = np.random.default_rng()  # contents: new ones each time
    result = []
    for when, row in zip(due, rows, strict=True):
        tokens, answer = (int(value) for value in data.lengths[row])
        prompt: list[int] | str
        if text:
            prompt = " ".join(f"{word:x}" for word in fresh.integers(0, 1 << 16, max(1, tokens // 3)))
        else:
            prompt = fresh.integers(0, vocabulary, tokens).tolist()
        result.append(Request(float(when), prompt, answer))
    return result
