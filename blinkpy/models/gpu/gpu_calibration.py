"""How large keys and values of a model on the GPU get, before its KV cache is made: see blinkpy.models.cache_scales."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blinkpy.device.array_trees import map_arrays
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.models.cache_scales import calibration_batch, calibration_tokens
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.kernel_errors import compiler_errors
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import Weights


@torch.inference_mode()
def measure_cache(
    model: DecoderDescription, weights: Weights, page_size: int, table: LinearTable, pdl: bool, *, invariant: bool
) -> NDArray[np.float32]:
    """The largest key and value of each head, float32 [layers, 2, kv_heads]. Its memory is free again when it returns."""
    tokens, device = calibration_tokens(model), weights.device
    shape = StepShape(tokens, 1, mixed=True, whole=invariant)
    cache = PagedCache(model, -(-tokens // page_size), page_size, weights.dtype, device)
    batch: Any = map_arrays(lambda array: torch.from_numpy(array).to(device), calibration_batch(model))
    requests: Any = SimpleNamespace(page_table=torch.arange(cache.num_pages, dtype=torch.int32, device=device)[None])
    decoder = GpuDecoder(model, weights, cache, batch, requests, [shape], tokens, table, pdl, invariant=invariant)
    with compiler_errors("the measurement of an FP8 cache"):
        decoder.layers(shape)
    return cache.largest()
