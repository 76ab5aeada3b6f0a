"""Bugs on purpose: small changes of the source, each of which the simulator or the properties must find.

A bug is a patch of one module. The patched module is loaded beside the real ones, with everything that imports it, so that
nothing else in the process changes. A patch that no longer fits its module is an error: the list follows the source.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from support.import_graph import importers_of, module_name

from blinkpy.sources import PACKAGE


class Bug(NamedTuple):
    """What is wrong, in which module (file names of the package differ), and the patch: `before` occurs once in the module
    and is replaced by `after`."""

    what: str
    module: str
    before: str
    after: str


SCHEDULER_BUGS = (
    # pages
    Bug("a page is freed twice", "page_allocator", "if references == 0:", "if references <= 1:"),
    Bug("a page is never freed", "page_allocator", "references = pages.refcount[page] - 1", "references = pages.refcount[page]"),
    Bug("a prefix hit is not counted as a reference", "page_allocator", "pages.refcount[page] += 1", "pages.refcount[page] += 0"),
    Bug(
        "a hit page stays in line for eviction",
        "page_allocator",
        "            pages.ring_position[page] = -1\n            revived",
        "            revived",
    ),
    Bug("an evicted page stays in the index", "page_allocator", "forget(pages, pages.free[free + i])", "pages.free[free + i]"),
    Bug("eviction skips a page", "page_allocator", "last = position + 1", "last = position + 2"),
    Bug(
        "two requests get the same page",
        "page_allocator",
        "counts[S.FREE_COUNT] = free - amount",
        "counts[S.FREE_COUNT] = free - amount + (1 if amount > 2 else 0)",
    ),
    Bug("compaction loses a page", "page_allocator", "counts[S.RING_TAIL] = kept", "counts[S.RING_TAIL] = kept - 1"),
    # prefix cache
    Bug("the tokens of a hit are not compared", "prefix_cache", "            i = 0\n", "            i = 1\n"),
    Bug(
        "the salt of a hit is not compared",
        "prefix_cache",
        "pages.key[page] == key and pages.salt[page] == salt",
        "pages.key[page] == key",
    ),
    Bug(
        "the parent of a hit is not compared",
        "prefix_cache",
        "(found[k - 1] >= 0 and pages.parent[found[k]] == found[k - 1])",
        "found[k - 1] >= 0",
    ),
    Bug(
        "the whole prompt may be a hit",
        "prefix_cache",
        "(requests.length[slot] - 1) >> limits.page_shift",
        "requests.length[slot] >> limits.page_shift",
    ),
    Bug(
        "an equal page is indexed twice",
        "prefix_cache",
        "return breaks > 0 and breaks >> _HALF == 0",
        "return breaks >> _HALF == 0",
    ),
    Bug(
        "a page leaves half of its chain",
        "prefix_cache",
        "    if after >= 0:\n        pages.bucket_previous[after] = before\n",
        "",
    ),
    # the end of requests
    Bug(
        "a request gets a token too many",
        "commit",
        "if generated >= requests.entry[slot, WORD_MAX_TOKENS]",
        "if generated > requests.entry[slot, WORD_MAX_TOKENS]",
    ),
    Bug(
        "min_tokens is off by one",
        "commit",
        "if generated > requests.entry[slot, WORD_MIN_TOKENS]:",
        "if generated >= requests.entry[slot, WORD_MIN_TOKENS]:",
    ),
    Bug("the last stop id is not looked at", "commit", "for i in range(STOP_IDS):", "for i in range(2):"),
    Bug(
        "a token of no vocabulary goes on",
        "commit",
        "if token < 0 or token >= limits.vocab_size:",
        "if token >= limits.vocab_size:",
    ),
    Bug(
        "a generated token is stored in the wrong place",
        "commit",
        "requests.tokens[slot, length - 1] = token",
        "requests.tokens[slot, max(0, length - 2)] = token",
    ),
    # the short way
    Bug(
        "the last token of a usual turn is not published",
        "publish",
        "for row in strided(lane, rows, lanes):\n        # Relies on O4",
        "for row in strided(lane, rows - 1, lanes):\n        # Relies on O4",
    ),
    Bug(
        "a usual turn's tokens are published again",
        "publish",
        "        forecast.unpublished[0] = 0\n",
        "        forecast.unpublished[0] = rows\n",
    ),
    Bug(
        "the tail stays behind a usual turn's tokens",
        "publish",
        "pairs.cq_tail[pair] = tail + published\n",
        "pairs.cq_tail[pair] = tail\n",
    ),
    Bug(
        "a usual turn does not see the last token of a request",
        "fast_path",
        "finish = FINISH_LENGTH if facts[row, S.FORECAST_FLAGS] & S.FORECAST_IS_LAST != 0 else FINISH_NONE",
        "finish = FINISH_NONE",
    ),
    # completions
    Bug(
        "a full completion queue is written over",
        "completions",
        "return limits.cq_entries - (",
        "return limits.cq_entries + 1 - (",
    ),
    Bug("the lap counter is that of the last lap", "completions", "% LAPS + 1", "% LAPS"),
    Bug(
        "the completions of a fifth pair are not numbered",
        "completions",
        "range(0, limits.pairs, PAIRS_AT_ONCE)",
        "range(0, limits.pairs, PAIRS_AT_ONCE + 1)",
    ),
    Bug(
        "a completion goes to another slot",
        "completions",
        "local = slot - requests.pair[slot] * limits.slots_per_pair",
        "local = slot % 5",
    ),
    # cancels, leases, epochs
    Bug(
        "a cancel of a waiting request is lost",
        "endings",
        "state.waiting, counts[S.WAITING_COUNT], lane, lanes)",
        "state.waiting, 0, lane, lanes)",
    ),
    Bug("a lease never ends", "ownership", "> limits.lease_ns:", "> 1000 * limits.lease_ns:"),
    Bug(
        "a doorbell of an earlier epoch is accepted",
        "ownership",
        "if doorbell >> EPOCH_SHIFT == epoch:",
        "if doorbell >> EPOCH_SHIFT <= epoch:",
    ),
    Bug(
        "a head of an earlier epoch is accepted",
        "ownership",
        "if head >> EPOCH_SHIFT == epoch:",
        "if head >> EPOCH_SHIFT <= epoch:",
    ),
    Bug(
        "an owner's requests survive its fence",
        "ownership",
        "if verdict & S.REVOKE:\n            pairs.attached[pair] = 0",
        "if verdict & S.REVOKE:\n            pairs.attached[pair] = 1",
    ),
    Bug(
        "a grant begins at the wrong completion",
        "ownership",
        "pairs.cq_head[pair] = pairs.cq_tail[pair]  #",
        "pairs.cq_tail[pair] = pairs.cq_head[pair]  #",
    ),
    Bug("a claim of any epoch is granted", "ownership", "if claim == epoch + 1 and", "if claim >= epoch and"),
    Bug(
        "a paused request that is preempted stays counted",
        "preempt",
        "counts[S.STALLED_COUNT] -= requests.stalled[slot]",
        "counts[S.STALLED_COUNT] -= 0",
    ),
    Bug(
        "a cancelled request keeps its pages",
        "endings",
        "if requests.status[scratch.slot[i]] == S.RUNNING:",
        "if requests.status[scratch.slot[i]] == S.EMPTY:",
    ),
    # intake
    Bug(
        "an entry of an earlier epoch is accepted",
        "intake",
        "stale = entry[WORD_EPOCH] != state.pairs.epoch[pair]",
        "stale = entry[WORD_EPOCH] > state.pairs.epoch[pair]",
    ),
    Bug(
        "a slot out of range is accepted",
        "intake",
        "usable = 0 <= local < limits.slots_per_pair",
        "usable = 0 <= local <= limits.slots_per_pair",
    ),
    Bug(
        "a request that can't fit is accepted",
        "intake",
        ">> limits.page_shift > limits.pages:",
        ">> limits.page_shift > limits.pages + 1:",
    ),
    Bug(
        "a prompt token of no vocabulary is accepted",
        "intake",
        "if token < 0 or token >= limits.vocab_size:",
        "if token < 0 or token > limits.vocab_size:",
    ),
    Bug(
        "the last prompt token is not copied",
        "intake",
        "for i in strided(lane, entry[WORD_PROMPT_LENGTH], lanes):",
        "for i in strided(lane, entry[WORD_PROMPT_LENGTH] - 1, lanes):",
    ),
    Bug("intake ignores its bound", "intake", "entries < min(pending, limits.intake_entries)", "entries < pending"),
    Bug("intake stays with the first pair", "intake", "counts[S.ROTATION] = pair", "counts[S.ROTATION] = 0"),
    Bug("new requests are taken in while draining", "intake", "!= COMMAND_RUN:", "> COMMAND_RUN + 1:"),
    # who runs
    Bug("pages that a hit takes back count as available", "admit", "hits <= available - revived", "hits <= available"),
    Bug("the first in rank is preempted", "preempt", "rank = max(rank, HIGHEST if", "rank = min(-rank, HIGHEST if"),
    Bug(
        "a request may run without room for its token",
        "stall",
        "scratch.position[i] >= pairs.unclaimed_entries[",
        "scratch.position[i] > pairs.unclaimed_entries[",
    ),
    Bug(
        "paused requests never give way",
        "admit",
        "if state.counts[S.STALLED_COUNT] > 0:",
        "if state.counts[S.STALLED_COUNT] > 1000:",
    ),
    Bug("who does not fit keeps others waiting for ever", "admit", "min(running, limits.pages >> WATERMARK_SHIFT)", "1"),
    Bug("a row too many runs", "admit", "if running == limits.rows or", "if running > limits.rows or"),
    Bug(
        "grown pages are not taken off the stack",
        "preempt",
        "        counts[S.FREE_COUNT] = free\n        counts[S.RUNNING_COUNT] = n",
        "        counts[S.RUNNING_COUNT] = n",
    ),
    # the batch
    Bug(
        "a page table is read one entry off",
        "plan",
        "page = requests.page_table[slot, position >> limits.page_shift]",
        "page = requests.page_table[slot, (position + 1) >> limits.page_shift]",
    ),
    Bug(
        "the last chunk of a prompt emits nothing",
        "plan",
        "emits = 1 if chunk == missing else 0",
        "emits = 1 if chunk > missing else 0",
    ),
    Bug(
        "a batch is larger than its bucket",
        "plan",
        "or state.buckets.rows[bucket] < rows:",
        "or state.buckets.rows[bucket] < 0:",
    ),
    Bug("a chunk exceeds the token budget", "plan", "chunk = min(missing, budget - first)", "chunk = missing"),
    Bug("steps beside decodes have no room for prompts", "plan", "budget = limits.mixed_tokens", "budget = decoding"),
    Bug("a burst's steps have no room for prompts", "plan", "budget = limits.burst_step_tokens", "budget = decoding"),
    Bug("padding keeps old cache slots", "plan", "batch.cache_slots[i] = -1", "batch.cache_slots[i] += 0"),
    Bug(
        "a request is ranked among the better ones",
        "waiting_list",
        "if requests.rank[other] < rank or",
        "if requests.rank[other] > rank or",
    ),
    Bug(
        "requests without a rank are left behind",
        "waiting_list",
        "counts[S.WAITING_COUNT] = ranked + unranked",
        "counts[S.WAITING_COUNT] = ranked + min(unranked, 2)",
    ),
)

FRONT_BUGS = (
    Bug(
        "a request id is used twice",
        "queue_pair",
        "        self._requests += 1\n",
        "        self._requests += len(prompt) & 1\n",
    ),
    Bug(
        "the doorbell is rung before the entry",
        "queue_pair",
        "        transport.write_prompt(prompt_offset, prompt)\n",
        "        transport.ring(self._stamp(self._sq_tail + 1))\n        transport.write_prompt(prompt_offset, prompt)\n",
    ),
    Bug("a slot is free before its last completion", "queue_pair", "if flags & FINISH_MASK:", "if flags:"),
    Bug(
        "a completion of the last lap is read again",
        "queue_pair",
        "lap = lap_of(position, size)",
        "lap = words[0] >> LAP_SHIFT",
    ),
    Bug(
        "the completion head runs ahead",
        "queue_pair",
        "self._stamp(position))\n        return events",
        "self._stamp(position + 1))\n        return events",
    ),
    Bug(
        "arena space comes back too early",
        "queue_pair",
        "self._unconsumed[0][0] <= head:",
        "self._unconsumed[0][0] <= head + 1:",
    ),
    Bug(
        "positions of before a claim are kept",
        "queue_pair",
        "self._reset(words.sq_head, words.cq_tail)",
        "self._reset(words.sq_head, 0)",
    ),
    Bug(
        "doorbells carry no epoch",
        "queue_pair",
        "return self.epoch << EPOCH_SHIFT | position & POSITION_MASK",
        "return 1 << EPOCH_SHIFT | position & POSITION_MASK",
    ),
    Bug(
        "a heartbeat does not repeat the doorbell",
        "queue_pair",
        "        if self._attached:\n            self._ring()\n            self.transport.write_word",
        "        if self._attached:\n            self.transport.write_word",
    ),
    Bug("a heartbeat is always the same", "queue_pair", "self._beat += 1", "self._beat = 1"),
    Bug(
        "a fence is not noticed",
        "queue_pair",
        "if pair.epoch != self.epoch or pair.attached != 1:",
        "if pair.epoch != self.epoch:",
    ),
    Bug("a piece of the arena wraps", "arenas", "if offset + count > self.size:", "if offset + count > 2 * self.size:"),
    Bug(
        "an arena gives out what is in use",
        "arenas",
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


def module_of(bug: Bug) -> tuple[str, Path]:
    """The module's dotted name and its file."""
    (path,) = PACKAGE.rglob(f"{bug.module}.py")
    return module_name(path), path


def patched_source(bug: Bug) -> str:
    """The module's source with the bug. Raises ValueError when the patch does not fit."""
    source = module_of(bug)[1].read_text()
    if source.count(bug.before) != 1:
        raise ValueError(f"{bug.what}: {bug.before!r} occurs {source.count(bug.before)} times in {bug.module}, not once")
    return source.replace(bug.before, bug.after)


@contextlib.contextmanager
def planted(bug: Bug | None) -> Iterator[None]:
    """Within the block, imports of the patched module, and of all that import it, give new modules; without a bug, of the
    scheduler's. Afterwards all is as before."""
    name, path = ("blinkpy.kv.page_allocator", PACKAGE) if bug is None else module_of(bug)
    names = sorted(({name} | importers_of(name)) - {"blinkpy"})
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = None
    if bug is not None:
        finder = _Patched(name, path, patched_source(bug))
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
