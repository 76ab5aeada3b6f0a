"""Compiles every Triton kernel variant that the served models use for sm_90, without a GPU, and reads what each one
needs.

The launchers themselves are called, with meta tensors (shapes, no memory) and Triton's driver replaced by one that only
names the target: each launch is specialised exactly as the JIT would specialise it (alignment, arguments equal to 1)
and compiled, but not started. `python benchmarks/common/aot_compile.py` prints the table; `--json` prints it for the test.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT, read_cubin
from blinkpy.kernels import activation, gather, norm
from blinkpy.kernels.attention import rotate_and_cache, split_plan
from blinkpy.kernels.attention.attention import VARIANTS as ATTENTION
from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import LAST_TOKENS, AttentionCall, NewTokens, PagedKV
from blinkpy.kernels.attention.prefill_attention import plan_prefill
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.linear.linear import VARIANTS as LINEARS
from blinkpy.kernels.linear.linear import can_leave_partials, linear
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearShape, LinearWorkspace
from blinkpy.kernels.moe import routing
from blinkpy.kernels.moe.expert_config import ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertCase, ExpertWorkspace
from blinkpy.kernels.moe.experts import VARIANTS as EXPERTS
from blinkpy.kernels.moe.experts import experts, plan_experts
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sampler import sample_tokens
from blinkpy.kernels.sampling.sampling_call import RequestView, SamplingCall, SamplingWorkspace
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.submission import SQ_ENTRY_WORDS

CAPABILITY = 90
REGISTER_LIMIT = 255
SPILL_ALLOWED = {"linear": 16, "adjust": 64}
"""Bytes of stack frame that a kernel may use, by name; all others must not spill. The assembler sometimes keeps two words of
the epilogue of `linear` on the stack although registers are free. `adjust` is given fewer registers than it would take, so
that more programs share a multiprocessor; what it spills belongs to the penalties."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    label: str
    kernel: str
    warps: int
    registers: int
    shared: int
    stack_frame: int
    unresolved: tuple[str, ...]
    seconds: float

    def problems(self) -> list[str]:
        found = []
        if self.shared > SHARED_MEMORY_LIMIT[CAPABILITY]:
            found.append(f"shared memory {self.shared} over {SHARED_MEMORY_LIMIT[CAPABILITY]}")
        if self.registers > REGISTER_LIMIT or self.registers * self.warps * 32 > 65_536:
            found.append(f"{self.registers} registers in {self.warps} warps")
        if self.stack_frame > SPILL_ALLOWED.get(self.kernel, 0):
            found.append(f"stack frame of {self.stack_frame} bytes")
        if self.unresolved:
            found.append(f"unresolved symbols {self.unresolved}")
        return found


class CompileOnlyDriver:
    """Stands where Triton's CUDA driver stands; launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


class Gate:
    """Collects the variants that launches compile while it is active."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self._seen: set[str] = set()
        self._label = ""

    def run(self, label: str, launch: Callable[[], None]) -> None:
        self._label = label
        original = JITFunction.run

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            compiled = original(kernel, *args, grid=grid, warmup=True, **kwargs)
            self._record(compiled, time.perf_counter() - begin)
            return compiled

        JITFunction.run = compile_only
        try:
            launch()
        finally:
            JITFunction.run = original

    def _record(self, compiled: Any, seconds: float) -> None:
        if compiled.hash in self._seen:
            return
        self._seen.add(compiled.hash)
        cubin = read_cubin(compiled.asm["cubin"])
        name = compiled.metadata.name
        needs = cubin.kernels[name]
        self.variants.append(
            Variant(
                self._label,
                name.lstrip("_"),
                compiled.metadata.num_warps,
                needs.registers,
                compiled.metadata.shared + needs.shared,
                needs.stack_frame,
                cubin.unresolved,
                round(seconds, 2),
            )
        )


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the feed-forward layer, or of one expert
    vocabulary: int
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    dtype: torch.dtype = torch.bfloat16
    page: int = 16


MODELS = (
    Shape("Llama-3-8B", 4096, 32, 8, 128, 14336, 128256),
    Shape("Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151936, qk_norm=True, experts=128, top_k=8),
    Shape("Phi-4", 5120, 40, 10, 128, 17920, 100352),
    Shape("demo", 256, 8, 4, 32, 704, 4096),
    Shape("demo float32", 256, 8, 4, 32, 704, 4096, dtype=torch.float32),
)
TABLE = LinearTable.load("NVIDIA H200")
EXPERT_TABLE = ExpertTable.load("NVIDIA H200")
ONE, MANY, MIXED = (1, 1, False), (64, 64, False), (2048, 256, True)
"""(tokens, rows, holds prefill chunks)"""
BUCKETS = {"Phi-4": (ONE, MIXED), "demo": ((64, 64, True),), "demo float32": ((64, 64, True),)}
"""Buckets of a model; the others get all three."""
SM_COUNT = 132


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(model: Shape, tokens: int, rows: int, mixed: bool, pdl: bool) -> Iterator[Callable[[], None]]:
    """The launches of one layer and of the ends of a step."""
    dtype = model.dtype
    counts = meta(8, dtype=torch.int64)
    ids, slots = meta(tokens, dtype=torch.int32), meta(rows, dtype=torch.int32)
    starts, table = meta(rows + 1, dtype=torch.int32), meta(512, 512, dtype=torch.int32)
    hidden = meta(tokens, model.hidden, dtype=dtype)
    weight = meta(model.hidden, dtype=dtype)
    size = model.heads + 2 * model.kv_heads
    qkv = meta(tokens, size * model.head_dim, dtype=dtype)
    q = qkv.view(tokens, size, model.head_dim)[:, : model.heads]
    cache = meta(1024, model.kv_heads, model.page, model.head_dim, dtype=dtype)
    angles = meta(8192, model.head_dim // 2, dtype=torch.float32)
    head_weight = meta(model.head_dim, dtype=dtype)
    norms = (head_weight, head_weight) if model.qk_norm else None
    attended = meta(tokens, model.heads * model.head_dim, dtype=dtype)
    yield lambda: gather.embed(ids, meta(model.vocabulary, model.hidden, dtype=dtype), counts, hidden, pdl=pdl)
    yield lambda: norm.rms_norm(hidden, weight, 1e-5, counts, hidden, pdl=pdl)
    yield lambda: norm.rms_norm(hidden, weight, 1e-5, counts, hidden, hidden, pdl=pdl)
    new, paged = NewTokens(qkv, angles, angles, norms), PagedKV(cache, cache, table)
    batch = BatchView(counts, slots, starts, slots, slots, ids, ids)
    yield lambda: rotate_and_cache.rope_and_cache(new, paged, batch, heads=model.heads, pdl=pdl)
    plan, last_plan = (split_plan.plan_decode(rows, model.kv_heads, 8192, SM_COUNT, dtype, mixed=m) for m in (mixed, False))
    workspace = split_plan.DecodeWorkspace.allocate(
        [(rows, plan), (rows, last_plan)], model.heads, model.kv_heads, model.head_dim, "meta"
    )
    call = AttentionCall(q, paged, batch, attended, rows, model.head_dim**-0.5, 0, workspace, None if mixed else new, pdl=pdl)
    yield lambda: attend(call, plan)
    if mixed:
        yield lambda: attend(call, plan_prefill(dtype, SM_COUNT, overlap_prefill=True))
    yield from linear_launches(model, tokens, rows, pdl)
    last = meta(rows, model.hidden, dtype=dtype)
    if StepShape(tokens, rows, mixed).last_tokens_only:
        yield lambda: attend(replace(call, last_tokens=True), last_plan)
        yield lambda: gather.last_tokens(hidden, starts, counts, last, counts, pdl=pdl)
        yield from linear_launches(model, rows, rows, pdl)
    yield lambda: norm.rms_norm(hidden, weight, 1e-5, counts, last, hidden, last_tokens_of=batch, pdl=pdl)
    yield from sampling_launches(model, rows, pdl)


def sampling_launches(model: Shape, rows: int, pdl: bool) -> Iterator[Callable[[], None]]:
    logits = meta(rows, model.vocabulary, dtype=torch.float32)
    by_slot, by_row = meta(512, dtype=torch.int32), meta(rows, dtype=torch.int32)
    requests = RequestView(meta(512, SQ_ENTRY_WORDS, dtype=torch.int32), meta(512, 8192, dtype=torch.int32), by_slot)
    batch, records = BatchView(meta(8, dtype=torch.int64), *[by_row] * 6), meta(rows, LOGPROB_ENTRIES, dtype=torch.int64)
    workspace = SamplingWorkspace.allocate(rows, model.vocabulary, "meta")
    call = SamplingCall(logits, requests, batch, by_row, records, workspace, pdl)
    yield lambda: sample_tokens(call)
    yield lambda: write_logprobs(call)


def linear_launches(model: Shape, tokens: int, rows: int, pdl: bool) -> Iterator[Callable[[], None]]:
    """The linear layers as a decode step runs them: norms, SwiGLU and residual additions fused in."""
    hidden, width = model.hidden, model.width

    def layer(n: int, k: int, m: int, **around: Any) -> Callable[[], None]:
        shape = LinearShape(m, n, k, dtype=model.dtype, **around)
        config = TABLE.config(n, k, m, model.dtype, swiglu=shape.swiglu)
        if shape.residual and can_leave_partials(config):  # left to the next norm
            shape = shape._replace(residual=False, partials=True)
        return linear_launch(config, shape, pdl)

    yield layer((model.heads + 2 * model.kv_heads) * model.head_dim, hidden, tokens, norm=True)
    yield layer(hidden, model.heads * model.head_dim, tokens, residual=True)
    if model.experts:
        yield layer(model.experts, hidden, tokens, result=torch.float32)
        yield from expert_launches(model, tokens, pdl)
    else:
        yield layer(width, hidden, tokens, norm=True, swiglu=True)
        yield layer(hidden, width, tokens, residual=True)
        up, counts = meta(tokens, 2 * width, dtype=model.dtype), meta(8, dtype=torch.int64)
        yield lambda: activation.swiglu(up, counts, meta(tokens, width, dtype=model.dtype), pdl=pdl)
    yield layer(model.vocabulary, hidden, rows, result=torch.float32)


def expert_launches(model: Shape, tokens: int, pdl: bool) -> Iterator[Callable[[], None]]:
    dtype, hidden, width, top_k = model.dtype, model.hidden, model.width, model.top_k
    counts, stream = meta(8, dtype=torch.int64), meta(tokens, hidden, dtype=dtype)
    logits, scales = meta(tokens, model.experts, dtype=torch.float32), (meta(hidden, dtype=dtype), 1e-5)
    router = meta(model.experts, hidden, dtype=dtype)
    if tokens <= routing.FUSED_ROUTER_TOKENS:
        yield lambda: routing.router_logits(stream, scales, router, counts, stream, logits, pdl=pdl)
    shape = ExpertShape(model.experts, top_k, hidden, width)
    weights = meta(model.experts, 2 * width, hidden, dtype=dtype), meta(model.experts, hidden, width, dtype=dtype)
    workspace = ExpertWorkspace.allocate(shape, tokens, dtype, "meta")
    call = ExpertCall(stream, logits, *weights, counts, stream, workspace, top_k, True, pdl)
    yield lambda: experts(call, plan_experts(shape, tokens, dtype, "meta", EXPERT_TABLE))


def case_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """(label, launch) of the cases that every registered variant declares, in bfloat16: what no model here may use yet."""
    for name, linear_variant in LINEARS.items():
        for linear_case in linear_variant.cases:
            yield f"case of {name}", linear_launch(*linear_case)
    for name, expert_variant in EXPERTS.items():
        for case in expert_variant.cases:
            yield f"case of {name}", expert_launch(name, case)
    for name, attention_variant in ATTENTION.items():
        for plan in attention_variant.plans(torch.bfloat16):
            model, last_tokens = MODELS[0], attention_variant.rows == {LAST_TOKENS}
            yield f"plan of {name}", attention_launch(model, 64, plan, last_tokens)


def linear_launch(config: LinearConfig, shape: LinearShape, pdl: bool = False) -> Callable[[], None]:
    make: dict[str, Any] = {"dtype": shape.dtype}
    x, weight = meta(shape.rows, shape.k, **make), meta(shape.weight_rows, shape.k, **make)
    bias, scales = (meta(size, **make) if given else None for size, given in ((len(weight), shape.bias), (shape.k, shape.norm)))
    split = (config.split_k,) if shape.partials else ()
    out = meta(*split, shape.rows, shape.n, dtype=torch.float32 if shape.partials else shape.result or shape.dtype)
    workspace = LinearWorkspace.allocate("meta", shape.dtype, partial=2**24, rows=shape.rows * (shape.k + shape.weight_rows))
    norm, residual = None if scales is None else (scales, 1e-5), out if shape.residual else None
    call = LinearCall(x, weight, out, workspace, meta(8, dtype=torch.int64), bias, norm, residual, shape.swiglu, pdl)
    return lambda: linear(call, config)


def expert_launch(name: str, case: ExpertCase, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    shape, tokens = case.shape, case.bucket
    table = ExpertTable({} if case.config is None else {shape.key(dtype): {tokens: case.config}})
    x, logits = meta(tokens, shape.hidden, dtype=dtype), meta(tokens, shape.experts, dtype=torch.float32)
    gate_up = meta(shape.experts, 2 * shape.width, shape.hidden, dtype=dtype)
    down = meta(shape.experts, shape.hidden, shape.width, dtype=dtype)
    workspace = ExpertWorkspace.allocate(shape, tokens, dtype, "meta")
    call = ExpertCall(x, logits, gate_up, down, meta(8, dtype=torch.int64), x, workspace, shape.top_k, case.normalize)
    return lambda: experts(call, plan_experts(shape, tokens, dtype, "meta", table, name))


def attention_launch(model: Shape, tokens: int, plan: Any, last_tokens: bool) -> Callable[[], None]:
    """Decode rows, chunks or last tokens of one size, by the variant of a plan."""
    make: dict[str, Any] = {"dtype": model.dtype}
    q, out = meta(tokens, model.heads, model.head_dim, **make), meta(tokens, model.heads * model.head_dim, **make)
    cache, ids = meta(1024, model.kv_heads, model.page, model.head_dim, **make), meta(tokens + 1, dtype=torch.int32)
    batch, paged = BatchView(meta(8, dtype=torch.int64), *[ids] * 6), PagedKV(cache, cache, meta(512, 512, dtype=torch.int32))
    sizes = split_plan.DecodePlan(64, 1, 64)  # scratch for any plan
    workspace = split_plan.DecodeWorkspace.allocate([(tokens, sizes)], model.heads, model.kv_heads, model.head_dim, "meta")
    call = AttentionCall(q, paged, batch, out, tokens, model.head_dim**-0.5, 0, workspace, last_tokens=last_tokens)
    return lambda: attend(call, plan)


def fits(launch: Callable[[], None]) -> bool:
    """Whether what this launches fits the GPU without spills. It is compiled into Triton's cache; Triton's driver is replaced."""
    triton.runtime.driver.set_active(CompileOnlyDriver())
    gate = Gate()
    gate.run("candidate", launch)
    return not any(variant.problems() for variant in gate.variants)


def compile_all() -> list[Variant]:
    """Compile every variant of every model and bucket. Kernels already in Triton's cache are only read."""
    triton.runtime.driver.set_active(CompileOnlyDriver())
    gate = Gate()
    for model in MODELS:
        for tokens, rows, mixed in BUCKETS.get(model.name, (ONE, MANY, MIXED)):
            for pdl in (False, True) if model.name == "Llama-3-8B" and tokens == 1 else (False,):
                for launch in launches(model, tokens, rows, mixed, pdl):
                    gate.run(f"{model.name} T={tokens}{' PDL' if pdl else ''}", launch)
    for label, launch in case_launches():
        gate.run(label, launch)
    return gate.variants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    begin = time.perf_counter()
    as_json = parser.parse_args().json
    variants = compile_all()
    if as_json:
        print(json.dumps([asdict(variant) | {"problems": variant.problems()} for variant in variants]))
    else:
        print(f"{'kernel':28}{'variant':28}{'warps':>6}{'regs':>6}{'shared':>8}{'stack':>6}{'s':>7}")
        for v in variants:
            print(
                f"{v.kernel:28}{v.label:28}{v.warps:6}{v.registers:6}{v.shared:8}{v.stack_frame:6}{v.seconds:7.2f}", *v.problems()
            )
        print(f"{len(variants)} variants, {time.perf_counter() - begin:.1f} s")
    return int(any(variant.problems() for variant in variants))


if __name__ == "__main__":
    raise SystemExit(main())
