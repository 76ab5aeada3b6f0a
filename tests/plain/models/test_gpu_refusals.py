"""What an engine on a GPU refuses at its start: one clear line, exit code 2, nothing loaded and nothing left behind.

The GPU is made up: the driver's answers are replaced, so these tests run on any machine.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from blinkpy.models.gpu import host_driven_step  # noqa: E402
from blinkpy.models.gpu.step_shapes import StepShape  # noqa: E402
from blinkpy.models.weights import decoder_weights  # noqa: E402

GIB = 1 << 30
LLAMA_8B = SHAPES["llama-3-8b"]


class LoadingBegan(Exception):
    """Everything was accepted, and weights would now be loaded."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make up a GPU; by default an H200 with a new driver. Whatever would load weights raises LoadingBegan."""

    def make(*, capability: tuple[int, int] = (9, 0), driver: int = 13000, free: int = 139 * GIB, total: int = 140 * GIB) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Made-Up")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
        monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (0, driver))

        def began(*arguments: object) -> None:
            raise LoadingBegan

        monkeypatch.setattr(decoder_weights, "dummy_weights", began)
        monkeypatch.setattr(cuda_device, "gpu_usable", lambda: True)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of which there is a config alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
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


def test_a_config_alone_is_enough_for_random_weights(gpu: Callable[..., None], folder: Path) -> None:
    gpu()
    with pytest.raises(LoadingBegan):
        cli.main(["engine", str(folder), "--device", "cuda", "--load-format", "dummy", "--name", f"test-{secrets.token_hex(6)}"])


def test_served_it_needs_a_tokenizer_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(folder), "--port", "0", "--load-format", "dummy"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"blinkpy: error: {folder} has no tokenizer.json"


def test_the_gpu_is_too_old(gpu: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu(capability=(7, 5))
    line = refused(capsys, folder, "--load-format", "dummy")
    assert "NVIDIA Made-Up has compute capability 7.5; 8.0 or newer is needed" in line


def test_the_driver_knows_no_conditional_nodes(
    gpu: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(driver=12040)
    line = refused(capsys, folder, "--load-format", "dummy")
    assert "the NVIDIA driver supports CUDA 12.4; conditional graph nodes" in line
    assert "need 12.8 (or use --control host)" in line
    with pytest.raises(LoadingBegan):  # which needs none
        make_engine(config(folder, control="host")).start()


def config(folder: Path, **values: Any) -> Config:
    return Config().with_options({"model": str(folder), "device": "cuda", "load_format": "dummy", **values})


def test_the_model_does_not_fit(gpu: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu(free=14 * GIB, total=16 * GIB)
    line = refused(capsys, folder, "--load-format", "dummy")
    assert "the model does not fit on the GPU: " in line
    for part in ("weights 14.96 GiB", "activations ", "scheduler state ", "graphs and kernels 1.00 GiB", "KV cache at least "):
        assert part in line
    assert "queue pairs" not in line  # they are in host memory
    assert "12.40 GiB usable (gpu_memory_utilization 0.9 of 16.00 GiB, of which 14.00 GiB are free)" in line


def test_queue_pairs_in_gpu_memory_are_part_of_what_does_not_fit(
    gpu: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_placement, "placement_problem", lambda way: "")
    gpu(free=14 * GIB, total=16 * GIB)
    # 2**26 tokens of 4 bytes in each of 4 arenas, and less than 2 MiB a pair for rings, records and page hashes.
    options = {"transport": "rdma", "workers": 4, "prompt_arena_tokens": 1 << 26, "max_model_len": 1024}
    for way in ("dmabuf", "peermem"):
        with pytest.raises(ConfigError, match=r"does not fit on the GPU: .*scheduler state .*, queue pairs 1\.0[01] GiB, "):
            make_engine(config(folder, queue_memory=way, **options)).start()
    with pytest.raises(ConfigError, match="does not fit") as caught:
        make_engine(config(folder, queue_memory="host", **options)).start()
    assert "queue pairs" not in str(caught.value)


def test_the_context_that_was_asked_for_does_not_fit(
    gpu: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(free=21 * GIB, total=22 * GIB)
    with pytest.raises(LoadingBegan):
        make_engine(config(folder, max_model_len=1024)).start()
    line = refused(capsys, folder, "--load-format", "dummy", "--num-pages", "40000", "--max-model-len", "8192")
    assert "does not fit" in line
    assert "KV cache at least 78.12 GiB" in line


def test_memory_that_is_gone_while_it_loads(
    gpu: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()

    def taken(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")

    monkeypatch.setattr(decoder_weights, "dummy_weights", taken)
    line = refused(capsys, folder, "--load-format", "dummy")
    assert (
        "out of GPU memory while loading weights: 139.00 GiB of 140.00 GiB are free, and the plan was weights 14.96 GiB" in line
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model("llama3", folder, 1, sharded=True)
    return folder


@pytest.mark.parametrize("damage", ["missing file", "cut short", "other shape", "none at all"])
def test_damaged_weights(
    gpu: Callable[..., None], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    gpu()
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    if damage == "missing file":
        shard.unlink()
        expected = f"{folder} has no {shard.name}, which model.safetensors.index.json names"
    elif damage == "cut short":
        shard.write_bytes(shard.read_bytes()[:-1])
        expected = f"{shard} is truncated: model.layers."
    elif damage == "other shape":
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**facts, "vocab_size": 200}))
        expected = "model.embed_tokens.weight has shape [199, 64], but config.json makes it [200, 64]"
    else:
        for path in folder.glob("model*"):
            path.unlink()
        expected = f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json"
    assert expected in refused(capsys, folder, "--max-model-len", "64")


def test_no_option_makes_a_step_that_exceeds_its_bucket(
    gpu: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu()
    line = refused(capsys, folder, "--load-format", "dummy", "--max-num-seqs", "64", "--max-num-batched-tokens", "63")
    assert "max_num_batched_tokens (63) must be at least max_num_seqs (64)" in line


def test_a_step_that_exceeds_its_bucket_is_not_run() -> None:
    shape, counts = StepShape(64, 8, mixed=True), np.zeros(BATCH_COUNTS, np.int64)
    counts[TOKENS], counts[ROWS] = 64, 8
    host_driven_step.require_fit(shape, counts)
    for tokens, rows in ((65, 8), (64, 9)):
        counts[TOKENS], counts[ROWS] = tokens, rows
        with pytest.raises(RuntimeError, match=f"a step of {tokens} tokens in {rows} rows exceeds its bucket, mixed 64x8"):
            host_driven_step.require_fit(shape, counts)
