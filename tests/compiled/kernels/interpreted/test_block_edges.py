"""Each kernel with sizes on both sides of each of its block constants: one size in each run, all nightly."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.kernel_cases.block_edges import BLOCKS, ELSEWHERE, PRODUCTS, Block, product_edges, run_product, spilled

import blinkpy.kernels

NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
PRODUCT_CASES = 6  # of a run


def constants() -> Iterator[tuple[str, str]]:
    """(Kernel, block constant) pairs from the signatures of all kernels, which are GPU functions that no other function calls."""
    sources = [path.read_text(encoding="utf-8") for path in Path(blinkpy.kernels.__path__[0]).rglob("*.py")]
    called = set(re.findall(r"(?<!def )\b(\w+)\(", "".join(sources)))
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name not in called:
                for argument in node.args.args:
                    if "constexpr" in ast.dump(argument) and ("BLOCK" in argument.arg or argument.arg == "HEADS"):
                        yield node.name, argument.arg


def test_each_constant_of_a_signature_has_sizes() -> None:
    found = {(kernel, constant) for kernel, constant in constants() if kernel not in PRODUCTS}
    assert found == {(block.kernel, block.constant) for block in BLOCKS} | ELSEWHERE
    assert PRODUCTS <= {kernel for kernel, _ in constants()}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.kernel} {block.constant} {block.axis}")
def test_sizes_around_a_block(rng: np.random.Generator, either_dtype: torch.dtype, block: Block) -> None:
    sizes = block.sizes(rng, either_dtype)
    assert len(sizes) >= 2
    for size in sizes if NIGHTLY else [int(rng.choice(sizes))]:
        print(size)
        block.run(rng, either_dtype, size)


def test_spilled_pages_of_all_sizes(rng: np.random.Generator) -> None:
    """All sizes in each run, because they are cheap."""
    for size in next(block for block in BLOCKS if block.run is spilled).sizes(rng, torch.float32):
        spilled(rng, torch.float32, size)


def cases() -> list[tuple[str, Any]]:
    every = product_edges()
    chosen = np.random.default_rng(int(os.environ["BLINKPY_SEED"])).permutation(len(every))
    return [every[at] for at in (chosen if NIGHTLY else chosen[:PRODUCT_CASES])]


@pytest.mark.parametrize(("name", "case"), cases(), ids=lambda value: value if isinstance(value, str) else "")
def test_products_around_their_blocks(rng: np.random.Generator, either_dtype: torch.dtype, name: str, case: Any) -> None:
    run_product(rng, either_dtype, name, case)
