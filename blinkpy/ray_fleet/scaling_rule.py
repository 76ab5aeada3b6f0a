"""How many engines a fleet should have: a pure function of the gauges of front ends. It does not depend on
Ray.

Each target gives the number of engines that the load needs; the highest number counts. The fleet grows as
soon as necessary, at the earliest `up_s` after the last change. It shrinks once the load has allowed it for
`down_s` without a break, to the number that the peak of that time needs. So no load, however it changes,
makes the number go down within `down_s` of any change, nor up within `up_s`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from blinkpy.config import option
from blinkpy.top.server_sample import ServerSample

NEVER = -math.inf
TTFT_HOLD = 0.5  # of the target: above it, no engine goes


@dataclass(frozen=True)
class ScaleTargets:
    """When there are more or fewer engines. A target of 0 counts for nothing."""

    requests: int = option(64, "requests that run or wait, for each engine", low=0, high=1 << 20)
    waiting_tokens: int = option(0, "tokens of prompts that wait, for each engine", low=0, high=1 << 30)
    free_pages: float = option(0.1, "share of the pages that is free or cached, at least", low=0, high=0.9)
    ttft_ms: int = option(0, "time to first token, P90, at most", low=0, high=3_600_000)
    interval_s: float = option(2.0, "seconds from look to look", low=0.1, high=600)
    up_s: float = option(15.0, "seconds from a change to the next engines, at least", low=0, high=86_400)
    down_s: float = option(300.0, "seconds of less load before an engine goes", low=1, high=86_400)

    @property
    def has_target(self) -> bool:
        return bool(self.requests or self.waiting_tokens or self.free_pages or self.ttft_ms)


class FleetGauges(NamedTuple):
    """A look at a fleet. engines: that serve. running, waiting: requests; waiting_tokens: of their prompts. free_pages: share of
    all pages, in [0, 1]. ttft_s: P90 since the last look, None where nothing began."""

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
    seen: (s, required engines) of earlier samples, the oldest first: those of the last down_s, and one before.
    """

    size: int
    changed_at: float = NEVER
    seen: tuple[tuple[float, int], ...] = ()

    def after(self, gauges: FleetGauges, now: float, wanted: int, targets: ScaleTargets) -> "ScaleHistory":
        """With this look, and the size that followed from it."""
        seen = (*self.seen, (now, needed_engines(gauges, targets)))
        first = max((index for index, (at, _) in enumerate(seen) if at <= now - targets.down_s), default=0)
        changed_at = now if wanted != self.size else self.changed_at
        return replace(self, size=wanted, changed_at=changed_at, seen=seen[first:])

    def interrupted(self) -> "ScaleHistory":
        """Nothing was seen for a while."""
        return replace(self, seen=())


def needed_engines(gauges: FleetGauges, targets: ScaleTargets) -> int:
    """Engines that the load needs by the targets; it may be any number from 0 on."""
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
    """Engines that there should be from now on, within bounds (least, most). now: s, of history's clock."""
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
    """The gauges of the front ends' samples, by number, and of earlier samples. None without any answer.

    Every front end reports all engines, so the highest value counts; each front end has its own queue and
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
    prompt = most("engine_prompt_tokens_total") / max(1.0, most("engine_requests_accepted_total"))  # as long as the others were
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
