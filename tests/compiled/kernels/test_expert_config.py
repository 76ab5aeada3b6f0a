"""Tables of expert configurations: round trip, lookup, defaults that fit the GPU, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blinkpy.config import ConfigError
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT
from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertShape, ExpertTable, ExpertTile, default_expert_config

SHAPE = ExpertShape(experts=128, top_k=8, hidden=2048, width=768)
GOOD = {"block_m": 16, "up": {"block_n": 32, "block_k": 128}, "down": {"block_n": 32, "block_k": 128}}


def test_round_trip_and_lookup(tmp_path: Path) -> None:
    few, many = (ExpertConfig(m, ExpertTile(32, 128, stages=3), ExpertTile(64, 64, warps=8)) for m in (16, 64))
    table = ExpertTable({SHAPE.key(torch.bfloat16): {16: few, 256: many}})
    table.save("NVIDIA H200", {"torch": "x"}, tmp_path)
    again = ExpertTable.load("NVIDIA H200", tmp_path)
    assert again.entries == table.entries
    for tokens, expected in ((8, few), (16, few), (17, many), (256, many), (8192, many)):
        assert again.config(SHAPE, tokens, torch.bfloat16) == expected
    assert again.config(SHAPE, 16, torch.float32) == default_expert_config(SHAPE, 16, torch.float32)
    other = ExpertShape(experts=64, top_k=8, hidden=2048, width=768)
    assert again.config(other, 16, torch.bfloat16) == default_expert_config(other, 16, torch.bfloat16)
    assert ExpertTable.load("Some Other GPU", tmp_path).entries == {}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"version": 2, "experts": {}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"block_m": 24}}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"up": {"block_n": 8, "block_k": 64}}}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"down": {"block_n": 32, "block_k": 64, "stages": 0}}}}},
        {"version": 1, "experts": {"x": {"16": GOOD | {"down": {"tile": 32}}}}},
        {"version": 1, "experts": {"x": {"many": GOOD}}},
    ],
)
def test_damaged_table(tmp_path: Path, document: object) -> None:
    (tmp_path / "nvidia_h200_experts.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"nvidia_h200_experts\.json|configuration of experts"):
        ExpertTable.load("NVIDIA H200", tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_defaults_and_shipped_tables_fit(dtype: torch.dtype) -> None:
    """Tiles in shared memory, by the operands' sizes: what the compiler needs besides is in the list of compiled kernels."""
    shipped = ExpertTable.load("NVIDIA H200")
    assert shipped.entries
    found = [default_expert_config(SHAPE, tokens, dtype) for tokens in (8, 64, 256, 1000, 8192)]
    for config in [*found, *(config for buckets in shipped.entries.values() for config in buckets.values())]:
        for tile, rows in ((config.up, 2 * config.up.block_n), (config.down, config.down.block_n)):
            assert tile.stages * (config.block_m + rows) * tile.block_k * 2 <= SHARED_MEMORY_LIMIT[90]
