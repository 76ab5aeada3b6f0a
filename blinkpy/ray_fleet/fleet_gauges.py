"""The inputs of a fleet's scaling, from the /metrics of its front ends: numbers of requests, pages and
seconds.
"""

from collections.abc import Mapping

from blinkpy.ray_fleet.scaling_rule import FleetGauges
from blinkpy.top.server_sample import ServerSample

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
