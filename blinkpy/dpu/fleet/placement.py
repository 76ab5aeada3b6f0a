"""Placement: the choice of an engine for each request of a worker."""

import logging
import random
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence

from blinkpy.dpu.fleet.engine_load import EngineLoad
from blinkpy.dpu.fleet.placement_rules import PlacedRequest, Rule, least_loaded, prefix
from blinkpy.queues.words import Int32

# Estimates the prefix caches of a fleet's engines from the prompts sent there, in one radix tree of pages.
#
# Each node knows which engines have its pages, so one walk finds the hits of all engines. Sending a prompt touches its pages,
# last page first. If an engine has too many pages, its least recently used page is evicted. So a page is never evicted before the
# pages that follow it.
#
# An edge is the text of one or several consecutive pages, as bytes. Comparing an edge is one call; a prompt of a thousand
# tokens takes two or three calls. The only hash is Python's keyed hash of bytes, followed by a comparison: no client can
# construct a prompt that is mistaken for another prompt.

TOKEN_BYTES = 4

Key = bytes | tuple[int, bytes]  # a page; the key of a prompt's first page includes the salt


class _Node:
    """Consecutive pages.

    edge: their bytes.
    end: tokens from the prompt's start to their end.
    key: its key among the parent's children. The root is its own parent.
    used: number of the last use, by engine that has these pages.
    """

    __slots__ = ("children", "edge", "end", "key", "parent", "used")

    def __init__(self, parent: "_Node | None", key: Key, edge: bytes, end: int):
        self.parent, self.key, self.edge, self.end = parent or self, key, edge, end
        self.children: dict[Key, _Node] = {}
        self.used: dict[int, int] = {}


class PrefixRecord:
    """The pages that engines may have cached. Prompts are int32 [n]; salts belong to the prefix cache, in [0,
    2**63).

    engines: number of engines.
    page_size: tokens.
    most_pages: maximum pages recorded per engine, at least 1. A page takes about 700 bytes for unrelated prompts of one page, and
    4 bytes per token for long prompts.
    """

    def __init__(self, engines: int, page_size: int, most_pages: int):
        self._page, self._most = page_size * TOKEN_BYTES, most_pages * page_size
        self._root = _Node(None, b"", b"", 0)
        self._use = 0  # number of the last use
        self._ends: list[OrderedDict[int, _Node]] = []  # by engine: the last node of each use, least recently used first
        self._tokens: list[int] = []  # by engine: tokens of its pages
        self._found: tuple[Int32, int, bytes, _Node, int] | None = (
            None  # the last match: prompt, salt, text; node and byte of its end
        )
        self.grow(engines)

    def grow(self, engines: int) -> None:
        """Raise the number of engines."""
        for _ in range(len(self._ends), engines):
            self._ends.append(OrderedDict())
            self._tokens.append(0)

    def tokens(self, engine: int) -> int:
        """Tokens of an engine's pages."""
        return self._tokens[engine]

    def match(self, prompt: Int32, salt: int) -> list[int]:
        """For each engine, the hit in tokens: whole pages at the prompt's start, without its last token. It counts as no use."""
        text, page, at, node, known = prompt.tobytes(), self._page, 0, self._root, [0] * len(self._ends)
        child = node.children.get((salt, text[:page]))
        while child is not None:
            node, edge = child, child.edge
            if text.startswith(edge, at):
                at, end = at + len(edge), node.end
                child = node.children.get(text[at : at + page])
            else:
                at += self._common(edge, text, at)
                end, child = at // TOKEN_BYTES, None
            for engine in node.used:
                known[engine] = end
        self._found = prompt, salt, text, node, at
        if len(text) == at > 0:
            return [min(tokens, (at - page) // TOKEN_BYTES) for tokens in known]
        return known

    def add(self, engine: int, prompt: Int32, salt: int) -> None:
        """Record that a prompt was sent to an engine, up to its last full page. Faster if the previous call
        was match() with the same objects.
        """
        if self._found is None or self._found[0] is not prompt or self._found[1] != salt:
            self.match(prompt, salt)
        assert self._found is not None
        _, _, text, node, at = self._found
        self._found = None
        if at < node.end * TOKEN_BYTES:
            node = self._split(node, at // TOKEN_BYTES)
        end = len(text) // self._page * self._page
        if at < end:
            key = text[at : at + self._page]
            node = self._child(node, key if at else (salt, key), text[at:end])
        if node is not self._root:
            self._note(engine, node)
            self._shrink(engine)

    def forget(self, engine: int) -> None:
        """Remove all pages of an engine."""
        for node in self._ends[engine].values():
            while node.used.pop(engine, None) is not None:
                if not node.used:
                    del node.parent.children[node.key]
                node = node.parent
        self._ends[engine].clear()
        self._tokens[engine], self._found = 0, None

    def _common(self, edge: bytes, text: bytes, at: int) -> int:
        """Length in bytes of the whole pages that an edge and the text at a position share. They share at least the key, and less
        than the whole edge.
        """
        page = self._page
        equal, most = 1, len(edge) // page - 1
        while equal < most:
            tried = (equal + most + 1) // 2
            if edge[equal * page : tried * page] == text[at + equal * page : at + tried * page]:
                equal = tried
            else:
                most = tried - 1
        return equal * page

    def _child(self, parent: _Node, key: Key, edge: bytes) -> _Node:
        parent.children[key] = node = _Node(parent, key, edge, parent.end + len(edge) // TOKEN_BYTES)
        return node

    def _split(self, node: _Node, end: int) -> _Node:
        """Split a node after the prompt's token `end`, and return the upper part."""
        length = len(node.edge) - (node.end - end) * TOKEN_BYTES
        upper = self._child(node.parent, node.key, node.edge[:length])
        upper.used.update(node.used)
        node.parent, node.edge = upper, node.edge[length:]
        node.key = node.edge[: self._page]
        upper.children[node.key] = node
        return upper

    def _note(self, engine: int, node: _Node) -> None:
        """Record that an engine uses all pages from the start to the end of a node. Merges nodes that no longer differ."""
        self._use += 1
        ends, below = self._ends[engine], None
        ends[self._use] = node
        while node is not self._root:
            before, parent = node.used.get(engine), node.parent
            if before is None:
                self._tokens[engine] += len(node.edge) // TOKEN_BYTES
            elif ends.get(before) is node:
                del ends[before]
            node.used[engine] = self._use
            if below is not None and len(node.children) == 1 and node.used == below.used:
                below.parent, below.key, below.edge = parent, node.key, node.edge + below.edge
                parent.children[below.key] = below
            else:
                below = node
            node = parent

    def _shrink(self, engine: int) -> None:
        """Evict the least recently used pages of an engine that has too many."""
        ends = self._ends[engine]
        while (excess := self._tokens[engine] - self._most) > 0:
            use, node = next(iter(ends.items()))
            if excess * TOKEN_BYTES < len(node.edge):
                if len(node.used) == 1:
                    node.edge, node.end = node.edge[: -excess * TOKEN_BYTES], node.end - excess
                    self._tokens[engine] = self._most
                    return
                self._split(node, node.end - excess)
            parent = node.parent
            self._tokens[engine] -= len(node.edge) // TOKEN_BYTES
            del node.used[engine]
            if not node.used:
                del parent.children[node.key]
            if parent.used.get(engine) == use:
                ends[use] = parent
            else:
                del ends[use]


__all__ = ["EngineLoad", "Placement"]

RECORD_PAGES = 1 << 16
LOG_S = 60.0  # minimum time between two log lines about a failing rule

logger = logging.getLogger("blinkpy.frontend")


class Placement:
    """Chooses engines for one worker.

    engines: number of engines.
    page_size: tokens.
    rule: a function of placement_rules, or a user's.
    record_pages: pages recorded per engine; ideally as many as the engine has.
    seed: random seed of the draws.
    on_fault: called if the rule raises, or returns no accepting engine. The least loaded engine is then chosen.
    faults: number of these calls.
    """

    def __init__(
        self,
        engines: int,
        page_size: int,
        *,
        rule: Rule = prefix,
        record_pages: int = RECORD_PAGES,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_fault: Callable[[], None] = lambda: None,
    ):
        self._rule, self._clock, self._engines = rule, clock, engines
        self._record = PrefixRecord(engines, page_size, record_pages)
        self._draw = random.Random(seed).getrandbits
        self._number = 0
        self._logged: float | None = None
        self.faults, self._on_fault = 0, on_fault

    def grow(self, engines: int) -> None:
        """Raise the number of engines."""
        self._engines = engines
        self._record.grow(engines)

    def choose(self, prompt: Int32, salt: int, loads: Sequence[EngineLoad]) -> int | None:
        """The index of the engine for a prompt, int32 [n]; None if no engine accepts requests. salt: the
        prefix cache's salt, in [0, 2**63).
        """
        able = [load for load in loads if load.accepts]
        if len(able) < 2:
            return able[0].index if able else None
        request = PlacedRequest(self._number, len(prompt), self._record.match(prompt, salt), salt, self._draw(32))
        self._number += 1
        try:
            chosen = self._rule(request, able)
            for load in able:
                if chosen is load:
                    return load.index
            self._fail(f"gave {chosen!r:.80}, which is not one of the engines")
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._fail(f"({frame.filename}, line {frame.lineno}) {traceback.format_exception_only(error)[-1].strip()}")
        return least_loaded(request, able).index

    def sent(self, engine: int, prompt: Int32, salt: int) -> None:
        """Record that a prompt, int32 [n], was sent to an engine, which may then have its pages cached."""
        if self._engines > 1:
            self._record.add(engine, prompt, salt)

    def forget(self, engine: int) -> None:
        """Clear the record of an engine that was restarted with an empty prefix cache."""
        self._record.forget(engine)

    def _fail(self, what: str) -> None:
        self.faults += 1
        self._on_fault()
        now = self._clock()
        if self._logged is None or now - self._logged >= LOG_S:
            self._logged = now
            logger.error("placement %s; %d requests so far were sent to the least loaded engine instead", what, self.faults)
