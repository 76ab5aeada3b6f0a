"""The parts of an engine on one GPU: the model's weights and cache, and the step graphs for a scheduler's state."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.engine.devices.device_contract import Setup
from blinkpy.kernels.all_reduce import Peers
from blinkpy.kernels.sampling.candidates import GrammarView
from blinkpy.kernels.sampling.sampler import SamplingCall, sample_tokens
from blinkpy.kv.state import Batch, Grammars, Requests, State
from blinkpy.models.description.split import WHOLE, Share
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.gpu_step import GpuStep, measure_cache
from blinkpy.models.gpu.kernel_tables import KernelTables
from blinkpy.models.gpu.step_shapes import StepShape, bucket_shapes, step_shapes
from blinkpy.models.paged_cache import PagedCache, choose_scales, ring_sizes
from blinkpy.models.weights.rank_checkpoint import rank_description

logger = logging.getLogger("blinkpy.engine")
CAPTURING = "compiling kernels and capturing steps"
MakeStep = Callable[[Batch, Requests, Grammars], GpuStep]


class GpuOptions(NamedTuple):
    """dtype: dtype of weights and activations. pdl: see GpuDecoder. sample: replaces sample_tokens."""

    dtype: torch.dtype
    pdl: bool
    sample: Callable[[SamplingCall], None] | None


class GpuParts(NamedTuple):
    """The parts of a loop. state: the scheduler's state, on the host. make_step, graph_of: see GpuLoop."""

    state: State
    make_step: MakeStep
    graph_of: NDArray[np.int32]
    stream: torch.cuda.Stream


def shapes_of(setup: Setup) -> tuple[list[tuple[int, int]], list[StepShape], NDArray[np.int32]]:
    """The buckets of an engine, and its step graphs as in `step_shapes`."""
    config, limits = setup.config, setup.limits
    buckets = bucket_shapes(setup.sizes.max_num_seqs, config.scheduler.max_num_batched_tokens)
    cut = {"groups": limits.step_groups, "cut_tokens": limits.cut_tokens}
    whole = config.engine.batch_invariant or setup.model.drafts_tokens  # one graph that reads all tokens
    return buckets, *step_shapes(buckets, whole=whole, drafts=limits.draft_requests if limits.draft_tokens else 0, **cut)


def load_gpu(setup: Setup, how: GpuOptions, share: Share = WHOLE, peers: Peers | None = None) -> GpuParts:
    """Load a model, or a rank's share of it, to the current GPU. peers: the rank's peers. Raises ConfigError."""
    config, sizes, report, dtype = setup.config, setup.sizes, setup.report, how.dtype
    model, invariant, page_size = rank_description(setup.model, share), config.engine.batch_invariant, sizes.page_size
    buckets, shapes, graph_of = shapes_of(setup)
    tables = KernelTables.load(torch.cuda.get_device_name())
    tables.require(model, dtype, {rows for shape in shapes for rows in (shape.tokens, shape.rows)}, invariant=invariant)
    logger.info("%s", tables.describe(model, dtype, invariant=invariant))
    weights, table = setup.load_weights(dtype, "cuda", share), tables.linear

    def measure() -> NDArray[np.float32]:
        if peers is not None:
            raise ConfigError("an FP8 cache on several GPUs needs a checkpoint with scales of keys and values")
        return measure_cache(model, weights, page_size, table, how.pdl, invariant=invariant)

    scales = choose_scales(config, model, weights.layers, measure)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    report("allocating the KV cache and the scheduler's state")
    rings = ring_sizes(config, model)
    limits, pages = setup.limits, sizes.num_pages
    places = sizes.slots, limits.snapshots, limits.draft_tokens
    cache = PagedCache(model, pages, page_size, dtype, "cuda", rings, scales, *places)
    head_cache = None
    if model.draft_head is not None:
        head_cache = PagedCache(model.draft_head, sizes.num_pages, page_size, dtype, "cuda")
    state, stream = setup.make_state(buckets), torch.cuda.Stream()

    def make_step(batch: Batch, requests: Requests, grammars: Grammars) -> GpuStep:
        """The captured step graphs. batch, requests, grammars: parts of the scheduler's state, on the GPU."""
        length = sizes.max_model_len
        decoder = GpuDecoder(
            model, weights, cache, batch, requests, shapes, length, table, how.pdl,
            expert_table=tables.experts, invariant=invariant, peers=peers, head_cache=head_cache,
        )  # fmt: skip
        step = GpuStep(decoder, GrammarView.of(grammars, requests), how.sample or sample_tokens)
        report(CAPTURING)
        step.capture(stream, lambda done: report(CAPTURING, done, 1))
        return step

    return GpuParts(state, make_step, graph_of, stream)
