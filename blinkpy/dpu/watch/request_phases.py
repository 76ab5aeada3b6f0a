"""How long a choice spent where: from the front end's clock, and the engine's word on how long it waited there."""

from typing import NamedTuple

from blinkpy.dpu.generation import Generation


class RequestPhases(NamedTuple):
    """Seconds; None for what was not reached, or is not known. front_end: until the engine had the request, without its
    wait for a slot; queue: that wait, and until it ran; prefill: until the first token; decode: until the last."""

    front_end: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None


def phases_of(generation: Generation) -> RequestPhases:
    """The phases of a choice that has ended."""
    if not generation.submitted:
        return RequestPhases()
    front_end = generation.submitted - generation.arrival - generation.waited
    if not generation.first_event or generation.request is None:
        return RequestPhases(front_end)
    decode = generation.last_event - generation.first_event
    waited = generation.request.waited_ns
    if waited < 0:
        return RequestPhases(front_end, decode=decode)
    in_engine = generation.first_event - generation.submitted
    queue = min(waited / 1e9, in_engine)  # two clocks, and one of a millisecond's ticks
    return RequestPhases(front_end, generation.waited + queue, in_engine - queue, decode)


def ending_of(generation: Generation) -> str:
    """How a choice ended: one of blinkpy.dpu.metrics.ENDINGS."""
    return generation.finish_reason or ("error" if generation.error is not None else "abort")
