"""The benchmark of whole steps without a GPU: batches, multiplications, measuring on a synthetic clock, the table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba_cuda")
pytest.importorskip("cuda.bindings")

from benchmarks.common.hand_batches import Rows, batch_arrays, decoding, graph_index, mixed, page_table, prompts  # noqa: E402
from benchmarks.common.harness import WrongAnswer  # noqa: E402
from benchmarks.common.roofline import multiplications  # noqa: E402
from benchmarks.parts import whole_steps as program  # noqa: E402
from blinkpy.kv.state import DECODE_ROWS, EMITS, MAX_CONTEXT, ROWS, TOKENS  # noqa: E402
from blinkpy.models.families.family import describe_config  # noqa: E402
from blinkpy.models.gpu.step_shapes import bucket_shapes, step_shapes  # noqa: E402
from blinkpy.models.weights.parts.weight_parts import expected_tensors  # noqa: E402

PAGE = 16
TINY = {"vocab_size": 53, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "max_position_embeddings": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
DENSE = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
WINDOW = {"architectures": ["MistralForCausalLM"], "sliding_window": 7}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
EXPERTS |= {"mlp_only_layers": [1]}


def random_rows(rng: np.random.Generator) -> Rows:
    """A few decode rows, and a few chunks with and without cached tokens before them."""
    decodes, chunks = int(rng.integers(0, 5)), rng.integers(2, 40, int(rng.integers(1, 4))).tolist()
    lengths = [1] * decodes + chunks
    cached = [*rng.integers(0, 60, decodes).tolist(), *(int(rng.choice([0, rng.integers(1, 60)])) for _ in chunks)]
    return Rows(tuple(lengths), tuple(a + b for a, b in zip(lengths, cached, strict=True)))


def test_every_token_of_a_batch_has_its_place(rng: np.random.Generator) -> None:
    rows = random_rows(rng)
    count, needed = len(rows.lengths), sum(-(-context // PAGE) for context in rows.contexts)
    pool = rng.permutation(needed + 9).astype(np.int32)[: needed + 2]
    token_ids = rng.integers(1, 99, rows.tokens + 20, dtype=np.int32)
    pages = page_table(rows, PAGE, pool, 12)
    batch = batch_arrays(rows, pages, PAGE, count + 3, token_ids)

    used = [int(page) for line in pages for page in line if page >= 0]
    assert len(used) == needed == len(set(used)) and set(used) <= set(pool.tolist())
    assert batch["query_starts"].tolist() == np.cumsum((0, *rows.lengths)).tolist() + [rows.tokens] * 3
    at = 0
    for row, (length, context) in enumerate(zip(rows.lengths, rows.contexts, strict=True)):
        for position in range(context - length, context):
            assert batch["positions"][at] == position and batch["token_rows"][at] == row
            assert batch["cache_slots"][at] == pages[row][position // PAGE] * PAGE + position % PAGE
            assert batch["token_ids"][at] == token_ids[at]
            at += 1
    slots = batch["cache_slots"][:at]
    assert at == rows.tokens and len(set(slots.tolist())) == at and set(slots // PAGE) <= set(pool.tolist())
    for name, padding in (("token_ids", 0), ("positions", 0), ("cache_slots", -1), ("token_rows", -1)):
        assert (batch[name][at:] == padding).all() and len(batch[name]) == len(token_ids) and batch[name].dtype == np.int32
    assert batch["row_slots"].tolist() == [*range(count), -1, -1, -1]
    assert batch["context_lengths"].tolist() == [*rows.contexts, 0, 0, 0]
    assert batch["emits"].tolist() == [1] * count + [0] * 3
    found = batch["counts"][[ROWS, TOKENS, DECODE_ROWS, MAX_CONTEXT, EMITS]]
    assert found.tolist() == [count, at, rows.lengths.count(1), max(rows.contexts), count]


def test_the_graph_is_the_one_that_the_scheduler_takes(rng: np.random.Generator) -> None:
    buckets = bucket_shapes(32, 512)
    shapes, table = step_shapes(buckets)
    step = SimpleNamespace(shapes=shapes)
    some = [decoding(1, 9), decoding(3, 9), decoding(32, 9), prompts(1, 2), prompts(1, 512), mixed(30, 40, 200)]
    for rows in (*some, random_rows(rng)):
        bucket = next(i for i, (tokens, most) in enumerate(buckets) if tokens >= rows.tokens and most >= len(rows.lengths))
        assert graph_index(step, rows) == table[bucket, int(rows.mixed)]
    with pytest.raises(ValueError, match="no step graph holds 1 rows of 513 tokens"):
        graph_index(step, prompts(1, 513))


@pytest.mark.parametrize("config", [DENSE, WINDOW, EXPERTS], ids=["dense", "window", "experts"])
@pytest.mark.parametrize("narrowed", [True, False])
def test_multiplications_one_by_one(rng: np.random.Generator, config: dict[str, Any], narrowed: bool) -> None:
    """Against the matrices of a checkpoint, and every query with every key that it may see."""
    a, rows = describe_config(TINY | config), random_rows(rng)
    window = config.get("sliding_window") or 10**9
    linear = attention = 0
    for name, shape in expected_tensors(a).items():
        last = f".layers.{len(a.layers) - 1}." in name
        behind = not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        if name == "model.embed_tokens.weight" or len(shape) != 2:
            continue
        lines = rows.tokens if name != "lm_head.weight" and not (narrowed and last and behind) else len(rows.lengths)
        linear += lines * shape[0] * shape[1] * (3 if ".experts." in name else 8)  # of 8 experts a token visits 3
    assert linear % 8 == 0
    for layer in range(len(a.layers)):
        for length, context in zip(rows.lengths, rows.contexts, strict=True):
            for query in range(context - 1 if narrowed and layer == len(a.layers) - 1 else context - length, context):
                keys = sum(1 for key in range(query + 1) if query - key < window)
                attention += keys * a.heads * 2 * a.head_dim
    found = multiplications(a, rows, last_tokens_only=narrowed)
    assert (found.linear, found.attention) == (linear // 8, attention)
    assert found.tflop == pytest.approx(2e-12 * (linear // 8 + attention))


@pytest.mark.parametrize(
    ("logits", "token", "message"),
    [([0.0, 2.0, 1.0], 2, "not the likeliest"), ([0.0, 2.0, float("nan")], 1, "not numbers"), ([0.0, 2.0], 2, "vocabulary")],
)
def test_a_wrong_step_is_not_measured(logits: list[float], token: int, message: str) -> None:
    likeliest = torch.tensor([[1.0] + [0.0] * (len(logits) - 1), logits])
    with pytest.raises(WrongAnswer, match=f"a step: .*{message}"):
        program.check_tokens(likeliest, torch.tensor([0, token], dtype=torch.int32), "a step")
