"""Whole steps on the GPU, launched and as captured graphs, against the CPU engine's step: every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver, runtime
from support.models import model_zoo, step_cases

from blinkpy.device.cuda.cuda_calls import check_cuda
from blinkpy.device.cuda.cuda_graphs import chain_of


@pytest.mark.parametrize("name", list(model_zoo.ZOO))
def test_float32(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    error = step_cases.step_case(rng, "cuda", name, tmp_path, torch.float32, steps=8)
    assert error < 1e-4


@pytest.mark.parametrize("name", ["llama3", "qwen3", "phi4-mini-long"])
def test_bfloat16_from_graphs(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    error = step_cases.step_case(rng, "cuda", name, tmp_path, torch.bfloat16, steps=8, graphs=True)
    assert error < 3e-2


@pytest.mark.parametrize("name", ["llama3", "llama-biased-mqa"])
def test_the_kernel_for_many_rows(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    error = step_cases.step_case(rng, "cuda", name, tmp_path, torch.bfloat16, steps=8, graphs=True, table=step_cases.TMA_TABLE)
    assert error < 3e-2


@pytest.mark.parametrize("name", ["llama-biased-mqa", "qwen3-moe-mixed", "mixtral"])
def test_sums_in_parts(rng: np.random.Generator, name: str, tmp_path: Path) -> None:
    """The norms add up what split sums left."""
    error = step_cases.step_case(rng, "cuda", name, tmp_path, torch.float32, steps=8, table=step_cases.SPLIT_TABLE)
    assert error < 1e-4


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe-mixed"])
def test_a_capture_knows_where_the_layers_end(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    """Behind them: the last norm, then the product with the vocabulary's matrix, beside which `overlap` runs; then sampling."""
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
