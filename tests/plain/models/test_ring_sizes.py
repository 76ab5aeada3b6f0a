"""Window rings: every token finds the tokens of its window, whatever chunks came before; their sizes, and refusals.

Claim outputs/rings: With window rings, each token finds the keys of its window, and logits equal those of
transformers.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.models.model_zoo import BASE
from support.models.paged_batch import PagedBatches, Sequence
from support.models.ring_storm import ring_storm

from benchmarks.common.model_shapes import SHAPES
from blinkpy.config import Config, ConfigError
from blinkpy.engine.sizing import engine_sizes
from blinkpy.kv.state import ROWS, Batch
from blinkpy.models.cpu.layer_tables import HostRings
from blinkpy.models.families.family import describe_config
from blinkpy.models.gpu.gpu_memory_plan import plan_memory
from blinkpy.models.paged_cache import PagedCache, RingSizes, kv_bytes_per_page, ring_bytes, ring_sizes

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
    length, tokens = 256, int(rng.integers(ROWS_AT_MOST, 150))
    sizes = random_sizes(rng, tokens)
    batches = PagedBatches(
        rng, page_size=sizes.page_size, num_pages=SLOTS * 64, slots=SLOTS, max_model_len=length, max_tokens=tokens, max_rows=4
    )
    check_steps(sizes, batches, ring_storm(rng, batches, 9, longest=230, new_tokens=20, rows=4, tokens=tokens, prompts=9))


def test_short_chunks_that_spill_side_by_side(rng: np.random.Generator) -> None:
    """Two tokens of each row, of which one spills: a window that ends its first page needs a page more than others."""
    page, length = 8, 64
    sizes = RingSizes((0, 1), page + 1, page, 2, SLOTS, 4 * 2 * page // page + ROWS_AT_MOST)
    batches = PagedBatches(rng, page_size=page, num_pages=99, slots=SLOTS, max_model_len=length, max_tokens=64, max_rows=4)
    sequences = [batches.add([1] * 40) for _ in range(ROWS_AT_MOST)]

    def steps() -> Iterator[Batch]:
        for count in (2 * page - 1, 2, page - 2, 2, 3):
            batch = batches.batch([(sequence, count) for sequence in sequences])
            yield batch
            batches.commit(batch)

    assert check_steps(sizes, batches, steps()) == 2


def check_steps(sizes: RingSizes, batches: PagedBatches, steps: Iterator[Batch]) -> int:
    """Serve steps with a cache that holds, instead of keys, their writers: sequence, layer and position. All
    layers share the memory. Returns how many steps had several rows with spill pages."""
    rings = HostRings(sizes, batches.requests.page_table.shape[1], batches.max_tokens)
    memory = np.full((sizes.all_pages, sizes.page_size), -1)
    caches = [memory[rank : rank + sizes.layer_pages] for rank in range(len(sizes.layers))]
    lives, several = list[Sequence](), 0  # all sequences, so that no two have the same name
    for batch in steps:
        lives += batches.rows
        rings.place(batch)
        spilled = rings.cache_slots >= (sizes.layer_pages - sizes.spill) * sizes.page_size
        starts = batch.query_starts[: int(batch.counts[ROWS]) + 1]
        several += sum(bool(spilled[begin:end].any()) for begin, end in pairwise(starts)) > 1
        for rank, cache in enumerate(caches):
            for start, (sequence, count) in zip(starts, batches.work, strict=False):
                name = id(sequence) * 1000 + rank * 300
                places = rings.cache_slots[start:][:count]
                cache.reshape(-1)[places] = name + np.arange(sequence.computed, sequence.computed + count)
            for sequence, count in batches.work:
                name, pages = id(sequence) * 1000 + rank * 300, rings.page_table[sequence.slot]
                seen = np.arange(max(sequence.computed - sizes.window + 1, 0), sequence.computed + count)
                found = cache[pages[seen // sizes.page_size], seen % sizes.page_size]
                assert (found == name + seen).all()
            rings.keep(cache)
        batch.sampled[: len(batches.work)] = 1
    return several


def held(cache: PagedCache) -> int:
    """Bytes of all keys and values."""
    storages = [side.untyped_storage() for side in (*cache.keys, *cache.values)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("shape", ["gemma-3-1b", "gpt-oss-20b"])
def test_what_is_planned_is_what_is_allocated(shape: str, rng: np.random.Generator) -> None:
    """Pages of the pool for layers without a window alone, and rings for all slots."""
    model, slots, workers = describe_config(SHAPES[shape]), int(rng.integers(1, 50)), int(rng.integers(1, 4))
    values = {"slots": slots, "workers": workers, "max_num_batched_tokens": 4096, "max_model_len": int(rng.integers(100, 30_000))}
    plain, ringed = (Config().with_options({**values, "window_cache": kind}) for kind in ("full", "ring"))
    full, ring = (plan_memory(config, model, 2, 1 << 20, 79 << 30, 79 << 30) for config in (plain, ringed))
    rings, pages = ring_sizes(ringed, model), int(rng.integers(1, 1000))
    assert ring_sizes(plain, model) is None and rings is not None and rings.slots == slots * workers
    added = {name: ring.parts[name] - full.parts[name] for name in ring.parts}
    table = 4 * slots * workers * -(-values["max_model_len"] // 16)
    caches = [PagedCache(model, pages, 16, torch.bfloat16, "meta", some) for some in (None, rings)]
    assert (
        added.pop("window rings") - table
        == ring_bytes(model, rings, 2)
        == held(caches[1]) - pages * kv_bytes_per_page(model, 16, 2, rings)
    )
    assert not any(added.values())
    assert held(caches[0]) == pages * kv_bytes_per_page(model, 16, 2)
    windows = [layer.attention.window for layer in model.layers]
    without = windows.count(0) / len(windows)
    assert kv_bytes_per_page(model, 16, 2, rings) == kv_bytes_per_page(model, 16, 2) * without
    largest = max(windows)  # a ring holds it wherever it begins in a page
    assert rings.pages == max((begin + largest - 1) // 16 - begin // 16 + 1 for begin in range(16))
    with pytest.raises(ConfigError, match=r"window rings .*; lower slots, since each needs a window ring$"):
        replace(ring, free=1 << 30).require(1)


def test_where_all_layers_have_a_window_pages_take_nothing() -> None:
    """So the pool has all pages that the slots could fill, in as little memory as there is."""
    model = describe_config(SHAPES["llama-3-8b"] | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096})
    sizes = {"slots": 4, "max_model_len": 8192, "max_num_batched_tokens": 2048, "grammar_slots": 0}
    config = Config().with_options({"window_cache": "ring", **sizes})
    rings = ring_sizes(config, model)
    page_bytes = kv_bytes_per_page(model, 16, 2, rings)
    plan = plan_memory(config, model, 2, page_bytes, 79 << 30, 79 << 30)
    assert page_bytes == 1 and engine_sizes(config, 8192, page_bytes, 1 << 20).num_pages == 2 * 4 * 512
    assert plan.parts["scheduler state"] < 100 << 20 < plan.parts["window rings"] < 32 * 4096 * 4 * 4096 * 1.1
