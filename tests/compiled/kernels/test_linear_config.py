"""Tables of linear configurations: round trip, defaults, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import FOLDER
from blinkpy.kernels.linear.linear import check_config
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import LinearTable, default_config, key


def test_round_trip_and_lookup(tmp_path: Path) -> None:
    measured = LinearConfig(block_n=64, split_k=2, weights_first=True, early_trigger=True)
    table = LinearTable({key(4096, 1024, 16, torch.bfloat16, False): measured})
    table.save("NVIDIA H200", {"torch": "x"}, tmp_path)
    written = json.loads((tmp_path / "nvidia_h200.json").read_text())["linear"]["n4096 k1024 m16 bfloat16"]
    assert (written["kind"], written["swap"], written["early"]) == ("triton", True, True)  # users' files have these names
    again = LinearTable.load("NVIDIA H200", tmp_path)
    assert again.entries == table.entries
    assert again.config(4096, 1024, 9, torch.bfloat16) == measured  # the next larger row count
    assert again.config(4096, 1024, 17, torch.bfloat16) == default_config(4096, 1024, 17, torch.bfloat16)
    assert again.config(4096, 1024, 9, torch.bfloat16, swiglu=True) != measured
    assert again.config(4096, 1024, 4096, torch.bfloat16).variant == "cublas"


def test_unknown_gpu_has_no_entries(tmp_path: Path) -> None:
    assert LinearTable.load("Some Other GPU", tmp_path).entries == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"version": 2, "linear": {}}),
        json.dumps({"version": 1, "linear": {"x": {"block_m": 17}}}),
        json.dumps({"version": 1, "linear": {"x": {"tile": 16}}}),
        json.dumps({"version": 1, "linear": {"x": {"kind": "none"}}}),
        json.dumps({"version": 1, "linear": {"x": {"kind": "tma", "block_n": 24}}}),
    ],
)
def test_damaged_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "nvidia_h200.json").write_text(text)
    with pytest.raises(ConfigError, match=r"nvidia_h200\.json|linear configuration"):
        LinearTable.load("NVIDIA H200", tmp_path)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_defaults_are_valid(rows: int, dtype: torch.dtype) -> None:
    for n, k in ((32, 32), (6144, 4096), (4096, 14336), (151_936, 2048)):
        for swiglu in (False, True):
            config = default_config(n, k, rows, dtype, swiglu=swiglu)
            check_config(config)
            assert (config.variant == "gemv") == (rows == 1)


def test_shipped_tables_load() -> None:
    for path in FOLDER.glob("*.json"):
        table = LinearTable.load(json.loads(path.read_text())["gpu"])
        assert table.entries, path
