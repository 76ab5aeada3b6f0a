"""The prefix index: it maps tokens and a parent page to the page with their keys and values.

The key of an indexed page is a hash of all tokens up to its end (blinkpy.queues.page_hash), in a chained hash table. A hash only
finds candidates: a page is a hit if its tokens and salt are equal *and* its parent is the request's previous page. Parents are
links (page, generation), and a page's generation changes whenever its content does. So by induction, a hit has exactly the same
tokens from the start. No collision can give a request the pages of other tokens.

*Duplicates.* Requests that compute the same tokens at the same time get equal pages. Only the first page is indexed. The other
requests keep their copies unindexed, and link their later pages to the first request's page (the "canonical" page of Requests).
So each chain of tokens is indexed once.

Device code (device/portable.py). New pages are processed in parallel, as a list of items ordered by request and page. For each
item, the lanes determine whether it is a duplicate, whether an earlier item will index an equal page, and the parent page. The
lane that owns a bucket changes its chain, in list order.
"""

from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.queues.page_hash import HASH_MODULUS_1, HASH_MODULUS_2, HASH_SHIFT
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE, WORD_FLAGS

ANY_PARENT = -3
CHAIN = 32  # maximum pages of a bucket that a lookup examines, newest first


@device
def uses_prefixes(limits, requests, slot):
    """Whether the request uses and extends the prefix index."""
    return limits.prefix_caching != 0 and requests.entry[slot, WORD_FLAGS] & SUBMIT_NO_PREFIX_CACHE == 0


@device
def extend_hash(limits, requests, slot, k):
    """Hash of the request's k-th page, from the previous page's hash; equal to blinkpy.queues.page_hash."""
    if k == 0:
        salt = requests.cache_salt[slot]
        first, second = salt % HASH_MODULUS_1, salt // HASH_MODULUS_1 % HASH_MODULUS_2
    else:
        before = requests.page_hash[slot, k - 1]
        first, second = before >> HASH_SHIFT, before & ((1 << HASH_SHIFT) - 1)
    for i in range(k << limits.page_shift, (k + 1) << limits.page_shift):
        value = requests.tokens[slot, i] + 1
        first = remainder(first * limits.hash_multiplier_1 + value, HASH_MODULUS_1)
        second = remainder(second * limits.hash_multiplier_2 + value, HASH_MODULUS_2)
    return first << HASH_SHIFT | second


@device
def remainder(x, modulus):
    """x % modulus without a division, for a modulus 2**31 - c with a small c, and 0 <= x < 2**62 + 2**32:
    2**31 is congruent to c.
    """
    mask = (1 << HASH_SHIFT) - 1
    c = mask + 1 - modulus
    x = (x & mask) + (x >> HASH_SHIFT) * c
    x = (x & mask) + (x >> HASH_SHIFT) * c
    return x - modulus if x >= modulus else x


@device
def find_page(limits, requests, pages, slot, k, parent):
    """The newest indexed page with the tokens of the request's k-th page after `parent`, or NO_PAGE.
    ANY_PARENT accepts any parent that still has its content.
    """
    key = requests.page_hash[slot, k]
    salt = requests.cache_salt[slot]
    page = pages.bucket_head[key & (limits.index_buckets - 1)]
    looked = 0
    while page >= 0 and looked < CHAIN:
        if pages.key[page] == key and pages.salt[page] == salt:
            equal = parent_lives(pages, page) and (parent == ANY_PARENT or pages.parent[page] == parent)
            i = 0
            while equal and i < limits.page_size:
                equal = pages.tokens[page, i] == requests.tokens[slot, (k << limits.page_shift) + i]
                i += 1
            if equal:
                return page
        page = pages.bucket_next[page]
        looked += 1
    return S.NO_PAGE


@device
def parent_lives(pages, page):
    """Whether the content of an indexed page's parent is unchanged."""
    parent = pages.parent[page]
    return parent < 0 or pages.generation[parent] == pages.parent_generation[page]


@device
def find_prefix(limits, requests, pages, found, slot, lane, lanes):
    """Find the leading pages in the index, found[0:hits]. Returns hits. At least one token is left to
    compute.
    """
    if not uses_prefixes(limits, requests, slot):
        return 0
    most = min((requests.length[slot] - 1) >> limits.page_shift, requests.hashed[slot])
    hits = 0
    while hits < most:
        k = hits + lane
        if k < most:  # a guess that needs no result for the previous page; only colliding hashes make it wrong
            found[k] = find_page(limits, requests, pages, slot, k, ANY_PARENT if k > 0 else S.NO_PAGE)
        barrier(lanes)
        linked = 0
        if k < most and found[k] >= 0:
            linked = 1 if k == 0 or (found[k - 1] >= 0 and pages.parent[found[k]] == found[k - 1]) else 0
        breaks, _ = block_scan(1 - linked, lane, lanes)
        good = block_sum(1 if breaks == 0 and linked == 1 else 0, lane, lanes)
        hits += good
        if good < lanes:
            if hits == 0 or hits >= most or found[hits] < 0:
                break
            behind = find_page(limits, requests, pages, slot, hits, found[hits - 1])
            barrier(lanes)
            if behind < 0:
                break
            if lane == 0:
                found[hits] = behind
            barrier(lanes)
            hits += 1
    return hits


@device
def index_pages(limits, state, lane, lanes):
    """Index the pages that the last step filled, at most limits.index_items; the rest wait for the next step."""
    if limits.prefix_caching == 0:
        return
    count = list_items(limits, state, lane, lanes)
    if count > 0:
        classify_items(limits, state, count, lane, lanes)
        link_items(limits, state, count, lane, lanes)


@device
def list_items(limits, state, lane, lanes):
    """Fill scratch.slot, .page (index in the sequence), .first (the request's first item) and .key. Returns
    the number of items.
    """
    requests, batch, scratch = state.requests, state.batch, state.scratch
    rows = batch.counts[S.ROWS]
    count = 0
    for tile in strided(0, rows, lanes):
        row = tile + lane
        fresh, slot, indexed = 0, 0, 0
        if row < rows and batch.emits[row] != S.DRAFT:
            slot = batch.row_slots[row]
            if uses_prefixes(limits, requests, slot) and requests.canonical[slot] != S.CHAIN_EVICTED:
                full = requests.computed[slot] >> limits.page_shift
                for k in range(requests.hashed[slot], full):  # at most one page, except after a step of several pages
                    requests.page_hash[slot, k] = extend_hash(limits, requests, slot, k)
                    requests.hashed[slot] = k + 1
                indexed = requests.indexed[slot]
                fresh = full - indexed
        before, total = block_scan(fresh, lane, lanes)
        for i in range(count + before, min(count + before + fresh, limits.index_items)):
            k = indexed + i - count - before
            scratch.slot[i], scratch.page[i], scratch.first[i] = slot, k, count + before
            scratch.key[i] = requests.page_hash[slot, k]
        count += total
    barrier(lanes)
    return min(count, limits.index_items)


@device
def classify_items(limits, state, count, lane, lanes):
    """Classify items as duplicate, new or postponed. scratch.breaks counts the breaks in chains of indexed pages up to each item,
    scratch.rival the postponed items (see `is_...`).
    """
    requests, pages, scratch = state.requests, state.pages, state.scratch
    for i in strided(lane, count, lanes):
        key = scratch.key[i]
        slot = scratch.slot[i]
        parent = requests.canonical[slot] if i == scratch.first[i] else ANY_PARENT
        scratch.found[i] = find_page(limits, requests, pages, slot, scratch.page[i], parent)
        rival, j = 0, 0
        while j < i and rival == 0:
            rival = 1 if scratch.key[j] == key else 0
            j += 1
        scratch.rival[i] = rival
    barrier(lanes)
    look_behind_parents(limits, state, count, lane, lanes)
    base = 0
    for tile in strided(0, count, lanes):
        i = tile + lane
        own = 0
        if i < count:
            slot, found = scratch.slot[i], scratch.found[i]
            if i > scratch.first[i]:
                parent = scratch.found[i - 1]
                known = parent >= 0
            else:
                parent = requests.canonical[slot]
                known = parent < 0 or pages.generation[parent] == requests.canonical_generation[slot]
                if not known:
                    requests.canonical[slot] = S.CHAIN_EVICTED
                    scratch.rival[i] = 1
            if found < 0 or not known or pages.parent[found] != parent:
                own = 1
        before, total = block_scan(own, lane, lanes)
        if i < count:
            scratch.breaks[i] = base + before + own
        base += total
    barrier(lanes)
    base = 0
    for tile in strided(0, count, lanes):  # found pages may follow a break, but only new pages are postponed
        i = tile + lane
        waits = 1 if i < count and scratch.rival[i] == 1 and not is_duplicate(scratch, i) else 0
        before, total = block_scan(waits, lane, lanes)
        if i < count:
            scratch.rival[i] = base + before + waits
        base += total
    barrier(lanes)


@device
def look_behind_parents(limits, state, count, lane, lanes):
    """Repeat lookups that found a page whose parent is not the page of the previous item.

    This is rare: two live pages hold the same tokens if the parent of one was evicted and the chain was
    computed again. The lookup finds the newest page, but the request may use the older page. Ends with a barrier.
    """
    pages, scratch = state.pages, state.scratch
    elsewhere = 0
    for i in strided(lane, count, lanes):
        if i > scratch.first[i] and is_elsewhere(pages, scratch, i):
            elsewhere = 1
    if block_max(elsewhere, lane, lanes) == 0:
        return
    if lane == 0:
        for i in range(count):  # in order: each item depends on its predecessor
            if i > scratch.first[i] and is_elsewhere(pages, scratch, i):
                parent = scratch.found[i - 1]
                scratch.found[i] = find_page(limits, state.requests, pages, scratch.slot[i], scratch.page[i], parent)
    barrier(lanes)


@device
def is_elsewhere(pages, scratch, i):
    """Whether the pages found for items i and i - 1 of a request are not child and parent."""
    before, found = scratch.found[i - 1], scratch.found[i]
    return before >= 0 and found >= 0 and pages.parent[found] != before


@device
def is_duplicate(scratch, i):
    """Whether an equal page with the same previous pages is indexed."""
    first = scratch.first[i]
    return scratch.breaks[i] == (scratch.breaks[first - 1] if first > 0 else 0)


@device
def is_new(scratch, i):
    """Whether the page is indexed now: it is not a duplicate, and neither this page nor an earlier page is postponed."""
    first = scratch.first[i]
    return not is_duplicate(scratch, i) and scratch.rival[i] == (scratch.rival[first - 1] if first > 0 else 0)


@device
def link_items(limits, state, count, lane, lanes):
    """Write the index entries of new items, and advance their requests."""
    requests, pages, scratch = state.requests, state.pages, state.scratch
    for i in strided(lane, count, lanes):
        if is_new(scratch, i):
            slot, k = scratch.slot[i], scratch.page[i]
            page = requests.page_table[slot, k]
            parent = requests.canonical[slot]
            if i > scratch.first[i]:
                parent = scratch.found[i - 1] if is_duplicate(scratch, i - 1) else requests.page_table[slot, k - 1]
            pages.key[page] = scratch.key[i]
            pages.salt[page] = requests.cache_salt[slot]
            pages.parent[page] = parent
            pages.parent_generation[page] = pages.generation[parent] if parent >= 0 else 0
            for j in range(limits.page_size):
                pages.tokens[page, j] = requests.tokens[slot, (k << limits.page_shift) + j]
    barrier(lanes)
    for i in range(count):
        bucket = scratch.key[i] & (limits.index_buckets - 1)
        if bucket & (lanes - 1) == lane and is_new(scratch, i):
            link(pages, requests.page_table[scratch.slot[i], scratch.page[i]], bucket)
    for i in strided(lane, count, lanes):
        duplicate = is_duplicate(scratch, i)
        if duplicate or is_new(scratch, i):
            slot, k = scratch.slot[i], scratch.page[i]
            last = i + 1 == count or scratch.first[i + 1] != scratch.first[i]
            if last or not (is_duplicate(scratch, i + 1) or is_new(scratch, i + 1)):
                page = scratch.found[i] if duplicate else requests.page_table[slot, k]
                requests.indexed[slot] = k + 1
                requests.canonical[slot] = page
                requests.canonical_generation[slot] = pages.generation[page]
    barrier(lanes)


@device
def link(pages, page, bucket):
    """One lane: put a page at the head of its chain."""
    after = pages.bucket_head[bucket]
    pages.bucket_next[page] = after
    pages.bucket_previous[page] = S.NO_PAGE
    if after >= 0:
        pages.bucket_previous[after] = page
    pages.bucket_head[bucket] = page


@device
def unlink(pages, page, bucket):
    """One lane: remove a page from its chain."""
    before, after = pages.bucket_previous[page], pages.bucket_next[page]
    if before >= 0:
        pages.bucket_next[before] = after
    else:
        pages.bucket_head[bucket] = after
    if after >= 0:
        pages.bucket_previous[after] = before
    pages.bucket_next[page] = S.NO_PAGE
    pages.bucket_previous[page] = S.NO_PAGE


@device
def forget(pages, page):
    """One lane: mark a page as not indexed, and invalidate links to it as a parent."""
    pages.parent[page] = S.NO_PAGE
    pages.key[page] = -1
    pages.generation[page] += 1
