"""Causal convolutions over the tokens of requests on the CPU, and layers with a gated short convolution.

The compiled pass computes token by token in float32, so results do not depend on a prompt's chunks.
"""

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, types

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.kv import state as S
from blinkpy.kv.state import DRAFT, Batch
from blinkpy.models.cpu.cpu_attention import run_on_threads, team_size
from blinkpy.models.cpu.cpu_delta import keep, silu
from blinkpy.models.cpu.passes.njit_math import FAST, pointer_to, take_number
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import ShortConvolution
from blinkpy.models.recurrent_states import RecurrentStates
from blinkpy.models.weights.decoder_weights import LayerWeights

_ADDRESSES = (
    *("x", "out"),  # float32 [tokens, channels]
    "inputs",  # float32 [slots, taps - 1 + drafts, channels]
    "held",  # int32 [slots], tokens whose inputs are before those of drafts
    "weights",  # float32 [taps, channels]
    "bias",  # float32 [channels]
    *("starts", "contexts", "row_slots", "emits"),  # int32 [rows + 1], [rows], [rows], [rows]
    "begun",  # int64, number of units of work that have begun: 0 before each pass
    "progress",  # int64, counts units of work, for the watchdog
)
_SIZES = ("tokens", "rows", "slots", "channels", "taps", "drafts", "silu")
ARGUMENTS = np.dtype([(name, np.int64) for name in (*_ADDRESSES, *_SIZES)], align=True)
UNIT = 64  # channels per unit of work


def _convolution_pass(arguments):  # type: ignore[no-untyped-def]
    a = carray(arguments, (1,), ARGUMENTS)[0]
    taps, channels = a.taps, a.channels
    x = carray(pointer_to(a.x), (a.tokens, channels), np.float32)
    out = carray(pointer_to(a.out), (a.tokens, channels), np.float32)
    inputs = carray(pointer_to(a.inputs), (a.slots, taps - 1 + a.drafts, channels), np.float32)
    held = carray(pointer_to(a.held), (a.slots,), np.int32)
    weights = carray(pointer_to(a.weights), (taps, channels), np.float32)
    bias = carray(pointer_to(a.bias), (channels,), np.float32)
    starts = carray(pointer_to(a.starts), (a.rows + 1,), np.int32)
    contexts = carray(pointer_to(a.contexts), (a.rows,), np.int32)
    row_slots = carray(pointer_to(a.row_slots), (a.rows,), np.int32)
    emits = carray(pointer_to(a.emits), (a.rows,), np.int32)
    parts = (channels + UNIT - 1) // UNIT

    unit = take_number(a.begun)
    while unit < a.rows * parts:
        row = unit // parts
        first = (unit - row * parts) * UNIT
        last = min(first + UNIT, channels)
        if emits[row] != DRAFT:
            start, end, slot = np.int64(starts[row]), np.int64(starts[row + 1]), np.int64(row_slots[row])
            carried, before, repeated = inputs[slot], np.int64(contexts[row]) - (end - start), np.int64(0)
            if before == 0:  # a new sequence
                for j in range(taps - 1):
                    for c in range(first, last):
                        carried[j, c] = np.float32(0)
            else:
                repeated = min(max(before - np.int64(held[slot]), np.int64(0)), a.drafts)
            drafts = np.int64(0)
            while drafts < a.drafts and row + drafts + 1 < a.rows and emits[row + drafts + 1] == DRAFT:
                drafts += 1
            for t in range(start, end + drafts):
                for c in range(first, last):
                    out[t, c] = bias[c] + x[t, c] * weights[taps - 1, c]
                for j in range(taps - 1):
                    at = t - (taps - 1) + j
                    if at >= start:
                        for c in range(first, last):
                            out[t, c] += x[at, c] * weights[j, c]
                    else:
                        for c in range(first, last):
                            out[t, c] += carried[taps - 1 + at - start + repeated, c] * weights[j, c]
                if a.silu:
                    for c in range(first, last):
                        out[t, c] = silu(out[t, c])
            keep(x, carried, start, end, repeated, drafts, taps - 1, first, last - first)
        take_number(a.progress)
        unit = take_number(a.begun)


@functools.cache
def compiled_convolution() -> Any:
    """Numba's CFunc void(ARGUMENTS *); see blinkpy.models.cpu.passes.cpu_attention_pass.compile_pass."""
    return cached_cfunc(_convolution_pass, types.void(types.voidptr), (), error_model="numpy", fastmath=FAST)


class CpuConvolution:
    """The convolutions of all recurrent layers of a model.

    states: states of the request slots; changed by each run.
    max_tokens: tokens of the largest batch.
    silu: whether SiLU is applied to the results.
    progress: advances during a step.
    """

    def __init__(
        self, layers: list[LayerWeights], states: RecurrentStates, max_tokens: int, *, silu: bool, progress: TorchProgress
    ):  # fmt: skip
        self.states, self.progress, self.threads = states, progress, team_size()
        self.compiled = compiled_convolution()
        self.weights = [None if layer.recurrent_conv is None else _taps_and_bias(layer) for layer in layers]
        taps, channels = next(some[0].shape for some in self.weights if some is not None)
        self.out = torch.empty(max_tokens, channels)
        self.begun = np.zeros(1, np.int64)
        self.arguments = a = np.zeros(1, ARGUMENTS)
        a["begun"], a["out"], a["held"] = self.begun.ctypes.data, self.out.data_ptr(), states.held.data_ptr()
        a["slots"], a["channels"], a["taps"], a["drafts"], a["silu"] = states.slots, channels, taps, states.drafts, silu

    def begin(self, batch: Batch) -> None:
        """Read the metadata of one step. Raises ValueError for slots beyond the states."""
        a, counts = self.arguments, batch.counts
        self.tokens, rows = int(counts[S.TOKENS]), int(counts[S.ROWS])
        # The compiled pass does not check these; a wrong value would write outside the buffers.
        if self.tokens > len(self.out) or (rows and int(batch.row_slots[:rows].max()) >= self.states.slots):
            raise ValueError(f"{self.tokens} tokens of slots {batch.row_slots[:rows]} exceed {self.states.slots} states")
        a["tokens"], a["rows"], a["progress"] = self.tokens, rows, self.progress.word.ctypes.data
        a["starts"], a["contexts"] = batch.query_starts.ctypes.data, batch.context_lengths.ctypes.data
        a["row_slots"], a["emits"] = batch.row_slots.ctypes.data, batch.emits.ctypes.data

    def run(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The convolution of one layer; keeps the last inputs of the batch's rows.

        x: float32 [tokens, channels], contiguous. Returns float32 [tokens, channels], valid until the next run.
        """
        own, states = self.weights[layer], self.states.layers[layer]
        if own is None or states is None:
            raise ValueError(f"layer {layer} has no convolution")
        a, (weights, bias) = self.arguments, own
        a["x"], a["inputs"] = x.data_ptr(), states.inputs.data_ptr()
        a["weights"], a["bias"] = weights.data_ptr(), bias.data_ptr()
        self.begun[:] = 0
        run_on_threads(self.compiled.address, a.ctypes.data, self.threads)
        return self.out[: self.tokens]


class CpuShortConvolution:
    """The gated short convolutions of all layers of a model. Parameters: see CpuConvolution."""

    def __init__(
        self,
        model: DecoderDescription,
        layers: list[LayerWeights],
        states: RecurrentStates,
        max_tokens: int,
        progress: TorchProgress,
    ):
        if not isinstance(model.recurrence, ShortConvolution):
            raise ValueError(f"{model.name} has no short convolution")
        self.convolution = CpuConvolution(layers, states, max_tokens, silu=False, progress=progress)

    def begin(self, batch: Batch) -> None:
        """Read the metadata of one step. Raises ValueError for slots beyond the states."""
        self.convolution.begin(batch)

    def run(self, layer: int, projected: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Compute one layer up to its last projection, and advance the states of the batch's rows.

        projected: [tokens, 3 * channels], of B, C and x. normed: the layer's input after its norm; unused.
        Returns [tokens, channels] in the dtype of `projected`.
        """
        before, behind, x = projected.chunk(3, dim=-1)
        return (behind * self.convolution.run(layer, (before * x).float().contiguous())).to(projected.dtype)


def _taps_and_bias(layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [taps, channels] and biases [channels] of a convolution, float32."""
    weights: Any = layer.recurrent_conv
    taps = weights.float().t().contiguous()
    bias = layer.recurrent_conv_bias
    return taps, torch.zeros(taps.shape[1]) if bias is None else bias.float()
