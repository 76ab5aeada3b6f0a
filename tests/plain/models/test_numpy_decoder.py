"""The CPU's decoder without torch: its threads, products and passes, and which models it takes."""

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.model_zoo import BASE, MOE, save_model
from support.waiting import wait_for

from blinkpy.config import ConfigError
from blinkpy.engine.devices import cpu_device
from blinkpy.engine.devices.cpu_device import torch_dtype_name
from blinkpy.models.cpu import numpy_products
from blinkpy.models.cpu.numpy_products import RowPasses, ThreadTeam
from blinkpy.models.description.blocks import Attention, NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.weights import array_weights
from blinkpy.models.weights.array_loader import load_arrays
from blinkpy.models.weights.array_weights import dummy_array_weights, load_array_weights, unknown_parts
from blinkpy.models.weights.checkpoint import open_checkpoint
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights


@pytest.fixture
def dense() -> DecoderDescription:
    return describe_config({**BASE, "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_unit_is_done_once(size: int, rng: np.random.Generator) -> None:
    team = ThreadTeam(size)
    for units in (0, 1, *rng.integers(2, 200, 5).tolist()):
        done: list[int] = []
        team.share(done.append, units)
        assert sorted(done) == list(range(units))


def test_only_helpers_that_have_begun_are_waited_for() -> None:
    team, here, hold, begun = ThreadTeam(2), threading.get_ident(), threading.Event(), threading.Event()
    ended = list[str]()

    def slow() -> None:
        if threading.get_ident() == here:
            assert begun.wait(60)
        else:
            begun.set()
            time.sleep(0.05)
            ended.append("helper")

    team.run(slow, 2)
    assert ended == ["helper"]
    team._posts[0].put(hold.wait)  # the one helper is busy from now on
    wait_for(team._posts[0].empty, 60)
    calls = list[int]()
    team.run(lambda: calls.append(threading.get_ident()), 2)
    assert calls == [here]
    hold.set()


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_errors_of_any_thread_are_the_callers(where: str) -> None:
    team, here, begun = ThreadTeam(2), threading.get_ident(), threading.Event()

    def fail() -> None:
        mine = "caller" if threading.get_ident() == here else "helper"
        if mine == "helper":
            begun.set()
        assert begun.wait(60)
        if mine == where:
            raise ValueError(where)

    with pytest.raises(ValueError, match=where):
        team.run(fail, 2)
    team.share(lambda unit: None, 5)  # it works on


def test_threads_end_with_their_team() -> None:
    before = set(threading.enumerate())
    team = ThreadTeam(3)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del team
    gc.collect()
    wait_for(lambda: not any(thread.is_alive() for thread in own), 60)


def test_passes_are_those_of_float64(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = RowPasses(ThreadTeam(2))
    for rows, unit in ((1, 1 << 14), (37, 1 << 14), (300, 64)):
        monkeypatch.setattr(numpy_products, "UNIT_ITEMS", unit)  # the smaller, the more threads are asked
        width = int(rng.integers(1, 150))
        x = rng.normal(0, 3, (rows, width)).astype(np.float32)
        weight = rng.normal(1, 0.5, width).astype(np.float32)
        exact = x.astype(np.float64)
        expected = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5) * weight
        np.testing.assert_allclose(passes.norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-5)
        both = rng.normal(0, 8, (rows, 2 * width)).astype(np.float32)
        both[0, 0], both[-1, -1] = -300, 300  # beyond where e^x is a float32
        gate, up = np.split(both.astype(np.float64), 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(passes.gated_silu(both), expected, rtol=1e-5, atol=1e-5)


def test_softmax_is_causal_and_keeps_to_its_window(rng: np.random.Generator) -> None:
    passes = RowPasses(ThreadTeam(1))
    for window in (0, 1, int(rng.integers(2, 30))):
        heads, tokens, first = (int(n) for n in rng.integers(1, 20, 3))
        scores = rng.normal(0, 20, (heads, tokens, first + tokens)).astype(np.float32)
        key, query = np.arange(first + tokens), np.arange(first, first + tokens)[:, None]
        seen = (key <= query) & ((key > query - window) | (window == 0))
        exact = np.where(seen, scores.astype(np.float64) * 0.3, -np.inf)
        powers = np.exp(exact - exact.max(-1, keepdims=True))
        passes.softmax(scores, first, window, 0.3)
        np.testing.assert_allclose(scores, powers / powers.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("llama3", "float32"), ("granite", "bfloat16"), ("qwen3-moe", "float16")])
def test_weights_are_those_that_torch_loads(name: str, dtype: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """From files of any type, in pieces that divide nothing."""
    save_model(name, tmp_path, int(rng.integers(2**31)), sharded=True, dtype=getattr(torch, dtype))
    model, seen = describe_model(tmp_path), list[float]()
    ours, theirs = load_array_weights(model, tmp_path, seen.append), load_weights(model, tmp_path, torch.float32)
    for own, other in zip([ours, *ours.layers], [theirs, *theirs.layers], strict=True):
        for field, value in vars(own).items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(value, getattr(other, field).numpy()), field
    assert seen[-1] == 1 and sorted(seen) == seen
    stored = open_checkpoint(model, tmp_path)
    targets = {key: np.full(tensor.shape, np.nan, np.float32) for key, tensor in stored.items()}
    places = [(key, stored[key], targets[key]) for key in stored]
    load_arrays(places, threads=3, piece_items=int(rng.integers(50, 5000)))
    assert np.array_equal(targets[f"{model.tensors.embedding}.weight"], ours.embedding)
    assert not any(np.isnan(target).any() for target in targets.values())


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    save_model("llama2", tmp_path, 1)
    stored = open_checkpoint(describe_model(tmp_path), tmp_path)
    last = max(stored, key=lambda key: stored[key].offset)
    places = [(key, stored[key], np.empty(stored[key].shape, np.float32)) for key in stored]
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(stored[last].offset + 5)
    with pytest.raises(ConfigError, match=f"was truncated while being read: {last} lacks"):
        load_arrays(places)


def test_random_weights_are_torchs(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_weights, "DRAWN", 1000)
    model, seed = describe_config({**BASE, **MOE, "architectures": ["Qwen3MoeForCausalLM"]}), int(rng.integers(2**62))
    ours, theirs = dummy_array_weights(model, seed), dummy_weights(model, seed, torch.float32)
    for own, other in zip([ours, *ours.layers], [theirs, *theirs.layers], strict=True):
        for field, value in vars(own).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(value, getattr(other, field).numpy(), rtol=2e-7, atol=0, err_msg=field)
    assert not np.array_equal(ours.lm_head, dummy_array_weights(model, seed + 1).lm_head)


def test_what_the_arrays_do_not_know_is_named(dense: DecoderDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that others add to a block, with another value than its default; a weight that others add."""
    assert unknown_parts(dense) == []
    scaled = replace(dense, layers=tuple(x._replace(attention=x.attention._replace(scale=0.3)) for x in dense.layers))
    biased = replace(dense, layers=tuple(x._replace(attention=x.attention._replace(o_bias=True)) for x in dense.layers))
    assert unknown_parts(scaled) == unknown_parts(biased) == []
    known = array_weights.KNOWN
    monkeypatch.setitem(known, Attention, known[Attention] - {"scale"})
    assert unknown_parts(dense) == []
    assert unknown_parts(scaled) == ["Attention.scale"]
    monkeypatch.delitem(array_weights.ArrayLayer.__dataclass_fields__, "o_bias")
    assert unknown_parts(biased) == ["weights o_bias"]


@pytest.mark.parametrize("has_torch", [True, False])
def test_which_decoder_computes(has_torch: bool, dense: DecoderDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "installed", lambda name: has_torch)
    narrow, half = replace(dense, dtype="bfloat16"), replace(dense, dtype="float16")
    other = replace(dense, placement=NormPlacement.SANDWICH)
    for model, requested in ((dense, "auto"), (narrow, "float32"), (half, "auto")):
        assert torch_dtype_name(model, requested) is None
    with pytest.raises(ConfigError, match="float16 is not supported on the CPU"):
        torch_dtype_name(dense, "float16")
    if has_torch:
        assert torch_dtype_name(narrow, "auto") == torch_dtype_name(dense, "bfloat16") == "bfloat16"
        assert torch_dtype_name(other, "auto") == "float32"
        return
    assert torch_dtype_name(narrow, "auto") is None
    with pytest.raises(ConfigError, match=r"dtype bfloat16 on the CPU needs torch \(pip install 'blinkpy-serve\[torch\]'\)"):
        torch_dtype_name(narrow, "bfloat16")
    with pytest.raises(ConfigError, match=r"needs NormPlacement.SANDWICH, which .*'blinkpy-serve\[torch\]'"):
        torch_dtype_name(other, "auto")
