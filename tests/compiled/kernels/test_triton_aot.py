"""Every Triton kernel variant compiles for sm_90 within the limits, in a separate process (it replaces Triton's driver).

Each run compiles a fresh sample with each kernel and a quarter of their flags' values; BLINKPY_PROFILE=nightly compiles every
kernel of every published model in every form.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.common.aot_compile import Variant
from benchmarks.common.aot_models import Form, forms_of, published
from benchmarks.common.aot_needs import formula
from benchmarks.common.aot_sample import MOST, AskedFor, choose, drawn_facts
from benchmarks.common.aot_walk import Walk, walk
from blinkpy.device.cuda.cubin import Cubin, CubinError, KernelResources, read_cubin

ENTRIES = ("linear.linear", "attention.attention", "moe.experts", "sampling.sampler")
ROOT = Path(__file__).parents[3]


NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
HOURS = 6 * 3600 if NIGHTLY else 900  # seconds; all are some 7,000 kernels
OTHERS = (
    "embed rms_norm rope_and_cache last_tokens swiglu squared_relu softcap router gate_shared quantise_rows swiglu_rows "
    "write_logprobs place_pages keep_spilled latent_decode latent_prefill head_products rotate_and_cache "
    "convolve recur recur_blocks scan scan_blocks "
    "norm_groups hold copy_states gate_output mix_inputs gate_inputs all_reduce gather_logits "
    "following_tokens choose_rows keep_rows take_drafts take_stream"
)


@pytest.mark.timeout(HOURS + 60)
def test_every_kernel_compiles_within_the_limits(seed: int, left_out: Callable[[str], None]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.common.aot_compile"]
    command += ["--processes", str(os.cpu_count())] if NIGHTLY else ["--sample", str(seed)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HOURS)
    assert done.stdout, done.stderr[-4000:]
    left_out(done.stderr.strip().rpartition("\n")[2])
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    registries = [import_module(f"blinkpy.kernels.{name}").VARIANTS for name in ENTRIES]
    registered = [variant for variants in registries for variant in variants.values()]
    names = {kernel.__name__.lstrip("_") for variant in registered for kernel in variant.kernels}
    problems = {f"{v['kernel']} {v['label']}": v["problems"] for v in variants if v["problems"]}
    assert not problems
    assert {v["kernel"] for v in variants} == names | set(OTHERS.split())
    assert done.returncode == 0


def test_a_sample_has_each_fact_and_draws_others(seed: int, rng: np.random.Generator) -> None:
    def facts(first: int, last: int) -> frozenset[tuple[int]]:
        return frozenset((int(n),) for n in rng.integers(first, last, 3))

    asked = {key: AskedFor(key, facts(0, 40), facts(40, 100)) for key in map(str, range(300))}
    chosen = choose(asked, seed)
    assert frozenset().union(*(asked[key].facts for key in chosen)) == frozenset().union(*(a.facts for a in asked.values()))
    assert len(chosen) == MOST
    assert choose(asked, seed) == chosen != choose(asked, seed + 1)
    flags = {key: AskedFor(key, frozenset({("kernel",), ("kernel", ("FLAG",), key)})) for key in asked}
    drawn = [drawn_facts(flags, seed + run) for run in range(40)]
    assert all(("kernel",) in one.facts and flags[key].facts == one.facts | one.others for of in drawn for key, one in of.items())
    assert all(sum(len(one.facts) == 2 for one in of.values()) in range(40, 110) for of in drawn), "a quarter of the flags"
    assert all(any(len(of[key].facts) == 2 for of in drawn) for key in flags), "consecutive runs do not cover all flags"
    many = {key: AskedFor(key, frozenset({(key,)})) for key in asked}
    assert choose(many, seed) == many.keys(), "a fact is left out"
    assert frozenset().union(*(choose(asked, seed + run) for run in range(40))) == asked.keys(), "consecutive runs do not see all"


class Kernel(NamedTuple):
    """A kernel of the list: only the fields that a walk reads."""

    asked: AskedFor
    function: SimpleNamespace


def test_a_walk_continues_where_it_was_ended(rng: np.random.Generator, tmp_path: Path) -> None:
    """Without time, it compiles nothing. Then a part; after a cut-off line, the rest; then only a kernel whose source changed."""
    alike = rng.integers(3, size=12)
    kernels = [
        Kernel(AskedFor(str(n), frozenset({(int(kind),)})), SimpleNamespace(cache_key="a")) for n, kind in enumerate(alike)
    ]
    journal, compiled = tmp_path / "journal", list[str]()

    def compile_one(kernel: Any) -> Variant:
        compiled.append(kernel.asked.key)
        if len(compiled) == most:
            raise KeyboardInterrupt
        return Variant(f"label {kernel.asked.key}", "linear", 4, stack_frame=1000 if kernel.asked.key == "7" else 0)

    def further(seconds: float = 600) -> Walk:
        return walk(kernels, journal, seconds, compile_one)  # type: ignore[arg-type]

    most = int(rng.integers(2, 12))
    assert further(0.0) == (0, 12, {})
    with pytest.raises(KeyboardInterrupt):
        further()
    whole = journal.read_text()
    journal.write_text(whole[: -int(rng.integers(1, len(whole.splitlines(keepends=True)[-1])))])
    kinds = [int(alike[int(key)]) for key in compiled]
    several = len(set(alike.tolist()))
    assert len(set(kinds[:several])) == len(kinds[:several]), "one kernel of each choice is first"
    before, most = len(compiled), 0
    assert further() == (12, 0, {"linear label 7": ["stack frame of 1000 bytes"]})
    assert len(compiled) - before == 12 - (before - 2), "the interrupted kernel, and the kernel of the cut line"
    assert set(compiled) == {str(n) for n in range(12)}
    compiled.clear()
    kernels[3].function.cache_key = "b"
    assert further() == further()
    assert compiled == ["3"]


def test_a_form_that_is_refused_is_refused_in_words() -> None:
    """A model that joins the list joins the sweep, in each form that describe_config accepts; it refuses only forms with these
    reasons."""
    described = [form for model in published() for form in forms_of(model.hub_id, model.config)]
    refused = [words for words in described if isinstance(words, str)]
    reasons = ["the matrices of all experts", "supported: mxfp4", "does not start at a multiple of 128 rows"]
    reasons += ["inputs are not a multiple of 128", "FP8 block scales permit this only in units of 128 rows"]
    assert all(any(reason in words for reason in reasons) for words in refused), refused
    forms = [form for form in described if isinstance(form, Form)]
    assert {form.hub_id for form in forms} == {model.hub_id for model in published()}
    assert {form.name for form in forms} >= {
        "bfloat16",
        "fp8",
        "fp8_blocks",
        "w4a16",
        "nvfp4",
        "mxfp4",
        "float32",
        "float32 fp8",
        "mtp",
        "eagle3",
    }


def test_a_kernel_that_does_not_compile_is_a_problem() -> None:
    """The old default: a tile of three columns, which reached the compiler unchecked."""
    code = """
from benchmarks.common import aot_cases, aot_compile
from blinkpy.kernels.linear.fp8_gemv import fp8_gemv
from blinkpy.kernels.linear.linear_variants import LinearConfig
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearWorkspace, Scales
import torch
meta = aot_cases.meta
weight, x, out = meta(64, 5120, dtype=aot_cases.FP8), *(meta(1, size, dtype=torch.bfloat16) for size in (5120, 64))
workspace = LinearWorkspace.allocate("meta", torch.bfloat16)
scales = Scales(None, meta(64, dtype=torch.float32))
call = LinearCall(x, weight, out, workspace, meta(8, dtype=torch.int64), scales=scales)
gate = aot_compile.Gate()
gate.record("three columns", lambda: fp8_gemv(call, LinearConfig("fp8_gemv", block_n=3, warps=8)))
print(*(variant.problems() for variant in aot_compile.compile_all(list(gate.recorded.values()))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "does not compile: CompilationError" in done.stdout, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize(
    ("shape", "axis", "warps", "wrong"), [("64", 0, 8, 2), ("32", 0, 1, 0), ("32, 32", 1, 8, 0), ("4, 32", 1, 8, 2)]
)
def test_a_gather_that_several_warps_share_is_a_problem(shape: str, axis: int, warps: int, wrong: int, tmp_path: Path) -> None:
    """On a GPU, and only there, such a kernel ended a loop with an illegal address."""
    (tmp_path / "gathers.py").write_text(f"""
import torch, triton, triton.language as tl
from benchmarks.common import aot_cases, aot_compile

@triton.jit
def gathers(x_ptr, out_ptr):
    place = tl.reshape(tl.arange(0, {np.prod([int(size) for size in shape.split(",")])}), ({shape},))
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, tl.gather(x, (x > 1).to(tl.int32), {axis}))

gate = aot_compile.Gate()
gate.record("a gather", lambda: gathers[(1,)](*[aot_cases.meta(64, dtype=torch.float32)] * 2, num_warps={warps}))
print([variant.narrow_gathers for variant in aot_compile.compile_all(list(gate.recorded.values()))])
""")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "gathers.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"[{wrong}]\n", f"{done.stdout}\n{done.stderr[-4000:]}"
    assert any("too few rows" in problem for problem in Variant("x", "gathers", warps, narrow_gathers=wrong).problems()) == (
        wrong > 0
    )


def test_a_formula_that_errs_is_a_problem() -> None:
    """Every compiled kernel with a formula is compared with the formula."""
    found = Variant("x", "linear", 4, 100, 50_000, 0, formula=(49_000, 90))
    assert not found.problems()
    for shared, registers in ((51_000, 90), (20_000, 90), (49_000, 101)):
        assert any("by formula" in problem for problem in replace(found, formula=(shared, registers)).problems())
    assert not replace(found, formula=(51_000, 90), long=False).problems(), "a short loop fills no pipeline"
    of_split_k = {"N": 64, "K": 4096, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "SWIGLU": False, "SCALES": 0}
    needs = formula("_linear", of_split_k, ["*bf16", "*bf16"], 4, 3)
    assert needs is not None
    assert needs.shared == 3 * (64 + 64) * 128 * 2 + 1024
    assert formula("_embed", {}, ["*i32", "*bf16"], 4, 3) is None
    # One row of Llama-3.1-8B's gate and up, by the table of an H200: the compiler takes 128 registers.
    of_row = {"N": 14336, "K": 4096, "BLOCK_N": 4, "BLOCK_K": 4096, "SWIGLU": True, "SCALES": 1}
    needs = formula("_fp8_gemv", of_row, ["*bf16", "*fp8e4nv"], 4, 3)
    assert needs is not None
    assert 100 <= needs.registers(4) <= 128


def test_the_gate_rejects_an_oversized_tile() -> None:
    """The gate itself reports a tile that needs more shared memory than a block may have."""
    code = """
import sys
sys.path[:0] = [{root!r}]
import torch
from benchmarks.common import aot_compile as aot
from benchmarks.common.aot_cases import meta
from blinkpy.kernels.linear.split_k import split_k_linear
from blinkpy.kernels.linear.linear_variants import LinearConfig
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearWorkspace
gate = aot.Gate()
x = meta(64, 4096, dtype=torch.bfloat16)
config = LinearConfig(block_m=64, block_n=256, block_k=128, stages=5, warps=8)
workspace = LinearWorkspace.allocate("meta", torch.bfloat16)
call = LinearCall(x, meta(4096, 4096, dtype=torch.bfloat16), x, workspace, meta(8, dtype=torch.int64))
gate.run("large", lambda: split_k_linear(call, config))
print(*(variant.problems() for variant in gate.variants.values()))
"""
    filled = code.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, timeout=120)
    assert "shared memory" in done.stdout, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_damaged_cubin(data: bytes) -> None:
    with pytest.raises(CubinError):
        read_cubin(data)


def test_unresolved_symbols() -> None:
    cubin = Cubin(("cudaGraphLaunch", "__cuda_syscall_x", "my_function"), {"kernel": KernelResources(32, 0, 0, 0)})
    assert cubin.unresolved == ("my_function",)
