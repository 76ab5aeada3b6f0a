"""The record of what a front end sent, against a plain list of pages in the order of their last use."""

import numpy as np
import pytest
from support.fleet.plain_placement import SALTS, PlainRecord, random_prompt

from blinkpy.dpu.fleet.prefix_record import PrefixRecord, first_key
from blinkpy.queues.array_types import Int32


def named(prompt: Int32, salt: int, page_size: int) -> tuple[bytes, bytes]:
    """A prompt as a record takes it."""
    return prompt.tobytes(), first_key(prompt.tobytes(), salt, page_size)


@pytest.mark.parametrize(("page_size", "most_pages"), [(1, 5), (2, 40), (4, 300)])
def test_it_is_as_if_each_page_were_kept_by_itself(page_size: int, most_pages: int, rng: np.random.Generator) -> None:
    record, plain = PrefixRecord(page_size, most_pages), PlainRecord(page_size, most_pages)
    sent: list[Int32] = []
    for _ in range(1500):
        prompt, salt = random_prompt(rng, sent, 12 * page_size), int(rng.choice(SALTS))
        assert record.match(*named(prompt, salt, page_size)) == plain.match(prompt, salt)
        if rng.random() < 0.7:
            record.add(*named(prompt, salt, page_size))
            plain.add(prompt, salt)
            sent.append(prompt)
            assert record.match(*named(prompt, salt, page_size)) == plain.match(prompt, salt)
        assert record.pages == len(plain.pages) <= most_pages
    for prompt in sent[-50:]:
        assert [record.match(*named(prompt, salt, page_size)) for salt in (0, 1, 3)] == [
            plain.match(prompt, salt) for salt in (0, 1, 3)
        ]
    record.clear()
    assert (record.pages, len(record), record.match(*named(sent[-1], 0, page_size))) == (0, 0, 0)


def bytes_of(record: PrefixRecord) -> int:
    """Of the text that the tree holds."""
    return sum(len(node.edge) + len(node.key) for node in record._used)


def test_a_flood_of_prompts_does_not_make_it_grow(rng: np.random.Generator) -> None:
    """Long prompts, prompts of a page each, and prompts that part from each other page by page."""
    page_size, most_pages = 16, 200
    record = PrefixRecord(page_size, most_pages)
    long = rng.integers(0, 1 << 16, 100 * page_size, dtype=np.int32)
    for i in range(600):
        parting = long[: (i % 100 + 2) * page_size].copy()
        parting[-1] += i + 1
        short = rng.integers(0, 1 << 16, 5 * page_size, dtype=np.int32)
        for prompt in (parting, short, short[:page_size], np.concatenate((short, long)), long):
            record.add(*named(prompt, i % 3, page_size))
            assert len(record) <= record.pages <= most_pages
            assert bytes_of(record) <= most_pages * (2 * page_size * 4 + 8)


def test_a_prompt_beyond_the_bound_leaves_its_beginning(rng: np.random.Generator) -> None:
    record, prompt = PrefixRecord(4, 10), rng.integers(0, 9, 100, dtype=np.int32)
    record.add(*named(prompt, 0, 4))
    assert (record.pages, record.match(*named(prompt, 0, 4))) == (10, 10)
