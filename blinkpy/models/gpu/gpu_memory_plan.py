"""The memory that an engine needs on a GPU, by part, computed before anything is loaded."""

from dataclasses import dataclass

from blinkpy.config import Config, ConfigError
from blinkpy.models.cache_scales import cache_itemsize
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import ring_bytes, ring_sizes
from blinkpy.models.weights.weight_parts import weight_bytes

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
        """The needed bytes by part, without the KV cache."""
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
        )


def gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"


def activation_bytes(model: DecoderDescription, tokens: int, rows: int, max_model_len: int, itemsize: int) -> int:
    """Upper bound of the decoder's buffers and workspaces for the largest step."""
    expert_width = model.experts.top_k * (3 * model.experts.size + model.hidden_size)
    width = 3 * model.hidden_size + 2 * model.q_size + 2 * model.kv_size + 3 * model.mlp_size + expert_width
    quantised = 0 if model.quantization is None else tokens * (width + width // 32)  # inputs as FP8, with their scales
    last = 2 * rows * model.hidden_size  # of each row: residual stream and its norm
    logits = 3 * rows * model.vocab_size * 4  # and the sampler's copies
    decode = rows * model.heads * DECODE_SPLITS * (model.head_dim + 2) * 4
    rope = 8 * max_model_len * sum(rope.rotary_dim // 2 for rope in model.ropes)
    return (tokens * width + last) * itemsize + quantised + logits + min(decode, 1 << 30) + rope + (64 << 20)


def state_bytes(slots: int, max_model_len: int, page_size: int, pages: int) -> int:
    """Upper bound of the scheduler's state in GPU memory."""
    per_sequence = -(-max_model_len // page_size) * 12 + max_model_len * 4 + PER_SLOT_STATE
    return slots * per_sequence + pages * (PER_PAGE_STATE + 4 * page_size) + (1 << 20)


def grammar_bytes(config: Config, model: DecoderDescription) -> int:
    """Upper bound of the grammars, including the bytes of all tokens."""
    engine = config.engine
    return engine.grammar_slots * (engine.grammar_kib << 10) + 32 * model.vocab_size if engine.grammar_slots else 0


def plan_memory(
    config: Config, model: DecoderDescription, itemsize: int, page_bytes: int, free: int, total: int, queue_bytes: int = 0
) -> MemoryPlan:
    """The plan for a model, including the flight recorder's copies of the scheduler's state.

    itemsize: bytes of a weight.
    page_bytes: of a page of the KV cache.
    free, total: bytes of the GPU.
    queue_bytes: of queue pairs in the GPU's memory.
    """
    scheduler, slots = config.scheduler, config.frontend.workers * config.queue.slots
    length = config.model.max_model_len or model.default_context
    table_width, rings = -(-length // config.cache.page_size), ring_sizes(config, model)
    pages = config.cache.num_pages or min(total // page_bytes, 2 * slots * table_width)
    rows = min(scheduler.max_num_seqs, slots)
    cut_tokens = scheduler.max_num_batched_tokens if scheduler.step_groups > 1 else 0
    parts = {
        "weights": weight_bytes(model, itemsize),
        "activations": activation_bytes(model, scheduler.max_num_batched_tokens, rows, length, itemsize),
        "scheduler state": (state_bytes(slots, length, config.cache.page_size, pages) + grammar_bytes(config, model))
        * (2 if config.engine.record_steps else 1),
        "window rings": ring_bytes(model, rings, cache_itemsize(config, itemsize)) + (4 * slots * table_width if rings else 0),
        "queue pairs": queue_bytes,
        "suspended step": cut_tokens * (model.hidden_size * itemsize + 16),
        "graphs and kernels": GRAPHS_AND_MODULES,
    }
    return MemoryPlan(parts, free, total, config.cache.gpu_memory_utilization)
