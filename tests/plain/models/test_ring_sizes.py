"""Window rings: every token finds what its window holds, whatever chunks came before; their sizes, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from support.models.model_zoo import BASE
from support.models.paged_batch import PagedBatches, Sequence
from support.models.ring_storm import ring_storm

from blinkpy.kv.state import ROWS
from blinkpy.models.cpu.layer_tables import HostRings
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.ring_sizes import RingSizes

SLOTS, ROWS_AT_MOST = 5, 4


def random_sizes(rng: np.random.Generator, tokens: int) -> RingSizes:
    """Of a model of random windows; its narrowest layers have the window of one token that sees itself alone."""
    page_size = int(rng.choice([4, 8, 16]))
    kinds = [int(rng.choice([0, 1, rng.integers(1, 3 * page_size), rng.integers(1, 70)])) for _ in range(4)]
    model = describe_config({**BASE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4})
    layers = tuple(
        layer._replace(attention=layer.attention._replace(window=window))
        for layer, window in zip(model.layers, [*kinds[:3], kinds[3] or 5], strict=True)
    )
    sizes = RingSizes.of(replace(model, layers=layers), page_size, SLOTS, tokens, ROWS_AT_MOST)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("attempt", range(30))
def test_every_token_finds_its_window(rng: np.random.Generator, attempt: int) -> None:
    """The cache holds in place of keys who wrote them: slot, life of the slot, and position. All layers share the memory."""
    length, tokens = 256, int(rng.integers(ROWS_AT_MOST, 150))
    sizes = random_sizes(rng, tokens)
    rings = HostRings(sizes, -(-length // sizes.page_size), tokens)
    memory = np.full((sizes.all_pages, sizes.page_size), -1)
    caches = [memory[rank : rank + sizes.layer_pages] for rank in range(len(sizes.layers))]
    batches = PagedBatches(
        rng, page_size=sizes.page_size, num_pages=SLOTS * 64, slots=SLOTS, max_model_len=length, max_tokens=tokens, max_rows=4
    )
    lives = list[Sequence]()  # all of them, so that no two have the same name
    storm = ring_storm(rng, batches, 99, longest=230, new_tokens=20, rows=ROWS_AT_MOST, tokens=tokens, prompts=9)
    for batch in storm:
        rows = int(batch.counts[ROWS])
        lives += batches.rows
        rings.place(batch)
        for rank, cache in enumerate(caches):
            for row, (sequence, count) in enumerate(batches.work):
                name = id(sequence) * 1000 + rank * 300
                places = rings.cache_slots[batch.query_starts[row] :][:count]
                cache.reshape(-1)[places] = name + np.arange(sequence.computed, sequence.computed + count)
            for sequence, count in batches.work:
                name, pages = id(sequence) * 1000 + rank * 300, rings.page_table[sequence.slot]
                seen = np.arange(max(sequence.computed - sizes.window + 1, 0), sequence.computed + count)
                found = cache[pages[seen // sizes.page_size], seen % sizes.page_size]
                assert (found == name + seen).all()
            rings.keep(cache)
        batch.sampled[:rows] = 1
