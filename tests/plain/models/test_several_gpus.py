"""Options and models that an engine on several GPUs refuses before it loads a model. The GPUs are synthetic, so these tests run
on any machine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")
runtime = pytest.importorskip("cuda.bindings").runtime
pytest.importorskip("numba_cuda")

from benchmarks.common.model_shapes import SHAPES  # noqa: E402
from blinkpy.config import Config, ConfigError  # noqa: E402
from blinkpy.engine.devices import rank_loops, rank_parts  # noqa: E402
from blinkpy.engine.engine import make_engine  # noqa: E402
from blinkpy.models.weights import weight_loader  # noqa: E402

GIB = 1 << 30
H200 = "NVIDIA H200"


class LoadingBegan(Exception):
    """Everything was accepted, and weights would now be loaded."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Synthetic GPUs with new drivers; by default two H200 with peer access."""

    def make(*names: str, lacking: tuple[int, int] | None = None, free: int = 139 * GIB) -> None:
        names = names or (H200, H200)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=0: names[gpu])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair != lacking)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu=0: (free if gpu else 139 * GIB, 140 * GIB))
        monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (0, 13000))
        monkeypatch.setattr(weight_loader, "dummy_weights", Mock(side_effect=LoadingBegan))
        monkeypatch.setattr(rank_parts, "open_peer_access", Mock(side_effect=LoadingBegan))
        assert rank_loops.RankLoops.faults

    return make


def start(folder: Path, ranks: int = 2, shape: str = "llama-3-8b", **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    options = {"model": str(folder), "device": "cuda", "load_format": "dummy", "tensor_parallel_size": ranks, **values}
    make_engine(Config().with_options(options)).start()


@pytest.mark.parametrize(
    ("made", "ranks", "options", "words"),
    [
        ({"names": (H200,)}, 2, {}, "needs 2 GPUs, but CUDA shows 1"),
        ({"names": (H200, "NVIDIA L4")}, 2, {}, "needs equal GPUs, but GPU 0 is NVIDIA H200 and GPU 1 is NVIDIA L4"),
        ({"lacking": (1, 0)}, 2, {}, "needs peer access between GPUs, but GPU 1 can't access the memory of GPU 0"),
        ({"names": (H200,) * 3}, 3, {}, "layer 0 of LlamaForCausalLM can't be split over 3 ranks: it has 32 query heads"),
        ({"free": 8 * GIB}, 2, {}, r"does not fit on the GPU: .*sums over GPUs .*of which 8.00 GiB are free"),
        ({}, 2, {"control": "host"}, "needs --control gpu: the host runs the steps of one GPU only"),
        ({}, 2, {"speculative": "ngram"}, "needs --speculative off"),
        ({}, 2, {"step_groups": 4, "policy": "deadlines"}, "needs --step-groups 1: cut steps were not tested"),
        ({}, 2, {"device": "null"}, "--tensor-parallel-size 2 needs --device cuda; the engine would run on null"),
    ],
)
def test_refusals(
    gpus: Callable[..., None], tmp_path: Path, made: dict[str, Any], ranks: int, options: dict[str, Any], words: str
) -> None:
    gpus(*made.pop("names", ()), **made)
    with pytest.raises(ConfigError, match=words):
        start(tmp_path, ranks, **options)


def test_two_gpus_are_taken(gpus: Callable[..., None], tmp_path: Path) -> None:
    """A model that does not fit on one of them: 15 GiB of weights, and 12 GiB usable."""
    gpus(free=26 * GIB)
    with pytest.raises(LoadingBegan):
        start(tmp_path, max_model_len=1024)
