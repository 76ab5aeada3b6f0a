"""Compiles every Triton kernel variant that the served models use for sm_90, without a GPU, and reads what each one
needs.

Whole steps are launched, and each case that a variant declares, with meta tensors (shapes, no memory) and Triton's driver
replaced by one that only names the target: each launch is specialised exactly as the JIT would specialise it (alignment,
arguments equal to 1) and compiled, but not started. `python -m benchmarks.common.aot_compile` prints a JSON object for each.
With `--sample SEED` a sample is compiled that has each flag of each kernel (aot_sample.py).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.common.aot_sample import AskedFor, asked_for, choose
from benchmarks.common.model_shapes import SHAPES
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT, read_cubin
from blinkpy.kernels.attention import split_plan
from blinkpy.kernels.attention.attention import VARIANTS as ATTENTION
from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import LAST_TOKENS, AttentionCall, PagedKV
from blinkpy.kernels.attention.window_rings import WindowRings, keep_spilled, place_pages
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.fp8_matrix import Fp8Matrix
from blinkpy.kernels.fp8_rows import FP8
from blinkpy.kernels.linear.linear import VARIANTS as LINEARS
from blinkpy.kernels.linear.linear import linear
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearShape, LinearWorkspace, Scales
from blinkpy.kernels.moe.expert_config import ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertCase, ExpertWorkspace
from blinkpy.kernels.moe.experts import VARIANTS as EXPERTS
from blinkpy.kernels.moe.experts import experts, plan_experts
from blinkpy.kernels.sampling.mask_illegal import GrammarView
from blinkpy.kernels.sampling.sample_tokens import VARIANTS as SAMPLERS
from blinkpy.kernels.sampling.sample_tokens import sample_tokens
from blinkpy.kernels.sampling.sampling_call import RequestView, SamplingCall, SamplingWorkspace
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.gpu_step import GpuStep
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import TORCH_DTYPES, LayerWeights, Weights, own_dtype
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.models.weights.weight_parts import Part, layer_parts, outer_parts
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.submission import SQ_ENTRY_WORDS

CAPABILITY = 90
REGISTER_LIMIT = 255
# Bytes of stack frame that a kernel may use; others must not spill. The assembler sometimes keeps two words of the epilogue of
# `linear` on the stack although registers are free. `adjust` gets fewer registers than it would take, so that more programs share
# a multiprocessor; what it spills belongs to the penalties. Triton 3.7 keeps two words of `sample_tokens` there.
SPILL_ALLOWED = {"linear": 16, "adjust": 64, "sample_tokens": 8}
DEMO = json.loads((DEMO_FOLDER / "config.json").read_text())
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
LLAMA4 = {  # Maverick, but every second layer does not rotate
    "architectures": ["Llama4ForCausalLM"],
    "interleave_moe_layer_step": 2,
    "num_local_experts": 128,
    "no_rope_layer_interval": 2,
    "dtype": "bfloat16",
}
ONE, MANY, MIXED = StepShape(1, 1, False), StepShape(64, 64, False), StepShape(2048, 256, True)
INVARIANT = tuple(replace(shape, whole=True) for shape in (ONE, MIXED))  # launched by batch-invariant decoders
# config.json of a model, and the steps of it that are launched; two layers stand for all
STEPS: dict[str, tuple[dict[str, Any], tuple[StepShape, ...]]] = {
    "Llama-3-8B": (SHAPES["llama-3-8b"], (ONE, MANY, MIXED, *INVARIANT)),
    "Qwen3-30B-A3B": (SHAPES["qwen3-30b-a3b"], (ONE, MANY, MIXED, *INVARIANT)),
    "GLM-4.5-Air": (SHAPES["glm-4.5-air"], (ONE, MANY, MIXED)),
    "Qwen1.5-MoE": (SHAPES["qwen1.5-moe"], (ONE, MIXED)),
    "Phi-4": (SHAPES["phi-4"], (ONE, MIXED)),
    "Gemma-2-9B": (GEMMA, (ONE, MIXED)),
    "gpt-oss-20b": (SHAPES["gpt-oss-20b"], (ONE, MANY, MIXED)),
    "Llama-4": (LLAMA4, (ONE, MANY, MIXED)),
    "demo": (DEMO, (StepShape(64, 64, True),)),
    "demo float32": (DEMO | {"torch_dtype": "float32"}, (StepShape(64, 64, True),)),
}
FP8_CACHE = {"Llama-3-8B", "Gemma-2-9B", "gpt-oss-20b", "demo float32"}  # whose steps are launched with one, too
LAYERS, MAX_MODEL_LEN, SLOTS = 2, 8192, 512
GPU = "NVIDIA H200"  # whose measured configurations are taken


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

    def problems(self) -> list[str]:
        shared_limit, registers = SHARED_MEMORY_LIMIT[CAPABILITY], self.registers
        found = {
            f"shared memory {self.shared} over {shared_limit}": self.shared > shared_limit,
            f"{registers} registers in {self.warps} warps": registers > REGISTER_LIMIT or registers * self.warps * 32 > 65_536,
            f"stack frame of {self.stack_frame} bytes": self.stack_frame > SPILL_ALLOWED.get(self.kernel, 0),
            f"unresolved symbols {self.unresolved}": bool(self.unresolved),
        }
        return [problem for problem, there in found.items() if there]


COMPILE_ONLY = SimpleNamespace(  # stands where Triton's CUDA driver stands; launches nothing
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
)


class Gate:
    """Collects the variants that launches compile. Triton's driver is replaced, in the whole process."""

    def __init__(self) -> None:
        triton.runtime.driver.set_active(COMPILE_ONLY)
        self.variants: dict[str, Variant] = {}

    def run(self, label: str, launch: Callable[[], object]) -> None:
        original = JITFunction.run

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = original(kernel, *args, grid=grid, warmup=True, **kwargs)
            if compiled is not None and compiled.hash not in self.variants:  # None: a hook left it out
                self.variants[compiled.hash] = needs_of(compiled, label)
            return compiled

        with patch.object(JITFunction, "run", compile_only):
            launch()

    def sample(self, launches: list[tuple[str, Callable[[], object]]], seed: int) -> set[str]:
        """Keys of the kernels to compile of all that these launches ask for. Nothing is compiled here."""
        asked: dict[str, AskedFor] = {}

        def note(**info: Any) -> bool:
            kernel = asked_for(info)
            asked[kernel.key] = kernel
            return True  # it is not compiled

        knobs.runtime.jit_cache_hook = note
        for label, launch in launches:
            self.run(label, launch)
        chosen = choose(asked, seed)
        print(f"{len(asked) - len(chosen)} of {len(asked)} kernels left out, with seed {seed}", file=sys.stderr)
        return chosen


def needs_of(compiled: Any, label: str) -> Variant:
    """What a compiled kernel needs, from its cubin."""
    cubin, name, warps = read_cubin(compiled.asm["cubin"]), compiled.metadata.name, compiled.metadata.num_warps
    needs = cubin.kernels[name]
    shared = compiled.metadata.shared + needs.shared
    return Variant(label, name.lstrip("_"), warps, needs.registers, shared, needs.stack_frame, cubin.unresolved)


def fits(launch: Callable[[], object]) -> bool:
    """Whether what this launches fits the GPU without spills. It is compiled into Triton's cache; Triton's driver is replaced."""
    gate = Gate()
    gate.run("candidate", launch)
    return not any(variant.problems() for variant in gate.variants.values())


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta_fp8(weight: torch.Tensor, blocks: bool) -> Fp8Matrix:
    *experts, n, k = weight.shape
    sizes = (*experts, -(-n // 128), -(-k // 128)) if blocks else (*experts, n)
    return Fp8Matrix(meta(*weight.shape, dtype=FP8), meta(*sizes, dtype=torch.float32))


def meta_step(config: dict[str, Any], shape: StepShape, pdl: bool, fp8: str = "", *, fp8_cache: bool = False) -> GpuStep:
    """The steps of a model on the GPU, but on meta tensors. fp8: matrices of layers are, with a scale for "rows" or "blocks"."""
    model = describe_config(config | {"num_hidden_layers": LAYERS})
    dtype = TORCH_DTYPES[model.dtype]

    def parts(described: list[Part]) -> dict[str, Any]:
        return {part.field: meta(*part.shape, dtype=own_dtype(part, dtype)) for part in described}

    outer = parts(outer_parts(model))
    layers = [LayerWeights(**parts(layer_parts(model, layer))) for layer in range(LAYERS)]
    if fp8:
        for layer in layers:
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(layer, name, meta_fp8(getattr(layer, name), fp8 == "blocks"))
    weights = Weights(outer["embedding"], layers, outer["final_norm"], outer.get("lm_head", outer["embedding"]))
    batch: Any = SimpleNamespace(
        **{name: meta(shape.tokens) for name in ("token_ids", "positions", "cache_slots")},
        **{name: meta(shape.rows) for name in ("row_slots", "context_lengths", "emits", "sampled")},
        query_starts=meta(shape.rows + 1),
        counts=meta(8, dtype=torch.int64),
        logprobs=meta(shape.rows, LOGPROB_ENTRIES, dtype=torch.int64),
    )
    requests: Any = SimpleNamespace(page_table=meta(SLOTS, MAX_MODEL_LEN // 16), **meta_requests()._asdict())
    scales = np.ones((LAYERS, 2, model.kv_heads), np.float32) if fp8_cache else None
    cache, table = PagedCache(model, 1024, 16, dtype, "meta", scales=scales), LinearTable.load(GPU)
    decoder = GpuDecoder(model, weights, cache, batch, requests, [shape], MAX_MODEL_LEN, table, pdl, invariant=shape.whole)
    step = GpuStep(decoder, meta_grammars())
    if scratch := step.decoder.experts:
        block = model.experts
        sizes = ExpertShape(block.number, block.top_k, model.hidden_size, block.size, block.mxfp4)
        of_gpu = ExpertTable.load(GPU)
        scratch.plans = {rows: plan_experts(sizes, rows, dtype, "meta", of_gpu) for rows in scratch.plans}
    return step


def meta_grammars(vocabulary: int = 128256) -> GrammarView:
    return GrammarView(meta(64, 1 << 16), meta(vocabulary, 2), meta(2 * vocabulary), meta(SLOTS), meta(SLOTS), meta(SLOTS))


def meta_requests() -> RequestView:
    return RequestView(meta(SLOTS, SQ_ENTRY_WORDS), meta(SLOTS, MAX_MODEL_LEN), meta(SLOTS))


def case_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """(label, launch) of the cases that every registered variant declares, in bfloat16: what no model here may use yet."""
    for name, linear_variant in LINEARS.items():
        for linear_case in linear_variant.cases:
            yield f"case of {name}", linear_launch(*linear_case)
    for name, expert_variant in EXPERTS.items():
        for case in expert_variant.cases:
            yield f"case of {name}", expert_launch(name, case)
    for name, attention_variant in ATTENTION.items():
        for plan in attention_variant.plans(torch.bfloat16):
            yield f"plan of {name}", attention_launch(plan, attention_variant.rows == {LAST_TOKENS})
    for name in SAMPLERS:
        yield f"case of {name}", sampling_launch(name)
    yield "window rings", ring_launch()


def linear_launch(config: LinearConfig, shape: LinearShape) -> Callable[[], object]:
    x, weight = meta(shape.rows, shape.k, dtype=shape.inputs or shape.dtype), meta(shape.weight_rows, shape.k, dtype=shape.dtype)
    around: dict[str, Any] = {"dtype": shape.inputs or (shape.out_dtype if shape.fp8 else shape.dtype)}
    bias, scales = (meta(size, **around) if given else None for size, given in ((len(weight), shape.bias), (shape.k, shape.norm)))
    split = (config.split_k,) if shape.partials else ()
    out = meta(*split, shape.rows, shape.n, dtype=torch.float32 if shape.partials else shape.out_dtype)
    workspace = LinearWorkspace.allocate(
        "meta", out.dtype if shape.fp8 else shape.dtype, partial=2**24, rows=shape.rows * (shape.k + shape.weight_rows)
    )
    norm, residual = None if scales is None else (scales, 1e-5), out if shape.residual else None
    call = LinearCall(x, weight, out, workspace, meta(8, dtype=torch.int64), bias, norm, residual, shape.swiglu, gelu=shape.gelu)
    call = replace(call, scales=ones_for(shape, "meta") if shape.fp8 else None)
    return partial(linear, call, config)


def ones_for(shape: LinearShape, device: str) -> Scales:
    """Scales of FP8 weights, and of x where that is FP8."""
    groups, wide = -(-shape.k // 128), shape.weight_rows
    sizes = ((shape.rows, groups), (-(-wide // 128), groups)) if shape.blocks else ((shape.rows,), (wide,))
    of_x, of_weight = (torch.ones(size, device=device) for size in sizes)
    return Scales(of_x if shape.inputs is None else None, of_weight)


def expert_launch(name: str, case: ExpertCase, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    shape, tokens = case.shape, case.bucket
    table = ExpertTable({} if case.config is None else {shape.key(dtype): {tokens: case.config}})
    x, logits = meta(tokens, shape.hidden, dtype=dtype), meta(tokens, shape.experts, dtype=torch.float32)
    per_item, stored = (2, torch.uint8) if shape.mxfp4 else (1, dtype)
    sizes = ((2 * shape.width, shape.hidden), (shape.hidden, shape.width))
    gate_up, down = (meta(shape.experts, rows, width // per_item, dtype=stored) for rows, width in sizes)
    scales = [meta(shape.experts, rows, width // 32, dtype=torch.uint8) for rows, width in sizes]
    biases = [meta(shape.experts, rows, dtype=dtype) for rows, _ in sizes]
    workspace = ExpertWorkspace.allocate(shape, tokens, dtype, "meta")
    selection = case.selection(meta(shape.experts, dtype=torch.float32))
    call = ExpertCall(x, logits, gate_up, down, meta(8, dtype=torch.int64), x, workspace, shape.top_k, selection)
    call = replace(call, clamp=case.clamp, biases=(biases[0], biases[1]) if case.biases else None)
    call = replace(call, scales=(scales[0], scales[1]) if shape.mxfp4 else None)
    if shape.fp8:
        matrices = [meta_fp8(weight, shape.fp8 == "blocks") for weight in (gate_up, down)]
        call = replace(call, gate_up=matrices[0].values, down=matrices[1].values, fp8=(matrices[0], matrices[1]))
    return lambda: experts(call, plan_experts(shape, tokens, dtype, "meta", table, name))


def attention_launch(plan: Any, last_tokens: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """64 decode rows, chunks or last tokens, by the variant of a plan."""
    tokens, heads, kv_heads, head_dim = 64, 32, 8, 128
    q, out = meta(tokens, heads, head_dim, dtype=dtype), meta(tokens, heads * head_dim, dtype=dtype)
    cache, ids = meta(1024, kv_heads, 16, head_dim, dtype=dtype), meta(tokens + 1)
    batch, paged = BatchView(meta(8, dtype=torch.int64), *[ids] * 6), PagedKV(cache, cache, meta(SLOTS, 512))
    sizes = split_plan.DecodePlan(64, 1, 64)  # scratch for any plan
    workspace = split_plan.DecodeWorkspace.allocate([(tokens, sizes)], heads, kv_heads, head_dim, "meta")
    call = AttentionCall(q, paged, batch, out, tokens, head_dim**-0.5, 0, workspace, last_tokens=last_tokens)
    return partial(attend, call, plan)


def ring_launch(tokens: int = 8192, rows: int = 64) -> Callable[[], object]:
    """The two kernels that a step has more with window rings, of Gemma 3 27B's layers."""
    rings = WindowRings(meta(SLOTS, 8192), meta(tokens), 1024, 65, 52)
    batch = BatchView(meta(8, dtype=torch.int64), *[meta(tokens + 1)] * 6)
    cache = meta(SLOTS * 65 * 52 + 1024, 16, 16, 128, dtype=torch.bfloat16)

    def launch() -> None:
        place_pages(rings, batch, rows=rows, page_size=16, pdl=True)
        keep_spilled(rings, PagedKV(cache, cache, rings.page_table), batch, rows=rows, pdl=True)

    return launch


def sampling_launch(name: str, rows: int = 64, vocabulary: int = 128256) -> Callable[[], object]:
    logits, batch = meta(rows, vocabulary, dtype=torch.float32), BatchView(meta(8, dtype=torch.int64), *[meta(rows)] * 6)
    records, workspace = meta(rows, LOGPROB_ENTRIES, dtype=torch.int64), SamplingWorkspace.allocate(rows, vocabulary, "meta")
    call = SamplingCall(logits, meta_requests(), meta_grammars(vocabulary), batch, meta(rows), records, workspace)
    return partial(sample_tokens, call, name)


def all_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """(label, launch) of every model and bucket, and of all cases."""
    for name, (config, shapes) in STEPS.items():
        for shape in shapes:
            pdl_too, fp8_too = name == "Llama-3-8B" and shape == ONE, name in FP8_CACHE
            for pdl, fp8_cache in [(False, False), *[(True, False)] * pdl_too, *[(False, True)] * fp8_too]:
                step = meta_step(config, shape, pdl, fp8_cache=fp8_cache)
                notes = f"{' PDL' if pdl else ''}{' invariant' if shape.whole else ''}{' FP8 cache' if fp8_cache else ''}"
                yield f"{name} T={shape.tokens}{notes}", partial(step.launch, shape)
    for fp8, shape in product(("rows", "blocks"), (ONE, MANY, MIXED, INVARIANT[1])):
        yield f"FP8 {fp8} T={shape.tokens}", partial(meta_step(SHAPES["llama-3-8b"], shape, True, fp8).launch, shape)
    yield from case_launches()


def compile_all(seed: int | None = None) -> list[Variant]:
    """Compile every variant of every model and bucket. Kernels already in Triton's cache are only read. seed: of a sample of
    those that differ in sizes alone, which are all compiled otherwise; standard error gets what is left out."""
    gate, launches = Gate(), list(all_launches())
    chosen = None if seed is None else gate.sample(launches, seed)
    knobs.runtime.jit_cache_hook = None if chosen is None else lambda **info: asked_for(info).key not in chosen
    for label, launch in launches:
        gate.run(label, launch)
    return list(gate.variants.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="SEED", help="a sample, with each flag of each kernel")
    variants = compile_all(parser.parse_args().sample)
    for variant in variants:
        print(json.dumps(asdict(variant) | {"problems": variant.problems()}))
    return int(any(variant.problems() for variant in variants))


if __name__ == "__main__":
    raise SystemExit(main())
