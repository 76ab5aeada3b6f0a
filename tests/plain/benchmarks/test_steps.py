"""The benchmark of whole steps, but for the GPU: batches, multiplications, measuring on a synthetic clock, the table."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba_cuda")
pytest.importorskip("cuda.bindings")

from benchmarks.common.hand_batches import Rows, batch_arrays, decoding, graph_index, mixed, page_table, prompts  # noqa: E402
from benchmarks.common.harness import UsageError, WrongAnswer, main  # noqa: E402
from benchmarks.common.model_shapes import SHAPES  # noqa: E402
from benchmarks.common.nvml import EnergyMeter, slope  # noqa: E402
from benchmarks.common.roofline import multiplications  # noqa: E402
from benchmarks.parts import whole_steps as program  # noqa: E402
from benchmarks.report.pages import rewritten  # noqa: E402
from benchmarks.report.part_tables import Results, step_row  # noqa: E402
from blinkpy.kv.state import DECODE_ROWS, EMITS, MAX_CONTEXT, ROWS, TOKENS  # noqa: E402
from blinkpy.models.families.describe_model import describe_config  # noqa: E402
from blinkpy.models.gpu.step_shapes import bucket_shapes, step_shapes  # noqa: E402
from blinkpy.models.weights.weight_parts import expected_tensors  # noqa: E402
from blinkpy.queues.submission import SQ_ENTRY, SQ_ENTRY_WORDS  # noqa: E402

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


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    pool, rows = np.arange(100, dtype=np.int32), decoding(4, 40)
    pages = page_table(rows, PAGE, pool[:12], 3)
    with pytest.raises(UsageError, match="the KV cache has 11 pages; a step with 160 tokens of context needs 12"):
        page_table(rows, PAGE, pool[:11], 3)
    with pytest.raises(ValueError, match="a context of 40 tokens"):
        page_table(rows, PAGE, pool, 2)
    with pytest.raises(ValueError, match="4 rows of 4 tokens"):
        batch_arrays(rows, pages, PAGE, 3, np.zeros(9, np.int32))
    with pytest.raises(ValueError, match="4 rows of 4 tokens"):
        batch_arrays(rows, pages, PAGE, 4, np.zeros(3, np.int32))


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


class SyntheticGpu:
    """A GPU that does one replay after another, and the host's clock, which moves on when the host waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_ms: float = 40.0) -> None:
        self.step_ms = step_ms
        self.now = self.done = 0.0
        self.replays = 0
        self.ready: list[float] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SyntheticEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr("benchmarks.parts.whole_steps.time", SimpleNamespace(perf_counter=lambda: self.now))

    def instantiate(self) -> None:
        self.ready.append(self.now)

    def replay(self) -> None:
        assert self.ready, "not instantiated"
        self.now += 1e-5
        self.done = max(self.done, self.now) + self.step_ms / 1e3
        self.replays += 1


class SyntheticEvent:
    def __init__(self, gpu: SyntheticGpu):
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.done, self.gpu.now)

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, other: Self) -> float:
        return (other.at - self.at) * 1e3


def synthetic_meter(period_s: float, clock_every: int) -> Any:
    """At 500 W and 1,700 MHz whenever it is asked about 1.5 s or more."""
    power = {"power_w": lambda begin, end: 500.0 if end - begin >= 1.5 else None, "clock_mhz": lambda begin, end: 1700.0}
    return nullcontext(SimpleNamespace(missing="", facts={"gpu": "G", "power_limit_w": 700.0}, **power))


def synthetic_engine(graph: Any, layers: int) -> Any:
    """What the benchmark takes of an engine that has started, on the CPU."""
    slots, tokens = 256, 8192
    shapes, _ = step_shapes(bucket_shapes(slots, tokens))

    def zeros(*size: int) -> Any:
        return torch.zeros(size, dtype=torch.int32)

    by_token = {name: zeros(tokens) for name in ("token_ids", "positions", "cache_slots", "token_rows")}
    by_row = {name: zeros(slots) for name in ("row_slots", "context_lengths", "emits")}
    counts = torch.zeros(8, dtype=torch.int64)
    batch = SimpleNamespace(**by_token, **by_row, query_starts=zeros(slots + 1), sampled=zeros(slots) + 2, counts=counts)
    requests = SimpleNamespace(page_table=zeros(slots, 8192 // PAGE), entry=zeros(slots, SQ_ENTRY_WORDS))
    sizes = dict(zip(program.SIZES, (tokens, slots, 8192, PAGE, 5000), strict=True))
    logits = torch.tensor([[0.5, 1.0, 7.0, -1.0]]).repeat(slots, 1)
    keys, values = ([torch.zeros(4) for _ in range(layers)] for _ in range(2))
    decoder = SimpleNamespace(cache=SimpleNamespace(keys=keys, values=values), buffers=SimpleNamespace(logits=logits))
    step = SimpleNamespace(shapes=shapes, graphs=[SimpleNamespace(graph=graph) for _ in shapes], decoder=decoder)
    runner = SimpleNamespace(step=step, device_state=SimpleNamespace(batch=batch, requests=requests))
    return SimpleNamespace(runner=runner, sizes=SimpleNamespace(**sizes), timings={"reading the model": 0.123})


def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is measured by default, with another architecture's layers: the time of a step, and what follows from it."""
    gpu = SyntheticGpu(monkeypatch)
    monkeypatch.setattr(program, "EnergyMeter", synthetic_meter)
    a = describe_config(SHAPES["llama-3-8b"])
    engine = synthetic_engine(gpu, len(a.layers))
    chosen = program.cases([1, 256], [1024, 8192], 30, 8192)
    run = SimpleNamespace(progress=lambda *words: None)
    results = program.measure(engine, a, chosen, 1.5, run)
    found = results["steps"]
    decodes = [(1, 1, "decode 1x1"), (256, 256, "decode 256x256")]
    chunks = [(512, 0), (2048, 0), (8192, 0), (8192, 0), (1024, 30), (1024, 30), (8192, 30)]
    expected = decodes + [(tokens, rows, f"mixed {tokens}x256") for tokens, rows in chunks]
    assert [(step["tokens"], step["decodes"], step["graph"]) for step in found] == expected
    for step in found:
        assert step["step_ms"] == step["lowest_ms"] == step["highest_ms"] == pytest.approx(40)
        assert 1.5 / 0.04 <= step["steps"] <= 1.5 / 0.04 + 4
        assert step["tflop_per_s"] == pytest.approx(sum(step["tflop"].values()) / 0.04, rel=1e-3)
        assert (step["mean_w"], step["joules"], step["clock_mhz"]) == (500, 20, 1700)
    assert found[1]["share_of_floor"] == pytest.approx(found[1]["floor_ms"] / 40, abs=1e-3) and "floor_ms" not in found[2]
    assert len(gpu.ready) == len({step["graph"] for step in found})
    assert all((tensor != 0).all() for tensor in engine.runner.step.decoder.cache.keys)
    assert engine.runner.device_state.batch.counts[TOKENS] == 8192  # of the last case
    entry = engine.runner.device_state.requests.entry.numpy().view(SQ_ENTRY)
    assert (entry["temperature"] == 0).all() and (entry["top_p"] == 1).all() and (entry["logprobs"] == -1).all()
    assert (entry["repetition_penalty"] == 1).all()


def test_the_gpu_never_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SyntheticGpu(monkeypatch, 0.9)
    gpu.instantiate()
    timing = program.replayed(gpu, 0.5)
    assert timing.steps % round(50 / 0.9) == 0 and timing.ended - timing.began >= 0.5
    assert timing.group_ms == pytest.approx([0.9] * len(timing.group_ms))
    assert gpu.done == pytest.approx(gpu.replays * 0.9e-3, abs=1e-4)  # no time between two replays


@pytest.mark.parametrize(
    ("logits", "token", "message"),
    [([0.0, 2.0, 1.0], 2, "not the likeliest"), ([0.0, 2.0, float("nan")], 1, "no numbers"), ([0.0, 2.0], 2, "vocabulary")],
)
def test_a_wrong_step_is_not_measured(logits: list[float], token: int, message: str) -> None:
    likeliest = torch.tensor([[1.0] + [0.0] * (len(logits) - 1), logits])
    with pytest.raises(WrongAnswer, match=f"a step: .*{message}"):
        program.check_tokens(likeliest, torch.tensor([0, token], dtype=torch.int32), "a step")


def test_options_that_fit_no_step() -> None:
    for rows, tokens, decodes in (([257], [512], 30), ([0], [512], 30), ([1], [512], 256), ([1], [31], 30), ([1], [4096], 30)):
        with pytest.raises(UsageError):
            program.cases(rows, tokens, decodes, 2048)
    assert [case.rows for case in program.cases([2], [512], 0, 512)] == [decoding(2, 256), prompts(1, 512), mixed(0, 1100, 512)]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["steps", "--smoke", "--output", str(tmp_path / "result.json")])
    assert main(program.benchmark, program.options()) == 2
    assert "error: no usable NVIDIA GPU was found" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_power_of_a_counter_that_moves_in_steps(rng: np.random.Generator) -> None:
    """700 W by a counter that moves every 0.1 s, read every 20 ms or so for 1.5 s. A difference is off by up to 6 %."""
    for _ in range(20):
        times = rng.uniform(0, 0.1) + np.cumsum(rng.uniform(0.02, 0.023, 70))
        marks = [(when, 70 * np.floor(when / 0.1)) for when in times.tolist()]
        assert slope(marks) == pytest.approx(700, rel=0.015)
    meter = EnergyMeter()
    meter._marks = [(-9.0, -1e9), *marks, (99.0, 1e9)]
    assert meter.power_w(0, 50) == slope(marks) and meter.power_w(times[0], times[3]) is None


def test_table(tmp_path: Path) -> None:
    facts = {"step_ms": 9.8765, "tflop": {"linear": 3.0, "attention": 0.5}, "tflop_per_s": 354.4}
    power = {"mean_w": 698.7, "joules": 6.9, "clock_mhz": 1650}
    cases = [("prompts", prompts(1, 8192)), ("prompts", prompts(64, 128)), ("mixed", mixed(30, 1100, 994, 4000), 4000)]
    shown = [program.Case(*case).facts() | facts for case in [*cases, ("mixed", mixed(0, 1100, 512))]]
    shown.insert(0, program.Case("decode", decoding(256, 256)).facts() | facts | power)
    rows = [step_row(step) for step in shown]
    assert rows[0] == ["decode, 256 rows at 256", "9.88", "699", "354"]
    assert rows[1] == ["a prompt of 8,192", "9.88", "", "354"]
    others = ["64 prompts of 128", "30 rows at 1,100, chunk of 994 behind 4,000 cached", "chunk of 512"]
    assert [row[0] for row in rows[2:]] == others
    page = "<!-- measured: steps -->\nold\n<!-- end of measured -->\n"
    assert "Not measured yet." in rewritten(page, Results(tmp_path))
    document = {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": {"hash": "0123456789" * 4},
        "arguments": {"seconds": 1.5},
        "results": {"gpu": {"gpu": "G", "power_limit_w": 700.0}, "steps": shown},
    }
    (tmp_path / "steps-llama-3-8b.json").write_text(json.dumps(document))
    text = rewritten(page, Results(tmp_path))
    assert "Llama-3-8B, G, power limit 700 W; 1.5 s of each step; 2026-01-02, `0123456`:" in text and " | ".join(rows[0]) in text
    made = rewritten(page.replace("steps", "files"), Results(tmp_path))
    assert "| `steps-llama-3-8b.json` | `python -m benchmarks.parts.whole_steps` | G | 2026-01-02, `0123456` |" in made
