"""Tables of measured configurations: round trip, lookup, defaults that fit the GPU, and damaged files."""

import json
import runpy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from blinkpy.config import ConfigError
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT
from blinkpy.kernels.config_files import FOLDER
from blinkpy.kernels.linear.linear import VARIANTS, check_config
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import InvariantLinearTable, LinearTable, default_config, key
from blinkpy.kernels.linear.linear_variants import LinearShape
from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertShape, ExpertTable, ExpertTile, default_expert_config
from blinkpy.models.families.describe_model import describe_config
from blinkpy.models.weights.weight_parts import layer_parts, outer_parts

ROOT = Path(__file__).parents[3]
MODELS: list[Any] = list(runpy.run_path(str(ROOT / "tools" / "published_models.py"))["MODELS"])
GPU = "NVIDIA H200"
SHAPE = ExpertShape(experts=128, top_k=8, hidden=2048, width=768)
GOOD = {"block_m": 16, "up": {"block_n": 32, "block_k": 128}, "down": {"block_n": 32, "block_k": 128}}
BF16 = torch.bfloat16


def test_round_trip_and_lookup_of_linear_configs(tmp_path: Path) -> None:
    measured = LinearConfig(block_n=64, split_k=2, weights_first=True, early_trigger=True)
    table = LinearTable({key(4096, 1024, 16, BF16, False): measured})
    table.save(GPU, {"torch": "x"}, tmp_path)
    written = json.loads((tmp_path / "nvidia_h200.json").read_text())["linear"]["n4096 k1024 m16 bfloat16"]
    assert (written["kind"], written["swap"], written["early"]) == ("triton", True, True)  # users' files have these names
    again = LinearTable.load(GPU, tmp_path)
    assert again.entries == table.entries
    assert again.config(4096, 1024, 9, BF16) == measured  # the next larger row count
    assert again.config(4096, 1024, 17, BF16) == default_config(4096, 1024, 17, BF16)
    assert again.config(4096, 1024, 9, BF16, swiglu=True) != measured
    assert again.config(4096, 1024, 4096, BF16).variant == "cublas"


def test_round_trip_and_lookup_of_expert_configs(tmp_path: Path) -> None:
    few, many = (ExpertConfig(m, ExpertTile(32, 128, stages=3), ExpertTile(64, 64, warps=8)) for m in (16, 64))
    table = ExpertTable({SHAPE.key(BF16): {16: few, 256: many}})
    table.save(GPU, {"torch": "x"}, tmp_path)
    again = ExpertTable.load(GPU, tmp_path)
    assert again.entries == table.entries
    for tokens, expected in ((8, few), (16, few), (17, many), (256, many), (8192, many)):
        assert again.config(SHAPE, tokens, BF16) == expected
    assert again.config(SHAPE, 16, torch.float32) == default_expert_config(SHAPE, 16, torch.float32)
    other = replace(SHAPE, experts=64)
    assert again.config(other, 16, BF16) == default_expert_config(other, 16, BF16)


@pytest.mark.parametrize("table", [LinearTable, ExpertTable])
def test_an_unknown_gpu_has_no_entries(tmp_path: Path, table: Any) -> None:
    assert table.load("Some Other GPU", tmp_path).entries == {}


@pytest.mark.parametrize(
    "document",
    [
        "{",
        [],
        {"version": 2, "linear": {}, "experts": {}},
        *({"version": 1, "linear": {"x": damaged}} for damaged in ({"block_m": 17}, {"tile": 16}, {"kind": "none"})),
        {"version": 1, "linear": {"x": {"kind": "tma", "block_n": 24}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"block_m": 24}}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"up": {"block_n": 8, "block_k": 64}}}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"down": {"block_n": 32, "block_k": 64, "stages": 0}}}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"down": {"tile": 32}}}}},
        {"version": 1, "experts": {"x": {"many": GOOD}}},
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, document: Any) -> None:
    text, known = document if document == "{" else json.dumps(document), document if isinstance(document, dict) else {}
    for table, kind, file in ((LinearTable, "linear", "nvidia_h200.json"), (ExpertTable, "experts", "nvidia_h200_experts.json")):
        (tmp_path / file).write_text(text)
        if kind in known or not known:
            with pytest.raises(ConfigError, match=rf"{file}|linear configuration|configuration of experts"):
                table.load(GPU, tmp_path)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 2048])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_defaults_of_linear_layers_are_valid(rows: int, dtype: torch.dtype) -> None:
    for n, k in ((32, 32), (6144, 4096), (4096, 14336), (151_936, 2048)):
        for swiglu in (False, True):
            config = default_config(n, k, rows, dtype, swiglu=swiglu)
            check_config(config)
            assert (config.variant == "gemv") == (rows == 1)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 65])
def test_defaults_of_fp8_layers_are_valid(rows: int, blocks: bool) -> None:
    for n, k in ((48, 32), (6144, 4096), (4096, 14336), (8192, 28672), (96, 100)):
        for swiglu in (False, True):
            config = default_config(n, k, rows, torch.float8_e4m3fn, swiglu=swiglu, blocks=blocks)
            check_config(config)
            shape = LinearShape(rows, n, k, swiglu=swiglu, dtype=torch.float8_e4m3fn, blocks=blocks)
            assert VARIANTS[config.variant].supports(shape)
            assert (config.variant == "fp8_gemv") == (rows == 1 and k % 8 == 0)


def published_matrices() -> Iterator[tuple[bool, int, int]]:
    """(whether it is gate and up, outputs, inputs) of every matrix of a published model, once."""
    found = set[tuple[bool, int, int]]()
    for published in MODELS:
        if published.refusal:
            continue
        model = describe_config(published.config)
        layers = {block: index for index, block in enumerate(model.layers)}.values()
        for part in [*outer_parts(model), *(part for layer in layers for part in layer_parts(model, layer))]:
            if len(part.shape) == 2 and not part.packed:
                swiglu = part.field.endswith("gate_up")
                found.add((swiglu, part.shape[0] // (2 if swiglu else 1), part.shape[1]))
    yield from sorted(found)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn])
def test_defaults_of_published_widths_are_valid(dtype: torch.dtype, blocks: bool) -> None:
    """Of any number of rows, and of a batch-invariant decoder. 13 models of 25 did not start in FP8 when this was not seen."""
    matrices = list(published_matrices())
    assert {k for _, _, k in matrices} >= {2560, 3072, 5120, 28_672}
    for (swiglu, n, k), rows in product(matrices, (1, 2, 4, 16, 17, 64, 65, 70, 256, 2048, 8192)):
        for table in (LinearTable(), InvariantLinearTable()):
            config = table.config(n, k, rows, dtype, swiglu=swiglu, blocks=blocks)
            check_config(config)
            shape = LinearShape(rows, n, k, swiglu=swiglu, dtype=dtype, blocks=blocks)
            assert VARIANTS[config.variant].supports(shape), (shape, config)
            assert not blocks or dtype != torch.float8_e4m3fn or config.variant == "fp8_gemv" or config.block_k <= 128


def test_shipped_tables_load() -> None:
    for path in FOLDER.glob("*.json"):
        assert LinearTable.load(json.loads(path.read_text())["gpu"]).entries, path


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_defaults_and_shipped_tables_of_experts_fit(dtype: torch.dtype) -> None:
    """Tiles in shared memory, by the operands' sizes: what the compiler needs besides is in the list of compiled kernels."""
    shipped = ExpertTable.load(GPU)
    assert shipped.entries
    found = [default_expert_config(SHAPE, tokens, dtype) for tokens in (8, 64, 256, 1000, 8192)]
    for config in [*found, *(config for buckets in shipped.entries.values() for config in buckets.values())]:
        for tile, rows in ((config.up, 2 * config.up.block_n), (config.down, config.down.block_n)):
            assert tile.stages * (config.block_m + rows) * tile.block_k * 2 <= SHARED_MEMORY_LIMIT[90]
