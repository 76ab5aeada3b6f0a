"""What another engine needs to go on with a generation."""

from dataclasses import dataclass, field

from blinkpy.queues.array_types import Int32
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters


@dataclass(slots=True, eq=False)
class Flight:
    """Of one generation. prompt: int32 [n], the client's. sampling: as its request asked, with a seed. grammar: as it was asked
    for. output: tokens that were pushed to the generation, all of them."""

    prompt: Int32
    sampling: RequestParameters
    grammar: ByteAutomaton | None = None
    output: list[int] = field(default_factory=list)
    engine: int = -1  # that has its request; -1: none
    cost: int = 0  # tokens that the engine has outstanding for it
    scores_due: int = 0  # completions that come before its output
    moves: int = 0  # to other engines
    paused_s: float = 0.0  # between engines, all pauses together
    paused_at: float = 0.0  # s of the monotonic clock; in a pause
