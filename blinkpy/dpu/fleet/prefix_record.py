"""What the prefix caches of a fleet's engines may hold, by what a front end sent there: prompts as one tree of their pages.

Each node has the engines that know its pages, so one walk tells what all of them know of a prompt. Pages leave the record of an
engine as they leave its cache. A prompt that is sent uses its pages, the last one first; where an engine has too many, the page
goes whose last use there is longest ago. So no page goes before those behind it.

An edge of the tree is the text of one page or of several that follow each other, as bytes: to compare it is one call, and a
prompt of a thousand tokens takes two or three. Nothing is hashed but by Python's own hash of bytes, which is keyed, and equal
means equal: no prompt can be made that is taken for another one.
"""

from collections import OrderedDict

from blinkpy.queues.words import Int32

TOKEN_BYTES = 4

Key = bytes | tuple[int, bytes]  # a page; that of a prompt's first page has the salt


class _Node:
    """Pages that follow each other. edge: their bytes; end: tokens from the prompt's start to their end; key: by which the
    parent's children have this node; the root is its own parent. used: the last use by each engine that knows these pages."""

    __slots__ = ("children", "edge", "end", "key", "parent", "used")

    def __init__(self, parent: "_Node | None", key: Key, edge: bytes, end: int):
        self.parent, self.key, self.edge, self.end = parent or self, key, edge, end
        self.children: dict[Key, _Node] = {}
        self.used: dict[int, int] = {}


class PrefixRecord:
    """engines: how many there are. page_size: tokens. most_pages: of one engine that are kept in mind, at least 1; one takes some
    700 bytes where no prompts have a common start and each is a page long, and 4 bytes a token where they are long.

    Prompts are int32 [n]. salt: of the prefix cache, in [0, 2**63).
    """

    def __init__(self, engines: int, page_size: int, most_pages: int):
        self._page, self._most = page_size * TOKEN_BYTES, most_pages * page_size
        self._root = _Node(None, b"", b"", 0)
        self._use = 0  # the number of the last one
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
        """Tokens at the start of a prompt that each engine knows, in whole pages, its last token left out. Uses none."""
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
        """Note that a prompt was sent to an engine; the tokens behind its last full page are left out. It is cheaper where match
        was called with the same objects, and nothing has changed since then."""
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
        """An engine knows nothing any more."""
        for node in self._ends[engine].values():
            while node.used.pop(engine, None) is not None:
                if not node.used:
                    del node.parent.children[node.key]
                node = node.parent
        self._ends[engine].clear()
        self._tokens[engine], self._found = 0, None

    def _common(self, edge: bytes, text: bytes, at: int) -> int:
        """Bytes of the pages at the start of an edge that a text has from a place on: the key at least, and not all."""
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
        """Make the pages of a node up to a token of the prompt a separate node, and return it."""
        length = len(node.edge) - (node.end - end) * TOKEN_BYTES
        upper = self._child(node.parent, node.key, node.edge[:length])
        upper.used.update(node.used)
        node.parent, node.edge = upper, node.edge[length:]
        node.key = node.edge[: self._page]
        upper.children[node.key] = node
        return upper

    def _note(self, engine: int, node: _Node) -> None:
        """An engine uses all pages from the start to the end of a node. Two nodes that nothing parts any more become one."""
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
        """Let an engine that knows too much forget what it used longest ago."""
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
