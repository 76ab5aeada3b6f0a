"""What the prefix caches of a fleet's engines may hold, by what a front end sent there: prompts as one tree of their pages.

Each node has the engines that know its pages, so one walk tells what all of them know of a prompt. Pages leave the record of an
engine as they leave its cache. A prompt that is sent uses its pages, the last one first; where an engine has too many, the page
goes whose last use there is longest ago. So no page goes before those behind it.

An edge of the tree is the text of one page or of several that follow each other, as bytes: to compare it is one call, and a
prompt of a thousand tokens takes two or three. Nothing is hashed but by Python's own hash of bytes, which is keyed, and equal
means equal: no prompt can be made that is taken for another one.
"""

from collections import OrderedDict

from blinkpy.queues.array_types import Int32

TOKEN_BYTES = 4

Key = bytes | tuple[int, bytes]  # a page; that of a prompt's first page has the salt


class _Node:
    """Pages that follow each other. start: tokens before them; edge: their bytes; key: by which the parent's children have this
    node. known: for each engine that knows the first of them, its last use, and tokens from the prompt's start that it knows."""

    __slots__ = ("children", "edge", "key", "known", "parent", "start")

    def __init__(self, parent: "_Node | None", key: Key, start: int, edge: bytes):
        self.parent, self.key, self.start, self.edge = parent, key, start, edge
        self.children: dict[Key, _Node] = {}
        self.known: dict[int, tuple[int, int]] = {}


class PrefixRecord:
    """engines: how many there are. page_size: tokens. most_pages: of one engine that are kept in mind, at least 1; one takes some
    900 bytes where no prompts have a common start and each is a page long, and 4 bytes a token where they are long.

    Prompts are int32 [n]. salt: of the prefix cache, in [0, 2**63).
    """

    def __init__(self, engines: int, page_size: int, most_pages: int):
        self._page, self._most = page_size * TOKEN_BYTES, most_pages * page_size
        self._root = _Node(None, b"", 0, b"")
        self._uses = 0
        self._ends: list[OrderedDict[int, _Node]] = []  # of each engine: where each use ends, the one longest ago first
        self._tokens: list[int] = []  # of each engine: that it knows
        self._found: tuple[Int32, int, bytes, _Node, int] | None = None  # prompt, salt, text; node and byte where match ended
        self.grow(engines)

    def grow(self, engines: int) -> None:
        """There are more engines than before, or as many."""
        for _ in range(len(self._ends), engines):
            self._ends.append(OrderedDict())
            self._tokens.append(0)

    def tokens(self, engine: int) -> int:
        """Of all pages that an engine knows."""
        return self._tokens[engine]

    def match(self, prompt: Int32, salt: int) -> list[int]:
        """Tokens at the start of a prompt that each engine knows, in whole pages; never all: one at least is computed. Uses none."""
        text, page, at, node, known = prompt.tobytes(), self._page, 0, self._root, [0] * len(self._ends)
        key: Key = (salt, text[:page])
        while (child := node.children.get(key)) is not None:
            node, edge = child, child.edge
            if not text.startswith(edge, at):
                at += self._common(edge, text, at)
                for engine, (_, end) in node.known.items():
                    known[engine] = min(end, at // TOKEN_BYTES)
                break
            for engine, (_, end) in node.known.items():
                known[engine] = end
            at += len(edge)
            key = text[at : at + page]
        self._found = prompt, salt, text, node, at
        if len(text) == at > 0:
            return [min(tokens, (at - page) // TOKEN_BYTES) for tokens in known]
        return known

    def add(self, engine: int, prompt: Int32, salt: int) -> None:
        """Note that a prompt was sent to an engine; the tokens behind its last full page are left out. It is cheaper where match
        was called with the same objects, and nothing was added since then."""
        if self._found is None or self._found[0] is not prompt or self._found[1] != salt:
            self.match(prompt, salt)
        assert self._found is not None
        _, _, text, node, at = self._found
        self._found = None
        if at < node.start * TOKEN_BYTES + len(node.edge):
            node = self._split(node, at)
        rest = text[at : len(text) // self._page * self._page]
        if rest and (node.children or node.parent is None):
            key = rest[: self._page] if at else (salt, rest[: self._page])
            node.children[key] = node = _Node(node, key, at // TOKEN_BYTES, rest)
        else:
            node.edge += rest
        self._use(engine, node)
        self._shrink(engine, self._most)

    def forget(self, engine: int) -> None:
        """An engine knows nothing any more."""
        self._shrink(engine, 0)

    def _common(self, edge: bytes, text: bytes, at: int) -> int:
        """Bytes of the pages at the start of an edge that a text has from a place on: one page at least, the key."""
        page = self._page
        equal, most = 1, min(len(edge), len(text) - at) // page
        while equal < most:
            tried = (equal + most + 1) // 2
            if edge[equal * page : tried * page] == text[at + equal * page : at + tried * page]:
                equal = tried
            else:
                most = tried - 1
        return equal * page

    def _split(self, node: _Node, at: int) -> _Node:
        """Make the pages of a node up to a byte of the prompt a node of their own, and return it. Nobody has used them now."""
        parent, length, end = node.parent, at - node.start * TOKEN_BYTES, at // TOKEN_BYTES
        assert parent is not None
        parent.children[node.key] = upper = _Node(parent, node.key, node.start, node.edge[:length])
        node.parent, node.key, node.start, node.edge = upper, node.edge[length : length + self._page], end, node.edge[length:]
        upper.children[node.key] = node
        for engine, (use, known) in list(node.known.items()):
            upper.known[engine] = use, min(known, end)
            if known <= end:
                del node.known[engine]
                self._ends[engine][use] = upper
        return upper

    def _use(self, engine: int, node: _Node) -> None:
        """An engine uses all pages from the start to the end of a node."""
        self._uses += 1
        ends, end = self._ends[engine], node.start + len(node.edge) // TOKEN_BYTES
        if end:
            ends[self._uses] = node
        while node.parent is not None:
            before, known = node.known.get(engine, (0, node.start))
            if ends.get(before) is node:
                del ends[before]
            self._tokens[engine] += end - known
            node.known[engine] = self._uses, end
            node, end = node.parent, node.start

    def _shrink(self, engine: int, most: int) -> None:
        """Let an engine forget what it used longest ago, until it knows `most` tokens."""
        ends, page = self._ends[engine], self._page
        while (excess := self._tokens[engine] - most) > 0:
            use, node = next(iter(ends.items()))
            parent, known = node.parent, node.known[engine][1]
            assert parent is not None
            left = max(node.start, known - excess)
            self._tokens[engine] -= known - left
            if left > node.start:
                node.known[engine] = use, left
            else:
                del node.known[engine]
                if parent.known.get(engine, (0, 0))[0] == use:
                    ends[use] = parent
                else:
                    del ends[use]
            if not node.known:
                del parent.children[node.key]
            elif not node.children:
                longest = max(end for _, end in node.known.values())
                node.edge = node.edge[: (longest - node.start) * TOKEN_BYTES]
