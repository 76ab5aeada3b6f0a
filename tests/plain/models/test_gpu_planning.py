"""What an engine on a GPU decides before it touches the GPU: step shapes, memory, and the layout of kernel arguments."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.common.model_shapes import SHAPES
from blinkpy.config import Config, ConfigError
from blinkpy.kv.limits import make_limits
from blinkpy.kv.state_memory import make_state
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.gpu.gpu_memory_plan import plan_memory
from blinkpy.models.gpu.step_shapes import SMALLEST_MIXED, bucket_shapes, step_shapes
from blinkpy.queues.header import EngineFacts
from blinkpy.queues.layout import QueueSizes

GIB = 1 << 30


def llama_8b() -> DecoderDescription:
    return describe_config(SHAPES["llama-3-8b"])


@pytest.mark.parametrize(("rows", "tokens"), [(256, 2048), (1, 1), (1, 512), (7, 7), (48, 300), (1024, 4096), (33, 33)])
def test_every_batch_has_a_graph_that_holds_it(rows: int, tokens: int, rng: np.random.Generator) -> None:
    buckets = bucket_shapes(rows, tokens)
    sizes = QueueSizes(1, rows, 1 << max(1, (rows - 1).bit_length()), 64, 64, 1)
    facts = EngineFacts(1, 70001, 70003, 64, 100, 16, 64, rows, 5000)
    make_state(make_limits(sizes, facts, max_num_batched_tokens=tokens), buckets)  # the scheduler accepts them
    shapes, table = step_shapes(buckets)
    assert table.shape == (len(buckets), 2)
    assert len(set(shapes)) == len(shapes)
    for _ in range(300):
        batch_rows = int(rng.integers(1, rows + 1))
        mixed = bool(rng.integers(2)) and tokens > batch_rows
        batch_tokens = int(rng.integers(batch_rows + 1, tokens + 1)) if mixed else batch_rows
        bucket = next(i for i, (t, r) in enumerate(buckets) if t >= batch_tokens and r >= batch_rows)
        shape = shapes[table[bucket, int(mixed)]]
        assert shape.tokens >= batch_tokens
        assert shape.rows >= batch_rows
        assert shape.mixed == mixed
        assert shape.tokens < 2 * batch_tokens or (mixed and shape.tokens <= max(2 * batch_tokens, SMALLEST_MIXED))
        assert batch_tokens <= 128 or shape.tokens - batch_tokens <= max(64, batch_tokens // 8)


def test_memory_by_part() -> None:
    config, model = Config().with_options({"max_model_len": 4096, "max_num_batched_tokens": 2048}), llama_8b()
    page = 2 * 32 * 8 * 128 * 16 * 2
    plan = plan_memory(config, model, 2, page, free=139 * GIB, total=140 * GIB)
    assert plan.weights == 2 * 8_030_261_248
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


def test_arrays_as_kernel_arguments() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba_cuda")
    pytest.importorskip("cuda.bindings")
    from blinkpy.engine import loop_graph

    first, second = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    assert loop_graph.arrays([first, second]) == [
        *(0, 0, 15, 4, first.data_ptr(), 3, 5, 20, 4),
        *(0, 0, 2, 8, second.data_ptr(), 2, 8),
    ]
