"""--device on a machine as it is, and as it might be."""

import pytest

from blinkpy import packages
from blinkpy.config import Config, ConfigError, options
from blinkpy.engine.devices import cuda_device
from blinkpy.engine.devices.device_contract import choose_device, device_kinds
from blinkpy.engine.engine import make_engine


def test_auto_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "gpu_usable", lambda: False)
    engine = make_engine(Config())
    assert engine.device.name == engine.config.engine.device == "cpu"
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        make_engine(Config().with_options({"device": "cuda"}))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: name != "numba_cuda")
    with pytest.raises(ConfigError, match="--device cuda needs numba_cuda: pip install"):
        make_engine(Config().with_options({"device": "cuda"}))


@pytest.mark.parametrize("device", ["cpu", "null"])
def test_the_gpu_can_not_control_another_device(device: str) -> None:
    with pytest.raises(ConfigError, match=f"--control gpu needs --device cuda; the engine would run on {device}"):
        make_engine(Config().with_options({"device": device, "control": "gpu"}))


def test_packages_are_looked_for_and_not_imported() -> None:
    assert packages.installed("numpy")
    assert not packages.installed("no_such_package.inner")


def test_each_device_is_a_file_that_the_option_names() -> None:
    item = next(item for _, item in options() if item.name == "device")
    kinds = device_kinds()
    assert sorted(["auto", *kinds]) == sorted(item.metadata["choices"])
    for name, kind in kinds.items():
        device = kind()
        assert device.name == name and kind.__module__ == f"blinkpy.engine.devices.{name}_device"
        assert device.gpu == (name == "cuda") and device.reads_weights == (name != "null")


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_takes_the_highest_rank_and_never_the_null_device(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(cuda_device, "gpu_usable", lambda: gpu)
    ranks = {name: kind().auto_rank() for name, kind in device_kinds().items()}
    assert ranks["null"] == 0 < ranks["cpu"] and (ranks["cuda"] > ranks["cpu"]) == gpu
    assert choose_device("auto").name == ("cuda" if gpu else "cpu")
    assert [choose_device(name).name for name in ranks] == list(ranks)
