"""Refusals of an engine on a GPU at its start: one clear line, exit code 2, nothing loaded and nothing left behind.

The GPU is synthetic: the driver's answers are replaced, so these tests run on any machine.
"""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
runtime = pytest.importorskip("cuda.bindings").runtime
pytest.importorskip("numba_cuda")

from support.models.model_zoo import save_model  # noqa: E402

from benchmarks.common.model_shapes import SHAPES  # noqa: E402
from blinkpy import cli  # noqa: E402
from blinkpy.config import Config, ConfigError  # noqa: E402
from blinkpy.engine.devices import cuda_device  # noqa: E402
from blinkpy.engine.engine import make_engine  # noqa: E402
from blinkpy.engine.link import pair_placement  # noqa: E402
from blinkpy.kv.state import BATCH_COUNTS, ROWS, TOKENS  # noqa: E402
from blinkpy.models.gpu.gpu_step import require_fit  # noqa: E402
from blinkpy.models.gpu.step_shapes import StepShape  # noqa: E402
from blinkpy.models.weights import weight_loader  # noqa: E402

GIB = 1 << 30
LLAMA_8B = SHAPES["llama-3-8b"]


class LoadingBegan(Exception):
    """Everything was accepted, and weights would now be loaded."""


@pytest.fixture
def gpu(monkeypatch) -> Callable[..., None]:
    """A synthetic GPU; by default an H200 with a new driver. The code that would load weights raises
    LoadingBegan, or another error."""

    what = runtime.cudaDeviceAttr
    attributes = {what.cudaDevAttrMemoryClockRate: (0, 3_200_000), what.cudaDevAttrGlobalMemoryBusWidth: (0, 6144)}

    def make(*, capability=(9, 0), driver=13000, free=139 * GIB, total=140 * GIB, loading: Exception | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Synthetic")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu=0: (free, total))
        monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (0, driver))
        monkeypatch.setattr(runtime, "cudaDeviceGetAttribute", lambda what, device: attributes[what])
        monkeypatch.setattr(weight_loader, "dummy_weights", Mock(side_effect=loading or LoadingBegan))
        monkeypatch.setattr(cuda_device, "gpu_usable", lambda: True)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of which there is a config alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def refused(capsys, folder: Path, *arguments: str) -> str:
    """`blinkpy engine` ends with exit code 2 and one line, which is returned, and leaves no segment behind."""
    name = f"test-{secrets.token_hex(6)}"
    code = cli.main(["engine", str(folder), "--device", "cuda", "--name", name, *arguments])
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if "error" in line.lower()]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert err.endswith(errors[0] + "\n"), "something followed the error"
    assert errors[0].startswith("blinkpy: error: ")
    assert not Path(f"/dev/shm/blinkpy.{name}").exists()
    return errors[0]


def config(folder: Path, **values: Any) -> Config:
    return Config().with_options({"model": str(folder), "device": "cuda", "load_format": "dummy", **values})


def test_served_it_needs_a_tokenizer_too(folder, capsys) -> None:
    assert cli.main(["serve", str(folder), "--port", "0", "--load-format", "dummy"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"blinkpy: error: {folder} has no tokenizer.json"


OLD_DRIVER = {"driver": 12040}
SMALL = {"free": 14 * GIB, "total": 16 * GIB}
LARGE_CONTEXT = ("--num-pages", "40000", "--max-model-len", "8192")
PLANNED = ("weights 14.96 GiB", "activations ", "scheduler state ", "graphs and kernels 1.00 GiB", "KV cache at least ")
USABLE = "12.40 GiB usable (gpu_memory_utilization 0.9 of 16.00 GiB, of which 14.00 GiB are free)"
TAKEN = "out of GPU memory while loading weights: 139.00 GiB of 140.00 GiB are free; the plan was weights 14.96 GiB"


@pytest.mark.parametrize(
    ("made", "arguments", "parts"),
    [
        ({"capability": (7, 5)}, (), ["NVIDIA Synthetic has compute capability 7.5; 8.0 or newer is needed"]),
        (
            {"capability": (8, 6)},
            ("--kv-cache-dtype", "fp8_e4m3"),
            ["kv_cache_dtype fp8_e4m3 needs", "8.9 or newer, but this GPU has 8.6"],
        ),
        (
            {},
            ("--tpot-target-ms", "3"),
            ["tpot_target_ms (3) is shorter than one step: reading 15.0 GB", "3.1 ms at this GPU's 4,915 GB/s"],
        ),
        ({}, ("--flex-tpot-target-ms", "3"), ["flex_tpot_target_ms (3) is shorter than one step"]),
        (OLD_DRIVER, (), ["the NVIDIA driver supports CUDA 12.4; conditional graph nodes", "need 12.8 (or use --control host)"]),
        (SMALL, (), ["the model does not fit on the GPU: ", *PLANNED, USABLE]),
        ({"free": 21 * GIB, "total": 22 * GIB}, LARGE_CONTEXT, ["does not fit", "KV cache at least 78.12 GiB"]),
        ({"loading": torch.cuda.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")}, (), [TAKEN]),
    ],
)
def test_what_the_gpu_can_not_do(gpu, folder, capsys, made, arguments, parts) -> None:
    gpu(**made)
    line = refused(capsys, folder, "--load-format", "dummy", *arguments)
    assert [part for part in parts if part not in line] == []
    assert "queue pairs" not in line  # they are in host memory


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({}, {}),
        ({}, {"tpot_target_ms": 4}),
        (OLD_DRIVER, {"control": "host"}),
        ({"free": 21 * GIB, "total": 22 * GIB}, {"max_model_len": 1024}),
    ],
)
def test_what_the_gpu_can_do(gpu, folder, made, options) -> None:
    """A config suffices for random weights. A loop on the host needs no conditional nodes. A smaller context needs less memory. A
    pace that a step can keep is accepted."""
    gpu(**made)
    with pytest.raises(LoadingBegan):
        make_engine(config(folder, **options)).start()


def test_queue_pairs_in_gpu_memory_are_part_of_what_does_not_fit(gpu, folder, monkeypatch) -> None:
    monkeypatch.setattr(pair_placement, "placement_problem", lambda queue_memory: "")
    gpu(**SMALL)
    # 2**26 tokens of 4 bytes in each of 4 arenas, a hash of 8 bytes for 16 tokens, and a little for rings and records.
    options = {"transport": "rdma", "workers": 4, "prompt_arena_tokens": 1 << 26, "max_model_len": 1024, "grammar_slots": 0}
    for queue_memory in ("dmabuf", "peermem"):
        with pytest.raises(ConfigError, match=r"does not fit on the GPU: .*scheduler state .*, queue pairs 1\.13 GiB, "):
            make_engine(config(folder, queue_memory=queue_memory, **options)).start()
    with pytest.raises(ConfigError, match="does not fit") as caught:
        make_engine(config(folder, queue_memory="host", **options)).start()
    assert "queue pairs" not in str(caught.value)


def test_damaged_weights(gpu, tmp_path: Path, capsys) -> None:
    """tests/plain/models/test_model_files.py knows more kinds of damage."""
    gpu()
    save_model("llama3", tmp_path, 1, sharded=True)
    shard = sorted(tmp_path.glob("model*"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is truncated: model.layers." in refused(capsys, tmp_path, "--max-model-len", "64")


def test_a_step_that_exceeds_its_bucket_is_not_run() -> None:
    shape, counts = StepShape(64, 8, mixed=True), np.zeros(BATCH_COUNTS, np.int64)
    counts[TOKENS], counts[ROWS] = 64, 8
    require_fit(shape, counts)
    for tokens, rows in ((65, 8), (64, 9)):
        counts[TOKENS], counts[ROWS] = tokens, rows
        with pytest.raises(RuntimeError, match=f"a step of {tokens} tokens in {rows} rows exceeds its bucket, mixed 64x8"):
            require_fit(shape, counts)
