"""The page pool and the prefix index by their rules, as plain Python objects.

R14. A request releases its last page first. Indexed pages without another holder become cached. Cached pages
are evicted in the order of their release, and no more than needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple["Page | None", int, tuple[int, ...]]  # page before it, salt, its tokens


@dataclass(slots=True, eq=False)
class Page:
    """What a page of the pool holds, from the moment that a request takes it until it is free again.

    number: in the pool; -1 while it was not seen in a page table, since any free page will do. place: where the index has it.
    """

    holders: int = 1
    number: int = -1
    place: Place | None = None
    alive: bool = True


class PagePool:
    """A page is free, held by requests, or cached: indexed, and held by none."""

    def __init__(self, pages: int) -> None:
        self.free = pages
        self.cached: dict[Page, None] = {}  # in the order of eviction
        self.index: dict[Place, Page] = {}
        self.named: dict[int, Page] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        return self.free + len(self.cached)

    def evict(self, wanted: int) -> None:
        """R14: make `wanted` pages free; those leave that were released first."""
        while self.free < wanted:
            page = next(iter(self.cached))
            del self.cached[page]
            self._drop(page)
            self.evictions += 1

    def take(self) -> Page:
        """A free page for one request."""
        self.free -= 1
        return Page()

    def share(self, page: Page) -> None:
        """A hit: one more request holds an indexed page."""
        self.cached.pop(page, None)
        page.holders += 1

    def release(self, pages: Sequence[Page]) -> None:
        """R14: a request's pages, the last one first. Indexed ones that nobody else holds become cached, others free."""
        for page in reversed(pages):
            page.holders -= 1
            if page.holders == 0 and page.place:
                self.cached[page] = None
            elif page.holders == 0:
                self._drop(page)

    def offer(self, page: Page, place: Place) -> None:
        """Put a full page into the index."""
        page.place = place
        self.index[place] = page

    def _drop(self, page: Page) -> None:
        page.alive = False
        if page.place:
            del self.index[page.place]
        self.named.pop(page.number, None)
        self.free += 1
