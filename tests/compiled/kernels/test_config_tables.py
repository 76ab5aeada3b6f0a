"""Tables of measured configurations: round trip, lookup, defaults that fit the GPU, and damaged files."""

import json
import re
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
from blinkpy.kernels.linear.linear import check_config
from blinkpy.kernels.linear.linear_table import InvariantLinearTable, LinearTable, default_config, key
from blinkpy.kernels.linear.linear_variants import LinearConfig, LinearShape
from blinkpy.kernels.moe.expert_variants import ExpertConfig, ExpertShape, ExpertTable, ExpertTile, default_expert_config
from blinkpy.models.families.family import describe_config
from blinkpy.models.weights.parts.weight_parts import layer_parts, outer_parts

ROOT = Path(__file__).parents[3]
MODELS: list[Any] = list(runpy.run_path(str(ROOT / "tools" / "published_models.py"))["MODELS"])
GPU = "NVIDIA H200"
SHAPE = ExpertShape(experts=128, top_k=8, hidden=2048, width=768)
GOOD = {"block_m": 16, "up": {"block_n": 32, "block_k": 128}, "down": {"block_n": 32, "block_k": 128}}
BF16 = torch.bfloat16


def test_round_trip_and_lookup_of_linear_configs(tmp_path: Path) -> None:
    measured = LinearConfig(block_n=64, split_k=2, weights_first=True, early_trigger=True)
    table = LinearTable({key(LinearShape(16, 4096, 1024)): measured})
    table.save(GPU, {"torch": "x"}, tmp_path)
    written = json.loads((tmp_path / "nvidia_h200.json").read_text())["linear"]["n4096 k1024 m16 bfloat16"]
    assert (written["kind"], written["swap"], written["early"]) == ("triton", True, True)  # users' files have these names
    again = LinearTable.load(GPU, tmp_path)
    assert again.entries == table.entries
    shape = LinearShape(9, 4096, 1024)
    assert again.config(shape) == measured  # the next larger row count
    assert again.config(shape._replace(rows=17)) == default_config(shape._replace(rows=17))
    assert again.config(shape._replace(swiglu=True)) != measured
    assert again.config(shape._replace(rows=4096)).variant == "cublas"


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


@pytest.mark.parametrize("document", ["{", "[]", '{"version": 2, "linear": {}, "experts": {}}', '{"version": 1}'])
@pytest.mark.parametrize("table", [LinearTable, ExpertTable])
def test_damaged_files_are_refused(tmp_path: Path, table: Any, document: str) -> None:
    table.path(GPU, tmp_path).write_text(document)
    with pytest.raises(ConfigError, match="not a valid table of configurations"):
        table.load(GPU, tmp_path)


ONE, MANY, BLOCKS = "n4096 k4096 m1 bfloat16", "n4096 k4096 m64 bfloat16", "n4096 k4096 m64 float8_e4m3fn blocks"
QWEN = "e128 top8 h2048 w768 bfloat16"


@pytest.mark.parametrize(
    ("table", "name", "entry", "words"),
    [
        (LinearTable, "x", {}, "not the name of a shape"),
        (LinearTable, "n4096 k4096 m0 bfloat16", {}, "not the name of a shape"),
        (LinearTable, MANY, {"block_m": 17}, "block_m 17 must be a power of two"),
        (LinearTable, MANY, {"block_m": 16.0}, "block_m 16.0 must be an integer"),
        (LinearTable, MANY, {"stages": 0}, "stages 0 must be an integer from 1"),
        (LinearTable, MANY, {"tile": 16}, "unknown field 'tile'"),
        (LinearTable, MANY, [], "no attribute"),
        (LinearTable, MANY, {"kind": "none"}, "unknown variant 'none'"),
        (LinearTable, MANY, {"kind": "gemv"}, "variant 'gemv' does not support"),
        (LinearTable, MANY, {"kind": "tma", "block_n": 24}, "block_n 24 must be a sum"),
        (LinearTable, BLOCKS, {"block_k": 256}, "block_k 256 exceeds 128"),
        (LinearTable, MANY, {"block_m": 64, "block_n": 256, "block_k": 128, "stages": 5}, "bytes of shared memory"),
        (LinearTable, ONE, {"kind": "gemv", "block_n": 64, "block_k": 4096, "warps": 4}, "registers per thread"),
        (ExpertTable, "x", {"16": GOOD}, "not the name of a shape"),
        (ExpertTable, QWEN, {"16": GOOD | {"block_m": 24}}, "block_m 24 must be a power of two"),
        (ExpertTable, QWEN, {"16": GOOD | {"up": {"block_n": 8, "block_k": 64}}}, "up.block_n 8"),
        (ExpertTable, QWEN, {"16": GOOD | {"down": {"block_n": 32, "block_k": 64, "stages": 0}}}, "down.stages 0"),
        (ExpertTable, QWEN, {"16": GOOD | {"down": {"tile": 32}}}, "tile"),
        (ExpertTable, QWEN, {"many": GOOD}, "many"),
    ],
)
def test_an_entry_that_does_not_pass_its_check_is_named(tmp_path: Path, table: Any, name: str, entry: Any, words: str) -> None:
    path = table.path(GPU, tmp_path)
    good = {"linear": {MANY: {"kind": "cublas"}}, "experts": {QWEN: {"16": GOOD}}}[table.section]
    path.write_text(json.dumps({"version": 1, table.section: good}))
    assert table.load(GPU, tmp_path).entries
    path.write_text(json.dumps({"version": 1, table.section: good | {name: entry}}))
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        table.load(GPU, tmp_path)
    assert f"{path}: entry {name!r} of {table.section!r}" in str(refused.value)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 2048])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_defaults_of_linear_layers_are_valid(rows: int, dtype: torch.dtype) -> None:
    for n, k in ((32, 32), (6144, 4096), (4096, 14336), (151_936, 2048)):
        for swiglu in (False, True):
            config = default_config(LinearShape(rows, n, k, swiglu=swiglu, dtype=dtype))
            assert (config.variant == "gemv") == (rows == 1)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 65])
def test_defaults_of_fp8_layers_are_valid(rows: int, blocks: bool) -> None:
    for n, k in ((48, 32), (6144, 4096), (4096, 14336), (8192, 28672), (96, 100)):
        for swiglu in (False, True):
            config = default_config(LinearShape(rows, n, k, swiglu=swiglu, dtype=torch.float8_e4m3fn, blocks=blocks))
            assert (config.variant == "fp8_gemv") == (rows == 1 and k % 8 == 0)


def published_matrices() -> Iterator[tuple[bool, int, int]]:
    """(Whether a matrix is gate and up, outputs, inputs) of every different matrix of the published models."""
    found = set[tuple[bool, int, int]]()
    for published in MODELS:
        if published.refusal:
            continue
        model = describe_config(published.config)
        layers = {block: index for index, block in enumerate(model.layers)}.values()
        for part in [*outer_parts(model), *(part for layer in layers for part in layer_parts(model, layer))]:
            if len(part.shape) == 2 and not part.packed:
                swiglu = part.field.endswith("gate_up") and model.gated
                found.add((swiglu, part.shape[0] // (2 if swiglu else 1), part.shape[1]))
    yield from sorted(found)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn])
def test_defaults_of_published_widths_are_valid(dtype: torch.dtype, blocks: bool) -> None:
    """For any number of rows, and for a batch-invariant decoder. Without this check, 13 of 25 models did not start in FP8."""
    matrices = list(published_matrices())
    assert {k for _, _, k in matrices} >= {2560, 3072, 5120, 28_672}
    for (swiglu, n, k), rows in product(matrices, (1, 2, 4, 16, 17, 64, 65, 70, 256, 2048, 8192)):
        for table in (LinearTable(), InvariantLinearTable()):
            shape = LinearShape(rows, n, k, swiglu=swiglu, dtype=dtype, blocks=blocks)
            config = table.config(shape)
            check_config(config, shape)
            assert not blocks or dtype != torch.float8_e4m3fn or config.variant == "fp8_gemv" or config.block_k <= 128


def test_shipped_tables_load() -> None:
    for path in FOLDER.glob("*.json"):
        assert LinearTable.load(json.loads(path.read_text())["gpu"]).entries, path


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_defaults_and_shipped_tables_of_experts_fit(dtype: torch.dtype) -> None:
    """Tiles in shared memory, by the operands' sizes; the list of compiled kernels has the compiler's further needs."""
    shipped = ExpertTable.load(GPU)
    assert shipped.entries
    found = [default_expert_config(SHAPE, tokens, dtype) for tokens in (8, 64, 256, 1000, 8192)]
    for config in [*found, *(config for buckets in shipped.entries.values() for config in buckets.values())]:
        for tile, rows in ((config.up, 2 * config.up.block_n), (config.down, config.down.block_n)):
            assert tile.stages * (config.block_m + rows) * tile.block_k * 2 <= SHARED_MEMORY_LIMIT[90]
