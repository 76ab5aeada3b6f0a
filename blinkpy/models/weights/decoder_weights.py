"""A decoder's weights as torch tensors: from a checkpoint, or random."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.fp8_rows import LARGEST, Fp8Matrix, quantised_rows
from blinkpy.kernels.linear.packed_words import SCALE_BIAS, PackedMatrix, int4_scales
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.split import WHOLE, Share
from blinkpy.models.weights.array_loader import read_scales
from blinkpy.models.weights.checkpoint import StoredTensor, open_checkpoint
from blinkpy.models.weights.packed_loader import SYMMETRIC, PackedReader
from blinkpy.models.weights.packed_matrix import (
    arrange_heads,
    arrange_runs,
    dense,
    empty_packed,
    read_packed,
)
from blinkpy.models.weights.part import Part
from blinkpy.models.weights.rank_checkpoint import rank_checkpoint, rank_description
from blinkpy.models.weights.weight_parts import dtype_name, layer_parts, open_weights, outer_parts

# Loads tensors from files to a device: threads read pieces into staging buffers, and copies follow.
#
# For a GPU the buffers are pinned, so that a copy runs during the next reads, and the host never holds all
# weights. Files are read, not mapped, so a file that is truncated meanwhile causes an error with its name
# instead of a SIGBUS.

THREADS = 8
PIECE_BYTES = 16 << 20
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
STORED_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn}


class QuantisedRows(NamedTuple):
    """Rows of a matrix that are quantised to FP8 while loading."""

    values: torch.Tensor  # float8_e4m3fn [rows, columns]
    scales: torch.Tensor  # float32 [rows]

    def fill(self, source: torch.Tensor) -> None:
        """Quantise the source. It has as many numbers as the target, of any type."""
        values, scales = quantised_rows(source.view(self.values.shape))
        self.values.copy_(values)
        self.scales.copy_(scales)

    def pieces(self, numbers: int) -> list["QuantisedRows"]:
        """Pieces of whole rows, with at most `numbers` numbers each."""
        rows = numbers // self.values.shape[1]
        if rows == 0:
            raise ConfigError(f"rows of {self.values.shape[1]} numbers are too long for quantization while loading")
        return [QuantisedRows(*some) for some in zip(self.values.split(rows), self.scales.split(rows), strict=True)]


Target = torch.Tensor | QuantisedRows


def _split(target: Target, numbers: int) -> list[Target]:
    """Parts of a target, with at most `numbers` numbers each."""
    return [*target.pieces(numbers)] if isinstance(target, QuantisedRows) else [*target.view(-1).split(numbers)]


def _numel(target: Target) -> int:
    return target.values.numel() if isinstance(target, QuantisedRows) else target.numel()


class Staging:
    """A buffer between files and a device. Its holder fills it, copies from it, and releases it."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream | None):
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        self.memory: memoryview = self.tensor.numpy().data
        self._stream = stream
        self._copied = None if stream is None else torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the last copy has left the buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, dtype: torch.dtype, target: Target) -> None:
        """Start copying as many elements of a dtype as the target has. The target may have another dtype."""
        source = self.tensor[: _numel(target) * dtype.itemsize].view(dtype)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if isinstance(target, QuantisedRows):
                target.fill(source.to(target.values.device, non_blocking=True))
            elif target.is_cuda and target.dtype != dtype:
                target.copy_(source.to(target.device, non_blocking=True))  # the GPU converts faster
            else:
                target.copy_(source, non_blocking=True)
            if self._copied is not None:
                self._copied.record(self._stream)


def load_tensors(
    places: list[tuple[str, StoredTensor, Target]],
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    threads: int = THREADS,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Load tensors, given by name and place, each into a contiguous target with as many elements, of any
    float dtype.

    progress: called with the completed fraction, at each percent.
    piece_bytes: bytes of one read and copy.
    Raises ConfigError, and stops, if a file can't be read to the end.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    free: SimpleQueue[Staging] = SimpleQueue()
    for _ in range(2 * threads):
        free.put(Staging(piece_bytes, stream))
    with ExitStack() as closing:
        files = {path: closing.enter_context(open_weights(path)) for path in {stored.path for _, stored, _ in places}}
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))  # it may still write to the targets
            closing.callback(stream.synchronize)
        pool = ThreadPoolExecutor(threads, "loader")
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = []
        for name, stored, target in places:
            dtype, position = STORED_DTYPES[stored.dtype], 0
            for part in _split(target, piece_bytes // dtype.itemsize):
                size = _numel(part) * dtype.itemsize
                pieces.append((size, pool.submit(_load_piece, free, files[stored.path], name, stored, position, part)))
                position += size
        total, done, reported = sum(size for size, _ in pieces), 0, 0.0
        for size, piece in pieces:
            piece.result()
            done += size
            if done / total >= reported + 0.01 or done == total:
                reported = done / total
                progress(reported)


def _load_piece(free: SimpleQueue[Staging], file: FileIO, name: str, stored: StoredTensor, position: int, target: Target) -> None:
    staging, dtype = free.get(), STORED_DTYPES[stored.dtype]
    try:
        staging.wait()
        stored.read(staging.memory[: _numel(target) * dtype.itemsize], file, position, name)
        staging.copy(dtype, target)
    finally:
        free.put(staging)


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Matrix = torch.Tensor | Fp8Matrix | PackedMatrix

LARGEST_FP4 = 6.0
INTEGER_RANGE = 8.0
DUMMY_RANGE = 1e-3
"""Of weights for measurements, to either side: that of vLLM and SGLang, so that the GPU flips as many bits for each, and draws as
much power. At its power limit that decides its clock, too."""
DUMMY_INPUT_SCALE = 2.0**-5
"""Of static schemes: normed inputs are seldom above 14."""
DRAWN = 1 << 24
"""FP8 numbers at a time."""


@dataclass
class LayerWeights:
    """Weights of one layer. Projections are [out, in] and fused: qkv holds q, k and v heads; gate_up the
    gate, then up. A layer that reads another layer's keys and values has only queries in qkv, and no k_norm.

    An expert layer has a router [experts, hidden]. Its gate_up, down and their biases have a leading
    dimension for the expert, unlike its shared MLP. In MXFP4, gate_up, down and their scales are uint8: a
    byte has two weights, the first one in its lower half, so the last dimension is half as long. A scale is a
    power of two with an offset of 127. Norms with an offset are float32.

    A layer with a gated delta net has its channels and gate in qkv, its last projection in o, and the fields delta_...;
    a gate of attention's output comes after the values in qkv.

    k_scale, v_scale: factors of an FP8 cache's keys and values; None if the checkpoint has no such scales.

    With latent attention, qkv holds the rows of queries (with q_b, of its input), of the latent vector, and of the
    rotated part of keys. kv_b has for each head the rows of its keys' plain part, then those of its values. It is
    never quantised.
    """

    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: Matrix  # [hidden, heads * head_dim]
    gate_up: Matrix  # [2 * intermediate, hidden] or [experts, 2 * expert_size, hidden]
    down: Matrix  # [hidden, intermediate] or [experts, hidden, expert_size]
    input_norm: torch.Tensor | None = None  # [hidden] before attention
    attention_out_norm: torch.Tensor | None = None  # [hidden] after attention
    post_norm: torch.Tensor | None = None  # [hidden] before the MLP
    mlp_out_norm: torch.Tensor | None = None  # [hidden] after the MLP
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim] or [heads * head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim] or [kv_heads * head_dim]
    router: torch.Tensor | None = None  # [experts, hidden]
    router_bias: torch.Tensor | None = None  # [experts]
    selection_bias: torch.Tensor | None = None  # float32 [experts], or [1, experts] with RouterKind.BIASED_SOFTMAX_TOP_K
    shared_gate_up: Matrix | None = None  # [2 * shared, hidden]
    shared_down: Matrix | None = None  # [hidden, shared]
    shared_gate: torch.Tensor | None = None  # [1, hidden]
    shared_out_norm: torch.Tensor | None = None  # [hidden], as the two below; of an MLP parallel to experts
    experts_in_norm: torch.Tensor | None = None
    experts_out_norm: torch.Tensor | None = None
    router_norm: torch.Tensor | None = None  # float32 [hidden]
    expert_factors: torch.Tensor | None = None  # float32 [experts]
    layer_scale: torch.Tensor | None = None  # [1]
    layer_input_gate: Matrix | None = None  # [layer_inputs, hidden]
    layer_input_projection: Matrix | None = None  # [hidden, layer_inputs]
    layer_input_norm: torch.Tensor | None = None  # [hidden]
    sinks: torch.Tensor | None = None  # [heads]
    delta_ba: Matrix | None = None  # [2 * value_heads, hidden], of strengths and of decays
    delta_conv: torch.Tensor | None = None  # [channels, taps], the last tap for the token itself
    delta_decay: torch.Tensor | None = None  # float32 [value_heads], logarithm of the rate
    delta_bias: torch.Tensor | None = None  # float32 [value_heads], of decays
    delta_norm: torch.Tensor | None = None  # [value_dim]
    gate_up_scales: torch.Tensor | None = None  # [experts, 2 * expert_size, hidden / 32]
    down_scales: torch.Tensor | None = None  # [experts, hidden, expert_size / 32]
    k_scale: float | None = None
    v_scale: float | None = None
    q_b: Matrix | None = None  # [heads * (plain + rotated), q_rank]
    kv_b: torch.Tensor | None = None  # [heads * (plain + value), rank]


@dataclass
class Weights:
    """All weights of a decoder, of one dtype except norms, and on one device. Tied embeddings: lm_head is the
    embedding.
    """

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]
    layer_embedding: torch.Tensor | None = None  # [vocab, layers * layer_inputs]
    layer_projection: torch.Tensor | None = None  # [layers * layer_inputs, hidden]
    layer_projection_norm: torch.Tensor | None = None  # [layer_inputs]
    draft_embedding_norm: torch.Tensor | None = None  # [hidden], as the two below; around a draft layer
    draft_hidden_norm: torch.Tensor | None = None
    draft_norm: torch.Tensor | None = None
    draft_projection: torch.Tensor | None = None  # [hidden, 2 * hidden], of the embedding, then of the hidden state

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def choose_dtype(model: DecoderDescription, requested: str, device: str) -> torch.dtype:
    """The dtype for computing: see dtype_name."""
    return TORCH_DTYPES[dtype_name(model, requested, device)]


def embedding_factor(model: DecoderDescription, dtype: torch.dtype) -> float:
    """The factor of embeddings in a dtype."""
    factor = model.factors.embedding
    return float(torch.tensor(factor).to(dtype)) if model.factors.rounded else factor


def layer_embedding_factor(model: DecoderDescription, dtype: torch.dtype) -> float:
    """The factor of the embeddings for each layer in a dtype."""
    return float(torch.tensor(model.layer_inputs**0.5).to(dtype))


def own_dtype(part: Part, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight, for a decoder with weights of type `dtype`."""
    return torch.uint8 if part.packed else torch.float32 if part.wide else dtype


def _assemble(
    model: DecoderDescription,
    make: Callable[[Part], torch.Tensor],
    make_fp8: Callable[[Part], Fp8Matrix],
    make_packed: Callable[[Part], PackedMatrix],
    cache_scales: list[dict[str, float]] | None = None,
    share: Share = WHOLE,
) -> Weights:
    """Build all weights.

    make, make_fp8, make_packed: build the weight of a part.
    cache_scales: scales of each layer's cache.
    share: whose output head it is, if that is a part of the embedding.
    """
    outer, layers = {part.field: make(part) for part in outer_parts(model)}, []
    for layer in range(len(model.layers)):
        weights: dict[str, Any] = {} if cache_scales is None else dict(cache_scales[layer])
        for part in layer_parts(model, layer):
            form = make_packed if part.packing is not None else make if part.quantization is None else make_fp8
            weights[part.field] = form(part)
        layers.append(LayerWeights(**weights))
    head = share.head(model.vocab_size)
    tied = {"lm_head": outer["embedding"][head.start : head.stop]}
    return Weights(**(tied | outer), layers=layers)


def load_weights(
    model: DecoderDescription,
    folder: str | Path,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Callable[[float], None] = lambda share: None,
    share: Share = WHOLE,
) -> Weights:
    """Load a checkpoint, or a rank's part of it.

    progress: called with the completed fraction of the bytes.
    share: the rank's share; a bias of a matrix whose results are summed over ranks is 0 on all ranks but the first.

    All headers are checked before memory is allocated; then tensors are read piece by piece into their
    places. Raises ConfigError (see open_checkpoint), also for a truncated file.
    """
    stored = open_checkpoint(model, folder)
    if share.ranks > 1:
        model, stored = rank_checkpoint(model, share, stored)
    scales, packed = read_scales(model, stored), None if model.packing is None else PackedReader(model.packing, stored)
    if packed is not None:
        packed.check(model)
    places: list[tuple[str, StoredTensor, Target]] = []
    arranged, changed = list[tuple[torch.Tensor, Part]](), list[tuple[torch.Tensor, float, float]]()
    quantised: list[tuple[Part, Fp8Matrix]] = []

    def make(part: Part) -> torch.Tensor:
        if not part.sources:
            return torch.ones(part.shape, dtype=own_dtype(part, dtype), device=device)
        result = torch.empty(part.shape, dtype=own_dtype(part, dtype), device=device)
        for name, shape, expert, row in part.sources:
            target = result if expert < 0 else result[expert]
            places.append((name, stored[name], target[row : row + shape[0]]))
        if part.transposed or part.interleaved or part.pairs_of or part.runs:
            arranged.append((result, part))
        if (part.offset, part.factor) != (0, 1):
            changed.append((result, part.offset, part.factor))
        return result

    def make_fp8(part: Part) -> Fp8Matrix:
        found = scales.of_parts.get(part.sources[0][0])
        result = _empty_fp8(part, device, None if found is None else found.inputs)
        if found is not None:
            result.scales.copy_(torch.from_numpy(found.weights))
        else:
            quantised.append((part, result))
        for name, shape, expert, row in part.sources:
            values, own = (result.values, result.scales) if expert < 0 else (result.values[expert], result.scales[expert])
            rows = slice(row, row + shape[0])  # of a matrix, or experts of a tensor that holds all of them
            target = QuantisedRows(values[rows].flatten(0, -2), own[rows].flatten())
            places.append((name, stored[name], target if found is None else values[rows]))
        if part.pairs_of:
            arranged.extend((rows, part) for rows in ((result.values,) if result.blocks else (result.values, result.scales)))
        if part.runs:
            arranged.extend((rows, part) for rows in (result.values, result.scales))
        if part.factor != 1:
            changed.append((result.scales, 0, part.factor))
        return result

    def make_packed(part: Part) -> PackedMatrix:
        if packed is None:
            raise ValueError("a 4-bit matrix of a model without a packing")
        return read_packed(part, packed, device)

    weights = _assemble(model, make, make_fp8, make_packed, scales.of_cache, share)
    load_tensors(places, torch.device(device), progress)
    for part, matrix in quantised:
        if not bool(matrix.scales.isfinite().all()):
            raise ConfigError(f"{folder}: {part.sources[0][0]}, or a matrix fused with it, has non-finite values")
    for tensor, part in arranged:
        if part.runs:
            arrange_runs(tensor, part.runs, unit=part.shape[0] // len(tensor))
        elif part.pairs_of:
            arrange_heads(tensor, *part.pairs_of)
        else:
            arrange_experts(tensor, part)
    for tensor, offset, factor in changed:
        tensor.add_(offset).mul_(factor)
    return _dequantised(_biased_once(weights, share))


def _biased_once(weights: Weights, share: Share) -> Weights:
    for layer in weights.layers if share.rank else ():
        for bias in (layer.o_bias, layer.down_bias):
            if bias is not None:
                bias.zero_()
    return weights


def _dequantised(weights: Weights) -> Weights:
    for layer in weights.layers:
        layer.kv_b = None if layer.kv_b is None else dense(layer.kv_b, weights.dtype)
    return weights


def _empty_fp8(part: Part, device: str, input_scale: float | None) -> Fp8Matrix:
    values = torch.empty(part.shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Matrix(values, torch.empty(part.scale_shape, dtype=torch.float32, device=device), input_scale)


def arrange_experts(weight: torch.Tensor, part: Part) -> None:
    """Convert from the checkpoint's order to the decoder's, in place, one expert at a time.

    weight: [experts, rows] or [experts, rows, columns], whose memory holds the stored tensor.
    """
    for expert in weight:
        stored = expert.clone()
        if part.transposed:
            stored = stored.view(expert.shape[1], expert.shape[0]).t()
        if part.interleaved:
            stored = stored.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        expert.copy_(stored)


def dummy_weights(
    model: DecoderDescription,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    spread: float = DUMMY_RANGE,
    share: Share = WHOLE,
) -> Weights:
    """Random weights without a checkpoint (`--load-format dummy`): uniform in [-spread, spread), norms 1;
    equal for equal seeds. With a share, they have the sizes of a rank; weights that are whole on all ranks are equal there.

    MXFP4: random bits, with a scale that keeps them within the spread. FP8: uniform, too; all scales are
        equal.
    """
    model = rank_description(model, share)
    generator, of_head = (torch.Generator(device).manual_seed(int(np.int64(seed))) for _ in range(2))

    def make(part: Part) -> torch.Tensor:
        result = torch.empty(part.shape, dtype=own_dtype(part, dtype), device=device)
        if part.packed and part.field.endswith("_scales"):
            return result.fill_(127 + math.floor(math.log2(spread / LARGEST_FP4)))
        if part.packed:
            return result.random_(0, 256, generator=generator)
        if part.field.endswith(("norm", "layer_scale", "expert_factors")):
            return result.fill_(1)
        own_numbers = part.field == "lm_head" and share.ranks > 1  # ranks differ in the number of these rows
        return result.uniform_(-spread, spread, generator=of_head if own_numbers else generator)

    def make_fp8(part: Part) -> Fp8Matrix:
        result = _empty_fp8(part, device, DUMMY_INPUT_SCALE if part.quantization and part.quantization.static else None)
        result.scales.fill_(spread / LARGEST)
        for some in result.values.view(-1).split(DRAWN):
            numbers = torch.empty(len(some), dtype=torch.float32, device=device)
            some.copy_(numbers.uniform_(-LARGEST, LARGEST, generator=generator))
        return result

    def make_packed(part: Part) -> PackedMatrix:
        result = empty_packed(part, device)
        result.words.random_(-(2**31), 2**31, generator=generator)
        if result.factors is not None:
            result.scales.view(torch.uint8).fill_(SCALE_BIAS << 3)  # 1
            result.factors.fill_(spread / LARGEST_FP4)
        else:
            scales = torch.full(result.scales.shape, spread / INTEGER_RANGE)
            result.scales.copy_(int4_scales(scales, torch.full(scales.shape, SYMMETRIC)))
        return result

    return _dequantised(_biased_once(_assemble(model, make, make_fp8, make_packed, share=share), share))
