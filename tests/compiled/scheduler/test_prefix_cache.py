"""The prefix cache: shared pages, pages that must not be shared, and the order of eviction.

Claim outputs/prefix-hits: A prefix hit has the same tokens, salt and parents, even if hashes collide.
"""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.front_end.hash_reference import page_hashes
from support.scheduler_cases import MULTIPLIERS, VOCAB, Case, case_sizes, make_case, tokens

from blinkpy.device.lanes import Team, in_lanes
from blinkpy.device.portable import device
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv.limits import make_limits_by_name
from blinkpy.kv.page_allocator import release_pages, take_pages
from blinkpy.kv.prefix_cache import ANY_PARENT, CHAIN, extend_hash, find_page, find_prefix, index_pages, is_elsewhere, remainder
from blinkpy.kv.state import CACHED_COUNT, CHAIN_EVICTED, FREE_COUNT, NO_PAGE, RING_HEAD, RING_TAIL, ROWS, Pages
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.page_hash import HASH_MODULUS_1, HASH_MODULUS_2
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE
from blinkpy.queues.words import FINISH_LENGTH


def make(lanes: int = 3, **sizes: Any) -> Case:
    return make_case(lanes=lanes, **{"pages": 32, "tokens": 32} | sizes)


def run(case: Case, prompt: list[int], max_tokens: int = 3, **fields: Any) -> int:
    """Serve one request alone; returns the number of tokens found in the cache."""
    before = case.counter("prefix_hit_tokens")
    request = case.submit(prompt, max_tokens, **fields)
    case.finish()
    assert request.ended == FINISH_LENGTH
    return case.counter("prefix_hit_tokens") - before


def test_a_prompt_is_computed_once() -> None:
    case = make()
    assert run(case, tokens(13)) == 0
    assert run(case, tokens(13)) == 12
    assert run(case, tokens(12)) == 8  # at least one token is computed
    assert run(case, tokens(9) + [1, 2, 3, 4]) == 8
    assert run(case, [1] + tokens(12)) == 0


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_new_page_waits_though_an_older_chain_has_it(lanes: int) -> None:
    """The first page of the older chain was evicted, so that only its other pages remain. Of two requests of one step, the first
    continues this chain, and the second computes all pages again. Both offer an equal last page.
    """
    limits = make_case(lanes=1, page_size=1, pages=40).limits
    state = make_state(limits, [(limits.tokens, limits.rows)])
    requests, batch, pages = state.requests, state.batch, state.pages
    index = in_lanes(index_pages, lanes, seed=lanes)

    def step(computed: dict[int, int]) -> None:
        for row, (slot, count) in enumerate(computed.items()):
            batch.row_slots[row], batch.emits[row], requests.computed[slot] = slot, 1, count
        batch.counts[ROWS] = len(computed)
        index(limits, as_memoryviews(state), 0, 1)

    for slot, first in ((0, 10), (1, 20), (2, 30)):
        requests.tokens[slot, :4], requests.page_table[slot, :4] = tokens(4), np.arange(first, first + 4)
    step({0: 4})
    assert requests.indexed[0] == 4
    pages.generation[10] += 1
    pages.key[10] = -1
    requests.page_table[1, :3], requests.indexed[1], requests.canonical[1] = [10, 11, 12], 3, 12
    requests.canonical_generation[1] = pages.generation[12]
    step({1: 4, 2: 4})
    assert (requests.indexed[1], requests.canonical[1]) == (4, 13)
    assert (requests.indexed[2], requests.canonical[2]) == (3, 32)
    step({2: 4})
    assert (requests.indexed[2], requests.canonical[2]) == (4, 33)


def test_generated_pages_are_shared_too() -> None:
    case = make()
    first = case.submit(tokens(6), 12)
    case.finish()
    assert run(case, tokens(6) + first.got, 2) == 16  # of 18 tokens; the last generated token was never computed


def test_pages_are_shared_while_they_are_in_use() -> None:
    case = make()
    case.submit(tokens(9), 12)
    case.turn()
    case.submit(tokens(9), 12, pair=1)
    case.turn()
    table = case.state.requests.page_table
    assert table[0, :2].tolist() == table[4, :2].tolist()
    assert case.state.pages.refcount[table[0, :3]].tolist() == [2, 2, 1]
    case.finish()
    assert case.counter("prefix_hit_tokens") == 8


def test_equal_prompts_at_the_same_time_leave_one_chain_and_what_follows_it_is_found() -> None:
    case = make(pairs=1, pages=40)
    run(case, tokens(17, 40))  # so that page numbers differ from the numbers of a step's items
    prompts = [tokens(8) + tokens(9, 20 + i) for i in range(3)]
    for prompt in prompts:
        case.submit(prompt, 2)
    case.finish()
    keys = case.state.pages.key[case.state.pages.key >= 0].tolist()
    assert len(keys) == len(set(keys)) == 4 + 2 + 3 * 2
    assert [run(case, prompt) for prompt in prompts] == [16, 16, 16]


@pytest.mark.parametrize("chunk", [4, 5, 32])
def test_chunked_prompts_are_indexed_as_they_are_computed(chunk: int) -> None:
    case = make(tokens=chunk)
    case.submit(tokens(25), 2)
    case.turn()
    case.turn()
    full = min(25, chunk if chunk < 25 else 25) // 4
    assert case.state.requests.indexed[0] == full
    case.finish()
    assert run(case, tokens(25)) == 24


def test_more_pages_than_a_turn_offers_follow_later() -> None:
    """Equal pages that wait for the next step, and that step's own pages, exceed the list of a turn: 16 + 3."""
    case = make(pairs=1, rows=3, tokens=16, page_size=1, max_model_len=18, pages=60)
    for _ in range(2):
        case.submit(tokens(8), 9)
    case.turn()
    prompt = tokens(14, 31)
    case.submit(prompt, 4)
    case.turn(2)  # 8 waiting pages and one of each row, and 14
    assert case.state.requests.indexed[2] < 14
    case.finish()
    assert run(case, prompt) == 13


def test_a_page_may_have_the_hash_0() -> None:
    case = make(pairs=1)
    case.submit(tokens(5), 1)
    case.views.hashes[0, 0], case.opinion = 0, None
    case.finish()
    assert case.state.counts[[FREE_COUNT, CACHED_COUNT]].tolist() == [31, 1]
    assert case.state.pages.key.max() == 0


def test_salts_flags_and_the_option_keep_requests_apart() -> None:
    case = make()
    hits = [run(case, tokens(9), cache_salt=salt) for salt in (1, 2, 1)]
    assert [*hits, run(case, tokens(9), flags=SUBMIT_NO_PREFIX_CACHE)] == [0, 0, 8, 0]
    case = make()
    assert run(case, tokens(9), flags=SUBMIT_NO_PREFIX_CACHE) == 0
    assert case.state.counts[CACHED_COUNT] == 0
    assert run(case, tokens(9)) == 0
    case = make(prefix_caching=False)
    assert [run(case, tokens(9)), run(case, tokens(9))] == [0, 0]
    assert case.state.counts[FREE_COUNT] == 32


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_hash_collision_is_not_a_hit(lanes: int) -> None:
    """With multipliers of 0, the hash is that of the page's last token. Only salt, tokens and parents distinguish
    pages."""
    case = make(lanes, multipliers=(0, 0))
    same_end = [[1, 2, 3, 9, 5], [4, 2, 3, 9, 5], [1, 2, 3, 9, 8, 8, 8, 9, 5], [4, 2, 3, 9, 8, 8, 8, 9, 5]]
    keys = [page_hashes(p, 4, (0, 0)) for p in same_end]
    assert keys == [[keys[0][0]]] * 2 + [[keys[0][0]] * 2] * 2
    assert [run(case, prompt, 1) for prompt in same_end] == [0, 0, 4, 4]
    assert [run(case, prompt, 1) for prompt in same_end] == [4, 4, 8, 8]
    assert run(case, same_end[0], 1, cache_salt=0) == 4
    assert run(case, same_end[0], 1, cache_salt=1) == 0  # no hash of these depends on the salt
    assert run(case, [9, 9, 9, 9, 8, 8, 8, 9, 5], 1) == 0  # the second page exists, but after another first page


def test_eviction_takes_the_oldest_and_the_tails_first() -> None:
    case = make(pages=8, max_model_len=20)
    run(case, tokens(17), 1)  # 4 pages cached
    run(case, tokens(9, 3), 1)  # 2 pages cached
    assert (case.state.counts[FREE_COUNT], case.state.counts[CACHED_COUNT]) == (2, 6)
    run(case, tokens(15, 5), 1, flags=SUBMIT_NO_PREFIX_CACHE)  # 4 pages: 2 free pages, and the last 2 of the first prompt
    assert case.counter("evictions") == 2
    assert run(case, tokens(17), 1) == 8
    assert run(case, tokens(9, 3), 1) == 8


def test_a_used_page_moves_to_the_end_of_the_line() -> None:
    case = make(pages=6, max_model_len=20)
    run(case, tokens(9), 1)
    run(case, tokens(9, 3), 1)
    run(case, tokens(9), 1)  # used again
    run(case, tokens(15, 5), 1, flags=SUBMIT_NO_PREFIX_CACHE)
    assert run(case, tokens(9), 1) == 8
    assert run(case, tokens(9, 3), 1) == 0


def test_a_child_of_an_evicted_page_is_not_found() -> None:
    """A page is evicted and reused for other tokens; a page that names it as its parent must not be found."""
    case = make(pages=8, max_model_len=20)
    run(case, tokens(13), 1)
    pages = case.state.pages
    root = int(np.flatnonzero((pages.key >= 0) & (pages.parent < 0))[0])
    pages.generation[root] += 1
    case.opinion = None  # the oracle does not know this
    assert run(case, tokens(13), 1) == 4


def test_a_request_whose_chain_was_evicted_stops_offering_pages() -> None:
    for page, length in enumerate((5, 9)):
        case = make(pages=32, max_model_len=32)
        case.submit(tokens(length), 20)
        case.turn()
        case.turn()
        requests = case.state.requests
        assert requests.canonical[0] == page
        case.state.pages.generation[page] += 1
        case.opinion = None  # the oracle does not know this
        for _ in range(9):
            case.turn()
        assert requests.canonical[0] == CHAIN_EVICTED
        assert requests.indexed[0] == 1 + page
        case.finish()


def test_the_ring_is_compacted_before_it_is_full() -> None:
    case = make(pages=8, max_model_len=20)
    tails = []
    for _ in range(40):
        run(case, tokens(17), 1)
        tails.append(int(case.state.counts[RING_TAIL] - case.state.counts[RING_HEAD]))
    assert max(tails) <= case.limits.ring_entries
    assert any(b < a for a, b in pairwise(tails))


@pytest.mark.parametrize("salt", [0, 1, 2**31 - 1, 2**40 + 12345, 2**63 - 1])
def test_hashes_of_generated_pages_continue_those_of_the_front_end(salt: int, rng: np.random.Generator) -> None:
    case = make(page_size=4, max_model_len=32)
    requests = case.state.requests
    requests.tokens[1] = rng.integers(0, 1 << 24, 32)
    requests.cache_salt[1] = salt
    for k in range(8):
        requests.page_hash[1, k] = extend_hash(case.limits, as_memoryviews(requests), 1, k)
    assert requests.page_hash[1].tolist() == page_hashes(requests.tokens[1], 4, MULTIPLIERS, salt)


@pytest.mark.parametrize("modulus", [HASH_MODULUS_1, HASH_MODULUS_2])
def test_remainders_without_division(modulus: int, rng: np.random.Generator) -> None:
    edges = [n * modulus + d for n in (0, 1, 2, 19, 20, 2**20, modulus - 1, modulus) for d in (-1, 0, 1)]
    for x in [*edges[1:], 2**62 + 2**32 - 1, *rng.integers(0, 2**62, 1000).tolist()]:
        assert remainder(x, modulus) == x % modulus


CONTENTS = [[*marks, last] for last in (0, 1) for marks in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]  # of pages, by number
FEW = [0, 0, 1, 2, 3, 4]  # of CONTENTS, so that chains meet


def random_chains(pages: Pages, rng: np.random.Generator) -> dict[tuple[int, int, int], int]:
    """Index pages whose hashes depend only on their last token. (parent, salt, content) -> page."""
    chains, order = dict[tuple[int, int, int], int](), rng.permutation(range(1, len(pages.key))).tolist()
    order.insert(rng.integers(4), 0)  # page 0 is early, so that other pages can follow it in a chain
    for i, page in enumerate(order):
        content, parent = int(rng.choice(FEW)), order[rng.integers(i)] if i and rng.random() < 0.7 else NO_PAGE
        salt = int(pages.salt[parent] if parent >= 0 else rng.integers(8) == 0)
        if chains.setdefault((parent, salt, content), page) == page:
            key, pages.tokens[page] = 77 * CONTENTS[content][-1], CONTENTS[content]
            bucket = key % len(pages.bucket_head)
            pages.key[page], pages.salt[page], pages.parent[page] = key, salt, parent
            pages.bucket_next[page], pages.bucket_head[bucket] = pages.bucket_head[bucket], page
    return chains


def test_a_hit_is_the_chain_of_the_request_whatever_collides(rng: np.random.Generator) -> None:
    """Some pages have new contents. Any number of lanes finds the one chain with the request's tokens and salt, from
    the first page on."""
    sizes, facts, options = case_sizes(pairs=1, slots=1, page_size=4, pages=24, max_model_len=33)
    limits, lengths = make_limits_by_name(sizes, facts, **options), Counter[int]()
    searches = [in_lanes(find_prefix, lanes, seed=lanes) for lanes in (1, 2, 3, 4, 5, 8)]
    for _ in range(200):
        state = make_state(limits)
        requests, pages, chains = state.requests, state.pages, random_chains(state.pages, rng)
        lost = set(rng.choice(list(chains.values())[:3], rng.integers(3)).tolist())
        pages.generation[list(lost)] += 1  # the pages after them are lost, too
        wanted, page, known = rng.choice(FEW, 8).tolist(), int(rng.integers(24)), {page: name for name, page in chains.items()}
        while page in known:  # usually some existing pages, from the first on
            page, wanted = known[page][0], [known[page][2], *wanted]
        contents = np.ravel([CONTENTS[content] for content in wanted[:8]])
        requests.tokens[0, :32], requests.page_hash[0, :8] = contents, 77 * contents[3::4]
        requests.length[0], requests.hashed[0] = rng.choice([33, rng.integers(1, 34)]), rng.choice([8, rng.integers(9)])
        most = min((int(requests.length[0]) - 1) // 4, int(requests.hashed[0]))
        chain, page = list[int](), NO_PAGE
        for content in wanted[:most]:
            page = -2 if page in lost else chains.get((page, 0, content), -2)
            if page < 0:
                break
            chain.append(page)
        pages.free[:] = chain[0] if chain else 0  # an array without a meaning here
        views = as_memoryviews(state)
        for search in searches:
            found = np.full(most, -1, np.int32)
            hits = search(limits, views.requests, views.pages, found.data, 0, 0, 1)
            assert found[:hits].tolist() == chain
        lengths[len(chain)] += 1
    assert len(lengths) > 3, lengths


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_a_chain_exists_once_where_its_begin_was_computed_again(lanes: int, rng: np.random.Generator) -> None:
    """Each request is on the older of two chains of its tokens: the older chain's first page was evicted, and the chain
    recomputed. The requests offer several pages together; pages of the older chain are found, other pages are new."""
    sizes, facts, options = case_sizes(pairs=1, slots=3, rows=3, tokens=96, page_size=4, pages=100, max_model_len=40)
    limits = make_limits_by_name(sizes, facts, **options)
    index = in_lanes(index_pages, lanes, seed=lanes)
    for _ in range(20):
        state, wanted = make_state(limits), dict[int, tuple[list[int], int]]()
        requests, pages, numbers = state.requests, state.pages, rng.permutation(100).tolist()
        evicted = numbers.pop()
        for slot in range(3):
            known, full = (int(rng.integers(1, 7)) for _ in range(2))
            known, full = min(known, full), max(known, full) + int(rng.integers(2))
            contents, hashes = rng.integers(VOCAB, size=4 * full), rng.integers(2**40, size=full)
            older, newer, own = ([numbers.pop() for _ in range(count)] for count in (known, max(known, full - 1), full))
            for chain in older, newer:
                for k, page in enumerate(chain):
                    bucket = int(hashes[k]) & (limits.index_buckets - 1)
                    pages.tokens[page], pages.key[page] = contents[4 * k : 4 * k + 4], hashes[k]
                    pages.parent[page] = chain[k - 1] if k else NO_PAGE
                    pages.bucket_next[page], pages.bucket_head[bucket] = pages.bucket_head[bucket], page
            pages.parent[older[0]], pages.parent_generation[older[0]] = evicted, pages.generation[evicted] - 1
            requests.tokens[slot, : 4 * full], requests.page_hash[slot, :full] = contents, hashes
            requests.page_table[slot, :full], requests.computed[slot], requests.hashed[slot] = own, 4 * full, full
            requests.indexed[slot], requests.canonical[slot] = 1, older[0]
            requests.canonical_generation[slot] = pages.generation[older[0]]
            parents = [NO_PAGE] * known + [older[-1], *own[known:-1]][: full - known]
            wanted[slot] = parents, own[-1] if known < full else older[-1]
        state.batch.counts[ROWS], state.batch.row_slots[:3] = 3, rng.permutation(3)
        assert limits.index_items >= 3 * 7
        index(limits, as_memoryviews(state), 0, 1)
        for slot, (parents, last) in wanted.items():
            full = len(parents)
            assert pages.parent[requests.page_table[slot, :full]].tolist() == parents
            assert (requests.indexed[slot], requests.canonical[slot]) == (full, last)


@pytest.mark.parametrize(("key", "salt"), [(7, 0), (8, 0), (7, 1)])
def test_a_bucket_is_looked_at_up_to_its_bound(key: int, salt: int) -> None:
    """Pages of one bucket, all with this hash and salt; one page has the request's token.

    Pages beyond the bound are not hits, so no turn takes long.
    """
    length = CHAIN + 2
    limits = SimpleNamespace(index_buckets=1, page_size=1, page_shift=0)
    requests = SimpleNamespace(page_hash=np.full((1, 1), 7), cache_salt=[0], tokens=np.ones((1, 1)))
    for place in range(length):
        keys, salts = [key] * length, [salt] * length
        keys[place], salts[place] = 7, 0
        pages = SimpleNamespace(
            bucket_head=[0], bucket_next=[*range(1, length), -1], key=keys, salt=salts, parent=[-1] * length,
            tokens=(np.arange(length) == place)[:, None].astype(int),
        )  # fmt: skip
        found = find_page(limits, requests, pages, 0, 0, ANY_PARENT)
        assert found == (place if place < CHAIN else NO_PAGE)


def test_a_page_of_another_hash_is_no_hit() -> None:
    """Not even with the same tokens: hashes determine hits, regardless of the buckets."""
    limits = SimpleNamespace(index_buckets=1, page_size=1, page_shift=0)
    requests = SimpleNamespace(page_hash=np.array([[7]]), cache_salt=[0], tokens=np.array([[1]]))
    for key, found in ((8, NO_PAGE), (7, 0)):
        pages = SimpleNamespace(bucket_head=[0], bucket_next=[-1], key=[key], salt=[0], parent=[-1], tokens=np.array([[1]]))
        assert find_page(limits, requests, pages, 0, 0, NO_PAGE) == found


@pytest.mark.parametrize("lanes", [1, 3])
def test_pages_are_offered_in_a_serial_order(lanes: int, rng: np.random.Generator) -> None:
    """Requests with a common start, whose pages are computed in several steps. An indexed page makes an equal page a duplicate.
    An equal page earlier in the list makes the rest of a request wait. A request whose chain was evicted offers no more pages."""
    rows, longest = 6, 8
    sizes, facts, options = case_sizes(
        pairs=1, slots=rows + 1, rows=rows, tokens=64, page_size=1, pages=rows * longest + 1, max_model_len=longest + 2
    )
    limits, index, seen = make_limits_by_name(sizes, facts, **options), in_lanes(index_pages, lanes, races=True), Counter[str]()
    for _ in range(12):
        state, names = make_state(limits), dict[tuple[int, ...], int]()
        requests, pages, scratch = state.requests, state.pages, state.scratch
        own = np.append(0, 1 + rng.permutation(rows * longest - 1)).reshape(rows, longest)
        prompts = [tuple(rng.choice([0, 0, 0, 1], longest).tolist()) for _ in range(rows)]
        requests.canonical[rows] = 0  # without a row: its scratch words belong to an earlier turn
        requests.canonical_generation[rows] = -5
        indexed, canonical, known = [0] * rows, [NO_PAGE] * rows, dict[tuple[int, ...], int]()
        for slot, prompt in enumerate(prompts):
            requests.tokens[slot, :longest], requests.page_table[slot, :longest] = prompt, own[slot]
            for k in range(longest):
                requests.page_hash[slot, k] = names.setdefault(prompt[: k + 1], 3 * len(names))
        for turn in range(3):
            for slot in range(rows):
                if turn and rng.random() < 0.1 and canonical[slot] >= 0:
                    requests.canonical_generation[slot] -= 1
                full = min(longest, int(requests.computed[slot]) + int(rng.integers(4)))
                requests.computed[slot] = requests.hashed[slot] = full
            order = rng.permutation(rows).tolist()
            state.batch.counts[ROWS], state.batch.row_slots[:rows] = rows, order
            scratch.slot[:], scratch.first[:], scratch.page[:] = rows, np.arange(len(scratch.first)), 0
            listed, before = set[tuple[int, ...]](), dict(known)
            for slot in order:
                begin, waits = indexed[slot], False
                if canonical[slot] == CHAIN_EVICTED:
                    continue
                evicted = canonical[slot] >= 0 and requests.canonical_generation[slot] != pages.generation[canonical[slot]]
                for k in range(begin, int(requests.computed[slot])):
                    name = prompts[slot][: k + 1]
                    kind = "evicted" if evicted else "duplicate" if name in before else "rival" if name in listed else "new"
                    waits |= kind in ("evicted", "rival")
                    seen["waits" if waits else kind] += 1
                    listed.add(name)
                    if kind == "evicted":
                        canonical[slot] = CHAIN_EVICTED
                    elif not waits:
                        known.setdefault(name, int(own[slot, k]))
                        indexed[slot], canonical[slot] = k + 1, known[name]
            index(limits, as_memoryviews(state), 0, 1)
            assert requests.indexed[:rows].tolist() == indexed and requests.canonical[:rows].tolist() == canonical
            assert requests.canonical[rows] == 0
            assert set(np.flatnonzero(pages.bucket_head >= 0).tolist()) == {
                names[name] & limits.index_buckets - 1 for name in known
            }
            assert {page: int(pages.parent[page]) for page in known.values()} == {
                page: known.get(name[:-1], NO_PAGE) for name, page in known.items()
            }
    assert len(seen) == 3, seen


def test_a_page_is_another_one_for_each_owner_and_lanes_wait_for_each_other() -> None:
    """A page is taken, released, and taken again; each time, links to its earlier content become invalid."""
    sizes, facts, options = case_sizes(pairs=1, slots=2, rows=2, page_size=1, pages=8, max_model_len=16)
    limits = make_limits_by_name(sizes, facts, **options)
    state = make_state(limits)
    take, release = in_lanes(take_pages, 3, races=True), in_lanes(release_pages, 3, races=True)
    views = as_memoryviews(state)
    for turn in range(3):
        before = state.pages.generation.tolist()
        take(limits, views.requests, views.pages, views.counts, views.counters, 0, 5, 0, 1)
        held = state.requests.page_table[0, :5].tolist()
        assert [page for page in range(8) if state.pages.generation[page] != before[page]] == sorted(held), turn
        release(limits, views.requests, views.pages, views.counts, 0, 0, 1)
        assert state.counts[FREE_COUNT] == 8


@device
def release_both(limits: Any, state: Any, lane: int, lanes: int) -> int:
    release_pages(limits, state.requests, state.pages, state.counts, 0, lane, lanes)
    release_pages(limits, state.requests, state.pages, state.counts, 1, lane, lanes)
    return 0


def test_pages_are_given_back_by_one_request_after_the_other() -> None:
    """The second request has no pages, so only the end of the first request's pages separates them."""
    sizes, facts, options = case_sizes(pairs=1, slots=2, rows=2, page_size=1, pages=8, max_model_len=16)
    limits = make_limits_by_name(sizes, facts, **options)
    state = make_state(limits)
    views, both = as_memoryviews(state), in_lanes(release_both, 3, races=True)
    for _ in range(8):
        in_lanes(take_pages, 3)(limits, views.requests, views.pages, views.counts, views.counters, 0, 5, 0, 1)
        both(limits, views, 0, 1)
        assert state.counts[FREE_COUNT] == 8


def test_a_page_is_elsewhere_if_both_are_found_and_one_is_not_behind_the_other() -> None:
    parents = [NO_PAGE, 0, 1, 0]
    pages = SimpleNamespace(parent=parents)
    for before in range(-1, 4):
        for found in range(-1, 4):
            expected = before >= 0 and found >= 0 and parents[found] != before
            assert is_elsewhere(pages, SimpleNamespace(found=[before, found]), 1) == expected


def test_a_chain_of_duplicates_begins_at_any_page() -> None:
    """Even at page 0, which is taken first: of equal pages computed in one step, one is indexed."""
    case = make(1, rows=2, tokens=64, max_model_len=64)
    prompt = tokens(25)
    for pair in range(2):
        case.submit(prompt, 3, pair)
    case.turn(3)
    first = case.state.requests.page_table[case.state.running[0]]
    assert first[0] == 0
    keys = case.state.pages.key
    assert sorted(np.flatnonzero(keys >= 0).tolist()) == sorted(first[:6].tolist())
    case.finish()


@pytest.mark.parametrize("lanes", [2, 4])
def test_items_beyond_what_a_turn_indexes_come_later_and_nothing_is_written_behind_them(lanes: int) -> None:
    """The scratch memory has space for exactly that number."""
    case = make(1, rows=2, tokens=64, max_model_len=64)
    case.submit(tokens(29), 9)
    case.turn(2)
    state, slot = case.state, int(case.state.running[0])
    indexed = state.requests.indexed[slot]
    assert indexed == 7 and state.batch.counts[ROWS] == 1
    for page in state.requests.page_table[slot, :7].tolist():
        state.pages.key[page] = state.pages.parent[page] = NO_PAGE
    state.pages.bucket_head[:] = state.pages.bucket_next[:] = state.pages.bucket_previous[:] = NO_PAGE
    state.requests.indexed[slot], state.requests.canonical[slot], at_once = 0, NO_PAGE, 3
    few = state._replace(scratch=state.scratch._replace(**{n: getattr(state.scratch, n)[:at_once] for n in ITEMS}))
    for done in (3, 6, 7):
        limits = case.limits._replace(index_items=at_once)
        Team(lanes, races=True).run(index_pages, limits, as_memoryviews(few))
        assert state.requests.indexed[slot] == done
        assert (state.pages.key >= 0).sum() == done
        assert state.requests.canonical[slot] == state.requests.page_table[slot, done - 1]


ITEMS = ("slot", "page", "first", "key", "found", "rival", "breaks")  # arrays of State.scratch with a word for each
