"""The requests of a simulation: arrival times, lengths and parameters."""

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError

AZURE = Path(__file__).parent / "workloads" / "azure_conversations.csv"
TOKENS = (1, 1 << 20)
COLUMNS = {  # lowest and highest value of each column
    "arrival_s": (0, 10**8),
    "prompt_tokens": TOKENS,
    "generated_tokens": TOKENS,
    "max_tokens": TOKENS,
    "priority": (-(1 << 31), (1 << 31) - 1),
}
REQUIRED = tuple(COLUMNS)[:3]
SMALLEST_LIMIT = 16  # tokens


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, arrays [n].

    arrival_ns: int64, since the first arrival.
    prompt, output: tokens.
    max_tokens: the client's limit, visible to policies; the output's length is not.
    priority: the request's priority.
    """

    arrival_ns: NDArray[np.int64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    priority: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def first(self, count: int) -> "Workload":
        """The first `count` requests."""
        return Workload(*(getattr(self, field.name)[:count] for field in dataclasses.fields(self)))

    def at_rate(self, rate: float) -> "Workload":
        """A copy with arrival times scaled to a mean of `rate` requests/s; unchanged if the rate is 0."""
        span = self.arrival_ns[-1]
        if rate == 0 or span == 0:
            return self
        scaled = self.arrival_ns * (((len(self) - 1) * 1e9 / rate) / span)
        return dataclasses.replace(self, arrival_ns=scaled.astype(np.int64))

    @property
    def longest(self) -> int:
        """The greatest possible number of tokens of a sequence: prompt plus max_tokens."""
        return int((self.prompt + self.max_tokens).max())


def load_workload(name: str) -> Workload:
    """Load a workload: 'azure', or a CSV file with `#` comments, a header, and the columns REQUIRED and
    optionally the other COLUMNS.

    The default of max_tokens is the output's length rounded up to a power of two, at least SMALLEST_LIMIT. Raises
    ConfigError with the line for invalid input.
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
    table = [_read(f"workload {path}, line {number}", line, columns) for number, line in numbered[1:]]
    table.sort(key=lambda row: row["arrival_s"])
    values = {column: np.array([row[column] for row in table]) for column in table[0]}
    output = values["generated_tokens"].astype(np.int64)
    limits = np.maximum(SMALLEST_LIMIT, 2 ** np.ceil(np.log2(output)).astype(np.int64))
    if "max_tokens" in values:
        limits = np.maximum(output, values["max_tokens"].astype(np.int64))
    return Workload(
        arrival_ns=((values["arrival_s"] - values["arrival_s"][0]) * 1e9).astype(np.int64),
        prompt=values["prompt_tokens"].astype(np.int64),
        output=output,
        max_tokens=limits,
        priority=values.get("priority", np.zeros(len(table))).astype(np.int64),
    )


def _read(where: str, line: str, columns: list[str]) -> dict[str, float]:
    """The known columns of a line. Raises ConfigError that begins with `where`."""
    try:
        row = {name: float(text) for name, text in zip(columns, next(csv.reader([line])), strict=True) if name in COLUMNS}
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    for name, value in row.items():
        low, high = COLUMNS[name]
        if not low <= value <= high:
            raise ConfigError(f"{where}: {name} must be {low} to {high}, not {value:g}")
    return row
