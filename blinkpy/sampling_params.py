"""How `LLM` generates: vLLM's names for the parameters of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.request_parameters import RequestParameters, in_limits
from blinkpy.queues.submission import STOP_IDS

OPTIONAL = frozenset({"max_tokens", "seed", "logprobs"})  # sampling parameters that may be None


@dataclass(frozen=True)
class SamplingParams:
    """How to generate; vLLM's names and defaults. max_tokens None: up to the model's context. logprobs: of the generated
    tokens and of that many (0 to 20) most likely ones, from the model's distribution before penalties and temperature.

    Raises ValueError for a value outside its range. temperature 0 is greedy; top_k 0 or -1 is off.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    priority: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("stop", "stop_token_ids", "ignore_eos") or (value is None and item.name in OPTIONAL):
                continue
            whole = not isinstance(item.default, float)
            fine = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not fine or not in_limits(item.name, value):
                raise ValueError(f"{item.name} is {value!r}")
        stops = self.stops()
        if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise ValueError(f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters, not {self.stop!r}")

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, room: int, eos_ids: Sequence[int]) -> RequestParameters:
        """What the engine gets. room: tokens that the context leaves for the output."""
        ids = tuple(dict.fromkeys([*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)]))
        if len(ids) > STOP_IDS:
            raise ValueError(f"{len(ids)} stop token ids with the model's own; at most {STOP_IDS} are possible")
        if self.max_tokens is not None and self.max_tokens > room:
            raise ValueError(f"max_tokens is {self.max_tokens}, and the context leaves {room}")
        return RequestParameters(
            max_tokens=room if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            priority=self.priority,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            stop_ids=ids,
        )
