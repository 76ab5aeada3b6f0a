"""The Triton kernels on a GPU: time of each at the shapes of real models, next to its floor and to torch in the same
run.

`python benchmarks/parts/kernel_times.py --out results.json` checks each answer, then measures. The floor of a kernel is the bytes
that it must move over the read bandwidth measured at the start. Times are medians of CUDA graph replays; each graph
goes through enough copies of its inputs that none is found in the L2 cache. `--tune` writes the best configuration of
each linear layer to blinkpy/kernels/configs/ instead; `--models NAME ...` limits both.
"""

# Launches are timed within their iteration (B023); the repository is put on the path first (E402).
# ruff: noqa: B023, E402

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
import torch.nn.functional as F
import triton

from benchmarks.common.graph_timing import graph_ms, header, rand, read_bandwidth
from blinkpy.kernels import activation, norm
from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import AttentionCall, NewTokens, PagedKV
from blinkpy.kernels.attention.prefill_attention import plan_prefill
from blinkpy.kernels.attention.rotate_and_cache import rope_and_cache
from blinkpy.kernels.attention.split_plan import DecodeWorkspace, plan_decode
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.linear.linear import leaves_partials, linear
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearWorkspace
from blinkpy.kernels.moe.expert_config import ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertWorkspace
from blinkpy.kernels.moe.experts import experts, plan_experts
from blinkpy.kernels.sampling.sampler import sample_tokens
from blinkpy.kernels.sampling.sampling_call import RequestView, SamplingCall, SamplingWorkspace
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.submission import SQ_ENTRY_WORDS, WORD_REPETITION_PENALTY, WORD_TEMPERATURE, WORD_TOP_P

CACHE_BYTES = 300_000_000
"""Inputs of one graph are at least this large together: several times the L2 cache."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layers."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    layers: int
    experts: int = 0
    top_k: int = 0
    head_dim: int = 128

    def linears(self) -> dict[str, tuple[int, int, bool, bool]]:
        """name -> (outputs, inputs, norm fused, SwiGLU fused)."""
        found = {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden, True, False),
            "o": (self.hidden, self.heads * self.head_dim, False, False),
            "lm_head": (self.vocabulary, self.hidden, False, False),
        }
        if self.experts:
            return found | {"router": (self.experts, self.hidden, False, False)}
        return found | {
            "gate_up": (self.width, self.hidden, True, True),
            "down": (self.hidden, self.width, False, False),
        }


MODELS = {
    "Llama-3-8B": Model(4096, 32, 8, 14336, 128256, 32),
    "Qwen3-30B-A3B": Model(2048, 32, 4, 768, 151936, 48, experts=128, top_k=8),
    "Phi-4": Model(5120, 40, 10, 17920, 100352, 40),
}


def view(counts: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> BatchView:
    """A batch whose row and whose token i have the number i, as slot, position and cache slot."""
    starts, lengths, ids = (array.to("cuda", torch.int32) for array in (starts, lengths, torch.arange(8192)))
    return BatchView(counts, ids[: len(lengths)], starts, lengths, torch.ones_like(lengths), ids, ids)


def agree(out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((out.float() - expected.float()).norm() / expected.float().norm())
    if not error < 2e-2:
        raise SystemExit(f"{what}: relative error {error:.2e}; not measured")


class Bench:
    """Collects rows of results."""

    def __init__(self, table: LinearTable) -> None:
        self.bandwidth = read_bandwidth()
        self.table = table
        self.rows: list[dict[str, Any]] = []
        print(f"read bandwidth {self.bandwidth:.0f} GB/s")

    def add(self, kernel: str, shape: str, ms: float, bytes_moved: int, torch_ms: float | None = None, **more: Any) -> None:
        """One result; bytes_moved: the least that any kernel must move."""
        floor = bytes_moved / self.bandwidth / 1e6
        row = {"kernel": kernel, "shape": shape, "us": ms * 1e3, "floor_us": floor * 1e3, "of_floor": floor / ms}
        row |= {"torch_us": None if torch_ms is None else torch_ms * 1e3} | more
        self.rows.append(row)
        other = "" if torch_ms is None else f"{torch_ms * 1e3:9.1f} torch"
        print(f"{kernel:18}{shape:44}{ms * 1e3:9.1f} us{floor * 1e3:9.1f} floor {floor / ms:6.1%}{other}", flush=True)

    def linears(self, name: str, model: Model, m: int) -> None:
        """Each linear layer by itself, then all of a model in one graph, with and without dependent launches."""
        workspace = LinearWorkspace.allocate("cuda", torch.bfloat16, rows=m * (model.hidden + 2 * model.width))
        counts = header(m, m, m)
        for layer, (n, k, normed, swiglu) in model.linears().items():
            wide = 2 * n if swiglu else n
            x, scale = rand(m, k), torch.ones(k, device="cuda", dtype=torch.bfloat16)
            weights = [rand(wide, k, scale=k**-0.5) for _ in range(max(2, CACHE_BYTES // (wide * k * 2)))]
            dtype = torch.float32 if layer in ("lm_head", "router") else torch.bfloat16
            out, plain = torch.zeros(m, n, device="cuda", dtype=dtype), rand(m, wide)
            config = self.table.config(n, k, m, torch.bfloat16, swiglu=swiglu)
            fused: dict[str, Any] = {"norm": (scale, 1e-5) if normed else None, "swiglu": swiglu}
            if leaves_partials(config):  # the next norm adds them up
                out = torch.zeros(config.split_k, m, n, device="cuda")

            def ours(pdl: bool = False) -> None:
                for weight in weights:
                    linear(LinearCall(x, weight, out, workspace, counts, pdl=pdl, **fused), config)

            def cublas() -> None:
                for weight in weights:
                    torch.mm(x, weight.T, out=plain)

            linear(LinearCall(x, weights[0], out, workspace, counts, **fused), config)
            expected = F.linear(F.rms_norm(x.float(), (k,), eps=1e-5) if normed else x.float(), weights[0].float())
            found = out.sum(0) if out.dim() == 3 else out
            agree(found, F.silu(expected[:, :n]) * expected[:, n:] if swiglu else expected, f"linear {layer}")
            times = [graph_ms(run) / len(weights) for run in (ours, lambda: ours(True), cublas)]
            self.add("linear", f"{name} {layer} M={m} {wide}x{k}", times[0], wide * k * 2, times[2],
                     pdl_us=times[1] * 1e3, config=asdict(config))  # fmt: skip
            print(f"{'':62}{times[1] * 1e3:9.1f} us with dependent launches")

    def decode(self, name: str, model: Model, rows: int, context: int, page: int = 16) -> None:
        """Decode attention of equal contexts."""
        per_row = -(-context // page)
        pages = rows * per_row
        bytes_read = 2 * pages * page * model.kv_heads * model.head_dim * 2
        copies = max(1, min(8, CACHE_BYTES // bytes_read + 1))
        shape = (pages, model.kv_heads, page, model.head_dim)
        caches = [(rand(*shape), rand(*shape)) for _ in range(copies)]
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(rows, per_row)
        lengths = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        q, out = rand(rows, model.heads, model.head_dim), rand(rows, model.heads * model.head_dim)
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        plan = plan_decode(rows, model.kv_heads, max(context, 8192), sm_count)
        workspace = DecodeWorkspace.allocate([(rows, plan)], model.heads, model.kv_heads, model.head_dim, "cuda")
        batch, scale = view(header(rows, rows, rows), torch.arange(rows + 1), lengths), model.head_dim**-0.5

        def ours() -> None:
            for k, v in caches:
                attend(AttentionCall(q, PagedKV(k, v, table), batch, out, rows, scale, workspace=workspace), plan)

        k, v = (c[table.long()].transpose(2, 3).reshape(rows, per_row * page, model.kv_heads, -1)[:, :context].transpose(1, 2)
                for c in caches[-1])  # fmt: skip

        def dense() -> torch.Tensor:
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

        ours()
        agree(out, dense().reshape(rows, -1), "decode attention")
        self.add("decode_attention", f"{name} rows={rows} context={context}", graph_ms(ours) / copies, bytes_read,
                 graph_ms(dense), plan=asdict(plan))  # fmt: skip

    def prefill(self, name: str, model: Model, tokens: int, cached: int, page: int = 16) -> None:
        """Prefill attention of one chunk behind `cached` tokens; the floor is arithmetic there, so TFLOP/s are
        given."""
        context = tokens + cached
        pages = -(-context // page)
        k, v = (rand(pages, model.kv_heads, page, model.head_dim) for _ in range(2))
        table = torch.randperm(pages, device="cuda").to(torch.int32)[None]
        q, out = rand(tokens, model.heads, model.head_dim), rand(tokens, model.heads * model.head_dim)
        batch = view(header(1, tokens, 0), torch.tensor([0, tokens]), torch.tensor([context]))
        call = AttentionCall(q, PagedKV(k, v, table), batch, out, 1, model.head_dim**-0.5)

        def ours() -> None:
            attend(call, plan_prefill(torch.bfloat16))

        kd, vd = (c[table[0].long()].transpose(1, 2).reshape(pages * page, model.kv_heads, -1)[:context].transpose(0, 1)[None]
                  for c in (k, v))  # fmt: skip
        mask = torch.ones(tokens, context, device="cuda", dtype=torch.bool).tril(cached) if cached else None

        def dense() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], kd, vd, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )

        ours()
        agree(out, dense()[0].transpose(0, 1).reshape(tokens, -1), "prefill attention")
        ms = graph_ms(ours)
        flops = 4 * model.heads * model.head_dim * (tokens * cached + tokens * tokens / 2)
        self.add("prefill_attention", f"{name} chunk={tokens} cached={cached}", ms,
                 2 * context * model.kv_heads * model.head_dim * 2, graph_ms(dense), tflops=flops / ms / 1e9)  # fmt: skip
        print(f"{'':62}{flops / ms / 1e9:9.0f} TFLOP/s")

    def small(self, name: str, model: Model, tokens: int) -> None:
        """Norm, rope and SwiGLU: bound by launch latency at few tokens."""
        counts, copies = header(tokens, tokens, tokens), 32
        x, residual, out = (rand(tokens, model.hidden) for _ in range(3))
        scale = torch.ones(model.hidden, device="cuda", dtype=torch.bfloat16)

        def normed() -> None:
            for _ in range(copies):
                norm.rms_norm(x, scale, 1e-5, counts, out, residual)

        def torch_normed() -> None:
            for _ in range(copies):
                F.rms_norm(residual.add_(x), (model.hidden,), scale, 1e-5)

        self.add(
            "rms_norm",
            f"{name} T={tokens}",
            graph_ms(normed) / copies,
            tokens * model.hidden * 8,
            graph_ms(torch_normed) / copies,
        )
        size = model.heads + 2 * model.kv_heads
        qkv = rand(tokens, size * model.head_dim)
        keys, values = (rand(tokens, model.kv_heads, 16, model.head_dim) for _ in range(2))
        angles = torch.zeros(8192, model.head_dim // 2, device="cuda")
        ids = torch.arange(tokens, device="cuda", dtype=torch.int32)
        batch, new, cache = view(counts, ids, ids), NewTokens(qkv, angles, angles), PagedKV(keys, values, ids[None])

        def rotated() -> None:
            for _ in range(copies):
                rope_and_cache(new, cache, batch, heads=model.heads)

        self.add("rope_and_cache", f"{name} T={tokens}", graph_ms(rotated) / copies, qkv.numel() * 4)
        wide, inner = rand(tokens, 2 * model.width), rand(tokens, model.width)

        def gated() -> None:
            for _ in range(copies):
                activation.swiglu(wide, counts, inner)

        def torch_gated() -> None:
            for _ in range(copies):
                gate, up = wide.chunk(2, -1)
                torch.mul(F.silu(gate), up, out=inner)

        self.add("swiglu", f"{name} T={tokens}", graph_ms(gated) / copies, inner.numel() * 6, graph_ms(torch_gated) / copies)

    def mixture(self, name: str, model: Model, tokens: int) -> None:
        """Routing and expert layers."""
        shape = ExpertShape(model.experts, model.top_k, model.hidden, model.width)
        plan = plan_experts(shape, tokens, torch.bfloat16, "cuda", ExpertTable.load(torch.cuda.get_device_name()))
        counts, logits = header(tokens, tokens, 0), torch.randn(tokens, model.experts, device="cuda")
        x, out = rand(tokens, model.hidden), rand(tokens, model.hidden)
        copies = 3
        gate_up = [rand(model.experts, 2 * model.width, model.hidden, scale=0.02) for _ in range(copies)]
        down = [rand(model.experts, model.hidden, model.width, scale=0.02) for _ in range(copies)]
        workspace = ExpertWorkspace.allocate(shape, tokens, torch.bfloat16, "cuda")

        def ours() -> None:
            for weights in zip(gate_up, down, strict=True):
                experts(ExpertCall(x, logits, *weights, counts, out, workspace, model.top_k, True), plan)

        used = len(torch.unique(logits.topk(model.top_k).indices))
        bytes_read = used * 3 * model.width * model.hidden * 2
        ms = graph_ms(ours) / copies
        flops = 6 * tokens * model.top_k * model.width * model.hidden
        self.add("experts", f"{name} T={tokens} ({used} experts)", ms, bytes_read, tflops=flops / ms / 1e9)

    def samplers(self, name: str, model: Model, rows: int) -> None:
        """Greedy, nucleus and unfiltered sampling, peaked and flat."""
        workspace = SamplingWorkspace.allocate(rows, model.vocabulary, "cuda")
        ones, history = (torch.ones(shape, device="cuda", dtype=torch.int32) for shape in (rows, (rows, 64)))
        batch = view(header(rows, rows, rows), torch.arange(rows + 1), ones)
        records = torch.zeros(rows, LOGPROB_ENTRIES, device="cuda", dtype=torch.int64)
        for label, temperature, top_p, spread in (
            ("greedy", 0.0, 1.0, 3.0), ("top_p 0.95 peaked", 1.0, 0.95, 4.0), ("top_p 0.95 flat", 1.0, 0.95, 1.0),
            ("unfiltered flat", 1.0, 1.0, 1.0),
        ):  # fmt: skip
            logits = torch.randn(rows, model.vocabulary, device="cuda") * spread
            entry = torch.zeros(rows, SQ_ENTRY_WORDS, device="cuda", dtype=torch.int32)
            reals = entry.view(torch.float32)
            reals[:, WORD_TEMPERATURE], reals[:, WORD_TOP_P] = temperature, top_p
            reals[:, WORD_REPETITION_PENALTY] = 1.0

            call = SamplingCall(logits, RequestView(entry, history, ones), batch, torch.zeros_like(ones), records, workspace)

            def ours() -> None:
                sample_tokens(call)

            def sorted_draw() -> None:
                probability = torch.softmax(logits, -1)
                ranked, order = probability.sort(-1, descending=True)
                ranked = torch.where(ranked.cumsum(-1) - ranked < 0.95, ranked, 0.0)
                order.gather(1, (ranked / torch.empty_like(ranked).exponential_()).argmax(-1, keepdim=True))

            other = graph_ms(lambda: logits.argmax(-1)) if temperature == 0 else graph_ms(sorted_draw)
            self.add("sample", f"{name} rows={rows} {label}", graph_ms(ours), logits.numel() * 4, other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kernels", nargs="+", default=["linear", "attention", "small", "experts", "sample"])
    parser.add_argument("--tune", action="store_true", help="find and store the configurations of the linear layers")
    parser.add_argument("--rows", type=int, nargs="+", help="row counts to tune for; by default all of the table")
    parser.add_argument("--pdl", action="store_true", help="tune with programmatic dependent launch")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")
    gpu = torch.cuda.get_device_name()
    about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__,
             "cuda": torch.version.cuda, "date": datetime.date.today().isoformat()}  # fmt: skip
    models = {name: MODELS[name] for name in options.models}
    if options.tune:
        tuner = importlib.import_module("benchmarks.tuning.kernel_tuner")
        print("wrote", tuner.tune(models, gpu, about, graph_ms, options.pdl, options.rows or list(tuner.MEASURED_ROWS)))
        return 0
    bench = Bench(LinearTable.load(gpu))
    for name, model in models.items():
        for m in (1, 8, 64) if "linear" in options.kernels else ():
            bench.linears(name, model, m)
        if "attention" in options.kernels:
            for rows, context in ((1, 300), (1, 8000), (1, 32_000), (8, 1000), (64, 1000), (256, 1000)):
                bench.decode(name, model, rows, context)
            for tokens, cached in ((512, 0), (2048, 0), (512, 7680)):
                bench.prefill(name, model, tokens, cached)
        for tokens in (1, 64, 2048) if "small" in options.kernels else ():
            bench.small(name, model, tokens)
        for tokens in (1, 8, 64, 256, 2048) if "experts" in options.kernels and model.experts else ():
            bench.mixture(name, model, tokens)
        for rows in (1, 64, 256) if "sample" in options.kernels else ():
            bench.samplers(name, model, rows)
    if options.out:
        options.out.write_text(json.dumps(about | {"read_gb_per_s": bench.bandwidth, "results": bench.rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
