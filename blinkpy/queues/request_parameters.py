"""What a request asks of the engine: limits and sampling, as they go into a submission entry."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.submission import SQ_ENTRY, SQ_ENTRY_BYTES, STOP_IDS

SEED_RANGE = (-(2**63), 2**63 - 1)
INT32_RANGE = (-(2**31), 2**31 - 1)

# One struct.pack for the 128 bytes, from the one definition of the record in blinkpy.queues.submission.
_KINDS = {"i8": "q", "i4": "i", "f4": "f"}


def _format() -> str:
    parts = ["<"]
    for name in SQ_ENTRY.names or ():
        field = SQ_ENTRY[name]
        count = field.shape[0] if field.shape else 1
        parts.append(_KINDS[field.base.str[1:]] * count)
    return "".join(parts)


ENTRY = struct.Struct(_format())
if ENTRY.size != SQ_ENTRY_BYTES:
    raise ImportError(f"a submission entry packs to {ENTRY.size} bytes, the layout has {SQ_ENTRY_BYTES}")


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Limits and sampling parameters of one request; fields as in blinkpy.queues.submission.SQ_ENTRY.

    Values are checked where they come from (the protocol, or blinkpy.LLM), against LIMITS. stop_ids: at most STOP_IDS
    token ids that end the request, end-of-sequence ids included. seed None: a random one.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    priority: int = 0
    cache_salt: int = 0
    flags: int = 0
    logprobs: int = -1
    stop_ids: tuple[int, ...] = ()

    def pack(
        self, request_id: int, epoch: int, slot: int, prompt_offset: int, prompt_length: int, hash_offset: int, hash_count: int
    ) -> bytes:
        """The submission entry. Raises ValueError when there are more stop ids than an entry holds, or a value
        overflows."""
        stops = self.stop_ids
        if len(stops) > STOP_IDS:
            raise ValueError(f"at most {STOP_IDS} stop ids fit into a submission entry, not {len(stops)}")
        try:
            return ENTRY.pack(
                request_id,
                random_seed() if self.seed is None else self.seed,
                self.cache_salt,
                epoch,
                slot,
                prompt_offset,
                prompt_length,
                hash_offset,
                hash_count,
                self.max_tokens,
                self.min_tokens,
                self.priority,
                self.flags,
                self.temperature,
                self.top_p,
                self.min_p,
                self.top_k,
                self.repetition_penalty,
                self.presence_penalty,
                self.frequency_penalty,
                self.logprobs,
                *stops,
                *(-1,) * (STOP_IDS - len(stops)),
            )
        except (struct.error, OverflowError) as error:
            raise ValueError(f"a sampling parameter does not fit into a submission entry: {error}") from error


# Inclusive bounds; (low, high). Below-zero top_k means off, as in vLLM.
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),  # 0 itself is refused
    "min_p": (0.0, 1.0),
    "top_k": (-1, INT32_RANGE[1]),
    "repetition_penalty": (0.0, 100.0),  # 0 itself is refused
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": SEED_RANGE,
    "priority": INT32_RANGE,
    "min_tokens": (0, INT32_RANGE[1]),
    "max_tokens": (1, INT32_RANGE[1]),
    "logprobs": (0, TOP_LOGPROBS),
    "top_logprobs": (0, TOP_LOGPROBS),
}
ABOVE_ZERO = frozenset({"top_p", "repetition_penalty"})  # their lower bound is not allowed itself
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def random_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(63)


def in_limits(name: str, value: float) -> bool:
    """Whether a parameter's value is allowed."""
    low, high = LIMITS[name]
    return low <= value <= high and not (name in ABOVE_ZERO and value == low)


def default_sampling(generation_config: Mapping[str, Any]) -> RequestParameters:
    """Defaults from a model's generation_config.json, as vLLM takes them; `do_sample: false` there means greedy.

    Values that are null are skipped. Raises ValueError for one that is out of range.
    """
    values: dict[str, Any] = {}
    for name in GENERATION_DEFAULTS:
        value = generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not in_limits(name, value):
            raise ValueError(f"generation_config.json: {name} is {value!r}")
        values[name] = max(0, int(value)) if name == "top_k" else float(value)
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    return replace(RequestParameters(), **values)
