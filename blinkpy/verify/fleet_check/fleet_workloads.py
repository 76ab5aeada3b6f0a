"""Workloads of a fleet: requests with prompts, so that the prefix cache has hits."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from blinkpy.queues.array_types import Int32, Int64
from blinkpy.verify.policy_check.check_workload import Workload, load_workload
from blinkpy.verify.policy_check.timed_server import OTHER, STOP, VOCAB

NOBODY = -1
QUESTION = (16, 512)  # tokens behind a common start
GROUPS, GROUP_TOKENS, ZIPF = 192, (512, 2560), 0.9  # system prompts
CHAT_TURNS, CHAT_SYSTEMS, CHAT_SYSTEM_TOKENS, PAUSE_S, MOST_ANSWER = (2, 9), 8, 600, 12.0, 400
BURST_EVERY_S, BURST_REQUESTS, BURST_TOKENS, BURST_LASTS_S, BURST_SHARE = 10.0, 12, 1500, 0.2, 0.3


@dataclass(frozen=True)
class FleetWorkload:
    """requests: in the order of their numbers.
    prompts: int32 of each.
    follows: int64 [n]: each arrives pause_ns after the end of this request, or at its own time if NOBODY.
    """

    requests: Workload
    prompts: list[Int32]
    follows: Int64
    pause_ns: Int64

    def __len__(self) -> int:
        return len(self.prompts)


def azure(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Lengths of the Azure trace, and no two prompts have a common start. Poisson arrivals, as of all but chats."""
    lengths = _lengths(count, rng)
    prompts = [_tokens(int(n), rng) for n in lengths.prompt]
    return _open_loop(_poisson(count, rate, rng), prompts, lengths)


def shared_prefix(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """One of many system prompts, popular ones more often by Zipf's law, and a question."""
    groups = GROUPS * engines // 4 + 1
    systems = [_tokens(int(n), rng) for n in rng.integers(*GROUP_TOKENS, groups)]
    weights = 1 / np.arange(1, groups + 1) ** ZIPF
    chosen = rng.choice(groups, count, p=weights / weights.sum())
    prompts = [np.concatenate((systems[group], _tokens(int(rng.integers(*QUESTION)), rng))) for group in chosen]
    return _open_loop(_poisson(count, rate, rng), prompts, _lengths(count, rng))


def chats(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Chats of several turns: each has the turns and answers before it, and arrives when its user has read and written."""
    lengths = _lengths(count, rng)
    output = np.minimum(lengths.output, MOST_ANSWER)
    systems = [_tokens(CHAT_SYSTEM_TOKENS, rng) for _ in range(CHAT_SYSTEMS)]
    prompts: list[Int32] = []
    follows: list[int] = []
    while len(prompts) < count:
        text = systems[rng.integers(CHAT_SYSTEMS)]
        for turn in range(min(int(rng.integers(*CHAT_TURNS)), count - len(prompts))):
            number = len(prompts)
            text = np.concatenate((text, _tokens(int(rng.integers(*QUESTION)), rng)))
            prompts.append(text)
            follows.append(number - 1 if turn else NOBODY)
            text = np.concatenate((text, np.full(output[number] - 1, OTHER, np.int32), np.array([STOP], np.int32)))
    first = np.array(follows) == NOBODY
    arrival = np.zeros(count, np.int64)
    arrival[first] = _poisson(int(first.sum()), rate * first.mean(), rng)
    pause = (rng.exponential(PAUSE_S, count) * 1e9).astype(np.int64)
    requests = Workload(arrival, _sizes(prompts), output, np.minimum(lengths.max_tokens, 2 * MOST_ANSWER), lengths.priority)
    return FleetWorkload(requests, prompts, np.array(follows), pause)


def bursts(count: int, rate: float, engines: int, rng: np.random.Generator) -> FleetWorkload:
    """Lengths of the Azure trace, with occasional bursts of requests with a common prefix, as in batch jobs."""
    lengths = _lengths(count, rng)
    job = rng.permutation(count) < BURST_SHARE * count  # requests of jobs
    arrival = _poisson(count, rate, rng)
    prompts = [_tokens(int(n), rng) for n in lengths.prompt]
    span, members = arrival[-1], np.flatnonzero(job)
    for part in np.array_split(members, max(1, len(members) // (BURST_REQUESTS * engines))):
        start, begin = _tokens(BURST_TOKENS, rng), int(rng.integers(0, span))
        for i in part:
            prompts[i] = np.concatenate((start, _tokens(int(rng.integers(*QUESTION)), rng)))
        arrival[part] = begin + (rng.random(len(part)) * BURST_LASTS_S * 1e9).astype(np.int64)
    return _open_loop(arrival, prompts, lengths)


FLEET_WORKLOADS: dict[str, Callable[[int, float, int, np.random.Generator], FleetWorkload]] = {
    "azure": azure,
    "shared-prefix": shared_prefix,
    "chats": chats,
    "bursts": bursts,
}
"""count: requests. rate: mean arrivals, requests/s, of the whole fleet. engines: of the fleet."""


def _lengths(count: int, rng: np.random.Generator) -> Workload:
    """Lengths of the trace, drawn with replacement."""
    whole = load_workload("azure")
    drawn = rng.integers(0, len(whole), count)
    return Workload(*(getattr(whole, field.name)[drawn] for field in fields(whole)))


def _tokens(count: int, rng: np.random.Generator) -> Int32:
    return rng.integers(STOP + 1, VOCAB, count, dtype=np.int32)


def _poisson(count: int, rate: float, rng: np.random.Generator) -> Int64:
    return (np.cumsum(rng.exponential(1 / rate, count)) * 1e9).astype(np.int64)


def _sizes(prompts: list[Int32]) -> Int64:
    return np.array([len(prompt) for prompt in prompts])


def _open_loop(arrival: Int64, prompts: list[Int32], lengths: Workload) -> FleetWorkload:
    count = len(prompts)
    requests = Workload(arrival, _sizes(prompts), lengths.output, lengths.max_tokens, lengths.priority)
    return FleetWorkload(requests, prompts, np.full(count, NOBODY), np.zeros(count, np.int64))
