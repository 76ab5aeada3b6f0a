"""The memory that an engine needs on a GPU, by part, computed before loading."""

from collections.abc import Iterator
from dataclasses import dataclass

from blinkpy.config import NGRAM, Config, ConfigError
from blinkpy.kernels import (
    MAX_EXPERTS,
    MAX_FP8_WIDTH,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_HIDDEN,
    MAX_LATENT,
    MAX_ROTATED,
    MAX_STATE,
    MAX_TOP_K,
    MIN_HEAD_DIM,
    ONE_SHOT_BYTES,
)
from blinkpy.models.description.blocks import Experts, NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.packing import Packing
from blinkpy.models.paged_cache import cache_itemsize, ring_bytes, ring_sizes
from blinkpy.models.recurrent_states import pool_bytes, settled_slots, settled_snapshots, snapshot_bytes
from blinkpy.models.weights.parts.part import Part
from blinkpy.models.weights.parts.weight_parts import layer_parts
from blinkpy.models.weights.parts.weight_sizes import weight_bytes

GRAPHS_AND_MODULES = 1 << 30
"""Reserve for captured graphs, loaded kernels, cuBLAS and fragmentation, bytes."""
PER_PAGE_STATE = 160
"""Bytes of scheduler state of one page, without its token ids."""
PER_SLOT_STATE = 640
DECODE_SPLITS = 64
"""Most parts that the keys of one decode row are split into."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. `cache` is the remainder for the KV cache within the permitted share."""

    parts: dict[str, int]
    free: int  # at the start
    total: int
    share: float  # permitted share of the total
    slots: int = 0  # request slots

    @property
    def usable(self) -> int:
        """Bytes that may still be allocated: the permitted share of the total, minus the memory in use."""
        return max(0, int(self.total * self.share) - (self.total - self.free))

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def cache(self) -> int:
        return self.usable - self.needed

    def describe(self) -> str:
        """A text with the required memory of each part, without the KV cache."""
        return ", ".join(f"{name} {gib(value)}" for name, value in self.parts.items() if value)

    def require(self, cache_bytes: int) -> None:
        """Raise ConfigError, with needed and free memory by part, unless the KV cache gets at least this
        number of bytes.
        """
        if self.cache >= cache_bytes:
            return
        listed = f"{self.describe()}, KV cache at least {gib(cache_bytes)}"
        raise ConfigError(
            f"the model does not fit on the GPU: {gib(self.needed + cache_bytes)} needed ({listed}), {gib(self.usable)} usable "
            f"(gpu_memory_utilization {self.share:g} of {gib(self.total)}, of which {gib(self.free)} are free)"
            + ("; lower slots, since each needs a window ring" if self.parts.get("window rings") else "")
            + (f"; lower slots ({self.slots}), since each needs a recurrent state" if self.parts.get("recurrent states") else "")
            + ("; lower state_snapshots" if self.parts.get("state snapshots") else "")
        )


def gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"


def activation_bytes(model: DecoderDescription, tokens: int, rows: int, max_model_len: int, itemsize: int) -> int:
    """Upper bound of the decoder's buffers and workspaces for the largest step."""
    expert_width = model.experts.top_k * (3 * model.experts.size + model.hidden_size)
    gates = 0 if model.attention.gate is None else model.q_size
    block = model.recurrence
    recurrent = 0 if block is None else block.in_size + block.channels + block.out_size
    streams = (5 if model.experts.parallel else 3) + (4 if model.drafting or model.inputs else 0)
    width = streams * model.hidden_size + _attention_width(model) + gates + recurrent + 3 * model.mlp_size + expert_width
    width += (len(model.layers) + 1) * model.layer_inputs + _read_width(model)
    quantised = 0 if model.quantization is None else tokens * (width + width // 32)  # inputs as FP8, with their scales
    of_row = 4 if model.inputs else 3 if model.drafting else 2  # number of residual streams and their norms
    last = of_row * rows * model.hidden_size
    logits = 3 * rows * model.vocab_size * 4  # and the sampler's copies
    decode = rows * model.heads * DECODE_SPLITS * (model.head_dim + 2) * 4
    rope = 8 * max_model_len * sum(rope.rotary_dim // 2 for rope in model.ropes)
    return (tokens * width + last) * itemsize + quantised + logits + min(decode, 1 << 30) + rope + (64 << 20)


def _read_width(head: DecoderDescription) -> int:
    """Elements of a token that a draft head reads of the model's residual stream; 0 for a model."""
    return 0 if head.inputs is None else len(head.inputs.layers) * head.inputs.width


def _attention_width(model: DecoderDescription) -> int:
    """Elements of a token in the buffers of attention."""
    latent, width = model.attention.latent, model.projected_size + model.attended_size
    if latent is None:
        return width
    return width + latent.q_rank + model.heads * (latent.plain + latent.rotated + latent.rank) + model.q_size


def state_bytes(slots: int, max_model_len: int, page_size: int, pages: int) -> int:
    """Upper bound of the scheduler's state in GPU memory."""
    per_sequence = -(-max_model_len // page_size) * 12 + max_model_len * 4 + PER_SLOT_STATE
    return slots * per_sequence + pages * (PER_PAGE_STATE + 4 * page_size) + (1 << 20)


def draft_bytes(config: Config, max_model_len: int) -> int:
    """Upper bound of the memory for the index of drafts, for all request slots."""
    return 8 * config.all_slots * max_model_len if config.scheduler.speculative == NGRAM else 0


def grammar_bytes(config: Config, model: DecoderDescription) -> int:
    """Upper bound of the grammars, including the bytes of all tokens."""
    engine = config.engine
    return engine.grammar_slots * (engine.grammar_kib << 10) + 32 * model.vocab_size if engine.grammar_slots else 0


def plan_memory(
    config: Config,
    model: DecoderDescription,
    itemsize: int,
    page_bytes: int,
    free: int,
    total: int,
    queue_bytes: int = 0,
    ranks: int = 1,
) -> MemoryPlan:
    """The plan for a model, including the flight recorder's copies of the scheduler's state.

    itemsize: bytes of a weight.
    page_bytes: bytes of a page of the KV cache.
    free, total: bytes of the GPU.
    queue_bytes: bytes of queue pairs in the GPU's memory.
    ranks: number of GPUs; `model` is the part on one of them.
    """
    scheduler, slots = config.scheduler, config.all_slots
    length = config.model.max_model_len or model.default_context
    table_width, rings = -(-length // config.cache.page_size), ring_sizes(config, model)
    pages = config.cache.num_pages or min(total // page_bytes, 2 * slots * table_width)
    rows = min(scheduler.max_num_seqs, slots)
    cut_tokens = scheduler.max_num_batched_tokens if scheduler.step_groups > 1 else 0
    kept = model.hidden_size * (2 if model.placement == NormPlacement.PARALLEL else 1)
    head, read = model.draft_head, 0 if model.draft_head is None else _read_width(model.draft_head)
    parts = {
        "weights": weight_bytes(model, itemsize),
        "activations": activation_bytes(model, scheduler.max_num_batched_tokens, rows, length, itemsize),
        "draft head": 0 if head is None else activation_bytes(head, scheduler.max_num_batched_tokens, rows, length, itemsize),
        "scheduler state": (
            state_bytes(slots, length, config.cache.page_size, pages) + grammar_bytes(config, model) + draft_bytes(config, length)
        )
        * (2 if config.engine.record_steps else 1),
        "window rings": ring_bytes(model, rings, cache_itemsize(config, itemsize)) + (4 * slots * table_width if rings else 0),
        "recurrent states": pool_bytes(config, model, itemsize),
        "state snapshots": snapshot_bytes(config, model, itemsize),
        "queue pairs": queue_bytes,
        "suspended step": cut_tokens * ((kept + len(model.layers) * model.layer_inputs + read) * itemsize + 16),
        "sums over GPUs": peer_bytes(model, scheduler.max_num_batched_tokens, rows, ranks, itemsize) if ranks > 1 else 0,
        "graphs and kernels": GRAPHS_AND_MODULES,
    }
    return MemoryPlan(parts, free, total, config.cache.gpu_memory_utilization, slots)


def peer_bytes(model: DecoderDescription, tokens: int, rows: int, ranks: int, itemsize: int) -> int:
    """Memory of a GPU for sums over `ranks` GPUs, and for its part of the logits."""
    return tokens * model.hidden_size * itemsize + 2 * ranks * ONE_SHOT_BYTES + 4 * rows * model.vocab_size + (1 << 20)


def slots_that_fit(plan: MemoryPlan, config: Config, model: DecoderDescription, itemsize: int) -> int:
    """Request slots of a worker if the user set none: recurrent states get at most half of the memory that the other parts leave.

    plan: a memory plan with the default slots. itemsize: bytes of a weight.
    """
    left = plan.cache + plan.parts["recurrent states"]
    return settled_slots(config, model, itemsize, left // 2)


def snapshots_that_fit(plan: MemoryPlan, config: Config, model: DecoderDescription, itemsize: int) -> int:
    """Snapshots of recurrent states: by default in at most an eighth of the memory that the other parts leave.

    plan: a memory plan with the engine's slots. itemsize: bytes of a weight.
    """
    return settled_snapshots(config, model, itemsize, (plan.cache + plan.parts["state snapshots"]) // 8)


# Models that the GPU's kernels support, by their sizes. Other models are refused before their weights are
# read.

INSTEAD = "--device cpu serves this model"


def require_kernels(model: DecoderDescription) -> None:
    """Raise ConfigError for the first layer that no kernel supports, with its name, the size, the limit, and
    an alternative.
    """
    for problem in _problems(model):
        raise ConfigError(f"{model.name} on a GPU: {problem}")


def first_layers(model: DecoderDescription) -> list[int]:
    """The first layer of each kind."""
    return sorted({kind: layer for layer, kind in reversed(list(enumerate(model.layers)))}.values())


def _problems(model: DecoderDescription) -> Iterator[str]:
    if model.draft_head is not None:
        yield from _problems(model.draft_head)
    first = model.prefix_of(0)
    attention = f"{first}{model.tensors.o.rpartition('.')[0]}"
    if model.hidden_size > MAX_HIDDEN:
        yield f"{first}{model.tensors.input_norm}: hidden size {model.hidden_size} is over {MAX_HIDDEN}; {INSTEAD}"
    latent = model.attention.latent
    if latent and (latent.rank > MAX_LATENT or latent.rotated > MAX_ROTATED):
        yield (
            f"{attention}: latent vectors of {latent.rank} elements with {latent.rotated} rotated ones, and the kernels take at "
            f"most {MAX_LATENT} with {MAX_ROTATED}; {INSTEAD}"
        )
    if not latent:
        yield from _head_problems(model)
    heads, key_dim, value_dim = (0, 0, 0) if model.recurrence is None else model.recurrence.matrices
    if heads and padded(key_dim) * padded(value_dim) > MAX_STATE:
        yield (
            f"{first}{model.tensors.recurrent_norm.rpartition('.')[0]}: heads of {key_dim} x {value_dim} numbers, and "
            f"kernels take at most {MAX_STATE} of padded sizes; {INSTEAD}"
        )
    for layer in first_layers(model):
        mlp = model.layers[layer].mlp
        if isinstance(mlp, Experts) and (mlp.number > MAX_EXPERTS or mlp.top_k > MAX_TOP_K):
            router = f"{model.mlp_prefix_of(layer)}{model.tensors.router}"
            yield (
                f"{router}: {mlp.top_k} of {mlp.number} experts, and the kernels take at most {MAX_TOP_K} of {MAX_EXPERTS}; "
                f"{INSTEAD}"
            )
        for part in layer_parts(model, layer):
            if part.quantization is not None and not part.dequantised and part.shape[-1] > MAX_FP8_WIDTH:
                yield _too_wide(part)
            if part.packing is not None and not part.dequantised:
                yield from _unpackable(part, part.packing)


def _unpackable(part: Part, packing: Packing) -> Iterator[str]:
    """Why no kernel takes a matrix of 4-bit weights."""
    name = part.sources[0][0].removesuffix(".weight")
    if packing.group % 32 and not packing.is_float:
        yield f"{name}: a scale for each {packing.group} inputs, and the kernels take multiples of 32; {INSTEAD}"


def _head_problems(model: DecoderDescription) -> Iterator[str]:
    for layer in first_layers(model):
        block = model.layers[layer].attention
        name = f"{model.prefix_of(layer)}{model.tensors.o.rpartition('.')[0]}"
        if not MIN_HEAD_DIM <= block.head_dim <= MAX_HEAD_DIM:
            limits = f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            yield f"{name}: head size {block.head_dim}, and the kernels take sizes {limits}; {INSTEAD}"
        if block.heads % block.kv_heads or block.heads // block.kv_heads > MAX_GROUP:
            yield (
                f"{name}: {block.heads} query heads over {block.kv_heads} key and value heads, and the kernels take 1 to "
                f"{MAX_GROUP} for each; {INSTEAD}"
            )


def padded(size: int) -> int:
    """The power of two that a kernel computes instead of a size."""
    return 1 << (size - 1).bit_length()


def _too_wide(part: Part) -> str:
    name, width = part.sources[0][0].removesuffix(".weight"), part.shape[-1]
    instead = "" if part.quantization is None or part.quantization.stored else "serve it without --quantization fp8, or "
    return f"{name}: {width} inputs as FP8, and the kernels quantise at most {MAX_FP8_WIDTH}; {instead}{INSTEAD}"
