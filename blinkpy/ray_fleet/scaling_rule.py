"""The number of engines that a fleet should have: a pure function of the front ends' gauges, independent of
Ray.

Each target gives the number of engines that the load needs; the highest number counts. The fleet grows as
soon as necessary, but at least `up_s` after the last change. It shrinks when the load has permitted it for
`down_s` without interruption, to the number that the peak of that time needs. So whatever the load, the number
falls at the earliest `down_s` after a change, and rises at the earliest `up_s` after one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from blinkpy.config import option
from blinkpy.top.server_sample import ServerSample

NEVER = -math.inf
TTFT_HOLD = 0.5  # share of the target above which no engine is removed


@dataclass(frozen=True)
class ScaleTargets:
    """Targets that decide when engines are added or removed. 0 disables a target."""

    requests: int = option(64, "running and waiting requests per engine", low=0, high=1 << 20)
    waiting_tokens: int = option(0, "waiting prompt tokens per engine", low=0, high=1 << 30)
    free_pages: float = option(0.1, "minimum share of pages that are free or cached", low=0, high=0.9)
    ttft_ms: int = option(0, "maximum P90 of the time to first token, in ms", low=0, high=3_600_000)
    interval_s: float = option(2.0, "time between two samples of the load, in seconds", low=0.1, high=600)
    up_s: float = option(15.0, "minimum time from a change to adding engines, in seconds", low=0, high=86_400)
    down_s: float = option(300.0, "time of lower load before an engine is removed, in seconds", low=1, high=86_400)

    @property
    def has_target(self) -> bool:
        return bool(self.requests or self.waiting_tokens or self.free_pages or self.ttft_ms)


class FleetGauges(NamedTuple):
    """A sample of a fleet's load.

    engines: serving engines.
    running, waiting: requests.
    waiting_tokens: prompt tokens of waiting requests.
    free_pages: share of all pages, in [0, 1].
    ttft_s: P90 since the last sample; None without new requests.
    """

    engines: int
    running: float
    waiting: float
    waiting_tokens: float
    free_pages: float
    ttft_s: float | None


@dataclass(frozen=True)
class ScaleHistory:
    """The rule's history.

    size: engines that exist or are being started.
    changed_at: time of its last change, s.
    seen: (s, required engines) of earlier samples, the oldest first: all samples of the last down_s, and one
        older sample.
    """

    size: int
    changed_at: float = NEVER
    seen: tuple[tuple[float, int], ...] = ()

    def after(self, gauges: FleetGauges, now: float, wanted: int, targets: ScaleTargets) -> "ScaleHistory":
        """The history with this sample, and the size that followed from it."""
        seen = (*self.seen, (now, needed_engines(gauges, targets)))
        first = max((index for index, (at, _) in enumerate(seen) if at <= now - targets.down_s), default=0)
        changed_at = now if wanted != self.size else self.changed_at
        return replace(self, size=wanted, changed_at=changed_at, seen=seen[first:])

    def interrupted(self) -> "ScaleHistory":
        """The history after a time without samples."""
        return replace(self, seen=())


def needed_engines(gauges: FleetGauges, targets: ScaleTargets) -> int:
    """Engines that the load needs by the targets: any number from 0."""
    needed = 0
    if targets.requests:
        needed = math.ceil((gauges.running + gauges.waiting) / targets.requests)
    if targets.waiting_tokens:
        needed = max(needed, math.ceil(gauges.waiting_tokens / targets.waiting_tokens))
    if targets.free_pages:
        used = gauges.engines * (1.0 - gauges.free_pages)
        needed = max(needed, math.ceil(used / (1.0 - targets.free_pages) - 1e-9))
    if targets.ttft_ms and gauges.ttft_s is not None:
        share = gauges.ttft_s * 1000 / targets.ttft_ms
        needed = max(needed, gauges.engines + (share > 1.0) if share > TTFT_HOLD else 0)
    return needed


def wanted_engines(gauges: FleetGauges, now: float, history: ScaleHistory, targets: ScaleTargets, bounds: tuple[int, int]) -> int:
    """The number of engines to run, within bounds (least, most). now: s, of the history's clock."""
    least, most = bounds
    size = min(max(history.size, least), most)
    needed = min(max(needed_engines(gauges, targets), least), most)
    since = now - history.changed_at
    if needed > size:
        return needed if since >= targets.up_s else size
    calm = bool(history.seen) and history.seen[0][0] <= now - targets.down_s and since >= targets.down_s
    if needed == size or not calm or gauges.engines < size:
        return size
    peak = max(number for _, number in history.seen)
    return min(size, max(needed, peak, least))


TTFT, QUANTILE = "time_to_first_token_seconds", 0.9


def fleet_gauges(now: Mapping[int, ServerSample], before: Mapping[int, ServerSample]) -> FleetGauges | None:
    """The gauges from front ends' samples, by number, and earlier samples. None if no front end answered.

    Every front end reports all engines, so the highest value counts. Each front end has its own queue and
    histograms.
    """
    answered = {number: sample for number, sample in now.items() if not sample.problem}
    if not answered:
        return None
    samples = list(answered.values())

    def most(name: str) -> float:
        return max(sample.get(name) for sample in samples)

    queued = sum(sample.get("waiting_requests") for sample in samples)
    waiting = most("engine_requests_waiting") + queued
    prompt = most("engine_prompt_tokens_total") / max(1.0, most("engine_requests_accepted_total"))  # assumes average prompts
    return FleetGauges(
        engines=round(most("each_engine_up")),
        running=most("engine_requests_running"),
        waiting=waiting,
        waiting_tokens=waiting * prompt,
        free_pages=min(map(_free_pages, samples)),
        ttft_s=max(
            filter(None, (sample.quantile(before.get(n), TTFT, QUANTILE) for n, sample in answered.items())), default=None
        ),
    )


def _free_pages(sample: ServerSample) -> float:
    free = sample.get("engine_pages_free") + sample.get("engine_pages_cached")
    pages = free + sample.get("engine_pages_held")
    return free / pages if pages else 1.0
