"""What the prefix cache of one engine may hold, by what a front end sent there: prompts as a tree of their pages.

Pages leave the record as they leave the engine's cache. A prompt that is sent uses its pages, the last one first; where there are
too many, the page goes whose last use is longest ago. So no page goes before those behind it.

An edge of the tree is the text of one page or of several that were last used together, as bytes: to compare it is one call, and a
prompt of a thousand tokens takes two or three. Nothing is hashed but by Python's own hash of bytes, which is keyed, and equal
means equal: no prompt can be made that is taken for another one.
"""

from collections import OrderedDict
from collections.abc import Sequence

SALT_BYTES = 8
ITEM_BYTES = 4  # of a token


def first_key(prompt: bytes, salt: int, page_size: int) -> bytes:
    """By which records know the first page of a prompt, and with it all that follow. salt: in [0, 2**63)."""
    return salt.to_bytes(SALT_BYTES, "little") + prompt[: page_size * ITEM_BYTES]


class _Node:
    """Pages that follow each other. edge: their bytes; key: by which the parent's children have this node."""

    __slots__ = ("children", "edge", "key", "parent")

    def __init__(self, edge: bytes, key: bytes, parent: "_Node | None"):
        self.edge, self.key, self.parent = edge, key, parent
        self.children: dict[bytes, _Node] = {}


class PrefixRecord:
    """page_size: tokens. most_pages: that are kept in mind, at least 1; one takes some 600 bytes where no prompts have a common
    start and each is a page long, and 4 bytes a token where they are long.

    Prompts are bytes, of int32 tokens.
    """

    def __init__(self, page_size: int, most_pages: int):
        self._page, self._most = page_size * ITEM_BYTES, most_pages
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.pages = 0
        self._root = _Node(b"", b"", None)
        self._firsts = self._root.children  # a prompt whose first page is not there matches nothing
        self._used: OrderedDict[_Node, None] = OrderedDict()  # all nodes, the one used longest ago first
        self._found: tuple[bytes, bytes, _Node, int, bytes] | None = None  # prompt, its key; where match ended, and the key there

    def __len__(self) -> int:
        """Nodes of the tree, at most as many as pages."""
        return len(self._used)

    @staticmethod
    def match_each(records: "Sequence[PrefixRecord]", prompt: bytes, key: bytes, end: int) -> list[int]:
        """As match() of each of a fleet's. The text of a beginning that several know becomes one object: it takes its memory
        once, and a prompt is compared with it once."""
        found, same, start, then = list[int](), b"", 0, b""
        for record in records:
            child = record._firsts.get(key)
            if child is None:
                found.append(0)
                continue
            edge = child.edge
            if edge is not same:
                if len(edge) > end or not prompt.startswith(edge):
                    found.append(record.match(prompt, key, end))
                    continue
                if len(edge) == start:
                    child.edge = same
                else:
                    same, start = edge, len(edge)
                    then = prompt[start : start + record._page]
            if then in child.children:
                found.append(record.match(prompt, key, end))
            else:
                record._found = prompt, key, child, start, then
                found.append(start // record._page)
        return found

    def match(self, prompt: bytes, key: bytes, end: int | None = None) -> int:
        """Pages at the start of a prompt that are known. Uses none. key: see first_key. end: bytes of the prompt to look at."""
        page, at, node, first = self._page, 0, self._root, key
        end = len(prompt) if end is None else end
        more, last = 0, end - page
        while at <= last and (child := node.children.get(key)) is not None:
            edge = child.edge
            if at + len(edge) > end or not prompt.startswith(edge, at):
                more = self._common(edge, prompt, at, end)
                break
            node, at = child, at + len(edge)
            key = prompt[at : at + page]
        self._found = prompt, first, node, at, key
        return at // page + more

    def add(self, prompt: bytes, key: bytes) -> None:
        """Note that a prompt was sent; the tokens behind its last full page are left out. key: see first_key. It is cheaper where
        match was called with the same objects, and nothing was added since then."""
        page, at, node, used = self._page, 0, self._root, self._used.move_to_end
        end = len(prompt) // page * page
        found, self._found = self._found, None
        if found is not None and found[0] is prompt and found[1] is key:
            _, _, node, at, key = found
        while at < end and (child := node.children.get(key)) is not None:
            edge, node = child.edge, child
            if not prompt.startswith(edge, at):
                common = self._common(edge, prompt, at, end) * page
                node = self._split(child, common)
                at += common
                key = prompt[at : at + page]
                break
            at += len(edge)
            key = prompt[at : at + page]
        if at < end:
            self.pages += (end - at) // page
            if at and not node.children:
                node.edge += prompt[at:end]  # all of it is used now
            else:
                node.children[key] = leaf = _Node(prompt[at:end], key, node)
                self._used[leaf] = None
        while node.parent is not None:
            used(node)
            node = node.parent
        while self.pages > self._most:
            self._cut()

    def _common(self, edge: bytes, prompt: bytes, at: int, end: int) -> int:
        """Pages at the start of an edge that the prompt has from a place on, and up to its end: one at least, the key."""
        page = self._page
        equal, most = 1, min(len(edge), end - at) // page
        while equal < most:
            tried = (equal + most + 1) // 2
            if edge[equal * page : tried * page] == prompt[at + equal * page : at + tried * page]:
                equal = tried
            else:
                most = tried - 1
        return equal

    def _split(self, node: _Node, length: int) -> _Node:
        """Make the first bytes of a node's edge a node of their own, and return it. The rest stays what was used earlier."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.edge[:length], node.key, parent)
        parent.children[node.key] = upper
        node.edge, node.key, node.parent = node.edge[length:], node.edge[length : length + self._page], upper
        upper.children[node.key] = node
        self._used[upper] = None
        return upper

    def _cut(self) -> None:
        """Forget what was used longest ago: the end of a node that has no children."""
        node = next(iter(self._used))
        pages = min(len(node.edge) // self._page, self.pages - self._most)
        self.pages -= pages
        node.edge = node.edge[: len(node.edge) - pages * self._page]
        if not node.edge:
            del self._used[node]
            assert node.parent is not None
            del node.parent.children[node.key]
