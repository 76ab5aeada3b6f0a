"""Gated delta nets on the CPU: a compiled pass for the convolution, the recurrence, and the norm and gate of its results.

The recurrence is computed token by token in float32, so a token's result does not depend on its prompt's chunks.
"""

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit, types

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.kv import state as S
from blinkpy.kv.state import DRAFT, Batch
from blinkpy.models.cpu.cpu_attention import run_on_threads, team_size
from blinkpy.models.cpu.passes.njit_math import FAST, exp2, larger, pointer_to, take_number
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import GatedDelta
from blinkpy.models.recurrent_states import RecurrentStates
from blinkpy.models.weights.decoder_weights import LayerWeights

_ADDRESSES = (
    "projected",  # float32 [tokens, in_size]: channels (queries, keys, values), then gates
    *("decays", "strengths"),  # float32 [tokens, value_heads]
    "out",  # float32 [tokens, value_heads, DV]
    "matrices",  # float32 [slots, value_heads, DK, DV]
    "inputs",  # float32 [slots, taps - 1 + drafts, channels]
    "drafted",  # float32 [slots, drafts, value_heads, DK + DV + 2], as LayerStates.drafted
    "held",  # int32 [slots], tokens that the matrices include
    "weights",  # float32 [taps, channels]
    "norm",  # float32 [DV]
    *("starts", "contexts", "row_slots", "emits"),  # int32 [rows + 1], [rows], [rows], [rows]
    "scratch",  # float32 [threads, channels of a key head]
    "sums",  # float32 [threads, DV]
    "ahead",  # float32 [threads, value heads of a key head, DK, DV], matrices after drafts; unused without drafts
    "begun",  # int64 [2], numbers of threads and units of work that have begun: 0 before each pass
    "progress",  # int64, counts units of work, for the watchdog
)
_SIZES = ("tokens", "rows", "threads", "slots", "key_heads", "value_heads", "taps", "drafts")
ARGUMENTS = np.dtype([*((name, np.int64) for name in (*_ADDRESSES, *_SIZES)), ("eps", np.float32)], align=True)
L2_EPS = 1e-6  # added to the squares of a query or key
LOG2_E = np.float32(1.44269504)

inlined = njit(inline="always")


@functools.lru_cache(maxsize=32)
def compile_delta(key_dim: int, value_dim: int) -> Any:
    """Compile the pass for one size of keys and values. Returns Numba's CFunc; see
    blinkpy.models.cpu.passes.cpu_attention_pass.compile_pass.
    """
    DK, DV = key_dim, value_dim

    def delta_pass(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (1,), ARGUMENTS)[0]
        thread, taps = take_number(a.begun), a.taps
        key_heads, heads = a.key_heads, a.value_heads
        shared = heads // key_heads
        channels = 2 * key_heads * DK + heads * DV
        own = 2 * DK + shared * DV  # channels of a key head, its query first
        projected = carray(pointer_to(a.projected), (a.tokens, channels + heads * DV), np.float32)
        decays = carray(pointer_to(a.decays), (a.tokens, heads), np.float32)
        strengths = carray(pointer_to(a.strengths), (a.tokens, heads), np.float32)
        out = carray(pointer_to(a.out), (a.tokens, heads, DV), np.float32)
        matrices = carray(pointer_to(a.matrices), (a.slots, heads, DK, DV), np.float32)
        inputs = carray(pointer_to(a.inputs), (a.slots, taps - 1 + a.drafts, channels), np.float32)
        drafted = carray(pointer_to(a.drafted), (a.slots, a.drafts, heads, DK + DV + 2), np.float32)
        held = carray(pointer_to(a.held), (a.slots,), np.int32)
        weights = carray(pointer_to(a.weights), (taps, channels), np.float32)
        norm = carray(pointer_to(a.norm), (DV,), np.float32)
        starts = carray(pointer_to(a.starts), (a.rows + 1,), np.int32)
        contexts = carray(pointer_to(a.contexts), (a.rows,), np.int32)
        row_slots = carray(pointer_to(a.row_slots), (a.rows,), np.int32)
        emits = carray(pointer_to(a.emits), (a.rows,), np.int32)
        x = carray(pointer_to(a.scratch), (a.threads, own), np.float32)[thread]
        sums = carray(pointer_to(a.sums), (a.threads, DV), np.float32)[thread]
        ahead = carray(pointer_to(a.ahead), (a.threads, shared, DK, DV), np.float32)[thread]

        unit = take_number(a.begun + 8)  # one key head of a row
        while unit < a.rows * key_heads:
            row = unit // key_heads
            g = unit - row * key_heads
            if emits[row] != DRAFT:
                start, end, slot = np.int64(starts[row]), np.int64(starts[row + 1]), np.int64(row_slots[row])
                carried, before, repeated = inputs[slot], np.int64(contexts[row]) - (end - start), np.int64(0)
                if before == 0:  # a new sequence
                    for j in range(taps - 1):
                        clear(carried[j, g * DK : (g + 1) * DK])
                        clear(carried[j, (key_heads + g) * DK : (key_heads + g + 1) * DK])
                        clear(carried[j, 2 * key_heads * DK + g * shared * DV : 2 * key_heads * DK + (g + 1) * shared * DV])
                    for h in range(g * shared, (g + 1) * shared):
                        for k in range(DK):
                            clear(matrices[slot, h, k])
                else:
                    repeated = min(max(before - np.int64(held[slot]), np.int64(0)), a.drafts)
                for j in range(repeated):  # drafts of the previous step that were correct
                    for h in range(g * shared, (g + 1) * shared):
                        d = drafted[slot, j, h]
                        key, value = d[:DK], d[DK : DK + DV]
                        advance(key, key, value, d[DK + DV], d[DK + DV + 1], matrices[slot, h], sums, out[start, h])
                drafts = np.int64(0)
                while drafts < a.drafts and row + drafts + 1 < a.rows and emits[row + drafts + 1] == DRAFT:
                    drafts += 1
                for t in range(start, end + drafts):
                    convolve(projected, carried, weights, start, repeated, t, g * DK, x[:DK])
                    convolve(projected, carried, weights, start, repeated, t, (key_heads + g) * DK, x[DK : 2 * DK])
                    convolve(projected, carried, weights, start, repeated, t, 2 * key_heads * DK + g * shared * DV, x[2 * DK :])
                    normalise(x[:DK], np.float32(1) / np.sqrt(np.float32(DK)))
                    normalise(x[DK : 2 * DK], np.float32(1))
                    for i in range(shared):
                        h = g * shared + i
                        v = x[2 * DK + i * DV : 2 * DK + (i + 1) * DV]
                        matrix = matrices[slot, h]
                        if t >= end:  # whether a draft is correct is known only in the next step
                            d = drafted[slot, t - end, h]
                            copy(d[:DK], x[DK : 2 * DK])
                            copy(d[DK : DK + DV], v)
                            d[DK + DV], d[DK + DV + 1] = decays[t, h], strengths[t, h]
                            if t == end:
                                for k in range(DK):
                                    copy(ahead[i, k], matrix[k])
                            matrix = ahead[i]
                        advance(x[:DK], x[DK : 2 * DK], v, decays[t, h], strengths[t, h], matrix, sums, out[t, h])
                        gate(out[t, h], projected[t, channels + h * DV : channels + (h + 1) * DV], norm, a.eps)
                keep(projected, carried, start, end, repeated, drafts, taps - 1, g * DK, DK)
                keep(projected, carried, start, end, repeated, drafts, taps - 1, (key_heads + g) * DK, DK)
                first, count = 2 * key_heads * DK + g * shared * DV, shared * DV
                keep(projected, carried, start, end, repeated, drafts, taps - 1, first, count)
            take_number(a.progress)
            unit = take_number(a.begun + 8)

    return cached_cfunc(delta_pass, types.void(types.voidptr), (key_dim, value_dim), error_model="numpy", fastmath=FAST)


@inlined
def clear(x):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        x[i] = np.float32(0)


@inlined
def silu(x):  # type: ignore[no-untyped-def]
    return x / (np.float32(1) + exp2(min(larger(-x * LOG2_E, np.float32(-126)), np.float32(126))))


@inlined
def copy(target, source):  # type: ignore[no-untyped-def]
    for i in range(len(target)):
        target[i] = source[i]


@inlined
def convolve(projected, carried, weights, start, repeated, t, first, target):  # type: ignore[no-untyped-def]
    """target = silu of the convolution of the channels from `first` on, at token t of a row that starts at `start`, after
    `repeated` drafts.
    """
    taps = len(weights)
    for c in range(len(target)):
        target[c] = projected[t, first + c] * weights[taps - 1, first + c]
    for j in range(taps - 1):
        at = t - (taps - 1) + j
        if at >= start:
            for c in range(len(target)):
                target[c] += projected[at, first + c] * weights[j, first + c]
        else:
            for c in range(len(target)):
                target[c] += carried[taps - 1 + at - start + repeated, first + c] * weights[j, first + c]
    for c in range(len(target)):
        target[c] = silu(target[c])


@inlined
def keep(projected, carried, start, end, repeated, drafts, kept, first, count):  # type: ignore[no-untyped-def]
    """Save the last `kept` inputs of some channels for the request's next token, and the inputs of the row's drafts."""
    for j in range(kept):
        at = end - kept + j
        for c in range(first, first + count):
            carried[j, c] = projected[at, c] if at >= start else carried[kept + at - start + repeated, c]
    for j in range(drafts):
        for c in range(first, first + count):
            carried[kept + j, c] = projected[end + j, c]


@inlined
def normalise(x, factor):  # type: ignore[no-untyped-def]
    """x = factor * x / |x|, in place."""
    square = np.float32(0)
    for i in range(len(x)):
        square += x[i] * x[i]
    scale = factor / np.sqrt(square + np.float32(L2_EPS))
    for i in range(len(x)):
        x[i] *= scale


@inlined
def advance(q, k, v, decay, strength, matrix, sums, out):  # type: ignore[no-untyped-def]
    """Advance a head's matrix by one token, and compute its result. See blinkpy.models.description.recurrent_blocks.GatedDelta.

    q, k: float32 [DK]; v, sums (scratch), out: [DV]; matrix: [DK, DV], changed in place.
    """
    DV = len(v)
    clear(sums)
    for i in range(len(k)):
        for d in range(DV):
            sums[d] += k[i] * matrix[i, d]
    for d in range(DV):
        sums[d] = strength * (v[d] - decay * sums[d])
        out[d] = np.float32(0)
    for i in range(len(k)):
        for d in range(DV):
            new = decay * matrix[i, d] + k[i] * sums[d]
            matrix[i, d] = new
            out[d] += q[i] * new


@inlined
def gate(x, gates, norm, eps):  # type: ignore[no-untyped-def]
    """x = norm(x) * silu(gates), in place. All: float32 [DV]."""
    square = np.float32(0)
    for d in range(len(x)):
        square += x[d] * x[d]
    scale = np.float32(1) / np.sqrt(square / np.float32(len(x)) + eps)
    for d in range(len(x)):
        x[d] *= scale * norm[d] * silu(gates[d])


class CpuDelta:
    """The gated delta nets of all layers of a model.

    states: states of the request slots; changed by each run.
    max_tokens: tokens of the largest batch.
    progress: advances during a step.
    """

    def __init__(
        self,
        model: DecoderDescription,
        layers: list[LayerWeights],
        states: RecurrentStates,
        max_tokens: int,
        progress: TorchProgress,
    ):
        if not isinstance(model.recurrence, GatedDelta):
            raise ValueError(f"{model.name} has no gated delta net")
        self.layers = layers
        self.states = states
        self.progress = progress
        self.threads = team_size()
        delta = model.recurrence
        self.compiled = compile_delta(delta.key_dim, delta.value_dim)
        self.out = torch.empty(max_tokens, delta.value_size)
        self.begun = np.zeros(2, np.int64)
        own = 2 * delta.key_dim + delta.value_heads // delta.key_heads * delta.value_dim
        scratch, sums = torch.empty(self.threads, own), torch.empty(self.threads, delta.value_dim)
        shared = delta.value_heads // delta.key_heads if states.drafts else 0
        ahead = torch.empty(self.threads, shared, delta.key_dim, delta.value_dim)
        self.arguments = a = np.zeros(1, ARGUMENTS)
        a["scratch"], a["sums"], a["begun"] = scratch.data_ptr(), sums.data_ptr(), self.begun.ctypes.data
        a["out"], a["threads"], a["slots"], a["eps"] = self.out.data_ptr(), self.threads, states.slots, model.norm.eps
        a["key_heads"], a["value_heads"], a["taps"] = delta.key_heads, delta.value_heads, delta.taps
        self.weights = [  # weights of convolution and norm, regardless of the other weights' dtype
            None
            if layer.recurrent_conv is None or layer.recurrent_norm is None
            else (layer.recurrent_conv.float().t().contiguous(), layer.recurrent_norm.float())
            for layer in layers
        ]
        a["ahead"], a["held"], a["drafts"] = ahead.data_ptr(), states.held.data_ptr(), states.drafts
        self.kept = scratch, sums, ahead  # keeps the memory behind the arguments alive

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

    def run(self, layer: int, projected: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Compute one layer up to its last projection, and advance the states of the batch's rows.

        projected: [tokens, in_size]. normed: [tokens, hidden], the layer's input after its norm.
        Returns [tokens, value_size] in the dtype of `projected`, valid until the next run.
        """
        weights, own, states = self.layers[layer], self.weights[layer], self.states.layers[layer]
        if own is None or states is None or weights.delta_ba is None:
            raise ValueError(f"layer {layer} has no gated delta net")
        strengths, rates = self.progress.linear(normed, weights.delta_ba).float().chunk(2, dim=-1)
        strengths = strengths.sigmoid()
        decays = (F.softplus(rates + weights.recurrent_bias) * -weights.recurrent_decay.exp()).exp()  # type: ignore[operator, union-attr]
        wide = projected.float().contiguous()
        a = self.arguments
        for name, tensor in {"projected": wide, "decays": decays, "strengths": strengths, "matrices": states.matrices}.items():
            a[name] = tensor.data_ptr()
        a["inputs"], a["drafted"] = states.inputs.data_ptr(), states.drafted.data_ptr()
        a["weights"], a["norm"] = own[0].data_ptr(), own[1].data_ptr()
        self.begun[:] = 0
        run_on_threads(self.compiled.address, a.ctypes.data, self.threads)
        return self.out[: self.tokens].to(projected.dtype)
