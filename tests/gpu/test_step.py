"""Whole steps on the GPU, launched and as captured graphs, against the CPU engine's step: every family of models."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver, runtime
from support.models import fp8_reference, model_zoo, step_cases
from support.models.packed_checkpoints import packed_weights
from support.models.redrawn_cases import redrawn_at_ties

from blinkpy.device.cuda import check_cuda
from blinkpy.device.cuda.cuda_graphs import chain_of

GRAPHS, WIDE, FP8_CACHE = {"graphs": True}, {"graphs": True, "table": step_cases.TMA_TABLE}, {"fp8_cache": True}
STEPS = [
    *((name, torch.float32, {}) for name in model_zoo.ZOO),
    *((name, torch.bfloat16, GRAPHS) for name in ("llama3", "qwen3", "phi4-mini-long")),
    *((name, torch.bfloat16, WIDE) for name in ("llama3", "llama-biased-mqa")),  # the kernel for many rows
    # The norms add up the parts of split sums.
    *(
        (name, torch.float32, {"table": step_cases.SPLIT_TABLE})
        for name in ("llama-biased-mqa", "qwen3-moe-mixed", "mixtral", "gemma4-moe")
    ),
    *((name, torch.bfloat16, WIDE) for name in ("gemma2", "gemma4", "gemma4-e", "olmo3")),
    *((name, torch.float32, {"table": step_cases.SPLIT_TABLE}) for name in ("gemma3", "olmo2")),
    *(
        (name, torch.bfloat16, FP8_CACHE | GRAPHS)
        for name in ("llama3", "qwen3", "gemma2", "gemma4-nested", "gemma4-e", "olmo2", "gpt-oss", "phi3")
    ),
    *((name, torch.float32, FP8_CACHE) for name in ("llama-biased-mqa", "mistral-window", "glm4-moe", "qwen3-moe", "llama4")),
]


@pytest.mark.parametrize(("name", "dtype", "options"), STEPS)
@redrawn_at_ties
def test_steps(rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    error = step_cases.step_case(rng, "cuda", name, tmp_path, dtype, steps=8, **options)
    exact, fp8 = dtype == torch.float32, "fp8_cache" in options  # rounding to FP8 may enlarge a last bit
    assert error < ((3e-2 if exact else 0.15) if fp8 else 1e-4 if exact else 3e-2)


RECURRENT = ("Qwen3Next", "Qwen3_5")  # their states can't return to before a wrong draft
DRAFTED_STEPS = [
    *((name, torch.float32, {}) for name, (kind, _) in model_zoo.ZOO.items() if not kind.startswith(RECURRENT)),
    *((name, torch.float32, GRAPHS) for name in ("gpt-oss", "gemma4-moe", "deepseek-v3")),
    *((name, torch.bfloat16, GRAPHS) for name in ("llama3", "qwen3", "gemma4")),  # without experts, whose choice may differ
    *((name, torch.bfloat16, FP8_CACHE | GRAPHS) for name in ("llama3", "gemma2")),
    *((name, torch.float32, {"invariant": True}) for name in ("llama3", "qwen3-moe", "deepseek-v3")),
]


@pytest.mark.parametrize(("name", "dtype", "options"), DRAFTED_STEPS)
@redrawn_at_ties
def test_drafts(rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Rows of one request read the keys of the rows before them."""
    error = step_cases.step_case(rng, "cuda", name, tmp_path, dtype, steps=16, drafts=True, **options)
    exact, fp8 = dtype == torch.float32, "fp8_cache" in options
    assert error < ((3e-2 if exact else 0.15) if fp8 else 1e-4 if exact else 3e-2)


FP8_STEPS = [
    ("llama-biased-mqa", torch.float32, {}, {}),
    ("llama-biased-mqa", torch.float32, {"blocks": True, "kept": ("gate_up",)}, {"table": step_cases.SPLIT_TABLE}),
    ("qwen3", torch.float32, {"static": True}, {"invariant": True}),
    ("llama3", torch.bfloat16, {}, GRAPHS),
    ("gemma2", torch.bfloat16, {"kept": ("down",)}, GRAPHS),
    ("gemma4", torch.bfloat16, {}, GRAPHS),
]


@pytest.mark.parametrize(("name", "dtype", "quantised", "options"), FP8_STEPS)
@redrawn_at_ties
def test_fp8_steps(
    rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype, quantised: dict[str, Any], options: dict[str, Any]
) -> None:
    quantise = partial(fp8_reference.fp8_weights, **quantised)
    error = step_cases.step_case(rng, "cuda", name, tmp_path, dtype, steps=8, quantise=quantise, **options)
    assert error < (0.1 if dtype == torch.float32 else 0.15)


PACKED_STEPS: list[tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = [
    ("llama-biased-mqa", torch.float32, {}, {}),
    ("qwen3", torch.float32, {"zeros": True, "kept": ("down",)}, {"table": step_cases.PACKED_TABLE}),
    ("llama-biased-mqa", torch.float32, {"group": 0}, {"invariant": True}),
    ("qwen3", torch.float32, {"ordered": True}, {}),
    ("gemma3", torch.float32, {"fp4": True}, {"table": step_cases.PACKED_TABLE}),
    ("qwen3-moe-mixed", torch.float32, {"zeros": True}, {}),
    ("glm4-moe", torch.float32, {"fp4": True}, {"invariant": True}),
    ("qwen3.5", torch.float32, {}, {}),
    ("llama3", torch.bfloat16, {}, GRAPHS),
    ("qwen3", torch.bfloat16, {"fp4": True}, GRAPHS),
    ("gemma2", torch.bfloat16, {"zeros": True, "kept": ("down",)}, GRAPHS),
]


@pytest.mark.parametrize(("name", "dtype", "packed", "options"), PACKED_STEPS)
@redrawn_at_ties
def test_packed_steps(
    rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype, packed: dict[str, Any], options: dict[str, Any]
) -> None:
    """The CPU's unpacked weights are rounded to bfloat16; the GPU's are exact."""
    quantise = partial(packed_weights, **packed)
    error = step_cases.step_case(rng, "cuda", name, tmp_path, dtype, steps=8, quantise=quantise, **options)
    assert error < (1e-3 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["qwen3-next", "qwen3.5", "lfm2", "granite4-h", "nemotron-h", "nemotron-h-mixed", "bamba", "falcon-h1"]
)
def test_a_step_from_a_snapshot(
    rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype, graphs: bool
) -> None:  # fmt: skip
    error = step_cases.snapshot_case(rng, "cuda", name, tmp_path, dtype, graphs=graphs)
    assert error < (1e-3 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe-mixed"])
def test_a_capture_knows_where_the_layers_end(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    """The layers are followed by the last norm, then by the product with the vocabulary's matrix, in parallel with `overlap`,
    then by sampling."""
    step = step_cases.on_device(rng, "cuda", name, tmp_path, torch.bfloat16).step
    for shape, captured in zip(step.shapes, step.capture(torch.cuda.Stream()), strict=True):
        names = [kernel_name(node) for node in chain_of(runtime.cudaGraph_t(captured.graph.raw_cuda_graph()))]
        assert names[captured.layers] == "_rms_norm", shape.name
        assert names[-3:] == ["_adjust", "_sample_tokens", "_write_logprobs"], shape.name
        assert len(names) >= captured.layers + 5, shape.name
        assert not any("norm" in name for name in names[captured.layers + 1 :]), shape.name


def kernel_name(node: Any) -> str:
    """The name of a node's kernel; "" for nodes of other kinds."""
    if check_cuda(runtime.cudaGraphNodeGetType(node)) != runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel:
        return ""
    parameters = check_cuda(driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(int(node))))
    kernel, function = parameters.kern, parameters.func
    return check_cuda(driver.cuKernelGetName(kernel) if int(kernel) else driver.cuFuncGetName(function)).decode()


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("gemma3", torch.float32, {}),
        ("gemma4-moe", torch.bfloat16, GRAPHS),
        ("gemma2-uncapped", torch.bfloat16, GRAPHS),
        ("gpt-oss", torch.bfloat16, GRAPHS),
        ("llama4", torch.bfloat16, GRAPHS),
        ("mistral-window", torch.bfloat16, GRAPHS),
        ("gpt-oss", torch.bfloat16, {"invariant": True, **GRAPHS}),
        ("gemma3", torch.bfloat16, FP8_CACHE | GRAPHS),
    ],
)
def test_window_rings(rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Decodes, chunks longer than a ring, preemptions and reused slots give the same bits as with all tokens kept."""
    step_cases.ring_case(rng, "cuda", name, tmp_path, dtype, step_cases.many_ring_steps, **options)
