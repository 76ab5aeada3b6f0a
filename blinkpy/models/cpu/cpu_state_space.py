"""State-space layers (Mamba-2) on the CPU: a compiled pass for the recurrence, after the convolution's pass.

The recurrence is computed token by token in float32, so a token's result does not depend on its prompt's chunks.
"""

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, types

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.kv.state import DRAFT, Batch
from blinkpy.models.cpu.cpu_attention import run_on_threads
from blinkpy.models.cpu.cpu_convolution import CpuConvolution
from blinkpy.models.cpu.cpu_delta import clear, copy
from blinkpy.models.cpu.passes.njit_math import FAST, pointer_to, take_number
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import StateSpace
from blinkpy.models.recurrent_states import RecurrentStates
from blinkpy.models.weights.decoder_weights import LayerWeights

_ADDRESSES = (
    "mixed",  # float32 [tokens, heads * DV + 2 * groups * DK]: values, keys, queries
    *("decays", "steps"),  # float32 [tokens, heads]
    "out",  # float32 [tokens, heads, DV]
    "matrices",  # float32 [slots, heads, DK, DV]
    "drafted",  # float32 [slots, drafts, heads, DK + DV + 1]: key times time step, value, decay
    "held",  # int32 [slots], tokens that the matrices include
    "ahead",  # float32 [threads, DK, DV], a matrix after drafts
    *("starts", "contexts", "row_slots", "emits"),  # int32 [rows + 1], [rows], [rows], [rows]
    "begun",  # int64 [2], numbers of threads and units of work that have begun: 0 before each pass
    "progress",  # int64, counts units of work, for the watchdog
)
_SIZES = ("tokens", "rows", "threads", "slots", "heads", "groups", "drafts")
ARGUMENTS = np.dtype([(name, np.int64) for name in (*_ADDRESSES, *_SIZES)], align=True)


@functools.lru_cache(maxsize=32)
def compile_space(key_dim: int, value_dim: int) -> Any:
    """Compile the pass for one size of keys and values. Returns Numba's CFunc; see
    blinkpy.models.cpu.passes.cpu_attention_pass.compile_pass.
    """
    DK, DV = key_dim, value_dim

    def space_pass(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (1,), ARGUMENTS)[0]
        thread, heads, groups = take_number(a.begun), a.heads, a.groups
        mixed = carray(pointer_to(a.mixed), (a.tokens, heads * DV + 2 * groups * DK), np.float32)
        decays = carray(pointer_to(a.decays), (a.tokens, heads), np.float32)
        steps = carray(pointer_to(a.steps), (a.tokens, heads), np.float32)
        out = carray(pointer_to(a.out), (a.tokens, heads, DV), np.float32)
        matrices = carray(pointer_to(a.matrices), (a.slots, heads, DK, DV), np.float32)
        drafted = carray(pointer_to(a.drafted), (a.slots, a.drafts, heads, DK + DV + 1), np.float32)
        held = carray(pointer_to(a.held), (a.slots,), np.int32)
        ahead = carray(pointer_to(a.ahead), (a.threads, DK, DV), np.float32)[thread]
        starts = carray(pointer_to(a.starts), (a.rows + 1,), np.int32)
        contexts = carray(pointer_to(a.contexts), (a.rows,), np.int32)
        row_slots = carray(pointer_to(a.row_slots), (a.rows,), np.int32)
        emits = carray(pointer_to(a.emits), (a.rows,), np.int32)

        unit = take_number(a.begun + 8)  # one head of a row
        while unit < a.rows * heads:
            row = unit // heads
            h = unit - row * heads
            if emits[row] != DRAFT:
                start, end, slot = np.int64(starts[row]), np.int64(starts[row + 1]), np.int64(row_slots[row])
                before, repeated, matrix = np.int64(contexts[row]) - (end - start), np.int64(0), matrices[slot, h]
                if before == 0:  # a new sequence
                    for k in range(DK):
                        clear(matrix[k])
                else:
                    repeated = min(max(before - np.int64(held[slot]), np.int64(0)), a.drafts)
                for j in range(repeated):  # drafts of the previous step that were correct
                    d = drafted[slot, j, h]
                    for k in range(DK):
                        for v in range(DV):
                            matrix[k, v] = d[DK + DV] * matrix[k, v] + d[k] * d[DK + v]
                drafts = np.int64(0)
                while drafts < a.drafts and row + drafts + 1 < a.rows and emits[row + drafts + 1] == DRAFT:
                    drafts += 1
                at = heads * DV + h // (heads // groups) * DK
                for t in range(start, end + drafts):
                    value = mixed[t, h * DV : (h + 1) * DV]
                    key, query = mixed[t, at : at + DK], mixed[t, at + groups * DK : at + groups * DK + DK]
                    step, decay, result = steps[t, h], decays[t, h], out[t, h]
                    if t >= end:  # whether a draft is correct is known only in the next step
                        d = drafted[slot, t - end, h]
                        for k in range(DK):
                            d[k] = step * key[k]
                        copy(d[DK : DK + DV], value)
                        d[DK + DV] = decay
                        if t == end:
                            for k in range(DK):
                                copy(ahead[k], matrix[k])
                            matrix = ahead
                    clear(result)
                    for k in range(DK):
                        scaled = step * key[k]
                        for v in range(DV):
                            new = decay * matrix[k, v] + scaled * value[v]
                            matrix[k, v] = new
                            result[v] += query[k] * new
            take_number(a.progress)
            unit = take_number(a.begun + 8)

    return cached_cfunc(space_pass, types.void(types.voidptr), (key_dim, value_dim), error_model="numpy", fastmath=FAST)


class CpuStateSpace:
    """The state-space layers of a model.

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
        if not isinstance(model.recurrence, StateSpace):
            raise ValueError(f"{model.name} has no state-space layers")
        self.space, self.layers, self.states, self.eps = model.recurrence, layers, states, model.norm.eps
        self.convolution = CpuConvolution(layers, states, max_tokens, silu=True, progress=progress)
        self.compiled = compile_space(self.space.key_dim, self.space.value_dim)
        self.out = torch.empty(max_tokens, self.space.value_size)
        self.begun, threads = np.zeros(2, np.int64), self.convolution.threads
        self.ahead = torch.empty(threads if states.drafts else 1, self.space.key_dim, self.space.value_dim)
        self.arguments = a = np.zeros(1, ARGUMENTS)
        a["begun"], a["out"], a["ahead"] = self.begun.ctypes.data, self.out.data_ptr(), self.ahead.data_ptr()
        a["held"], a["slots"], a["drafts"] = states.held.data_ptr(), states.slots, states.drafts
        a["heads"], a["groups"], a["threads"] = self.space.heads, self.space.groups, threads

    def begin(self, batch: Batch) -> None:
        """Read the metadata of one step. Raises ValueError for slots beyond the states."""
        self.convolution.begin(batch)
        for name in ("tokens", "rows", "progress", "starts", "contexts", "row_slots", "emits"):
            self.arguments[name] = self.convolution.arguments[name]

    def run(self, layer: int, projected: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Compute one layer up to its last projection, and advance the states of the batch's rows.

        projected: [tokens, in_size]. normed: the layer's input after its norm; unused.
        Returns [tokens, value_size] in the dtype of `projected`.
        """
        weights, states, space, a = self.layers[layer], self.states.layers[layer], self.space, self.arguments
        log_rates, biases, skips = weights.recurrent_decay, weights.recurrent_bias, weights.recurrent_skip
        norm = weights.recurrent_norm
        if states is None or log_rates is None or biases is None or skips is None or (norm is None and space.normed):
            raise ValueError(f"layer {layer} has no state space")
        channels, gates, steps = projected.float().split([space.channels, space.value_size, space.heads], dim=-1)
        mixed = self.convolution.run(layer, channels.contiguous())
        steps = F.softplus(steps + biases)
        decays = (steps * -log_rates.exp()).exp()
        for name, tensor in {"mixed": mixed, "decays": decays, "steps": steps, "matrices": states.matrices}.items():
            a[name] = tensor.data_ptr()
        a["drafted"] = states.drafted.data_ptr()
        self.begun[:] = 0
        run_on_threads(self.compiled.address, a.ctypes.data, self.convolution.threads)
        tokens, values = len(projected), mixed[:, : space.value_size].unflatten(1, (space.heads, -1))
        found = self.out[:tokens].view_as(values) + skips[:, None] * values
        gated = found.flatten(1) * F.silu(gates)
        if norm is not None:
            grouped = gated.unflatten(1, (space.groups, -1))
            grouped = grouped * (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            gated = grouped.flatten(1) * norm.float()
        return gated.to(projected.dtype)
