"""The record of a front end's prompts, compared with a plain list of pages of each engine in the order of their
last use.

Supports claim fleet/placement.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from support.fleet.plain_placement import SALTS, PlainRecord, random_prompt

from blinkpy.dpu.fleet.placement import PrefixRecord, _Node
from blinkpy.queues.words import Int32


def nodes(record: PrefixRecord) -> Iterator[_Node]:
    """Those of the tree."""
    left = list(record._root.children.values())
    while left:
        yield (node := left.pop())
        left += node.children.values()


def require_sound(record: PrefixRecord, engines: int, page_size: int) -> None:
    """Each page is known to somebody, and behind what an engine knows stands the end of its last use, in order."""
    tokens = [0] * engines
    for node in nodes(record):
        assert node.parent.children[node.key] is node
        assert node.edge[: 4 * page_size] == (node.key if isinstance(node.key, bytes) else node.key[1])
        assert node.end == node.parent.end + len(node.edge) // 4
        assert node.used
        for engine, use in node.used.items():
            tokens[engine] += len(node.edge) // 4
            assert node.parent is record._root or node.parent.used[engine] >= use
            deeper = any(engine in child.used for child in node.children.values())
            assert deeper or record._ends[engine][use] is node
    for engine in range(engines):
        assert record.tokens(engine) == tokens[engine]
        assert list(record._ends[engine]) == sorted(record._ends[engine])
        assert all(node.used[engine] == use for use, node in record._ends[engine].items())
        assert set(record._ends[engine].values()) <= set(nodes(record))


@pytest.mark.parametrize(
    ("engines", "page_size", "most_pages"), [(1, 1, 5), (3, 1, 8), (2, 2, 40), (5, 2, 40), (1, 4, 300), (4, 4, 300)]
)
def test_it_is_as_if_each_page_of_each_engine_were_kept_by_itself(
    engines: int, page_size: int, most_pages: int, rng: np.random.Generator
) -> None:
    record = PrefixRecord(1, page_size, most_pages)
    record.grow(engines)
    plain = [PlainRecord(page_size, most_pages) for _ in range(engines)]
    sent: list[Int32] = []

    def require_equal(prompt: Int32, salt: int) -> None:
        assert record.match(prompt, salt) == [page_size * one.match(prompt[:-1], salt) for one in plain]

    for call in range(1500):
        prompt, salt = random_prompt(rng, sent, 12 * page_size), int(rng.choice(SALTS))
        if rng.random() < 0.7:
            require_equal(prompt, salt)
        if rng.random() < 0.01:
            engine = int(rng.integers(engines))
            record.forget(engine)
            plain[engine] = PlainRecord(page_size, most_pages)
        if rng.random() < 0.7:
            engine = int(rng.integers(engines))
            record.add(engine, prompt, salt)
            plain[engine].add(prompt, salt)
            sent.append(prompt)
            require_equal(prompt, salt)
        assert [record.tokens(i) for i in range(engines)] == [page_size * len(one.pages) for one in plain]
        if call % 20 == 0:
            require_sound(record, engines, page_size)
    for prompt in sent[-50:]:
        for salt in (0, 1, 3):
            require_equal(prompt, salt)
    for engine in range(engines):
        record.forget(engine)
    assert not list(nodes(record))
    assert record.match(sent[-1], 0) == [0] * engines


def test_a_flood_of_prompts_does_not_make_it_grow(rng: np.random.Generator) -> None:
    """Long prompts, prompts of a page each, and prompts that part from each other page by page."""
    engines, page_size, most_pages = 2, 16, 200
    record = PrefixRecord(engines, page_size, most_pages)
    long = rng.integers(0, 1 << 16, 100 * page_size, dtype=np.int32)
    for i in range(600):
        parting = long[: (i % 100 + 2) * page_size].copy()
        parting[-1] += i + 1
        short = rng.integers(0, 1 << 16, 5 * page_size, dtype=np.int32)
        for prompt in (parting, short, short[:page_size], np.concatenate((short, long)), long):
            record.add(int(rng.integers(engines)), prompt, i % 3)
            tree, known = list(nodes(record)), [record.tokens(engine) // page_size for engine in range(engines)]
            assert len(tree) <= sum(known)
            assert all(len(ends) <= pages <= most_pages for ends, pages in zip(record._ends, known, strict=True))
            assert sum(len(node.edge) + page_size * 4 for node in tree) <= engines * most_pages * 2 * page_size * 4
    require_sound(record, engines, page_size)


def test_a_prompt_beyond_the_bound_leaves_its_beginning(rng: np.random.Generator) -> None:
    record, prompt = PrefixRecord(2, 4, 10), rng.integers(0, 9, 100, dtype=np.int32)
    record.add(1, prompt, 0)
    assert (record.tokens(1), record.match(prompt, 0)) == (40, [0, 40])
