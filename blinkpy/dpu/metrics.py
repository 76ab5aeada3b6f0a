"""Metrics of the front end: every worker writes its own block of float64 in memory that all workers share, so each of them can
answer for all (blinkpy.dpu.watch.exposition)."""

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)
# Options that bound what one client may do: a counter tells how often each did.
LIMITS = (
    *("max_connections", "max_header_bytes", "max_header_count", "max_pipelined", "header_timeout_s"),
    *("max_body_bytes", "max_body_chunks", "max_body_values", "max_body_depth", "body_timeout_s", "prepare_ms"),
    *("grammar_compile_ms", "grammar_compile_mib", "send_timeout_s", "close_timeout_s", "max_lag_ms"),
)
COUNTERS = {
    **{f"refused_{name}": f"Requests refused and connections closed by the limit {name}" for name in LIMITS},
    "prompt_tokens": "Prompt tokens handed to the engine",
    "generated_tokens": "Generated tokens received",
    "grammar_writes": "Grammars and token rules of requests that were written into the engine's memory",
    "grammar_written_bytes": "Bytes of these",
    "grammar_hits": "Grammars and token rules of requests that were there already",
    "disconnects": "Requests cancelled because the client went away",
    "slow_clients": "Requests cancelled because the client did not read",
    "engine_losses": "Times that the engine or the lease was lost",
    "bodies_given_up": "Bodies refused because too many bytes were arriving (body_room_mib)",
    "body_wait_seconds": "Seconds that clients were not read from because bodies came too fast (body_mib_per_s), in all",
    "unread_given_up": "Connections closed because clients left too much unread (unread_room_mib)",
    "answers_given_up": "Requests ended because whole answers took too much memory (answer_room_mib)",
    "preparations_refused": "Requests refused because too many waited to be tokenized (max_preparing, body_room_mib)",
    "refused_max_waiting_tokens": "Requests refused because too many tokens waited for a slot of a worker",
    "refused_max_flex_waiting_tokens": "Requests refused because too many tokens of service tier flex waited for a slot",
    "refused_max_waiting_s": "Requests refused because they had waited too long for a slot",
    "refused_waiting_tokens": "Requests refused because too many tokens of their key waited (waiting_tokens)",
    "refused_tokens_per_minute": "Requests refused because their key had used its tokens (tokens_per_minute)",
    "placement_faults": "Requests that went to the least loaded engine because the placement raised, or gave none",
    "moves": "Requests that went on in another engine",
    "moves_refused": "Requests that lost their engine and could not, in time or at all",
    "stray_completions": "Completions for slots without a request; should stay 0",
}
GAUGES = {
    "requests_in_flight": "Requests that hold a slot",
    "slots": "Requests in flight that the worker may have",
    "waiting_requests": "Requests that wait for a slot",
    "waiting_tokens": "Their prompt tokens and max_tokens",
    "attached": "Queue pairs that the worker has: one of each engine",
    "connections": "Open connections",
    "arriving_bytes": "Bytes of bodies that have not arrived in full",
    "unread_bytes": "Bytes of answers that clients have not taken",
    "answer_bytes": "Memory of whole answers that are being generated",
    "lag_seconds": "How long the next request has waited for its worker to begin with it",
    "preparing": "Requests that wait to be tokenized, or are",
}
METERS = {  # of the GPU, by the first worker alone; 0 if there is none to read
    "gpu_energy_joules_total": "Energy that the GPU has used since its driver was loaded, J",
    "gpu_power_watts": "Power that the GPU draws, W",
    "gpu_joules_per_token": "Energy of a generated token in the last minute, J; all that the GPU used, idle power included",
}
ENDINGS = ("stop", "length", "abort", "error")


class HistogramShape(NamedTuple):
    """Attribute of Metrics, name, help text and upper bounds of the buckets, in seconds or tokens."""

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
        "From the request's arrival to its first token",
        (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
    ),
    HistogramShape("inter_token_latency", "inter_token_latency_seconds", "Between two events of one request", _GAPS),
    HistogramShape("request_duration", "request_duration_seconds", "From the request's arrival to its last token", _RUNS),
    HistogramShape(
        "front_end_time",
        "front_end_time_seconds",
        "From the request's arrival to its submission to the engine, without the wait for a slot",
        _WAITS,
    ),
    HistogramShape("queue_time", "queue_time_seconds", "For a slot, and in the engine until the request began to run", _WAITS),
    HistogramShape("prefill_time", "prefill_time_seconds", "From there to the first token", _WAITS),
    HistogramShape("inference_time", "inference_time_seconds", "From the begin of its run to the last token", _RUNS),
    HistogramShape("decode_time", "decode_time_seconds", "From the first token to the last one", _RUNS),
    HistogramShape("time_per_output_token", "time_per_output_token_seconds", "Mean of a request, behind its first token", _GAPS),
    HistogramShape("prompt_length", "request_prompt_tokens", "Tokens of a prompt", _SIZES),
    HistogramShape("output_length", "request_generated_tokens", "Tokens that were generated for a request", _SIZES),
)

# A block has one place for each of these, and then those of the histograms: one for each bucket, one above all, the sum.
_SINGLE: tuple[int | str, ...] = (*STATUSES, "other", *COUNTERS, *GAUGES, *METERS, *ENDINGS)
_PLACES = {name: place for place, name in enumerate(_SINGLE)}
*_HISTOGRAM_AT, BLOCK = accumulate((len(shape.bounds) + 2 for shape in HISTOGRAMS), initial=len(_PLACES))
BLOCK_BYTES = BLOCK * 8


class Histogram:
    """One histogram of one worker."""

    __slots__ = ("_bounds", "_start", "_sum", "_values")

    def __init__(self, values: "memoryview[float]", which: int):
        self._values, self._bounds, self._start = values, HISTOGRAMS[which].bounds, _HISTOGRAM_AT[which]
        self._sum = self._start + len(self._bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        self._values[self._start + bisect_left(self._bounds, value)] += times
        self._values[self._sum] += value * times


class Metrics:
    """One worker's block in `memory`, which holds BLOCK_BYTES for each of `workers` workers (default: of its own)."""

    def __init__(self, worker: int = 0, workers: int = 1, memory: memoryview | None = None):
        self.worker, self.workers = worker, workers
        self._all = (memory if memory is not None else memoryview(bytearray(workers * BLOCK_BYTES))).cast("B").cast("d")
        self._own = self._all[worker * BLOCK : (worker + 1) * BLOCK]
        for i in range(BLOCK):  # an earlier worker may have left values
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
        """Count what one of LIMITS has refused or closed."""
        self.count(f"refused_{limit}")

    def response(self, status: int) -> None:
        """Count a response by its status."""
        self._own[_PLACES.get(status, _PLACES["other"])] += 1.0

    def ending(self, reason: str) -> None:
        """Count a choice by how it ended, one of ENDINGS."""
        self._own[_PLACES[reason]] += 1.0

    def observe(self, attribute: str, value: float) -> None:
        """Note a value in one of HISTOGRAMS."""
        self._histograms[attribute].observe(value)

    def values(self, name: int | str) -> list[float]:
        """One of COUNTERS, GAUGES, METERS, ENDINGS, or of the statuses, of each worker."""
        return [self._all[w * BLOCK + _PLACES[name]] for w in range(self.workers)]

    def histogram(self, which: int) -> list[tuple[list[float], float]]:
        """Of each worker, one of HISTOGRAMS: the counts of its buckets with the one above all, not added up, and its sum."""
        start, count = _HISTOGRAM_AT[which], len(HISTOGRAMS[which].bounds) + 1
        blocks = [list(self._all[w * BLOCK + start : w * BLOCK + start + count + 1]) for w in range(self.workers)]
        return [(values[:-1], values[-1]) for values in blocks]
