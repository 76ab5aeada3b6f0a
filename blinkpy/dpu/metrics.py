"""Metrics of the front end. Every worker writes its own block of float64 in memory shared by all workers, so
that each worker can report all of them (blinkpy.dpu.watch.exposition).
"""

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)
# Options that limit clients; a counter counts the refusals by each.
LIMITS = (
    *("max_connections", "max_header_bytes", "max_header_count", "max_pipelined", "header_timeout_s"),
    *("max_body_bytes", "max_body_chunks", "max_body_values", "max_body_depth", "body_timeout_s", "prepare_ms"),
    *("grammar_compile_ms", "grammar_compile_mib", "send_timeout_s", "close_timeout_s", "max_lag_ms"),
)
COUNTERS = {
    **{f"refused_{name}": f"Requests refused and connections closed because of {name}" for name in LIMITS},
    "prompt_tokens": "Prompt tokens submitted to the engine",
    "generated_tokens": "Generated tokens received",
    "prediction_tokens": "Tokens of the predictions of ended requests",
    "accepted_prediction_tokens": "Accepted drafts from the predictions of ended requests",
    "grammar_writes": "Grammars and token rules written to the engine's memory",
    "grammar_written_bytes": "Bytes of grammars and token rules written to the engine's memory",
    "grammar_hits": "Grammars and token rules of requests already in the engine's memory",
    "disconnects": "Requests cancelled because the client disconnected",
    "slow_clients": "Requests cancelled because the client did not read its responses",
    "engine_losses": "Losses of an engine or of a lease",
    "bodies_given_up": "Bodies refused because too many bytes were arriving (body_budget_mib)",
    "unread_given_up": "Connections closed because clients left too many bytes unread (unread_budget_mib)",
    "answers_given_up": "Requests ended because unstreamed responses used too much memory (answer_budget_mib)",
    "preparations_refused": "Requests refused because too many waited for tokenization (max_preparing, body_budget_mib)",
    "refused_max_waiting_tokens": "Requests refused because too many tokens waited for a slot",
    "refused_max_flex_waiting_tokens": "Requests refused because too many tokens of service tier flex waited for a slot",
    "refused_max_waiting_s": "Requests refused because they waited too long for a slot",
    "refused_waiting_tokens": "Requests refused because too many tokens of their key waited (waiting_tokens)",
    "refused_tokens_per_minute": "Requests refused because their key had used its tokens (tokens_per_minute)",
    "placement_faults": "Requests sent to the least loaded engine because the placement failed",
    "moves": "Requests continued by another engine",
    "moves_refused": "Requests that lost their engine and could not continue on another engine",
    "stray_completions": "Completions for slots without a request; should stay 0",
}
GAUGES = {
    "requests_in_flight": "Requests that hold a slot",
    "slots": "Maximum requests in flight of the worker",
    "waiting_requests": "Requests that wait for a slot",
    "waiting_tokens": "Sum of prompt tokens and max_tokens of requests that wait for a slot",
    "attached": "Queue pairs of the worker, one per engine",
    "connections": "Open connections",
    "arriving_bytes": "Received bytes of incomplete bodies",
    "unread_bytes": "Response bytes that clients have not read",
    "answer_bytes": "Memory of unfinished unstreamed responses, bytes",
    "lag_seconds": "Time for which the next request has waited for the worker to begin it",
    "preparing": "Requests in tokenization, or waiting for it",
}
METERS = {  # of the GPU, set only by the first worker; 0 without a meter
    "gpu_energy_joules_total": "Energy used by the GPU since its driver was loaded, J",
    "gpu_power_watts": "Power drawn by the GPU, W",
    "gpu_joules_per_token": "Energy per generated token in the last minute, J, including the GPU's idle power",
}
ENDINGS = ("stop", "length", "abort", "error")


class HistogramShape(NamedTuple):
    """A histogram.

    attribute: an attribute of Metrics.
    name, help: the metric's name and help text for Prometheus.
    bounds: upper bounds of the buckets, s or tokens.
    """

    attribute: str
    name: str
    help: str
    bounds: tuple[float, ...]


_WAITS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_RUNS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_SIZES = tuple(4.0**n for n in range(10))
HISTOGRAMS = (
    HistogramShape(
        "time_to_first_token",
        "time_to_first_token_seconds",
        "Time from the request's arrival to its first token",
        (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
    ),
    HistogramShape("inter_token_latency", "inter_token_latency_seconds", "Time between two events of one request", _GAPS),
    HistogramShape("request_duration", "request_duration_seconds", "Time from the request's arrival to its last token", _RUNS),
    HistogramShape(
        "front_end_time",
        "front_end_time_seconds",
        "Time from the request's arrival to its submission to the engine, without the wait for a slot",
        _WAITS,
    ),
    HistogramShape("queue_time", "queue_time_seconds", "Wait for a slot, and in the engine until its run", _WAITS),
    HistogramShape("prefill_time", "prefill_time_seconds", "Time from the start of its run to its first token", _WAITS),
    HistogramShape("inference_time", "inference_time_seconds", "Time from the start of its run to its last token", _RUNS),
    HistogramShape("decode_time", "decode_time_seconds", "Time from the first token to the last one", _RUNS),
    HistogramShape(
        "time_per_output_token",
        "time_per_output_token_seconds",
        "Mean time per token after the first",
        _GAPS,
    ),
    HistogramShape("prompt_length", "request_prompt_tokens", "Prompt tokens of a request", _SIZES),
    HistogramShape("output_length", "request_generated_tokens", "Generated tokens of a request", _SIZES),
)

# A block has a place for each of these, then for each histogram: its buckets, the values above all bounds,
# the sum.
_SINGLE: tuple[int | str, ...] = (*STATUSES, "other", *COUNTERS, *GAUGES, *METERS, *ENDINGS)
_PLACES = {name: place for place, name in enumerate(_SINGLE)}
*_HISTOGRAM_AT, BLOCK = accumulate((len(shape.bounds) + 2 for shape in HISTOGRAMS), initial=len(_PLACES))
BLOCK_BYTES = BLOCK * 8


class Histogram:
    """One worker's histogram."""

    __slots__ = ("_bounds", "_start", "_sum", "_values")

    def __init__(self, values: "memoryview[float]", which: int):
        self._values = values
        self._bounds = HISTOGRAMS[which].bounds
        self._start = _HISTOGRAM_AT[which]
        self._sum = self._start + len(self._bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        self._values[self._start + bisect_left(self._bounds, value)] += times
        self._values[self._sum] += value * times


class Metrics:
    """One worker's metrics. memory: BLOCK_BYTES for each of `workers` workers; by default private memory."""

    def __init__(self, worker: int = 0, workers: int = 1, memory: memoryview | None = None):
        self.worker, self.workers = worker, workers
        self._all = (memory if memory is not None else memoryview(bytearray(workers * BLOCK_BYTES))).cast("B").cast("d")
        self._own = self._all[worker * BLOCK : (worker + 1) * BLOCK]
        for i in range(BLOCK):  # erase values of a predecessor
            self._own[i] = 0.0
        self._histograms = {shape.attribute: Histogram(self._own, which) for which, shape in enumerate(HISTOGRAMS)}
        self.time_to_first_token = self._histograms["time_to_first_token"]
        self.inter_token_latency = self._histograms["inter_token_latency"]
        self.request_duration = self._histograms["request_duration"]

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to one of COUNTERS."""
        self._own[_PLACES[name]] += amount

    def gauge(self, name: str, value: float) -> None:
        """Set one of GAUGES or METERS."""
        self._own[_PLACES[name]] = value

    def gauge_of_all(self, name: str) -> float:
        """Sum of one of GAUGES over all workers."""
        return sum(self.values(name))

    def refused(self, limit: str) -> None:
        """Count a refusal or a closed connection by one of LIMITS."""
        self.count(f"refused_{limit}")

    def response(self, status: int) -> None:
        """Count a response by its status."""
        self._own[_PLACES.get(status, _PLACES["other"])] += 1.0

    def ending(self, reason: str) -> None:
        """Count the end of a choice. reason: one of ENDINGS."""
        self._own[_PLACES[reason]] += 1.0

    def observe(self, attribute: str, value: float) -> None:
        """Add a value to one of HISTOGRAMS."""
        self._histograms[attribute].observe(value)

    def values(self, name: int | str) -> list[float]:
        """The values of all workers. name: a name in COUNTERS, GAUGES, METERS or ENDINGS, or a status."""
        return [self._all[w * BLOCK + _PLACES[name]] for w in range(self.workers)]

    def histogram(self, which: int) -> list[tuple[list[float], float]]:
        """For each worker, (counts of the buckets and of the values above all bounds, not cumulative; sum).
        which: index in HISTOGRAMS.
        """
        start, count = _HISTOGRAM_AT[which], len(HISTOGRAMS[which].bounds) + 1
        blocks = [list(self._all[w * BLOCK + start : w * BLOCK + start + count + 1]) for w in range(self.workers)]
        return [(values[:-1], values[-1]) for values in blocks]
