"""The page pool and its prefix index by their rules (R4, R5, R13, R14 of docs/verification.md), as immutable values."""

from typing import NamedTuple

ROOT, EVICTED, ORPHANED = -1, -2, -3  # instead of a page: no page before; evicted; its request offers no more

Tokens = tuple[int, ...]
Place = tuple[int, Tokens]  # (page before it, its tokens)


class Holder(NamedTuple):
    """A running request. canonical: the indexed page equal to its page `indexed` - 1."""

    tokens: Tokens
    computed: int
    pages: tuple[int, ...]
    indexed: int
    canonical: int


class Pool(NamedTuple):
    """holders: by slot. places: place of each page, or None. cached: pages in the order of eviction."""

    holders: tuple[Holder | None, ...]
    places: tuple[Place | None, ...]
    cached: tuple[int, ...] = ()

    @property
    def held(self) -> set[int]:
        return {page for holder in self.holders if holder for page in holder.pages}

    @property
    def free(self) -> int:
        return len(self.places) - len(self.held) - len(self.cached)

    def prefix(self, tokens: Tokens, size: int) -> tuple[int, ...]:
        """The indexed pages of the first tokens, without the last token at least."""
        hits: list[int] = []
        for k in range((len(tokens) - 1) // size):
            place = (hits[-1] if hits else ROOT), tokens[k * size : (k + 1) * size]
            if place not in self.places:
                break
            hits.append(self.places.index(place))
        return tuple(hits)

    def evict(self, wanted: int) -> "Pool":
        """Evict pages until `wanted` pages are free."""
        pool = self
        while pool.free < wanted:
            gone, *cached = pool.cached
            places = [place and (EVICTED if place[0] == gone else place[0], place[1]) for place in pool.places]
            places[gone] = None
            holders = [h and h._replace(canonical=EVICTED if h.canonical == gone else h.canonical) for h in pool.holders]
            pool = Pool(tuple(holders), tuple(places), tuple(cached))
        return pool

    def put(self, slot: int, holder: Holder | None) -> "Pool":
        return self._replace(holders=(*self.holders[:slot], holder, *self.holders[slot + 1 :]))

    def release(self, slot: int) -> "Pool":
        """Release a request's pages, the last page first: an indexed page without another holder becomes cached."""
        holder, pool = self.holders[slot], self.put(slot, None)
        assert holder is not None
        alone = [page for page in reversed(holder.pages) if page not in pool.held]
        return pool._replace(cached=pool.cached + tuple(page for page in alone if pool.places[page]))

    def step(self, slots: tuple[int, ...], size: int) -> "Pool":
        """Compute all tokens of these requests, and offer the pages that they filled, request by request."""
        pool, listed, offers = self, set[Tokens](), dict[int, Place]()
        for slot in slots:
            holder = pool.holders[slot]
            assert holder is not None
            waits = holder.canonical in (EVICTED, ORPHANED)
            indexed, canonical = holder.indexed, holder.canonical
            for k in range(indexed, len(holder.tokens) // size if canonical != ORPHANED else 0):
                place, all_before = (canonical, holder.tokens[k * size : (k + 1) * size]), holder.tokens[: (k + 1) * size]
                equal = self.places.index(place) if place in self.places and not waits else None
                waits = waits or (equal is None and all_before in listed)
                listed.add(all_before)
                canonical = ORPHANED if canonical == EVICTED else canonical
                if not waits:
                    if equal is None:
                        equal = holder.pages[k]
                        offers[equal] = place
                    indexed, canonical = k + 1, equal
            pool = pool.put(slot, holder._replace(computed=len(holder.tokens), indexed=indexed, canonical=canonical))
        return pool._replace(places=tuple(offers.get(page, place) for page, place in enumerate(pool.places)))
