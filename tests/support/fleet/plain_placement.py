"""A second, plain implementation of the default placement, and a storm that compares the two."""

import importlib
import itertools
from collections import OrderedDict
from types import ModuleType
from typing import Any

import numpy as np

from blinkpy.queues.words import Int32, Int64

SALTS = (0, 1, 2**63 - 1)
ROW_TOKENS, EXTRA_TOKENS = 64, 32768


class PlainRecord:
    """An engine's pages, each by the salt and all tokens up to its end."""

    def __init__(self, page_size: int, most_pages: int):
        self.page_size, self.most_pages = page_size, most_pages
        self.pages: OrderedDict[tuple[int, ...], None] = OrderedDict()  # the least recently used page first

    def _names(self, prompt: Int32, salt: int) -> list[tuple[int, ...]]:
        ends = range(self.page_size, len(prompt) + 1, self.page_size)
        return [(salt, *prompt[:end].tolist()) for end in ends]

    def match(self, prompt: Int32, salt: int) -> int:
        names = self._names(prompt, salt)
        return next((i for i, name in enumerate(names) if name not in self.pages), len(names))

    def add(self, prompt: Int32, salt: int) -> None:
        for name in reversed(self._names(prompt, salt)):
            self.pages[name] = None
            self.pages.move_to_end(name)
        while len(self.pages) > self.most_pages:
            self.pages.popitem(last=False)


class PlainPlacement:
    """The engines that are correct for a prompt."""

    def __init__(self, engines: int, page_size: int, most_pages: int):
        self.page_size, self.most_pages = page_size, most_pages
        self.records = [PlainRecord(page_size, most_pages) for _ in range(engines)]

    def right(self, prompt: Int32, salt: int, loads: list[Any]) -> set[int | None]:
        cost = {e.index: e.tokens_in_flight + e.waiting_tokens + ROW_TOKENS * e.running for e in loads if e.accepts}
        if len(cost) < 2:
            return {next(iter(cost), None)}
        cached = {i: self.records[i].match(prompt[:-1], salt) * self.page_size for i in cost}
        least = {i for i in cost if cost[i] == min(cost.values())}
        homes = {i for i in cost if cached[i] == max(cached.values())}
        homes = {i for i in homes if cost[i] == min(cost[home] for home in homes)}
        wait = {load.index: load.waiting_tokens + load.unseen_tokens for load in loads if load.accepts}
        right = set[int | None]()
        for i, home in itertools.product(least, homes):  # the choice depends on which of several equal engines are compared
            saved = cached[home] - cached[i]
            right.add(home if saved and cost[home] - cost[i] <= EXTRA_TOKENS and wait[home] - wait[i] <= saved else i)
        return right

    def sent(self, engine: int, prompt: Int32, salt: int) -> None:
        self.records[engine].add(prompt, salt)

    def forget(self, engine: int) -> None:
        self.records[engine] = PlainRecord(self.page_size, self.most_pages)


def random_prompt(rng: np.random.Generator, sent: list[Int32], longest: int) -> Int32:
    """A prompt of few different tokens, so that many have a common start; or an earlier prompt, cut and continued."""
    prompt = rng.integers(0, 2, rng.integers(1, longest), dtype=np.int32)
    if sent and rng.random() < 0.6:
        before = sent[rng.integers(len(sent))]
        prompt = np.concatenate((before[: rng.integers(len(before) + 1)], prompt[: rng.integers(longest)]))
    return prompt[:longest] if len(prompt) else np.ones(1, np.int32)


def placement_storm(rng: np.random.Generator, calls: int, module: ModuleType | None = None) -> str:
    """Compare random calls. Returns the difference, or "". module: blinkpy.dpu.fleet.placement, or one with a bug."""
    module = module or importlib.import_module("blinkpy.dpu.fleet.placement")
    engines, page_size, most_pages = int(rng.integers(2, 6)), int(rng.choice([1, 2, 4])), int(rng.integers(5, 200))
    placement, plain = (
        module.Placement(engines, page_size, record_pages=most_pages),
        PlainPlacement(engines, page_size, most_pages),
    )
    sent: list[Int32] = []
    numbers: Int64 = np.zeros(0, np.int64)
    for call in range(calls):
        prompt, salt = random_prompt(rng, sent, 12 * page_size), int(rng.choice(SALTS))
        if rng.random() < 0.5 or not numbers.size:
            spread = int(rng.choice([1, 30, 3000]))  # spread of the loads
            numbers = rng.integers(0, spread, (engines, 4))
            numbers[:, 2] *= int(rng.choice([1, 40]))
            numbers[:, 3] //= int(rng.choice([1, 9, 3000]))
        loads = [
            module.EngineLoad(i, 9, waiting, running // 64, 9, flying, unseen, bool(rng.random() < 0.8))
            for i, (waiting, running, flying, unseen) in enumerate(numbers.tolist())
        ]
        chosen, right = placement.choose(prompt, salt, loads), plain.right(prompt, salt, loads)
        if chosen not in right:
            return f"call {call}: engine {chosen}, not of {right}"
        if placement.faults:
            return f"call {call}: the rule failed"
        if rng.random() < 0.04:
            lost = int(rng.integers(engines))
            placement.forget(lost)
            plain.forget(lost)
        if chosen is not None and rng.random() < 0.9:  # otherwise the engine was lost at this moment
            for _ in range(int(rng.integers(1, 3))):
                placement.sent(chosen, prompt, salt)
                plain.sent(chosen, prompt, salt)
            sent.append(prompt)
        for i, record in enumerate(plain.records):
            if placement._record.tokens(i) != len(record.pages) * page_size:
                return f"call {call}: {placement._record.tokens(i)} tokens of engine {i}, not {len(record.pages)} pages"
    return ""
