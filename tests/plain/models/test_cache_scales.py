"""Scales of an FP8 KV cache, its memory, and its refusals."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numba import njit
from support.models.model_zoo import BASE

from blinkpy.config import Config, ConfigError
from blinkpy.engine.devices.cuda_device import fp8_problem
from blinkpy.engine.devices.null_device import NullDevice
from blinkpy.models.cpu.cpu_step import CpuStep, measure_cache
from blinkpy.models.cpu.passes.njit_math import float_of_fp8, fp8_of
from blinkpy.models.families.family import describe_config
from blinkpy.models.gpu.gpu_memory_plan import plan_memory
from blinkpy.models.paged_cache import (
    FP8_NUMBERS,
    PagedCache,
    cache_itemsize,
    choose_scales,
    kv_bytes_per_page,
    ring_sizes,
    scales_for,
)
from blinkpy.models.weights.array_weights import dummy_array_weights
from blinkpy.models.weights.weight_loader import dummy_weights
from blinkpy.serving.model_facts import fit

MODEL = describe_config({**BASE, "architectures": ["LlamaForCausalLM"]})
FP8 = Config().with_options({"kv_cache_dtype": "fp8_e4m3"})
LAYERS = len(MODEL.layers)


def test_the_numbers_are_those_of_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FP8_NUMBERS, theirs, equal_nan=True)


def test_compiled_code_rounds_as_torch_does(rng: np.random.Generator) -> None:
    """Numbers of all sizes, all halves between two numbers, and saturated values; and back."""

    @njit
    def both_ways(given, bits, numbers):  # type: ignore[no-untyped-def]
        for i in range(len(given)):
            bits[i] = fp8_of(given[i])
            numbers[i] = float_of_fp8(bits[i])

    ordered = np.sort(FP8_NUMBERS[~np.isnan(FP8_NUMBERS)])
    given = (rng.standard_normal(4000) * np.exp2(rng.uniform(-14, 10, 4000))).astype(np.float32)
    given = np.concatenate([given, (ordered[1:] + ordered[:-1]) / 2, np.float32([448, 464, 1e30, -1e30, -0.0])])
    bits, numbers = np.zeros(len(given), np.uint8), np.zeros(len(given), np.float32)
    both_ways(given, bits, numbers)
    theirs = torch.from_numpy(given).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(bits, theirs.view(torch.uint8).numpy()) and np.array_equal(numbers, theirs.float().numpy())


def test_measured_scales_are_powers_of_two_with_headroom(rng: np.random.Generator) -> None:
    largest = np.exp(rng.uniform(-20, 20, (LAYERS, 2, MODEL.kv_heads))).astype(np.float32)
    largest[0, 0, 0], largest[0, 1, 0] = 0, 224
    scales = scales_for(largest)
    assert scales.dtype == np.float32 and scales[0, 0, 0] == scales[0, 1, 0] == 1
    assert (np.frexp(scales)[0] == 0.5).all()
    share = (largest / (448 * scales))[largest > 0]
    assert (share <= 0.5).all() and (share > 0.25).all()
    for wrong in (math.nan, math.inf):
        largest[2, 1, 0] = wrong
        with pytest.raises(ConfigError, match="values of layer 2 are not finite"):
            scales_for(largest)


def test_a_checkpoints_scales_come_first(rng: np.random.Generator) -> None:
    """Missing scales are measured; dummy weights, and a cache of the model's type, need no measurement."""
    measured = np.full((LAYERS, 2, MODEL.kv_heads), 224, np.float32)
    plain: list[Any] = [SimpleNamespace() for _ in range(LAYERS)]
    assert choose_scales(Config(), MODEL, plain, Mock(side_effect=AssertionError)) is None
    dummy = FP8.with_options({"load_format": "dummy"})
    assert (choose_scales(dummy, MODEL, plain, Mock(side_effect=AssertionError)) == np.ones_like(measured)).all()
    known: list[Any] = [SimpleNamespace(k_scale=0.3 + layer, v_scale=0.7) for layer in range(LAYERS)]
    scales = choose_scales(FP8, MODEL, known, Mock(side_effect=AssertionError))
    assert scales is not None
    assert np.array_equal(scales[:, 0, 0], np.float32([0.3, 1.3, 2.3])) and (scales[:, 1] == np.float32(0.7)).all()
    known[1].v_scale = None
    partly = choose_scales(FP8, MODEL, known, lambda: measured)
    assert partly is not None and (partly[1, 1] == 1).all() and (np.delete(partly, 1, 0)[:, 1] == np.float32(0.7)).all()
    for wrong in (0.0, -1.0, math.nan, math.inf, 1e-45):
        known[2].k_scale = wrong
        with pytest.raises(ConfigError, match=r"k_scale of layer 2 is .* must be positive and finite"):
            choose_scales(FP8, MODEL, known, lambda: measured)


def test_both_decoders_measure_the_same_each_time() -> None:
    found = [
        measure_cache(MODEL, weights, page)
        for page in (8, 16)
        for weights in (dummy_array_weights(MODEL, 7, 0.2), dummy_weights(MODEL, 7, torch.float32, spread=0.2))
    ]
    assert found[0].shape == (LAYERS, 2, MODEL.kv_heads) and (found[0] > 0).all()
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])
    assert np.allclose(found[0], measure_cache(MODEL, dummy_array_weights(MODEL, 7, 0.2), 8))


def test_a_token_takes_a_byte_for_each_number() -> None:
    ones = np.ones((LAYERS, 2, MODEL.kv_heads), np.float32)
    assert [cache_itemsize(config, 2) for config in (Config(), FP8)] == [2, 1]
    cache = PagedCache(MODEL, 10, 8, torch.bfloat16, scales=ones)
    assert cache.dtype == torch.bfloat16 and {side.dtype for side in cache.keys + cache.values} == {torch.float8_e4m3fn}
    assert sum(side.numel() for side in cache.keys + cache.values) == 10 * kv_bytes_per_page(MODEL, 8, 1)
    arrays = CpuStep(MODEL, dummy_array_weights(MODEL, 7, 0.2), 10, 8, 64, 64, scales=ones).cache
    assert sum(side.nbytes for side in arrays.keys + arrays.values) == 10 * kv_bytes_per_page(MODEL, 8, 1)


@pytest.mark.parametrize("window_cache", ["full", "ring"])
def test_the_pool_of_a_gpu_doubles(window_cache: str) -> None:
    """Of a model with windows in some layers; rings take half as much, too."""
    gemma = {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "head_dim": 256}
    model = describe_config(
        gemma | {"architectures": ["Gemma3ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4, "dtype": "bfloat16"}
    )
    config = Config().with_options({"slots": 16, "max_model_len": 32768, "window_cache": window_cache})
    both = [config.with_options({"kv_cache_dtype": name}) for name in ("auto", "fp8_e4m3")]
    assert all((ring_sizes(one, model) is not None) == (window_cache == "ring") for one in both)
    plain, halved = (fit(model, one, "GPU", 24 << 30).cached for one in both)
    plans = [plan_memory(one.with_options({"max_num_batched_tokens": 2048}), model, 2, 1 << 20, 1 << 35, 1 << 35) for one in both]
    rings = [plan.parts["window rings"] for plan in plans]
    assert rings == [0, 0] if window_cache == "full" else 0.5 * rings[0] <= rings[1] < 0.51 * rings[0]
    assert plain > 0 and halved > 1.95 * plain
    assert halved < 2.3 * plain or window_cache == "ring"


def test_devices_without_fp8_caches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, refused in (((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert bool(fp8_problem("fp8_e4m3")) == refused
        assert fp8_problem("auto") == ""
    assert "keeps no keys and values" in NullDevice().unusable(FP8)
    assert NullDevice().unusable(Config()) == ""
