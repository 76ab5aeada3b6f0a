"""The requests of a simulation: when they arrive, how long they are, what they ask for."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError

AZURE = Path(__file__).parent / "workloads" / "azure_conversations.csv"
REQUIRED = ("arrival_s", "prompt_tokens", "generated_tokens")
OPTIONAL = ("max_tokens", "priority")
SMALLEST_LIMIT = 16  # tokens
TOKENS_AT_MOST = 1 << 20


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, arrays [n].

    arrival_ns: int64, from the first one on. prompt, output: tokens. max_tokens: what the client allows, and all that a policy
    sees of the output's length. priority: as given with the request.
    """

    arrival_ns: NDArray[np.int64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    priority: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def first(self, count: int) -> Workload:
        """The first `count` requests."""
        return Workload(*(getattr(self, field.name)[:count] for field in dataclasses.fields(self)))

    def at_rate(self, rate: float) -> Workload:
        """The same with times scaled to a mean of `rate` requests a second; as it is if the rate is 0."""
        span = self.arrival_ns[-1]
        if rate == 0 or span == 0:
            return self
        scaled = self.arrival_ns * (((len(self) - 1) * 1e9 / rate) / span)
        return dataclasses.replace(self, arrival_ns=scaled.astype(np.int64))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a request may become."""
        return int((self.prompt + self.max_tokens).max())


def usual_limit(output: NDArray[np.int64]) -> NDArray[np.int64]:
    """max_tokens of a client that knows its answers roughly: the next power of two, SMALLEST_LIMIT at least."""
    return np.maximum(SMALLEST_LIMIT, 2 ** np.ceil(np.log2(output)).astype(np.int64))


def load_workload(name: str) -> Workload:
    """'azure', or a CSV file: lines that begin with # are comments, then a head with the columns REQUIRED and maybe OPTIONAL.

    Raises ConfigError, with the line, for what can't be read.
    """
    path = AZURE if name == "azure" else Path(name)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"workload {path} can't be read: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    head = next(csv.reader([numbered[0][1]])) if numbered else []
    columns = [column.strip() for column in head]
    if missing := [column for column in REQUIRED if column not in columns]:
        raise ConfigError(f"workload {path} has no column {missing[0]}; it needs {', '.join(REQUIRED)}")
    if len(numbered) < 3:
        raise ConfigError(f"workload {path} has fewer than two requests")
    table = [_read(path, number, line, columns) for number, line in numbered[1:]]
    table.sort(key=lambda row: row["arrival_s"])
    first = table[0]["arrival_s"]
    output = np.array([row["generated_tokens"] for row in table], np.int64)
    limits = usual_limit(output)
    if "max_tokens" in columns:
        limits = np.maximum(output, np.array([row["max_tokens"] for row in table], np.int64))
    return Workload(
        arrival_ns=np.array([(row["arrival_s"] - first) * 1e9 for row in table], np.int64),
        prompt=np.array([row["prompt_tokens"] for row in table], np.int64),
        output=output,
        max_tokens=limits,
        priority=np.array([row.get("priority", 0) for row in table], np.int64),
    )


def _read(path: Path, number: int, line: str, columns: list[str]) -> dict[str, float]:
    try:
        row = {name: float(text) for name, text in zip(columns, next(csv.reader([line])), strict=True) if _known(name)}
    except ValueError as error:
        raise ConfigError(f"workload {path}, line {number}: {error}") from error
    for name in ("prompt_tokens", "generated_tokens", "max_tokens"):
        if not 1 <= row.get(name, 1) <= TOKENS_AT_MOST:
            raise ConfigError(f"workload {path}, line {number}: {name} must be 1 to {TOKENS_AT_MOST}, not {row[name]:g}")
    if not 0 <= row["arrival_s"] < 1e8:
        raise ConfigError(f"workload {path}, line {number}: arrival_s must be 0 to 1e8, not {row['arrival_s']:g}")
    if not -(1 << 31) <= row.get("priority", 0) < 1 << 31:
        raise ConfigError(f"workload {path}, line {number}: priority must fit 32 bits")
    return row


def _known(name: str) -> bool:
    return name in REQUIRED or name in OPTIONAL
