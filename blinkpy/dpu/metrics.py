"""Metrics of the front end, and the engine's from shared memory, as Prometheus text.

Every worker writes its own block of float64 in memory that all workers share, so each of them can answer for all. The
engine's counters are read from the queue segment, at no cost to the engine.
"""

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from blinkpy.queues.words import COUNTER, ENGINE_HEARTBEAT, ENGINE_STATE, ENGINE_STEPS, GAUGE, STATE_NAMES

STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 503)
COUNTERS = {
    "prompt_tokens": "Prompt tokens handed to the engine",
    "generated_tokens": "Generated tokens received",
    "disconnects": "Requests cancelled because the client went away",
    "slow_clients": "Requests cancelled because the client did not read",
    "engine_losses": "Times that the engine or the lease was lost",
    "bodies_given_up": "Bodies refused because too many bytes were arriving (body_room_mib)",
    "unread_given_up": "Connections closed because clients left too much unread (unread_room_mib)",
    "preparations_refused": "Requests refused because too many waited to be tokenized (max_preparing, body_room_mib)",
    "stray_completions": "Completions for slots without a request; should stay 0",
}
GAUGES = {
    "requests_in_flight": "Requests that hold a slot",
    "attached": "1 while the worker has its queue pair",
    "connections": "Open connections",
    "arriving_bytes": "Bytes of bodies that have not arrived in full",
    "unread_bytes": "Bytes of answers that clients have not taken",
    "preparing": "Requests that wait to be tokenized, or are",
}


class HistogramShape(NamedTuple):
    """Name, help text and upper bounds of the buckets, in seconds."""

    name: str
    help: str
    bounds: tuple[float, ...]


HISTOGRAMS = (
    HistogramShape(
        "time_to_first_token_seconds",
        "From the request's arrival to its first token",
        (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
    ),
    HistogramShape(
        "inter_token_latency_seconds",
        "Between two events of one request",
        (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
    ),
    HistogramShape(
        "request_duration_seconds",
        "From the request's arrival to its last token",
        (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
    ),
)

# A block has one place for each of these, and then those of the histograms: one for each bucket, one above all, the sum.
_PLACES = {name: place for place, name in enumerate((*STATUSES, "other", *COUNTERS, *GAUGES))}
*_HISTOGRAM_AT, BLOCK = accumulate((len(shape.bounds) + 2 for shape in HISTOGRAMS), initial=len(_PLACES))
BLOCK_BYTES = BLOCK * 8


class Histogram:
    """One histogram of one worker."""

    __slots__ = ("_bounds", "_start", "_sum", "_values")

    def __init__(self, values: "memoryview[float]", which: int):
        self._values, self._bounds, self._start = values, HISTOGRAMS[which].bounds, _HISTOGRAM_AT[which]
        self._sum = self._start + len(self._bounds) + 1

    def observe(self, value: float) -> None:
        self._values[self._start + bisect_left(self._bounds, value)] += 1.0
        self._values[self._sum] += value


class Metrics:
    """One worker's block in `memory`, which holds BLOCK_BYTES for each of `workers` workers (default: of its own)."""

    def __init__(self, worker: int = 0, workers: int = 1, memory: memoryview | None = None):
        self.worker, self.workers = worker, workers
        self._all = (memory if memory is not None else memoryview(bytearray(workers * BLOCK_BYTES))).cast("B").cast("d")
        self._own = self._all[worker * BLOCK : (worker + 1) * BLOCK]
        for i in range(BLOCK):  # an earlier worker may have left values
            self._own[i] = 0.0
        histograms = (Histogram(self._own, which) for which in range(len(HISTOGRAMS)))
        self.time_to_first_token, self.inter_token_latency, self.request_duration = histograms

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to one of COUNTERS."""
        self._own[_PLACES[name]] += amount

    def gauge(self, name: str, value: float) -> None:
        """Set one of GAUGES."""
        self._own[_PLACES[name]] = value

    def gauge_of_all(self, name: str) -> float:
        """Sum of one of GAUGES over all workers."""
        return sum(self._all[w * BLOCK + _PLACES[name]] for w in range(self.workers))

    def response(self, status: int) -> None:
        """Count a response by its status."""
        self._own[_PLACES.get(status, _PLACES["other"])] += 1.0

    def render(self, engine: list[int] | None) -> bytes:
        """The exposition. engine: the words of the engine's block, None while there is no engine."""
        lines: list[str] = []

        def head(name: str, kind: str, help: str) -> None:
            lines.append(f"# HELP blinkpy_{name} {help}")
            lines.append(f"# TYPE blinkpy_{name} {kind}")

        head("engine_up", "gauge", "1 while this worker has a queue pair of a running engine")
        lines.append(f"blinkpy_engine_up {int(engine is not None)}")
        if engine is not None:
            head("engine_state", "gauge", "1 for the state that the engine is in")
            for i, name in enumerate(STATE_NAMES):
                lines.append(f'blinkpy_engine_state{{state="{name}"}} {int(engine[ENGINE_STATE] == i)}')
            for name, index in {"heartbeats": ENGINE_HEARTBEAT, "steps": ENGINE_STEPS, **COUNTER}.items():
                head(f"engine_{name}_total", "counter", f"The engine's count of {name.replace('_', ' ')}")
                lines.append(f"blinkpy_engine_{name}_total {engine[index]}")
            for name, index in GAUGE.items():
                head(f"engine_{name}", "gauge", f"The engine's {name.replace('_', ' ')} as of its last step")
                lines.append(f"blinkpy_engine_{name} {engine[index]}")
        blocks = [(w, self._all[w * BLOCK : (w + 1) * BLOCK]) for w in range(self.workers)]
        head("http_responses_total", "counter", "HTTP responses by status")
        for w, values in blocks:
            for status in (*STATUSES, "other"):
                if count := values[_PLACES[status]]:
                    lines.append(f'blinkpy_http_responses_total{{worker="{w}",status="{status}"}} {count:.0f}')
        for kind, ending, table in (("counter", "_total", COUNTERS), ("gauge", "", GAUGES)):
            for name, help in table.items():
                head(f"{name}{ending}", kind, help)
                lines.extend(f'blinkpy_{name}{ending}{{worker="{w}"}} {values[_PLACES[name]]:.0f}' for w, values in blocks)
        for shape, start in zip(HISTOGRAMS, _HISTOGRAM_AT, strict=True):
            head(shape.name, "histogram", shape.help)
            for w, values in blocks:
                total = 0.0
                for i, bound in enumerate((*shape.bounds, "+Inf")):
                    total += values[start + i]
                    le = bound if isinstance(bound, str) else f"{bound:g}"
                    lines.append(f'blinkpy_{shape.name}_bucket{{worker="{w}",le="{le}"}} {total:.0f}')
                lines.append(f'blinkpy_{shape.name}_sum{{worker="{w}"}} {values[start + len(shape.bounds) + 1]:.9g}')
                lines.append(f'blinkpy_{shape.name}_count{{worker="{w}"}} {total:.0f}')
        return ("\n".join(lines) + "\n").encode()
