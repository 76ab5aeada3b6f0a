"""Sizes of an engine from options, a model and memory; on a GPU its step shapes and the layout of kernel arguments."""

import dataclasses
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.model_shapes import SHAPES
from blinkpy.config import DEFAULT_SLOTS, Config, ConfigError
from blinkpy.device.tables import named_arrays
from blinkpy.engine.sizing import engine_sizes, grammar_arena, pages_for
from blinkpy.kv import state as S
from blinkpy.kv.limits import make_limits_by_name
from blinkpy.kv.state_memory import make_state
from blinkpy.models.families.family import describe_config
from blinkpy.models.gpu.gpu_buffers import Buffers
from blinkpy.models.gpu.gpu_memory_plan import plan_memory, slots_that_fit
from blinkpy.models.gpu.step_shapes import SMALLEST_MIXED, bucket_shapes, step_shapes
from blinkpy.queues.layout import EngineFacts, QueueSizes
from blinkpy.serving.model_facts import fit

GIB = 1 << 30
MODELS = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "published_models.py"))["MODELS"]


@pytest.mark.parametrize(("rows", "tokens"), [(256, 2048), (1, 1), (1, 512), (7, 7), (48, 300), (1024, 4096), (33, 33)])
def test_every_batch_has_a_graph_that_holds_it(rows: int, tokens: int, rng: np.random.Generator) -> None:
    buckets = bucket_shapes(rows, tokens)
    sizes = QueueSizes(1, rows, 1 << max(1, (rows - 1).bit_length()), 64, 64, 1)
    facts = EngineFacts(1, 70001, 70003, 64, 100, 16, 64, rows, 5000)
    make_state(make_limits_by_name(sizes, facts, max_num_batched_tokens=tokens), buckets)  # the scheduler accepts them
    shapes, table = step_shapes(buckets, drafts=int(rng.integers(rows + 1)))
    assert table.shape == (len(buckets), len(S.STEP_KINDS))
    assert len(set(shapes)) == len(shapes)
    for _ in range(300):
        batch_rows = int(rng.integers(1, rows + 1))
        mixed = bool(rng.integers(2)) and tokens > batch_rows
        batch_tokens = int(rng.integers(batch_rows + 1, tokens + 1)) if mixed else batch_rows
        bucket = next(i for i, (t, r) in enumerate(buckets) if t >= batch_tokens and r >= batch_rows)
        shape = shapes[table[bucket, S.MIXED_STEP if mixed else S.DECODE_STEP]]
        assert shape.tokens >= batch_tokens
        assert shape.rows >= batch_rows
        assert shape.mixed == mixed
        assert shape.tokens < 2 * batch_tokens or (mixed and shape.tokens <= max(2 * batch_tokens, SMALLEST_MIXED))
        assert batch_tokens <= 128 or shape.tokens - batch_tokens <= max(64, batch_tokens // 8)


@pytest.mark.parametrize(("rows", "tokens"), [(256, 2048), (1, 1), (7, 7), (48, 300), (33, 33)])
def test_only_graphs_of_few_rows_return_drafts(rows: int, tokens: int) -> None:
    """A graph returns drafts if its smallest batch may have some. Each border of the buckets and its neighbours are the limit."""
    buckets = bucket_shapes(rows, tokens)
    of_rows = [next(i for i, (t, _) in enumerate(buckets) if t >= n) for n in range(1, rows + 1)]
    limits = {border + beside for _, border in buckets for beside in (-1, 0, 1)}
    for drafts in sorted(limits):
        shapes, table = step_shapes(buckets, drafts=drafts)
        assert len(set(shapes)) == len(shapes)
        for bucket in set(of_rows):
            smallest, largest = of_rows.index(bucket) + 1, rows - of_rows[::-1].index(bucket)
            shape, found = (shapes[table[bucket, kind]] for kind in (S.DECODE_STEP, S.DRAFTED_STEP))
            assert (found.drafted, found.mixed) == (drafts > 0, not drafts) and found.tokens >= largest <= found.rows
            assert found.returns_drafts and shape.returns_drafts == (not drafts or smallest <= drafts)
            same = {"drafted": False, "returns_drafts": shape.returns_drafts}
            assert not drafts or dataclasses.replace(found, **same) == shape


@pytest.mark.parametrize("cut_tokens", [0, 40, 256])
def test_smaller_steps_are_cut_into_fewer_groups(cut_tokens: int) -> None:
    """As the scheduler counts them, by the bucket, also if a batch runs in the graph of a larger one."""
    buckets = bucket_shapes(16, 512)
    shapes, table = step_shapes(buckets, groups=9, cut_tokens=cut_tokens)
    whole = len(step_shapes(buckets)[0])
    assert all((shape.groups > 1) == (i >= whole) for i, shape in enumerate(shapes))
    for (tokens, rows), (_, mixed, cut, _) in zip(buckets, table.tolist(), strict=True):
        groups = math.ceil(9 * tokens / 512)
        if tokens > cut_tokens and groups > 1:
            assert shapes[cut] == dataclasses.replace(shapes[mixed], groups=groups)
            assert (shapes[cut].tokens, shapes[cut].rows) >= (tokens, rows)
        else:
            assert cut == 0


def test_default_slots_leave_memory_for_pages(rng: np.random.Generator) -> None:
    """Recurrent states get at most half of the remaining memory, by the sizes of a published model and a GPU of
    any size."""
    wide = next(describe_config(one.config) for one in MODELS if one.hub_id == "Qwen/Qwen3.5-27B")
    for _ in range(50):
        memory, workers = int(rng.integers(60, 400)) * GIB, int(rng.integers(1, 4))
        config = Config().with_options({"workers": workers, "max_num_batched_tokens": 2048, "max_model_len": 4096})
        plan = plan_memory(config, wide, 2, 1 << 20, memory, memory)
        slots = slots_that_fit(plan, config, wide, 2)
        settled = plan_memory(config.with_options({"slots": slots}), wide, 2, 1 << 20, memory, memory)
        half = (plan.cache + plan.parts["recurrent states"]) // 2
        assert 1 <= slots <= DEFAULT_SLOTS and settled.parts["recurrent states"] == workers * slots * wide.state_bytes(2)
        assert slots == 1 or settled.parts["recurrent states"] <= half
        assert slots == DEFAULT_SLOTS or workers * (slots + 8) * wide.state_bytes(2) > half
    plain = describe_config(SHAPES["llama-3-8b"])
    assert slots_that_fit(plan_memory(Config(), plain, 2, 1 << 20, 40 * GIB, 40 * GIB), Config(), plain, 2) == DEFAULT_SLOTS


def test_a_large_recurrent_model_fits_a_common_gpu_with_default_options() -> None:
    wide = next(describe_config(one.config) for one in MODELS if one.hub_id == "Qwen/Qwen3.5-27B")
    found = fit(wide, Config(), "H100", 80 * GIB)
    assert not found.problem and 8 <= found.slots < DEFAULT_SLOTS and found.cached > 4096
    asked = fit(wide, Config().with_options({"slots": DEFAULT_SLOTS}), "H100", 80 * GIB)
    assert "lower slots (256), since each needs a recurrent state" in asked.problem


def test_memory_by_part() -> None:
    config = Config().with_options({"max_model_len": 4096, "max_num_batched_tokens": 2048})
    model = describe_config(SHAPES["llama-3-8b"])
    page = 2 * 32 * 8 * 128 * 16 * 2
    plan = plan_memory(config, model, 2, page, free=139 * GIB, total=140 * GIB)
    assert plan.parts["weights"] == 2 * 8_030_261_248
    assert plan.usable == int(140 * GIB * 0.9) - GIB
    assert plan.cache == plan.usable - plan.needed > 100 * GIB
    plan.require(plan.cache)
    with pytest.raises(ConfigError, match=r"does not fit on the GPU: .*weights 14\.96 GiB.*, 125\.00 GiB usable"):
        plan.require(plan.cache + 1)
    with_queues = plan_memory(config, model, 2, page, free=139 * GIB, total=140 * GIB, queue_bytes=3 * GIB)
    assert (with_queues.needed - plan.needed, plan.cache - with_queues.cache) == (3 * GIB, 3 * GIB)
    small = dataclasses.replace(plan, free=8 * GIB, total=16 * GIB)
    with pytest.raises(ConfigError, match=r"6\.40 GiB usable"):
        small.require(page)


def test_four_bit_experts_take_four_bits() -> None:
    facts = SHAPES["gpt-oss-20b"]
    parts = [
        plan_memory(Config(), describe_config(some), 2, 1 << 16, 1, 1).parts["weights"]
        for some in (facts, facts | {"quantization_config": None})
    ]
    experts = 24 * 32 * 3 * 2880 * 2880
    assert parts[1] == 2 * 20_914_757_184
    assert parts[1] - parts[0] == 2 * experts - experts // 2 - experts // 32


def test_no_buffer_is_larger_than_its_part_of_the_plan(rng: np.random.Generator) -> None:
    """Of each published model, for steps of any size, whole and cut."""
    for config in (one.config for one in MODELS if not one.refusal):
        model, tokens, rows = describe_config(config), int(rng.integers(300, 9000)), int(rng.integers(1, 300))
        asked = {"slots": 300, "max_num_seqs": rows, "max_num_batched_tokens": tokens, "step_groups": 2}
        parts = plan_memory(Config().with_options(asked), model, 2, 1 << 20, 1 << 40, 1 << 40).parts
        buffers = vars(Buffers(model, tokens, rows, torch.bfloat16, "meta", tokens))
        cut = sum(tensor.nbytes for name, tensor in buffers.items() if name.startswith("cut"))
        assert sum(tensor.nbytes for tensor in buffers.values()) - cut <= parts["activations"], model.name
        assert cut <= parts["suspended step"] <= 2 * cut, model.name


def test_no_state_is_larger_than_its_part_of_the_plan(rng: np.random.Generator) -> None:
    """With the index of drafts and the copies of recordings, for any context."""
    model = describe_config(MODELS[0].config)
    for _ in range(12):
        length, slots, pages = (int(rng.integers(low, high)) for low, high in ((16, 5000), (2, 300), (50_000, 100_000)))
        recorded, drafts = int(rng.choice((0, 64))), str(rng.choice(("off", "ngram", "mtp")))
        asked = {"max_model_len": length, "slots": slots, "num_pages": pages, "speculative": drafts, "record_steps": recorded}
        config = Config().with_options(asked | {"max_num_batched_tokens": 2048, "grammar_slots": 0})
        planned = plan_memory(config, model, 2, 1 << 20, 1 << 40, 1 << 40).parts["scheduler state"]
        sizes = QueueSizes(1, slots, 1 << max(1, (slots - 1).bit_length()), 64, 64, 1)
        facts = EngineFacts(1, 70001, 70003, length, 100, 16, pages, slots, 5000)
        limits = {"speculative": drafts, "max_num_batched_tokens": 2048, "speculative_tokens": 0, "speculative_match": 8}
        made = make_state(make_limits_by_name(sizes, facts, **limits), bucket_shapes(slots, 2048))
        state = sum(array.nbytes for _, array in named_arrays(made))
        assert state * (2 if recorded else 1) <= planned <= 8 * state, asked


def test_arrays_as_kernel_arguments() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba_cuda")
    from blinkpy.device.cuda.kernel_compiler import array_words

    first, second = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    assert array_words(first, second) == [
        *(0, 0, 15, 4, first.data_ptr(), 3, 5, 20, 4),
        *(0, 0, 2, 8, second.data_ptr(), 2, 8),
    ]


def test_what_is_left_open_comes_from_the_model_and_the_memory(rng: np.random.Generator) -> None:
    context, page_bytes = int(rng.integers(100, 5000)), int(rng.integers(1000, 100_000))
    pages = int(rng.integers(2, 2000))
    sizes = engine_sizes(Config(), context, page_bytes, pages * page_bytes + page_bytes // 2)
    assert sizes.num_pages == pages
    assert sizes.max_model_len == min(context, pages * 16)
    assert pages_for(sizes.max_model_len, 16) <= sizes.num_pages
    assert sizes.queue.prompt_tokens >= sizes.max_model_len + 16 * 65536
    assert sizes.queue.sq_entries >= sizes.queue.slots
    assert sizes.max_num_seqs <= sizes.slots


def test_grammars_have_room_beside_prompts() -> None:
    """As asked for, or 4 of the largest; no words without grammars."""
    for options, words in (({}, 4 << 18), ({"grammar_arena_kib": 2048}, 2048 << 8), ({"grammar_slots": 0}, 0)):
        config = Config().with_options({"prompt_arena_tokens": 5000, "max_model_len": 100, **options})
        assert grammar_arena(config) == words
        assert engine_sizes(config, 1000, 1024, 1 << 20).queue.prompt_tokens == 5000 + words


def test_page_hashes_have_space_for_all_prompts_of_their_arena(rng: np.random.Generator) -> None:
    """The hash arena grows with the prompt arena, so that neither is full before the other."""
    for tokens in (0, 10, int(rng.integers(100, 1 << 22))):
        for page_size in (16, 64):
            config = Config().with_options({"prompt_arena_tokens": tokens, "max_model_len": 10, "page_size": page_size})
            queue = engine_sizes(config, 1000, 1024, 1 << 20).queue
            prompts = queue.prompt_tokens - grammar_arena(config)
            assert queue.hash_entries == max(1, prompts // page_size)
            assert prompts == tokens or not tokens


def test_pages_that_no_slot_could_use_are_not_allocated() -> None:
    for workers in (1, 3):
        config = Config().with_options({"slots": 2, "max_model_len": 32, "workers": workers})
        assert engine_sizes(config, 1000, 1, 1 << 20).num_pages == 2 * workers * 2 * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 2000}, "exceeds the model's context length of 1000"),
        ({"num_pages": 3, "max_model_len": 100}, "needs 7 pages, but there are 3"),
        ({"prompt_arena_tokens": 50, "max_model_len": 100}, r"prompt_arena_tokens \(50\)"),
        ({"grammar_arena_kib": 9, "grammar_kib": 5}, r"grammar_arena_kib \(9\) is too small: .* grammar_kib \(5\) each"),
        ({"workers": 64, "slots": 65535, "max_model_len": 1000, "max_num_seqs": 1}, "GiB of token history"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_figures(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_sizes(Config().with_options(options), 1000, 1024, 1 << 20)


def test_no_memory_for_a_single_page() -> None:
    with pytest.raises(ConfigError, match="too small for one request"):
        engine_sizes(Config(), 1000, 4096, 4000)
