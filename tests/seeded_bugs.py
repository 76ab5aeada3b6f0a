"""Bugs on purpose: small changes of the source, each of which the simulator or the properties must find.

A bug is a patch of one module. The patched module is loaded beside the real ones, with everything that imports it, so that
nothing else in the process changes. A patch that no longer fits its module is an error: the list follows the source.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import blinkpy

PACKAGE = Path(blinkpy.__file__).parent
# What is loaded anew around a patch: the modules that may be patched, and those that import them.
MODULES = (
    "kernels.admit",
    "kernels.ahead",
    "kernels.commit",
    "kernels.completions",
    "kernels.inbox",
    "kernels.intake",
    "kernels.plan",
    "kernels.reclaim",
    "kernels.scheduler",
    "kernels.host_scheduler",
    "kernels.steady",
    "kv.pages",
    "kv.prefix",
    "dpu.queue_pair",
    "dpu.rings",
)


class Bug(NamedTuple):
    """What is wrong, where, and the patch: `before` occurs once in the module and is replaced by `after`."""

    what: str
    module: str
    before: str
    after: str


SCHEDULER_BUGS = (
    # pages
    Bug("a page is freed twice", "kv.pages", "if references == 0:", "if references <= 1:"),
    Bug("a page is never freed", "kv.pages", "references = pages.refcount[page] - 1", "references = pages.refcount[page]"),
    Bug("a prefix hit is not counted as a reference", "kv.pages", "pages.refcount[page] += 1", "pages.refcount[page] += 0"),
    Bug(
        "a hit page stays in line for eviction",
        "kv.pages",
        "            pages.ring_position[page] = -1\n            revived",
        "            revived",
    ),
    Bug("an evicted page stays in the index", "kv.pages", "forget(pages, pages.free[free + i])", "pages.free[free + i]"),
    Bug("eviction skips a page", "kv.pages", "last = position + 1", "last = position + 2"),
    Bug(
        "two requests get the same page",
        "kv.pages",
        "counts[FREE_COUNT] = free - amount",
        "counts[FREE_COUNT] = free - amount + (1 if amount > 2 else 0)",
    ),
    Bug("compaction loses a page", "kv.pages", "counts[RING_TAIL] = kept", "counts[RING_TAIL] = kept - 1"),
    # prefix cache
    Bug("the tokens of a hit are not compared", "kv.prefix", "            i = 0\n", "            i = 1\n"),
    Bug(
        "the salt of a hit is not compared",
        "kv.prefix",
        "pages.key[page] == key and pages.salt[page] == salt",
        "pages.key[page] == key",
    ),
    Bug(
        "the parent of a hit is not compared",
        "kv.prefix",
        "(found[k - 1] >= 0 and pages.parent[found[k]] == found[k - 1])",
        "found[k - 1] >= 0",
    ),
    Bug(
        "the whole prompt may be a hit",
        "kv.prefix",
        "(requests.length[slot] - 1) >> limits.page_shift",
        "requests.length[slot] >> limits.page_shift",
    ),
    Bug(
        "an equal page is indexed twice", "kv.prefix", "return breaks > 0 and breaks >> _HALF == 0", "return breaks >> _HALF == 0"
    ),
    Bug(
        "a page leaves half of its chain", "kv.prefix", "    if after >= 0:\n        pages.bucket_previous[after] = before\n", ""
    ),
    # the end of requests
    Bug(
        "a request gets a token too many",
        "kernels.commit",
        "if generated >= requests.entry[slot, WORD_MAX_TOKENS]",
        "if generated > requests.entry[slot, WORD_MAX_TOKENS]",
    ),
    Bug(
        "min_tokens is off by one",
        "kernels.commit",
        "if generated > requests.entry[slot, WORD_MIN_TOKENS]:",
        "if generated >= requests.entry[slot, WORD_MIN_TOKENS]:",
    ),
    Bug("the last stop id is not looked at", "kernels.commit", "for i in range(STOP_IDS):", "for i in range(2):"),
    Bug(
        "a token of no vocabulary goes on",
        "kernels.commit",
        "if token < 0 or token >= limits.vocab_size:",
        "if token >= limits.vocab_size:",
    ),
    Bug(
        "a generated token is stored in the wrong place",
        "kernels.commit",
        "requests.tokens[slot, length - 1] = token",
        "requests.tokens[slot, max(0, length - 2)] = token",
    ),
    # the short way
    Bug(
        "the last token of a usual turn is not published",
        "kernels.steady",
        "for row in strided(lane, rows, lanes):\n        # Relies on O4",
        "for row in strided(lane, rows - 1, lanes):\n        # Relies on O4",
    ),
    Bug(
        "a usual turn's tokens are published again",
        "kernels.steady",
        "        forecast.unpublished[0] = 0\n",
        "        forecast.unpublished[0] = rows\n",
    ),
    Bug(
        "the tail stays behind a usual turn's tokens",
        "kernels.steady",
        "pairs.cq_tail[pair] = tail + published\n",
        "pairs.cq_tail[pair] = tail\n",
    ),
    Bug(
        "a usual turn does not see the last token of a request",
        "kernels.steady",
        "finish = FINISH_LENGTH if facts[row, FORECAST_FLAGS] & FORECAST_LAST != 0 else FINISH_NONE",
        "finish = FINISH_NONE",
    ),
    # completions
    Bug(
        "a full completion queue is written over",
        "kernels.completions",
        "return limits.cq_entries - (",
        "return limits.cq_entries + 1 - (",
    ),
    Bug("the lap counter is that of the last lap", "kernels.completions", "% LAPS + 1", "% LAPS"),
    Bug(
        "the completions of a fifth pair are not numbered",
        "kernels.completions",
        "range(0, limits.pairs, PAIRS_AT_ONCE)",
        "range(0, limits.pairs, PAIRS_AT_ONCE + 1)",
    ),
    Bug(
        "a completion goes to another slot",
        "kernels.completions",
        "local = slot - requests.pair[slot] * limits.slots_per_pair",
        "local = slot % 5",
    ),
    # cancels, leases, epochs
    Bug(
        "a cancel of a waiting request is lost",
        "kernels.reclaim",
        "state.waiting, counts[WAITING_COUNT], lane, lanes)",
        "state.waiting, 0, lane, lanes)",
    ),
    Bug("a lease never ends", "kernels.reclaim", "> limits.lease_ns:", "> 1000 * limits.lease_ns:"),
    Bug(
        "a doorbell of an earlier epoch is accepted",
        "kernels.reclaim",
        "if doorbell >> EPOCH_SHIFT == epoch:",
        "if doorbell >> EPOCH_SHIFT <= epoch:",
    ),
    Bug(
        "a head of an earlier epoch is accepted",
        "kernels.reclaim",
        "if head >> EPOCH_SHIFT == epoch:",
        "if head >> EPOCH_SHIFT <= epoch:",
    ),
    Bug(
        "an owner's requests survive its fence",
        "kernels.reclaim",
        "if verdict & FENCE:\n            pairs.attached[pair] = 0",
        "if verdict & FENCE:\n            pairs.attached[pair] = 1",
    ),
    Bug(
        "a grant begins at the wrong completion",
        "kernels.reclaim",
        "pairs.cq_head[pair] = pairs.cq_tail[pair]  #",
        "pairs.cq_tail[pair] = pairs.cq_head[pair]  #",
    ),
    Bug("a claim of any epoch is granted", "kernels.reclaim", "if claim == epoch + 1 and", "if claim >= epoch and"),
    Bug(
        "a paused request that is preempted stays counted",
        "kernels.admit",
        "counts[PAUSED_COUNT] -= requests.paused[slot]",
        "counts[PAUSED_COUNT] -= 0",
    ),
    Bug(
        "a cancelled request keeps its pages",
        "kernels.reclaim",
        "if requests.status[scratch.slot[i]] == RUNNING:",
        "if requests.status[scratch.slot[i]] == EMPTY:",
    ),
    # intake
    Bug(
        "an entry of an earlier epoch is accepted",
        "kernels.intake",
        "stale = entry[WORD_EPOCH] != state.pairs.epoch[pair]",
        "stale = entry[WORD_EPOCH] > state.pairs.epoch[pair]",
    ),
    Bug(
        "a slot out of range is accepted",
        "kernels.intake",
        "usable = 0 <= local < limits.slots_per_pair",
        "usable = 0 <= local <= limits.slots_per_pair",
    ),
    Bug(
        "a request that can't fit is accepted",
        "kernels.intake",
        ">> limits.page_shift > limits.pages:",
        ">> limits.page_shift > limits.pages + 1:",
    ),
    Bug(
        "a prompt token of no vocabulary is accepted",
        "kernels.intake",
        "if token < 0 or token >= limits.vocab_size:",
        "if token < 0 or token > limits.vocab_size:",
    ),
    Bug(
        "the last prompt token is not copied",
        "kernels.intake",
        "for i in strided(lane, entry[WORD_PROMPT_LENGTH], lanes):",
        "for i in strided(lane, entry[WORD_PROMPT_LENGTH] - 1, lanes):",
    ),
    Bug("intake ignores its bound", "kernels.intake", "entries < min(pending, limits.intake_entries)", "entries < pending"),
    Bug("intake stays with the first pair", "kernels.intake", "counts[ROTATION] = pair", "counts[ROTATION] = 0"),
    Bug("new requests are taken in while draining", "kernels.intake", "!= COMMAND_RUN:", "> COMMAND_RUN + 1:"),
    # who runs
    Bug("pages that a hit takes back count as available", "kernels.admit", "hits <= available - revived", "hits <= available"),
    Bug("the first in rank is preempted", "kernels.admit", "rank = max(rank, HIGHEST if", "rank = min(-rank, HIGHEST if"),
    Bug(
        "a request may run without room for its token",
        "kernels.admit",
        "scratch.rank[i] >= pairs.room[",
        "scratch.rank[i] > pairs.room[",
    ),
    Bug(
        "paused requests never give way",
        "kernels.admit",
        "if state.counts[PAUSED_COUNT] > 0:",
        "if state.counts[PAUSED_COUNT] > 1000:",
    ),
    Bug("who does not fit keeps others waiting for ever", "kernels.admit", "min(running, limits.pages >> WATERMARK_SHIFT)", "1"),
    Bug("a row too many runs", "kernels.admit", "if running == limits.rows or", "if running > limits.rows or"),
    Bug(
        "grown pages are not taken off the stack",
        "kernels.admit",
        "        counts[FREE_COUNT] = free\n        counts[RUNNING_COUNT] = n",
        "        counts[RUNNING_COUNT] = n",
    ),
    # the batch
    Bug(
        "a page table is read one entry off",
        "kernels.plan",
        "page = requests.page_table[slot, position >> limits.page_shift]",
        "page = requests.page_table[slot, (position + 1) >> limits.page_shift]",
    ),
    Bug(
        "the last chunk of a prompt emits nothing",
        "kernels.plan",
        "emits = 1 if chunk == missing else 0",
        "emits = 1 if chunk > missing else 0",
    ),
    Bug(
        "a batch is larger than its bucket",
        "kernels.plan",
        "or state.buckets.rows[bucket] < rows:",
        "or state.buckets.rows[bucket] < 0:",
    ),
    Bug("a chunk exceeds the token budget", "kernels.plan", "chunk = min(missing, budget - first)", "chunk = missing"),
    Bug("steps beside decodes have no room for prompts", "kernels.plan", "budget = limits.mixed_tokens", "budget = decoding"),
    Bug("a burst's steps have no room for prompts", "kernels.plan", "budget = limits.burst_step_tokens", "budget = decoding"),
    Bug("padding keeps old cache slots", "kernels.plan", "batch.cache_slots[i] = -1", "batch.cache_slots[i] += 0"),
    Bug(
        "a request is ranked among the better ones",
        "kernels.scheduler",
        "if requests.rank[other] < rank or",
        "if requests.rank[other] > rank or",
    ),
    Bug(
        "requests without a rank are left behind",
        "kernels.scheduler",
        "counts[WAITING_COUNT] = sorted_count + entering",
        "counts[WAITING_COUNT] = sorted_count + min(entering, 2)",
    ),
)

FRONT_BUGS = (
    Bug(
        "a request id is used twice",
        "dpu.queue_pair",
        "        self._requests += 1\n",
        "        self._requests += len(prompt) & 1\n",
    ),
    Bug(
        "the doorbell is rung before the entry",
        "dpu.queue_pair",
        "        transport.write_prompt(prompt_offset, prompt)\n",
        "        transport.ring(self._stamp(self._sq_tail + 1))\n        transport.write_prompt(prompt_offset, prompt)\n",
    ),
    Bug("a slot is free before its last completion", "dpu.queue_pair", "if flags & FINISH_MASK:", "if flags:"),
    Bug(
        "a completion of the last lap is read again",
        "dpu.queue_pair",
        "lap = lap_of(position, size)",
        "lap = words[0] >> LAP_SHIFT",
    ),
    Bug(
        "the completion head runs ahead",
        "dpu.queue_pair",
        "self._stamp(position))\n        return events",
        "self._stamp(position + 1))\n        return events",
    ),
    Bug(
        "arena space comes back too early",
        "dpu.queue_pair",
        "self._unconsumed[0][0] <= head:",
        "self._unconsumed[0][0] <= head + 1:",
    ),
    Bug(
        "positions of before a claim are kept",
        "dpu.queue_pair",
        "self._reset(words.sq_head, words.cq_tail)",
        "self._reset(words.sq_head, 0)",
    ),
    Bug(
        "doorbells carry no epoch",
        "dpu.queue_pair",
        "return self.epoch << EPOCH_SHIFT | position & POSITION_MASK",
        "return 1 << EPOCH_SHIFT | position & POSITION_MASK",
    ),
    Bug(
        "a heartbeat does not repeat the doorbell",
        "dpu.queue_pair",
        "        if self._attached:\n            self._ring()\n            self.transport.write_word",
        "        if self._attached:\n            self.transport.write_word",
    ),
    Bug("a heartbeat is always the same", "dpu.queue_pair", "self._beat += 1", "self._beat = 1"),
    Bug(
        "a fence is not noticed",
        "dpu.queue_pair",
        "if pair.epoch != self.epoch or pair.attached != 1:",
        "if pair.epoch != self.epoch:",
    ),
    Bug("a piece of the arena wraps", "dpu.rings", "if offset + count > self.size:", "if offset + count > 2 * self.size:"),
    Bug(
        "an arena gives out what is in use",
        "dpu.rings",
        "if start + count - self.head > self.size:",
        "if start - self.head > self.size:",
    ),
)


class _Patched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from other source text."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def patched_source(bug: Bug) -> str:
    """The module's source with the bug. Raises ValueError when the patch does not fit."""
    source = (PACKAGE / (bug.module.replace(".", "/") + ".py")).read_text()
    if source.count(bug.before) != 1:
        raise ValueError(f"{bug.what}: {bug.before!r} occurs {source.count(bug.before)} times in {bug.module}, not once")
    return source.replace(bug.before, bug.after)


@contextlib.contextmanager
def planted(bug: Bug | None) -> Iterator[None]:
    """Within the block, imports of MODULES give new modules, one of them with the bug. Afterwards all is as before."""
    names = [f"blinkpy.{name}" for name in MODULES]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = None
    if bug is not None:
        path = PACKAGE / (bug.module.replace(".", "/") + ".py")
        finder = _Patched(f"blinkpy.{bug.module}", path, patched_source(bug))
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder is not None:
            sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
        for name, module in before.items():
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
